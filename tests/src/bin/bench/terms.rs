//! What each store is measured beside, and what it has to reach. A store that is not here is measured all the same.

use crate::floor::Floor;
use crate::program::Policy;
use crate::table::Bar;
use crate::{floor_memory, floor_redis, floor_zookeeper};

pub(crate) struct Terms {
    /// Of W1 in one run.
    pub(crate) pairs: usize,
    pub(crate) floor: Option<&'static Floor>,
    /// A lock of another crate that the program `peers` drives there.
    pub(crate) peer: Option<&'static str>,
    /// The p50 of W1.
    pub(crate) pair: Option<Bar>,
    /// Pairs a second of W2, for the number of tasks that is judged.
    pub(crate) many: Option<Bar>,
    /// True hand-overs a second of W3 and of W4.
    pub(crate) one_process: ByPolicy,
    pub(crate) four_processes: ByPolicy,
    /// The p50 of W5.
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
    floor: None,
    peer: None,
    pair: None,
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

/// By the scheme of a store's URL.
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
        },
        "zookeeper" => Terms {
            floor: Some(&floor_zookeeper::FLOOR),
            pair: Some(Bar::OfFloor(0.95)),
            four_processes: ByPolicy {
                strict: Some(Bar::TimesFloor(1.5)),
                default: Some(Bar::TimesFloor(50.0)),
            },
            hand_over: Some(Bar::OfFloor(0.75)),
            ..UNKNOWN
        },
        _ => UNKNOWN,
    }
}
