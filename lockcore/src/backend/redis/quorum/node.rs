//! The connection to one node, and what is known of the node.

use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::FromRedisValue;
use redis::aio::MultiplexedConnection;

use super::super::connection::RedisConnection;
use super::super::dial::Server;
use super::super::errors::{GUIDE, failed};
use super::super::layout;
use super::super::opening::without_wake_ups;
use super::super::siblings::field;
use super::proposal::WallClock;
use crate::backend::{EventSink, StoreError};
use crate::clock::{Clock, Instant};
use crate::name::Namespace;

/// The longest ttl of a ticket. A node that has restarted may have forgotten tickets, so it must
/// not vote until all of them have ended. The node has forgotten their ttls. A client does not know
/// them either, because others may have asked for longer ttls than its own. So all clients have the
/// same limit, and the node does not vote for this time. The limit is short, because another node
/// must not fail in this time. Locks can be held for longer, because leases are renewed.
pub(super) const LONGEST_TTL: Duration = Duration::from_secs(120);

/// How long a node that has restarted does not vote. It is the longest ttl, one percent of it for
/// the drift of clocks, and two seconds. The two seconds are there because the node rounds its
/// uptime to a second.
const ASIDE: Duration = LONGEST_TTL
    .saturating_add(LONGEST_TTL.checked_div(100).expect("not by zero"))
    .saturating_add(Duration::from_secs(2));

/// A node that is up.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) connection: RedisConnection,
    /// The server's run id. It differs between servers, and between two starts of one server.
    pub(super) run_id: Arc<str>,
    /// From when the node votes. A node that has restarted may have forgotten tickets, so it does
    /// not vote at once.
    pub(super) votes_from: Instant,
    pub(super) wall_clock: Arc<WallClock>,
}

impl Node {
    /// Connects to a node.
    pub(super) async fn open(
        server: &Arc<Server>,
        receiver: u64,
        namespace: &Namespace,
        events: Weak<EventSink>,
    ) -> Result<Self, StoreError> {
        let channel = layout::channel(receiver);
        let connection = without_wake_ups(server, namespace, channel, events).await?;
        let info: String = ask(server, &connection, "info", &["server"]).await?;
        let read_at = Clock::BOOT.now();
        let uptime = field(&info, "uptime_in_seconds").and_then(|seconds| seconds.parse().ok());
        let (Some(run_id), Some(uptime)) = (field(&info, "run_id"), uptime) else {
            return Err(server.mistake(
                "its INFO lacks run_id or uptime_in_seconds, which a quorum needs; use Redis 6 or later, or Valkey",
            ));
        };
        let aside = ASIDE.saturating_sub(Duration::from_secs(uptime));
        let keeps_all = aside.is_zero() || keeps_every_write(connection.connection.clone()).await;
        let asked = Clock::BOOT.now();
        let time = ask(server, &connection, "time", &[]).await?;
        load_scripts(connection.connection.clone()).await;
        Ok(Self {
            run_id: run_id.into(),
            votes_from: match keeps_all {
                true => read_at,
                false => read_at.after(aside),
            },
            wall_clock: Arc::new(WallClock::new(asked, time)),
            connection,
        })
    }
}

/// Loads the scripts into the server before they are used. Otherwise the server does not know a
/// script at its first use, and the client has to send the text. A request that is sent in between
/// would overtake that text: a release could arrive before its enqueue, or an inspect before a
/// release.
async fn load_scripts(mut connection: MultiplexedConnection) {
    let scripts = [
        &layout::ENQUEUE,
        &layout::RAISE,
        &layout::RENEW,
        &layout::RELEASE,
        &layout::INSPECT,
    ];
    let mut load = redis::pipe();
    for script in scripts {
        load.cmd("SCRIPT").arg("LOAD").arg(&script.source).ignore();
    }
    let loaded: Result<(), _> = load.query_async(&mut connection).await;
    if let Err(error) = loaded {
        tracing::debug!(%error, "the scripts are not loaded yet");
    }
}

/// Runs a command that is needed while connecting. The user needs a right for it that the scripts
/// do not need.
async fn ask<T: FromRedisValue>(
    server: &Server,
    connection: &RedisConnection,
    command: &str,
    arguments: &[&str],
) -> Result<T, StoreError> {
    let answer = redis::cmd(command)
        .arg(arguments)
        .query_async(&mut connection.connection.clone())
        .await;
    answer.map_err(|error| match error.code() {
        Some("NOPERM") => server.mistake(format_args!("the user may not run {command}{GUIDE}")),
        _ => server.failed(error),
    })
}

/// Whether a restart of the server loses no write. If the user may not read the settings, the
/// answer is no.
async fn keeps_every_write(mut connection: MultiplexedConnection) -> bool {
    let mut question = redis::cmd("CONFIG");
    question.arg("GET").arg("*append*");
    let settings: Result<Vec<(String, String)>, _> =
        question.query_async(&mut connection).await.map_err(failed);
    let settings = settings.unwrap_or_default();
    let is = |name: &str, value: &str| settings.iter().any(|(n, v)| n == name && v == value);
    // Without the last setting, the server does not wait for the disk while it rewrites its file.
    is("appendonly", "yes") && is("appendfsync", "always") && is("no-appendfsync-on-rewrite", "no")
}
