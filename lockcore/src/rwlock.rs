//! The read/write lock: many readers, or one writer.

// A reader takes one permit of `FULL`, a writer all of them. Upgrades are in `upgrade`.

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::acquire::handle::Client;
use crate::lock::Lock;
use crate::request::FULL;

pub use crate::upgrade::UpgradedGuard;

/// A read/write lock on a name. Its write side *is* the mutex on that name.
///
/// It is [fair](crate::Fair): a reader does not overtake a writer that waits.
///
/// A writer that has finished writing and only reads from then on can let other readers in with
/// [`Guard::downgrade`]. In the other direction, [`Guard::try_upgrade`](crate::Guard::try_upgrade)
/// makes a reader a writer if there is no other reader. It never waits, because two readers that
/// wait to become writers would wait for each other.
///
/// [`Guard::downgrade`]: crate::Guard::downgrade
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let catalog = locks.rwlock("catalog:7");
/// let one = catalog.read().acquire().await?;
/// let other = catalog.read().acquire().await?;
/// assert!(catalog.write().try_acquire().await.is_err());
/// # drop((one, other));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct RwLock {
    client: Arc<Client>,
    name: String,
}

impl RwLock {
    pub(crate) fn new(client: &Arc<Client>, name: String) -> Self {
        Self {
            client: Arc::clone(client),
            name,
        }
    }

    /// The shared side. Several callers hold it at once, so its grants have no fencing token.
    pub fn read(&self) -> Lock {
        Lock::new(&self.client, self.name.clone(), Ok((NonZeroU32::MIN, FULL)))
    }

    /// The exclusive side.
    pub fn write(&self) -> Lock {
        Lock::new(&self.client, self.name.clone(), Ok((FULL, FULL)))
    }
}
