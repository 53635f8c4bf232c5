//! Tests of the requests about counters that the core sends. The store for tests loses the messages
//! that a fact names.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::{self, Answer, Connection, Count, Counted, Fault, Name};
use lockcore::testing::{Store as Kit, Verb, around};
use lockcore::{ErrorKind, Locks, LostReason, Wait};
use tests::eventually::eventually;
use tokio::sync::Semaphore;

use crate::store::{DEFAULT, Kind, SOON, STALL, Store, kind};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_lost_reply_and_a_lost_request_count_once
        a_change_whose_answers_never_come_is_unknown_and_a_read_unavailable
        a_change_that_was_never_sent_is_unavailable
        a_refused_change_is_passed_on_at_once
        a_change_that_others_are_in_the_way_of_is_repeated_for_the_whole_wait
        an_attempt_that_fails_leaves_its_list_of_answered_changes_to_the_next
        waiters_in_one_process_cost_one_watch_and_one_read_for_each_change
        a_late_waiter_costs_one_read
        a_waiter_learns_of_a_change_that_came_while_it_was_cut_off
        a_latch_that_a_store_has_lost_does_not_open
        a_latch_that_does_not_open_in_time_is_a_timeout
        a_latch_that_is_not_set_does_not_open
        a_latch_and_a_counter_are_kept_for_as_long_as_they_are_to_be
        a_time_for_which_nothing_can_be_kept_is_refused
        a_latch_whose_caller_does_not_wait_costs_one_read
        a_shutdown_ends_the_waiting
        waiters_that_are_dropped_leave_no_watch
        a_store_without_counters_says_so
        a_client_that_is_shut_down_asks_nothing_about_a_counter
    ]
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, future).await.expect("hangs")
}

async fn a_lost_reply_and_a_lost_request_count_once(_: Store) {
    let kit = Kit::new();
    let latch = kit.client().unwrap().latch("a");
    assert!(latch.try_set(9).await.unwrap());
    for left in [8, 6, 4] {
        kit.lose_next_reply(Verb::Count);
        assert_eq!(latch.count_down().await.unwrap(), left);
        if left > 4 {
            kit.lose_next_request(Verb::Count);
            assert_eq!(latch.count_down().await.unwrap(), left - 1);
        }
    }
    // Five answers are lost, one after the other.
    for _ in 0..5 {
        kit.lose_next_reply(Verb::Count);
    }
    assert_eq!(latch.count_down().await.unwrap(), 3);
    kit.fail_next(Verb::Count, Fault::Retry);
    assert_eq!(latch.count_down().await.unwrap(), 2);
}

async fn a_change_whose_answers_never_come_is_unknown_and_a_read_unavailable(_: Store) {
    let kit = Kit::new();
    let builder = Locks::builder().op_timeout(Duration::from_millis(100));
    let locks = kit.client_with(builder).unwrap();
    let counter = locks.counter("a");
    let brief = counter.clone().wait(Duration::from_millis(300));
    assert_eq!(counter.add(1).await.unwrap().count, 1);

    kit.freeze();
    let changed = soon(brief.add(1)).await;
    assert_eq!(kind(changed), ErrorKind::Unknown);
    assert_eq!(kind(soon(brief.get()).await), ErrorKind::Unavailable);

    // All repetitions of the change arrive now.
    kit.thaw();
    assert_eq!(soon(counter.add(1)).await.unwrap().count, 3);
}

async fn a_change_that_was_never_sent_is_unavailable(_: Store) {
    let kit = Kit::new();
    let builder = Locks::builder().op_timeout(Duration::from_millis(100));
    let locks = kit.client_with(builder).unwrap();
    kit.freeze();

    let error = soon(locks.counter("a").add(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(error.name(), Some("a"));

    kit.thaw();
    assert_eq!(soon(locks.counter("a").get()).await.unwrap().count, 0);
}

async fn a_refused_change_is_passed_on_at_once(_: Store) {
    let kit = Kit::new();
    let counter = kit.client().unwrap().counter("a");
    for (fault, expected) in [
        (Fault::Refused, ErrorKind::Unavailable),
        (Fault::Config, ErrorKind::Config),
    ] {
        kit.fail_next(Verb::Count, fault);
        assert_eq!(kind(counter.add(1).await), expected);
    }
    assert_eq!(counter.get().await.unwrap().count, 0);
    // A mistake of the caller is refused at once too.
    let most = lockcore::counter::Counter::MAX;
    counter.set(most).await.unwrap();
    assert_eq!(kind(counter.add(1).await), ErrorKind::Config);
    assert_eq!(counter.get().await.unwrap().count, most);
    // After a lost answer, a refusal says nothing about the first try, so the outcome is unknown.
    kit.lose_next_reply(Verb::Count);
    kit.fail_next(Verb::Count, Fault::Refused);
    assert_eq!(kind(counter.set(1).await), ErrorKind::Unknown);
    assert_eq!(counter.get().await.unwrap().count, 1);
}

/// Answers that many changes with a conflict.
#[derive(Debug)]
struct Contended {
    connection: Arc<dyn Connection>,
    conflicts: Arc<AtomicUsize>,
}

impl Connection for Contended {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.connection)
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        let less = |left: usize| left.checked_sub(1);
        match self
            .conflicts
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less)
        {
            Ok(_) => {
                let error = backend::StoreError::conflict("another client was faster");
                Box::pin(std::future::ready(Err(error)))
            }
            Err(_) => self.connection.count(count),
        }
    }
}

/// The pauses between the attempts take longer than the operation timeout.
async fn a_change_that_others_are_in_the_way_of_is_repeated_for_the_whole_wait(_: Store) {
    const ATTEMPTS: usize = 12;
    let op_timeout = Duration::from_millis(100);
    let conflicts = Arc::<AtomicUsize>::default();
    let all = Arc::clone(&conflicts);
    let store = around(Arc::new(Kit::new()), move |connection| Contended {
        connection,
        conflicts: Arc::clone(&all),
    });
    let builder = Locks::builder().backend(store).op_timeout(op_timeout);
    let counter = builder.build().unwrap().counter("a");
    for (wait, value) in [(Wait::For(10 * SOON), 1), (Wait::Forever, 2)] {
        conflicts.store(ATTEMPTS, Ordering::SeqCst);
        let began = Instant::now();

        let added = soon(counter.clone().wait(wait).add(1)).await.unwrap();

        assert_eq!(added.count, value);
        assert!(began.elapsed() > op_timeout);
    }
    conflicts.store(usize::MAX, Ordering::SeqCst);
    let impatient = soon(counter.wait(Duration::ZERO).add(1)).await.unwrap_err();
    assert_eq!(impatient.kind(), ErrorKind::Unavailable);
    assert!(
        impatient.to_string().contains("another client"),
        "{impatient}"
    );
}

/// Notes how many answered changes each attempt of a change tells the store.
#[derive(Debug)]
struct Lists {
    connection: Arc<dyn Connection>,
    told: Arc<Mutex<Vec<usize>>>,
}

impl Connection for Lists {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.connection)
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        self.told.lock().unwrap().push(count.answered.len());
        self.connection.count(count)
    }
}

async fn an_attempt_that_fails_leaves_its_list_of_answered_changes_to_the_next(_: Store) {
    let kit = Kit::new();
    let told = Arc::<Mutex<Vec<usize>>>::default();
    let lists = Arc::clone(&told);
    let store = around(Arc::new(kit.clone()), move |connection| Lists {
        connection,
        told: Arc::clone(&lists),
    });
    let locks = Locks::builder().op_timeout(STALL).backend(store);
    let counter = locks.build().unwrap().counter("a");
    counter.add(1).await.unwrap();

    kit.fail_next(Verb::Count, Fault::Retry);
    counter.add(1).await.unwrap();
    kit.fail_next(Verb::Count, Fault::Refused);
    assert_eq!(kind(counter.add(1).await), ErrorKind::Unavailable);
    assert_eq!(counter.add(1).await.unwrap().count, 3);

    assert_eq!(*told.lock().unwrap(), [0, 1, 1, 1, 1]);
}

/// Counts the reads of counters, and the calls of `watch` and `unwatch`.
#[derive(Debug)]
struct Watched {
    connection: Arc<dyn Connection>,
    spent: Arc<Spent>,
}

#[derive(Debug, Default)]
struct Spent {
    counts: AtomicUsize,
    watches: AtomicUsize,
    unwatches: AtomicUsize,
}

impl Spent {
    fn all(&self) -> [usize; 3] {
        [&self.counts, &self.watches, &self.unwatches].map(|spent| spent.load(Ordering::SeqCst))
    }
}

impl Connection for Watched {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.connection)
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        self.spent.counts.fetch_add(1, Ordering::SeqCst);
        self.connection.count(count)
    }

    fn watch(&self, name: Name) -> Answer<()> {
        self.spent.watches.fetch_add(1, Ordering::SeqCst);
        self.connection.watch(name)
    }

    fn unwatch(&self, name: Name) -> Answer<()> {
        self.spent.unwatches.fetch_add(1, Ordering::SeqCst);
        self.connection.unwatch(name)
    }
}

/// A client whose requests are counted, and another one of the same store.
fn counted() -> (Locks, Arc<Spent>, Locks) {
    let kit = Kit::new();
    let spent = Arc::<Spent>::default();
    let counts = Arc::clone(&spent);
    let store = around(Arc::new(kit.clone()), move |connection| Watched {
        connection,
        spent: Arc::clone(&counts),
    });
    let locks = Locks::builder().op_timeout(STALL).backend(store);
    (
        locks.build().unwrap(),
        spent,
        kit.client_with(Locks::builder()).unwrap(),
    )
}

async fn waiters_in_one_process_cost_one_watch_and_one_read_for_each_change(_: Store) {
    const WAITERS: u32 = 100;
    let (locks, spent, other) = counted();
    let latch = other.latch("a");
    assert!(latch.try_set(3).await.unwrap());
    let mut waiters = tokio::task::JoinSet::new();
    let waiting = Arc::new(Semaphore::new(0));
    for _ in 0..WAITERS {
        let (latch, waiting) = (locks.latch("a"), Arc::clone(&waiting));
        waiters.spawn(async move {
            let mut opens = Box::pin(latch.wait_for_zero());
            tokio::select! {
                biased;
                outcome = &mut opens => return outcome,
                () = std::future::ready(()) => {}
            }
            waiting.add_permits(1);
            opens.await
        });
    }
    let _all_wait = waiting.acquire_many(WAITERS).await.unwrap();
    let mut changes = locks.counter("a").changes();
    assert_eq!(soon(changes.next()).await.unwrap().count, 3);
    eventually("it is watched", SOON, async || spent.all()[1] == 1).await;

    let [before, ..] = spent.all();
    for left in [2, 1, 0] {
        assert_eq!(latch.count_down().await.unwrap(), left);
        while soon(changes.next()).await.unwrap().count != left as i64 {}
    }
    for outcome in soon(waiters.join_all()).await {
        outcome.unwrap();
    }
    let [reads, watches, _] = spent.all();
    assert_eq!(watches, 1);
    // If a change comes during a read, another read follows. So each change costs at most two
    // reads. The last waiter and the watch cost one each.
    assert!(reads - before <= 2 * 3 + 2, "{before} + {}", reads - before);
    drop(changes);
    eventually("it is watched no more", SOON, async || spent.all()[2] == 1).await;
}

async fn a_late_waiter_costs_one_read(_: Store) {
    let (locks, spent, other) = counted();
    other.latch("a").reset().await.unwrap();
    soon(locks.latch("a").wait_for_zero()).await.unwrap();
    assert_eq!(spent.all(), [1, 0, 0]);
}

async fn a_waiter_learns_of_a_change_that_came_while_it_was_cut_off(_: Store) {
    let kit = Kit::new();
    let there = kit.another_process();
    let locks = there.client().unwrap();
    let latch = kit.client().unwrap().latch("a");
    for _ in 0..10 {
        assert!(latch.try_set(2).await.unwrap());
        let mut changes = locks.counter("a").changes();
        assert_eq!(soon(changes.next()).await.unwrap().count, 2);
        let waits = tokio::spawn({
            let latch = locks.latch("a");
            async move { latch.wait_for_zero().await }
        });
        latch.count_down().await.unwrap();
        assert_eq!(soon(changes.next()).await.unwrap().count, 1);

        there.freeze();
        latch.count_down().await.unwrap();
        there.break_connections();
        there.thaw();

        soon(waits).await.unwrap().unwrap();
    }
}

async fn a_latch_that_a_store_has_lost_does_not_open(_: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    assert!(locks.latch("a").try_set(1).await.unwrap());
    let mut changes = locks.counter("a").changes();
    assert_eq!(soon(changes.next()).await.unwrap().count, 1);
    let latch = locks.latch("a");
    let mut waits = Box::pin(latch.wait_for_zero());
    // The first change may have been shown by a look that began before this waiter came. The second
    // change cannot: its look began later. The waiter is polled first, so it has seen that look
    // too.
    tokio::select! {
        biased;
        outcome = &mut waits => panic!("{outcome:?}"),
        () = async {
            for value in [2, 3] {
                locks.counter("a").add(1).await.unwrap();
                assert_eq!(soon(changes.next()).await.unwrap().count, value);
            }
        } => {}
    }

    kit.lose_data();
    kit.break_connections();

    let error = soon(waits).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("it has lost data"), "{error}");
}

async fn a_latch_that_is_not_set_does_not_open(_: Store) {
    let kit = Kit::new();
    let latch = kit.client().unwrap().latch("a");
    for _ in 0..2 {
        let error = soon(latch.wait_for_zero()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("nobody has set"), "{error}");
        // This changes nothing, because the latch is at zero.
        assert_eq!(latch.count_down().await.unwrap(), 0);
    }

    latch.reset().await.unwrap();

    soon(latch.wait_for_zero()).await.unwrap();
}

/// After its time, a counter is at zero, and a latch is not set. An open latch is kept too.
async fn a_latch_and_a_counter_are_kept_for_as_long_as_they_are_to_be(_: Store) {
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    let kit = Kit::new();
    kit.clock().stop();
    for (keep, days) in [(None, 30), (Some(2 * DAY), 2), (Some(3_000 * DAY), 3_000)] {
        let locks = kit.client().unwrap();
        let names =
            [("shut", 3), ("open", 1)].map(|(name, count)| (format!("{name} {days}"), count));
        let counter = locks.counter(format!("counter {days}"));
        let counter = keep.map_or(counter.clone(), |keep| counter.keep(keep));
        counter.add(1_000).await.unwrap();
        for (name, count) in &names {
            let latch = locks.latch(name.as_str());
            let latch = keep.map_or(latch.clone(), |keep| latch.keep(keep));
            assert!(latch.try_set(*count).await.unwrap());
        }
        let [shut, open] = names.map(|(name, _)| locks.latch(name).wait(Duration::ZERO));
        open.count_down().await.unwrap();

        // Every request counts as a use.
        for _ in 0..2 {
            kit.clock().advance(days * DAY - Duration::from_secs(1));
            assert_eq!(shut.count().await.unwrap(), 3);
            let is_open = locks.counter(format!("open {days}")).get().await.unwrap();
            assert!(is_open.count == 0 && is_open.version > 0, "{is_open:?}");
            assert_eq!(counter.get().await.unwrap().count, 1_000);
        }
        kit.clock().advance(days * DAY);

        assert_eq!(counter.add(1).await.unwrap().count, 1);
        for latch in [shut, open] {
            let gone = soon(latch.wait_for_zero()).await;
            assert_eq!(kind(gone), ErrorKind::Unavailable);
        }
    }
}

async fn a_time_for_which_nothing_can_be_kept_is_refused(_: Store) {
    let locks = Kit::new().client().unwrap();
    for keep in [Duration::ZERO, Duration::from_secs(59), Duration::MAX] {
        let counter = locks.counter("a").keep(keep);
        let error = counter.add(1).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{keep:?}");
        assert!(
            error.to_string().contains("a minute to 100 years"),
            "{error}"
        );
        let set = locks.latch("a").keep(keep).try_set(1).await;
        assert_eq!(kind(set), ErrorKind::Config);
    }
    assert_eq!(locks.counter("a").get().await.unwrap().version, 0);
}

async fn a_latch_that_does_not_open_in_time_is_a_timeout(_: Store) {
    let kit = Kit::new();
    let patient = Locks::builder().op_timeout(SOON / 2);
    let locks = kit.client_with(patient).unwrap();
    let latch = locks.latch("a");
    assert!(latch.try_set(1).await.unwrap());
    let brief = latch.clone().wait(Duration::from_secs(4));
    let error = soon(brief.wait_for_zero()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("still not at zero"), "{error}");

    kit.freeze();
    let latch = locks.latch("b").wait(Duration::from_millis(50));
    let waited = soon(latch.wait_for_zero()).await;
    assert_eq!(kind(waited), ErrorKind::Unavailable);
    for wrong in [0, u64::MAX] {
        assert_eq!(kind(latch.try_set(wrong).await), ErrorKind::Config);
        assert_eq!(kind(latch.count_down_by(wrong).await), ErrorKind::Config);
    }
    let unusable = locks.latch("").wait_for_zero().await;
    assert_eq!(kind(unusable), ErrorKind::Config);
}

/// The clock stands still, so the call does not wait for the end of any time.
async fn a_latch_whose_caller_does_not_wait_costs_one_read(_: Store) {
    let kit = Kit::new();
    let latch = kit.client().unwrap().latch("a").wait(Duration::ZERO);
    let (counted, spent, other) = counted();
    let is_read = counted.latch("a").wait(Duration::ZERO);
    assert!(other.latch("a").try_set(1).await.unwrap());
    assert!(latch.try_set(1).await.unwrap());
    kit.clock().stop();

    let error = soon(latch.wait_for_zero()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert_eq!(error.name(), Some("a"));
    latch.count_down().await.unwrap();
    soon(latch.wait_for_zero()).await.unwrap();

    assert_eq!(
        kind(soon(is_read.wait_for_zero()).await),
        ErrorKind::Timeout
    );
    assert_eq!(spent.all(), [1, 0, 0]);

    kit.fail_next(Verb::Count, Fault::Refused);
    assert_eq!(
        kind(soon(latch.wait_for_zero()).await),
        ErrorKind::Unavailable
    );
}

async fn a_shutdown_ends_the_waiting(_: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    let latch = locks.latch("a");
    assert!(latch.try_set(1).await.unwrap());
    let mut changes = locks.counter("a").changes();
    assert_eq!(soon(changes.next()).await.unwrap().count, 1);
    let waits = latch.clone();
    let waits = tokio::spawn(async move { waits.wait_for_zero().await });
    soon(locks.shutdown(SOON)).await.unwrap();

    let shut_down = ErrorKind::Lost(LostReason::Shutdown);
    assert_eq!(kind(soon(waits).await.unwrap()), shut_down);
    assert_eq!(kind(soon(changes.next()).await), shut_down);
    assert_eq!(kind(latch.count_down().await), shut_down);
}

async fn waiters_that_are_dropped_leave_no_watch(_: Store) {
    let (locks, spent, other) = counted();
    assert!(other.latch("a").try_set(1).await.unwrap());
    for round in 1..=20 {
        let latch = locks.latch("a");
        let mut waits = Box::pin(latch.wait_for_zero());
        tokio::select! {
            outcome = &mut waits => panic!("{outcome:?}"),
            () = async {
                eventually("it is watched", SOON, async || spent.all()[1] == round).await;
            } => {}
        }
        drop(waits);
        eventually("it is watched no more", SOON, async || {
            spent.all()[2] == round
        })
        .await;
    }
}

async fn a_store_without_counters_says_so(_: Store) {
    #[derive(Debug)]
    struct Without(Arc<dyn Connection>);

    impl Connection for Without {
        fn inner(&self) -> Option<&Arc<dyn Connection>> {
            Some(&self.0)
        }

        fn count(&self, count: Arc<Count>) -> Answer<Counted> {
            let error = backend::StoreError::new(
                Fault::Config,
                format!("{}: this store has no counters", count.name),
            );
            Box::pin(std::future::ready(Err(error)))
        }
    }

    let memory = backend::open("memory:").unwrap();
    let locks = Locks::with_backend(around(memory, Without)).unwrap();
    for error in [
        locks.counter("a").add(1).await.unwrap_err(),
        soon(locks.latch("a").wait_for_zero()).await.unwrap_err(),
        soon(locks.counter("a").changes().next()).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("has no counters"), "{error}");
    }
}

async fn a_client_that_is_shut_down_asks_nothing_about_a_counter(_: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    let counter = locks.counter("a");
    counter.add(1).await.unwrap();
    locks.shutdown(SOON).await.unwrap();

    for error in [
        counter.add(1).await.unwrap_err(),
        counter.get().await.unwrap_err(),
        locks.latch("a").count_down().await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Lost(LostReason::Shutdown));
        assert!(!error.was_held());
        assert!(error.to_string().contains("not carried out"), "{error}");
    }
    let later = kit.another_process().client().unwrap();
    assert_eq!(later.counter("a").get().await.unwrap().count, 1);
}
