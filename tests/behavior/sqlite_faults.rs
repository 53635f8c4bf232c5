//! Tests with SQLite files that are locked, removed, read-only or broken, with files of another
//! program, and with processes that share a file. This file has what the groups of facts share. The
//! groups are the files of this folder.

mod bursts;
mod cost;
mod damage;
mod forks;
mod paths;
mod processes;
mod time;
mod turns;

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::Locks;
use tests::process::Holder;
use tests::stalls::awake_since;

use crate::faults::{patient, patient_holder};
use crate::store::{Kind, SOON, Store};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [
        paths::facts,
        damage::facts,
        processes::facts,
        cost::facts,
        time::facts,
        bursts::facts,
        forks::facts,
        turns::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

fn holder(store: &Store, name: &str) -> Holder {
    holder_of(&store.file().url(), name)
}

fn holder_of(url: &str, name: &str) -> Holder {
    patient_holder(url, name, Duration::from_secs(20))
}

fn client(store: &Store) -> Locks {
    let builder = patient(store.file().url()).ttl(Duration::from_secs(10));
    builder.build().unwrap()
}

fn next_held(holders: &mut [Holder]) -> (usize, u64) {
    let began = Instant::now();
    loop {
        for (at, holder) in holders.iter_mut().enumerate() {
            if let Some(line) = holder.process().hear(Duration::from_micros(200)) {
                let token = line.strip_prefix("HELD ").expect("granted");
                return (at, token.parse().unwrap());
            }
        }
        assert!(awake_since(began) < 2 * SOON, "nobody gets the lock");
    }
}
