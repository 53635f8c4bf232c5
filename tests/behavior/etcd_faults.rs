//! Tests with etcd servers that are full, lose leases or keys, or get requests late, of requests that
//! come at the same moment, and of how many there are. Each fact has its own servers. This file has what the groups of facts
//! share. The groups are the files of this folder.

mod capacities;
mod ensembles;
mod full;
mod late;
mod leases;
mod requests;
mod rights;

use libtest_mimic::Trial;
use lockcore::Locks;
use lockcore::backend::Namespace;
use tests::etcd_server::EtcdServer;

use crate::faults::patient;
use crate::store::Kind;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [
        capacities::facts,
        ensembles::facts,
        full::facts,
        late::facts,
        leases::facts,
        requests::facts,
        rights::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

fn client(server: &EtcdServer) -> Locks {
    patient(server.url()).build().unwrap()
}

/// The namespace of the clients.
fn namespace() -> Namespace {
    Namespace::new("test").unwrap()
}
