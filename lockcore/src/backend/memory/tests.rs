//! Tests of the store behind its connection.

use super::*;
use crate::name::Namespace;
use crate::request::FULL;

fn request(name: &str, ttl: Duration) -> Request {
    Request {
        name: Name::new(Namespace::new("lock").unwrap(), name).unwrap(),
        id: Id::count(),
        permits: FULL,
        capacity: FULL,
        ttl,
        wait: true,
        name_ahead: false,
        lingers: false,
        highest_seen: 0,
        owner: "".into(),
    }
}

#[test]
fn a_renewal_may_bring_the_end_of_a_ticket_nearer() {
    let clock = Clock::by_hand();
    clock.stop();
    let store = Store::new(clock.clone());
    let ttl = Duration::from_secs(10);
    let (mut holder, waiter) = (request("a", ttl), Arc::new(request("a", ttl)));
    let granted = store.enqueue(Arc::new(holder.clone()), 1).unwrap();
    assert!(matches!(granted, Enqueued::Granted { .. }));
    let waits = store.enqueue(Arc::clone(&waiter), 1).unwrap();
    assert!(matches!(waits, Enqueued::Waiting { .. }));

    holder.ttl = Duration::from_secs(1);
    let renewed = store.renew(&holder);
    assert!(matches!(renewed, Renewed::Granted { .. }));
    clock.advance(Duration::from_secs(2));

    assert!(matches!(store.renew(&waiter), Renewed::Granted { .. }));
    assert_eq!(store.renew(&holder), Renewed::Lost);
}

#[test]
fn a_name_that_reuses_the_memory_of_another_sees_none_of_its_tickets() {
    let clock = Clock::by_hand();
    clock.stop();
    let store = Store::new(clock.clone());
    let (first, second) = (
        Arc::new(request("a", Duration::from_secs(1))),
        Arc::new(request("b", Duration::from_secs(10))),
    );
    let departure = Departure {
        request: Arc::clone(&first),
        enqueue_may_follow: false,
    };
    let mut last = 0;
    for _ in 0..2 {
        let granted = store.enqueue(Arc::clone(&first), 1).unwrap();
        assert!(matches!(granted, Enqueued::Granted { .. }));
        assert_eq!(store.release(&departure), Released::Released);
        assert_eq!(store.release(&departure), Released::NotFound);
        let Ok(Enqueued::Granted { ticket, .. }) = store.enqueue(Arc::clone(&second), 1) else {
            panic!("not granted");
        };
        assert!(ticket >= last, "numbers only rise");
        last = ticket;
        clock.advance(Duration::from_secs(2));
    }

    assert!(store.inspect(&first.name).is_empty());
    assert_eq!(store.inspect(&second.name).len(), 1);
}
