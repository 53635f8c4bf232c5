//! Tests of names that one client uses alone: the parent node is created and deleted with the
//! ticket.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Locks};
use tests::eventually::eventually;
use tests::zookeeper_server::ZooKeeperServer;

use zookeeper_client::{Acl, AuthId, Permission};

use super::{client, counted, nothing_left, operator};
use crate::store::{Kind, LEASE, SOON, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        an_uncontended_pair_costs_two_requests_and_leaves_nothing
        a_name_that_was_contended_costs_three_requests_and_no_failed_ones
        a_parent_that_another_client_has_made_is_no_proof_of_being_first
        a_client_that_waited_in_vain_follows_no_longer_than_the_parent_lives
        a_line_that_may_not_be_read_keeps_no_ticket
    ]
}

async fn pair(locks: &Locks, name: &str) {
    give_back(locks.mutex(name).acquire().await.unwrap()).await;
}

/// The cost is the same for a name that was used before and for a new name.
async fn an_uncontended_pair_costs_two_requests_and_leaves_nothing(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = counted(&server);
    pair(&locks, "used").await;
    for used in [true, false] {
        let before = server.packets();
        for number in 0..50 {
            let name = if used {
                "used"
            } else {
                &format!("new{number}")
            };
            pair(&locks, name).await;
        }
        let spent = server.packets().since(before);
        println!("50 pairs, used before: {used}: {spent:?}");
        assert_eq!((spent.received, spent.sent), (100, 100));
    }
    let operator = operator(&server).await;
    let names = operator.list_children("/test:1").await.unwrap();
    assert!(names.is_empty(), "{names:?}");
}

/// If a client has seen tickets of other clients in a line, it uses the requests for contended
/// names there, as long as the parent node exists.
async fn a_name_that_was_contended_costs_three_requests_and_no_failed_ones(_: Store) {
    let server = ZooKeeperServer::start();
    let (locks, other) = (counted(&server), client(&server));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(other.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
    drop(other);
    eventually("the other is gone", SOON, async || server.sessions() == 1).await;

    let before = server.packets();
    for _ in 0..50 {
        pair(&locks, "a").await;
    }

    let spent = server.packets().since(before);
    assert_eq!((spent.received, spent.sent), (150, 150));
}

async fn a_parent_that_another_client_has_made_is_no_proof_of_being_first(_: Store) {
    let server = ZooKeeperServer::start();
    let (one, other) = (client(&server), client(&server));
    for _ in 0..3 {
        pair(&one, "a").await;
        let guard = other.mutex("a").acquire().await.unwrap();

        let tried = one.mutex("a").try_acquire().await;

        assert_eq!(kind(tried), ErrorKind::Busy);
        give_back(guard).await;
    }
}

/// After its last waiter has gone, a client watches a line for five seconds more. But it stops as
/// soon as the parent node of the line is deleted. Otherwise each pair of acquire and release of
/// the other client would cost it two lists and four events, because each pair creates and deletes
/// the parent.
async fn a_client_that_waited_in_vain_follows_no_longer_than_the_parent_lives(_: Store) {
    let server = ZooKeeperServer::start();
    let (locks, other) = (client(&server), client(&server));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waits = begin(other.mutex("a").wait(LEASE));
    tickets(&locks, "a", 2).await;
    eventually("it is watched", SOON, async || server.watches() > 0).await;
    waits.abort();
    tickets(&locks, "a", 1).await;
    assert!(server.watches() > 0);

    give_back(guard).await;

    eventually("it is not followed", Duration::from_secs(3), async || {
        server.watches() == 0
    })
    .await;
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(other.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
}

/// The client creates its ticket before it reads the line. So it must delete the ticket when the
/// read is refused.
async fn a_line_that_may_not_be_read_keeps_no_ticket(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = client(&server);
    let operator = operator(&server).await;
    let guard = locks.mutex("a").acquire().await.unwrap();
    let rights = Permission::CREATE | Permission::DELETE | Permission::ADMIN;
    let rights = [Acl::new(rights, AuthId::anyone())];
    operator
        .set_acl("/test:1/{a}", &rights, None)
        .await
        .unwrap();

    let other = client(&server);
    let refused = other.mutex("a").acquire().await;

    assert_eq!(kind(refused), ErrorKind::Config);
    give_back(guard).await;
    nothing_left(&server).await;
}
