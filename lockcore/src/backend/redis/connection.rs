//! An open connection to one server.

use std::future::Future;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisResult, Value};

use super::dial::Driver;
use super::group::Group;
use super::hop::Hop;
use super::watch::Watch;
use super::watched::Watched;
use crate::backend::StoreError;

/// One multiplexed connection. Commands and wake-ups share one socket (RESP3).
#[derive(Clone, Debug)]
pub(super) struct RedisConnection {
    pub(super) connection: MultiplexedConnection,
    /// The channel of wake-ups for tickets of this connection, without the prefix.
    pub(super) channel: Arc<str>,
    /// The counters that are watched on this connection.
    pub(super) watched: Arc<Watched>,
    pub(super) driver: Arc<Driver>,
    /// The watch over the sentinels, if sentinels have named this server.
    pub(super) watch: Option<Arc<Watch>>,
    /// The group of the verbs that wait for durability, if the URL asks for it.
    pub(super) group: Option<Arc<Group>>,
    /// How this request reached a node of a cluster.
    pub(super) hop: Option<Hop>,
}

/// Sends the command of a verb to the server.
pub(super) trait Socket: Send {
    fn connection(&self) -> &RedisConnection;

    /// Returns the server's reply. The outer error means that the command was not sent.
    fn query(
        &mut self,
        command: Cmd,
    ) -> impl Future<Output = Result<RedisResult<Value>, StoreError>> + Send;
}

impl RedisConnection {
    /// Whether this request was redirected to this server with `ASK`. Such a server is taking over
    /// the slot of the key. The node that serves the slot does not have the key.
    pub(super) fn is_asking(&self) -> bool {
        self.hop.as_ref().is_some_and(|hop| hop.asking)
    }
}

impl Socket for RedisConnection {
    fn connection(&self) -> &RedisConnection {
        self
    }

    async fn query(&mut self, command: Cmd) -> Result<RedisResult<Value>, StoreError> {
        let _under_way = self.driver.in_flight.begin();
        Ok(match self.is_asking() {
            true => self.query_asking(command).await,
            false => command.query_async(&mut self.connection).await,
        })
    }
}

impl RedisConnection {
    async fn query_asking(&mut self, command: Cmd) -> RedisResult<Value> {
        // `ASKING` counts for the next command of the connection. So both are sent together, and no
        // other task's command can come between them.
        let mut both = redis::pipe();
        both.cmd("ASKING").add_command(command);
        let answers = self.connection.send_packed_commands(&both, 1, 1).await?;
        answers
            .into_iter()
            .next()
            .unwrap_or(Value::Nil)
            .extract_error()
    }
}
