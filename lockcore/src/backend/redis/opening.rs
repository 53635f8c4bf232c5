//! The first requests of a connection to a server with locks.

use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Weak};

use futures_util::TryFutureExt as _;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, RedisResult};
use tokio::sync::oneshot;

use super::connection::RedisConnection;
use super::dial::Server;
use super::{config, errors, layout, rights, siblings};
use crate::backend::{EventSink, StoreError};
use crate::name::Namespace;

/// The settings of all connections to servers with locks.
pub(super) fn settings() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        // The core has its own deadlines, on the lease clock. So the driver needs none. Its timers
        // depend on the user's runtime, where they may be paused or off.
        .set_connection_timeout(None)
        .set_response_timeout(None)
        // This many requests can wait until they are written. The default of 50 is less than the
        // number of tasks in one busy process.
        .set_pipeline_buffer_size(1024)
}

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
    if !missing.is_empty() {
        let missing = missing.join(", ").to_lowercase();
        return Err(server.mistake(format_args!(
            "the user may not run {missing}{}",
            errors::GUIDE
        )));
    }
    Ok(also)
}

/// Opens a connection that gets no wake-ups, to a server that accepts locks. The second part of the
/// result resolves when the connection ends.
pub(super) async fn without_wake_ups(
    server: &Server,
    namespace: &Namespace,
    channel: Arc<str>,
    events: Weak<EventSink>,
) -> Result<(RedisConnection, oneshot::Receiver<()>), StoreError> {
    let (open, closed) = oneshot::channel::<()>();
    // The driver drops this when the connection ends.
    let sink = move |_| {
        let _goes_with_the_sink = &open;
        Ok::<_, Infallible>(())
    };
    let config = settings().set_push_sender(sink);
    let dialed = server.siblings.dial();
    let (connection, driver) = server.connect(config).await?;
    let channels = layout::wake_channel(namespace, &channel);
    let nothing = std::future::ready(Ok(()));
    let checked = checked(server, &connection, namespace, &channels, nothing);
    let run_id = siblings::run_id(connection.clone());
    let ((), run_id) = tokio::try_join!(checked, run_id)?;
    if let Some(run_id) = run_id {
        let dialed = (dialed, server.info.addr().to_string());
        (server.siblings).join(dialed, run_id, driver.end(), events)?;
    }
    let connection = RedisConnection {
        connection,
        channel,
        watched: Arc::default(),
        driver: Arc::new(driver),
        watch: None,
        group: None,
        hop: None,
        wakes: false,
    };
    Ok((connection, closed))
}

/// Connects once more, and checks that the address still leads to the server of the open
/// connections. Otherwise it ends them.
///
/// # Errors
///
/// `Retry` if the address leads to another server.
pub(super) async fn compared(server: &Server) -> Result<(), StoreError> {
    let (connection, _driver) = server.connect(settings()).await?;
    match siblings::run_id(connection).await? {
        Some(run_id) => (server.siblings).compare(&server.info.addr().to_string(), &run_id),
        None => Ok(()),
    }
}
