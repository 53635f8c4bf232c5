//! Lists of the tickets of a name, shared by those who ask for them at the same time: a burst on one
//! name costs one list at a time and not one for each request, each as long as the line.
//!
//! A caller needs to see what it sent before. Requests of a session are carried out in the order in
//! which they were sent, and a list tells what stands when it is carried out. So a list that is sent
//! *after* a request was shows what came of it, whoever asked for the list. Nobody is answered with a list
//! that was under way when they asked: they share the next one, which is sent when that one is answered.
//! (Over a change of servers too: a server that knows less than the session has seen is refused by the
//! session. What another connection may still bring is the business of those who ask, by `sync`.)
//!
//! Whoever stops listening takes nothing from the others: a task of the keeper asks. Should that end with
//! its runtime, nobody is left to be answered.

use std::sync::Arc;

use tokio::sync::oneshot;
use zookeeper_client::{Error as ZkError, Stat};

use super::layout;
use super::session::{Asking, Listed, Session};

impl Session {
    /// The tickets of a parent, after all that was sent before this call. Sent by the call, unless one is
    /// under way.
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

/// Until nobody asks any more.
async fn ask(
    session: Arc<Session>,
    path: String,
    first: impl Future<Output = Result<(Vec<String>, Stat), ZkError>>,
    mut asking: Asking,
) {
    let mut listed = first.await;
    loop {
        let tickets: Listed = match listed {
            Ok((children, _)) => Ok(layout::in_line(&children).into()),
            Err(ZkError::NoNode) => Ok(Arc::new([])),
            Err(error) => Err(error),
        };
        for tell in asking {
            let _ = tell.send(tickets.clone()); // gone, if it gave up
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
