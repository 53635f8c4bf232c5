//! A connection to a cluster, as its parts see it. The parts are on lower floors and do not know
//! the type.

use std::fmt::Debug;
use std::sync::Arc;

use super::map::Map;
use crate::backend::StoreError;
use crate::backend::redis::views::Address;

/// The whole connection.
pub(super) trait Whole: Debug + Send + Sync {
    /// Asks for the map again, for all connections of the client, unless one of them has just
    /// asked.
    fn refresh(self: Arc<Self>);

    /// Whether the map of this connection is newer than `map`, which another connection has asked
    /// for.
    fn knows_newer(&self, map: &Map) -> bool;

    /// Replaces the map of this connection.
    fn adopt(&self, map: &Map);

    /// Ends this connection, because no node can be asked for the map.
    fn end(&self, error: &StoreError);

    /// Whether this is the node that serves a slot, as far as this connection knows.
    fn serves(&self, slot: u16, node: &Address) -> bool;

    /// Whether this connection listens in the slot at this node. If it does not, this call starts
    /// the subscription.
    fn hears_at(self: Arc<Self>, slot: u16, at: &Address) -> bool;

    /// The connection to a node has ended, or could not be made.
    fn lost(self: Arc<Self>, node: &Address, was_up: bool);
}
