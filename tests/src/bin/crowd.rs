//! Many tasks that want one lock: `crowd NAME TASKS SECONDS FOLDER`.
//!
//! Each task acquires the mutex again and again. Inside, it visits the file witness in FOLDER and
//! appends its token to the file `tokens` there. Errors of the lock are counted, and the task tries
//! again. Prints `DONE <visits> <errors>`. The `LOCK_…` variables choose the store.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Parser;
use lockcore::{Error, Locks};
use tests::witness::FileWitness;

/// Many tasks acquire one mutex again and again. Prints DONE, the number of visits and the number
/// of errors.
#[derive(Parser)]
struct Arguments {
    /// Name of the mutex
    name: String,
    /// Number of tasks
    tasks: usize,
    /// Duration in seconds
    seconds: u64,
    /// Folder of the witness and of the file `tokens`
    folder: PathBuf,
    /// How long each visit lasts
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration)]
    stay: Duration,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::parse();
    let locks = Locks::from_env()?;
    let end = Instant::now() + Duration::from_secs(arguments.seconds);
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..arguments.tasks {
        let lock = locks.mutex(&arguments.name);
        let (folder, stay) = (arguments.folder.clone(), arguments.stay);
        tasks.spawn(async move {
            let witness = FileWitness::in_folder(&folder);
            let (mut visits, mut errors) = (0u64, 0u64);
            while Instant::now() < end {
                let outcome = lock
                    .run(async |held| {
                        let visit = witness.write();
                        if !stay.is_zero() {
                            tokio::time::sleep(stay).await;
                        }
                        let mut tokens = File::options()
                            .create(true)
                            .append(true)
                            .open(folder.join("tokens"))
                            .unwrap();
                        tokens
                            .write_all(format!("{}\n", held.grant_id()).as_bytes())
                            .unwrap();
                        drop(visit);
                        Ok::<_, Error>(())
                    })
                    .await;
                match outcome {
                    Ok(()) => visits += 1,
                    Err(error) => {
                        eprintln!("crowd: {error}");
                        errors += 1;
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                }
            }
            (visits, errors)
        });
    }
    let (mut visits, mut errors) = (0, 0);
    while let Some(done) = tasks.join_next().await {
        let (visited, failed) = done?;
        visits += visited;
        errors += failed;
    }
    println!("DONE {visits} {errors}");
    locks.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}
