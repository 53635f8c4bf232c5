//! The election: many campaign, one leads. It is the mutex of a name, and the value beside it, which every new leader
//! writes. So those who observe hear of each leader. They are in `observe`.

mod observe;

use std::convert::Infallible;
use std::fmt;
use std::ops::{ControlFlow, Deref};
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind, LostReason};
use crate::hold::{Guard, Held, Release};
use crate::lock::Lock;
use crate::locks::Locks;
use crate::options::Wait;
use crate::pauses::Pauses;
use crate::token::FencingToken;
use crate::value::LockValue;

pub use observe::Leaders;

/// A round that has lasted so long is no failure: the next pause is short again.
const SETTLED: Duration = Duration::from_secs(1);

/// A leader reads its value so often: four times in the day for which a store keeps it.
const KEPT_FOR: Duration = Duration::from_secs(6 * 60 * 60);

impl Locks {
    /// An election on a name: one of all who campaign leads, in all processes together.
    ///
    /// It uses the [mutex](Self::mutex) of the name and its [value](Self::value). Use the two for nothing else.
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
            lock: lock.wait(Wait::Forever).reentrant(false),
            name,
            value: "".into(),
        }
    }
}

/// An election: see [`Locks::election`]. Nothing happens at the store before a method is called that waits.
///
/// Candidates lead in the order in which they came, but for the turns that a process gives its own tasks first: see
/// [`Fair`](crate::Fair). A leader that dies is followed when its lease ends, one that
/// [resigns](Leader::resign) at once.
///
/// **Two may believe that they lead, for a moment.** A leader that is frozen does not notice that its lease has ended and
/// another leads. Each leader has a [token](Leader::token), greater than those of all before it. Send it with every
/// write, and let the resource refuse lower ones, as [`fencing`](crate::fencing) shows.
#[derive(Clone, Debug)]
#[must_use = "an election does nothing until somebody campaigns or observes"]
pub struct Election {
    locks: Locks,
    lock: Lock,
    name: String,
    value: Arc<str>,
}

impl Election {
    /// The text that the leader publishes to the observers, for example its address: up to 1,024 bytes. Default: an empty text. The
    /// leader can replace it by [`set_value`](Held::set_value).
    pub fn value(mut self, text: impl Into<Arc<str>>) -> Self {
        self.value = text.into();
        self
    }

    /// How long [`campaign`](Self::campaign) waits, connecting included. Default: forever, whatever the client's default
    /// is.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.lock = self.lock.wait(wait);
        self
    }

    /// How long a leader that has died is not followed, at most. Bounds and default as in [`Lock::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.lock = self.lock.ttl(ttl);
        self
    }

    /// Waits until this candidate leads, and tells the observers. One request more than a lock.
    ///
    /// # Errors
    ///
    /// Those of [`Lock::acquire`] and of [`Held::set_value`]: [`Timeout`](crate::ErrorKind::Timeout) only if there is a
    /// [wait](Self::wait), and [`Config`](crate::ErrorKind::Config) at a store without counters. Nobody leads for this
    /// candidate then.
    /// [`WouldDeadlock`](crate::ErrorKind::WouldDeadlock) inside of [`run_as_leader`](Self::run_as_leader) on the same
    /// name.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future withdraws the candidate. If it leads already, it gives that up in the background.
    pub async fn campaign(&self) -> Result<Leader, Error> {
        if !self.locks.0.shared.capability.counters {
            let text = "an election needs a store with counters, and this store has none";
            return Err(Error::config(text).of_name(&self.name));
        }
        let guard = self.lock.acquire().await?;
        guard.set_value(Arc::clone(&self.value)).await?;
        // The lease may have ended while the value was sent again and again.
        match guard.loss() {
            Some(lost) => Err(lost),
            None => Ok(Leader {
                value: self.locks.value(self.name.clone()),
                guard,
            }),
        }
    }

    /// Campaigns, and runs `body` while this candidate leads. When the leadership is lost, the body is dropped where it
    /// stands, and this campaigns again. The body decides how it goes on: with `Break` this resigns and returns, with
    /// `Continue` it resigns and campaigns again, behind the candidates that wait.
    ///
    /// The body gets a view of the leadership: its [token](Held::fencing_token), and
    /// [`set_value`](Held::set_value) to tell the observers something else. Tasks that it spawns are not stopped by a
    /// loss.
    ///
    /// After a failure, and after each round, there is a pause before the next campaign: about 20 ms, and up to 2 seconds
    /// if rounds and campaigns keep ending within a second.
    ///
    /// # Errors
    ///
    /// Only if another try would fail in the same way: [`Config`](crate::ErrorKind::Config),
    /// [`WouldDeadlock`](crate::ErrorKind::WouldDeadlock), [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch),
    /// and [`Lost`](crate::ErrorKind::Lost) when the client is shut down. The end of a [wait](Self::wait) is no error
    /// here: the candidate campaigns again.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the body first. It then withdraws the candidate, or gives the leadership up in the
    /// background.
    pub async fn run_as_leader<T, F, W>(&self, mut body: F) -> Result<T, Error>
    where
        // Not `AsyncFnMut`: its futures borrow from the closure, and the compiler cannot show that they are `Send`.
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
                    let ended = tokio::select! {
                        biased;
                        ended = leader.while_held(body(held.clone())) => ended,
                        never = self.keep_value(&leader.value) => match never {},
                    };
                    if held.elapsed() > SETTLED {
                        pauses = Pauses::default();
                    }
                    match ended {
                        Err(lost) => lost,
                        Ok(next) => {
                            // A release that fails goes on in the background.
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
                continue; // while it pauses, it is not in line
            }
            tracing::info!(%error, "campaigning again");
            shared.alarm(shared.clock.now().after(pauses.draw())).await;
        }
    }

    /// Reads the value now and then, because a store forgets it a day after its last use.
    async fn keep_value(&self, value: &LockValue) -> Infallible {
        let shared = &self.locks.0.shared;
        loop {
            shared.alarm(shared.clock.now().after(KEPT_FOR)).await;
            if let Err(error) = value.read().await {
                tracing::debug!(%error, "the value of a leader cannot be read at the moment");
            }
        }
    }

    /// Tells who leads, now and after each change. Nothing happens at the store before the first call of
    /// [`next`](Leaders::next).
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

/// The leadership, from [`Election::campaign`]. It is a held lock: [`Held`] has its
/// [`lost`](Held::lost), [`in_danger`](Held::in_danger), [`remaining`](Held::remaining), and
/// [`set_value`](Held::set_value), which tells the observers something else.
///
/// Dropping it gives the leadership up in the background. Observers learn that from the next leader, or when the lease
/// that they have seen is over. [`resign`](Self::resign) tells them at once.
#[must_use = "the leadership is given up as soon as this is dropped; bind it to a variable"]
pub struct Leader {
    guard: Guard,
    value: LockValue,
}

impl Leader {
    /// Tells this leader from all others of the election: every later leader has a greater token. It is the
    /// [fencing token](Held::fencing_token).
    #[must_use]
    pub fn token(&self) -> FencingToken {
        FencingToken::of_exclusive(self.grant_id())
    }

    /// A view of the leadership, which can be cloned and passed on.
    #[must_use]
    pub fn held(&self) -> Held {
        self.guard.held()
    }

    /// Gives the leadership up, waits for the store's answer as [`Guard::release`] does, and tells the observers. The
    /// value stays. Two requests more than a release. Resign before the client is shut down: after that, nobody is told.
    ///
    /// # Errors
    ///
    /// Those of [`Guard::release`]. If only the telling fails, there is no error: observers then learn it as if this was
    /// dropped.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives the leadership up in the background, as dropping this does.
    pub async fn resign(self) -> Result<Release, Error> {
        let token = self.token();
        let released = self.guard.release().await?;
        // If anybody has written since it was read, the observers look anyway.
        let told = async {
            let read = self.value.read().await?;
            match &read.written {
                Some(last) if last.token == token => self.value.touch(read.version).await.map(drop),
                _ => Ok(()),
            }
        };
        if let Err(error) = told.await {
            tracing::debug!(%error, "observers were not told of the resignation");
        }
        Ok(released)
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
