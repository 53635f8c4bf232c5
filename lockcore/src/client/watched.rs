//! The counters that are watched. Callers that wait for changes share this list with the tasks that
//! look at the store.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};

use crate::backend::{Counted, Fault, StoreError, TicketInfo};
use crate::error::Error;
use crate::log::guarded;
use crate::name::Name;

/// The counters that this client watches.
#[derive(Debug, Default)]
pub(crate) struct Watches {
    all: Mutex<HashMap<Name, Arc<Watched>>>,
    /// Notifies the tasks when pushes may have been lost.
    pub(super) gaps: watch::Sender<()>,
}

/// A counter that somebody waits for.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) name: Name,
    /// The result of the task's last look. The task ends when nobody subscribes to it any more.
    pub(super) looked: watch::Sender<Looked>,
    /// How many looks have begun.
    pub(super) begun: AtomicU64,
    /// Asks the task to look again.
    pub(super) wanted: Notify,
    pub(super) listed: Listed,
}

/// The lists of the tickets of the name, which the callers share with the task that lists.
#[derive(Debug)]
pub(super) struct Listed {
    /// How many times a caller has asked for a list.
    pub(super) asked: AtomicU64,
    /// Whether a task lists. It ends when it has answered all callers.
    pub(super) is_listing: AtomicBool,
    pub(super) last: watch::Sender<List>,
}

/// The answer of the store, and how many callers had asked when the request was made. So it is an
/// answer for these callers.
#[derive(Debug)]
pub(super) struct List {
    pub(super) answers: u64,
    pub(super) tickets: Result<Arc<[TicketInfo]>, StoreError>,
}

/// The result of a look at a counter.
#[derive(Clone, Debug)]
pub(super) struct Looked {
    pub(super) number: u64,
    pub(super) seen: Seen,
    /// Whether the task looks again by itself after every change. If not, a caller must ask for the
    /// next look.
    pub(super) is_watched: bool,
}

/// The outcome of a look.
#[derive(Clone, Debug)]
pub(super) enum Seen {
    Nothing,
    Counter(Counted),
    Failed(StoreError),
    ShutDown,
}

/// A caller that waits for a change of a counter. While at least one exists, the task of the
/// counter runs.
#[derive(Debug)]
pub(crate) struct Watching {
    pub(super) watched: Arc<Watched>,
    pub(super) looked: watch::Receiver<Looked>,
    /// The number of the last look that does not count for this caller, because it began before
    /// this value was made or was already returned.
    pub(super) known: u64,
}

impl Default for Listed {
    fn default() -> Self {
        let nothing = List {
            answers: 0,
            tickets: Ok(Arc::new([])),
        };
        Self {
            asked: AtomicU64::new(0),
            is_listing: AtomicBool::new(false),
            last: watch::channel(nothing).0,
        }
    }
}

impl Watches {
    /// Pushes may have been lost, so each task watches and reads its counter again.
    pub(crate) fn gap(&self) {
        self.gaps.send_replace(());
    }

    pub(crate) fn changed(&self, name: &Name) {
        if let Some(watched) = self.all().get(name) {
            watched.wanted.notify_one();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    /// Makes all callers that wait fail.
    pub(crate) fn close(&self) {
        let all: Vec<_> = self.all().values().cloned().collect();
        for watched in all {
            watched.tell(u64::MAX, Seen::ShutDown, false);
        }
    }

    /// Removes a counter that nobody waits for any more. Returns whether it was removed.
    pub(super) fn remove_unused(&self, watched: &Watched) -> bool {
        let mut all = self.all();
        let is_unused = watched.looked.receiver_count() == 0;
        if is_unused {
            all.remove(&watched.name);
        }
        is_unused
    }

    pub(super) fn all(&self) -> MutexGuard<'_, HashMap<Name, Arc<Watched>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watched {
    pub(super) fn tell(&self, number: u64, seen: Seen, is_watched: bool) {
        // This runs wakers, which are users' code.
        guarded(|| {
            self.looked.send_if_modified(|looked| {
                let is_news = looked.number < number;
                if is_news {
                    *looked = Looked {
                        number,
                        seen,
                        is_watched,
                    };
                }
                is_news
            });
        });
    }
}

impl Watching {
    /// Returns the result of a look that began after this value was made, and after the look that
    /// the last call returned.
    ///
    /// The inner error is that of a look that has failed. Other looks follow.
    ///
    /// If the future is dropped, the next call returns what this call would have returned, or
    /// something newer.
    pub(crate) async fn news(&mut self) -> Result<Result<Counted, StoreError>, Error> {
        let known = self.known;
        if known > 0 && !self.looked.borrow().is_watched {
            self.watched.wanted.notify_one();
        }
        let is_news =
            |looked: &Looked| looked.number > known || matches!(looked.seen, Seen::ShutDown);
        let looked = self.looked.wait_for(is_news).await;
        // The sender lives in `self.watched`.
        let looked = looked.map_err(|_| Error::shut_down())?;
        self.known = looked.number;
        match &looked.seen {
            Seen::Counter(counted) => Ok(Ok(counted.clone())),
            Seen::Failed(error) => Ok(Err(error.clone())),
            Seen::Nothing | Seen::ShutDown => Err(Error::shut_down()),
        }
    }

    /// As [`news`](Self::news), but it keeps waiting after a look that has failed. The last failure
    /// is in `trouble` until a look succeeds.
    pub(crate) async fn seen(
        &mut self,
        trouble: &mut Option<StoreError>,
    ) -> Result<Counted, Error> {
        loop {
            match self.news().await? {
                Ok(counted) => {
                    *trouble = None;
                    return Ok(counted);
                }
                Err(error) if error.fault() == Fault::Config => {
                    return Err(error.unavailable_unless_config());
                }
                Err(error) => {
                    tracing::debug!(%error, "a counter cannot be read at the moment");
                    *trouble = Some(error);
                }
            }
        }
    }
}
