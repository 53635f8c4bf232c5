//! The settings that a client is made with.

use std::sync::Arc;
use std::time::Duration;

use crate::clock::Clock;
use crate::name::Namespace;
use crate::options::{Fair, Wait};

/// The settings that a client is made with, after they were checked.
pub(crate) struct Settings {
    pub(crate) clock: Clock,
    pub(crate) namespace: Namespace,
    pub(crate) op_timeout: Duration,
    /// The address of the store. Messages name it, and the client uses it to distinguish stores.
    /// Empty if none was given.
    pub(crate) place: String,
    /// The owner that log lines name.
    pub(crate) owner: Arc<str>,
    pub(crate) defaults: Defaults,
}

/// The options of a lock that does not set its own.
pub(crate) struct Defaults {
    pub(crate) ttl: Duration,
    pub(crate) wait: Wait,
    pub(crate) through_outages: bool,
    pub(crate) linger: Duration,
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
                through_outages: false,
                linger: Duration::ZERO,
                fair: Fair::Strict,
            },
        }
    }
}
