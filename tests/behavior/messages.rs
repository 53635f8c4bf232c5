//! Tests of errors: their kind, and whether their text is true and tells the next step.

use std::path::Path;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::Fault;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{Error, ErrorKind, Fair, Guard, Lock, Locks, LostReason};
use tests::eventually::eventually;
use tests::redis_server::RedisServer;
use tests::stores::redis::USER;
use tests::watch::SECRET;
use tokio::io::AsyncWriteExt as _;
use tokio::net::UnixListener;
use tracing::Level;

use crate::faults::builder;
use crate::store::{
    DEFAULT, Kind, LEASE, SOON, Store, assert_nothing_left, begin, give_back, kind,
};
use crate::traces;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        a_max_hold_of_zero_is_refused_and_nothing_is_taken
        a_lease_that_nobody_was_to_renew_does_not_blame_a_renewal
        a_caller_that_waits_for_its_own_guard_is_told_so
        a_waiter_for_another_client_is_not_told_that_it_is_its_own
    ]
}

/// Facts about one kind of server only.
pub(crate) fn facts_of_redis(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_password_that_is_written_as_the_messages_say_gets_in
        a_server_that_does_not_answer_is_named
        a_user_without_a_password_does_not_get_in_as_another_user
        a_url_for_valkey_leads_to_the_same_locks
        a_server_behind_a_socket_of_unix_keeps_the_same_locks
        a_socket_that_is_missing_or_of_another_server_is_named
    ]
}

/// Facts about ZooKeeper only.
pub(crate) fn facts_of_zookeeper(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_port_of_another_server_than_zookeeper_is_doubted
    ]
}

/// Messages about the configuration. They do not depend on the store.
pub(crate) fn facts_of_settings(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        unlikely_settings_are_warned_of_once
    ]
}

/// Facts about slow replies, on the store for tests.
pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        an_ensure_spoilt_by_a_slow_reply_is_no_mistake
        an_ensure_beyond_max_hold_is_a_mistake_with_any_ttl
        the_error_of_an_operation_under_a_lock_says_that_the_lock_was_held
        the_error_of_somebody_who_has_no_lock_yet_does_not_say_that_it_was_held
    ]
}

async fn a_max_hold_of_zero_is_refused_and_nothing_is_taken(store: Store) {
    let locks = store.client();
    let lock = locks.mutex("a").max_hold(Duration::ZERO);
    let of_several = Locks::all([locks.mutex("b"), lock.clone()]);

    let error = lock.try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("max_hold of zero"), "{error}");
    assert_eq!(kind(of_several.acquire().await), ErrorKind::Config);

    assert_nothing_left(&store, &locks, "a").await;
    assert!(locks.inspect("b").await.unwrap().is_empty());
    // The shortest limit ends at once, and the loss has this limit as its reason.
    let least = locks.mutex("a").max_hold(Duration::from_nanos(1));
    let guard = least.acquire().await.unwrap();
    assert_eq!(guard.lost().await, LostReason::MaxHold);
}

async fn a_lease_that_nobody_was_to_renew_does_not_blame_a_renewal(store: Store) {
    let ttl = Duration::from_millis(200);
    let lock = store.client().mutex("a").ttl(ttl).renew(false);
    let lost = ErrorKind::Lost(LostReason::Expired);

    let guard = lock.clone().wait(SOON).acquire().await.unwrap();
    guard.lost().await;
    let mut texts = vec![
        guard.reenter().unwrap_err(),
        guard.ensure(Duration::ZERO).await.unwrap_err(),
        guard.while_held(async {}).await.unwrap_err(),
    ];
    drop(guard);
    let ran: Result<(), Error> = lock
        .wait(SOON)
        .run(async |_| std::future::pending().await)
        .await;
    texts.push(ran.unwrap_err());

    for error in texts {
        assert_eq!(error.kind(), lost);
        let text = error.to_string();
        assert!(!text.contains("no renewal was acknowledged"), "{text}");
        assert!(text.contains("without renewal"), "{text}");
    }
}

/// A caller holds a guard and waits for the same name. It waits with the same lock, with a lock
/// that shares its lane, and with a lock that needs its own ticket.
/// The wait of a caller that must get [`ErrorKind::Timeout`]. The store must have answered by then,
/// or the caller gets another error.
const ANSWERED: Duration = Duration::from_secs(4);

async fn a_caller_that_waits_for_its_own_guard_is_told_so(store: Store) {
    let locks = store.client();
    let changes: [fn(Lock) -> Lock; 3] = [
        |lock| lock,
        |lock| lock.max_hold(SOON),
        |lock| lock.ttl(Duration::from_secs(5)),
    ];
    for held in changes {
        let guard = held(locks.mutex("a")).acquire().await.unwrap();
        let mut texts = Vec::new();
        for asked in changes {
            let busy = asked(locks.mutex("a")).try_acquire().await.unwrap_err();
            assert_eq!(busy.kind(), ErrorKind::Busy);
            texts.push(busy.to_string());
        }
        let late = changes.map(|asked| begin(asked(locks.mutex("a")).wait(ANSWERED)));
        for late in late {
            let late = late.await.unwrap().unwrap_err();
            assert_eq!(late.kind(), ErrorKind::Timeout);
            texts.push(late.to_string());
        }
        for text in texts {
            assert!(text.contains("a guard of this client has it"), "{text}");
            assert!(text.contains("reenter") && text.contains("run"), "{text}");
        }
        give_back(guard).await;
        assert_nothing_left(&store, &locks, "a").await;
    }
    let pool = locks.semaphore("s", 3);
    let some = pool.permits(2).acquire().await.unwrap();
    let busy = pool.permits(2).try_acquire().await.unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::Busy);
    // A semaphore is not re-entered inside `run`, so the text does not suggest that.
    let text = busy.to_string();
    assert!(
        text.contains("a guard of this client has some of it"),
        "{text}"
    );
    assert!(text.contains("reenter") && !text.contains("run"), "{text}");
    give_back(some).await;
}

async fn a_waiter_for_another_client_is_not_told_that_it_is_its_own(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let elsewhere = other.mutex("a").acquire().await.unwrap();
    // This guard is of another name, so the waiter does not wait for it.
    let here = locks.mutex("b").acquire().await.unwrap();

    let busy = locks.mutex("a").try_acquire().await.unwrap_err();
    let lock = locks.mutex("a").wait(ANSWERED);
    let late = lock.acquire().await.unwrap_err();

    for text in [busy.to_string(), late.to_string()] {
        assert!(!text.contains("of this client"), "{text}");
    }
    give_back(here).await;
    give_back(elsewhere).await;
}

async fn an_ensure_spoilt_by_a_slow_reply_is_no_mistake(_: Store) {
    let kit = Kit::new();
    kit.clock().stop();
    let locks = kit.client().unwrap();
    let ttl = Duration::from_secs(30);
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    let whole = guard.remaining();
    kit.clock().advance(ttl / 10);
    let mut renewal = kit.hold_next(Verb::Renew);
    let late = Duration::from_millis(900);

    let (outcome, ()) = tokio::join!(guard.ensure(whole), async {
        renewal.arrived().await;
        kit.clock().advance(late);
        renewal.let_go();
    });

    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("slow"), "{error}");
    assert_eq!(error.name(), Some("a"));
    assert!(guard.is_valid());
    // A longer time than the fastest reply can give is a mistake of the caller.
    let error = guard.ensure(whole + Duration::from_millis(1)).await;
    assert_eq!(kind(error), ErrorKind::Config);
    guard.ensure(whole - Duration::from_secs(1)).await.unwrap();
    give_back(guard).await;
}

async fn an_ensure_beyond_max_hold_is_a_mistake_with_any_ttl(_: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    kit.clock().stop();
    let lock = locks.mutex("a").ttl(Duration::from_secs(30));
    let guard = lock.max_hold(Duration::from_secs(5)).acquire().await;
    let guard = guard.unwrap();

    let error = guard.ensure(Duration::from_secs(6)).await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("max_hold"), "{error}");
    guard.ensure(Duration::from_secs(5)).await.unwrap();
    give_back(guard).await;
}

/// Work under the lock may be done in part when an operation fails, also if the store refuses only
/// the release.
async fn the_error_of_an_operation_under_a_lock_says_that_the_lock_was_held(_: Store) {
    let mutex = |locks: &Locks| locks.mutex("a");
    let reader = |locks: &Locks| locks.rwlock("a").read();
    let writer = |locks: &Locks| locks.rwlock("a").write();
    let permits = |locks: &Locks| locks.semaphore("a", 2).permits(2);
    let hour = Duration::from_secs(3600);
    let refused = |verb| (Some(verb), ErrorKind::Unavailable);
    let release = async |guard: Guard| guard.release().await;
    fails_under(mutex, refused(Verb::Release), release).await;
    let extend = async |guard: Guard| guard.extend(hour).await;
    fails_under(mutex, refused(Verb::Renew), extend).await;
    let ensure = async |guard: Guard| guard.ensure(hour).await;
    fails_under(mutex, refused(Verb::Renew), ensure).await;
    let detach = async |guard: Guard| guard.detach().await.map_err(Error::from);
    fails_under(mutex, refused(Verb::Renew), detach).await;
    let set_value = async |guard: Guard| guard.set_value("page 7").await;
    fails_under(mutex, refused(Verb::Count), set_value).await;
    let value = async |guard: Guard| guard.value().await;
    fails_under(mutex, refused(Verb::Count), value).await;
    let downgrade = async |mut guard: Guard| guard.downgrade().await;
    fails_under(writer, refused(Verb::Renew), downgrade).await;
    let release_one = async |guard: Guard| guard.release_permits(1).await;
    fails_under(permits, refused(Verb::Renew), release_one).await;
    let upgrade = async |mut guard: Guard| guard.try_upgrade().await.map(drop);
    fails_under(reader, refused(Verb::Enqueue), upgrade).await;
    let release = async |mut guard: Guard| {
        let upgraded = guard.try_upgrade().await.expect("the only reader");
        upgraded.release().await
    };
    fails_under(reader, refused(Verb::Release), release).await;

    // Mistakes, and a lock that is used in several places.
    let mistake = (None, ErrorKind::Config);
    fails_under(mutex, mistake, ensure).await;
    let extend = async |guard: Guard| guard.extend(Duration::ZERO).await;
    fails_under(mutex, mistake, extend).await;
    fails_under(mutex, mistake, release_one).await;
    fails_under(mutex, mistake, upgrade).await;
    fails_under(permits, mistake, downgrade).await;
    let token = async |guard: Guard| guard.fencing_token();
    fails_under(reader, mistake, token).await;
    let long = async |guard: Guard| guard.set_value("x".repeat(2_000)).await;
    fails_under(mutex, mistake, long).await;
    let detach = async |guard: Guard| {
        let second = guard.reenter()?;
        let refused = guard.detach().await;
        drop(second);
        refused.map_err(Error::from)
    };
    fails_under(mutex, (None, ErrorKind::Busy), detach).await;
}

/// Takes a lock in a store of its own, and checks the error of an operation on it. If there is a
/// verb, the store refuses this request.
async fn fails_under<T>(
    lock: impl Fn(&Locks) -> Lock,
    (verb, expected): (Option<Verb>, ErrorKind),
    operation: impl AsyncFnOnce(Guard) -> Result<T, Error>,
) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    let guard = lock(&locks).acquire().await.unwrap();
    if let Some(verb) = verb {
        kit.fail_next(verb, Fault::Refused);
    }

    let error = operation(guard).await.map(drop).unwrap_err();

    assert_eq!((error.kind(), error.name()), (expected, Some("a")));
    assert!(error.was_held(), "{error}");
}

async fn the_error_of_somebody_who_has_no_lock_yet_does_not_say_that_it_was_held(_: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let both = Locks::all(["b", "a"].map(|name| locks.mutex(name)));

    let mut errors = vec![
        locks.mutex("a").try_acquire().await.unwrap_err(),
        both.try_acquire().await.unwrap_err(),
        locks.mutex("").try_acquire().await.unwrap_err(),
    ];
    for fault in [Fault::Refused, Fault::Config] {
        // A store for each. A client may count in the background after a failure.
        let kit = Kit::new();
        let locks = kit.client().unwrap();
        kit.fail_next(Verb::Enqueue, fault);
        errors.push(locks.mutex("c").acquire().await.unwrap_err());
        // The candidate has the mutex, and cannot tell the observers. It has not begun to lead.
        kit.fail_next(Verb::Count, fault);
        let election = locks.election("d").wait(Duration::ZERO);
        errors.push(election.campaign().await.unwrap_err());
    }

    for error in errors {
        assert!(!error.was_held(), "{error}");
    }
    give_back(guard).await;
}

/// A password like those that a generator makes.
async fn a_password_that_is_written_as_the_messages_say_gets_in(_: Store) {
    let password = "a:b#c/d?e@f%67g";
    let server = RedisServer::with(&["--requirepass", password]);
    let url = |written: &str| {
        server
            .url()
            .replace("redis://", &format!("redis://:{written}@"))
    };

    let as_it_is = Locks::connect(&url(password)).unwrap_err();
    assert_eq!(as_it_is.kind(), ErrorKind::Config);
    let mut written = password.replace('%', "%25");
    let half_done = Locks::connect(&url(&written.replace('#', "%23").replace('@', "%40")));
    assert_eq!(half_done.unwrap_err().kind(), ErrorKind::Config);
    let refused = Locks::connect(&url("a%3Ab")).unwrap();
    let refused = refused.mutex("a").acquire().await.unwrap_err();
    for text in [as_it_is.to_string(), refused.to_string()] {
        for code in ["%23", "%2F", "%40"] {
            assert!(text.contains(code), "{text}");
        }
    }
    for (sign, code) in [('#', "%23"), ('/', "%2F"), ('?', "%3F"), ('@', "%40")] {
        written = written.replace(sign, code);
    }
    // A colon need not be escaped.
    assert!(written.contains(':'));

    let locks = Locks::builder().url(url(&written)).op_timeout(SOON);
    let locks = locks.build().unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}

async fn a_server_that_does_not_answer_is_named(_: Store) {
    let server = RedisServer::start();
    let brief = Duration::from_millis(200);
    let locks = Locks::builder()
        .url(server.url())
        .op_timeout(brief)
        .build()
        .unwrap();
    server.freeze();

    let errors = [
        locks.mutex("a").acquire().await.map(drop).unwrap_err(),
        locks.ready(2 * brief).await.unwrap_err(),
    ];

    server.thaw();
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        assert!(text.contains(server.url().trim_end_matches('/')), "{text}");
    }
}

/// A server without passwords would let the client in, whoever it says that it is.
async fn a_user_without_a_password_does_not_get_in_as_another_user(_: Store) {
    let server = RedisServer::start();
    let url = server.url().replace("redis://", "redis://hunter2@");

    let error = Locks::connect(&url).unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config);
    let text = error.to_string();
    assert!(
        text.contains("a user is given without a password"),
        "{text}"
    );
    assert!(!text.contains("hunter2"), "{text}");
}

async fn a_url_for_valkey_leads_to_the_same_locks(_: Store) {
    let server = RedisServer::start();
    let client = |url| Locks::builder().url(url).op_timeout(SOON).build().unwrap();
    let redis = client(server.url());
    let valkey = client(server.url().replace("redis://", "valkey://"));

    let guard = redis.mutex("a").acquire().await.unwrap();

    assert_eq!(kind(valkey.mutex("a").try_acquire().await), ErrorKind::Busy);
    give_back(guard).await;
    give_back(valkey.mutex("a").try_acquire().await.unwrap()).await;
}

/// A client at the socket and a client at the port exclude each other.
async fn a_server_behind_a_socket_of_unix_keeps_the_same_locks(_: Store) {
    let user = [
        "--user",
        USER,
        "on",
        &format!(">{SECRET}"),
        "~*",
        "&*",
        "+@all",
    ];
    let server = RedisServer::with(&user);
    let socket = server.socket();
    let rest = format!("{}?user={USER}&password={SECRET}&db=3", socket.display());
    let at_port = builder(server.url_with_user(USER, SECRET) + "/3");
    let at_port = at_port.op_timeout(SOON).build().unwrap();
    for scheme in ["redis+unix", "unix"] {
        let at_socket = builder(format!("{scheme}://{rest}")).op_timeout(SOON);
        let at_socket = at_socket.build().unwrap();
        at_socket.ready(SOON).await.unwrap();

        let guard = at_socket.mutex("a").acquire().await.unwrap();
        let refused = at_port.mutex("a").try_acquire().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy);
        let waits = at_port.mutex("a").wait(SOON);
        let waiter = tokio::spawn(async move { waits.acquire().await });
        eventually("it waits", SOON, async || {
            at_port.inspect("a").await.unwrap().len() == 2
        })
        .await;

        give_back(guard).await;
        give_back(waiter.await.unwrap().unwrap()).await;
    }
}

async fn a_socket_that_is_missing_or_of_another_server_is_named(_: Store) {
    let folder = tempfile::tempdir().unwrap();
    let refused = async |socket: &Path| {
        let url = format!("redis+unix://{}", socket.display());
        let locks = builder(url).build().unwrap();
        let error = locks.mutex("a").acquire().await.unwrap_err();
        let text = error.to_string();
        let named = format!("cannot connect to {}", socket.display());
        assert!(text.contains(&named), "{text}");
        assert!(!text.contains("TLS"), "{text}");
        error
    };

    let missing = refused(&folder.path().join("missing")).await;
    assert_eq!(missing.kind(), ErrorKind::Unavailable);

    let other = folder.path().join("other");
    let listener = UnixListener::bind(&other).unwrap();
    let answers = tokio::spawn(async move {
        let (mut client, _) = listener.accept().await.unwrap();
        let answer = b"HTTP/1.1 400 Bad Request\r\n\r\n";
        client.write_all(answer).await.unwrap();
        client
    });
    let other = refused(&other).await;
    assert_eq!(other.kind(), ErrorKind::Config);
    assert!(other.to_string().contains("is not Redis"), "{other}");
    answers.await.unwrap();
}

async fn a_port_of_another_server_than_zookeeper_is_doubted(_: Store) {
    let server = RedisServer::start();
    for scheme in ["zookeeper", "zookeeper+tls"] {
        let url = format!("{scheme}://127.0.0.1:{}", server.port());
        // The driver gives a silent server up after a part of the ttl, and says less.
        let locks = Locks::builder().url(url).ttl(LEASE);
        let locks = locks.op_timeout(Duration::from_secs(2)).build().unwrap();

        let error = locks.mutex("a").acquire().await.unwrap_err();

        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        assert!(text.contains("another server than ZooKeeper"), "{text}");
        assert!(text.contains("2181 is usual"), "{text}");
    }
}

async fn unlikely_settings_are_warned_of_once(_: Store) {
    let doubtful = |operation: u64, bound: u64, ttl: u64| {
        let before = traces::lines("LOCK_").len();
        let locks = Locks::builder()
            .url("memory:")
            .ttl(Duration::from_millis(ttl))
            .op_timeout(Duration::from_millis(operation))
            .fair(Fair::Local(Duration::from_millis(bound)));
        locks.build().unwrap();
        let told = traces::lines("LOCK_").split_off(before);
        assert!(
            told.iter().all(|line| line.level == Level::WARN),
            "{told:?}"
        );
        // The test finds its warnings by this ttl, which no other fact uses.
        let ttl = format!("(LOCK_TTL, {ttl}ms)");
        let told = told.into_iter().map(|line| line.text);
        told.filter(|text| text.contains(&ttl)).collect::<Vec<_>>()
    };

    assert_eq!(doubtful(711, 711, 711), Vec::<String>::new());
    let slow = doubtful(713, 712, 712);
    assert!(
        slow.len() == 1 && slow[0].contains("LOCK_OP_TIMEOUT"),
        "{slow:?}"
    );
    let unfair = doubtful(713, 714, 713);
    assert!(
        unfair.len() == 1 && unfair[0].contains("LOCK_FAIR"),
        "{unfair:?}"
    );
    assert!(unfair[0].contains("50ms"), "{unfair:?}");
    assert_eq!(doubtful(1000, 1000, 715).len(), 2);
}
