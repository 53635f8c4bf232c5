//! The contract at the connection: a ticket that holds goes from one client to another.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::fact::{Fact, group_of, without_sessions};
use super::kit::{Asker, Store, with};
use super::steps::{SOON, STALL, eventually};
use crate::backend::{
    Adoption, Capability, Departure, Enqueued, FULL, Fault, Id, Released, Renewed, Request, Resize,
    ResizeOp, ResizeOutcome,
};

pub(super) fn all() -> Vec<Fact> {
    let adopting = group_of!["adoptions", false, adopts;
        an_adopted_ticket_keeps_its_number_and_its_place
        one_of_several_holders_is_adopted_and_the_others_stay
        an_adoption_that_is_repeated_finds_its_ticket
        a_ticket_is_adopted_once
        a_ticket_that_waits_or_is_another_one_is_not_adopted
        a_ticket_that_was_made_smaller_is_adopted_as_it_is
        an_ask_goes_along_with_its_ticket
        a_late_enqueue_of_a_ticket_that_was_adopted_takes_nothing
        an_adoption_that_comes_after_its_release_takes_nothing
    ];
    // At a store with sessions, only the core ends a ticket before its session.
    let expiring =
        |capability: &Capability| without_sessions(capability).and_then(|()| adopts(capability));
    let expiring = group_of!["adoptions", false, expiring;
        a_ticket_that_has_expired_is_not_adopted
        a_ticket_with_others_behind_it_that_has_expired_is_not_adopted
    ];
    let detaching = group_of!["adoptions", false, detaches;
        a_detached_ticket_outlives_its_client
        a_detached_ticket_ends_after_its_ttl_although_its_client_goes_on
        a_renewal_takes_a_detached_ticket_back
    ];
    let resizing = group_of!["adoptions", false, adopts_and_resizes;
        a_ticket_is_adopted_if_it_holds_by_the_stored_capacity
        an_adoption_that_finds_no_ticket_leaves_the_stored_capacity
    ];
    let refusing = group_of!["adoptions", false, adopts_not;
        an_adoption_is_refused_and_changes_nothing
    ];
    [adopting, expiring, detaching, resizing, refusing].concat()
}

fn adopts(capability: &Capability) -> Result<(), &'static str> {
    match capability.adopts {
        true => Ok(()),
        false => Err("its tickets stay with their clients"),
    }
}

fn adopts_not(capability: &Capability) -> Result<(), &'static str> {
    match capability.adopts {
        true => Err("its tickets go from one client to another"),
        false => Ok(()),
    }
}

fn detaches(capability: &Capability) -> Result<(), &'static str> {
    match capability.sessions {
        true => adopts(capability),
        false => Err("its tickets do not depend on a session"),
    }
}

fn adopts_and_resizes(capability: &Capability) -> Result<(), &'static str> {
    match capability.resizes {
        true => adopts(capability),
        false => Err("it stores no capacities"),
    }
}

/// The request of another client that takes over the ticket of `request`.
fn another(request: &Request) -> Arc<Request> {
    with(request, |request| {
        request.id = Id::draw().unwrap();
        request.wait = false;
        request.owner = "host/2/client job 7".into();
    })
}

async fn an_adopted_ticket_keeps_its_number_and_its_place(store: Store) {
    let (gives, takes, mut other) = (
        store.connect().await,
        store.connect().await,
        store.connect().await,
    );
    let (given, waits) = (store.writer("a"), store.writer("a"));
    let number = gives.holds(&given).await;
    let behind = other.waits(&waits).await;
    let taken = with(&another(&given), |request| request.ttl /= 2);

    let Enqueued::Granted { ticket, valid_for } = takes.adopt(given.id, number, &taken).await
    else {
        panic!("it is not adopted");
    };

    assert_eq!(ticket, number);
    assert!(valid_for <= taken.ttl && !valid_for.is_zero());
    // The id that the ticket had before names no ticket any more.
    assert_eq!(gives.renew(&given).await, Renewed::Lost);
    assert_eq!(gives.release(&given).await, Released::NotFound);
    let line = other.inspect(store.name("a")).await;
    let [holds, second] = &line[..] else {
        panic!("{line:?}");
    };
    assert_eq!((holds.ticket, holds.granted), (number, true));
    assert_eq!((holds.permits, holds.capacity), (FULL.get(), FULL.get()));
    assert_eq!(holds.owner, "host/2/client");
    assert_eq!(holds.owner_text.as_deref(), Some("job 7"));
    assert!(holds.remaining <= taken.ttl, "{:?}", holds.remaining);
    assert_eq!((second.ticket, second.granted), (behind, false));
    assert!(takes.renew(&taken).await.holds());
    assert!(!other.renew(&waits).await.holds());
    assert_eq!(other.woken_besides(), []);

    assert_eq!(takes.release(&taken).await, Released::Released);

    eventually("the waiter holds", SOON, async || {
        other.renew(&waits).await.holds()
    })
    .await;
    for client in [gives, takes, other] {
        client.close().await;
    }
}

async fn one_of_several_holders_is_adopted_and_the_others_stay(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    let tickets = [2, 1, 2].map(|permits| store.permits("s", permits, 5));
    let mut numbers = Vec::new();
    for ticket in &tickets {
        numbers.push(gives.holds(ticket).await);
    }
    let waits = store.permits("s", 5, 5);
    gives.waits(&waits).await;

    let mut taken = Vec::new();
    for at in [1, 2, 0] {
        let ours = another(&tickets[at]);
        let adopted = takes.adopt(tickets[at].id, numbers[at], &ours).await;
        assert!(matches!(adopted, Enqueued::Granted { ticket, .. } if ticket == numbers[at]));
        assert_eq!(gives.renew(&tickets[at]).await, Renewed::Lost);
        taken.push(ours);
        for ours in &taken {
            assert!(takes.renew(ours).await.holds());
        }
        let line = takes.inspect(store.name("s")).await;
        let held = line.iter().filter(|place| place.granted);
        let held: Vec<_> = held.map(|place| (place.ticket, place.permits)).collect();
        assert_eq!(held, [(numbers[0], 2), (numbers[1], 1), (numbers[2], 2)]);
    }

    // Releasing the three tickets frees all permits, and no more.
    for ours in &taken {
        assert!(!gives.renew(&waits).await.holds());
        assert_eq!(takes.release(ours).await, Released::Released);
    }
    eventually("the waiter holds", SOON, async || {
        gives.renew(&waits).await.holds()
    })
    .await;
    let one_more = with(&store.permits("s", 1, 5), |request| request.wait = false);
    assert!(matches!(
        takes.enqueue(&one_more).await,
        Enqueued::Busy { .. }
    ));
    gives.close().await;
    takes.close().await;
}

async fn an_adoption_that_is_repeated_finds_its_ticket(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    for given in [store.writer("a"), store.reader("b")] {
        let beside = store.reader("b");
        gives.holds(&beside).await;
        let number = gives.holds(&given).await;
        let ours = another(&given);

        for _ in 0..3 {
            let adopted = takes.adopt(given.id, number, &ours).await;
            assert!(matches!(adopted, Enqueued::Granted { ticket, .. } if ticket == number));
        }

        assert!(takes.renew(&ours).await.holds());
        assert_eq!(takes.release(&ours).await, Released::Released);
        // After the release of the ticket, a repetition finds nothing.
        assert_eq!(takes.adopt(given.id, number, &ours).await, Enqueued::Gone);
        assert_eq!(gives.release(&beside).await, Released::Released);
    }
    assert!(takes.inspect(store.name("a")).await.is_empty());
    assert!(takes.inspect(store.name("b")).await.is_empty());
    gives.close().await;
    takes.close().await;
}

async fn a_ticket_is_adopted_once(store: Store) {
    let (gives, takes, late) = (
        store.connect().await,
        store.connect().await,
        store.connect().await,
    );
    let given = store.writer("a");
    let number = gives.holds(&given).await;
    let (first, second) = (another(&given), another(&given));

    let adopted = takes.adopt(given.id, number, &first).await;
    assert!(matches!(adopted, Enqueued::Granted { .. }));
    for client in [&late, &takes, &gives] {
        assert_eq!(
            client.adopt(given.id, number, &second).await,
            Enqueued::Gone
        );
        assert_eq!(client.renew(&second).await, Renewed::Lost);
    }

    // The client that has adopted the ticket can give it to another client.
    assert!(takes.renew(&first).await.holds());
    let adopted = late.adopt(first.id, number, &second).await;
    assert!(matches!(adopted, Enqueued::Granted { ticket, .. } if ticket == number));
    assert_eq!(late.release(&second).await, Released::Released);
    for client in [gives, takes, late] {
        client.close().await;
    }
}

async fn a_ticket_that_waits_or_is_another_one_is_not_adopted(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    let (holds, elsewhere) = (store.permits("a", 2, 3), store.permits("b", 2, 3));
    let number = gives.holds(&holds).await;
    gives.holds(&elsewhere).await;
    let waits = store.permits("a", 2, 3);
    let behind = gives.waits(&waits).await;
    let size = |permits, capacity| {
        let other = store.permits("a", permits, capacity);
        with(&another(&holds), |request| {
            (request.permits, request.capacity) = (other.permits, other.capacity);
        })
    };
    let ours = another(&holds);

    for (from, ticket, request) in [
        (waits.id, behind, &another(&waits)),
        (waits.id, number, &ours),
        (holds.id, behind, &ours),
        (holds.id, number + 1, &ours),
        (holds.id, 0, &ours),
        (Id::draw().unwrap(), number, &ours),
        (holds.id, number, &size(1, 3)),
        (holds.id, number, &size(3, 3)),
        (holds.id, number, &size(2, 4)),
        (holds.id, number, &another(&elsewhere)),
        (holds.id, number, &another(&store.permits("c", 2, 3))),
    ] {
        assert_eq!(
            takes.adopt(from, ticket, request).await,
            Enqueued::Gone,
            "{ticket} {request:?}"
        );
        assert_eq!(takes.renew(request).await, Renewed::Lost);
    }

    // All tickets are as they were.
    for ticket in [&holds, &elsewhere] {
        assert!(gives.renew(ticket).await.holds());
    }
    assert!(!gives.renew(&waits).await.holds());
    assert_eq!(gives.release(&holds).await, Released::Released);
    eventually("the waiter holds", SOON, async || {
        gives.renew(&waits).await.holds()
    })
    .await;
    let adopted = takes.adopt(waits.id, behind, &another(&waits)).await;
    assert!(matches!(adopted, Enqueued::Granted { ticket, .. } if ticket == behind));
    gives.close().await;
    takes.close().await;
}

const SHORT: Duration = Duration::from_millis(300);

async fn a_ticket_that_has_expired_is_not_adopted(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    // The ticket is alone in the line. In the second case, another ticket is beside it, which
    // lives.
    for (short, beside) in [
        (store.writer("a"), None),
        (store.reader("b"), Some(store.reader("b"))),
    ] {
        if let Some(beside) = &beside {
            takes.holds(beside).await;
        }
        let given = with(&short, |request| request.ttl = SHORT);
        let number = gives.holds(&given).await;
        let ours = with(&another(&given), |request| request.ttl = 100 * SHORT);

        eventually("it has expired", SOON, async || {
            let line = takes.inspect(given.name.clone()).await;
            line.iter().all(|place| place.ticket != number)
        })
        .await;

        assert_eq!(takes.adopt(given.id, number, &ours).await, Enqueued::Gone);
        assert_eq!(takes.renew(&ours).await, Renewed::Lost);
        let next = store.reader(given.name.as_str());
        assert!(takes.holds(&next).await > number);
        assert_eq!(takes.adopt(given.id, number, &ours).await, Enqueued::Gone);
        for ticket in [Some(&next), beside.as_ref()].into_iter().flatten() {
            assert!(takes.renew(ticket).await.holds());
        }
    }
    gives.close().await;
    takes.close().await;
}

async fn a_ticket_with_others_behind_it_that_has_expired_is_not_adopted(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    let given = with(&store.request("a"), |request| request.ttl = SHORT);
    let number = gives.holds(&given).await;
    let next = store.writer("a");
    // If the machine stalls, the first ticket may have expired, and this one holds at once.
    let behind = takes.enqueue(&next).await;
    assert!(!matches!(behind, Enqueued::Busy { .. }), "{behind:?}");
    let ours = with(&another(&given), |request| request.ttl = 100 * SHORT);

    // `inspect` only reads: it does not remove the expired ticket. So the adoption is the request
    // that finds it expired.
    eventually("it has expired", SOON, async || {
        let line = takes.inspect(store.name("a")).await;
        line.first().is_some_and(|first| first.ticket > number)
    })
    .await;
    assert_eq!(takes.adopt(given.id, number, &ours).await, Enqueued::Gone);

    assert!(takes.renew(&next).await.holds());
    assert_eq!(takes.adopt(given.id, number, &ours).await, Enqueued::Gone);
    assert!(takes.renew(&next).await.holds());
    assert_eq!(takes.renew(&ours).await, Renewed::Lost);
    gives.close().await;
    takes.close().await;
}

async fn a_ticket_that_was_made_smaller_is_adopted_as_it_is(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    let given = store.writer("a");
    let number = gives.holds(&given).await;
    let reads = with(&given, |request| {
        request.permits = store.reader("a").permits;
    });
    assert!(gives.renew(&reads).await.holds());

    assert_eq!(
        takes.adopt(given.id, number, &another(&given)).await,
        Enqueued::Gone
    );
    let ours = another(&reads);
    let adopted = takes.adopt(given.id, number, &ours).await;

    assert!(matches!(adopted, Enqueued::Granted { ticket, .. } if ticket == number));
    let beside = store.reader("a");
    gives.holds(&beside).await;
    assert_eq!(takes.release(&ours).await, Released::Released);
    assert_eq!(gives.release(&beside).await, Released::Released);
    gives.close().await;
    takes.close().await;
}

async fn an_ask_goes_along_with_its_ticket(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    for given in [store.writer("a"), store.reader("b")] {
        let beside = store.reader("b");
        gives.holds(&beside).await;
        let number = gives.holds(&given).await;
        assert!(
            takes
                .ask_back(&given, "7000 host/3/client needs it: now")
                .await
        );
        let ours = another(&given);

        let adopted = takes.adopt(given.id, number, &ours).await;
        assert!(matches!(adopted, Enqueued::Granted { .. }));
        let repeated = takes.adopt(given.id, number, &ours).await;
        assert!(matches!(repeated, Enqueued::Granted { .. }));

        let grace = Duration::from_secs(7);
        let renewed = takes.renew(&ours).await;
        assert!(
            matches!(renewed, Renewed::AskedBack { grace: given, .. } if given == grace),
            "{renewed:?}"
        );
        let line = takes.inspect(given.name.clone()).await;
        let shown = line.iter().find(|place| place.ticket == number);
        let asked = shown.and_then(|place| place.asked_back.clone());
        assert_eq!(asked.expect("it is not shown").why, "needs it: now");
        assert_eq!(shown.unwrap().owner_text.as_deref(), Some("job 7"));
        // A later ask-back replaces this one, and reaches the client that has the ticket now.
        assert!(gives.ask_back(&ours, "0 host/3/client now").await);
        let renewed = takes.renew(&ours).await;
        assert!(matches!(renewed, Renewed::AskedBack { grace, .. } if grace.is_zero()));
        assert_eq!(takes.release(&ours).await, Released::Released);
        assert_eq!(gives.release(&beside).await, Released::Released);
    }
    gives.close().await;
    takes.close().await;
}

async fn adopt_with_mark(client: &Asker, from: Id, number: u64, to: &Arc<Request>) -> Enqueued {
    let adoption = Adoption::new(from, number, true, Arc::clone(to));
    client.connection.adopt(Arc::new(adoption)).await.unwrap()
}

async fn a_late_enqueue_of_a_ticket_that_was_adopted_takes_nothing(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    for given in [store.writer("a"), store.reader("b")] {
        let beside = store.reader("b");
        gives.holds(&beside).await;
        let number = gives.holds(&given).await;
        let ours = another(&given);
        let adopted = adopt_with_mark(&takes, given.id, number, &ours).await;
        assert!(matches!(adopted, Enqueued::Granted { .. }));

        assert_eq!(gives.enqueue(&given).await, Enqueued::Gone);

        assert!(takes.renew(&ours).await.holds());
        assert_eq!(takes.release(&ours).await, Released::Released);
        assert_eq!(gives.enqueue(&given).await, Enqueued::Gone);
        assert_eq!(gives.release(&beside).await, Released::Released);
        assert!(takes.inspect(given.name.clone()).await.is_empty());
    }
    gives.close().await;
    takes.close().await;
}

async fn an_adoption_that_comes_after_its_release_takes_nothing(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    let given = store.writer("a");
    let number = gives.holds(&given).await;
    let (late, ours) = (another(&given), another(&given));
    let leaving = vec![Departure::new(Arc::clone(&late), true)];
    let released = takes.connection.release(leaving).await.unwrap();
    assert_eq!(released, [Released::NotFound]);

    assert_eq!(takes.adopt(given.id, number, &late).await, Enqueued::Gone);

    // Another client can adopt the ticket.
    assert!(gives.renew(&given).await.holds());
    let adopted = takes.adopt(given.id, number, &ours).await;
    assert!(matches!(adopted, Enqueued::Granted { .. }));
    assert_eq!(takes.release(&ours).await, Released::Released);
    gives.close().await;
    takes.close().await;
}

/// The ttl of detached tickets. Servers may count whole seconds.
const DETACHED: Duration = Duration::from_secs(1);

async fn a_detached_ticket_outlives_its_client(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    let given = store.writer("a");
    let number = gives.holds(&given).await;

    gives.detach(&given).await;
    gives.close().await;

    let ours = another(&given);
    let adopted = takes.adopt(given.id, number, &ours).await;
    assert!(
        matches!(adopted, Enqueued::Granted { ticket, .. } if ticket == number),
        "{adopted:?}"
    );
    assert!(takes.renew(&ours).await.holds());
    assert_eq!(takes.release(&ours).await, Released::Released);
    takes.close().await;
}

/// The second detach is a repetition, as after a lost answer.
async fn a_detached_ticket_ends_after_its_ttl_although_its_client_goes_on(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    let [given, kept] = ["a", "b"].map(|name| store.writer(name));
    let given = with(&given, |request| request.ttl = DETACHED);
    let number = gives.holds(&given).await;
    gives.holds(&kept).await;

    gives.detach(&given).await;
    gives.detach(&given).await;

    eventually("it has ended", STALL, async || {
        takes.inspect(given.name.clone()).await.is_empty()
    })
    .await;
    let late = takes.adopt(given.id, number, &another(&given)).await;
    assert_eq!(late, Enqueued::Gone);
    assert_eq!(gives.renew(&given).await, Renewed::Lost);
    assert!(gives.renew(&kept).await.holds());
    gives.close().await;
    takes.close().await;
}

/// Another ticket shows that the time is over: it is detached later, and with a longer ttl.
async fn a_renewal_takes_a_detached_ticket_back(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    let [kept, given] = [("a", DETACHED), ("b", 4 * DETACHED)]
        .map(|(name, ttl)| with(&store.writer(name), |request| request.ttl = ttl));
    gives.holds(&kept).await;
    gives.holds(&given).await;

    gives.detach(&kept).await;
    assert!(gives.renew(&kept).await.holds());
    gives.detach(&given).await;

    eventually("the time is over", STALL, async || {
        takes.inspect(given.name.clone()).await.is_empty()
    })
    .await;
    assert!(gives.renew(&kept).await.holds());
    assert_eq!(gives.release(&kept).await, Released::Released);
    gives.close().await;
    takes.close().await;
}

/// Stores a capacity for a name that has none. Callers state 2.
async fn store_capacity(store: &Store, client: &Asker, name: &str, capacity: u32) {
    let op = ResizeOp::Set {
        capacity: Some(capacity),
        after: None,
        stated: NonZeroU32::new(2).unwrap(),
    };
    let change = Resize::new(store.name(name), Id::draw().unwrap(), op);
    let resized = client.resize(&Arc::new(change)).await;
    assert_eq!(resized.outcome, ResizeOutcome::Applied);
}

async fn a_ticket_is_adopted_if_it_holds_by_the_stored_capacity(store: Store) {
    let (gives, takes) = (store.connect().await, store.connect().await);
    store_capacity(&store, &gives, "larger", 3).await;
    store_capacity(&store, &gives, "smaller", 1).await;

    let holders: Vec<_> = (0..3).map(|_| store.permits("larger", 1, 2)).collect();
    let mut last = 0;
    for holder in &holders {
        last = gives.holds(holder).await;
    }
    let taken = another(&holders[2]);
    let adopted = takes.adopt(holders[2].id, last, &taken).await;
    assert!(
        matches!(adopted, Enqueued::Granted { ticket, .. } if ticket == last),
        "{adopted:?}"
    );

    let (holds, waits) = (
        store.permits("smaller", 1, 2),
        store.permits("smaller", 1, 2),
    );
    gives.holds(&holds).await;
    let number = gives.waits(&waits).await;
    let refused = takes.adopt(waits.id, number, &another(&waits)).await;
    assert_eq!(refused, Enqueued::Gone);
    let renewed = gives.renew(&waits).await;
    assert!(matches!(renewed, Renewed::Waiting { .. }), "{renewed:?}");
    gives.close().await;
    takes.close().await;
}

async fn an_adoption_that_finds_no_ticket_leaves_the_stored_capacity(store: Store) {
    let client = store.connect().await;
    store_capacity(&store, &client, "a", 3).await;
    let gone = store.permits("a", 1, 2);

    let refused = client.adopt(gone.id, 1, &another(&gone)).await;

    assert_eq!(refused, Enqueued::Gone);
    for _ in 0..3 {
        client.holds(&store.permits("a", 1, 2)).await;
    }
    // The stored capacity was not given to another name.
    for _ in 0..2 {
        client.holds(&store.permits("b", 1, 2)).await;
    }
    client.waits(&store.permits("b", 1, 2)).await;
    client.close().await;
}

async fn an_adoption_is_refused_and_changes_nothing(store: Store) {
    let client = store.connect().await;
    let given = store.writer("a");
    let number = client.holds(&given).await;

    let adoption = Adoption::new(given.id, number, false, another(&given));
    let refused = client.connection.adopt(Arc::new(adoption)).await;

    assert_eq!(refused.unwrap_err().fault(), Fault::Config);
    assert!(client.renew(&given).await.holds());
    assert_eq!(client.release(&given).await, Released::Released);
    client.close().await;
}
