//! A process that holds a lock and may be killed. Lines on standard input tell it what to do.
//!
//! ```text
//! acquire   → HELD <token> | FAILED <kind>     waits as long as LOCK_WAIT says
//! try       → HELD <token> | FAILED <kind>     does not wait
//! downgrade → DOWNGRADED | FAILED <kind>       it only reads from here on
//! detach    → DETACHED <text> | FAILED <kind>  gives the lock away
//! adopt <text> → HELD <token> | FAILED <kind>  takes over a lock that was given away
//! release   → RELEASED Released | RELEASED AlreadyLost | FAILED <kind>
//! valid     → VALID true | VALID false         the guard's own judgement, without asking the store
//! lost      → LOST <reason>                    when the guard is lost
//! asked     → ASKED <grace> <why>, by <whom>   when somebody asks for it
//! ```
//!
//! The `LOCK_…` variables choose the store, namespace, ttl and wait. The process ends when its
//! standard input ends, and drops a guard that it still has.

use std::io::{self, BufRead as _};
use std::time::Duration;

use clap::{Parser, Subcommand};
use lockcore::{Error, Guard, Lock, Locks};

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    lock: Which,
    /// Does not renew the lease.
    #[arg(long, global = true)]
    no_renew: bool,
}

#[derive(Subcommand)]
enum Which {
    Mutex {
        name: String,
    },
    Read {
        name: String,
    },
    Write {
        name: String,
    },
    Permits {
        permits: u32,
        capacity: u32,
        name: String,
    },
}

impl Arguments {
    fn lock(self, locks: &Locks) -> Lock {
        let lock = match self.lock {
            Which::Mutex { name } => locks.mutex(name),
            Which::Read { name } => locks.rwlock(name).read(),
            Which::Write { name } => locks.rwlock(name).write(),
            Which::Permits {
                permits,
                capacity,
                name,
            } => locks.semaphore(name, capacity).permits(permits),
        };
        lock.renew(!self.no_renew)
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let locks = Locks::from_env()?;
    let lock = Arguments::parse().lock(&locks);
    let mut guard = None;

    // Blocking this thread for the next line delays nothing: it is the runtime's main thread, and
    // drives no other task.
    for line in io::stdin().lock().lines() {
        match line?.as_str() {
            "acquire" => guard = report(lock.acquire().await),
            "try" => guard = report(lock.try_acquire().await),
            "release" => match held(guard.take())?.release().await {
                Ok(release) => println!("RELEASED {release:?}"),
                Err(error) => println!("FAILED {:?}", error.kind()),
            },
            "detach" => match held(guard.take())?.detach().await {
                Ok(text) => println!("DETACHED {text}"),
                Err(refused) => {
                    println!("FAILED {:?}", refused.error().kind());
                    guard = Some(refused.into_guard());
                }
            },
            "downgrade" => match held(guard.as_mut())?.downgrade().await {
                Ok(()) => println!("DOWNGRADED"),
                Err(error) => println!("FAILED {:?}", error.kind()),
            },
            "valid" => println!("VALID {}", held(guard.as_ref())?.is_valid()),
            "asked" => {
                let asked = held(guard.as_ref())?.revoked().await;
                println!("ASKED {:?} {}, by {}", asked.grace, asked.why, asked.by);
            }
            "lost" => println!("LOST {:?}", held(guard.as_ref())?.lost().await),
            other => match other.strip_prefix("adopt ") {
                Some(text) => guard = report(locks.adopt(text).await),
                None => return Err(format!("not a command: {other:?}").into()),
            },
        }
    }

    drop(guard);
    Ok(locks.shutdown(Duration::from_secs(5)).await?)
}

fn report(acquired: Result<Guard, Error>) -> Option<Guard> {
    match acquired {
        Ok(guard) => {
            println!("HELD {}", guard.grant_id());
            Some(guard)
        }
        Err(error) => {
            eprintln!("holder: {error}");
            println!("FAILED {:?}", error.kind());
            None
        }
    }
}

fn held<G>(guard: Option<G>) -> Result<G, &'static str> {
    guard.ok_or("nothing is held")
}
