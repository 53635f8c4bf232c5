//! TLS for the client library. The library connects to a port on the loopback device. This module
//! forwards the library's bytes to the server over TLS, with the client's certificate files. User
//! and password do not come from the library: this module adds them after the connection is
//! encrypted.
//!
//! The library has TLS of its own. But the library's TLS installs a cryptography provider for the
//! whole process, and panics if there are two to choose from. It also does not report why a
//! handshake failed.
//!
//! No other process may use such a port, because the client's certificate may give access to data
//! that the other process must not see. So only connections of this process are forwarded. Any
//! other connection is closed before its TLS handshake begins. (It would not be enough to check the
//! user. Containers of a pod share the loopback device and often the user number, but not the
//! files.)

mod credentials;

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncWriteExt as _, copy, split};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use zookeeper_client::Client;

use crate::backend::Fault;
use crate::error::Error;
use crate::tls::{Connector, Tls};
use credentials::Credentials;

/// The time limit for making a TLS connection. The library itself gives up after a quarter of the
/// session timeout. This limit ends the dials that the library does not wait for any more.
const DIAL: Duration = Duration::from_secs(5);

/// The pause after the system could not accept a connection (for example because no file descriptor
/// is free).
const PAUSE: Duration = Duration::from_millis(100);

/// The servers, and the TLS configuration for each.
#[derive(Debug)]
pub(super) struct Servers(Vec<Arc<Server>>);

#[derive(Debug)]
struct Server {
    host: String,
    port: u16,
    tls: Connector,
    credentials: Option<Credentials>,
}

/// One local port for each server. The ports are closed when the tunnel is dropped. Connections
/// that were accepted before stay open.
#[derive(Debug)]
pub(super) struct Tunnel {
    hosts: String,
    /// The tasks that accept connections. They end when the tunnel is dropped.
    _doors: JoinSet<()>,
    failures: Arc<Failures>,
}

/// Why the last connection to each server failed, and whether a person must correct something.
#[derive(Debug)]
struct Failures(Mutex<Vec<Option<(Fault, String)>>>);

impl Servers {
    /// Prepares TLS for the servers `h1:2281,[::1]:2281`, with the credentials `user:password` if
    /// they are given. Reads the certificate files once, here.
    pub(super) fn new(hosts: &str, digest: Option<&str>, tls: &Tls) -> Result<Arc<Self>, Error> {
        if cfg!(not(target_os = "linux")) && tls.cert_file.is_some() {
            return Err(Error::config(
                "a client certificate for ZooKeeper needs Linux: elsewhere it is not known which process \
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
            // In a URL an IPv6 address is in brackets.
            let host = host
                .trim_start_matches('[')
                .trim_end_matches(']')
                .to_owned();
            servers.push(Arc::new(Server {
                host,
                port,
                tls,
                credentials: digest.map(Credentials::digest),
            }));
        }
        Ok(Arc::new(Self(servers)))
    }

    pub(super) async fn open(&self) -> io::Result<Tunnel> {
        let mut hosts = Vec::with_capacity(self.0.len());
        let mut doors = JoinSet::new();
        let failures = Arc::new(Failures(Mutex::new(vec![None; self.0.len()])));
        for (number, server) in self.0.iter().enumerate() {
            let door = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            hosts.push(door.local_addr()?.to_string());
            let slot = Slot(Arc::clone(&failures), number);
            doors.spawn(admit(door, Arc::clone(server), slot));
        }
        Ok(Tunnel {
            hosts: hosts.join(","),
            _doors: doors,
            failures,
        })
    }
}

impl Tunnel {
    /// The addresses that the library must connect to.
    pub(super) fn hosts(&self) -> &str {
        &self.hosts
    }

    /// The failure to report. It is a mistake of the client only if every server reports a mistake,
    /// because a single server may be out of reach for a moment.
    pub(super) fn failure(&self) -> Option<(Fault, String)> {
        let failures = self.failures.each();
        let known = failures.iter().flatten();
        let reasons: Vec<&str> = known.map(|(_, reason)| &**reason).collect();
        let is_mistake = |failure: &Option<_>| matches!(failure, Some((Fault::Config, _)));
        let fault = match failures.iter().all(is_mistake) {
            true => Fault::Config,
            false => Fault::Retry,
        };
        (!reasons.is_empty()).then(|| (fault, reasons.join("; ")))
    }

    /// Keeps the ports open as long as the library may connect again. If a port were closed
    /// earlier, another process could get it, and with it the bytes that the library sends to its
    /// server.
    pub(super) fn stay_open_for(self: Arc<Self>, client: &Client) {
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

/// Accepts connections of the library until the tunnel is dropped.
async fn admit(door: TcpListener, server: Arc<Server>, failures: Slot) {
    loop {
        let Ok((inside, from)) = door.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        // The replies to the library are small and come one by one. With Nagle's algorithm each
        // would be delayed by 40 ms.
        let here = inside.set_nodelay(true).and_then(|()| inside.local_addr());
        // The check runs on a blocking thread, because it reads the table of connections from a
        // file, which may be long.
        let ours = tokio::task::spawn_blocking(move || is_ours(from, here?));
        match ours
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)))
        {
            Ok(true) => {
                let (server, failures) = (Arc::clone(&server), failures.clone());
                tokio::spawn(async move { carry(&server, inside, &failures).await });
            }
            Ok(false) => tracing::warn!(%from, "ZooKeeper: refused a connection that is not ours"),
            Err(error) => failures.note(Fault::Retry, format!("no way to the server: {error}")),
        }
    }
}

/// Forwards one connection of the library until either end closes it. If this fails, the library
/// sees only a closed connection. The reason is noted before the connection is closed.
async fn carry(server: &Server, mut inside: TcpStream, failures: &Slot) {
    let dialled = tokio::time::timeout(DIAL, server.dial()).await;
    let outside = match dialled.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
        Ok(outside) => outside,
        Err(error) => return failures.of(server, &error),
    };
    let (mut from_library, mut to_library) = inside.split();
    let (mut from_server, mut to_server) = split(outside);
    let up = async {
        if let Some(credentials) = &server.credentials {
            credentials.show(&mut from_library, &mut to_server).await?;
        }
        copy(&mut from_library, &mut to_server).await?;
        to_server.shutdown().await
    };
    let down = async {
        if server.credentials.is_some() {
            credentials::pass_until_answered(&mut from_server, &mut to_library).await?;
        }
        copy(&mut from_server, &mut to_library).await
    };
    let ended = tokio::select! {
        // If the server ends the connection, it may have sent the reason. The library gets this
        // reason first.
        biased;
        ended = down => ended.map(drop),
        ended = up => ended,
    };
    // With TLS 1.3 the server checks our certificate only after our side of the handshake has
    // ended. So a refusal of the certificate appears only here.
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

/// The place for one server's failure.
#[derive(Clone, Debug)]
struct Slot(Arc<Failures>, usize);

impl Slot {
    fn of(&self, server: &Server, error: &io::Error) {
        if let Some(mistake) = server.tls.mistake(error) {
            // The mistake is logged, because no error reports it if the other servers work.
            tracing::warn!(%server, "ZooKeeper: {mistake}");
            return self.note(
                Fault::Config,
                format!("cannot connect to {server}: {mistake}"),
            );
        }
        // A server without TLS ends the connection in this way. A server with a problem of its own
        // may do the same.
        let hint = match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                " (if this port does not speak TLS, write zookeeper://)"
            }
            _ => "",
        };
        self.note(
            Fault::Retry,
            format!("cannot connect to {server}: {error}{hint}"),
        );
    }

    fn note(&self, fault: Fault, reason: String) {
        self.0.each()[self.1] = Some((fault, reason));
    }
}

impl Failures {
    fn each(&self) -> MutexGuard<'_, Vec<Option<(Fault, String)>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the other end of a connection on this machine is a socket of this process.
#[cfg(target_os = "linux")]
fn is_ours(from: SocketAddr, to: SocketAddr) -> io::Result<bool> {
    let Some(inode) = inode(from, to)? else {
        return Ok(false);
    };
    let socket = format!("socket:[{inode}]");
    for file in std::fs::read_dir("/proc/self/fd")? {
        // A descriptor that is closed at this moment is not the library's: the library keeps its
        // descriptor open while it waits for an answer.
        if std::fs::read_link(file?.path()).is_ok_and(|link| link.as_os_str() == &*socket) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A client certificate is refused on these systems, so another process gains nothing by using this
/// port.
#[cfg(not(target_os = "linux"))]
fn is_ours(_: SocketAddr, _: SocketAddr) -> io::Result<bool> {
    Ok(true)
}

/// The inode of the socket with the address `from`, from the kernel's table of connections: `sl
/// local remote state queues timer retransmits uid timeout inode …`. Addresses are written in the
/// byte order of memory. <https://docs.kernel.org/networking/proc_net_tcp.html>
#[cfg(target_os = "linux")]
fn inode(from: SocketAddr, to: SocketAddr) -> io::Result<Option<String>> {
    let named = |address| match address {
        SocketAddr::V4(v4) => {
            let bytes = u32::from_ne_bytes(v4.ip().octets());
            Ok(format!("{bytes:08X}:{:04X}", v4.port()))
        }
        SocketAddr::V6(_) => Err(io::Error::other("not an address that we listen at")),
    };
    let (from, to) = (named(from)?, named(to)?);
    let table = std::fs::read_to_string("/proc/self/net/tcp")?;
    Ok(table.lines().find_map(|line| {
        let field: Vec<&str> = line.split_whitespace().collect();
        // If the process has closed its end, the state of the socket is not "established" (01) any
        // more, and the socket has no inode.
        let is_it = field.len() >= 10
            && (field[1], field[2], field[3]) == (&from, &to, "01")
            && field[9] != "0";
        is_it.then(|| field[9].to_owned())
    }))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net;

    use super::*;

    #[test]
    fn a_mistake_at_one_server_is_the_clients_only_if_there_is_one_at_each() {
        let failures = Arc::new(Failures(Mutex::new(vec![None; 2])));
        let tunnel = Tunnel {
            hosts: String::new(),
            _doors: JoinSet::new(),
            failures: Arc::clone(&failures),
        };
        let slots = [0, 1].map(|number| Slot(Arc::clone(&failures), number));
        assert_eq!(tunnel.failure(), None);

        slots[0].note(Fault::Config, "expired".into());
        let (fault, reason) = tunnel.failure().unwrap();
        assert_eq!((fault, &*reason), (Fault::Retry, "expired"));

        slots[1].note(Fault::Retry, "away".into());
        let (fault, reason) = tunnel.failure().unwrap();
        assert_eq!((fault, &*reason), (Fault::Retry, "expired; away"));

        slots[1].note(Fault::Config, "unknown CA".into());
        assert_eq!(tunnel.failure().unwrap().0, Fault::Config);
    }

    #[test]
    fn a_connection_is_ours_while_our_end_of_it_is_open() {
        let door = net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = door.local_addr().unwrap();
        let made = net::TcpStream::connect(at).unwrap();
        let (_accepted, from) = door.accept().unwrap();

        assert!(is_ours(from, at).unwrap());

        drop(made);
        assert!(!is_ours(from, at).unwrap(), "closed, so of nobody");
    }

    /// The other process is a shell of the same user on this machine.
    #[tokio::test]
    async fn no_other_process_is_carried_to_the_server() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let hosts = format!("127.0.0.1:{}", server.local_addr().unwrap().port());
        let tunnel = Servers::new(&hosts, None, &Tls::default()).unwrap();
        let tunnel = tunnel.open().await.unwrap();
        let port = tunnel.hosts().rsplit_once(':').unwrap().1.to_owned();

        // The shell ends when its connection is closed, without having read anything.
        let stranger = tokio::task::spawn_blocking(move || {
            let script = format!("exec 3<>/dev/tcp/127.0.0.1/{port} && cat <&3");
            std::process::Command::new("bash")
                .args(["-c", &script])
                .output()
                .unwrap()
        });
        let told = tokio::select! {
            told = stranger => told.unwrap(),
            _ = server.accept() => panic!("somebody else's connection was carried"),
        };
        assert!(told.stdout.is_empty() && told.status.success(), "{told:?}");

        // A connection of this process is forwarded.
        let _ours = TcpStream::connect(tunnel.hosts()).await.unwrap();
        server.accept().await.unwrap();
    }
}
