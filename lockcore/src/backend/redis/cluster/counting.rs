//! Requests about counters, and the repetition of changes at new masters. Which changes these are,
//! and what a repetition does, is in `changed`. The way to a node is in `routes`.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};

use futures_util::future::join_all;
use tokio::sync::watch;

use super::routes::Routes;
use super::slots;
use crate::backend::events::Timer;
use crate::backend::redis::changed::{
    Changed, LOOKS_EVERY, Repeating, for_each_by_itself, repeated_all,
};
use crate::backend::redis::connection::RedisConnection;
use crate::backend::redis::counters;
use crate::backend::redis::hop::Hop;
use crate::backend::redis::task::{Task, Tasks};
use crate::backend::redis::views::Address;
use crate::backend::{Count, Counted, Fault, StoreError};
use crate::name::Name;
use crate::pauses::Pauses;

/// The counters of one connection to the cluster.
#[derive(Debug)]
pub(super) struct Counting {
    routes: Arc<Routes>,
    /// The tasks that repeat the changes of single counters.
    repeating: Tasks,
    _repeats: Task,
    _looks: Task,
}

impl Counting {
    pub(super) fn begin(routes: &Arc<Routes>) -> Arc<Self> {
        let (runtime, mut new_maps) = (&routes.context.runtime, routes.new_maps());
        // The map of this connection may be newer than changes that another connection has made.
        new_maps.mark_changed();
        Arc::new_cyclic(|whole: &Weak<Self>| Self {
            routes: Arc::clone(routes),
            repeating: Tasks::in_runtime(runtime.clone()),
            _repeats: Task::spawn(runtime, Self::repeats_changes(whole.clone(), new_maps)),
            _looks: Task::spawn(runtime, Self::looks_for_new_masters(whole.clone())),
        })
    }

    /// Sends a request about a counter to the master of its slot. The node that answers has all
    /// earlier changes of this client by then, however the request was redirected.
    pub(super) async fn count(self: &Arc<Self>, count: Arc<Count>) -> Result<Counted, StoreError> {
        let changed = self.changed();
        // Once, because the ids that a refused request has told must be told again. Not before the
        // earlier changes are repeated, because what is told is not repeated any more.
        let told = OnceLock::new();
        let verb = |link: RedisConnection| {
            let (told, count) = (&told, &count);
            async move {
                self.catch_up(link.clone(), &count.name).await?;
                let telling = told.get_or_init(|| changed.telling(count));
                counters::count(link, Arc::clone(&telling.count)).await
            }
        };
        let answered = self.routes.ask(slots::of_name(&count.name), verb).await?;
        if let Some(telling) = told.into_inner() {
            telling.answered();
        }
        changed.note(&answered.node.label, &count, &answered.answer);
        Ok(answered.answer.counted)
    }

    /// Repeats, at the node of this link, the changes of a counter that another node has
    /// acknowledged.
    async fn catch_up(&self, link: RedisConnection, name: &Name) -> Result<(), StoreError> {
        let node = link.hop.as_ref().map(|hop| Arc::clone(&hop.node));
        let Some(turn) = Repeating::begin(self.changed(), name, &node.unwrap_or_default())? else {
            return Ok(());
        };
        let ask = move |count| {
            let link = link.clone();
            async move {
                let outcome = counters::count(link.clone(), count).await;
                let outcome = outcome.map(|answered| answered.counted);
                // The node has not looked at the counter, so the change is not done with here.
                match link.hop.as_ref().and_then(Hop::redirect) {
                    Some(_) => {
                        outcome.map_err(|error| StoreError::new(Fault::Retry, error.to_string()))
                    }
                    None => outcome,
                }
            }
        };
        turn.repeat_in_task(|task| self.repeating.spawn(task), ask)
            .await
    }

    /// Repeats the changes of all counters whose names are at other masters by now. It begins with
    /// each new map, on all connections. The changes of one counter are repeated by one of them at a
    /// time. No caller waits for it.
    async fn repeats_changes(counting: Weak<Self>, new_maps: watch::Receiver<()>) {
        let masters = || match counting.upgrade() {
            Some(here) => here.to_repeat().into_keys().collect(),
            None => Vec::new(),
        };
        let repeat = |master| Self::repeats_at(counting.clone(), master);
        for_each_by_itself(new_maps, masters, repeat).await;
    }

    /// Repeats the changes of the counters of one master. A new master may refuse the changes for
    /// some time. So it tries again after a pause what has failed, until all is done or the changes
    /// are too old.
    async fn repeats_at(counting: Weak<Self>, master: Option<Address>) {
        let mut pauses = Pauses::default();
        while let Some(here) = counting.upgrade()
            && let Some(timer) = here.timer()
            && let Some(names) = here.to_repeat().remove(&master)
            && !repeated_all(&names, |name| here.repeat_changes(name, &timer)).await
        {
            drop(here); // the client may end during the pause
            timer(pauses.draw()).await;
        }
    }

    /// The counters with changes to repeat, by the master that has their slot now, if one has it.
    fn to_repeat(&self) -> BTreeMap<Option<Address>, Vec<Name>> {
        let map = self.routes.map();
        let has = |old: &str, name: &Name| {
            let new = map.master(slots::of_name(name));
            new.is_none_or(|new| new.to_string() == old)
        };
        let mut names_at: BTreeMap<_, Vec<Name>> = BTreeMap::new();
        for name in self.changed().names(has) {
            let master = map.master(slots::of_name(&name)).cloned();
            names_at.entry(master).or_default().push(name);
        }
        names_at
    }

    /// Repeats the changes of a counter that an earlier master of its slot has acknowledged.
    async fn repeat_changes(self: &Arc<Self>, name: Name, timer: &Timer) -> Result<(), StoreError> {
        let verb = |link| self.catch_up(link, &name);
        tokio::select! {
            repeated = self.routes.ask(slots::of_name(&name), verb) => repeated.map(drop),
            () = timer(self.routes.context.op_timeout) => {
                Err(StoreError::new(Fault::Retry, "the new master does not answer"))
            }
        }
    }

    /// Finds out that a master was replaced, while this client has changes that may be missing at
    /// the new one. See [`Changed::looks`].
    async fn looks_for_new_masters(counting: Weak<Self>) {
        while let Some(here) = counting.upgrade()
            && let Some(timer) = here.timer()
        {
            let changed = Arc::clone(here.changed());
            // Before the look, so that no change in between is missed.
            let mut noted = changed.noted();
            match changed.looks() {
                None => {
                    drop(here); // the client may end meanwhile
                    let _ = noted.changed().await; // an error is impossible: `changed` is here
                }
                Some(looks) => {
                    // At all masters at the same time, because one of them may not answer.
                    let looks = looks.into_iter().map(|look| async {
                        tokio::select! {
                            _ = here.count(look) => {} // if this fails, the next look comes soon
                            () = timer(here.routes.context.op_timeout) => {}
                        }
                    });
                    join_all(looks).await;
                    drop(here);
                }
            }
            timer(LOOKS_EVERY).await;
        }
    }

    fn changed(&self) -> &Arc<Changed> {
        &self.routes.context.seeds.changed
    }

    /// `None` if the runtime of the connection has ended.
    fn timer(&self) -> Option<Timer> {
        let sink = self.routes.context.events.upgrade()?;
        Some(sink.timer())
    }
}
