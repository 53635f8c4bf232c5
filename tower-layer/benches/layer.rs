//! Measures a service alone, and the same service under a lock per request. The difference is the
//! cost of the layer when no other request needs the key.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::convert::Infallible;

use bytes::Bytes;
use criterion::{Criterion, criterion_group, criterion_main};
use http::{Request, Response};
use http_body_util::{BodyExt, Empty, Full};
use lockcore::Locks;
use lockcore_tower::{BoxError, Key, LockLayer};
use tokio::runtime::Runtime;
use tower::{Layer, Service, ServiceExt, service_fn};

type In = Request<Empty<Bytes>>;

/// One request from its call to the end of its response.
async fn one<S, B>(service: &S)
where
    S: Service<In, Response = Response<B>, Error = Infallible> + Clone,
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
{
    let request = Request::post("/orders?id=42").header("id", "42");
    let request = request.body(Empty::new()).unwrap();
    let response = service.clone().oneshot(request).await.unwrap();
    let body = response.into_body().collect().await;
    assert_eq!(body.map_err(Into::into).unwrap().to_bytes(), "done");
}

fn requests(criterion: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let locks = Locks::connect("memory:").unwrap();
    let alone = service_fn(async |_: In| {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"done"))))
    });
    let layer = |key| LockLayer::new(locks.clone(), key).layer(alone);
    let by_header = layer(Key::header("id").prefix("order:"));
    let by_template = layer(Key::template("order:{header.id}:{query.id}"));
    let passing = layer(Key::header("no-such").optional());

    let mut group = criterion.benchmark_group("a request");
    group.bench_function("alone", |bencher| {
        bencher.to_async(&runtime).iter(|| one(&alone));
    });
    group.bench_function("passing through", |bencher| {
        bencher.to_async(&runtime).iter(|| one(&passing));
    });
    group.bench_function("locked by a header", |bencher| {
        bencher.to_async(&runtime).iter(|| one(&by_header));
    });
    group.bench_function("locked by a template", |bencher| {
        bencher.to_async(&runtime).iter(|| one(&by_template));
    });
    group.bench_function("a lock alone", |bencher| {
        bencher.to_async(&runtime).iter(async || {
            let guard = locks.mutex("order:42").acquire().await.unwrap();
            guard.release().await.unwrap();
        });
    });
    group.finish();
}

criterion_group!(benches, requests);
criterion_main!(benches);
