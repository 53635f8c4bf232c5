//! Tests of the fields and lines that the layers add to the traces.
//!
//! This program has only one test, because `tracing` remembers for each place in the code whether a
//! subscriber listens. If one test reaches such a place while another test begins to listen, the
//! place can be switched off for the whole program.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use common::*;
use futures_util::FutureExt;
use http::header::CONTENT_TYPE;
use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use lockcore_tower::{FenceLayer, Key, LockLayer, TOKEN_HEADER};
use tower::limit::ConcurrencyLimit;
use tower::{Layer, ServiceExt, service_fn};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::FmtSpan;

#[derive(Clone, Default)]
struct Traces(Arc<Mutex<Vec<u8>>>);

impl Traces {
    /// The text since the last call.
    fn take(&self) -> String {
        String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap()
    }
}

impl std::io::Write for Traces {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn the_label_the_first_name_too_many_and_refused_requests_are_in_the_traces() {
    let traces = Traces::default();
    let writer = traces.clone();
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::DEBUG)
        .with_span_events(FmtSpan::NEW)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .init();

    let layer = LockLayer::new(memory(), Key::template("order:42")).label("order:{id}");
    let handler =
        service_fn(async |_: In| Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new())));
    let response = layer.layer(handler).oneshot(get("/")).await.unwrap();

    assert_eq!(response.status(), StatusCode::OK);
    let told = traces.take();
    assert!(told.contains(r#"label="order:{id}""#), "{told}");

    let key = Key::template("order:{header.x-order:u64}");
    let layer = LockLayer::new(memory(), key);
    let request = Request::get("/").header("x-order", "42");
    let request = request.body(Empty::new()).unwrap();
    layer.layer(handler).oneshot(request).await.unwrap();

    let told = traces.take();
    let label = r#"label="order:{header.x-order}""#;
    assert!(told.contains(label), "{told}");

    let layer = by_path(&memory()).max_names(2, Duration::from_secs(3600));
    for path in ["/a", "/b", "/c", "/d"] {
        layer.layer(handler).oneshot(get(path)).await.unwrap();
    }

    let told = traces.take();
    let warnings: Vec<_> = told.lines().filter(|it| it.contains("WARN")).collect();
    assert_eq!(warnings.len(), 1, "{told}");
    assert!(
        warnings[0].contains("see LockLayer::max_names most=2 per=3600s"),
        "{told}"
    );

    // The second write waits for the end of the first write, and is late when the third comes.
    let fence = FenceLayer::new(Key::template("account:7"));
    let endless = service_fn(async |_: In| {
        std::future::pending::<()>().await;
        Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
    });
    let write = |token: &str| {
        let request = Request::post("/").header(TOKEN_HEADER, token);
        let request = request.body(Empty::new()).unwrap();
        Box::pin(fence.layer(endless).oneshot(request))
    };
    let [mut first, mut overtaken, mut third] = ["1", "2", "3"].map(write);
    for write in [&mut first, &mut overtaken, &mut third] {
        assert!(write.now_or_never().is_none());
    }
    assert_eq!(traces.take(), "");

    let refused = in_time(overtaken).await.unwrap();

    assert_eq!(refused.status(), StatusCode::PRECONDITION_FAILED);
    assert_refused(&traces.take(), "Late");

    // The lock is granted, but the deadline of the client has passed.
    let hurried = Request::post("/order:42")
        .header(CONTENT_TYPE, "application/grpc")
        .header("grpc-timeout", "0n");
    let hurried = hurried.body(Empty::new()).unwrap();
    let refused = by_path(&memory()).layer(handler).oneshot(hurried);

    let refused = in_time(refused).await.unwrap();

    assert_eq!(refused.headers()["grpc-status"], "4");
    assert_refused(&traces.take(), "Overdue");

    // This request gives its permit back while it waits for the lock, and another takes it.
    let locks = memory();
    let other = hold(&locks, "order:42").await;
    let service = ConcurrencyLimit::new(endless, 1);
    let layer = by_path(&locks).wait(SOON * 12);
    let mut waits = Box::pin(layer.layer(service.clone()).oneshot(get("/order:42")));
    assert!((&mut waits).now_or_never().is_none());
    let mut busy = Box::pin(service.oneshot(get("/")));
    assert!((&mut busy).now_or_never().is_none());
    other.release().await.unwrap();
    // The wait for the service uses tokio's clock, which now moves when no task can run.
    tokio::time::pause();

    let refused = waits.await.unwrap();

    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_refused(&traces.take(), "Unavailable");
}

/// Checks that a line tells of a refused request and of this kind of problem.
fn assert_refused(told: &str, kind: &str) {
    let tells = |line: &str| {
        line.contains("DEBUG") && line.contains("request refused") && line.contains(kind)
    };
    assert!(told.lines().any(tells), "{told}");
}
