//! The verbs, and what their failures mean. Requests go out when the library's method is called,
//! one after the other on one connection, and the server takes them in that order; what is awaited
//! is only the reply. So what was sent stays sent when a future is dropped, and the state under the
//! mutex says of every id how far it has come:
//!
//! - not there: nothing was sent, or it is known that nothing is at the store;
//! - `Mine::Asked`: a create was sent; dropped, or the reply lost, it may stand. The same id asked
//!   for again looks for it first; its release looks for it by id;
//! - `Mine::Standing`: it stands under a path that we know, until its release is acknowledged.

mod enqueue;
mod release;
mod renew;

use std::sync::Arc;
use std::time::Duration;

use zookeeper_client::{Error as ZkError, MultiReadResult};

pub(super) use enqueue::enqueue;
pub(super) use release::release;
pub(super) use renew::renew;

use super::errors::failed;
use super::layout::{self, Parent};
use super::session::Session;
use crate::backend::{Fault, Place, StoreError};
use crate::clock::Clock;
use crate::name::Name;
use crate::request::Request;

/// Nodes that are read in one request; the path of each has two kilobytes at most.
const READS: usize = 250;

pub(super) async fn inspect(session: Arc<Session>, name: Name) -> Result<Vec<Place>, StoreError> {
    session.usable()?;
    let parent = Parent::of(&name);
    let children = match session.client.list_children(&parent.path).await {
        Ok(children) => children,
        Err(ZkError::NoNode) => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let line = layout::in_line(&children);
    if line.is_empty() {
        return Ok(Vec::new());
    }
    // Sent together, in requests that stay far below the megabyte for which a server ends the connection.
    let mut reading = Vec::new();
    for page in line.chunks(READS) {
        let mut reads = session.client.new_multi_reader();
        for ticket in page {
            reads
                .add_get_data(&parent.child(&ticket.node))
                .map_err(failed)?;
        }
        reading.push(reads.commit());
    }
    let mut read = Vec::with_capacity(line.len());
    for page in reading {
        read.extend(page.await.map_err(failed)?);
    }
    // As the line was: of what is gone meanwhile, or has another node, nobody else is shown to hold for it.
    let holders = layout::holders(&line);
    let places = line.iter().zip(read).enumerate();
    let places = places.filter_map(|(at, (ticket, read))| {
        let MultiReadResult::Data { data, stat } = read else {
            return None;
        };
        let (owner, number) = layout::owner_and_number(&data, stat.czxid.unsigned_abs());
        Some(Place::new(
            number,
            at < holders,
            ticket.permits,
            ticket.capacity,
            // The servers do not tell how long a session has left; this is the most.
            ticket.ttl,
            owner,
        ))
    });
    Ok(places.collect())
}

/// The parent is a container, which the server removes some time after its last ticket; this does
/// it now.
pub(super) async fn forget(session: Arc<Session>, name: Name) -> Result<(), StoreError> {
    session.usable()?;
    let parent = Parent::of(&name);
    session.state().forget_parent(&parent.path);
    match session.client.delete(&parent.path, None).await {
        Ok(()) | Err(ZkError::NoNode | ZkError::NotEmpty) => Ok(()),
        Err(error) => Err(failed(error)),
    }
}

/// Asks for what the store needs beyond the oldest protocol: several reads in one request, which
/// came with the watches that wake waiters (3.6).
pub(super) async fn check(session: Arc<Session>) -> Result<Vec<String>, StoreError> {
    let mut reads = session.client.new_multi_reader();
    reads.add_get_children("/").map_err(failed)?;
    match reads.commit().await {
        Ok(_) => {}
        Err(ZkError::Unimplemented) => {
            return Err(StoreError::new(
                Fault::Config,
                "ZooKeeper: the server is too old; 3.6 or later is needed",
            ));
        }
        Err(error) => return Err(failed(error)),
    }
    let (asked, given) = (session.asked, session.timeout);
    let mut warnings = Vec::new();
    if given < asked {
        warnings.push(format!(
            "asked for a session of {asked:?} (LOCK_TTL), and the server gave {given:?}; longer ttls are refused. \
             Raise the server's maxSessionTimeout"
        ));
    }
    if given > asked {
        warnings.push(format!(
            "asked for a session of {asked:?} (LOCK_TTL), and the server gave {given:?}: that is how long a lock \
             stays taken when its holder dies. Lower the server's minSessionTimeout"
        ));
    }
    Ok(warnings)
}

/// For how long a lease is valid from now on: its ttl, as long as the session certainly lives. The
/// core counts it from a moment before this one, so that the deadline is earlier, if anything.
fn valid_for(session: &Session, request: &Request) -> Duration {
    valid_for_in(&session.state().proof, request)
}

fn valid_for_in(proof: &super::session::Proof, request: &Request) -> Duration {
    proof.lives_for(Clock::BOOT.now()).min(request.ttl)
}
