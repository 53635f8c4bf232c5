//! What a client is made with.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::Clock;
use crate::name::Namespace;
use crate::options::{Fair, Wait};

/// What a client is made with, checked.
pub(crate) struct Settings {
    pub(crate) clock: Clock,
    pub(crate) namespace: Namespace,
    pub(crate) op_timeout: Duration,
    /// Where the store is, to tell it from another and for messages; empty if nobody said so.
    pub(crate) place: String,
    /// For logs.
    pub(crate) owner: Arc<str>,
    pub(crate) defaults: Defaults,
}

/// What a lock does that does not say otherwise.
pub(crate) struct Defaults {
    pub(crate) ttl: Duration,
    pub(crate) wait: Wait,
    pub(crate) fair: Fair,
}

#[cfg(test)]
impl Settings {
    pub(crate) fn of_tests() -> Self {
        Self {
            clock: Clock::BOOT,
            namespace: Namespace::new("test").expect("a namespace"),
            op_timeout: Duration::from_secs(1),
            place: String::new(),
            owner: "test".into(),
            defaults: Defaults {
                ttl: Duration::from_secs(10),
                wait: Wait::Forever,
                fair: Fair::Strict,
            },
        }
    }
}
