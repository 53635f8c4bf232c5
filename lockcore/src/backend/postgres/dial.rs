//! Opens a connection to the server: a socket, the protocol of the driver over it, and the session
//! that the verbs need.

use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::AbortHandle;
use tokio_postgres::{AsyncMessage, NoTls, SimpleQueryMessage, SimpleQueryRow};

use super::calls::{self, Calls, FUNCTIONS, SCHEMA};
use super::config::{Server, Wakeups};
#[cfg(feature = "postgres-tls")]
use super::encrypted;
use super::errors::{GUIDE, failed, not_connected};
use crate::backend::events::Timer;
use crate::backend::socket::{Stream, socket};
use crate::backend::{BoxFuture, Fault, StoreError};

/// An open connection. Its driver ends when this is dropped.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) calls: Arc<Calls>,
    driver: AbortHandle,
    /// Which of the hosts it leads to.
    pub(super) host: (String, u16),
    /// When the server was started, as it says. Two servers hardly have the same time.
    pub(super) server_began: String,
    /// The number of the process that serves this connection at the server.
    process: String,
    /// Known only if the URL names several hosts.
    history: Option<History>,
}

/// Which of the servers with the same data was promoted last.
#[derive(Clone, Debug)]
pub(super) struct History {
    /// A standby has the same as its primary.
    system: String,
    /// A standby that is promoted begins a later timeline.
    timeline: u32,
}

impl History {
    fn is_before(&self, other: &Self) -> bool {
        self.system == other.system && self.timeline < other.timeline
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Line {
    /// Whether the other server was promoted later than this one.
    fn is_replaced_by(&self, other: &Option<History>) -> bool {
        (self.history.as_ref().zip(other.as_ref())).is_some_and(|(own, other)| own.is_before(other))
    }

    /// Ends the driver, and so the connection.
    pub(super) fn end(&self) -> AbortHandle {
        self.driver.clone()
    }
}

/// How long the client waits for the server.
#[derive(Clone)]
pub(super) struct Patience {
    pub(super) timer: Timer,
    /// For one operation.
    pub(super) time: Duration,
}

impl Patience {
    pub(super) fn end(&self) -> BoxFuture<()> {
        (self.timer)(self.time)
    }

    /// For the other hosts, when one has answered. They answer soon, or are out of reach.
    fn grace(&self) -> BoxFuture<()> {
        (self.timer)(self.time / 4)
    }
}

impl fmt::Debug for Patience {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.time.fmt(f)
    }
}

/// What the driver does with messages that answer no request. It is dropped when the connection
/// ends.
pub(super) type Hears = Box<dyn FnMut(AsyncMessage) + Send>;

/// Connects to the server that has the locks: all hosts are tried at once. When one is found that is
/// no standby, the others have a moment to answer.
///
/// If two servers take writes, one was promoted and the other was not stopped. The one that was
/// promoted has the later timeline, and is taken. A client that has seen a later timeline takes no
/// server of an earlier one any more.
pub(super) async fn primary(
    server: &Server,
    mut hears: impl FnMut() -> Hears,
    patience: &Patience,
    newest: &Mutex<Option<History>>,
) -> Result<Line, StoreError> {
    let mut tries: FuturesUnordered<_> = (server.hosts.iter())
        .map(|host| dial(server, host.clone(), hears()))
        .collect();
    let mut failure: Option<StoreError> = None;
    let found = loop {
        match (tries.next().await, &failure) {
            (Some(Ok(line)), _) => break Some(line),
            // A mistake that a person must correct is told, if no host can be used.
            (Some(Err(_)), Some(told)) if told.fault() == Fault::Config => {}
            (Some(Err(error)), _) => failure = Some(error),
            (None, _) => break None,
        }
    };
    // A URL names at least one host.
    let none = || StoreError::new(Fault::Config, "the URL names no host");
    let mut line = found.ok_or_else(|| failure.unwrap_or_else(none))?;
    if !tries.is_empty() {
        let mut grace = patience.grace();
        while let Either::Left((Some(other), _)) = select(tries.next(), &mut grace).await {
            line = match other {
                Ok(other) if line.is_replaced_by(&other.history) => other,
                _ => line,
            };
        }
    }
    let mut newest = newest.lock().unwrap_or_else(PoisonError::into_inner);
    if line.is_replaced_by(&newest) {
        let (host, port) = &line.host;
        return Err(StoreError::new(
            Fault::Retry,
            format!(
                "{host}:{port} takes writes although another server was promoted in its place; \
                 stop it, or let it follow the other. If the other was given up, restart the \
                 clients"
            ),
        ));
    }
    if line.history.is_some() {
        newest.clone_from(&line.history);
    }
    Ok(line)
}

/// Warns if more than one of several hosts take writes, of those that answer soon.
pub(super) async fn two_primaries(server: &Server, patience: &Patience) -> Option<String> {
    let mut grace = patience.grace();
    let hosts = server.hosts.iter().filter(|_| server.hosts.len() > 1);
    let mut tries: FuturesUnordered<_> = hosts
        .map(|host| dial(server, host.clone(), Box::new(drop)))
        .collect();
    let mut primaries: Vec<Line> = Vec::new();
    while let Either::Left((Some(tried), _)) = select(tries.next(), &mut grace).await {
        // Two names may lead to one server.
        let known = |line: &Line| {
            primaries
                .iter()
                .any(|other| other.server_began == line.server_began)
        };
        let new = tried.ok().filter(|line| !known(line));
        primaries.extend(new);
    }
    (primaries.len() > 1).then(|| {
        let names = primaries
            .iter()
            .map(|line| format!("{}:{}", line.host.0, line.host.1));
        let names: Vec<_> = names.collect();
        format!(
            "{} take writes at the same time, so two clients may hold the same lock. Stop all but \
             the one that was promoted last, or let them follow it",
            names.join(" and ")
        )
    })
}

/// About the server and the process that serves this connection there.
const SERVER: &str = "SELECT pg_is_in_recovery(), current_setting('server_version_num'), \
    pg_postmaster_start_time(), pg_backend_pid()";

const OLDEST: u32 = 130_000;

/// Connects to one host, and checks that it is no standby. Changes nothing on the connection, which
/// may be one of a pooler.
pub(super) async fn dial(
    server: &Server,
    host: (String, u16),
    mut hears: Hears,
) -> Result<Line, StoreError> {
    let place = format!("{}:{}", host.0, host.1);
    let because =
        |fault, text: String| StoreError::new(fault, format!("cannot connect to {place}: {text}"));
    let not_connected = |error| match server.mistake(&error) {
        Some(mistake) => because(Fault::Config, mistake),
        None => not_connected(&place, error),
    };
    let stream = stream(server, &host).await;
    let stream = stream.map_err(|(fault, text)| because(fault, text))?;
    let opened = server.login.connect_raw(stream, NoTls).await;
    let (client, mut connection) = opened.map_err(not_connected)?;
    let driver = tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|context| connection.poll_message(context)).await {
            hears(message);
        }
    });
    let mut line = Line {
        calls: Arc::new(Calls::new(client, server.wakeups == Wakeups::Look)),
        driver: driver.abort_handle(),
        host,
        server_began: String::new(),
        process: String::new(),
        history: None,
    };
    let told = line.calls.client().simple_query(SERVER).await;
    let told = told.map_err(not_connected)?;
    let row = row(&told);
    let column = |at| row.and_then(|row| row.get(at)).unwrap_or_default();
    if column(1).parse().is_ok_and(|version: u32| version < OLDEST) {
        return Err(because(
            Fault::Config,
            "this PostgreSQL is too old; update it to 13 or later".to_owned(),
        ));
    }
    if column(0) == "t" {
        // Not a mistake: after a failover, the address may lead to the other server, or this one
        // may be promoted.
        let text = "it is a standby, which takes no locks; name the server that it follows";
        return Err(because(Fault::Retry, text.to_owned()));
    }
    column(2).clone_into(&mut line.server_began);
    column(3).clone_into(&mut line.process);
    if server.hosts.len() > 1 {
        line.history = history(&line).await;
    }
    Ok(line)
}

/// The first row of an answer.
fn row(told: &[SimpleQueryMessage]) -> Option<&SimpleQueryRow> {
    told.iter().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    })
}

/// `None` if this user may not read it, or if the connection has ended. Of the name of a file of the
/// log, the first eight digits are the timeline.
async fn history(line: &Line) -> Option<History> {
    let text = "SELECT system_identifier, left(pg_walfile_name(pg_current_wal_lsn()), 8) \
        FROM pg_control_system()";
    let told = line.calls.client().simple_query(text).await.ok()?;
    let row = row(&told)?;
    Some(History {
        system: row.get(0)?.to_owned(),
        timeline: u32::from_str_radix(row.get(1)?, 16).ok()?,
    })
}

/// Whether a pooler gives the connections of the server to others after each transaction. It may
/// say no although there is one.
///
/// Each line is served by one process, and by another than the other line. A pooler usually hands
/// out the connection that it got back last. If nobody else uses it in this moment, both queries
/// find the same process.
pub(super) async fn shares_processes(line: &Line, other: &Line) -> Result<bool, StoreError> {
    for line in [line, other] {
        let told = line.calls.client().simple_query("SELECT pg_backend_pid()");
        let told = told.await.map_err(failed)?;
        if row(&told).and_then(|row| row.get(0)) != Some(&*line.process) {
            return Ok(true);
        }
    }
    Ok(line.process == other.process)
}

/// The settings of a connection that no other client uses. The isolation is that which the verbs
/// need, whatever the default of the database is. The core has its own deadlines. A timeout of the
/// server would end the wait for a standby, and say that the request was carried out, or end a
/// connection that is not used for a while. Not every version has all of these timeouts.
///
/// The queries of the verbs find their few rows by an index, one row after the other. Just after a
/// vacuum the tables are nearly empty for the planner. It would then prefer plans that read all rows
/// of a line, and sort them. The session keeps these plans while removed rows fill the table again.
/// Where a table must be read, this makes the plan so dear for the planner that it would compile it,
/// which takes longer than everything else (`jit`).
const SESSION: &str = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED; \
    SET synchronous_commit = off; SET client_min_messages = warning; \
    SET enable_seqscan = off; SET enable_bitmapscan = off; SET jit = off; \
    SELECT set_config(name, '0', false) FROM pg_settings WHERE name IN \
    ('statement_timeout', 'lock_timeout', 'idle_session_timeout', 'transaction_timeout')";

pub(super) async fn set_up(line: &Line) -> Result<(), StoreError> {
    let done = line.calls.client().batch_execute(SESSION).await;
    done.map_err(failed)
}

/// How long the request to end something may take.
const CANCEL: Duration = Duration::from_secs(5);

/// Ends what the server does for this connection, which then answers. Nobody learns whether the
/// request has come to the server.
///
/// A server or a pooler that hangs answers nothing. So this ends after some time.
pub(super) async fn cancel(server: &Server, line: &Line) {
    let _ = tokio::time::timeout(CANCEL, try_to_cancel(server, line)).await;
}

async fn try_to_cancel(server: &Server, line: &Line) {
    let Ok(mut stream) = stream(server, &line.host).await else {
        return;
    };
    // The driver would close the connection at once, and a pooler would forget about the request.
    let mut request = Vec::new();
    let token = line.calls.client().cancel_token();
    let written = token.cancel_query_raw(tokio::io::join(tokio::io::empty(), &mut request), NoTls);
    if written.await.is_ok() && stream.write_all(&request).await.is_ok() {
        // The server closes the connection when it has done so.
        let _ = stream.read(&mut [0]).await;
    }
}

#[cfg_attr(
    not(feature = "postgres-tls"),
    allow(unused_variables, reason = "only TLS asks the server's settings")
)]
async fn stream(
    server: &Server,
    (host, port): &(String, u16),
) -> Result<Box<dyn Stream>, (Fault, String)> {
    let socket = socket(host, *port).await;
    let socket = socket.map_err(|error| (Fault::Retry, error.to_string()))?;
    #[cfg(feature = "postgres-tls")]
    if let Some(tls) = &server.tls {
        let tls = tls.for_host(host);
        let tls = tls.map_err(|error| (Fault::Config, error.to_string()))?;
        return Ok(Box::new(encrypted::begin(&tls, socket).await?));
    }
    Ok(Box::new(socket))
}

/// Makes the schema if it is missing, and replaces functions of an earlier version. Those of a later
/// version serve this client too, and stay.
///
/// If the future is dropped in the middle, the connection is dropped with it, and the server rolls
/// the transaction back.
pub(super) async fn find_schema(line: &Line) -> Result<(), StoreError> {
    let earlier = match version(line).await {
        Ok(version) if version >= FUNCTIONS => return Ok(()),
        Ok(version) => Some(version),
        Err(missing) => match code(&missing) {
            "3F000" => None,
            "42883" => {
                return Err(no_schema(
                    "the schema lockcore1 is not that of this library",
                ));
            }
            "42501" => {
                return Err(no_schema(
                    "this user may not use the schema lockcore1: GRANT USAGE ON SCHEMA lockcore1, \
                     and EXECUTE ON ALL FUNCTIONS IN SCHEMA lockcore1",
                ));
            }
            _ => return Err(failed(missing)),
        },
    };
    // Clients that start together have all read the version before one of them makes it. The others
    // wait at the lock of the file, and then find that nothing is left to do.
    let made = format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; SELECT pg_advisory_xact_lock(1818583907, 0); \
         DO $do$ BEGIN IF to_regnamespace('lockcore1') IS NOT NULL THEN \
         IF lockcore1.version() >= {FUNCTIONS} THEN \
         RAISE EXCEPTION 'the functions of lockcore are there' USING ERRCODE = 'LC002'; \
         END IF; END IF; END $do$; {SCHEMA} COMMIT"
    );
    let Err(error) = line.calls.client().batch_execute(&made).await else {
        return Ok(());
    };
    let rolled_back = line.calls.client().batch_execute("ROLLBACK").await;
    rolled_back.map_err(failed)?;
    match (code(&error), earlier) {
        // Another client was there in between.
        ("LC002", _) => Ok(()),
        ("42501", None) => Err(no_schema(
            "the schema lockcore1 is missing, and this user may not make it: let a user with the \
             right to CREATE in this database run the file lockcore1.sql",
        )),
        ("42501", Some(version)) => Err(no_schema(&format!(
            "the functions of the schema lockcore1 are those of version {version}, this library \
             needs version {FUNCTIONS}, and this user may not replace them: let the owner of the \
             schema run the file lockcore1.sql of this library"
        ))),
        _ => Err(failed(error)),
    }
}

/// So many operation timeouts after it was sent, no client waits for a request any more.
const ABANDONED: u32 = 10;

/// Ends requests of clients that have gone without ending them: see `durable`. Those of a client
/// with a much longer operation timeout are ended too, and this client tries again.
///
/// If it fails, the next client that connects does it, and the next request finds a connection
/// that has ended.
pub(super) async fn end_waits(line: &Line, op_timeout: Duration) {
    let millis =
        i64::try_from(op_timeout.saturating_mul(ABANDONED).as_millis()).unwrap_or(i64::MAX);
    let _ = line.calls.ask_once(&calls::END_WAITS, &[&millis]).await;
}

async fn version(line: &Line) -> Result<i32, tokio_postgres::Error> {
    let client = line.calls.client();
    let rows = client.query_typed(calls::VERSION_OF_SCHEMA, &[]).await?;
    rows.first().map_or(Ok(0), |row| row.try_get(0))
}

fn code(error: &tokio_postgres::Error) -> &str {
    error.code().map_or("", |code| code.code())
}

fn no_schema(why: &str) -> StoreError {
    StoreError::new(Fault::Config, format!("PostgreSQL: {why}{GUIDE}"))
}
