//! Tests of the behaviour of the library at real stores. Each test is a *fact*: its name is a
//! sentence that must be true. Each fact runs on every store that it applies to, in its own
//! namespace, on real servers that the harness starts. `store.rs` has the argument that every fact
//! gets. The other files are groups of facts.
//!
//! The whole run fails when a password appears in its output or in the traces of the library.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

mod any;
mod barrier;
mod counted;
mod counters;
mod crowd;
mod detach;
mod downgrade;
mod election;
mod etcd_faults;
mod exclusion;
mod extend;
mod faults;
mod fencing;
mod forks;
mod giving_up;
mod histories;
mod hostile;
mod inversions;
mod kit;
mod late;
mod leases;
mod linger;
mod listing;
mod local;
mod logs;
mod messages;
mod metrics;
mod moved;
mod multi;
mod mysql_faults;
mod owners;
mod part;
mod permits;
mod postgres_faults;
mod processes;
mod protocol;
mod redis_cluster;
mod redis_durability;
mod redis_faults;
mod redis_quorum;
mod redis_rights;
mod redis_scripts;
mod redis_sentinel;
mod reentry;
mod revoke;
mod runtimes;
mod server_faults;
mod sqlite_faults;
mod starved;
mod store;
mod stress;
mod tls;
mod traces;
mod upgrade;
mod views;
mod without_line;
mod zookeeper_faults;

use std::collections::BTreeMap;
use std::num::NonZero;

use libtest_mimic::{Arguments, Trial};
use lockcore::backend::Capability;
use store::Kind;
use tests::stores::{self, Answers, Suite};

fn main() {
    tests::watch::output_for(&traces::SECRETS);
    traces::search();
    metrics::record();
    tests::stalls::watch();
    let mut trials = Vec::new();
    for store in stores::ALL {
        let mut facts = without_line::leave_out(*store, facts_of(*store));
        facts.retain(|fact| runs_on(*store, fact));
        assert!(
            facts.iter().any(is_strict),
            "{store:?} has no fact of a strict order"
        );
        trials.extend(facts);
    }
    trials.extend(facts_of_memory(&stores::memory::Memory));
    trials.extend(facts_of_redis(&stores::redis::Redis));
    trials.extend(facts_of_sqlite(&stores::sqlite::Sqlite));
    trials.extend(etcd_faults::facts(&stores::etcd::Etcd));
    trials.extend(mysql_faults::facts(&stores::mysql::Mysql));
    trials.extend(postgres_faults::facts(&stores::postgres::Postgres));
    trials.extend(listing::facts_of_postgres(&stores::postgres::Postgres));
    trials.extend(redis_cluster::facts(&stores::cluster::Cluster));
    trials.extend(redis_sentinel::facts(&stores::sentinel::Sentinel));
    trials.extend(redis_quorum::facts(&stores::quorum::RedisQuorum));
    trials.extend(zookeeper_faults::facts(&stores::zookeeper::ZooKeeper));
    trials.extend(messages::facts_of_zookeeper(&stores::zookeeper::ZooKeeper));
    let mut arguments = Arguments::from_args();
    // A fact computes for about a sixth of its time. For the rest it waits.
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    arguments.test_threads.get_or_insert((3 * cores).min(32));
    let conclusion = libtest_mimic::run(&arguments, mixed(trials));
    if !arguments.list {
        tests::fact::print_the_slowest();
    }
    let leaks = traces::found();
    assert!(leaks.is_empty(), "secrets in traces: {leaks:#?}");
    conclusion.exit();
}

/// Spreads each group of facts evenly over the run. The facts of a group often load the machine in
/// the same way, for example by starting three servers each. In a row, several of them would run at
/// the same time. For the same reason each group begins with another one of its facts: most groups
/// run on many stores.
fn mixed(trials: Vec<Trial>) -> Vec<Trial> {
    let mut groups: BTreeMap<String, Vec<Trial>> = BTreeMap::new();
    for trial in trials {
        let group = trial
            .name()
            .rsplit_once("::")
            .map_or("", |(group, _)| group);
        groups.entry(group.to_owned()).or_default().push(trial);
    }
    let mut random = fastrand::Rng::with_seed(0); // the same order in each run
    let mut placed: Vec<(f64, Trial)> = Vec::new();
    for mut group in groups.into_values() {
        let size = group.len();
        group.rotate_left(random.usize(..size));
        let places = (0..size).map(|nth| (nth as f64 + random.f64()) / size as f64);
        placed.extend(places.zip(group));
    }
    placed.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    placed.into_iter().map(|(_, trial)| trial).collect()
}

/// The facts that every store has to pass, as far as its capability allows.
fn facts_of(store: Kind) -> Vec<Trial> {
    let mut trials = store::conformance(store);
    trials.extend(exclusion::facts(store));
    if store.suite() == Suite::Exclusion {
        return trials;
    }
    if store.suite() == Suite::Whole {
        trials.extend(facts_of_the_core(store));
    } else {
        assert!(
            another_stands_for(store),
            "no store with the capability of {store:?} runs the facts of the core"
        );
    }
    trials.extend(leases::facts(store));
    trials.extend(linger::facts(store));
    trials.extend(downgrade::facts(store));
    trials.extend(revoke::facts(store));
    trials.extend(metrics::facts(store));
    trials.extend(detach::facts(store));
    trials.extend(listing::facts(store));
    trials.extend(permits::facts(store));
    trials.extend(fencing::facts(store));
    trials.extend(stress::facts(store));
    trials.extend(hostile::facts(store));
    trials.extend(histories::facts(store));
    trials.extend(forks::facts_of_the_default(store));
    if store.capability().cross_process {
        trials.extend(downgrade::facts_of_processes(store));
        trials.extend(forks::facts(store));
        trials.extend(revoke::facts_of_processes(store));
        trials.extend(detach::facts_of_processes(store));
        trials.extend(processes::facts(store));
    }
    if store.timings().answers == Answers::AServer {
        trials.extend(server_faults::facts(store));
    }
    let capability = store.capability();
    if capability.counters {
        trials.extend(barrier::facts(store));
        trials.extend(election::facts(store));
    }
    if capability.counters && capability.cross_process {
        trials.extend(barrier::facts_of_processes(store));
        trials.extend(election::facts_of_processes(store));
        trials.extend(counters::facts(store));
        trials.extend(forks::facts_of_counters(store));
        if store.timings().answers == Answers::AServer {
            trials.extend(counters::facts_of_servers(store));
            trials.extend(election::facts_of_servers(store));
            trials.extend(barrier::facts_of_servers(store));
        }
    }
    if store.tls().is_some() {
        trials.extend(tls::facts(store));
    }
    trials
}

/// Whether a fact runs on this store under its policy. A policy is a matter of the core: to a store,
/// [`Fair::Strict`](lockcore::Fair::Strict) only means more tickets of one client in a line. So under
/// it, a store beside another one with its capability has only the facts of exclusion and of crowds.
fn runs_on(store: Kind, fact: &Trial) -> bool {
    let remains = ["::exclusion::", "::stress::"];
    let remains = remains.iter().any(|group| fact.name().contains(group));
    store.suite() == Suite::Whole || !is_strict(fact) || remains
}

fn is_strict(fact: &Trial) -> bool {
    fact.name().contains("::strict::")
}

/// The facts that use only what every store does in the same way. They run on one store of each
/// kind of capability, and on every store with `--long`. Leases, permits and downgrades are not
/// here: renewals and resizes are verbs of the store.
fn facts_of_the_core(store: Kind) -> Vec<Trial> {
    let groups = [
        any::facts,
        extend::facts,
        giving_up::facts,
        local::facts,
        logs::facts,
        messages::facts,
        multi::facts,
        owners::facts,
        part::facts,
        reentry::facts,
        runtimes::facts,
        starved::facts,
        upgrade::facts,
        views::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

/// Whether the facts of the core run on another store with the same capability. They follow no
/// counters, so it does not matter whether the store pushes changes of these. None of their locks
/// lingers. Nor do they depend on how many requests are in flight, or on the longest ttl.
fn another_stands_for(store: Kind) -> bool {
    let kind = |capability: Capability| {
        let capability = capability.watches(false).tells_holders(false);
        let capability = capability.longest_ttl(store::LEASE);
        capability.in_flight(1).renewals_in_flight(1)
    };
    stores::ALL.iter().any(|other| {
        other.suite() == Suite::Whole && kind(other.capability()) == kind(store.capability())
    })
}

/// Facts of the core, on a store whose clock and failures the test controls, and facts that need no
/// store.
fn facts_of_memory(store: Kind) -> Vec<Trial> {
    let groups = [
        kit::facts,
        leases::facts_of_the_kit,
        forks::facts_of_memory,
        stress::facts_of_the_kit,
        protocol::facts,
        inversions::facts,
        downgrade::facts_of_the_kit,
        messages::facts_of_the_kit,
        metrics::facts_of_the_kit,
        messages::facts_of_settings,
        logs::facts_of_the_kit,
        part::facts_of_the_kit,
        permits::facts_of_the_kit,
        linger::facts_of_the_kit,
        extend::facts_of_the_kit,
        any::facts_of_the_kit,
        detach::facts_of_the_kit,
        detach::facts_of_messages,
        processes::facts_of_none,
        counters::facts_of_the_kit,
        barrier::facts_of_the_kit,
        election::facts_of_the_kit,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

fn facts_of_redis(store: Kind) -> Vec<Trial> {
    let groups = [
        processes::facts_of_redis,
        counters::facts_of_redis,
        detach::facts_of_messages,
        redis_faults::facts,
        redis_durability::facts,
        redis_scripts::facts,
        fencing::facts_of_redis,
        hostile::facts_of_redis,
        redis_rights::facts,
        listing::facts_of_redis,
        messages::facts_of_redis,
        logs::facts_of_redis,
        metrics::facts_of_redis,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

fn facts_of_sqlite(store: Kind) -> Vec<Trial> {
    let groups = [
        detach::facts_of_messages,
        fencing::facts_of_sqlite,
        sqlite_faults::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}
