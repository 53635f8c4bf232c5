//! Redis Cluster: each name is in one of 16,384 slots, and each slot is at one of several masters.
//! The requests to a master are the same as to a single server, and so are the scripts.
//!
//! The driver's own client for clusters cannot be used, for three reasons. It accepts neither the
//! sockets of `dial` nor the TLS of this library. It does not tell which node a request went to, so
//! the loss of that node would go unnoticed. And it mixes up answers when a slot with a
//! subscription leaves its node: see [`ears`].
//!
//! This folder is longer than the folders of other stores should be, because it contains a client
//! for clusters: the map, a link to each node, and the subscriptions in each slot. The verbs and
//! the scripts are those of the single server.

mod context;
mod counting;
mod ears;
mod map;
mod nodes;
mod question;
mod receivers;
mod routes;
mod seeds;
mod slots;
mod verbs;
mod whole;

use std::sync::Arc;

use crate::backend::{EventSink, StoreError};
use routes::Routes;
pub(super) use seeds::Seeds;
pub(super) use verbs::ClusterConnection;

/// Asks the nodes of the URL where the slots are. Connections to the masters are opened when they
/// are needed.
pub(super) async fn connected(
    seeds: Arc<Seeds>,
    events: EventSink,
) -> Result<ClusterConnection, StoreError> {
    let nodes = seeds.addresses.iter().cloned().collect();
    let map = seeds.ask(nodes, events.namespace()).await?;
    Ok(ClusterConnection::of(Routes::begin(seeds, events, map)))
}
