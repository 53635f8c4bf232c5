//! Tests of a request until the head of its response. The tests of bodies are in `bodies`, and
//! those of axum and of real connections in `axum`.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use common::*;
use futures_util::FutureExt;
use http::{HeaderName, HeaderValue, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use lockcore::Locks;
use lockcore::backend::{
    self, Answer, Connection, Enqueued, Fault, Name, Request, StoreError, TicketInfo,
};
use lockcore::testing::{Store, Verb, around};
use lockcore_tower::{Key, LockLayer};
use tokio::sync::{Barrier, Notify};
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_test::mock;

type Out = Response<Full<Bytes>>;

fn ok() -> Out {
    Out::new("done".into())
}

async fn unreached(_: In) -> Result<Out, Infallible> {
    panic!("the handler should not be called")
}

#[tokio::test]
async fn a_held_key_is_answered_with_409_and_retry_after() {
    let locks = memory();
    let _other = hold(&locks, "order:42").await;

    let service = by_path(&locks)
        .wait(Duration::from_millis(20))
        .layer(service_fn(unreached));
    let response = in_time(service.oneshot(get("/order:42"))).await.unwrap();

    assert_eq!(response.status(), StatusCode::CONFLICT);
    assert_eq!(response.headers()["retry-after"], "1");
    let problem = problem_of(response, "lock-held").await;
    assert_eq!(problem["status"], 409);
    assert_eq!(problem["key"], "order:42");
    // The keeper takes the waiter out of the line.
    until_tickets(&locks, "order:42", 1).await;
}

#[tokio::test]
async fn try_only_does_not_wait() {
    let locks = memory();
    let _other = hold(&locks, "order:42").await;

    // The client's own wait is longer than `in_time` allows.
    let service = by_path(&locks).try_only().layer(service_fn(unreached));
    let response = in_time(service.oneshot(get("/order:42"))).await.unwrap();

    assert_eq!(response.status(), StatusCode::CONFLICT);
    assert_eq!(response.headers()["retry-after"], "1");
}

#[tokio::test]
async fn a_request_waits_until_the_key_is_free() {
    let locks = memory();
    let other = hold(&locks, "order:42").await;
    let (service, mut handle) = mock::pair::<In, Out>();
    let service = by_path(&locks).wait(SOON).layer(service);

    let response = tokio::spawn(service.oneshot(get("/order:42")));
    until_tickets(&locks, "order:42", 2).await;
    assert!(handle.next_request().now_or_never().is_none());

    other.release().await.unwrap();
    let (_, respond) = in_time(handle.next_request()).await.unwrap();
    respond.send_response(ok());
    assert_eq!(response.await.unwrap().unwrap().status(), StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_for_one_key_never_overlap() {
    let locks = memory();
    let inside = Arc::new(AtomicUsize::new(0));
    let service = by_path(&locks).layer(service_fn(move |_: In| {
        let inside = Arc::clone(&inside);
        async move {
            let others = inside.fetch_add(1, Ordering::SeqCst);
            tokio::task::yield_now().await;
            inside.fetch_sub(1, Ordering::SeqCst);
            Ok::<_, Infallible>(Out::new(others.to_string().into()))
        }
    }));

    let requests = (0..50).map(|_| {
        let service = service.clone();
        tokio::spawn(async move {
            let response = service.oneshot(get("/order:42")).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
            response.into_body().collect().await.unwrap().to_bytes()
        })
    });
    for others in in_time(futures_util::future::join_all(requests)).await {
        assert_eq!(others.unwrap(), "0");
    }
}

#[tokio::test]
async fn requests_for_two_keys_overlap() {
    let locks = memory();
    let both_inside = Arc::new(Barrier::new(2));
    let service = by_path(&locks).layer(service_fn(move |_: In| {
        let both_inside = Arc::clone(&both_inside);
        async move {
            both_inside.wait().await;
            Ok::<_, Infallible>(ok())
        }
    }));

    let (one, two) = in_time(async {
        tokio::join!(
            service.clone().oneshot(get("/order:1")),
            service.clone().oneshot(get("/order:2"))
        )
    })
    .await;

    assert_eq!(one.unwrap().status(), StatusCode::OK);
    assert_eq!(two.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn a_request_without_a_key_passes_through() {
    // The store fails every request, so an answer shows that no request was sent to the store.
    let locks = broken(Fault::Refused);
    let service = by_path(&locks).layer(service_fn(|request: In| async move {
        assert!(request.extensions().get::<lockcore::Held>().is_none());
        Ok::<_, Infallible>(ok())
    }));

    let response = service.oneshot(get("/")).await.unwrap();

    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(http_body::Body::size_hint(response.body()).exact(), Some(4));
    assert_eq!(
        response.into_body().collect().await.unwrap().to_bytes(),
        "done"
    );
}

#[tokio::test]
async fn the_handler_finds_the_lock_in_the_extensions() {
    let locks = memory();
    let service = by_path(&locks).layer(service_fn(|request: In| async move {
        let held = request.extensions().get::<lockcore::Held>().unwrap();
        assert!(held.is_valid());
        Ok::<_, Infallible>(Out::new(held.name().to_owned().into()))
    }));

    let response = service.oneshot(get("/order:42")).await.unwrap();

    assert_eq!(
        response.into_body().collect().await.unwrap().to_bytes(),
        "order:42"
    );
}

#[tokio::test]
async fn the_lock_is_not_taken_before_the_call() {
    let locks = memory();
    let mut service = by_path(&locks).layer(service_fn(unreached));

    service.ready().await.unwrap();
    assert_eq!(tickets(&locks, "order:42").await, 0);

    // A future that is not polled takes no lock either.
    let response = service.call(get("/order:42"));
    assert_eq!(tickets(&locks, "order:42").await, 0);
    drop(response);
}

#[tokio::test]
async fn the_service_that_was_made_ready_is_the_one_that_is_called() {
    let locks = memory();
    let (service, mut handle) = mock::pair::<In, Out>();
    let mut service = by_path(&locks).layer(service);
    handle.allow(1);

    service.ready().await.unwrap();
    // The mock panics when a clone that is not ready is called.
    let response = tokio::spawn(service.call(get("/order:42")));
    let (_, respond) = in_time(handle.next_request()).await.unwrap();
    respond.send_response(ok());

    assert_eq!(response.await.unwrap().unwrap().status(), StatusCode::OK);
}

/// If a waiting request kept its permit, requests for one key would block the requests for all
/// other keys.
#[tokio::test]
async fn a_request_that_waits_for_its_lock_keeps_no_place_in_the_service() {
    let locks = memory();
    let other = hold(&locks, "order:42").await;
    let limited = ConcurrencyLimitLayer::new(1).layer(service_fn(|_: In| async {
        tokio::task::yield_now().await;
        Ok::<_, Infallible>(ok())
    }));
    let mut service = by_path(&locks).wait(SOON * 2).layer(limited);
    let next = service.clone();

    // This caller keeps its service, and so the permit that the service has reserved.
    in_time(service.ready()).await.unwrap();
    let waits = tokio::spawn(service.call(get("/order:42")));
    until_tickets(&locks, "order:42", 2).await;

    for path in ["/order:43", "/"] {
        let response = in_time(next.clone().oneshot(get(path))).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
    }
    other.release().await.unwrap();
    let response = in_time(waits).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    drop(service);
}

/// A handler has the only permit of the service, and waits for a lock. The request that holds this
/// lock waits for the permit.
#[tokio::test(start_paused = true)]
async fn a_request_waits_for_its_service_no_longer_than_for_its_lock() {
    let deadline = HeaderName::from_static("deadline");
    let in_a_second = |locks: &Locks| by_path(locks).wait(Duration::from_secs(1));
    let by_its_deadline = |locks: &Locks| by_path(locks).wait(SOON * 2).deadline_header(&deadline);

    let after = refused_after(in_a_second).await;
    assert!((1_900..1_910).contains(&after.as_millis()), "{after:?}");
    let after = refused_after(by_its_deadline).await;
    assert!((900..=1_000).contains(&after.as_millis()), "{after:?}");
}

/// Waits 900 ms for a lock, and then for the service. Returns after how long the request is refused.
async fn refused_after(layer: impl FnOnce(&Locks) -> LockLayer) -> Duration {
    let store = Store::new();
    // The wait for the lock uses the clock of the store, so it does not end. The wait for the
    // service uses tokio's clock.
    store.clock().stop();
    let locks = store.client().unwrap();
    let other = hold(&locks, "order:2").await;
    let entered = Arc::new(Notify::new());
    let limited = ConcurrencyLimitLayer::new(1).layer(service_fn({
        let (locks, entered) = (locks.clone(), Arc::clone(&entered));
        move |_: In| {
            let (locks, entered) = (locks.clone(), Arc::clone(&entered));
            async move {
                entered.notify_one();
                nothing_is_left(&locks, "order:2").await;
                Ok::<_, Infallible>(ok())
            }
        }
    }));
    let service = layer(&locks).layer(limited);

    let mut request = get("/order:2");
    let second = HeaderValue::from_static("1000");
    request.headers_mut().insert("deadline", second);
    let began = tokio::time::Instant::now();
    let waits = tokio::spawn(service.clone().oneshot(request));
    until_tickets(&locks, "order:2", 2).await;
    let first = tokio::spawn(service.oneshot(get("/order:1")));
    in_time(entered.notified()).await;
    tokio::time::advance(Duration::from_millis(900)).await;
    other.release().await.unwrap();

    let refused = in_time(waits).await.unwrap().unwrap();
    let after = began.elapsed();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let problem = problem(refused).await;
    assert!(problem["detail"].as_str().unwrap().contains("not ready"));
    let first = in_time(first).await.unwrap().unwrap();
    assert_eq!(first.status(), StatusCode::OK);
    after
}

/// The request has given its permit back while the store answered. The lock is free, so a wait of
/// zero for the lock is no reason to refuse the request.
#[tokio::test(start_paused = true)]
async fn a_request_that_does_not_wait_for_its_lock_waits_for_its_service() {
    let store = Store::new();
    let locks = store.client().unwrap();
    locks.ready(SOON).await.unwrap();
    let ends = Arc::new(Notify::new());
    let limited = ConcurrencyLimitLayer::new(1).layer(service_fn({
        let ends = Arc::clone(&ends);
        move |request: In| {
            let ends = Arc::clone(&ends);
            async move {
                if request.uri().path() == "/" {
                    ends.notified().await;
                }
                Ok::<_, Infallible>(ok())
            }
        }
    }));
    let service = by_path(&locks).try_only().layer(limited);

    let mut asked = store.hold_next(Verb::Enqueue);
    let waits = tokio::spawn(service.clone().oneshot(get("/order:1")));
    in_time(asked.arrived()).await;
    let mut other = Box::pin(service.oneshot(get("/")));
    assert!(other.as_mut().now_or_never().is_none());
    asked.let_go();
    // The paused clock moves only when no task can run.
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(tickets(&locks, "order:1").await, 1);
    ends.notify_one();

    assert_eq!(in_time(other).await.unwrap().status(), StatusCode::OK);
    let response = in_time(waits).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::OK);
}

#[tokio::test]
async fn the_service_is_made_ready_again_under_the_lock_that_was_waited_for() {
    let locks = memory();
    let other = hold(&locks, "order:42").await;
    let (service, mut handle) = mock::pair::<In, Out>();
    let mut service = by_path(&locks).wait(SOON * 2).layer(service);
    handle.allow(1);

    service.ready().await.unwrap();
    let response = tokio::spawn(service.call(get("/order:42")));
    until_tickets(&locks, "order:42", 2).await;
    // The inner service is busy, and then it fails.
    handle.allow(0);
    other.release().await.unwrap();
    until_tickets(&locks, "order:42", 1).await;
    assert!(handle.next_request().now_or_never().is_none());
    handle.send_error("broken");

    let error = in_time(response).await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "broken");
    assert_eq!(tickets(&locks, "order:42").await, 0);
}

#[tokio::test]
async fn an_error_of_the_service_comes_out_as_it_is_with_the_lock_released() {
    let locks = memory();
    let service = by_path(&locks).layer(service_fn(|_: In| async { Err::<Out, _>("broken") }));

    let error = service.oneshot(get("/order:42")).await.unwrap_err();

    assert_eq!(error, "broken");
    assert_eq!(tickets(&locks, "order:42").await, 0);
}

#[tokio::test]
async fn a_client_that_goes_away_while_waiting_leaves_the_line() {
    let locks = memory();
    let other = hold(&locks, "order:42").await;
    let service = by_path(&locks).layer(service_fn(unreached));

    let request = tokio::spawn(service.oneshot(get("/order:42")));
    until_tickets(&locks, "order:42", 2).await;
    request.abort();

    until_tickets(&locks, "order:42", 1).await;
    other.release().await.unwrap();
    nothing_is_left(&locks, "order:42").await;
}

#[tokio::test]
async fn a_client_that_goes_away_takes_the_handler_along_and_then_the_lock() {
    let locks = memory();
    let witness = Witness::of(&locks, "order:42");
    let (entered, service) = never_ends(&witness);
    let service = by_path(&locks).layer(service);

    let request = tokio::spawn(service.oneshot(get("/order:42")));
    in_time(entered.notified()).await;
    request.abort();
    assert!(request.await.unwrap_err().is_cancelled());

    nothing_is_left(&locks, "order:42").await;
    assert_eq!(
        witness.saw_tickets(),
        Some(1),
        "the handler goes before the lock"
    );
}

#[tokio::test]
async fn a_request_that_is_dropped_after_any_number_of_polls_leaves_nothing_behind() {
    let locks = memory();
    let layer = by_path(&locks);

    let polls = drop_request_after_each_poll(&locks, &["order:42"], &layer, "/order:42").await;

    // The request was dropped before the handler, in the handler, and before each of the last two
    // parts of the body.
    assert!(polls >= 4, "{polls}");
}

#[tokio::test]
async fn replies_that_are_lost_on_the_way_cost_a_request_nothing() {
    let store = Store::new();
    let locks = store.client().unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let service = by_path(&locks).layer(service_fn({
        let calls = Arc::clone(&calls);
        move |_: In| {
            calls.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, Infallible>(ok()) }
        }
    }));

    for verb in [Verb::Enqueue, Verb::Release] {
        store.lose_next_reply(verb);
        let response = service.clone().oneshot(get("/order:42"));
        let response = in_time(response).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let body = in_time(response.into_body().collect()).await.unwrap();
        assert_eq!(body.to_bytes(), "done");
        nothing_is_left(&locks, "order:42").await;
    }
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_handler_that_panics_releases() {
    let locks = memory();
    let service = by_path(&locks).layer(service_fn(|_: In| async {
        panic!("on purpose");
        #[allow(unreachable_code)]
        Ok::<_, Infallible>(ok())
    }));

    let outcome = tokio::spawn(service.oneshot(get("/order:42"))).await;

    assert!(outcome.unwrap_err().is_panic());
    nothing_is_left(&locks, "order:42").await;
}

#[tokio::test]
async fn a_handler_that_loses_its_lock_is_dropped_and_answered_with_503() {
    let locks = memory();
    let witness = Witness::of(&locks, "order:42");
    let (entered, service) = never_ends(&witness);
    let service = by_path(&locks).layer(service);

    let request = tokio::spawn(service.oneshot(get("/order:42")));
    in_time(entered.notified()).await;
    lose(&locks).await;

    let response = in_time(request).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(
        !response.headers().contains_key("retry-after"),
        "part of the work may be done"
    );
    assert_eq!(
        witness.saw_tickets(),
        Some(1),
        "the handler goes before the lock"
    );
    let problem = problem_of(response, "lock-lost").await;
    assert_eq!(problem["key"], "order:42");
}

#[tokio::test]
async fn the_answer_to_a_loss_does_not_wait_for_the_store() {
    let store = Store::new();
    // With the clock stopped, no operation times out.
    store.clock().stop();
    let locks = store.client().unwrap();
    let entered = Arc::new(Notify::new());
    let service = by_path(&locks).layer(service_fn({
        let entered = Arc::clone(&entered);
        move |_: In| {
            entered.notify_one();
            pending::<Result<Out, Infallible>>()
        }
    }));

    let request = tokio::spawn(service.oneshot(get("/order:42")));
    in_time(entered.notified()).await;
    store.freeze();
    store.clock().advance(Duration::from_secs(10));

    let response = in_time(request).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    store.thaw();
}

#[tokio::test]
async fn a_handler_is_not_polled_again_once_the_lock_is_lost() {
    let locks = memory();
    let (entered, polled_after) = (Arc::new(Notify::new()), Arc::new(AtomicUsize::new(0)));
    let service = by_path(&locks).layer(service_fn({
        let (entered, polled_after) = (Arc::clone(&entered), Arc::clone(&polled_after));
        move |request: In| {
            let (entered, polled_after) = (Arc::clone(&entered), Arc::clone(&polled_after));
            let held = held_in(&request);
            async move {
                // This future is ready again after each step, so only a check before each poll can
                // stop it.
                loop {
                    if !held.is_valid() {
                        polled_after.fetch_add(1, Ordering::SeqCst);
                        return Ok::<_, Infallible>(ok());
                    }
                    entered.notify_one();
                    tokio::task::yield_now().await;
                }
            }
        }
    }));

    let request = tokio::spawn(service.oneshot(get("/order:42")));
    in_time(entered.notified()).await;
    lose(&locks).await;

    let response = in_time(request).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(polled_after.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_client_that_is_shut_down_is_answered_with_503() {
    let locks = memory();
    locks.shutdown(SOON).await.unwrap();

    let service = by_path(&locks).layer(service_fn(unreached));
    let response = service.oneshot(get("/order:42")).await.unwrap();

    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    problem_of(response, "lock-unavailable").await;
}

#[tokio::test]
async fn a_store_that_refuses_is_answered_with_503_and_its_words_stay_inside() {
    let locks = broken(Fault::Refused);

    let service = by_path(&locks).layer(service_fn(unreached));
    let response = service.oneshot(get("/order:42")).await.unwrap();

    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(response.headers()["retry-after"], "1");
    let problem = problem_of(response, "lock-unavailable").await;
    assert_eq!(problem["key"], "order:42");
    assert!(!problem.to_string().contains("hunter2"), "{problem}");
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_answered_with_503() {
    let locks = broken(Fault::Unknown);

    let service = by_path(&locks)
        .wait(Duration::from_millis(50))
        .layer(service_fn(unreached));
    let response = in_time(service.oneshot(get("/order:42"))).await.unwrap();

    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn a_mistake_in_the_configuration_is_answered_with_500() {
    let locks = memory();
    let bad_ttl = by_path(&locks).ttl(Duration::ZERO);
    let empty_name = LockLayer::new(locks, Key::from_fn(|_| Ok(Some(String::new()))));
    let bad_store = by_path(&broken(Fault::Config));

    for layer in [bad_ttl, empty_name, bad_store] {
        let response = layer
            .layer(service_fn(unreached))
            .oneshot(get("/order:42"))
            .await
            .unwrap();

        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert!(response.headers().get("retry-after").is_none());
        problem_of(response, "lock-misconfigured").await;
    }
}

#[tokio::test]
async fn a_name_in_use_as_a_semaphore_is_answered_with_500() {
    let locks = memory();
    let _permit = locks
        .semaphore("order:42", 3)
        .permits(1)
        .acquire()
        .await
        .unwrap();

    let service = by_path(&locks).layer(service_fn(unreached));
    let response = in_time(service.oneshot(get("/order:42"))).await.unwrap();

    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
}

/// A connection that fails every request with this fault. The message contains a password.
#[derive(Debug)]
struct Broken(Arc<dyn Connection>, Fault);

/// A client of a store with such connections.
fn broken(fault: Fault) -> Locks {
    let memory = backend::open("memory:").expect("it needs nothing");
    let store = around(memory, move |connection| Broken(connection, fault));
    Locks::with_backend(store).expect("it needs nothing")
}

impl Broken {
    fn fail<T: Send + 'static>(&self) -> Answer<T> {
        let error = StoreError::new(self.1, "no such user: redis://:hunter2@10.0.0.1");
        Box::pin(async { Err(error) })
    }
}

impl Connection for Broken {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.0)
    }

    fn enqueue(&self, _request: Arc<Request>, _patience: Duration) -> Answer<Enqueued> {
        self.fail()
    }

    fn inspect(&self, _name: Name) -> Answer<Vec<TicketInfo>> {
        self.fail()
    }

    fn check(&self) -> Answer<Vec<String>> {
        self.fail()
    }
}
