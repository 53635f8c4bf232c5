//! What the user holds: the guard that releases, and the view that looks.

use std::fmt;
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use humantime::format_duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::Level;
use tracing::field::{DebugValue, debug};
use tracing::level_filters::LevelFilter;

use crate::backend::{Departure, Released};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, LostReason};
use crate::lease::Lease;
use crate::local::Share;
use crate::lock::{OnLost, Order};
use crate::locks::Client;
use crate::name::Name;
use crate::request::FULL;
use crate::shared::{Shared, Where};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::table::{Cleanup, Stage};
use crate::token::{FencingToken, WriteToken};

/// A view of a held lock: its token, whether it is still held, and a signal when it is lost.
///
/// Clones are views of the same lock. A view never releases; it may outlive the lock, and says so.
#[derive(Clone)]
pub struct Held(Arc<Hold>);

/// One hold of a lock: the guards that share it, and what is given back when the last is gone.
struct Hold {
    lease: Arc<Lease>,
    token: FencingToken,
    /// When it began, if that is to be logged.
    since: Option<Instant>,
    client: Arc<Client>,
    on_lost: OnLost,
    #[cfg(debug_assertions)]
    label: Option<&'static str>,
    guards: Guards,
    /// A guard has ended that had lost the lock.
    ended_lost: AtomicBool,
    /// `None` once it has been given back.
    source: Mutex<Option<Source>>,
    /// Made by the first inner hold; as many permits as the lock has.
    turns: OnceLock<Arc<Semaphore>>,
}

/// Where a hold comes from, and so what its end means.
enum Source {
    /// A ticket of its own, which is not given back before a time (`min_hold`).
    Ticket { keep_until: Instant },
    /// A ticket that others in this process may use after it, or with it.
    Share(Share),
    /// Another hold of the same lock, whose scope this was taken in.
    Outer(Guard, Option<Turn>),
}

/// How many guards a hold has, and how many of them write: in one word, so that there is one who ended
/// last, and one after whom nobody writes.
///
/// Without guards it is over. Without writers, of which an exclusive hold keeps the last beyond its end,
/// it is a reader's. Both are final.
struct Guards(AtomicU64);

/// Below are the guards, from here on those that write.
const WRITER: u64 = 1 << 32;

/// What a guard has left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    Nobody,
    /// It was the last that wrote.
    Readers,
    /// Whoever writes, or reads where nobody has written.
    Others,
}

impl Guards {
    /// The first.
    fn new(exclusive: bool) -> Self {
        Self(AtomicU64::new(if exclusive { WRITER | 1 } else { 1 }))
    }

    fn are_gone(&self) -> bool {
        self.0.load(Ordering::SeqCst) as u32 == 0
    }

    fn are_exclusive(&self) -> bool {
        self.0.load(Ordering::SeqCst) >= WRITER
    }

    /// One more, while there is one: it writes if it wants to and others do. Returns whether it does.
    fn one_more(&self, write: bool) -> Option<bool> {
        let writer = |guards: u64| if write && guards >= WRITER { WRITER } else { 0 };
        let one_more = |guards: u64| {
            let room = !matches!(guards as u32, 0 | u32::MAX);
            room.then(|| guards + writer(guards) + 1)
        };
        let order = Ordering::SeqCst;
        let before = self.0.fetch_update(order, order, one_more).ok()?;
        Some(writer(before) > 0)
    }

    fn one_less(&self, writes: bool) -> Left {
        let left = |guards: u64| match (guards as u32, guards < 2 * WRITER) {
            (1, _) => (Left::Nobody, guards - 1),
            (_, true) if writes => (Left::Readers, guards - WRITER - 1),
            _ if writes => (Left::Others, guards - WRITER - 1),
            _ => (Left::Others, guards - 1),
        };
        let one_less = |guards| Some(left(guards).1);
        let order = Ordering::SeqCst;
        match self.0.fetch_update(order, order, one_less) {
            Ok(before) | Err(before) => left(before).0,
        }
    }

    /// One that writes reads on. Returns whether it was the last that wrote.
    fn one_writer_less(&self) -> bool {
        self.0.fetch_sub(WRITER, Ordering::SeqCst) < 2 * WRITER
    }

    /// The same if no other writes. Returns whether that is so.
    fn only_writer_less(&self) -> bool {
        let only = |guards: u64| (guards < 2 * WRITER).then(|| guards - WRITER);
        let order = Ordering::SeqCst;
        self.0.fetch_update(order, order, only).is_ok()
    }
}

/// What an exclusive inner hold takes, a shared one taking 1: fewer than tokio allows anywhere.
pub(crate) const TURNS: u32 = 1 << 28;

/// Inner holds that exclude each other have one at a time.
pub(crate) type Turn = OwnedSemaphorePermit;

impl Held {
    /// The name of the lock, as it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.lease.request.name.as_str()
    }

    /// The fencing token, as an identity of this grant: for logs. To write with, take the
    /// [`write_token`](Self::write_token).
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.0.token
    }

    /// The fencing token of an exclusive lock: pass it on with every write, and let the resource
    /// refuse lower ones, as [`fencing`](crate::fencing) shows.
    ///
    /// A lock that is lost still has it: whether a late write may pass is for the resource to say.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for the read side of a read/write lock, also after a
    /// [downgrade](Guard::downgrade), and for a semaphore: several hold those at once, so that their
    /// tokens order nothing.
    pub fn write_token(&self) -> Result<WriteToken, Error> {
        if !self.is_exclusive() {
            return Err(Error::config(
                "a shared lock or a semaphore has no token to write with, as others hold it too; take the mutex or the write side",
            )
            .of_name(self.name()));
        }
        Ok(WriteToken::of_exclusive(self.token()))
    }

    /// Whether the lock is held at this moment, by the local deadline.
    ///
    /// A `true` may be outdated when the next line runs: a process can be stopped between any two
    /// instructions. Only a check of the [token](Self::token) at the resource closes that gap.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.lost_reason_here().is_none()
    }

    /// How long the lock is held if no further renewal succeeds; zero when it is lost.
    ///
    /// With renewal on this rises again at every renewal.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        if self.is_over() || self.shared().is_forked() {
            return Duration::ZERO;
        }
        let now = self.shared().clock.now();
        now.until(self.0.lease.deadline())
    }

    /// Resolves when the lock is lost. It stays pending after a release.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits.
    pub async fn lost(&self) -> LostReason {
        if self.shared().is_forked() {
            return LostReason::Forked;
        }
        let reason = self.0.lease.until_lost(&self.shared().clock).await;
        if self.is_over() {
            // Lost by somebody else, whom the ticket was passed on to.
            return std::future::pending().await;
        }
        reason
    }

    /// Resolves when the lock is likely to be lost soon: a third of its ttl is left, which with
    /// renewal on means that two renewals have failed. Returns what is [left](Self::remaining) then.
    /// It may still be renewed after that; ask again to be warned again. It stays pending after a
    /// release.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits.
    pub async fn in_danger(&self) -> Duration {
        let (shared, lease) = (self.shared(), &self.0.lease);
        if shared.is_forked() {
            return Duration::ZERO;
        }
        loop {
            let changed = lease.changed.notified();
            let deadline = lease.deadline();
            let remaining = shared.clock.now().until(deadline);
            if self.is_over() {
                return std::future::pending().await;
            }
            if remaining <= lease.ttl() / 3 {
                return remaining;
            }
            // Renewals move the deadline without a word; the alarm then looks again. A loss is told.
            let danger = deadline.before(lease.ttl() / 3);
            let _ = shared.by(danger, changed).await;
        }
    }

    /// Makes sure that the lock is held for `duration` from now on, renewing it if less remains:
    /// call it before a step that must not be cut short.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost); [`Unknown`](crate::ErrorKind::Unknown) or
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the renewal was not acknowledged, or so late that
    /// less is left, in which case the lock is held for [`remaining`](Self::remaining) all the same;
    /// [`Config`](crate::ErrorKind::Config) when `duration` is longer than the lock's
    /// [ttl](crate::Lock::ttl), less a hundredth of it and 5 ms, or than what
    /// [`max_hold`](crate::Lock::max_hold) leaves: [`Guard::extend`] makes the ttl longer.
    ///
    /// # Cancel safety
    ///
    /// Safe: a renewal that was sent may take effect, which does no harm.
    pub async fn ensure(&self, duration: Duration) -> Result<(), Error> {
        if self.is_valid() && self.remaining() >= duration {
            return Ok(());
        }
        let ensured = self.renew().await.and_then(|()| self.lasts(duration));
        ensured.map_err(|error| error.of_name(self.name()))
    }

    /// What has just been renewed is held for so long. If not, that is the caller's doing or the store's.
    fn lasts(&self, duration: Duration) -> Result<(), Error> {
        let remaining = self.remaining();
        if remaining >= duration {
            return Ok(());
        }
        let cannot = format!("cannot be ensured for {duration:?}");
        let lease = &self.0.lease;
        if duration > lease.longest() {
            let ttl = lease.ttl();
            return Err(Error::config(format!(
                "{cannot}: a renewal gives {ttl:?}; ask with a longer ttl, or extend it"
            )));
        }
        if lease.deadline() == lease.hold_until() {
            return Err(Error::config(format!(
                "{cannot}: it ends by itself in {remaining:?} (max_hold)"
            )));
        }
        Err(Error::unavailable(format!(
            "{cannot}: the store was so slow to renew it that {remaining:?} were left; trying again may help"
        )))
    }

    async fn renew(&self) -> Result<(), Error> {
        let shared = self.shared();
        if self.is_valid() {
            let by = shared.clock.now().after(shared.op_timeout);
            shared.renew_now(&self.0.lease, by).await?;
        }
        self.loss_here().map_or(Ok(()), Err)
    }

    /// The error that says why it is not held any more, if that is so.
    pub(crate) fn loss(&self) -> Option<Error> {
        self.lost_reason().map(|reason| self.lost_for(reason))
    }

    fn loss_here(&self) -> Option<Error> {
        self.lost_reason_here().map(|reason| self.lost_for(reason))
    }

    pub(crate) fn lost_for(&self, reason: LostReason) -> Error {
        let lease = &self.0.lease;
        Error::lost_lease(reason, lease.renew).of_name(self.name())
    }

    pub(crate) fn lost_reason(&self) -> Option<LostReason> {
        self.lost_at(self.shared().clock.now())
    }

    /// As [`lost_reason`](Self::lost_reason), and in a forked child everything is lost. That is a
    /// system call, which is too much for every poll of a body.
    fn lost_reason_here(&self) -> Option<LostReason> {
        let forked = self.shared().is_forked().then_some(LostReason::Forked);
        forked.or_else(|| self.lost_reason())
    }

    fn lost_at(&self, now: Instant) -> Option<LostReason> {
        if self.is_over() {
            return Some(LostReason::Released);
        }
        self.0.lease.lost(now)
    }

    /// Whether the last guard is gone, and had the lock until then. What becomes of the ticket after
    /// that is another's business.
    fn is_over(&self) -> bool {
        let hold = &self.0;
        hold.guards.are_gone() && !hold.ended_lost.load(Ordering::SeqCst)
    }

    /// Another guard of the same hold, while there is one; to `write` if that is still done under it.
    pub(crate) fn guard(&self, write: bool) -> Option<Guard> {
        let writes = self.0.guards.one_more(write)?;
        Some(Guard {
            held: self.clone(),
            writes,
            over: false,
        })
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

    /// For logs.
    fn held_for(&self, now: Instant) -> Option<DebugValue<Duration>> {
        self.0.since.map(|since| debug(since.until(now)))
    }

    /// [`Lock::label`](crate::Lock::label).
    #[cfg(debug_assertions)]
    pub(crate) fn label(&self) -> Option<&'static str> {
        self.0.label
    }

    /// What inner holds wait for before they begin.
    pub(crate) fn turns(&self) -> Arc<Semaphore> {
        let all = || Arc::new(Semaphore::new(TURNS as usize));
        Arc::clone(self.0.turns.get_or_init(all))
    }

    pub(crate) fn on_lost(&self) -> OnLost {
        self.0.on_lost
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.0.lease
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.0.client.shared
    }

    /// Nobody writes under this hold any more, and somebody reads. If that was the ticket's last writer, it
    /// is a writer's no more from here on, and the store has to be asked to let readers in.
    fn read_on(&self) {
        let mut held = self.clone();
        loop {
            let hold = &held.0;
            let mut source = hold.source.lock().unwrap_or_else(PoisonError::into_inner);
            let (outer, turn) = match &mut *source {
                // The last reader has ended meanwhile.
                None => return,
                Some(Source::Ticket { .. } | Source::Share(_)) => {
                    // Under the mutex: whoever is given the ticket after this finds that it is no writer's.
                    hold.lease.shrink();
                    drop(source);
                    let shared = &hold.client.shared;
                    return shared.lanes.mode_changed(shared, &hold.lease);
                }
                Some(Source::Outer(outer, turn)) => {
                    // Readers of the hold around need not wait for it any more.
                    let rest = turn
                        .as_mut()
                        .and_then(|turn| turn.split(TURNS as usize - 1));
                    outer.writes = false;
                    let last = outer.0.guards.one_writer_less();
                    (last.then(|| outer.held()), rest)
                }
            };
            drop(source);
            drop(turn); // runs wakers
            match outer {
                Some(outer) => held = outer,
                None => return,
            }
        }
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held")
            .field("name", &self.name())
            .field("token", &self.token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

/// A held lock. Dropping it hands the release to the client's keeper thread, which also works
/// outside a runtime, during a panic and while a runtime shuts down; [`release`](Self::release)
/// waits for the store's answer.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let guard = locks.mutex("order:42").acquire().await?;
/// println!("{} is ours, token {}", guard.name(), guard.token());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "the lock is released as soon as the guard is dropped; bind it to a variable"]
pub struct Guard {
    held: Held,
    /// It counts among those that write.
    writes: bool,
    /// It does not count any more.
    over: bool,
}

/// What is to be done at the end of a guard.
enum End {
    /// Others of its hold are left.
    Nothing,
    /// Those read, and the store does not know yet.
    Shrink,
    GiveBack(Source),
}

/// What [`Guard::release`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// The lock was held to the end, and its user is done with it.
    Released,
    /// It had been lost before: somebody else may have held it meanwhile.
    AlreadyLost,
}

impl Guard {
    /// Of a ticket that the store has just granted, and that nobody else uses.
    pub(crate) fn of_ticket(lease: Arc<Lease>, order: &Order<'_>) -> Self {
        let token = FencingToken::of_ticket(lease.ticket(), 0);
        // What is given back before it was used is given back at once.
        let keep_until = Instant::from_nanos(0);
        Self::new(lease, token, Source::Ticket { keep_until }, order)
    }

    /// When the lock was granted, which its task may have heard of later.
    pub(crate) fn granted_at(&self) -> Instant {
        let granted_at = self.lease().granted_at();
        granted_at.unwrap_or_else(|| self.shared().clock.now())
    }

    /// The hold began at `since`: its limits count from then. They mean nothing where the ticket is
    /// another's too.
    pub(crate) fn begin(&self, since: Instant, min_hold: Duration, max_hold: Option<Duration>) {
        let (hold, shared) = (&self.held.0, self.shared());
        let mut source = hold.source.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Source::Ticket { keep_until }) = &mut *source {
            *keep_until = since.after(min_hold);
            if let Some(limit) = max_hold {
                hold.lease.end_at(since.after(limit));
                shared.entrust_held(&hold.lease);
            }
        }
    }

    /// Of a ticket that others of this process may have used before.
    pub(crate) fn of_share(share: Share, order: &Order<'_>) -> Self {
        let lease = Arc::clone(share.lease());
        let token = FencingToken::of_ticket(lease.ticket(), share.hand_overs());
        Self::new(lease, token, Source::Share(share), order)
    }

    /// Of a lock that `outer` holds already.
    pub(crate) fn inside(outer: Guard, turn: Option<Turn>, order: &Order<'_>) -> Self {
        let (lease, token) = (Arc::clone(&outer.0.lease), outer.token());
        Self::new(lease, token, Source::Outer(outer, turn), order)
    }

    fn new(lease: Arc<Lease>, token: FencingToken, source: Source, order: &Order<'_>) -> Self {
        let writes = order.is_exclusive();
        // The clock is not asked for nothing.
        let logged = Level::DEBUG <= LevelFilter::current();
        let hold = Hold {
            lease,
            token,
            since: logged.then(|| order.client.shared.clock.now()),
            client: Arc::clone(order.client),
            on_lost: order.on_lost,
            #[cfg(debug_assertions)]
            label: order.label,
            guards: Guards::new(writes),
            ended_lost: AtomicBool::new(false),
            source: Mutex::new(Some(source)),
            turns: OnceLock::new(),
        };
        Self {
            held: Held(Arc::new(hold)),
            writes,
            over: false,
        }
    }

    /// Whether the hold stays exclusive for as long as this guard does.
    pub(crate) fn writes(&self) -> bool {
        self.writes
    }

    /// A view that can be cloned and passed on.
    #[must_use]
    pub fn held(&self) -> Held {
        self.held.clone()
    }

    /// A second guard of the same hold, without asking anybody: the lock is given back when the
    /// last of them is gone. For work that is split up; it does not keep the parts apart.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost).
    pub fn reenter(&self) -> Result<Guard, Error> {
        if let Some(error) = self.loss_here() {
            return Err(error);
        }
        let released = || self.lost_for(LostReason::Released);
        self.held.guard(true).ok_or_else(released)
    }

    /// Makes a write hold a read hold, and waits for the store's answer, at most one operation timeout:
    /// other readers come in, those that wait in line are woken, and no writer has been in between. The
    /// place in line stays what it is: a writer that waits lets no later reader pass.
    ///
    /// A read hold has no [`write_token`](Held::write_token). To write means to release it and to take the
    /// lock again: inside, asking for the write side is [`WouldDeadlock`](crate::ErrorKind::WouldDeadlock).
    /// [`token`](Held::token) stays. The lease is renewed by the change, as by [`ensure`](Held::ensure), also
    /// without [renewal](crate::Lock::renew). [`min_hold`](crate::Lock::min_hold) keeps the read side then.
    ///
    /// Called again, or for a lock that was taken to read, this does nothing, unless the store has not
    /// acknowledged the change yet: then it is asked again.
    ///
    /// A hold that was taken inside of another hold of the lock ([`Lock::reentrant`](crate::Lock::reentrant))
    /// is a part of that one: readers elsewhere come in when nobody writes under the outer one either, and
    /// the store is not asked before.
    ///
    /// # Errors
    ///
    /// Nothing has changed:
    /// [`Busy`](crate::ErrorKind::Busy) while another guard of the same hold is left, or an inner one that
    /// writes; [`Config`](crate::ErrorKind::Config) for a semaphore; [`Lost`](crate::ErrorKind::Lost) if the
    /// lock was lost before.
    ///
    /// This is a read hold all the same: [`Unavailable`](crate::ErrorKind::Unavailable) or
    /// [`Unknown`](crate::ErrorKind::Unknown) when the store has not acknowledged it. It is held for
    /// [`remaining`](Held::remaining), but readers elsewhere may still be kept out; the keeper goes on asking
    /// until they are not. [`Lost`](crate::ErrorKind::Lost) when that is what the store says.
    ///
    /// # Cancel safety
    ///
    /// Dropped before its first poll, nothing has happened. After that this is a read hold, and the keeper
    /// goes on asking.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let catalog = locks.rwlock("catalog:7");
    /// let mut guard = catalog.write().acquire().await?;
    /// println!("rebuilt, nobody has seen it half done");
    ///
    /// guard.downgrade().await?;
    /// let reader = catalog.read().try_acquire().await?;
    /// assert!(catalog.write().try_acquire().await.is_err());
    /// # drop((guard, reader));
    /// # Ok(()) }
    /// ```
    pub async fn downgrade(&mut self) -> Result<(), Error> {
        let outcome = self.downgraded().await;
        outcome.map_err(|error| error.of_name(self.name()))
    }

    async fn downgraded(&mut self) -> Result<(), Error> {
        if self.lease().request.capacity != FULL {
            return Err(Error::config(
                "a semaphore has no read side; give permits back by release_permits instead",
            ));
        }
        if let Some(error) = self.loss_here() {
            return Err(error);
        }
        if self.writes {
            if !self.held.0.guards.only_writer_less() {
                return Err(Error::still_written());
            }
            self.writes = false;
            self.held.read_on();
        }
        match self.lease().is_shrinking() {
            true => Shrinking(&self.held).ask().await,
            false => Ok(()),
        }
    }

    /// Gives back some of a semaphore's permits and keeps the rest, and waits for the store's answer, at
    /// most one operation timeout: those that wait in line for as many are woken. `permits` is 1 to one
    /// less than the permits that are held; for all of them, [`release`](Self::release) the guard.
    ///
    /// They are gone for every guard of the hold: those of [`reenter`](Self::reenter) share the permits,
    /// and the last of them gives back what is left. [`token`](Held::token) and the place in line stay.
    /// The lease is renewed by the change, as by [`ensure`](Held::ensure), also without
    /// [renewal](crate::Lock::renew).
    ///
    /// # Errors
    ///
    /// Nothing has changed: [`Config`](crate::ErrorKind::Config) for another number of permits, and for a
    /// mutex or a read/write lock, which [`downgrade`](Self::downgrade) is for;
    /// [`Lost`](crate::ErrorKind::Lost) if the lock was lost before;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown) when permits
    /// that were given back before are still not acknowledged as such.
    ///
    /// The permits are not the caller's any more all the same: `Unavailable` or `Unknown` when the store
    /// has not acknowledged it. Others may be kept out of them until the keeper, which goes on asking, has
    /// an answer. [`remaining`](Held::remaining) tells how long the rest is held. `Lost` when that is what
    /// the store says.
    ///
    /// # Cancel safety
    ///
    /// Dropped before its first poll, nothing has happened. After that the permits are given back as above,
    /// unless earlier ones were not acknowledged yet, and the keeper goes on asking.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let uploads = locks.semaphore("uploads", 5);
    /// let guard = uploads.permits(5).acquire().await?;
    /// println!("four of five parts are up");
    ///
    /// guard.release_permits(4).await?;
    /// let others = uploads.permits(4).try_acquire().await?;
    /// # drop(others);
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    pub async fn release_permits(&self, permits: u32) -> Result<(), Error> {
        let outcome = self.permits_released(permits).await;
        outcome.map_err(|error| error.of_name(self.name()))
    }

    async fn permits_released(&self, permits: u32) -> Result<(), Error> {
        let lease = self.lease();
        if lease.request.capacity == FULL {
            return Err(Error::config(
                "only the permits of a semaphore can be given back in part; downgrade a write hold to read on",
            ));
        }
        loop {
            if let Some(error) = self.loss_here() {
                return Err(error);
            }
            let held = lease.permits();
            let Some(left) = held.checked_sub(permits).and_then(NonZeroU32::new) else {
                return Err(Error::config(format!(
                    "{permits} of the {held} permits that are held cannot be given back in part; for all of \
                     them, release the guard instead"
                )));
            };
            if permits == 0 {
                return Err(Error::config("no permits to give back: it takes 1 or more"));
            }
            if lease.shrink_from(held, left.get()) {
                return Shrinking(&self.held).ask().await;
            }
            // By another guard of this hold, or by a call that was not acknowledged: one after the other.
            Shrinking(&self.held).ask().await?;
        }
    }

    /// Makes the ttl of the lease longer, beyond what the lock was asked with, and renews the lease with
    /// it: from now on it is held for `ttl` without a further renewal, less a hundredth of that and 5 ms.
    /// Renewals go on with it, at its pace, for as long as the lock is held. For work that turns out to take
    /// long, before a step in which the store may be away, and for a lease without
    /// [renewal](crate::Lock::renew). If this process dies, the lock stays taken for as long.
    ///
    /// `ttl` is at least the present one, and at most what the store allows
    /// ([`Capability::longest_ttl`](crate::backend::Capability::longest_ttl); where a session carries the
    /// lease, that is its length, and a renewal gives what is left of it). A `ttl` as long as the present one
    /// only renews. [`max_hold`](crate::Lock::max_hold) stays the end. A ticket with a longer ttl is not
    /// passed on inside this process: whoever is next asks for one with its own.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for another ttl; [`Lost`](crate::ErrorKind::Lost). Nothing has
    /// changed then.
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown) when that was
    /// not acknowledged within an operation timeout, or when an earlier renewal with the shorter ttl never
    /// was, which may still arrive and would cut the lease: for a minute after that it is believed in only
    /// as far as that ttl goes. The lock is held for [`remaining`](Held::remaining) all the same, and later
    /// renewals ask for the longer ttl.
    ///
    /// # Cancel safety
    ///
    /// Dropped before its first poll, nothing has happened. After that later renewals ask for the longer
    /// ttl.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let guard = locks.mutex("report").acquire().await?;
    /// assert!(guard.remaining() < Duration::from_secs(11));
    ///
    /// // It has more pages than usual.
    /// guard.extend(Duration::from_secs(60)).await?;
    /// assert!(guard.remaining() > Duration::from_secs(55));
    /// # Ok(()) }
    /// ```
    pub async fn extend(&self, ttl: Duration) -> Result<(), Error> {
        let outcome = self.extended(ttl).await;
        outcome.map_err(|error| error.of_name(self.name()))
    }

    async fn extended(&self, ttl: Duration) -> Result<(), Error> {
        let (shared, lease) = (self.shared(), &self.held.0.lease);
        let longest = shared.backend.capability().longest_ttl;
        let present = lease.ttl();
        if ttl < present || ttl > longest {
            return Err(Error::config(format!(
                "a ttl of {} does not extend this lease: it has {}, and this store takes up to {}",
                format_duration(ttl),
                format_duration(present),
                format_duration(longest)
            )));
        }
        if let Some(error) = self.loss_here() {
            return Err(error);
        }
        if ttl > present {
            lease.lengthen(ttl);
            // The next holder has asked for the shorter one.
            shared.lanes.lost(shared, lease);
        }
        let by = shared.clock.now().after(shared.op_timeout);
        loop {
            // The answer may be to what was asked by another, with a longer one.
            let trusted = lease.is_trusted(shared.clock.now());
            self.renew().await.map_err(Error::unavailable_if_config)?;
            if trusted {
                return Ok(());
            }
            // A renewal of before is under way, which the next answer may find answered.
            let again = shared.clock.now().after(Duration::from_millis(5));
            if again >= by {
                return Err(Error::unavailable(format!(
                    "an earlier renewal was not answered and may still arrive, which would cut the lease to its ttl of \
                     {present:?}; it is believed in for that long until a minute after it"
                )));
            }
            shared.alarm(again).await;
        }
    }

    /// Releases the lock and waits for the store's answer, at most one operation timeout from when it
    /// is asked. In a burst of releases it may have to wait for its turn before that, for as long as the
    /// lease lasts. There is nothing to wait for where the lock is passed on inside this process, where another guard of the
    /// same hold is left, and where the keeper gives it back later
    /// ([`Lock::min_hold`](crate::Lock::min_hold)). Where this was the last to write and what was taken inside
    /// is still read under, the lock becomes the read side: see [`downgrade`](Self::downgrade).
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown) when the store
    /// did not answer; [`Config`](crate::ErrorKind::Config) when it denies the release. The keeper goes on trying
    /// until it is acknowledged or the lease has run out.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future hands the release to the keeper, as dropping the guard does.
    pub async fn release(mut self) -> Result<Release, Error> {
        if self.shared().is_forked() {
            self.disown();
            return Ok(Release::AlreadyLost);
        }
        let now = self.shared().clock.now();
        let lost_before = self.lost_at(now).is_some();
        let at_the_store = match self.end(now) {
            End::Nothing => false,
            End::Shrink => {
                let asked = Shrinking(&self.held).ask().await;
                match asked.map_err(|error| error.of_name(self.name())) {
                    // Who read on has ended meanwhile, and with that the hold.
                    _ if self.held.is_over() => {}
                    // The same as if it had been found before.
                    Err(error) if matches!(error.kind(), ErrorKind::Lost(_)) => {
                        return Ok(Release::AlreadyLost);
                    }
                    asked => asked?,
                }
                false
            }
            End::GiveBack(Source::Ticket { .. }) => true,
            End::GiveBack(Source::Share(share)) => share.leave(),
            End::GiveBack(Source::Outer(outer, turn)) => {
                drop(turn);
                // Boxed, or this future would contain itself.
                return Box::pin(outer.release()).await;
            }
        };
        let mut found = true;
        if at_the_store {
            found = Departing::of(&self.held).release(now).await?;
        }
        if !found && !lost_before {
            self.shared().missing(&self.held.0.lease);
        }
        let (lock, token) = (self.name(), self.token());
        let held_for = self.held.held_for(now);
        tracing::debug!(lock, %token, held_for, found, at_the_store, "lock released");
        Ok(if found && !lost_before {
            Release::Released
        } else {
            Release::AlreadyLost
        })
    }

    /// In a forked child this is a copy of a guard of the parent's. It gives nothing back, and what it
    /// comes from does not either.
    fn disown(&mut self) {
        self.over = true;
        // A thread of the parent's that had it at the fork never gives it back.
        let mut source = self.held.0.source.try_lock();
        let source = source.as_deref_mut().ok().and_then(Option::take);
        match source {
            Some(Source::Share(share)) => share.disown(),
            Some(Source::Outer(mut outer, _)) => outer.disown(),
            Some(Source::Ticket { .. }) | None => {}
        }
    }

    /// Ends this guard.
    fn end(&mut self, now: Instant) -> End {
        if std::mem::replace(&mut self.over, true) {
            return End::Nothing;
        }
        let hold = &self.held.0;
        let shared = self.shared();
        let lost = hold.lease.lost(now);
        if let Some(reason) = lost {
            hold.ended_lost.store(true, Ordering::SeqCst);
            shared.lost(&hold.lease, Stage::Held, reason);
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
        let mut source = hold.source.lock().unwrap_or_else(PoisonError::into_inner);
        let source = source.take();
        if let Some(Source::Ticket { keep_until }) = source
            && lost.is_none()
            && now < keep_until
        {
            shared.keep(&hold.lease, keep_until);
            return End::Nothing;
        }
        source.map_or(End::Nothing, End::GiveBack)
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
        let source = match self.end(now) {
            End::Nothing => return,
            End::Shrink => return self.shared().renew_soon(self.lease().request.id),
            End::GiveBack(source) => source,
        };
        let held_for = self.held.held_for(now);
        tracing::debug!(lock = self.name(), token = %self.token(), held_for, "lock released in the background");
        match source {
            Source::Ticket { .. } => self.shared().clean_up(Cleanup::of_held(&self.held.0.lease)),
            // Their drops give back.
            Source::Share(share) => drop(share),
            Source::Outer(outer, turn) => drop((turn, outer)),
        }
    }
}

/// A ticket that is to have fewer permits than the store knows: nobody writes under it any more, or some of
/// them were given back. If that is not acknowledged, for whatever reason, its drop leaves it to the keeper.
struct Shrinking<'a>(&'a Held);

impl Shrinking<'_> {
    async fn ask(self) -> Result<(), Error> {
        let held = self.0;
        let to_have = held.lease().permits();
        // Whatever the store says, nothing is as it was before.
        held.renew().await.map_err(Error::unavailable_if_config)?;
        let text = "the store could not say whether the ticket is smaller now";
        match held.lease().counted() > to_have {
            true => Err(Error::unknown(text)),
            false => Ok(()),
        }
    }
}

impl Drop for Shrinking<'_> {
    fn drop(&mut self) {
        let lease = self.0.lease();
        if lease.is_shrinking() {
            self.0.shared().renew_soon(lease.request.id);
        }
    }
}

/// A ticket that its last user is releasing at the store. If that is not acknowledged, for whatever
/// reason, its drop hands the ticket to the keeper.
struct Departing<'a> {
    held: &'a Held,
    acknowledged: bool,
}

impl<'a> Departing<'a> {
    fn of(held: &'a Held) -> Self {
        // No later batch renews it.
        held.shared().table().leave(held.0.lease.request.id);
        Self {
            held,
            acknowledged: false,
        }
    }

    /// Returns whether the ticket was there.
    async fn release(mut self, now: Instant) -> Result<bool, Error> {
        let (shared, lease) = (self.held.shared(), &self.held.0.lease);
        let departure = Departure {
            request: Arc::clone(&lease.request),
            enqueue_may_follow: lease.is_ambiguous(),
        };
        // It is worth waiting for its turn as long as it holds anything.
        let turn_by = lease.deadline().max(now);
        let answer = shared
            .release(Where::Here, now, turn_by, vec![departure])
            .await;
        let error = match answer.map(|answers| answers.first().copied()) {
            Ok(Some(released @ (Released::Released | Released::NotFound))) => {
                self.acknowledged = true;
                shared.disarm(lease.request.id);
                return Ok(released == Released::Released);
            }
            Ok(Some(Released::Failed) | None) => {
                Error::unknown("the store could not say whether the lock is released")
            }
            Err(error) => Error::from(error),
        };
        Err(error.of_name(self.held.name()))
    }
}

impl Drop for Departing<'_> {
    fn drop(&mut self) {
        if !self.acknowledged {
            // Releases once more if the first request has arrived, which finds nothing.
            let lease = &self.held.0.lease;
            self.held.shared().clean_up(Cleanup::of(lease));
        }
    }
}
