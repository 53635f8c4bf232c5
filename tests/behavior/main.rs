//! The behaviour suite: facts as sentences, each run on every store that it applies to, each in a namespace of its own,
//! on real servers that the harness starts. `store.rs` says what a fact gets; the other files are groups of facts.
//!
//! The run fails as a whole when a password turns up in what it prints or in what the library traces.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

mod border;
mod counted;
mod crowd;
mod downgrade;
mod exclusion;
mod extend;
mod faults;
mod fencing;
mod forks;
mod giving_up;
mod histories;
mod inversions;
mod kit;
mod leases;
mod local;
mod logs;
mod messages;
mod multi;
mod owners;
mod part;
mod processes;
mod protocol;
mod redis_faults;
mod redis_rights;
mod redis_scripts;
mod reentry;
mod runtimes;
mod sqlite_faults;
mod starved;
mod store;
mod tls;
mod traces;
mod views;
mod zookeeper_faults;

use libtest_mimic::Arguments;
use store::Kind;

fn main() {
    tests::watch::output_for(&traces::SECRETS);
    traces::search();
    let mut trials = Vec::new();
    for kind in [Kind::Memory, Kind::Redis, Kind::Sqlite, Kind::ZooKeeper] {
        trials.extend(exclusion::facts(kind));
        trials.extend(leases::facts(kind));
        trials.extend(giving_up::facts(kind));
        trials.extend(starved::facts(kind));
        trials.extend(runtimes::facts(kind));
        trials.extend(local::facts(kind));
        trials.extend(reentry::facts(kind));
        trials.extend(downgrade::facts(kind));
        trials.extend(downgrade::local_facts(kind));
        trials.extend(multi::facts(kind));
        trials.extend(messages::facts(kind));
        trials.extend(logs::facts(kind));
        trials.extend(views::facts(kind));
        trials.extend(part::facts(kind));
        trials.extend(extend::facts(kind));
        trials.extend(owners::facts(kind));
        trials.extend(fencing::facts(kind));
        trials.extend(crowd::facts(kind));
        trials.extend(border::facts(kind));
    }
    for kind in [Kind::Memory, Kind::Redis, Kind::Sqlite, Kind::ZooKeeper] {
        trials.extend(histories::facts(kind));
    }
    trials.extend(kit::facts(Kind::Memory));
    trials.extend(crowd::facts_of_the_kit(Kind::Memory));
    trials.extend(protocol::facts(Kind::Memory));
    trials.extend(inversions::facts(Kind::Memory));
    trials.extend(downgrade::facts_of_the_kit(Kind::Memory));
    trials.extend(messages::facts_of_the_kit(Kind::Memory));
    trials.extend(messages::facts_of_settings(Kind::Memory));
    trials.extend(logs::facts_of_the_kit(Kind::Memory));
    trials.extend(part::facts_of_the_kit(Kind::Memory));
    trials.extend(extend::facts_of_the_kit(Kind::Memory));
    for kind in [Kind::Redis, Kind::Sqlite, Kind::ZooKeeper] {
        trials.extend(downgrade::facts_of_processes(kind));
    }
    trials.extend(processes::facts_of_none(Kind::Memory));
    trials.extend(processes::facts(Kind::Redis));
    trials.extend(processes::facts(Kind::Sqlite));
    trials.extend(processes::facts_of_sessions(Kind::ZooKeeper));
    trials.extend(processes::facts_of_redis(Kind::Redis));
    for kind in [Kind::Redis, Kind::Sqlite, Kind::ZooKeeper] {
        trials.extend(forks::facts(kind));
    }
    trials.extend(redis_faults::facts(Kind::Redis));
    trials.extend(redis_scripts::facts(Kind::Redis));
    trials.extend(fencing::facts_of_redis(Kind::Redis));
    trials.extend(border::facts_of_redis(Kind::Redis));
    trials.extend(fencing::facts_of_sqlite(Kind::Sqlite));
    trials.extend(sqlite_faults::facts(Kind::Sqlite));
    trials.extend(redis_rights::facts(Kind::Redis));
    trials.extend(messages::facts_of_redis(Kind::Redis));
    trials.extend(logs::facts_of_redis(Kind::Redis));
    for kind in [Kind::Redis, Kind::ZooKeeper] {
        trials.extend(tls::facts(kind));
    }
    trials.extend(exclusion::facts(Kind::ZooKeeperTls));
    trials.extend(zookeeper_faults::facts(Kind::ZooKeeper));
    let mut arguments = Arguments::from_args();
    // Facts wait more than they work.
    arguments.test_threads.get_or_insert(4);
    let conclusion = libtest_mimic::run(&arguments, trials);
    let leaks = traces::found();
    assert!(leaks.is_empty(), "secrets in traces: {leaks:#?}");
    conclusion.exit();
}
