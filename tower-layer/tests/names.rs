//! Tests of the limit on the number of different names that requests may lock, and of the answer to
//! a request beyond the limit.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{In, by_path, get, in_time, problem_of};
use http::{HeaderValue, Method, Response, StatusCode};
use lockcore::testing::Store;
use lockcore_tower::{LockBody, LockLayer};
use tower::{Layer, ServiceExt, service_fn};

const HOUR: Duration = Duration::from_secs(3600);

/// Asks a layer, and counts how often the handler is called.
async fn ask(layer: &LockLayer, calls: &Arc<AtomicU32>, request: In) -> Response<LockBody<String>> {
    let handler = service_fn({
        let calls = Arc::clone(calls);
        move |_: In| {
            calls.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, Infallible>(Response::new(String::new())) }
        }
    });
    in_time(layer.layer(handler).oneshot(request))
        .await
        .unwrap()
}

#[tokio::test]
async fn a_name_too_many_is_refused_before_the_store_hears_of_it_and_the_others_go_on() {
    let store = Store::new();
    let locks = store.client().unwrap();
    let layer = by_path(&locks).max_names(2, HOUR);
    let calls = Arc::new(AtomicU32::new(0));
    for name in ["/a", "/b", "/a", "/b"] {
        // Each request uses a clone of the layer. A router makes one for each route.
        let answer = ask(&layer.clone(), &calls, get(name)).await;
        assert_eq!(answer.status(), StatusCode::OK, "{name}");
    }

    // From here on, the store answers no request.
    store.freeze();
    let refused = ask(&layer, &calls, get("/c")).await;
    let mut to_grpc = get("/d");
    *to_grpc.method_mut() = Method::POST;
    let grpc = HeaderValue::from_static("application/grpc");
    to_grpc.headers_mut().insert("content-type", grpc);
    let in_grpc = ask(&layer, &calls, to_grpc).await;
    store.thaw();
    let known = ask(&layer, &calls, get("/a")).await;
    let unlocked = ask(&layer, &calls, get("/")).await;

    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let retry_after = refused.headers()["retry-after"].to_str().unwrap();
    let retry_after: u64 = retry_after.parse().unwrap();
    assert!((3_500..=3_600).contains(&retry_after), "{retry_after}");
    problem_of(refused, "lock-names").await;
    assert_eq!(in_grpc.headers()["grpc-status"], "8");
    assert_eq!(known.status(), StatusCode::OK);
    assert_eq!(unlocked.status(), StatusCode::OK);
    assert_eq!(calls.load(Ordering::SeqCst), 6);
}

#[tokio::test]
async fn the_next_stretch_of_time_begins_with_no_name() {
    const STRETCH: Duration = Duration::from_millis(50);
    let layer = by_path(&common::memory()).max_names(1, STRETCH);
    let calls = Arc::new(AtomicU32::new(0));

    // Repeats each request until its name passes, which may be only in the next period.
    in_time(async {
        for name in ["/a", "/b", "/c"] {
            while ask(&layer, &calls, get(name)).await.status() != StatusCode::OK {
                tokio::task::yield_now().await;
            }
        }
    })
    .await;

    assert_eq!(calls.load(Ordering::SeqCst), 3);
}

#[test]
#[should_panic(expected = "0 names in 1s: both are more than zero")]
fn a_bound_of_no_names_is_seen_at_the_start() {
    let _ = by_path(&common::memory()).max_names(0, Duration::from_secs(1));
}
