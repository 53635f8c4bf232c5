//! A service as the README has it: work under a lock, until a signal ends it. It says `HELD` when it is at work, which
//! never comes to an end, and `ENDED` when it has given everything back.
//!
//! Which store, namespace and ttl come from the `LOCK_…` variables, the key from the first argument. Without a key it has
//! no work: it says `LISTENS` and looks for a signal when it is told a line.

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
            // Blocks the thread that would poll it.
            let _ = std::io::stdin().read_line(&mut String::new());
            stopped.await;
        }
    }
    lockcore::shutdown(Duration::from_secs(5)).await?;
    println!("ENDED");
    Ok(())
}
