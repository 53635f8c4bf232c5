//! Tests of answers that the service chooses: answers of its own function, answers without the key,
//! and answers of handlers that take locks themselves.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use common::{In, by_path, get, hold, in_time, memory};
use futures_util::{StreamExt, stream};
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use lockcore::testing::Store;
use lockcore_tower::{FenceLayer, Key, LockLayer, Refusal, TOKEN_HEADER};
use tower::{Layer, Service, ServiceExt, service_fn};

const NAME: &str = "order:42";

/// The answer of a layer around a handler that never ends.
async fn answer<L, S, B>(layer: &L, request: In) -> Response<String>
where
    L: Layer<tower::util::BoxCloneService<In, Response<String>, Infallible>, Service = S>,
    S: Service<In, Response = Response<B>, Error = Infallible>,
    B: http_body::Body<Data = Bytes, Error: std::fmt::Debug>,
{
    let endless = service_fn(async |_: In| std::future::pending().await);
    let service = layer.layer(tower::util::BoxCloneService::new(endless));
    let (parts, body) = in_time(service.oneshot(request))
        .await
        .unwrap()
        .into_parts();
    let text = in_time(body.collect()).await.unwrap().to_bytes();
    Response::from_parts(parts, String::from_utf8(text.into()).unwrap())
}

fn at(path: &str, header: (&'static str, &'static str)) -> In {
    let mut request = get(path);
    let (name, value) = header;
    let value = HeaderValue::from_static(value);
    request.headers_mut().insert(name, value);
    request
}

/// A request of a gRPC client.
fn grpc(path: &str) -> In {
    let mut request = at(path, ("content-type", "application/grpc"));
    *request.method_mut() = Method::POST;
    request
}

fn of_our_own(refusal: Refusal<'_>) -> Response<String> {
    let text = format!(
        "{} | {} | {} | {:?} | {:?}",
        refusal.kind(),
        refusal.title(),
        refusal.detail(),
        refusal.key(),
        refusal.retry_after()
    );
    let mut response = Response::new(text);
    *response.status_mut() = refusal.status();
    response
}

#[tokio::test]
async fn a_function_of_ones_own_makes_every_answer_of_the_layer() {
    let locks = memory();
    let _other = hold(&locks, NAME).await;
    let by_header = Key::header_as::<u64>("id").prefix("order:");
    let layer = LockLayer::new(locks.clone(), by_header)
        .try_only()
        .retry_after(Duration::from_millis(2_500))
        .refuse_with(of_our_own);

    let held = answer(&layer, at("/", ("id", "42"))).await;
    let missing = answer(&layer, get("/")).await;
    let mut upgrade = at("/", ("id", "7"));
    let websocket = HeaderValue::from_static("websocket");
    upgrade.headers_mut().insert("upgrade", websocket);
    let upgrade = answer(&layer, upgrade).await;
    let limited = layer.max_hold(Duration::from_millis(20));
    let lost = answer(&limited, at("/", ("id", "7"))).await;

    assert_eq!(held.status(), StatusCode::CONFLICT);
    assert_eq!(held.headers()[RETRY_AFTER], "3");
    assert!(!held.headers().contains_key(CONTENT_TYPE));
    assert_eq!(
        held.body(),
        "lock-held | Locked by another request | Another request for the same key is being handled. \
         This one was not; try again. | Some(\"order:42\") | Some(3s)"
    );
    assert_eq!(missing.status(), StatusCode::BAD_REQUEST);
    assert!(!missing.headers().contains_key(RETRY_AFTER));
    let text = missing.body();
    assert!(
        text.starts_with("lock-key | No key to lock | The header \"id\" is missing"),
        "{text}"
    );
    assert!(text.ends_with("| None | None"), "{text}");
    assert_eq!(upgrade.status(), StatusCode::NOT_IMPLEMENTED);
    let text = upgrade.body();
    assert!(text.starts_with("lock-upgrade"), "{text}");
    assert_eq!(lost.status(), StatusCode::SERVICE_UNAVAILABLE);
    let text = lost.body();
    assert!(text.starts_with("lock-lost"), "{text}");
}

#[tokio::test]
async fn a_function_of_ones_own_has_the_last_word_on_the_headers_and_may_use_the_usual_body() {
    let locks = memory();
    let _other = hold(&locks, NAME).await;
    let layer = by_path(&locks).try_only();
    let usual = answer(&layer, get("/order:42")).await;
    let layer = layer.refuse_with(|refusal| {
        let response = Response::builder()
            .status(StatusCode::TOO_MANY_REQUESTS)
            .header(RETRY_AFTER, "17");
        response.body(refusal.to_json()).unwrap()
    });

    let own = answer(&layer, get("/order:42")).await;

    assert_eq!(own.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(own.headers()[RETRY_AFTER], "17");
    assert_eq!(own.body(), usual.body());
}

#[tokio::test]
async fn a_grpc_client_gets_a_grpc_status_where_other_clients_get_a_response_of_the_service() {
    let locks = memory();
    let _other = hold(&locks, NAME).await;
    let layer = by_path(&locks).try_only().refuse_with(of_our_own);

    let request = grpc("/order:42");
    let refused = answer(&layer, request).await;

    assert_eq!(refused.status(), StatusCode::OK);
    assert_eq!(refused.headers()["grpc-status"], "10");
    assert_eq!(refused.body(), "");
}

#[tokio::test]
async fn a_function_of_ones_own_makes_the_answers_of_a_fence() {
    let fence = FenceLayer::new(Key::template("account")).refuse_with(of_our_own);
    let unfenced = answer(&fence, get("/")).await;
    let instant = fence.layer(service_fn(async |_: In| {
        Ok::<_, Infallible>(Response::new(String::new()))
    }));
    let later = at("/", (TOKEN_HEADER_NAME, "9"));
    in_time(instant.oneshot(later)).await.unwrap();

    let late = answer(&fence, at("/", (TOKEN_HEADER_NAME, "8"))).await;

    assert_eq!(TOKEN_HEADER, TOKEN_HEADER_NAME);
    assert_eq!(unfenced.status(), StatusCode::BAD_REQUEST);
    assert!(unfenced.body().starts_with("fencing-token | "));
    assert_eq!(late.status(), StatusCode::PRECONDITION_FAILED);
    assert!(late.body().starts_with("write-refused | "));
}

const TOKEN_HEADER_NAME: &str = "lock-fencing-token";

#[tokio::test]
async fn a_hidden_key_is_in_no_answer() {
    let locks = memory();
    let _other = hold(&locks, NAME).await;
    let plain = by_path(&locks).try_only();
    let hidden = plain.clone().hide_key();
    let to_grpc = || grpc("/order:42");
    let lost = |layer: LockLayer| layer.max_hold(Duration::from_millis(20));

    let shown = [
        answer(&plain, get("/order:42")).await,
        answer(&plain, to_grpc()).await,
        answer(&lost(plain), get("/order:7")).await,
    ];
    let secret = [
        answer(&hidden, get("/order:42")).await,
        answer(&hidden, to_grpc()).await,
        answer(&lost(hidden.clone()), get("/order:7")).await,
        answer(&hidden.refuse_with(of_our_own), get("/order:42")).await,
    ];

    for answer in shown {
        assert!(format!("{answer:?}").contains("order:"), "{answer:?}");
    }
    for answer in secret {
        assert!(!format!("{answer:?}").contains("order:"), "{answer:?}");
    }
}

#[tokio::test]
async fn a_hidden_key_is_not_in_the_end_of_a_stream_that_loses_its_lock() {
    for (hides, expected) in [(false, "(key: order:42)"), (true, "may be done.")] {
        let mut layer = by_path(&memory()).max_hold(Duration::from_millis(20));
        if hides {
            layer = layer.hide_key();
        }
        let streams = service_fn(async |_: In| {
            let data = Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"page 1")));
            let body = StreamBody::new(stream::iter([data]).chain(stream::pending()));
            let response = Response::builder().header(CONTENT_TYPE, "application/grpc");
            Ok::<_, Infallible>(response.body(body).unwrap())
        });
        let request = grpc("/order:42");
        let response = in_time(layer.layer(streams).oneshot(request))
            .await
            .unwrap();

        let body = in_time(response.into_body().collect()).await.unwrap();
        let trailers: HeaderMap = body.trailers().unwrap().clone();
        let message = trailers["grpc-message"].to_str().unwrap();
        assert!(message.ends_with(expected), "{message}");
    }
}

#[tokio::test]
async fn a_key_stays_taken_for_its_least_time_and_the_response_does_not_wait_for_it() {
    const LEAST: Duration = Duration::from_secs(3);
    let store = Store::new();
    store.clock().stop();
    let layer = by_path(&store.client().unwrap()).min_hold(LEAST);
    let status = async |layer: &LockLayer| {
        let instant =
            service_fn(async |_: In| Ok::<_, Infallible>(Response::new(String::from("done"))));
        let response = in_time(layer.layer(instant).oneshot(get("/report")));
        let (parts, body) = response.await.unwrap().into_parts();
        in_time(body.collect()).await.unwrap();
        parts.status
    };

    // The clock of the store stands still, so a request that waits would wait for ever.
    let first = status(&layer).await;
    let at_once = status(&layer.clone().try_only()).await;
    store.clock().advance(LEAST - Duration::from_millis(1));
    let shortly_before = status(&layer.clone().try_only()).await;
    store.clock().advance(Duration::from_millis(1));
    let behind = status(&layer).await;

    assert_eq!(first, StatusCode::OK);
    assert_eq!(at_once, StatusCode::CONFLICT);
    assert_eq!(shortly_before, StatusCode::CONFLICT);
    assert_eq!(behind, StatusCode::OK);
}

#[cfg(feature = "axum")]
mod in_axum {
    use std::sync::atomic::{AtomicU32, Ordering};

    use axum::Router;
    use axum::response::IntoResponse;
    use axum::routing::get;
    use lockcore::backend::Fault;
    use lockcore::testing::Verb;
    use lockcore::{Error, Locks};
    use lockcore_tower::{Problem, ProblemWithoutKey};

    use super::*;
    use crate::common::{lose, problem_of};

    /// The answer of a handler that returns this error.
    async fn by_a_handler(error: Error) -> Response<axum::body::Body> {
        let error = std::sync::Mutex::new(Some(error));
        let error = std::sync::Arc::new(error);
        let fail = async move || -> Result<(), Problem> {
            let error = error.lock().unwrap().take();
            Err(error.unwrap())?
        };
        let app: Router = Router::new().route("/", get(fail));
        let request = http::Request::get("/").body(axum::body::Body::empty());
        in_time(app.oneshot(request.unwrap())).await.unwrap()
    }

    async fn by_the_layer(locks: &Locks, path: &str) -> Response<String> {
        let layer = by_path(locks).try_only();
        answer(&layer, super::get(path)).await
    }

    #[tokio::test]
    async fn a_handler_that_takes_a_lock_itself_answers_as_the_layer_does() {
        let store = Store::new();
        // The answer names the rest of a lease, which must not change during the test.
        store.clock().stop();
        let (locks, down) = (store.client().unwrap(), store.client().unwrap());
        let _other = hold(&locks, NAME).await;
        lose(&down).await;
        let long = "x".repeat(5_000);
        for (locks, name, status) in [
            (&locks, NAME, StatusCode::CONFLICT),
            (&locks, &long, StatusCode::INTERNAL_SERVER_ERROR),
            (&down, "other", StatusCode::SERVICE_UNAVAILABLE),
        ] {
            let error = locks.mutex(name).try_acquire().await.unwrap_err();
            let of_the_layer = by_the_layer(locks, &format!("/{name}")).await;

            let of_the_handler = by_a_handler(error).await;

            assert_eq!(of_the_handler.status(), status);
            assert_eq!(of_the_layer.status(), status);
            let (one, other) = (of_the_handler.headers(), of_the_layer.headers());
            assert_eq!(one.get(CONTENT_TYPE), other.get(CONTENT_TYPE));
            assert_eq!(one.get(RETRY_AFTER), other.get(RETRY_AFTER));
            let body = of_the_handler.into_body().collect().await.unwrap();
            let body = String::from_utf8(body.to_bytes().into()).unwrap();
            assert_eq!(&body, of_the_layer.body());
            assert!(
                body.contains("\"type\":\"https://docs.rs/lockcore-tower/"),
                "{body}"
            );
        }
    }

    #[tokio::test]
    async fn a_handler_may_answer_without_the_name_of_the_lock_as_a_layer_that_hides_it() {
        let store = Store::new();
        store.clock().stop();
        let locks = store.client().unwrap();
        let _other = hold(&locks, NAME).await;
        let layer = by_path(&locks).try_only().hide_key();
        let inner = locks.clone();
        let rotate = async move || -> Result<(), ProblemWithoutKey> {
            let guard = inner.mutex(NAME).try_acquire().await?;
            guard.release().await?;
            Ok(())
        };
        let app: Router = Router::new().route("/", get(rotate));
        let request = http::Request::get("/").body(axum::body::Body::empty());

        let of_the_handler = in_time(app.oneshot(request.unwrap())).await.unwrap();
        let of_the_layer = answer(&layer, super::get("/order:42")).await;

        assert_eq!(of_the_handler.status(), StatusCode::CONFLICT);
        assert_eq!(of_the_handler.headers()[RETRY_AFTER], "1");
        let body = of_the_handler.into_body().collect().await.unwrap();
        let body = String::from_utf8(body.to_bytes().into()).unwrap();
        assert!(!body.contains(NAME), "{body}");
        assert_eq!(&body, of_the_layer.body());
    }

    /// A part of the handler's work may be done, even if its own process has ended the lock.
    #[tokio::test]
    async fn a_handler_whose_lock_was_lost_does_not_say_that_nothing_was_done() {
        let locks = memory();
        let guard = hold(&locks, NAME).await;
        // The shutdown gives the holder no time to finish.
        let shutdown = locks.shutdown(Duration::ZERO);
        let (lost, _) = in_time(futures_util::future::join(
            guard.while_held(std::future::pending::<()>()),
            shutdown,
        ))
        .await;

        let answer = by_a_handler(lost.unwrap_err()).await;

        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(!answer.headers().contains_key(RETRY_AFTER));
        let problem = crate::common::problem(answer).await;
        assert!(problem["type"].as_str().unwrap().ends_with("#lock-lost"));
    }

    /// The answer of a handler, and how often it did its work. The release fails with this fault.
    async fn after_a_failed_release(
        fault: Fault,
        settle: impl AsyncFn(&Locks, &AtomicU32) -> Result<String, Problem>,
    ) -> (axum::response::Response, u32) {
        let store = Store::new();
        let locks = store.client().unwrap();
        let settled = AtomicU32::new(0);
        store.fail_next(Verb::Release, fault);
        let answer = in_time(settle(&locks, &settled)).await.into_response();
        (answer, settled.load(Ordering::SeqCst))
    }

    /// If the answer said "not handled; try again", the client would settle the order twice. With
    /// the status 503, a proxy could do that.
    #[tokio::test]
    async fn a_handler_whose_release_fails_does_not_say_that_nothing_was_done() {
        for (fault, section) in [
            (Fault::Refused, "lock-uncertain"),
            (Fault::Config, "lock-misconfigured"),
        ] {
            let (answer, settled) = after_a_failed_release(fault, async |locks, settled| {
                let guard = locks.mutex(NAME).acquire().await?;
                settled.fetch_add(1, Ordering::SeqCst);
                guard.release().await?;
                Ok("settled".to_owned())
            })
            .await;

            assert_eq!(settled, 1);
            assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
            assert!(!answer.headers().contains_key(RETRY_AFTER));
            let problem = problem_of(answer, section).await;
            assert_eq!(problem["key"], NAME);
            let detail = problem["detail"].as_str().unwrap();
            assert!(detail.ends_with("may be done, or all of it."), "{detail}");
        }
    }

    /// A mistake in the handler stays a mistake, and this answer does not say "not handled" either.
    #[tokio::test]
    async fn a_handler_that_misuses_its_lock_does_not_say_that_nothing_was_done() {
        let locks = memory();
        let guard = hold(&locks, NAME).await;
        let mistake = guard.extend(Duration::ZERO).await.unwrap_err();

        let answer = by_a_handler(mistake).await;

        assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let problem = problem_of(answer, "lock-misconfigured").await;
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.ends_with("may be done, or all of it."), "{detail}");
    }

    /// This is the form that the documentation shows.
    #[tokio::test]
    async fn a_handler_that_runs_its_work_under_the_lock_answers_although_the_release_fails() {
        let (answer, settled) = after_a_failed_release(Fault::Refused, async |locks, settled| {
            let order = locks.mutex(NAME);
            order
                .run(async |_| {
                    settled.fetch_add(1, Ordering::SeqCst);
                    Ok("settled".to_owned())
                })
                .await
        })
        .await;

        assert_eq!((answer.status(), settled), (StatusCode::OK, 1));
    }
}
