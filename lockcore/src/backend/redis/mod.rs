//! Redis and Valkey: see [`guide::redis`](crate::guide::redis) for what it promises and needs.

mod acknowledged;
mod config;
mod connection;
mod dial;
mod durability;
mod errors;
mod events;
mod gathering;
mod group;
mod layout;
mod released;
mod rights;
mod sentinels;
mod tickets;
mod turn;
mod views;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use futures_util::TryFutureExt as _;
use redis::AsyncConnectionConfig;
use tokio::sync::oneshot;
use url::Url;

use super::{
    Answer, Backend, Capability, Connection, Departure, Enqueued, EventSink, Released, Renewed,
    StoreError, TicketInfo,
};
use crate::error::Error;
use crate::name::Name;
use crate::request::Request;
use crate::tls::Tls;

use connection::RedisConnection;
use dial::Server;
use group::Opened;
use released::Repetition;
use sentinels::Sentinels;
use watch::Watch;

/// Opens `redis://…`.
pub(crate) fn open(url: &Url, _: &Tls) -> Result<Arc<dyn Backend>, Error> {
    let server = config::server(url)?;
    Ok(Arc::new(Redis::Server(Arc::new(server))))
}

/// Opens `rediss://…`, the same over TLS.
#[cfg(feature = "redis-tls")]
pub(crate) fn open_encrypted(url: &Url, tls: &Tls) -> Result<Arc<dyn Backend>, Error> {
    let server = config::encrypted_server(url, tls)?;
    Ok(Arc::new(Redis::Server(Arc::new(server))))
}

/// Opens `redis+sentinel://…`.
pub(crate) fn open_by_sentinels(url: &Url, _: &Tls) -> Result<Arc<dyn Backend>, Error> {
    let sentinels = Sentinels::plain(url)?;
    Ok(Arc::new(Redis::Sentinels(Arc::new(sentinels))))
}

/// Opens `rediss+sentinel://…`, the same over TLS.
#[cfg(feature = "redis-tls")]
pub(crate) fn open_encrypted_by_sentinels(url: &Url, tls: &Tls) -> Result<Arc<dyn Backend>, Error> {
    let sentinels = Sentinels::encrypted(url, tls)?;
    Ok(Arc::new(Redis::Sentinels(Arc::new(sentinels))))
}

/// Half of the day for which a key stays after the last request. So no ticket can outlive its key, even if the server's
/// clock jumps by hours.
const LONGEST_TTL: Duration = Duration::from_secs(12 * 60 * 60);

/// The most tickets in one request. The core sends as many.
const BATCH: usize = 100;

/// How to find the server that has the locks.
#[derive(Debug)]
enum Redis {
    /// A single server, or one that behaves like one.
    Server(Arc<Server>),
    /// The master that the sentinels name.
    Sentinels(Arc<Sentinels>),
}

impl Backend for Redis {
    fn capability(&self) -> Capability {
        let durability = match self {
            Self::Server(server) => server.durability,
            Self::Sentinels(sentinels) => sentinels.durability(),
        };
        Capability::new()
            .longest_ttl(LONGEST_TTL)
            // See `acknowledged`.
            .wake_ups_grant(durability.is_none())
    }

    fn silence(&self) -> &'static str {
        match self {
            // A server without TLS takes the first bytes of TLS for an incomplete command, and waits for the rest.
            Self::Server(server) if server.is_encrypted() => {
                "; a server without TLS is silent too: redis:// is for it"
            }
            Self::Server(_) => "",
            Self::Sentinels(sentinels) => sentinels.silence(),
        }
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        match self {
            Self::Server(server) => {
                let server = Arc::clone(server);
                Box::pin(async move {
                    let connection = connected(&server, events).await?;
                    Ok(Arc::new(connection) as Arc<dyn Connection>)
                })
            }
            Self::Sentinels(sentinels) => {
                let sentinels = Arc::clone(sentinels);
                Box::pin(async move {
                    let (master, watch) = Watch::begin(&sentinels).await?;
                    let mut connection = watch.meanwhile(connected(&master, events)).await?;
                    watch.leave_when_moved(&connection.driver);
                    // Without the watch, with which this task ends.
                    let repeats = connection.clone();
                    watch.spawn(release_again(repeats, watch.released_elsewhere()));
                    connection.watch = Some(Arc::new(watch));
                    Ok(Arc::new(connection) as Arc<dyn Connection>)
                })
            }
        }
    }
}

/// Connects to a server, and checks that it accepts locks and that the user has the rights.
async fn connected(server: &Server, events: EventSink) -> Result<RedisConnection, StoreError> {
    let channel: Arc<str> = format!("{:016x}", events.receiver()).into();
    let namespace = events.namespace().clone();
    let channels = layout::wake_channel(&namespace, &channel);
    let op_timeout = events.op_timeout();
    let (open, ended) = oneshot::channel::<()>();
    let sink = events::sink(events);
    let config = AsyncConnectionConfig::new()
        // The core has its own deadlines, on the lease clock. The timers of the user's runtime may be paused or off.
        .set_connection_timeout(None)
        .set_response_timeout(None)
        // More requests than this wait until they can be written. The default of 50 is less than the number of tasks in
        // one busy process.
        .set_pipeline_buffer_size(1024)
        .set_push_sender(move |push| {
            let _goes_with_the_connection = &open;
            sink(push)
        });
    let (mut connection, driver) = server.connect(config).await?;
    // All three requests are sent together, in one round trip.
    let keeps_locks = config::keeps_locks(connection.clone(), server);
    let missing = rights::missing(connection.clone(), &namespace, &channels);
    // Resolves when the server has confirmed the subscription, so no wake-up can come before it.
    let subscribed = connection.subscribe(&channels);
    let failed = |error| server.failed(error);
    let (missing, subscribed) = (missing.map_err(failed), subscribed.map_err(failed));
    let acknowledged = async {
        match server.durability {
            Some(durability) => Opened::of(server, durability).await.map(Some),
            None => Ok(None),
        }
    };
    let ((), missing, (), acknowledged) =
        tokio::try_join!(keeps_locks, missing, subscribed, acknowledged)?;
    if !missing.is_empty() {
        let missing = missing.join(", ").to_lowercase();
        return Err(server.mistake(format_args!(
            "the user may not run {missing}{}",
            errors::GUIDE
        )));
    }
    let acknowledged = match acknowledged {
        Some(opened) => {
            let beside = opened.beside(server, &driver, ended, channels, op_timeout);
            Some(Arc::new(beside.await?))
        }
        None => None,
    };
    Ok(RedisConnection {
        connection,
        channel,
        driver: Arc::new(driver),
        watch: None,
        acknowledged,
    })
}

/// Nobody waits for this. One batch at a time, so that renewals need not wait for it. If it is dropped, because the
/// connection ends, the next connection repeats the rest.
async fn release_again(connection: RedisConnection, mut again: Repetition) {
    while let Some(batch) = again.next(BATCH) {
        if tickets::release(connection.clone(), batch).await.is_err() {
            return;
        }
        again.is_done(BATCH);
    }
}

impl Connection for RedisConnection {
    fn enqueue(&self, request: Arc<Request>) -> Answer<Enqueued> {
        let mut connection = self.clone();
        match self.acknowledged.clone() {
            Some(verbs) => Box::pin(acknowledged::enqueue(verbs, connection, request)),
            None => Box::pin(async move { tickets::enqueue(&mut connection, request).await }),
        }
    }

    fn renew(&self, tickets: Vec<Arc<Request>>) -> Answer<Vec<Renewed>> {
        let mut connection = self.clone();
        match self.acknowledged.clone() {
            Some(verbs) => Box::pin(acknowledged::renew(verbs, connection, tickets)),
            None => Box::pin(async move { tickets::renew(&mut connection, tickets).await }),
        }
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        let connection = self.clone();
        let Some(watch) = self.watch.clone() else {
            return Box::pin(tickets::release(connection, tickets));
        };
        Box::pin(async move {
            let answers = tickets::release(connection, tickets.clone()).await?;
            watch.note_released(tickets);
            Ok(answers)
        })
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        Box::pin(tickets::inspect(self.clone(), name))
    }

    fn forget(&self, name: Name) -> Answer<()> {
        Box::pin(tickets::forget(self.clone(), name))
    }

    fn check(&self) -> Answer<Vec<String>> {
        Box::pin(config::check(self.clone()))
    }
}
