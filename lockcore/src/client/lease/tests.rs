//! Tests of the lease record, and leases that the tests of other modules use.

use std::num::NonZeroU32;

use super::*;
use crate::name::{Name, Namespace};
use crate::request::Id;

pub(super) const TTL: Duration = Duration::from_secs(10);

pub(crate) fn lease() -> Lease {
    lease_with(TTL, 1)
}

pub(crate) fn lease_for(ttl: Duration) -> Lease {
    lease_with(ttl, 1)
}

fn lease_with(ttl: Duration, permits: u32) -> Lease {
    let permits = NonZeroU32::new(permits).unwrap();
    let namespace = Namespace::new("test").unwrap();
    Lease::new(
        Arc::new(Request {
            name: Name::new(namespace, "n").unwrap(),
            id: Id::draw().unwrap(),
            permits,
            capacity: permits,
            ttl,
            wait: true,
            name_ahead: false,
            lingers: false,
            highest_seen: 0,
            owner: "test".into(),
        }),
        true,
    )
}

pub(crate) fn at(seconds: u64) -> Instant {
    Instant::from_nanos(seconds * 1_000_000_000)
}

#[test]
fn validity_counts_from_the_send_less_the_drift_allowance() {
    let lease = lease();
    lease.answered(7, at(100), TTL);

    let allowance = Duration::from_millis(105);
    assert_eq!(lease.deadline(), at(110).before(allowance));
    assert_eq!(lease.lost(at(109)), None);
    assert_eq!(lease.lost(at(110)), Some(LostReason::Expired));
}

#[test]
fn an_acknowledgement_that_comes_after_the_deadline_revives_nothing() {
    let lease = lease();
    lease.answered(7, at(100), TTL);

    // The renewal was sent in time and acknowledged too late. Nobody had checked the deadline
    // before.
    assert_eq!(lease.extend(at(109), TTL, at(111)), Err(AlreadyLost));
    assert_eq!(lease.lost(at(111)), Some(LostReason::Expired));
    assert_eq!(lease.extend(at(111), TTL, at(111)), Err(AlreadyLost));
}

#[test]
fn a_late_reply_to_an_early_renewal_does_not_move_the_deadline_back() {
    let lease = lease();
    lease.answered(7, at(100), TTL);
    lease.extend(at(106), TTL, at(107)).unwrap();
    let deadline = lease.deadline();

    lease.extend(at(103), TTL, at(108)).unwrap();
    assert_eq!(lease.deadline(), deadline);
}

#[test]
fn the_first_reason_of_a_loss_stays() {
    let lease = lease();
    lease.answered(7, at(100), TTL);

    assert!(lease.lose(LostReason::Taken));
    assert!(!lease.lose(LostReason::Shutdown));
    assert_eq!(lease.lost(at(101)), Some(LostReason::Taken));
}

#[test]
fn no_renewal_holds_a_lease_beyond_its_end() {
    let lease = lease();
    lease.answered(7, at(100), TTL);
    lease.end_at(at(115));
    lease.extend(at(106), TTL, at(107)).unwrap();

    assert_eq!(lease.deadline(), at(115));
    assert!(!lease.wants_renewal());
    assert_eq!(lease.lost(at(115)), Some(LostReason::MaxHold));
}

#[test]
fn a_ticket_is_made_smaller_one_step_after_the_other() {
    let lease = Arc::new(lease_with(TTL, 5));
    assert!(!lease.shrink_from(4, 3), "it has five");
    assert!(lease.shrink_from(5, 3));
    assert!(lease.is_shrinking() && lease.wants_renewal());
    assert!(!lease.shrink_from(3, 2), "the store knows of five");
    let (before, after) = (Arc::clone(&lease.request), lease.renewal(at(101)));
    assert_eq!((after.permits.get(), after.ttl), (3, TTL));

    assert!(!lease.acknowledged(&before));
    assert_eq!((lease.permits(), lease.counted()), (3, 5));
    assert!(lease.acknowledged(&after));
    assert_eq!(lease.counted(), 3);
    // Each step is reported once, in whatever order the answers come.
    assert!(!lease.acknowledged(&after) && !lease.acknowledged(&before));
    assert!(lease.shrink_from(3, 1));
    assert!(!lease.acknowledged(&after) && lease.is_shrinking());
}

#[test]
fn a_lease_lost_before_its_answer_stays_lost() {
    let lease = lease();
    lease.lose(LostReason::Shutdown);
    lease.answered(7, at(100), TTL);

    assert_eq!(lease.lost(at(101)), Some(LostReason::Shutdown));
}

#[test]
fn a_wake_up_that_overtakes_its_reply_is_kept_and_a_forged_number_grants_nothing() {
    let lease = lease();
    lease.grant(7, at(100));
    assert!(!lease.is_granted(1));
    lease.answered(7, at(100), TTL);
    assert!(lease.is_granted(1));

    lease.grant(8, at(100));
    assert!(
        lease.is_granted(1),
        "a forged wake-up must not undo a true one"
    );
}

#[test]
fn a_forged_number_grants_nothing() {
    let lease = lease();
    lease.grant(8, at(100));
    lease.answered(7, at(100), TTL);
    assert!(!lease.is_granted(1));

    lease.grant(7, at(100));
    assert!(lease.is_granted(1));
}

#[test]
fn a_ttl_beyond_64_bits_of_nanoseconds_is_renewed_with_patience() {
    let lease = lease_for(Duration::MAX);
    lease.answered(7, at(100), Duration::MAX);

    assert!(lease.renewal_patience(at(100)) >= TTL);
}
