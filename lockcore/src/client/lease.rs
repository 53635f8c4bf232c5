//! The lease record: what this process knows of one ticket, and until when it may rely on the
//! ticket. `renewal` has the content of the renewals, and `keeper` sends them. The user's view of a
//! lease is in `hold`.

mod asked;
mod renewal;

use std::sync::Arc;
use std::time::Duration;

use self::asked::Asked;
pub(crate) use self::renewal::{LONGEST_STALL, Renewal, Trust};
use crate::clock::{Clock, Instant, nanos};
use crate::error::LostReason;
use crate::meter::LockMeter;
use crate::options::LONGEST_LINGER;
use crate::request::{FULL, Request};
use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering};
use crate::sync::{Mutex, Notify};
use crate::token::GrantId;

/// How long a grant may wait until its task collects it, as a part of the ttl. A task that is
/// polled collects its grant in microseconds. The keeper checks every third of the ttl, so it keeps
/// an uncollected grant for at most one ttl.
pub(crate) const COLLECTED_WITHIN: f64 = 2.0 / 3.0;

/// The state of one ticket. The acquire loop, the guard, the keeper and the wake-ups share it.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) request: Arc<Request>,
    /// Whether the keeper renews the ticket while it is held. A waiting ticket is always renewed.
    pub(crate) renew: bool,
    /// The deadline in nanoseconds of the lease clock, or [`LOST`]. The deadline may become later
    /// only while it lies in the future. [`LOST`] is final.
    deadline: AtomicU64,
    /// The deadline is never later than this time (`max_hold`).
    hold_until: AtomicU64,
    /// When the holder must have given the ticket up, because the ticket was asked back:
    /// nanoseconds of the lease clock. 0 if the ticket was not asked back.
    give_up_at: AtomicU64,
    /// Why the lease is lost, as [`reason_code`]. This is written before the deadline becomes
    /// [`LOST`].
    reason: AtomicU8,
    /// The number of the ticket. 0 until the store has answered the enqueue.
    ticket: AtomicU64,
    /// How many times the ticket was handed over inside this process.
    hand_overs: AtomicU16,
    /// The ticket number that a wake-up or a renewal has reported as granted, else 0. A wake-up may
    /// arrive before the reply to its own enqueue. So the number is kept here. When the reply has
    /// come, the number is compared with the ticket's number.
    granted: AtomicU64,
    /// Whether the ticket right ahead has ended, so that this one holds although the store may not
    /// know this yet: see [`turns`](super::turns). It stays true. So this is apart from `granted`,
    /// which is taken back if the store says that the ticket waits.
    turn: AtomicBool,
    /// The time of [`granted_at`](Self::granted_at). 0 while the ticket is not granted.
    granted_at: AtomicU64,
    /// High half: the permits that the ticket is renewed with. Low half: the permits that the store
    /// counts, as far as this process knows. Both only fall. The high half falls first. The low
    /// half falls when the store has acknowledged the smaller number.
    permits: AtomicU64,
    /// The ttl that the ticket is renewed with, in nanoseconds. It only rises, and is written under
    /// the mutex of `asked`.
    ttl: AtomicU64,
    /// The ttl that the store gave last, in nanoseconds. The next renewal is due after a third of it.
    given: AtomicU64,
    asked: Mutex<Asked>,
    /// Whether the loss has been reported to the listeners of the client.
    told: AtomicBool,
    /// How many renewals in a row the store has refused, or could not carry out.
    refused: AtomicU64,
    /// Set if an enqueue of this id was sent and never answered. The enqueue may arrive at the
    /// store later.
    ambiguous: AtomicBool,
    /// The number of the lane whose tasks use the ticket, or whose leader waits with it. 0 if there is
    /// none. It is read and written under the mutex of the lanes.
    lane: std::sync::atomic::AtomicU64,
    /// The [epoch](super::shared::Shared::epoch) of the latest request to which the store answered
    /// that the ticket exists.
    confirmed: AtomicU64,
    /// Fires when the ticket is granted or lost.
    pub(crate) changed: Notify,
    /// The metrics of the lock that the ticket was asked for.
    pub(crate) meter: LockMeter,
    /// See [`Lock::linger`](crate::Lock::linger). Zero if the ticket does not linger.
    linger: Duration,
    /// Whether the store has told this client to look after the ticket, because somebody waits
    /// behind it, or asks for it. From then on it does not linger.
    wanted: AtomicBool,
}

const LOST: u64 = 0;

/// The lease was lost before. A loss is final.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AlreadyLost;

impl Lease {
    /// A record for a request that has not been sent. It holds nothing, and cannot expire.
    pub(crate) fn new(request: Arc<Request>, renew: bool) -> Self {
        let permits = both(request.permits.get(), request.permits.get());
        Self {
            permits: AtomicU64::new(permits),
            ttl: AtomicU64::new(nanos(request.ttl)),
            given: AtomicU64::new(0),
            request,
            renew,
            deadline: AtomicU64::new(Instant::FAR_FUTURE.as_nanos()),
            hold_until: AtomicU64::new(Instant::FAR_FUTURE.as_nanos()),
            give_up_at: AtomicU64::new(0),
            reason: AtomicU8::new(0),
            ticket: AtomicU64::new(0),
            hand_overs: AtomicU16::new(0),
            granted: AtomicU64::new(0),
            turn: AtomicBool::new(false),
            granted_at: AtomicU64::new(0),
            asked: Mutex::new(Asked::nothing()),
            told: AtomicBool::new(false),
            refused: AtomicU64::new(0),
            ambiguous: AtomicBool::new(false),
            lane: std::sync::atomic::AtomicU64::new(0),
            confirmed: AtomicU64::new(0),
            changed: Notify::new(),
            meter: LockMeter::NONE,
            linger: Duration::ZERO,
            wanted: AtomicBool::new(false),
        }
    }

    pub(crate) fn set_lane(&self, lane: u64) {
        self.lane.store(lane, std::sync::atomic::Ordering::Relaxed);
    }

    pub(crate) fn lane(&self) -> u64 {
        self.lane.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// The record of a ticket that another client has detached. The tasks of that client have
    /// handed it over `hand_overs` times.
    pub(crate) fn adopted(request: Arc<Request>, hand_overs: u16) -> Self {
        Self {
            hand_overs: AtomicU16::new(hand_overs),
            ..Self::new(request, true)
        }
    }

    /// The same record, whose loss counts in `meter`.
    pub(crate) fn measured_by(self, meter: LockMeter) -> Self {
        Self { meter, ..self }
    }

    /// The same record, of a ticket that may linger for this long after each use.
    pub(crate) fn lingering(self, linger: Duration) -> Self {
        Self { linger, ..self }
    }

    /// Somebody may want the ticket, so it does not linger from now on.
    pub(crate) fn want(&self) {
        self.wanted.store(true, Ordering::SeqCst);
    }

    /// Until when the ticket may stay with this process, if its last user is done at `now`. `None` if
    /// it does not linger.
    ///
    /// Only a ticket that its first enqueue has granted lingers. The line was empty then, and the store
    /// tells when it begins again. A ticket that has waited may have others behind it. At the end of the
    /// linger, half of the ttl is left, as for every hand-over in this process. A lost lease has no time
    /// left.
    pub(crate) fn lingers_until(&self, now: Instant) -> Option<Instant> {
        if self.linger.is_zero() || self.wanted.load(Ordering::SeqCst) {
            return None;
        }
        let granted_for = self.granted_at()?.after(LONGEST_LINGER);
        let half = self.deadline().before(self.ttl() / 2);
        let until = now.after(self.linger).min(granted_for).min(half);
        let own = !self.was_reported() && !self.has_turn() && !self.is_ambiguous();
        let whole = self.is_exclusive() && !self.is_asked_back();
        (own && whole && until > now).then_some(until)
    }

    /// Notes the answer of the store to the enqueue. From here on the ticket has a number and a
    /// deadline.
    ///
    /// The acquire loop calls this once per lease, before it gives the lease to the keeper.
    pub(crate) fn answered(&self, ticket: u64, sent: Instant, valid_for: Duration) {
        self.ticket.store(ticket, Ordering::SeqCst);
        if self.is_ambiguous() {
            self.enqueue_may_follow(sent);
        }
        self.given.store(nanos(valid_for), Ordering::SeqCst);
        let deadline = deadline(sent, valid_for).as_nanos().max(LOST + 1);
        // The deadline is set only if no deadline was set before. If a shutdown has marked the
        // lease as lost meanwhile, the lease stays lost.
        let unsent = Instant::FAR_FUTURE.as_nanos();
        let _ =
            self.deadline
                .compare_exchange(unsent, deadline, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Applies an acknowledged renewal that was sent at `sent`. If the deadline has passed at
    /// `now`, the loss is final, even if it was not noticed before.
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
        self.given.store(nanos(valid_for), Ordering::SeqCst);
        // `hold_until` may have become earlier since `proposed` was computed.
        self.deadline
            .fetch_min(self.hold_until().as_nanos(), Ordering::SeqCst);
        Ok(())
    }

    /// Ends the lease at `until` or earlier, even if renewals are acknowledged.
    pub(crate) fn end_at(&self, until: Instant) {
        let until = until.as_nanos();
        self.hold_until.fetch_min(until, Ordering::SeqCst);
        // This can only bring the deadline nearer. LOST is 0, so a lost lease stays lost.
        self.deadline.fetch_min(until, Ordering::SeqCst);
    }

    /// Notes that the ticket was asked back, and that its holder must give it up by `until`. The
    /// answer to each later renewal repeats the ask-back. From a later answer, the client computes
    /// a later end, so only an earlier end counts. Returns whether this was the first call.
    pub(crate) fn ask_back(&self, until: Instant) -> bool {
        let order = Ordering::SeqCst;
        let nanos = until.as_nanos();
        let sooner = |at: u64| (at == 0 || nanos < at).then_some(nanos);
        // The time is written before the end of the lease. So a reader that finds the lease over
        // also finds this reason.
        let before = self.give_up_at.fetch_update(order, order, sooner);
        self.end_at(until);
        self.changed.notify_waiters();
        before == Ok(0)
    }

    /// Whether the ticket was asked back.
    pub(crate) fn is_asked_back(&self) -> bool {
        self.give_up_at.load(Ordering::SeqCst) != 0
    }

    /// Why the ticket is not at the store any more.
    pub(crate) fn why_missing(&self) -> LostReason {
        match self.is_asked_back() {
            true => LostReason::Revoked,
            false => LostReason::Taken,
        }
    }

    /// Makes the ticket a read ticket, because the last writer has ended and readers remain. From
    /// now on no writer may use the ticket, even if the store does not know this yet.
    pub(crate) fn shrink(&self) {
        self.shrink_from(FULL.get(), 1);
    }

    /// Notes that the ticket is renewed with `permits` from now on. This is done only if the ticket
    /// has `before` permits and the store has acknowledged that number. Returns whether this was
    /// done.
    ///
    /// There is only one change at a time. So a store need not handle two changes that may both
    /// arrive late.
    pub(crate) fn shrink_from(&self, before: u32, permits: u32) -> bool {
        let order = Ordering::SeqCst;
        let (old, new) = (both(before, before), both(permits, before));
        (self.permits.compare_exchange(old, new, order, order)).is_ok()
    }

    /// The permits that the ticket should have. While the ticket is being made smaller, the store
    /// may count more permits, until it has acknowledged the smaller number.
    pub(crate) fn permits(&self) -> u32 {
        (self.permits.load(Ordering::SeqCst) >> 32) as u32
    }

    /// The permits that the store counts, as far as this process knows.
    pub(crate) fn counted(&self) -> u32 {
        self.permits.load(Ordering::SeqCst) as u32
    }

    /// The ttl that the ticket is renewed with.
    pub(crate) fn ttl(&self) -> Duration {
        Duration::from_nanos(self.ttl.load(Ordering::SeqCst))
    }

    /// The ttl that the store gave last.
    pub(crate) fn given(&self) -> Duration {
        Duration::from_nanos(self.given.load(Ordering::SeqCst))
    }

    /// The longest time for which a renewal can make the lease valid, if the store gives so much.
    pub(crate) fn longest(&self, given: Duration) -> Duration {
        let ttl = self.ttl().min(given);
        ttl.saturating_sub(drift(ttl))
    }

    /// Notes that the store has acknowledged a renewal with this request. Returns whether this was
    /// the first answer after which the store counts no more permits than the ticket is to have.
    pub(crate) fn acknowledged(&self, request: &Request) -> bool {
        let order = Ordering::SeqCst;
        let counted = |permits: u64| {
            let (to_have, counted) = ((permits >> 32) as u32, permits as u32);
            let fewer = request.permits.get() < counted;
            fewer.then(|| both(to_have, request.permits.get()))
        };
        let fewer = self.permits.fetch_update(order, order, counted).is_ok();
        fewer && !self.is_shrinking()
    }

    /// Whether the holder may write, while no other client may read or write.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.permits() == FULL.get()
    }

    /// Whether the ticket was made smaller, and the store has not acknowledged this yet.
    pub(crate) fn is_shrinking(&self) -> bool {
        let permits = self.permits.load(Ordering::SeqCst);
        (permits >> 32) as u32 != permits as u32
    }

    /// Whether other clients may read at the same time, as far as this process knows.
    pub(crate) fn is_shared(&self) -> bool {
        self.counted() != FULL.get()
    }

    /// Whether this is the read side of a lock. Several grants may use such a ticket at the same
    /// time.
    pub(crate) fn is_read(&self) -> bool {
        self.request.capacity == FULL && self.is_shared()
    }

    /// The time after which the lease is over, even if renewals are acknowledged.
    pub(crate) fn hold_until(&self) -> Instant {
        Instant::from_nanos(self.hold_until.load(Ordering::SeqCst))
    }

    /// Whether a renewal would change anything.
    pub(crate) fn wants_renewal(&self) -> bool {
        self.is_shrinking() || self.renew && self.deadline() < self.hold_until()
    }

    /// Makes the loss final. Returns whether this call was the first.
    pub(crate) fn lose(&self, reason: LostReason) -> bool {
        // Of several calls, the first sets the reason and returns true. The reason is written
        // before any reader can see LOST.
        let code = reason_code(reason);
        let first = self
            .reason
            .compare_exchange(0, code, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok();
        // Every call does this, because the thread of the first call may be stopped just before
        // this line.
        self.deadline.swap(LOST, Ordering::SeqCst);
        self.changed.notify_waiters();
        first
    }

    /// Marks the loss as reported to the listeners. Returns whether this call was the first.
    pub(crate) fn tell_loss(&self) -> bool {
        !self.told.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn is_told(&self) -> bool {
        self.told.load(Ordering::SeqCst)
    }

    /// Returns how many renewals in a row have been refused, this one included.
    pub(crate) fn renewal_refused(&self) -> u64 {
        self.refused.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn renewal_accepted(&self) {
        self.refused.store(0, Ordering::SeqCst);
    }

    /// Whether the store has refused the last renewal.
    pub(crate) fn is_refused(&self) -> bool {
        self.refused.load(Ordering::SeqCst) > 0
    }

    /// Why the lease is lost, or `None` if it is not lost. If the deadline has passed, this call
    /// marks the lease as lost.
    pub(crate) fn lost(&self, now: Instant) -> Option<LostReason> {
        let deadline = self.deadline.load(Ordering::SeqCst);
        if deadline != LOST && deadline > now.as_nanos() {
            return None;
        }
        if deadline != LOST {
            let hold_until = self.hold_until().as_nanos();
            self.lose(if deadline < hold_until {
                LostReason::Expired
            } else if hold_until == self.give_up_at.load(Ordering::SeqCst) {
                LostReason::Revoked
            } else {
                LostReason::MaxHold
            });
        }
        Some(reason_of(self.reason.load(Ordering::SeqCst)))
    }

    /// Resolves when the lease is lost. Returns the reason.
    pub(crate) async fn until_lost(&self, clock: &Clock) -> LostReason {
        loop {
            let changed = self.changed.notified();
            let mut changed = std::pin::pin!(changed);
            // The waker is registered before the check, so that no change in between is missed.
            changed.as_mut().enable();
            if let Some(reason) = self.lost(clock.now()) {
                return reason;
            }
            // The keeper notifies this task at the deadline, even while a renewal hangs.
            changed.await;
        }
    }

    /// The deadline. If the lease is lost, the deadline is [`LOST`], which is in the past of every
    /// clock.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::from_nanos(self.deadline.load(Ordering::SeqCst))
    }

    /// Notes a grant that a wake-up or a renewal has reported.
    ///
    /// Ignores the message if it names another ticket number: such a message must have been forged.
    pub(crate) fn grant(&self, ticket: u64, now: Instant) {
        let known = self.ticket();
        if known != 0 && known != ticket {
            return;
        }
        self.note_granted(now);
        self.granted.store(ticket, Ordering::SeqCst);
        self.changed.notify_waiters();
    }

    /// The ticket right ahead has ended, so this ticket has its turn.
    pub(crate) fn let_in(&self, now: Instant) {
        self.turn.store(true, Ordering::SeqCst);
        self.note_granted(now);
        self.changed.notify_waiters();
    }

    /// Whether the ticket holds because the ticket right ahead has ended. The store may say that it
    /// waits.
    pub(crate) fn has_turn(&self) -> bool {
        self.turn.load(Ordering::SeqCst)
    }

    /// Whether the ticket is granted: a grant was reported for the number that the store gave this
    /// ticket, or the ticket has its turn.
    ///
    /// A turn counts only if the store has confirmed the ticket since the last gap. Otherwise the
    /// store may have lost the ticket, and may have let somebody else in. After a gap the keeper
    /// renews every ticket, which confirms this one.
    pub(crate) fn is_granted(&self, epoch: u64) -> bool {
        self.was_reported() || self.has_turn() && self.is_confirmed_in(epoch)
    }

    /// Whether a grant was reported for the number that the store gave this ticket.
    pub(crate) fn was_reported(&self) -> bool {
        let ticket = self.ticket();
        ticket != 0 && self.granted.load(Ordering::SeqCst) == ticket
    }

    /// Notes that the ticket has been granted since `at`. Only the first call counts.
    pub(crate) fn note_granted(&self, at: Instant) {
        let order = Ordering::SeqCst;
        let _ = (self.granted_at).compare_exchange(0, at.as_nanos(), order, order);
    }

    /// Since when the ticket has been granted, as far as this process knows. If a wake-up or a
    /// renewal reported the grant, this is the time when the report came. If the enqueue was
    /// answered with the grant, this is the time when the enqueue was sent.
    pub(crate) fn granted_at(&self) -> Option<Instant> {
        let at = self.granted_at.load(Ordering::SeqCst);
        (at != 0).then_some(Instant::from_nanos(at))
    }

    /// Forgets a report of a grant that turned out to be false. A turn stays.
    pub(crate) fn ungrant(&self, now: Instant) {
        self.granted_at.store(0, Ordering::SeqCst);
        self.granted.store(0, Ordering::SeqCst);
        // If the turn comes after this line, `let_in` sets the time.
        if self.has_turn() {
            self.note_granted(now);
        }
    }

    pub(crate) fn ticket(&self) -> u64 {
        self.ticket.load(Ordering::SeqCst)
    }

    /// Counts a hand-over. Called under the mutex of the lanes.
    pub(crate) fn pass_on(&self) -> u16 {
        self.hand_overs.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn hand_overs(&self) -> u16 {
        self.hand_overs.load(Ordering::SeqCst)
    }

    /// The grant of the latest holder in this process.
    pub(crate) fn grant_id(&self) -> GrantId {
        GrantId::of_ticket(self.ticket(), self.hand_overs())
    }

    /// Notes that the store has answered a request of `epoch`, so the ticket existed in that epoch.
    ///
    /// If the ticket was confirmed in an earlier epoch, a message that somebody waits may have been
    /// lost in the gap.
    pub(crate) fn confirm(&self, epoch: u64) {
        let before = self.confirmed.fetch_max(epoch, Ordering::SeqCst);
        if before != 0 && before < epoch {
            self.want();
        }
    }

    /// Whether the store has confirmed the ticket since the last gap. `epoch` is the epoch that
    /// began with that gap.
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

const fn both(to_have: u32, counted: u32) -> u64 {
    (to_have as u64) << 32 | counted as u64
}

/// The deadline is the time before the send, plus the validity, less the time that two clocks may
/// drift apart in the validity. A hundredth is far more than crystals drift (100 ppm). The 5 ms are
/// for rounding and scheduling at the store.
fn deadline(sent: Instant, valid_for: Duration) -> Instant {
    sent.after(valid_for).before(drift(valid_for))
}

fn drift(ttl: Duration) -> Duration {
    Duration::from_nanos(nanos(ttl) / 100) + Duration::from_millis(5)
}

const fn reason_code(reason: LostReason) -> u8 {
    match reason {
        LostReason::Expired => 1,
        LostReason::Taken => 2,
        LostReason::Shutdown => 3,
        LostReason::MaxHold => 4,
        // A guard computes these two reasons itself; no lease stores them.
        LostReason::Released => 5,
        LostReason::Forked => 6,
        LostReason::Revoked => 7,
    }
}

const fn reason_of(code: u8) -> LostReason {
    match code {
        2 => LostReason::Taken,
        3 => LostReason::Shutdown,
        4 => LostReason::MaxHold,
        7 => LostReason::Revoked,
        _ => LostReason::Expired,
    }
}

#[cfg(test)]
pub(crate) mod tests;
