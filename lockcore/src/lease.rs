//! The lease record: what this process knows of one ticket, and until when it may believe in it.
//! Who renews it is `keeper`; what the user sees of it is `guard`.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::clock::{Clock, Instant};
use crate::error::LostReason;
use crate::request::Request;
use crate::sync::Notify;
use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering};
use crate::token::FencingToken;

/// One ticket's state, shared by the acquire loop, the guard, the keeper and the wake-ups.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) request: Arc<Request>,
    /// Whether the keeper prolongs it once it is held. A waiting ticket is always renewed.
    pub(crate) renew: bool,
    /// P3 in one word: the deadline in nanoseconds of the lease clock, or [`LOST`]. It moves
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
    /// Who may use it: [`WRITER`], [`SHRINKING`] or [`SHARED`].
    side: AtomicU8,
    /// What it is renewed with from when it is shrinking.
    shrunk: OnceLock<Arc<Request>>,
    /// Its loss has been told to those who watch the client.
    told: AtomicBool,
    /// An enqueue of this id was sent and never answered, so it may still arrive.
    ambiguous: AtomicBool,
    /// The [epoch](crate::shared::Shared::epoch) in which the store was last asked and said that the
    /// ticket stands.
    confirmed: AtomicU64,
    /// Fires when the ticket is granted or lost.
    pub(crate) changed: Notify,
}

const LOST: u64 = 0;

/// One writer, and who is inside of his hold.
const WRITER: u8 = 0;
/// Nobody writes any more, and the store has not acknowledged it: whoever has it reads on, and nobody else
/// may do anything.
const SHRINKING: u8 = 1;
/// Readers, or the permits of a semaphore.
const SHARED: u8 = 2;

/// The word was final already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AlreadyLost;

impl Lease {
    /// A record for a request that has not been sent: it holds nothing, and cannot expire.
    pub(crate) fn new(request: Arc<Request>, renew: bool) -> Self {
        let exclusive = request.is_exclusive();
        Self {
            request,
            renew,
            deadline: AtomicU64::new(Instant::FAR_FUTURE.as_nanos()),
            hold_until: AtomicU64::new(Instant::FAR_FUTURE.as_nanos()),
            reason: AtomicU8::new(0),
            ticket: AtomicU64::new(0),
            hand_overs: AtomicU16::new(0),
            granted: AtomicU64::new(0),
            granted_at: AtomicU64::new(0),
            side: AtomicU8::new(if exclusive { WRITER } else { SHARED }),
            shrunk: OnceLock::new(),
            told: AtomicBool::new(false),
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
        let to_read = || Arc::new(self.request.to_read());
        self.shrunk.get_or_init(to_read);
        let order = Ordering::SeqCst;
        let _ = self.side.compare_exchange(WRITER, SHRINKING, order, order);
    }

    /// What to renew it with. Once it is to shrink, that asks for it again and again.
    pub(crate) fn renewal(&self) -> &Arc<Request> {
        self.shrunk.get().unwrap_or(&self.request)
    }

    /// A renewal with this was acknowledged. Returns whether the ticket is a read ticket by it, and was
    /// not known to be one.
    pub(crate) fn acknowledged(&self, renewal: &Request) -> bool {
        let order = Ordering::SeqCst;
        let shrinks = self.shrunk.get().is_some() && !renewal.is_exclusive();
        shrinks && (self.side.compare_exchange(SHRINKING, SHARED, order, order)).is_ok()
    }

    /// Of a ticket that one may write under, and nobody else does anything.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.side.load(Ordering::SeqCst) == WRITER
    }

    /// Whether the store has still to be asked to let readers in.
    pub(crate) fn is_shrinking(&self) -> bool {
        self.side.load(Ordering::SeqCst) == SHRINKING
    }

    /// Whether others may read under it, as far as is known.
    pub(crate) fn is_shared(&self) -> bool {
        self.side.load(Ordering::SeqCst) == SHARED
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

/// P3: counted from before the send, less what two clocks may drift apart over the ttl. A
/// hundredth is far above what crystals do (100 ppm); the 5 ms are for rounding and scheduling at
/// the store.
fn deadline(sent: Instant, valid_for: Duration) -> Instant {
    sent.after(valid_for)
        .before(valid_for / 100 + Duration::from_millis(5))
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
        lease_for(TTL)
    }

    pub(crate) fn lease_for(ttl: Duration) -> Lease {
        let namespace = Namespace::new("test").unwrap();
        Lease::new(
            Arc::new(Request {
                name: Name::new(namespace, "n").unwrap(),
                id: Id::draw().unwrap(),
                permits: NonZeroU32::MIN,
                capacity: NonZeroU32::MIN,
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
