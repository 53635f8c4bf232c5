//! Several locks at once: all of them, or one of them.

// This file has the order in which all of several locks are taken, their common time limit, and the
// loss of one of them. Taking one of several is in `any`, and work under them in `run`.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{FutureExt as _, join_all, select_all};
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::Notify;

use crate::acquire::pending::LAST_MOMENT;
use crate::backend::AskedBack;
use crate::error::{Error, ErrorKind, LostReason};
use crate::hold::{Guard, Held, Release};
use crate::lock::Lock;
use crate::options::Wait;

pub use crate::any::AnyLock;

/// Several locks that are taken together, all or none of them. Made by
/// [`Locks::all`](crate::Locks::all).
///
/// The caller waits for the locks one after the other, in the order of their names. So two callers
/// with some locks in common never wait for each other in a circle.
///
/// Together with the request for the first lock, the caller asks for up to 15 of the others, without
/// waiting for these. If all are free, that takes one round trip. If it has to wait for one of them, it
/// gives back at once what it has got of the later ones. Meanwhile another client that only tries one of
/// these may be refused. With [`Fair::Strict`](crate::Fair::Strict) the caller asks for one after the
/// other.
///
/// If a mutex or a read/write lock is in the list twice, it is locked once. If one of the two
/// entries is the write side, the write side is locked, with the settings of this entry. Otherwise
/// the settings of the first entry count. If a semaphore is in the list twice, its permits are
/// added up, with the settings of the first entry: `permits(2)` and `permits(3)` are five permits.
/// More permits than the semaphore has are an error.
///
/// Each lock keeps its own settings, such as [`Lock::ttl`]. [`Lock::min_hold`] and
/// [`Lock::max_hold`] count from the grant of the last lock. There is one wait for all locks
/// together. Its default is the longest wait of the single locks. An empty list is granted at once.
///
/// While the call waits for one lock, it holds the locks that it has taken before, so others wait
/// for these too. For locks of different stores the order is by name, then by the URL of the store.
///
/// ```
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// use lockcore::Locks;
///
/// let locks = Locks::connect("memory:")?;
/// let accounts = [7, 3].map(|id| locks.mutex(format!("account:{id}")));
/// Locks::all(accounts)
///     .wait(Duration::from_secs(2))
///     .run(async |held| {
///         for lock in held.iter() {
///             println!("{} by grant {}", lock.name(), lock.grant_id());
///         }
///         Ok::<_, lockcore::Error>(())
///     })
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "locks do nothing until they are acquired"]
pub struct MultiLock {
    /// The locks in the order in which they are taken, without duplicates.
    locks: Vec<Lock>,
    wait: Option<Wait>,
}

impl MultiLock {
    pub(crate) fn new(mut locks: Vec<Lock>) -> Self {
        locks.sort_by(Lock::in_order);
        // A name may be in the list with two capacities, for example as a mutex and as a semaphore.
        // Then both locks stay in the list, and the store refuses one of them.
        locks.dedup_by(|later, earlier| {
            if earlier.add_permits(later) {
                return true;
            }
            if later.covers(earlier) && !earlier.covers(later) {
                std::mem::swap(later, earlier);
            }
            earlier.covers(later)
        });
        Self { locks, wait: None }
    }

    /// How long [`acquire`](Self::acquire) and [`run`](Self::run) wait, for all locks together.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = Some(wait.into());
        self
    }

    /// A text for traces and metrics that is the same for all keys. It is set as the
    /// [`Lock::label`] of each lock.
    pub fn label(mut self, label: &'static str) -> Self {
        let labelled = self.locks.into_iter().map(|lock| lock.label(label));
        self.locks = labelled.collect();
        self
    }

    /// Takes all locks, or none.
    ///
    /// # Errors
    ///
    /// The errors of [`Lock::acquire`], with the name of the lock that failed, and
    /// [`Lost`](crate::ErrorKind::Lost) when a lock was lost while this waited for the next one.
    /// After an error, the locks that were already taken are released before this returns, or in
    /// the background if the store is slow.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind, as with a single lock. A future that is not dropped and
    /// not polled any more may hold some of the locks.
    pub async fn acquire(&self) -> Result<MultiGuard, Error> {
        let longest = |longest, wait| match (longest, wait) {
            (Wait::For(one), Wait::For(other)) => Wait::For(one.max(other)),
            _ => Wait::Forever,
        };
        let waits = self.locks.iter().map(Lock::default_wait);
        let wait = self.wait.or_else(|| waits.reduce(longest));
        self.take(wait).await
    }

    /// Takes all locks if all are free, in one round trip each. They are not asked for at the same
    /// time: if two callers did that, each could get one lock and be refused the other. See
    /// [`Lock::try_acquire`] for locks that this client is still releasing.
    ///
    /// # Errors
    ///
    /// [`Busy`](crate::ErrorKind::Busy) with the name of the first lock that is not free, and the
    /// errors of [`acquire`](Self::acquire) except `Timeout`.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(&self) -> Result<MultiGuard, Error> {
        self.take(None).await
    }

    async fn take(&self, wait: Option<Wait>) -> Result<MultiGuard, Error> {
        // If the future is dropped during the loop, the guards are dropped, and their keepers
        // release the locks.
        let mut guards = Vec::with_capacity(self.locks.len());
        // A wait of zero means not to wait, as for a single lock.
        let wait = wait.filter(|wait| *wait != Wait::For(Duration::ZERO));
        let error = match self.take_each(wait, &mut guards).await {
            Ok(()) => {
                // The limits count from the last grant, because the work cannot begin before the
                // last grant.
                if self.locks.iter().any(Lock::is_limited)
                    && let Some(since) = guards.iter().map(Guard::granted_at).max()
                {
                    for (lock, guard) in self.locks.iter().zip(&guards) {
                        lock.begin_at(guard, since);
                    }
                }
                return Ok(MultiGuard::of(guards));
            }
            Err(error) => error,
        };
        // The locks are released before the return. Otherwise a caller that asks again at once
        // would find its own locks held. The wait may be over, or the store may be out of reach, so
        // this waits only for the usual time of a release.
        if let Some(lock) = self.locks.first() {
            let releases = join_all(guards.into_iter().map(Guard::release));
            let _ = lock.within(LAST_MOMENT, releases).await;
        }
        Err(error)
    }

    async fn take_each(&self, wait: Option<Wait>, guards: &mut Vec<Guard>) -> Result<(), Error> {
        let Some(first) = self.locks.first() else {
            return Ok(());
        };
        // All locks are checked first, so that an error in the last lock is reported before the
        // first lock is taken.
        for lock in &self.locks {
            lock.check()?;
        }
        let clock = first.clock();
        let began = clock.now();
        if let Some(wait) = wait {
            self.take_free(wait, guards).await?;
        }
        for lock in &self.locks[guards.len()..] {
            let left = match wait {
                Some(Wait::For(all)) if !guards.is_empty() => {
                    let spent = began.until(clock.now());
                    match all.checked_sub(spent) {
                        Some(left) if !left.is_zero() => Some(Wait::For(left)),
                        _ => return Err(lock.timeout(spent)),
                    }
                }
                as_given => as_given,
            };
            let lost = first_lost(guards.iter().map(|guard| &**guard));
            let guard = tokio::select! {
                biased;
                // One of the locks is lost, so it is useless to wait for the others. The request in
                // flight is cleaned up when its future is dropped.
                (held, reason) = lost => return Err(held.lost_for(reason)),
                guard = lock.take(left) => guard,
            };
            guards.push(guard.map_err(|error| match error.kind() {
                // It has waited only for the rest of the time, and must tell the whole time.
                ErrorKind::Timeout => lock.timeout(began.until(clock.now())),
                _ => error,
            })?);
        }
        Ok(())
    }

    /// Takes the first lock, and those behind it that are free, up to the first one that is not. Does
    /// nothing if one of the locks [must not be early](Lock::may_be_early). The caller asks again, and
    /// waits, for the lock that it has not got, whatever the reason was.
    ///
    /// If the future is dropped, the guards are dropped, and all requests in flight clean up after
    /// themselves.
    async fn take_free(&self, wait: Wait, guards: &mut Vec<Guard>) -> Result<(), Error> {
        let several = self.locks.len() > 1 && self.locks.iter().all(Lock::may_be_early);
        let Some((first, behind)) = self.locks.split_first().filter(|_| several) else {
            return Ok(());
        };
        let mut early = Early::ask(&behind[..behind.len().min(MOST_EARLY)], wait);
        let outcome = match take_first(first, wait, &mut early).await {
            Ok(guard) => {
                let lost = first_lost([&*guard].into_iter());
                let outcome = tokio::select! {
                    biased;
                    // Each of these answers comes within an operation timeout.
                    () = early.collect() => Ok(()),
                    (held, reason) = lost => Err(held.lost_for(reason)),
                };
                guards.push(guard);
                outcome
            }
            Err(error) => Err(error),
        };
        // After an error, the caller releases them before it returns.
        guards.extend(early.in_front());
        outcome
    }
}

/// Takes a lock, and collects the answers about those behind it.
///
/// As soon as the caller has to wait for others, or the answer about the first lock takes longer than an
/// operation may take, it gives back what it has got behind it. So it never waits for somebody who waits
/// for one of those.
async fn take_first<F>(first: &Lock, wait: Wait, early: &mut Early<F>) -> Result<Guard, Error>
where
    F: Future<Output = (usize, Result<Guard, Error>)>,
{
    let others = Arc::new(Notify::new());
    let mut taking = pin!(first.take_telling(wait, Arc::clone(&others)));
    let late = first.within(first.op_timeout(), std::future::pending::<()>());
    let mut late = pin!(late.fuse());
    loop {
        tokio::select! {
            biased;
            // This is polled first. If this process knows that it has to wait, nothing else is sent.
            guard = &mut taking => return guard,
            () = others.notified() => early.give_up(),
            _ = &mut late => early.give_up(),
            () = early.collect(), if !early.asked.is_empty() => {}
        }
    }
}

/// How many locks are asked for together with the first one. Most of this work is in vain if one of the
/// first locks is not free.
const MOST_EARLY: usize = 15;

/// Locks that were asked for before the caller's turn has come to wait for them. What is left in it when
/// it is dropped is given back.
struct Early<F> {
    /// Polled at the same time. Each answer comes with the place of its lock.
    asked: FuturesUnordered<F>,
    granted: Vec<Option<Guard>>,
    /// Of use are only the locks in front of this place, which is that of the first lock that was not
    /// granted.
    front: usize,
}

impl<F: Future<Output = (usize, Result<Guard, Error>)>> Early<F> {
    /// Collects the answers, until those about all locks in front are there.
    ///
    /// Cancel safety: safe. What was collected stays.
    async fn collect(&mut self) {
        while let Some((at, answer)) = self.asked.next().await {
            match answer {
                Ok(guard) => self.granted[at] = Some(guard),
                Err(_) => self.front = self.front.min(at),
            }
            if self.granted[..self.front].iter().all(Option::is_some) {
                self.asked.clear();
            }
        }
    }
}

impl<F> Early<F> {
    /// Gives everything back.
    fn give_up(&mut self) {
        self.front = 0;
        self.asked.clear();
        drop(self.in_front());
    }

    /// Takes the guards of the locks in front, and gives the others back.
    fn in_front(&mut self) -> Vec<Guard> {
        let behind = self.granted.drain(self.front..).flatten();
        behind.for_each(|guard| guard.lease().want()); // it does not linger
        self.granted.drain(..).flatten().collect()
    }
}

impl<F> Drop for Early<F> {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl Early<()> {
    /// Asks for each of these locks at the same time, when it is polled.
    fn ask(
        locks: &[Lock],
        wait: Wait,
    ) -> Early<impl Future<Output = (usize, Result<Guard, Error>)> + use<'_>> {
        let most = match wait {
            Wait::For(wait) => wait,
            Wait::Forever => Duration::MAX,
        };
        let asked = (locks.iter().enumerate())
            .map(|(at, lock)| async move { (at, lock.take_early(most).await) })
            .collect();
        Early {
            asked,
            granted: locks.iter().map(|_| None).collect(),
            front: locks.len(),
        }
    }
}

/// A view of several held locks. It dereferences to a slice of [`Held`], in the order of the names.
/// Its methods are those of [`Held`], for all the locks together.
#[derive(Clone)]
pub struct MultiHeld(Vec<Held>);

impl MultiHeld {
    pub(crate) fn of(held: impl IntoIterator<Item = Held>) -> Self {
        Self(held.into_iter().collect())
    }

    /// The lock of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Held> {
        self.iter().find(|held| held.name() == name)
    }

    /// Whether all locks are held at this moment: see [`Held::is_valid`].
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.iter().all(Held::is_valid)
    }

    /// How long all locks are held if no further renewal succeeds: see [`Held::remaining`].
    #[must_use]
    pub fn remaining(&self) -> Duration {
        let remaining = self.iter().map(Held::remaining);
        remaining.min().unwrap_or(Duration::MAX)
    }

    /// Resolves when one of the locks is lost or released: see [`Held::lost`]. If one is lost, the
    /// others are released. In this case the call returns the lock that was lost, and why.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits.
    pub async fn lost(&self) -> (&Held, LostReason) {
        let first = first_lost(self.iter()).await;
        let not_held = self
            .iter()
            .filter_map(|held| Some((held, held.lost_reason()?)));
        let mut lost = not_held.filter(|(_, reason)| *reason != LostReason::Released);
        lost.next().unwrap_or(first)
    }

    /// Resolves when somebody asks for one of the locks. Tells who asks and why: see
    /// [`Held::revoked`]. Nobody asks for the other locks, but work under all of them ends when one
    /// is lost.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits and reads.
    pub async fn revoked(&self) -> (&Held, AskedBack) {
        let revoked = |held| Box::pin(async move { (held, Held::revoked(held).await) });
        first(self.iter().map(revoked)).await
    }

    /// Resolves when one of the locks is likely to be lost soon. Returns the lock and the time that
    /// is left for it. Each lock has its own warnings: see [`Held::in_danger`].
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits.
    pub async fn in_danger(&self) -> (&Held, Duration) {
        let danger = |held| Box::pin(async move { (held, Held::in_danger(held).await) });
        first(self.iter().map(danger)).await
    }

    /// Makes sure that all locks are held for `duration` from now on: see [`Held::ensure`].
    ///
    /// # Errors
    ///
    /// The errors of [`Held::ensure`].
    ///
    /// # Cancel safety
    ///
    /// As [`Held::ensure`].
    pub async fn ensure(&self, duration: Duration) -> Result<(), Error> {
        // While some locks were being renewed, the leases of the others grew shorter. If two rounds
        // are not enough, further rounds do not help.
        for _ in 0..2 {
            let all = join_all(self.iter().map(|held| held.ensure(duration))).await;
            all.into_iter().collect::<Result<(), _>>()?;
            if self.remaining() >= duration {
                return Ok(());
            }
        }
        let text =
            format!("cannot be ensured together for {duration:?}: the renewals take too long");
        Err(Error::unavailable(text).of_held())
    }

    /// Resolves when one of the leases changes.
    pub(crate) async fn changed(&self) {
        first(
            self.iter()
                .map(|held| Box::pin(held.lease().changed.notified())),
        )
        .await;
    }
}

/// The first lock that is lost, and why.
async fn first_lost<'a>(all: impl ExactSizeIterator<Item = &'a Held>) -> (&'a Held, LostReason) {
    first(all.map(|held| Box::pin(async move { (held, held.lost().await) }))).await
}

/// The result of the first future that is ready. Without futures it never resolves.
async fn first<F: Future + Unpin>(futures: impl ExactSizeIterator<Item = F>) -> F::Output {
    if futures.len() == 0 {
        return std::future::pending().await;
    }
    select_all(futures).await.0
}

impl Deref for MultiHeld {
    type Target = [Held];

    fn deref(&self) -> &[Held] {
        &self.0
    }
}

impl fmt::Debug for MultiHeld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Several held locks. If this is dropped, the keepers release the locks, as with a single
/// [`Guard`].
#[derive(Debug)]
#[must_use = "the locks are released as soon as the guard is dropped; bind it to a variable"]
pub struct MultiGuard {
    held: MultiHeld,
    guards: Vec<Guard>,
}

impl MultiGuard {
    pub(crate) fn of(guards: Vec<Guard>) -> Self {
        Self {
            held: MultiHeld::of(guards.iter().map(|guard| guard.held())),
            guards,
        }
    }

    /// A view of the locks, which can be cloned and given to other code.
    #[must_use]
    pub fn held(&self) -> MultiHeld {
        self.held.clone()
    }

    /// Releases all locks and waits for the stores' answers: see [`Guard::release`]. Returns
    /// [`Release::AlreadyLost`] if one of the locks had been lost.
    ///
    /// # Errors
    ///
    /// The first error of [`Guard::release`]. Every lock is released even so: if a release fails,
    /// the keeper repeats it.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the keepers release the locks, as after the drop of the guard.
    pub async fn release(self) -> Result<Release, Error> {
        let all = join_all(self.guards.into_iter().map(Guard::release)).await;
        all.into_iter()
            .try_fold(Release::Released, |so_far, released| {
                Ok(match released? {
                    Release::Released => so_far,
                    Release::AlreadyLost => Release::AlreadyLost,
                })
            })
    }
}

impl Deref for MultiGuard {
    type Target = MultiHeld;

    fn deref(&self) -> &MultiHeld {
        &self.held
    }
}
