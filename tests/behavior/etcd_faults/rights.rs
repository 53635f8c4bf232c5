//! Tests of users, passwords and rights.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::etcd_server::EtcdServer;
use tests::watch::SECRET;

use crate::faults::{is_renewed, patient, works_again};
use crate::store::{DEFAULT, Kind, SOON, Store, begin, give_back, kind, soon, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_user_with_the_rights_of_the_guide_needs_no_others
        a_login_that_the_server_has_forgotten_is_made_again
        a_login_that_ends_while_a_lock_is_held_is_made_again
    ]
}

const USER: &str = "locks";

/// A server with a user who has the rights of the guide.
fn server() -> EtcdServer {
    let mut server = EtcdServer::start();
    server.let_in(USER, "test:1:");
    server
}

async fn a_user_with_the_rights_of_the_guide_needs_no_others(_: Store) {
    let server = server();
    let url = server.url_with_user(USER, SECRET);
    let [holder, waiter] = [(); 2].map(|()| patient(&url).build().unwrap());
    holder.ready(SOON).await.unwrap();
    let guard = holder.mutex("a").acquire().await.unwrap();
    let waits = begin(waiter.mutex("a").wait(SOON));
    tickets(&holder, "a", 2).await;
    give_back(guard).await;
    let next = soon(waits).await.unwrap().unwrap();
    give_back(next).await;
    assert_eq!(holder.counter("c").add(1).await.unwrap().count, 1);

    let elsewhere = patient(&url).namespace("other").build().unwrap();
    let outcome = elsewhere.mutex("a").acquire().await;
    assert_eq!(kind(outcome), ErrorKind::Config);
    let stranger = patient(server.url_with_user(USER, "wrong"))
        .build()
        .unwrap();
    assert_eq!(kind(stranger.mutex("a").acquire().await), ErrorKind::Config);
    let nobody = patient(server.url()).build().unwrap();
    assert_eq!(kind(nobody.mutex("a").acquire().await), ErrorKind::Config);
}

/// A server forgets the tokens of all logins when it ends, and when nobody needs them any more.
async fn a_login_that_the_server_has_forgotten_is_made_again(_: Store) {
    let ttl = Duration::from_secs(24);
    let server = server();
    let locks = patient(server.url_with_user(USER, SECRET)).build().unwrap();
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();

    server.ctl(&["auth", "disable"]);
    server.ctl(&["auth", "enable"]);
    is_renewed(&guard, ttl).await;
    server.restart();

    is_renewed(&guard, ttl).await;
    assert!(guard.is_valid());
    works_again(&locks, "b", SOON).await;
    give_back(guard).await;
}

/// The server forgets a login that nobody has used for a second or two. The client uses its own every
/// three seconds.
async fn a_login_that_ends_while_a_lock_is_held_is_made_again(_: Store) {
    let ttl = Duration::from_secs(18);
    let mut server = EtcdServer::with(&["--auth-token-ttl=1"]);
    server.let_in(USER, "test:1:");
    let url = server.url_with_user(USER, SECRET);
    let [holder, waiter] = [(); 2].map(|()| patient(&url).ttl(ttl).build().unwrap());
    let guard = holder.mutex("a").acquire().await.unwrap();
    let waits = begin(waiter.mutex("a").wait(3 * SOON));
    tickets(&holder, "a", 2).await;

    for _ in 0..2 {
        is_renewed(&guard, ttl).await;
    }

    assert!(guard.is_valid() && !waits.is_finished());
    give_back(guard).await;
    give_back(soon(waits).await.unwrap().unwrap()).await;

    // The stream of the watches still has the login that has ended. The server refuses new ones on it.
    let (counter, theirs) = (holder.counter("c"), waiter.counter("c"));
    let mut changes = theirs.changes();
    assert_eq!(soon(changes.next()).await.unwrap().count, 0);
    for count in 1..=2 {
        let change = tokio::spawn(async move {
            let next = changes.next().await.unwrap();
            (changes, next.count)
        });
        counter.add(1).await.unwrap();
        let seen;
        (changes, seen) = tokio::time::timeout(2 * SOON, change)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(seen, count);
    }
}
