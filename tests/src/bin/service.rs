//! A service like the one in the README: it works under a lock until a signal ends it. It prints
//! `HELD` when its work begins. The work never ends by itself. It prints `ENDED` when it has
//! released everything.
//!
//! The `LOCK_…` variables choose the store, namespace and ttl. The first argument is the key.
//! Without a key the service does no work. It prints `LISTENS`, waits for a line of input, and only
//! after that waits for a signal.

use std::time::Duration;

use lockcore::{Error, distributed_lock};

#[distributed_lock(key = key)]
async fn work(key: String) -> Result<(), Error> {
    println!("HELD");
    std::future::pending().await
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    match std::env::args().nth(1) {
        Some(key) => tokio::select! {
            done = work(key) => done?,
            () = lockcore::stop_signal() => {}
        },
        None => {
            let stopped = lockcore::stop_signal();
            println!("LISTENS");
            // Blocks the thread, so nothing polls the signal meanwhile.
            let _ = std::io::stdin().read_line(&mut String::new());
            stopped.await;
        }
    }
    lockcore::shutdown(Duration::from_secs(5)).await?;
    println!("ENDED");
    Ok(())
}
