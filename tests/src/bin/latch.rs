//! A process that uses a latch and a counter of the same name. Lines on standard input tell it what
//! to do.
//!
//! ```text
//! set N     → SET true | SET false
//! down N    → LEFT <count>
//! wait N    → OPEN <count of those that went on>      N tasks wait, and all have ended
//! add N     → DONE                                    N requests, each adds one
//! ```
//!
//! Any request that fails is answered `FAILED <kind>`. The `LOCK_…` variables choose the store,
//! namespace and wait.

use std::io::{self, BufRead as _};
use std::time::Duration;

use lockcore::{Error, Locks};
use tokio::task::JoinSet;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let locks = Locks::from_env()?;
    let name = std::env::args().nth(1).ok_or("the name is missing")?;

    // Blocking this thread for the next line delays nothing: it is the runtime's main thread, and
    // drives no other task.
    for line in io::stdin().lock().lines() {
        let line = line?;
        let (verb, number) = line.split_once(' ').ok_or("a verb and a number")?;
        match carry_out(&locks, &name, verb, number.parse()?).await {
            Ok(answer) => println!("{answer}"),
            Err(error) => {
                eprintln!("latch: {error}");
                println!("FAILED {:?}", error.kind());
            }
        }
    }

    Ok(locks.shutdown(Duration::from_secs(5)).await?)
}

async fn carry_out(locks: &Locks, name: &str, verb: &str, number: u64) -> Result<String, Error> {
    let latch = locks.latch(name);
    Ok(match verb {
        "set" => format!("SET {}", latch.try_set(number).await?),
        "down" => format!("LEFT {}", latch.count_down_by(number).await?),
        "wait" => {
            let mut waiters = JoinSet::new();
            for _ in 0..number {
                let latch = latch.clone();
                waiters.spawn(async move { latch.wait_for_zero().await });
            }
            let mut went_on = 0;
            for outcome in waiters.join_all().await {
                outcome?;
                went_on += 1;
            }
            format!("OPEN {went_on}")
        }
        "add" => {
            let counter = locks.counter(name);
            for _ in 0..number {
                counter.add(1).await?;
            }
            "DONE".to_owned()
        }
        other => return Ok(format!("not a verb: {other}")),
    })
}
