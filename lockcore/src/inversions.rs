//! Order inversions: records which locks the code of this process asks for while it holds other
//! locks. Warns if code asks for two locks in both orders, or for more than two in a circle. Only
//! debug builds contain this file. Which locks the running code holds is in `scope`.
//!
//! A false alarm costs more than a missed one. So a circle counts only if all its steps can happen
//! at the same time:
//!
//! - A request that does not wait cannot deadlock, and a re-entry sends no request. Both are not
//!   recorded.
//! - A lock counts as held only if the asking code itself keeps it held. Two locks do not count.
//!   One is a lock that was held where a task was spawned, because its owner may not wait for the
//!   task. The other is the lock of a bare guard, because no code belongs to the guard.
//! - If both of two steps hold a common lock, and only one of them can hold it at a time, they
//!   never happen at the same time.
//!
//! Read locks and permits are treated as all other locks. Two readers do not exclude each other.
//! But in a fair queue a reader waits behind a writer, and this writer may wait for another reader.
//! The permits of a semaphore can all be held. So both kinds can be a part of a deadlock.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::hash::Prehashed;
use crate::name::Name;

/// How many pairs are remembered. A program has at most some hundred places in its code that ask
/// for a lock under another. If its names vary without end, the most recent pairs are kept.
const PAIRS: usize = 4096;

/// Code that holds more locks at once is not checked: the memory and the time for it grow with
/// their number.
const HELD_AT_ONCE: usize = 32;

/// How many pairs a client warns of in its life. If names vary, one mistake makes many pairs.
const WARNINGS: usize = 100;

/// The record of one client. It is empty, with nothing on the heap, until code asks for a lock
/// under another.
#[derive(Default)]
pub(crate) struct Inversions(Mutex<Pairs>);

/// A lock that code holds while it asks for another lock.
pub(crate) struct Around<'a> {
    pub(crate) called: Called<'a>,
    pub(crate) part: Part,
    /// The asking code itself keeps the lock held, and the lock is of this client.
    pub(crate) keeps: bool,
}

impl Inversions {
    /// Records that code waits for `wanted` while it holds the locks `around`. Warns if this
    /// completes a circle.
    pub(crate) fn asked_for(&self, wanted: Called<'_>, around: &[Around<'_>]) {
        if around.is_empty() || around.len() > HELD_AT_ONCE {
            return;
        }
        let together: Arc<[Part]> = around.iter().map(|held| held.part.clone()).collect();
        for held in around.iter().filter(|held| held.keeps) {
            let under = held.called;
            // A panic cannot leave the data half changed, so a poisoned mutex may be used.
            let mut asked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let circle = asked.asked(under, wanted, &together);
            drop(asked); // a subscriber may use locks
            if let Some(circle) = circle {
                tracing::warn!(
                    lock = %wanted.name,
                    label = wanted.label,
                    under = %under.name,
                    under_label = under.label,
                    circle = %circle,
                    "a deadlock can happen: this lock was asked for under that one, and elsewhere in this process it was the \
                     other way round. When both happen at once, here or in two processes, each waits for the other until its \
                     wait is over. Take them together with Locks::all, or everywhere in the same order"
                );
            }
        }
    }
}

/// The name and the label of a lock, for messages.
#[derive(Clone, Copy)]
pub(crate) struct Called<'a> {
    pub(crate) name: &'a Name,
    pub(crate) label: Option<&'static str>,
}

impl Called<'_> {
    /// The label, or the name if there is no label. The label is better because it does not contain
    /// the key.
    fn in_general(&self) -> String {
        let name = || self.name.as_str().to_owned();
        self.label.map_or_else(name, str::to_owned)
    }
}

/// A lock that is held.
#[derive(Clone, PartialEq)]
pub(crate) struct Part {
    pub(crate) name: Name,
    pub(crate) permits: u32,
    pub(crate) capacity: u32,
}

impl Part {
    /// Whether the two cannot be held at the same time. Compares names and not clients, because two
    /// clients may use one store.
    fn excludes(&self, other: &Self) -> bool {
        self.name == other.name && self.permits.saturating_add(other.permits) > self.capacity
    }
}

fn exclude_each_other(some: &[Part], others: &[Part]) -> bool {
    let excluded = |part: &Part| others.iter().any(|other| part.excludes(other));
    some.iter().any(excluded)
}

fn contains_all(some: &[Part], others: &[Part]) -> bool {
    others.iter().all(|part| some.contains(part))
}

/// The recorded pairs, as plain data: no clock, and no warnings.
#[derive(Default)]
struct Pairs {
    /// For each lock, the locks that code has asked for under it. Each has the list of all locks
    /// that were held at that time.
    under: Prehashed<Name, Prehashed<Name, Arc<[Part]>>>,
    /// The same pairs, the oldest first.
    pairs: VecDeque<(Name, Name)>,
    told: HashSet<[String; 2]>,
}

impl Pairs {
    /// Records that code asks for `wanted` while it holds `together`, which contains `under`.
    /// Returns the circle to warn of, if there is one.
    fn asked(
        &mut self,
        under: Called<'_>,
        wanted: Called<'_>,
        together: &Arc<[Part]>,
    ) -> Option<Circle> {
        // Several permits of one semaphore are no pair. After `WARNINGS` warnings, no more are
        // given.
        if under.name == wanted.name || self.told.len() == WARNINGS {
            return None;
        }
        if !self.record(under.name, wanted.name, together) {
            return None;
        }
        let circle = self.way(wanted.name, under.name, together)?;
        let mut pair = [under.in_general(), wanted.in_general()];
        pair.sort();
        self.told.insert(pair).then_some(circle)
    }

    /// Records the pair of `under`, which is held, and `wanted`, which code asks for. Returns
    /// whether the pair is new, or is recorded with fewer held locks than before.
    fn record(&mut self, under: &Name, wanted: &Name, together: &Arc<[Part]>) -> bool {
        if let Some(known) = self.under.get_mut(under).and_then(|of| of.get_mut(wanted)) {
            // This pair is recorded already, with the same locks held or with fewer. The recorded
            // pair can be part of every circle of the new one, so the new one adds nothing.
            if contains_all(together, known) {
                return false;
            }
            if contains_all(known, together) {
                *known = Arc::clone(together);
            }
            return true;
        }
        if self.pairs.len() == PAIRS {
            self.forget_oldest();
        }
        let of = self.under.entry(under.clone()).or_default();
        of.insert(wanted.clone(), Arc::clone(together));
        self.pairs.push_back((under.clone(), wanted.clone()));
        true
    }

    fn forget_oldest(&mut self) {
        let Some((under, wanted)) = self.pairs.pop_front() else {
            return;
        };
        if let Some(of) = self.under.get_mut(&under) {
            of.remove(&wanted);
            if of.is_empty() {
                self.under.remove(&under);
            }
        }
    }

    /// Returns the shortest circle that the new pair closes, if there is one. A pair is a lock that
    /// is held, and a lock that code asks for meanwhile. A circle is a chain of recorded pairs that
    /// leads from `wanted` back to `under`. It counts only if all its pairs can exist at the same
    /// time, together with the new pair: if the locks that are held in them (`together`) do not
    /// exclude each other. The search visits each lock once, so its time is bounded by the number
    /// of recorded pairs.
    fn way(&self, wanted: &Name, under: &Name, together: &[Part]) -> Option<Circle> {
        #[derive(Clone, Copy)]
        struct Step<'a> {
            to: &'a Name,
            together: &'a [Part],
            before: Option<usize>,
        }
        let mut steps = vec![Step {
            to: wanted,
            together,
            before: None,
        }];
        let mut been = Prehashed::from_iter([(wanted, ())]);
        let mut at = 0;
        while let Some(&step) = steps.get(at) {
            for (to, together) in self.under.get(step.to).into_iter().flatten() {
                let mut way = std::iter::successors(Some(step), |step| Some(steps[step.before?]));
                if way.any(|step| exclude_each_other(step.together, together)) {
                    continue;
                }
                if to == under {
                    let way = std::iter::successors(Some(step), |step| Some(steps[step.before?]));
                    let mut names: Vec<Name> = way.map(|step| step.to.clone()).collect();
                    names.push(under.clone());
                    names.reverse();
                    return Some(Circle(names));
                }
                if been.insert(to, ()).is_none() {
                    steps.push(Step {
                        to,
                        together,
                        before: Some(at),
                    });
                }
            }
            at += 1;
        }
        None
    }
}

/// A circle of locks. Code asks for each lock under the lock before it, and for the first under the
/// last.
struct Circle(Vec<Name>);

impl fmt::Display for Circle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for name in &self.0 {
            write!(f, "{name} → ")?;
        }
        self.0.first().map_or(Ok(()), |first| write!(f, "{first}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Namespace;
    use crate::request::FULL;

    fn name(name: &str) -> Name {
        Name::new(Namespace::new("test").unwrap(), name).unwrap()
    }

    fn part(of: &str, permits: u32) -> Part {
        Part {
            name: name(of),
            permits,
            capacity: FULL.get(),
        }
    }

    /// The warnings when code asks for `wanted` while it holds all of `held`, each by itself.
    fn ask(asked: &mut Pairs, held: &[Part], wanted: &str) -> Vec<String> {
        let together: Arc<[Part]> = held.into();
        let called = |name| Called { name, label: None };
        let wanted = name(wanted);
        let told = held
            .iter()
            .filter_map(|part| asked.asked(called(&part.name), called(&wanted), &together));
        told.map(|circle| circle.to_string()).collect()
    }

    /// As [`ask`], with mutexes as the held locks.
    fn nest(asked: &mut Pairs, held: &[&str], wanted: &str) -> Vec<String> {
        let held: Vec<Part> = held.iter().map(|name| part(name, FULL.get())).collect();
        ask(asked, &held, wanted)
    }

    const NOTHING: [String; 0] = [];

    #[test]
    fn one_order_is_never_told_of() {
        let mut asked = Pairs::default();
        for _ in 0..3 {
            assert_eq!(nest(&mut asked, &["a"], "b"), NOTHING);
            assert_eq!(nest(&mut asked, &["a", "b"], "c"), NOTHING);
            assert_eq!(nest(&mut asked, &["b"], "c"), NOTHING);
        }
    }

    #[test]
    fn the_other_order_is_told_of_once_whichever_comes_first() {
        let mut asked = Pairs::default();
        assert_eq!(nest(&mut asked, &["a"], "b"), NOTHING);
        assert_eq!(nest(&mut asked, &["b"], "a"), ["b → a → b"]);
        for _ in 0..3 {
            assert_eq!(nest(&mut asked, &["a"], "b"), NOTHING);
            assert_eq!(nest(&mut asked, &["b"], "a"), NOTHING);
        }
    }

    #[test]
    fn a_longer_circle_is_told_of_by_its_shortest_way() {
        let mut asked = Pairs::default();
        for (under, wanted) in [("a", "b"), ("b", "c"), ("c", "d"), ("b", "d"), ("d", "e")] {
            assert_eq!(nest(&mut asked, &[under], wanted), NOTHING);
        }
        assert_eq!(nest(&mut asked, &["d"], "a"), ["d → a → b → d"]);
    }

    #[test]
    fn of_one_mistake_the_pair_that_deadlocks_is_told_of() {
        let mut asked = Pairs::default();
        nest(&mut asked, &["a"], "b");
        nest(&mut asked, &["a", "b"], "c");
        assert_eq!(nest(&mut asked, &["c"], "a"), ["c → a → c"]);
        // Code that asks for `b` here holds `a`, which excludes the code of the other order.
        assert_eq!(nest(&mut asked, &["c", "a"], "b"), NOTHING);
    }

    #[test]
    fn two_orders_under_a_lock_that_lets_one_in_never_meet() {
        let mut asked = Pairs::default();
        nest(&mut asked, &["gate", "a"], "b");
        assert_eq!(nest(&mut asked, &["gate", "b"], "a"), NOTHING);
        // The first step without `gate` can happen at the same time as the others.
        assert_eq!(nest(&mut asked, &["b"], "a"), ["b → a → b"]);
    }

    #[test]
    fn a_pair_is_remembered_with_the_fewest_locks_held() {
        let mut asked = Pairs::default();
        nest(&mut asked, &["gate", "a"], "b");
        nest(&mut asked, &["a"], "b");
        nest(&mut asked, &["gate", "a"], "b");
        assert_eq!(nest(&mut asked, &["gate", "b"], "a"), ["b → a → b"]);
    }

    #[test]
    fn the_steps_of_a_longer_circle_must_not_keep_each_other_out_either() {
        let mut asked = Pairs::default();
        nest(&mut asked, &["gate", "a"], "b");
        nest(&mut asked, &["gate", "b"], "c");
        assert_eq!(nest(&mut asked, &["c"], "a"), NOTHING);
        assert_eq!(nest(&mut asked, &["b"], "c"), ["b → c → a → b"]);
    }

    #[test]
    fn readers_of_a_common_lock_meet_and_a_writer_keeps_them_out() {
        let mut asked = Pairs::default();
        ask(&mut asked, &[part("gate", 1), part("a", 1)], "b");
        let writes = [part("gate", FULL.get()), part("b", 1)];
        assert_eq!(ask(&mut asked, &writes, "a"), NOTHING);
        let reads = [part("gate", 1), part("b", 1)];
        assert_eq!(ask(&mut asked, &reads, "a"), ["b → a → b"]);
    }

    #[test]
    fn a_lock_under_itself_is_no_order() {
        let mut asked = Pairs::default();
        assert_eq!(ask(&mut asked, &[part("a", 1)], "a"), NOTHING);
        assert!(asked.pairs.is_empty());
    }

    #[test]
    fn keys_of_one_label_are_told_of_once() {
        let mut asked = Pairs::default();
        let mut told = 0;
        for number in 0..10 {
            let names = [format!("x:{number}"), format!("y:{number}")].map(|text| name(&text));
            let called = [0, 1].map(|side| Called {
                name: &names[side],
                label: Some(["x:{id}", "y:{id}"][side]),
            });
            for (under, wanted) in [(0, 1), (1, 0)] {
                let together = [part(names[under].as_str(), FULL.get())].into();
                let circle = asked.asked(called[under], called[wanted], &together);
                told += usize::from(circle.is_some());
            }
        }
        assert_eq!(told, 1);
    }

    #[test]
    fn names_without_end_are_forgotten_and_the_last_ones_are_known() {
        let mut asked = Pairs::default();
        for number in 0..100_000 {
            let order = format!("order:{number}");
            assert_eq!(nest(&mut asked, &["shop", &order], "stock"), NOTHING);
        }

        assert_eq!(asked.pairs.len(), PAIRS);
        let remembered: usize = asked.under.values().map(|of| of.len()).sum();
        assert_eq!(remembered, PAIRS);
        let last = nest(&mut asked, &["stock"], "order:99999");
        assert_eq!(last, ["stock → order:99999 → stock"]);
        assert_eq!(nest(&mut asked, &["stock"], "order:0"), NOTHING);
    }

    #[test]
    fn mistakes_without_end_are_told_of_a_hundred_times() {
        let mut asked = Pairs::default();
        let mut told = 0;
        for number in 0..1000 {
            let order = format!("order:{number}");
            nest(&mut asked, &["stock"], &order);
            told += nest(&mut asked, &[&order], "stock").len();
        }
        assert_eq!(told, WARNINGS);
    }
}
