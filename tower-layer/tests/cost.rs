//! Tests that count the allocations of a request whose lock is free. These numbers are exact.
//! `benches/layer.rs` measures time.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::convert::Infallible;

use allocation_counter::AllocationInfo;
use bytes::Bytes;
use common::{In, SOON, memory};
use futures_util::FutureExt;
use http::{Request, Response};
use http_body_util::{BodyExt, Empty, Full};
use lockcore_tower::{BoxError, Key, LockLayer};
use tokio::task::coop::unconstrained;
use tower::{Layer, Service, ServiceExt, service_fn};

/// Allocations of this thread for one request.
fn of_a_request<S, B>(service: &S) -> u64
where
    S: Service<In, Response = Response<B>, Error = Infallible> + Clone,
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
{
    allocations(async || {
        let request = Request::get("/").header("id", "42");
        let request = request.body(Empty::new()).unwrap();
        let response = service.clone().oneshot(request).await.unwrap();
        let body = response.into_body().collect().await;
        body.map_err(Into::into).unwrap();
    })
}

/// The smallest number of allocations in many rounds. Some rounds allocate more, because they fetch
/// random numbers or grow a map.
fn allocations(round: impl AsyncFn()) -> u64 {
    let rounds = (0..100).map(|_| {
        let one = || {
            // The memory store answers at once. Without `unconstrained`, tokio's budget for a task
            // would make it wait.
            unconstrained(round()).now_or_never().expect("no wait");
        };
        let AllocationInfo { count_total, .. } = allocation_counter::measure(one);
        count_total
    });
    rounds.min().unwrap()
}

/// The allocations of one acquire and its release in memory: the name (given and shared), the
/// request, the lease and the hold, the answers of the store to both requests, the store's list of
/// tickets, the release and its result.
const OF_A_LOCK: u64 = 9;

/// With the feature `metrics` of lockcore, the answers to both requests are measured.
const OF_METRICS: u64 = 2;

/// The layer boxes its future and its release. It allocates three times for `Held` as the first
/// extension of a request.
const OF_THE_LAYER: u64 = 5;

#[tokio::test]
async fn a_request_allocates_little_more_than_its_lock() {
    let locks = memory();
    locks.ready(SOON).await.unwrap();
    let alone = service_fn(async |_: In| {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"done"))))
    });
    let layer = LockLayer::new(locks.clone(), Key::header("id").prefix("order:"));
    let passing = LockLayer::new(locks.clone(), Key::header("none").optional());

    let (service, locked) = (of_a_request(&alone), of_a_request(&layer.layer(alone)));
    let passed = of_a_request(&passing.layer(alone));
    let lock = allocations(async || {
        let guard = locks.mutex("order:42").acquire().await.unwrap();
        guard.release().await.unwrap();
    });

    println!("service {service}, passing through {passed}, lock {lock}, locked {locked}");
    assert_eq!(passed, service);
    assert!(lock <= OF_A_LOCK || lock == OF_A_LOCK + OF_METRICS);
    assert!(locked <= service + lock + OF_THE_LAYER);
}
