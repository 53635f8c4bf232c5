//! The changes of counters that a master has acknowledged shortly before another server has replaced
//! it. The new master may not have received them. So the client repeats these changes there, each
//! with its own id. If the new master has received a change, it finds the id, and the change does not
//! count again.
//!
//! - *The server must not have forgotten the id.* A client tells the server which ids it may forget.
//!   Here these ids are held back for as long as their changes may be repeated. As soon as an id is
//!   told, its change is not repeated any more. The server itself remembers an id for a minute, and a
//!   change is repeated for half a minute.
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

use tokio::sync::{oneshot, watch};

use crate::backend::{BoxFuture, Count, CountOp, Counted, Fault, OnlyIf, Outcome, StoreError};
use crate::clock::{Clock, Instant};
use crate::name::Name;
use crate::request::Id;

/// For how long the id of an answered change is held back. From the promotion of a replica until
/// clients leave the old master it takes a second or two.
const RECENT: Duration = Duration::from_secs(3);

/// A change that is older than this is not repeated, because the server may have forgotten its id.
const LONGEST: Duration = Duration::from_secs(30);

/// The most ids of answered changes that are held back for one counter. A server remembers 5,000
/// changes of a counter, those of all clients together, and then refuses others. So this is enough
/// for 100 clients that change one counter all the time.
const MOST_OF_ONE: usize = 50;

/// With more changes than this, those that are not recent any more are removed.
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
    /// The oldest of each counter come first.
    of: HashMap<Name, VecDeque<Recent>>,
    number: usize,
    /// When there were too many the last time.
    swept: Option<Instant>,
    /// The counters whose changes are being repeated.
    repeating: HashSet<Name>,
    /// When a connection has looked for new masters the last time.
    looked: Option<Instant>,
}

/// A change that was acknowledged.
#[derive(Clone, Debug)]
struct Recent {
    at: Instant,
    /// The address of the master that has acknowledged the change.
    master: Arc<str>,
    count: Arc<Count>,
    /// The version of the counter after the change.
    version: u64,
    /// Whether the client allows the server to forget the id.
    is_answered: bool,
}

impl Changed {
    /// Remembers a change that the master has acknowledged. A change that was refused is not
    /// repeated: at another master it might be carried out.
    pub(super) fn note(&self, master: &Arc<str>, count: &Arc<Count>, counted: &Counted) {
        if count.op == CountOp::Read || counted.outcome != Outcome::Applied {
            return;
        }
        let at = Clock::BOOT.now();
        let mut all = self.all();
        if all.number >= MANY {
            if all.swept.is_some_and(|swept| swept.until(at) < SWEPT_EVERY) {
                return;
            }
            all.swept = Some(at);
            all.of.retain(|_, changes| {
                changes.retain(|change| change.at.until(at) <= RECENT);
                !changes.is_empty()
            });
            all.number = all.of.values().map(VecDeque::len).sum();
            if all.number >= MANY {
                return;
            }
        }
        all.number += 1;
        all.of
            .entry(count.name.clone())
            .or_default()
            .push_back(Recent {
                at,
                master: Arc::clone(master),
                count: Arc::clone(count),
                version: counted.version,
                is_answered: false,
            });
        drop(all);
        self.noted.send_replace(());
    }

    /// The same request, but without the ids that are held back, and with earlier ids that are not
    /// held back any more.
    pub(super) fn telling(&self, count: &Arc<Count>) -> Arc<Count> {
        // A server takes no ids from a read.
        if count.op == CountOp::Read {
            return Arc::clone(count);
        }
        let now = Clock::BOOT.now();
        let mut all = self.all();
        let Some(changes) = all.of.get_mut(&count.name) else {
            return Arc::clone(count);
        };
        let mut told: HashSet<Id> = count.answered.iter().copied().collect();
        for change in changes.iter_mut() {
            change.is_answered |= told.remove(&change.count.id);
        }
        let mut too_many = changes.len().saturating_sub(MOST_OF_ONE);
        let before = changes.len();
        changes.retain(|change| {
            let is_old = too_many > 0 || change.at.until(now) > RECENT;
            let ends = change.is_answered && is_old;
            too_many -= usize::from(ends && too_many > 0);
            if ends {
                told.insert(change.count.id);
            }
            !ends
        });
        let (gone, is_empty) = (before - changes.len(), changes.is_empty());
        all.number -= gone;
        if is_empty {
            all.of.remove(&count.name);
        }
        Arc::new(Count {
            answered: told.into_iter().collect(),
            ..Count::clone(count)
        })
    }

    /// The counters that have changes which another master has acknowledged. `has` tells of a master
    /// whether it has a name.
    pub(super) fn names(&self, has: impl Fn(&str, &Name) -> bool) -> Vec<Name> {
        let all = self.all();
        let of = all.of.iter();
        of.filter(|(name, changes)| changes.iter().any(|change| !has(&change.master, name)))
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
        for (name, changes) in &all.of {
            if let Some(change) = changes.back()
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
        if self.next(name, master).is_none() {
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

    /// The oldest change of a counter that is to be repeated at this master.
    fn next(&self, name: &Name, master: &str) -> Option<Recent> {
        let now = Clock::BOOT.now();
        let mut all = self.all();
        let changes = all.of.get_mut(name)?;
        let before = changes.len();
        changes.retain(|change| change.at.until(now) <= LONGEST);
        let gone = before - changes.len();
        let next = changes.iter().find(|change| *change.master != *master);
        let next = next.cloned();
        if changes.is_empty() {
            all.of.remove(name);
        }
        all.number -= gone;
        next
    }

    /// Notes that this master has been asked for a change, and which version the change has made
    /// there. A later change of this client may have the condition that nobody has changed the
    /// counter since. Its condition is the new version now. With `None` the change was not carried
    /// out there, because others have changed the counter. Then the conditions of the later changes
    /// stay as they are, and do not hold.
    fn is_at(&self, done: &Recent, master: &Arc<str>, version: Option<u64>) {
        let mut all = self.all();
        for change in all.of.get_mut(&done.count.name).into_iter().flatten() {
            if change.count.id == done.count.id {
                change.master = Arc::clone(master);
                change.version = version.unwrap_or(change.version);
            }
            let Some(version) = version else {
                continue;
            };
            let CountOp::Set {
                value,
                only_if: Some(OnlyIf::Version(since)),
            } = change.count.op
            else {
                continue;
            };
            if since == done.version && *change.master != **master {
                let only_if = Some(OnlyIf::Version(version));
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
        while let Some(change) = changed.next(name, master) {
            let repeated = async {
                let read = match change.count.op {
                    CountOp::Set { only_if: None, .. } | CountOp::Write(_) => {
                        Some(ask(reads(name, &change)).await?)
                    }
                    _ => None,
                };
                match repetition(&change, read.as_ref()) {
                    Some(count) => {
                        let counted = ask(count).await?;
                        let is_applied = counted.outcome == Outcome::Applied;
                        Ok::<_, StoreError>(is_applied.then_some(counted.version))
                    }
                    None => Ok(None),
                }
            };
            match repeated.await {
                Ok(version) => changed.is_at(&change, master, version),
                // The counter is damaged at this master, or the user may not change it.
                Err(error) if error.fault() == Fault::Config => {
                    changed.is_at(&change, master, None);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
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

fn reads(name: &Name, change: &Recent) -> Arc<Count> {
    Arc::new(Count::new(name.clone(), change.count.id, CountOp::Read))
}

/// The request that repeats a change. `read` is the counter at the new master, for a value and for a
/// set without a condition. These would undo every later change.
///
/// A value is repeated unless a later holder, or this holder later, has written there. A set is
/// repeated only if the counter there is older than after the change, and on the condition that
/// nobody changes the counter in between. Versions follow the clocks of the servers, so this decides
/// rightly if the clocks differ by less than the time between the two changes. If the sets of two
/// clients are both missing there, the one that is repeated first stays.
fn repetition(change: &Recent, read: Option<&Counted>) -> Option<Arc<Count>> {
    let count = Count {
        answered: Vec::new(),
        ..Count::clone(&change.count)
    };
    let is_newer = |read: &Counted| read.version >= change.version;
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

    #[tokio::test]
    async fn changes_of_another_master_are_repeated_in_order_and_once() {
        let changed = Arc::new(Changed::default());
        let (old, new) = (Arc::from("old"), Arc::from("new"));
        let all = [add(Vec::new()), add(Vec::new()), add(Vec::new())];
        for count in &all {
            changed.note(&old, count, &counted(5));
        }
        changed.note(&new, &add(Vec::new()), &counted(9));
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
        assert_eq!(*asked.lock().unwrap(), [ids[0], ids[1], ids[1], ids[2]]);
        assert_eq!(changed.names(of_new), []);
    }

    #[tokio::test]
    async fn a_caller_that_goes_away_keeps_the_turn_from_nobody() {
        let changed = Arc::new(Changed::default());
        let (old, new) = (Arc::from("old"), Arc::from("new"));
        let count = add(Vec::new());
        changed.note(&old, &count, &counted(5));
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
            changed.note(&master, &add(Vec::new()), &counted(5));
        }
        let looks = changed.looks().unwrap();
        assert_eq!(looks.len(), 1);
        assert_eq!(looks[0].op, CountOp::Read);
        assert!(changed.looks().unwrap().is_empty());
    }

    #[test]
    fn the_ids_of_the_latest_changes_are_held_back_and_what_is_told_is_not_repeated() {
        let (changed, master) = (Changed::default(), Arc::from("old"));
        let mut last = Vec::new();
        let mut told = Vec::new();
        let mut ids = Vec::new();
        for _ in 0..MOST_OF_ONE + 20 {
            let count = add(std::mem::take(&mut last));
            told.extend(changed.telling(&count).answered.iter().copied());
            changed.note(&master, &count, &counted(1));
            last.push(count.id);
            ids.push(count.id);
        }
        // The change that notes the last id has not come yet.
        let stays = |id: &Id| {
            changed
                .all()
                .of
                .values()
                .flatten()
                .any(|it| it.count.id == *id)
        };
        assert_eq!(told, ids[..told.len()]);
        assert!((15..=20).contains(&told.len()), "{}", told.len());
        assert!(!told.iter().any(stays) && ids[told.len()..].iter().all(stays));
    }

    #[test]
    fn a_set_is_repeated_only_if_nobody_has_changed_the_counter_later() {
        let set = |only_if| CountOp::Set { value: 7, only_if };
        let recent = |op| Recent {
            at: Clock::BOOT.now(),
            master: Arc::from("old"),
            count: change(op, Vec::new()),
            version: 50,
            is_answered: false,
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
            version: 50,
            is_answered: false,
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
        changed.note(&old, &refused, &Counted::new(1, 1, 5, Outcome::Kept));
        let (first, second) = (change(set(1), Vec::new()), change(set(5), Vec::new()));
        changed.note(&old, &first, &counted(5));
        changed.note(&old, &second, &counted(6));
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
        let (changed, master) = (Changed::default(), Arc::from("old"));
        let mut last = Vec::new();
        for _ in 0..MOST_OF_ONE + 20 {
            let count = add(std::mem::take(&mut last));
            let told = changed.telling(&count);
            changed.note(&master, &count, &counted(1));
            last.push(count.id);
            drop(told);
        }
        let before = changed.all().number;

        let told = changed.telling(&change(CountOp::Read, Vec::new()));

        assert!(told.answered.is_empty());
        assert_eq!(changed.all().number, before);
    }
}
