//! Tests of users and their rights at a Redis server: wrong passwords and missing rights. No
//! message may show a password.

use std::future::ready;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::{self, Answer, Backend, Capability, Connection, EventSink};
use lockcore::{Error, ErrorKind, Locks, LostReason};
use tests::eventually::eventually;
use tests::redis_server::RedisServer;
use tests::stalls::awake_since;
use tests::stores::redis::{USER, documented, grant};
use tests::watch::SECRET;

use crate::store::{Kind, SOON, Store, begin, give_back, kind, shows_no_password, tickets};
use crate::traces::{self, WRONG};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_user_with_the_documented_rights_can_do_everything_and_nothing_else
        without_any_one_of_the_documented_rights_the_client_says_which_is_missing
        a_right_that_is_taken_away_is_reported_and_noticed_when_it_is_back
        a_command_that_is_denied_in_mid_life_is_named_and_costs_no_lease
        a_revocation_without_the_right_names_it_and_changes_nothing
        a_wrong_password_is_a_mistake_and_does_not_show
        a_wrong_password_is_offered_once_for_each_caller
        a_password_changed_under_a_holder_is_not_offered_for_ever
        a_mistake_that_was_mended_is_noticed_by_the_next_caller
        nothing_that_can_be_printed_shows_the_password
    ]
}

pub(crate) fn command(server: &RedisServer, words: &[String]) {
    server.command::<()>(&words.iter().map(String::as_str).collect::<Vec<_>>());
}

/// A client in the default namespace, which the guide's rights are for.
fn client(url: String) -> Locks {
    Locks::builder().url(url).op_timeout(SOON).build().unwrap()
}

/// How often clients have sent HELLO. A client sends it once with its password. If the password is
/// right, it sends HELLO once more, without the password, to learn which server this is.
fn offers(server: &RedisServer) -> u64 {
    *server.command_stats().get("hello").unwrap_or(&0)
}

async fn a_user_with_the_documented_rights_can_do_everything_and_nothing_else(_: Store) {
    let server = RedisServer::start();
    grant(&server, "lock", SECRET);
    let url = server.url_with_user(USER, SECRET);
    let locks = client(url.clone());
    locks.ready(SOON).await.unwrap();

    let guard = locks
        .mutex("a")
        .ttl(Duration::from_secs(6))
        .acquire()
        .await
        .unwrap();
    let waiter = begin(client(url.clone()).mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    guard
        .ensure(Duration::from_millis(5_936))
        .await
        .unwrap_err(); // a renewal is sent, and gives less time
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
    let dropped = locks.mutex("a").acquire().await.unwrap();
    drop(dropped);
    tickets(&locks, "a", 0).await;
    // `ready` skips information that the user may not read.
    server.command::<()>(&["ACL", "SETUSER", USER, "-info"]);
    locks.ready(SOON).await.unwrap();
    let denied: Result<String, _> = redis::cmd("GET")
        .arg("other")
        .query(&mut redis::Client::open(url).unwrap().get_connection().unwrap());
    assert_eq!(denied.unwrap_err().code(), Some("NOPERM"));
}

async fn without_any_one_of_the_documented_rights_the_client_says_which_is_missing(_: Store) {
    let server = RedisServer::start();
    let documented = documented("lock", SECRET);
    let more = [
        (["resetkeys", "~other:1:*"], "key"),
        (["resetchannels", "&other:*"], "channel"),
    ];
    let client = |user: &str| client(server.url_with_user(user, SECRET) + "/1");
    each_missing_right_is_named(&server, &documented, &more, client).await;
}

/// For each documented right, makes a user without this right. For each entry of `more`, makes a
/// user with these changes. The error of each user must name the missing right, and nothing may be
/// written.
pub(crate) async fn each_missing_right_is_named(
    server: &RedisServer,
    documented: &[String],
    more: &[([&str; 2], &str)],
    client: impl Fn(&str) -> Locks,
) {
    let commands = documented.iter().filter_map(|word| word.strip_prefix('+'));
    let mut without: Vec<_> = commands
        .filter(|command| *command != "info") // only `ready` needs it, and works without it
        // A client works without this right: it uses the command only to end messages that nobody
        // waits for.
        .filter(|command| *command != "unsubscribe")
        .map(|command| (vec![format!("-{command}")], command))
        .collect();
    assert!(without.len() > 15, "the page names {without:?} only");
    let more = more.iter();
    without.extend(more.map(|(change, named)| (change.map(str::to_owned).into(), *named)));
    for (number, (change, named)) in without.into_iter().enumerate() {
        let user = format!("user{number}");
        let mut words = documented.to_owned();
        words[2].clone_from(&user);
        words.extend(change.iter().cloned());
        command(server, &words);

        let error = client(&user).mutex("a").acquire().await.expect_err(named);

        let text = format!("{error} {error:?}");
        assert_eq!(
            error.kind(),
            ErrorKind::Config,
            "without {change:?}: {text}"
        );
        assert!(
            text.contains("Minimum rights"),
            "without {change:?}: {text}"
        );
        assert!(text.contains(named), "without {change:?}: {text}");
        shows_no_password(&error);
        assert_eq!(server.keys("*"), Vec::<String>::new(), "without {change:?}");
    }
}

async fn a_right_that_is_taken_away_is_reported_and_noticed_when_it_is_back(_: Store) {
    let server = RedisServer::start();
    grant(&server, "lock", SECRET);
    let locks = client(server.url_with_user(USER, SECRET));
    give_back(locks.mutex("a").acquire().await.unwrap()).await;

    server.command::<()>(&["ACL", "SETUSER", USER, "-evalsha"]);
    let error = locks.mutex("a").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("Minimum rights"), "{error}");

    server.command::<()>(&["ACL", "SETUSER", USER, "+evalsha"]);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}

/// The server denies a command while a script is running. Earlier commands of the script have been
/// carried out by then.
async fn a_command_that_is_denied_in_mid_life_is_named_and_costs_no_lease(_: Store) {
    let server = RedisServer::start();
    grant(&server, "lock", SECRET);
    let locks = client(server.url_with_user(USER, SECRET));
    let change = |right: &str| server.command::<()>(&["ACL", "SETUSER", USER, right]);
    let is_named = |error: Error, kind: ErrorKind, command: &str| {
        assert_eq!(error.kind(), kind, "{error}");
        let text = error.to_string();
        assert!(
            text.contains(&format!("may not run {command} any more")),
            "{text}"
        );
        assert!(text.contains("Minimum rights"), "{text}");
    };
    // The lease is much longer than the steps up to its next renewal, even on a busy machine.
    let lock = locks.mutex("held").ttl(Duration::from_secs(9));
    let holds = lock.acquire().await.unwrap();
    let renewed = async || {
        // A rise of the remaining time shows a renewal.
        let mut last = holds.remaining();
        eventually("renewed", SOON, || {
            let now = holds.remaining();
            ready(now > std::mem::replace(&mut last, now))
        })
        .await;
    };
    renewed().await; // by the keeper, so it is connected now

    change("-set");
    is_named(
        locks.mutex("a").acquire().await.unwrap_err(),
        ErrorKind::Config,
        "set",
    );
    assert_eq!(server.keys("*{a}*"), Vec::<String>::new());
    let more = holds.remaining() + Duration::from_millis(1);
    is_named(
        holds.ensure(more).await.unwrap_err(),
        ErrorKind::Config,
        "set",
    );
    server.command::<()>(&["ACL", "LOG", "RESET"]);
    eventually("the keeper's renewal is denied", SOON, async || {
        !server
            .command::<Vec<redis::Value>>(&["ACL", "LOG"])
            .is_empty()
    })
    .await;
    change("+set");
    renewed().await;

    // The release: first none of its commands is allowed, and after that only half of them.
    change("-set");
    is_named(holds.release().await.unwrap_err(), ErrorKind::Config, "set");
    change("+set");
    tickets(&locks, "held", 0).await;
    let holds = lock.acquire().await.unwrap();
    let waits = begin(
        client(server.url_with_user(USER, SECRET))
            .mutex("held")
            .wait(SOON),
    );
    tickets(&locks, "held", 2).await;
    change("-publish");
    is_named(
        holds.release().await.unwrap_err(),
        ErrorKind::Config,
        "publish",
    );
    change("+publish");
    give_back(waits.await.unwrap().unwrap()).await;
}

async fn a_revocation_without_the_right_names_it_and_changes_nothing(_: Store) {
    let server = RedisServer::start();
    grant(&server, "lock", SECRET);
    let operator = client(server.url_with_user(USER, SECRET));
    let change = |right: &str| server.command::<()>(&["ACL", "SETUSER", USER, right]);
    let mut another = documented("lock", SECRET);
    another[2] = "holder".to_owned();
    command(&server, &another);
    let holder = client(server.url_with_user("holder", SECRET));
    let guard = holder.mutex("a").acquire().await.unwrap();
    let ticket = guard.grant_id().ticket();
    assert_eq!(operator.inspect("a").await.unwrap().len(), 1);

    for right in ["evalsha", "hdel"] {
        change(&format!("-{right}"));
        let error = operator.revoke("a", ticket, SOON, "x").await.unwrap_err();
        change(&format!("+{right}"));
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        let text = error.to_string();
        assert!(
            text.contains(right) && text.contains("Minimum rights"),
            "{text}"
        );
        assert_eq!(operator.inspect("a").await.unwrap()[0].asked_back, None);
        assert!(guard.is_valid());
    }

    let ended = operator.revoke("a", ticket, Duration::from_millis(100), "x");
    assert_eq!(ended.await.unwrap(), lockcore::Release::Released);
    assert_eq!(guard.lost().await, LostReason::Revoked);
}

/// The server answers NOAUTH or WRONGPASS.
async fn a_wrong_password_is_a_mistake_and_does_not_show(_: Store) {
    let server = RedisServer::with(&["--requirepass", SECRET]);
    let traced = traces::seen();
    for (url, hint) in [
        (server.url(), "asks for a password"),
        (
            server.url_with_user("default", WRONG),
            "check user and password",
        ),
        (
            server.url_with_user("nobody", WRONG),
            "check user and password",
        ),
        (
            server.url_with_user("nobody", SECRET),
            "check user and password",
        ),
    ] {
        let locks = client(url);
        let started = Instant::now();
        let error = locks.mutex("a").acquire().await.unwrap_err();

        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains(hint), "{error}");
        let awake = awake_since(started);
        assert!(awake < SOON / 2, "a mistake was tried again: {awake:?}");
        shows_no_password(&(&error, error.to_string()));
        assert_eq!(kind(locks.ready(SOON).await), ErrorKind::Config);
    }
    // If no traces were searched, the search of the whole run for secrets would always find
    // nothing.
    assert!(traces::seen() > traced, "no traces were searched");
}

async fn a_wrong_password_is_offered_once_for_each_caller(_: Store) {
    let server = RedisServer::with(&["--requirepass", SECRET]);
    let locks = client(server.url_with_user("default", WRONG));

    for asked in 1..=6 {
        assert_eq!(kind(locks.mutex("a").acquire().await), ErrorKind::Config);
        assert_eq!(offers(&server), asked);
    }

    // This lease is much longer than the longest pause between two tries. Meanwhile another client
    // acquires a lock and loses it.
    let other = client(server.url_with_user("default", SECRET));
    let offered = offers(&server);
    let lock = other.mutex("b").ttl(Duration::from_secs(4)).renew(false);
    let guard = lock.acquire().await.unwrap();
    assert_eq!(guard.lost().await, LostReason::Expired);
    assert_eq!(
        offers(&server),
        offered + 4,
        "those of the other client's two connections, and no more"
    );
}

/// The keeper connects while it has something to renew or to release. After that it does not offer
/// the password again.
async fn a_password_changed_under_a_holder_is_not_offered_for_ever(_: Store) {
    let server = RedisServer::start();
    grant(&server, "lock", WRONG);
    // The default operation timeout is short enough for the shutdown below.
    let locks = Locks::connect(&server.url_with_user(USER, WRONG)).unwrap();
    let ttl = Duration::from_secs(1);
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    let before = offers(&server);

    server.command::<()>(&["ACL", "SETUSER", USER, "resetpass", &format!(">{SECRET}")]);
    server.command::<()>(&["CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES"]);
    server.command::<()>(&["CLIENT", "KILL", "TYPE", "PUBSUB"]);
    assert_eq!(guard.lost().await, LostReason::Expired);
    drop(guard);
    let while_held = offers(&server) - before;
    assert!(
        (1..=30).contains(&while_held),
        "{while_held} times in one lease"
    );

    // The keeper gives up a release one operation timeout after the ticket has expired.
    locks.shutdown(4 * ttl).await.unwrap();
    let given_up = offers(&server);
    assert!(given_up - before <= 60, "{} times", given_up - before);
    let mine = client(server.url_with_user(USER, SECRET));
    let guard = mine
        .mutex("b")
        .ttl(3 * ttl)
        .renew(false)
        .acquire()
        .await
        .unwrap();
    assert_eq!(guard.lost().await, LostReason::Expired);
    assert_eq!(offers(&server), given_up + 4, "offered with nothing to do");
}

async fn a_mistake_that_was_mended_is_noticed_by_the_next_caller(_: Store) {
    let server = RedisServer::with(&["--requirepass", SECRET]);
    let locks = client(server.url_with_user(USER, SECRET));
    for _ in 0..5 {
        assert_eq!(kind(locks.mutex("a").acquire().await), ErrorKind::Config);
        grant(&server, "lock", SECRET);
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
        server.command::<()>(&["ACL", "DELUSER", USER]);
        // When the user is deleted, the server closes its connections.
        eventually("noticed", SOON, async || {
            locks.mutex("a").try_acquire().await.is_err()
        })
        .await;
    }
}

/// A store that records the debug output of its connections.
#[derive(Debug)]
struct Seen {
    store: Arc<dyn Backend>,
    connections: Arc<Mutex<Vec<String>>>,
}

impl Backend for Seen {
    fn capability(&self) -> Capability {
        self.store.capability()
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let connections = Arc::clone(&self.connections);
        connections.lock().unwrap().push(format!("{events:?}"));
        let opening = self.store.connect(events);
        Box::pin(async move {
            let connection = opening.await?;
            connections
                .lock()
                .unwrap()
                .push(format!("{connection:?} {connection:#?}"));
            Ok(connection)
        })
    }
}

async fn nothing_that_can_be_printed_shows_the_password(_: Store) {
    let server = RedisServer::start();
    grant(&server, "lock", SECRET);
    let url = server.url_with_user(USER, SECRET);
    let builder = Locks::builder().url(&url);
    shows_no_password(&builder);
    let locks = builder.build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    shows_no_password(&(
        &locks,
        locks.mutex("a"),
        locks.rwlock("a"),
        locks.semaphore("b", 2),
    ));
    shows_no_password(&(&guard, &*guard, guard.grant_id()));
    shows_no_password(&locks.inspect("a").await);
    let errors: Vec<Error> = vec![
        locks.mutex("a").try_acquire().await.unwrap_err(),
        locks
            .mutex("a")
            .wait(Duration::from_millis(20))
            .acquire()
            .await
            .unwrap_err(),
        locks
            .semaphore("a", 2)
            .permits(1)
            .acquire()
            .await
            .unwrap_err(),
        locks.mutex("").acquire().await.unwrap_err(),
        Locks::builder()
            .url(&url)
            .namespace("not-his")
            .build()
            .unwrap()
            .mutex("a")
            .acquire()
            .await
            .unwrap_err(),
        Locks::connect(&format!("{url}/zero")).unwrap_err(),
        Locks::connect(&url.replace("redis://", "rodis://")).unwrap_err(),
        Locks::connect(&url.replace("redis://", "")).unwrap_err(),
        Locks::connect(&url.replace("127.0.0.1:", "127.0.0.1:x")).unwrap_err(),
        Locks::builder()
            .url(&url)
            .ca_file("ca.pem")
            .build()
            .unwrap_err(),
    ];
    for error in &errors {
        shows_no_password(&(error, error.to_string()));
    }
    drop(guard);

    let store = backend::open(&url).unwrap();
    shows_no_password(&store);
    let connections = Arc::default();
    let seen = Seen {
        store,
        connections: Arc::clone(&connections),
    };
    let locks = Locks::with_backend(Arc::new(seen)).unwrap();
    locks.ready(SOON).await.unwrap();
    let connections = connections.lock().unwrap();
    assert_eq!(connections.len(), 4, "{connections:?}");
    shows_no_password(&*connections);
}
