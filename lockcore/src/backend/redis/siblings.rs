//! The connections of one client to one address. All of them must lead to the same server. An
//! operator may move the address to another server while the earlier one goes on as a master. Then
//! new connections lead to the new server, and open ones to the earlier server: the client would
//! take a lock at one of them and renew it at the other.
//!
//! Of two connections to different servers, the one that was dialed later is right. A connection
//! finds its server at some moment between the begin of the dial and the server's answer. So if one
//! connection had its answer before the dial of the other began, the other one is newer. If the two
//! overlap, nobody knows which of them is newer. Then both end, and the core dials again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use redis::aio::MultiplexedConnection;
use tokio::task::AbortHandle;

use super::errors::failed;
use crate::backend::{EventSink, Fault, News, StoreError};

/// The open connections of a client, by their addresses.
#[derive(Debug, Default)]
pub(super) struct Siblings(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// How many dials and answers there were.
    steps: u64,
    list: Vec<Sibling>,
}

/// A connection, and the server that it leads to.
#[derive(Debug)]
struct Sibling {
    address: String,
    run_id: Arc<str>,
    /// When the server had answered, as a number of steps.
    answered: u64,
    end: AbortHandle,
    events: Weak<EventSink>,
}

/// When the dial of a connection began, as a number of steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dialed(u64);

impl State {
    fn step(&mut self) -> u64 {
        self.steps += 1;
        self.steps
    }

    /// Removes the connections to this address that lead to other servers than this one.
    fn take_others(&mut self, address: &str, run_id: &str) -> Vec<Sibling> {
        self.list.retain(|sibling| !sibling.end.is_finished());
        let is_other = |it: &mut Sibling| it.address == address && *it.run_id != *run_id;
        self.list.extract_if(.., is_other).collect()
    }
}

impl Siblings {
    /// Called before a connection is dialed.
    pub(super) fn dial(&self) -> Dialed {
        Dialed(self.state().step())
    }

    /// Notes a connection to this address that was just opened, and how to end it. Ends the
    /// connections to other servers.
    ///
    /// # Errors
    ///
    /// `Retry` if it is not certain that all of these were dialed before. Then this connection must
    /// end too.
    pub(super) fn join(
        &self,
        (dialed, address): (Dialed, String),
        run_id: Arc<str>,
        end: AbortHandle,
        events: Weak<EventSink>,
    ) -> Result<(), StoreError> {
        let mut state = self.state();
        let others = state.take_others(&address, &run_id);
        let is_newest = others.iter().all(|other| other.answered < dialed.0);
        let error = moved(&address);
        if is_newest {
            let answered = state.step();
            state.list.push(Sibling {
                address,
                run_id,
                answered,
                end,
                events,
            });
        }
        drop(state);
        end_all(&others);
        is_newest.then_some(()).ok_or(error)
    }

    /// A new connection to this address leads to the server with this run id. Ends the connections
    /// to other servers.
    ///
    /// # Errors
    ///
    /// `Retry` if there was one.
    pub(super) fn compare(&self, address: &str, run_id: &str) -> Result<(), StoreError> {
        let others = self.state().take_others(address, run_id);
        end_all(&others);
        match others.is_empty() {
            true => Ok(()),
            false => Err(moved(address)),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends these connections, and reports the first of them.
fn end_all(others: &[Sibling]) {
    let mut told = others
        .iter()
        .filter_map(|it| Some((it, it.events.upgrade()?)));
    if let Some((first, events)) = told.next() {
        events.tell(News::Moved(first.address.clone()));
    }
    others.iter().for_each(|sibling| sibling.end.abort());
}

fn moved(address: &str) -> StoreError {
    StoreError::replace(
        Fault::Retry,
        format!("{address} leads to another server than before; the client leaves the earlier one"),
    )
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
        Ok(info) => Ok(field(&info, "run_id").map(Arc::from)),
        Err(error) if error.is_broken() => Err(error),
        Err(error) => {
            tracing::debug!(%error, "it stays unchecked whether all connections lead to one server");
            Ok(None)
        }
    }
}

/// A field of the answer to `INFO`.
pub(super) fn field<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = info.lines();
    let value = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Joins a connection to this server. Returns whether it may stay, and the task that stands for
    /// it.
    fn join(all: &Siblings, dialed: Dialed, run_id: &str) -> (bool, tokio::task::JoinHandle<()>) {
        let task = tokio::spawn(std::future::pending());
        let at = (dialed, "address".to_owned());
        let joined = all.join(at, run_id.into(), task.abort_handle(), Weak::new());
        (joined.is_ok(), task)
    }

    async fn is_ended(task: tokio::task::JoinHandle<()>) -> bool {
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
        task.is_finished()
    }

    #[tokio::test]
    async fn of_two_connections_the_one_that_was_dialed_later_stays() {
        let all = Siblings::default();
        let (_, earlier) = join(&all, all.dial(), "earlier");
        let (_, beside) = join(&all, all.dial(), "earlier");

        let (stays, later) = join(&all, all.dial(), "later");

        assert!(stays && is_ended(earlier).await && is_ended(beside).await);
        assert!(!is_ended(later).await);
    }

    /// The slower of the two answers last, and may have found the earlier server.
    #[tokio::test]
    async fn if_two_dials_overlap_both_connections_end() {
        let all = Siblings::default();
        let slow = all.dial();
        let (_, quick) = join(&all, all.dial(), "one");

        let (stays, _) = join(&all, slow, "another");

        assert!(!stays && is_ended(quick).await);
        let (stays, _) = join(&all, all.dial(), "one");
        assert!(stays);
    }

    #[tokio::test]
    async fn connections_to_other_addresses_are_not_compared() {
        let all = Siblings::default();
        let (_, one) = join(&all, all.dial(), "one");
        let task = tokio::spawn(std::future::pending::<()>());
        let at = (all.dial(), "another address".to_owned());
        all.join(at, "another".into(), task.abort_handle(), Weak::new())
            .unwrap();
        assert!(!is_ended(one).await);
        all.compare("address", "one").unwrap();
        all.compare("address", "another").unwrap_err();
    }
}
