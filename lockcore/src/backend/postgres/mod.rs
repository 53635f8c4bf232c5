//! PostgreSQL: see [`guide::postgres`](crate::guide::postgres) for what it promises and needs.
//!
//! The verbs are functions of the schema in `schema/lockcore1.sql`. `durable` explains when a
//! request counts, and `waits` and `events` how a waiter is woken.

mod calls;
mod config;
mod counters;
mod dial;
mod durable;
#[cfg(feature = "postgres-tls")]
mod encrypted;
mod errors;
mod events;
mod link;
mod tickets;
mod upkeep;
mod waits;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::try_join;
use tokio::runtime::Handle;
use url::Url;

use super::table::Upkeep;
use super::{
    Adoption, Answer, Backend, Capability, Connection, Count, Counted, Departure, Enqueued,
    EventSink, Fault, Listing, Page, Released, Renewed, Resize, Resized, StoreError, TicketInfo,
};
use crate::error::Error;
use crate::name::Name;
use crate::request::{Id, Request};
use crate::tls::Tls;
use config::{Durability, Server, Wakeups};
use dial::{Line, Patience};
use durable::{Flushes, Warnings};
use errors::{POOLER, failed};
use events::{Ears, GREETING, channel};
use link::Link;
use waits::Waits;

/// Opens `postgres://…`.
pub(crate) fn open(url: &Url, _: &Tls) -> Result<Arc<dyn Backend>, Error> {
    Ok(of(Server::plain(url)?))
}

/// Opens `postgres+tls://…`.
#[cfg(feature = "postgres-tls")]
pub(crate) fn open_encrypted(url: &Url, tls: &Tls) -> Result<Arc<dyn Backend>, Error> {
    Ok(of(Server::encrypted(url, tls)?))
}

/// The key of a name in the tables.
pub(crate) fn key(name: &Name) -> String {
    super::table::key(name, calls::VERSION)
}

fn of(server: Server) -> Arc<dyn Backend> {
    Arc::new(Postgres(Arc::new(Store {
        server: Arc::new(server),
        waits: Arc::default(),
        newest: Mutex::default(),
    })))
}

/// A PostgreSQL server, or a primary with its standbys.
#[derive(Debug)]
struct Postgres(Arc<Store>);

#[derive(Debug)]
struct Store {
    server: Arc<Server>,
    waits: Arc<Waits>,
    /// That of the latest connection to one of several hosts: see [`dial::primary`].
    newest: Mutex<Option<dial::History>>,
}

/// A client's connection: one connection to the server for the verbs, and one for the flushes.
#[derive(Debug)]
struct PostgresConnection(Arc<Link>);

impl Backend for Postgres {
    fn capability(&self) -> Capability {
        Capability::new()
            // The server carries out the requests of a connection one by one, some 100 µs each.
            // Renewals wait behind these.
            .in_flight(250)
            .asks_back(true)
            .lists(true)
            .adopts(true)
            .resizes(true)
            .counters(true)
            .watches(self.0.server.wakeups == Wakeups::Listen)
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let store = Arc::clone(&self.0);
        Box::pin(async move {
            let link = connected(&store, events).await?;
            Ok(Arc::new(PostgresConnection(link)) as Arc<dyn Connection>)
        })
    }
}

/// Connects, makes the schema if it is missing, and checks that messages of the server arrive.
///
/// If the future is dropped, all that it has opened is dropped with it.
async fn connected(store: &Arc<Store>, events: EventSink) -> Result<Arc<Link>, StoreError> {
    let server = &store.server;
    let receiver = events.receiver();
    let patience = Patience {
        timer: events.timer(),
        time: events.op_timeout(),
    };
    let ears = Arc::new(Ears::new(receiver, Arc::clone(&store.waits)));
    let warnings = Warnings::default();
    let events = Arc::new(events);
    let main = async {
        let hears = || ears.hear(&events, &warnings);
        let line = dial::primary(server, hears, &patience, &store.newest).await?;
        dial::find_schema(&line).await?;
        dial::end_waits(&line, patience.time).await;
        Ok(line)
    };
    let (line, flushes) = match server.wakeups {
        Wakeups::Look => (main.await?, None),
        Wakeups::Listen => listening(server, main, &ears, &patience).await?,
    };
    drop(events);
    let upkeep = Arc::new(Upkeep::default());
    if ears.is_listening() {
        upkeep.begin();
    }
    let (calls, heard) = (Arc::clone(&line.calls), Arc::clone(&ears));
    let timer = Arc::clone(&patience.timer);
    let keeps_up = tokio::spawn(upkeep::keep_up(calls, heard, Arc::clone(&upkeep), timer));
    Ok(Arc::new(Link {
        server: Arc::clone(server),
        patience,
        line,
        flushes,
        warnings,
        durability: server.durability,
        receiver,
        waits: Arc::clone(&store.waits),
        ears,
        upkeep,
        keeps_up: keeps_up.abort_handle(),
        runtime: Handle::current(),
    }))
}

/// Opens a second connection beside `main`, and sets both up. Without flushes, the second one only
/// greets.
async fn listening(
    server: &Arc<Server>,
    main: impl Future<Output = Result<Line, StoreError>>,
    ears: &Ears,
    patience: &Patience,
) -> Result<(Line, Option<Flushes>), StoreError> {
    let warnings = Warnings::default();
    let beside = |host: &(String, u16)| dial::dial(server, host.clone(), warnings.hear());
    let (line, beside) = match server.hosts.as_slice() {
        [host] => try_join(main, beside(host)).await?,
        _ => {
            let line = main.await?;
            let beside = beside(&line.host).await?;
            (line, beside)
        }
    };
    // The address may have moved in between.
    if beside.server_began != line.server_began {
        return Err(StoreError::new(
            Fault::Retry,
            "PostgreSQL: two connections to this address have reached two servers; name an \
             address that always leads to the primary",
        ));
    }
    greet(&line, &beside, ears).await?;
    // The calls that are used most.
    let prepared = |call| line.calls.prepared(call);
    let prepared = try_join(
        prepared(&calls::ENQUEUE),
        try_join(prepared(&calls::RELEASE), prepared(&calls::RENEW)),
    );
    let main = try_join(dial::set_up(&line), prepared);
    try_join(main, dial::set_up(&beside)).await?;
    let flushes = (server.durability != Durability::Off).then(|| {
        let (server, patience) = (Arc::clone(server), patience.clone());
        Flushes::begin(server, beside, warnings, patience, line.end())
    });
    Ok((line, flushes))
}

/// Checks that the messages of the server arrive on this connection. Behind a pooler that gives a
/// connection of the server to another client after each transaction, the messages go astray
/// without an error. There a message that this connection sends to itself could still arrive, so
/// the other one sends it.
///
/// Nothing is set up before this has passed, because it would stay at a pooler. What is listened to
/// would stay too, so the processes are looked at before.
///
/// When the message is committed, the server has told the process of the other connection. That
/// process sends it before its next answer.
async fn greet(line: &Line, beside: &Line, ears: &Ears) -> Result<(), StoreError> {
    let pooled = || {
        let text = format!("PostgreSQL: notifications do not arrive: {POOLER}");
        StoreError::new(Fault::Config, text)
    };
    if dial::shares_processes(line, beside).await? {
        return Err(pooled());
    }
    let channel = channel(ears.receiver());
    let client = line.calls.client();
    let listens = client.batch_execute(&format!("LISTEN \"{channel}\"")).await;
    listens.map_err(failed)?;
    ears.begun();
    let greeted = (beside.calls.client())
        .batch_execute(&format!("NOTIFY \"{channel}\", '{GREETING}'"))
        .await;
    greeted.map_err(failed)?;
    client.batch_execute("SELECT 1").await.map_err(failed)?;
    if !ears.is_greeted() {
        return Err(pooled());
    }
    // Tickets may wait that were enqueued on an earlier connection of this runtime.
    ears.stop(client);
    Ok(())
}

impl Connection for PostgresConnection {
    /// An enqueue is two requests, one after the other. The task that polls the future may be late,
    /// and gives up when it finds no answer. So the runtime of the connection does both. If the
    /// future is dropped, that runtime goes on, as a server would.
    ///
    /// The first poll sends the first request. Otherwise it could come to the server long after the
    /// future is dropped, when that runtime is busy.
    fn enqueue(&self, request: Arc<Request>, _: Duration) -> Answer<Enqueued> {
        let link = Arc::clone(&self.0);
        Box::pin(async move {
            let runtime = link.runtime.clone();
            let mut asked = Box::pin(tickets::enqueue(link, request));
            if let Some(answer) = (&mut asked).now_or_never() {
                return answer;
            }
            let asked = runtime.spawn(asked);
            let ended =
                |_| StoreError::broken("PostgreSQL: the runtime of the connection has ended");
            asked.await.map_err(ended)?
        })
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, _: Duration) -> Answer<Vec<Renewed>> {
        Box::pin(tickets::renew(Arc::clone(&self.0), tickets))
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        Box::pin(tickets::release(Arc::clone(&self.0), tickets))
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        Box::pin(tickets::inspect(Arc::clone(&self.0), name))
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        Box::pin(tickets::list(Arc::clone(&self.0), listing))
    }

    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        Box::pin(tickets::ask_back(Arc::clone(&self.0), name, id, ask))
    }

    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        Box::pin(tickets::adopt(Arc::clone(&self.0), adoption))
    }

    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        Box::pin(tickets::resize(Arc::clone(&self.0), resize))
    }

    fn forget(&self, name: Name) -> Answer<()> {
        Box::pin(tickets::forget(Arc::clone(&self.0), name))
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        Box::pin(counters::count(Arc::clone(&self.0), count))
    }

    fn watch(&self, name: Name) -> Answer<()> {
        Box::pin(counters::watch(Arc::clone(&self.0), name))
    }

    fn unwatch(&self, name: Name) -> Answer<()> {
        Box::pin(counters::unwatch(Arc::clone(&self.0), name))
    }

    fn check(&self) -> Answer<Vec<String>> {
        let link = Arc::clone(&self.0);
        Box::pin(async move {
            let mut warnings = config::check(link.calls(), link.durability).await?;
            let (server, patience) = (&link.server, &link.patience);
            warnings.extend(dial::two_primaries(server, patience).await);
            Ok(warnings)
        })
    }
}
