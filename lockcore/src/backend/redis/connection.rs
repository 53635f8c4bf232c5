//! A connection that is up.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;

use super::dial::Driver;
use super::watch::Watch;

/// One multiplexed connection: commands and wake-ups on the same socket (RESP3).
#[derive(Clone, Debug)]
pub(super) struct RedisConnection {
    pub(super) connection: MultiplexedConnection,
    /// The channel of wake-ups for tickets of this connection, without the prefix.
    pub(super) channel: Arc<str>,
    pub(super) driver: Arc<Driver>,
    /// The watch over the sentinels, if they have named this server.
    pub(super) watch: Option<Arc<Watch>>,
}
