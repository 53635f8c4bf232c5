//! Tests of elections on the store for tests. This store holds requests back, delays answers, and
//! moves its clock as a fact asks.

use std::ops::ControlFlow;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::testing::{Store as Kit, Verb};
use lockcore::value::Written;
use lockcore::{ErrorKind, Locks, LostReason, Release};
use tests::eventually::eventually;
use tokio::sync::mpsc;

use super::observers::leads;
use crate::late::LateAnswers;
use crate::store::{A_FEW_MILLIS, DEFAULT, Kind, SOON, STALL, Store, kind, soon, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        an_observer_never_goes_back_to_an_older_value
        a_leader_that_resigns_does_not_overwrite_a_later_value
        a_candidate_whose_wait_is_over_stands_in_line_again_at_once
        observers_that_come_months_later_find_the_leader
        a_lease_that_ended_while_its_value_was_sent_is_no_leadership
        a_shutdown_waits_until_the_observers_of_a_leader_that_resigns_are_told
    ]
}

/// The store has carried out the release, and the message to the observers is on its way.
async fn a_shutdown_waits_until_the_observers_of_a_leader_that_resigns_are_told(_: Store) {
    let kit = Kit::new();
    let patient = Locks::builder().op_timeout(STALL);
    let locks = kit.client_with(patient).unwrap();
    let leader = leads(&locks, "a").await;
    let mut message = kit.hold_next(Verb::Count);
    let resigns = tokio::spawn(leader.resign());
    soon(message.arrived()).await;

    let mut ends = Box::pin(locks.shutdown(SOON));
    let early = tokio::time::timeout(A_FEW_MILLIS, &mut ends).await;
    assert!(early.is_err(), "the client ended before the message");

    message.let_go();
    soon(ends).await.unwrap();
    assert_eq!(soon(resigns).await.unwrap().unwrap(), Release::Released);
}

const HOUR: Duration = Duration::from_secs(60 * 60);

/// The observer has already read a newer value of the second leader when the message with its older
/// value arrives.
async fn an_observer_never_goes_back_to_an_older_value(_: Store) {
    let (kit, late) = (Kit::new(), LateAnswers::default());
    let there = kit.another_process();
    let client = |kit: &Kit| {
        let patient = Locks::builder().ttl(2 * STALL).op_timeout(STALL);
        kit.client_with(patient).unwrap()
    };
    let (locks, other) = (client(&kit), client(&there));
    let first = leads(&locks, "a").await;
    let (tell, mut told) = mpsc::unbounded_channel();
    let mut leaders = late.client_of(&kit).election("a").observe();
    let observes = tokio::spawn(async move {
        loop {
            tell.send(leaders.next().await.unwrap().unwrap()).unwrap();
        }
    });
    let seen = soon(told.recv()).await.unwrap();
    assert_eq!(seen, Written::new(first.token(), "a"));

    // The second leader holds the lock, and has not written its value yet.
    let mut write = there.hold_next(Verb::Count);
    let election = other.election("a").value("b");
    let campaign = tokio::spawn(async move { election.campaign().await });
    tickets(&locks, "a", 2).await;
    let mut list = late.hold_list(1);
    soon(first.resign()).await.unwrap();
    list.is_made().await;
    soon(write.arrived()).await;
    // The test holds back the news with the second leader's first value. Meanwhile the observer
    // reads this leader's second value itself.
    let mut news = late.hold_value("b");
    write.let_go();
    news.is_made().await;
    let second = soon(campaign).await.unwrap().unwrap();
    second.set_value("b, moved").await.unwrap();
    list.let_go();
    let seen = soon(told.recv()).await.unwrap();
    assert_eq!(seen, Written::new(second.token(), "b, moved"));

    let mut newer = late.hold_value("b, moved");
    news.let_go();
    // The client sends this read only after it has passed the earlier news on to the observer.
    newer.is_made().await;
    newer.let_go();
    second.set_value("b, moved again").await.unwrap();

    let seen = soon(told.recv()).await.unwrap();
    assert_eq!(seen, Written::new(second.token(), "b, moved again"));
    observes.abort();
}

/// A leader that resigns makes a new version of the value to tell the observers. Before this request
/// arrives, another write does: a late one of the same leader, or one of the next leader. It must
/// stay.
async fn a_leader_that_resigns_does_not_overwrite_a_later_value(_: Store) {
    for is_its_own in [true, false] {
        let kit = Kit::new();
        let here = kit.another_process();
        let (locks, other) = (here.client().unwrap(), kit.client().unwrap());
        let leader = leads(&locks, "early").await;
        let (view, token) = (leader.held(), leader.token());
        let mut write = match is_its_own {
            true => here.hold_next(Verb::Count),
            false => kit.hold_next(Verb::Count),
        };
        let writes = tokio::spawn(async move {
            match is_its_own {
                true => view.set_value("late").await.map(|()| token),
                false => {
                    let next = other.election("a").value("late").campaign().await?;
                    Ok(next.token())
                }
            }
        });
        if is_its_own {
            soon(write.arrived()).await;
        } else {
            tickets(&locks, "a", 2).await;
        }
        let mut touch = here.hold_next(Verb::Count);
        let resigns = tokio::spawn(leader.resign());
        soon(touch.arrived()).await;

        write.let_go();
        let writer = soon(writes).await.unwrap().unwrap();
        touch.let_go();
        assert_eq!(soon(resigns).await.unwrap().unwrap(), Release::Released);

        let left = kit.client().unwrap().value("a").get().await.unwrap();
        assert_eq!(left, Some(Written::new(writer, "late")));
    }
}

/// The clock stands still, so a candidate that paused between two tries would never try again. The
/// new try has a new ticket.
async fn a_candidate_whose_wait_is_over_stands_in_line_again_at_once(_: Store) {
    const WAIT: Duration = Duration::from_secs(60);
    let kit = Kit::new();
    kit.clock().stop();
    let client = || kit.client_with(Locks::builder().ttl(HOUR)).unwrap();
    let (locks, other) = (client(), client());
    let leader = leads(&locks, "first").await;
    let election = other.election("a").wait(WAIT);
    let runs = tokio::spawn(async move {
        election
            .run_as_leader(async |leader| ControlFlow::Break(leader.fencing_token()))
            .await
    });
    let mut last = leader.token().ticket();
    for wait_is_over in [false, true, true, true] {
        if wait_is_over {
            kit.clock().advance(WAIT);
        }
        eventually("it stands in line", SOON, async || {
            let line = locks.inspect("a").await.unwrap();
            let place = line.iter().find(|place| !place.granted);
            place.is_some_and(|place| place.ticket > last)
        })
        .await;
        last = locks.inspect("a").await.unwrap()[1].ticket;
    }

    soon(leader.resign()).await.unwrap();

    let token = soon(runs).await.unwrap().unwrap().unwrap();
    assert_eq!(token.ticket(), last);
}

/// A store forgets a value 30 days after its last use. Here nobody but the leader's own client uses
/// the value.
async fn observers_that_come_months_later_find_the_leader(_: Store) {
    let kit = Kit::new();
    kit.clock().stop();
    let there = kit.another_process();
    // No renewal is due during this fact.
    let locks = there.client_with(Locks::builder().ttl(8_000 * HOUR));
    let leader = leads(&locks.unwrap(), "10.0.0.7").await;

    for _ in 0..8 {
        let mut read = there.hold_next(Verb::Count);
        kit.clock().advance(8 * 24 * HOUR);
        soon(read.arrived()).await;
        read.let_go();
        let mut leaders = kit.client().unwrap().election("a").observe();
        let seen = soon(leaders.next()).await.unwrap();
        assert_eq!(seen, Some(Written::new(leader.token(), "10.0.0.7")));
    }
}

async fn a_lease_that_ended_while_its_value_was_sent_is_no_leadership(_: Store) {
    let kit = Kit::new();
    kit.clock().stop();
    let (ttl, op_timeout) = (Duration::from_secs(3), Duration::from_secs(60));
    let builder = Locks::builder().ttl(ttl).op_timeout(op_timeout);
    let locks = kit.client_with(builder).unwrap();
    let mut write = kit.hold_next(Verb::Count);
    let election = locks.election("a").value("late");
    let campaign = tokio::spawn(async move { election.campaign().await });
    soon(write.arrived()).await;

    // The lease ends. The operation timeout does not, so the client waits for the answer to the
    // write.
    kit.clock().advance(ttl);
    write.let_go();

    let expired = ErrorKind::Lost(LostReason::Expired);
    assert_eq!(kind(soon(campaign).await.unwrap()), expired);
    // The write has arrived, and the next leader replaces the value.
    let next = leads(&locks, "next").await;
    let told = locks.value("a").get().await.unwrap();
    assert_eq!(told, Some(Written::new(next.token(), "next")));
}
