//! The deadline: until when this process may rely on a lease.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use super::{TTL, in_every_order, request, spawn, wait_for};
use crate::client::lease::{Lease, Trust};
use crate::clock::{Clock, Instant};
use crate::error::LostReason;
use crate::sync::Mutex;

/// When the request was sent. The deadline is a little less than ten seconds later.
const SENT: Instant = at(100);

const fn at(seconds: u64) -> Instant {
    Instant::from_nanos(seconds * 1_000_000_000)
}

fn unsent() -> Arc<Lease> {
    Arc::new(Lease::new(Arc::new(request(NonZeroU32::MIN)), true))
}

fn held() -> Arc<Lease> {
    let lease = unsent();
    lease.answered(7, SENT, TTL);
    lease
}

#[test]
fn a_renewal_that_comes_together_with_a_loss_revives_nothing() {
    in_every_order(|| {
        let lease = held();
        let renewal = spawn({
            let lease = Arc::clone(&lease);
            move || lease.extend(at(105), TTL, at(106))
        });

        assert!(lease.lose(LostReason::Taken));
        assert_eq!(lease.lost(at(106)), Some(LostReason::Taken));
        let _ = renewal.join().unwrap();

        assert_eq!(lease.lost(at(106)), Some(LostReason::Taken));
        assert_eq!(lease.deadline(), Instant::from_nanos(0));
    });
}

#[test]
fn a_thread_that_has_seen_a_lease_lost_never_sees_it_held_again() {
    in_every_order(|| {
        let lease = held();
        // One acknowledgement comes in time, one comes after the deadline, and this thread reads
        // the lease.
        let in_time = spawn({
            let lease = Arc::clone(&lease);
            move || lease.extend(at(105), TTL, at(109)).is_ok()
        });
        let late = spawn({
            let lease = Arc::clone(&lease);
            move || lease.extend(at(109), TTL, at(111)).is_ok()
        });

        let seen = lease.lost(at(111));
        let seen_again = lease.lost(at(109));

        if seen.is_some() {
            assert_eq!(seen_again, seen);
        }
        let (in_time, late) = (in_time.join().unwrap(), late.join().unwrap());
        assert!(
            in_time || !late,
            "revived by an acknowledgement that came late"
        );
        if seen.is_some() {
            assert_eq!(lease.lost(at(109)), seen);
        } else {
            assert!(in_time, "held beyond its deadline and not renewed");
        }
    });
}

#[test]
fn of_two_reasons_all_see_the_same_and_only_its_caller_was_first() {
    in_every_order(|| {
        let lease = held();
        let lose = |reason| {
            let lease = Arc::clone(&lease);
            spawn(move || {
                let first = lease.lose(reason);
                assert!(lease.lost(at(101)).is_some(), "lost, and believed in");
                first.then_some(reason)
            })
        };
        let taken = lose(LostReason::Taken);
        let shutdown = lose(LostReason::Shutdown);

        let seen = lease.lost(at(101));
        let given = [taken.join().unwrap(), shutdown.join().unwrap()];

        let reason = lease.lost(at(101));
        assert!(
            seen.is_none() || seen == reason,
            "{seen:?}, then {reason:?}"
        );
        let given: Vec<_> = given.into_iter().flatten().collect();
        assert_eq!(given, Vec::from_iter(reason));
    });
}

#[test]
fn a_thread_that_sees_the_loss_sees_its_reason() {
    in_every_order(|| {
        let lease = held();
        let loser = spawn({
            let lease = Arc::clone(&lease);
            move || lease.lose(LostReason::Taken)
        });

        let seen = lease.lost(at(101));

        assert!(matches!(seen, None | Some(LostReason::Taken)), "{seen:?}");
        assert!(loser.join().unwrap());
    });
}

#[test]
fn of_two_renewals_the_later_counts() {
    in_every_order(|| {
        let lease = held();
        let renewals = [103, 105].map(|sent| {
            let lease = Arc::clone(&lease);
            spawn(move || lease.extend(at(sent), TTL, at(106)).unwrap())
        });

        for renewal in renewals {
            renewal.join().unwrap();
        }

        assert_eq!(lease.lost(at(114)), None);
        assert_eq!(lease.lost(at(115)), Some(LostReason::Expired));
    });
}

#[test]
fn no_renewal_gets_past_the_end_that_is_being_set() {
    in_every_order(|| {
        let lease = held();
        let renewals = [105, 107].map(|sent| {
            let lease = Arc::clone(&lease);
            spawn(move || lease.extend(at(sent), TTL, at(108)).unwrap())
        });

        lease.end_at(at(112));
        for renewal in renewals {
            renewal.join().unwrap();
        }

        assert_eq!(lease.deadline(), at(112));
        assert_eq!(lease.lost(at(112)), Some(LostReason::MaxHold));
    });
}

/// The store keeps a ticket for the ttl of the renewal that it has carried out last. This process
/// must not count on a longer ttl.
#[test]
fn no_more_is_believed_of_an_extension_than_the_store_has() {
    in_every_order(|| {
        let lease = held();
        let store = Arc::new(Mutex::new(TTL));
        let keeper = spawn({
            let (lease, store) = (Arc::clone(&lease), Arc::clone(&store));
            move || {
                let renewal = lease.renewal(at(103));
                let ttl = renewal.ttl;
                *store.lock().unwrap() = ttl;
                renewal.answered(ttl)
            }
        });

        lease.lengthen(6 * TTL);
        let renewal = lease.renewal(at(103));
        let ttl = renewal.ttl;
        *store.lock().unwrap() = ttl;
        let believed = renewal.answered(ttl);

        let believed_by_keeper = keeper.join().unwrap();
        let has = *store.lock().unwrap();
        assert!(believed.max(believed_by_keeper) <= has);
        assert_eq!(lease.trust(at(103)), Trust::Whole, "both are answered");
    });
}

#[test]
fn an_answer_that_comes_together_with_a_shutdown_holds_nothing() {
    in_every_order(|| {
        let lease = unsent();
        let shutdown = spawn({
            let lease = Arc::clone(&lease);
            move || lease.lose(LostReason::Shutdown)
        });

        lease.answered(7, SENT, TTL);
        let seen = lease.lost(at(101));
        assert!(shutdown.join().unwrap());

        assert!(
            matches!(seen, None | Some(LostReason::Shutdown)),
            "{seen:?}"
        );
        assert_eq!(lease.lost(at(101)), Some(LostReason::Shutdown));
    });
}

#[test]
fn a_task_that_waits_for_the_loss_is_told() {
    in_every_order(|| {
        let clock = Clock::by_hand();
        clock.stop();
        let lease = unsent();
        lease.answered(7, clock.now(), TTL);
        let loser = spawn({
            let (lease, clock) = (Arc::clone(&lease), clock.clone());
            move || {
                let _ = lease.extend(clock.now(), TTL + Duration::from_secs(1), clock.now());
                lease.lose(LostReason::Taken)
            }
        });

        assert_eq!(wait_for(lease.until_lost(&clock)), LostReason::Taken);

        assert!(loser.join().unwrap());
    });
}

#[test]
fn a_wake_up_that_overtakes_its_reply_or_comes_with_it_is_seen() {
    in_every_order(|| {
        let lease = unsent();
        let wake_up = spawn({
            let lease = Arc::clone(&lease);
            move || lease.grant(7, SENT)
        });

        // This does what a waiter in the store's line does.
        lease.answered(7, SENT, TTL);
        wait_for(async {
            loop {
                let changed = lease.changed.notified();
                let mut changed = std::pin::pin!(changed);
                changed.as_mut().enable();
                if lease.is_granted(1) {
                    return;
                }
                changed.await;
            }
        });

        wake_up.join().unwrap();
    });
}
