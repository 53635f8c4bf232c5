//! Lists of the tickets of a name, shared by all callers that ask for one at the same time. So if
//! many requests for one name come at once, only one list is in flight at a time. This matters
//! because a list is as long as the line.
//!
//! A caller must see the effect of its earlier requests. A server carries out the requests of a
//! session in the order in which they were sent. A list shows the state at the moment when the
//! server carries it out. So a list that is sent *after* a request shows the effect of that
//! request, whoever asked for the list. A caller never gets a list that was already in flight when
//! it asked. The caller shares the next list, which is sent when the first is answered. (This is
//! also true after a change of servers: the session refuses a server that knows less than the
//! session has seen. If another connection may deliver a request later, the caller must use
//! `sync`.)
//!
//! If a caller drops its future, the other callers get their list all the same, because a task on
//! the keeper's runtime sends the requests. If that task ends with its runtime, no caller is left.

use std::sync::Arc;

use tokio::sync::oneshot;
use zookeeper_client::{Error as ZkError, Stat};

use super::row::Row;
use super::session::Session;
use super::standing::{Asking, Listed};

impl Session {
    /// The line of a parent. It shows the effect of every request that was sent before this call.
    /// The call itself sends the request, unless a list is in flight.
    pub(super) fn list(
        self: &Arc<Self>,
        path: &str,
    ) -> impl Future<Output = Listed> + Send + 'static {
        let (tell, told) = oneshot::channel();
        let mut state = self.state();
        match state.lists.get_mut(path) {
            Some(next) => next.push(tell),
            None => {
                state.lists.insert(path.to_owned(), Vec::new());
                let first = self.client.get_children(path);
                let rest = ask(Arc::clone(self), path.to_owned(), first, vec![tell]);
                self.runtime.spawn(rest);
            }
        }
        drop(state);
        async move { told.await.unwrap_or(Err(ZkError::ClientClosed)) }
    }
}

/// Sends one list after the other, until no caller waits for a list.
async fn ask(
    session: Arc<Session>,
    path: String,
    first: impl Future<Output = Result<(Vec<String>, Stat), ZkError>>,
    mut asking: Asking,
) {
    let mut listed = first.await;
    loop {
        let row: Listed = match listed {
            Ok((children, _)) => Ok(Arc::new(Row::of(&children))),
            Err(ZkError::NoNode) => Ok(Arc::default()),
            Err(error) => Err(error),
        };
        // The node of a forgotten capacity is deleted by every client that finds it unused, because
        // the client that forgot the capacity may be gone.
        if let Ok(Some(spent)) = row.as_ref().map(|row| row.spent()) {
            session.delete_unasked(format!("{path}/{spent}"));
        }
        for tell in asking {
            let _ = tell.send(row.clone()); // fails if the caller has dropped its future
        }
        let listing = {
            let mut state = session.state();
            asking = state
                .lists
                .get_mut(&path)
                .map(std::mem::take)
                .unwrap_or_default();
            asking.retain(|tell| !tell.is_closed());
            if asking.is_empty() {
                state.lists.remove(&path);
                return;
            }
            session.client.get_children(&path)
        };
        listed = listing.await;
    }
}
