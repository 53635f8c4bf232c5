//! The first requests of a connection to a server with locks.

use std::future::Future;
use std::sync::{Arc, Weak};

use futures_util::TryFutureExt as _;
use redis::RedisResult;
use redis::aio::MultiplexedConnection;

use super::connection::RedisConnection;
use super::dial::{Server, settings};
use super::{config, errors, layout, rights};
use crate::backend::{EventSink, StoreError};
use crate::name::Namespace;

/// Checks that the server accepts locks and that the user has the rights. Sends `also` together
/// with these requests, so that all take one round trip, and returns its answer.
pub(super) async fn checked<T>(
    server: &Server,
    connection: &MultiplexedConnection,
    namespace: &Namespace,
    channel: &str,
    also: impl Future<Output = RedisResult<T>>,
) -> Result<T, StoreError> {
    let keeps_locks = config::keeps_locks(connection.clone(), server);
    let missing = rights::missing(connection.clone(), namespace, channel);
    let failed = |error| server.failed(error);
    let (missing, also) = (missing.map_err(failed), also.map_err(failed));
    let ((), missing, also) = tokio::try_join!(keeps_locks, missing, also)?;
    if let Some(missing) = missing {
        return Err(server.mistake(format_args!(
            "the user may not run {missing}{}",
            errors::GUIDE
        )));
    }
    Ok(also)
}

/// Opens a connection that gets no wake-ups, to a server that accepts locks.
pub(super) async fn without_wake_ups(
    server: &Arc<Server>,
    namespace: &Namespace,
    channel: Arc<str>,
    events: Weak<EventSink>,
) -> Result<RedisConnection, StoreError> {
    let channels = layout::wake_channel(namespace, &channel);
    let first = async |connection: MultiplexedConnection| {
        let nothing = std::future::ready(Ok(()));
        checked(server, &connection, namespace, &channels, nothing).await
    };
    let (connection, driver, ()) = server.open(settings(), events, first).await?;
    Ok(RedisConnection::new(connection, driver, channel))
}
