//! Tests of the log lines for an operator: which lines the client logs, at which level, and how
//! often. `guide/logs.md` describes them.

use std::collections::HashMap;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{Error, ErrorKind, Locks, Release, Wait, distributed_lock, with_default};
use tests::eventually::eventually;
use tests::redis_server::RedisServer;
use tests::stores::Answers;
use tests::stores::redis::{USER, grant};
use tests::watch::SECRET;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::with_default as with_subscriber;
use tracing::{Event, Level, Metadata, Subscriber};

use crate::store::{DEFAULT, Kind, LEASE, SOON, Store, give_back, kind, soon, tickets};
use crate::traces::{self, LOGGED, Line};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_client_tells_of_its_start_and_of_its_end_once
        a_release_tells_for_how_long_the_lock_was_held
        a_lock_that_is_not_taken_is_logged_by_guard_and_function_alike
        a_subscriber_that_panics_keeps_no_lock_back
    ]
}

pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_lock_that_was_deleted_under_its_holder_is_a_warning_at_its_release
        a_deleted_lock_is_a_warning_though_a_renewal_misses_it_after_its_use
        a_lease_that_runs_out_after_its_release_is_no_warning
        a_url_that_was_not_opened_is_not_repeated
        a_forced_release_is_logged_only_if_it_has_ended_a_grant
    ]
}

pub(crate) fn facts_of_redis(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        an_outage_is_one_warning_and_its_end_another
        a_mistake_behind_an_outage_is_logged_as_well
        renewals_that_are_refused_are_one_warning_and_their_end_another
    ]
}

/// A name that only the log lines of this fact contain.
fn marked(store: &Store, what: &str) -> String {
    format!("{LOGGED}{}:{what}", store.namespace)
}

fn at(level: Level, part: &str) -> Vec<String> {
    let lines = traces::lines(part).into_iter();
    let lines = lines.filter(|line| line.level == level);
    lines.map(|line: Line| line.text).collect()
}

async fn one(level: Level, part: &str, message: &str) -> String {
    let told = || {
        let mut told = at(level, part);
        told.retain(|text| text.contains(message));
        told
    };
    eventually(message, SOON, async || !told().is_empty()).await;
    let told = told();
    assert_eq!(told.len(), 1, "{told:?}");
    told[0].clone()
}

/// Shuts a client down. When this returns, its keeper has logged everything.
async fn said(locks: Locks) {
    let dropped = tokio::task::spawn_blocking(move || drop(locks));
    dropped.await.unwrap();
}

async fn a_client_tells_of_its_start_and_of_its_end_once(store: Store) {
    for shut_down in [true, false] {
        let owner = marked(&store, if shut_down { "shut" } else { "drop" });
        let builder = Locks::builder().op_timeout(Duration::from_secs(9));
        let locks = store.client_with(builder.owner(&owner));
        let started = at(Level::INFO, &owner);
        assert_eq!(started.len(), 1, "{started:?}");
        let expected = [
            "lock client started".to_owned(),
            format!("namespace=\"{}\"", store.namespace),
            format!("/{}/", std::process::id()),
            "ttl=10s".to_owned(),
            "wait=\"15s\"".to_owned(),
            "through_outages=false".to_owned(),
            "fair=\"50ms\"".to_owned(),
        ];
        for part in expected {
            assert!(started[0].contains(&part), "no {part} in {started:?}");
        }
        if let Answers::AServer = store.timings().answers {
            let url = store.url();
            let (scheme, _) = url.split_once(':').unwrap();
            let shown = format!("store=\"{scheme}://127.0.0.1:");
            assert!(started[0].contains(&shown), "no {shown} in {started:?}");
        }
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
        if shut_down {
            locks.shutdown(SOON).await.unwrap();
            locks.clone().shutdown(SOON).await.unwrap();
        }
        said(locks).await;

        let told = at(Level::INFO, &owner);
        assert!(
            told.len() == 2 && told[1].contains("lock client ended"),
            "{told:?}"
        );
        assert_eq!(at(Level::WARN, &owner), Vec::<String>::new());
    }
}

async fn a_forced_release_is_logged_only_if_it_has_ended_a_grant(store: Store) {
    let (kit, name) = (Kit::new(), marked(&store, "forced"));
    let (locks, operator) = (kit.client().unwrap(), kit.client().unwrap());
    let guard = locks.mutex(&name).acquire().await.unwrap();
    let ticket = guard.grant_id().ticket();
    let mut forced = kit.hold_next(Verb::Release);
    let ends = tokio::spawn({
        let (operator, name) = (operator.clone(), name.clone());
        async move { operator.force_release(name, ticket).await }
    });
    soon(forced.arrived()).await;
    give_back(guard).await;
    forced.let_go();
    let ended = soon(ends).await.unwrap().unwrap();
    assert_eq!(ended, Release::AlreadyLost);
    let took = "took a lock away";
    assert!(
        !at(Level::INFO, &name)
            .iter()
            .any(|text| text.contains(took))
    );

    let guard = locks.mutex(&name).acquire().await.unwrap();
    let ticket = guard.grant_id().ticket();
    let ended = operator.force_release(name.as_str(), ticket).await;
    assert_eq!(ended.unwrap(), Release::Released);
    one(Level::INFO, &name, took).await;
}

async fn a_release_tells_for_how_long_the_lock_was_held(store: Store) {
    let locks = store.client();
    let names = ["waited", "dropped", "run", "shared"].map(|what| marked(&store, what));
    let [waited, dropped, run, shared] = &names;
    let released = Release::Released;

    let guard = locks.mutex(waited).acquire().await.unwrap();
    let at_least = Duration::from_millis(30);
    tokio::time::sleep(at_least).await;
    assert_eq!(guard.release().await.unwrap(), released);
    drop(locks.mutex(dropped).acquire().await.unwrap());
    let ran: Result<(), Error> = locks.mutex(run).run(async |_| Ok(())).await;
    ran.unwrap();
    let one_after_the_other = locks.rwlock(shared);
    let first = one_after_the_other.read().acquire().await.unwrap();
    let second = one_after_the_other.read().acquire().await.unwrap();
    assert_eq!(first.release().await.unwrap(), released);
    drop(second);

    let mut told = Vec::new();
    for name in [waited, dropped, run] {
        told.push(one(Level::DEBUG, name, "lock released").await);
    }
    let both = at(Level::DEBUG, shared);
    told.extend(
        both.into_iter()
            .filter(|text| text.contains("lock released")),
    );
    assert_eq!(told.len(), 5, "{told:?}");
    for text in &told {
        assert!(text.contains("held_for="), "{text}");
    }
    let held_for = told[0].split("held_for=").nth(1).unwrap();
    let held_for = held_for.split(' ').next().unwrap().replace('µ', "u");
    // `Duration` prints a time of this length in milliseconds or in seconds.
    let in_seconds = held_for
        .strip_suffix("ms")
        .map(|ms| ms.parse::<f64>().unwrap() / 1000.0);
    let in_seconds = in_seconds.unwrap_or_else(|| held_for.trim_end_matches('s').parse().unwrap());
    assert!(in_seconds >= at_least.as_secs_f64(), "{held_for}");
}

#[distributed_lock(key = name.to_owned(), wait = Duration::from_secs(3))]
async fn annotated(name: &str) -> Result<(), Error> {
    Ok(())
}

async fn a_lock_that_is_not_taken_is_logged_by_guard_and_function_alike(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let name = marked(&store, "taken");
    let held = other.mutex(&name).acquire().await.unwrap();
    let lock = locks.mutex(&name).wait(Duration::from_secs(3));
    locks.ready(SOON).await.unwrap();

    let errors = [
        lock.acquire().await.map(drop).unwrap_err(),
        with_default(locks.clone(), annotated(&name))
            .await
            .unwrap_err(),
        lock.try_acquire().await.map(drop).unwrap_err(),
    ];

    give_back(held).await;
    let mut told = at(Level::DEBUG, &name);
    told.retain(|text| text.contains("lock not taken"));
    assert_eq!(told.len(), errors.len(), "{told:?}");
    for (text, error) in told.iter().zip(&errors) {
        assert!(text.contains(&error.to_string()), "{text}: {error}");
    }
    assert_eq!(errors[1].kind(), ErrorKind::Timeout);
}

async fn a_lock_that_was_deleted_under_its_holder_is_a_warning_at_its_release(store: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    let name = |what: &str| marked(&store, what);
    let ended: [(&str, bool); 2] = [("released", true), ("dropped", false)];
    for (what, waits) in ended {
        // First a ticket that other tasks of the process may share, and then one that they may not
        // share.
        for (own, lock) in [
            (false, locks.mutex(name(what))),
            (true, locks.mutex(name(what)).max_hold(SOON)),
        ] {
            let before = at(Level::WARN, &name(what)).len();
            let guard = lock.acquire().await.unwrap();
            kit.lose_data();
            match waits {
                true => assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost),
                false => drop(guard),
            }
            eventually("told", SOON, async || {
                at(Level::WARN, &name(what)).len() > before
            })
            .await;
            let told = at(Level::WARN, &name(what)).split_off(before);
            assert!(told.len() == 1, "{own}: {told:?}");
            assert!(
                told[0].contains("lock lost") && told[0].contains("Taken"),
                "{told:?}"
            );
        }
    }
}

/// While the keeper's renewal is in flight, the store loses the lock, and the use of the lock ends.
async fn a_deleted_lock_is_a_warning_though_a_renewal_misses_it_after_its_use(store: Store) {
    for waits in [true, false] {
        let kit = Kit::new();
        let locks = kit.client().unwrap();
        let name = marked(&store, if waits { "late release" } else { "late drop" });
        let guard = locks.mutex(&name).acquire().await.unwrap();
        let mut renewal = kit.hold_next(Verb::Renew);
        kit.clock().advance(Duration::from_secs(4));
        renewal.arrived().await;
        kit.lose_data();

        let mut release = kit.hold_next(Verb::Release);
        let ended = tokio::spawn(async move {
            match waits {
                true => assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost),
                false => drop(guard),
            }
        });
        release.arrived().await;
        renewal.let_go();
        if waits {
            // The release and the renewal use different connections, so their answers may come in
            // any order. The test lets the release go only after the client has logged the answer
            // to the renewal. If the guard is dropped, both requests use one connection, in order,
            // so the test need not wait.
            one(Level::DEBUG, &name, "ticket lost").await;
        }
        release.let_go();
        ended.await.unwrap();

        let told = one(Level::WARN, &name, "lock lost").await;
        assert!(told.contains("Taken"), "{told}");
    }
}

/// In a URL that cannot be parsed, a password may be in an unexpected place. So the log shows no
/// part of this URL.
async fn a_url_that_was_not_opened_is_not_repeated(store: Store) {
    let owner = marked(&store, "own");
    let locks = Locks::builder()
        .url(format!("redis://ann:12/{SECRET}@host"))
        .backend(lockcore::backend::open("memory:").unwrap())
        .owner(&owner);
    drop(locks.build().unwrap());

    let told = one(Level::INFO, &owner, "lock client started").await;
    assert!(told.contains("store=\"the store\""), "it names another");
}

/// The store was not reachable when the keeper released the ticket. The use of the lock had ended,
/// so nothing was lost.
async fn a_lease_that_runs_out_after_its_release_is_no_warning(store: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    let name = marked(&store, "late");
    let guard = locks.mutex(&name).acquire().await.unwrap();
    kit.freeze();
    drop(guard);
    kit.clock().advance(Duration::from_secs(10));
    kit.thaw();

    // Waits until the keeper has released the ticket. It has tried for longer than the lease.
    locks.shutdown(SOON).await.unwrap();
    said(locks).await;
    assert_eq!(at(Level::WARN, &name), Vec::<String>::new());
}

async fn an_outage_is_one_warning_and_its_end_another(store: Store) {
    let server = RedisServer::start();
    let owner = marked(&store, "owner");
    let locks = Locks::builder().url(server.url()).owner(&owner);
    let locks = locks.op_timeout(Duration::from_secs(2)).build().unwrap();
    let guard = locks
        .mutex("a")
        .ttl(Duration::from_secs(60))
        .acquire()
        .await
        .unwrap();

    server.stop();
    for _ in 0..3 {
        locks.mutex("b").acquire().await.unwrap_err();
    }
    eventually("tried again", SOON, async || {
        at(Level::DEBUG, &owner).len() >= 10
    })
    .await;
    let place = server.url();
    let told = one(Level::WARN, &owner, "out of reach").await;
    assert!(told.contains(place.trim_end_matches('/')), "{told}");
    server.restart();
    let told = one(Level::WARN, &owner, "is back").await;
    assert!(
        told.contains("after=") && told.contains(place.trim_end_matches('/')),
        "{told}"
    );

    drop(guard);
    give_back(locks.mutex("b").acquire().await.unwrap()).await;
    said(locks).await;
    let told = at(Level::WARN, &owner);
    assert_eq!(told.len(), 2, "{told:?}");
}

async fn a_mistake_behind_an_outage_is_logged_as_well(store: Store) {
    let server = RedisServer::start();
    grant(&server, "lock", SECRET);
    let owner = marked(&store, "owner");
    let locks = Locks::builder()
        .url(server.url_with_user(USER, SECRET))
        .owner(&owner);
    let locks = locks.op_timeout(SOON).build().unwrap();
    let lock = locks.mutex("a").ttl(Duration::from_secs(60));
    let guard = lock.acquire().await.unwrap();

    server.command::<()>(&["ACL", "SETUSER", USER, "resetpass", ">other"]);
    server.command::<()>(&["CLIENT", "KILL", "TYPE", "NORMAL", "SKIPME", "YES"]);
    server.command::<()>(&["CLIENT", "KILL", "TYPE", "PUBSUB"]);
    for _ in 0..5 {
        eventually("refused", SOON, async || {
            kind(locks.mutex("b").acquire().await) == ErrorKind::Config
        })
        .await;
    }

    one(Level::WARN, &owner, "WRONGPASS").await;
    server.command::<()>(&["ACL", "SETUSER", USER, &format!(">{SECRET}")]);
    give_back(
        locks
            .mutex("b")
            .wait(Wait::Forever)
            .acquire()
            .await
            .unwrap(),
    )
    .await;
    one(Level::WARN, &owner, "is back").await;
    give_back(guard).await;
    said(locks).await;
    let told = at(Level::WARN, &owner);
    let parts = ["out of reach", "WRONGPASS", "is back"];
    assert_eq!(told.len(), parts.len(), "{told:?}");
    for (line, part) in told.iter().zip(parts) {
        assert!(line.contains(part), "{told:?}");
    }
}

async fn renewals_that_are_refused_are_one_warning_and_their_end_another(store: Store) {
    let server = RedisServer::start();
    grant(&server, "lock", SECRET);
    let owner = marked(&store, "owner");
    let locks = Locks::builder()
        .url(server.url_with_user(USER, SECRET))
        .owner(&owner);
    let locks = locks.op_timeout(SOON).build().unwrap();
    let guard = locks
        .mutex("a")
        .ttl(Duration::from_secs(9))
        .acquire()
        .await
        .unwrap();
    let renewed = async || {
        // A rise of the remaining time shows a renewal.
        let mut last = guard.remaining();
        eventually("renewed", SOON, || {
            let now = guard.remaining();
            ready(now > std::mem::replace(&mut last, now))
        })
        .await;
    };
    renewed().await;

    server.command::<()>(&["ACL", "SETUSER", USER, "-set"]);
    server.command::<()>(&["ACL", "LOG", "RESET"]);
    eventually("denied several times", SOON, async || {
        let denied: Vec<HashMap<String, redis::Value>> = server.command(&["ACL", "LOG"]);
        // Redis joins equal log entries to one entry with a count. Each renewal causes two entries.
        let count = |entry: &HashMap<_, _>| matches!(entry["count"], redis::Value::Int(5..));
        denied.iter().any(count)
    })
    .await;
    let told = one(Level::WARN, &owner, "refuses renewals").await;
    assert!(told.contains("may not run set any more"), "{told}");
    server.command::<()>(&["ACL", "SETUSER", USER, "+set"]);
    renewed().await;
    one(Level::WARN, &owner, "accepts renewals again").await;

    give_back(guard).await;
    tickets(&locks, "a", 0).await;
    said(locks).await;
    assert_eq!(at(Level::WARN, &owner).len(), 2);
}

/// A subscriber that panics at each event, and counts them.
struct Broken(Arc<AtomicUsize>);

impl Subscriber for Broken {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
        panic!("on purpose");
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// A dropped guard logs its release on the thread of the user.
async fn a_subscriber_that_panics_keeps_no_lock_back(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let theirs = other.mutex("a").wait(SOON);
    let shared = locks.mutex("a");
    // No other task uses the ticket of such a lock.
    let own = locks.mutex("a").max_hold(LEASE);
    for lock in [shared, own] {
        let guard = lock.wait(SOON).acquire().await.unwrap();
        let events = Arc::default();

        with_subscriber(Broken(Arc::clone(&events)), || drop(guard));

        assert_ne!(events.load(Ordering::SeqCst), 0);
        give_back(theirs.acquire().await.unwrap()).await;
    }
}
