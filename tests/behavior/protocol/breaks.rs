//! Tests with connections that break, events that are missed, and data that is lost: how a client
//! reconnects, and which tickets it renews after that.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use libtest_mimic::Trial;
use lockcore::backend::{Enqueued, Fault, Released, Renewed};
use lockcore::events::Event;
use lockcore::testing::{Hold, Store as Kit, Verb};
use lockcore::{ErrorKind, Fair, Locks};
use tests::eventually::eventually;

use super::player::{self, Asked, patient, played};
use super::{TTL, kit, still_granted};
use crate::store::{Kind, SOON, Store, begin, give_back, kind, soon, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        clients_that_lost_their_connections_do_not_come_back_all_at_once
        after_a_gap_a_client_rechecks_a_hundred_tickets_at_a_time
        after_a_gap_many_leases_are_rechecked_in_bounded_steps
        a_late_answer_replaces_no_connection_on_which_others_are_answered
        answers_that_come_when_their_callers_have_gone_keep_the_connection
        a_request_whose_caller_has_gone_shows_nothing_about_the_connection
        a_runtime_that_its_user_blocks_shows_nothing_about_the_connection
        short_waits_without_any_answer_replace_the_connection
        a_break_is_followed_by_one_connection
        a_listener_hears_that_the_store_is_back_though_nobody_asks
        a_listener_that_comes_during_an_outage_is_told_of_it
        after_a_loss_of_data_nothing_is_passed_on_before_the_store_was_asked
        a_ticket_is_passed_on_again_when_the_store_has_confirmed_it
    ]
}

/// Each client reconnects at a random time within 20 ms.
async fn clients_that_lost_their_connections_do_not_come_back_all_at_once(_: Store) {
    let (kit, locks) = kit();
    let holder = locks.mutex("a").acquire().await.unwrap();
    let theirs = kit.another_process();
    let clients: Vec<Locks> = (0..30).map(|_| theirs.client().unwrap()).collect();
    // The waiters are in line at the store, and their clients send nothing. Each client reconnects
    // by itself, after one pause.
    let _waiters: Vec<_> = clients
        .iter()
        .map(|client| begin(client.mutex("a")))
        .collect();
    tickets(&locks, "a", 1 + clients.len()).await;
    let mut back: Vec<_> = (clients.iter())
        .map(|_| theirs.hold_next(Verb::Connect))
        .collect();

    let mut events: Vec<_> = clients.iter().map(Locks::events).collect();

    theirs.break_connections();
    for client in &mut events {
        assert_eq!(client.recv().await, Some(Event::Suspended));
    }
    // All clients have begun their pauses. The clock stands still.
    let is_there = |hold: &mut Hold| hold.arrived().now_or_never().is_some();
    assert!(!is_there(&mut back[0]), "somebody comes without a pause");
    // This is half of the longest pause.
    kit.clock().advance(Duration::from_millis(11));

    let first = tokio::time::timeout(SOON, back[0].arrived());
    first.await.expect("nobody comes before the longest pause");
    assert!(!is_there(back.last_mut().unwrap()), "all are back");
    kit.clock().advance(Duration::from_millis(11));
    let last = tokio::time::timeout(SOON, back.last_mut().unwrap().arrived());
    last.await.expect("somebody stays away");
    drop(holder);
}

/// A script at the store must stay short, so a request has at most a hundred tickets.
async fn after_a_gap_a_client_rechecks_a_hundred_tickets_at_a_time(_: Store) {
    let (locks, mut store) = patient();
    let mut guards = Vec::new();
    for number in 0..250 {
        guards.push(store.grant(&locks.mutex(format!("n{number}"))).await);
    }
    let events = Arc::clone(&store.events.lock().unwrap()[0]);

    events.gap();

    let mut sizes = Vec::new();
    while sizes.iter().sum::<usize>() < guards.len() {
        let (tickets, reply) = store.renewal().await;
        sizes.push(tickets.len());
        let answers = tickets.iter().map(|request| Renewed::Granted {
            valid_for: request.ttl,
        });
        reply.send(Ok(answers.collect())).unwrap();
    }
    sizes.sort_unstable(); // they may be sent in any order
    assert_eq!(sizes, [50, 100, 100]);
}

async fn after_a_gap_many_leases_are_rechecked_in_bounded_steps(_: Store) {
    let (locks, mut store) = patient();
    let mut guards = Vec::new();
    for number in 0..2_000 {
        guards.push(store.grant(&locks.mutex(format!("n{number}"))).await);
    }
    let events = Arc::clone(&store.events.lock().unwrap()[0]);

    // The test reports two gaps, as if two connections had broken.
    events.gap();
    events.gap();

    let (mut under_way, mut asked) = (Vec::new(), 0);
    while asked < guards.len() {
        if under_way.is_empty() {
            under_way.push(store.next().await);
        }
        // All further requests that arrive before the test answers one of them.
        while let Ok(next) = tokio::time::timeout(Duration::from_millis(50), store.next()).await {
            under_way.push(next);
        }
        assert!((1..=8).contains(&under_way.len()), "{}", under_way.len());
        let Asked::Renew(tickets, reply) = under_way.remove(0) else {
            panic!("not a renewal");
        };
        asked += tickets.len();
        reply.send(Ok(still_granted(&tickets))).unwrap();
    }
}

async fn a_late_answer_replaces_no_connection_on_which_others_are_answered(_: Store) {
    let (locks, mut store) = played();
    let late = begin(locks.mutex("late").wait(SOON));
    let mut unanswered = vec![store.enqueue().await.1];
    let began = Instant::now();
    while began.elapsed() < 3 * TTL {
        let asking = begin(locks.mutex("prompt"));
        // After an operation timeout, the client repeats the late request.
        loop {
            match store.next().await {
                Asked::Enqueue(request, reply) if request.name.as_str() == "prompt" => {
                    let _ = reply.send(Ok(Enqueued::Busy { retry_in: None }));
                    break;
                }
                Asked::Enqueue(_, reply) => unanswered.push(reply),
                // The first caller gives up at some time, and its ticket is released.
                Asked::Release(_, reply) => reply.send(Ok(vec![Released::NotFound])).unwrap(),
                other => panic!("not an enqueue: {other:?}"),
            }
        }
        assert_eq!(kind(asking.await.unwrap()), ErrorKind::Busy);
    }
    assert_eq!(
        store.connections.lock().unwrap().len(),
        1,
        "it was replaced"
    );
    late.abort();
}

/// How long the callers of the next facts wait: far less than an operation may take (1 s).
const SHORT: Duration = Duration::from_millis(100);

/// A client whose connections are up. No further connection is opened as long as the `Hold` lives.
async fn connected() -> (Kit, Locks, Hold) {
    let (kit, locks) = kit();
    drop(locks.mutex("a").acquire().await.unwrap());
    tickets(&locks, "a", 0).await;
    let again = kit.hold_next(Verb::Connect);
    (kit, locks, again)
}

/// A caller asks for a lock and gives up before the store has got the request.
async fn gives_up(kit: &Kit, locks: &Locks) -> Hold {
    let mut enqueue = kit.hold_next(Verb::Enqueue);
    let asking = begin(locks.mutex("a").wait(SHORT));
    soon(enqueue.arrived()).await;
    kit.clock().advance(SHORT);
    assert_eq!(kind(soon(asking).await.unwrap()), ErrorKind::Unknown);
    enqueue
}

/// The store answers, but each answer is a little too late for its caller.
async fn answers_that_come_when_their_callers_have_gone_keep_the_connection(_: Store) {
    let (kit, locks, _again) = connected().await;

    for _ in 0..30 {
        let mut release = kit.hold_next(Verb::Release);
        gives_up(&kit, &locks).await.let_go();
        soon(release.arrived()).await; // the keeper has the answer
    }

    give_back(soon(locks.mutex("a").acquire()).await.unwrap()).await;
}

async fn a_request_whose_caller_has_gone_shows_nothing_about_the_connection(_: Store) {
    let (kit, locks, _again) = connected().await;
    let mut read = kit.hold_next(Verb::Inspect);
    let reading = locks.clone();
    let reading = tokio::spawn(async move { reading.inspect("a").await });
    soon(read.arrived()).await;
    reading.abort();
    assert!(reading.await.is_err());
    kit.clock().advance(Duration::from_secs(60));

    gives_up(&kit, &locks).await.let_go();

    give_back(soon(locks.mutex("a").acquire()).await.unwrap()).await;
}

/// The answer comes to a runtime that does not run. The caller has gone, so the keeper waits in its
/// place, for one operation timeout (1 s).
async fn a_runtime_that_its_user_blocks_shows_nothing_about_the_connection(_: Store) {
    let blocking = tokio::task::spawn_blocking(|| {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().unwrap();
        let (kit, locks, _again) = runtime.block_on(connected());
        let mut release = kit.hold_next(Verb::Release);
        let enqueue = runtime.block_on(async {
            let mut enqueue = kit.hold_next(Verb::Enqueue);
            let asking = begin(locks.mutex("a"));
            soon(enqueue.arrived()).await;
            asking.abort();
            assert!(asking.await.is_err());
            enqueue
        });

        // From here on the runtime does not run, until the keeper has stopped waiting.
        let keeper = tokio::runtime::Handle::current();
        keeper.block_on(async {
            eventually("the keeper stops waiting", SOON, || {
                kit.clock().advance(SHORT);
                let releases = release.arrived().now_or_never().is_some();
                async move { releases }
            })
            .await;
        });
        enqueue.let_go();
        release.let_go();

        let next = runtime.block_on(async {
            let next = locks.mutex("a").wait(SOON);
            tokio::time::timeout(SOON, next.acquire()).await
        });
        let next = next.expect("the connection was replaced").unwrap();
        runtime.block_on(give_back(next));
    });
    blocking.await.unwrap();
}

async fn short_waits_without_any_answer_replace_the_connection(_: Store) {
    let (kit, locks, again) = connected().await;
    let mut events = locks.events();
    let mut unanswered = Vec::new();

    // In total this is one operation timeout.
    for _ in 0..10 {
        assert_eq!(events.recv().now_or_never(), None, "too early");
        unanswered.push(gives_up(&kit, &locks).await);
    }

    assert_eq!(soon(events.recv()).await, Some(Event::Suspended));
    again.let_go();
}

/// Several requests may fail because of the break. One of them or the connection's driver may
/// report it first.
async fn a_break_is_followed_by_one_connection(_: Store) {
    let (locks, store) = played();
    let connections = || store.connections.lock().unwrap().len();
    locks.ready(SOON).await.unwrap();
    let mut asked = store.asked;
    let playing = tokio::spawn(async move {
        while let Some(next) = asked.recv().await {
            if let Asked::Enqueue(_, reply) = next {
                let _ = reply.send(Ok(Enqueued::Busy { retry_in: None }));
            }
        }
    });

    for round in 1..=100 {
        let before = connections();
        assert_eq!(before, round, "one too many");
        // Dropping these events ends the driver of the connection.
        let receiver = store.connections.lock().unwrap()[0];
        let events = player::last_of(&store.events, receiver);
        store.broken.store(round, Ordering::SeqCst);
        let asking: Vec<_> = (0..8)
            .map(|number| begin(locks.mutex(format!("n{number}")).wait(SOON)))
            .collect();
        drop(events);
        eventually("it is connected again", SOON, async || {
            connections() > before
        })
        .await;
        for asked in asking {
            let _ = asked.await.unwrap();
        }
    }
    playing.abort();
}

async fn a_listener_hears_that_the_store_is_back_though_nobody_asks(_: Store) {
    let (kit, locks) = kit();
    let mut events = locks.events();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    for _ in 0..3 {
        kit.fail_next(Verb::Connect, Fault::Retry);
    }

    kit.break_connections();

    let next = tokio::time::timeout(SOON, events.recv()).await;
    assert_eq!(next.expect("nothing is told"), Some(Event::Suspended));
    let mut next = None;
    eventually("it is told", SOON, || {
        kit.clock().advance(Duration::from_millis(100)); // lets the supervisor's pauses pass
        next = events.recv().now_or_never();
        ready(next.is_some())
    })
    .await;
    assert_eq!(next, Some(Some(Event::Restored)));
}

async fn a_listener_that_comes_during_an_outage_is_told_of_it(_: Store) {
    let (kit, locks) = kit();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let mut first = locks.events();
    let mut again = kit.hold_next(Verb::Connect);
    kit.break_connections();
    let next = tokio::time::timeout(SOON, first.recv()).await;
    assert_eq!(next.expect("nothing is told"), Some(Event::Suspended));

    let mut late = locks.events();

    assert_eq!(late.recv().await, Some(Event::Suspended));
    eventually("it connects again", SOON, || {
        kit.clock().advance(Duration::from_millis(10)); // lets the supervisor's pauses pass
        ready(again.arrived().now_or_never().is_some())
    })
    .await;
    again.let_go();
    for events in [&mut first, &mut late] {
        let next = tokio::time::timeout(SOON, events.recv()).await;
        assert_eq!(next.expect("nothing is told"), Some(Event::Restored));
    }
}

/// A client whose tasks may pass a lock on among themselves for an hour.
fn keeps_its_own(kit: &Kit) -> Locks {
    let fair = Fair::Local(Duration::from_secs(3600));
    kit.client_with(Locks::builder().fair(fair)).unwrap()
}

/// The store has lost the ticket, and another client has a newer one. If the old ticket were passed
/// on, its token would be lower than the newer one.
async fn after_a_loss_of_data_nothing_is_passed_on_before_the_store_was_asked(_: Store) {
    let kit = Kit::new();
    let (locks, elsewhere) = (keeps_its_own(&kit), kit.another_process().client().unwrap());
    let holder = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(locks.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    let mut renewal = kit.hold_next(Verb::Renew);
    kit.lose_data();
    kit.break_connections();
    renewal.arrived().await;
    let theirs = elsewhere.mutex("a").try_acquire().await.unwrap();

    drop(holder);

    tickets(&elsewhere, "a", 2).await;
    assert!(!waiter.is_finished(), "two are in");
    renewal.let_go();
    let before = theirs.fencing_token().unwrap();
    give_back(theirs).await;
    let next = waiter.await.unwrap().unwrap();
    assert!(next.fencing_token().unwrap() > before);
}

async fn a_ticket_is_passed_on_again_when_the_store_has_confirmed_it(_: Store) {
    let kit = Kit::new();
    let locks = keeps_its_own(&kit);
    let holder = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(locks.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    let before = holder.remaining();
    kit.clock().advance(Duration::from_secs(1));
    kit.break_connections();
    eventually("it is confirmed", SOON, async || {
        holder.remaining() + Duration::from_millis(500) > before
    })
    .await;

    let grant = holder.grant_id();
    drop(holder);

    let next = waiter.await.unwrap().unwrap();
    assert_eq!(
        next.grant_id().as_u64() >> 10,
        grant.as_u64() >> 10,
        "another ticket"
    );
}
