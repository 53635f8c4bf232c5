//! Tickets of names that no other client uses at the moment. One transaction creates the parent
//! together with the ticket, and another transaction deletes both. So an uncontended lock costs two
//! requests, and leaves nothing at the store.
//!
//! - A transaction that has created the parent proves that there is no other ticket. So the new
//!   ticket is the first.
//! - A transaction deletes the parent only if no other ticket is there. Otherwise it changes
//!   nothing, and the ticket is deleted by itself.
//!
//! If either transaction fails because others use the name, this process remembers the parent. Then
//! it uses the name in the ordinary way as long as the parent exists. The server removes the parent
//! some time after its last ticket.

use std::sync::Arc;

use futures_util::future::Either;
use zookeeper_client::{CreateMode, Error as ZkError, MultiWriteError, MultiWriteResult};

use super::stands;
use crate::backend::zookeeper::errors::failed_after_create;
use crate::backend::zookeeper::layout::{Parent, Ticket};
use crate::backend::zookeeper::session::Session;
use crate::backend::zookeeper::standing::Standing;
use crate::backend::{Fault, StoreError};
use crate::request::{Id, Request};

/// Creates a ticket with its parent. Returns `None` if the parent exists, or cannot be created in
/// this way. In both cases nothing was created.
///
/// If the future is dropped, or no answer comes, the ticket may exist. Its id is [`Mine::Asked`].
///
/// [`Mine::Asked`]: crate::backend::zookeeper::standing::Mine::Asked
pub(super) async fn create(
    session: &Arc<Session>,
    request: &Request,
    parent: &Parent,
) -> Result<Option<Standing>, StoreError> {
    let mut created = send(session, request, parent).await;
    if let Err(MultiWriteError::OperationFailed {
        index: 0,
        source: ZkError::NoNode,
    }) = created
    {
        // The folder is missing, because this is the first name of the namespace. Both requests are
        // sent before the first reply is awaited.
        let container = CreateMode::Container.with_acls(session.acls);
        let folder = session.client.create(&parent.folder, b"", &container);
        let again = send(session, request, parent);
        let _ = folder.await; // if this failed, the other request fails too
        created = again.await;
    }
    let created = match created {
        Ok(created) => created,
        Err(error) => return not_created(session, request, error),
    };
    let Some((path, sequence, czxid)) = read(&created) else {
        return Err(unreadable()); // the next attempt finds the ticket
    };
    let czxid = match czxid {
        Some(czxid) => czxid,
        None => {
            let stat = session
                .client
                .check_stat(&path)
                .await
                .map_err(failed_after_create)?;
            stat.ok_or_else(unreadable)?.czxid
        }
    };
    stands(session, request, parent, sequence, path, czxid, true).map(Some)
}

fn unreadable() -> StoreError {
    StoreError::new(Fault::Unknown, "ZooKeeper: unreadable reply to a create")
}

/// Creates a ticket with its parent. The call itself sends the request, and the future waits for
/// the reply.
fn send(
    session: &Session,
    request: &Request,
    parent: &Parent,
) -> impl Future<Output = Result<Vec<MultiWriteResult>, MultiWriteError>> {
    let container = CreateMode::Container.with_acls(session.acls);
    let ticket = CreateMode::EphemeralSequential.with_acls(session.acls);
    let prefix = parent.prefix(request, session.tag());
    let mut writes = session.client.new_multi_writer();
    let added = writes.add_create(&parent.path, b"", &container);
    let added = added.and_then(|()| writes.add_create(&prefix, request.owner.as_bytes(), &ticket));
    let created = added.map(|()| writes.commit());
    async move { created?.await }
}

fn not_created(
    session: &Session,
    request: &Request,
    error: MultiWriteError,
) -> Result<Option<Standing>, StoreError> {
    match error {
        // The ordinary way would fail too.
        MultiWriteError::OperationFailed {
            source: ZkError::SessionExpired | ZkError::SessionMoved,
            ..
        }
        | MultiWriteError::RequestFailed { .. } => {
            Err(session.not_created(request.id, error.into()))
        }
        MultiWriteError::OperationFailed { .. } => Ok(None),
    }
}

/// The path, the sequence number and the creating transaction of the ticket. Some servers do not
/// report what a transaction has created, or report only a part of it (ZOOKEEPER-4026,
/// ZOOKEEPER-4667). One of the two nodes is enough, because one transaction created both.
fn read(created: &[MultiWriteResult]) -> Option<(String, i32, Option<i64>)> {
    let [
        MultiWriteResult::Create { stat: parent, .. },
        MultiWriteResult::Create { path, stat },
    ] = created
    else {
        return None;
    };
    let (_, node) = path.rsplit_once('/')?;
    let sequence = Ticket::parse(node)?.sequence;
    let told = [stat, parent].into_iter().find(|stat| !stat.is_invalid());
    Some((path.clone(), sequence, told.map(|stat| stat.czxid)))
}

/// Deletes a ticket. If the ticket was created together with its parent, the first request tries to
/// delete both. If that fails because there is another ticket, a second request deletes the ticket
/// alone. A task on the keeper's runtime sends both requests. So if the future of a release is
/// dropped after its first poll, both are sent all the same.
pub(super) fn delete(
    session: &Arc<Session>,
    id: Id,
    ticket: Standing,
) -> impl Future<Output = Result<(), ZkError>> {
    // If a ticket may have been made smaller, its path may be another one, so it is deleted without
    // its parent.
    let together = ticket.alone && ticket.shrinks_to.is_none();
    let deleted = match together {
        true => {
            let runtime = session.runtime.clone();
            Either::Left(runtime.spawn(together_or_not(Arc::clone(session), id, ticket)))
        }
        false => {
            if ticket.alone {
                session.state().is_not_alone(id);
            }
            Either::Right(session.client.delete(&ticket.path, None))
        }
    };
    async move {
        match deleted {
            // The task is cancelled only if its runtime ends. The session ends with the runtime,
            // and the ticket with the session.
            Either::Left(task) => task.await.unwrap_or(Err(ZkError::ClientClosed)),
            Either::Right(deleted) => deleted.await,
        }
    }
}

async fn together_or_not(session: Arc<Session>, id: Id, ticket: Standing) -> Result<(), ZkError> {
    let mut writes = session.client.new_multi_writer();
    writes.add_delete(&ticket.path, None)?;
    writes.add_delete(&ticket.parent, None)?;
    match writes.commit().await {
        Ok(_) => return Ok(()),
        // There is another ticket, or the user has no right to delete the parent.
        Err(MultiWriteError::OperationFailed { index: 1, .. }) => {}
        Err(error) => return Err(error.into()),
    }
    session.state().is_not_alone(id);
    session.client.delete(&ticket.path, None).await
}
