//! A TCP proxy in front of a server. It cuts, freezes and delays connections, and loses replies.
//!
//! The proxy runs on its own thread and runtime. So a test that blocks its runtime does not stop
//! the proxy. Each method has taken effect when it returns. `pump` handles one connection.

mod pump;

use std::io;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use self::pump::Broken;
use crate::ports::listen;

/// A proxy on its own loopback port. Dropping the value closes its port and its connections.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    /// `None` only while the proxy is dropped: dropping the rules ends the thread.
    rules: Option<watch::Sender<Rules>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// The traffic over the proxy's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The connections that were accepted. Connections that were refused during a cut are not
    /// counted.
    pub connections: u64,
    /// Bytes from clients that were passed on.
    pub bytes_up: u64,
    /// Bytes from the server that were passed on.
    pub bytes_down: u64,
    /// The number of reads from clients that returned data. For a client that sends one request at
    /// a time, it is the number of its requests.
    pub chunks_up: u64,
    /// Requests that contained the marker of [`Proxy::lose_replies`], with or without a reply.
    pub recognised: u64,
    /// Reads from clients that contained the marker of [`Proxy::delay_requests`].
    pub delayed: u64,
    /// Connections that [`Proxy::lose_replies`] has ended.
    pub replies_lost: u64,
}

/// The rules for every connection. A change takes effect at once.
#[derive(Clone, Copy, Debug, Default)]
struct Rules {
    cut: bool,
    clients_cut: bool,
    frozen: bool,
    events_lost: bool,
    delay_up: Duration,
    delay_down: Duration,
}

impl Rules {
    fn cut_for_clients(&self) -> bool {
        self.cut || self.clients_cut
    }
}

/// The state that all connections share, besides the rules.
#[derive(Debug, Default)]
struct Shared {
    /// The port of the server that new connections lead to.
    server: AtomicU16,
    /// The number of connections that are open now.
    open: Mutex<usize>,
    closed_one: Condvar,
    trap: Mutex<Option<Trap>>,
    /// The texts of [`Proxy::rename`].
    renamed: Mutex<Option<(Vec<u8>, Vec<u8>)>>,
    /// The marker and the delay of [`Proxy::delay_requests`].
    delayed_requests: Mutex<Option<(Vec<u8>, Duration)>>,
    connections: AtomicU64,
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
    chunks_up: AtomicU64,
    recognised: AtomicU64,
    delayed: AtomicU64,
    replies_lost: AtomicU64,
}

/// The next `remaining` requests that contain the marker get no reply.
#[derive(Debug)]
struct Trap {
    marker: Vec<u8>,
    remaining: usize,
}

impl Proxy {
    /// Makes a proxy to a server on a loopback port. The server may be down.
    pub fn to(server: u16) -> Self {
        let listener = listen();
        let port = listener.local_addr().unwrap().port();
        let (rules, obeyed) = watch::channel(Rules::default());
        let shared = Arc::new(Shared {
            server: server.into(),
            ..Shared::default()
        });
        let thread = thread::Builder::new().name(format!("proxy-{port}")).spawn({
            let shared = shared.clone();
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .unwrap();
                runtime.block_on(accept(listener, obeyed, shared)).unwrap();
            }
        });
        Self {
            port,
            rules: Some(rules),
            shared,
            thread: Some(thread.unwrap()),
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL by which a Redis client reaches the server through the proxy.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Resets every connection. Until [`restore`](Self::restore), resets each new connection as
    /// soon as it is accepted.
    pub fn cut(&self) {
        self.change(|rules| rules.cut = true);
        self.wait_until_closed();
    }

    /// Does the same as [`cut`](Self::cut), for clients only. The server's side of each connection
    /// stays open. The proxy sends nothing on it, and closes it at the end.
    pub fn cut_clients(&self) {
        self.change(|rules| rules.clients_cut = true);
        self.wait_until_closed();
    }

    /// Leads new connections to another server. Open connections stay.
    pub fn lead_to(&self, server: u16) {
        self.shared.server.store(server, Ordering::Relaxed);
    }

    /// Accepts connections again.
    pub fn restore(&self) {
        self.change(|rules| (rules.cut, rules.clients_cut) = (false, false));
    }

    /// Holds back all bytes in both directions. Connections stay open, and new ones are accepted.
    pub fn freeze(&self) {
        self.change(|rules| rules.frozen = true);
    }

    /// Ends a freeze, and passes on the bytes that were held back.
    pub fn thaw(&self) {
        self.change(|rules| rules.frozen = false);
    }

    /// From now on, drops the events of a ZooKeeper server. Call this while the server sends
    /// nothing.
    pub fn lose_events(&self) {
        self.change(|rules| rules.events_lost = true);
    }

    /// Delays bytes that are read from now on: `up` from client to server, `down` from server to
    /// client.
    pub fn delay(&self, up: Duration, down: Duration) {
        self.change(|rules| (rules.delay_up, rules.delay_down) = (up, down));
    }

    /// Delays the requests that contain the marker, if it comes in one piece, and that are read from
    /// now on. Requests behind them on the same connection are delayed too. Replaces an earlier
    /// call.
    pub fn delay_requests(&self, marker: &[u8], delay: Duration) {
        assert!(
            !marker.is_empty(),
            "a marker is what the request is recognised by"
        );
        *self.shared.delayed_requests() = Some((marker.to_vec(), delay));
    }

    /// Loses the replies to the next `count` requests that contain the marker. The server gets
    /// these requests and carries them out. The proxy drops everything that the server sends after
    /// one of these requests, and resets the connection of the client. Replies to earlier requests
    /// that are in flight on this connection are lost too. Replaces an earlier call.
    pub fn lose_replies(&self, marker: &[u8], count: usize) {
        assert!(
            !marker.is_empty(),
            "a marker is what the request is recognised by"
        );
        *self.shared.trap() = Some(Trap {
            marker: marker.to_vec(),
            remaining: count,
        });
    }

    /// From now on, replaces the first text by the second in replies, if it comes in one piece.
    /// Both texts must have the same length.
    pub fn rename(&self, from: &[u8], to: &[u8]) {
        assert_eq!(
            from.len(),
            to.len(),
            "lengths in front of the text would be wrong"
        );
        *self.shared.renamed() = Some((from.to_vec(), to.to_vec()));
    }

    pub fn traffic(&self) -> Traffic {
        // Waits until a write in progress has been counted.
        self.rules.as_ref().unwrap().send_if_modified(|_| false);
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            connections: read(&self.shared.connections),
            bytes_up: read(&self.shared.bytes_up),
            bytes_down: read(&self.shared.bytes_down),
            chunks_up: read(&self.shared.chunks_up),
            recognised: read(&self.shared.recognised),
            delayed: read(&self.shared.delayed),
            replies_lost: read(&self.shared.replies_lost),
        }
    }

    /// The number of connections that are open now.
    pub fn open_connections(&self) -> usize {
        *self.shared.open()
    }

    fn wait_until_closed(&self) {
        let open = self.shared.open();
        drop(
            self.shared
                .closed_one
                .wait_while(open, |open| *open > 0)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    fn change(&self, change: impl FnOnce(&mut Rules)) {
        // Connections write while they borrow the rules. So this returns only when no connection is
        // writing.
        self.rules.as_ref().unwrap().send_modify(change);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.rules = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn accept(
    listener: std::net::TcpListener,
    mut rules: watch::Receiver<Rules>,
    shared: Arc<Shared>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    loop {
        let client = tokio::select! {
            accepted = listener.accept() => accepted?.0,
            changed = rules.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return Ok(()), // the proxy was dropped, and its connections end with the runtime
            },
        };
        // The connection is counted while the rules are borrowed. So either this code sees the cut,
        // or the cut sees this connection among the open ones.
        let open = {
            let rules = rules.borrow();
            if rules.cut_for_clients() {
                reset(&client);
                continue;
            }
            shared.count_in()
        };
        let server = shared.server.load(Ordering::Relaxed);
        tokio::spawn(serve(client, server, rules.clone(), open));
    }
}

/// Serves one connection from accept to close.
async fn serve(mut client: TcpStream, port: u16, rules: watch::Receiver<Rules>, open: Open) {
    let mut server = None;
    let connection = async {
        let server = server.insert(TcpStream::connect(("127.0.0.1", port)).await?);
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        pump::through(&mut client, server, &rules, &open.0).await
    };
    let mut until_cut = rules.clone();
    let end = tokio::select! {
        end = connection => end,
        rules = until_cut.wait_for(Rules::cut_for_clients) => match rules {
            Ok(rules) if !rules.cut => Err(Broken::ClientCut),
            _ => Err(Broken::Failed),
        },
    };
    match (end, server) {
        (Ok(()), _) => {}
        (Err(Broken::ReplyLost), server) => {
            open.0.replies_lost.fetch_add(1, Ordering::Relaxed);
            reset(&client);
            drop((client, open));
            if let Some(server) = server {
                pump::drain(server).await;
            }
        }
        (Err(Broken::ClientCut), server) => {
            reset(&client);
            drop((client, open));
            let _ = until_cut.wait_for(|rules| !rules.cut_for_clients()).await;
            drop(server);
        }
        // If one side has failed, or after a cut, the other side gets a reset too.
        (Err(Broken::Failed), server) => {
            reset(&client);
            server.iter().for_each(reset);
        }
    }
}

/// Makes the close of this stream a reset, which drops data that has not been sent yet.
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger(); // fails only if the peer has reset it already
}

/// Counts a connection as open until this value is dropped.
struct Open(Arc<Shared>);

impl Shared {
    fn count_in(self: &Arc<Self>) -> Open {
        *self.open() += 1;
        self.connections.fetch_add(1, Ordering::Relaxed);
        Open(self.clone())
    }

    fn open(&self) -> MutexGuard<'_, usize> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn trap(&self) -> MutexGuard<'_, Option<Trap>> {
        self.trap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn renamed(&self) -> MutexGuard<'_, Option<(Vec<u8>, Vec<u8>)>> {
        self.renamed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn delayed_requests(&self) -> MutexGuard<'_, Option<(Vec<u8>, Duration)>> {
        self.delayed_requests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        *self.0.open() -= 1;
        self.0.closed_one.notify_all();
    }
}

#[cfg(test)]
mod tests;
