//! Tests of the options of the layer: how it asks for the lock, and how long it keeps the lock.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

#[path = "../common/mod.rs"]
mod common;
mod grpc;
mod upgrades;

use std::convert::Infallible;
use std::future::pending;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use common::*;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use lockcore::backend::Fault;
use lockcore::testing::{Store, Verb};
use lockcore::{Locks, OnLost};
use lockcore_tower::{HoldUntil, Key, LockLayer, LockService, Upgrades};
use tokio::sync::{Barrier, Notify};
use tower::{Layer, Service, ServiceExt, service_fn};

const NAME: &str = "order:42";
const OTHER: &str = "shop:1";

fn one_lock(locks: &Locks) -> LockLayer {
    LockLayer::new(locks.clone(), Key::template(NAME))
}

/// A handler that answers with the token of its lock.
fn tokens()
-> impl Service<In, Response = Response<String>, Error = Infallible, Future: Send> + Clone + Send {
    service_fn(async |request: In| {
        let held = request.extensions().get::<lockcore::Held>();
        let token = held.map_or_else(|| "-".to_owned(), |held| held.grant_id().to_string());
        Ok(Response::new(token))
    })
}

/// A handler that never ends. The test can wait until it runs.
fn endless() -> (
    Arc<Notify>,
    impl Service<In, Response = Response<String>, Error = Infallible, Future: Send> + Clone + Send,
) {
    let entered = Arc::new(Notify::new());
    let service = service_fn({
        let entered = Arc::clone(&entered);
        move |_: In| {
            let entered = Arc::clone(&entered);
            async move {
                entered.notify_one();
                pending().await
            }
        }
    });
    (entered, service)
}

async fn ask<S, B>(layer: &LockLayer, service: S, request: In) -> Response<String>
where
    LockService<S>: Service<In, Response = Response<B>, Error = Infallible>,
    B: http_body::Body<Data = Bytes, Error: std::fmt::Debug>,
{
    let response = in_time(layer.layer(service).oneshot(request)).await;
    let (parts, body) = response.unwrap().into_parts();
    let text = in_time(body.collect()).await.unwrap().to_bytes();
    Response::from_parts(parts, String::from_utf8(text.into()).unwrap())
}

async fn status(layer: &LockLayer, request: In) -> StatusCode {
    ask(layer, tokens(), request).await.status()
}

fn post() -> In {
    by_method(Method::POST)
}

fn by_method(method: Method) -> In {
    let mut request = get("/");
    *request.method_mut() = method;
    request
}

fn with(headers: &[(&'static str, &'static str)]) -> In {
    let mut request = post();
    for (name, value) in headers {
        let value = HeaderValue::from_static(value);
        request.headers_mut().append(*name, value);
    }
    request
}

fn grpc(headers: &[(&'static str, &'static str)]) -> In {
    let mut request = with(headers);
    let content = HeaderValue::from_static("application/grpc+proto");
    request.headers_mut().insert("content-type", content);
    request
}

// ---- which requests exclude each other

#[tokio::test]
async fn safe_methods_share_the_key_and_exclude_other_methods() {
    let locks = memory();
    let layer = one_lock(&locks).read_on_get().try_only();
    let all_inside = Arc::new(Barrier::new(4));
    let service = layer.layer(service_fn(move |_: In| {
        let all_inside = Arc::clone(&all_inside);
        async move {
            all_inside.wait().await;
            Ok::<_, Infallible>(Response::new(String::new()))
        }
    }));

    let together = [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE]
        .map(|method| service.clone().oneshot(by_method(method)));
    for response in in_time(futures_util::future::join_all(together)).await {
        assert_eq!(response.unwrap().status(), StatusCode::OK);
    }

    let reader = locks.rwlock(NAME).read().acquire().await.unwrap();
    assert_eq!(status(&layer, get("/")).await, StatusCode::OK);
    for method in [Method::POST, Method::DELETE, Method::PATCH] {
        let refused = status(&layer, by_method(method)).await;
        assert_eq!(refused, StatusCode::CONFLICT);
    }
    reader.release().await.unwrap();
    let _writer = hold(&locks, NAME).await;
    assert_eq!(status(&layer, get("/")).await, StatusCode::CONFLICT);
}

/// The handler of a route for any method, and a gRPC server, ignore the method.
#[tokio::test]
async fn a_request_for_options_takes_the_lock() {
    let locks = memory();
    let layer = one_lock(&locks).try_only();
    let of_grpc = || {
        let mut call = by_method(Method::OPTIONS);
        let content = HeaderValue::from_static("application/grpc");
        call.headers_mut().insert("content-type", content);
        call
    };

    let response = ask(&layer, tokens(), by_method(Method::OPTIONS)).await;
    assert_ne!(response.body(), "-", "under the lock");

    let _other = hold(&locks, NAME).await;
    for request in [by_method(Method::OPTIONS), of_grpc()] {
        assert_eq!(status(&layer, request).await, StatusCode::CONFLICT);
    }
}

/// A browser sends OPTIONS before the real request, without the header that names the lock.
#[tokio::test]
async fn a_request_for_options_passes_without_the_lock_if_the_layer_says_so() {
    let locks = memory();
    let _other = hold(&locks, NAME).await;
    let by_header = LockLayer::new(locks.clone(), Key::header("id"));

    for layer in [one_lock(&locks).try_only(), by_header] {
        let layer = layer.pass_options();
        let response = ask(&layer, tokens(), by_method(Method::OPTIONS)).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.body(), "-", "no lock");
    }
}

#[tokio::test]
async fn shared_requests_exclude_only_exclusive_ones() {
    let locks = memory();
    let layer = one_lock(&locks).shared().try_only();

    let reader = locks.rwlock(NAME).read().acquire().await.unwrap();
    assert_eq!(status(&layer, post()).await, StatusCode::OK);
    reader.release().await.unwrap();

    let _writer = hold(&locks, NAME).await;
    assert_eq!(status(&layer, post()).await, StatusCode::CONFLICT);
}

#[tokio::test]
async fn as_many_requests_are_handled_at_once_as_there_are_permits_for() {
    let locks = memory();
    let layer = one_lock(&locks).permits(2, 5).try_only();

    let one = locks.semaphore(NAME, 5).permits(3).acquire().await.unwrap();
    assert_eq!(status(&layer, post()).await, StatusCode::OK);
    let two = locks.semaphore(NAME, 5).permits(1).acquire().await.unwrap();
    assert_eq!(status(&layer, post()).await, StatusCode::CONFLICT);
    drop((one, two));
}

#[test]
fn a_number_of_permits_that_cannot_be_had_is_seen_at_the_start() {
    for (permits, of) in [(0, 3), (4, 3), (1, 1 << 30)] {
        let layer = one_lock(&memory());
        let built = std::panic::catch_unwind(AssertUnwindSafe(|| layer.permits(permits, of)));
        assert!(built.is_err(), "{permits} of {of}");
    }
}

// ---- how long it waits

#[tokio::test]
async fn a_full_line_refuses_requests_until_a_waiter_leaves() {
    let locks = memory();
    let other = hold(&locks, NAME).await;
    let layer = one_lock(&locks).wait(SOON * 2).max_waiting(1);

    let waits = tokio::spawn(layer.layer(tokens()).oneshot(post()));
    until_tickets(&locks, NAME, 2).await;
    // The refusal comes at once. The wait is longer than `in_time` allows.
    assert_eq!(status(&layer, post()).await, StatusCode::CONFLICT);

    waits.abort();
    assert!(waits.await.unwrap_err().is_cancelled());
    let (entered, service) = endless();
    let waits = tokio::spawn(layer.layer(service).oneshot(post()));
    until_tickets(&locks, NAME, 2).await;
    other.release().await.unwrap();
    in_time(entered.notified()).await;

    // The request that has the lock does not count as a waiter.
    let next = tokio::spawn(layer.layer(tokens()).oneshot(post()));
    until_tickets(&locks, NAME, 2).await;
    waits.abort();
    let response = in_time(next).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_free_key_is_locked_although_no_request_may_wait() {
    let locks = memory();
    let layer = one_lock(&locks).max_waiting(0);

    assert_eq!(status(&layer, post()).await, StatusCode::OK);
    let _other = hold(&locks, NAME).await;
    assert_eq!(status(&layer, post()).await, StatusCode::CONFLICT);
}

#[tokio::test]
async fn a_request_waits_no_longer_than_its_client() {
    let locks = memory();
    let _other = hold(&locks, NAME).await;
    // The layer sets no wait here. The default of `Locks` is longer than `in_time` allows.
    let layer = one_lock(&locks);
    let forever = layer.clone().wait(lockcore::Wait::Forever);

    for layer in [&layer, &forever] {
        for timeout in ["20m", "0n"] {
            let response = ask(layer, tokens(), grpc(&[("grpc-timeout", timeout)])).await;
            assert_eq!(response.headers()["grpc-status"], "4", "{timeout}");
        }
    }
    let sooner = layer.clone().wait(Duration::from_millis(20));
    let response = ask(&sooner, tokens(), grpc(&[("grpc-timeout", "10S")])).await;
    assert_eq!(
        response.headers()["grpc-status"],
        "10",
        "not the client's bound"
    );
    // In a request that is not gRPC, the header means nothing.
    let response = ask(&sooner, tokens(), with(&[("grpc-timeout", "0n")])).await;
    assert_eq!(response.status(), StatusCode::CONFLICT);

    let named = layer.deadline_header("X-Deadline");
    let response = ask(&named, tokens(), with(&[("x-deadline", "20")])).await;
    assert_eq!(response.status(), StatusCode::CONFLICT);
}

#[tokio::test]
async fn a_deadline_header_that_was_not_named_means_nothing() {
    let locks = memory();
    let other = hold(&locks, NAME).await;
    let layer = one_lock(&locks).wait(SOON);

    let waits = tokio::spawn(
        layer
            .layer(tokens())
            .oneshot(with(&[("x-deadline", "0"), ("grpc-timeout", "0n")])),
    );
    until_tickets(&locks, NAME, 2).await;
    other.release().await.unwrap();

    assert_eq!(
        in_time(waits).await.unwrap().unwrap().status(),
        StatusCode::OK
    );
}

// ---- how long it keeps the lock

#[tokio::test]
async fn a_request_that_holds_for_too_long_is_stopped() {
    let store = Store::new();
    store.clock().stop();
    let (entered, service) = endless();
    let longest = Duration::from_secs(1);
    let layer = one_lock(&store.client().unwrap()).max_hold(longest);

    let request = tokio::spawn(layer.layer(service).oneshot(post()));
    in_time(entered.notified()).await;
    store.clock().advance(longest);
    let response = in_time(request).await.unwrap().unwrap();

    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    problem_of(response, "lock-lost").await;
}

#[tokio::test]
async fn a_request_that_asked_for_a_signal_goes_on_and_is_told() {
    let store = Store::new();
    let locks = store.client().unwrap();
    let layer = one_lock(&locks).on_lost(OnLost::Signal);
    let (entered, told) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let service = layer.layer(service_fn({
        let (entered, told) = (Arc::clone(&entered), Arc::clone(&told));
        move |request: In| {
            let (entered, told) = (Arc::clone(&entered), Arc::clone(&told));
            let held = held_in(&request);
            async move {
                entered.notify_one();
                held.lost().await;
                let parts = futures_util::stream::once(async move {
                    told.notified().await;
                    Ok::<_, Infallible>(http_body::Frame::data(Bytes::from("to the end")))
                });
                Ok::<_, Infallible>(Response::new(http_body_util::StreamBody::new(parts)))
            }
        }
    }));

    let request = tokio::spawn(service.oneshot(post()));
    in_time(entered.notified()).await;
    store.freeze();
    store.clock().advance(Duration::from_secs(10));
    let response = in_time(request).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    store.thaw();

    let body = tokio::spawn(response.into_body().collect());
    tokio::task::yield_now().await;
    told.notify_one();
    assert_eq!(
        in_time(body).await.unwrap().unwrap().to_bytes(),
        "to the end"
    );
}

#[tokio::test]
async fn the_ttl_is_how_long_the_key_stays_taken_when_the_process_dies() {
    let store = Store::new();
    let there = store.another_process();
    let (entered, service) = endless();
    let layer = one_lock(&there.client().unwrap()).ttl(Duration::from_secs(3));
    let request = tokio::spawn(layer.layer(service).oneshot(post()));
    in_time(entered.notified()).await;

    there.freeze();
    let here = store.client().unwrap();
    store.clock().advance(Duration::from_secs(2));
    assert!(here.mutex(NAME).try_acquire().await.is_err());
    store.clock().advance(Duration::from_secs(1));

    let free = here.mutex(NAME).try_acquire().await;
    assert!(free.is_ok(), "the next one waits no longer than that");
    request.abort();
}

#[tokio::test]
async fn a_request_waits_through_an_outage_if_the_layer_or_the_client_says_so() {
    use StatusCode as Code;
    for (layer, client, expected) in [
        (None, false, Code::SERVICE_UNAVAILABLE),
        (Some(true), false, Code::OK),
        (None, true, Code::OK),
        (Some(false), true, Code::SERVICE_UNAVAILABLE),
    ] {
        let store = Store::new();
        let builder = Locks::builder().through_outages(client);
        let mut one = one_lock(&store.client_with(builder).unwrap());
        if let Some(yes) = layer {
            one = one.through_outages(yes);
        }
        store.fail_next(Verb::Enqueue, Fault::Refused);

        let response = in_time(one.layer(tokens()).oneshot(post())).await.unwrap();

        assert_eq!(response.status(), expected, "{layer:?} {client}");
    }
}

#[tokio::test]
async fn the_lock_may_be_let_go_with_the_headers() {
    let locks = memory();
    let layer = one_lock(&locks).hold_until(HoldUntil::Headers);
    let service = layer.layer(service_fn(async |_: In| {
        let body = Full::<Bytes>::new("all".into());
        Ok::<_, Infallible>(Response::new(body))
    }));

    let response = in_time(service.oneshot(post())).await.unwrap();

    assert_eq!(tickets(&locks, NAME).await, 0);
    assert_eq!(http_body::Body::size_hint(response.body()).exact(), Some(3));
    assert_eq!(whole(response).await, "all");
}

// ---- two layers

#[tokio::test]
async fn two_layers_hold_two_locks_and_let_both_go() {
    let locks = memory();
    let inner = one_lock(&locks);
    let outer = LockLayer::new(locks.clone(), Key::template(OTHER)).shared();
    let held_inside = {
        let locks = locks.clone();
        service_fn(move |_: In| {
            let locks = locks.clone();
            async move {
                let both = (tickets(&locks, NAME).await, tickets(&locks, OTHER).await);
                Ok::<_, Infallible>(Response::new(format!("{both:?}")))
            }
        })
    };

    let response = ask(&outer, inner.layer(held_inside), post()).await;

    assert_eq!(response.body(), "(1, 1)");
    assert_eq!(tickets(&locks, NAME).await, 0);
    assert_eq!(tickets(&locks, OTHER).await, 0);
}

#[tokio::test]
async fn a_second_layer_with_the_same_key_re_enters() {
    let locks = memory();
    let one = one_lock(&locks);
    for inner in [one.clone(), one.clone().shared()] {
        // A re-entered lock has the same token.
        let outer = one.clone().token_header();
        let response = ask(&outer, inner.layer(tokens()), post()).await;

        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["lock-fencing-token"], **response.body());
        assert_eq!(tickets(&locks, NAME).await, 0);
    }
}

#[tokio::test]
async fn a_second_layer_that_would_wait_for_the_first_is_answered_with_500() {
    let locks = memory();
    let one = one_lock(&locks);
    let cases = [
        (one.clone().shared(), one.clone()),
        (one.clone(), one.clone().reentrant(false)),
    ];
    for (outer, inner) in cases {
        let response = ask(&outer, inner.layer(tokens()), post()).await;

        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let problem: serde_json::Value = serde_json::from_str(response.body()).unwrap();
        assert!(
            problem["detail"]
                .as_str()
                .unwrap()
                .contains("wait for itself")
        );
        assert_eq!(tickets(&locks, NAME).await, 0);
    }
}

// ---- answers

#[tokio::test]
async fn the_status_and_the_pause_of_a_refusal_can_be_chosen() {
    let store = Store::new();
    store.clock().stop();
    let locks = store.client().unwrap();
    let _other = hold(&locks, NAME).await;
    let layer = one_lock(&store.client().unwrap()).try_only();

    let plain = ask(&layer, tokens(), post()).await;
    let layer = layer.busy_status(StatusCode::LOCKED);
    let layer = layer.retry_after(Duration::from_secs(60));
    store.clock().advance(Duration::from_secs(1));
    let chosen = ask(&layer, tokens(), post()).await;

    assert_eq!(plain.status(), StatusCode::CONFLICT);
    assert_eq!(plain.headers()["retry-after"], "1");
    assert_eq!(chosen.status(), StatusCode::LOCKED);
    let problem: serde_json::Value = serde_json::from_str(chosen.body()).unwrap();
    assert_eq!(problem["status"], 423);
    // One second of the holder's ttl of ten seconds has passed, and its lease has not been renewed
    // yet.
    assert_eq!(chosen.headers()["retry-after"], "9");
}

#[test]
#[should_panic(expected = "200 OK does not tell")]
fn a_refusal_cannot_be_a_success() {
    let _ = one_lock(&memory()).busy_status(StatusCode::OK);
}

#[tokio::test]
async fn the_token_of_an_exclusive_lock_is_told_to_the_client() {
    let locks = memory();
    let layer = one_lock(&locks).read_on_get().token_header();

    let write = ask(&layer, tokens(), post()).await;
    let read = ask(&layer, tokens(), get("/")).await;
    let permit = LockLayer::new(locks.clone(), Key::template(OTHER)).permits(1, 1);
    let permit = ask(&permit.token_header(), tokens(), post()).await;
    let own = service_fn(async |_: In| {
        let response = Response::builder().header("lock-fencing-token", "7");
        Ok::<_, Infallible>(response.body(String::new()).unwrap())
    });
    let own = ask(&layer, own, post()).await;
    let not_asked_for = ask(&one_lock(&locks), tokens(), post()).await;

    assert_eq!(write.headers()["lock-fencing-token"], **write.body());
    assert_eq!(own.headers()["lock-fencing-token"], "7");
    for without in [read, permit, not_asked_for] {
        assert_eq!(without.status(), StatusCode::OK);
        assert!(!without.headers().contains_key("lock-fencing-token"));
    }
}
