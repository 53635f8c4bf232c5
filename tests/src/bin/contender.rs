//! One of several processes that share a file. The script `tests/versions` starts some that are built
//! with this version of the library, and some that are built with an earlier one.
//!
//! ```text
//! contender FOLDER ROUNDS
//! ```
//!
//! Each round takes a lock, the read side of one, and a permit. Files in the folder show which processes
//! are inside, so each round checks that the lock keeps the others out. At its end the process exits
//! without a release. So the next process gets the lock when the lease has ended. The process after
//! that gets it by a release.
//!
//! The `LOCK_…` variables choose the store, the ttl and the wait. The earlier version compiles this
//! file too, so it uses nothing that is new.

use std::error::Error;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use lockcore::{FencingToken, Locks};

type Failure = Box<dyn Error + Send + Sync>;

const NAME: &str = "shared:file";
/// How many processes may be in the folder with a permit.
const PLACES: u32 = 2;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().ok_or("usage: contender FOLDER ROUNDS");
    let (folder, rounds) = (PathBuf::from(next()?), next()?.parse::<u32>()?);
    let locks = Locks::from_env()?;
    for _ in 0..rounds {
        write(&locks, &folder).await?;
        read(&locks, &folder).await?;
        visit(&locks, &folder).await?;
    }
    let guard = locks.mutex(NAME).acquire().await?;
    println!("{rounds} rounds; dies with {}", guard.grant_id());
    std::process::exit(0) // drops nothing
}

/// Adds one to the number in the file. The value beside the lock and a latch of the store must follow
/// the file.
async fn write(locks: &Locks, folder: &Path) -> Result<(), Failure> {
    let guard = locks.mutex(NAME).acquire().await?;
    let inside = folder.join("inside");
    File::create_new(&inside).map_err(|error| format!("two holders: {error}"))?;
    let file = folder.join("count");
    let text = fs::read_to_string(&file).unwrap_or_else(|_| "0 0".to_owned());
    let (count, last) = text.split_once(' ').ok_or("no token in the file")?;
    let (count, last) = (count.parse::<u64>()?, last.parse::<i64>()?);
    let token: FencingToken = guard.fencing_token()?;
    expect(token.as_i64() > last, || format!("{token} after {last}"))?;
    let value = locks.value(NAME).get().await?;
    let value = value.map_or_else(|| "0".to_owned(), |value| value.text.to_string());
    expect(value == count.to_string(), || {
        format!("the value is {value}, after {count}")
    })?;
    let latch = locks.latch(NAME);
    let left = latch.count().await?;
    expect(left == count, || {
        format!("the latch is at {left}, after {count}")
    })?;

    let count = count + 1;
    fs::write(&file, format!("{count} {}", token.as_i64()))?;
    guard.set_value(count.to_string()).await?;
    latch.reset().await?;
    let set = latch.try_set(count).await?;
    expect(set, || "the latch was not at zero".to_owned())?;
    fs::remove_file(inside)?;
    guard.release().await?;
    Ok(())
}

async fn read(locks: &Locks, folder: &Path) -> Result<(), Failure> {
    let guard = locks.rwlock(NAME).read().acquire().await?;
    let inside = folder.join("inside");
    expect(!inside.exists(), || "a reader beside a writer".to_owned())?;
    tokio::task::yield_now().await;
    expect(!inside.exists(), || "a writer beside a reader".to_owned())?;
    guard.release().await?;
    Ok(())
}

async fn visit(locks: &Locks, folder: &Path) -> Result<(), Failure> {
    let guard = locks.semaphore("places", PLACES).acquire().await?;
    let place = folder.join(format!("place-{}", std::process::id()));
    File::create_new(&place)?;
    let names = fs::read_dir(folder)?
        .flatten()
        .map(|entry| entry.file_name());
    let taken = names.filter(|name| name.as_encoded_bytes().starts_with(b"place-"));
    let taken = taken.count();
    expect(taken <= PLACES as usize, || {
        format!("{taken} in {PLACES} places")
    })?;
    fs::remove_file(place)?;
    guard.release().await?;
    Ok(())
}

fn expect(so: bool, otherwise: impl FnOnce() -> String) -> Result<(), Failure> {
    match so {
        true => Ok(()),
        false => Err(otherwise().into()),
    }
}
