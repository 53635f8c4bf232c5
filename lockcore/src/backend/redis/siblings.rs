//! The connections of one client to one address. All of them must lead to the same server. An
//! operator may move the address to another server while the earlier one goes on as a master. Then
//! new connections lead to the new server, and open ones to the earlier server: the client would
//! take a lock at one of them and renew it at the other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use redis::aio::MultiplexedConnection;
use tokio::task::AbortHandle;

use super::errors::failed;
use crate::backend::{EventSink, News, StoreError};

/// The connections to one address that are open.
#[derive(Debug, Default)]
pub(super) struct Siblings(Mutex<Vec<Sibling>>);

/// A connection, and the server that it leads to.
#[derive(Debug)]
struct Sibling {
    run_id: Arc<str>,
    end: AbortHandle,
    events: Weak<EventSink>,
}

impl Siblings {
    /// Notes a connection to this address that was just opened, and how to end it. Ends the connections to other servers, which are
    /// older.
    pub(super) fn join(
        &self,
        address: &str,
        run_id: Arc<str>,
        end: AbortHandle,
        events: &Arc<EventSink>,
    ) {
        self.end_others(address, &run_id);
        self.list().push(Sibling {
            run_id,
            end,
            events: Arc::downgrade(events),
        });
    }

    /// The address leads to the server with this run id. Ends the connections to other servers, and
    /// reports the first of them. Returns whether there was one.
    pub(super) fn end_others(&self, address: &str, run_id: &str) -> bool {
        let mut list = self.list();
        list.retain(|sibling| !sibling.end.is_finished());
        let (stay, others): (Vec<_>, Vec<_>) =
            (list.drain(..)).partition(|sibling| *sibling.run_id == *run_id);
        *list = stay;
        drop(list);
        let mut told = others.iter().filter_map(|sibling| sibling.events.upgrade());
        if let Some(events) = told.next() {
            events.tell(News::Moved(address.to_owned()));
        }
        others.iter().for_each(|sibling| sibling.end.abort());
        !others.is_empty()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Sibling>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The identity of a server. It differs between two servers, and between two starts of one. `None`
/// if the user may not ask for it.
pub(super) async fn run_id(
    mut connection: MultiplexedConnection,
) -> Result<Option<Arc<str>>, StoreError> {
    let mut question = redis::cmd("INFO");
    question.arg("server");
    let answer: Result<String, _> = question.query_async(&mut connection).await;
    match answer.map_err(failed) {
        Ok(info) => Ok(info.lines().find_map(|line| {
            let run_id = line.strip_prefix("run_id:")?;
            Some(run_id.trim().into())
        })),
        Err(error) if error.is_broken() => Err(error),
        Err(error) => {
            tracing::debug!(%error, "it stays unchecked whether all connections lead to one server");
            Ok(None)
        }
    }
}
