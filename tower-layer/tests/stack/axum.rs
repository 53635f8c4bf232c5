//! Stacks in axum.

use std::future::pending;
use std::sync::{Arc, Mutex};

use axum::body::{Body, Bytes};
use axum::error_handling::HandleErrorLayer;
use axum::routing::{any, get, post};
use axum::{BoxError, Router};
use http::header::{
    ACCEPT_ENCODING, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_REQUEST_METHOD, CONTENT_ENCODING, ORIGIN,
};
use lockcore::Locks;
use lockcore_tower::{HeldLock, Key, LockLayer};
use tower::limit::{ConcurrencyLimitLayer, RateLimitLayer};
use tower::retry::RetryLayer;
use tower::{ServiceBuilder, ServiceExt};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer};
use tower_http::trace::TraceLayer;

use super::common::{SOON, hold, in_time, memory, nothing_is_left, tickets, until_tickets};
use super::{Duration, MOST, NAME, OnceMore, Request, Response, SHORT, StatusCode, cors, timeout};

fn by_id(locks: &Locks) -> LockLayer {
    LockLayer::new(locks.clone(), Key::path("id").prefix("order:")).try_only()
}

/// Routes whose handlers end, never end, panic, and read a body.
fn orders() -> Router {
    // Compression leaves short bodies as they are.
    let look = async |held: HeldLock| format!("{} {}", held.name(), "and more ".repeat(20));
    Router::new()
        .route("/orders/{id}", get(look))
        .route("/orders/{id}/hang", get(pending::<()>))
        .route("/orders/{id}/panic", get(panics))
        .route("/orders/{id}/note", post(async |note: Bytes| note))
}

async fn panics() {
    if true {
        panic!("on purpose")
    }
}

/// The layers of `tower_http` around the lock, in the order that its documentation and most
/// services use, in one `ServiceBuilder`.
fn outside(locks: &Locks, after: Duration) -> Router {
    orders().layer(
        ServiceBuilder::new()
            .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
            .layer(TraceLayer::new_for_http())
            .layer(PropagateRequestIdLayer::x_request_id())
            .layer(RequestBodyLimitLayer::new(MOST))
            .layer(CatchPanicLayer::new())
            .layer(cors())
            .layer(timeout(after))
            .layer(CompressionLayer::new())
            .layer(by_id(locks)),
    )
}

/// The same, but the lock is outside of all others.
fn inside(locks: &Locks, after: Duration) -> Router {
    orders().layer(
        ServiceBuilder::new()
            .layer(by_id(locks))
            .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
            .layer(TraceLayer::new_for_http())
            .layer(PropagateRequestIdLayer::x_request_id())
            .layer(RequestBodyLimitLayer::new(MOST))
            .layer(CatchPanicLayer::new())
            .layer(cors())
            .layer(timeout(after))
            .layer(CompressionLayer::new()),
    )
}

/// As `outside`, with each layer added to the router by itself. The last one is the outermost.
fn one_by_one(locks: &Locks, after: Duration) -> Router {
    orders()
        .route_layer(by_id(locks))
        .layer(timeout(after))
        .layer(CompressionLayer::new())
        .layer(RequestBodyLimitLayer::new(MOST))
        .layer(PropagateRequestIdLayer::x_request_id())
        .layer(cors())
        .layer(CatchPanicLayer::new())
        .layer(TraceLayer::new_for_http())
        .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
}

/// The lock is in the middle. It reads bodies itself, and asks for its lock after that.
fn around_and_inside(locks: &Locks, after: Duration) -> Router {
    orders().layer(
        ServiceBuilder::new()
            .layer(cors())
            .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
            .layer(PropagateRequestIdLayer::x_request_id())
            .layer(CompressionLayer::new())
            .layer(by_id(locks).read_body_first(MOST, SOON))
            .layer(TraceLayer::new_for_http())
            .layer(CatchPanicLayer::new())
            .layer(timeout(after)),
    )
}

type Stack = fn(&Locks, Duration) -> Router;

const STACKS: [(&str, Stack); 4] = [
    ("outside", outside),
    ("inside", inside),
    ("one by one", one_by_one),
    ("around and inside", around_and_inside),
];

async fn ask(app: &Router, request: http::request::Builder, body: &'static str) -> Response<Body> {
    let request = request.header(ORIGIN, "https://shop.example");
    let request = request.header(ACCEPT_ENCODING, "gzip");
    in_time(app.clone().oneshot(request.body(Body::from(body)).unwrap()))
        .await
        .unwrap()
}

async fn text(response: Response<Body>) -> Bytes {
    super::common::whole(response).await
}

#[tokio::test]
async fn a_request_runs_under_its_lock_and_each_layer_adds_its_part() {
    for (stack, build) in STACKS {
        let locks = memory();
        let app = build(&locks, SOON);

        for _ in 0..3 {
            let response = ask(&app, Request::get("/orders/42"), "").await;

            assert_eq!(response.status(), StatusCode::OK, "{stack}");
            let headers = response.headers().clone();
            assert_eq!(headers[CONTENT_ENCODING], "gzip", "{stack}");
            assert_eq!(headers[ACCESS_CONTROL_ALLOW_ORIGIN], "*", "{stack}");
            assert_eq!(headers["x-request-id"].len(), 36, "{stack}");
            assert_eq!(text(response).await[..2], [0x1f, 0x8b], "{stack}: gzip");
            assert_eq!(tickets(&locks, NAME).await, 0, "{stack}");
        }

        let note = ask(&app, Request::post("/orders/42/note"), "short").await;
        assert_eq!(text(note).await, "short", "{stack}");
        nothing_is_left(&locks, NAME).await;
    }
}

#[tokio::test]
async fn a_request_whose_lock_is_held_is_refused_through_all_layers() {
    for (stack, build) in STACKS {
        let locks = memory();
        let app = build(&locks, SOON);
        let _other = hold(&locks, NAME).await;

        let response = ask(&app, Request::get("/orders/42"), "").await;

        assert_eq!(response.status(), StatusCode::CONFLICT, "{stack}");
        let free = ask(&app, Request::get("/orders/43"), "").await;
        assert_eq!(free.status(), StatusCode::OK, "{stack}");
        if stack != "inside" {
            let headers = response.headers();
            assert_eq!(headers[ACCESS_CONTROL_ALLOW_ORIGIN], "*", "{stack}");
            assert_eq!(headers["x-request-id"].len(), 36, "{stack}");
        }
    }
}

/// The answer is made by the layer for CORS, with a default body.
#[tokio::test]
async fn a_preflight_is_answered_outside_of_the_lock_while_the_lock_is_held() {
    for (stack, build) in STACKS.into_iter().filter(|(stack, _)| *stack != "inside") {
        let locks = memory();
        let app = build(&locks, SOON);
        let _other = hold(&locks, NAME).await;
        let preflight = Request::options("/orders/42");
        let preflight = preflight.header(ACCESS_CONTROL_REQUEST_METHOD, "GET");

        let response = ask(&app, preflight, "").await;

        assert_eq!(response.status(), StatusCode::OK, "{stack}");
        let methods = &response.headers()[ACCESS_CONTROL_ALLOW_METHODS];
        assert_eq!(methods, "GET,POST", "{stack}");
        assert_eq!(text(response).await, "", "{stack}");
    }
}

#[tokio::test]
async fn a_preflight_inside_of_the_lock_waits_for_the_lock_as_other_requests_do() {
    let locks = memory();
    let app = inside(&locks, SOON);
    let preflight = || {
        let preflight = Request::options("/orders/42");
        preflight.header(ACCESS_CONTROL_REQUEST_METHOD, "GET")
    };

    let answered = ask(&app, preflight(), "").await;
    assert_eq!(answered.status(), StatusCode::OK);
    let _other = hold(&locks, NAME).await;
    let refused = ask(&app, preflight(), "").await;
    assert_eq!(refused.status(), StatusCode::CONFLICT);
}

/// A handler for any method does its work for OPTIONS too, with or without a body.
#[tokio::test]
async fn a_handler_for_any_method_runs_under_the_lock_for_options_too() {
    let locks = memory();
    let handler = async |held: Option<HeldLock>| held.is_some().to_string();
    let app = Router::new().route("/orders/{id}", any(handler).layer(by_id(&locks)));

    for body in ["", "a body without a content type"] {
        let response = ask(&app, Request::options("/orders/42"), body).await;
        assert_eq!(text(response).await, "true");
    }
    let _other = hold(&locks, NAME).await;
    let refused = ask(&app, Request::options("/orders/42"), "").await;
    assert_eq!(refused.status(), StatusCode::CONFLICT);
}

/// The answer is made by the layer for timeouts, with a default body.
#[tokio::test]
async fn a_request_that_takes_too_long_is_answered_with_408_and_lets_its_lock_go() {
    for (stack, build) in STACKS {
        let locks = memory();
        let app = build(&locks, SHORT);

        let response = ask(&app, Request::get("/orders/42/hang"), "").await;

        assert_eq!(response.status(), StatusCode::REQUEST_TIMEOUT, "{stack}");
        assert_eq!(text(response).await, "", "{stack}");
        nothing_is_left(&locks, NAME).await;
    }
}

#[tokio::test]
async fn a_handler_that_panics_is_answered_with_500_and_lets_its_lock_go() {
    for (stack, build) in STACKS {
        let locks = memory();
        let app = build(&locks, SOON);

        let response = ask(&app, Request::get("/orders/42/panic"), "").await;

        let status = response.status();
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR, "{stack}");
        drop(response);
        nothing_is_left(&locks, NAME).await;
    }
}

#[tokio::test]
async fn a_body_that_is_too_large_is_answered_with_413_and_leaves_no_lock() {
    const LARGE: &str = "a note that has more than the sixty-four bytes that a note may have";
    for (stack, build) in STACKS {
        let locks = memory();
        let app = build(&locks, SOON);

        let response = ask(&app, Request::post("/orders/42/note"), LARGE).await;

        assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE, "{stack}");
        drop(response);
        nothing_is_left(&locks, NAME).await;
    }
}

async fn overloaded(error: BoxError) -> (StatusCode, String) {
    (StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

/// A limit of one request, which refuses the others, and a queue. Outside of the lock the limit
/// counts requests that wait for a lock too. (Without `with_state`, a router makes its layers anew
/// for each request, and each has its own limit. A server calls `with_state` itself.)
fn limited_outside(locks: &Locks) -> Router {
    let app = orders().layer(
        ServiceBuilder::new()
            .layer(HandleErrorLayer::new(overloaded))
            .load_shed()
            .layer(ConcurrencyLimitLayer::new(1))
            .buffer(4)
            .layer(RateLimitLayer::new(1_000_000, Duration::from_secs(1)))
            .layer(by_id(locks).wait(SOON)),
    );
    app.with_state(())
}

fn limited_inside(locks: &Locks) -> Router {
    let app = orders().layer(
        ServiceBuilder::new()
            .layer(by_id(locks).wait(SOON))
            .layer(HandleErrorLayer::new(overloaded))
            .load_shed()
            .layer(ConcurrencyLimitLayer::new(1))
            .buffer(4)
            .layer(RateLimitLayer::new(1_000_000, Duration::from_secs(1))),
    );
    app.with_state(())
}

#[tokio::test]
async fn limits_that_refuse_and_a_queue_fit_on_both_sides_of_the_lock() {
    for (stack, build) in [
        ("outside", limited_outside as fn(&Locks) -> Router),
        ("inside", limited_inside),
    ] {
        let locks = memory();
        let app = build(&locks);

        for _ in 0..3 {
            let response = ask(&app, Request::get("/orders/42"), "").await;
            assert_eq!(response.status(), StatusCode::OK, "{stack}");
            drop(response);
        }
        nothing_is_left(&locks, NAME).await;
    }
}

#[tokio::test]
async fn a_limit_outside_of_the_lock_refuses_while_a_request_waits_and_one_inside_does_not() {
    for (stack, build, status) in [
        (
            "outside",
            limited_outside as fn(&Locks) -> Router,
            StatusCode::SERVICE_UNAVAILABLE,
        ),
        ("inside", limited_inside, StatusCode::OK),
    ] {
        let locks = memory();
        let app = build(&locks);
        let other = hold(&locks, NAME).await;
        let waiting = Request::get("/orders/42").body(Body::empty()).unwrap();
        let waiting = tokio::spawn(app.clone().oneshot(waiting));
        until_tickets(&locks, NAME, 2).await;

        let response = ask(&app, Request::get("/orders/43"), "").await;
        assert_eq!(response.status(), status, "{stack}");

        other.release().await.unwrap();
        let waited = in_time(waiting).await.unwrap().unwrap();
        assert_eq!(waited.status(), StatusCode::OK, "{stack}");
    }
}

/// A route whose handler fails, and records its grants.
fn failing() -> (Router, Arc<Mutex<Vec<u64>>>) {
    let grants = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let grants = Arc::clone(&grants);
        async move |held: HeldLock| {
            grants.lock().unwrap().push(held.grant_id().as_u64());
            StatusCode::INTERNAL_SERVER_ERROR
        }
    };
    (Router::new().route("/orders/{id}", get(handler)), grants)
}

#[tokio::test]
async fn a_retry_outside_takes_the_lock_again_and_a_retry_inside_keeps_it() {
    let locks = memory();
    let retry = || RetryLayer::new(OnceMore::new());
    let (outside, apart) = failing();
    let outside = outside.layer(ServiceBuilder::new().layer(retry()).layer(by_id(&locks)));
    let (inside, together) = failing();
    let inside = inside.layer(ServiceBuilder::new().layer(by_id(&locks)).layer(retry()));

    for app in [outside, inside] {
        let response = ask(&app, Request::get("/orders/42"), "").await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        drop(response);
        nothing_is_left(&locks, NAME).await;
    }

    let grants = |seen: Arc<Mutex<Vec<u64>>>| <[u64; 2]>::try_from(seen.lock().unwrap().clone());
    let [first, second] = grants(apart).unwrap();
    assert_ne!(first, second);
    let [first, second] = grants(together).unwrap();
    assert_eq!(first, second);
}
