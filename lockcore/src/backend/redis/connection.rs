//! An open connection to one server.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, RedisResult, Value};

use super::dial::Driver;
use super::durable::Member;
use super::group::Group;
use super::hop::Hop;
use super::watch::Watch;
use super::watched::Watched;
use crate::backend::{Fault, StoreError};

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
    /// The part of this verb in the group, if it waits for durability.
    pub(super) member: Option<Member>,
    /// How this request reached a node of a cluster.
    pub(super) hop: Option<Hop>,
    /// Whether this request probably wakes a waiter of another process.
    pub(super) wakes: bool,
}

impl RedisConnection {
    pub(super) fn new(
        connection: MultiplexedConnection,
        driver: Driver,
        channel: Arc<str>,
    ) -> Self {
        Self {
            connection,
            channel,
            watched: Arc::default(),
            driver: Arc::new(driver),
            watch: None,
            group: None,
            member: None,
            hop: None,
            wakes: false,
        }
    }

    /// Whether this request was redirected to this server with `ASK`. Such a server is taking over
    /// the slot of the key. The node that serves the slot does not have the key.
    pub(super) fn is_asking(&self) -> bool {
        self.hop.as_ref().is_some_and(|hop| hop.asking)
    }

    /// A copy for one verb, which counts when its write is durable. The caller waits for `patience`.
    pub(super) fn durable(&self, patience: Duration) -> Self {
        let group = self.group.as_ref();
        Self {
            member: group.map(|group| Member::of(group, patience)),
            ..self.clone()
        }
    }

    /// Resolves when the write of this verb counts. That is at once if the URL asks for no
    /// durability.
    pub(super) async fn counts(&self) -> Result<(), StoreError> {
        match &self.member {
            Some(member) => member.counts().await,
            None => Ok(()),
        }
    }

    /// As [`counts`](Self::counts), for a request that the core repeats with the same id.
    pub(super) async fn counts_or_is_unknown(&self) -> Result<(), StoreError> {
        let counts = self.counts().await;
        counts.map_err(|error| error.carried_out(Fault::Unknown))
    }

    /// Sends the command of a verb to the server, and returns the server's reply. The outer error
    /// means that the command was not sent.
    pub(super) async fn query(&mut self, command: Cmd) -> Result<RedisResult<Value>, StoreError> {
        if let Some(member) = &mut self.member {
            return member.query(command).await;
        }
        let _under_way = self.driver.in_flight.begin();
        // If other requests of this connection are in flight, a reply to one of them often has the
        // effect of TIME.
        let is_alone = self.driver.in_flight.is_one();
        Ok(if self.is_asking() {
            self.query_behind("ASKING", command).await
        } else if self.wakes && is_alone {
            self.query_behind("TIME", command).await
        } else {
            command.query_async(&mut self.connection).await
        })
    }

    /// Sends two commands in one packet, so no command of another task can come between them.
    /// Returns the reply to the second command.
    ///
    /// `ASKING` counts for the next command of the connection.
    ///
    /// `TIME` makes the server send wake-ups before the reply. After the server has run the
    /// commands of a packet, it writes to its clients. The client that was the last to get its
    /// first message is written to first. Without `TIME` that is the client that has sent the
    /// script, because the reply comes after the messages of the script. The reply wakes this
    /// process, and this process then takes the processor that the waiter needs.
    ///
    /// Measured on two processors: with `TIME` a waiter of another process gets its lock after 260
    /// µs, and without it after 320 µs. With `TIME` a pair of acquire and release without waiters
    /// takes 3 µs more. So `TIME` is sent only if a waiter is likely.
    async fn query_behind(&mut self, first: &str, command: Cmd) -> RedisResult<Value> {
        let mut both = redis::pipe();
        both.cmd(first).add_command(command);
        let answers = self.connection.send_packed_commands(&both, 1, 1).await?;
        answers
            .into_iter()
            .next()
            .unwrap_or(Value::Nil)
            .extract_error()
    }
}
