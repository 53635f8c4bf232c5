//! The changes of counters that a master has acknowledged shortly before another server has replaced
//! it. The new master may not have received them. So the client repeats these changes there, each
//! with its own id. If the new master has received a change, it finds the id, and the change does not
//! count again.
//!
//! - *The server must not have forgotten the id.* A client tells the server which ids it may forget.
//!   Here these ids are held back for as long as their changes may be repeated. As soon as an id is
//!   told, its change is not repeated any more. The server itself remembers an id for a minute, and a
//!   change is repeated for half a minute. Each answer says how many changes of the counter the server
//!   remembers. If these are too many, each client holds fewer ids back, in proportion to how many it
//!   holds back: see [`Latest::most`].
//! - *Others have changed the counter at the new master meanwhile.* An addition counts in any order.
//!   A change with a condition is carried out only if its condition holds there too. For a value the
//!   fencing token decides. A set without a condition is repeated only if there is no newer version:
//!   see [`repetition`](repeat::repetition).
//! - *The client itself changes the counter at the new master.* Its request waits until the earlier
//!   changes of this counter are repeated there.
//! - *Two connections of the client repeat the changes of a counter.* Only one of them at a time does,
//!   so the changes come in their order. It has the [right](Repeating) to. This belongs to a task
//!   of that connection and not to a caller, whose future may be dropped or not polled. It ends
//!   when the last repetition is answered, or with the connection. So no repetition is on its way
//!   when a client tells the server to forget its id. If the runtime of the connection is blocked in
//!   this moment, requests of other runtimes for this counter are in conflict until it runs again.
//! - *The client sends no request that would show the new master.* A cluster does not report a new
//!   master. So the client [looks](Changed::looks) for it, as long as it has changes that it may have
//!   to repeat.

mod repeat;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::backend::{Count, CountOp, Counted, MOST_REMEMBERED, OnlyIf, Outcome};
use crate::clock::{Clock, Instant};
use crate::counting::answered::Answered;
use crate::name::Name;
use crate::request::Id;
pub(super) use repeat::{Repeating, for_each_by_itself, repeated_all};

/// For how long the id of an answered change is held back. From the promotion of a replica until
/// clients leave the old master it takes a second or two.
const RECENT: Duration = Duration::from_secs(3);

/// A change that is older than this is not repeated, because the server may have forgotten its id.
const LONGEST: Duration = Duration::from_secs(30);

/// How many changes of one counter the server may remember, those of all clients together, before
/// the clients hold fewer ids back. A server that remembers [`MOST_REMEMBERED`] changes refuses
/// others. The rest is for changes whose answers have not come yet.
const ENOUGH: usize = MOST_REMEMBERED / 5 * 4;

/// How many changes of a counter each client may hold back, however many the others hold. This is
/// [`ENOUGH`] for 100 clients.
const LEAST: usize = ENOUGH / 100;

/// The most changes that one request stops to hold back.
const FREED_AT_ONCE: usize = 100;

/// The most additions to a counter that are repeated at the same time.
const REPEATED_AT_ONCE: usize = 100;

/// The most counters whose changes are repeated at the same time.
const COUNTERS_AT_ONCE: usize = 32;

/// With more changes than this, those that are not recent any more are removed. If this is not
/// enough, a change takes the place of the oldest one of the same counter, or is not repeated.
const MANY: usize = 10_000;
const SWEPT_EVERY: Duration = Duration::from_millis(100);

/// The shortest time between two looks for new masters.
pub(super) const LOOKS_EVERY: Duration = Duration::from_secs(1);

/// The latest changes of all connections of a client.
#[derive(Debug, Default)]
pub(super) struct Changed {
    all: Mutex<Changes>,
    /// Wakes the tasks that look for new masters, one of each connection. One of them alone may be on
    /// a runtime that is blocked.
    noted: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Changes {
    of: HashMap<Name, Latest>,
    /// The ids that are not held back any more, and that a later request tells.
    to_tell: Answered,
    /// How many changes of all counters there are.
    number: usize,
    /// When there were too many the last time.
    swept: Option<Instant>,
    /// The counters whose changes are being repeated.
    repeating: HashSet<Name>,
    /// When a connection has looked for new masters the last time.
    looked: Option<Instant>,
}

/// The latest changes of one counter.
#[derive(Debug, Default)]
struct Latest {
    /// The oldest come first.
    changes: VecDeque<Recent>,
    /// How many of these changes each master has acknowledged. After a failover there are two.
    at: Vec<(Arc<str>, usize)>,
    /// The ids of these changes, and of each whether the client allows the server to forget it.
    ids: HashMap<Id, bool>,
    /// How many changes this client may hold back, if the server remembers too many. A client that
    /// holds many gives up more of them than one that holds few, and none goes below [`LEAST`].
    /// While the server remembers fewer, there is no limit but the time. So after a while, the
    /// clients that change a counter share what the server remembers, also with those that come
    /// later, and need not know how many they are.
    most: Option<usize>,
}

/// An answer about a counter.
#[derive(Debug)]
pub(super) struct CountAnswer {
    pub(super) counted: Counted,
    /// How many changes of the counter the server remembers.
    pub(super) remembered: usize,
}

/// A change that was acknowledged.
#[derive(Clone, Debug)]
struct Recent {
    at: Instant,
    /// The address of the master that has acknowledged the change.
    master: Arc<str>,
    count: Arc<Count>,
    /// The count and the version of the counter after the change.
    after: i64,
    version: u64,
    /// The version that the repetition of an earlier change of this client has made at the new
    /// master, if the counter had the same count after it as at the old one. The counter is not
    /// newer there than this change, as long as it has this version.
    follows: Option<u64>,
}

impl Recent {
    /// Whether the change is an addition whose effect does not depend on the changes before it.
    fn counts_in_any_order(&self) -> bool {
        matches!(self.count.op, CountOp::Add { floor: None, .. })
    }

    /// A read of this counter.
    fn reads(&self, name: &Name) -> Arc<Count> {
        Arc::new(Count::new(name.clone(), self.count.id, CountOp::Read))
    }
}

impl Changed {
    /// Remembers a change that the master has acknowledged. A change that was refused is not
    /// repeated: at another master it might be carried out.
    pub(super) fn note(&self, master: &Arc<str>, count: &Arc<Count>, answered: &CountAnswer) {
        let CountAnswer {
            counted,
            remembered,
        } = answered;
        if count.op == CountOp::Read || counted.outcome != Outcome::Applied {
            return;
        }
        let at = Clock::BOOT.now();
        let mut all = self.all();
        if all.number >= MANY {
            if all.swept.is_none_or(|swept| swept.until(at) >= SWEPT_EVERY) {
                all.swept = Some(at);
                all.remove_older(RECENT, at);
            }
            if all.number >= MANY && !all.remove_oldest_of(&count.name) {
                return;
            }
        }
        all.number += 1;
        let latest = all.of.entry(count.name.clone()).or_default();
        latest.ids.insert(count.id, false);
        latest.add_at(master);
        latest.changes.push_back(Recent {
            at,
            master: Arc::clone(master),
            count: Arc::clone(count),
            after: counted.count,
            version: counted.version,
            follows: None,
        });
        // A sixteenth less than in proportion, so that they become fewer and not only no more.
        let fewer = latest.changes.len() * ENOUGH * 15 / (remembered * 16).max(1);
        latest.most = (*remembered > ENOUGH).then(|| fewer.max(LEAST));
        drop(all);
        self.noted.send_replace(());
    }

    /// The same request, but without the ids that are held back, and with earlier ids that are not
    /// held back any more.
    pub(super) fn telling(self: &Arc<Self>, count: &Arc<Count>) -> Telling {
        let as_it_is = || Telling {
            changed: Arc::clone(self),
            count: Arc::clone(count),
            ids: Vec::new(),
        };
        // A server takes no ids from a read.
        if count.op == CountOp::Read {
            return as_it_is();
        }
        let now = Clock::BOOT.now();
        let Changes {
            of,
            to_tell,
            number,
            ..
        } = &mut *self.all();
        let mut told = Vec::new();
        if let Some(latest) = of.get_mut(&count.name) {
            for id in &count.answered {
                match latest.ids.get_mut(id) {
                    Some(is_answered) => *is_answered = true,
                    None => told.push(*id),
                }
            }
            let mut freed = 0;
            while freed < FREED_AT_ONCE && latest.holds_too_many(now) {
                latest.remove_oldest(to_tell);
                freed += 1;
            }
            *number -= freed;
            if latest.changes.is_empty() {
                of.remove(&count.name);
            }
        } else {
            told.clone_from(&count.answered);
        }
        let ids = to_tell.take(&count.name);
        if ids.is_empty() && told.len() == count.answered.len() {
            return as_it_is();
        }
        told.extend(&ids);
        Telling {
            changed: Arc::clone(self),
            count: Arc::new(Count {
                answered: told,
                ..Count::clone(count)
            }),
            ids,
        }
    }

    /// The counters that have changes which another master has acknowledged. `has` tells of a master
    /// whether it has a name.
    pub(super) fn names(&self, has: impl Fn(&str, &Name) -> bool) -> Vec<Name> {
        let all = self.all();
        let of = all.of.iter();
        of.filter(|(name, latest)| latest.at.iter().any(|(master, _)| !has(master, name)))
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// Changes when there may be changes to look for.
    pub(super) fn noted(&self) -> watch::Receiver<()> {
        self.noted.subscribe()
    }

    /// One read of a counter for each master that has acknowledged a change which may have to be
    /// repeated. `None` if there is no such change. Empty if a connection of this client has just
    /// looked.
    ///
    /// If the master is not one any more, it answers the read with the address of another one. One
    /// request a second to each master costs little, and only clients that change counters send it.
    pub(super) fn looks(&self) -> Option<Vec<Arc<Count>>> {
        let now = Clock::BOOT.now();
        let all = &mut *self.all();
        let mut latest: BTreeMap<&str, (&Name, &Recent)> = BTreeMap::new();
        for (name, of) in &all.of {
            if let Some(change) = of.changes.back()
                && change.at.until(now) <= LONGEST
            {
                latest.entry(&change.master).or_insert((name, change));
            }
        }
        let looks: Vec<_> = latest
            .into_values()
            .map(|(name, change)| change.reads(name))
            .collect();
        if looks.is_empty() {
            return None;
        }
        if all
            .looked
            .is_some_and(|looked| looked.until(now) < LOOKS_EVERY)
        {
            return Some(Vec::new());
        }
        all.looked = Some(now);
        Some(looks)
    }

    /// The oldest changes of a counter that are to be repeated at this master: one change, or
    /// additions that may be repeated at the same time. Empty if there are none.
    fn next(&self, name: &Name, master: &str) -> Vec<Recent> {
        let mut all = self.all();
        all.remove_older_of(name, LONGEST, Clock::BOOT.now());
        let Some(latest) = all.of.get(name) else {
            return Vec::new();
        };
        let elsewhere = |change: &&Recent| *change.master != *master;
        let mut next = latest.changes.iter().filter(elsewhere).peekable();
        let mut taken: Vec<_> = next.next().into_iter().cloned().collect();
        if taken.iter().all(Recent::counts_in_any_order) {
            while taken.len() < REPEATED_AT_ONCE
                && let Some(change) = next.next_if(|change| change.counts_in_any_order())
            {
                taken.push(change.clone());
            }
        }
        taken
    }

    /// Notes that this master has been asked for these changes of one counter, and what each has made
    /// there. With `None` a change was not carried out there.
    ///
    /// If the counter has the same count after a change as at the earlier master, the later changes
    /// of this client may count on top of it as they did there, whoever else has changed the
    /// counter. If a later change has the condition that nobody has changed the counter since, its
    /// condition is the new version now. If the count is another one, the conditions stay as they
    /// are, and do not hold.
    fn note_at(&self, done: &[(Recent, Option<Counted>)], master: &Arc<str>) {
        let Some((Recent { count, .. }, _)) = done.first() else {
            return;
        };
        let mut all = self.all();
        let Some(latest) = all.of.get_mut(&count.name) else {
            return;
        };
        let mut made_of: HashMap<Id, Option<&Counted>> = HashMap::new();
        let mut versions: HashMap<u64, u64> = HashMap::new();
        let mut follows = None;
        for (change, made) in done {
            made_of.insert(change.count.id, made.as_ref());
            if let Some(made) = made.as_ref().filter(|made| made.count == change.after) {
                versions.insert(change.version, made.version);
                follows = Some(made.version);
            }
        }
        let mut moved = Vec::new();
        for change in &mut latest.changes {
            if let Some(made) = made_of.get(&change.count.id) {
                moved.push(std::mem::replace(&mut change.master, Arc::clone(master)));
                change.version = made.map_or(change.version, |made| made.version);
                continue;
            }
            if *change.master == **master {
                continue;
            }
            change.follows = follows.or(change.follows);
            if let CountOp::Set {
                count,
                only_if: Some(OnlyIf::Version(version)),
            } = &change.count.op
                && let Some(version) = versions.get(version)
            {
                let (count, only_if) = (*count, Some(OnlyIf::Version(*version)));
                change.count = Arc::new(Count {
                    op: CountOp::Set { count, only_if },
                    ..Count::clone(&change.count)
                });
            }
        }
        for from in moved {
            latest.remove_at(&from);
            latest.add_at(master);
        }
    }

    fn all(&self) -> MutexGuard<'_, Changes> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Changes {
    /// Removes the oldest change of a counter. Returns `false` if there is none.
    fn remove_oldest_of(&mut self, name: &Name) -> bool {
        let latest = self.of.get_mut(name);
        let removed = latest.is_some_and(|latest| latest.remove_oldest(&mut self.to_tell));
        self.number -= usize::from(removed);
        removed
    }

    /// Removes the changes of a counter that are older than `age`.
    fn remove_older_of(&mut self, name: &Name, age: Duration, now: Instant) {
        let Some(latest) = self.of.get_mut(name) else {
            return;
        };
        self.number -= latest.remove_older(age, now, &mut self.to_tell);
        if latest.changes.is_empty() {
            self.of.remove(name);
        }
    }

    /// Removes the changes that are older than `age`, and the counters that have no others.
    fn remove_older(&mut self, age: Duration, now: Instant) {
        self.of.retain(|_, latest| {
            self.number -= latest.remove_older(age, now, &mut self.to_tell);
            !latest.changes.is_empty()
        });
    }
}

impl Latest {
    /// Whether another master than this one has acknowledged a change.
    fn is_elsewhere(&self, master: &str) -> bool {
        self.at.iter().any(|(at, _)| **at != *master)
    }

    fn add_at(&mut self, master: &Arc<str>) {
        match self.at.iter_mut().find(|(at, _)| at == master) {
            Some((_, changes)) => *changes += 1,
            None => self.at.push((Arc::clone(master), 1)),
        }
    }

    fn remove_at(&mut self, master: &str) {
        if let Some((_, changes)) = self.at.iter_mut().find(|(at, _)| **at == *master) {
            *changes -= 1;
        }
        self.at.retain(|(_, changes)| *changes > 0);
    }

    /// Whether the oldest change need not be held back any more, or cannot.
    fn holds_too_many(&self, now: Instant) -> bool {
        let is_old = |oldest: &Recent| oldest.at.until(now) > RECENT;
        self.changes.front().is_some_and(is_old)
            || self.most.is_some_and(|most| self.changes.len() > most)
    }

    /// Removes the oldest change, which is not repeated any more. Returns `false` if there is none.
    fn remove_oldest(&mut self, to_tell: &mut Answered) -> bool {
        let Some(Recent { master, count, .. }) = self.changes.pop_front() else {
            return false;
        };
        self.remove_at(&master);
        // If the client does not allow it yet, a later request of the client tells this id.
        if self.ids.remove(&count.id) == Some(true) {
            to_tell.note(&count.name, &[count.id]);
        }
        true
    }

    /// Removes the changes that are older than `age`. Returns how many.
    fn remove_older(&mut self, age: Duration, now: Instant, to_tell: &mut Answered) -> usize {
        let before = self.changes.len();
        let is_older = |oldest: &Recent| oldest.at.until(now) > age;
        while self.changes.front().is_some_and(is_older) {
            self.remove_oldest(to_tell);
        }
        before - self.changes.len()
    }
}

/// A request that tells the server ids which are not held back any more. If it is dropped before
/// [`answered`](Self::answered), a later request tells these ids.
#[derive(Debug)]
pub(super) struct Telling {
    changed: Arc<Changed>,
    pub(super) count: Arc<Count>,
    ids: Vec<Id>,
}

impl Telling {
    /// Notes that the server has answered.
    pub(super) fn answered(mut self) {
        self.ids.clear();
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        let mut all = self.changed.all();
        all.to_tell.note(&self.count.name, &self.ids);
    }
}

#[cfg(test)]
mod tests;
