//! Opening a connection: a socket, TLS over it for `rediss://`, and the driver's protocol over that.
//!
//! The driver could do all of it, but its TLS installs a cryptography provider for the whole process
//! and reads the system's certificates at each connect, also when others are to be trusted.

use std::fmt;
use std::io;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::socket2::SockRef;
use redis::{AsyncConnectionConfig, ConnectionAddr, ConnectionInfo, ErrorKind, RedisError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::{AbortHandle, JoinError, JoinSet};

use super::errors::not_connected;
use super::gathering::{Gathering, InFlight};
use crate::backend::{Fault, StoreError};
#[cfg(feature = "redis-tls")]
use crate::tls::Connector;

/// Where the server is and how to get in.
pub(super) struct Server {
    pub(super) info: ConnectionInfo,
    /// `None` is `redis://`, which is never encrypted; with it nothing goes out in plain text.
    #[cfg(feature = "redis-tls")]
    pub(super) tls: Option<Connector>,
}

/// Ends the task that drives a connection when the last who uses that has gone.
#[derive(Debug)]
pub(super) struct Driver {
    task: AbortHandle,
    pub(super) in_flight: InFlight,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Server {
    /// Connects, or says what is in the way and whether somebody must remove it.
    pub(super) async fn connect(
        &self,
        config: AsyncConnectionConfig,
    ) -> Result<(MultiplexedConnection, Driver), StoreError> {
        let in_flight = InFlight::default();
        let opened = async {
            let stream = Gathering::new(self.stream().await?, in_flight.clone());
            let settings = self.info.redis_settings();
            // With TLS 1.3 the server judges our certificate when our handshake is over; what it
            // found is its answer to the first request.
            MultiplexedConnection::new_with_config(settings, stream, config).await
        };
        let (connection, driver) = opened.await.map_err(|error| self.failed(error))?;
        let task = tokio::spawn(driver).abort_handle();
        Ok((connection, Driver { task, in_flight }))
    }

    async fn stream(&self) -> io::Result<Box<dyn Stream>> {
        let socket = self.socket().await?;
        #[cfg(feature = "redis-tls")]
        if let Some(tls) = &self.tls {
            return Ok(Box::new(tls.connect(socket).await?));
        }
        Ok(Box::new(socket))
    }

    /// To whichever address of the host answers first.
    async fn socket(&self) -> io::Result<TcpStream> {
        let ConnectionAddr::Tcp(host, port) = self.info.addr() else {
            return Err(io::Error::other("not an address of TCP"));
        };
        let mut tries = JoinSet::new();
        for address in tokio::net::lookup_host((host.as_str(), *port)).await? {
            tries.spawn(TcpStream::connect(address));
        }
        let mut outcome = Err(io::Error::other("the host has no address"));
        while let Some(tried) = tries.join_next().await {
            outcome = match tried.map_err(JoinError::try_into_panic) {
                Ok(outcome) => outcome,
                // A runtime without its I/O driver, say: the core has a word for that.
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

    /// What a failure to get in means. Nothing has been asked yet, so nothing can be unknown.
    pub(super) fn failed(&self, error: RedisError) -> StoreError {
        #[cfg(feature = "redis-tls")]
        if let Some(tls) = &self.tls {
            if let Some(mistake) = tls.mistake(&error) {
                return self.mistake(mistake);
            }
            let error = not_connected(error);
            return self.because(error.fault(), error);
        }
        if error.kind() == ErrorKind::Parse {
            return self.mistake(
                "what answers is not Redis; if this port speaks TLS, the scheme is rediss",
            );
        }
        // How a server that expects TLS ends what is none; a server in trouble does the same.
        let hint = match error.is_connection_dropped() && !error.is_connection_refusal() {
            true => " (if this port speaks TLS, the scheme is rediss)",
            false => "",
        };
        let error = not_connected(error);
        self.because(error.fault(), format_args!("{error}{hint}"))
    }

    /// Redis takes the first bytes of TLS for a command that is not complete.
    pub(super) fn silence(&self) -> &'static str {
        #[cfg(feature = "redis-tls")]
        if self.tls.is_some() {
            return "; a server without TLS is silent too: redis:// is for it";
        }
        ""
    }

    /// Something that a person must mend.
    pub(super) fn mistake(&self, reason: impl fmt::Display) -> StoreError {
        self.because(Fault::Config, reason)
    }

    pub(super) fn because(&self, fault: Fault, reason: impl fmt::Display) -> StoreError {
        let server = self.info.addr();
        StoreError::new(fault, format!("cannot connect to {server}: {reason}"))
    }
}

/// Neither user nor password.
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
