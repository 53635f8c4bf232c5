//! The double barrier: parties enter together and leave together.

// The rule for this is in `places`.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crate::acquire::handle::Client;
use crate::error::Error;
use crate::hold::Held;
use crate::options::Wait;
use crate::places::{Party, Places};

/// A barrier with two sides, for a number of parties in one process or in many. The parties enter
/// when all of them have come, and leave when all of them are done.
///
/// In all other respects it is a [`Barrier`](crate::barrier::Barrier). A party keeps its place from
/// [`enter`](Self::enter) until all parties have left. So the parties of the next round enter only
/// after that. A party may stay inside for as long as it likes: its client reads the counter of the
/// name once an hour, so that the store keeps it.
///
/// ```
/// use lockcore::double_barrier::Left;
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

/// A party that is inside of a double barrier. It dereferences to [`Held`], which is the lease of
/// the party's place. A place can be lost like a lock.
///
/// If this value is dropped without [`leave`](Self::leave), the party's place becomes free, and the
/// other parties see this party as [missing](Self::missing).
#[derive(Debug)]
#[must_use = "the party is missing as soon as this is dropped; call `leave`"]
pub struct Inside(Party);

/// How a group has left a double barrier: see [`Inside::leave`]. All parties that leave get the
/// same answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Left {
    /// All parties that had entered have left.
    All,
    /// Some parties died, or gave up their places, before they left. All others have left.
    NotAll,
}

impl DoubleBarrier {
    pub(crate) fn new(client: &Arc<Client>, name: String, parties: u32) -> Self {
        Self(Places::new(client, name, parties))
    }

    /// How long [`enter`](Self::enter) waits, and how long [`leave`](Inside::leave) waits, the time
    /// to connect included. Default: the client's default (`LOCK_WAIT`).
    pub fn wait(self, wait: impl Into<Wait>) -> Self {
        Self(self.0.wait(wait.into()))
    }

    /// How long the place of a party stays taken if the party dies. So the others may wait for this
    /// time: see [`Lock::ttl`](crate::Lock::ttl). Default: the client's default (`LOCK_TTL`).
    pub fn ttl(self, ttl: Duration) -> Self {
        Self(self.0.ttl(ttl))
    }

    /// A text for traces and [metrics](crate::guide::metrics): see
    /// [`Lock::label`](crate::Lock::label).
    pub fn label(self, label: &'static str) -> Self {
        Self(self.0.label(label))
    }

    /// Waits until all parties have come, and enters with them.
    ///
    /// # Errors
    ///
    /// As [`Barrier::wait_for_all`](crate::barrier::Barrier::wait_for_all).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: the client's keeper frees the place. If all parties
    /// have come by then and are entering, the others may count this party. They enter, and this
    /// party is [missing](Inside::missing).
    pub async fn enter(&self) -> Result<Inside, Error> {
        let party = self.0.gather().await?;
        Ok(Inside(party.enter()))
    }
}

impl Inside {
    /// Whether this party came last. True for one party of each round.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.0.is_last()
    }

    /// Resolves when a party is missing: it has died or given up its place, and has not
    /// [left](Self::leave). Returns how many parties are missing.
    ///
    /// If a process dies, its party is missing from the end of its lease, and this call resolves at
    /// that time. If a party gives up its place, this call resolves as soon as the place is free.
    /// The check costs about one request in each [ttl](DoubleBarrier::ttl), and watches the counter
    /// of the name. If this party has [lost](Held::lost) its own place, this call stays pending.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only reads.
    pub async fn missing(&self) -> u32 {
        self.0.missing().await
    }

    /// Leaves, and waits until all others have left or are missing. The result tells whether some
    /// were missing. If the process of another party dies, the call waits until the lease of that
    /// party's place ends. A party may also leave after [`Locks::shutdown`](crate::Locks::shutdown)
    /// was called, until the time of the shutdown is over.
    ///
    /// # Errors
    ///
    /// [`Timeout`](crate::ErrorKind::Timeout) when another party is inside at the end of the
    /// [wait](DoubleBarrier::wait), or at the first look if the wait is zero. The place of this
    /// party is freed. The others count this party as missing, unless all have left by then.
    ///
    /// [`Lost`](crate::ErrorKind::Lost) when this party has lost its place, so the others count it
    /// as missing. [`Unavailable`](crate::ErrorKind::Unavailable) when the store was out of reach
    /// for the wait, or has lost its data; [`Config`](crate::ErrorKind::Config) for missing rights.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future frees the place, like the drop of `Inside`. The others count this party
    /// as missing, unless all have left by then.
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
