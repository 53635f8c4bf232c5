//! Requests whose lock an operator asks for: with `OnRevoke::Cancel` they are stopped at once, otherwise when the time
//! that they are given is over.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::*;
use futures_util::{FutureExt, stream};
use http::{Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use lockcore::{ErrorKind, Locks, LostReason, OnLost, OnRevoke, Release};
use lockcore_tower::{BoxError, Key, Keys, LockLayer, WorkLayer};
use tokio::sync::Notify;
use tower::{Layer, ServiceExt, service_fn};

const NAME: &str = "order:42";

/// Much longer than a step of a test takes.
const LONG: Duration = Duration::from_secs(60);

/// Asks for the lock of [`NAME`], as an operator does, and returns when its holder has given it up.
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
        let (entered, inside) = (Arc::new(Notify::new()), witness.clone());
        let service = layer.layer(service_fn({
            let entered = Arc::clone(&entered);
            move |_: In| {
                let (inside, entered) = (inside.inside(), Arc::clone(&entered));
                async move {
                    entered.notify_one();
                    pending::<()>().await;
                    drop(inside);
                    Ok::<_, Infallible>(Response::new(endless_parts()))
                }
            }
        }));
        let request = tokio::spawn(service.oneshot(get("/")));
        in_time(entered.notified()).await;

        ask_for(&locks, LONG).await;

        let response = in_time(request).await.unwrap().unwrap();
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
        let problem = problem(response).await;
        let kind = problem["type"].as_str().unwrap();
        assert!(kind.ends_with("#lock-lost"), "{problem}");
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
                let held = request.extensions().get::<lockcore::Held>().unwrap();
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

    // Another does not leave, until its time is over.
    let request = tokio::spawn(service.oneshot(get("/order:42")));
    in_time(entered.notified()).await;
    let (began, grace) = (Instant::now(), Duration::from_millis(300));
    ask_for(&locks, grace).await;
    let response = in_time(request).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(began.elapsed() >= grace);
    nothing_is_left(&locks, NAME).await;
}

/// The lock is still valid, so only a look at the request for it can end this body.
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

        // On a runtime of its own: this one runs no other task until the body has ended.
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

/// It hears of other losses, and goes on then.
#[tokio::test]
async fn a_body_that_only_hears_of_a_loss_goes_on_although_it_stops_when_asked() {
    let store = lockcore::testing::Store::new();
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
