//! A live page of a busy shop: `cargo run -p examples --example dashboard`, then open
//! http://127.0.0.1:3000/locks. An argument gives another address. The store is the one of LOCK_URL,
//! or memory.
//!
//! The page is open to everybody who reaches the port of this machine. In a service, put it behind
//! your own authentication.

use std::time::Duration;

use axum::Router;
use lockcore::{Error, Locks};
use lockcore_tower::Dashboard;

/// What the clerks work on.
const NAMES: [&str; 6] = [
    "order:1",
    "order:2",
    "order:3",
    "stock:lamp",
    "stock:chair",
    "report:daily",
];
const CLERKS: usize = 14;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let locks = match std::env::var("LOCK_URL") {
        Ok(_) => Locks::from_env()?,
        Err(_) => Locks::connect("memory:")?,
    };
    locks.ready(Duration::from_secs(5)).await?;
    for number in 1..=CLERKS {
        tokio::spawn(clerk(locks.clone(), number));
    }

    let page = Dashboard::new(locks.clone()).actions(true);
    let app = Router::new().nest("/locks", page.into_router());
    let address = std::env::args().nth(1);
    let address = address.as_deref().unwrap_or("127.0.0.1:3000");
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("http://{}/locks", listener.local_addr()?);
    let server = axum::serve(listener, app).with_graceful_shutdown(lockcore::stop_signal());
    locks
        .run_until_stopped(server, Duration::from_secs(5))
        .await?
        .transpose()?;
    Ok(())
}

/// Takes one lock after the other, and works for a few seconds under each.
async fn clerk(locks: Locks, number: usize) {
    loop {
        let name = fastrand::choice(NAMES).unwrap_or(NAMES[0]);
        let lock = locks.mutex(name).wait(Duration::from_secs(30));
        let lock = lock.owner(format!("clerk {number}"));
        let worked = lock.run(async |_| {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(500..6_000))).await;
            Ok::<_, Error>(())
        });
        if let Err(error) = worked.await {
            // An operator has taken the lock, or the wait is over.
            println!("clerk {number}: {error}");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
}
