//! Lists of the tickets of a name, for callers of this client that watch the counter of the name.
//! These callers share the lists: at most one request is in flight, however many callers ask.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::shared::Shared;
use super::watched::{List, Watched, Watching};
use crate::backend::TicketInfo;
use crate::error::Error;
use crate::log::guarded;

impl Shared {
    /// The tickets of a watched name, oldest first, as the store shows them after this call.
    ///
    /// The request is sent by the keeper, so a caller that is not polled keeps nobody waiting.
    pub(crate) async fn tickets(
        self: &Arc<Self>,
        watching: &Watching,
    ) -> Result<Arc<[TicketInfo]>, Error> {
        let Watched { name, listed, .. } = &*watching.watched;
        let number = listed.asked.fetch_add(1, Ordering::SeqCst) + 1;
        let mut lists = listed.last.subscribe();
        if !listed.is_listing.swap(true, Ordering::SeqCst) {
            let watched = Arc::clone(&watching.watched);
            self.keeper.spawn(list(Arc::clone(self), watched));
        }
        // The sender lives in `watching`.
        let list = lists.wait_for(|list| list.answers >= number).await;
        let tickets = list.map_err(|_| Error::shut_down())?.tickets.clone();
        tickets.map_err(|error| error.unavailable_unless_config().of_name(name.as_str()))
    }
}

/// Lists until no caller is left without an answer. A caller that is not answered by one list asked
/// while it was made, so the next list answers it.
async fn list(shared: Arc<Shared>, watched: Arc<Watched>) {
    let listed = &watched.listed;
    loop {
        let answers = listed.asked.load(Ordering::SeqCst);
        let by = shared.clock.now().after(shared.op_timeout);
        let verb = shared.operate_for_callers(by, |verbs, _| verbs.inspect(watched.name.clone()));
        let tickets = verb.await.map(|(_, tickets)| tickets.into());
        // This runs wakers, which are users' code.
        guarded(|| drop(listed.last.send_replace(List { answers, tickets })));
        // A caller first counts itself and then looks whether a task lists. This task does it the
        // other way round. So either the caller starts a task, or this task sees the caller.
        listed.is_listing.store(false, Ordering::SeqCst);
        let is_done = listed.asked.load(Ordering::SeqCst) == answers;
        if is_done || listed.is_listing.swap(true, Ordering::SeqCst) {
            return;
        }
    }
}
