//! Tests of the metrics: after a known course of events, each has the right number.
//! `guide/metrics.md` describes them. Each fact has its own namespace, and all metrics have the
//! namespace as a label.

mod recorder;

use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use libtest_mimic::Trial;
use lockcore::backend::Fault;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::{Error, ErrorKind, Fair, Lock, Locks, LostReason, Release, Wait};
use lockcore::{distributed_lock, with_default};
use tests::eventually::eventually;
use tests::redis_server::RedisServer;

pub(crate) use self::recorder::record;
use self::recorder::{Number, series};
use crate::faults::works_again;
use crate::store::{
    DEFAULT, Kind, LEASE, SOON, Store, begin, give_back, in_line, kind, soon, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store;
        a_grant_counts_with_its_wait_and_a_hold_with_its_length
        a_caller_without_a_grant_counts_by_its_outcome
        each_lost_lock_counts_once_by_its_reason
        gauges_are_zero_when_nothing_is_in_use
        renewals_and_requests_count_by_their_answers
    ];
    facts.extend(crate::store_facts![store, Fair::Local(SOON);
        a_hand_over_counts_by_its_giver
    ]);
    facts.extend(crate::store_facts![store, DEFAULT;
        no_label_has_the_name_of_a_lock
    ]);
    facts
}

pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_renewal_is_late_from_a_third_of_the_ttl_on
        a_request_counts_by_its_outcome
        a_lock_that_several_ask_for_early_counts_once
        a_connection_that_breaks_counts_as_down_and_then_as_made_again
        a_task_that_is_not_polled_counts_as_waiting_until_it_is_dropped
        parties_and_candidates_count_with_their_label
        a_client_that_ends_in_an_outage_leaves_no_clean_up_in_the_gauge
    ]
}

pub(crate) fn facts_of_redis(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        an_outage_counts_its_connections_and_its_failures
    ]
}

/// The metrics of a fact, by its namespace.
struct Metrics(String);

impl Metrics {
    fn of(store: &Store) -> Self {
        Self(store.namespace.clone())
    }

    /// The sum of all series of a metric that have these labels.
    fn number(&self, name: &str, labels: &[(&str, &str)]) -> Number {
        let wanted = series(|series| {
            series.name == name
                && series.has("namespace", &self.0)
                && labels.iter().all(|(label, value)| series.has(label, value))
        });
        let mut total = Number::default();
        for (_, number) in wanted {
            total.sum += number.sum;
            total.count += number.count;
        }
        total
    }

    /// The value of a counter or a gauge.
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> i64 {
        self.number(name, labels).sum as i64
    }

    fn acquisitions(&self, outcome: &str) -> i64 {
        self.value("lockcore_acquisitions_total", &[("outcome", outcome)])
    }

    async fn becomes(&self, value: i64, name: &str, labels: &[(&str, &str)]) {
        eventually("the metric has the value", SOON, async || {
            self.value(name, labels) == value
        })
        .await;
    }

    async fn gauges_are_zero(&self) {
        for gauge in [
            "lockcore_held",
            "lockcore_waiting",
            "lockcore_cleanups_open",
            "lockcore_connected",
        ] {
            self.becomes(0, gauge, &[]).await;
        }
    }
}

/// The caller asks for the second lock while it asks for the first, and then again to wait for it.
async fn a_lock_that_several_ask_for_early_counts_once(store: Store) {
    let metrics = Metrics::of(&store);
    let (locks, other) = (store.client(), store.client());
    let second = other.mutex("b").acquire().await.unwrap();
    let both = Locks::all(["a", "b"].map(|name| locks.mutex(name)));
    let waits = tokio::spawn(async move { both.acquire().await });
    in_line(&store, &other, "b", 1, 1).await;

    give_back(second).await;

    let both = soon(waits).await.unwrap().unwrap();
    assert_eq!(both.release().await.unwrap(), Release::Released);
    assert_eq!(metrics.acquisitions("granted"), 3);
    assert_eq!(metrics.acquisitions("busy"), 0);
}

async fn a_grant_counts_with_its_wait_and_a_hold_with_its_length(store: Store) {
    let metrics = Metrics::of(&store);
    let locks = store.client();
    let lock = locks.mutex("a").label("order:{id}");
    let labels = [("lock", "order:{id}")];

    let guard = lock.acquire().await.unwrap();
    let granted = Instant::now();
    assert_eq!(metrics.value("lockcore_held", &labels), 1);
    assert_eq!(metrics.value("lockcore_waiting", &labels), 0);
    assert_eq!(metrics.number("lockcore_hold_seconds", &[]).count, 0);
    let second = guard.reenter().unwrap();
    // The work, so that the hold has a length.
    tokio::time::sleep(Duration::from_millis(30)).await;
    drop(guard);
    assert_eq!(
        metrics.value("lockcore_held", &labels),
        1,
        "a guard is left"
    );
    let at_least = granted.elapsed();
    give_back(second).await;

    assert_eq!(metrics.value("lockcore_held", &labels), 0);
    let hold = metrics.number("lockcore_hold_seconds", &labels);
    assert!(
        hold.count == 1 && hold.sum >= at_least.as_secs_f64(),
        "{hold:?}, at least {at_least:?}"
    );
    let wait = metrics.number("lockcore_wait_seconds", &labels);
    assert_eq!(wait.count, 1);
    assert_eq!(metrics.acquisitions("granted"), 1);

    // One that waits.
    let other = store.client();
    let guard = other.mutex("a").acquire().await.unwrap();
    let waiting = begin(lock.clone());
    metrics.becomes(1, "lockcore_waiting", &labels).await;
    let asked = Instant::now();
    in_line(&store, &other, "a", 1, 1).await;
    let at_least = asked.elapsed();
    give_back(guard).await;
    give_back(soon(waiting).await.unwrap().unwrap()).await;

    assert_eq!(metrics.value("lockcore_waiting", &[]), 0);
    let wait = metrics.number("lockcore_wait_seconds", &labels);
    assert!(
        wait.count == 2 && wait.sum >= at_least.as_secs_f64(),
        "{wait:?}, at least {at_least:?}"
    );
    assert_eq!(metrics.acquisitions("granted"), 3);
}

async fn a_caller_without_a_grant_counts_by_its_outcome(store: Store) {
    let metrics = Metrics::of(&store);
    let (locks, other) = (store.client(), store.client());
    let held = other.mutex("a").acquire().await.unwrap();
    let lock = locks.mutex("a");

    assert_eq!(kind(lock.try_acquire().await), ErrorKind::Busy);
    let short = lock.clone().wait(Duration::from_secs(3));
    assert_eq!(kind(short.acquire().await), ErrorKind::Timeout);
    let cancelled = begin(lock.clone());
    metrics.becomes(1, "lockcore_waiting", &[]).await;
    cancelled.abort();
    metrics.becomes(0, "lockcore_waiting", &[]).await;
    locks.shutdown(SOON).await.unwrap();
    assert_eq!(
        kind(lock.acquire().await),
        ErrorKind::Lost(LostReason::Shutdown)
    );

    let outcomes = ["granted", "busy", "timeout", "cancelled", "lost"];
    let counts = outcomes.map(|outcome| metrics.acquisitions(outcome));
    assert_eq!(counts, [1; 5], "of {outcomes:?}");
    assert_eq!(metrics.number("lockcore_acquisitions_total", &[]).sum, 5.0);
    assert_eq!(metrics.number("lockcore_wait_seconds", &[]).count, 1);
    give_back(held).await;
}

async fn each_lost_lock_counts_once_by_its_reason(store: Store) {
    let metrics = Metrics::of(&store);
    let (locks, operator) = (store.client(), store.client());
    // A lease for a moment has no time for the first connection.
    locks.ready(SOON).await.unwrap();
    let lock = |name: &str| locks.mutex(name).label("lost");
    let brief = Duration::from_millis(300);

    let expires = lock("expires").ttl(brief).renew(false);
    let expires = expires.acquire().await.unwrap();
    let ends = lock("ends").max_hold(brief).acquire().await.unwrap();
    let taken = lock("taken").acquire().await.unwrap();
    let ticket = taken.grant_id().ticket();
    operator.force_release("taken", ticket).await.unwrap();
    taken.extend(LEASE).await.unwrap_err();
    assert_eq!(soon(taken.lost()).await, LostReason::Taken);
    assert_eq!(soon(expires.lost()).await, LostReason::Expired);
    assert_eq!(soon(ends.lost()).await, LostReason::MaxHold);
    let mut reasons = vec!["taken", "expired", "max_hold", "shutdown"];
    let mut guards = vec![expires, ends, taken];
    if store.capability().asks_back {
        let asked = lock("asked").acquire().await.unwrap();
        let ticket = asked.grant_id().ticket();
        let revoked = operator.revoke("asked", ticket, Duration::ZERO, "a test");
        revoked.await.unwrap();
        assert_eq!(soon(asked.lost()).await, LostReason::Revoked);
        guards.push(asked);
        reasons.push("revoked");
    }
    let stays = lock("stays").acquire().await.unwrap();
    drop(locks.shutdown(Duration::ZERO).await);
    assert_eq!(soon(stays.lost()).await, LostReason::Shutdown);
    guards.push(stays);
    drop(guards);

    let count = |reason: &&str| metrics.value("lockcore_lost_total", &[("reason", *reason)]);
    eventually("each loss is noticed", SOON, async || {
        reasons.iter().all(|reason| count(reason) > 0)
    })
    .await;
    let all = reasons.len();
    let counts: Vec<_> = reasons.iter().map(count).collect();
    assert_eq!(counts, vec![1; all], "of {reasons:?}");
    let lost = metrics.value("lockcore_lost_total", &[("lock", "lost")]);
    assert_eq!(lost, all as i64);
    assert_eq!(metrics.value("lockcore_lost_total", &[]), lost);
    assert_eq!(metrics.value("lockcore_held", &[]), 0);
    let holds = metrics.number("lockcore_hold_seconds", &[]);
    assert_eq!(holds.count, all as u64);
}

async fn gauges_are_zero_when_nothing_is_in_use(store: Store) {
    let metrics = Metrics::of(&store);
    let locks = store.client();
    let guard = locks.mutex("a").acquire().await.unwrap();
    metrics.becomes(1, "lockcore_held", &[]).await;
    assert!(metrics.value("lockcore_connected", &[]) > 0);

    // A waiter that is dropped in line, and a task that panics under a lock.
    let waits = begin(locks.mutex("a").wait(Wait::Forever));
    metrics.becomes(1, "lockcore_waiting", &[]).await;
    waits.abort();
    let panics = locks.mutex("b");
    let panics = tokio::spawn(async move {
        let _guard = panics.acquire().await.unwrap();
        std::panic::resume_unwind(Box::new("under a lock"));
    });
    assert!(panics.await.unwrap_err().is_panic());
    drop(guard);
    for gauge in [
        "lockcore_held",
        "lockcore_waiting",
        "lockcore_cleanups_open",
    ] {
        metrics.becomes(0, gauge, &[]).await;
    }

    let guard = locks.mutex("a").acquire().await.unwrap();
    drop(locks.shutdown(Duration::ZERO).await);
    drop(guard);
    drop(locks);
    metrics.gauges_are_zero().await;
    assert_eq!(metrics.acquisitions("cancelled"), 1);
}

async fn renewals_and_requests_count_by_their_answers(store: Store) {
    let metrics = Metrics::of(&store);
    let (locks, operator) = (store.client(), store.client());
    let guard = locks.mutex("a").acquire().await.unwrap();

    guard.extend(LEASE).await.unwrap();
    let renewed = metrics.value("lockcore_renewals_total", &[("outcome", "renewed")]);
    assert!(renewed >= 1, "{renewed}");
    let lost = [("outcome", "lost")];
    assert_eq!(metrics.value("lockcore_renewals_total", &lost), 0);
    let ticket = guard.grant_id().ticket();
    operator.force_release("a", ticket).await.unwrap();
    guard.extend(LEASE).await.unwrap_err();
    let lost = metrics.value("lockcore_renewals_total", &lost);
    assert_eq!(lost, 1);
    drop(guard);

    locks.inspect("a").await.unwrap();
    for verb in ["enqueue", "renew", "release", "inspect"] {
        let labels = [("verb", verb), ("outcome", "ok")];
        eventually("the request is answered", SOON, async || {
            metrics
                .number("lockcore_store_request_seconds", &labels)
                .count
                > 0
        })
        .await;
    }
}

async fn a_hand_over_counts_by_its_giver(store: Store) {
    let metrics = Metrics::of(&store);
    let (locks, other) = (store.client(), store.client());
    let count = |place| metrics.value("lockcore_hand_overs_total", &[("where", place)]);
    let guard = locks.mutex("a").acquire().await.unwrap();
    let mut next = Box::pin(locks.mutex("a").into_future());
    assert!(next.as_mut().now_or_never().is_none()); // it waits in this process
    assert_eq!([count("process"), count("store")], [0, 0]);

    give_back(guard).await;
    let guard = soon(next).await.unwrap();
    assert_eq!([count("process"), count("store")], [1, 0]);

    if store.capability().queues {
        let enqueued = [("verb", "enqueue"), ("outcome", "ok")];
        let answered = || {
            let requests = metrics.number("lockcore_store_request_seconds", &enqueued);
            requests.count
        };
        let before = answered();
        let next = begin(other.mutex("a"));
        eventually("its enqueue is answered", SOON, async || {
            answered() > before
        })
        .await;
        tickets(&locks, "a", 2).await;
        give_back(guard).await;
        give_back(soon(next).await.unwrap().unwrap()).await;
        assert_eq!([count("process"), count("store")], [1, 1]);
    }
}

#[distributed_lock(key = "secret-{id}")]
async fn annotated(id: &str) -> Result<(), Error> {
    Ok(())
}

/// The name of a lock may have no bound, and may be personal.
async fn no_label_has_the_name_of_a_lock(store: Store) {
    const KEY: &str = "secret-4711";
    let locks = store.client();
    let lock = |locks: &Locks| -> Lock { locks.mutex(KEY) };
    with_default(locks.clone(), annotated("4711"))
        .await
        .unwrap();
    assert_eq!(
        lock(&locks)
            .acquire()
            .await
            .unwrap()
            .release()
            .await
            .unwrap(),
        Release::Released
    );
    lock(&locks)
        .run(async |_| Ok::<_, Error>(()))
        .await
        .unwrap();
    let read = locks.rwlock(KEY).read().acquire().await.unwrap();
    kind(lock(&locks).try_acquire().await);
    give_back(read).await;
    if store.capability().counters {
        locks.latch(KEY).try_set(1).await.unwrap();
    }
    let lost = lock(&locks).acquire().await.unwrap();
    drop(locks.shutdown(Duration::ZERO).await);
    drop(lost);

    let all = series(|series| series.has("namespace", &store.namespace));
    assert!(all.len() > 10, "{all:?}");
    for (series, _) in all {
        let values = series.labels.values();
        assert!(
            values.clone().all(|value| !value.contains("4711")),
            "{series:?}"
        );
        let lock = series.labels.get("lock").map(String::as_str);
        assert!(
            matches!(lock, None | Some("other" | "secret-{id}")),
            "{series:?}"
        );
    }
}

/// A store that the test controls, in the namespace of the fact.
fn kit(store: &Store) -> (Kit, Locks) {
    let kit = Kit::new();
    let builder = Locks::builder().namespace(&store.namespace);
    let locks = kit.client_with(builder.fair(Fair::Strict)).unwrap();
    (kit, locks)
}

async fn a_renewal_is_late_from_a_third_of_the_ttl_on(store: Store) {
    let metrics = Metrics::of(&store);
    let (kit, locks) = kit(&store);
    // On a lent connection a ticket may be renewed twice.
    locks.ready(SOON).await.unwrap();
    metrics.becomes(2, "lockcore_connected", &[]).await;
    kit.clock().stop();
    let ttl = Duration::from_secs(30);
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    let late = || metrics.number("lockcore_renewal_late_seconds", &[]);

    for (delay, before) in [(Duration::ZERO, 0), (Duration::from_millis(500), 1)] {
        let mut renewal = kit.hold_next(Verb::Renew);
        kit.clock().advance(ttl / 3);
        soon(renewal.arrived()).await;
        kit.clock().advance(delay);
        let sum = late().sum;
        renewal.let_go();
        eventually("it is renewed", SOON, async || late().count == before + 1).await;
        let late = late().sum - sum;
        // The allowance for drift makes the lease a hundredth shorter, and so its third too.
        let expected = delay.as_secs_f64();
        assert!((expected..expected + 0.5).contains(&late), "{late} s");
    }
    give_back(guard).await;
}

async fn a_request_counts_by_its_outcome(store: Store) {
    let metrics = Metrics::of(&store);
    let (kit, locks) = kit(&store);
    let count = |outcome| {
        let labels = [("verb", "enqueue"), ("outcome", outcome)];
        metrics
            .number("lockcore_store_request_seconds", &labels)
            .count
    };
    for (fault, outcome) in [
        (Fault::Retry, "retry"),
        (Fault::Refused, "refused"),
        (Fault::Unknown, "unknown"),
        (Fault::Config, "config"),
    ] {
        assert_eq!(count(outcome), 0);
        kit.fail_next(Verb::Enqueue, fault);
        let _ = locks.mutex("a").try_acquire().await;
        assert_eq!(count(outcome), 1, "{outcome}");
    }

    let mut enqueue = kit.hold_next(Verb::Enqueue);
    let asks = begin(locks.mutex("b"));
    soon(enqueue.arrived()).await;
    assert_eq!(count("unanswered"), 0);
    asks.abort();
    // The keeper awaits the answer in place of the caller. It gives up at the end of the client.
    drop(locks);
    eventually("nobody waits for it", SOON, async || {
        count("unanswered") == 1
    })
    .await;
    enqueue.let_go();
}

async fn a_connection_that_breaks_counts_as_down_and_then_as_made_again(store: Store) {
    let metrics = Metrics::of(&store);
    let (kit, locks) = kit(&store);
    let guard = locks.mutex("a").acquire().await.unwrap();
    // The connection of this runtime, and that of the keeper.
    metrics.becomes(2, "lockcore_connected", &[]).await;
    assert_eq!(metrics.value("lockcore_reconnects_total", &[]), 0);

    kit.freeze();
    kit.break_connections();
    metrics.becomes(0, "lockcore_connected", &[]).await;
    kit.thaw();
    metrics.becomes(2, "lockcore_reconnects_total", &[]).await;
    metrics.becomes(2, "lockcore_connected", &[]).await;

    give_back(guard).await;
    drop(locks);
    metrics.gauges_are_zero().await;
}

async fn a_task_that_is_not_polled_counts_as_waiting_until_it_is_dropped(store: Store) {
    let metrics = Metrics::of(&store);
    let (_kit, locks) = kit(&store);
    let guard = locks.mutex("a").acquire().await.unwrap();
    let mut waits = Box::pin(locks.mutex("a").wait(Wait::Forever).into_future());

    tokio::select! {
        biased;
        _ = &mut waits => panic!("it is held"),
        () = std::future::ready(()) => {}
    }
    assert_eq!(metrics.value("lockcore_waiting", &[]), 1);
    drop(waits);

    assert_eq!(metrics.value("lockcore_waiting", &[]), 0);
    assert_eq!(metrics.acquisitions("cancelled"), 1);
    give_back(guard).await;
}

async fn parties_and_candidates_count_with_their_label(store: Store) {
    let metrics = Metrics::of(&store);
    let (_kit, locks) = kit(&store);

    let loaded = locks.barrier("a", 1).label("loaded");
    loaded.wait_for_all().await.unwrap();
    let computing = locks.double_barrier("b", 1).label("computing");
    let inside = computing.enter().await.unwrap();
    let leader = locks.election("c").label("leader").campaign().await;

    for label in ["loaded", "computing", "leader"] {
        let grants = metrics.value("lockcore_acquisitions_total", &[("lock", label)]);
        assert_eq!(grants, 1, "{label}");
    }
    assert_eq!(metrics.acquisitions("granted"), 3);
    inside.leave().await.unwrap();
    leader.unwrap().resign().await.unwrap();
    for label in ["loaded", "computing", "leader"] {
        metrics
            .becomes(0, "lockcore_held", &[("lock", label)])
            .await;
    }
}

async fn a_client_that_ends_in_an_outage_leaves_no_clean_up_in_the_gauge(store: Store) {
    let metrics = Metrics::of(&store);
    let kit = Kit::new();
    let builder = Locks::builder()
        .namespace(&store.namespace)
        .op_timeout(Duration::from_secs(2));
    let locks = kit.client_with(builder).unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    kit.freeze();
    drop(guard);
    metrics.becomes(1, "lockcore_cleanups_open", &[]).await;

    let ends = tokio::task::spawn_blocking(move || drop(locks));
    soon(ends).await.unwrap();

    metrics.gauges_are_zero().await;
}

async fn an_outage_counts_its_connections_and_its_failures(store: Store) {
    let metrics = Metrics::of(&store);
    let server = RedisServer::start();
    let locks = Locks::builder()
        .url(server.url())
        .namespace(&store.namespace)
        .op_timeout(Duration::from_secs(2))
        .build()
        .unwrap();
    let labels = [("store", "redis")];
    // The first connection may take longer than an operation.
    works_again(&locks, "warm", SOON).await;
    let before = metrics.acquisitions("unavailable");
    let guard = locks.mutex("a").ttl(SOON).acquire().await.unwrap();
    metrics.becomes(2, "lockcore_connected", &labels).await;

    server.stop();
    // A request that is sent before the client notices may have been carried out.
    metrics.becomes(0, "lockcore_connected", &labels).await;
    let refused = kind(locks.mutex("b").acquire().await);
    assert_eq!(refused, ErrorKind::Unavailable);
    assert_eq!(metrics.acquisitions("unavailable"), before + 1);
    server.restart();
    metrics.becomes(2, "lockcore_connected", &labels).await;

    assert!(metrics.value("lockcore_reconnects_total", &labels) >= 2);
    drop(guard);
    drop(locks);
    metrics.gauges_are_zero().await;
}
