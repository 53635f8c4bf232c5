//! Counters and values that somebody in this process waits for. Both are called counters here. For
//! each of them there is one task on the keeper, however many callers wait. The task watches the
//! counter at the store, reads it after each change, and gives the result to the callers.
//!
//! A push of a store carries no state. A push that is late, lost or doubled does no harm, because a
//! caller believes only a read that began after its call. No change is missed, because the task
//! first watches the counter and then reads it. After a gap the task does both again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};

use super::shared::Shared;
use super::table::Phase;
use super::watched::{Listed, Looked, Seen, Watched, Watching};
use crate::backend::{Connection, Count, CountOp, Counted, Fault, StoreError};
use crate::error::Error;
use crate::name::Name;
use crate::pauses::Pauses;

/// How often a counter is read at a store that does not push changes.
const LOOK: Duration = Duration::from_millis(100);

/// How often a counter is read at a store that pushes changes. This finds a change whose push was
/// lost unnoticed. It also keeps the counter alive at the store.
const LOOK_ALL_THE_SAME: Duration = Duration::from_secs(60);

impl Shared {
    /// Begins to wait for changes of a counter.
    pub(crate) fn watch(self: &Arc<Self>, name: &Name) -> Result<Watching, Error> {
        self.refuse_forked()?;
        let mut all = self.watches.all();
        // Under the mutex: either a shutdown finds this caller in the list, or this call finds that
        // the client is shut down.
        if self.table().phase != Phase::Open {
            return Err(Error::shut_down());
        }
        if let Some(watched) = all.get(name) {
            let looked = watched.looked.subscribe();
            let known = watched.begun.load(Ordering::SeqCst);
            watched.wanted.notify_one();
            return Ok(Watching {
                watched: Arc::clone(watched),
                looked,
                known,
            });
        }
        let nothing = Looked {
            number: 0,
            seen: Seen::Nothing,
            is_watched: false,
        };
        let (sender, looked) = watch::channel(nothing);
        let watched = Arc::new(Watched {
            name: name.clone(),
            looked: sender,
            begun: AtomicU64::new(0),
            wanted: Notify::new(),
            listed: Listed::default(),
        });
        all.insert(name.clone(), Arc::clone(&watched));
        drop(all);
        self.keeper
            .spawn(follow(Arc::clone(self), Arc::clone(&watched)));
        Ok(Watching {
            watched,
            looked,
            known: 0,
        })
    }

    /// One look at a counter. With `watch`, the counter is first watched and then read.
    async fn look(self: &Arc<Self>, name: &Name, watch: bool) -> Result<Counted, StoreError> {
        let by = self.clock.now().after(self.op_timeout);
        if watch {
            let watching = self.operate_for_callers(by, |verbs, _| verbs.watch(name.clone()));
            watching.await?;
        }
        let id = self.new_id();
        let id = id.map_err(|error| StoreError::new(Fault::Retry, error.to_string()))?;
        let count = Arc::new(Count::new(name.clone(), id, CountOp::Read));
        let counting = self.operate_for_callers(by, |verbs, _| verbs.count(count));
        counting.await.map(|(_, counted)| counted)
    }
}

/// Looks at a counter for as long as somebody waits for its changes. The first look only reads the
/// counter and does not watch it. If the caller already finds what it waits for, the counter has
/// cost one request.
async fn follow(shared: Arc<Shared>, watched: Arc<Watched>) {
    let pushes = shared.capability.watches;
    let name = &watched.name;
    let mut gaps = shared.watches.gaps.subscribe();
    let (mut is_watched, mut pauses) = (false, Pauses::default());
    // Whether the store may push changes. This stays true after a look that has failed.
    let mut may_push = false;
    let mut is_first = true;
    loop {
        // The gap is marked as seen before the look, because this look sees all changes that the
        // gap may have hidden.
        is_watched &= !gaps.has_changed().unwrap_or(true);
        gaps.mark_unchanged();
        let number = watched.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let watches = pushes && !is_first && !is_watched;
        may_push |= watches;
        let outcome = shared.look(name, watches).await;
        is_watched = outcome.is_ok() && (is_watched || watches);
        is_first = false;
        let now = shared.clock.now();
        let again = match &outcome {
            Ok(_) if pushes => now.after(LOOK_ALL_THE_SAME),
            Ok(_) => now.after(LOOK),
            Err(_) => now.after(pauses.draw()),
        };
        let has_failed = outcome.is_err();
        if !has_failed {
            pauses = Pauses::default();
        }
        let seen = match outcome {
            Ok(counted) => Seen::Counter(counted),
            Err(error) => Seen::Failed(error),
        };
        // If the counter is not watched although the store could push, a caller must ask for the
        // next look. In all other cases the task looks again by itself.
        watched.tell(number, seen, is_watched || !pushes || has_failed);
        let news = async {
            match has_failed {
                // A store that fails is not asked in a tight loop.
                true => std::future::pending().await,
                false => watched.wanted.notified().await,
            }
        };
        tokio::select! {
            () = watched.looked.closed() => {
                // The counter is unwatched before it is removed from the list. After the removal
                // the next caller starts another task, which may watch the counter too. This task
                // must not end that watch.
                if std::mem::take(&mut may_push) {
                    is_watched = false;
                    let by = shared.clock.now().after(shared.op_timeout);
                    let verb = |verbs: &dyn Connection, _| verbs.unwatch(name.clone());
                    // If the request fails, the store pushes changes for a while, and they are
                    // ignored.
                    let _ = shared.operate_for_callers(by, verb).await;
                }
                if shared.watches.remove_unused(&watched) {
                    return;
                }
            }
            () = news => {}
            _ = gaps.changed(), if !has_failed => is_watched = false,
            () = shared.alarm(again) => {}
        }
    }
}
