//! The count-down latch: callers wait until a count has reached zero.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::handle::Client;
use crate::backend::{CountOp, OnlyIf, Outcome};
use crate::counter::Counter;
use crate::error::Error;
use crate::options::Wait;

/// A count-down latch: tasks of any process wait until others have counted down to zero.
///
/// Set the latch before others wait for it: to wait for a latch that nobody has set is an error, so
/// that a latch which the store does not have never looks open.
///
/// The count is the [`Counter`] of the name, and the store limits the changes of a minute as it does
/// there. The count has nothing to do with locks on the name. The store keeps it for at least 30
/// days after its last use, or for as long as [`keep`](Self::keep) says, and for as long as somebody
/// waits. It also keeps a latch that has opened, so whoever comes later passes at once.
///
/// **A failover of Redis may lose a count-down**, and the latch then stays shut: see [`Counter`]. So
/// wait with a [bound](Self::wait).
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let imported = locks.latch("imported");
/// assert!(imported.try_set(2).await?);
///
/// // In other tasks, or in other processes:
/// for part in 0..2 {
///     let imported = imported.clone();
///     tokio::spawn(async move {
///         println!("part {part} is done");
///         imported.count_down().await
///     });
/// }
///
/// imported.wait_for_zero().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a latch does nothing until it is set, counted down or waited for"]
pub struct Latch(Counter);

impl Latch {
    /// The largest count of a latch: 2⁵³ − 1.
    pub const MAX_COUNT: u64 = Counter::MAX.unsigned_abs();

    pub(crate) fn new(client: &Arc<Client>, name: String) -> Self {
        Self(Counter::new(client, name))
    }

    /// How long [`wait_for_zero`](Self::wait_for_zero) waits, connecting included. With zero it reads
    /// the count once. For the other requests it has the meaning of [`Counter::wait`]. Default: the
    /// client's default (`LOCK_WAIT`).
    pub fn wait(self, wait: impl Into<Wait>) -> Self {
        Self(self.0.wait(wait))
    }

    /// For how long the store keeps the latch after its last use: a minute to 100 years. Default: 30
    /// days. State it where the latch is [set](Self::try_set): see [`Counter::keep`]. After that
    /// time, the latch is not set any more, and to [wait](Self::wait_for_zero) for it is an error.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let migrated = locks.latch("migrated").keep(Duration::from_secs(365 * 24 * 60 * 60));
    /// assert!(migrated.try_set(3).await?);
    /// # Ok(()) }
    /// ```
    pub fn keep(self, keep: Duration) -> Self {
        Self(self.0.keep(keep))
    }

    /// Sets the count, 1 to 2⁵³ − 1, if the latch is at zero. Returns whether it was at zero. If
    /// so, a new generation begins. The calls that have waited since before return, because the
    /// count of their generation was zero.
    ///
    /// # Errors
    ///
    /// As [`Counter::add`].
    ///
    /// # Cancel safety
    ///
    /// Not safe: if the future is dropped after it was polled, the latch may have been set or not.
    pub async fn try_set(&self, count: u64) -> Result<bool, Error> {
        let count = self.size(count)?;
        let only_if = Some(OnlyIf::Count(0));
        let counted = self.0.change(CountOp::Set { count, only_if }).await?;
        Ok(counted.outcome == Outcome::Applied)
    }

    /// Counts down by one: short for `count_down_by(1)`.
    ///
    /// # Errors
    ///
    /// As [`Counter::add`].
    ///
    /// # Cancel safety
    ///
    /// Not safe: if the future is dropped after it was polled, the latch may have been counted down
    /// or not.
    pub async fn count_down(&self) -> Result<u64, Error> {
        self.count_down_by(1).await
    }

    /// Counts down by a number, at most to zero. Returns the new count. A count-down counts once,
    /// even if its answer is lost and the client sends the request again.
    ///
    /// # Errors
    ///
    /// As [`Counter::add`].
    ///
    /// # Cancel safety
    ///
    /// Not safe, as [`count_down`](Self::count_down).
    pub async fn count_down_by(&self, by: u64) -> Result<u64, Error> {
        let op = CountOp::Add {
            delta: -self.size(by)?,
            floor: Some(0),
        };
        self.0.change(op).await.map(|counted| rest(counted.count))
    }

    /// Returns the count. It is 0 also for a latch that nobody has set.
    ///
    /// # Errors
    ///
    /// As [`Counter::get`].
    ///
    /// # Cancel safety
    ///
    /// Safe: it only reads.
    pub async fn count(&self) -> Result<u64, Error> {
        self.0.get().await.map(|now| rest(now.count))
    }

    /// Sets the count to zero. Callers that wait return, and the latch can be [set](Self::try_set)
    /// again.
    ///
    /// # Errors
    ///
    /// As [`Counter::add`].
    ///
    /// # Cancel safety
    ///
    /// Not safe, as [`count_down`](Self::count_down).
    pub async fn reset(&self) -> Result<(), Error> {
        self.0.set(0).await.map(drop)
    }

    /// Waits until the count is zero. If it has reached zero already, the call returns at once. After the
    /// count has reached zero, somebody may set the latch again before this call has seen the zero.
    /// The call returns nevertheless: it sees a new generation, so the count of the generation that
    /// it has waited for was zero.
    ///
    /// # Errors
    ///
    /// [`Timeout`](crate::ErrorKind::Timeout) when the count is not zero within the
    /// [wait](Self::wait). [`Unavailable`](crate::ErrorKind::Unavailable) when nobody has set the
    /// latch, or longer ago than the store [keeps](Self::keep) it; when the store was out of reach
    /// for the whole wait; or when it has lost its data and with it the latch.
    /// [`Lost`](crate::ErrorKind::Lost) when the client is shut down.
    /// [`Config`](crate::ErrorKind::Config) for a name that is not usable, a store without
    /// counters, or missing rights.
    ///
    /// # Cancel safety
    ///
    /// Safe: it changes nothing.
    pub async fn wait_for_zero(&self) -> Result<(), Error> {
        let zero = match self.0.wait {
            Wait::For(Duration::ZERO) => self.is_zero().await,
            _ => self.zero().await,
        };
        zero.map_err(|error| self.0.named(error))
    }

    /// Reads the count once.
    async fn is_zero(&self) -> Result<(), Error> {
        let counted = self.0.change(CountOp::Read).await?;
        match (counted.generation, counted.count) {
            (0, _) => Err(never_set()),
            (_, ..=0) => Ok(()),
            _ => Err(Error::not_zero(Duration::ZERO)),
        }
    }

    /// Waits for the zero.
    async fn zero(&self) -> Result<(), Error> {
        let shared = &self.0.client().shared;
        let began = shared.clock.now();
        let mut generation = None;
        let mut trouble = None;
        let coming = async {
            let mut watching = self.0.watch()?;
            loop {
                let counted = watching.seen(&mut trouble).await?;
                let before = *generation.get_or_insert(counted.generation);
                // Generations only rise.
                if counted.generation < before {
                    return Err(Error::unavailable(
                        "the store does not know the latch any more, or an older one: it has lost data",
                    ));
                }
                if before == 0 {
                    return Err(never_set());
                }
                if counted.count <= 0 || counted.generation != before {
                    return Ok(());
                }
            }
        };
        let give_up = match self.0.wait {
            Wait::For(wait) => began.after(wait),
            Wait::Forever => crate::clock::Instant::FAR_FUTURE,
        };
        if let Some(outcome) = shared.by(give_up, coming).await {
            return outcome;
        }
        let waited = began.until(shared.clock.now());
        Err(match (generation, trouble) {
            (_, Some(error)) => error.unavailable_unless_config(),
            (Some(_), None) => Error::not_zero(waited),
            (None, None) => Error::unavailable("the store did not answer in time"),
        })
    }

    /// A count as the store keeps it.
    fn size(&self, count: u64) -> Result<i64, Error> {
        let size = i64::try_from(count).ok();
        let size = size.filter(|size| (1..=Counter::MAX).contains(size));
        size.ok_or_else(|| {
            let most = Self::MAX_COUNT;
            let text = format!("a latch counts 1 to {most}, and not {count}");
            self.0.named(Error::config(text))
        })
    }
}

fn never_set() -> Error {
    Error::unavailable(
        "nobody has set this latch, or longer ago than the store has kept it; set it before others wait",
    )
}

/// Returns the count of a latch. The counter may be negative if somebody has changed it as a plain
/// counter.
fn rest(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}
