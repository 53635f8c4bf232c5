//! Tests with an operator that asks for the lock of a request. With `OnRevoke::Cancel` the layer
//! stops the request at once, and otherwise at the end of the grace.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::convert::Infallible;
use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::*;
use futures_util::{FutureExt, StreamExt, stream};
use http::{Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use lockcore::testing::Store;
use lockcore::{ErrorKind, Locks, LostReason, OnLost, OnRevoke, Release};
use lockcore_tower::{BoxError, Key, Keys, LockLayer, WorkLayer};
use tokio::sync::Notify;
use tower::{Layer, ServiceExt, service_fn};

const NAME: &str = "order:42";

/// Much longer than a step of a test takes.
const LONG: Duration = Duration::from_secs(60);

/// Asks the holder of the lock of [`NAME`] to give it up, as an operator does. Returns when the
/// holder has given it up.
async fn ask_for(locks: &Locks, grace: Duration) {
    let holder = locks.inspect(NAME).await.unwrap()[0].ticket;
    let asked = locks.revoke(NAME, holder, grace, "maintenance");
    assert_eq!(in_time(asked).await.unwrap(), Release::Released);
}

/// Both kinds of a layer for [`NAME`]: for one lock, and for several.
fn layers(locks: &Locks) -> [LockLayer; 2] {
    let names = Keys::from_fn(2, |_| Ok(vec![NAME.to_owned(), "order:7".to_owned()]));
    [
        LockLayer::new(locks.clone(), Key::from_fn(|_| Ok(Some(NAME.to_owned())))),
        LockLayer::all(locks.clone(), names),
    ]
}

/// Parts that are always ready.
fn endless_parts() -> StreamBody<impl futures_util::Stream<Item = Result<Frame<Bytes>, BoxError>>> {
    StreamBody::new(stream::repeat_with(|| {
        Ok::<_, BoxError>(Frame::data(Bytes::from("part")))
    }))
}

/// Holds back everything that the client sends after the drop of its work, and so the release
/// first.
#[derive(Clone)]
struct Stops {
    store: Store,
    has_stopped: Arc<AtomicBool>,
}

struct Work(Stops);

impl Stops {
    /// A store, a client of the store, and the value that holds back what this client sends.
    fn new() -> (Store, Self, Locks) {
        let store = Store::new();
        let there = store.another_process();
        let locks = there.client().unwrap();
        let has_stopped = Arc::default();
        let stops = Self {
            store: there,
            has_stopped,
        };
        (store, stops, locks)
    }

    fn work(&self) -> Work {
        Work(self.clone())
    }

    /// Polls until the work is dropped, and once more. All polls must be pending, because no
    /// release has arrived.
    async fn nothing_comes_out<T>(&self, mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) {
        in_time(async {
            loop {
                let is_last = self.has_stopped.load(Ordering::SeqCst);
                let waits = poll_fn(|cx| Poll::Ready(poll(cx).is_pending())).await;
                assert!(waits, "it does not wait for the release");
                if is_last {
                    return;
                }
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    /// Lets everything arrive that was held back.
    fn go_on(&self) {
        self.has_stopped.store(false, Ordering::SeqCst);
        self.store.thaw();
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.0.store.freeze();
        self.0.has_stopped.store(true, Ordering::SeqCst);
    }
}

/// Begins a request. When the request has the lock, asks the holder to give the lock up.
async fn begin_and_ask<F: Future>(operator: &Locks, mut request: Pin<&mut F>, entered: &Notify) {
    let began = async {
        tokio::select! {
            _ = &mut request => panic!("it is answered"),
            () = entered.notified() => {}
        }
    };
    in_time(began).await;
    let operator = operator.clone();
    tokio::spawn(async move { ask_for(&operator, LONG).await });
}

fn assert_revoked(error: &BoxError) {
    let error = error.downcast_ref::<lockcore::Error>();
    let kind = error.expect("an error of the lock").kind();
    assert_eq!(kind, ErrorKind::Lost(LostReason::Revoked));
}

#[tokio::test]
async fn a_handler_is_stopped_as_soon_as_somebody_asks() {
    let locks = memory();
    for layer in layers(&locks) {
        let layer = layer.on_revoke(OnRevoke::Cancel);
        let witness = Witness::of(&locks, NAME);
        let (entered, service) = never_ends(&witness);
        let service = layer.layer(service);
        let request = tokio::spawn(service.oneshot(get("/")));
        in_time(entered.notified()).await;

        ask_for(&locks, LONG).await;

        let response = in_time(request).await.unwrap().unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let problem = problem_of(response, "lock-lost").await;
        assert_eq!(problem["key"], NAME);
        assert_eq!(witness.saw_tickets(), Some(1), "it goes before the lock");
        nothing_is_left(&locks, NAME).await;
    }
}

#[tokio::test]
async fn a_handler_that_may_finish_has_the_time_that_it_is_given() {
    let locks = memory();
    let (entered, leave) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let service = by_path(&locks).layer(service_fn({
        let (entered, leave) = (Arc::clone(&entered), Arc::clone(&leave));
        move |request: In| {
            let (entered, leave) = (Arc::clone(&entered), Arc::clone(&leave));
            async move {
                let held = held_in(&request);
                entered.notify_one();
                let asked = held.revoked().await;
                leave.notified().await;
                Ok::<_, Infallible>(Response::new(asked.why))
            }
        }
    }));
    let request = tokio::spawn(service.clone().oneshot(get("/order:42")));
    in_time(entered.notified()).await;
    let asks = tokio::spawn({
        let locks = locks.clone();
        async move { ask_for(&locks, LONG).await }
    });
    leave.notify_one();
    let response = in_time(request).await.unwrap().unwrap();
    let said = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(said, "maintenance");
    in_time(asks).await.unwrap();

    // Another handler does not end before its time is over.
    let request = tokio::spawn(service.oneshot(get("/order:42")));
    in_time(entered.notified()).await;
    let (began, grace) = (Instant::now(), Duration::from_millis(300));
    ask_for(&locks, grace).await;
    let response = in_time(request).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(began.elapsed() >= grace);
    nothing_is_left(&locks, NAME).await;
}

/// A client that repeats the request at once finds the lock free.
#[tokio::test]
async fn the_lock_is_free_when_the_answer_to_a_stopped_request_arrives() {
    let (store, stops, locks) = Stops::new();
    let operator = store.client().unwrap();
    for layer in layers(&locks) {
        let layer = layer.on_revoke(OnRevoke::Cancel);
        let entered = Arc::new(Notify::new());
        let service = layer.layer(service_fn({
            let (entered, stops) = (Arc::clone(&entered), stops.clone());
            move |_: In| {
                let (work, entered) = (stops.work(), Arc::clone(&entered));
                async move {
                    entered.notify_one();
                    pending::<()>().await;
                    drop(work);
                    Ok::<_, Infallible>(Response::new(endless_parts()))
                }
            }
        }));
        let mut request = Box::pin(service.oneshot(get("/")));
        begin_and_ask(&operator, request.as_mut(), &entered).await;

        stops
            .nothing_comes_out(|cx| request.as_mut().poll(cx))
            .await;
        assert!(tickets(&operator, NAME).await > 0);
        stops.go_on();

        let response = in_time(request).await.unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(tickets(&operator, NAME).await, 0);
    }
}

/// The lock is valid, so only the check whether the lock was asked back can end this body.
#[tokio::test]
async fn a_body_that_is_always_ready_ends_as_soon_as_somebody_asks() {
    let locks = memory();
    for layer in layers(&locks) {
        let layer = layer.on_revoke(OnRevoke::Cancel);
        let service = layer.layer(service_fn(async |_: In| {
            Ok::<_, Infallible>(Response::new(endless_parts()))
        }));
        let response = service.oneshot(get("/")).await.unwrap();
        let mut body = response.into_body();
        assert!(body.frame().await.unwrap().is_ok());

        // The operator has a runtime of its own, because this runtime runs no other task until the
        // body has ended.
        let asks = std::thread::spawn({
            let locks = locks.clone();
            move || {
                let mut runtime = tokio::runtime::Builder::new_current_thread();
                runtime
                    .enable_all()
                    .build()
                    .unwrap()
                    .block_on(ask_for(&locks, LONG));
            }
        });
        let began = Instant::now();
        let error = loop {
            let part = body.frame().now_or_never().expect("always ready");
            if let Err(error) = part.expect("not the end") {
                break error;
            }
            assert!(began.elapsed() < SOON, "it goes on");
            std::thread::yield_now();
        };

        assert_revoked(&error);
        drop(body);
        tokio::task::spawn_blocking(|| asks.join().unwrap())
            .await
            .unwrap();
        nothing_is_left(&locks, NAME).await;
    }
}

/// A server does not poll a body while its client reads nothing.
#[tokio::test]
async fn a_body_that_nobody_polls_ends_as_soon_as_somebody_asks() {
    let locks = memory();
    for policy in [OnLost::Cancel, OnLost::Signal] {
        let layer = by_path(&locks).on_revoke(OnRevoke::Cancel).on_lost(policy);
        let witness = Witness::of(&locks, NAME);
        let inside = witness.clone();
        let service = layer.layer(service_fn(move |_: In| {
            let inside = inside.inside();
            let parts = stream::once(async move {
                pending::<()>().await;
                drop(inside);
                Ok::<_, BoxError>(Frame::data(Bytes::new()))
            });
            async { Ok::<_, Infallible>(Response::new(StreamBody::new(Box::pin(parts)))) }
        }));
        let response = service.oneshot(get("/order:42")).await.unwrap();
        let mut body = response.into_body();
        assert!(body.frame().now_or_never().is_none());

        ask_for(&locks, LONG).await;

        assert_eq!(witness.saw_tickets(), Some(1), "it goes before the lock");
        assert_revoked(&in_time(body.frame()).await.unwrap().unwrap_err());
        assert!(in_time(body.frame()).await.is_none());
    }
}

/// In one case the task of the body ends it, and in the other case a poll ends it.
#[tokio::test]
async fn the_lock_is_free_when_the_end_of_a_stopped_body_arrives() {
    let (store, stops, locks) = Stops::new();
    let operator = store.client().unwrap();
    for layer in layers(&locks) {
        for is_ready in [false, true] {
            let layer = layer.clone().on_revoke(OnRevoke::Cancel);
            let work = stops.clone();
            let service = layer.layer(service_fn(move |_: In| {
                let work = work.work();
                let parts = endless_parts().filter(move |_| {
                    let _own = &work;
                    match is_ready {
                        true => std::future::ready(true).left_future(),
                        false => pending().right_future(),
                    }
                });
                async { Ok::<_, Infallible>(Response::new(StreamBody::new(parts))) }
            }));
            let response = in_time(service.oneshot(get("/"))).await.unwrap();
            let mut body = Box::pin(response.into_body());
            let asked = tokio::spawn({
                let operator = operator.clone();
                async move { ask_for(&operator, LONG).await }
            });

            if is_ready {
                // The body makes parts until it is stopped.
                in_time(async {
                    while let Some(part) = body.frame().now_or_never() {
                        let part = part.expect("not the end");
                        part.expect("it does not wait for the release");
                        tokio::task::yield_now().await;
                    }
                })
                .await;
            }
            stops
                .nothing_comes_out(|cx| http_body::Body::poll_frame(body.as_mut(), cx))
                .await;
            assert!(tickets(&operator, NAME).await > 0);
            stops.go_on();

            let error = in_time(body.frame()).await.unwrap().unwrap_err();
            assert_revoked(&error);
            assert_eq!(tickets(&operator, NAME).await, 0);
            in_time(asked).await.unwrap();
        }
    }
}

/// A body of at most two parts has ended before the head of the response is sent. So it does not
/// hold the lock while a client stops reading.
#[tokio::test]
async fn a_body_that_is_complete_needs_no_task() {
    let locks = memory();
    let tasks = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
    };
    // The connection to the store has tasks too.
    nothing_is_left(&locks, NAME).await;
    let before = tasks();
    for layer in layers(&locks) {
        let layer = layer.on_revoke(OnRevoke::Cancel);
        let data = || Full::new(Bytes::from("done"));
        let whole = layer.layer(service_fn(move |_: In| async move {
            Ok::<_, Infallible>(Response::new(data()))
        }));
        let response = whole.oneshot(get("/")).await.unwrap();
        assert_eq!((tasks(), tickets(&locks, NAME).await), (before, 0));
        assert_eq!(
            response.into_body().collect().await.unwrap().to_bytes(),
            "done"
        );

        let trailers = || http::HeaderMap::from_iter([(http::header::AGE, 1.into())]);
        let with_trailers = layer.layer(service_fn(move |_: In| async move {
            let trailers = async move { Some(Ok(trailers())) };
            Ok::<_, Infallible>(Response::new(data().with_trailers(trailers)))
        }));
        let response = with_trailers.oneshot(get("/")).await.unwrap();
        assert_eq!((tasks(), tickets(&locks, NAME).await), (before, 0));
        let whole = response.into_body().collect().await.unwrap();
        assert_eq!(whole.trailers(), Some(&trailers()));
        assert_eq!(whole.to_bytes(), "done");

        let endless = layer.layer(service_fn(async |_: In| {
            Ok::<_, Infallible>(Response::new(endless_parts()))
        }));
        let response = endless.oneshot(get("/")).await.unwrap();
        assert_eq!(tasks(), before + 1, "somebody has to end it");
        drop(response);
        nothing_is_left(&locks, NAME).await;
        in_time(async {
            while tasks() > before {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

/// After other losses the body continues, and can learn of them.
#[tokio::test]
async fn a_body_that_only_hears_of_a_loss_goes_on_although_it_stops_when_asked() {
    let store = Store::new();
    let locks = store.client().unwrap();
    let layer = by_path(&locks)
        .on_revoke(OnRevoke::Cancel)
        .on_lost(OnLost::Signal);
    let service = layer.layer(service_fn(async |_: In| {
        Ok::<_, Infallible>(Response::new(endless_parts()))
    }));
    let response = service.oneshot(get("/order:42")).await.unwrap();
    let mut body = response.into_body();

    store.freeze();
    store.clock().advance(LONG);

    for _ in 0..3 {
        assert!(in_time(body.frame()).await.unwrap().is_ok());
    }
    store.thaw();
}

#[tokio::test]
async fn a_job_is_stopped_as_soon_as_somebody_asks() {
    let locks = memory();
    let lock = locks.mutex(NAME).on_revoke(OnRevoke::Cancel);
    let entered = Arc::new(Notify::new());
    let service = WorkLayer::with_lock(move |(): &()| Ok::<_, BoxError>(Some(lock.clone()))).layer(
        service_fn({
            let entered = Arc::clone(&entered);
            move |()| {
                let entered = Arc::clone(&entered);
                async move {
                    entered.notify_one();
                    pending::<Result<(), BoxError>>().await
                }
            }
        }),
    );
    let job = tokio::spawn(service.oneshot(()));
    in_time(entered.notified()).await;

    ask_for(&locks, LONG).await;

    assert_revoked(&in_time(job).await.unwrap().unwrap_err());
    nothing_is_left(&locks, NAME).await;
}

#[tokio::test]
async fn the_lock_is_free_when_the_answer_to_a_stopped_job_arrives() {
    let (store, stops, locks) = Stops::new();
    let operator = store.client().unwrap();
    let lock = locks.mutex(NAME).on_revoke(OnRevoke::Cancel);
    let entered = Arc::new(Notify::new());
    let service = WorkLayer::with_lock(move |(): &()| Ok::<_, BoxError>(Some(lock.clone()))).layer(
        service_fn({
            let (entered, stops) = (Arc::clone(&entered), stops.clone());
            move |()| {
                let (work, entered) = (stops.work(), Arc::clone(&entered));
                async move {
                    entered.notify_one();
                    pending::<()>().await;
                    drop(work);
                    Ok::<_, BoxError>(())
                }
            }
        }),
    );
    let mut job = Box::pin(service.oneshot(()));
    begin_and_ask(&operator, job.as_mut(), &entered).await;

    stops.nothing_comes_out(|cx| job.as_mut().poll(cx)).await;
    assert_eq!(tickets(&operator, NAME).await, 1);
    stops.go_on();

    assert_revoked(&in_time(job).await.unwrap_err());
    assert_eq!(tickets(&operator, NAME).await, 0);
}
