//! Configuration: the builder, the environment variables, and the reasons for the defaults.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use humantime::format_duration;

use crate::acquire::handle::Client;
use crate::backend::{Backend, Capability, meant, open};
use crate::client::settings::{Defaults, Settings};
use crate::clock::Clock;
use crate::error::Error;
use crate::locks::Locks;
use crate::name::Namespace;
use crate::options::{Fair, LONGEST_LINGER, SHORTEST_TTL, Wait};
use crate::owner::{Owner, OwnerText};
use crate::tls::Tls;

/// The namespace of all clients that set none. So two services that share a store and a name
/// exclude each other, as users of one name expect.
const NAMESPACE: &str = "lock";
/// Long enough for three renewals, even if the store is slow or restarts. Short enough for a waiter
/// whose holder has died.
const TTL: Duration = Duration::from_secs(10);
/// Longer than one lease, so that a waiter gets the lock even if its holder has just died. Shorter
/// than the 30 s after which most clients and proxies give up.
const WAIT: Wait = Wait::For(Duration::from_secs(15));
/// Enough for some hundred hand-overs inside a process before the store is asked. The delay for
/// waiters of other processes is too short for people to notice.
const FAIR: Fair = Fair::Local(LOCAL);
const LOCAL: Duration = Duration::from_millis(50);
/// A store on the same network answers in a millisecond. If it takes a second, something is wrong.
const OP_TIMEOUT: Duration = Duration::from_secs(1);

/// Accepted values that are words and not durations, in upper and lower case.
const FOREVER: &str = "forever";
const STRICT: &str = "strict";

const VARIABLES: [&str; 12] = [
    "LOCK_URL",
    "LOCK_NAMESPACE",
    "LOCK_TTL",
    "LOCK_WAIT",
    "LOCK_THROUGH_OUTAGES",
    "LOCK_LINGER",
    "LOCK_FAIR",
    "LOCK_OP_TIMEOUT",
    "LOCK_OWNER",
    "LOCK_CA_FILE",
    "LOCK_CERT_FILE",
    "LOCK_KEY_FILE",
];

/// What precedes the name of a variable of ours, or is written there by mistake.
const PREFIXES: [&str; 3] = ["LOCK_", "LOCKS_", "LOCKCORE_"];

/// Names that other libraries use for what these variables set, and the variables that a user may
/// have meant. They are not read, because each setting has only one name.
const OTHER_NAMES: [(&str, &str); 8] = [
    ("LOCK_ACQUIRE_TIMEOUT", "LOCK_WAIT"),
    ("LOCK_EXPIRY", "LOCK_TTL"),
    ("LOCK_LEASE", "LOCK_TTL"),
    ("LOCK_LEASE_TIME", "LOCK_TTL"),
    ("LOCK_MAX_WAIT", "LOCK_WAIT"),
    ("LOCK_TIMEOUT", "LOCK_WAIT or LOCK_OP_TIMEOUT"),
    ("LOCK_WAIT_TIME", "LOCK_WAIT"),
    ("LOCK_WAIT_TIMEOUT", "LOCK_WAIT"),
];

/// The configuration of a client.
///
/// | method | variable | meaning | default |
/// |---|---|---|---|
/// | [`url`](Self::url) | `LOCK_URL` | the address of the store | none |
/// | [`namespace`](Self::namespace) | `LOCK_NAMESPACE` | first part of all names | `lock` |
/// | [`ttl`](Self::ttl) | `LOCK_TTL` | the lease length of locks that set none | `10s` |
/// | [`wait`](Self::wait) | `LOCK_WAIT` | the wait of locks that set none, or `forever` | `15s` |
/// | [`through_outages`](Self::through_outages) | `LOCK_THROUGH_OUTAGES` | whether the wait covers outages of the store | `false` |
/// | [`linger`](Self::linger) | `LOCK_LINGER` | how long a lock stays with its process after its use | `0s` |
/// | [`fair`](Self::fair) | `LOCK_FAIR` | `strict`, or how long a process may serve its own tasks first | `50ms` |
/// | [`op_timeout`](Self::op_timeout) | `LOCK_OP_TIMEOUT` | how long one operation at the store may take | `1s` |
/// | [`owner`](Self::owner) | `LOCK_OWNER` | the text that `inspect` shows beside machine and process | none |
/// | [`ca_file`](Self::ca_file) | `LOCK_CA_FILE` | the CA to trust instead of the system's roots | none |
/// | [`cert_file`](Self::cert_file), [`key_file`](Self::key_file) | `LOCK_CERT_FILE`, `LOCK_KEY_FILE` | the client's own certificate | none |
///
/// ```
/// use std::time::Duration;
///
/// let locks = lockcore::Locks::builder()
///     .url("memory:")
///     .namespace("shop")
///     .ttl(Duration::from_secs(5))
///     .build()?;
/// # Ok::<_, lockcore::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "a builder does nothing until it is built"]
pub struct Builder {
    url: Option<String>,
    backend: Option<Arc<dyn Backend>>,
    namespace: String,
    ttl: Duration,
    wait: Wait,
    through_outages: bool,
    linger: Duration,
    fair: Fair,
    op_timeout: Duration,
    owner: String,
    tls: Tls,
    /// Warnings about variables that were not read, although their names resemble ours.
    unread: Vec<String>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            url: None,
            backend: None,
            namespace: NAMESPACE.into(),
            ttl: TTL,
            wait: WAIT,
            through_outages: false,
            linger: Duration::ZERO,
            fair: FAIR,
            op_timeout: OP_TIMEOUT,
            owner: String::new(),
            tls: Tls::default(),
            unread: Vec::new(),
        }
    }
}

impl Builder {
    /// Reads the variables of the table above, and no others. A variable that resembles one of
    /// these may be misspelt, as `LOCK_WIAT` and `LOCK_TIMEOUT` are. It may also belong to another
    /// program. So the client that is built logs a warning about it.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config). The message names the variable and what it accepts. If
    /// `LOCK_URL` is not set, the message also names the variables that resemble ours.
    pub fn from_env() -> Result<Self, Error> {
        Self::from_variables(std::env::vars_os())
    }

    fn from_variables(
        variables: impl Iterator<Item = (OsString, OsString)>,
    ) -> Result<Self, Error> {
        let mut builder = Self::default();
        for (variable, value) in variables {
            let Some(variable) = variable.to_str() else {
                continue;
            };
            if !VARIABLES.contains(&variable) {
                builder.unread.extend(meant_by(variable).map(|meant| {
                    format!(
                        "the environment has {variable}, which lockcore does not read; did you mean {meant}?"
                    )
                }));
                continue;
            }
            let value = value
                .into_string()
                .map_err(|_| Error::config(format!("{variable} is not UTF-8")))?;
            builder = builder.set(variable, value)?;
        }
        if builder.url.is_none() {
            let mut message = format!(
                "LOCK_URL is not set: it says which store keeps the locks, as memory: or redis://host; {}",
                open::what_this_build_knows()
            );
            for unread in &builder.unread {
                message.push_str("; ");
                message.push_str(unread);
            }
            return Err(Error::config(message));
        }
        Ok(builder)
    }

    fn set(self, variable: &str, value: String) -> Result<Self, Error> {
        let duration_or = |word: &str| {
            let accepted = match word {
                "" => "is not a duration".to_owned(),
                word => format!("is neither \"{word}\" nor a duration"),
            };
            humantime::parse_duration(&value).map_err(|error| {
                Error::config(format!(
                    "{variable}={value} {accepted} as 500ms, 10s or 2m: {error}"
                ))
            })
        };
        let duration = || duration_or("");
        Ok(match variable {
            "LOCK_URL" => self.url(value),
            "LOCK_NAMESPACE" => self.namespace(value),
            "LOCK_TTL" => self.ttl(duration()?),
            "LOCK_WAIT" if value.eq_ignore_ascii_case(FOREVER) => self.wait(Wait::Forever),
            "LOCK_WAIT" => self.wait(duration_or(FOREVER)?),
            "LOCK_THROUGH_OUTAGES" => {
                let yes = value.parse().map_err(|_| {
                    Error::config(format!(
                        "{variable}={value} is neither \"true\" nor \"false\""
                    ))
                });
                self.through_outages(yes?)
            }
            "LOCK_LINGER" => self.linger(duration()?),
            "LOCK_FAIR" if value.eq_ignore_ascii_case(STRICT) => self.fair(Fair::Strict),
            "LOCK_FAIR" => self.fair(Fair::Local(duration_or(STRICT)?)),
            "LOCK_OWNER" => self.owner(value),
            "LOCK_CA_FILE" => self.ca_file(value),
            "LOCK_CERT_FILE" => self.cert_file(value),
            "LOCK_KEY_FILE" => self.key_file(value),
            _ => self.op_timeout(duration()?),
        })
    }

    /// The URL of the store:
    ///
    /// - `memory:`
    /// - `sqlite:PATH`
    /// - `postgres://user[:password]@host[:port][,host[:port]…]/database`; `postgresql` is the same
    /// - `mysql://user[:password]@host[:port]/database`; `mariadb` is the same
    /// - `redis://[[user]:password@]host[:port][/database]`
    /// - `redis+unix:///path[?user=…&password=…&db=…]`, a Redis server behind a socket of Unix;
    ///   `unix:///path` is the same
    /// - `redis+sentinel://[[user]:password@]host[:port][,host[:port]…]/service[/database]`
    /// - `redis+cluster://[[user]:password@]host[:port][,host[:port]…]`
    /// - `redlock://[[user]:password@]host[:port],host[:port],host[:port][,…]`, a quorum of Redis
    ///   servers
    /// - `etcd://[user:password@]host[:port][,host[:port]…]`
    /// - `zookeeper://[user:password@]host[:port][,host[:port]…][/chroot]`
    ///
    /// With TLS: `postgres+tls://…`, `mysql+tls://…`, `rediss://…`, `rediss+sentinel://…`,
    /// `rediss+cluster://…`, `redlock+tls://…`, `etcd+tls://…` and `zookeeper+tls://…`.
    ///
    /// Where the scheme begins with `redis`, it may begin with `valkey`. Behind a `?` some stores have
    /// options: see [their pages](crate::guide#stores). A user without a password is refused. If a user
    /// of the Redis server needs no password, write any.
    ///
    /// In a user or password, `%25` stands for `%`, `%40` for `@`, `%23` for `#`, `%2F` for `/`,
    /// `%3F` for `?`. In an option behind a `?`, `%26` stands for `&`.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.url = Some(url.into());
        self
    }

    /// Uses a store of your own, or a wrapped store: see [`backend`](crate::backend). It takes
    /// precedence over [`url`](Self::url).
    #[cfg(any(feature = "backend", test))]
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> Self {
        self.backend = Some(backend);
        self
    }

    /// The first part of all names. It separates the applications that share a store. 1 to 64
    /// characters of `a-z A-Z 0-9 . _ -`.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// The lease length of locks that do not set their own. At least 50 ms.
    ///
    /// A lock stays taken for this long when its holder dies. The default of 10 s leaves room for
    /// three renewals.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// The wait of locks that do not set their own. With the default of 15 s, a waiter gets the
    /// lock even if its holder has just died.
    pub fn wait(mut self, wait: impl Into<Wait>) -> Self {
        self.wait = wait.into();
        self
    }

    /// Whether the wait of locks that do not set their own choice covers outages of the store: see
    /// [`Lock::through_outages`](crate::Lock::through_outages). With the default of `false`, a store
    /// that cannot be reached is an error after one [operation timeout](Self::op_timeout), as a
    /// service needs it for its requests.
    pub fn through_outages(mut self, yes: bool) -> Self {
        self.through_outages = yes;
        self
    }

    /// How long locks that do not set their own time stay with this process after their use: see
    /// [`Lock::linger`](crate::Lock::linger). At most a second, and on Redis only. With the default
    /// of zero, they are released at once.
    pub fn linger(mut self, time: Duration) -> Self {
        self.linger = time;
        self
    }

    /// Sets whether the tasks of a process may hand a lock over among themselves. The time in
    /// [`Fair::Local`] is the *bound*: after this time, the process gives the lock to the next
    /// process. With the default of 50 ms, a lock that one process uses heavily is handed over
    /// inside that process. This needs nearly no requests to the store, and other processes hardly
    /// notice the wait. If the bound is longer than the ttl, the client logs a warning.
    pub fn fair(mut self, fair: Fair) -> Self {
        self.fair = fair;
        self
    }

    /// How long one operation at the store may take, including the time to connect. It must be
    /// greater than zero. If it is longer than the ttl, the client logs a warning, because the
    /// client would notice an outage only when the locks are lost. A renewal may take three times
    /// as long, up to a quarter of the ttl, so that a slow store does not cost the locks.
    pub fn op_timeout(mut self, timeout: Duration) -> Self {
        self.op_timeout = timeout;
        self
    }

    /// The text that [`Locks::inspect`] shows as the
    /// [`owner_text`](crate::inspect::TicketInfo::owner_text) of this client's tickets. It may say
    /// which application this is, which version, and which replica. At most 64 bytes of UTF-8
    /// without control characters and line breaks. The default is empty: no text. A lock may have
    /// [another](crate::Lock::owner).
    ///
    /// The text is not a part of any name. Everybody who may read the store can read it, so it must
    /// contain no secrets.
    ///
    /// ```
    /// let locks = lockcore::Locks::builder()
    ///     .url("memory:")
    ///     .owner("billing 2.7, blue")
    ///     .build()?;
    /// # Ok::<_, lockcore::Error>(())
    /// ```
    pub fn owner(mut self, text: impl Into<String>) -> Self {
        self.owner = text.into();
        self
    }

    /// The CA certificates, in a PEM file, for stores that are reached over TLS. The server's
    /// certificate must come from one of them. They replace the certificates that the system
    /// trusts, which are the default. With your own CA, nobody else can pretend to be the server.
    ///
    /// The server's certificate is always verified. This file and the next two are read once, when
    /// the client is built.
    ///
    /// ```no_run
    /// let locks = lockcore::Locks::builder()
    ///     .url("rediss://locks.example.com")
    ///     .ca_file("/etc/ssl/example-ca.pem")
    ///     .build()?;
    /// # Ok::<_, lockcore::Error>(())
    /// ```
    pub fn ca_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.tls.ca_file = Some(path.into());
        self
    }

    /// The certificate, in a PEM file, that this client shows to a server that asks for one (mutual
    /// TLS). After the certificate, the file has the certificates that lead from it to the CA.
    /// Needs [`key_file`](Self::key_file) too.
    pub fn cert_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.tls.cert_file = Some(path.into());
        self
    }

    /// The private key of [`cert_file`](Self::cert_file), in a PEM file without a password.
    pub fn key_file(mut self, path: impl Into<PathBuf>) -> Self {
        self.tls.key_file = Some(path.into());
        self
    }

    /// Checks the configuration and makes the client. Nothing is connected yet.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for a value that is not usable;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when no thread can be started, or memory is
    /// short.
    pub fn build(self) -> Result<Locks, Error> {
        self.build_at(Clock::BOOT)
    }

    /// As [`build`](Self::build), with this clock.
    pub(crate) fn build_at(mut self, clock: Clock) -> Result<Locks, Error> {
        if let Some(backend) = self.backend.take() {
            // If a URL was set too, it is ignored. It names another store, and was not checked.
            return self.build_with(backend, String::new(), clock);
        }
        let url = self.url.as_deref().ok_or_else(|| {
            Error::config(format!(
                "no store was named: call url(…) or set LOCK_URL; {}",
                open::what_this_build_knows()
            ))
        })?;
        let backend = open::open_with(url, &self.tls)?;
        let place = open::place(url);
        self.build_with(backend, place, clock)
    }

    pub(crate) fn build_with(
        self,
        backend: Arc<dyn Backend>,
        place: String,
        clock: Clock,
    ) -> Result<Locks, Error> {
        let namespace = Namespace::new(&self.namespace)
            .map_err(|error| Error::config(format!("LOCK_NAMESPACE: {error}")))?;
        let capability = backend.capability();
        let longest = capability.longest_ttl;
        if self.ttl < SHORTEST_TTL || self.ttl > longest {
            return Err(Error::config(format!(
                "a ttl (LOCK_TTL) of {} is not usable: this store takes {} to {}",
                format_duration(self.ttl),
                format_duration(SHORTEST_TTL),
                format_duration(longest)
            )));
        }
        if self.linger > LONGEST_LINGER {
            return Err(Error::config(format!(
                "a linger (LOCK_LINGER) of {} is not usable: it is at most {}, and 20ms is usual",
                format_duration(self.linger),
                format_duration(LONGEST_LINGER)
            )));
        }
        if self.op_timeout.is_zero() {
            return Err(Error::config(
                "an operation timeout (LOCK_OP_TIMEOUT) of zero would fail every operation",
            ));
        }
        let doubts = self.doubts(&capability);
        let owner = OwnerText::new(self.owner)
            .map_err(|error| Error::config(format!("LOCK_OWNER: {error}")))?;
        let owner = Owner::of_this_process(&owner);
        let settings = Settings {
            clock,
            namespace,
            op_timeout: self.op_timeout,
            place,
            owner: Arc::clone(&owner.whole),
            defaults: Defaults {
                ttl: self.ttl,
                wait: self.wait,
                through_outages: self.through_outages,
                linger: self.linger,
                fair: self.fair,
            },
        };
        let locks = Locks(Client::start(backend, settings, owner)?);
        for doubt in doubts {
            tracing::warn!("{doubt}");
        }
        Ok(locks)
    }

    /// Warnings about what can be used but is probably a mistake. A value is no error, because a
    /// lock may have a ttl of its own. A variable is no error, because another program may read it.
    fn doubts(&self, store: &Capability) -> Vec<String> {
        let ttl = format_duration(self.ttl);
        let mut doubts = self.unread.clone();
        if self.op_timeout > self.ttl {
            doubts.push(format!(
                "an operation may take {} (LOCK_OP_TIMEOUT), which is longer than a lease (LOCK_TTL, {ttl}): when the \
                 store does not answer, locks are lost before that is noticed; set it below a third of the ttl",
                format_duration(self.op_timeout)
            ));
        }
        if let Fair::Local(bound) = self.fair
            && bound > self.ttl
        {
            doubts.push(format!(
                "a process may serve its own for {} (LOCK_FAIR), which is longer than a lease (LOCK_TTL, {ttl}): other \
                 processes wait for that long, as if a holder had died; the default is {}",
                format_duration(bound),
                format_duration(LOCAL)
            ));
        }
        if self.fair == Fair::Strict && !store.queues {
            doubts.push(
                "strict order (LOCK_FAIR) was asked for, but the line of this store has no order: whoever asks when \
                 the lock is free gets it, and a caller may wait while others come and go; if the order matters, \
                 take another store than a quorum of Redis servers"
                    .to_owned(),
            );
        }
        let lingers = store.tells_holders && self.fair != Fair::Strict;
        if !self.linger.is_zero() && !lingers && !store.answers_at_once {
            doubts.push(
                "a linger (LOCK_LINGER) was asked for, which has no effect with this store, or with strict order: locks \
                 are released as soon as nobody of the process uses them"
                    .to_owned(),
            );
        }
        doubts
    }
}

/// The variable of ours that a user probably meant by this one. `None` if the variable has nothing
/// to do with us.
fn meant_by(variable: &str) -> Option<&'static str> {
    let name = (PREFIXES.iter()).find_map(|prefix| variable.strip_prefix(prefix))?;
    let written = format!("LOCK_{name}");
    let other = OTHER_NAMES.iter().find(|(other, _)| *other == written);
    match other {
        Some((_, meant)) => Some(meant),
        // Without the prefix, because letters that all variables have say nothing.
        None => {
            let of = |ours: &'static str| ours.trim_start_matches(PREFIXES[0]);
            let nearest = meant::nearest(name, VARIABLES.map(of))?;
            VARIABLES.into_iter().find(|ours| of(ours) == nearest)
        }
    }
}

impl Locks {
    /// A client of the store at `url`, with defaults for everything else: see [`Builder`].
    ///
    /// Checks the configuration and returns at once; the connection is made at first use.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for a URL that this build does not know;
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when no thread can be started, or memory is
    /// short.
    pub fn connect(url: &str) -> Result<Self, Error> {
        Self::builder().url(url).build()
    }

    /// A client that is configured by `LOCK_URL` and the other variables of [`Builder::from_env`].
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect). The message names the variable and what it accepts.
    pub fn from_env() -> Result<Self, Error> {
        Builder::from_env()?.build()
    }

    /// Starts a configuration that sets more than the URL.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// A client of a store of your own: see [`backend`](crate::backend).
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when no thread can be started, or memory is
    /// short.
    #[cfg(any(feature = "backend", test))]
    pub fn with_backend(backend: Arc<dyn Backend>) -> Result<Self, Error> {
        Self::builder().backend(backend).build()
    }
}

/// Does not show the URL, because it may contain a password.
impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder")
            .field("url", &self.url.as_ref().map(|_| "…"))
            .field("namespace", &self.namespace)
            .field("ttl", &self.ttl)
            .field("wait", &self.wait)
            .field("through_outages", &self.through_outages)
            .field("linger", &self.linger)
            .field("fair", &self.fair)
            .field("op_timeout", &self.op_timeout)
            .field("owner", &self.owner)
            .field("tls", &self.tls)
            .finish()
    }
}

#[cfg(test)]
mod tests;
