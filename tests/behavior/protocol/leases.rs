//! Tests of the times at which the client renews the ticket of a holder or of a waiter, rechecks a
//! ticket, and begins a lease.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::{Capability, Enqueued, Fault, Released, Renewed, Request, StoreError};
use lockcore::testing::Verb;
use lockcore::{ErrorKind, Locks, LostReason, Wait};
use tests::eventually::eventually;
use tracing::Level;

use super::player::{Asked, granted, patient, patient_with, played, played_with, waiting, wire};
use super::{TTL, is_not_renewed, kit, still_granted};
use crate::store::{Kind, SOON, Store, begin, give_back, kind, tickets};
use crate::traces::{self, LOGGED};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_grant_that_arrives_after_its_end_is_not_handed_out
        a_renewed_lease_counts_from_the_send_of_the_renewal
        an_ensured_lease_counts_from_the_send_of_the_renewal
        a_renewal_goes_out_after_a_third_of_the_lease
        a_place_in_line_that_has_aged_is_renewed_before_it_is_handed_out
        a_wake_up_that_a_store_does_not_stand_for_is_asked_about_until_it_is_answered
        wake_ups_that_a_store_does_not_stand_for_are_paced_and_compared
        a_batch_that_fails_with_a_lost_ticket_tells_the_loss_and_the_reason
        a_waiter_that_has_lost_its_place_is_not_refused_because_the_line_is_full
        a_waiter_asks_again_each_time_the_holders_lease_may_be_over
        a_lease_that_is_being_released_is_not_renewed
        the_release_of_an_extended_lease_has_the_longer_ttl
        an_acknowledgement_that_comes_after_the_deadline_leads_to_a_release
        a_renewal_that_the_store_leaves_out_is_repeated
        a_ticket_that_cannot_be_renewed_is_one_warning_while_others_are_renewed
    ]
}

async fn a_grant_that_arrives_after_its_end_is_not_handed_out(_: Store) {
    let (kit, locks) = kit();
    let mut late = kit.hold_next(Verb::Enqueue);
    let task = begin(locks.mutex("a").ttl(Duration::from_millis(100)));
    late.arrived().await;

    kit.clock().advance(Duration::from_millis(100));
    late.let_go();

    // The client releases the old ticket and takes a new one, in either order.
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

/// A lease that `ensure` renews also counts from the moment when the client sends the renewal.
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

/// The first renewal is sent when a third of the lease is over. So two renewals may fail before the
/// lease is in danger.
async fn a_renewal_goes_out_after_a_third_of_the_lease(_: Store) {
    let (kit, locks) = kit();
    let guard = locks.mutex("a").ttl(30 * TTL).acquire().await.unwrap();
    for _ in 0..2 {
        let mut renewal = kit.hold_next(Verb::Renew);
        // A third of the ttl is 10 s. Drift allowance and jitter make it at most 1.3 s less.
        kit.clock().advance(Duration::from_millis(8600));
        is_not_renewed(&locks, &guard, &mut renewal).await;

        kit.clock().advance(Duration::from_millis(1400));
        renewal.arrived().await;
        let before = guard.remaining();
        renewal.let_go();
        eventually("it is renewed", SOON, async || guard.remaining() > before).await;
    }
}

/// If enough of the ticket's lease is left, a hand-over needs only the wake-up. Here little is
/// left, so the waiter renews before it returns the guard.
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

    // If the waiter had not renewed the ticket, two fifths of the lease would be left.
    let guard = waiter.await.unwrap().unwrap();
    assert!(guard.remaining() > 9 * TTL, "{:?}", guard.remaining());
}

/// The store does not promise that a woken ticket holds. An example is a store that cannot tell at
/// once whether its replicas know of the grant. So the waiter renews its ticket until the store
/// answers.
async fn a_wake_up_that_a_store_does_not_stand_for_is_asked_about_until_it_is_answered(_: Store) {
    let (locks, mut store) = patient_with(Capability::new().wake_ups_grant(false));
    let task = begin(locks.mutex("a").ttl(60 * TTL).wait(SOON));
    let (request, reply) = store.enqueue().await;
    reply.send(Ok(waiting(60 * TTL, None))).unwrap();

    let valid_for = 60 * TTL;
    let no = Renewed::Waiting {
        valid_for,
        recheck_in: None,
        grace: None,
    };
    let unknown = || StoreError::halfway(Fault::Unknown, "not acknowledged");
    store.wake(request.id);
    let (_, reply) = store.renewal().await;
    reply.send(Ok(vec![no])).unwrap();
    store.wake(request.id);
    let (_, reply) = store.renewal().await;
    reply.send(Err(unknown())).unwrap();
    // The waiter renews again soon: its ordinary renewals are 20 s apart.
    let (_, reply) = store.renewal().await;
    assert!(!task.is_finished());
    reply
        .send(Ok(vec![Renewed::Granted { valid_for }]))
        .unwrap();

    drop(task.await.unwrap().unwrap());
}

/// Its old ticket may be in the line still, until the keeper has given it back. So may those of
/// other waiters of this client.
async fn a_waiter_that_has_lost_its_place_is_not_refused_because_the_line_is_full(_: Store) {
    let (locks, mut store) = played();
    let task = begin(locks.mutex("a").ttl(60 * TTL).wait(SOON));
    let (first, reply) = store.enqueue().await;
    reply
        .send(Ok(waiting(60 * TTL, Some(Duration::ZERO))))
        .unwrap();
    let (_, reply) = store.renewal().await;
    reply.send(Ok(vec![Renewed::Lost])).unwrap();

    let mut releases = Vec::new();
    for refused in [true, true, false] {
        let (request, reply) = loop {
            match store.next().await {
                Asked::Enqueue(request, reply) => break (request, reply),
                Asked::Release(tickets, reply) => releases.push((tickets, reply)), // not answered
                other => panic!("neither an enqueue nor a release: {other:?}"),
            }
        };
        assert_ne!(request.id, first.id);
        let answer = match refused {
            true => Enqueued::Busy { retry_in: None },
            false => granted(request.ttl),
        };
        reply.send(Ok(answer)).unwrap();
    }

    drop(task.await.unwrap().unwrap());
}

/// Everybody with the right to publish can send any number of these messages. So the waiter limits
/// how often it renews, and compares the number in the message with its own.
async fn wake_ups_that_a_store_does_not_stand_for_are_paced_and_compared(_: Store) {
    let (locks, mut store) = played_with(Capability::new().wake_ups_grant(false));
    let task = begin(locks.mutex("a").ttl(60 * TTL).wait(SOON));
    let (request, reply) = store.enqueue().await;
    reply.send(Ok(waiting(60 * TTL, None))).unwrap();
    eventually("it waits in line", SOON, async || {
        store.wake(request.id);
        !store.asked.is_empty()
    })
    .await;
    let no = Renewed::Waiting {
        valid_for: 60 * TTL,
        recheck_in: None,
        grace: None,
    };
    let (_, reply) = store.renewal().await;
    reply.send(Ok(vec![no])).unwrap();

    let began = Instant::now();
    let mut asked = 0;
    while began.elapsed() < TTL {
        store.wake(request.id);
        if let Ok(Asked::Renew(_, reply)) = store.asked.try_recv() {
            asked += 1;
            reply.send(Ok(vec![no])).unwrap();
        }
        tokio::task::yield_now().await;
    }
    // The waiter rechecks at most ten times a second. A message and the answer before it may each
    // cause a recheck, so 22 are allowed.
    assert!((1..=22).contains(&asked), "asked {asked} times in a second");

    // The last wake-up may have caused a recheck at a later time. After this pause, this recheck
    // has been sent.
    tokio::time::sleep(TTL / 2).await;
    while let Ok(Asked::Renew(_, reply)) = store.asked.try_recv() {
        reply.send(Ok(vec![no])).unwrap();
    }
    for other in [0, 6, 8, u64::MAX] {
        store.wake_with(request.id, other);
    }
    tokio::time::sleep(TTL / 2).await; // no event tells that no request comes
    assert!(store.asked.is_empty(), "the number is another ticket's");
    task.abort();
}

/// Both leases are renewed in one request, because the connection had a gap.
async fn a_batch_that_fails_with_a_lost_ticket_tells_the_loss_and_the_reason(store: Store) {
    let owner = format!("{LOGGED}{}:lost", store.namespace);
    let (wire, mut store) = wire(Capability::new());
    let locks = Locks::builder().backend(wire).owner(&owner);
    let locks = locks.build().unwrap();
    let lost = store.grant(&locks.mutex("lost").ttl(60 * TTL)).await;
    let kept = store.grant(&locks.mutex("kept").ttl(60 * TTL)).await;
    for events in &*store.events.lock().unwrap() {
        events.gap();
    }
    // Each connection with a gap causes a renewal of all tickets, so there may be several renewals.
    let reason = "0 of 1 replicas";
    tokio::select! {
        reason = lost.lost() => assert_eq!(reason, LostReason::Taken),
        () = async {
            loop {
                let (tickets, reply) = store.renewal().await;
                let lost = tickets.iter().filter(|ticket| ticket.name.as_str() == "lost");
                let lost = lost.map(|ticket| ticket.id).collect();
                let error = StoreError::halfway(Fault::Unknown, reason).with_lost(lost);
                let _ = reply.send(Err(error));
            }
        } => {}
    }

    assert!(kept.is_valid());
    eventually("the log says why", SOON, async || {
        let told = traces::lines(&owner).into_iter();
        let mut told = told.filter(|line| line.text.contains("refuses renewals"));
        told.any(|line| line.text.contains(reason))
    })
    .await;
}

/// A dead holder sends nothing. So the waiter rechecks when the holder's lease should be over, and
/// once more if the holder has renewed in between.
async fn a_waiter_asks_again_each_time_the_holders_lease_may_be_over(_: Store) {
    let (locks, mut store) = patient();
    let _task = begin(locks.mutex("a").ttl(60 * TTL).wait(SOON));
    let recheck_in = Duration::from_millis(200);
    let (_, reply) = store.enqueue().await;
    let mut told = Instant::now();
    reply.send(Ok(waiting(60 * TTL, Some(recheck_in)))).unwrap();
    for _ in 0..3 {
        let (_, reply) = store.renewal().await;
        // This request came after the time that the store had set for the recheck. The ordinary
        // renewals of the waiter are 20 s apart.
        let after = told.elapsed();
        assert!(
            after >= recheck_in * 9 / 10 && after < recheck_in + SOON,
            "{after:?}"
        );
        told = Instant::now();
        reply
            .send(Ok(vec![Renewed::Waiting {
                valid_for: 60 * TTL,
                recheck_in: Some(recheck_in),
                grace: None,
            }]))
            .unwrap();
    }
}

/// A release first takes its lease out of the keeper's later batches.
async fn a_lease_that_is_being_released_is_not_renewed(_: Store) {
    for dropped in [true, false] {
        let (locks, mut store) = played();
        let leaving = store.grant(&locks.mutex("leaving").ttl(TTL)).await;
        // The renewal of this lease is due at the same time as that of the other lease.
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

/// Stores that repeat a release on their own do so until the ticket has expired.
async fn the_release_of_an_extended_lease_has_the_longer_ttl(_: Store) {
    for dropped in [true, false] {
        let (locks, mut store) = patient();
        let guard = store.grant(&locks.mutex("a").ttl(10 * TTL)).await;
        let (extended, ()) = tokio::join!(guard.extend(20 * TTL), async {
            let (tickets, reply) = store.renewal().await;
            reply.send(Ok(still_granted(&tickets))).unwrap();
        });
        extended.unwrap();

        let release = match dropped {
            true => {
                drop(guard);
                store.release().await
            }
            false => tokio::join!(guard.release(), store.release()).1,
        };

        assert_eq!(release.request.ttl, 20 * TTL, "dropped: {dropped}");
    }
}

async fn an_acknowledgement_that_comes_after_the_deadline_leads_to_a_release(_: Store) {
    let (kit, locks) = kit();
    let guard = locks.mutex("a").ttl(10 * TTL).acquire().await.unwrap();
    let end = guard.remaining();
    // The renewal is in flight at the deadline. Its answer comes before the ticket ends at the
    // store, which is later than the deadline.
    let mut renewal = kit.hold_next(Verb::Renew);
    kit.clock().advance(end - Duration::from_millis(500));
    renewal.arrived().await;
    kit.clock().advance(Duration::from_millis(500));
    assert_eq!(guard.lost().await, LostReason::Expired);

    renewal.let_go();

    tickets(&locks, "a", 0).await;
    assert!(!guard.is_valid());
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
    // Log lines are written in order. So all lines about refusals come before this line.
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
