//! A lock as a value: its name, its permits and its options. Callers keep it, clone it, and take it
//! many times.

use std::cmp::Ordering;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use humantime::format_duration;
use tokio::sync::Notify;
use tracing::Instrument;
use tracing::field::{self, Empty};

use crate::acquire::handle::Client;
use crate::acquire::spec::Spec;
use crate::acquire::{Budget, acquire};
use crate::backend::BoxFuture;
use crate::client::events::GrantListener;
use crate::clock::{Clock, Instant};
use crate::error::{Error, ErrorKind};
use crate::hold::Guard;
use crate::name::Name;
use crate::options::{Fair, LONGEST_LINGER, OnLost, OnRevoke, SHORTEST_TTL, Wait};
use crate::owner::{Owner, OwnerText};
use crate::request::FULL;
use crate::scope;

/// A lock that can be acquired: a name, a number of permits, and the options. Nothing happens at
/// the store before [`acquire`](Self::acquire), [`try_acquire`](Self::try_acquire) or
/// [`run`](Self::run).
///
/// If code holds one lock and asks for another, it can deadlock with code that takes the two in the
/// other order. [`Locks::all`](crate::Locks::all) takes several locks in a fixed order. A debug
/// build [warns](crate::guide::trouble#-two-locks-are-asked-for-in-different-orders) when code asks
/// for two locks in both orders.
///
/// ```
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let lock = locks.mutex("order:42").wait(Duration::from_secs(2));
/// lock.run(async |held| {
///     println!("settling order 42, grant {}", held.grant_id());
///     Ok::<_, lockcore::Error>(())
/// })
/// .await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct Lock {
    client: Arc<Client>,
    /// An error if the name or the permits are not valid. Each attempt to take the lock returns it.
    what: Result<What, Error>,
    ttl: Duration,
    wait: Wait,
    through_outages: bool,
    renew: bool,
    min_hold: Duration,
    max_hold: Option<Duration>,
    linger: Duration,
    reentrant: bool,
    on_lost: OnLost,
    on_revoke: OnRevoke,
    label: Option<&'static str>,
    /// `Some` if the lock has an owner text of its own.
    owner: Option<Owner>,
}

#[derive(Clone, Debug)]
struct What {
    name: Name,
    permits: NonZeroU32,
    capacity: NonZeroU32,
}

impl Lock {
    pub(crate) fn new(
        client: &Arc<Client>,
        name: String,
        share: Result<(NonZeroU32, NonZeroU32), Error>,
    ) -> Self {
        let what = share.and_then(|(permits, capacity)| {
            let name = Name::new(client.shared.namespace.clone(), name)?;
            Ok(What {
                name,
                permits,
                capacity,
            })
        });
        Self {
            ttl: client.shared.defaults.ttl,
            wait: client.shared.defaults.wait,
            through_outages: client.shared.defaults.through_outages,
            client: Arc::clone(client),
            what,
            renew: true,
            min_hold: Duration::ZERO,
            max_hold: None,
            linger: client.shared.defaults.linger,
            reentrant: true,
            on_lost: OnLost::default(),
            on_revoke: OnRevoke::default(),
            label: None,
            owner: None,
        }
    }

    /// The name, as it was given. `None` if the name, the permits, the capacity or the owner text
    /// is not valid. In that case [`acquire`](Self::acquire) returns the reason as its error.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.what.as_ref().ok().map(|what| what.name.as_str())
    }

    /// How long [`acquire`](Self::acquire) and [`run`](Self::run) wait, the time to connect
    /// included. Default: the client's default (`LOCK_WAIT`).
    ///
    /// This is the wait for a holder, and not for the store. A store that cannot be reached is an
    /// error after one operation timeout, however long the wait is. With
    /// [`through_outages`](Self::through_outages), the wait covers outages too. A caller that is in
    /// line when an outage begins keeps waiting in both cases.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into();
        self
    }

    /// Whether the [`wait`](Self::wait) also covers times in which the store is out of reach or
    /// refuses requests. Default: the client's default (`LOCK_THROUGH_OUTAGES`), which is false.
    ///
    /// - **false** is for work that somebody waits for, such as an HTTP request: within one operation
    ///   timeout, the caller learns that the store is down, and callers do not pile up.
    /// - **true** is for work that has to be done some time, such as a job. The client asks again
    ///   until the store answers. If the wait ends before, the error is that of the last attempt:
    ///   [`Unavailable`](crate::ErrorKind::Unavailable) or [`Unknown`](crate::ErrorKind::Unknown).
    ///   Mistakes, such as wrong credentials, are an error at once.
    ///
    /// [`try_acquire`](Self::try_acquire) does not wait, so this has no effect on it. An
    /// [election](crate::Locks::election) always waits through outages.
    pub fn through_outages(mut self, yes: bool) -> Self {
        self.through_outages = yes;
        self
    }

    /// The length of the lease: how long the lock stays taken if this process dies. At least 50 ms.
    /// The ttl does not limit the work, because the client renews the lease while the process
    /// lives. [`renew`](Self::renew) turns the renewal off. Default: the client's default
    /// (`LOCK_TTL`).
    ///
    /// At a store with sessions, such as ZooKeeper, a ttl can be no longer than the session that the
    /// server gave. A lease that is renewed has the smaller of the two. A lease without renewal is
    /// refused.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Whether the lease is renewed while it is held. Without renewal it ends one ttl after the
    /// grant, or one ttl after a renewal by hand ([`Held::ensure`](crate::Held::ensure),
    /// [`Guard::downgrade`]). Default: true.
    pub fn renew(mut self, on: bool) -> Self {
        self.renew = on;
        self
    }

    /// The shortest time that the lock stays taken, counted from the grant. A caller that is done
    /// earlier does not wait: the client's keeper releases the lock at the end of this time.
    /// Example: several processes call `try_acquire` at midnight, and their clocks differ a little.
    /// With a `min_hold` that is longer than this difference, only one of them does the work.
    /// Default: zero.
    ///
    /// A shutdown and the drop of a client's last handle do not wait for the end of this time. They
    /// leave the lock at the store, with the rest of this time as its ttl. The lock is free when
    /// this ttl is over. It is no longer than the longest ttl of the store: 12 hours on Redis, two
    /// minutes on a quorum of Redis servers, and a year elsewhere. So the rest of a longer `min_hold`
    /// is cut to that.
    ///
    /// ZooKeeper and etcd have sessions, and no ttl for a single ticket. There a client that ends
    /// waits for the end of this time, for at most one operation timeout, and then leaves its
    /// session open. The lock is free when the session has timed out. This may be later than the
    /// end of the `min_hold`. It may be earlier if the `min_hold` is longer than the session
    /// timeout.
    ///
    /// If the process is killed, the lock stays taken until its lease has run out.
    pub fn min_hold(mut self, least: Duration) -> Self {
        self.min_hold = least;
        self
    }

    /// The longest time that the lock is held, counted from the grant, even with renewal. After
    /// this time the lock is [lost](crate::LostReason::MaxHold). It is free when the rest of its
    /// lease has run out, at most one ttl later. Without a `max_hold`, the lock of a leaked guard
    /// is renewed for as long as the process lives. The limit must be greater than zero. Default:
    /// no limit.
    pub fn max_hold(mut self, limit: Duration) -> Self {
        self.max_hold = Some(limit);
        self
    }

    /// How long the lock stays with this client after its use, if nobody waits for it. If a task of this
    /// client takes the lock again in this time, it gets it without a request to the store, in a few
    /// microseconds. At most a second. Default: the client's default
    /// ([`Builder::linger`](crate::Builder::linger), `LOCK_LINGER`), which is zero.
    ///
    /// Use it for keys that one client takes again and again, for example because the requests of a
    /// customer are routed to the same process. 20 ms are usual. The release then sends nothing, and
    /// returns at once. The setting of the task that has asked the store counts, also for tasks that take
    /// the lock again.
    ///
    /// When another client begins to wait, or is refused, the store tells this client, which releases
    /// the lock at once. That costs a waiter a message and a release more, about as long as two
    /// requests. If the message is lost, or not read because the runtime that took the lock is never idle,
    /// the linger ends by itself. No task takes the lock again later than one second after the grant,
    /// after a thousand uses, or with less than half of the ttl left. A
    /// [`shutdown`](crate::Locks::shutdown), or the drop of the client's last handle, releases it too.
    ///
    /// What it costs:
    ///
    /// - If the process is killed in this time, or ends without one of these two, the lock stays taken for
    ///   the rest of its ttl, although nobody used it. The process-wide default client is never dropped,
    ///   so call [`shutdown`](crate::shutdown) before the end of `main`.
    /// - To another client that [tries](Self::try_acquire), the lock is not free. If the two use the lock
    ///   all the time, the other one is often refused.
    /// - [`Locks::inspect`](crate::Locks::inspect) shows a holder, although nobody uses the lock.
    /// - If the store has lost the lock, [`release`](Guard::release) does not find that out.
    ///
    /// It applies to mutexes and write locks that [`Fair::Local`](crate::Fair::Local) hands over inside
    /// the process: that are renewed and have no `min_hold`, no `max_hold` and no owner text of their own.
    /// A lock that was waited for does not linger, because others may wait behind it. It has an effect at
    /// Redis (one server, and Sentinel). At other stores the lock is released as usual.
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("redis://127.0.0.1")?;
    /// let cart = locks.mutex("cart:42").linger(Duration::from_millis(20));
    /// for _ in 0..100 {
    ///     // Only the first one sends a request.
    ///     drop(cart.acquire().await?);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn linger(mut self, time: Duration) -> Self {
        self.linger = time;
        self
    }

    /// Whether code that runs under this lock may take it again. If so, both holds use the same
    /// grant and token, and no request is sent to the store. If several parts of the code take it
    /// again at the same time, as in a `join!`, they take turns. A future whose turn it is and that
    /// is not polled any more keeps the others waiting, so drop it: an example is a `select!` over
    /// `&mut future` that has finished. With `false`, a second request fails with
    /// [`WouldDeadlock`](crate::ErrorKind::WouldDeadlock) at once. Default: true.
    ///
    /// The inner hold uses the lease of the outer one: its own `ttl`, `renew`, `min_hold` and
    /// `max_hold` have no effect.
    ///
    /// A read hold that is taken inside of a write hold may outlive the write hold. When the last
    /// write hold ends, the lock is [downgraded](Guard::downgrade), and stays held until the last
    /// read hold ends.
    ///
    /// "Runs under" means inside of [`run`](Self::run),
    /// [`Held::while_held`](crate::Held::while_held) or [`Held::scope`](crate::Held::scope). To
    /// take the lock of a bare [`Guard`] again, use [`Guard::reenter`]. A second `acquire` would
    /// wait until the guard releases. There is no re-entry into a semaphore: each request takes
    /// more permits.
    pub fn reentrant(mut self, yes: bool) -> Self {
        self.reentrant = yes;
        self
    }

    /// Sets what happens to work under this lock when the lock is lost. Default:
    /// [`OnLost::Cancel`].
    pub fn on_lost(mut self, policy: OnLost) -> Self {
        self.on_lost = policy;
        self
    }

    /// Sets what happens to work under this lock when somebody asks for the lock
    /// ([`Locks::revoke`](crate::Locks::revoke)).
    /// Default: [`OnRevoke::Finish`].
    pub fn on_revoke(mut self, policy: OnRevoke) -> Self {
        self.on_revoke = policy;
        self
    }

    /// A text for traces and [metrics](crate::guide::metrics) that is the same for all keys, such as
    /// `order:{id}`. The macro sets it.
    pub fn label(mut self, label: &'static str) -> Self {
        self.label = Some(label);
        self
    }

    /// The text that [`Locks::inspect`](crate::Locks::inspect) shows as the
    /// [`owner_text`](crate::inspect::TicketInfo::owner_text) of the ticket, for example the name
    /// of the job, or the id of the request. At most 64 bytes of UTF-8 without control characters
    /// and line breaks. With any other text, a request for the lock fails with
    /// [`Config`](crate::ErrorKind::Config). An empty text means no text. Default: the client's
    /// default ([`Builder::owner`](crate::Builder::owner), `LOCK_OWNER`).
    ///
    /// The text is not a part of the name. Everybody who may read the store can read it, so it must
    /// contain no secrets. A lock with its own text is never handed over inside the process (see
    /// [`Fair`](crate::Fair)): it always has a ticket of its own. Otherwise the ticket would show
    /// the text of its first holder.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::builder().url("memory:").owner("billing 2.7").build()?;
    /// let guard = locks.mutex("order:42").owner("refund 4711").acquire().await?;
    ///
    /// let tickets = locks.inspect("order:42").await?;
    /// assert_eq!(tickets[0].owner_text.as_deref(), Some("refund 4711"));
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn owner(mut self, text: impl Into<String>) -> Self {
        match OwnerText::new(text.into()) {
            Ok(text) => self.owner = Some(self.client.owner.with(&text)),
            Err(error) => {
                self.what = self
                    .what
                    .and_then(|what| Err(error.of_name(what.name.as_str())));
            }
        }
        self
    }

    /// Takes the lock, waiting in line for as long as [`wait`](Self::wait) says.
    ///
    /// # Errors
    ///
    /// [`Timeout`](crate::ErrorKind::Timeout), [`Unavailable`](crate::ErrorKind::Unavailable),
    /// [`Unknown`](crate::ErrorKind::Unknown),
    /// [`CapacityMismatch`](crate::ErrorKind::CapacityMismatch),
    /// [`WouldDeadlock`](crate::ErrorKind::WouldDeadlock), [`Config`](crate::ErrorKind::Config).
    /// Besides, [`Busy`](crate::ErrorKind::Busy) with a `wait` of zero, and when ten thousand
    /// callers wait already. And [`Lost`](crate::ErrorKind::Lost) after a shutdown, and for a
    /// request inside of a hold of the same lock that is lost. A store that cannot be reached is
    /// reported after one operation timeout, not after the whole wait, except with
    /// [`through_outages`](Self::through_outages).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: the client's keeper removes the ticket from the
    /// store, or releases the lock if it was just granted.
    pub async fn acquire(&self) -> Result<Guard, Error> {
        Ok(self.begin(self.take(Some(self.wait)).await?))
    }

    /// Takes the lock if it is free, in one round trip. If it is not free, and this client is still
    /// releasing a lock of this name whose guard was dropped, this waits for that release and asks
    /// once more. All this takes at most about one operation timeout.
    ///
    /// # Errors
    ///
    /// [`Busy`](crate::ErrorKind::Busy) when the lock is not free or others wait for it, and the
    /// errors of [`acquire`](Self::acquire) except `Timeout`.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(&self) -> Result<Guard, Error> {
        Ok(self.begin(self.take(None).await?))
    }

    /// Returns a listener to the grants of this name that this client gets from now on. The
    /// listener reports when a grant is made, revoked, lost, or released. For a read/write lock it
    /// reports both sides. It does not report grants of other clients;
    /// [`Locks::inspect`](crate::Locks::inspect) shows these.
    ///
    /// [Re-entry](Self::reentrant) is no new grant, so the listener does not report it. A listener
    /// sends no requests.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockcore::events::GrantEvent;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let report = locks.mutex("report");
    /// let mut grants = report.grants();
    ///
    /// let guard = report.acquire().await?;
    /// let grant_id = guard.grant_id();
    /// guard.release().await?;
    ///
    /// assert_eq!(grants.recv().await, Some(GrantEvent::Granted(grant_id)));
    /// assert_eq!(grants.recv().await, Some(GrantEvent::Released(grant_id)));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn grants(&self) -> GrantListener {
        let name = self.what.as_ref().map_or("", |what| what.name.as_str());
        self.client.shared.listen_to_grants(name.to_owned())
    }

    pub(crate) fn default_wait(&self) -> Wait {
        self.wait
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.client.shared.clock
    }

    /// Whether a caller may ask for this lock before its turn has come to wait for it. With
    /// [`Fair::Strict`], such a request would pass other tasks of this process that gather. A store that
    /// answers at once is as fast without.
    pub(crate) fn may_be_early(&self) -> bool {
        let shared = &self.client.shared;
        shared.defaults.fair != Fair::Strict && !shared.capability.answers_at_once
    }

    pub(crate) fn waits_through_outages(&self) -> bool {
        self.through_outages
    }

    pub(crate) fn op_timeout(&self) -> Duration {
        self.client.shared.op_timeout
    }

    pub(crate) fn is_of_client_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.client, &other.client)
    }

    /// The result of a future, or `None` if it takes longer than `time` by this lock's clock.
    pub(crate) async fn within<T>(
        &self,
        time: Duration,
        future: impl Future<Output = T>,
    ) -> Option<T> {
        let shared = &self.client.shared;
        shared.by(shared.clock.now().after(time), future).await
    }

    pub(crate) fn timeout(&self, waited: Duration) -> Error {
        match &self.what {
            Ok(what) => self.refused(Error::timeout(waited), &what.name),
            Err(error) => error.clone(),
        }
    }

    /// Completes an error for the caller, and logs it.
    fn refused(&self, error: Error, name: &Name) -> Error {
        let error = error.of_name(name.as_str());
        let not_free = matches!(error.kind(), ErrorKind::Busy | ErrorKind::Timeout);
        let held = not_free.then(|| self.client.shared.held_among_few(name));
        let error = match held.flatten() {
            Some(capacity) => error.held_here(capacity == FULL),
            None => error,
        };
        tracing::debug!(%error, label = self.label, "lock not taken");
        error
    }

    /// Whether the lock has a mistake that makes every attempt fail.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.spec().map(drop)
    }

    /// The order in which several locks are taken. It is the same in every process, and does not
    /// depend on the caller's list. If two clients have the same store address, their order is by
    /// memory address. Such clients are stores in memory, which exist in one process only, or were
    /// made by [`Locks::with_backend`](crate::Locks::with_backend).
    pub(crate) fn in_order(&self, other: &Self) -> Ordering {
        fn key(lock: &Lock) -> (Option<(&str, &str)>, &str, *const Client) {
            let name = lock.what.as_ref().ok().map(|what| &what.name);
            let name = name.map(|name| (name.as_str(), name.namespace().as_str()));
            (name, &lock.client.shared.place, Arc::as_ptr(&lock.client))
        }
        key(self).cmp(&key(other))
    }

    /// Whether `self` and the other value are the same lock, and `self` takes at least as many
    /// permits.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        let (Ok(this), Ok(that)) = (&self.what, &other.what) else {
            return false;
        };
        let same = Arc::ptr_eq(&self.client, &other.client) && this.name == that.name;
        same && this.capacity == that.capacity && this.permits >= that.permits
    }

    /// If both are permits of the same semaphore, adds the other's permits to this one, and returns
    /// true. The sum may be more than the semaphore has; a request for the permits then returns an
    /// error.
    pub(crate) fn add_permits(&mut self, other: &Self) -> bool {
        let same_client = Arc::ptr_eq(&self.client, &other.client);
        let (Ok(this), Ok(that)) = (&mut self.what, &other.what) else {
            return false;
        };
        let same = same_client && this.name == that.name && this.capacity == that.capacity;
        let semaphore = same && this.capacity != FULL;
        if semaphore {
            // The sum saturates far above every capacity.
            this.permits = this.permits.saturating_add(that.permits.get());
        }
        semaphore
    }

    /// Starts the limits of a lock that the user gets now. They count from the grant.
    fn begin(&self, guard: Guard) -> Guard {
        if self.is_limited() {
            self.begin_at(&guard, guard.granted_at());
        }
        guard
    }

    /// As [`begin`](Self::begin), with limits that count from `since`.
    pub(crate) fn begin_at(&self, guard: &Guard, since: Instant) {
        guard.begin(since, self.min_hold, self.max_hold);
    }

    /// Whether the lock has a [`min_hold`](Self::min_hold) or a [`max_hold`](Self::max_hold).
    pub(crate) fn is_limited(&self) -> bool {
        self.max_hold.is_some() || !self.min_hold.is_zero()
    }

    /// Takes the lock with another wait than [`wait`](Self::wait) says, or with `None` only if it is
    /// free. Gives up after `most`, even if a store that does not answer could be given more time.
    pub(crate) async fn acquire_within(
        &self,
        wait: Option<Wait>,
        most: Duration,
    ) -> Result<Guard, Error> {
        let budget = |spec: &Spec<'_>| Budget::new(spec, wait).at_most(most);
        Ok(self.begin(self.take_with(budget).await?))
    }

    /// Takes the lock, without setting its limits: see [`begin`](Self::begin).
    pub(crate) fn take(&self, wait: Option<Wait>) -> impl Future<Output = Result<Guard, Error>> {
        self.take_with(move |spec| Budget::new(spec, wait))
    }

    /// As [`take`](Self::take). Notifies `others` when the caller has to wait for others.
    pub(crate) fn take_telling(
        &self,
        wait: Wait,
        others: Arc<Notify>,
    ) -> impl Future<Output = Result<Guard, Error>> {
        self.take_with(move |spec| Budget::new(spec, Some(wait)).telling(others))
    }

    /// Takes the lock if it is free, for a caller that waits for it later if it is not. Does not set
    /// its limits.
    pub(crate) fn take_early(&self, most: Duration) -> impl Future<Output = Result<Guard, Error>> {
        self.take_with(move |spec| Budget::new(spec, None).at_most(most).early())
    }

    async fn take_with(&self, budget: impl FnOnce(&Spec<'_>) -> Budget) -> Result<Guard, Error> {
        // The store in memory never makes its caller wait. Without this call, a loop over locks
        // would never yield its thread.
        tokio::task::coop::consume_budget().await;
        // This check comes before any use of data that belongs to the parent process.
        self.client.shared.refuse_forked()?;
        let spec = self.spec()?;
        let name = spec.name;
        let shared = &self.client.shared;
        let span = tracing::debug_span!(
            "acquire",
            lock = %name,
            label = self.label,
            lock.name = self.label,
            lock.token = Empty,
            db.system.name = shared.system(),
            db.operation.name = "acquire",
            server.address = shared.address(),
            "error.type" = Empty,
        );
        let budget = budget(&spec);
        let outer = spec
            .can_reenter()
            .then(|| scope::find(&self.client, name, spec.is_exclusive()))
            .flatten();
        let guard = async {
            match outer {
                Some(outer) => scope::reenter(&spec, outer, &budget).await,
                None => {
                    #[cfg(debug_assertions)]
                    if budget.waits || budget.early {
                        scope::note_wait(&spec);
                    }
                    let grant = acquire(&spec, &budget).await?;
                    let guard = Guard::of(grant, &spec);
                    tracing::debug!(grant_id = %guard.grant_id(), waited = ?budget.waited(&spec), "lock granted");
                    Ok(guard)
                }
            }
        };
        let taken = guard.instrument(span.clone()).await;
        match &taken {
            Ok(guard) => span.record("lock.token", field::display(guard.grant_id())),
            Err(error) => span.record("error.type", error.kind().code()),
        };
        taken.map_err(|error| self.refused(error, name))
    }

    fn spec(&self) -> Result<Spec<'_>, Error> {
        let what = self.what.as_ref().map_err(Clone::clone)?;
        let longest = self.client.shared.capability.longest_ttl;
        if self.ttl < SHORTEST_TTL || self.ttl > longest {
            return Err(Error::config(format!(
                "a ttl of {} is not usable: this store takes {} to {}",
                format_duration(self.ttl),
                format_duration(SHORTEST_TTL),
                format_duration(longest)
            ))
            .of_name(what.name.as_str()));
        }
        if what.permits > what.capacity {
            return Err(Error::config(format!(
                "asks for {} permits in all, of a semaphore of {}: there are not so many",
                what.permits, what.capacity
            ))
            .of_name(what.name.as_str()));
        }
        if self.max_hold == Some(Duration::ZERO) {
            return Err(Error::config(
                "a max_hold of zero is not usable: the lock would be lost before it is held; leave it out for no limit",
            )
            .of_name(what.name.as_str()));
        }
        if self.linger > LONGEST_LINGER {
            return Err(Error::config(format!(
                "a linger of {} is not usable: it is at most {}, and 20ms is usual",
                format_duration(self.linger),
                format_duration(LONGEST_LINGER)
            ))
            .of_name(what.name.as_str()));
        }
        let ends_by_itself = match self.renew {
            true => self.max_hold,
            false => Some(self.max_hold.map_or(self.ttl, |limit| limit.min(self.ttl))),
        };
        if let Some(end) = ends_by_itself
            && self.min_hold > end
        {
            return Err(Error::config(format!(
                "a min_hold of {} cannot be kept: this lock ends by itself after {} (max_hold, or a ttl that is not \
                 renewed)",
                format_duration(self.min_hold),
                format_duration(end)
            ))
            .of_name(what.name.as_str()));
        }
        Ok(Spec {
            client: &self.client,
            name: &what.name,
            permits: what.permits,
            capacity: what.capacity,
            ttl: self.ttl,
            renew: self.renew,
            linger: self.linger,
            owner: &self.owner.as_ref().unwrap_or(&self.client.owner).whole,
            through_outages: self.through_outages,
            limited: self.is_limited() || self.owner.is_some(),
            reentrant: self.reentrant,
            on_lost: self.on_lost,
            on_revoke: self.on_revoke,
            label: self.label,
            meter: self.client.shared.meter.lock(self.label),
        })
    }
}

/// `lock.await` is [`lock.acquire().await`](Lock::acquire).
///
/// ```
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let guard = locks.mutex("order:42").wait(Duration::from_secs(2)).await?;
/// # drop(guard);
/// # Ok(()) }
/// ```
impl IntoFuture for Lock {
    type Output = Result<Guard, Error>;
    type IntoFuture = BoxFuture<Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.acquire().await })
    }
}
