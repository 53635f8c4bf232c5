//! Opens a connection to a server: a socket, TLS over the socket for `rediss://`, and the protocol
//! of the driver over that.
//!
//! The driver could do all of this. But its TLS installs a cryptography provider for the whole
//! process. It also reads the system's certificates at each connect, even if the client trusts
//! other certificates.

use std::fmt;
use std::future::Future;
use std::io;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use redis::aio::MultiplexedConnection;
use redis::io::tcp::socket2::SockRef;
use redis::{AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinError, JoinSet};

use super::durability::Durability;
use super::errors::not_connected;
use super::gathering::{Gathering, InFlight};
use super::siblings::{self, Siblings};
use super::task::Task;
use crate::backend::{EventSink, Fault, StoreError};
#[cfg(feature = "redis-tls")]
use crate::tls::Connector;

/// The address of a server, and how to log in.
pub(super) struct Server {
    pub(super) info: ConnectionInfo,
    /// Encrypts the connection. `None` for `redis://`, which is never encrypted. With `Some`,
    /// nothing is sent in plain text.
    #[cfg(feature = "redis-tls")]
    pub(super) tls: Option<Connector>,
    pub(super) part: Part,
    /// The disks and replicas that must have a write before it counts. `None` if the server alone
    /// is enough.
    pub(super) durability: Option<Durability>,
    /// The open connections of the client to this address, and to other addresses.
    pub(super) siblings: Arc<Siblings>,
}

/// The role of a server for the client. Error messages depend on it, because they say where to
/// correct something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The URL names this server, and it has the locks.
    Alone,
    /// The URL names this server, and it names the master.
    Sentinel,
    /// Sentinels have named this server, and it has the locks.
    Master,
    /// The URL names this server, and it names the nodes of its cluster.
    Seed,
    /// This server is a node of a cluster, and has some of the locks.
    Node,
    /// The URL names this server, and it votes on the locks with the others.
    Voter,
}

impl Part {
    /// The scheme without TLS, and the scheme with TLS.
    fn schemes(self) -> (&'static str, &'static str) {
        match self {
            Self::Alone => ("redis", "rediss"),
            Self::Sentinel | Self::Master => ("redis+sentinel", "rediss+sentinel"),
            Self::Seed | Self::Node => ("redis+cluster", "rediss+cluster"),
            Self::Voter => ("redlock", "redlock+tls"),
        }
    }
}

/// Ends the task that drives a connection when the last user of the connection is gone.
#[derive(Debug)]
pub(super) struct Driver {
    task: Task,
    /// Nothing is ever sent on this channel. The task has its other end.
    open: watch::Receiver<()>,
    pub(super) in_flight: InFlight,
    /// Whether the last ticket that was taken on this connection had to wait.
    pub(super) has_waited: AtomicBool,
    /// The server, if it is known which one it is: see [`Server::siblings`].
    pub(super) server: Option<Arc<Server>>,
}

impl Driver {
    /// Returns a handle that can end the task earlier.
    pub(super) fn end(&self) -> AbortHandle {
        self.task.end()
    }

    /// Resolves when the connection has ended.
    pub(super) fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut open = self.open.clone();
        async move {
            let _ = open.changed().await; // an error: the other end is gone
        }
    }
}

/// The settings of all connections.
pub(super) fn settings() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        // The core has its own deadlines, on the lease clock. So the driver needs none. Its timers
        // depend on the user's runtime, where they may be paused or off.
        .set_connection_timeout(None)
        .set_response_timeout(None)
        // This many requests can wait until they are written. The default of 50 is less than the
        // number of tasks in one busy process.
        .set_pipeline_buffer_size(1024)
}

impl Server {
    /// Opens a connection that leads to the same server as the other connections of the client to
    /// this address. Ends the others if they lead to an earlier server, and tells `events`. `first`
    /// are the first requests.
    pub(super) async fn open<T, F>(
        self: &Arc<Self>,
        config: AsyncConnectionConfig,
        events: Weak<EventSink>,
        first: impl FnOnce(MultiplexedConnection) -> F,
    ) -> Result<(MultiplexedConnection, Driver, T), StoreError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let dialed = self.siblings.dial();
        let (connection, mut driver) = self.connect(config).await?;
        let run_id = siblings::run_id(connection.clone());
        let (first, run_id) = tokio::try_join!(first(connection.clone()), run_id)?;
        if let Some(run_id) = run_id {
            let at = (dialed, self.info.addr().to_string());
            self.siblings.join(at, run_id, driver.end(), events)?;
            driver.server = Some(Arc::clone(self));
        }
        Ok((connection, driver, first))
    }

    /// Connects once more, and checks that the address still leads to the server of the open
    /// connections. Otherwise it ends them.
    ///
    /// # Errors
    ///
    /// `Retry` if the address leads to another server.
    pub(super) async fn compare(&self) -> Result<(), StoreError> {
        let (connection, _driver) = self.connect(settings()).await?;
        match siblings::run_id(connection).await? {
            Some(run_id) => (self.siblings).compare(&self.info.addr().to_string(), &run_id),
            None => Ok(()),
        }
    }

    /// Connects. The error says what the problem is, and whether a person must correct it.
    pub(super) async fn connect(
        &self,
        config: AsyncConnectionConfig,
    ) -> Result<(MultiplexedConnection, Driver), StoreError> {
        let in_flight = InFlight::default();
        let opened = async {
            let stream = Gathering::new(self.stream().await?, in_flight.clone());
            let settings = self.info.redis_settings();
            // With TLS 1.3 the server checks the client's certificate only after the client has
            // finished the handshake. If the server refuses it, the error comes as the answer to
            // the first request.
            MultiplexedConnection::new_with_config(settings, stream, config).await
        };
        let (connection, driver) = opened.await.map_err(|error| self.failed(error))?;
        let (is_open, open) = watch::channel(());
        let task = Task::spawn(&Handle::current(), async move {
            driver.await;
            drop(is_open);
        });
        let driver = Driver {
            task,
            open,
            in_flight,
            has_waited: AtomicBool::new(false),
            server: None,
        };
        Ok((connection, driver))
    }

    async fn stream(&self) -> io::Result<Box<dyn Stream>> {
        if let ConnectionAddr::Unix(path) = self.info.addr() {
            return Ok(Box::new(tokio::net::UnixStream::connect(path).await?));
        }
        let socket = self.socket().await?;
        #[cfg(feature = "redis-tls")]
        if let Some(tls) = &self.tls {
            return Ok(Box::new(tls.connect(socket).await?));
        }
        Ok(Box::new(socket))
    }

    /// Connects to all addresses of the host at once, and uses the first connection that succeeds.
    async fn socket(&self) -> io::Result<TcpStream> {
        let ConnectionAddr::Tcp(host, port) = self.info.addr() else {
            return Err(io::Error::other("not an address of TCP"));
        };
        let mut tries = JoinSet::new();
        for address in tokio::net::lookup_host((host.as_str(), *port)).await? {
            tries.spawn(TcpStream::connect(address));
        }
        let mut outcome = Err(io::Error::other(
            "the host has no address; check its name in the URL",
        ));
        while let Some(tried) = tries.join_next().await {
            outcome = match tried.map_err(JoinError::try_into_panic) {
                Ok(outcome) => outcome,
                // The task has panicked, for example because the runtime has no I/O driver. The
                // core turns this panic into an error.
                Err(Ok(panic)) => std::panic::resume_unwind(panic),
                Err(Err(ended)) => Err(io::Error::other(ended)),
            };
            if outcome.is_ok() {
                break;
            }
        }
        let socket = outcome?;
        let settings = self.info.tcp_settings();
        socket.set_nodelay(settings.nodelay())?;
        if let Some(keepalive) = settings.keepalive() {
            SockRef::from(&socket).set_tcp_keepalive(keepalive)?;
        }
        Ok(socket)
    }

    /// The meaning of an error while connecting. No request has been sent yet, so no outcome can be
    /// unknown.
    pub(super) fn failed(&self, error: RedisError) -> StoreError {
        if self.part == Part::Sentinel && matches!(error.code(), Some("NOAUTH" | "WRONGPASS")) {
            return self.mistake(format_args!(
                "{error} (the sentinels' own user and password follow the service: \
                 /SERVICE?sentinel_user=USER&sentinel_password=PASSWORD; those in front of the hosts are for the servers)"
            ));
        }
        #[cfg(feature = "redis-tls")]
        if let Some(tls) = &self.tls {
            if let Some(mistake) = tls.mistake(&error) {
                return self.mistake(mistake);
            }
            let error = not_connected(error);
            return self.because(error.fault(), error);
        }
        let hint = match (self.info.addr(), self.part.schemes()) {
            // A socket is never encrypted.
            (ConnectionAddr::Unix(_), _) => String::new(),
            (_, (_, encrypted)) => format!(" (if this port speaks TLS, write {encrypted}://)"),
        };
        if error.kind() == ErrorKind::Parse {
            return self.mistake(format_args!("the server there is not Redis{hint}"));
        }
        // A server that expects TLS drops a connection without TLS in this way. So does a server in
        // trouble.
        if error.is_connection_dropped() && !error.is_connection_refusal() {
            let error = not_connected(error);
            return self.because(error.fault(), format_args!("{error}{hint}"));
        }
        let error = not_connected(error);
        self.because(error.fault(), error)
    }

    pub(super) fn is_encrypted(&self) -> bool {
        #[cfg(feature = "redis-tls")]
        return self.tls.is_some();
        #[cfg(not(feature = "redis-tls"))]
        return false;
    }

    /// An error that a person must correct.
    pub(super) fn mistake(&self, reason: impl fmt::Display) -> StoreError {
        self.because(Fault::Config, reason)
    }

    pub(super) fn because(&self, fault: Fault, reason: impl fmt::Display) -> StoreError {
        let server = self.info.addr();
        let part = match self.part {
            Part::Alone => "",
            Part::Sentinel => "the sentinel ",
            Part::Master => "the master ",
            Part::Seed | Part::Node => "the cluster's node ",
            Part::Voter => "the node ",
        };
        StoreError::new(fault, format!("cannot connect to {part}{server}: {reason}"))
    }
}

/// Shows neither the user nor the password.
impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}/{}",
            self.info.addr(),
            self.info.redis_settings().db()
        )
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}
