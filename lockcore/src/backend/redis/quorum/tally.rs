//! The count of renewals and releases: what a majority of the nodes says about each ticket of a
//! batch. This file does no I/O.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::backend::{FULL, Released, Renewed};

/// How many nodes are a majority of all.
pub(super) fn majority(all: usize) -> usize {
    all / 2 + 1
}

/// How many nodes must have the ticket of a request.
///
/// Two majorities have a node in common. So a majority is enough for writers and readers: if two of
/// them must not hold together, that node refuses one of them.
///
/// For a semaphore a majority is not enough. For example, each of three nodes has room for two
/// holders. Each two of the three nodes are a majority, so three holders could get one each. If
/// each holder has its permits at `needed` nodes, all holders have at most `all * capacity /
/// needed` permits together. This must be less than `capacity + 1`.
pub(super) fn needed(all: usize, permits: NonZeroU32, capacity: NonZeroU32) -> usize {
    if capacity == FULL && (permits.get() == 1 || permits == FULL) {
        return majority(all);
    }
    let capacity = u64::from(capacity.get());
    (all as u64 * capacity / (capacity + 1)) as usize + 1
}

/// The answer of a node to one renewal, and the number of the ticket if the client has told it to
/// this node.
pub(super) type Told = (Renewed, Option<u64>);

/// The answers of the nodes to one renewal.
#[derive(Clone, Debug, Default)]
pub(super) struct RenewalTally {
    granted: Vec<Duration>,
    lost: usize,
    /// The number of the ticket. A node that was asked late may have an older proposal of the same
    /// client, which is smaller.
    number: Option<u64>,
}

impl RenewalTally {
    pub(super) fn answered(&mut self, (answer, number): Told) {
        self.number = self.number.max(number);
        match answer {
            Renewed::Granted { valid_for } | Renewed::AskedBack { valid_for, .. } => {
                self.granted.push(valid_for);
            }
            Renewed::Lost => self.lost += 1,
            // No ticket waits at a node, so `Waiting` says nothing certain.
            Renewed::Waiting { .. } | Renewed::Failed => {}
        }
    }

    pub(super) fn number(&self) -> Option<u64> {
        self.number
    }

    /// The answer, once it is certain. Of the `all` nodes, `asked` may still answer.
    pub(super) fn answer(&self, all: usize, needed: usize, asked: usize) -> Option<Renewed> {
        if self.granted.len() >= needed {
            let valid_for = self.granted.iter().min().copied()?;
            return Some(Renewed::Granted { valid_for });
        }
        // The other nodes are too few, whatever they answer.
        if self.lost > all - needed {
            return Some(Renewed::Lost);
        }
        let may_hold = self.granted.len() + asked >= needed;
        let may_be_lost = self.lost + asked > all - needed;
        (!may_hold && !may_be_lost).then_some(Renewed::Failed)
    }
}

/// The answers of the nodes to one release.
#[derive(Clone, Debug, Default)]
pub(super) struct Removal {
    acknowledged: usize,
    missing: usize,
}

impl Removal {
    pub(super) fn answered(&mut self, answer: Released) {
        match answer {
            Released::Released => self.acknowledged += 1,
            Released::NotFound => {
                self.acknowledged += 1;
                self.missing += 1;
            }
            Released::Failed => {}
        }
    }

    /// The answer, once there is one. Of the `all` nodes, `asked` may still answer.
    ///
    /// A ticket that counts may be missing at a few nodes: they were late or have lost it. If so
    /// many nodes miss it that the rest are too few, the ticket did not count any more. Then the
    /// answer is "not found", because others may have had the lock.
    pub(super) fn answer(&self, all: usize, needed: usize, asked: usize) -> Option<Released> {
        let majority = majority(all);
        if self.acknowledged >= majority {
            return Some(match self.missing > all - needed {
                true => Released::NotFound,
                false => Released::Released,
            });
        }
        (self.acknowledged + asked < majority).then_some(Released::Failed)
    }

    /// Whether the answer is final, whatever the other nodes say. If all nodes that have answered
    /// had the ticket, the answer is taken as final too.
    pub(super) fn is_settled(&self, all: usize, needed: usize, asked: usize) -> bool {
        let most = all - needed;
        self.missing == 0 || self.missing > most || self.missing + asked <= most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::ALL_BUT_ONE;

    fn granted(seconds: u64) -> Renewed {
        Renewed::Granted {
            valid_for: Duration::from_secs(seconds),
        }
    }

    #[test]
    fn as_many_nodes_are_needed_as_keep_holders_within_the_capacity() {
        let needed = |all, permits, capacity| {
            let number = |number| NonZeroU32::new(number).unwrap();
            needed(all, number(permits), number(capacity))
        };
        for (all, majority) in [(3, 2), (5, 3), (7, 4)] {
            assert_eq!(needed(all, FULL.get(), FULL.get()), majority);
            assert_eq!(needed(all, 1, FULL.get()), majority);
            assert_eq!(needed(all, 1, 1), majority);
            for capacity in 2..20 {
                let needed = needed(all, 1, capacity);
                let most = all * capacity as usize / needed;
                assert!(
                    needed <= all && most <= capacity as usize,
                    "{needed} of {all}"
                );
            }
        }
        assert_eq!([2, 3, 4].map(|capacity| needed(5, 1, capacity)), [4, 4, 5]);
        assert_eq!(needed(3, 1, 2), 3);
        // The product needs more than 32 bits.
        assert_eq!(needed(5, ALL_BUT_ONE.get(), FULL.get()), 5);
    }

    #[test]
    fn a_renewal_is_what_a_majority_of_all_nodes_says() {
        let (lost, failed) = (Renewed::Lost, Renewed::Failed);
        for (answers, asked, answer) in [
            (
                vec![granted(3), granted(2), granted(4)],
                2,
                Some(granted(2)),
            ),
            (vec![granted(3), granted(2)], 3, None),
            (vec![granted(3), granted(2), lost, lost], 1, None),
            (vec![lost, lost, lost], 2, Some(lost)),
            // Two nodes are down, so nobody can know.
            (vec![granted(3), granted(2), lost], 0, Some(failed)),
            (vec![granted(3), granted(2), failed], 2, None),
            (vec![granted(3), lost, failed, failed], 1, Some(failed)),
        ] {
            let mut renewal = RenewalTally::default();
            answers
                .iter()
                .for_each(|answer| renewal.answered((*answer, None)));
            assert_eq!(renewal.answer(5, 3, asked), answer, "{answers:?}");
        }
    }

    #[test]
    fn a_release_is_acknowledged_by_a_majority_of_all_nodes() {
        use crate::backend::Released::{Failed, NotFound, Released};
        for (answers, needed, asked, answer) in [
            (vec![NotFound, NotFound, Released], 3, 2, Some(Released)),
            (vec![NotFound, NotFound, NotFound], 3, 2, Some(NotFound)),
            // The ticket was at two nodes at most, and others could have had the lock at three.
            (
                vec![Released, NotFound, NotFound, NotFound],
                3,
                1,
                Some(NotFound),
            ),
            (vec![Released, Released, NotFound], 4, 2, Some(Released)),
            (vec![Released, Released, NotFound], 5, 2, Some(NotFound)),
            (vec![Released, Released], 3, 3, None),
            (vec![Released, Released], 3, 0, Some(Failed)),
            (vec![Released, Released, Failed], 3, 1, None),
        ] {
            let mut removal = Removal::default();
            answers.iter().for_each(|answer| removal.answered(*answer));
            assert_eq!(removal.answer(5, needed, asked), answer, "{answers:?}");
        }
    }
}
