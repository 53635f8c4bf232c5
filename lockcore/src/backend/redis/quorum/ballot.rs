//! The count of an enqueue: which nodes have granted it, the number of the ticket, and when the
//! outcome is certain. This file does no I/O: `tickets` asks the nodes.
//!
//! # Why numbers rise
//!
//! A node remembers the last number of each name, and assigns a greater one to the next ticket. A
//! grant counts only when enough nodes have a last number that is not smaller than the grant's
//! number. Any two grants have one of these nodes in common. Of two grants, the *later* one is the
//! one whose ticket this common node has assigned a number to later. The later grant's number is
//! not smaller than the number that this node has assigned to it. So it is greater than the earlier
//! grant's number.
//!
//! For the last step, a node counts only if it has not assigned a greater number than the chosen
//! one. The chosen number is the highest of those that a majority has assigned. A node that answers
//! after the choice may have assigned a greater number, and then it does not count. If it counted,
//! a number could fall. Three nodes show it:
//!
//! 1. Nodes 1 and 2 choose the number of client A. Node 1 then loses the ticket early, for example
//!    because its clock jumps.
//! 2. Client B is granted by nodes 1 and 3, with a greater number, and releases.
//! 3. Node 3 now grants to client A, which still waits for its answer. Node 3 assigns a number that
//!    is greater than both, and would confirm the smaller one.
//!
//! There are two ways to come that far:
//!
//! - *Proposed.* The client proposes a number that is ahead of all clocks. A node assigns exactly
//!   this number if three things are true: it is greater than the node's clock, it is greater than
//!   the name's last number, and it is at most a day ahead of the clock. When enough nodes have
//!   assigned the proposed number, the grant counts.
//! - *Raised.* Otherwise the grant gets the highest number that any of these nodes has assigned.
//!   The client tells each of them this number. Each node has to confirm that it remembers the
//!   number and still has the ticket. That takes one more round trip.
//!
//! The proposal is only a guess that saves the round trip. If it is wrong, nothing unsafe happens:
//!
//! - *Nodes assign different numbers*, because a clock has jumped or the name has had a greater
//!   number. Then too few nodes have the proposed number, and the number is raised.
//! - *Two clients ask at once.* Each node serves one after the other. It assigns the proposal of
//!   the second client only if that is greater than the first client's number. If the two tickets
//!   exclude each other, a node has only one of them. So one of the two must be gone from their
//!   common node before the other can count.
//! - *A client proposes a number that is far ahead.* Nodes assign it only if it is at most a day
//!   ahead of their clocks. The proposals of other clients are smaller for a while, and the numbers
//!   of their grants are raised above it.
//! - *A node restarts without its data* and assigns a small number. It does not vote until all
//!   tickets that it had have ended, two minutes later. By then its clock has passed the numbers
//!   that it has forgotten, because a proposal is ahead of the clocks by much less. This is not
//!   safe if a clock was further ahead than two minutes: see the guide.
//! - *A key has expired at some nodes.* It lives until a day after the node's clock has passed the
//!   last number. So the clock is greater than the forgotten number. A ticket that expires does not
//!   change the last number.
//! - *An answer is late or is lost.* The node may have assigned the proposal or a greater number,
//!   and keeps it. The ticket has the number that was counted. Only this number is marked at enough
//!   nodes, so every majority knows it.

use std::time::Duration;

use super::tally::majority;
use crate::backend::{Enqueued, Fault, StoreError};

/// A day in microseconds, the unit of ticket numbers and of the servers' clocks. A number that is
/// more than a day ahead of the others comes from a wrong clock.
pub(super) const DAY: u64 = 24 * 60 * 60 * 1_000_000;

/// The count of one enqueue.
#[derive(Debug)]
pub(super) struct Ballot {
    votes: Vec<Vote>,
    /// How many nodes must have the ticket: a majority, or more.
    needed: usize,
    /// The number that the client has proposed to the nodes.
    proposed: u64,
    /// The number of the ticket, once enough nodes have granted it.
    number: Option<u64>,
}

/// The answer of one node.
#[derive(Clone, Debug)]
enum Vote {
    /// The node is not asked: it is down, or does not vote.
    Absent,
    Asked,
    /// The node has granted the ticket.
    Granted {
        number: u64,
        valid_for: Duration,
    },
    /// The node has granted the ticket, and the client is telling it the number.
    Raising {
        valid_for: Duration,
    },
    /// The node has the ticket with its number.
    Counts {
        valid_for: Duration,
    },
    /// The node may have the ticket, but its vote does not count.
    Spoilt(StoreError),
    Busy(Option<Duration>),
    Mismatch(u32),
    Gone,
    /// The node has no ticket.
    Failed(StoreError),
}

/// Whether the outcome of a count is certain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Open,
    Granted {
        ticket: u64,
        valid_for: Duration,
    },
    /// Too few nodes have granted the ticket.
    Refused,
}

impl Ballot {
    /// Begins a count among `all` nodes. Only the nodes in `asked` are asked.
    pub(super) fn new(
        all: usize,
        needed: usize,
        proposed: u64,
        asked: impl IntoIterator<Item = usize>,
    ) -> Self {
        let mut votes = vec![Vote::Absent; all];
        for at in asked {
            votes[at] = Vote::Asked;
        }
        Self {
            votes,
            needed,
            proposed,
            number: None,
        }
    }

    /// Counts the answer of a node to the enqueue. Returns the nodes that the client must tell the
    /// number now, and the number.
    pub(super) fn answered(
        &mut self,
        at: usize,
        answer: Result<Enqueued, StoreError>,
    ) -> Vec<(usize, u64)> {
        self.votes[at] = match answer {
            Ok(Enqueued::Granted { ticket, valid_for }) => Vote::Granted {
                number: ticket,
                valid_for,
            },
            // The request says that it must not wait. So the vote is spoilt, and the ticket will be
            // released.
            Ok(Enqueued::Waiting { .. }) => {
                Vote::Spoilt(StoreError::new(Fault::Retry, "a node let a request wait"))
            }
            Ok(Enqueued::Busy { retry_in }) => Vote::Busy(retry_in),
            Ok(Enqueued::CapacityMismatch { in_use }) => Vote::Mismatch(in_use),
            Ok(Enqueued::Gone) => Vote::Gone,
            Err(error) if may_be_carried_out(&error) => Vote::Spoilt(error),
            Err(error) => Vote::Failed(error),
        };
        self.raise()
    }

    /// Chooses the number as soon as enough nodes have granted. Returns the nodes that have granted
    /// and do not know the number. If the number is the proposal, a node that has assigned it knows
    /// it.
    fn raise(&mut self) -> Vec<(usize, u64)> {
        let needed = self.needed;
        let number = match (self.number, self.highest_sound()) {
            (Some(number), _) => number,
            (None, None) => return Vec::new(),
            (None, Some(highest)) => {
                let sound = self.granted().filter(|(_, number, _)| *number <= highest);
                if sound.count() < needed {
                    return Vec::new();
                }
                highest
            }
        };
        self.number = Some(number);
        let granted: Vec<_> = self.granted().collect();
        let mut raising = Vec::new();
        for (at, own, valid_for) in granted {
            self.votes[at] = if own > number.saturating_add(DAY) {
                Vote::Spoilt(StoreError::new(Fault::Retry, AHEAD))
            } else if own > number {
                Vote::Spoilt(StoreError::new(Fault::Retry, GREATER))
            } else if own == number && number == self.proposed {
                Vote::Counts { valid_for }
            } else {
                raising.push((at, number));
                Vote::Raising { valid_for }
            };
        }
        raising
    }

    fn granted(&self) -> impl Iterator<Item = (usize, u64, Duration)> + '_ {
        let votes = self.votes.iter().enumerate();
        votes.filter_map(|(at, vote)| match *vote {
            Vote::Granted { number, valid_for } => Some((at, number, valid_for)),
            _ => None,
        })
    }

    /// Counts the answer of a node that was told the number.
    pub(super) fn raised(&mut self, at: usize, answer: Result<bool, StoreError>) {
        let Vote::Raising { valid_for } = self.votes[at] else {
            return;
        };
        self.votes[at] = match answer {
            Ok(true) => Vote::Counts { valid_for },
            Ok(false) => Vote::Spoilt(StoreError::new(
                Fault::Retry,
                "a node's clock is more than a day behind the others, or it has lost a ticket; let all nodes \
                 follow the same time servers",
            )),
            Err(error) => Vote::Spoilt(error),
        };
    }

    /// Whether a majority has answered, too few of these nodes have granted the ticket, and others
    /// are in the way at one of them.
    pub(super) fn is_split(&self) -> bool {
        let is_answer = |vote: &&Vote| !matches!(vote, Vote::Absent | Vote::Asked);
        let answers = self.votes.iter().filter(is_answer).count();
        let is_refused = self.votes.iter().any(|vote| matches!(vote, Vote::Busy(_)));
        self.number.is_none() && is_refused && answers >= majority(self.votes.len())
    }

    /// Ends the count without the answers that are missing. These nodes may have the ticket, or take
    /// it later.
    pub(super) fn give_up(&mut self, error: impl Fn(usize) -> StoreError) {
        for (at, vote) in self.votes.iter_mut().enumerate() {
            if matches!(vote, Vote::Asked | Vote::Raising { .. }) {
                *vote = Vote::Spoilt(error(at));
            }
        }
    }

    pub(super) fn verdict(&self) -> Verdict {
        let needed = self.needed;
        let counts = self.votes.iter().filter_map(|vote| match vote {
            Vote::Counts { valid_for } => Some(*valid_for),
            _ => None,
        });
        if let (Some(ticket), Some(valid_for)) = (self.number, counts.clone().min())
            && counts.count() >= needed
        {
            return Verdict::Granted { ticket, valid_for };
        }
        let is_open = |vote: &&Vote| matches!(vote, Vote::Asked | Vote::Raising { .. });
        let open = self.votes.iter().filter(is_open).count();
        let granted = self
            .votes
            .iter()
            .filter(|vote| matches!(vote, Vote::Granted { .. } | Vote::Counts { .. }));
        // If a node has another capacity, the count waits until it is certain whether a majority
        // has it. If a majority has it, no grant is possible.
        let mismatches = self.mismatches().count();
        let majority = majority(self.votes.len());
        let may_mismatch = (1..majority).contains(&mismatches) && mismatches + open >= majority;
        let waits = open + granted.count() >= needed || may_mismatch;
        match waits && open > 0 {
            true => Verdict::Open,
            false => Verdict::Refused,
        }
    }

    /// The nodes whose answer to the enqueue has not come, and those whose answer will never come.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = usize> + '_ {
        let votes = self.votes.iter().enumerate();
        votes.filter_map(|(at, vote)| match vote {
            Vote::Asked => Some(at),
            Vote::Spoilt(error) if may_be_carried_out(error) => Some(at),
            _ => None,
        })
    }

    /// The nodes that may have the ticket.
    pub(super) fn may_have(&self) -> impl Iterator<Item = usize> + '_ {
        let votes = self.votes.iter().enumerate();
        votes.filter_map(|(at, vote)| match vote {
            Vote::Asked
            | Vote::Granted { .. }
            | Vote::Raising { .. }
            | Vote::Counts { .. }
            | Vote::Spoilt(_) => Some(at),
            Vote::Absent | Vote::Busy(_) | Vote::Mismatch(_) | Vote::Gone | Vote::Failed(_) => None,
        })
    }

    /// The answer if too few nodes have granted, on the condition that all tickets are released. It
    /// is an error if so many nodes have failed that the others are too few. Then it has the errors
    /// of the nodes.
    pub(super) fn refusal(&self) -> Result<Enqueued, Vec<StoreError>> {
        let needed = self.needed;
        let (mut free, mut ends) = (0, Vec::new());
        let (mut unable, mut errors) = (0, Vec::new());
        let highest = self.highest_sound();
        for vote in &self.votes {
            match vote {
                Vote::Gone => return Ok(Enqueued::Gone),
                Vote::Granted { number, .. }
                    if highest.is_some_and(|highest| *number > highest) =>
                {
                    unable += 1;
                    errors.push(StoreError::new(Fault::Retry, AHEAD));
                }
                // The count has ended before this answer.
                Vote::Asked => {}
                Vote::Granted { .. } | Vote::Raising { .. } | Vote::Counts { .. } => free += 1,
                Vote::Busy(end) => ends.push(end.unwrap_or(Duration::MAX)),
                // It is counted below.
                Vote::Mismatch(_) => {}
                Vote::Absent => unable += 1,
                Vote::Spoilt(error) | Vote::Failed(error) => {
                    unable += 1;
                    errors.push(error.clone());
                }
            }
        }
        if self.mismatches().count() >= majority(self.votes.len())
            && let Some(in_use) = self.mismatches().next()
        {
            return Ok(Enqueued::CapacityMismatch { in_use });
        }
        if unable > self.votes.len() - needed {
            return Err(errors);
        }
        ends.sort_unstable();
        let last_needed = needed.checked_sub(free + 1).and_then(|at| ends.get(at));
        Ok(Enqueued::Busy {
            retry_in: last_needed.copied().filter(|end| *end < Duration::MAX),
        })
    }

    /// The capacities of the nodes that have the name in use with another capacity.
    fn mismatches(&self) -> impl Iterator<Item = u32> + '_ {
        self.votes.iter().filter_map(|vote| match vote {
            Vote::Mismatch(in_use) => Some(*in_use),
            _ => None,
        })
    }

    /// The highest number that does not come from a wrong clock, once enough nodes have granted.
    fn highest_sound(&self) -> Option<u64> {
        let numbers: Vec<u64> = self.granted().map(|(_, number, _)| number).collect();
        match numbers.len() >= self.needed {
            true => highest_sound(numbers),
            false => None,
        }
    }
}

/// The highest of these numbers or clocks, without those that are more than a day ahead of the
/// middle one. So one wrong clock cannot raise the numbers of all nodes.
pub(super) fn highest_sound(mut numbers: Vec<u64>) -> Option<u64> {
    numbers.sort_unstable();
    let limit = numbers.get(numbers.len().saturating_sub(1) / 2)? + DAY;
    let sound = numbers.partition_point(|number| *number <= limit);
    Some(numbers[sound - 1])
}

/// Whether a node whose answer is this error may have carried out the request.
pub(super) fn may_be_carried_out(error: &StoreError) -> bool {
    error.fault() == Fault::Unknown || error.is_halfway()
}

/// The error of a node whose number is not accepted.
const AHEAD: &str = "a node's clock is more than a day ahead of the others; let all nodes follow the same time servers";

/// The error of a node that has assigned a number greater than the chosen one.
const GREATER: &str =
    "a node has drawn a number that is greater than the one that was chosen before; ask again";

#[cfg(test)]
mod histories;

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn granted(number: u64) -> Result<Enqueued, StoreError> {
        Ok(Enqueued::Granted {
            ticket: number,
            valid_for: TTL,
        })
    }

    fn busy(seconds: u64) -> Result<Enqueued, StoreError> {
        Ok(Enqueued::Busy {
            retry_in: Some(Duration::from_secs(seconds)),
        })
    }

    fn failed(fault: Fault) -> Result<Enqueued, StoreError> {
        Err(StoreError::new(fault, "said why"))
    }

    const PROPOSED: u64 = 500;

    fn ballot<const N: usize>(answers: [Result<Enqueued, StoreError>; N]) -> Ballot {
        let mut ballot = Ballot::new(5, 3, PROPOSED, 0..5);
        for (at, answer) in answers.into_iter().enumerate() {
            let raising = ballot.answered(at, answer);
            assert!(raising.is_empty(), "{raising:?}");
        }
        ballot
    }

    #[test]
    fn a_grant_counts_when_a_majority_has_the_highest_number() {
        let mut ballot = ballot([granted(7), granted(9)]);

        assert_eq!(ballot.answered(2, granted(8)), [(0, 9), (1, 9), (2, 9)]);
        assert_eq!(ballot.verdict(), Verdict::Open);
        ballot.raised(0, Ok(true));
        ballot.raised(1, Ok(true));
        assert_eq!(ballot.verdict(), Verdict::Open);
        // If one node could not be told the number, another node that grants later can count in its
        // place.
        ballot.raised(2, Err(StoreError::broken("lost")));
        assert_eq!(ballot.verdict(), Verdict::Open);
        assert_eq!(ballot.answered(3, granted(9)), [(3, 9)]);
        assert_eq!(ballot.verdict(), Verdict::Open);
        ballot.raised(3, Ok(true));

        let (ticket, valid_for) = (9, TTL);
        assert_eq!(ballot.verdict(), Verdict::Granted { ticket, valid_for });
    }

    #[test]
    fn a_node_that_draws_a_greater_number_after_it_is_chosen_does_not_count() {
        let mut ballot = ballot([granted(7), granted(9)]);
        assert_eq!(ballot.answered(2, granted(8)), [(0, 9), (1, 9), (2, 9)]);
        ballot.raised(0, Ok(false));
        ballot.raised(1, Ok(true));
        ballot.raised(2, Ok(true));
        assert_eq!(ballot.verdict(), Verdict::Open);

        assert_eq!(ballot.answered(3, granted(10)), []);

        assert_eq!(ballot.verdict(), Verdict::Open);
        assert!(ballot.may_have().any(|at| at == 3));
        ballot.answered(4, granted(10));
        assert_eq!(ballot.verdict(), Verdict::Refused);
        assert!(ballot.refusal().is_err());
    }

    #[test]
    fn a_grant_counts_at_once_when_a_majority_has_drawn_the_proposal() {
        let granted = || granted(PROPOSED);
        let mut ballot = ballot([granted(), busy(1), granted()]);
        assert_eq!(ballot.verdict(), Verdict::Open);

        assert_eq!(ballot.answered(4, granted()), []);

        let (ticket, valid_for) = (PROPOSED, TTL);
        assert_eq!(ballot.verdict(), Verdict::Granted { ticket, valid_for });
        // A node that grants after that is not told the number, although it has assigned another
        // one.
        ballot.answered(3, self::granted(PROPOSED + 9));
        assert_eq!(ballot.verdict(), Verdict::Granted { ticket, valid_for });
    }

    /// This is true even if all nodes have assigned the same number: another client has proposed
    /// it, or it is the next number of the name by chance.
    #[test]
    fn a_number_that_was_not_proposed_is_told_to_all() {
        for others in [[PROPOSED, PROPOSED], [PROPOSED + 1; 2]] {
            let mut ballot = ballot(others.map(granted));

            let told = [0, 1, 2].map(|at| (at, PROPOSED + 1));
            assert_eq!(ballot.answered(2, granted(PROPOSED + 1)), told);
            assert_eq!(ballot.verdict(), Verdict::Open);
        }
    }

    #[test]
    fn only_a_node_that_has_not_drawn_the_highest_proposal_is_told_it() {
        let behind = PROPOSED - 1;
        let mut ballot = ballot([granted(PROPOSED), granted(behind)]);

        assert_eq!(ballot.answered(2, granted(PROPOSED)), [(1, PROPOSED)]);

        assert_eq!(ballot.verdict(), Verdict::Open);
        ballot.raised(1, Ok(true));
        let (ticket, valid_for) = (PROPOSED, TTL);
        assert_eq!(ballot.verdict(), Verdict::Granted { ticket, valid_for });
    }

    #[test]
    fn a_count_ends_as_soon_as_there_can_be_no_majority() {
        let mut ballot = ballot([granted(1), busy(3), busy(1)]);
        assert_eq!(ballot.verdict(), Verdict::Open);

        ballot.answered(3, busy(2));

        assert_eq!(ballot.verdict(), Verdict::Refused);
        // The node that has not answered may have the ticket, too.
        assert_eq!(ballot.may_have().collect::<Vec<_>>(), [0, 4]);
        // Two more nodes are needed, and the second of them is free in two seconds.
        assert_eq!(ballot.refusal().unwrap(), busy(2).unwrap());
    }

    #[test]
    fn without_enough_answers_the_errors_are_told() {
        let refused = |answers| ballot::<5>(answers).refusal();
        let down = || failed(Fault::Unknown);

        let errors = refused([granted(1), granted(1), down(), down(), down()]);
        assert_eq!(errors.unwrap_err().len(), 3);
        let contended = refused([granted(1), busy(1), busy(1), down(), down()]);
        assert!(matches!(contended, Ok(Enqueued::Busy { .. })));
        let gone = refused([granted(1), Ok(Enqueued::Gone), down(), down(), down()]);
        assert!(matches!(gone, Ok(Enqueued::Gone)));
        let other = || Ok(Enqueued::CapacityMismatch { in_use: 3 });
        let mismatch = refused([other(), other(), other(), busy(1), busy(1)]);
        assert_eq!(mismatch.unwrap(), other().unwrap());
    }

    #[test]
    fn one_node_of_three_that_is_busy_is_enough_if_two_of_five_are_down() {
        let mut ballot = Ballot::new(5, 3, PROPOSED, 0..3);

        ballot.answered(0, busy(1));

        assert_eq!(ballot.verdict(), Verdict::Refused);
        assert!(matches!(ballot.refusal(), Ok(Enqueued::Busy { .. })));
        // The answer names another capacity only if a majority has it.
        let mut ballot = Ballot::new(5, 3, PROPOSED, 0..3);
        let other = || Ok(Enqueued::CapacityMismatch { in_use: 3 });
        ballot.answered(0, other());
        assert_eq!(ballot.verdict(), Verdict::Open);
        ballot.answered(1, granted(1));
        ballot.answered(2, granted(1));
        assert_eq!(ballot.verdict(), Verdict::Refused);
        assert!(matches!(ballot.refusal(), Ok(Enqueued::Busy { .. })));
    }

    #[test]
    fn a_count_that_is_given_up_is_contended_only_if_the_others_could_have_granted() {
        let late = |_| StoreError::new(Fault::Unknown, "late");
        let mut contended = ballot([granted(1), granted(1), busy(1)]);
        assert!(contended.is_split());
        assert_eq!(contended.verdict(), Verdict::Open);

        contended.give_up(late);

        assert_eq!(contended.verdict(), Verdict::Refused);
        assert_eq!(contended.refusal().unwrap(), busy(1).unwrap());
        let may_have = contended.may_have().collect::<Vec<_>>();
        assert_eq!(may_have, [0, 1, 3, 4]);
        let mut too_few = ballot([granted(1), granted(1), failed(Fault::Retry)]);
        too_few.give_up(late);
        assert_eq!(too_few.refusal().unwrap_err().len(), 3);
    }

    /// A semaphore of two needs all three nodes, and a mutex needs two of them.
    #[test]
    fn a_node_that_does_not_answer_hides_no_capacity_that_a_majority_has() {
        let other = || Ok(Enqueued::CapacityMismatch { in_use: 3 });
        for needed in [2, 3] {
            let mut ballot = Ballot::new(3, needed, PROPOSED, 0..3);
            ballot.answered(0, other());
            assert_eq!(ballot.verdict(), Verdict::Open);

            ballot.answered(1, other());

            assert_eq!(ballot.verdict(), Verdict::Refused);
            assert_eq!(ballot.refusal().unwrap(), other().unwrap());
            // The node that has not answered may have the ticket.
            assert_eq!(ballot.may_have().collect::<Vec<_>>(), [2]);
        }
    }

    #[test]
    fn a_count_does_not_wait_for_a_capacity_that_no_majority_can_have() {
        let other = || Ok(Enqueued::CapacityMismatch { in_use: 3 });
        let mut ballot = ballot([other(), busy(1), busy(2)]);
        assert_eq!(ballot.verdict(), Verdict::Open);

        ballot.answered(3, busy(3));

        assert_eq!(ballot.verdict(), Verdict::Refused);
        assert!(matches!(ballot.refusal(), Ok(Enqueued::Busy { .. })));
    }

    #[test]
    fn a_node_whose_clock_is_days_ahead_does_not_choose_the_number() {
        let ahead = 1_000 + 2 * DAY;
        let mut ballot = ballot([granted(ahead), granted(1_000), granted(1_001)]);
        assert_eq!(ballot.verdict(), Verdict::Open);
        let mut three = Ballot {
            votes: ballot.votes.clone(),
            needed: 3,
            proposed: PROPOSED,
            number: None,
        };
        for at in [3, 4] {
            three.answered(at, failed(Fault::Retry));
        }
        assert_eq!(three.verdict(), Verdict::Refused);
        assert!(
            three
                .refusal()
                .unwrap_err()
                .iter()
                .any(|error| error.to_string() == AHEAD)
        );

        let raising = ballot.answered(3, granted(1_002));

        assert_eq!(raising, [(1, 1_002), (2, 1_002), (3, 1_002)]);
        (1..4).for_each(|at| ballot.raised(at, Ok(true)));
        let (ticket, valid_for) = (1_002, TTL);
        assert_eq!(ballot.verdict(), Verdict::Granted { ticket, valid_for });
        assert!(ballot.may_have().any(|at| at == 0));
    }

    #[test]
    fn a_node_that_does_not_vote_is_no_part_of_a_majority() {
        let mut ballot = Ballot::new(3, 2, PROPOSED, [0, 1]);
        ballot.answered(0, granted(1));
        assert_eq!(ballot.verdict(), Verdict::Open);

        ballot.answered(1, busy(1));

        assert_eq!(ballot.verdict(), Verdict::Refused);
    }
}
