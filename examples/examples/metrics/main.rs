//! A service whose metrics Prometheus can read.
//!
//! ```text
//! cargo run --example metrics                                 # locks in the memory of this process
//! LOCK_URL=redis://127.0.0.1/ cargo run --example metrics
//! curl http://127.0.0.1:9464/metrics
//! ```
//!
//! Beside this file are a dashboard for Grafana (`grafana.json`) and rules for alerts (`alerts.yml`).
//! The page `metrics` of the guide says what each metric counts.

use std::error::Error as StdError;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use lockcore::{Error, ErrorKind, Locks, LostReason, distributed_lock};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::net::TcpListener;

/// In seconds. A request to a store takes microseconds to milliseconds, a wait up to minutes.
const BUCKETS: [f64; 12] = [
    0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0,
];

/// How often the exporter looks after its histograms. They grow until then, or until a scrape.
const UPKEEP: Duration = Duration::from_secs(5);

#[tokio::main]
async fn main() -> Result<(), Box<dyn StdError>> {
    // The recorder comes first: a client takes its handles from it.
    let metrics = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &BUCKETS)?
        .install_recorder()?;
    let locks = match std::env::var_os("LOCK_URL") {
        Some(_) => Locks::from_env()?,
        None => Locks::connect("memory:")?,
    };
    lockcore::set_default(locks.clone())?;

    let listener = TcpListener::bind("127.0.0.1:9464").await?;
    println!(
        "the metrics are at http://{}/metrics",
        listener.local_addr()?
    );
    tokio::spawn(keep_up(metrics.clone()));
    tokio::spawn(work());
    let routes = Router::new().route("/metrics", get(async move || metrics.render()));
    axum::serve(listener, routes)
        .with_graceful_shutdown(lockcore::stop_signal())
        .await?;
    Ok(locks.shutdown(Duration::from_secs(5)).await?)
}

async fn keep_up(metrics: PrometheusHandle) {
    loop {
        tokio::time::sleep(UPKEEP).await;
        metrics.run_upkeep();
    }
}

/// Twenty customers of ten orders.
async fn work() {
    for customer in 0..20 {
        tokio::spawn(async move {
            loop {
                let order = fastrand::u32(0..10);
                match settle(order).await {
                    Ok(()) => {}
                    Err(error) if error.kind() == ErrorKind::Timeout => {}
                    Err(error) if error.kind() == ErrorKind::Lost(LostReason::Shutdown) => return,
                    Err(error) => eprintln!("customer {customer}: {error}"),
                }
                tokio::time::sleep(Duration::from_millis(fastrand::u64(10..100))).await;
            }
        });
    }
}

// The label of these locks is the template, whatever the order is.
#[distributed_lock(key = "order:{order}", wait = "200ms")]
async fn settle(order: u32) -> Result<(), Error> {
    tokio::time::sleep(Duration::from_millis(fastrand::u64(5..60))).await;
    Ok(())
}
