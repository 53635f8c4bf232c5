//! The semaphore: a lock of which each caller takes `k` of `n` permits.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::acquire::handle::Client;
use crate::backend::TicketInfo;
use crate::client::capacities::Twice;
use crate::error::{Error, ErrorKind};
use crate::hold::Guard;
use crate::lock::Lock;
use crate::name::Name;
use crate::request::{FULL, mismatch};

/// How often [`Semaphore::drain`] reads the free permits. It reads them again only if other callers
/// have taken permits since its last read.
const LOOKS: u32 = 8;

/// A semaphore on a name: at most `capacity` permits are taken at any time.
///
/// All callers that use the name must state the same capacity. While the semaphore is in use, a
/// request with another capacity is refused with
/// [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch).
///
/// An operator can [resize](Self::resize) the semaphore. From then on the store keeps the capacity,
/// and ignores the capacity that callers state.
///
/// A semaphore is [fair](crate::Fair): a small request does not overtake a large request that
/// waits. A request takes all its permits at once.
///
/// On a quorum of Redis servers (`redlock://`), a semaphore of two permits needs all of three
/// servers or four of five, and a larger one more, up to all of them. So one server that is down can
/// make it [`Unavailable`](crate::ErrorKind::Unavailable), while a mutex needs a majority only.
///
/// Permits have a lease, like every lock here: they are free again when the lease of a dead holder
/// ends. With [`permits(k)`](Self::permits)`.`[`ttl(…)`](Lock::ttl)`.`[`renew(false)`](Lock::renew)
/// the permits are free after the ttl even if their holder lives. The `PermitExpirableSemaphore` of
/// Redisson has the same use.
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

    /// Returns a lock that takes `permits` permits together, all of them or none. `permits` is from
    /// 1 to the capacity that this semaphore states. With another number, a request for the permits
    /// fails with [`Config`](crate::ErrorKind::Config).
    pub fn permits(&self, permits: u32) -> Lock {
        Lock::new(&self.client, self.name.clone(), self.share(permits))
    }

    /// Acquires one permit: short for `permits(1).acquire()`.
    ///
    /// # Errors
    ///
    /// The errors of [`Lock::acquire`].
    ///
    /// # Cancel safety
    ///
    /// Safe, like [`Lock::acquire`].
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

    /// Acquires one permit if one is free: short for `permits(1).try_acquire()`.
    ///
    /// # Errors
    ///
    /// The errors of [`Lock::try_acquire`].
    ///
    /// # Cancel safety
    ///
    /// Safe, like [`Lock::try_acquire`].
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let uploads = locks.semaphore("uploads", 1);
    /// let one = uploads.try_acquire().await?;
    /// assert!(uploads.try_acquire().await.is_err());
    /// # drop(one);
    /// # Ok(()) }
    /// ```
    pub async fn try_acquire(&self) -> Result<Guard, Error> {
        self.permits(1).try_acquire().await
    }

    /// How many permits can be taken now: the free permits, or 0 if a caller waits. No caller may
    /// overtake a waiter. So if the free permits are too few for the first waiter, no other caller
    /// can take them.
    ///
    /// The answer is a snapshot, and may be out of date when it arrives. To take permits only if
    /// they are free, use [`try_acquire`](Lock::try_acquire) instead. A call of `available` costs
    /// one request. It costs two requests if the name is not in use, or is in use with [another
    /// capacity](Self::resize).
    ///
    /// # Errors
    ///
    /// [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch) when callers use the name with
    /// another capacity, and no capacity is stored; [`Unavailable`](crate::ErrorKind::Unavailable)
    /// and [`Config`](crate::ErrorKind::Config).
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

    /// Takes all permits that are free, and returns how many it has taken. Never waits.
    ///
    /// `drain` reads how many permits are [available](Self::available), and then asks for exactly
    /// this number. So it never takes more permits than were free at the read. If other callers
    /// take some of these permits between the read and the request, the request takes none, and
    /// `drain` reads again. After eight reads it gives up. If other callers release permits between
    /// the read and the request, these permits stay free. If no other caller interferes, the call
    /// costs the read and one more request.
    ///
    /// There is one exception: a caller may [forget](Self::forget_capacity) a larger stored
    /// capacity between the read and the request. In this case `drain` may take more permits than
    /// callers state as the capacity. Other callers are refused until these permits are released.
    ///
    /// # Errors
    ///
    /// [`Busy`](crate::ErrorKind::Busy) when no permit is free, when a caller waits, and when other
    /// callers have taken permits after each of the eight reads. Also the other errors of
    /// [`available`](Self::available) and of [`Lock::try_acquire`].
    ///
    /// # Cancel safety
    ///
    /// Safe, like [`Lock::try_acquire`].
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
            match self.of_free(free.permits).try_acquire().await {
                Err(error) if error.kind() == ErrorKind::Busy => busy = Some(error),
                taken => return Ok((taken?, free.permits)),
            }
        }
        Err(busy.unwrap_or_else(|| Error::busy(None).of_name(&self.name)))
    }

    /// The capacity that counts: the stored capacity. If none is stored, the capacity that this
    /// semaphore states. This costs one request.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable), [`Config`](crate::ErrorKind::Config), and
    /// [`Lost`](crate::ErrorKind::Lost) after a [shutdown](crate::Locks::shutdown) of the client.
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
    /// assert_eq!(uploads.capacity().await?, 5);
    /// uploads.resize(8).await?;
    /// assert_eq!(uploads.capacity().await?, 8);
    /// # Ok(()) }
    /// ```
    pub async fn capacity(&self) -> Result<u32, Error> {
        let (_, stated) = self.share(1)?;
        let shared = &self.client.shared;
        let stored = shared.stored_capacity(&self.name()?).await?;
        Ok(stored.unwrap_or(stated.get()))
    }

    /// Stores another capacity of this name, for all callers: 0 to
    /// [`MAX_PERMITS`](Self::MAX_PERMITS). From then on the stored capacity counts in place of the
    /// capacities that callers state. A request for more permits than the stored capacity waits
    /// until the capacity is large enough.
    ///
    /// - **More permits** are granted to the first waiters at once.
    /// - **Fewer permits** take nothing from holders. Later grants wait until the held permits fit
    ///   into the new capacity. With 0, no caller gets permits until the capacity grows again.
    ///
    /// The store keeps the capacity until [`forget_capacity`](Self::forget_capacity), however long
    /// the name is not used. So the capacity also counts for programs that start later and state
    /// another capacity. While a capacity is stored, a mutex, a read/write lock, or a barrier on
    /// the same name is refused with [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch).
    ///
    /// This costs two requests, if no other client changes the capacity at the same moment. On
    /// ZooKeeper a change costs [more requests](crate::guide::zookeeper#stored-capacities).
    ///
    /// # Errors
    ///
    /// - [`Config`](crate::ErrorKind::Config) for a capacity that is not possible, and on a store
    ///   that cannot keep a capacity: a quorum of Redis servers. Nothing is changed in these cases.
    /// - [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch) when no capacity is stored yet,
    ///   and the name is in use with another capacity than this semaphore states.
    /// - [`Unavailable`](crate::ErrorKind::Unavailable) when nothing was changed, because the store
    ///   is down or refuses the change.
    /// - [`Unknown`](crate::ErrorKind::Unknown) when the change was sent and its answer never came.
    ///   The change was made once, or not at all.
    /// - [`Lost`](crate::ErrorKind::Lost) after a [shutdown](crate::Locks::shutdown) of the client.
    ///   Nothing is changed.
    ///
    /// # Cancel safety
    ///
    /// Not safe: if the future is dropped after it was polled, the change may have been made or
    /// not. It is safe to call `resize` again.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let uploads = locks.semaphore("uploads", 2);
    /// let both = uploads.permits(2).acquire().await?;
    ///
    /// uploads.resize(3).await?;
    /// let third = uploads.acquire().await?;
    ///
    /// uploads.resize(1).await?; // all three go on
    /// assert_eq!(uploads.available().await?, 0);
    /// # drop((both, third));
    /// # Ok(()) }
    /// ```
    pub async fn resize(&self, capacity: u32) -> Result<(), Error> {
        self.fits(u64::from(capacity))?;
        let set = self.change(Twice::Harmless, |_| Ok(Some(capacity)));
        set.await.map(drop)
    }

    /// [Stores](Self::resize) a capacity that is larger by this number than the capacity that
    /// counts now. Returns the new capacity. A change counts once, even if its answer is lost and
    /// the client sends it again.
    ///
    /// # Errors
    ///
    /// The errors of [`resize`](Self::resize). The error is also
    /// [`Unknown`](crate::ErrorKind::Unknown) when the answer was lost and another client has
    /// changed the capacity since. In this case read the [`capacity`](Self::capacity).
    ///
    /// # Cancel safety
    ///
    /// Not safe: if the future is dropped after it was polled, the permits may have been added or
    /// not.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let uploads = locks.semaphore("uploads", 5);
    /// assert_eq!(uploads.add_permits(2).await?, 7);
    /// # Ok(()) }
    /// ```
    pub async fn add_permits(&self, permits: u32) -> Result<u32, Error> {
        let more = |now: u32| {
            let sum = u64::from(now) + u64::from(permits);
            self.fits(sum)
        };
        self.step(more).await
    }

    /// [Stores](Self::resize) a capacity that is smaller by this number than the capacity that
    /// counts now. Returns the new capacity. Holders keep their permits.
    ///
    /// # Errors
    ///
    /// The errors of [`add_permits`](Self::add_permits). Also [`Config`](crate::ErrorKind::Config)
    /// when the capacity is smaller than `permits`; nothing is changed in this case.
    ///
    /// # Cancel safety
    ///
    /// Not safe, like [`add_permits`](Self::add_permits).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let uploads = locks.semaphore("uploads", 5);
    /// assert_eq!(uploads.reduce_permits(2).await?, 3);
    /// # Ok(()) }
    /// ```
    pub async fn reduce_permits(&self, permits: u32) -> Result<u32, Error> {
        let fewer = |now: u32| {
            now.checked_sub(permits).ok_or_else(|| {
                Error::config(format!(
                    "the semaphore has {now} permits, and cannot be reduced by {permits}; nothing was changed"
                ))
            })
        };
        self.step(fewer).await
    }

    /// Forgets the [stored](Self::resize) capacity. From then on the capacity that callers state
    /// counts again. Holders keep their permits. If no capacity is stored, nothing happens. This
    /// costs two requests.
    ///
    /// # Errors
    ///
    /// The errors of [`resize`](Self::resize). Also
    /// [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch) when a holder or a waiter states
    /// another capacity than this semaphore: without a stored capacity, all must state the same
    /// capacity.
    ///
    /// # Cancel safety
    ///
    /// Not safe, like [`resize`](Self::resize). It is safe to call `forget_capacity` again.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let uploads = locks.semaphore("uploads", 5);
    /// uploads.resize(8).await?;
    /// uploads.forget_capacity().await?;
    /// assert_eq!(uploads.capacity().await?, 5);
    /// # Ok(()) }
    /// ```
    pub async fn forget_capacity(&self) -> Result<(), Error> {
        let forget = self.change(Twice::Harmless, |_| Ok(None));
        forget.await.map(drop)
    }

    /// Stores the capacity that `next` computes from the capacity that counts now.
    async fn step(&self, next: impl Fn(u32) -> Result<u32, Error>) -> Result<u32, Error> {
        let stated = self.capacity;
        let change = |stored: Option<u32>| next(stored.unwrap_or(stated)).map(Some);
        let stored = self.change(Twice::Wrong, change).await?;
        Ok(stored.unwrap_or(stated))
    }

    async fn change(
        &self,
        twice: Twice,
        next: impl Fn(Option<u32>) -> Result<Option<u32>, Error>,
    ) -> Result<Option<u32>, Error> {
        let (_, stated) = self.share(1)?;
        let name = self.name()?;
        self.client.shared.resize(&name, stated, twice, next).await
    }

    fn fits(&self, capacity: u64) -> Result<u32, Error> {
        let fits = u32::try_from(capacity).ok();
        let fits = fits.filter(|capacity| *capacity <= Self::MAX_PERMITS);
        fits.ok_or_else(|| {
            let most = Self::MAX_PERMITS;
            let text = format!(
                "a semaphore of {capacity} is not possible: it has at most {most} permits; nothing was changed"
            );
            Error::config(text).of_name(&self.name)
        })
    }

    async fn look(&self) -> Result<Free, Error> {
        let (_, stated) = self.share(1)?;
        let shared = &self.client.shared;
        let name = self.name()?;
        let places = shared.inspect(&name).await?;
        let capacity = match places.first() {
            // If a capacity is stored, it is equal to the stated capacity here.
            Some(oldest) if oldest.capacity == stated.get() => stated.get(),
            Some(oldest) => match shared.stored_capacity(&name).await? {
                Some(_) => oldest.capacity,
                None => return Err(mismatch(stated, oldest.capacity).of_name(&self.name)),
            },
            None => shared.stored_capacity(&name).await?.unwrap_or(stated.get()),
        };
        Ok(Free::in_line(&places, capacity))
    }

    fn name(&self) -> Result<Name, Error> {
        let namespace = self.client.shared.namespace.clone();
        Name::new(namespace, self.name.as_str())
    }

    /// Returns a lock that takes the `permits` that a list of the tickets has shown as free.
    /// `permits` must be at least 1. If the stored capacity is larger than the capacity that this
    /// semaphore states, there may be more free permits than stated. In this case the request
    /// states `permits` as its capacity. This is harmless, because the store does not use the
    /// capacity in a request while one is stored.
    fn of_free(&self, permits: u32) -> Lock {
        let most = permits.max(self.capacity);
        let of_most = Self::new(&self.client, self.name.clone(), most);
        of_most.permits(permits)
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
    /// Computes the free permits from the tickets of a name.
    fn in_line(places: &[TicketInfo], capacity: u32) -> Self {
        let (holders, waiters): (Vec<_>, Vec<_>) = places.iter().partition(|place| place.granted);
        let out = holders.iter().map(|holder| holder.permits);
        let out = out.fold(0, u32::saturating_add);
        Self {
            permits: match waiters.is_empty() {
                true => capacity.saturating_sub(out),
                false => 0,
            },
            retry_in: holders.iter().map(|holder| holder.remaining).min(),
        }
    }
}
