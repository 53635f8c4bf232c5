//! The floors, peers and bars of each store. A store that is not listed here is measured without
//! them.

use crate::floor::Floor;
use crate::program::Policy;
use crate::table::Bar;
use crate::{floor_etcd, floor_memory, floor_mysql, floor_postgres, floor_redis, floor_zookeeper};

pub(crate) struct Terms {
    /// The number of pairs of W1 in one run.
    pub(crate) pairs: usize,
    /// The most leases that one process is asked to keep: about as many as it can at this store.
    pub(crate) leases: usize,
    pub(crate) floor: Option<&'static Floor>,
    /// A lock of another crate, which the program `peers` drives.
    pub(crate) peer: Option<&'static str>,
    /// The bar for the p50 of W1.
    pub(crate) pair: Option<Bar>,
    /// The bar for the processor time of the server for a pair of W1.
    pub(crate) cpu: Option<Bar>,
    /// The bar for the pairs per second of W2, at the number of tasks that has a bar.
    pub(crate) many: Option<Bar>,
    /// The bars for the true hand-overs per second of W3 and of W4.
    pub(crate) one_process: ByPolicy,
    pub(crate) four_processes: ByPolicy,
    /// The bar for the p50 of W5.
    pub(crate) hand_over: Option<Bar>,
}

pub(crate) struct ByPolicy {
    strict: Option<Bar>,
    default: Option<Bar>,
}

impl ByPolicy {
    pub(crate) fn bar(&self, policy: Policy) -> Option<Bar> {
        match policy {
            Policy::Strict => self.strict,
            Policy::Default => self.default,
        }
    }
}

const UNKNOWN: Terms = Terms {
    pairs: 2_000,
    leases: 100_000,
    floor: None,
    peer: None,
    pair: None,
    cpu: None,
    many: None,
    one_process: ByPolicy {
        strict: None,
        default: None,
    },
    four_processes: ByPolicy {
        strict: None,
        default: None,
    },
    hand_over: None,
};

/// The terms for the scheme of a store's URL.
pub(crate) fn of(scheme: &str) -> Terms {
    match scheme {
        "memory" => Terms {
            pairs: 300_000,
            floor: Some(&floor_memory::FLOOR),
            pair: Some(Bar::AtMost(0.8)),
            ..UNKNOWN
        },
        "redis" => Terms {
            pairs: 10_000,
            floor: Some(&floor_redis::FLOOR),
            peer: Some("rslock"),
            pair: Some(Bar::OfFloor(1.10)),
            many: Some(Bar::TimesFloor(0.65)),
            one_process: ByPolicy {
                strict: Some(Bar::TimesFloor(0.65)),
                default: Some(Bar::AtLeast(200_000.0)),
            },
            four_processes: ByPolicy {
                strict: Some(Bar::TimesFloor(0.65)),
                default: None,
            },
            hand_over: Some(Bar::OfFloor(1.25)),
            ..UNKNOWN
        },
        "zookeeper" => Terms {
            leases: 30_000,
            floor: Some(&floor_zookeeper::FLOOR),
            pair: Some(Bar::OfFloor(0.95)),
            four_processes: ByPolicy {
                strict: Some(Bar::TimesFloor(1.5)),
                default: Some(Bar::TimesFloor(50.0)),
            },
            hand_over: Some(Bar::OfFloor(0.75)),
            ..UNKNOWN
        },
        "etcd" => Terms {
            leases: 30_000,
            floor: Some(&floor_etcd::FLOOR),
            pair: Some(Bar::OfFloor(1.2)),
            four_processes: ByPolicy {
                strict: Some(Bar::TimesFloor(3.0)),
                default: Some(Bar::AtLeast(50_000.0)),
            },
            hand_over: Some(Bar::AtMost(1_000.0)),
            ..UNKNOWN
        },
        "postgres" => Terms {
            floor: Some(&floor_postgres::FLOOR),
            one_process: ByPolicy {
                strict: None,
                default: Some(Bar::AtLeast(100_000.0)),
            },
            ..UNKNOWN
        },
        "mysql" => Terms {
            leases: 10_000,
            floor: Some(&floor_mysql::FLOOR),
            cpu: Some(Bar::OfFloor(5.0)),
            one_process: ByPolicy {
                strict: None,
                default: Some(Bar::AtLeast(100_000.0)),
            },
            four_processes: ByPolicy {
                strict: Some(Bar::AtLeast(150.0)),
                default: None,
            },
            ..UNKNOWN
        },
        "sqlite" => Terms {
            leases: 10_000,
            ..UNKNOWN
        },
        "redlock" => Terms {
            peer: Some("rslock"),
            ..UNKNOWN
        },
        _ => UNKNOWN,
    }
}
