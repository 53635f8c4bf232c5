//! The contract at the connection: what each request answers, what it leaves in the store, and
//! which wake-ups it sends.

use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::fact::{
    Fact, any_store, group_of, that_pushes, that_queues, without_queue, without_sessions,
};
use super::kit::{PATIENCE, Store, with};
use super::steps::{LEASE, SOON, eventually};
use crate::backend::{Capability, Departure, Enqueued, Id, MAX_TICKET, Released, Renewed, Request};

pub(super) fn all() -> Vec<Fact> {
    let any = group_of!["requests", false, any_store;
        a_request_that_does_not_wait_is_busy_and_leaves_nothing
        only_its_own_id_renews_and_releases_a_ticket
        a_renewal_creates_no_ticket
        an_enqueue_that_comes_after_its_release_takes_nothing
        another_capacity_is_refused_and_leaves_nothing
        numbers_rise_after_the_last_ticket_has_left_and_after_the_name_is_forgotten
        an_enqueue_that_is_dropped_at_any_poll_may_be_repeated
    ];
    let in_line = group_of!["requests", false, that_queues;
        an_enqueue_takes_one_ticket_however_often_it_is_sent
        a_line_is_listed_oldest_first_with_the_permits_of_each_ticket
        a_batch_is_answered_one_by_one_and_in_order
        connections_of_two_openings_see_the_same_tickets
        a_name_that_is_in_use_is_not_forgotten
        a_waiter_that_leaves_lets_in_the_waiters_behind_it
        tickets_are_made_smaller_in_one_batch
    ];
    let naming = |capability: &Capability| match capability.names_ahead {
        true => Ok(()),
        false => Err("it names no ticket ahead"),
    };
    let named = group_of!["requests", false, naming;
        the_ticket_right_ahead_is_named_if_both_are_of_one_client_and_want_everything
    ];
    let telling = |capability: &Capability| match capability.tells_holders {
        true => Ok(()),
        false => Err("it does not tell holders who waits"),
    };
    let told = group_of!["requests", false, telling;
        a_holder_that_lingers_is_told_each_time_that_a_line_begins_behind_it
    ];
    let without_line = group_of!["requests", false, without_queue;
        a_request_that_may_wait_is_busy_and_leaves_nothing
    ];
    let pushing = group_of!["requests", false, that_pushes;
        a_release_wakes_the_waiters_that_it_grants_and_no_others
        a_ticket_that_becomes_smaller_wakes_the_waiters_that_now_hold
    ];
    let in_line_by_ttl = |capability: &Capability| {
        without_sessions(capability).and_then(|()| that_queues(capability))
    };
    let by_ttl = group_of!["requests", false, in_line_by_ttl;
        a_ticket_ends_after_its_ttl_and_the_next_holds
        a_renewal_sets_when_a_ticket_expires
    ];
    let own_numbers = |capability: &Capability| match capability.sessions {
        true => Err("its numbers are those of its server, which no client has seen ahead of it"),
        false => Ok(()),
    };
    let by_numbers = group_of!["requests", false, own_numbers;
        a_number_is_greater_than_any_that_the_client_has_seen
    ];
    let both = |capability: &Capability| {
        without_sessions(capability).and_then(|()| that_pushes(capability))
    };
    let pushing_by_ttl = group_of!["requests", false, both;
        a_release_skips_an_expired_waiter_and_wakes_the_next
    ];
    let by_line = [in_line, named, told, without_line].concat();
    [any, by_line, pushing, by_ttl, by_numbers, pushing_by_ttl].concat()
}

async fn an_enqueue_takes_one_ticket_however_often_it_is_sent(store: Store) {
    let client = store.connect().await;
    let (holds, waits) = (store.writer("a"), store.writer("a"));

    let Enqueued::Granted { ticket, valid_for } = client.enqueue(&holds).await else {
        panic!("it does not hold, and no other ticket is there");
    };
    let waiting = client.waits(&waits).await;

    assert!(ticket > 0 && ticket < waiting && waiting <= MAX_TICKET);
    assert!(!valid_for.is_zero() && valid_for <= holds.ttl);
    assert_eq!(client.holds(&holds).await, ticket);
    assert_eq!(client.waits(&waits).await, waiting);
    assert_eq!(client.inspect(store.name("a")).await.len(), 2);
    client.close().await;
}

async fn a_request_that_does_not_wait_is_busy_and_leaves_nothing(store: Store) {
    let client = store.connect().await;
    let holds = store.writer("a");
    client.holds(&holds).await;

    let tries = with(&store.request("a"), |request| request.wait = false);
    let Enqueued::Busy { retry_in } = client.enqueue(&tries).await else {
        panic!("it holds, although another ticket holds all permits");
    };

    assert!(retry_in.is_none_or(|retry_in| retry_in <= holds.ttl));
    assert_eq!(client.inspect(store.name("a")).await.len(), 1);
    assert_eq!(client.release(&tries).await, Released::NotFound);
    client.close().await;
}

/// After this answer, the client asks again with another id.
async fn a_request_that_may_wait_is_busy_and_leaves_nothing(store: Store) {
    let client = store.connect().await;
    let holds = store.writer("a");
    client.holds(&holds).await;

    let waits = store.writer("a");
    assert!(matches!(
        client.enqueue(&waits).await,
        Enqueued::Busy { .. }
    ));

    assert_eq!(client.inspect(store.name("a")).await.len(), 1);
    assert_eq!(client.release(&holds).await, Released::Released);
    assert_eq!(client.renew(&waits).await, Renewed::Lost);
    client.holds(&store.writer("a")).await;
    client.close().await;
}

async fn a_line_is_listed_oldest_first_with_the_permits_of_each_ticket(store: Store) {
    let client = store.connect().await;
    let mut numbers = Vec::new();
    for permits in [2, 1, 3] {
        let request = store.permits("pool", permits, 3);
        let (Enqueued::Granted { ticket, .. } | Enqueued::Waiting { ticket, .. }) =
            client.enqueue(&request).await
        else {
            panic!("it takes no ticket");
        };
        numbers.push(ticket);
    }

    let line = client.inspect(store.name("pool")).await;

    assert!(numbers.is_sorted());
    assert_eq!(line.iter().map(|t| t.ticket).collect::<Vec<_>>(), numbers);
    assert_eq!(
        line.iter().map(|t| t.permits).collect::<Vec<_>>(),
        [2, 1, 3]
    );
    let granted: Vec<_> = line.iter().map(|ticket| ticket.granted).collect();
    assert_eq!(granted, [true, true, false]);
    for ticket in &line {
        assert_eq!(
            (ticket.capacity, ticket.owner.as_str()),
            (3, "host/1/client")
        );
        assert!(!ticket.remaining.is_zero(), "{ticket:?}");
    }
    client.close().await;
}

async fn only_its_own_id_renews_and_releases_a_ticket(store: Store) {
    let (ours, other) = (store.connect().await, store.connect().await);
    let holds = store.writer("a");
    let number = ours.holds(&holds).await;

    let foreign = store.writer("a");
    assert_eq!(other.renew(&foreign).await, Renewed::Lost);
    assert_eq!(other.release(&foreign).await, Released::NotFound);

    assert!(matches!(ours.renew(&holds).await, Renewed::Granted { .. }));
    let line = ours.inspect(store.name("a")).await;
    assert_eq!((line.len(), line[0].ticket), (1, number));
    assert_eq!(ours.release(&holds).await, Released::Released);
    assert_eq!(ours.release(&holds).await, Released::NotFound);
    ours.close().await;
    other.close().await;
}

async fn a_renewal_creates_no_ticket(store: Store) {
    let client = store.connect().await;
    let request = store.writer("a");
    assert_eq!(client.renew(&request).await, Renewed::Lost);
    client.holds(&request).await;
    assert_eq!(client.release(&request).await, Released::Released);

    assert_eq!(client.renew(&request).await, Renewed::Lost);

    assert_eq!(client.inspect(store.name("a")).await, []);
    client.close().await;
}

/// If a caller gives up, its release may arrive before its enqueue.
async fn an_enqueue_that_comes_after_its_release_takes_nothing(store: Store) {
    let client = store.connect().await;
    let given_up = store.writer("a");

    let leaving = vec![Departure::new(Arc::clone(&given_up), true)];
    let released = client.connection.release(leaving).await.unwrap();
    assert_eq!(released, [Released::NotFound]);

    assert_eq!(client.enqueue(&given_up).await, Enqueued::Gone);
    assert_eq!(client.inspect(store.name("a")).await, []);
    client.holds(&store.writer("a")).await;
    client.close().await;
}

async fn another_capacity_is_refused_and_leaves_nothing(store: Store) {
    let client = store.connect().await;
    let holds = store.permits("pool", 1, 3);
    client.holds(&holds).await;

    let refused = client.enqueue(&store.permits("pool", 1, 4)).await;

    assert_eq!(refused, Enqueued::CapacityMismatch { in_use: 3 });
    assert_eq!(client.inspect(store.name("pool")).await.len(), 1);
    assert_eq!(client.release(&holds).await, Released::Released);
    client.holds(&store.permits("pool", 1, 4)).await;
    client.close().await;
}

async fn a_batch_is_answered_one_by_one_and_in_order(store: Store) {
    let client = store.connect().await;
    let [holds, never, waits, elsewhere] = ["a", "a", "a", "b"].map(|name| store.writer(name));
    client.holds(&holds).await;
    client.waits(&waits).await;
    client.holds(&elsewhere).await;

    let asked = [&elsewhere, &never, &holds, &waits].map(Arc::clone);
    let renewed = client
        .connection
        .renew(asked.to_vec(), PATIENCE)
        .await
        .unwrap();
    assert!(
        matches!(
            renewed[..],
            [
                Renewed::Granted { .. },
                Renewed::Lost,
                Renewed::Granted { .. },
                Renewed::Waiting { .. }
            ]
        ),
        "{renewed:?}"
    );

    let leaving = asked.map(|request| Departure::new(request, false));
    let released = client.connection.release(leaving.to_vec()).await.unwrap();
    assert_eq!(
        released,
        [
            Released::Released,
            Released::NotFound,
            Released::Released,
            Released::Released
        ]
    );
    for name in ["a", "b"] {
        assert_eq!(client.inspect(store.name(name)).await, []);
    }
    client.close().await;
}

async fn connections_of_two_openings_see_the_same_tickets(store: Store) {
    let (one, other) = (store.connect().await, store.connect().await);
    let (holds, waits) = (store.writer("a"), store.writer("a"));
    let first = one.holds(&holds).await;
    let second = other.waits(&waits).await;

    for client in [&one, &other] {
        let line = client.inspect(store.name("a")).await;
        let numbers: Vec<_> = line.iter().map(|ticket| ticket.ticket).collect();
        assert_eq!(numbers, [first, second]);
    }
    assert_eq!(one.release(&holds).await, Released::Released);
    eventually("the other client's ticket holds", SOON, async || {
        matches!(other.renew(&waits).await, Renewed::Granted { .. })
    })
    .await;
    one.close().await;
    other.close().await;
}

async fn numbers_rise_after_the_last_ticket_has_left_and_after_the_name_is_forgotten(store: Store) {
    let client = store.connect().await;
    let mut last = 0;
    for forget in [false, true, false] {
        let request = store.writer("a");
        let number = client.holds(&request).await;
        assert!(number > last, "{number} after {last}");
        last = number;
        assert_eq!(client.release(&request).await, Released::Released);
        if forget {
            client.connection.forget(store.name("a")).await.unwrap();
        }
    }
    client.close().await;
}

async fn a_name_that_is_in_use_is_not_forgotten(store: Store) {
    let client = store.connect().await;
    let holds = store.writer("a");
    client.holds(&holds).await;

    client.connection.forget(store.name("a")).await.unwrap();

    assert!(matches!(
        client.renew(&holds).await,
        Renewed::Granted { .. }
    ));
    client.waits(&store.writer("a")).await;
    client.close().await;
}

/// A client repeats an enqueue if the reply was lost, or came too late for the caller.
async fn an_enqueue_that_is_dropped_at_any_poll_may_be_repeated(store: Store) {
    let client = store.connect().await;
    for polls in 0..4 {
        let request = store.writer("a");
        {
            let mut asking = pin!(client.connection.enqueue(Arc::clone(&request), PATIENCE));
            let mut left = polls;
            std::future::poll_fn(|cx| {
                if left == 0 || asking.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(());
                }
                left -= 1;
                Poll::Pending
            })
            .await;
        }
        client.holds(&request).await;
        assert_eq!(client.inspect(store.name("a")).await.len(), 1);
        assert_eq!(client.release(&request).await, Released::Released);
        assert_eq!(client.inspect(store.name("a")).await, []);
    }
    client.close().await;
}

async fn a_waiter_that_leaves_lets_in_the_waiters_behind_it(store: Store) {
    let client = store.connect().await;
    let [one, all, another] = [1, 3, 2].map(|permits| store.permits("pool", permits, 3));
    client.holds(&one).await;
    client.waits(&all).await;
    client.waits(&another).await;

    assert_eq!(client.release(&all).await, Released::Released);

    eventually("the waiter behind it holds", SOON, async || {
        matches!(client.renew(&another).await, Renewed::Granted { .. })
    })
    .await;
    client.close().await;
}

/// A store may always leave the name out. It must not give a wrong one.
async fn the_ticket_right_ahead_is_named_if_both_are_of_one_client_and_want_everything(
    store: Store,
) {
    let (ours, other) = (store.connect().await, store.connect().await);
    let writer = || with(&store.writer("a"), |request| request.name_ahead = true);
    let reader = || with(&store.reader("a"), |request| request.name_ahead = true);
    let (holds, first, second) = (writer(), writer(), writer());
    let (silent, foreign, behind_foreign) = (store.writer("a"), writer(), writer());
    let (reads, behind_reader) = (reader(), writer());
    ours.holds(&holds).await;

    assert_eq!(ahead_of(ours.enqueue(&first).await), Some(holds.id));
    let named = ahead_of(ours.enqueue(&second).await);
    assert!(named.is_none_or(|id| id == first.id), "{named:?}");
    for (client, request) in [
        (&ours, &silent),
        (&other, &foreign),
        (&ours, &behind_foreign),
        (&ours, &reads),
        (&ours, &behind_reader),
    ] {
        assert_eq!(ahead_of(client.enqueue(request).await), None);
    }

    // After `first` has left, `holds` is right ahead of `second`.
    assert_eq!(ours.release(&first).await, Released::Released);
    let named = ahead_of(ours.enqueue(&second).await);
    assert!(named.is_none_or(|id| id == holds.id), "{named:?}");
    other.close().await;
    ours.close().await;
}

fn ahead_of(answer: Enqueued) -> Option<Id> {
    match answer {
        Enqueued::Waiting { ahead, .. } => ahead,
        other => panic!("does not wait: {other:?}"),
    }
}

async fn a_holder_that_lingers_is_told_each_time_that_a_line_begins_behind_it(store: Store) {
    let (mut ours, theirs) = (store.connect().await, store.connect().await);
    let mut seen = 0;
    // In the third round the client has seen a number that is ahead of the store's.
    for round in 0..3 {
        let holds = with(&store.request("a"), |request| {
            request.lingers = true;
            request.highest_seen = seen;
        });
        let number = ours.holds(&holds).await;
        for _ in 0..2 {
            let waits = store.writer("a");
            theirs.waits(&waits).await;
            ours.expect_wanted(holds.id).await;
            assert_eq!(theirs.release(&waits).await, Released::Released);
        }
        // What a store keeps of an enqueue that may come later makes no difference.
        if round == 1 {
            let late = Departure::new(store.writer("a"), true);
            let answers = theirs.connection.release(vec![late]).await.unwrap();
            assert_eq!(answers, [Released::NotFound]);
        }
        let waits = store.writer("a");
        theirs.waits(&waits).await;
        ours.expect_wanted(holds.id).await;
        assert_eq!(ours.release(&holds).await, Released::Released);
        assert_eq!(theirs.release(&waits).await, Released::Released);
        if round == 1 {
            seen = number + 3_600_000_000; // an hour, if numbers are the time in microseconds
        }
    }
    // A request that is refused tells it too.
    let holds = with(&store.request("a"), |request| request.lingers = true);
    ours.holds(&holds).await;
    let tries = with(&store.request("a"), |request| request.wait = false);
    assert!(matches!(
        theirs.enqueue(&tries).await,
        Enqueued::Busy { .. }
    ));
    ours.expect_wanted(holds.id).await;
    theirs.close().await;
    ours.close().await;
}

async fn a_release_wakes_the_waiters_that_it_grants_and_no_others(store: Store) {
    let (leaving, mut next, mut last) = (
        store.connect().await,
        store.connect().await,
        store.connect().await,
    );
    let writer = store.writer("c");
    leaving.holds(&writer).await;
    let readers = [store.reader("c"), store.reader("c")];
    let mut expected = Vec::new();
    for reader in &readers {
        expected.push((reader.id, next.waits(reader).await));
    }
    let behind = store.writer("c");
    last.waits(&behind).await;

    assert_eq!(leaving.release(&writer).await, Released::Released);

    let mut woken = Vec::new();
    for _ in 0..2 {
        let wake = next.expect_wake().await;
        woken.push((wake.id, wake.ticket));
    }
    woken.sort_by_key(|(_, number)| *number);
    assert_eq!(woken, expected);
    assert!(matches!(last.renew(&behind).await, Renewed::Waiting { .. }));
    assert_eq!(last.woken_besides(), []);
    for client in [leaving, next, last] {
        client.close().await;
    }
}

async fn a_ticket_that_becomes_smaller_wakes_the_waiters_that_now_hold(store: Store) {
    let (holding, mut waiting) = (store.connect().await, store.connect().await);
    let writer = store.writer("c");
    let number = holding.holds(&writer).await;
    let reader = store.reader("c");
    let behind = waiting.waits(&reader).await;

    let smaller = with(&writer, |request| request.permits = reader.permits);
    assert!(matches!(
        holding.renew(&smaller).await,
        Renewed::Granted { .. }
    ));

    let wake = waiting.expect_wake().await;
    assert_eq!((wake.id, wake.ticket), (reader.id, behind));
    let line = holding.inspect(store.name("c")).await;
    let shown: Vec<_> = line
        .iter()
        .map(|ticket| (ticket.ticket, ticket.permits))
        .collect();
    assert_eq!(shown, [(number, 1), (behind, 1)]);
    // A renewal cannot make a ticket larger again.
    assert!(matches!(
        holding.renew(&writer).await,
        Renewed::Granted { .. }
    ));
    assert_eq!(holding.inspect(store.name("c")).await[0].permits, 1);
    holding.close().await;
    waiting.close().await;
}

async fn a_ticket_ends_after_its_ttl_and_the_next_holds(store: Store) {
    let client = store.connect().await;
    let (dies, next) = (store.writer("a"), store.writer("a"));
    client.holds(&dies).await;
    client.waits(&next).await;

    // The short ttl comes with a renewal. If it came with the enqueue, and the machine stood still
    // between the two enqueues, the ticket would end too early.
    let shorter = with(&dies, |request| request.ttl = Duration::from_millis(300));
    let renewed = client.renew(&shorter).await;
    assert!(matches!(renewed, Renewed::Granted { .. }), "{renewed:?}");

    eventually("the next one holds", SOON, async || {
        matches!(client.renew(&next).await, Renewed::Granted { .. })
    })
    .await;
    assert_eq!(client.renew(&dies).await, Renewed::Lost);
    assert_eq!(client.release(&dies).await, Released::NotFound);
    client.close().await;
}

/// Because of this, tokens rise even after the store has lost its data. The store ignores a number
/// that is more than a day ahead of its clock.
async fn a_number_is_greater_than_any_that_the_client_has_seen(store: Store) {
    const A_DAY_OF_MICROS: u64 = 86_400_000_000;
    let client = store.connect().await;
    let first = store.writer("a");
    let seen = client.holds(&first).await + 1_000_000;
    assert_eq!(client.release(&first).await, Released::Released);

    let next = with(&store.request("a"), |request| request.highest_seen = seen);
    let number = client.holds(&next).await;
    assert!(number > seen, "{number} after {seen}");
    assert_eq!(client.release(&next).await, Released::Released);

    let wrong = with(&store.request("a"), |request| {
        request.highest_seen = seen + 365 * A_DAY_OF_MICROS;
    });
    let number = client.holds(&wrong).await;
    assert!(number < seen + 2 * A_DAY_OF_MICROS, "{number} after {seen}");
    client.close().await;
}

/// No request reaches the store between the expiry of the waiter and the release.
async fn a_release_skips_an_expired_waiter_and_wakes_the_next(store: Store) {
    let (leaving, mut waiting) = (store.connect().await, store.connect().await);
    let (holds, next) = (store.writer("a"), store.writer("a"));
    let short = Duration::from_millis(200);
    let dies = store.writer("a");
    leaving.holds(&holds).await;
    leaving.waits(&dies).await;
    let number = waiting.waits(&next).await;
    let renewed = leaving
        .renew(&with(&dies, |request| request.ttl = short))
        .await;
    assert!(matches!(renewed, Renewed::Waiting { .. }), "{renewed:?}");
    tokio::time::sleep(2 * short).await; // only time makes a ticket expire

    assert_eq!(leaving.release(&holds).await, Released::Released);

    let wake = waiting.expect_wake().await;
    assert_eq!((wake.id, wake.ticket), (next.id, number));
    assert_eq!(leaving.renew(&dies).await, Renewed::Lost);
    leaving.close().await;
    waiting.close().await;
}

/// Renewals with a longer ttl and with a shorter one, for a holder and for a waiter.
async fn a_renewal_sets_when_a_ticket_expires(store: Store) {
    let client = store.connect().await;
    let [holds, first, second] = [(); 3].map(|()| store.writer("a"));
    let line = [
        client.holds(&holds).await,
        client.waits(&first).await,
        client.waits(&second).await,
    ];
    let numbers = async || {
        let line = client.inspect(store.name("a")).await;
        line.iter().map(|ticket| ticket.ticket).collect::<Vec<_>>()
    };
    let lasts = |request: &Arc<Request>, ttl| with(request, |request| request.ttl = ttl);
    let (long, short) = (2 * LEASE, Duration::from_millis(500));

    for (at, request) in [&holds, &first].into_iter().enumerate() {
        let answer = client.renew(&lasts(request, long)).await;
        let (Renewed::Granted { valid_for } | Renewed::Waiting { valid_for, .. }) = answer else {
            panic!("{answer:?}");
        };
        assert_eq!(valid_for, long);
        let shown = client.inspect(store.name("a")).await;
        assert!(shown[at].remaining > LEASE, "{shown:?}");
        assert_eq!(numbers().await, line);
    }

    let renewed = client.renew(&lasts(&first, short)).await;
    assert!(matches!(renewed, Renewed::Waiting { .. }), "{renewed:?}");
    eventually("the first in line has ended", SOON, async || {
        numbers().await == [line[0], line[2]]
    })
    .await;
    let renewed = client.renew(&lasts(&holds, short)).await;
    assert!(matches!(renewed, Renewed::Granted { .. }), "{renewed:?}");
    eventually("the holder has ended", SOON, async || {
        client.renew(&lasts(&second, long)).await == Renewed::Granted { valid_for: long }
    })
    .await;
    assert_eq!(numbers().await, line[2..]);
    client.close().await;
}

/// The batch has tickets of two names. For each name, all of its tickets must become smaller before
/// the waiter fits.
async fn tickets_are_made_smaller_in_one_batch(store: Store) {
    let client = store.connect().await;
    let pool = |permits| store.permits("pool", permits, 4);
    let holders = [pool(2), store.writer("catalog"), pool(2)];
    for holder in &holders {
        client.holds(holder).await;
    }
    let waiters = [pool(2), store.reader("catalog")];
    for waiter in &waiters {
        client.waits(waiter).await;
    }

    let smaller = holders.map(|holder| with(&holder, |request| request.permits = NonZeroU32::MIN));
    let renewed = client
        .connection
        .renew(smaller.to_vec(), PATIENCE)
        .await
        .unwrap();

    let holds = |answer: &Renewed| matches!(answer, Renewed::Granted { .. });
    assert!(renewed.iter().all(holds), "{renewed:?}");
    eventually("the waiters hold", SOON, async || {
        let asked = client
            .connection
            .renew(waiters.to_vec(), PATIENCE)
            .await
            .unwrap();
        asked.iter().all(holds)
    })
    .await;
    for full in [pool(1), store.writer("catalog")] {
        client.waits(&full).await;
    }
    client.close().await;
}
