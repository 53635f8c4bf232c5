//! Taking one of several locks: the first that is free, or the first that is granted. Taking all of
//! several locks is in `multi`.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use crate::clock::{Clock, Instant};
use crate::error::{Error, ErrorKind};
use crate::hold::Guard;
use crate::lock::Lock;
use crate::options::Wait;

/// One of several locks. Made by [`Locks::any`](crate::Locks::any).
///
/// A list of names is a pool of resources, and the caller gets one of them. If the resources need
/// no names, use a [semaphore](crate::Locks::semaphore): it costs one request instead of one per
/// name.
///
/// The locks are asked for one after the other, in the order of the list. If a store does not
/// answer for a tenth of an operation timeout, the locks of other clients are asked for meanwhile.
/// If it does not answer for half of one, the other locks of the same client are asked for too. So
/// a free lock of a store that works is found soon, and all locks of a client that does not answer
/// take one operation timeout together.
///
/// The caller gets one guard, never two. If the store grants a second lock to this caller at the
/// same moment, the client releases the second lock at once.
#[derive(Clone, Debug)]
#[must_use = "no lock is taken until `acquire` is awaited"]
pub struct AnyLock(Vec<Lock>);

impl AnyLock {
    pub(crate) fn new(locks: Vec<Lock>) -> Self {
        Self(locks)
    }

    /// Takes the first lock in the list that is free. If none is free, waits for all of them, and
    /// takes the first that is granted. If the store of some locks fails, waits for the others that
    /// somebody holds.
    ///
    /// Each lock waits as long as it is [set](Lock::wait) to, counted from the call.
    ///
    /// # Errors
    ///
    /// If no lock is granted: the first error other than [`Busy`](crate::ErrorKind::Busy) and
    /// [`Timeout`](crate::ErrorKind::Timeout), or else the error of the lock that has waited
    /// longest. [`Config`](crate::ErrorKind::Config) for an empty list, and for a lock that can
    /// never be taken.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind, as with a single lock.
    pub async fn acquire(&self) -> Result<Guard, Error> {
        acquire(&self.0, true).await
    }

    /// Takes the first lock in the list that is free, and waits for none. As
    /// [`acquire`](Self::acquire) in all other respects.
    ///
    /// # Errors
    ///
    /// [`Busy`](crate::ErrorKind::Busy) when none of the locks is free, and the errors of
    /// [`acquire`](Self::acquire).
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(&self) -> Result<Guard, Error> {
        acquire(&self.0, false).await
    }
}

/// Takes the first lock that is free. If no lock is free and `waits` is true, waits at the same
/// time for all locks that somebody holds.
///
/// **One after the other.** While the stores answer, one request is in flight: a caller that takes
/// a free lock has asked for no lock behind it. With several requests at a time it would hold
/// several locks for a moment, and other callers would find them held.
///
/// **A store that is silent does not keep the others waiting.** After a tenth of an operation
/// timeout without an answer, the locks of each other client are asked for meanwhile, each client's
/// one after the other. After half of an operation timeout, the other locks of the same client are
/// asked for too: a part of the store may be down, such as one node of a cluster. These get the
/// rest of the operation timeout. So a client that does not answer takes one operation timeout, and
/// not one for each of its locks. Only in this time may the caller be granted several locks at
/// once.
///
/// **One guard.** The futures are polled in the order of the list. When one of them is ready, all
/// others are dropped without a further poll. A request that is in flight, or was granted, is
/// cleaned up by this drop, as in a single acquire. The same is true if the future of this call is
/// dropped.
async fn acquire(locks: &[Lock], waits: bool) -> Result<Guard, Error> {
    // If one of the locks can never be taken, none is asked for.
    for lock in locks {
        lock.check()?;
    }
    let Some(first) = locks.first() else {
        return Err(Error::config(
            "one of no locks cannot be taken: the list is empty",
        ));
    };
    let mut search = Search::new(locks, waits, first.clock());
    loop {
        search.go_on();
        if search.asked.is_empty() {
            return Err(search.error());
        }
        let answer = match search.has_more() {
            // If no answer comes, the search goes on with other locks.
            true => first.within(first.op_timeout() / 10, search.answer()).await,
            false => Some(search.answer().await),
        };
        match answer {
            Some((_, Ok(guard))) => return Ok(guard),
            Some((place, Err(error))) => search.refused(place, error),
            None => {}
        }
    }
}

/// The state of a search. A lock is known by its place in the list.
struct Search<'a> {
    locks: &'a [Lock],
    waits: bool,
    clock: &'a Clock,
    began: Instant,
    /// The locks that were not asked for yet.
    untried: Vec<usize>,
    /// The locks that are asked for or waited for now.
    asked: BTreeMap<usize, Wanted<'a>>,
    /// The locks that this caller is to wait for, and does not wait for yet: somebody holds them, or
    /// their stores are out of reach.
    later: Vec<usize>,
    /// Whether a store was silent. From then on, no client waits for the answers of another.
    silent: bool,
    /// The error of the last lock that was not free in time.
    taken: Option<Error>,
    /// The first error of any other kind.
    failed: Option<Error>,
}

/// A lock that is asked for or waited for.
struct Wanted<'a> {
    /// When the lock was asked for. `None` if the caller waits for it in line.
    tried_at: Option<Instant>,
    granted: Pin<Box<dyn Future<Output = Result<Guard, Error>> + Send + 'a>>,
}

impl<'a> Search<'a> {
    fn new(locks: &'a [Lock], waits: bool, clock: &'a Clock) -> Self {
        Self {
            locks,
            waits,
            clock,
            began: clock.now(),
            untried: (0..locks.len()).collect(),
            asked: BTreeMap::new(),
            later: Vec::new(),
            silent: false,
            taken: None,
            failed: None,
        }
    }

    /// Asks for the next locks, as far as the answers to the earlier requests allow, and begins to
    /// wait.
    fn go_on(&mut self) {
        let now = self.clock.now();
        let oldest = self.tried_at(|_| true);
        self.silent |= oldest.is_some_and(|(at, lock)| at.until(now) >= lock.op_timeout() / 10);
        for place in std::mem::take(&mut self.untried) {
            let lock = &self.locks[place];
            let whole = lock.op_timeout();
            let patience = match self.tried_at(|other| other.is_of_client_of(lock)) {
                Some((at, _)) => {
                    let silent = at.until(now);
                    (silent >= whole / 2).then(|| whole.saturating_sub(silent))
                }
                None => (self.silent || self.tried_at(|_| true).is_none()).then_some(whole),
            };
            match patience {
                Some(patience) => self.ask(place, patience, now),
                None => self.untried.push(place),
            }
        }
        let all_answered = self.untried.is_empty() && self.tried_at(|_| true).is_none();
        if self.silent || all_answered {
            for place in std::mem::take(&mut self.later) {
                self.wait_for(place, now);
            }
        }
    }

    /// When the oldest request was sent that has no answer yet, of those for the locks that match.
    fn tried_at(&self, wanted: impl Fn(&Lock) -> bool) -> Option<(Instant, &'a Lock)> {
        let tries = self.asked.iter().filter_map(|(place, asked)| {
            let lock = &self.locks[*place];
            asked.tried_at.filter(|_| wanted(lock)).map(|at| (at, lock))
        });
        tries.min_by_key(|(at, _)| *at)
    }

    fn ask(&mut self, place: usize, patience: Duration, now: Instant) {
        let lock = &self.locks[place];
        let patience = match self.left(lock, now) {
            Some(Wait::For(left)) if left.is_zero() => return self.late(lock, now),
            Some(Wait::For(left)) => left.min(patience),
            Some(Wait::Forever) | None => patience,
        };
        let asked = Wanted {
            tried_at: Some(now),
            granted: Box::pin(lock.acquire_within(None, patience)),
        };
        self.asked.insert(place, asked);
    }

    fn wait_for(&mut self, place: usize, now: Instant) {
        let lock = &self.locks[place];
        let left = match self.left(lock, now) {
            Some(Wait::For(left)) if left.is_zero() => return self.late(lock, now),
            Some(left) => left,
            None => return,
        };
        let asked = Wanted {
            tried_at: None,
            granted: Box::pin(lock.acquire_within(Some(left), Duration::MAX)),
        };
        self.asked.insert(place, asked);
    }

    /// How much of its wait a lock has left. `None` if the caller does not wait for it.
    fn left(&self, lock: &Lock, now: Instant) -> Option<Wait> {
        match lock.default_wait() {
            _ if !self.waits => None,
            Wait::For(Duration::ZERO) => None,
            Wait::For(wait) => Some(Wait::For(now.until(self.began.after(wait)))),
            Wait::Forever => Some(Wait::Forever),
        }
    }

    fn late(&mut self, lock: &Lock, now: Instant) {
        self.taken = Some(lock.timeout(self.began.until(now)));
    }

    /// Whether other locks can be asked for or waited for before an answer comes.
    fn has_more(&self) -> bool {
        !self.untried.is_empty() || !self.later.is_empty()
    }

    /// The next answer, and the place of its lock.
    async fn answer(&mut self) -> (usize, Result<Guard, Error>) {
        poll_fn(|cx| {
            for (place, asked) in &mut self.asked {
                if let Poll::Ready(outcome) = asked.granted.as_mut().poll(cx) {
                    return Poll::Ready((*place, outcome));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Notes that a lock was not granted, and why.
    fn refused(&mut self, place: usize, error: Error) {
        let was_tried = (self.asked.remove(&place)).is_some_and(|asked| asked.tried_at.is_some());
        match error.kind() {
            ErrorKind::Busy => {
                if self.waits && was_tried {
                    self.later.push(place);
                }
                self.taken = Some(error);
            }
            // This lock has waited only for the rest of its time. The error must tell the whole
            // time.
            ErrorKind::Timeout => self.late(&self.locks[place], self.clock.now()),
            _ => {
                let lock = &self.locks[place];
                if self.waits && was_tried && lock.waits_through_outages() && error.is_outage() {
                    self.later.push(place);
                }
                self.failed.get_or_insert(error);
            }
        }
    }

    fn error(self) -> Error {
        let nothing = || Error::busy(None); // every lock was refused with one of the two errors
        self.failed.or(self.taken).unwrap_or_else(nothing)
    }
}
