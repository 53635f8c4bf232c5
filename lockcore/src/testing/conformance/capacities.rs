//! The contract at the connection: capacities that are stored.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::fact::{Fact, group_of};
use super::kit::{Asker, Store, with};
use super::steps::{SOON, eventually};
use crate::backend::{
    Capability, Enqueued, Released, Renewed, Request, Resize, ResizeOp, ResizeOutcome, Resized,
};
use crate::request::Id;

pub(super) fn all() -> Vec<Fact> {
    let resizes = |capability: &Capability| match capability.resizes {
        true => Ok(()),
        false => Err("it stores no capacities"),
    };
    let expiring = |capability: &Capability| match (capability.resizes, capability.sessions) {
        (false, _) => Err("it stores no capacities"),
        (true, true) => Err("its tickets end with their sessions"),
        (true, false) => Ok(()),
    };
    let forgetting = group_of!["capacities", false, expiring;
        a_name_whose_tickets_have_all_expired_is_forgotten
    ];
    let resizing = group_of!["capacities", false, resizes;
        more_permits_let_the_first_waiters_in_with_one_push_each
        fewer_permits_take_nothing_back_and_later_grants_wait_until_what_is_out_fits
        a_stored_capacity_outlives_its_line_and_outranks_what_requests_state
        a_request_for_more_permits_than_there_are_waits_until_there_are_enough
        a_change_that_comes_twice_counts_once_and_one_that_is_too_late_does_nothing
        a_change_that_comes_again_after_the_name_was_forgotten_does_nothing
        a_capacity_is_forgotten_unless_a_ticket_states_another
        a_name_in_use_with_another_capacity_is_not_resized
    ];
    [resizing, forgetting].concat()
}

/// A change of the capacity of the name `a`. The caller states the capacity 5.
fn change(store: &Store, capacity: Option<u32>, after: Option<Id>) -> Arc<Resize> {
    let op = ResizeOp::Set {
        capacity,
        after,
        stated: NonZeroU32::new(5).unwrap(),
    };
    Arc::new(Resize::new(store.name("a"), Id::draw().unwrap(), op))
}

async fn read(store: &Store, asker: &Asker) -> Resized {
    let id = Id::draw().unwrap();
    let read = Resize::new(store.name("a"), id, ResizeOp::Read);
    let read = asker.resize(&Arc::new(read)).await;
    assert_eq!(read.outcome, ResizeOutcome::Applied);
    read
}

/// Changes the capacity, while no other client does.
async fn resize(store: &Store, asker: &Asker, capacity: Option<u32>) {
    let after = read(store, asker).await.change;
    let change = change(store, capacity, after);
    let resized = asker.resize(&change).await;
    assert_eq!(resized.outcome, ResizeOutcome::Applied);
    assert_eq!(read(store, asker).await.capacity, capacity);
}

async fn holds_soon(asker: &Asker, ticket: &Arc<Request>) {
    eventually("the ticket holds", SOON, async || {
        matches!(asker.renew(ticket).await, Renewed::Granted { .. })
    })
    .await;
}

async fn still_waits(asker: &Asker, ticket: &Arc<Request>) {
    let renewed = asker.renew(ticket).await;
    assert!(matches!(renewed, Renewed::Waiting { .. }), "{renewed:?}");
}

async fn more_permits_let_the_first_waiters_in_with_one_push_each(store: Store) {
    let (ours, other) = (store.connect().await, store.connect().await);
    let mut waiting = store.connect().await;
    let all = store.permits("a", 5, 5);
    ours.holds(&all).await;
    let waiters: Vec<_> = [1, 2, 3, 1]
        .iter()
        .map(|permits| store.permits("a", *permits, 5))
        .collect();
    let mut numbers = Vec::new();
    for waiter in &waiters {
        numbers.push(waiting.waits(waiter).await);
    }

    resize(&store, &other, Some(8)).await;

    let mut woken = [waiting.expect_wake().await, waiting.expect_wake().await];
    woken.sort_by_key(|wake| wake.ticket);
    assert_eq!(woken.map(|wake| wake.ticket), numbers[..2]);
    for waiter in &waiters[..2] {
        holds_soon(&waiting, waiter).await;
    }
    // The permits of the third waiter do not fit, and no later waiter overtakes it.
    still_waits(&waiting, &waiters[2]).await;
    still_waits(&waiting, &waiters[3]).await;
    assert_eq!(waiting.woken_besides(), []);
    let line = other.inspect(store.name("a")).await;
    let shown: Vec<_> = line.iter().map(|t| (t.granted, t.capacity)).collect();
    let expected = [true, true, true, false, false].map(|granted| (granted, 8));
    assert_eq!(shown, expected);

    resize(&store, &other, Some(12)).await;

    holds_soon(&waiting, &waiters[2]).await;
    holds_soon(&waiting, &waiters[3]).await;
    for waiter in &waiters {
        assert_eq!(waiting.release(waiter).await, Released::Released);
    }
    assert_eq!(ours.release(&all).await, Released::Released);
    for asker in [ours, other, waiting] {
        asker.close().await;
    }
}

async fn fewer_permits_take_nothing_back_and_later_grants_wait_until_what_is_out_fits(
    store: Store,
) {
    let (ours, other) = (store.connect().await, store.connect().await);
    let holders: Vec<_> = (0..3).map(|_| store.permits("a", 5, 10)).collect();
    let stated = |capacity, after| {
        let op = ResizeOp::Set {
            capacity: Some(capacity),
            after,
            stated: NonZeroU32::new(10).unwrap(),
        };
        Arc::new(Resize::new(store.name("a"), Id::draw().unwrap(), op))
    };
    ours.holds(&holders[0]).await;
    ours.holds(&holders[1]).await;
    ours.waits(&holders[2]).await;
    let more = stated(15, None);
    assert_eq!(other.resize(&more).await.outcome, ResizeOutcome::Applied);
    holds_soon(&ours, &holders[2]).await;

    let fewer = stated(3, Some(more.id));
    assert_eq!(other.resize(&fewer).await.outcome, ResizeOutcome::Applied);

    let late = store.permits("a", 2, 10);
    other.waits(&late).await;
    let line = other.inspect(store.name("a")).await;
    let shown: Vec<_> = line.iter().map(|t| (t.granted, t.capacity)).collect();
    let expected = [true, true, true, false].map(|granted| (granted, 3));
    assert_eq!(shown, expected);
    for (at, holder) in holders.iter().enumerate() {
        for behind in &holders[at..] {
            // A repetition of the enqueue finds the ticket, and the ticket holds.
            ours.holds(behind).await;
            let renewed = ours.renew(behind).await;
            assert!(matches!(renewed, Renewed::Granted { .. }), "{renewed:?}");
        }
        still_waits(&other, &late).await;
        assert_eq!(ours.release(holder).await, Released::Released);
    }
    holds_soon(&other, &late).await;
    let third = with(&store.permits("a", 2, 10), |request| request.wait = false);
    let refused = other.enqueue(&third).await;
    assert!(matches!(refused, Enqueued::Busy { .. }), "{refused:?}");
    assert_eq!(other.release(&late).await, Released::Released);
    ours.close().await;
    other.close().await;
}

async fn a_stored_capacity_outlives_its_line_and_outranks_what_requests_state(store: Store) {
    let (ours, other) = (store.connect().await, store.connect().await);
    resize(&store, &ours, Some(2)).await;

    for _ in 0..2 {
        let states_more = store.permits("a", 1, 5);
        let states_less = store.permits("a", 1, 1);
        ours.holds(&states_more).await;
        other.holds(&states_less).await;
        let refused = with(&store.permits("a", 1, 7), |request| request.wait = false);
        let refused = other.enqueue(&refused).await;
        assert!(matches!(refused, Enqueued::Busy { .. }), "{refused:?}");
        // A mutex and a reader ask for another capacity than a semaphore does.
        for request in [store.writer("a"), store.reader("a")] {
            let refused = other.enqueue(&request).await;
            assert_eq!(refused, Enqueued::CapacityMismatch { in_use: 2 });
        }
        assert_eq!(ours.release(&states_more).await, Released::Released);
        assert_eq!(other.release(&states_less).await, Released::Released);
        assert_eq!(ours.inspect(store.name("a")).await, []);
    }
    assert_eq!(read(&store, &other).await.capacity, Some(2));
    // When a name that is not in use is forgotten, its stored capacity is removed too.
    ours.connection.forget(store.name("a")).await.unwrap();
    assert_eq!(read(&store, &other).await.capacity, None);
    let writer = store.writer("a");
    ours.holds(&writer).await;
    assert_eq!(ours.release(&writer).await, Released::Released);
    ours.close().await;
    other.close().await;
}

async fn a_request_for_more_permits_than_there_are_waits_until_there_are_enough(store: Store) {
    let mut ours = store.connect().await;
    let other = store.connect().await;
    resize(&store, &other, Some(0)).await;
    let four = store.permits("a", 4, 5);
    let number = ours.waits(&four).await;
    let one = store.permits("a", 1, 5);
    ours.waits(&one).await;

    resize(&store, &other, Some(3)).await;
    still_waits(&ours, &four).await;
    still_waits(&ours, &one).await;
    resize(&store, &other, Some(4)).await;

    assert_eq!(ours.expect_wake().await.ticket, number);
    holds_soon(&ours, &four).await;
    still_waits(&ours, &one).await;
    assert_eq!(ours.release(&four).await, Released::Released);
    holds_soon(&ours, &one).await;
    assert_eq!(ours.release(&one).await, Released::Released);
    ours.close().await;
    other.close().await;
}

async fn a_change_that_comes_twice_counts_once_and_one_that_is_too_late_does_nothing(store: Store) {
    let (ours, other) = (store.connect().await, store.connect().await);
    let first = change(&store, Some(7), None);
    for _ in 0..2 {
        let resized = ours.resize(&first).await;
        let expected = Resized::new(Some(7), Some(first.id), ResizeOutcome::Applied);
        assert_eq!(resized, expected);
    }

    let late = change(&store, Some(1), None);
    let resized = other.resize(&late).await;
    let kept = Resized::new(Some(7), Some(first.id), ResizeOutcome::Kept);
    assert_eq!(resized, kept);

    let second = change(&store, Some(9), Some(first.id));
    assert_eq!(other.resize(&second).await.outcome, ResizeOutcome::Applied);
    let resized = ours.resize(&first).await;
    let kept = Resized::new(Some(9), Some(second.id), ResizeOutcome::Kept);
    assert_eq!(resized, kept);

    let forgets = change(&store, None, Some(second.id));
    assert_eq!(other.resize(&forgets).await.capacity, None);
    assert_eq!(other.resize(&second).await.outcome, ResizeOutcome::Kept);
    assert_eq!(read(&store, &ours).await.capacity, None);
    ours.close().await;
    other.close().await;
}

async fn a_change_that_comes_again_after_the_name_was_forgotten_does_nothing(store: Store) {
    let (client, other) = (store.connect().await, store.connect().await);
    // In the first round, only the stored capacity is forgotten. In the second one, all about the
    // name is.
    for forgets_the_name in [false, true] {
        let after = read(&store, &client).await.change;
        let adds = change(&store, Some(7), after);
        let added = client.resize(&adds).await;
        assert_eq!(added.outcome, ResizeOutcome::Applied);
        match forgets_the_name {
            true => other.connection.forget(store.name("a")).await.unwrap(),
            false => resize(&store, &other, None).await,
        }

        // The client acts as if it had no answer.
        let again = client.resize(&adds).await;

        assert_eq!(again.capacity, None, "{again:?}");
        assert_eq!(read(&store, &other).await.capacity, None);
        resize(&store, &other, Some(3)).await;
        assert_eq!(client.resize(&adds).await.capacity, Some(3));
        resize(&store, &other, None).await;
    }
    client.close().await;
    other.close().await;
}

async fn a_capacity_is_forgotten_unless_a_ticket_states_another(store: Store) {
    let (ours, other) = (store.connect().await, store.connect().await);
    resize(&store, &other, Some(6)).await;
    let (six, waits) = (store.permits("a", 6, 7), store.permits("a", 1, 5));
    ours.holds(&six).await;
    ours.waits(&waits).await;

    let after = read(&store, &other).await.change;
    let forgets = change(&store, None, after);
    let refused = other.resize(&forgets).await;
    assert_eq!(refused.outcome, ResizeOutcome::Mismatch { in_use: 7 });
    assert_eq!(read(&store, &other).await.capacity, Some(6));
    assert_eq!(ours.release(&six).await, Released::Released);
    holds_soon(&ours, &waits).await;

    let beyond = store.permits("a", 5, 5);
    // A client that learns of tickets from events may see a moment later that its own holds.
    let _ = ours.enqueue(&beyond).await;
    holds_soon(&ours, &beyond).await;
    resize(&store, &other, None).await;

    // Six permits are out, and nothing is taken back.
    for holder in [&waits, &beyond] {
        ours.holds(holder).await;
        let renewed = ours.renew(holder).await;
        assert!(matches!(renewed, Renewed::Granted { .. }), "{renewed:?}");
    }
    let next = store.permits("a", 4, 5);
    other.waits(&next).await;
    let refused = other.enqueue(&store.permits("a", 1, 7)).await;
    assert_eq!(refused, Enqueued::CapacityMismatch { in_use: 5 });
    assert_eq!(ours.release(&waits).await, Released::Released);
    still_waits(&other, &next).await;
    assert_eq!(ours.release(&beyond).await, Released::Released);
    holds_soon(&other, &next).await;
    assert_eq!(other.release(&next).await, Released::Released);
    ours.close().await;
    other.close().await;
}

async fn a_name_in_use_with_another_capacity_is_not_resized(store: Store) {
    let (ours, other) = (store.connect().await, store.connect().await);
    for (holder, in_use) in [
        (store.permits("a", 1, 4), 4),
        (store.writer("a"), crate::backend::FULL.get()),
    ] {
        ours.holds(&holder).await;

        let refused = other.resize(&change(&store, Some(9), None)).await;

        assert_eq!(refused.outcome, ResizeOutcome::Mismatch { in_use });
        assert_eq!(read(&store, &other).await.capacity, None);
        assert_eq!(ours.release(&holder).await, Released::Released);
    }
    resize(&store, &other, Some(9)).await;
    ours.close().await;
    other.close().await;
}

/// No other request comes between the end of the leases and the one that forgets the name. So the
/// store may still have the tickets.
async fn a_name_whose_tickets_have_all_expired_is_forgotten(store: Store) {
    let client = store.connect().await;
    let short = |permits| {
        with(&store.permits("a", permits, 5), |request| {
            request.ttl = Duration::from_millis(300);
        })
    };
    for line in [&[2][..], &[2, 1], &[1, 2]] {
        resize(&store, &client, Some(2)).await;
        for permits in line {
            // If the machine stalls, the first ticket may have expired, and this one holds.
            let _ = client.enqueue(&short(*permits)).await;
        }
        eventually("they have expired", SOON, async || {
            client.inspect(store.name("a")).await.is_empty()
        })
        .await;

        client.connection.forget(store.name("a")).await.unwrap();

        assert_eq!(read(&store, &client).await.capacity, None);
        let writer = store.writer("a");
        client.holds(&writer).await;
        assert_eq!(client.release(&writer).await, Released::Released);
    }
    client.close().await;
}
