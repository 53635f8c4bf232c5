//! Redis and Valkey: see [`guide::redis`](crate::guide::redis) for what it promises and needs.

mod access;
mod adopt;
mod capacities;
mod changed;
mod cluster;
mod config;
mod connection;
mod counters;
mod dial;
mod durability;
mod durable;
mod errors;
mod events;
mod gathering;
mod group;
mod hop;
mod layout;
mod opening;
mod owed;
pub(crate) mod quorum;
mod rights;
mod sentinels;
mod siblings;
mod task;
mod tickets;
mod turn;
mod views;
mod watch;
mod watched;

use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use url::Url;

use super::{
    Adoption, Answer, Backend, Capability, Connection, Count, Counted, Departure, Enqueued,
    EventSink, Listing, News, Page, Released, Renewed, Resize, Resized, StoreError, TicketInfo,
};
use crate::backend::events::Timer;
use crate::error::Error;
use crate::name::Name;
use crate::pauses::Pauses;
use crate::request::{Id, Request};
use crate::tls::Tls;

use changed::{Repeating, repeated_all};
use cluster::Seeds;
use connection::RedisConnection;
use dial::{Server, settings};
use group::Opened;
use opening::checked;
use sentinels::Sentinels;
use watch::Watch;

/// Opens the URLs of a server, of sentinels and of a cluster, with and without TLS.
pub(crate) fn open(url: &Url, tls: &Tls) -> Result<Arc<dyn Backend>, Error> {
    let redis = match url.scheme().split_once('+') {
        Some((_, "sentinel")) => Redis::Sentinels(Arc::new(Sentinels::read(url, tls)?)),
        Some((_, "cluster")) => Redis::Cluster(Arc::new(Seeds::read(url, tls)?)),
        Some((_, "unix")) => Redis::Server(Arc::new(config::server_at_socket(url, tls)?)),
        _ => Redis::Server(Arc::new(config::server(url, tls)?)),
    };
    Ok(Arc::new(redis))
}

/// The longest ttl: half a day. A key stays for a day after the last request for it. So no ticket
/// can outlive its key, even if the server's clock jumps by hours.
const LONGEST_TTL: Duration = Duration::from_secs(12 * 60 * 60);

/// How to find the server that has the locks.
#[derive(Clone, Debug)]
enum Redis {
    /// A single server, or one that behaves like one.
    Server(Arc<Server>),
    /// The master that the sentinels name.
    Sentinels(Arc<Sentinels>),
    /// The nodes of a cluster, each for the names in its slots.
    Cluster(Arc<Seeds>),
}

impl Backend for Redis {
    fn capability(&self) -> Capability {
        let durability = match self {
            Self::Server(server) => server.durability,
            Self::Sentinels(sentinels) => sentinels.durability(),
            Self::Cluster(_) => None,
        };
        Capability::new()
            .longest_ttl(LONGEST_TTL)
            // See `durable`.
            .wake_ups_grant(durability.is_none())
            // It names no tickets ahead. A failover, the end of a log, or an eviction may lose a
            // waiter and keep the ticket ahead: see the model of turns.
            // A holder in a cluster listens only from its first renewal on.
            .tells_holders(!matches!(self, Self::Cluster(_)))
            .asks_back(true)
            .lists(true)
            .adopts(true)
            .resizes(true)
            .counters(true)
            .watches(!matches!(self, Self::Cluster(_)))
    }

    fn silence(&self) -> &'static str {
        match self {
            // A server without TLS takes the first bytes of TLS for an incomplete command, and
            // waits for the rest.
            Self::Server(server) if server.is_encrypted() => {
                "; a server without TLS is silent too: redis:// is for it"
            }
            Self::Server(_) => "",
            Self::Sentinels(sentinels) => sentinels.silence(),
            Self::Cluster(seeds) => seeds.silence(),
        }
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let redis = self.clone();
        Box::pin(async move {
            Ok(match redis {
                Self::Server(server) => Arc::new(connected(&server, Arc::new(events)).await?),
                Self::Sentinels(all) => Arc::new(connected_to_master(&all, events).await?),
                Self::Cluster(seeds) => {
                    Arc::new(cluster::connected(seeds, events).await?) as Arc<dyn Connection>
                }
            })
        })
    }
}

/// Connects to the master that the sentinels name.
async fn connected_to_master(
    sentinels: &Arc<Sentinels>,
    events: EventSink,
) -> Result<RedisConnection, StoreError> {
    let (master, watch) = Watch::begin(sentinels).await?;
    let timer = events.timer();
    let events = Arc::new(events);
    let told = Arc::downgrade(&events);
    let mut connection = watch.meanwhile(connected(&master, events)).await?;
    watch.leave_when_moved(&connection.driver);
    // This copy has no watch. So the tasks do not keep the watch alive, and end when the connection
    // drops the watch.
    let here = connection.clone();
    let at = (Arc::clone(sentinels), Arc::clone(watch.address()));
    watch.spawn(release_again(here.clone(), at.clone(), Arc::clone(&timer)));
    watch.spawn(tell_risk(here.clone(), at.clone(), told));
    if here.group.is_none() {
        watch.spawn(change_again(here, at, timer));
    }
    connection.watch = Some(Arc::new(watch));
    Ok(connection)
}

/// Connects to a server, and checks that it accepts locks and that the user has the rights.
async fn connected(
    server: &Arc<Server>,
    events: Arc<EventSink>,
) -> Result<RedisConnection, StoreError> {
    let channel = layout::channel(events.receiver());
    let namespace = events.namespace().clone();
    let channels = layout::wake_channel(&namespace, &channel);
    let op_timeout = events.op_timeout();
    let watched = Arc::default();
    let config =
        settings().set_push_sender(events::sink(Arc::clone(&events), Arc::clone(&watched)));
    let first = async |connection: MultiplexedConnection| {
        let mut subscribes = connection.clone();
        // Resolves when the server has confirmed the subscription. No ticket is requested before
        // that, so no wake-up is missed.
        let subscribed = subscribes.subscribe(&channels);
        let checked = checked(server, &connection, &namespace, &channels, subscribed);
        let opened = async {
            match server.durability {
                Some(durability) => Opened::of(server, durability).await.map(Some),
                None => Ok(None),
            }
        };
        let ((), opened) = tokio::try_join!(checked, opened)?;
        Ok(opened)
    };
    let events = Arc::downgrade(&events);
    let (connection, driver, opened) = server.open(config, events, first).await?;
    let group = match opened {
        Some(opened) => {
            let key = layout::some_key(&namespace);
            let group = opened.beside(server, &driver, &channels, key, op_timeout);
            Some(Arc::new(group.await?))
        }
        None => None,
    };
    Ok(RedisConnection {
        watched,
        group,
        ..RedisConnection::new(connection, driver, channel)
    })
}

/// The sentinels that have named a master, and the master's address.
type NamedBy = (Arc<Sentinels>, Arc<str>);

/// Warns if a failover of this master may cost exclusion, unless the client has looked at its settings
/// before.
async fn tell_risk(
    connection: RedisConnection,
    (sentinels, master): NamedBy,
    events: Weak<EventSink>,
) {
    if sentinels.looked_at().contains(&master) {
        return;
    }
    // Another connection may have looked at the same time.
    if let Ok(risk) = config::risk(connection).await
        && sentinels.looked_at().insert(Arc::clone(&master))
        && let (Some(warning), Some(events)) = (risk, events.upgrade())
    {
        events.tell(News::Warning(format!("{master}: {warning}")));
    }
}

/// Repeats at this master the releases that an earlier one has acknowledged.
async fn release_again(connection: RedisConnection, (sentinels, master): NamedBy, timer: Timer) {
    let masters = || Some(|_: &Name| Some(Arc::clone(&master)));
    let send = async |batch| {
        let answers = tickets::release(connection.clone(), batch).await;
        answers.unwrap_or_default().into_iter().map(Some).collect()
    };
    sentinels.owed.repeat(masters, send, &timer).await;
}

/// Repeats at this master the changes of counters that an earlier one has acknowledged, until the
/// master has them, or they are too old. No caller waits for it, but a request about one of these
/// counters repeats the changes of this counter by itself: see `count`.
async fn change_again(connection: RedisConnection, (sentinels, master): NamedBy, timer: Timer) {
    let mut pauses = Pauses::default();
    let changed = &sentinels.changed;
    loop {
        let names = changed.names(|of, _| *of == *master);
        let repeat = async |name| match Repeating::begin(changed, &name, &master)? {
            Some(turn) => {
                let ask = |count| counted_here(connection.clone(), count);
                turn.repeat(ask).await
            }
            None => Ok(()),
        };
        if repeated_all(&names, repeat).await {
            return;
        }
        timer(pauses.draw()).await;
    }
}

/// Sends a request about a counter to this server.
async fn counted_here(
    connection: RedisConnection,
    count: Arc<Count>,
) -> Result<Counted, StoreError> {
    Ok(counters::count(connection, count).await?.counted)
}

/// [`counted_here`], at a master that another server may replace. First repeats the changes of this
/// counter that an earlier master has acknowledged.
async fn count_at_master(
    connection: RedisConnection,
    watch: Arc<Watch>,
    count: Arc<Count>,
) -> Result<Counted, StoreError> {
    let (changed, master) = (&watch.sentinels().changed, watch.address());
    if let Some(turn) = Repeating::begin(changed, &count.name, master)? {
        // This copy has no watch, because a task of the watch must not keep it alive.
        let here = RedisConnection {
            watch: None,
            ..connection.clone()
        };
        let ask = move |count| counted_here(here.clone(), count);
        turn.repeat_in_task(|task| watch.spawn(task), ask).await?;
    }
    let telling = changed.telling(&count);
    let answered = counters::count(connection, Arc::clone(&telling.count)).await?;
    telling.answered();
    changed.note(master, &count, &answered);
    Ok(answered.counted)
}

impl Connection for RedisConnection {
    fn enqueue(&self, request: Arc<Request>, patience: Duration) -> Answer<Enqueued> {
        Box::pin(tickets::enqueue(self.durable(patience), request))
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, patience: Duration) -> Answer<Vec<Renewed>> {
        Box::pin(tickets::renew(self.durable(patience), tickets))
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        let connection = self.clone();
        let Some(watch) = self.watch.clone() else {
            return Box::pin(tickets::release(connection, tickets));
        };
        Box::pin(async move {
            let answers = tickets::release(connection, tickets.clone()).await?;
            let owed = &watch.sentinels().owed;
            owed.acknowledged(watch.address(), tickets, &answers);
            Ok(answers)
        })
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        Box::pin(tickets::inspect(self.clone(), name))
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        Box::pin(tickets::list(self.clone(), listing))
    }

    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        Box::pin(tickets::ask_back(self.clone(), name, id, ask))
    }

    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        Box::pin(adopt::adopt(self.durable(Duration::MAX), adoption))
    }

    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        Box::pin(capacities::resize(self.durable(Duration::MAX), resize))
    }

    fn forget(&self, name: Name) -> Answer<()> {
        Box::pin(tickets::forget(self.clone(), name))
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        let connection = self.durable(Duration::MAX);
        match self.watch.clone().filter(|_| self.group.is_none()) {
            Some(watch) => Box::pin(count_at_master(connection, watch, count)),
            None => Box::pin(counted_here(connection, count)),
        }
    }

    fn watch(&self, name: Name) -> Answer<()> {
        Box::pin(counters::watch(self.clone(), name))
    }

    fn unwatch(&self, name: Name) -> Answer<()> {
        Box::pin(counters::unwatch(self.clone(), name))
    }

    fn check(&self) -> Answer<Vec<String>> {
        Box::pin(config::check(self.clone()))
    }
}
