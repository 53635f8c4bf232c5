//! The tickets whose client knew of a grant before a call told of it. A call that was under way when
//! the client learned of the grant may have made it, and tells of it later. No other call does.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::request::Id;

/// What settled while calls are under way.
#[derive(Debug, Default)]
pub(super) struct Settled(Mutex<Times>);

/// Calls and tickets have times, which count up.
#[derive(Debug, Default)]
struct Times {
    now: u64,
    /// When the calls began that are under way.
    calls: BTreeSet<u64>,
    /// When each ticket settled last. No call that is under way began after that.
    last: HashMap<Id, u64>,
    in_order: VecDeque<(u64, Id)>,
}

/// A call that is under way, until this is dropped.
#[derive(Debug)]
pub(super) struct UnderWay<'s> {
    settled: &'s Settled,
    began: u64,
}

impl Settled {
    fn times(&self) -> MutexGuard<'_, Times> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin_call(&self) -> UnderWay<'_> {
        let mut times = self.times();
        let began = times.next();
        times.calls.insert(began);
        UnderWay {
            settled: self,
            began,
        }
    }

    /// The client knows that this ticket holds, or that it has gone.
    pub(super) fn note(&self, id: Id) {
        let mut times = self.times();
        if !times.calls.is_empty() {
            let now = times.next();
            times.last.insert(id, now);
            times.in_order.push_back((now, id));
        }
    }

    /// The ticket waits again.
    pub(super) fn forget(&self, id: Id) {
        self.times().last.remove(&id);
    }

    /// Whether the client knows of this ticket what a call that is under way may tell.
    pub(super) fn has(&self, id: Id) -> bool {
        self.times().last.contains_key(&id)
    }
}

impl Times {
    fn next(&mut self) -> u64 {
        self.now += 1;
        self.now
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut times = self.settled.times();
        times.calls.remove(&self.began);
        let oldest = times.calls.first().copied().unwrap_or(u64::MAX);
        while let Some((at, id)) = times.in_order.front().copied()
            && at < oldest
        {
            times.in_order.pop_front();
            // It may have settled once more.
            if times.last.get(&id) == Some(&at) {
                times.last.remove(&id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_remembered_for_as_long_as_a_call_that_began_before() {
        let settled = Settled::default();
        let [early, late] = [(); 2].map(|()| Id::draw().unwrap());
        settled.note(early);
        assert!(!settled.has(early), "no call can tell of it");

        let first = settled.begin_call();
        settled.note(early);
        let second = settled.begin_call();
        settled.note(late);
        assert!(settled.has(early) && settled.has(late));
        drop(first);
        assert!(!settled.has(early) && settled.has(late));
        settled.forget(late);
        assert!(!settled.has(late), "it waits again");
        settled.note(late);
        drop(second);
        assert!(!settled.has(late));
        assert!(settled.times().in_order.is_empty());
    }

    #[test]
    fn a_ticket_that_settles_again_is_remembered_from_then_on() {
        let settled = Settled::default();
        let id = Id::draw().unwrap();
        let first = settled.begin_call();
        settled.note(id);
        let second = settled.begin_call();
        settled.note(id);
        drop(first);
        assert!(settled.has(id));
        drop(second);
        assert!(!settled.has(id));
    }
}
