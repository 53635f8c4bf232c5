//! Without the feature `metrics`: nothing.

use std::time::Duration;

use super::{HandOver, Renewal};
use crate::error::{Error, LostReason};
use crate::fork::Process;

#[derive(Debug)]
pub(crate) struct Meter;

impl Meter {
    pub(crate) fn new(_place: &str, _namespace: &str, _process: &Process) -> Self {
        Self
    }

    pub(crate) fn lock(&self, _label: Option<&'static str>) -> LockMeter {
        LockMeter
    }

    pub(crate) fn renewals(&self, _outcome: Renewal, _count: usize) {}

    pub(crate) fn renewal_late(&self, _by: impl FnOnce() -> Option<Duration>) {}

    pub(crate) fn reconnected(&self) {}

    pub(crate) fn connected(&self) -> Up {
        Up
    }

    pub(crate) fn cleanups_begun(&self, _count: usize) {}

    pub(crate) fn cleaned_up(&self, _count: usize) {}
}

#[derive(Clone, Debug)]
pub(crate) struct LockMeter;

impl LockMeter {
    pub(crate) const NONE: Self = Self;

    pub(crate) fn asks(&self) -> Asking {
        Asking
    }

    pub(crate) fn held(&self) {}

    pub(crate) fn ended(&self, _held_for: impl FnOnce() -> Duration) {}

    pub(crate) fn lost(&self, _reason: LostReason) {}
}

pub(crate) struct Asking;

impl Asking {
    pub(crate) fn granted(self, _waited: Duration, _by: Option<HandOver>) {}

    pub(crate) fn refused(self, _error: &Error) {}
}

#[derive(Debug)]
pub(crate) struct Up;

impl Up {
    pub(crate) fn down(&self) {}
}
