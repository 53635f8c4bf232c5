//! Tests with clients that are killed while they wait for a lock or hold it. The tests measure the
//! time until the lock is free.
//!
//! The layer learns of the end of a client from the server, so the tests are about both. The server
//! is `axum::serve`, which uses hyper. `cargo test --all-features --test killed -- --nocapture`
//! prints the table.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::fmt;
use std::future::pending;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::routing::post;
use bytes::Bytes;
use common::*;
use futures_util::{StreamExt, stream};
use http_body_util::Full;
use hyper_util::rt::{TokioExecutor, TokioIo};
use lockcore::Locks;
use lockcore_tower::{Key, LockLayer};
use tokio::net::TcpListener;
use tokio::sync::Notify;

const NAME: &str = "order:42";
const PATH: &str = "/orders/42";

/// Ends the hold of a client if the server does not notice that the client has died.
const MAX_HOLD: Duration = Duration::from_secs(10);

/// The server needs a few milliseconds to notice the end of a client. This bound is for a busy
/// machine, and is much less than the longest hold.
const AT_ONCE: Duration = Duration::from_secs(5);

/// The time that a busy machine may need on top of the longest hold.
const BUSY: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Http1,
    /// HTTP/1.1 with a second request after the first.
    Pipelined,
    Http2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Killed {
    InLine,
    InTheHandler,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    way: Way,
    body: usize,
    killed: Killed,
    body_first: bool,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            way,
            body,
            killed,
            body_first,
        } = self;
        let read = if *body_first {
            "read first"
        } else {
            "as it comes"
        };
        write!(f, "{way:?} | {body} bytes | {read} | {killed:?}")
    }
}

impl Case {
    /// Whether it is certain that the server notices the end of this client at once. It is if the
    /// server has read everything and waits for more. The server usually reads a small body before
    /// the handler, but not always.
    fn is_noticed(&self) -> bool {
        match self.way {
            // The server always reads the connection, and resets its streams when it closes.
            Way::Http2 => true,
            Way::Http1 => self.body == 0 || self.body_first,
            Way::Pipelined => false,
        }
    }
}

const BODIES: [usize; 3] = [0, 5_000, 5_000_000];

#[tokio::test(flavor = "multi_thread")]
async fn the_lock_of_a_client_that_was_killed_is_free_when_that_is_noticed() {
    if let Ok(order) = std::env::var(CLIENT) {
        return client(&order).await;
    }
    let mut cases = Vec::new();
    for way in [Way::Http1, Way::Pipelined, Way::Http2] {
        for body in BODIES {
            for body_first in [false, true] {
                for killed in [Killed::InLine, Killed::InTheHandler] {
                    cases.push(Case {
                        way,
                        body,
                        killed,
                        body_first,
                    });
                }
            }
        }
    }

    // Many cases run at once, because the slow ones only wait.
    let measured = stream::iter(cases)
        .map(|case| async move { (case, until_free(case).await) })
        .buffered(18);
    let measured: Vec<_> = measured.collect().await;

    println!("| connection | body | which is | killed | free after |\n|---|---|---|---|---|");
    for (case, took) in &measured {
        println!("| {case} | {took:.3?} |");
    }
    for (case, took) in measured {
        let most = match case.is_noticed() {
            true => AT_ONCE,
            false => MAX_HOLD + BUSY,
        };
        assert!(took <= most, "{case}: {took:?}");
    }
}

/// Returns the time from the kill until another client has the lock.
async fn until_free(case: Case) -> Duration {
    let store = Locks::builder().url("memory:").op_timeout(MAX_HOLD);
    let locks = store.build().unwrap();
    let (address, entered) = serve(&locks, case.body_first).await;
    let other = match case.killed {
        Killed::InLine => Some(hold(&locks, NAME).await),
        Killed::InTheHandler => None,
    };

    let mut client = Client::start(case, address);
    match case.killed {
        Killed::InLine => until_tickets(&locks, NAME, 2).await,
        Killed::InTheHandler => entered.notified().await,
    }
    client.kill();
    let since = Instant::now();
    drop(other);

    let lock = locks.mutex(NAME).wait(MAX_HOLD * 10);
    let guard = lock.acquire().await.unwrap();
    let took = since.elapsed();
    guard.release().await.unwrap();
    took
}

/// A server with a handler that never answers and does not look at the body. With `body_first`, the
/// layer reads it.
async fn serve(locks: &Locks, body_first: bool) -> (SocketAddr, Arc<Notify>) {
    let entered = Arc::new(Notify::new());
    let handler = post({
        let entered = Arc::clone(&entered);
        async move |request: Request| {
            entered.notify_one();
            pending::<()>().await;
            drop(request);
        }
    });
    let layer = LockLayer::new(locks.clone(), Key::path("id").prefix("order:"))
        .wait(MAX_HOLD * 10)
        .ttl(MAX_HOLD * 10)
        .max_hold(MAX_HOLD);
    let handler = match body_first {
        true => handler.route_layer(layer.read_body_first(BODIES[2], MAX_HOLD * 10)),
        false => handler.route_layer(layer),
    };
    let app = Router::new().route("/orders/{id}", handler);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, app).await });
    (address, entered)
}

// ---- the client: this program once more, as a process of its own

const CLIENT: &str = "LOCKCORE_TEST_CLIENT";

struct Client(Child);

impl Client {
    fn start(case: Case, address: SocketAddr) -> Self {
        let name = "the_lock_of_a_client_that_was_killed_is_free_when_that_is_noticed";
        let client = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(CLIENT, format!("{:?} {} {address}", case.way, case.body))
            // The client ends when this pipe closes, and so when this process ends.
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn();
        Self(client.unwrap())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The client process: it sends its request and then does nothing more.
async fn client(order: &str) {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(1);
    });
    let words: Vec<_> = order.split(' ').collect();
    let [way, body, address] = words[..] else {
        panic!("{order}");
    };
    let body = vec![0; body.parse().unwrap()];
    let address: SocketAddr = address.parse().unwrap();
    if way == "Http2" {
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let io = TokioIo::new(stream);
        let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), io);
        let (mut sender, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        let request = http::Request::post(format!("http://{address}{PATH}"));
        let request = request.body(Full::<Bytes>::from(body)).unwrap();
        let answer = sender.send_request(request).await;
        panic!("{answer:?}");
    }
    let mut stream = TcpStream::connect(address).unwrap();
    let length = body.len();
    write!(
        stream,
        "POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n"
    )
    .unwrap();
    stream.write_all(&body).unwrap();
    if way == "Pipelined" {
        write!(stream, "GET {PATH} HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    }
    pending().await
}
