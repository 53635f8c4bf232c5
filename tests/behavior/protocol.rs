//! Which requests the core sends to a store, in which order, and how it reacts to each answer. Where the content of
//! requests matters, the test plays the store. Where only their time matters, the facts use the library's own store for
//! tests with a stopped clock.

mod player;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use libtest_mimic::Trial;
use lockcore::backend::{Capability, Enqueued, Fault, Released, Renewed, Request, StoreError};
use lockcore::testing::{Hold, Store as Kit, Verb};
use lockcore::{ErrorKind, Event, Fair, Locks, LostReason, Release, Wait};
use tests::eventually::eventually;
use tracing::Level;

use self::player::{Asked, Player, granted, played, played_with, waiting, wire};
use crate::store::{Kind, SOON, Store, begin, give_back, kind, tickets};
use crate::traces::{self, LOGGED};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        an_abandoned_request_is_released_after_its_reply_and_not_before
        an_abandoned_request_that_is_never_answered_leaves_a_mark
        a_refusal_does_not_settle_an_earlier_try_of_an_abandoned_request
        a_ticket_that_a_denied_request_may_have_left_is_given_back
        a_request_that_was_denied_from_the_start_leaves_nothing_to_give_back
        a_release_leaves_a_mark_when_an_earlier_try_is_still_under_way
        an_unanswered_try_makes_the_outcome_unknown_with_any_next_answer
        a_grant_that_arrives_after_its_end_is_not_handed_out
        a_renewed_lease_counts_from_the_send_of_the_renewal
        an_ensured_lease_counts_from_the_send_of_the_renewal
        a_renewal_goes_out_after_a_third_of_the_lease
        a_place_in_line_that_has_aged_is_renewed_before_it_is_handed_out
        a_waiter_asks_again_each_time_the_holders_lease_may_be_over
        a_lease_that_is_being_released_is_not_renewed
        an_acknowledgement_that_comes_after_the_deadline_leads_to_a_release
        clients_that_lost_their_connections_do_not_come_back_all_at_once
        after_a_gap_a_client_rechecks_a_hundred_tickets_at_a_time
        after_a_gap_many_leases_are_rechecked_in_bounded_steps
        a_release_that_the_store_leaves_out_is_repeated
        a_renewal_that_the_store_leaves_out_is_repeated
        a_ticket_that_cannot_be_renewed_is_one_warning_while_others_are_renewed
        a_late_answer_replaces_no_connection_on_which_others_are_answered
        requests_beyond_the_limit_of_a_store_wait_and_a_release_passes_them
        a_renewal_passes_the_requests_that_wait
        requests_of_futures_that_are_not_polled_keep_nobody_out
        an_enqueue_of_a_future_that_is_not_polled_keeps_no_try_out
        a_place_that_is_lost_while_its_future_is_not_polled_goes_to_the_next
        a_break_is_followed_by_one_connection
        a_listener_hears_that_the_store_is_back_though_nobody_asks
        a_listener_that_comes_during_an_outage_is_told_of_it
        after_a_loss_of_data_nothing_is_passed_on_before_the_store_was_asked
        a_ticket_is_passed_on_again_when_the_store_has_confirmed_it
    ]
}

const TTL: Duration = Duration::from_secs(1);

/// A client of a store with a stopped clock.
fn kit() -> (Kit, Locks) {
    let kit = Kit::new();
    kit.clock().stop();
    let locks = kit.client().unwrap();
    (kit, locks)
}

async fn abandon<T>(task: tokio::task::JoinHandle<T>) {
    task.abort();
    assert!(task.await.is_err_and(|ended| ended.is_cancelled()));
}

/// A release that overtook its enqueue would leave a lock that nobody uses.
async fn an_abandoned_request_is_released_after_its_reply_and_not_before(_: Store) {
    let (locks, mut store) = played();
    drop(store.grant(&locks.mutex("warm")).await);
    store.release().await; // the keeper is connected
    let other = store.grant(&locks.mutex("other")).await;
    let task = begin(locks.mutex("a"));
    let (request, reply) = store.enqueue().await;

    abandon(task).await;
    // The keeper does clean-ups in order. A release for the first request would have come before this one.
    drop(other);
    assert_eq!(store.release().await.request.name.as_str(), "other");
    reply.send(Ok(granted(TTL))).unwrap();

    let departure = store.release().await;
    assert_eq!(departure.request.id, request.id);
    assert!(
        !departure.enqueue_may_follow,
        "the reply was here: no mark is needed"
    );
}

async fn an_abandoned_request_that_is_never_answered_leaves_a_mark(_: Store) {
    let (locks, mut store) = played();
    let task = begin(locks.mutex("a"));
    let (request, _never_answered) = store.enqueue().await;

    abandon(task).await;

    let departure = store.release().await;
    assert_eq!(departure.request.id, request.id);
    assert!(departure.enqueue_may_follow);
}

async fn a_refusal_does_not_settle_an_earlier_try_of_an_abandoned_request(_: Store) {
    let refusals = [
        Ok(Enqueued::Busy { retry_in: None }),
        Err(StoreError::new(Fault::Refused, "full")),
    ];
    for refusal in refusals {
        let (locks, mut store) = played();
        let task = begin(locks.mutex("a"));
        let (request, lost) = store.enqueue().await;
        drop(lost);
        let (again, reply) = store.enqueue().await;
        assert_eq!(again.id, request.id);

        abandon(task).await;
        reply.send(refusal).unwrap();

        let departure = store.release().await;
        assert_eq!(departure.request.id, request.id);
        assert!(departure.enqueue_may_follow);
    }
}

/// A right may be taken away while a script is running.
async fn a_ticket_that_a_denied_request_may_have_left_is_given_back(_: Store) {
    for dropped in [false, true] {
        let (locks, mut store) = played();
        let task = begin(locks.mutex("a"));
        let (request, reply) = store.enqueue().await;
        let denied = Err(StoreError::halfway("denied"));
        if dropped {
            abandon(task).await;
            reply.send(denied).unwrap();
        } else {
            reply.send(denied).unwrap();
            assert_eq!(kind(task.await.unwrap()), ErrorKind::Config);
        }

        let departure = store.release().await;
        assert_eq!(departure.request.id, request.id);
        assert!(!departure.enqueue_may_follow, "it was answered");
    }
}

/// If the keeper tried to release it, that could be denied too, and on a store with sessions without end.
async fn a_request_that_was_denied_from_the_start_leaves_nothing_to_give_back(_: Store) {
    for dropped in [false, true] {
        let (locks, mut store) = played();
        let task = begin(locks.mutex("a"));
        let (_, reply) = store.enqueue().await;
        let denied = Err(StoreError::new(Fault::Config, "denied"));
        if dropped {
            abandon(task).await;
            reply.send(denied).unwrap();
        } else {
            reply.send(denied).unwrap();
            assert_eq!(kind(task.await.unwrap()), ErrorKind::Config);
        }

        locks.shutdown(SOON).await.unwrap();

        let asked = store.asked.try_recv();
        assert!(asked.is_err(), "{asked:?}");
    }
}

async fn a_ticket_that_cannot_be_renewed_is_one_warning_while_others_are_renewed(store: Store) {
    let owner = format!("{LOGGED}{}:renewals", store.namespace);
    let (wire, mut store) = wire(Capability::new());
    let locks = Locks::builder()
        .backend(wire)
        .owner(&owner)
        .build()
        .unwrap();
    let lock = |name: &str, ttl| locks.mutex(name).ttl(ttl);
    let refused = store.grant(&lock("refused", 9 * TTL)).await;
    let renewed = store.grant(&lock("renewed", 3 * TTL)).await;
    let warnings = || {
        let lines = traces::lines(&owner).into_iter();
        let warnings = lines.filter(|line| line.level == Level::WARN);
        warnings.map(|line| line.text).collect::<Vec<_>>()
    };

    let (mut failures, mut between) = (0, 0);
    while failures < 8 || between < 2 {
        let (tickets, reply) = store.renewal().await;
        let answer = |ticket: &Arc<Request>| match ticket.name.as_str() {
            "refused" => Renewed::Failed,
            _ => Renewed::Granted {
                valid_for: ticket.ttl,
            },
        };
        let answers: Vec<_> = tickets.iter().map(answer).collect();
        failures += u32::from(answers.contains(&Renewed::Failed));
        between += u32::from(failures > 2 && answers != [Renewed::Failed]);
        reply.send(Ok(answers)).unwrap();
    }
    // Log lines are written in order, so all lines about the refusals come before this one.
    let over = |text: &String| text.contains("accepts renewals again");
    while !warnings().iter().any(over) {
        let (tickets, reply) = store.renewal().await;
        let answer = |ticket: &Arc<Request>| Renewed::Granted {
            valid_for: ticket.ttl,
        };
        reply
            .send(Ok(tickets.iter().map(answer).collect()))
            .unwrap();
    }
    let told = warnings();
    let [refused_once, _] = &told[..] else {
        panic!("{told:#?}");
    };
    assert!(
        refused_once.contains("refuses renewals") && refused_once.contains("\"refused\""),
        "{told:?}"
    );

    drop((refused, renewed));
    let mut left = 2;
    while left > 0 {
        match store.next().await {
            Asked::Release(tickets, reply) => {
                left -= tickets.len();
                let answers = vec![Released::Released; tickets.len()];
                reply.send(Ok(answers)).unwrap();
            }
            Asked::Renew(tickets, reply) => {
                reply
                    .send(Ok(vec![Renewed::Failed; tickets.len()]))
                    .unwrap();
            }
            other => panic!("nobody asked for {other:?}"),
        }
    }
}

async fn a_release_leaves_a_mark_when_an_earlier_try_is_still_under_way(_: Store) {
    for dropped in [false, true] {
        let (locks, mut store) = played();
        let task = begin(locks.mutex("a"));
        drop(store.enqueue().await); // the connection breaks in the first try
        let (request, reply) = store.enqueue().await;
        reply.send(Ok(granted(request.ttl))).unwrap();
        let guard = task.await.unwrap().unwrap();

        let departure = if dropped {
            drop(guard);
            store.release().await
        } else {
            let (released, departure) = tokio::join!(guard.release(), store.release());
            assert_eq!(released.unwrap(), Release::Released);
            departure
        };

        assert!(departure.enqueue_may_follow, "dropped: {dropped}");
    }
}

async fn an_unanswered_try_makes_the_outcome_unknown_with_any_next_answer(_: Store) {
    let (locks, mut store) = played();
    let task = begin(locks.mutex("a"));
    drop(store.enqueue().await); // the connection breaks in the first try
    let (_, reply) = store.enqueue().await;
    reply
        .send(Err(StoreError::new(Fault::Refused, "full")))
        .unwrap();

    let error = task.await.unwrap().unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Unknown);
    assert!(error.may_hold());
    assert!(store.release().await.enqueue_may_follow);
}

async fn a_grant_that_arrives_after_its_end_is_not_handed_out(_: Store) {
    let (kit, locks) = kit();
    let mut late = kit.hold_next(Verb::Enqueue);
    let task = begin(locks.mutex("a").ttl(Duration::from_millis(100)));
    late.arrived().await;

    kit.clock().advance(Duration::from_millis(100));
    late.let_go();

    // The old ticket is released and a new one is taken, in either order.
    let guard = task.await.unwrap().unwrap();
    assert!(guard.is_valid());
    tickets(&locks, "a", 1).await;
    give_back(guard).await;
}

async fn a_renewed_lease_counts_from_the_send_of_the_renewal(_: Store) {
    let (kit, locks) = kit();
    let guard = locks.mutex("a").ttl(10 * TTL).acquire().await.unwrap();
    let whole = guard.remaining();
    let mut renewal = kit.hold_next(Verb::Renew);
    kit.clock().advance(5 * TTL);
    renewal.arrived().await;

    let late = Duration::from_millis(900);
    kit.clock().advance(late);
    let before = guard.remaining();
    renewal.let_go();

    eventually("the renewal is worked in", SOON, async || {
        guard.remaining() > before
    })
    .await;
    assert_eq!(guard.remaining(), whole - late);
}

/// The same for a renewal that the caller requests.
async fn an_ensured_lease_counts_from_the_send_of_the_renewal(_: Store) {
    let (kit, locks) = kit();
    let lock = locks.mutex("a").ttl(10 * TTL).renew(false);
    let guard = lock.acquire().await.unwrap();
    let whole = guard.remaining();
    kit.clock().advance(5 * TTL);
    let mut renewal = kit.hold_next(Verb::Renew);
    let late = Duration::from_millis(900);

    let (outcome, ()) = tokio::join!(guard.ensure(whole), async {
        renewal.arrived().await;
        kit.clock().advance(late);
        renewal.let_go();
    });

    assert_eq!(kind(outcome), ErrorKind::Unavailable);
    assert_eq!(guard.remaining(), whole - late);
}

/// So two renewals may fail before the lease is in danger.
async fn a_renewal_goes_out_after_a_third_of_the_lease(_: Store) {
    let (kit, locks) = kit();
    let guard = locks.mutex("a").ttl(30 * TTL).acquire().await.unwrap();
    for _ in 0..2 {
        let mut renewal = kit.hold_next(Verb::Renew);
        // A third of the ttl is 10 s. Drift allowance and jitter are 1.3 s at most.
        kit.clock().advance(Duration::from_millis(8600));
        // When this is released, the keeper has looked at the clock.
        drop(locks.mutex("other").acquire().await.unwrap());
        tickets(&locks, "other", 0).await;
        tokio::select! {
            biased;
            () = renewal.arrived() => panic!("renewed with {:?} left", guard.remaining()),
            () = std::future::ready(()) => {}
        }

        kit.clock().advance(Duration::from_millis(1400));
        renewal.arrived().await;
        let before = guard.remaining();
        renewal.let_go();
        eventually("it is renewed", SOON, async || guard.remaining() > before).await;
    }
}

/// A hand-over needs only the wake-up, if enough of the ticket's lease is left.
async fn a_place_in_line_that_has_aged_is_renewed_before_it_is_handed_out(_: Store) {
    let (kit, locks) = kit();
    let holder = locks.mutex("a").ttl(100 * TTL).acquire().await.unwrap();
    let theirs = kit.another_process();
    let lock = theirs.client().unwrap().mutex("a").ttl(10 * TTL);
    let waiter = begin(lock.wait(Wait::Forever));
    tickets(&locks, "a", 2).await;
    let mut unanswered = theirs.hold_next(Verb::Renew);
    kit.clock().advance(6 * TTL);
    unanswered.arrived().await;

    give_back(holder).await;

    // Without the renewal, it would have two fifths left.
    let guard = waiter.await.unwrap().unwrap();
    assert!(guard.remaining() > 9 * TTL, "{:?}", guard.remaining());
}

/// A dead holder sends nothing. The waiter rechecks when the holder's lease should be over, again if it was renewed in
/// between.
async fn a_waiter_asks_again_each_time_the_holders_lease_may_be_over(_: Store) {
    let (locks, mut store) = played();
    let _task = begin(locks.mutex("a").ttl(60 * TTL).wait(SOON));
    let recheck_in = Duration::from_millis(200);
    let (_, reply) = store.enqueue().await;
    let mut told = Instant::now();
    reply.send(Ok(waiting(60 * TTL, Some(recheck_in)))).unwrap();
    for _ in 0..3 {
        let (_, reply) = store.renewal().await;
        // The ordinary renewals are 20 s apart.
        let after = told.elapsed();
        assert!(
            after >= recheck_in * 9 / 10 && after < recheck_in + TTL,
            "{after:?}"
        );
        told = Instant::now();
        reply
            .send(Ok(vec![Renewed::Waiting {
                valid_for: 60 * TTL,
                recheck_in: Some(recheck_in),
            }]))
            .unwrap();
    }
}

/// A release first takes the lease out of later batches.
async fn a_lease_that_is_being_released_is_not_renewed(_: Store) {
    for dropped in [true, false] {
        let (locks, mut store) = played();
        let leaving = store.grant(&locks.mutex("leaving").ttl(TTL)).await;
        // A lease whose renewal is due at the same time as the other's.
        let _staying = store.grant(&locks.mutex("staying").ttl(TTL)).await;
        if dropped {
            drop(leaving);
        } else {
            tokio::spawn(leaving.release());
        }
        let Asked::Release(_, _not_answered_yet) = store.next().await else {
            panic!("not a release");
        };

        let (tickets, _) = store.renewal().await;

        let renewed: Vec<&str> = tickets
            .iter()
            .map(|request| request.name.as_str())
            .collect();
        assert_eq!(renewed, ["staying"], "dropped: {dropped}");
    }
}

async fn an_acknowledgement_that_comes_after_the_deadline_leads_to_a_release(_: Store) {
    let (kit, locks) = kit();
    let guard = locks.mutex("a").ttl(10 * TTL).acquire().await.unwrap();
    let end = guard.remaining();
    // The renewal is under way at the deadline, and is answered before the ticket ends at the store, which is later.
    let mut renewal = kit.hold_next(Verb::Renew);
    kit.clock().advance(end - Duration::from_millis(500));
    renewal.arrived().await;
    kit.clock().advance(Duration::from_millis(500));
    assert_eq!(guard.lost().await, LostReason::Expired);

    renewal.let_go();

    tickets(&locks, "a", 0).await;
    assert!(!guard.is_valid());
}

/// Each client reconnects within 20 ms, at a random time.
async fn clients_that_lost_their_connections_do_not_come_back_all_at_once(_: Store) {
    let (kit, locks) = kit();
    let holder = locks.mutex("a").acquire().await.unwrap();
    let theirs = kit.another_process();
    let clients: Vec<Locks> = (0..30).map(|_| theirs.client().unwrap()).collect();
    // The waiters stand in line at the store and send nothing. Each client reconnects on its own, after one pause.
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
    // All pauses have begun, on a stopped clock.
    let is_there = |hold: &mut Hold| hold.arrived().now_or_never().is_some();
    assert!(!is_there(&mut back[0]), "somebody comes without a pause");
    // Half of the longest pause.
    kit.clock().advance(Duration::from_millis(11));

    let first = tokio::time::timeout(SOON, back[0].arrived());
    first.await.expect("nobody comes before the longest pause");
    assert!(!is_there(back.last_mut().unwrap()), "all are back");
    kit.clock().advance(Duration::from_millis(11));
    let last = tokio::time::timeout(SOON, back.last_mut().unwrap().arrived());
    last.await.expect("somebody stays away");
    drop(holder);
}

/// A script at the store must stay short.
async fn after_a_gap_a_client_rechecks_a_hundred_tickets_at_a_time(_: Store) {
    let (locks, mut store) = played();
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
    let (locks, mut store) = played();
    let mut guards = Vec::new();
    for number in 0..2_000 {
        guards.push(store.grant(&locks.mutex(format!("n{number}"))).await);
    }
    let events = Arc::clone(&store.events.lock().unwrap()[0]);

    // Twice, as if two connections broke.
    events.gap();
    events.gap();

    let (mut under_way, mut asked) = (Vec::new(), 0);
    while asked < guards.len() {
        if under_way.is_empty() {
            under_way.push(store.next().await);
        }
        // And all further requests that arrive without an answer from the test.
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

fn still_granted(tickets: &[Arc<Request>]) -> Vec<Renewed> {
    let granted = tickets.iter().map(|request| Renewed::Granted {
        valid_for: request.ttl,
    });
    granted.collect()
}

/// A third-party store that answers for fewer tickets than it was asked about.
async fn a_release_that_the_store_leaves_out_is_repeated(_: Store) {
    let (locks, mut store) = played();
    drop(store.grant(&locks.mutex("a")).await);
    for _ in 0..2 {
        let Asked::Release(tickets, reply) = store.next().await else {
            panic!("not a release");
        };
        assert_eq!(tickets.len(), 1);
        reply.send(Ok(Vec::new())).unwrap();
    }
    store.release().await;
    locks.shutdown(SOON).await.unwrap();
}

async fn a_renewal_that_the_store_leaves_out_is_repeated(_: Store) {
    let (locks, mut store) = played();
    let guard = store.grant(&locks.mutex("a").ttl(TTL)).await;
    for _ in 0..2 {
        let (_, reply) = store.renewal().await;
        reply.send(Ok(Vec::new())).unwrap();
    }
    let (tickets, reply) = store.renewal().await;
    reply.send(Ok(still_granted(&tickets))).unwrap();
    eventually("it is renewed", SOON, async || guard.remaining() > TTL / 2).await;
}

async fn a_late_answer_replaces_no_connection_on_which_others_are_answered(_: Store) {
    let (locks, mut store) = played();
    let late = begin(locks.mutex("late").wait(SOON));
    let mut unanswered = vec![store.enqueue().await.1];
    let began = Instant::now();
    while began.elapsed() < 3 * TTL {
        let asking = begin(locks.mutex("prompt"));
        // The late request is repeated after an operation timeout.
        loop {
            match store.next().await {
                Asked::Enqueue(request, reply) if request.name.as_str() == "prompt" => {
                    let _ = reply.send(Ok(Enqueued::Busy { retry_in: None }));
                    break;
                }
                Asked::Enqueue(_, reply) => unanswered.push(reply),
                // The release of the caller that has given up.
                Asked::Release(_, reply) => reply.send(Ok(vec![Released::NotFound])).unwrap(),
                other @ Asked::Renew(..) => panic!("not an enqueue: {other:?}"),
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

async fn requests_beyond_the_limit_of_a_store_wait_and_a_release_passes_them(_: Store) {
    let (wire, mut store) = wire(Capability::new().in_flight(2));
    let may_take = Duration::from_secs(4);
    // A ttl so long that no renewal comes in between.
    let locks = Locks::builder().ttl(30 * may_take);
    let locks = locks.backend(wire).op_timeout(may_take).build().unwrap();
    let guard = store.grant(&locks.mutex("held")).await;
    let waits = 3 * may_take;
    let asking: Vec<_> = (0..4)
        .map(|number| begin(locks.mutex(format!("n{number}")).wait(waits)))
        .collect();
    let first = [store.enqueue().await, store.enqueue().await];
    let beyond = tokio::time::timeout(Duration::from_millis(200), store.next()).await;
    assert!(beyond.is_err(), "{beyond:?}");

    let releasing = tokio::spawn(guard.release());
    store.release().await;
    assert_eq!(releasing.await.unwrap().unwrap(), Release::Released);

    // The store is slow. The last request waits for longer than an operation may take, because it has not been sent.
    // Each request is sent once.
    let began = Instant::now();
    tokio::time::sleep(may_take * 2 / 5).await;
    for (request, reply) in first {
        reply.send(Ok(granted(request.ttl))).unwrap();
    }
    for _ in 0..2 {
        let (request, reply) = store.enqueue().await;
        tokio::time::sleep(may_take * 2 / 5).await;
        reply.send(Ok(granted(request.ttl))).unwrap();
    }
    assert!(began.elapsed() > may_take);
    for asked in asking {
        drop(asked.await.unwrap().unwrap());
        store.release().await;
    }
}

async fn a_renewal_passes_the_requests_that_wait(_: Store) {
    let (locks, mut store) = played_with(Capability::new().in_flight(1));
    let guard = store.grant(&locks.mutex("held").ttl(TTL)).await;
    let asking: Vec<_> = (0..4)
        .map(|number| begin(locks.mutex(format!("n{number}")).wait(SOON)))
        .collect();
    let (_, _unanswered) = store.enqueue().await;

    let (tickets, reply) = store.renewal().await;

    reply.send(Ok(still_granted(&tickets))).unwrap();
    eventually("it is renewed", SOON, async || guard.remaining() > TTL / 2).await;
    for asked in asking {
        asked.abort();
    }
}

/// Any number of requests may fail because of the break, and they or the connection's driver may report it first.
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
        // The drop below ends the driver of the connection.
        let events = store.events.lock().unwrap().pop();
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

    let clock = kit.clock().clone();
    let turning = tokio::spawn(async move {
        loop {
            clock.advance(Duration::from_millis(100));
            tokio::time::sleep(Duration::from_millis(1)).await; // lets the supervisor's pauses pass
        }
    });
    let next = tokio::time::timeout(SOON, events.recv()).await;
    assert_eq!(next.expect("nothing is told"), Some(Event::Suspended));
    let next = tokio::time::timeout(SOON, events.recv()).await;
    assert_eq!(next.expect("nothing is told"), Some(Event::Restored));
    turning.abort();
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
    let clock = kit.clock().clone();
    let turning = tokio::spawn(async move {
        loop {
            clock.advance(Duration::from_millis(10));
            tokio::time::sleep(Duration::from_millis(1)).await; // lets the supervisor's pauses pass
        }
    });
    again.arrived().await;
    turning.abort();
    again.let_go();
    for events in [&mut first, &mut late] {
        let next = tokio::time::timeout(SOON, events.recv()).await;
        assert_eq!(next.expect("nothing is told"), Some(Event::Restored));
    }
}

/// A client whose tasks may keep a lock among themselves for an hour.
fn keeps_its_own(kit: &Kit) -> Locks {
    let fair = Fair::Local(Duration::from_secs(3600));
    kit.client_with(Locks::builder().fair(fair)).unwrap()
}

/// Otherwise the next holders would have lower tokens than those that the store has given out since.
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

async fn requests_of_futures_that_are_not_polled_keep_nobody_out(_: Store) {
    let (locks, mut store) = played_with(Capability::new().in_flight(2));
    locks.ready(SOON).await.unwrap();
    let mut starved = Vec::new();
    for number in 0..2 {
        let lock = locks.mutex(format!("starved{number}"));
        let mut future = Box::pin(async move { lock.acquire().await });
        assert!(future.as_mut().now_or_never().is_none());
        let (request, reply) = store.enqueue().await;
        reply.send(Ok(granted(request.ttl))).unwrap();
        starved.push(future);
    }

    let asking: Vec<_> = (0..4)
        .map(|number| begin(locks.mutex(format!("n{number}")).wait(SOON)))
        .collect();

    for _ in &asking {
        let (_, reply) = store.enqueue().await;
        reply.send(Ok(Enqueued::Busy { retry_in: None })).unwrap();
    }
    for asked in asking {
        assert_eq!(kind(asked.await.unwrap()), ErrorKind::Busy);
    }
}

async fn an_enqueue_of_a_future_that_is_not_polled_keeps_no_try_out(_: Store) {
    let (locks, mut store) = played();
    locks.ready(SOON).await.unwrap();
    let lock = locks.mutex("a").ttl(TTL);
    let waits = lock.clone();
    let mut starved = Box::pin(async move { waits.acquire().await });
    assert!(starved.as_mut().now_or_never().is_none());
    let (_, _unanswered) = store.enqueue().await;

    let asked = eventually_asked(&lock, &mut store);

    let request = tokio::time::timeout(SOON, asked)
        .await
        .expect("it is busy for ever");
    assert_eq!(request.name.as_str(), "a");
}

/// Tries until a request arrives at the store.
async fn eventually_asked(lock: &lockcore::Lock, store: &mut Player) -> Arc<Request> {
    loop {
        let trying = lock.clone();
        let tried = tokio::spawn(async move { trying.try_acquire().await });
        tokio::select! {
            (request, reply) = store.enqueue() => {
                reply.send(Ok(Enqueued::Busy { retry_in: None })).unwrap();
                return request;
            }
            tried = tried => assert_eq!(kind(tried.unwrap()), ErrorKind::Busy),
        }
        tokio::time::sleep(Duration::from_millis(10)).await; // so that this is no tight loop
    }
}

async fn a_place_that_is_lost_while_its_future_is_not_polled_goes_to_the_next(_: Store) {
    let (locks, mut store) = played();
    locks.ready(SOON).await.unwrap();
    let lock = locks.mutex("a").ttl(TTL).wait(SOON);
    let waits = lock.clone();
    let mut starved = Box::pin(async move { waits.acquire().await });
    assert!(starved.as_mut().now_or_never().is_none());
    let (request, reply) = store.enqueue().await;
    let waiting = Enqueued::Waiting {
        ticket: 7,
        valid_for: request.ttl,
        recheck_in: None,
    };
    reply.send(Ok(waiting)).unwrap();
    assert!(starved.as_mut().now_or_never().is_none());
    let next = begin(lock);

    let (_, reply) = store.renewal().await;
    reply.send(Ok(vec![Renewed::Lost])).unwrap();

    let (request, reply) = store.enqueue().await;
    reply.send(Ok(granted(request.ttl))).unwrap();
    drop(next.await.unwrap().unwrap());
}
