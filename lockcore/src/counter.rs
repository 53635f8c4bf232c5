//! The shared counter: one number that many processes change and watch.

use std::sync::Arc;
use std::time::Duration;

use humantime::format_duration;

use crate::acquire::handle::Client;
use crate::backend::{CountOp, Counted, MAX_COUNT, OnlyIf, Outcome};
use crate::client::watched::Watching;
use crate::counting::KEEPS;
use crate::error::Error;
use crate::name::Name;
use crate::options::Wait;

/// A number at the store that many processes change. Each change is one atomic step.
///
/// The count is from −(2⁵³ − 1) to 2⁵³ − 1. A counter that nobody has set or changed is 0. The
/// counter of a name has nothing to do with locks on that name, but a
/// [`Latch`](crate::latch::Latch) of the same name is this counter.
///
/// A change counts once, even if its answer is lost and the client sends it again. The store keeps
/// a counter for at least 30 days after its last use, or for as long as [`keep`](Self::keep) says,
/// and for as long as somebody waits for its [changes](Self::changes).
///
/// To count a change once, the store remembers it: until the next change of the same client tells
/// the store that the answer has come, or else for a minute. A store that remembers 5,000 changes
/// of a counter (Redis: up to 10,000) refuses another one with
/// [`Unavailable`](crate::ErrorKind::Unavailable). A client that makes many changes at once does
/// not reach this limit. Changes that nobody tells the store of can: those of thousands of
/// processes that make one change each and end, and those whose futures are dropped.
///
/// **A failover of Redis may lose changes** that the old master has acknowledged and the new one has
/// not received. The client repeats its latest changes at the new master: see
/// [which](crate::guide::redis#counters). A client with [`durability`](crate::guide::redis#durability)
/// does not repeat them. There an acknowledged change is lost only if a server becomes the master that
/// was not among those that the client has waited for.
///
/// Except on Redis and in memory, changes of a counter at the same time get in each other's way, and
/// the client sends them again. Thousands of them take long. A change that has not been carried out
/// when its [`wait`](Self::wait) is over fails with `Unavailable`.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let visits = locks.counter("visits");
/// visits.add(2).await?;
/// assert_eq!(visits.add(1).await?.count, 3);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a counter does nothing until it is read or changed"]
pub struct Counter {
    client: Arc<Client>,
    /// An error if the name is not valid. Each request returns it.
    name: Result<Name, Error>,
    pub(crate) wait: Wait,
    keep: Option<Duration>,
}

/// The count of a counter, and the version for a [change on condition](Counter::compare_and_set).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CounterReading {
    /// The count.
    pub count: i64,
    /// The number of the last change, which rises with every change, even if a change sets the
    /// count that the counter has already. 0 if there is no such counter.
    pub version: u64,
}

impl Counter {
    /// The largest count of a counter: 2⁵³ − 1. The smallest is its negative.
    pub const MAX: i64 = MAX_COUNT;

    pub(crate) fn new(client: &Arc<Client>, name: String) -> Self {
        Self::of(client, Name::new(client.shared.namespace.clone(), name))
    }

    pub(crate) fn of(client: &Arc<Client>, name: Result<Name, Error>) -> Self {
        Self {
            client: Arc::clone(client),
            name,
            wait: client.shared.defaults.wait,
            keep: None,
        }
    }

    /// For how long the client repeats a request, at least for one operation timeout. A change that
    /// gets no answer is repeated for at most 30 seconds. A change that other clients are in the way
    /// of, as on every store but Redis and memory, is repeated for the whole wait. A store that is
    /// down is an error after one operation timeout. Default: the client's default (`LOCK_WAIT`).
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into();
        self
    }

    /// For how long the store keeps the counter after its last use, which is the last change or
    /// read by anybody: a minute to 100 years. After that, the counter is 0 again.
    ///
    /// The store keeps this time with the counter: 30 days, until a change states another time. A
    /// [`set`](Self::set) or [`compare_and_set`](Self::compare_and_set) may make it longer or
    /// shorter, and an [`add`](Self::add) only longer. A handle without `keep` leaves it as it is.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
    ///
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let invoices = locks.counter("invoices").keep(10 * YEAR);
    /// assert_eq!(invoices.add(1).await?.count, 1);
    /// # Ok(()) }
    /// ```
    pub fn keep(mut self, keep: Duration) -> Self {
        self.keep = Some(keep);
        self
    }

    /// Reads the counter.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store is down;
    /// [`Config`](crate::ErrorKind::Config) for a name or a [`keep`](Self::keep) that is not usable,
    /// and for a store without counters; [`Lost`](crate::ErrorKind::Lost) after a
    /// [shutdown](crate::Locks::shutdown) of the client: the store was not asked.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only reads.
    pub async fn get(&self) -> Result<CounterReading, Error> {
        self.change(CountOp::Read).await.map(CounterReading::of)
    }

    /// Adds a number to the counter. The number may be negative. Returns the new count.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) when the sum is beyond [`MAX`](Self::MAX) or its
    /// negative; nothing is changed in this case. [`Unavailable`](crate::ErrorKind::Unavailable)
    /// when nothing was changed because the store is down or refuses, or because others were in the
    /// way for the whole [wait](Self::wait). [`Unknown`](crate::ErrorKind::Unknown) when the change
    /// was sent and its answer never came: the change was made once, or not at all. The other
    /// errors are those of [`get`](Self::get).
    ///
    /// # Cancel safety
    ///
    /// Not safe: if the future is dropped after it was polled, the change may have been made or
    /// not.
    pub async fn add(&self, delta: i64) -> Result<CounterReading, Error> {
        let op = CountOp::Add { delta, floor: None };
        self.change(op).await.map(CounterReading::of)
    }

    /// Sets the counter, without a condition.
    ///
    /// # Errors
    ///
    /// As [`add`](Self::add).
    ///
    /// # Cancel safety
    ///
    /// Not safe, as [`add`](Self::add).
    pub async fn set(&self, count: i64) -> Result<CounterReading, Error> {
        let only_if = None;
        let op = CountOp::Set { count, only_if };
        self.change(op).await.map(CounterReading::of)
    }

    /// Sets the counter if nobody has changed it since it had this version. Otherwise nothing is
    /// changed, and the inner result is `Err` with the present count and version.
    ///
    /// # Errors
    ///
    /// As [`add`](Self::add).
    ///
    /// # Cancel safety
    ///
    /// Not safe, as [`add`](Self::add).
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let highest = locks.counter("highest");
    /// let mut seen = highest.get().await?;
    /// while seen.count < 42 {
    ///     seen = match highest.compare_and_set(seen.version, 42).await? {
    ///         Ok(now) | Err(now) => now,
    ///     };
    /// }
    /// assert_eq!(highest.get().await?.count, 42);
    /// # Ok(()) }
    /// ```
    pub async fn compare_and_set(
        &self,
        version: u64,
        count: i64,
    ) -> Result<Result<CounterReading, CounterReading>, Error> {
        let only_if = Some(OnlyIf::Version(version));
        let counted = self.change(CountOp::Set { count, only_if }).await?;
        Ok(match counted.outcome {
            Outcome::Applied => Ok(CounterReading::of(counted)),
            Outcome::Kept | Outcome::Overflow => Err(CounterReading::of(counted)),
        })
    }

    /// Follows the count: the present one, and later ones when it changes. Nothing
    /// happens at the store before the first call of [`next`](CounterChanges::next).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let jobs = locks.counter("jobs");
    /// let mut changes = jobs.changes();
    /// assert_eq!(changes.next().await?.count, 0);
    /// jobs.add(3).await?;
    /// assert_eq!(changes.next().await?.count, 3);
    /// # Ok(()) }
    /// ```
    pub fn changes(&self) -> CounterChanges {
        CounterChanges(self.follow())
    }

    pub(crate) fn follow(&self) -> Following {
        Following {
            counter: self.clone(),
            watching: None,
            told: None,
        }
    }

    pub(crate) fn name(&self) -> Result<&Name, Error> {
        self.name.as_ref().map_err(Error::clone)
    }

    pub(crate) async fn change(&self, op: CountOp) -> Result<Counted, Error> {
        let name = self.name()?;
        let [least, most] = KEEPS;
        if let Some(keep) = self.keep.filter(|keep| !(least..=most).contains(keep)) {
            let text = format!(
                "a store keeps a counter for a minute to 100 years, and not for {}",
                format_duration(keep)
            );
            return Err(self.named(Error::config(text)));
        }
        let shared = &self.client.shared;
        shared.count(name, op, self.keep, self.wait).await
    }

    pub(crate) fn watch(&self) -> Result<Watching, Error> {
        self.client.shared.watch(self.name()?)
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// An error about this counter.
    pub(crate) fn named(&self, error: Error) -> Error {
        match &self.name {
            Ok(name) => error.of_name(name.as_str()),
            Err(_) => error,
        }
    }
}

impl CounterReading {
    fn of(counted: Counted) -> Self {
        Self {
            count: counted.count,
            version: counted.version,
        }
    }
}

/// Follows a counter: see [`Counter::changes`].
///
/// From the first call of [`next`](Self::next) until this value is dropped, the store sends one
/// message to this client for each change of the counter. All tasks of the client that follow the
/// counter share these messages. If a store cannot send messages (see its page in the
/// [guide](crate::guide)), the client asks it ten times a second.
#[derive(Debug)]
pub struct CounterChanges(Following);

impl CounterChanges {
    /// The count if it has changed since the last call, or else as soon as it
    /// changes. The first call returns the present count.
    ///
    /// If several changes follow each other fast, the call may return only the last of them. If the
    /// store is down, the call waits until the store is back.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for a name that is not usable, at a store without
    /// counters, and for a user without the rights; [`Lost`](crate::ErrorKind::Lost) when the
    /// client is shut down.
    ///
    /// # Cancel safety
    ///
    /// Safe: if the future is dropped, the next call returns what this call would have returned.
    pub async fn next(&mut self) -> Result<CounterReading, Error> {
        self.0.next().await.map(CounterReading::of)
    }
}

/// Follows a counter, or a value of a lock, which is kept as a counter.
#[derive(Debug)]
pub(crate) struct Following {
    counter: Counter,
    watching: Option<Watching>,
    /// The version that was returned last.
    told: Option<u64>,
}

impl Following {
    /// The counter if it has changed since the last call, or else as soon as it changes. If the
    /// future is dropped, the next call returns what this call would have returned.
    pub(crate) async fn next(&mut self) -> Result<Counted, Error> {
        // In a forked child no task looks at the counter.
        let open = self.counter.client().shared.refuse_forked();
        open.map_err(|error| self.counter.named(error))?;
        let watching = match &mut self.watching {
            Some(watching) => watching,
            none => none.insert(self.counter.watch()?),
        };
        loop {
            let seen = watching.seen(&mut None).await;
            let counted = seen.map_err(|error| self.counter.named(error))?;
            if self.told != Some(counted.version) {
                self.told = Some(counted.version);
                return Ok(counted);
            }
        }
    }
}
