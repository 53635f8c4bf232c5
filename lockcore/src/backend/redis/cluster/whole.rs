//! A connection to a cluster, as its parts see it.

use std::fmt::Debug;
use std::sync::Arc;

use super::map::Map;
use crate::backend::StoreError;
use crate::backend::redis::views::Address;

/// The whole connection.
pub(super) trait Whole: Debug + Send + Sync {
    /// Asks for the map again, for all connections of the client, unless it has just been asked for.
    fn refresh(self: Arc<Self>);

    /// Whether its map is of a later time than this one, which was asked for by another connection.
    fn knows_newer(&self, map: &Map) -> bool;

    /// From now on, this is the map.
    fn adopt(&self, map: &Map);

    /// No node can be asked for the map.
    fn end(&self, error: &StoreError);

    /// Whether this is the node that serves a slot, as far as this connection knows.
    fn serves(&self, slot: u16, node: &Address) -> bool;

    /// Whether this connection listens in the slot at this node. If not, it begins to.
    fn hears_at(self: Arc<Self>, slot: u16, at: &Address) -> bool;

    /// The connection to a node has ended, or could not be made.
    fn lost(self: Arc<Self>, node: &Address, was_up: bool);
}
