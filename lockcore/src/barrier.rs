//! The barrier: parties wait until all of them have come. How that is decided is in `places`.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::handle::Client;
use crate::error::Error;
use crate::options::Wait;
use crate::places::{MOST_PARTIES, Places};

/// A barrier for a number of parties, in one process or in many: each waits until all of them have come, and then all go
/// on. Then it is ready for the next round.
///
/// A party that waits has a place, which is a lease that is renewed. A party that gives up, or whose future is dropped,
/// frees its place. So does a party that dies, when its lease ends. So a round is complete only when all parties wait at
/// the same time. With more parties than the barrier is for, the first of them make up a round, and the others wait for
/// the next one.
///
/// All users of the name must state the same number of parties. While the barrier is in use, another number is refused
/// with [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch). The barrier uses the locks and the
/// [`Counter`](crate::Counter) of its name, so nothing else may have that name.
///
/// A party costs five requests to the store for each round, and one more if it completes the round. A client whose
/// parties have to wait costs five more, however many they are. When the round is complete, the store sends one message to
/// each client that waits.
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

/// A party has gone on with the others: see [`Barrier::wait_for_all`].
#[derive(Debug)]
pub struct BarrierWaitResult(bool);

impl Barrier {
    /// The most parties of a barrier: (2³⁰ − 1) / 3. Every party looks at the places of all, so a barrier is meant for up
    /// to some hundred.
    pub const MAX_PARTIES: u32 = MOST_PARTIES;

    pub(crate) fn new(client: &Arc<Client>, name: String, parties: u32) -> Self {
        Self(Places::new(client, name, parties))
    }

    /// How long [`wait_for_all`](Self::wait_for_all) waits, connecting included. Default: the client's default
    /// (`LOCK_WAIT`).
    pub fn wait(self, wait: impl Into<Wait>) -> Self {
        Self(self.0.wait(wait.into()))
    }

    /// How long the place of a party stays taken if it dies: see [`Lock::ttl`](crate::Lock::ttl). Default: the client's
    /// default (`LOCK_TTL`).
    pub fn ttl(self, ttl: Duration) -> Self {
        Self(self.0.ttl(ttl))
    }

    /// Waits until all parties wait, and then goes on with them.
    ///
    /// One of them is told that it is the [leader](BarrierWaitResult::is_leader): the one that was the last to come.
    ///
    /// # Errors
    ///
    /// [`Timeout`](crate::ErrorKind::Timeout) when not all have come within the [wait](Self::wait). The others have not
    /// gone on with this party then, and will not. Finding that out takes up to three more requests, and at most one
    /// operation timeout. (A party that had no place yet, because the round before was not over, does not ask. If it gets
    /// its place in the moment in which it gives up, the others may count it.) With a wait of zero also
    /// [`Busy`](crate::ErrorKind::Busy), when there is no place for one more.
    ///
    /// [`Unknown`](crate::ErrorKind::Unknown) when the wait was over, and the store did not say whether the others have
    /// gone on with this party, or whether it still had its place then. A party that was counted in the last moment asks
    /// for its place for one more operation timeout, so this comes at most two operation timeouts after the wait.
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store could not be asked, or has lost its data.
    /// [`Lost`](crate::ErrorKind::Lost) when this party has lost its place, for example because its process was stopped for
    /// longer than the [ttl](Self::ttl), or when the client is shut down. The others may have gone on with it before that.
    /// [`Config`](crate::ErrorKind::Config) for a name, a number of parties or a ttl that is
    /// not usable, a store without counters, or missing rights.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: the client's keeper frees the place. If the others are about to go on
    /// at that moment, they go on.
    pub async fn wait_for_all(&self) -> Result<BarrierWaitResult, Error> {
        let party = self.0.gather().await?;
        // The place is freed in the background. Until then the next round waits for it.
        Ok(BarrierWaitResult(party.is_last()))
    }
}

impl BarrierWaitResult {
    /// Whether this party was the last to come. This is true for one party of each round, or for none if that one is gone
    /// before it is told.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.0
    }
}
