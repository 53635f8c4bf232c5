//! Turns: when a ticket of this client ends, the ticket of this client right behind it gets the lock
//! in memory, and does not wait until the store knows of the end. This is plain data of the
//! [table](super::table): which ticket lets in which one. What a ticket does with its turn is in
//! `acquire::pending`.
//!
//! The store keeps the line and stays the judge. It names the ticket [right
//! ahead](crate::backend::Enqueued::Waiting::ahead) of a waiter only if both ask for everything. The
//! rule is:
//!
//! > A ticket holds as soon as its own lease is valid and either the store says that it holds, or
//! > the ticket that was right ahead of it *has ended*: it was held, and its last user is done.
//!
//! There are never two holders. A ticket that asks for everything holds only after everything older
//! has ended, or is gone from the store. So when the ticket ahead has been held, everything older
//! than that is over. Nothing is between the two: a ticket in between would have been in the line
//! when the store named the one ahead, or was gone by then. And an end stays true for ever, so it
//! does not matter when, or how often, the waiter learns of it. The store lets in nobody younger
//! than the waiter while the waiter is in line, and the waiter believes in its lease only until its
//! deadline. The tests in `model` visit every order of steps of this rule, and show for each part of
//! it what happens without it:
//!
//! - *Only a ticket that was held lets another in.* If a waiter gives up, the ticket ahead of it may
//!   be held. So only the end of the last use ends a ticket here ([`Turns::end`]). Whatever else
//!   takes a ticket out of the table only forgets its follower ([`Turns::forget`]): a waiter that
//!   gives up, a lease that is lost, revoked or recalled, a `min_hold` that is over, a shutdown. The
//!   store serves the next one then.
//! - *A ticket that was detached lets nobody in*, because the adopter holds it. It leaves the table
//!   in the same way.
//! - *The store wakes the next one all the same.* If the follower has given up, its turn is lost,
//!   and the ticket behind the follower is served by the store.
//! - *Each ticket lets in at most one.* After a store has lost its data it may name a ticket twice.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::lease::Lease;
use crate::clock::Instant;
use crate::hash::Prehashed;
use crate::request::Id;

/// How long a ticket that has ended is remembered, for a follower whose enqueue is answered later.
/// The store woke that follower too, so this only saves time.
const REMEMBERED: Duration = Duration::from_secs(1);

/// How many tickets that have ended are remembered.
const MOST_REMEMBERED: usize = 4_096;

/// The tickets that let others in. Every ticket of `behind` is in the table.
#[derive(Default)]
pub(super) struct Turns {
    /// For a ticket: the one right behind it.
    behind: Prehashed<Id, Arc<Lease>>,
    /// Tickets that have ended and have let nobody in, with the time until which each is
    /// remembered.
    ended: Prehashed<Id, Instant>,
    /// The same times with their ids, in order. It may have ids that are not in `ended` any more.
    forget: VecDeque<(Instant, Id)>,
}

impl Turns {
    /// Notes that `follower` is right behind a ticket. `is_known` tells which tickets are in the
    /// table. Returns whether the ticket ahead has ended already, so that the follower holds.
    #[must_use]
    pub(super) fn follow(
        &mut self,
        ahead: Id,
        is_known: impl Fn(Id) -> bool,
        follower: &Arc<Lease>,
    ) -> bool {
        if self.ended.remove(&ahead).is_some() {
            return true;
        }
        // If the one that was behind it has given up, the next is right behind it now.
        let behind = self.behind.get(&ahead);
        let is_free = behind.is_none_or(|before| !is_known(before.request.id));
        if is_known(ahead) && is_free {
            self.behind.insert(ahead, Arc::clone(follower));
        }
        false
    }

    /// Whether a ticket is known to be right behind this one.
    pub(super) fn is_followed(&self, id: Id) -> bool {
        self.behind.contains_key(&id)
    }

    /// The last user of a ticket is done. Returns the lease that holds because of this. `is_known`
    /// is that of [`follow`](Self::follow).
    #[must_use]
    pub(super) fn end(
        &mut self,
        id: Id,
        is_known: impl Fn(Id) -> bool,
        now: Instant,
    ) -> Option<Arc<Lease>> {
        // If the one behind has given up, the ticket may let in one that comes later.
        let next = self
            .behind
            .remove(&id)
            .filter(|next| is_known(next.request.id));
        if next.is_none() {
            let until = now.after(REMEMBERED);
            self.ended.insert(id, until);
            self.forget.push_back((until, id));
        }
        while let Some(&(until, oldest)) = self.forget.front()
            && (until <= now || self.forget.len() > MOST_REMEMBERED)
        {
            self.forget.pop_front();
            self.ended.remove(&oldest);
        }
        next
    }

    /// A ticket leaves the table. It lets nobody in from now on, unless it has ended before.
    pub(super) fn forget(&mut self, id: Id) {
        self.behind.remove(&id);
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use super::super::lease::tests::{at, lease};
    use super::*;

    fn waits() -> (Id, Arc<Lease>) {
        let lease = Arc::new(lease());
        (lease.request.id, lease)
    }

    #[test]
    fn a_ticket_that_ends_lets_in_the_one_behind_it_once() {
        let ((ahead, _), (_, first), (_, second)) = (waits(), waits(), waits());
        let mut turns = Turns::default();
        assert!(!turns.follow(ahead, |_| true, &first));
        assert!(!turns.follow(ahead, |_| true, &second));

        let next = turns
            .end(ahead, |_| true, at(1))
            .expect("nobody was let in");

        assert!(Arc::ptr_eq(&next, &first));
        assert!(!turns.follow(ahead, |_| false, &second), "it let in two");
    }

    #[test]
    fn a_ticket_that_has_ended_lets_in_one_that_comes_later() {
        let ((ahead, _), (_, late), (_, later)) = (waits(), waits(), waits());
        let mut turns = Turns::default();
        assert!(turns.end(ahead, |_| true, at(1)).is_none());

        assert!(turns.follow(ahead, |_| true, &late));
        assert!(!turns.follow(ahead, |_| true, &later), "it let in two");
    }

    #[test]
    fn a_ticket_that_leaves_without_having_ended_lets_nobody_in() {
        let ((ahead, _), (_, waits)) = (waits(), waits());
        let mut turns = Turns::default();
        assert!(!turns.follow(ahead, |_| true, &waits));

        turns.forget(ahead);

        assert!(!turns.follow(ahead, |_| false, &waits));
        assert_eq!(turns.behind.len(), 0);
    }

    #[test]
    fn a_follower_that_has_given_up_leaves_its_place_to_the_next() {
        let ((ahead, _), (gone, gave_up), (_, next)) = (waits(), waits(), waits());
        let mut turns = Turns::default();
        assert!(!turns.follow(ahead, |_| true, &gave_up));

        assert!(!turns.follow(ahead, |id| id != gone, &next));

        let let_in = turns
            .end(ahead, |_| true, at(1))
            .expect("nobody was let in");
        assert!(Arc::ptr_eq(&let_in, &next));
    }

    #[test]
    fn a_follower_that_has_given_up_does_not_use_up_the_turn() {
        let ((ahead, _), (gone, gave_up), (_, later)) = (waits(), waits(), waits());
        let mut turns = Turns::default();
        assert!(!turns.follow(ahead, |_| true, &gave_up));

        assert!(turns.end(ahead, |id| id != gone, at(1)).is_none());

        assert!(turns.follow(ahead, |_| false, &later));
    }

    #[test]
    fn what_has_ended_is_forgotten() {
        let ((first, _), (second, follower)) = (waits(), waits());
        let mut turns = Turns::default();
        assert!(turns.end(first, |_| true, at(1)).is_none());
        assert!(turns.end(second, |_| true, at(2)).is_none());
        assert!(!turns.follow(first, |_| false, &follower));
        for _ in 0..MOST_REMEMBERED {
            assert!(turns.end(waits().0, |_| true, at(2)).is_none());
        }
        assert!(!turns.follow(second, |_| false, &follower));
        assert_eq!(turns.ended.len(), turns.forget.len());
    }
}
