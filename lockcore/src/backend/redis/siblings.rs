//! The connections of one client to one address. All of them must lead to the same server. An
//! operator may move the address to another server while the earlier one goes on as a master. Then
//! new connections lead to the new server, and open ones to the earlier server: the client would
//! take a lock at one of them and renew it at the other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use redis::aio::MultiplexedConnection;
use tokio::task::AbortHandle;

use super::dial::{Driver, Part, Server};
use super::errors::failed;
use super::opening::settings;
use crate::backend::{EventSink, Fault, News, StoreError};

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
    /// Notes a connection that was just opened. Ends the connections to other servers, which are
    /// older.
    pub(super) fn join(
        &self,
        server: &Server,
        run_id: Arc<str>,
        driver: &Driver,
        events: &Arc<EventSink>,
    ) {
        self.end_others(server, &run_id);
        self.list().push(Sibling {
            run_id,
            end: driver.end(),
            events: Arc::downgrade(events),
        });
    }

    /// The address leads to the server with this run id. Ends the connections to other servers, and
    /// reports the first of them. Returns whether there was one.
    fn end_others(&self, server: &Server, run_id: &str) -> bool {
        let mut list = self.list();
        list.retain(|sibling| !sibling.end.is_finished());
        let (stay, others): (Vec<_>, Vec<_>) =
            (list.drain(..)).partition(|sibling| *sibling.run_id == *run_id);
        *list = stay;
        drop(list);
        let mut told = others.iter().filter_map(|sibling| sibling.events.upgrade());
        if let Some(events) = told.next() {
            events.tell(News::Moved(server.info.addr().to_string()));
        }
        others.iter().for_each(|sibling| sibling.end.abort());
        !others.is_empty()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Sibling>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The identity of a server. It differs between two servers, and between two starts of one. `None`
/// if the user may not ask for it, or if something else than the URL chooses the server.
pub(super) async fn run_id(
    server: &Server,
    mut connection: MultiplexedConnection,
) -> Result<Option<Arc<str>>, StoreError> {
    if server.part != Part::Alone {
        return Ok(None);
    }
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

/// Connects once more, and checks that the address still leads to the server of the open
/// connections. Otherwise it ends them.
///
/// # Errors
///
/// `Retry` if the address leads to another server.
pub(super) async fn check(server: &Server) -> Result<(), StoreError> {
    let (connection, _driver) = server.connect(settings()).await?;
    match run_id(server, connection).await? {
        Some(run_id) if server.siblings.end_others(server, &run_id) => Err(StoreError::replace(
            Fault::Retry,
            format!(
                "{} leads to another server than before; the client leaves the earlier one",
                server.info.addr()
            ),
        )),
        _ => Ok(()),
    }
}
