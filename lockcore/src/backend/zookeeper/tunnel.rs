//! TLS for the client library: it connects to a port on the loopback device, and what it says there
//! goes on to the server over TLS, as the client's files say.
//!
//! The library could do all of it, but its TLS installs a cryptography provider for the whole process
//! (where there are two to choose from, it panics), and does not say why a handshake failed.
//!
//! Nobody else may get through such a port: the client's certificate may open what is closed to him.
//! So only connections of processes of our own user are let in, who could read the key as well. The
//! others are not passed on, not even to a handshake.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncWriteExt as _, copy, split};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use zookeeper_client::Client;

use crate::backend::Fault;
use crate::error::Error;
use crate::tls::{Connector, Tls};

/// For a connection with TLS to stand. The library gives up by itself, after a quarter of the session
/// timeout; this is for the attempts that it has turned away from.
const DIAL: Duration = Duration::from_secs(5);

/// After the system would not give a connection (no more files, say).
const PAUSE: Duration = Duration::from_millis(100);

/// The servers, and how each is recognised.
#[derive(Debug)]
pub(super) struct Servers(Vec<Arc<Server>>);

#[derive(Debug)]
struct Server {
    host: String,
    port: u16,
    tls: Connector,
}

/// A port here for each server. Closed when this is dropped; what has come in by then goes on.
#[derive(Debug)]
pub(super) struct Tunnel {
    hosts: String,
    /// Tasks that end with it.
    _doors: JoinSet<()>,
    failures: Arc<Failures>,
}

/// Why the last connection failed, and whether that is for a person to mend. A mistake is not
/// forgotten for another server that is merely away.
#[derive(Debug, Default)]
struct Failures(Mutex<Option<(Fault, String)>>);

impl Servers {
    /// Of `h1:2281,[::1]:2281`. Reads the files, once.
    pub(super) fn new(hosts: &str, tls: &Tls) -> Result<Arc<Self>, Error> {
        if cfg!(not(target_os = "linux")) && tls.cert_file.is_some() {
            return Err(Error::config(
                "a client certificate for ZooKeeper needs Linux: elsewhere it is not known which user \
                 a connection on this machine is from",
            ));
        }
        let mut servers: Vec<Arc<Server>> = Vec::new();
        for address in hosts.split(',') {
            let (host, port) = address.rsplit_once(':').unwrap_or_default();
            let port = port.parse().map_err(|_| {
                Error::config(format!("\"{port}\" is no port of a ZooKeeper server"))
            })?;
            let tls = match servers.first() {
                Some(first) => first.tls.for_host(host)?,
                None => Connector::new(tls, host)?,
            };
            // An address of IPv6 stands in brackets in a URL.
            let host = host
                .trim_start_matches('[')
                .trim_end_matches(']')
                .to_owned();
            servers.push(Arc::new(Server { host, port, tls }));
        }
        Ok(Arc::new(Self(servers)))
    }

    pub(super) async fn open(&self) -> io::Result<Tunnel> {
        let mut hosts = Vec::with_capacity(self.0.len());
        let mut doors = JoinSet::new();
        let failures = Arc::<Failures>::default();
        for server in &self.0 {
            let door = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            hosts.push(door.local_addr()?.to_string());
            doors.spawn(admit(door, Arc::clone(server), Arc::clone(&failures)));
        }
        Ok(Tunnel {
            hosts: hosts.join(","),
            _doors: doors,
            failures,
        })
    }
}

impl Tunnel {
    /// Where the library is to connect to.
    pub(super) fn hosts(&self) -> &str {
        &self.hosts
    }

    pub(super) fn failure(&self) -> Option<(Fault, String)> {
        self.failures.last().clone()
    }

    /// As long as the library may connect again. Not shorter: somebody else could get a port that we
    /// give up, and with it what the library says to its server.
    pub(super) fn stay_open_for(self, client: &Client) {
        let mut states = client.state_watcher();
        let mut state = client.state();
        tokio::spawn(async move {
            while !state.is_terminated() {
                state = states.changed().await;
            }
            drop(self);
        });
    }
}

/// Lets the library in, as often as it comes.
async fn admit(door: TcpListener, server: Arc<Server>, failures: Arc<Failures>) {
    loop {
        let Ok((inside, from)) = door.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let here = inside.local_addr();
        // The table of connections is read from a file that may be long.
        let ours = tokio::task::spawn_blocking(move || is_ours(from, here?));
        match ours.await.map_err(io::Error::other).flatten() {
            Ok(true) => {
                let (server, failures) = (Arc::clone(&server), Arc::clone(&failures));
                tokio::spawn(async move { carry(&server, inside, &failures).await });
            }
            Ok(false) => tracing::warn!(%from, "ZooKeeper: refused a connection that is not ours"),
            Err(error) => failures.note(Fault::Retry, format!("no way to the server: {error}")),
        }
    }
}

/// Carries one connection of the library, until either end closes it. The library sees why it could
/// not be carried as a connection that was closed; the reason is noted before that.
async fn carry(server: &Server, mut inside: TcpStream, failures: &Failures) {
    let dialled = tokio::time::timeout(DIAL, server.dial()).await;
    let outside = match dialled.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(outside) => outside,
        Err(error) => return failures.of(server, &error),
    };
    let (mut from_library, mut to_library) = inside.split();
    let (mut from_server, mut to_server) = split(outside);
    let up = async {
        copy(&mut from_library, &mut to_server).await?;
        to_server.shutdown().await
    };
    let ended = tokio::select! {
        ended = up => ended,
        ended = copy(&mut from_server, &mut to_library) => ended.map(drop),
    };
    // With TLS 1.3 the server judges our certificate when our handshake is over.
    if let Err(error) = ended {
        failures.of(server, &error);
    }
}

impl Server {
    async fn dial(&self) -> io::Result<tokio_rustls::client::TlsStream<TcpStream>> {
        let socket = TcpStream::connect((self.host.as_str(), self.port)).await?;
        socket.set_nodelay(true)?;
        self.tls.connect(socket).await
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

impl Failures {
    fn of(&self, server: &Server, error: &io::Error) {
        if let Some(mistake) = server.tls.mistake(error) {
            // The others may serve, and then nobody gets to see it.
            tracing::warn!(%server, "ZooKeeper: {mistake}");
            return self.note(
                Fault::Config,
                format!("cannot connect to {server}: {mistake}"),
            );
        }
        // How a server without TLS ends what it takes for a request; one in trouble does the same.
        let hint = match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                " (if this port does not speak TLS, the scheme is zookeeper)"
            }
            _ => "",
        };
        self.note(
            Fault::Retry,
            format!("cannot connect to {server}: {error}{hint}"),
        );
    }

    fn note(&self, fault: Fault, reason: String) {
        let mut last = self.last();
        if !matches!(&*last, Some((Fault::Config, _))) || fault == Fault::Config {
            *last = Some((fault, reason));
        }
    }

    fn last(&self) -> std::sync::MutexGuard<'_, Option<(Fault, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a connection on this machine comes from a process of our own user.
#[cfg(target_os = "linux")]
fn is_ours(from: SocketAddr, to: SocketAddr) -> io::Result<bool> {
    is_of(rustix::process::geteuid().as_raw(), from, to)
}

/// Without a client certificate, which is refused here, nobody gets further than on his own.
#[cfg(not(target_os = "linux"))]
fn is_ours(_: SocketAddr, _: SocketAddr) -> io::Result<bool> {
    Ok(true)
}

/// By the kernel's table of connections, which has the end that is `from`: `sl local remote state
/// queues timer retransmits uid timeout inode …`, addresses as the bytes lie in memory.
/// <https://docs.kernel.org/networking/proc_net_tcp.html>
#[cfg(target_os = "linux")]
fn is_of(user: u32, from: SocketAddr, to: SocketAddr) -> io::Result<bool> {
    let named = |address| match address {
        SocketAddr::V4(v4) => {
            let bytes = u32::from_ne_bytes(v4.ip().octets());
            Ok(format!("{bytes:08X}:{:04X}", v4.port()))
        }
        SocketAddr::V6(_) => Err(io::Error::other("not an address that we listen at")),
    };
    let (from, to, user) = (named(from)?, named(to)?, user.to_string());
    let table = std::fs::read_to_string("/proc/self/net/tcp")?;
    Ok(table.lines().any(|line| {
        let field: Vec<&str> = line.split_whitespace().collect();
        // An end that its process has closed belongs to nobody and shows as root's: it is not
        // "established" (01) any more, and has no inode.
        field.len() >= 10
            && (field[1], field[2], field[3]) == (&from, &to, "01")
            && field[7] == user
            && field[9] != "0"
    }))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net;

    use super::*;

    #[test]
    fn a_connection_is_of_the_user_whose_process_has_made_it() {
        let user = rustix::process::geteuid().as_raw();
        let door = net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = door.local_addr().unwrap();
        let made = net::TcpStream::connect(at).unwrap();
        let (_accepted, from) = door.accept().unwrap();

        assert!(is_ours(from, at).unwrap());
        assert!(!is_of(user + 1, from, at).unwrap());

        drop(made);
        for user in [user, 0] {
            assert!(!is_of(user, from, at).unwrap(), "closed, so of nobody");
        }
    }
}
