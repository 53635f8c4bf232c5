//! Eight orders arrive at once for one item. With the lock they are served one after the other.
//! Without it they overwrite each other's work.
//!
//! ```text
//! cargo run -p first
//! ```
//!
//! The locks are in the memory of this process, and LOCK_URL is ignored. The example is built
//! without the other stores, so it builds quickly. The other examples show locks that several
//! processes share.

use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockcore::{Locks, distributed_lock};
use tokio::task::JoinSet;

const ORDERS: u32 = 8;

/// How many items are left. A sale reads this number, takes some time, and writes one less, as with
/// a file or a database row.
static LEFT: AtomicU32 = AtomicU32::new(0);

async fn sell() -> u32 {
    let left = LEFT.load(Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(20)).await;
    LEFT.store(left - 1, Ordering::SeqCst);
    left - 1
}

/// Sells under a lock, so there is only one sale at a time for each item.
#[distributed_lock(key = "stock:{item}", held = held)]
async fn sell_locked(item: &str, order: u32) -> Result<(), lockcore::Error> {
    let left = sell().await;
    println!(
        "order {order} got the lock of {item} under token {}: {left} left",
        held.fencing_token()?
    );
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let locks = Locks::connect("memory:")?;
    lockcore::set_default(locks.clone())?; // for annotated functions; without this line they read LOCK_URL

    LEFT.store(ORDERS, Ordering::SeqCst);
    let mut orders = JoinSet::new();
    for order in 1..=ORDERS {
        orders.spawn(sell_locked("socks", order));
    }
    while let Some(sold) = orders.join_next().await {
        sold??;
    }
    let left_with_lock = LEFT.load(Ordering::SeqCst);

    LEFT.store(ORDERS, Ordering::SeqCst);
    let mut orders = JoinSet::new();
    for _ in 1..=ORDERS {
        orders.spawn(sell());
    }
    while let Some(sold) = orders.join_next().await {
        sold?;
    }
    let left_without = LEFT.load(Ordering::SeqCst);

    println!(
        "{ORDERS} sold of {ORDERS} with lock: {left_with_lock} left; without lock: {left_without} left"
    );
    locks.shutdown(Duration::from_secs(5)).await?;
    match left_with_lock {
        0 => Ok(()),
        left => Err(format!("with the lock {left} should have been 0").into()),
    }
}
