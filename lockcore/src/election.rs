//! The election: many candidates campaign, and one of them leads.

// It uses the mutex of a name, and the value beside it, which every new leader writes. So the store
// tells the observers of each leader. The observers are in `observe`.

mod observe;

use std::fmt;
use std::ops::{ControlFlow, Deref};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;

use crate::backend::{CountOp, KEEP};
use crate::client::counters::check_value;
use crate::client::shared::Shared;
use crate::client::table::AtEnd;
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, LostReason};
use crate::hold::{DetachError, Guard, Held, Release};
use crate::lock::Lock;
use crate::locks::Locks;
use crate::name::Name;
use crate::options::{OnRevoke, Wait};
use crate::pauses::Pauses;
use crate::token::FencingToken;

pub use observe::Leaders;

/// If a round has lasted longer than this, it is no failure: the next pause is short again.
const SETTLED: Duration = Duration::from_secs(1);

/// How often the value of a leader is read: four times in the time for which a store keeps it.
const READ_AGAIN: Duration = Duration::from_secs(KEEP.as_secs() / 4);

/// A wait of zero would mean not to wait.
const LEAST_WAIT: Duration = Duration::from_millis(1);

impl Locks {
    /// An election on a name. Of all candidates in all processes, one leads.
    ///
    /// It uses the [mutex](Self::mutex) of the name and its [value](Self::value). Do not use these
    /// two for anything else.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let election = locks.election("scheduler").value("10.0.0.7:8080");
    /// let done = election
    ///     .run_as_leader(async |leader| {
    ///         println!("leading, with token {:?}", leader.fencing_token());
    ///         ControlFlow::Break("all is scheduled")
    ///     })
    ///     .await?;
    /// assert_eq!(done, "all is scheduled");
    /// # Ok(()) }
    /// ```
    pub fn election(&self, name: impl Into<String>) -> Election {
        let name = name.into();
        let lock = self.mutex(name.clone());
        Election {
            locks: self.clone(),
            // A leader that resigns makes way at once, so the lock does not linger.
            lock: lock
                .wait(Wait::Forever)
                .through_outages(true)
                .reentrant(false)
                .linger(Duration::ZERO),
            name,
            value: "".into(),
        }
    }
}

/// An election: see [`Locks::election`]. No request is sent before an async method is called.
///
/// Candidates lead in the order in which they came. But a process may let its own tasks lead first
/// for a short time: see [`Fair`](crate::Fair). When a leader dies, the next candidate leads after
/// the lease has ended. When a leader [resigns](Leader::resign), the next candidate leads at once.
///
/// **Two may believe that they lead, for a moment.** A leader that is frozen does not notice that
/// its lease has ended and another candidate leads. Each leader has a [token](Leader::token),
/// greater than the tokens of all leaders before it. Send it with every write, and let the resource
/// refuse lower tokens, as [`fencing`](crate::fencing) shows.
#[derive(Clone, Debug)]
#[must_use = "an election does nothing until somebody campaigns or observes"]
pub struct Election {
    locks: Locks,
    lock: Lock,
    name: String,
    value: Arc<str>,
}

impl Election {
    /// The text that the leader publishes to the observers, for example its address: up to 1,024
    /// bytes. Default: an empty text. The leader can replace it with
    /// [`set_value`](Held::set_value).
    pub fn value(mut self, text: impl Into<Arc<str>>) -> Self {
        self.value = text.into();
        self
    }

    /// How long [`campaign`](Self::campaign) waits, connecting and [outages](Lock::through_outages)
    /// included. If the wait ends while the value of the new leader is written, the write has an
    /// operation timeout all the same. The default is forever, whatever the client's default is.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.lock = self.lock.wait(wait);
        self
    }

    /// The ttl of the leader's lease. After a leader has died, it takes at most this long until the
    /// next candidate leads. Bounds and default as in [`Lock::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.lock = self.lock.ttl(ttl);
        self
    }

    /// A text for traces and [metrics](crate::guide::metrics): see [`Lock::label`].
    pub fn label(mut self, label: &'static str) -> Self {
        self.lock = self.lock.label(label);
        self
    }

    /// The text that [`Locks::inspect`] shows for the leader and for the candidates that wait: see
    /// [`Lock::owner`]. Default: the client's default.
    pub fn owner(mut self, text: impl Into<String>) -> Self {
        self.lock = self.lock.owner(text);
        self
    }

    /// What happens to the body of [`run_as_leader`](Self::run_as_leader) when somebody asks for the
    /// leadership ([`Locks::revoke`]). Default: [`OnRevoke::Finish`]. With [`OnRevoke::Cancel`] the
    /// body is dropped at once, and the candidate campaigns again, behind the others.
    ///
    /// A [`Leader`] from [`campaign`](Self::campaign) is not stopped by this. It can listen to
    /// [`revoked`](Held::revoked).
    pub fn on_revoke(mut self, policy: OnRevoke) -> Self {
        self.lock = self.lock.on_revoke(policy);
        self
    }

    /// Waits until this candidate leads, and tells the observers. This takes one request more than
    /// a lock. If the store is out of reach, the candidate waits until it is back.
    ///
    /// # Errors
    ///
    /// The errors of [`Lock::acquire`] and of [`Held::set_value`].
    /// [`Timeout`](crate::ErrorKind::Timeout) only if there is a [wait](Self::wait), and
    /// [`Config`](crate::ErrorKind::Config) at a store without counters and for a
    /// [value](Self::value) that is too long.
    /// [`WouldDeadlock`](crate::ErrorKind::WouldDeadlock) inside of
    /// [`run_as_leader`](Self::run_as_leader) on the same name. After any error this candidate does
    /// not lead.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future withdraws the candidate. If the candidate leads already, the keeper
    /// releases its lock.
    pub async fn campaign(&self) -> Result<Leader, Error> {
        if !self.locks.0.shared.capability.counters {
            let text = "an election needs a store with counters, and this store has none";
            return Err(Error::config(text).of_name(&self.name));
        }
        check_value(&self.value).map_err(|error| error.of_name(&self.name))?;
        let clock = &self.locks.0.shared.clock;
        let give_up = match self.lock.default_wait() {
            Wait::For(wait) => clock.now().after(wait),
            Wait::Forever => Instant::FAR_FUTURE,
        };
        let mut lock = self.lock.clone();
        let mut pauses = Pauses::default();
        loop {
            let guard = lock.acquire().await?;
            let error = match self.lead(guard, give_up).await {
                Ok(leader) => return Ok(leader),
                Err(error) => error,
            };
            let again = clock.now().after(pauses.draw());
            // The store may have gone out of reach since the grant.
            if !error.is_outage() || again >= give_up {
                return Err(error);
            }
            tracing::info!(%error, "campaigning again");
            self.locks.0.shared.alarm(again).await;
            if let Wait::For(_) = lock.default_wait() {
                lock = lock.wait(clock.now().until(give_up).max(LEAST_WAIT));
            }
        }
    }

    /// Publishes the value of a candidate that has the lock.
    async fn lead(&self, guard: Guard, give_up: Instant) -> Result<Leader, Error> {
        let left = self.locks.0.shared.clock.now().until(give_up);
        let left = left.min(guard.remaining());
        let token = FencingToken::of_exclusive(guard.grant_id());
        // Before the value is written: if this future is dropped before the answer, observers may
        // have seen a leader.
        tell_observers_at_end(&self.locks.0.shared, &guard);
        guard
            .write_value(token, Arc::clone(&self.value), left)
            .await?;
        // The lease may have ended while the value was being sent, which may take several attempts.
        match guard.loss() {
            Some(lost) => Err(lost),
            None => Ok(Leader {
                _keeping: Keeping::begin(&self.locks.0.shared, &guard),
                guard,
            }),
        }
    }

    /// Campaigns, and runs `body` while this candidate leads. When the leadership is lost, the call
    /// drops the body at its current `.await`, and campaigns again. When the body ends, its result
    /// decides what follows. With `Break` the call resigns and returns. With `Continue` it resigns
    /// and campaigns again, behind the candidates that wait.
    ///
    /// The body gets a view of the leadership: its [token](Held::fencing_token), and
    /// [`set_value`](Held::set_value) to publish another value to the observers. A loss does not
    /// stop tasks that the body has spawned.
    ///
    /// After a failure, and after each round, there is a pause before the next campaign. The pause
    /// is about 20 ms. It grows to 2 seconds if rounds and campaigns keep ending within a second.
    ///
    /// **A body that changes a variable** must change it before its `async` block. An `async` closure
    /// that changes a captured variable does not compile: the compiler says that it "does not
    /// implement `FnMut` because it captures state from its environment". Inside the `async` block,
    /// use an atomic or a mutex.
    ///
    /// ```
    /// use std::ops::ControlFlow;
    /// use std::sync::atomic::{AtomicU32, Ordering};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// # let election = lockcore::Locks::connect("memory:")?.election("scheduler");
    /// let mut terms = 0;
    /// let pages = AtomicU32::new(0);
    /// let done = election
    ///     .run_as_leader(|_leader| {
    ///         terms += 1;
    ///         let (term, pages) = (terms, &pages);
    ///         async move {
    ///             pages.fetch_add(10, Ordering::Relaxed);
    ///             match term {
    ///                 3 => ControlFlow::Break("done"),
    ///                 _ => ControlFlow::Continue(()),
    ///             }
    ///         }
    ///     })
    ///     .await?;
    /// assert_eq!((done, terms, pages.into_inner()), ("done", 3, 30));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// Only if another try would fail in the same way: [`Config`](crate::ErrorKind::Config),
    /// [`WouldDeadlock`](crate::ErrorKind::WouldDeadlock),
    /// [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch), and
    /// [`Lost`](crate::ErrorKind::Lost) when the client is shut down. The end of a
    /// [wait](Self::wait) is not an error here: the candidate campaigns again.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future first drops the body. Then it withdraws the candidate, or the keeper
    /// releases its lock if the candidate leads.
    pub async fn run_as_leader<T, F, W>(&self, mut body: F) -> Result<T, Error>
    where
        // Not `AsyncFnMut`: its futures borrow from the closure, and the compiler cannot show that
        // they are `Send`.
        F: FnMut(Held) -> W,
        W: Future<Output = ControlFlow<T>>,
    {
        let shared = &self.locks.0.shared;
        let mut pauses = Pauses::default();
        loop {
            let error = match self.campaign().await {
                Err(error) => error,
                Ok(leader) => {
                    let held = leader.held();
                    let ended = leader.while_held(body(held.clone())).await;
                    if held.elapsed() > SETTLED {
                        pauses = Pauses::default();
                    }
                    match ended {
                        Err(lost) => lost,
                        Ok(next) => {
                            // If the release fails, the keeper repeats it.
                            if let Err(error) = leader.resign().await {
                                tracing::warn!(%error, "the leader resigns in the background");
                            }
                            match next {
                                ControlFlow::Break(result) => return Ok(result),
                                ControlFlow::Continue(()) => {
                                    shared.alarm(shared.clock.now().after(pauses.draw())).await;
                                    continue;
                                }
                            }
                        }
                    }
                }
            };
            if is_final(&error) {
                return Err(error);
            }
            if error.kind() == ErrorKind::Timeout {
                continue; // no pause, because a candidate that pauses is not in line
            }
            tracing::info!(%error, "campaigning again");
            shared.alarm(shared.clock.now().after(pauses.draw())).await;
        }
    }

    /// Returns an observer, which tells who leads, now and after each change. No request is sent
    /// before the first call of [`next`](Leaders::next).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let election = locks.election("scheduler").value("10.0.0.7:8080");
    /// let mut leaders = election.observe();
    /// assert_eq!(leaders.next().await?, None);
    ///
    /// let leader = election.campaign().await?;
    /// let seen = leaders.next().await?.expect("a leader");
    /// assert_eq!((seen.token, &*seen.text), (leader.token(), "10.0.0.7:8080"));
    ///
    /// leader.resign().await?;
    /// assert_eq!(leaders.next().await?, None);
    /// # Ok(()) }
    /// ```
    pub fn observe(&self) -> Leaders {
        Leaders::new(self.locks.clone(), self.name.clone())
    }
}

/// Whether another campaign would fail in the same way.
fn is_final(error: &Error) -> bool {
    match error.kind() {
        ErrorKind::Config | ErrorKind::WouldDeadlock | ErrorKind::CapacityMismatch => true,
        ErrorKind::Lost(reason) => matches!(reason, LostReason::Shutdown | LostReason::Forked),
        ErrorKind::Busy | ErrorKind::Timeout | ErrorKind::Unavailable | ErrorKind::Unknown => false,
    }
}

/// The leadership, from [`Election::campaign`]. It is a held lock with the methods of [`Held`]:
/// [`lost`](Held::lost), [`in_danger`](Held::in_danger), [`remaining`](Held::remaining), and
/// [`set_value`](Held::set_value), which publishes another value to the observers.
///
/// When this value is dropped, the keeper releases the lock, and then tells the observers.
/// [`resign`](Self::resign) does the same, and waits until it is done. If another candidate of this
/// client waits, it gets the lock without a request to the store. The observers then learn of both
/// when that candidate publishes its value.
#[must_use = "the leadership is given up as soon as this is dropped; bind it to a variable"]
pub struct Leader {
    guard: Guard,
    _keeping: Keeping,
}

/// When the leader's ticket has ended, the value gets a new version, with the same text. So everybody
/// who follows the value looks who leads. The process may end before that, or the request may fail.
/// Then the observers look when the lease ends that they have seen. If another leader has written by
/// then, its text stays, and the observers look once more than they need.
fn tell_observers_at_end(shared: &Shared, guard: &Guard) {
    let request = &guard.lease().request;
    let touch = AtEnd {
        counter: request.name.value(),
        op: CountOp::Set {
            count: 0, // the number of this record, which nobody uses
            only_if: None,
        },
    };
    shared.change_at_end(request.id, touch);
}

/// Keeps the value of a leader at the store, until this is dropped. A store forgets a value some
/// time after its last use, and a leader may lead longer than that. Observers that come then must
/// find the value.
struct Keeping(AbortHandle);

impl Keeping {
    fn begin(shared: &Arc<Shared>, guard: &Guard) -> Self {
        let value = guard.lease().request.name.value();
        // The task keeps no handle of the client alive, which would have to be dropped elsewhere.
        let first = shared.clock.now().after(READ_AGAIN);
        let reading = keep_reading(Arc::clone(shared), value, first);
        let reading = shared.keeper.spawn(reading);
        Self(reading.abort_handle())
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn keep_reading(shared: Arc<Shared>, value: Name, mut next: Instant) {
    loop {
        shared.alarm(next).await;
        next = next.after(READ_AGAIN);
        let read = shared.count(&value, CountOp::Read, None, Wait::Forever);
        if let Err(error) = read.await {
            tracing::debug!(%error, "the value of a leader cannot be read at the moment");
        }
    }
}

impl Leader {
    /// Identifies this leader: every later leader of the election has a greater token. It is the
    /// [fencing token](Held::fencing_token).
    #[must_use]
    pub fn token(&self) -> FencingToken {
        FencingToken::of_exclusive(self.grant_id())
    }

    /// A view of the leadership, which can be cloned and passed to other code.
    #[must_use]
    pub fn held(&self) -> Held {
        self.guard.held()
    }

    /// Gives the leadership up, waits for the store's answer as [`Guard::release`] does, and tells
    /// the observers. The value stays. This takes one request more than a release.
    ///
    /// # Errors
    ///
    /// The errors of [`Guard::release`]. If only the message to the observers fails, there is no
    /// error. Observers then learn of the end from the next leader, or when the lease that they have
    /// seen ends.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the keeper releases the lock and tells the observers, as after a
    /// drop of this value.
    pub async fn resign(self) -> Result<Release, Error> {
        self.guard.release().await
    }

    /// Gives the leadership to another process, without an election: see [`Guard::detach`].
    /// [`Locks::adopt`] takes it over, with the same [token](Self::token). Observers see no change,
    /// because the value stays. They see the new process when it [writes](Held::set_value) another
    /// value. The adopter has a guard and not a `Leader`. When it releases the guard, observers
    /// learn that from the next leader, or when the lease that they have seen ends.
    ///
    /// # Errors
    ///
    /// As [`Guard::detach`]. The guard in the error leads still, except when the error is
    /// [`Lost`](crate::ErrorKind::Lost). Its [`release`](Guard::release) is the resignation.
    ///
    /// # Cancel safety
    ///
    /// As [`resign`](Self::resign).
    pub async fn detach(self) -> Result<String, DetachError> {
        self.guard.detach().await
    }
}

impl Deref for Leader {
    type Target = Held;

    fn deref(&self) -> &Held {
        &self.guard
    }
}

impl fmt::Debug for Leader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Leader").field(&self.guard).finish()
    }
}
