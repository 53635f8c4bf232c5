//! The semaphore: k permits of n.

use std::num::NonZeroU32;
use std::sync::Arc;

use crate::acquire::handle::Client;
use crate::error::Error;
use crate::hold::Guard;
use crate::lock::Lock;
use crate::request::FULL;

/// A semaphore on a name: at most `capacity` permits are taken at any time.
///
/// All users of the name must state the same capacity. While the semaphore is in use, another capacity is refused with
/// [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch).
///
/// Fair: a small request does not pass a large one that waits. The permits of a request are taken all at once.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let uploads = locks.semaphore("uploads", 3);
/// let two = uploads.permits(2).acquire().await?;
/// assert!(uploads.permits(2).try_acquire().await.is_err());
/// # drop(two);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct Semaphore {
    client: Arc<Client>,
    name: String,
    capacity: u32,
}

impl Semaphore {
    /// The largest capacity of a semaphore: 2³⁰ − 1.
    pub const MAX_PERMITS: u32 = FULL.get() - 1;

    pub(crate) fn new(client: &Arc<Client>, name: String, capacity: u32) -> Self {
        Self {
            client: Arc::clone(client),
            name,
            capacity,
        }
    }

    /// This number of permits at once: 1 to the capacity. Anything else is reported as
    /// [`Config`](crate::ErrorKind::Config) when the permits are asked for.
    pub fn permits(&self, permits: u32) -> Lock {
        Lock::new(&self.client, self.name.clone(), self.share(permits))
    }

    /// Acquires one permit: short for `permits(1).acquire()`.
    ///
    /// # Errors
    ///
    /// As [`Lock::acquire`].
    ///
    /// # Cancel safety
    ///
    /// Safe, as [`Lock::acquire`] is.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let uploads = locks.semaphore("uploads", 2);
    /// let (one, two) = (uploads.acquire().await?, uploads.acquire().await?);
    /// assert!(uploads.permits(1).try_acquire().await.is_err());
    /// # drop((one, two));
    /// # Ok(()) }
    /// ```
    pub async fn acquire(&self) -> Result<Guard, Error> {
        self.permits(1).acquire().await
    }

    fn share(&self, permits: u32) -> Result<(NonZeroU32, NonZeroU32), Error> {
        let capacity = NonZeroU32::new(self.capacity).filter(|capacity| *capacity < FULL);
        let capacity = capacity.ok_or_else(|| {
            Error::config(format!(
                "a semaphore of {} is not usable: it takes 1 to {}",
                self.capacity,
                Self::MAX_PERMITS
            ))
            .of_name(&self.name)
        })?;
        let permits = NonZeroU32::new(permits).filter(|permits| *permits <= capacity);
        let permits = permits.ok_or_else(|| {
            Error::config(format!(
                "asks for a number of permits that is not 1 to {capacity}"
            ))
            .of_name(&self.name)
        })?;
        Ok((permits, capacity))
    }
}
