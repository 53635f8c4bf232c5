//! An HTTP server like the one in the README. `GET /orders/ID` answers with a body that never ends,
//! under the lock of this order.
//!
//! It prints `LISTENS` and its port, `HELD` when a body begins, `DROPPED` when a body is dropped,
//! and `STOPPED` at the first signal. At its end it prints `ENDED`. The `LOCK_…` variables choose
//! the store and the namespace. The argument is how many seconds it may take after a signal.

use std::convert::Infallible;
use std::error::Error;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::get;
use futures_util::stream;
use lockcore::Locks;
use lockcore_tower::{Key, LockLayer};
use tokio::net::TcpListener;

/// Owned by a body.
struct Inside;

impl Drop for Inside {
    fn drop(&mut self) {
        println!("DROPPED");
    }
}

async fn endless() -> Body {
    println!("HELD");
    let part = Bytes::from_static(&[0; 64 * 1024]);
    Body::from_stream(stream::repeat_with({
        let inside = Inside;
        move || {
            let _ = &inside;
            Ok::<_, Infallible>(part.clone())
        }
    }))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let within = std::env::args()
        .nth(1)
        .and_then(|seconds| seconds.parse().ok());
    let within = Duration::from_secs(within.ok_or("how many seconds may it take?")?);
    let locks = Locks::from_env()?;
    locks.ready(Duration::from_secs(5)).await?;
    let one_per_order = LockLayer::new(locks.clone(), Key::path("id").prefix("order:"));
    let app = Router::new().route("/orders/{id}", get(endless).route_layer(one_per_order));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let stopped = lockcore::stop_signal();
    tokio::spawn(async {
        stopped.await;
        println!("STOPPED");
    });
    let port = listener.local_addr()?.port();
    let server = axum::serve(listener, app).with_graceful_shutdown(lockcore::stop_signal());
    let served = locks.run_until_stopped(server, within);
    // From here on, signals are caught, although nothing has been polled yet.
    println!("LISTENS {port}");
    served.await?.transpose()?;
    println!("ENDED");
    Ok(())
}
