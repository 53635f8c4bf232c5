//! Redis Cluster: each name is in one of 16,384 slots, and each slot is at one of several masters. The requests to a
//! master are the same as to a single server, and so are the scripts.
//!
//! The driver's own client for clusters does not do. It takes neither our sockets nor our TLS. It does not tell which node
//! a request went to, so the loss of that node would go unnoticed. And it mixes up answers when a subscribed slot leaves
//! its node: see [`ears`].

mod ears;
mod map;
mod nodes;
mod receivers;
mod routes;
mod seeds;
mod slots;
mod verbs;

use std::future::Future;
use std::sync::{Arc, OnceLock};

use redis::{ErrorKind, RedisError, ServerErrorKind};
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use crate::backend::{EventSink, StoreError};
use routes::Routes;
pub(super) use seeds::Seeds;
pub(super) use verbs::ClusterConnection;

/// Asks the nodes of the URL where the slots are. Connections to the masters are opened when they are needed.
pub(super) async fn connected(
    seeds: Arc<Seeds>,
    events: EventSink,
) -> Result<ClusterConnection, StoreError> {
    let nodes = seeds.addresses.iter().cloned().collect();
    let map = seeds.ask(nodes, events.namespace()).await?;
    Ok(ClusterConnection(Routes::begin(seeds, events, map)))
}

/// How a request reached a node, and where the node has sent it.
#[derive(Clone, Debug, Default)]
pub(super) struct Hop {
    /// The request goes to a node that does not serve the slot yet.
    pub(super) asking: bool,
    redirect: Arc<OnceLock<Redirect>>,
}

#[derive(Debug)]
struct Redirect {
    /// For this request only.
    asking: bool,
    /// The address, as the node has written it.
    to: String,
}

impl Hop {
    /// A node has answered with this error.
    pub(super) fn note(&self, error: &RedisError) {
        if let Some((to, _)) = error.redirect_node() {
            let asking = error.kind() == ErrorKind::Server(ServerErrorKind::Ask);
            let to = to.to_owned();
            let _ = self.redirect.set(Redirect { asking, to }); // one request has one answer
        }
    }

    fn redirect(&self) -> Option<&Redirect> {
        self.redirect.get()
    }
}

/// A task of the connection's runtime, until it is dropped.
#[derive(Debug)]
struct Task(AbortHandle);

impl Task {
    fn spawn(runtime: &Handle, task: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(runtime.spawn(task).abort_handle())
    }

    fn is_over(&self) -> bool {
        self.0.is_finished()
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}
