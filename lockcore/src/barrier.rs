//! The barrier: parties wait until all of them have come. The rule for this is in `places`.

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
/// its lease ends. So a round is complete only when all parties wait at the same time. If more
/// parties come than the barrier is for, the first of them complete a round, and the others wait
/// for the next round.
///
/// All users of the name must state the same number of parties. While the barrier is in use,
/// another number is refused with [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch). The
/// barrier uses the locks and the [`Counter`](crate::Counter) of its name, so nothing else may have
/// that name.
///
/// Each party costs five requests to the store per round, and the party that completes the round
/// costs one more. Each client with waiting parties costs five more requests, for any number of
/// parties. When the round is complete, the store sends one message to each client that waits.
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
    /// The most parties of a barrier: (2³⁰ − 1) / 3. Every party reads the places of all parties,
    /// so a barrier is meant for at most some hundred parties.
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

    /// Waits until all parties wait. Then the round is complete, and the calls of all parties
    /// return.
    ///
    /// One party learns that it is the [leader](BarrierWaitResult::is_leader): the party that came
    /// last.
    ///
    /// # Errors
    ///
    /// [`Timeout`](crate::ErrorKind::Timeout) when not all have come within the [wait](Self::wait).
    /// In this case the others have not completed a round with this party, and will not. To be sure
    /// of this, the client needs up to three more requests, and at most one operation timeout. The
    /// exception is a party that has no place yet, because the round before is not over. The client
    /// sends no such requests for this party. If the store grants the place at the moment in which
    /// the party gives up, the others may count the party. With a wait of zero the error can also
    /// be [`Busy`](crate::ErrorKind::Busy), when all places are taken.
    ///
    /// [`Unknown`](crate::ErrorKind::Unknown) when the wait was over, and the store did not answer
    /// one of two questions. The first is whether a round was completed with this party. The second
    /// is whether the party still has its place. A party that was counted at the last moment
    /// asks the second question for one more operation timeout. So this error comes at most two
    /// operation timeouts after the end of the wait.
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store was out of reach, or has lost
    /// its data. [`Lost`](crate::ErrorKind::Lost) when this party has lost its place, or when the
    /// client is shut down. A party loses its place, for example, if its process is stopped for
    /// longer than the [ttl](Self::ttl). The others may have completed a round with this party
    /// before the loss. [`Config`](crate::ErrorKind::Config) for a name, a number of parties or a
    /// ttl that is not usable, a store without counters, or missing rights.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: the client's keeper frees the place. If the round
    /// is being completed at that moment, the others may count this party, and their calls return.
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
