//! The code that the tests share: a store, requests, and ways to look at a lock without sleeping.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

use std::convert::Infallible;
use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Empty, StreamBody};
use lockcore::{ErrorKind, Guard, Held, Locks};
use lockcore_tower::{Key, LockLayer};
use tokio::sync::Notify;
use tower::{Layer, Service, ServiceExt, service_fn};

/// Longer than each step of a test takes, and shorter than a lease that nobody renews.
pub const SOON: Duration = Duration::from_secs(5);

pub type In = Request<Empty<Bytes>>;

pub fn memory() -> Locks {
    Locks::connect("memory:").unwrap()
}

/// Locks the path of the request without its slash. A request for `/` takes no lock.
pub fn by_path(locks: &Locks) -> LockLayer {
    let key = Key::from_fn(|request| {
        Ok(Some(request.uri.path()[1..].to_owned()).filter(|name| !name.is_empty()))
    });
    LockLayer::new(locks.clone(), key)
}

pub fn get(path: &str) -> In {
    Request::get(path).body(Empty::new()).unwrap()
}

pub async fn hold(locks: &Locks, name: &str) -> Guard {
    locks.mutex(name).try_acquire().await.unwrap()
}

/// Ends all locks of this client by a shutdown. The shutdown stops work one operation timeout before
/// its end. At half of that time before its end it would release locks although their work runs; no
/// test may take so long.
pub async fn lose(locks: &Locks) {
    // On a busy machine the releases may take longer than this. Even so, the locks are lost.
    if let Err(error) = locks.shutdown(Duration::from_secs(3)).await {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
}

pub async fn in_time<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(SOON, future)
        .await
        .expect("should not take so long")
}

/// The number of holders and waiters of a name, at the store and inside this client.
pub async fn tickets(locks: &Locks, name: &str) -> usize {
    let places = locks.inspect(name).await.unwrap();
    let local: u32 = places.iter().map(|place| place.local_waiters).sum();
    places.len() + local as usize
}

/// Waits until there are `count` tickets. The store has no event for it, so this asks again and
/// again.
pub async fn until_tickets(locks: &Locks, name: &str, count: usize) {
    in_time(async {
        while tickets(locks, name).await != count {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Begins a future again and again, and drops it after 0, 1, 2 ... polls, until one ends within its
/// polls. Returns the number of these polls. Checks that each dropped future leaves nothing behind.
pub async fn drop_after_each_poll<F: Future>(
    locks: &Locks,
    names: &[&str],
    begin: impl Fn() -> F,
) -> usize {
    let mut polls = 0;
    loop {
        let mut begun = Box::pin(begin());
        let ends = (0..polls).any(|_| begun.as_mut().now_or_never().is_some());
        drop(begun);
        for name in names {
            nothing_is_left(locks, name).await;
        }
        if ends {
            return polls;
        }
        polls += 1;
    }
}

/// As [`drop_after_each_poll`], for a request. The handler and the body yield, so that each of
/// their steps needs a poll.
pub async fn drop_request_after_each_poll(
    locks: &Locks,
    names: &[&str],
    layer: &LockLayer,
    path: &str,
) -> usize {
    locks.ready(SOON).await.unwrap();
    let service = layer.layer(service_fn(async |_: In| {
        tokio::task::yield_now().await;
        let parts = futures_util::stream::unfold(0, async |part| {
            tokio::task::yield_now().await;
            (part < 2).then_some((
                Ok::<_, Infallible>(Frame::data(Bytes::from("part"))),
                part + 1,
            ))
        });
        Ok::<_, Infallible>(Response::new(StreamBody::new(parts)))
    }));
    let whole = async || {
        let response = service.clone().oneshot(get(path)).await.unwrap();
        response.into_body().collect().await.unwrap().to_bytes()
    };
    drop_after_each_poll(locks, names, whole).await
}

/// Waits in line for the lock. If a ticket was left behind, this would wait for a whole lease.
pub async fn nothing_is_left(locks: &Locks, name: &str) {
    let guard = locks
        .mutex(name)
        .wait(SOON)
        .acquire()
        .await
        .expect("something was left behind");
    guard.release().await.unwrap();
    assert_eq!(tickets(locks, name).await, 0);
}

pub async fn problem<B>(response: Response<B>) -> serde_json::Value
where
    B: Body,
    B::Error: std::fmt::Debug,
{
    assert_eq!(
        response.headers()["content-type"],
        "application/problem+json"
    );
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    for member in ["type", "title", "detail"] {
        assert!(problem[member].is_string(), "{member}: {problem}");
    }
    problem
}

/// The problem of a response, which is explained in the section `kind` of the answers.
pub async fn problem_of<B>(response: Response<B>, kind: &str) -> serde_json::Value
where
    B: Body,
    B::Error: std::fmt::Debug,
{
    let problem = problem(response).await;
    let section = problem["type"].as_str().unwrap().rsplit_once('#');
    assert_eq!(section.map(|(_, kind)| kind), Some(kind), "{problem}");
    problem
}

/// The whole body of a response.
pub async fn whole<B>(response: Response<B>) -> Bytes
where
    B: Body,
    B::Error: std::fmt::Debug,
{
    let body = in_time(response.into_body().collect()).await;
    body.unwrap().to_bytes()
}

/// The held lock that a handler finds in its request.
pub fn held_in(request: &In) -> Held {
    request.extensions().get::<Held>().unwrap().clone()
}

/// A handler that never ends. The test can wait until the handler runs. When the handler is
/// dropped, the witness counts the tickets.
pub fn never_ends(
    witness: &Witness,
) -> (
    Arc<Notify>,
    impl Service<In, Response = Response<String>, Error = Infallible, Future: Send>
    + Clone
    + Send
    + use<>,
) {
    let entered = Arc::new(Notify::new());
    let service = service_fn({
        let (witness, entered) = (witness.clone(), Arc::clone(&entered));
        move |_: In| {
            let (inside, entered) = (witness.inside(), Arc::clone(&entered));
            async move {
                entered.notify_one();
                pending::<()>().await;
                drop(inside);
                Ok(Response::new(String::new()))
            }
        }
    });
    (entered, service)
}

/// How long the witness waits for a release that was sent too early. The keeper needs a fraction of
/// this time for a release.
const TOO_EARLY: Duration = Duration::from_millis(20);

/// Counts the tickets at the store at the moment when a handler or a body is dropped. That handler
/// or body owns an [`Inside`] of this witness.
#[derive(Clone)]
pub struct Witness {
    locks: Locks,
    name: String,
    seen: Arc<Mutex<Option<usize>>>,
}

pub struct Inside(Witness);

impl Witness {
    pub fn of(locks: &Locks, name: &str) -> Self {
        Self {
            locks: locks.clone(),
            name: name.to_owned(),
            seen: Arc::default(),
        }
    }

    pub fn inside(&self) -> Inside {
        Inside(self.clone())
    }

    /// `None` if no `Inside` was dropped yet.
    pub fn saw_tickets(&self) -> Option<usize> {
        *self.seen.lock().unwrap()
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let since = Instant::now();
        loop {
            // The memory store answers at once on a connection that is up.
            let places = self.0.locks.inspect(self.0.name.as_str()).now_or_never();
            let seen = places.expect("connected").unwrap().len();
            *self.0.seen.lock().unwrap() = Some(seen);
            if seen == 0 || since.elapsed() > TOO_EARLY {
                return;
            }
            std::thread::yield_now();
        }
    }
}
