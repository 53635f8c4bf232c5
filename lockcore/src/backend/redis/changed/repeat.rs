//! How the changes of a counter are repeated at another master: in which order, and with which
//! requests.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{oneshot, watch};

use super::{COUNTERS_AT_ONCE, Changed, LONGEST, Recent};
use crate::backend::{BoxFuture, Count, CountOp, Counted, Fault, OnlyIf, Outcome, StoreError};
use crate::clock::Clock;
use crate::name::Name;

/// The right to repeat the changes of a counter at a master. One connection at a time has it.
#[derive(Debug)]
pub(in super::super) struct Repeating {
    changed: Arc<Changed>,
    name: Name,
    master: Arc<str>,
}

impl Repeating {
    /// Begins to repeat, at this master, the changes of a counter that another master has
    /// acknowledged. `None` if there are none.
    ///
    /// # Errors
    ///
    /// A conflict if somebody else repeats them.
    pub(in super::super) fn begin(
        changed: &Arc<Changed>,
        name: &Name,
        master: &Arc<str>,
    ) -> Result<Option<Self>, StoreError> {
        let mut all = changed.all();
        all.remove_older_of(name, LONGEST, Clock::BOOT.now());
        let latest = all.of.get(name);
        if !latest.is_some_and(|latest| latest.is_elsewhere(master)) {
            return Ok(None);
        }
        match all.repeating.insert(name.clone()) {
            true => Ok(Some(Self {
                changed: Arc::clone(changed),
                name: name.clone(),
                master: Arc::clone(master),
            })),
            false => Err(StoreError::conflict(
                "another connection of this client repeats earlier changes of this counter",
            )),
        }
    }

    /// Repeats the changes, oldest first. `ask` sends a request to the master.
    ///
    /// If this fails, or the future is dropped, the rest is repeated by the next one that has the right.
    pub(in super::super) async fn repeat<F>(
        self,
        ask: impl Fn(Arc<Count>) -> F,
    ) -> Result<(), StoreError>
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
            let repeated = join_all(changes.iter().map(|change| repeat(change, &ask))).await;
            let mut done = Vec::new();
            let mut failed = None;
            for (change, outcome) in changes.into_iter().zip(repeated) {
                match outcome {
                    Ok(made) => done.push((change, made)),
                    // The counter is damaged at this master, or the user may not change it.
                    Err(error) if error.fault() == Fault::Config => done.push((change, None)),
                    Err(error) => failed = Some(error),
                }
            }
            changed.note_at(&done, master);
            if let Some(error) = failed {
                return Err(error);
            }
        }
    }

    /// [`repeat`](Self::repeat) in a task, which goes on if this future is dropped. `spawn` starts a
    /// task that ends with the connection.
    pub(in super::super) async fn repeat_in_task<F>(
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

impl Drop for Repeating {
    fn drop(&mut self) {
        self.changed.all().repeating.remove(&self.name);
    }
}

/// Repeats the changes of these counters of one master once, of some at the same time. If all of some
/// fail, the master does not answer or refuses everything, so the others are left out. Returns whether
/// all were repeated.
pub(in super::super) async fn repeated_all<F>(names: &[Name], repeat: impl Fn(Name) -> F) -> bool
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

/// Runs `repeat` for each of the `masters`, whenever there is a new map. None of them waits for
/// another one, which may be slow or dead. A master whose future still runs when a map comes gets
/// another one after it, because the map may give it more counters.
pub(in super::super) async fn for_each_by_itself<M: Clone + Ord, F: Future<Output = ()>>(
    mut new_maps: watch::Receiver<()>,
    masters: impl Fn() -> Vec<M>,
    repeat: impl Fn(M) -> F,
) {
    // The masters whose futures run, and of each whether it gets another one.
    let mut busy = BTreeMap::new();
    let mut running = FuturesUnordered::new();
    loop {
        let next = tokio::select! {
            changed = new_maps.changed() => match changed {
                Ok(()) => masters(),
                Err(_) => return,
            },
            Some(master) = running.next() => match busy.remove(&master) {
                Some(true) => vec![master],
                _ => continue,
            },
        };
        for master in next {
            match busy.entry(master) {
                Entry::Occupied(mut gets_another) => *gets_another.get_mut() = true,
                Entry::Vacant(idle) => {
                    let (master, repeated) = (idle.key().clone(), repeat(idle.key().clone()));
                    idle.insert(false);
                    running.push(async move {
                        repeated.await;
                        master
                    });
                }
            }
        }
    }
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
            Some(ask(change.reads(&change.count.name)).await?)
        }
        _ => None,
    };
    let Some(count) = repetition(change, read.as_ref()) else {
        return Ok(None);
    };
    let made = ask(count).await?;
    Ok((made.outcome == Outcome::Applied).then_some(made))
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
pub(super) fn repetition(change: &Recent, read: Option<&Counted>) -> Option<Arc<Count>> {
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
        (CountOp::Set { count, .. }, Some(read)) => CountOp::Set {
            count: *count,
            only_if: Some(OnlyIf::Version(read.version)),
        },
        (op, _) => op.clone(),
    };
    Some(Arc::new(Count { op, ..count }))
}
