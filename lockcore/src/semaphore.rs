//! The semaphore: k permits of n.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::acquire::handle::Client;
use crate::backend::TicketInfo;
use crate::error::{Error, ErrorKind};
use crate::hold::Guard;
use crate::lock::Lock;
use crate::name::Name;
use crate::request::{FULL, mismatch};

/// How often [`Semaphore::drain`] looks. Each further look means that others have taken permits since the last one.
const LOOKS: u32 = 8;

/// A semaphore on a name: at most `capacity` permits are taken at any time.
///
/// All users of the name must state the same capacity. While the semaphore is in use, another capacity is refused with
/// [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch).
///
/// Fair: a small request does not pass a large one that waits. The permits of a request are taken all at once.
///
/// Permits have a lease, like every lock here: they come back when their holder dies. With
/// [`permits(k)`](Self::permits)`.`[`ttl(…)`](Lock::ttl)`.`[`renew(false)`](Lock::renew) they also come back from a holder
/// that lives, after that time. This is what the `PermitExpirableSemaphore` of Redisson is for.
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

    /// How many permits could be taken now: what is not held, and 0 if somebody waits. Nobody passes a waiter, so permits
    /// that are free but too few for the first in line are of no use to others.
    ///
    /// This is a snapshot, which may be out of date when it arrives. To take permits only if they are free, ask for them
    /// ([`try_acquire`](Lock::try_acquire)). One request.
    ///
    /// # Errors
    ///
    /// [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch) when the name is in use with another capacity;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) and [`Config`](crate::ErrorKind::Config).
    ///
    /// # Cancel safety
    ///
    /// Safe: it only reads.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let uploads = locks.semaphore("uploads", 5);
    /// let two = uploads.permits(2).acquire().await?;
    /// assert_eq!(uploads.available().await?, 3);
    /// # drop(two);
    /// # Ok(()) }
    /// ```
    pub async fn available(&self) -> Result<u32, Error> {
        Ok(self.look().await?.permits)
    }

    /// Takes all permits that are free, and returns how many these are. Never waits.
    ///
    /// It looks how many permits are [available](Self::available), and asks for exactly so many. So it never takes more
    /// than were free when it looked. If others take some of them between the look and the request, the request takes
    /// none, and it looks again. After eight looks it gives up. If others give permits back in between, these stay free.
    /// Two requests, if nobody is in the way.
    ///
    /// # Errors
    ///
    /// [`Busy`](crate::ErrorKind::Busy) when no permit is free, when somebody waits, and when others were faster each
    /// time. The other errors of [`available`](Self::available), and of [`Lock::try_acquire`].
    ///
    /// # Cancel safety
    ///
    /// Safe, as [`Lock::try_acquire`] is.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let uploads = locks.semaphore("uploads", 5);
    /// let two = uploads.permits(2).acquire().await?;
    ///
    /// let (rest, permits) = uploads.drain().await?;
    /// assert_eq!(permits, 3);
    /// assert!(uploads.drain().await.is_err());
    /// # drop((two, rest));
    /// # Ok(()) }
    /// ```
    pub async fn drain(&self) -> Result<(Guard, u32), Error> {
        let mut busy = None;
        for _ in 0..LOOKS {
            let free = self.look().await?;
            if free.permits == 0 {
                return Err(Error::busy(free.retry_in).of_name(&self.name));
            }
            match self.permits(free.permits).try_acquire().await {
                Err(error) if error.kind() == ErrorKind::Busy => busy = Some(error),
                taken => return Ok((taken?, free.permits)),
            }
        }
        Err(busy.unwrap_or_else(|| Error::busy(None).of_name(&self.name)))
    }

    async fn look(&self) -> Result<Free, Error> {
        let (_, capacity) = self.share(1)?;
        let shared = &self.client.shared;
        let name = Name::new(shared.namespace.clone(), self.name.as_str())?;
        let places = shared.inspect(&name).await?;
        match places.first() {
            Some(oldest) if oldest.capacity != capacity.get() => {
                Err(mismatch(capacity, oldest.capacity).of_name(&self.name))
            }
            _ => Ok(Free::in_line(&places, capacity)),
        }
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

/// The free permits of a semaphore.
struct Free {
    permits: u32,
    /// When the first of the holders' leases ends, if it is not renewed.
    retry_in: Option<Duration>,
}

impl Free {
    /// By the tickets of a name.
    fn in_line(places: &[TicketInfo], capacity: NonZeroU32) -> Self {
        let (holders, waiters): (Vec<_>, Vec<_>) = places.iter().partition(|place| place.granted);
        let out = holders.iter().map(|holder| holder.permits);
        let out = out.fold(0, u32::saturating_add);
        Self {
            permits: match waiters.is_empty() {
                true => capacity.get().saturating_sub(out),
                false => 0,
            },
            retry_in: holders.iter().map(|holder| holder.remaining).min(),
        }
    }
}
