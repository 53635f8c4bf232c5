//! A quorum of independent Redis servers: a store over stores. See
//! [`guide::redis_quorum`](crate::guide::redis_quorum) for what it promises and needs.
//!
//! Each node is a single Redis server, and runs the same scripts as a store of one server. A ticket
//! counts if a majority of the nodes has it. A ticket of a semaphore needs more nodes than a
//! majority.
//!
//! No request waits at a node. A client that gets no majority releases the tickets that it got, and
//! the core sends the request again later. The counting is in `ballot` and `tally`, the requests
//! are in `tickets`, and the connections to the nodes are in `nodes`. A node that has lost a ticket
//! gets it again in `repair`.

mod asked;
mod background;
mod ballot;
mod config;
mod late;
mod node;
mod nodes;
mod proposal;
mod repair;
mod reported;
mod tally;
mod tickets;

use std::sync::Arc;
use std::time::Duration;

use url::Url;

use super::dial::Server;
use super::owed::Owed;
use crate::backend::{
    Answer, Backend, BoxFuture, Capability, Connection, Departure, Enqueued, EventSink, Released,
    Renewed, TicketInfo,
};
use crate::error::Error;
use crate::name::Name;
use crate::request::Request;
use crate::tls::Tls;

use late::Late;
use node::LONGEST_TTL;
use nodes::Links;
use reported::Reported;

/// Opens `redlock://…` and `redlock+tls://…`.
pub(crate) fn open(url: &Url, tls: &Tls) -> Result<Arc<dyn Backend>, Error> {
    Ok(Arc::new(Quorum::of(config::servers(url, tls)?)))
}

/// The nodes that the URL names, and what all connections of a client share.
#[derive(Debug)]
struct Quorum {
    servers: Arc<[Arc<Server>]>,
    owed: Arc<[Owed]>,
    reported: Arc<[Reported]>,
    late: Late,
}

impl Quorum {
    fn of(servers: Vec<Server>) -> Self {
        Self {
            owed: servers.iter().map(|_| Owed::default()).collect(),
            reported: servers.iter().map(|_| Reported::default()).collect(),
            servers: servers.into_iter().map(Arc::new).collect(),
            late: Late::default(),
        }
    }
}

impl Backend for Quorum {
    fn capability(&self) -> Capability {
        Capability::new()
            .queues(false)
            .pushes(false)
            .longest_ttl(LONGEST_TTL)
    }

    fn silence(&self) -> &'static str {
        match self.servers.iter().any(|it| it.is_encrypted()) {
            true => {
                "; a majority of the nodes must answer; servers without TLS are silent: redlock:// is for them"
            }
            false => "; a majority of the nodes must answer",
        }
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let (servers, owed) = (Arc::clone(&self.servers), Arc::clone(&self.owed));
        let (reported, late) = (Arc::clone(&self.reported), self.late.clone());
        Box::pin(async move {
            let links = Arc::new(Links::open(servers, (owed, reported), events).await?);
            Ok(Arc::new(QuorumConnection { links, late }) as Arc<dyn Connection>)
        })
    }
}

/// Connections to a majority of the nodes, or more.
#[derive(Debug)]
struct QuorumConnection {
    links: Arc<Links>,
    late: Late,
}

impl Connection for QuorumConnection {
    fn enqueue(&self, request: Arc<Request>, patience: Duration) -> Answer<Enqueued> {
        let (links, late) = (Arc::clone(&self.links), self.late.clone());
        Box::pin(tickets::enqueue(links, late, request, patience))
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, _patience: Duration) -> Answer<Vec<Renewed>> {
        let (links, late) = (Arc::clone(&self.links), self.late.clone());
        Box::pin(tickets::renew(links, late, tickets))
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        Box::pin(tickets::release(
            Arc::clone(&self.links),
            self.late.clone(),
            tickets,
        ))
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        Box::pin(tickets::inspect(Arc::clone(&self.links), name))
    }

    fn forget(&self, name: Name) -> Answer<()> {
        Box::pin(tickets::forget(Arc::clone(&self.links), name))
    }

    fn check(&self) -> Answer<Vec<String>> {
        Box::pin(config::check(Arc::clone(&self.links)))
    }

    fn close(self: Arc<Self>) -> BoxFuture<()> {
        Box::pin(async move { self.links.close().await })
    }
}
