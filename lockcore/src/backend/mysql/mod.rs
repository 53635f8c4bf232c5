//! MySQL and MariaDB: see [`guide::mysql`](crate::guide::mysql) for what it promises and needs.
//!
//! The verbs are procedures of the file `schema/lockcore1.sql`: one call each, and so one
//! transaction. They lock the row of their name before they read anything else.
//!
//! - **Durability.** A commit lets go of the row before it waits for the disk, unless the server
//!   writes a binary log. So others may see a verb before the disk has it. But each verb is answered
//!   only when the disk has it and everything that was committed before
//!   (`innodb_flush_log_at_trx_commit = 1`), because the log is written in order. So a crash leaves
//!   a prefix that has every ticket that a client believes in. What can be missing are requests
//!   without an answer, and a grant that a look has seen, together with the release that made it.
//!   Then the released ticket is back, in front of the one that believes that it holds, and nobody
//!   renews it. The one behind goes on: its renewals answer that it waits, and such an answer keeps
//!   the lease of a holder. Nobody passes it, because nobody passes the one in front.
//! - **Reads do not wait for the disk.** A read of a counter, a capacity or a line may show a change
//!   whose commit is not on the disk yet, and a crash in this moment takes it back. The client that
//!   made the change has no answer yet, and repeats it with the same id. Only if it dies too, the
//!   change is gone that somebody has read. A change of a counter that finds that an earlier attempt
//!   has made it is such a read too. A change of a capacity that finds this writes, and so waits.
//! - **Isolation.** Each verb sets READ COMMITTED for its own transaction, so no setting of the
//!   server or of a proxy matters. In REPEATABLE READ the snapshot would be taken by the first plain
//!   read, which stands behind the lock of the name, so it would be as new. But the lock of a row
//!   that is missing would also lock the gap, and two clients that make a name would be a deadlock.
//! - **Deadlocks.** A verb locks rows of one name only behind the row of this name, and when it has
//!   locked a name, it waits for no other one. So there is no circle. If somebody else locks
//!   rows of the tables and the server finds a circle, it rolls the verb back, which is then made
//!   again.
//! - **Waiting.** Somebody else may have locked the row of a name. A call for this name waits for a
//!   second, or for less time than an operation may take, and then fails. A call for several names
//!   skips the name. It also skips a name if somebody else has locked a ticket of it that the call is
//!   to change: then it rolls back what it has done for this name. Other calls get another connection,
//!   so neither row holds up another name. A client whose caller has given up leaves a mark for a call
//!   that comes later: the mark lives for a minute.
//! - **A connection that is cut in the middle of a call** takes nothing back: the server goes on
//!   until it answers. A call is one transaction, so it is carried out or not. The core asks again
//!   with the same id.

mod calls;
mod config;
mod counters;
mod dial;
#[cfg(feature = "mysql-tls")]
mod encrypted;
mod errors;
mod link;
mod login;
mod looks;
mod settled;
mod tickets;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use url::Url;

use super::{
    Adoption, Answer, Backend, Capability, Connection, Count, Counted, Departure, Enqueued,
    EventSink, Listing, Page, Released, Renewed, Resize, Resized, StoreError, TicketInfo,
};
use crate::error::Error;
use crate::name::Name;
use crate::request::{Id, Request};
use crate::tls::Tls;
use config::Server;
use link::{Link, Store};

/// Opens `mysql://…`.
pub(crate) fn open(url: &Url, _: &Tls) -> Result<Arc<dyn Backend>, Error> {
    Ok(of(Server::plain(url)?))
}

/// Opens `mysql+tls://…`.
#[cfg(feature = "mysql-tls")]
pub(crate) fn open_encrypted(url: &Url, tls: &Tls) -> Result<Arc<dyn Backend>, Error> {
    Ok(of(Server::encrypted(url, tls)?))
}

fn of(server: Server) -> Arc<dyn Backend> {
    Arc::new(Mysql(Arc::new(Store::new(server))))
}

/// A MySQL or MariaDB server.
#[derive(Debug)]
struct Mysql(Arc<Store>);

/// The connections of one runtime of a client.
#[derive(Debug)]
struct MysqlConnection(Link);

impl Backend for Mysql {
    fn capability(&self) -> Capability {
        Capability::new()
            // Four connections carry out one call each, and each waits for the disk. Renewals wait
            // behind the calls.
            .in_flight(64)
            .asks_back(true)
            .lists(true)
            .adopts(true)
            .resizes(true)
            .counters(true)
    }

    fn silence(&self) -> &'static str {
        "; another server than MySQL at this port is silent too: check it, 3306 is usual"
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let store = Arc::clone(&self.0);
        Box::pin(async move {
            let link = connected(&store, events).await?;
            Ok(Arc::new(MysqlConnection(link)) as Arc<dyn Connection>)
        })
    }
}

/// Connects, and makes the tables and procedures if they are missing.
///
/// If the future is dropped, all that it has opened is dropped with it, but not a connection that
/// makes the procedures: this goes on.
async fn connected(store: &Arc<Store>, events: EventSink) -> Result<Link, StoreError> {
    let server = &store.server;
    let mut wire = dial::dial(server, events.op_timeout()).await?;
    let settings = dial::settings(&mut wire).await?;
    dial::check_server(&server.place(), &settings)?;
    let wire = dial::find_schema(wire, events.op_timeout()).await?;
    let mut link = Link::begin(store, wire, settings, events);
    link.spawn(looks::look);
    link.spawn(looks::sweep);
    Ok(link)
}

impl MysqlConnection {
    fn link(&self) -> Arc<link::Inner> {
        Arc::clone(&self.0.inner)
    }
}

impl Connection for MysqlConnection {
    fn enqueue(&self, request: Arc<Request>, _: Duration) -> Answer<Enqueued> {
        Box::pin(tickets::enqueue(self.link(), request))
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, patience: Duration) -> Answer<Vec<Renewed>> {
        Box::pin(tickets::renew(self.link(), tickets, patience))
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        Box::pin(tickets::release(self.link(), tickets))
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        Box::pin(tickets::inspect(self.link(), name))
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        Box::pin(tickets::list(self.link(), listing))
    }

    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        Box::pin(tickets::ask_back(self.link(), name, id, ask))
    }

    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        Box::pin(tickets::adopt(self.link(), adoption))
    }

    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        Box::pin(tickets::resize(self.link(), resize))
    }

    fn forget(&self, name: Name) -> Answer<()> {
        Box::pin(tickets::forget(self.link(), name))
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        Box::pin(counters::count(self.link(), count))
    }

    fn check(&self) -> Answer<Vec<String>> {
        let link = self.link();
        Box::pin(async move { dial::check(&link.store().server, link.op_timeout).await })
    }
}
