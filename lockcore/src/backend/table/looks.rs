//! Looks: a store that cannot call looks again and again whether the tickets that wait are granted.
//! Here is which tickets of a process wait, and how often to look.

use std::collections::{BTreeSet, HashMap};
#[cfg(feature = "mysql")]
use std::ops::Bound;
use std::time::Duration;

use tokio::time::Instant;

use crate::request::Id;

/// The shortest pause between two looks, used after a change.
const SOONEST: Duration = Duration::from_millis(2);

/// Between the shortest and the longest pause, the pause is an eighth of the time since the last
/// change. So a waiter waits at most an eighth longer than the lock was held. It takes about 35
/// looks from the shortest pause to one of 50 ms.
const PART: u32 = 8;

/// The tickets that wait, each in a line `L`.
#[derive(Debug)]
pub(crate) struct Looks<L> {
    /// The longest pause.
    latest: Duration,
    waiting: HashMap<Id, Waiting<L>>,
    /// The same tickets, in the order of their lines.
    in_order: BTreeSet<(L, Id)>,
    /// No ticket in `waiting` ends before this time, in milliseconds of the boot clock.
    none_ends_before: i64,
    /// When another process last made a change, or a ticket began to wait for another process.
    changed: Option<Instant>,
}

/// A ticket that waits.
#[derive(Debug)]
struct Waiting<L> {
    line: L,
    /// When it ends if it is not renewed, in milliseconds of the boot clock.
    ends: i64,
}

impl<L: Clone + Ord> Looks<L> {
    pub(crate) fn new(latest: Duration) -> Self {
        Self {
            latest,
            waiting: HashMap::new(),
            in_order: BTreeSet::new(),
            none_ends_before: 0,
            changed: None,
        }
    }

    /// Notes that a ticket waits in a line until `ends`, if it is not renewed. If only tickets of
    /// this process are ahead of it, a release in this process will wake it, so frequent looks are
    /// not needed. Slow looks are needed even then, because another process may remove tickets that
    /// have expired.
    pub(crate) fn waits(&mut self, id: Id, line: L, ends: i64, foreign_ahead: bool) {
        self.none_ends_before = self.none_ends_before.min(ends);
        let is_new = !self.waiting.contains_key(&id);
        self.settled(id); // it may stand in another line by now
        self.in_order.insert((line.clone(), id));
        self.waiting.insert(id, Waiting { line, ends });
        if is_new && foreign_ahead {
            self.changed();
        }
    }

    /// Notes that the ticket does not wait any more: it holds or is gone, and its client knows
    /// that.
    pub(crate) fn settled(&mut self, id: Id) {
        if let Some(ticket) = self.waiting.remove(&id) {
            self.in_order.remove(&(ticket.line, id));
        }
    }

    /// Forgets the tickets that have ended. Usually an answer [settles](Self::settled) a ticket
    /// before its end. But if the store cannot be used until then, no answer comes, and after that
    /// the client does not ask for this ticket any more.
    pub(crate) fn forget_ended(&mut self, now: i64) {
        if now < self.none_ends_before {
            return;
        }
        let in_order = &mut self.in_order;
        self.waiting.retain(|id, ticket| {
            let stays = ticket.ends > now;
            if !stays {
                in_order.remove(&(ticket.line.clone(), *id));
            }
            stays
        });
        let ends = self.waiting.values().map(|ticket| ticket.ends);
        self.none_ends_before = ends.min().unwrap_or(i64::MAX);
    }

    pub(crate) fn is_waiting(&self, id: Id) -> bool {
        self.waiting.contains_key(&id)
    }

    /// The lines to look at.
    #[cfg(feature = "sqlite")]
    pub(crate) fn lines(&self) -> BTreeSet<L> {
        self.in_order.iter().map(|(line, _)| line.clone()).collect()
    }

    /// The first ticket behind a line, or of all if there is no line, in the order of the lines.
    #[cfg(feature = "mysql")]
    pub(crate) fn first_behind(&self, line: Option<L>) -> Option<&(L, Id)> {
        match line {
            Some(line) => {
                let behind = (line, Id::from_bytes([u8::MAX; 16]));
                let behind = (Bound::Excluded(behind), Bound::Unbounded);
                self.in_order.range(behind).next()
            }
            None => self.in_order.first(),
        }
    }

    /// Another process has changed something.
    pub(crate) fn changed(&mut self) {
        self.changed = Some(Instant::now());
    }

    /// The time of the next look, if any ticket waits.
    pub(crate) fn look_at(&self, looked: Instant) -> Option<Instant> {
        if self.waiting.is_empty() {
            return None;
        }
        let pause = self.changed.map_or(self.latest, |changed| {
            let unchanged = looked.saturating_duration_since(changed);
            (unchanged / PART).clamp(SOONEST, self.latest)
        });
        Some(looked + pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATEST: Duration = Duration::from_millis(50);

    #[tokio::test(start_paused = true)]
    async fn looks_become_rarer_the_longer_nothing_changes_and_stop_when_nobody_waits() {
        let mut looks = Looks::new(LATEST);
        let id = Id::draw().unwrap();
        assert_eq!(looks.look_at(Instant::now()), None);
        looks.waits(id, 1, 60_000, true);

        let began = Instant::now();
        let mut looked = began;
        let mut count = 0;
        while looked < began + Duration::from_millis(400) {
            let next = looks.look_at(looked).unwrap();
            assert!(next - looked >= SOONEST && next - looked <= LATEST);
            assert!(next - looked <= ((looked - began) / PART).max(SOONEST));
            looked = next;
            count += 1;
        }
        assert!((30..45).contains(&count), "{count}");
        assert_eq!(looks.look_at(looked), Some(looked + LATEST));

        looks.settled(id);
        assert_eq!(looks.look_at(looked), None);
        looks.waits(id, 1, 60_000, false);
        let next = looks.look_at(looked);
        assert_eq!(next, Some(looked + LATEST), "all ahead are of this process");
    }

    #[tokio::test(start_paused = true)]
    async fn a_ticket_that_nothing_settles_is_forgotten_at_its_end() {
        let mut looks = Looks::new(LATEST);
        let [renewed, other] = [(); 2].map(|()| Id::draw().unwrap());
        let is_waiting = |looks: &Looks<i64>| [renewed, other].map(|id| looks.is_waiting(id));
        looks.waits(renewed, 1, 1000, true);
        looks.waits(other, 2, 1500, true);

        looks.forget_ended(999);
        looks.waits(renewed, 1, 2000, true);
        looks.forget_ended(1499);
        assert_eq!(is_waiting(&looks), [true, true]);

        looks.forget_ended(1500);
        assert_eq!(is_waiting(&looks), [true, false]);
        looks.forget_ended(1999);
        assert!(looks.look_at(Instant::now()).is_some());
        looks.forget_ended(2000);
        assert!(looks.look_at(Instant::now()).is_none());
    }
}
