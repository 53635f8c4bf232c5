//! The renewals of a lease: what each asks for, and how much of its answer this process may rely
//! on. Sending them is in `keeper`.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::Lease;
use super::asked::Asked;
use crate::backend::{Fault, StoreError};
use crate::clock::{Instant, nanos};
use crate::request::Request;
use crate::sync::atomic::Ordering;

/// How late a store may carry out a request that it has not answered. A server that was stopped
/// reads its requests when it continues. After this time such a request counts as never carried
/// out.
pub(crate) const LONGEST_STALL: Duration = Duration::from_secs(60);

/// How much of the ttl a renewal that is sent now may count on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trust {
    /// The whole ttl.
    Whole,
    /// Less, until the renewals with a shorter ttl that are in flight are answered.
    InFlight,
    /// Only `ttl`, for the time `rest`. It is the ttl of an earlier request that was never
    /// answered.
    Late { ttl: Duration, rest: Duration },
}

/// One renewal of a lease. If it is dropped before the store has [answered](Self::answered), it
/// counts as a renewal that may arrive later.
#[derive(Debug)]
pub(crate) struct Renewal {
    lease: Arc<Lease>,
    request: Arc<Request>,
    sent: Instant,
    /// See [`Lease::at_most`].
    at_most: Duration,
    answered: Cell<bool>,
}

impl Lease {
    /// From now on the ticket is renewed with this ttl, if it is longer than the present one.
    pub(crate) fn lengthen(&self, ttl: Duration) {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if ttl > self.ttl() {
            self.ttl.store(nanos(ttl), Ordering::SeqCst);
            asked.shorter += std::mem::take(&mut asked.now);
        }
    }

    /// The request as it was enqueued, but with the present ttl.
    pub(crate) fn as_enqueued(&self) -> Arc<Request> {
        self.asked_with(self.request.permits.get(), self.ttl())
    }

    /// The request with the permits and the ttl that the ticket is to have now.
    pub(crate) fn as_it_is(&self) -> Arc<Request> {
        self.asked_with(self.permits(), self.ttl())
    }

    fn asked_with(&self, permits: u32, ttl: Duration) -> Arc<Request> {
        let as_enqueued = (self.request.permits.get(), self.request.ttl);
        match NonZeroU32::new(permits) {
            Some(fewer) if (permits, ttl) != as_enqueued => Arc::new(Request {
                permits: fewer,
                ttl,
                ..(*self.request).clone()
            }),
            _ => Arc::clone(&self.request),
        }
    }

    /// Makes the next renewal, which the caller is about to send. While the ticket is being made
    /// smaller, every renewal asks for the smaller number of permits.
    pub(crate) fn renewal(self: &Arc<Self>, now: Instant) -> Renewal {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.now += 1;
        let (ttl, at_most) = (self.ttl(), self.at_most(&asked, now));
        drop(asked);
        Renewal {
            lease: Arc::clone(self),
            request: self.asked_with(self.permits(), ttl),
            sent: now,
            at_most,
            answered: Cell::new(false),
        }
    }

    /// How long a renewal that is sent now waits for its answer: a quarter of the ttl. (The caller
    /// gives up after a few operation timeouts, if these are shorter.) The first renewal is sent after a
    /// third of the ttl. If it and the next one wait for a whole quarter in vain, at most a sixth
    /// of the ttl is left.
    ///
    /// After the ttl was lengthened, less than two thirds of the new ttl are left, until the store
    /// has acknowledged the new ttl. Until then a renewal waits for three eighths of what is left,
    /// but at least for a quarter of the ttl of the enqueue.
    pub(crate) fn renewal_patience(&self, now: Instant) -> Duration {
        let left = now.until(self.deadline());
        // `ttl` is at most what 64 bits of nanoseconds can say, and the one of the request is not.
        let most = self.ttl() / 4;
        (left / 8 * 3).clamp(most.min(self.request.ttl / 4), most)
    }

    /// How much of the ttl a renewal that is sent now may count on.
    pub(crate) fn trust(&self, now: Instant) -> Trust {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let at_most = self.at_most(&asked, now);
        if at_most >= self.ttl() {
            Trust::Whole
        } else if asked.shorter > 0 {
            Trust::InFlight
        } else {
            Trust::Late {
                ttl: at_most,
                rest: now.until(asked.late_until),
            }
        }
    }

    /// The store has answered the enqueue that was sent at `sent`, and did not answer an earlier
    /// one. It may carry out that one later.
    pub(super) fn enqueue_may_follow(&self, sent: Instant) {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.late = self.request.ttl;
        asked.late_until = sent.after(LONGEST_STALL);
    }

    /// The longest validity that a renewal sent now may count on. It is shorter than the ttl if the
    /// store may carry out another request, with a shorter ttl, after this one.
    fn at_most(&self, asked: &Asked, now: Instant) -> Duration {
        if asked.shorter > 0 {
            self.request.ttl // no renewal has a shorter ttl
        } else if now < asked.late_until {
            asked.late
        } else {
            Duration::MAX
        }
    }
}

impl Renewal {
    /// The store has answered, so this renewal cannot arrive later. Returns how much of the
    /// validity that the store gave may be relied on.
    pub(crate) fn answered(self, valid_for: Duration) -> Duration {
        self.answered.set(true);
        valid_for.min(self.at_most)
    }

    /// The renewal failed. The store has not carried it out, unless the error leaves that unknown.
    pub(crate) fn refused(&self, error: &StoreError) {
        self.answered.set(error.fault() != Fault::Unknown);
    }
}

impl Deref for Renewal {
    type Target = Arc<Request>;

    fn deref(&self) -> &Arc<Request> {
        &self.request
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        let lease = &self.lease;
        let mut asked = lease.asked.lock().unwrap_or_else(PoisonError::into_inner);
        match self.request.ttl < lease.ttl() {
            true => asked.shorter -= 1,
            false => asked.now -= 1,
        }
        if !self.answered.get() {
            // Requests that were late before have arrived by now or never will, so they do not
            // count any more.
            if asked.late_until <= self.sent {
                asked.late = Duration::MAX;
            }
            asked.late = asked.late.min(self.request.ttl);
            asked.late_until = asked.late_until.max(self.sent.after(LONGEST_STALL));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{TTL, at, lease};
    use super::*;

    #[test]
    fn a_longer_ttl_is_believed_in_when_no_shorter_renewal_can_follow() {
        let (lease, long) = (Arc::new(lease()), 6 * TTL);
        lease.answered(7, at(100), TTL);
        let shorter = lease.renewal(at(103));
        lease.lengthen(long);
        lease.lengthen(TTL);
        assert_eq!(lease.ttl(), long);

        // The shorter renewal is in flight, and is answered after the longer one.
        let longer = lease.renewal(at(104));
        assert_eq!((longer.ttl, longer.id), (long, lease.request.id));
        assert_eq!(longer.answered(long), TTL);
        assert_eq!(shorter.answered(TTL), TTL);
        assert_eq!(lease.renewal(at(104)).answered(long), long);

        // This renewal is never answered. It may arrive for as long as a server may have been
        // stopped.
        let longest = 2 * long;
        drop(lease.renewal(at(105)));
        lease.lengthen(longest);
        let late = Trust::Late {
            ttl: long,
            rest: Duration::from_secs(1),
        };
        assert_eq!(lease.trust(at(164)), late);
        assert_eq!(lease.renewal(at(164)).answered(longest), long);
        assert_eq!(lease.trust(at(165)), Trust::Whole);
        assert_eq!(lease.renewal(at(165)).answered(longest), longest);

        // A late renewal that has the same ttl does no harm.
        drop(lease.renewal(at(170)));
        assert_eq!(lease.renewal(at(171)).answered(longest), longest);
    }

    #[test]
    fn an_enqueue_that_was_not_answered_may_follow_for_a_minute() {
        let (lease, long) = (Arc::new(lease()), 6 * TTL);
        lease.set_ambiguous();
        lease.answered(7, at(100), TTL);
        assert_eq!(lease.trust(at(101)), Trust::Whole);

        lease.lengthen(long);

        let late = Trust::Late {
            ttl: TTL,
            rest: Duration::from_secs(1),
        };
        assert_eq!(lease.trust(at(159)), late);
        assert_eq!(lease.renewal(at(159)).answered(long), TTL);
        assert_eq!(lease.trust(at(160)), Trust::Whole);
        assert_eq!(lease.renewal(at(160)).answered(long), long);
    }

    #[test]
    fn a_renewal_that_was_refused_does_not_follow() {
        for (fault, believed) in [
            (Fault::Refused, 2 * TTL),
            (Fault::Retry, 2 * TTL),
            (Fault::Config, 2 * TTL),
            (Fault::Unknown, TTL),
        ] {
            let lease = Arc::new(lease());
            let renewal = lease.renewal(at(101));
            renewal.refused(&StoreError::new(fault, "refused"));
            drop(renewal);
            lease.lengthen(2 * TTL);
            assert_eq!(lease.renewal(at(102)).answered(2 * TTL), believed);
        }
    }
}
