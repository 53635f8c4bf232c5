//! A hold of a lock, the guards that share it, and what happens when the last of these guards ends.

use std::ops::Deref;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::Span;
use tracing::field::{DebugValue, Empty, debug};

use super::counts::{Guards, Left};
use super::warned::Warned;
use crate::acquire::Grant;
use crate::acquire::handle::Client;
use crate::acquire::lanes::Share;
use crate::acquire::spec::Spec;
use crate::client::events::GrantEvent;
use crate::client::lease::Lease;
use crate::client::shared::Shared;
use crate::client::tracked::Stage;
use crate::clock::Instant;
use crate::error::{Error, LostReason};
use crate::log::guarded;
use crate::meter::LockMeter;
use crate::name::Name;
use crate::options::{OnLost, OnRevoke};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::token::GrantId;

/// A view of a held lock: its identity, whether it is held now, and a signal when it is lost.
///
/// Clones are views of the same lock. A view never releases the lock. It may exist longer than the
/// lock is held, and then reports that the lock is over.
#[derive(Clone)]
pub struct Held(pub(super) Arc<Hold>, pub(super) Warned);

/// One hold of a lock: the guards that share it, and what the last guard releases.
pub(super) struct Hold {
    pub(super) lease: Arc<Lease>,
    pub(super) grant_id: GrantId,
    /// When the hold began.
    pub(super) since: Instant,
    pub(super) client: Arc<Client>,
    pub(super) on_lost: OnLost,
    on_revoke: OnRevoke,
    pub(super) label: Option<&'static str>,
    /// The metrics of the locks with this label. Nothing for a hold inside of another one.
    meter: LockMeter,
    pub(super) guards: Guards,
    /// Whether a guard ended when the lock was already lost.
    pub(super) ended_lost: AtomicBool,
    /// `None` after the hold has been given back.
    pub(super) origin: Mutex<Option<Origin>>,
    /// Made by the first inner hold. See [`INNER_PERMITS`].
    pub(super) inner_permits: OnceLock<Arc<Semaphore>>,
}

/// Where a hold comes from. This decides what happens at its end.
pub(super) enum Origin {
    /// A ticket that only this hold uses. The ticket is not released before `keep_until`
    /// (`min_hold`).
    Ticket { keep_until: Instant },
    /// A ticket that other tasks of this process may use after this hold, or at the same time.
    Share(Share),
    /// Another hold of the same lock, inside of which this one was taken.
    Outer(Guard, Option<InnerPermits>),
}

/// How many permits an exclusive inner hold takes. A shared inner hold takes 1. The number is below
/// tokio's limit on every platform.
pub(crate) const INNER_PERMITS: u32 = 1 << 28;

/// The permits of an inner hold. Inner holds that exclude each other wait for these.
pub(crate) type InnerPermits = OwnedSemaphorePermit;

/// A held lock.
///
/// Dropping it hands the release to the client's keeper thread. A drop works outside of a runtime
/// too, and during a panic, and while a runtime shuts down. [`release`](Self::release) waits for
/// the store's answer. The memory store needs no thread: there the drop itself releases the lock.
///
/// A later request of the same client is not refused because this release has not reached the store
/// yet. [`try_acquire`](crate::Lock::try_acquire) then waits for the release, or goes on with the
/// ticket if the release has not begun.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let guard = locks.mutex("order:42").acquire().await?;
/// println!("{} is ours, grant {}", guard.name(), guard.grant_id());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "the lock is released as soon as the guard is dropped; bind it to a variable"]
pub struct Guard {
    pub(super) held: Held,
    /// Whether this guard counts as a writer.
    pub(super) writes: bool,
    /// Whether this guard has ended, so that it does not count as a guard any more.
    pub(super) over: bool,
}

/// What remains to be done after a guard has ended.
pub(super) enum End {
    /// Nothing: other guards of the hold remain, or the keeper keeps the ticket for its `min_hold`.
    Nothing,
    /// Only readers remain, and the store has not acknowledged that yet.
    Shrink,
    GiveBack(Origin),
}

impl Hold {
    /// The last guard has ended, at `now`. Wakes the views that wait for the end of the hold, and also those
    /// of other holds of the ticket, which look and wait again. No mutex is held, because wakers
    /// are users' code.
    pub(super) fn tell_end(&self, now: Instant) {
        self.meter.ended(|| self.since.until(now));
        guarded(|| self.lease.changed.notify_waiters());
    }
}

impl Held {
    /// The error that says why the lock is not held any more, or `None` if it is held.
    pub(crate) fn loss(&self) -> Option<Error> {
        self.lost_reason().map(|reason| self.lost_for(reason))
    }

    pub(crate) fn lost_for(&self, reason: LostReason) -> Error {
        let lease = &self.0.lease;
        Error::lost_lease(reason, lease.renew).of_name(self.name())
    }

    /// Completes the error of an operation on this lock. The lock was held, so part of the work
    /// under it may be done, whatever the operation was.
    pub(crate) fn failed(&self, error: Error) -> Error {
        error.of_name(self.name()).of_held()
    }

    /// Why the lock is not held any more, or `None` if it is held. In a forked child every lock is
    /// lost.
    pub(crate) fn lost_reason(&self) -> Option<LostReason> {
        let forked = self.shared().is_forked().then_some(LostReason::Forked);
        forked.or_else(|| self.lost_at(self.shared().clock.now()))
    }

    pub(super) fn lost_at(&self, now: Instant) -> Option<LostReason> {
        if self.is_over() {
            return Some(LostReason::Released);
        }
        self.0.lease.lost(now)
    }

    /// Whether the last guard has ended while the lock was not lost. After that the ticket may
    /// belong to another holder, so the state of the lease says nothing about this hold.
    pub(super) fn is_over(&self) -> bool {
        let hold = &self.0;
        hold.guards.are_gone() && !hold.ended_lost.load(Ordering::SeqCst)
    }

    /// Returns another guard of the same hold, if the hold has at least one guard. The new guard
    /// writes if `write` is true and another guard writes.
    pub(crate) fn guard(&self, write: bool) -> Option<Guard> {
        let writes = self.0.guards.one_more(write)?;
        Some(Guard {
            held: self.clone(),
            writes,
            over: false,
        })
    }

    /// Whether the hold has only one guard, and only this hold uses its ticket. If so, this makes it
    /// stay so: no other task of this process gets the ticket from now on.
    pub(crate) fn claim_only_use(&self) -> bool {
        let hold = &self.0;
        let origin = hold.origin.lock().unwrap_or_else(PoisonError::into_inner);
        let is_shared = match &*origin {
            Some(Origin::Ticket { .. }) => false,
            Some(Origin::Share(_)) => true,
            Some(Origin::Outer(..)) | None => return false,
        };
        drop(origin);
        hold.guards.are_one() && (!is_shared || hold.client.lanes.retire_if_only(&hold.lease))
    }

    pub(crate) fn is_exclusive(&self) -> bool {
        self.0.guards.are_exclusive()
    }

    pub(crate) fn is_of(&self, client: &Arc<Client>, name: &Name) -> bool {
        self.is_of_client(client) && self.0.lease.request.name == *name
    }

    pub(crate) fn is_of_client(&self, client: &Arc<Client>) -> bool {
        Arc::ptr_eq(&self.0.client, client)
    }

    /// How long the lock was held, for logs.
    pub(super) fn held_for(&self, now: Instant) -> DebugValue<Duration> {
        debug(self.0.since.until(now))
    }

    /// [`Lock::label`](crate::Lock::label).
    pub(crate) fn label(&self) -> Option<&'static str> {
        self.0.label
    }

    /// A span for work under the lock. Its `lock.name` is the label, and never the name of the lock.
    #[doc(hidden)] // for the layer, which polls bodies by hand
    pub fn span(&self) -> Span {
        let Hold {
            label,
            grant_id,
            client,
            ..
        } = &*self.0;
        tracing::debug_span!(
            "held",
            lock.name = label,
            lock.token = %grant_id,
            db.system.name = client.shared.system(),
            "error.type" = Empty,
        )
    }

    /// The permits that an inner hold must get before it begins. The semaphore serves requests in
    /// the order of arrival, which is the rule of `queue::granted`.
    pub(crate) fn inner_permits(&self) -> Arc<Semaphore> {
        let all = || Arc::new(Semaphore::new(INNER_PERMITS as usize));
        Arc::clone(self.0.inner_permits.get_or_init(all))
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.0.client
    }

    pub(crate) fn on_lost(&self) -> OnLost {
        self.0.on_lost
    }

    pub(crate) fn on_revoke(&self) -> OnRevoke {
        self.0.on_revoke
    }

    /// Whether work under the lock may be stopped before it is done.
    pub(crate) fn stops_work(&self) -> bool {
        self.0.on_lost == OnLost::Cancel || self.0.on_revoke == OnRevoke::Cancel
    }

    /// Why work under the lock must stop now, or `None` if it may continue.
    pub(crate) fn stop(&self) -> Option<Error> {
        if self.0.on_revoke == OnRevoke::Cancel && self.0.lease.is_asked_back() && !self.is_over() {
            return Some(Error::asked_for().of_name(self.name()));
        }
        self.loss().filter(|_| self.0.on_lost == OnLost::Cancel)
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.0.lease
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.0.client.shared
    }

    /// The last writer of this hold has ended, and readers remain. If this writer was also the last
    /// writer of the ticket, no writer may use the ticket from now on. The caller must then ask the
    /// store to let readers in.
    pub(super) fn read_on(&self) {
        let mut held = self.clone();
        loop {
            let hold = &held.0;
            let mut origin = hold.origin.lock().unwrap_or_else(PoisonError::into_inner);
            let (outer, inner) = match &mut *origin {
                // The last reader has ended meanwhile.
                None => return,
                Some(Origin::Ticket { .. } | Origin::Share(_)) => {
                    // This is done under the mutex, so that the next user of the ticket sees that
                    // it is a read ticket.
                    hold.lease.shrink();
                    drop(origin);
                    return hold.client.lanes.mode_changed(&hold.lease);
                }
                Some(Origin::Outer(outer, inner)) => {
                    // Readers of the outer hold do not wait for this inner hold any more.
                    let rest = inner
                        .as_mut()
                        .and_then(|inner| inner.split(INNER_PERMITS as usize - 1));
                    outer.writes = false;
                    let last = outer.0.guards.one_writer_less();
                    (last.then(|| outer.held()), rest)
                }
            };
            drop(origin);
            drop(inner); // dropping it runs wakers, which are users' code
            match outer {
                Some(outer) => held = outer,
                None => return,
            }
        }
    }
}

impl Guard {
    /// The guard of a grant.
    pub(crate) fn of(grant: Grant, spec: &Spec<'_>) -> Self {
        match grant {
            Grant::Ticket(lease, since) => Self::of_ticket(lease, since, spec),
            Grant::Share(share, since) => Self::of_share(share, since, spec),
        }
    }

    /// The guard of a ticket that the store has just granted and nobody else uses.
    pub(crate) fn of_ticket(lease: Arc<Lease>, since: Instant, spec: &Spec<'_>) -> Self {
        // An adopted ticket may have been handed over before, so its grant id counts those
        // hand-overs.
        let grant_id = lease.grant_id();
        // Before `begin` is called there is no `min_hold`, so a lock that was never used is
        // released at once.
        let keep_until = Instant::from_nanos(0);
        Self::new(lease, grant_id, since, Origin::Ticket { keep_until }, spec)
    }

    /// When the lock was granted. The task may have got it later.
    pub(crate) fn granted_at(&self) -> Instant {
        let granted_at = self.lease().granted_at();
        granted_at.unwrap_or_else(|| self.shared().clock.now())
    }

    /// Notes that the hold began at `since`. `min_hold` and `max_hold` count from that time. They
    /// have no effect if the ticket is shared with other tasks.
    pub(crate) fn begin(&self, since: Instant, min_hold: Duration, max_hold: Option<Duration>) {
        let (hold, shared) = (&self.held.0, self.shared());
        let mut origin = hold.origin.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Origin::Ticket { keep_until }) = &mut *origin {
            *keep_until = since.after(min_hold);
            if let Some(limit) = max_hold {
                hold.lease.end_at(since.after(limit));
                shared.entrust_held(&hold.lease);
            }
        }
    }

    /// The guard of a ticket that other tasks of this process may have used before.
    fn of_share(share: Share, since: Instant, spec: &Spec<'_>) -> Self {
        let lease = Arc::clone(share.lease());
        let grant_id = GrantId::of_ticket(lease.ticket(), share.hand_overs());
        Self::new(lease, grant_id, since, Origin::Share(share), spec)
    }

    /// The guard of a lock that `outer` holds already.
    pub(crate) fn inside(outer: Guard, inner: Option<InnerPermits>, spec: &Spec<'_>) -> Self {
        let (lease, grant_id) = (Arc::clone(&outer.0.lease), outer.grant_id());
        let since = outer.0.since;
        Self::new(lease, grant_id, since, Origin::Outer(outer, inner), spec)
    }

    pub(super) fn new(
        lease: Arc<Lease>,
        grant_id: GrantId,
        since: Instant,
        origin: Origin,
        spec: &Spec<'_>,
    ) -> Self {
        let writes = spec.is_exclusive();
        let mut meter = LockMeter::NONE;
        if !matches!(origin, Origin::Outer(..)) {
            meter = spec.meter.clone();
            meter.held();
            let teller = &spec.client.shared.teller;
            teller.tell_grant(&lease.request.name, GrantEvent::Granted(grant_id));
        }
        let hold = Hold {
            lease,
            grant_id,
            since,
            client: Arc::clone(spec.client),
            on_lost: spec.on_lost,
            on_revoke: spec.on_revoke,
            label: spec.label,
            meter,
            guards: Guards::new(writes),
            ended_lost: AtomicBool::new(false),
            origin: Mutex::new(Some(origin)),
            inner_permits: OnceLock::new(),
        };
        Self {
            held: Held(Arc::new(hold), Warned::default()),
            writes,
            over: false,
        }
    }

    /// Whether this guard writes. The hold stays exclusive for as long as such a guard exists.
    pub(crate) fn writes(&self) -> bool {
        self.writes
    }

    /// Ends a guard in a forked child, where it is a copy of a guard of the parent. This copy
    /// releases nothing, and the holds around it release nothing.
    pub(super) fn disown(&mut self) {
        self.over = true;
        // This does not wait for the mutex. A thread of the parent may have held the mutex at the
        // fork, and in the child nothing unlocks it.
        let mut origin = self.held.0.origin.try_lock();
        let origin = origin.as_deref_mut().ok().and_then(Option::take);
        match origin {
            Some(Origin::Share(share)) => share.disown(),
            Some(Origin::Outer(mut outer, _)) => outer.disown(),
            Some(Origin::Ticket { .. }) | None => {}
        }
    }

    /// Ends this guard.
    pub(super) fn end(&mut self, now: Instant) -> End {
        if std::mem::replace(&mut self.over, true) {
            return End::Nothing;
        }
        let hold = &self.held.0;
        let shared = self.shared();
        let lost = hold.lease.lost(now);
        if let Some(reason) = lost {
            hold.ended_lost.store(true, Ordering::SeqCst);
            // A subscriber that panics here must not keep the ticket from its release.
            guarded(|| shared.lost(&hold.lease, Stage::Held, reason));
        }
        match hold.guards.one_less(self.writes) {
            Left::Nobody => {}
            Left::Readers if lost.is_none() => {
                self.held.read_on();
                return match hold.lease.is_shrinking() {
                    true => End::Shrink,
                    false => End::Nothing,
                };
            }
            Left::Readers | Left::Others => return End::Nothing,
        }
        hold.tell_end(now);
        // The mutex is free again after this line. It must be, because telling listeners runs
        // wakers.
        let origin = (hold.origin.lock().unwrap_or_else(PoisonError::into_inner)).take();
        let event = match lost {
            None => Some(GrantEvent::Released(hold.grant_id)),
            // The loss of a lock that is not a read lock was reported when it was found.
            Some(reason) => {
                (hold.lease.is_read()).then_some(GrantEvent::Lost(hold.grant_id, reason))
            }
        };
        if let (Some(event), Some(Origin::Ticket { .. } | Origin::Share(_))) = (event, &origin) {
            shared.teller.tell_grant(&hold.lease.request.name, event);
        }
        if let Some(Origin::Ticket { keep_until }) = origin
            && lost.is_none()
            && now < keep_until
        {
            shared.keep(&hold.lease, keep_until);
            return End::Nothing;
        }
        origin.map_or(End::Nothing, End::GiveBack)
    }
}

impl Deref for Guard {
    type Target = Held;

    fn deref(&self) -> &Held {
        &self.held
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.over {
            return;
        }
        if self.shared().is_forked() {
            return self.disown();
        }
        let now = self.shared().clock.now();
        let origin = match self.end(now) {
            End::Nothing => return,
            End::Shrink => return self.shared().recheck_now(self.lease().request.id),
            End::GiveBack(origin) => origin,
        };
        match origin {
            Origin::Ticket { .. } => self.shared().give_back(&self.held.0.lease, false),
            // Dropping one of these releases the lock.
            Origin::Share(share) => drop(share),
            Origin::Outer(outer, inner) => drop((inner, outer)),
        }
        // A subscriber is the user's code and may panic. If this is a drop during a panic, a second
        // panic would abort the process.
        guarded(|| {
            let held_for = self.held.held_for(now);
            tracing::debug!(lock = self.name(), grant_id = %self.grant_id(), held_for, "lock released in the background");
        });
    }
}
