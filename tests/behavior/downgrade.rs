//! Tests of downgrades: a writer becomes a reader. The store then grants waiting readers and no
//! waiting writer, and no other writer holds the lock in between. This file has the code that the
//! groups of facts share. The groups are the files of this folder.

mod holds;
mod inner;
mod line;
mod local;
mod unacknowledged;

use libtest_mimic::Trial;
use lockcore::{Guard, Lock};
use tokio::task::JoinHandle;

use crate::store::{Kind, LEASE, soon};

pub(crate) use self::line::facts_of_processes;
pub(crate) use self::unacknowledged::facts as facts_of_the_kit;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [line::facts, holds::facts, inner::facts, local::facts];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

fn begin(lock: Lock) -> JoinHandle<Guard> {
    tokio::spawn(async move { lock.wait(LEASE).acquire().await.unwrap() })
}

/// Acquires a lock inside the scope of another guard of it.
async fn inside(outer: &Guard, lock: Lock) -> Guard {
    let inner = outer.while_held(async { lock.acquire().await });
    inner.await.unwrap().unwrap()
}

/// Waits for the guard of a waiter that is granted by a wake-up. The waiter's first renewal would
/// come only after twenty seconds.
async fn at_once(waiter: JoinHandle<Guard>) -> Guard {
    soon(waiter).await.unwrap()
}
