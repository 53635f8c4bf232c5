//! The lease record: what this process knows of one ticket, and until when it may believe in it.
//! Who renews it is `keeper`; what the user sees of it is `hold`.

use std::cell::Cell;
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::backend::{Fault, StoreError};
use crate::clock::{Clock, Instant};
use crate::error::LostReason;
use crate::request::{FULL, Request};
use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering};
use crate::sync::{Mutex, Notify};
use crate::token::FencingToken;

/// Of the ttl, how long a grant may wait for its task to collect it. A task that is polled does so in
/// microseconds. The keeper looks every third of the ttl, so that a grant that nobody collects is
/// kept for one ttl at most.
pub(crate) const COLLECTED_WITHIN: f64 = 2.0 / 3.0;

/// One ticket's state, shared by the acquire loop, the guard, the keeper and the wake-ups.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) request: Arc<Request>,
    /// Whether the keeper prolongs it once it is held. A waiting ticket is always renewed.
    pub(crate) renew: bool,
    /// The deadline in nanoseconds of the lease clock, or [`LOST`]. It moves
    /// forward only while it lies in the future, and nothing leaves [`LOST`].
    deadline: AtomicU64,
    /// The deadline never lies beyond this (`max_hold`).
    hold_until: AtomicU64,
    /// Why, as [`reason_code`]; written before the word becomes [`LOST`].
    reason: AtomicU8,
    /// The number of the ticket once the store has told it, else 0.
    ticket: AtomicU64,
    /// How often the ticket was passed on inside this process.
    hand_overs: AtomicU16,
    /// The number that a wake-up or a renewal says is granted, else 0. A wake-up may overtake the
    /// reply to its own enqueue; it is kept here and compared when the reply has come.
    granted: AtomicU64,
    /// See [`granted_at`](Self::granted_at); 0 before that.
    granted_at: AtomicU64,
    /// The permits that it is renewed with, above, and below those that the store is known to count.
    /// Both only fall, and the second follows the first.
    permits: AtomicU64,
    /// The ttl that it is renewed with, in nanoseconds. It only rises, under the mutex of `asked`.
    ttl: AtomicU64,
    asked: Mutex<Asked>,
    /// Its loss has been told to those who watch the client.
    told: AtomicBool,
    /// How many renewals in a row the store has refused, or could not carry out.
    refused: AtomicU64,
    /// An enqueue of this id was sent and never answered, so it may still arrive.
    ambiguous: AtomicBool,
    /// The [epoch](super::shared::Shared::epoch) in which the store was last asked and said that the
    /// ticket stands.
    confirmed: AtomicU64,
    /// Fires when the ticket is granted or lost.
    pub(crate) changed: Notify,
}

const LOST: u64 = 0;

/// Renewals whose answers have not come. Only of use once the ttl has risen: one of before it that the
/// store carries out after those that followed it cuts the ticket's time, without anybody's hearing of
/// it.
#[derive(Debug)]
struct Asked {
    /// With the ttl of now, and with a shorter one.
    now: u32,
    shorter: u32,
    /// The shortest ttl of those that nobody waits for any more, and until when they may arrive.
    late: Duration,
    late_until: Instant,
}

/// What was sent and not answered is carried out within this time or never: as long as a server that
/// was stopped takes to read on.
pub(crate) const LONGEST_STALL: Duration = Duration::from_secs(60);

/// What a lease is renewed with, once. Unless the store [answers](Self::answered), dropping it means
/// that it may still arrive.
#[derive(Debug)]
pub(crate) struct Renewal {
    lease: Arc<Lease>,
    request: Arc<Request>,
    sent: Instant,
    /// See [`Lease::at_most`].
    at_most: Duration,
    answered: Cell<bool>,
}

/// The word was final already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AlreadyLost;

impl Lease {
    /// A record for a request that has not been sent: it holds nothing, and cannot expire.
    pub(crate) fn new(request: Arc<Request>, renew: bool) -> Self {
        let permits = both(request.permits.get(), request.permits.get());
        Self {
            permits: AtomicU64::new(permits),
            ttl: AtomicU64::new(nanos(request.ttl)),
            request,
            renew,
            deadline: AtomicU64::new(Instant::FAR_FUTURE.as_nanos()),
            hold_until: AtomicU64::new(Instant::FAR_FUTURE.as_nanos()),
            reason: AtomicU8::new(0),
            ticket: AtomicU64::new(0),
            hand_overs: AtomicU16::new(0),
            granted: AtomicU64::new(0),
            granted_at: AtomicU64::new(0),
            asked: Mutex::new(Asked {
                now: 0,
                shorter: 0,
                late: Duration::MAX,
                late_until: Instant::from_nanos(0),
            }),
            told: AtomicBool::new(false),
            refused: AtomicU64::new(0),
            ambiguous: AtomicBool::new(false),
            confirmed: AtomicU64::new(0),
            changed: Notify::new(),
        }
    }

    /// The store has answered the enqueue: from here on the ticket has a number and a deadline.
    ///
    /// Called once per lease, by the acquire loop, before the keeper looks after it.
    pub(crate) fn answered(&self, ticket: u64, sent: Instant, valid_for: Duration) {
        self.ticket.store(ticket, Ordering::SeqCst);
        let deadline = deadline(sent, valid_for).as_nanos().max(LOST + 1);
        // Only from "not sent": a lease that shutdown has lost meanwhile stays lost.
        let unsent = Instant::FAR_FUTURE.as_nanos();
        let _ =
            self.deadline
                .compare_exchange(unsent, deadline, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// An acknowledged renewal that was sent at `sent`. A deadline that has passed at `now` is
    /// final even if nobody has noticed it yet.
    pub(crate) fn extend(
        &self,
        sent: Instant,
        valid_for: Duration,
        now: Instant,
    ) -> Result<(), AlreadyLost> {
        let proposed = deadline(sent, valid_for).min(self.hold_until()).as_nanos();
        self.deadline
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |current| {
                (current != LOST && current > now.as_nanos()).then_some(current.max(proposed))
            })
            .map_err(|_| AlreadyLost)?;
        // If the end was set between the two looks at it.
        self.deadline
            .fetch_min(self.hold_until().as_nanos(), Ordering::SeqCst);
        Ok(())
    }

    /// Ends the lease at `until`, whatever renewals say. Called once, when it is handed out.
    pub(crate) fn end_at(&self, until: Instant) {
        let until = until.as_nanos();
        self.hold_until.store(until, Ordering::SeqCst);
        // Only forward in time is refused by the word's rule; LOST, which is 0, stays.
        self.deadline.fetch_min(until, Ordering::SeqCst);
    }

    /// Nobody writes under it any more, and somebody reads: it is to become a read ticket, and is no
    /// writer's from now on, whatever the store knows of it yet.
    pub(crate) fn shrink(&self) {
        self.shrink_from(FULL.get(), 1);
    }

    /// From now on it is renewed with so many permits, if it has had `before`, and as the store knows.
    /// Returns whether it is so.
    ///
    /// One change at a time: a store need not know of two that may both arrive.
    pub(crate) fn shrink_from(&self, before: u32, permits: u32) -> bool {
        let order = Ordering::SeqCst;
        let (old, new) = (both(before, before), both(permits, before));
        (self.permits.compare_exchange(old, new, order, order)).is_ok()
    }

    /// The permits that it is to have; the store may count more.
    pub(crate) fn permits(&self) -> u32 {
        (self.permits.load(Ordering::SeqCst) >> 32) as u32
    }

    /// The permits that the store counts, as far as is known.
    pub(crate) fn counted(&self) -> u32 {
        self.permits.load(Ordering::SeqCst) as u32
    }

    /// The ttl that it is renewed with.
    pub(crate) fn ttl(&self) -> Duration {
        Duration::from_nanos(self.ttl.load(Ordering::SeqCst))
    }

    /// What a renewal gives at best.
    pub(crate) fn longest(&self) -> Duration {
        let ttl = self.ttl();
        ttl.saturating_sub(drift(ttl))
    }

    /// From now on it is renewed with this ttl, if that is longer than the one it has.
    pub(crate) fn lengthen(&self, ttl: Duration) {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if ttl > self.ttl() {
            self.ttl.store(nanos(ttl), Ordering::SeqCst);
            asked.shorter += std::mem::take(&mut asked.now);
        }
    }

    /// As it was enqueued, with the ttl that it may have at the store by now.
    pub(crate) fn as_enqueued(&self) -> Arc<Request> {
        self.asked_with(self.request.permits.get(), self.ttl())
    }

    /// With the permits and the ttl that it is to have at the store.
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

    /// What to renew it with, about to be sent. Once it is to shrink, that asks for it again and again.
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

    /// Whether a renewal that is sent now gives the whole ttl.
    pub(crate) fn is_trusted(&self, now: Instant) -> bool {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        self.at_most(&asked, now) >= self.ttl()
    }

    /// What may be believed of a renewal that is sent now: another one, with a shorter ttl, may be carried
    /// out after it.
    fn at_most(&self, asked: &Asked, now: Instant) -> Duration {
        if asked.shorter > 0 || self.is_ambiguous() {
            self.request.ttl // none has a shorter one
        } else if now < asked.late_until {
            asked.late
        } else {
            Duration::MAX
        }
    }

    /// A renewal with this was acknowledged. Returns whether the store counts no more permits by it than
    /// the ticket is to have, and was not known to.
    pub(crate) fn acknowledged(&self, renewal: &Request) -> bool {
        let order = Ordering::SeqCst;
        let counted = |permits: u64| {
            let (to_have, counted) = ((permits >> 32) as u32, permits as u32);
            let fewer = renewal.permits.get() < counted;
            fewer.then(|| both(to_have, renewal.permits.get()))
        };
        let fewer = self.permits.fetch_update(order, order, counted).is_ok();
        fewer && !self.is_shrinking()
    }

    /// Of a ticket that one may write under, and nobody else does anything.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.permits() == FULL.get()
    }

    /// Whether the store has still to be asked to let others in.
    pub(crate) fn is_shrinking(&self) -> bool {
        let permits = self.permits.load(Ordering::SeqCst);
        (permits >> 32) as u32 != permits as u32
    }

    /// Whether others may read under it, as far as is known.
    pub(crate) fn is_shared(&self) -> bool {
        self.counted() != FULL.get()
    }

    /// The time that no renewal moves the deadline beyond.
    pub(crate) fn hold_until(&self) -> Instant {
        Instant::from_nanos(self.hold_until.load(Ordering::SeqCst))
    }

    /// Whether a renewal would be of any use.
    pub(crate) fn wants_renewal(&self) -> bool {
        self.is_shrinking() || self.renew && self.deadline() < self.hold_until()
    }

    /// Makes the loss final. Returns whether it was this call that did.
    pub(crate) fn lose(&self, reason: LostReason) -> bool {
        // The first reason wins, and with it this call; it is in place before anybody can see LOST.
        let code = reason_code(reason);
        let first = self
            .reason
            .compare_exchange(0, code, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok();
        // Also by who is not the first, who may have been stopped before it.
        self.deadline.swap(LOST, Ordering::SeqCst);
        self.changed.notify_waiters();
        first
    }

    /// Whether this is the first to tell of the loss.
    pub(crate) fn tell_loss(&self) -> bool {
        !self.told.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn is_told(&self) -> bool {
        self.told.load(Ordering::SeqCst)
    }

    /// Returns how many renewals in a row have been refused by now.
    pub(crate) fn renewal_refused(&self) -> u64 {
        self.refused.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn renewal_accepted(&self) {
        self.refused.store(0, Ordering::SeqCst);
    }

    /// Whether the store has refused its last renewal.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused.load(Ordering::SeqCst) > 0
    }

    /// Why the lease is lost, if it is; notices a deadline that has passed.
    pub(crate) fn lost(&self, now: Instant) -> Option<LostReason> {
        let deadline = self.deadline.load(Ordering::SeqCst);
        if deadline != LOST && deadline > now.as_nanos() {
            return None;
        }
        if deadline != LOST {
            self.lose(if deadline >= self.hold_until().as_nanos() {
                LostReason::MaxHold
            } else {
                LostReason::Expired
            });
        }
        Some(reason_of(self.reason.load(Ordering::SeqCst)))
    }

    /// Resolves when the lease is lost, and says why.
    pub(crate) async fn until_lost(&self, clock: &Clock) -> LostReason {
        loop {
            let changed = self.changed.notified();
            let mut changed = std::pin::pin!(changed);
            // Registered before looking: what happens in between is not missed.
            changed.as_mut().enable();
            if let Some(reason) = self.lost(clock.now()) {
                return reason;
            }
            // The keeper fires it at the deadline, also while a renewal hangs.
            changed.await;
        }
    }

    /// The deadline; in the past of every clock when lost.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::from_nanos(self.deadline.load(Ordering::SeqCst))
    }

    /// Notes a grant that a wake-up or a renewal told.
    ///
    /// One with a number that is not the ticket's, which only a forger could have sent, is ignored.
    pub(crate) fn grant(&self, ticket: u64, now: Instant) {
        let known = self.ticket();
        if known != 0 && known != ticket {
            return;
        }
        self.is_granted_since(now);
        self.granted.store(ticket, Ordering::SeqCst);
        self.changed.notify_waiters();
    }

    /// Whether the ticket that the store told us has been granted.
    pub(crate) fn is_granted(&self) -> bool {
        let ticket = self.ticket();
        ticket != 0 && self.granted.load(Ordering::SeqCst) == ticket
    }

    /// It has been granted since `at` at the earliest. The first that is told counts.
    pub(crate) fn is_granted_since(&self, at: Instant) {
        let order = Ordering::SeqCst;
        let _ = (self.granted_at).compare_exchange(0, at.as_nanos(), order, order);
    }

    /// Since when it has been granted, as far as is known: when a wake-up or a renewal told, or when
    /// the enqueue was sent that it was the answer to.
    pub(crate) fn granted_at(&self) -> Option<Instant> {
        let at = self.granted_at.load(Ordering::SeqCst);
        (at != 0).then_some(Instant::from_nanos(at))
    }

    /// Forgets a grant that turned out to be none.
    pub(crate) fn ungrant(&self) {
        self.granted_at.store(0, Ordering::SeqCst);
        self.granted.store(0, Ordering::SeqCst);
    }

    pub(crate) fn ticket(&self) -> u64 {
        self.ticket.load(Ordering::SeqCst)
    }

    /// Counts a hand-over; called under the mutex of the lanes.
    pub(crate) fn pass_on(&self) -> u16 {
        self.hand_overs.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn hand_overs(&self) -> u16 {
        self.hand_overs.load(Ordering::SeqCst)
    }

    /// The token of the latest who got it.
    pub(crate) fn token(&self) -> FencingToken {
        FencingToken::of_ticket(self.ticket(), self.hand_overs())
    }

    /// The store, asked in `epoch`, says that the ticket stands.
    pub(crate) fn confirm(&self, epoch: u64) {
        self.confirmed.fetch_max(epoch, Ordering::SeqCst);
    }

    /// Whether the store has said so since the last gap, after which `epoch` began.
    pub(crate) fn is_confirmed_in(&self, epoch: u64) -> bool {
        self.confirmed.load(Ordering::SeqCst) >= epoch
    }

    pub(crate) fn set_ambiguous(&self) {
        self.ambiguous.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_ambiguous(&self) -> bool {
        self.ambiguous.load(Ordering::SeqCst)
    }
}

impl Renewal {
    /// The store has answered: this does not arrive any more. Returns what the ttl that it gave is worth.
    pub(crate) fn answered(self, valid_for: Duration) -> Duration {
        self.answered.set(true);
        valid_for.min(self.at_most)
    }

    /// It was not carried out, unless that is unknown.
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
            // What was late before and has arrived by now, or never will, does not count any more.
            if asked.late_until <= self.sent {
                asked.late = Duration::MAX;
            }
            asked.late = asked.late.min(self.request.ttl);
            asked.late_until = asked.late_until.max(self.sent.after(LONGEST_STALL));
        }
    }
}

const fn both(to_have: u32, counted: u32) -> u64 {
    (to_have as u64) << 32 | counted as u64
}

/// A ttl is a year at most.
fn nanos(ttl: Duration) -> u64 {
    ttl.as_nanos().try_into().unwrap_or(u64::MAX)
}

/// Counted from before the send, less what two clocks may drift apart over the ttl. A
/// hundredth is far above what crystals do (100 ppm); the 5 ms are for rounding and scheduling at
/// the store.
fn deadline(sent: Instant, valid_for: Duration) -> Instant {
    sent.after(valid_for).before(drift(valid_for))
}

fn drift(ttl: Duration) -> Duration {
    ttl / 100 + Duration::from_millis(5)
}

const fn reason_code(reason: LostReason) -> u8 {
    match reason {
        LostReason::Expired => 1,
        LostReason::Taken => 2,
        LostReason::Shutdown => 3,
        LostReason::MaxHold => 4,
        // A view finds these; no lease is lost by them.
        LostReason::Released => 5,
        LostReason::Forked => 6,
    }
}

const fn reason_of(code: u8) -> LostReason {
    match code {
        2 => LostReason::Taken,
        3 => LostReason::Shutdown,
        4 => LostReason::MaxHold,
        _ => LostReason::Expired,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::name::{Name, Namespace};
    use crate::request::Id;

    const TTL: Duration = Duration::from_secs(10);

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
                highest_seen: 0,
                owner: "test".into(),
            }),
            true,
        )
    }

    fn at(seconds: u64) -> Instant {
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

        // Sent in time, acknowledged too late, and nobody had looked at the deadline before.
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
    fn a_longer_ttl_is_believed_in_when_no_shorter_renewal_can_follow() {
        let (lease, long) = (Arc::new(lease()), 6 * TTL);
        lease.answered(7, at(100), TTL);
        let shorter = lease.renewal(at(103));
        lease.lengthen(long);
        lease.lengthen(TTL);
        assert_eq!(lease.ttl(), long);

        // Under way, then answered.
        let longer = lease.renewal(at(104));
        assert_eq!((longer.ttl, longer.id), (long, lease.request.id));
        assert_eq!(longer.answered(long), TTL);
        assert_eq!(shorter.answered(TTL), TTL);
        assert_eq!(lease.renewal(at(104)).answered(long), long);

        // Never answered: it is not believed to be gone before a server cannot have been stopped any longer.
        let longest = 2 * long;
        drop(lease.renewal(at(105)));
        lease.lengthen(longest);
        assert!(!lease.is_trusted(at(164)));
        assert_eq!(lease.renewal(at(164)).answered(longest), long);
        assert!(lease.is_trusted(at(165)));
        assert_eq!(lease.renewal(at(165)).answered(longest), longest);

        // One that is as long costs nothing when it is late.
        drop(lease.renewal(at(170)));
        assert_eq!(lease.renewal(at(171)).answered(longest), longest);
        // The first request may be carried out again.
        lease.set_ambiguous();
        assert_eq!(lease.renewal(at(300)).answered(longest), TTL);
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
        // Each is told of once, in whatever order answers come.
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
        assert!(!lease.is_granted());
        lease.answered(7, at(100), TTL);
        assert!(lease.is_granted());

        lease.grant(8, at(100));
        assert!(
            lease.is_granted(),
            "a forged wake-up must not undo a true one"
        );
    }

    #[test]
    fn a_forged_number_grants_nothing() {
        let lease = lease();
        lease.grant(8, at(100));
        lease.answered(7, at(100), TTL);
        assert!(!lease.is_granted());

        lease.grant(7, at(100));
        assert!(lease.is_granted());
    }
}
