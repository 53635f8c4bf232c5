//! Traces of requests that share a lock: how long each waited for it, and what ran under it.
//!
//! ```text
//! cargo run --release --example traces                              # locks in the memory of this process
//! LOCK_URL=redis://127.0.0.1/ cargo run --release --example traces
//! ```
//!
//! lockcore only uses `tracing`; `tracing-opentelemetry` makes spans of OpenTelemetry of it. Here they
//! are kept in memory and printed at the end. A service gives them to an exporter, such as that of
//! `opentelemetry-otlp`. The page `logs` of the guide says what each span and field means.

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Path, State};
use axum::http::{Request, StatusCode};
use axum::routing::{Router, post};
use examples::{Orders, expect};
use lockcore::Locks;
use lockcore_tower::{Key, LockLayer};
use opentelemetry::trace::{SpanId, TracerProvider};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use tokio::sync::watch;
use tower::ServiceExt;
use tower_http::trace::TraceLayer;
use tracing::{Instrument, info_span};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

type Failure = Box<dyn Error + Send + Sync>;

const STEP: Duration = Duration::from_millis(20);

#[derive(Clone)]
struct Work {
    orders: Orders,
    /// The handlers begin their work when this is true.
    begin: watch::Receiver<bool>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder()
        .with_simple_exporter(exporter.clone())
        .build();
    let traces = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer("shop"))
        // The files, threads and busy times of spans are left out, so that the output stays short.
        .with_location(false)
        .with_threads(false)
        .with_tracked_inactivity(false)
        .with_target(false);
    // The spans of lockcore have the level DEBUG.
    let which = Targets::new()
        .with_target("lockcore", LevelFilter::DEBUG)
        .with_target("traces", LevelFilter::INFO);
    tracing_subscriber::registry()
        .with(traces.with_filter(which))
        .init();

    let locks = examples::locks_in_memory()?;
    Ok(examples::tell([&locks], story(&locks, exporter)).await)
}

fn router(locks: &Locks, work: Work) -> Router {
    let key = || Key::path_as::<u64>("id").prefix("order:");
    // Spans show the label. The name of the lock may be personal.
    let one_at_a_time = LockLayer::new(locks.clone(), key()).label("order:{id}");
    let at_once = one_at_a_time.clone().try_only();
    let span = |request: &Request<Body>| {
        info_span!(
            "request",
            http.request.method = %request.method(),
            url.path = request.uri().path(),
        )
    };
    Router::new()
        .route("/{id}/settle", post(settle).route_layer(one_at_a_time))
        .route("/{id}/cancel", post(cancel).route_layer(at_once))
        .layer(TraceLayer::new_for_http().make_span_with(span)) // around the lock
        .with_state(work)
}

async fn settle(State(mut work): State<Work>, Path(id): Path<u64>) -> StatusCode {
    let _visit = work.orders.visit("settle", id);
    if work.begin.wait_for(|begin| *begin).await.is_err() {
        return StatusCode::SERVICE_UNAVAILABLE;
    }
    let write = tokio::time::sleep(STEP);
    write.instrument(info_span!("write the receipt")).await;
    StatusCode::OK
}

async fn cancel() -> StatusCode {
    StatusCode::OK
}

async fn send(router: &Router, path: &str) -> Result<StatusCode, Failure> {
    let request = Request::post(path).body(Body::empty())?;
    let response = router.clone().oneshot(request).await?;
    let status = response.status();
    to_bytes(response.into_body(), usize::MAX).await?; // the lock is kept until here
    Ok(status)
}

async fn story(locks: &Locks, exporter: InMemorySpanExporter) -> Result<(), Failure> {
    let orders = Orders::default();
    let (begin, begun) = watch::channel(false);
    let work = Work {
        orders: orders.clone(),
        begin: begun,
    };
    let router = router(locks, work);

    let inside = orders.next_visit("settle");
    let first = send(&router, "/7/settle");
    let others = async {
        inside.await;
        let third = async {
            let refused = send(&router, "/7/cancel").await;
            begin.send_replace(true);
            refused
        };
        tokio::join!(send(&router, "/7/settle"), third)
    };
    let (first, (second, third)) = tokio::join!(first, others);
    let answers = [first?, second?, third?];
    let wanted = [StatusCode::OK, StatusCode::OK, StatusCode::CONFLICT];
    expect(&format!("{wanted:?}, not {answers:?}"), answers == wanted)?;

    let mut spans = exporter.get_finished_spans()?;
    spans.sort_by_key(|span| span.start_time);
    print(&spans, SpanId::INVALID, 0);
    check(&spans)
}

/// Prints the spans in this span, and the spans in each of them.
fn print(spans: &[SpanData], around: SpanId, depth: usize) {
    let inside = |span: &&SpanData| span.parent_span_id == around;
    for span in spans.iter().filter(inside) {
        let took = span.end_time.duration_since(span.start_time);
        let took = took.unwrap_or_default().as_micros();
        let name = format!("{:1$}{2}", "", 2 * depth, span.name);
        println!("{name:<22} {:>6}.{:03} ms", took / 1000, took % 1000);
        for field in &span.attributes {
            println!("{:40}{} = {}", "", field.key, field.value);
        }
        print(spans, span.span_context.span_id(), depth + 1);
    }
}

fn field(span: &SpanData, key: &str) -> Option<String> {
    let mut fields = span.attributes.iter();
    fields
        .find(|field| field.key.as_str() == key)
        .map(|field| field.value.to_string())
}

/// Checks that the spans tell what has happened.
fn check(spans: &[SpanData]) -> Result<(), Failure> {
    let named = |name: &'static str| spans.iter().filter(move |span| span.name == name);
    let around = |span: &SpanData| {
        let id = span.parent_span_id;
        spans
            .iter()
            .find(move |span| span.span_context.span_id() == id)
    };
    let mut ended = None;
    for held in named("held") {
        let request = around(held).filter(|around| around.name == "request");
        let request = request.ok_or("the lock is held in a request")?;
        let acquired = named("acquire").find(|span| span.parent_span_id == held.parent_span_id);
        let acquired = acquired.ok_or("a request takes the lock that it holds")?;
        let token = field(held, "lock.token");
        expect(
            "both spans have the token",
            token.is_some() && token == field(acquired, "lock.token"),
        )?;
        expect("one holder at a time", ended < Some(held.start_time))?;
        ended = Some(held.end_time.min(request.end_time));
    }
    let under = named("write the receipt")
        .filter(|write| around(write).is_some_and(|around| around.name == "held"))
        .count();
    let refused = named("acquire")
        .filter(|acquire| field(acquire, "error.type").as_deref() == Some("busy"))
        .count();
    expect("two requests that work, and one that does not", {
        named("held").count() == 2 && under == 2 && refused == 1
    })?;
    println!(
        "\n{under} requests worked under the lock, one after the other, and {refused} was refused"
    );
    Ok(())
}
