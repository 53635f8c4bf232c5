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
//!   see [`repetition`].
//! - *The client itself changes the counter at the new master.* Its request waits until the earlier
//!   changes of this counter are repeated there.
//! - *Two connections of the client repeat the changes of a counter.* Only one of them at a time does,
//!   so the changes come in their order. It has the [`Turn`] of the counter. The turn belongs to a
//!   task of that connection and not to a caller, whose future may be dropped or not polled. It ends
//!   when the last repetition is answered, or with the connection. So no repetition is on its way
//!   when a client tells the server to forget its id. If the runtime of the connection is blocked in
//!   this moment, requests of other runtimes for this counter are in conflict until it runs again.
//! - *The client sends no request that would show the new master.* A cluster does not report a new
//!   master. So the client [looks](Changed::looks) for it, as long as it has changes that it may have
//!   to repeat.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{oneshot, watch};

use crate::backend::{
    BoxFuture, Count, CountOp, Counted, Fault, MOST_REMEMBERED, OnlyIf, Outcome, StoreError,
};
use crate::clock::{Clock, Instant};
use crate::name::Name;
use crate::request::Id;

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

/// The most ids that are not held back any more and are told in one request.
const TOLD_AT_ONCE: usize = 100;

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
    /// The ids of these changes, and of each whether the client allows the server to forget it.
    ids: HashMap<Id, bool>,
    /// Ids that are not held back any more, and that a later request tells. They come first.
    to_tell: Vec<Id>,
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
    /// The value and the version of the counter after the change.
    value: i64,
    version: u64,
    /// The version that the repetition of an earlier change of this client has made at the new
    /// master, if the counter had the same value after it as at the old one. The counter is not newer
    /// there than this change, as long as it has this version.
    follows: Option<u64>,
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
        latest.changes.push_back(Recent {
            at,
            master: Arc::clone(master),
            count: Arc::clone(count),
            value: counted.value,
            version: counted.version,
            follows: None,
        });
        let held = latest.changes.len();
        let fewer = |held: usize| held * ENOUGH / remembered / 16 * 15;
        latest.most = (*remembered > ENOUGH).then(|| fewer(held).max(LEAST));
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
        let mut all = self.all();
        let Some(latest) = all.of.get_mut(&count.name) else {
            return as_it_is();
        };
        let mut told = Vec::new();
        for id in &count.answered {
            match latest.ids.get_mut(id) {
                Some(is_answered) => *is_answered = true,
                None => told.push(*id),
            }
        }
        let mut gone = 0;
        while gone < TOLD_AT_ONCE && latest.holds_too_many(now) {
            latest.remove_oldest();
            gone += 1;
        }
        let now_told = latest.to_tell.len().min(TOLD_AT_ONCE);
        let ids: Vec<_> = latest.to_tell.drain(..now_told).collect();
        told.extend(&ids);
        let is_empty = latest.is_empty();
        all.number -= gone;
        if is_empty {
            all.of.remove(&count.name);
        }
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
        of.filter(|(name, latest)| {
            let mut changes = latest.changes.iter();
            changes.any(|change| !has(&change.master, name))
        })
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
            .map(|(name, change)| reads(name, change))
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

    /// Begins to repeat, at this master, the changes of a counter that another master has
    /// acknowledged. `None` if there are none.
    ///
    /// # Errors
    ///
    /// A conflict if somebody else repeats them.
    pub(super) fn begin(
        self: &Arc<Self>,
        name: &Name,
        master: &Arc<str>,
    ) -> Result<Option<Turn>, StoreError> {
        if self.next(name, master).is_empty() {
            return Ok(None);
        }
        match self.all().repeating.insert(name.clone()) {
            true => Ok(Some(Turn {
                changed: Arc::clone(self),
                name: name.clone(),
                master: Arc::clone(master),
            })),
            false => Err(StoreError::conflict(
                "another connection of this client repeats earlier changes of this counter",
            )),
        }
    }

    /// The oldest changes of a counter that are to be repeated at this master: one change, or
    /// additions that may be repeated at the same time. Empty if there are none.
    fn next(&self, name: &Name, master: &str) -> Vec<Recent> {
        let all = &mut *self.all();
        let Some(latest) = all.of.get_mut(name) else {
            return Vec::new();
        };
        all.number -= latest.remove_older(LONGEST, Clock::BOOT.now());
        let elsewhere = |change: &&Recent| *change.master != *master;
        let mut next = latest.changes.iter().filter(elsewhere).peekable();
        let mut taken: Vec<_> = next.next().into_iter().cloned().collect();
        if taken.iter().all(counts_in_any_order) {
            while taken.len() < REPEATED_AT_ONCE
                && let Some(change) = next.next_if(|change| counts_in_any_order(change))
            {
                taken.push(change.clone());
            }
        }
        if latest.is_empty() {
            all.of.remove(name);
        }
        taken
    }

    /// Notes that this master has been asked for a change, and what the change has made there. With
    /// `None` the change was not carried out there.
    ///
    /// If the counter has the same value after it as at the earlier master, the later changes of this
    /// client may count on top of it as they did there, whoever else has changed the counter. If a
    /// later change has the condition that nobody has changed the counter since this one, its
    /// condition is the new version now. If the value is another one, the conditions stay as they are,
    /// and do not hold.
    fn is_at(&self, done: &Recent, master: &Arc<str>, made: Option<&Counted>) {
        let same = made.filter(|made| made.value == done.value);
        let mut all = self.all();
        let Some(latest) = all.of.get_mut(&done.count.name) else {
            return;
        };
        for change in &mut latest.changes {
            if change.count.id == done.count.id {
                change.master = Arc::clone(master);
                change.version = made.map_or(change.version, |made| made.version);
                continue;
            }
            let Some(same) = same.filter(|_| *change.master != **master) else {
                continue;
            };
            change.follows = Some(same.version);
            if let CountOp::Set { value, only_if } = &change.count.op
                && *only_if == Some(OnlyIf::Version(done.version))
            {
                let (value, only_if) = (*value, Some(OnlyIf::Version(same.version)));
                change.count = Arc::new(Count {
                    op: CountOp::Set { value, only_if },
                    ..Count::clone(&change.count)
                });
            }
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
        let removed = latest.is_some_and(Latest::remove_oldest);
        self.number -= usize::from(removed);
        removed
    }

    /// Removes the changes that are older than `age`, and the counters that have no others.
    fn remove_older(&mut self, age: Duration, now: Instant) {
        self.of.retain(|_, latest| {
            self.number -= latest.remove_older(age, now);
            !latest.is_empty()
        });
    }
}

impl Latest {
    /// Whether the oldest change need not be held back any more, or cannot.
    fn holds_too_many(&self, now: Instant) -> bool {
        let is_old = |oldest: &Recent| oldest.at.until(now) > RECENT;
        self.changes.front().is_some_and(is_old)
            || self.most.is_some_and(|most| self.changes.len() > most)
    }

    /// Removes the oldest change, which is not repeated any more. Returns `false` if there is none.
    fn remove_oldest(&mut self) -> bool {
        let Some(oldest) = self.changes.pop_front() else {
            return false;
        };
        let id = oldest.count.id;
        // If the client does not allow it yet, a later request of the client tells this id.
        if self.ids.remove(&id) == Some(true) {
            self.to_tell.push(id);
        }
        true
    }

    fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.to_tell.is_empty()
    }

    /// Removes the changes that are older than `age`. Returns how many.
    fn remove_older(&mut self, age: Duration, now: Instant) -> usize {
        let before = self.changes.len();
        let is_older = |oldest: &Recent| oldest.at.until(now) > age;
        while self.changes.front().is_some_and(is_older) {
            self.remove_oldest();
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
        if !self.ids.is_empty() {
            let mut all = self.changed.all();
            let latest = all.of.entry(self.count.name.clone()).or_default();
            latest.to_tell.append(&mut self.ids);
        }
    }
}

/// The turn to repeat the changes of a counter at a master.
#[derive(Debug)]
pub(super) struct Turn {
    changed: Arc<Changed>,
    name: Name,
    master: Arc<str>,
}

impl Turn {
    /// Repeats the changes, oldest first. `ask` sends a request to the master.
    ///
    /// If this fails, or the future is dropped, the rest is repeated by the next turn.
    pub(super) async fn repeat<F>(self, ask: impl Fn(Arc<Count>) -> F) -> Result<(), StoreError>
    where
        F: Future<Output = Result<Counted, StoreError>>,
    {
        let Self {
            changed,
            name,
            master,
        } = &self;
        loop {
            let changes = changed.next(name, master);
            if changes.is_empty() {
                return Ok(());
            }
            let repeated = changes.iter().map(|change| repeat(change, &ask));
            let mut failed = None;
            for (change, outcome) in changes.iter().zip(join_all(repeated).await) {
                match outcome {
                    Ok(made) => changed.is_at(change, master, made.as_ref()),
                    // The counter is damaged at this master, or the user may not change it.
                    Err(error) if error.fault() == Fault::Config => {
                        changed.is_at(change, master, None);
                    }
                    Err(error) => failed = Some(error),
                }
            }
            if let Some(error) = failed {
                return Err(error);
            }
        }
    }

    /// [`repeat`](Self::repeat) in a task, which goes on if this future is dropped. `spawn` starts a
    /// task that ends with the connection.
    pub(super) async fn repeat_in_task<F>(
        self,
        spawn: impl FnOnce(BoxFuture<()>),
        ask: impl Fn(Arc<Count>) -> F + Send + Sync + 'static,
    ) -> Result<(), StoreError>
    where
        F: Future<Output = Result<Counted, StoreError>> + Send + 'static,
    {
        let (tell, told) = oneshot::channel();
        spawn(Box::pin(async move {
            let _ = tell.send(self.repeat(ask).await); // the caller may have gone
        }));
        let ended = |_| StoreError::new(Fault::Retry, "the connection has ended");
        told.await.map_err(ended)?
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.changed.all().repeating.remove(&self.name);
    }
}

/// Repeats the changes of these counters of one master once, of some at the same time. If all of some
/// fail, the master does not answer or refuses everything, so the others are left out. Returns whether
/// all were repeated.
pub(super) async fn repeated_all<F>(names: &[Name], repeat: impl Fn(Name) -> F) -> bool
where
    F: Future<Output = Result<(), StoreError>>,
{
    let mut are_done = true;
    for some in names.chunks(COUNTERS_AT_ONCE) {
        let repeated = join_all(some.iter().cloned().map(&repeat)).await;
        are_done &= repeated.iter().all(Result::is_ok);
        if repeated.iter().all(Result::is_err) {
            break;
        }
    }
    are_done
}

/// Repeats a change. Returns what it has made, or `None` if it was not carried out.
async fn repeat<F>(
    change: &Recent,
    ask: impl Fn(Arc<Count>) -> F,
) -> Result<Option<Counted>, StoreError>
where
    F: Future<Output = Result<Counted, StoreError>>,
{
    let read = match change.count.op {
        CountOp::Set { only_if: None, .. } | CountOp::Write(_) => {
            Some(ask(reads(&change.count.name, change)).await?)
        }
        _ => None,
    };
    let Some(count) = repetition(change, read.as_ref()) else {
        return Ok(None);
    };
    let made = ask(count).await?;
    Ok((made.outcome == Outcome::Applied).then_some(made))
}

/// Whether the change is an addition whose effect does not depend on the changes before it.
fn counts_in_any_order(change: &Recent) -> bool {
    matches!(change.count.op, CountOp::Add { floor: None, .. })
}

fn reads(name: &Name, change: &Recent) -> Arc<Count> {
    Arc::new(Count::new(name.clone(), change.count.id, CountOp::Read))
}

/// The request that repeats a change. `read` is the counter at the new master, for a value and for a
/// set without a condition. These would undo every later change.
///
/// A value is repeated unless a later holder, or this holder later, has written there. A set is
/// repeated only if the counter there is older than after the change, and on the condition that
/// nobody changes the counter in between. An earlier change of this client that was repeated just
/// now does not make the counter newer. Versions follow the clocks of the servers, so this decides
/// rightly if the clocks differ by less than the time between the two changes. If the sets of two
/// clients are both missing there, the one that is repeated first stays.
fn repetition(change: &Recent, read: Option<&Counted>) -> Option<Arc<Count>> {
    let count = Count {
        answered: Vec::new(),
        ..Count::clone(&change.count)
    };
    let is_newer =
        |read: &Counted| read.version >= change.version && Some(read.version) != change.follows;
    let op = match (&count.op, read) {
        (CountOp::Write(text), Some(read)) => {
            let there = read.written.as_ref().map(|there| there.token);
            if there > Some(text.token) || (there == Some(text.token) && is_newer(read)) {
                return None;
            }
            count.op.clone()
        }
        (_, Some(read)) if is_newer(read) => return None,
        (CountOp::Set { value, .. }, Some(read)) => CountOp::Set {
            value: *value,
            only_if: Some(OnlyIf::Version(read.version)),
        },
        (op, _) => op.clone(),
    };
    Some(Arc::new(Count { op, ..count }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Written;
    use crate::counting::{Carried, Record};
    use crate::name::Namespace;
    use crate::token::{FencingToken, GrantId};

    fn change(op: CountOp, answered: Vec<Id>) -> Arc<Count> {
        let name = Name::new(Namespace::new("test").unwrap(), "a").unwrap();
        let count = Count::new(name, Id::draw().unwrap(), op);
        Arc::new(Count { answered, ..count })
    }

    fn add(answered: Vec<Id>) -> Arc<Count> {
        let (delta, floor) = (1, None);
        change(CountOp::Add { delta, floor }, answered)
    }

    fn counted(version: u64) -> Counted {
        Counted::new(1, 1, version, Outcome::Applied)
    }

    fn answered(version: u64) -> CountAnswer {
        CountAnswer {
            counted: counted(version),
            remembered: 1,
        }
    }

    #[tokio::test]
    async fn changes_of_another_master_are_repeated_in_order_and_once() {
        let changed = Arc::new(Changed::default());
        let (old, new) = (Arc::from("old"), Arc::from("new"));
        let all = [add(Vec::new()), add(Vec::new()), add(Vec::new())];
        for count in &all {
            changed.note(&old, count, &answered(5));
        }
        changed.note(&new, &add(Vec::new()), &answered(9));
        let name = &all[0].name;
        let of_new = |master: &str, _: &Name| master == "new";
        assert_eq!(changed.names(of_new), std::slice::from_ref(name));
        let asked = Mutex::new(Vec::new());
        let ask = |count: Arc<Count>| {
            asked.lock().unwrap().push(count.id);
            let answer = match asked.lock().unwrap().len() {
                2 => Err(StoreError::new(Fault::Retry, "not now")),
                _ => Ok(counted(6)),
            };
            std::future::ready(answer)
        };

        let turn = || changed.begin(name, &new);
        let first = turn().unwrap().unwrap();
        assert!(turn().unwrap_err().is_conflict());
        let failed = first.repeat(ask).await.unwrap_err();
        assert_eq!(failed.fault(), Fault::Retry);
        let second = turn().unwrap().unwrap();
        second.repeat(ask).await.unwrap();
        assert!(turn().unwrap().is_none());

        let ids = all.map(|count| count.id);
        // Additions are repeated together.
        assert_eq!(*asked.lock().unwrap(), [ids[0], ids[1], ids[2], ids[1]]);
        assert_eq!(changed.names(of_new), []);
    }

    #[tokio::test]
    async fn a_caller_that_goes_away_keeps_the_turn_from_nobody() {
        let changed = Arc::new(Changed::default());
        let (old, new) = (Arc::from("old"), Arc::from("new"));
        let count = add(Vec::new());
        changed.note(&old, &count, &answered(5));
        let turn = changed.begin(&count.name, &new).unwrap().unwrap();
        let (answers, answered) = tokio::sync::watch::channel(false);
        let ask = move |_| {
            let mut answered = answered.clone();
            async move {
                answered.wait_for(|answered| *answered).await.unwrap();
                Ok(counted(6))
            }
        };
        let mut tasks = tokio::task::JoinSet::new();
        let spawn = |task| drop(tasks.spawn(task));
        let caller = turn.repeat_in_task(spawn, ask);

        assert!(futures_util::future::FutureExt::now_or_never(caller).is_none());
        assert!(changed.begin(&count.name, &new).is_err());
        answers.send_replace(true);
        tasks.join_all().await;

        assert!(changed.begin(&count.name, &new).unwrap().is_none());
    }

    #[test]
    fn a_client_looks_for_new_masters_once_a_second_and_only_for_its_own_changes() {
        let (changed, master) = (Changed::default(), Arc::from("old"));
        assert!(changed.looks().is_none());
        for _ in 0..3 {
            changed.note(&master, &add(Vec::new()), &answered(5));
        }
        let looks = changed.looks().unwrap();
        assert_eq!(looks.len(), 1);
        assert_eq!(looks[0].op, CountOp::Read);
        assert!(changed.looks().unwrap().is_empty());
    }

    #[test]
    fn the_clients_of_a_counter_share_what_a_server_remembers_and_repeat_nothing_they_have_told() {
        const CLIENTS: usize = 10;
        let master: Arc<str> = Arc::from("old");
        let clients: [_; CLIENTS] = std::array::from_fn(|_| Arc::<Changed>::default());
        let mut answered_before: [Vec<Id>; CLIENTS] = Default::default();
        let mut remembered = HashSet::new();
        let mut most = 0;

        // The last client comes when the others have taken all there is.
        let before = (0..CLIENTS - 1).cycle().take(2 * ENOUGH);
        for at in before.chain((0..CLIENTS).cycle().take(4 * ENOUGH)) {
            let count = add(std::mem::take(&mut answered_before[at]));
            let telling = clients[at].telling(&count);
            for id in &telling.count.answered {
                assert!(remembered.remove(id), "told twice, or before the answer");
            }
            telling.answered();
            remembered.insert(count.id);
            let answered = CountAnswer {
                counted: counted(1),
                remembered: remembered.len(),
            };
            clients[at].note(&master, &count, &answered);
            answered_before[at].push(count.id);
            most = most.max(remembered.len());
        }

        assert!(most <= ENOUGH + CLIENTS, "{most}");
        for client in &clients {
            let all = client.all();
            let held: Vec<_> = all.of.values().flat_map(|latest| &latest.changes).collect();
            assert!(held.len() > ENOUGH / CLIENTS / 3, "{}", held.len());
            let is_remembered = |change: &&Recent| remembered.contains(&change.count.id);
            assert!(held.iter().all(is_remembered));
        }
    }

    /// A master that has some of the changes of one client, and gets all of them again.
    #[tokio::test]
    async fn after_the_repetition_a_counter_is_as_its_only_client_has_left_it() {
        let token = FencingToken::of_exclusive(GrantId::of_ticket(6, 0));
        for seed in 0..300 {
            let random = fastrand::Rng::with_seed(seed);
            assert_repeated(random, token).await;
        }
    }

    async fn assert_repeated(mut random: fastrand::Rng, token: FencingToken) {
        let changed = Arc::new(Changed::default());
        let (old, new) = (Arc::from("old"), Arc::from("new"));
        let mut master = Record::default();
        let mut promoted = master.clone();
        let mut version = 0;
        let has = random.u64(0..20);
        for time in 1..20 {
            let only_if = match random.u8(0..4) {
                0 => None,
                1 => Some(OnlyIf::Value(random.i64(0..3))),
                _ => Some(OnlyIf::Version(version)),
            };
            let op = match random.u8(0..8) {
                0 => CountOp::Write(Written::new(token, random.u8(..).to_string())),
                1..4 => CountOp::Set {
                    value: random.i64(0..3),
                    only_if,
                },
                floor => CountOp::Add {
                    delta: random.i64(-3..4),
                    floor: (floor == 4).then_some(0),
                },
            };
            let count = change(op, Vec::new());
            let counted = asked(&mut master, &count, time);
            if time < has {
                let _ = asked(&mut promoted, &count, time);
            }
            version = counted.version;
            let remembered = 1;
            let answered = CountAnswer {
                counted,
                remembered,
            };
            changed.note(&old, &count, &answered);
        }
        let name = changed.names(|_, _| false).remove(0);
        let promoted = Mutex::new(promoted);
        let ask = |count: Arc<Count>| {
            let made = asked(&mut promoted.lock().unwrap(), &count, 1_000);
            std::future::ready(Ok(made))
        };

        let turn = changed.begin(&name, &new).unwrap().unwrap();
        turn.repeat(ask).await.unwrap();

        let read = change(CountOp::Read, Vec::new());
        let seen = |record: &mut Record| {
            let counted = asked(record, &read, 0);
            (counted.value, counted.written.map(|written| written.text))
        };
        let there = seen(&mut promoted.lock().unwrap());
        assert_eq!(there, seen(&mut master), "{random:?}");
    }

    fn asked(record: &mut Record, count: &Count, time: u64) -> Counted {
        match record.carry_out(count, 0, time) {
            Carried::Answered(answer) | Carried::Changed { answer, .. } => answer,
            Carried::Crowded => panic!("the record is crowded"),
        }
    }

    /// A set that was acknowledged before another client's change must not undo it.
    #[tokio::test]
    async fn a_set_on_top_of_a_change_of_another_client_is_not_repeated() {
        let changed = Arc::new(Changed::default());
        let (old, new) = (Arc::from("old"), Arc::from("new"));
        let mut master = Record::default();
        let first = add(Vec::new());
        let counted = asked(&mut master, &first, 5);
        let only_if = Some(OnlyIf::Version(counted.version));
        let sets = [None, only_if].map(|only_if| CountOp::Set { value: 7, only_if });
        for count in [
            first,
            change(sets[1].clone(), Vec::new()),
            change(sets[0].clone(), Vec::new()),
        ] {
            let counted = asked(&mut master, &count, 6);
            let remembered = 1;
            changed.note(
                &old,
                &count,
                &CountAnswer {
                    counted,
                    remembered,
                },
            );
        }
        let promoted = Mutex::new(Record::default());
        let (delta, floor) = (100, None);
        let of_another = change(CountOp::Add { delta, floor }, Vec::new());
        let _ = asked(&mut promoted.lock().unwrap(), &of_another, 10);
        let ask = |count: Arc<Count>| {
            std::future::ready(Ok(asked(&mut promoted.lock().unwrap(), &count, 11)))
        };

        let name = &of_another.name;
        let turn = changed.begin(name, &new).unwrap().unwrap();
        turn.repeat(ask).await.unwrap();

        let read = change(CountOp::Read, Vec::new());
        assert_eq!(asked(&mut promoted.lock().unwrap(), &read, 0).value, 101);
    }

    #[test]
    fn a_set_is_repeated_only_if_nobody_has_changed_the_counter_later() {
        let set = |only_if| CountOp::Set { value: 7, only_if };
        let recent = |op| Recent {
            at: Clock::BOOT.now(),
            master: Arc::from("old"),
            count: change(op, Vec::new()),
            value: 1,
            version: 50,
            follows: None,
        };
        let repeated = |op, read: Option<u64>| {
            let read = read.map(counted);
            repetition(&recent(op), read.as_ref()).map(|count| count.op.clone())
        };
        assert_eq!(repeated(set(None), Some(50)), None);
        assert_eq!(repeated(set(None), Some(60)), None);
        let if_version = |version| set(Some(OnlyIf::Version(version)));
        assert_eq!(repeated(set(None), Some(40)), Some(if_version(40)));
        assert_eq!(repeated(if_version(9), None), Some(if_version(9)));
    }

    #[test]
    fn a_value_is_repeated_unless_a_later_holder_has_written() {
        let token = |number: u64| FencingToken::of_exclusive(GrantId::of_ticket(number, 0));
        let write = |number, text: &str| CountOp::Write(Written::new(token(number), text));
        let recent = Recent {
            at: Clock::BOOT.now(),
            master: Arc::from("old"),
            count: change(write(6, "six"), Vec::new()),
            value: 1,
            version: 50,
            follows: None,
        };
        let is_repeated = |there: Option<u64>, version| {
            let mut read = counted(version);
            read.written = there.map(|number| Written::new(token(number), "there"));
            repetition(&recent, Some(&read)).is_some()
        };
        // An earlier holder's value was repeated first, which has made a newer version.
        assert!(is_repeated(Some(5), 60));
        assert!(is_repeated(None, 60));
        assert!(is_repeated(Some(6), 40));
        assert!(!is_repeated(Some(6), 50));
        assert!(!is_repeated(Some(7), 40));
    }

    #[tokio::test]
    async fn a_refused_change_is_not_repeated_and_no_later_one_follows_from_it() {
        let changed = Arc::new(Changed::default());
        let (old, new) = (Arc::from("old"), Arc::from("new"));
        let set = |version| CountOp::Set {
            value: 7,
            only_if: Some(OnlyIf::Version(version)),
        };
        let refused = change(set(1), Vec::new());
        let kept = CountAnswer {
            counted: Counted::new(1, 1, 5, Outcome::Kept),
            remembered: 1,
        };
        changed.note(&old, &refused, &kept);
        let (first, second) = (change(set(1), Vec::new()), change(set(5), Vec::new()));
        changed.note(&old, &first, &answered(5));
        changed.note(&old, &second, &answered(6));
        let asked = Mutex::new(Vec::new());
        // Another client has changed the counter at the new master.
        let ask = |count: Arc<Count>| {
            asked.lock().unwrap().push((count.id, count.op.clone()));
            std::future::ready(Ok(Counted::new(1, 1, 9, Outcome::Kept)))
        };

        let turn = changed.begin(&first.name, &new).unwrap().unwrap();
        turn.repeat(ask).await.unwrap();

        let asked = asked.into_inner().unwrap();
        assert_eq!(asked, [(first.id, set(1)), (second.id, set(5))]);
    }

    #[test]
    fn a_read_takes_no_ids_with_it() {
        let (changed, master) = (Arc::<Changed>::default(), Arc::from("old"));
        let ids = crowd(&changed, &master);
        let read = changed.telling(&change(CountOp::Read, Vec::new()));

        assert_eq!(read.count.answered, []);
        assert_eq!(changed.all().number, LEAST + 1);
        let told = changed.telling(&add(ids.clone()));
        assert_eq!(told.count.answered, ids[..1]);
        assert_eq!(changed.all().number, LEAST);
    }

    #[test]
    fn ids_that_a_failed_request_has_told_are_told_again() {
        let (changed, master) = (Arc::<Changed>::default(), Arc::from("old"));
        let ids = crowd(&changed, &master);
        let failed = changed.telling(&add(ids.clone()));
        assert_eq!(failed.count.answered, ids[..1]);
        assert_eq!(changed.telling(&add(Vec::new())).count.answered, []);
        drop(failed);

        let again = changed.telling(&add(Vec::new()));

        assert_eq!(again.count.answered, ids[..1]);
        again.answered();
        assert_eq!(changed.telling(&add(Vec::new())).count.answered, []);
    }

    #[test]
    fn with_too_many_changes_a_new_one_takes_the_place_of_the_oldest_of_its_counter() {
        let (changed, master) = (Arc::<Changed>::default(), Arc::from("old"));
        let counts: Vec<_> = (0..MANY + 5).map(|_| add(Vec::new())).collect();
        for count in &counts {
            changed.note(&master, count, &answered(1));
        }

        let all = changed.all();
        assert_eq!(all.number, MANY);
        let latest = all.of.values().next().unwrap();
        assert_eq!(latest.changes[0].count.id, counts[5].id);
    }

    /// One change more than a client may hold back at least, at a server that remembers too many.
    fn crowd(changed: &Arc<Changed>, master: &Arc<str>) -> Vec<Id> {
        let crowded = CountAnswer {
            counted: counted(1),
            remembered: 10 * ENOUGH,
        };
        let counts = (0..=LEAST).map(|_| {
            let count = add(Vec::new());
            changed.note(master, &count, &crowded);
            count.id
        });
        counts.collect()
    }
}
