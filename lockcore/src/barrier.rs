//! The barrier: parties wait until all of them have come.

// The rule for this is in `places`.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::handle::Client;
use crate::error::Error;
use crate::options::Wait;
use crate::places::{MOST_PARTIES, Places};

/// A barrier for a number of parties, in one process or in many. Each party waits until all of them
/// have come. Then the waits of all parties end, and the barrier is ready for the next round.
///
/// A party that waits has a place, which is a lease that its client renews. If a party gives up, or
/// if its future is dropped, its place becomes free. If a party dies, its place becomes free when
/// its lease ends. A round is complete only when all its parties have waited at the same time: when
/// all places are taken, each party is asked to agree, and a party that is gone does not agree. Then
/// the others wait for another party, after the place has become free. If more parties come than
/// the barrier is for, the first of them complete a round, and the others wait for the next round.
///
/// All users of the name must state the same number of parties. While the barrier is in use,
/// another number is refused with [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch). The
/// barrier uses the locks and the [`Counter`](crate::counter::Counter) of its name, so nothing else
/// may have that name.
///
/// A failover of Redis may lose places and the [`Counter`](crate::counter::Counter). A party whose
/// place or round is lost gets an error.
///
/// Each party costs three requests to the store per round. Each client with waiting parties costs
/// about eight more requests, for any number of parties, and each round costs two more. The parties
/// of a client share the lists of all places. The store sends two messages to each client that
/// waits. If a party agrees late or never, each client lists the places once more per second.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
///
/// // In other tasks, or in other processes:
/// let mut workers = tokio::task::JoinSet::new();
/// for worker in 0..3 {
///     let loaded = locks.barrier("loaded", 3);
///     workers.spawn(async move {
///         println!("worker {worker} has loaded its part");
///         let passed = loaded.wait_for_all().await?;
///         Ok::<_, lockcore::Error>(passed.is_leader())
///     });
/// }
///
/// let mut leaders = 0;
/// while let Some(is_leader) = workers.join_next().await {
///     leaders += u32::from(is_leader.unwrap()?);
/// }
/// assert_eq!(leaders, 1);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a barrier does nothing until it is waited for"]
pub struct Barrier(Places);

/// The result of a party whose round is complete: see [`Barrier::wait_for_all`].
#[derive(Debug)]
pub struct BarrierWaitResult(bool);

impl Barrier {
    /// The most parties of a barrier. Every client with parties reads the places of all parties a
    /// few times, so the time that they need to meet grows with their number: 2,000 parties in four
    /// processes need a few seconds on a busy Redis.
    pub const MAX_PARTIES: u32 = MOST_PARTIES;

    pub(crate) fn new(client: &Arc<Client>, name: String, parties: u32) -> Self {
        Self(Places::new(client, name, parties))
    }

    /// How long [`wait_for_all`](Self::wait_for_all) waits, connecting included. Default: the
    /// client's default (`LOCK_WAIT`).
    pub fn wait(self, wait: impl Into<Wait>) -> Self {
        Self(self.0.wait(wait.into()))
    }

    /// How long the place of a party stays taken if the party dies: see
    /// [`Lock::ttl`](crate::Lock::ttl). Default: the client's default (`LOCK_TTL`).
    pub fn ttl(self, ttl: Duration) -> Self {
        Self(self.0.ttl(ttl))
    }

    /// A text for traces and [metrics](crate::guide::metrics): see
    /// [`Lock::label`](crate::Lock::label).
    pub fn label(self, label: &'static str) -> Self {
        Self(self.0.label(label))
    }

    /// Waits until all parties wait. Then the round is complete, and the calls of all parties
    /// return.
    ///
    /// One party learns that it is the [leader](BarrierWaitResult::is_leader): the party that came
    /// last.
    ///
    /// # Errors
    ///
    /// [`Timeout`](crate::ErrorKind::Timeout) when not all have come within the [wait](Self::wait).
    /// In this case the others have not completed a round with this party, and will not. If the
    /// party has agreed to a round that is not complete, the client gives the round up first. This
    /// takes up to three requests, and at most one operation timeout. With a wait of zero the party
    /// does not wait for others to come. Then the error can also be
    /// [`Busy`](crate::ErrorKind::Busy), when all places are taken.
    ///
    /// [`Unknown`](crate::ErrorKind::Unknown) when the wait was over, and the store did not answer
    /// whether a round was completed with this party. So this error comes at most one operation
    /// timeout after the end of the wait. The error is also `Unknown` when this party has agreed to a
    /// round and then lost its place, and the store has gone on to another round since.
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store was out of reach, or has lost
    /// its data. [`Lost`](crate::ErrorKind::Lost) when the client is shut down, and when somebody
    /// asks for the place with [`Locks::revoke`](crate::Locks::revoke). A party that loses its place
    /// in another way, for example because the store was out of reach for longer than the
    /// [ttl](Self::ttl), takes another one. [`Config`](crate::ErrorKind::Config) for a name, a number of parties or a ttl that is not
    /// usable, a store without counters, or missing rights.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: the client's keeper frees the place. If all parties
    /// have come by then and the round is being completed, the others may count this party, and
    /// their calls return.
    pub async fn wait_for_all(&self) -> Result<BarrierWaitResult, Error> {
        let party = self.0.gather().await?;
        // The drop of `party` frees the place in the background. The next round waits until the
        // place is free.
        Ok(BarrierWaitResult(party.is_last()))
    }
}

impl BarrierWaitResult {
    /// Whether this party came last. This is true for one party of each round. It is true for none
    /// if that party gives up or dies before its call returns.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.0
    }
}
