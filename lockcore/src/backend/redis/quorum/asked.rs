//! Requests that were sent to several nodes.

use std::future::Future;
use std::sync::Arc;

use futures_util::future::poll_immediate;
use futures_util::stream::{FuturesUnordered, StreamExt as _};

use super::node::Node;
use super::nodes::Nodes;
use crate::backend::{BoxFuture, Enqueued, StoreError};

/// Requests that are in flight, each with its node.
pub(super) type Asked<T> = FuturesUnordered<BoxFuture<(usize, Result<T, StoreError>)>>;

/// The request to one node in an enqueue, and its answer.
pub(super) enum Step {
    Enqueued(usize, Result<Enqueued, StoreError>),
    Raised(usize, Result<bool, StoreError>),
}

/// Sends a request to all nodes that are up.
pub(super) fn everywhere<T, F>(nodes: &Arc<Nodes>, verb: impl Fn(&Node) -> F) -> Asked<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T, StoreError>> + Send + 'static,
{
    let asked = nodes.up().into_iter().map(|(at, node)| {
        let answer = nodes.send(at, &node, verb(&node));
        Box::pin(async move { (at, answer.await) }) as BoxFuture<_>
    });
    asked.collect()
}

/// Sends the requests that were not polled yet. If the first nodes answer at once, a verb may have
/// its outcome before the requests to the other nodes were polled. After this function all of them
/// are sent. So the next request on these connections arrives after them at every node.
///
/// Passes the answers that are ready to `look_at`.
pub(super) async fn send_rest<T>(
    asked: &mut FuturesUnordered<BoxFuture<T>>,
    mut look_at: impl FnMut(T),
) {
    while let Some(Some(answer)) = poll_immediate(asked.next()).await {
        look_at(answer);
    }
}
