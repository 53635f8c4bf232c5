//! A process that forks. It shows the state of the parent's lock in the child, and what a client of
//! the child can do at a store.
//!
//! ```text
//! forked URL            the parent holds `parent` when it forks
//! forked URL --idle     the parent has a client when it forks. The client has sent no request
//! forked URL --body     a body that runs under `parent` forks, and awaits in the child
//! forked URL --changes  the parent follows a counter and a value when it forks
//! forked URL --default  the parent has a default client. `LOCK_URL` and `LOCK_NAMESPACE` name the
//!                       same store
//!
//! CHILD SEES <reason> <release> <kind>
//!     if the parent has a lock: why the child sees it as lost, the result of its release, and the
//!     error when the child acquires with the parent's client
//! CHILD HELD <token> | CHILD FAILED <kind> <error>
//!     the child has made a client of its own, which acquires `child`
//! CHILD RELEASED Released | CHILD RELEASED AlreadyLost
//!     standard input has ended. After this line the child ends
//! PARENT VALID true | PARENT VALID false
//!     the child has ended, and the parent has a lock
//! CHILD WENT ON | CHILD STOPPED <kind>
//!     the result of the body in the child
//! CHILD TOLD <kind>
//!     the error of the child when it asks for the next change of the counter, or of the value
//! PARENT WENT ON
//!     the body has ended in the parent
//! <process> WORKED | <process> FAILED <kind> <error>
//!     the result of an annotated function in this process
//! ```

use std::io;
use std::thread;
use std::time::Duration;

use clap::Parser;
use fork::{Fork, fork, waitpid};
use lockcore::{Guard, Locks, distributed_lock};
use tokio::runtime::Runtime;

#[derive(Parser)]
struct Arguments {
    url: String,
    #[arg(long, default_value = "test")]
    namespace: String,
    /// Sends no request before the fork
    #[arg(long)]
    idle: bool,
    /// Forks while it holds the lock
    #[arg(long, conflicts_with = "idle")]
    body: bool,
    /// Follows a counter and a value before the fork
    #[arg(long, conflicts_with_all = ["idle", "body"])]
    changes: bool,
    /// Works with the process-wide default
    #[arg(long, conflicts_with_all = ["idle", "body", "changes"])]
    default: bool,
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

// This function makes its runtimes by hand: in the child, the parent's runtime has no threads.
fn main() -> Outcome {
    let arguments = Arguments::parse();
    if arguments.default {
        return default(&arguments);
    }
    let runtime = runtime()?;
    let locks = client(&arguments)?;
    if arguments.body {
        return body(&runtime, &locks);
    }
    if arguments.changes {
        return changes(&runtime, &locks);
    }
    let mut held = match arguments.idle {
        true => None,
        false => Some(runtime.block_on(locks.mutex("parent").acquire())?),
    };
    in_child(|| {
        parents(&locks, held.take())?;
        child(&arguments)
    })?;
    if let Some(held) = held {
        println!("PARENT VALID {}", held.is_valid());
    }
    Ok(())
}

/// Runs work in a forked child. Returns in the parent when the child has ended.
fn in_child(work: impl FnOnce() -> Outcome) -> Outcome {
    match fork()? {
        Fork::Child => {
            let outcome = work();
            if let Err(error) = &outcome {
                eprintln!("forked: {error}");
            }
            std::process::exit(i32::from(outcome.is_err()));
        }
        Fork::Parent(child) => Ok(waitpid(child).map(drop)?),
    }
}

fn default(arguments: &Arguments) -> Outcome {
    lockcore::set_default(client(arguments)?)?;
    annotated("PARENT")?;
    in_child(|| {
        annotated("CHILD")?;
        in_child(|| {
            lockcore::set_default(client(arguments)?)?;
            annotated("GRANDCHILD")
        })
    })?;
    // This thread uses the default client all the time. So it is likely to use it at the moment of
    // a fork.
    thread::spawn(|| while lockcore::default_locks().is_ok() {});
    for _ in 0..20 {
        in_child(|| annotated("CHILD"))?;
    }
    runtime()?.block_on(lockcore::shutdown(Duration::from_secs(5)))?;
    annotated("PARENT")?;
    in_child(|| annotated("CHILD"))
}

fn annotated(process: &str) -> Outcome {
    #[distributed_lock(key = "annotated")]
    async fn work() -> Result<(), lockcore::Error> {
        Ok(())
    }

    match runtime()?.block_on(work()) {
        Ok(()) => println!("{process} WORKED"),
        Err(error) => println!("{process} FAILED {:?} {error}", error.kind()),
    }
    Ok(())
}

fn body(runtime: &Runtime, locks: &Locks) -> Outcome {
    let lock = locks.mutex("parent");
    let forks = lock.run(async |_| match fork()? {
        Fork::Child => {
            tokio::task::yield_now().await;
            println!("CHILD WENT ON");
            Ok(())
        }
        Fork::Parent(child) => {
            waitpid(child)?;
            println!("PARENT WENT ON");
            Ok::<_, Box<dyn std::error::Error>>(())
        }
    });
    let outcome = runtime.block_on(forks);
    if let Err(error) = &outcome
        && let Some(error) = error.downcast_ref::<lockcore::Error>()
    {
        println!("CHILD STOPPED {:?}", error.kind());
        std::process::exit(0);
    }
    outcome
}

fn changes(runtime: &Runtime, locks: &Locks) -> Outcome {
    let mut counts = locks.counter("followed").changes();
    let mut values = locks.value("followed").changes();
    runtime.block_on(counts.next())?;
    runtime.block_on(values.next())?;
    in_child(|| {
        let runtime = self::runtime()?;
        let told = [
            runtime.block_on(counts.next()).map(drop),
            runtime.block_on(values.next()).map(drop),
        ];
        for told in told {
            println!("CHILD TOLD {:?}", told.map_err(|error| error.kind()));
        }
        Ok(())
    })
}

/// Prints the state of the parent's lock and client as the child sees them, and drops them.
fn parents(locks: &Locks, held: Option<Guard>) -> Outcome {
    let Some(held) = held else { return Ok(()) };
    let runtime = runtime()?;
    assert!(!held.is_valid() && held.remaining().is_zero());
    let reason = runtime.block_on(held.lost());
    let found = runtime.block_on(held.release())?;
    let asked = runtime.block_on(locks.mutex("parent").try_acquire());
    let refused = asked.err().map(|error| error.kind());
    println!("CHILD SEES {reason:?} {found:?} {refused:?}");
    Ok(())
}

fn child(arguments: &Arguments) -> Outcome {
    let runtime = runtime()?;
    let locks = client(arguments)?;
    let lock = locks.mutex("child").wait(Duration::from_secs(5));
    match runtime.block_on(lock.acquire()) {
        Ok(held) => {
            println!("CHILD HELD {}", held.grant_id());
            io::copy(&mut io::stdin(), &mut io::sink())?;
            println!("CHILD RELEASED {:?}", runtime.block_on(held.release())?);
        }
        Err(error) => {
            println!("CHILD FAILED {:?} {error}", error.kind());
            io::copy(&mut io::stdin(), &mut io::sink())?;
        }
    }
    Ok(())
}

fn runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
}

fn client(of: &Arguments) -> Result<Locks, lockcore::Error> {
    let builder = Locks::builder().url(&of.url);
    // The machine may stand still.
    let builder = builder.op_timeout(Duration::from_secs(30));
    builder.namespace(&of.namespace).build()
}
