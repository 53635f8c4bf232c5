//! The rule of [turns](super) as a model: two clients, a line at a store, and every order of their
//! steps. A wake-up may reach nobody, a waiter may give up, a lease may end, a process may die, a
//! ticket may be detached and adopted, a writer may go on as a reader, and a failover may lose a
//! waiter. At most two of these happen in one history.
//!
//! Each part of the rule is a switch. The tests visit all states, and check that the rule as it is
//! has no bad state, and that it has one without each part.
//!
//! # What a store may lose
//!
//! With any loss of data, a turn must not be worse than a store that names nobody: if such a store
//! has one holder after the loss, there must be one with turns too. Redis acknowledges a write before
//! it is safe, so it may lose these:
//!
//! - *Everything, or the grant of a holder* (a restart without data, a tail of the log, a replica that
//!   has not received it). Two clients hold until the first one's next renewal, with turns or
//!   without. The guide says so, and `durability` prevents it.
//! - *A waiter, but no grant* (a tail of the log, or a replica that is behind by a moment). Without
//!   turns this is harmless: the waiter learns of the loss before it holds. With a turn there are two
//!   holders: 0 holds, and 1 waits right behind it. The server restarts without 1. 2 of another
//!   client waits behind 0. 0 ends, 1 holds by its turn, and the release of 0 lets 2 in. The client
//!   could renew 1 before it releases 0, whenever it has learned of a gap in between. This closes
//!   this case, but costs a request for each hand-over after a gap, and fails if the lease of 0 ends
//!   at the server first.
//! - *A waiter, without a gap* (the key of the line is evicted, or somebody deletes it, while the key
//!   of the holder stays). Nothing tells the client before the next renewal. The same schedule has
//!   two holders with turns, whatever the client does at a gap, and one without turns. Only a renewal
//!   of 1 before *each* release of 0 would find out, and then nothing is gained.
//!
//! So no rule is sound for Redis that does not ask the server at each hand-over, and a Redis names
//! nobody ([`Capability::names_ahead`](crate::backend::Capability::names_ahead)). Tasks of one process
//! that ask together share one plain ticket instead (`acquire::groups`). No loss makes such a ticket
//! worse than any other.

use std::collections::{HashSet, VecDeque};

use self::Stage::*;

const MOST: usize = 4;

/// The parts of the rule, and what may happen.
#[derive(Clone, Copy)]
struct Rules {
    tickets: usize,
    readers: bool,
    /// How many things may go wrong in one history.
    faults: u8,
    may_give_up: bool,
    may_end: bool,
    may_die: bool,
    may_move: bool,
    may_shrink: bool,
    may_lose_waiter: bool,
    /// The loss of a waiter is a gap, so the client learns of it. If not, a key was evicted.
    loss_is_gap: bool,
    /// The store names the ticket ahead. If not, there are no turns.
    names: bool,
    /// The store names a ticket only if it is right ahead. Else it names the youngest older one of
    /// the same client.
    right_ahead: bool,
    /// Only if both ask for everything.
    only_full: bool,
    /// The store shortens no lease of a ticket that was given a name.
    named_is_not_cut: bool,
    /// The store wakes the next one, even if the client has let it in.
    store_wakes: bool,
    /// Only a ticket that was held lets the next one in.
    only_held: bool,
    /// A ticket that was detached lets nobody in.
    moved_is_forgotten: bool,
    /// A ticket is detached only when the store says that it holds.
    moved_if_granted: bool,
    /// After a gap, a turn counts only when a renewal has confirmed the ticket.
    confirmed: bool,
    /// After a gap, the client renews the ticket that it has let in before it sends the release of
    /// the one ahead. The client does not do this. So a store that may lose a waiter names nobody:
    /// see [`Capability::names_ahead`](crate::backend::Capability::names_ahead).
    renews_first: bool,
}

const RULE: Rules = Rules {
    tickets: 3,
    readers: true,
    faults: 2,
    may_give_up: true,
    may_end: true,
    may_die: true,
    may_move: true,
    may_shrink: true,
    may_lose_waiter: false,
    loss_is_gap: true,
    names: true,
    right_ahead: true,
    only_full: true,
    named_is_not_cut: true,
    store_wakes: true,
    only_held: true,
    moved_is_forgotten: true,
    moved_if_granted: true,
    confirmed: true,
    renews_first: true,
};

/// How far a ticket has come in its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    None,
    Asked,
    Waits,
    Holds,
    /// It was held, and its user is done.
    Ended,
    GaveUp,
    Died,
    /// Detached, and not adopted.
    Moved,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Ticket {
    stage: Stage,
    client: u8,
    writes: bool,
    /// The deadline has passed.
    over: bool,
    /// Reported as granted: by the store, or because of the ticket ahead.
    has_turn: bool,
    follower: Option<u8>,
    /// The ticket that it has let in.
    told: Option<u8>,
    // At the store:
    in_line: bool,
    full: bool,
    granted: bool,
    ahead: Option<u8>,
    /// Its wake-up has reached nobody. The client learns of that with the gap of its connection.
    unheard: bool,
    /// Its lease was shortened because of that.
    cut: bool,
    // On the way:
    answer: Option<bool>,
    wake: bool,
    release: bool,
    shrink: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct State {
    tickets: [Ticket; MOST],
    taken: usize,
    died: [bool; 2],
    faults: u8,
    /// A failover has happened, so that clients must renew.
    gap: bool,
    /// A valid text of a detached ticket was refused.
    refused: bool,
}

/// A bad state that a search has found.
#[derive(Debug, PartialEq, Eq, Hash, Clone, Copy)]
enum Bad {
    TwoHolders,
    /// A waiter that nothing will wake before its renewal.
    Sleeper,
    Refused,
}

impl State {
    const FIRST: Self = Self {
        tickets: [Ticket {
            stage: None,
            client: 0,
            writes: false,
            over: false,
            has_turn: false,
            follower: Option::None,
            told: Option::None,
            in_line: false,
            full: false,
            granted: false,
            ahead: Option::None,
            unheard: false,
            cut: false,
            answer: Option::None,
            wake: false,
            release: false,
            shrink: false,
        }; MOST],
        taken: 0,
        died: [false; 2],
        faults: 0,
        gap: false,
        refused: false,
    };

    fn bad(&self) -> Option<Bad> {
        let valid = |ticket: &&Ticket| ticket.stage == Holds && !ticket.over;
        let holders = self.tickets.iter().filter(valid);
        if holders.clone().count() > 1 && holders.clone().any(|holder| holder.writes) {
            return Some(Bad::TwoHolders);
        }
        self.refused.then_some(Bad::Refused)
    }

    fn lives(&self, at: usize) -> bool {
        !self.died[self.tickets[at].client as usize]
    }

    /// The store grants by the rule of the line, and wakes.
    fn grant(&mut self, wakes: bool) {
        let (mut any, mut writer) = (false, false);
        for ticket in &mut self.tickets[..self.taken] {
            if !ticket.in_line {
                continue;
            }
            if if ticket.full { any } else { writer } {
                break;
            }
            if !ticket.granted {
                ticket.granted = true;
                ticket.wake = wakes;
            }
            any = true;
            writer |= ticket.full;
        }
    }

    fn remove(&mut self, at: usize, wakes: bool) {
        if self.tickets[at].in_line {
            self.tickets[at].in_line = false;
            self.tickets[at].granted = false;
            self.grant(wakes);
        }
    }

    /// The wake-ups of the step from `before` reach nobody. The store shortens the leases.
    fn unheard(mut self, before: &Self, rules: &Rules) -> Option<Self> {
        let mut any = false;
        for (ticket, before) in self.tickets.iter_mut().zip(&before.tickets) {
            if ticket.wake && !before.wake {
                ticket.wake = false;
                ticket.unheard = true;
                ticket.cut = ticket.ahead.is_none() || !rules.named_is_not_cut;
                any = true;
            }
        }
        any.then_some(self)
    }

    fn let_in(&mut self, at: usize, follower: u8) {
        self.tickets[at].told = Some(follower);
        let follower = &mut self.tickets[follower as usize];
        follower.has_turn |= follower.stage == Waits;
    }

    /// The answer to the enqueue of a waiter has come.
    fn follow(&mut self, follower: usize) {
        let Some(ahead) = self.tickets[follower].ahead else {
            return;
        };
        let client = self.tickets[follower].client;
        let ticket = &mut self.tickets[ahead as usize];
        match ticket.stage {
            _ if ticket.told.is_some() || ticket.client != client => {}
            Ended => self.let_in(ahead as usize, follower as u8),
            Asked | Waits | Holds => ticket.follower = ticket.follower.or(Some(follower as u8)),
            _ => {}
        }
    }

    /// The states after one step, and whether the step needs nobody's doing: a waiter may rely on
    /// such a step.
    fn next(&self, rules: &Rules) -> Vec<(Self, bool)> {
        let mut next = Vec::new();
        self.enqueue(rules, &mut next);
        for at in 0..self.taken {
            self.client_steps(at, rules, &mut next);
            self.store_steps(at, rules, &mut next);
            self.faults(at, rules, &mut next);
            self.consequences(at, &mut next);
        }
        next.retain(|(state, _)| state.faults <= rules.faults);
        next
    }

    fn enqueue(&self, rules: &Rules, next: &mut Vec<(Self, bool)>) {
        if self.taken == rules.tickets {
            return;
        }
        for (client, writes) in [(0, true), (1, true), (0, false), (1, false)] {
            if self.died[client as usize] || !writes && !rules.readers {
                continue;
            }
            let (mut state, at) = (*self, self.taken);
            state.taken += 1;
            let of_client = |other: &&usize| self.tickets[**other].client == client;
            let line: Vec<usize> = (0..at).filter(|at| self.tickets[*at].in_line).collect();
            let ahead = match rules.right_ahead {
                true => line.last().filter(of_client),
                false => line.iter().rfind(of_client),
            };
            let full = |other: &&usize| {
                rules.names && (!rules.only_full || writes && self.tickets[**other].full)
            };
            let ticket = &mut state.tickets[at];
            (ticket.stage, ticket.client, ticket.writes) = (Asked, client, writes);
            (ticket.in_line, ticket.full) = (true, writes);
            ticket.ahead = ahead.filter(full).map(|ahead| *ahead as u8);
            state.grant(false);
            state.tickets[at].answer = Some(state.tickets[at].granted);
            next.push((state, false));
        }
    }

    fn client_steps(&self, at: usize, rules: &Rules, next: &mut Vec<(Self, bool)>) {
        let (ticket, mut state) = (self.tickets[at], *self);
        if !self.lives(at) {
            return;
        }
        let collect = |state: &mut Self| {
            let ticket = &mut state.tickets[at];
            match ticket.over {
                true => (ticket.stage, ticket.release) = (GaveUp, true),
                false => ticket.stage = Holds,
            }
        };
        match ticket.stage {
            Asked => {
                state.tickets[at].answer = Option::None;
                match ticket.answer == Some(true) {
                    true => collect(&mut state),
                    false => {
                        state.tickets[at].stage = Waits;
                        state.follow(at);
                    }
                }
                next.push((state, true));
            }
            Waits if ticket.wake => {
                state.tickets[at].wake = false;
                state.tickets[at].has_turn = true;
                next.push((state, true));
            }
            Waits if ticket.has_turn => {
                // A renewal finds out that the ticket is lost.
                state.tickets[at].over |= self.gap && rules.confirmed && !ticket.in_line;
                collect(&mut state);
                next.push((state, true));
            }
            Holds => {
                state.tickets[at].stage = Ended;
                state.tickets[at].release = true;
                if let Some(follower) = ticket.follower.filter(|_| !ticket.over) {
                    state.let_in(at, follower);
                }
                next.push((state, true));
            }
            _ => {}
        }
        // A renewal that is answered "holds".
        let asks = matches!(ticket.stage, Waits | Holds) && ticket.in_line && ticket.granted;
        let changes = ticket.cut || ticket.stage == Waits && !ticket.wake && !ticket.has_turn;
        if asks && !ticket.over && changes {
            let mut state = *self;
            (state.tickets[at].cut, state.tickets[at].unheard) = (false, false);
            state.tickets[at].has_turn |= ticket.stage == Waits;
            // It comes after a third of the ttl. A waiter that relies on it sleeps too long, except
            // after a gap.
            next.push((state, ticket.unheard));
        }
    }

    fn store_steps(&self, at: usize, rules: &Rules, next: &mut Vec<(Self, bool)>) {
        let ticket = self.tickets[at];
        let mut with_unheard = |state: Self| {
            next.push((state, true));
            next.extend(state.unheard(self, rules).map(|state| (state, true)));
        };
        if ticket.release {
            let mut state = *self;
            state.tickets[at].release = false;
            if self.gap
                && rules.renews_first
                && let Some(told) = ticket.told
            {
                let told = &mut state.tickets[told as usize];
                told.over |= !told.in_line;
            }
            state.remove(at, rules.store_wakes || ticket.told.is_none());
            with_unheard(state);
        }
        if ticket.in_line && (ticket.over || ticket.cut) {
            let mut state = *self;
            state.remove(at, true);
            with_unheard(state);
        }
        if ticket.shrink && ticket.in_line {
            let mut state = *self;
            (state.tickets[at].shrink, state.tickets[at].full) = (false, false);
            state.grant(true);
            with_unheard(state);
        }
    }

    fn faults(&self, at: usize, rules: &Rules, next: &mut Vec<(Self, bool)>) {
        let (ticket, lives) = (self.tickets[at], self.lives(at));
        let mut fault = |allowed: bool, change: &dyn Fn(&mut Self)| {
            if allowed {
                let mut state = *self;
                state.faults += 1;
                change(&mut state);
                next.push((state, false));
            }
        };
        fault(
            rules.may_give_up && lives && ticket.stage == Waits,
            &|state| {
                state.tickets[at].stage = GaveUp;
                state.tickets[at].release = true;
                if let Some(follower) = ticket.follower.filter(|_| !rules.only_held) {
                    state.let_in(at, follower);
                }
            },
        );
        let holds = lives && ticket.stage == Holds;
        fault(
            rules.may_shrink && holds && ticket.writes && rules.readers,
            &|state| {
                state.tickets[at].writes = false;
                state.tickets[at].shrink = true;
            },
        );
        let may_leave = holds && !ticket.over && (ticket.granted || !rules.moved_if_granted);
        fault(rules.may_move && may_leave, &|state| {
            state.tickets[at].stage = Moved;
            if let Some(follower) = ticket.follower.filter(|_| !rules.moved_is_forgotten) {
                state.let_in(at, follower);
            }
            state.tickets[at].follower = Option::None;
        });
        fault(
            rules.may_end && lives && ticket.in_line && !ticket.over,
            &|state| {
                state.tickets[at].over = true;
            },
        );
        fault(rules.may_die && lives && ticket.stage != None, &|state| {
            state.died[ticket.client as usize] = true;
            for other in &mut state.tickets {
                let dies = matches!(other.stage, Asked | Waits | Holds);
                if other.client == ticket.client && dies {
                    other.stage = Died;
                }
            }
        });
        let is_last = !self.tickets[at + 1..].iter().any(|behind| behind.in_line);
        let waits = ticket.in_line && !ticket.granted && is_last;
        fault(rules.may_lose_waiter && !self.gap && waits, &|state| {
            state.tickets[at].in_line = false;
            state.gap = rules.loss_is_gap;
        });
    }

    /// What an earlier fault leads to.
    fn consequences(&self, at: usize, next: &mut Vec<(Self, bool)>) {
        let ticket = self.tickets[at];
        if matches!(ticket.stage, Died | Moved) && ticket.in_line && !ticket.over {
            let mut state = *self;
            state.tickets[at].over = true;
            next.push((state, true));
        }
        let other = 1 - ticket.client;
        if ticket.stage == Moved && ticket.in_line && !ticket.over && !self.died[other as usize] {
            let mut state = *self;
            match ticket.granted {
                true => {
                    (state.tickets[at].stage, state.tickets[at].client) = (Holds, other);
                    state.tickets[at].told = Option::None;
                }
                false => state.refused = true,
            }
            next.push((state, false));
        }
    }
}

/// Visits all states, or as many as it takes to find this bad one. Returns how many there are, and
/// the bad ones.
fn search(rules: Rules, until: Option<Bad>) -> (usize, HashSet<Bad>) {
    let mut seen = HashSet::from([State::FIRST]);
    let mut bad = HashSet::new();
    let mut open = VecDeque::from([State::FIRST]);
    while let Some(state) = open.pop_front() {
        if until.is_some_and(|until| bad.contains(&until)) {
            break;
        }
        if let Some(found) = state.bad() {
            bad.insert(found);
            continue;
        }
        let next = state.next(&rules);
        let sleeps = |(at, ticket): (usize, &Ticket)| {
            ticket.stage == Waits && ticket.in_line && !ticket.over && state.lives(at)
        };
        let goes_on = next.iter().any(|(_, relied_on)| *relied_on);
        if !goes_on && state.tickets.iter().enumerate().any(sleeps) {
            bad.insert(Bad::Sleeper);
        }
        for (state, _) in next {
            if seen.insert(state) {
                open.push_back(state);
            }
        }
    }
    (seen.len(), bad)
}

/// Checks that the rule is bad without one of its parts, in the way that is expected.
fn is_needed(expected: Bad, rules: Rules) {
    let (_, bad) = search(rules, Some(expected));
    assert!(bad.contains(&expected), "{bad:?}");
}

#[test]
fn the_rule_has_no_bad_state() {
    let readers = Rules { faults: 1, ..RULE };
    let writers = Rules {
        readers: false,
        ..RULE
    };
    let many = Rules {
        tickets: 4,
        faults: 0,
        ..RULE
    };
    let mut searches = vec![readers, writers, many];
    // These take minutes without optimization.
    if std::env::var_os("LOCKCORE_LONG").is_some() {
        let four = Rules {
            tickets: 4,
            readers: false,
            faults: 1,
            ..RULE
        };
        searches.extend([RULE, four]);
    }
    for rules in searches {
        let (states, bad) = search(rules, Option::None);
        assert!(bad.is_empty(), "{bad:?}");
        assert!(states > 10_000, "{states}");
    }
}

/// What a client would have to do for a store that may lose a waiter in a failover, so that the
/// waiter does not hold beside the one that the new master lets in. Even this is enough only if the
/// client can reach the new master before the lease of the ticket ahead ends there.
#[test]
fn a_waiter_that_a_failover_loses_does_not_hold_by_a_turn() {
    let loses = Rules {
        may_lose_waiter: true,
        may_end: false,
        readers: false,
        ..RULE
    };
    let (_, bad) = search(loses, Option::None);
    assert!(bad.is_empty(), "{bad:?}");
}

#[test]
fn a_waiter_that_an_eviction_takes_holds_by_a_turn_even_if_the_client_renews_after_each_gap() {
    is_needed(
        Bad::TwoHolders,
        Rules {
            may_lose_waiter: true,
            loss_is_gap: false,
            readers: false,
            ..RULE
        },
    );
}

/// So a store that may lose a waiter names nobody.
#[test]
fn a_waiter_that_is_lost_never_holds_at_a_store_that_names_nobody() {
    for loss_is_gap in [true, false] {
        let plain = Rules {
            may_lose_waiter: true,
            loss_is_gap,
            names: false,
            readers: false,
            // Without turns, the client renews no ticket before a release.
            confirmed: false,
            renews_first: false,
            ..RULE
        };
        let (states, bad) = search(plain, Option::None);
        assert!(bad.is_empty(), "{bad:?}");
        assert!(states > 10_000, "{states}");
    }
}

#[test]
fn a_waiter_that_gives_up_must_let_nobody_in() {
    is_needed(
        Bad::TwoHolders,
        Rules {
            only_held: false,
            ..RULE
        },
    );
}

#[test]
fn only_a_ticket_that_is_right_ahead_may_let_another_in() {
    is_needed(
        Bad::TwoHolders,
        Rules {
            right_ahead: false,
            ..RULE
        },
    );
}

#[test]
fn tickets_that_do_not_ask_for_everything_must_not_let_another_in() {
    is_needed(
        Bad::TwoHolders,
        Rules {
            only_full: false,
            ..RULE
        },
    );
}

#[test]
fn a_waiter_that_was_given_a_name_must_keep_its_whole_lease() {
    is_needed(
        Bad::TwoHolders,
        Rules {
            named_is_not_cut: false,
            ..RULE
        },
    );
}

#[test]
fn the_store_must_wake_the_next_one_all_the_same() {
    is_needed(
        Bad::Sleeper,
        Rules {
            store_wakes: false,
            ..RULE
        },
    );
}

#[test]
fn a_ticket_that_was_detached_must_let_nobody_in() {
    is_needed(
        Bad::TwoHolders,
        Rules {
            moved_is_forgotten: false,
            ..RULE
        },
    );
}

#[test]
fn a_ticket_must_not_be_detached_before_the_store_says_that_it_holds() {
    is_needed(
        Bad::Refused,
        Rules {
            moved_if_granted: false,
            ..RULE
        },
    );
}

#[test]
fn after_a_gap_the_release_must_wait_for_a_renewal_of_the_one_that_was_let_in() {
    is_needed(
        Bad::TwoHolders,
        Rules {
            may_lose_waiter: true,
            readers: false,
            renews_first: false,
            ..RULE
        },
    );
}

#[test]
fn after_a_gap_a_turn_must_not_count_before_a_renewal() {
    is_needed(
        Bad::TwoHolders,
        Rules {
            may_lose_waiter: true,
            readers: false,
            confirmed: false,
            ..RULE
        },
    );
}
