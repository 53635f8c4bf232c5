//! The double barrier: parties enter together and leave together. How that is decided is in `places`.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::acquire::handle::Client;
use crate::error::Error;
use crate::hold::Held;
use crate::options::Wait;
use crate::places::{Party, Places};

/// A barrier with two sides, for a number of parties in one process or in many: they enter when all of them have come,
/// and leave when all of them are done.
///
/// In all other respects it is a [`Barrier`](crate::Barrier). A place lasts from [`enter`](Self::enter) until all have
/// left, so the parties of the next round enter after that.
///
/// ```
/// use lockcore::Left;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
///
/// // In other tasks, or in other processes:
/// let mut workers = tokio::task::JoinSet::new();
/// for _ in 0..3 {
///     let computing = locks.double_barrier("computing", 3);
///     workers.spawn(async move {
///         let inside = computing.enter().await?;
///         println!("all three compute now");
///         inside.leave().await
///     });
/// }
///
/// while let Some(left) = workers.join_next().await {
///     assert_eq!(left.unwrap()?, Left::All);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a barrier does nothing until it is entered"]
pub struct DoubleBarrier(Places);

/// A party that is inside of a double barrier. It dereferences to [`Held`]: the lease of its place, which is lost like
/// that of a lock.
///
/// Dropping it frees the place without leaving: for the others, this party is [missing](Self::missing).
#[derive(Debug)]
#[must_use = "the party is missing as soon as this is dropped; call `leave`"]
pub struct Inside(Party);

/// How a group has left a double barrier: see [`Inside::leave`]. All parties that leave get the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Left {
    /// All that had entered.
    All,
    /// Some parties were missing: they died, or gave up their places. All others have left.
    NotAll,
}

impl DoubleBarrier {
    pub(crate) fn new(client: &Arc<Client>, name: String, parties: u32) -> Self {
        Self(Places::new(client, name, parties))
    }

    /// How long [`enter`](Self::enter) and [`leave`](Inside::leave) wait, each for itself, connecting included. Default:
    /// the client's default (`LOCK_WAIT`).
    pub fn wait(self, wait: impl Into<Wait>) -> Self {
        Self(self.0.wait(wait.into()))
    }

    /// How long the place of a party stays taken if it dies, and so how long the others may wait for it: see
    /// [`Lock::ttl`](crate::Lock::ttl). Default: the client's default (`LOCK_TTL`).
    pub fn ttl(self, ttl: Duration) -> Self {
        Self(self.0.ttl(ttl))
    }

    /// Waits until all parties have come, and enters with them.
    ///
    /// # Errors
    ///
    /// As [`Barrier::wait_for_all`](crate::Barrier::wait_for_all).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: the client's keeper frees the place. If the others are about to enter
    /// at that moment, they enter, and this party is [missing](Inside::missing).
    pub async fn enter(&self) -> Result<Inside, Error> {
        self.0.gather().await.map(Inside)
    }
}

impl Inside {
    /// Whether this party was the last to come. True for one party of each round.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.0.is_last()
    }

    /// Resolves when a party is missing: it is gone, and has not [left](Self::leave). Returns how many are missing.
    ///
    /// A process that dies is missing when the lease of its place ends, and this tells of it then. A place that was
    /// given up is noticed when the next of the leases could have ended, after one [ttl](DoubleBarrier::ttl) at most. That
    /// costs about one request in each ttl. It stays pending when this party has [lost](Held::lost) its own place.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only reads.
    pub async fn missing(&self) -> u32 {
        self.0.missing().await
    }

    /// Leaves, and waits until all others have left or are gone. Tells whether some were gone before they had left. A
    /// process that dies is waited for until the lease of its place ends.
    ///
    /// # Errors
    ///
    /// [`Timeout`](crate::ErrorKind::Timeout) when somebody is still inside after the [wait](DoubleBarrier::wait). This
    /// party has left, and its place is freed. It counts as missing for the others, unless all have left by then.
    ///
    /// [`Lost`](crate::ErrorKind::Lost) when this party has lost its place, so it is missing for the others.
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store could not be asked within the wait, or has lost its
    /// data; [`Config`](crate::ErrorKind::Config) for missing rights.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future frees the place, as dropping the guard does: the party is missing, unless all have left by
    /// then.
    pub async fn leave(mut self) -> Result<Left, Error> {
        Ok(match self.0.leave().await? {
            true => Left::All,
            false => Left::NotAll,
        })
    }
}

impl Deref for Inside {
    type Target = Held;

    fn deref(&self) -> &Held {
        self.0.guard()
    }
}
