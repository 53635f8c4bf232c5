//! A process that forks: what a client of the child's own can do at a store.
//!
//! ```text
//! forked URL           the parent holds `parent` when it forks
//! forked URL --idle    the parent has a client when it forks, which has not been asked for anything
//!
//! CHILD HELD <token> | CHILD FAILED <kind> <error>    a client that the child makes asks for `child`
//! CHILD RELEASED Released | CHILD RELEASED AlreadyLost          when standard input has ended
//! PARENT VALID true | PARENT VALID false              when the child has ended, if it holds `parent`
//! ```

use std::io;
use std::time::Duration;

use clap::Parser;
use fork::{Fork, fork, waitpid};
use lockcore::Locks;
use tokio::runtime::Runtime;

#[derive(Parser)]
struct Arguments {
    url: String,
    /// Asks for nothing before the fork.
    #[arg(long)]
    idle: bool,
}

// The runtimes are made by hand: that of the parent has no threads in the child.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    let runtime = runtime()?;
    let locks = client(&arguments.url)?;
    let held = match arguments.idle {
        true => None,
        false => Some(runtime.block_on(locks.mutex("parent").acquire())?),
    };
    match fork()? {
        Fork::Child => {
            // What the parent has is not dropped here.
            let outcome = child(&arguments.url);
            if let Err(error) = &outcome {
                eprintln!("forked: {error}");
            }
            std::process::exit(i32::from(outcome.is_err()));
        }
        Fork::Parent(child) => waitpid(child)?,
    };
    if let Some(held) = held {
        println!("PARENT VALID {}", held.is_valid());
    }
    Ok(())
}

fn child(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    let runtime = runtime()?;
    let locks = client(url)?;
    let lock = locks.mutex("child").wait(Duration::from_secs(5));
    match runtime.block_on(lock.acquire()) {
        Ok(held) => {
            println!("CHILD HELD {}", held.token());
            io::copy(&mut io::stdin(), &mut io::sink())?;
            println!("CHILD RELEASED {:?}", runtime.block_on(held.release())?);
        }
        Err(error) => println!("CHILD FAILED {:?} {error}", error.kind()),
    }
    Ok(())
}

fn runtime() -> io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
}

fn client(url: &str) -> Result<Locks, lockcore::Error> {
    Locks::builder().url(url).namespace("test").build()
}
