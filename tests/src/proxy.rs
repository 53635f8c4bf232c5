//! A TCP proxy in front of a server: cuts, freezes and delays what goes through, and loses replies.
//!
//! It runs on a thread and a runtime of its own, so that a test that blocks its runtime does not stop it. Every verb has
//! taken effect when it returns. What happens inside one connection is in `pump`.

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

/// A proxy on a loopback port of its own; gone, with its connections, with its value.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    /// `None` only while it is dropped: the end of the rules ends the thread.
    rules: Option<watch::Sender<Rules>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What went through, over the proxy's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Connections accepted, without those refused while cut.
    pub connections: u64,
    /// Bytes from clients that were passed on.
    pub bytes_up: u64,
    /// Bytes from the server that were passed on.
    pub bytes_down: u64,
    /// Reads from clients that brought something: for a client that sends one request at a time, its requests.
    pub chunks_up: u64,
    /// Requests that [`Proxy::lose_replies`] was looking for and saw, answered or not.
    pub recognised: u64,
    /// Connections that were ended by [`Proxy::lose_replies`].
    pub replies_lost: u64,
}

/// The rules that every connection obeys, now and after each change.
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

/// What the connections share beside the rules.
#[derive(Debug, Default)]
struct Shared {
    /// The port that new connections lead to.
    server: AtomicU16,
    /// Connections that are open now.
    open: Mutex<usize>,
    closed_one: Condvar,
    trap: Mutex<Option<Trap>>,
    connections: AtomicU64,
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
    chunks_up: AtomicU64,
    recognised: AtomicU64,
    replies_lost: AtomicU64,
}

/// The next `remaining` requests that contain the marker get no reply.
#[derive(Debug)]
struct Trap {
    marker: Vec<u8>,
    remaining: usize,
}

impl Proxy {
    /// A proxy to a server on a loopback port, which need not be up yet.
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

    /// Where a Redis client finds the server through the proxy.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Resets every connection and, until [`restore`](Self::restore), each new one as soon as it is accepted.
    pub fn cut(&self) {
        self.change(|rules| rules.cut = true);
        self.wait_until_closed();
    }

    /// The same for clients, and the server is not told: its ends of the connections stay, and nothing is said on them
    /// any more. The end of that is a close.
    pub fn cut_clients(&self) {
        self.change(|rules| rules.clients_cut = true);
        self.wait_until_closed();
    }

    /// New connections lead to another server; those that are open stay where they are.
    pub fn lead_to(&self, server: u16) {
        self.shared.server.store(server, Ordering::Relaxed);
    }

    /// Lets connections in again.
    pub fn restore(&self) {
        self.change(|rules| (rules.cut, rules.clients_cut) = (false, false));
    }

    /// Holds back all bytes in both directions; connections stay, and new ones are accepted.
    pub fn freeze(&self) {
        self.change(|rules| rules.frozen = true);
    }

    /// Passes on what was held back, and all else.
    pub fn thaw(&self) {
        self.change(|rules| rules.frozen = false);
    }

    /// A ZooKeeper server's events go nowhere from now on. For a moment when it says nothing.
    pub fn lose_events(&self) {
        self.change(|rules| rules.events_lost = true);
    }

    /// Delays what is read from now on: `up` from client to server, `down` back.
    pub fn delay(&self, up: Duration, down: Duration) {
        self.change(|rules| (rules.delay_up, rules.delay_down) = (up, down));
    }

    /// The next `count` requests that contain the marker reach the server, which serves them, but their connection ends
    /// without a reply: whatever the server says after such a request is swallowed and the client gets a reset. Replies
    /// that were still due for earlier requests on that connection are lost with it. Replaces what was asked before.
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

    pub fn traffic(&self) -> Traffic {
        // Waits for a write that is just being counted.
        self.rules.as_ref().unwrap().send_if_modified(|_| false);
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            connections: read(&self.shared.connections),
            bytes_up: read(&self.shared.bytes_up),
            bytes_down: read(&self.shared.bytes_down),
            chunks_up: read(&self.shared.chunks_up),
            recognised: read(&self.shared.recognised),
            replies_lost: read(&self.shared.replies_lost),
        }
    }

    /// Connections that are open now.
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
        // Returns only when no connection is in the middle of a write: they write with the rules borrowed.
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
                Err(_) => return Ok(()), // the proxy was dropped; its connections go with the runtime
            },
        };
        // Counted with the rules borrowed: a cut is either seen here, or sees this connection among the open ones.
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

/// One connection from accept to close.
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
        // One side's failure, or the cut: the other side learns it as a reset too.
        (Err(Broken::Failed), server) => {
            reset(&client);
            server.iter().for_each(reset);
        }
    }
}

/// Its close will be a reset, and what is still to be sent is forgotten.
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger(); // fails only when the peer has reset it already
}

/// A connection that is counted as open.
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
}

impl Drop for Open {
    fn drop(&mut self) {
        *self.0.open() -= 1;
        self.0.closed_one.notify_all();
    }
}

#[cfg(test)]
mod tests;
