//! The functions of the schema, as statements that a connection prepares once. Behind a pooler that
//! moves a client from one connection of the server to another, nothing is prepared.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};
use tokio_postgres::{Client, Row as PgRow, Statement};

use super::errors::failed;
use crate::backend::table::Row;
use crate::backend::{Fault, StoreError};
use crate::request::Id;

/// The layout version. It is in the name of the schema and in every key. So a change of this number
/// is a breaking release.
pub(super) const VERSION: u32 = 1;

/// The schema and everything in it.
pub(super) const SCHEMA: &str = include_str!("schema/lockcore1.sql");

/// The version of the functions in this schema. They serve clients of earlier versions too.
pub(super) const FUNCTIONS: i32 = 4;

/// Fails if the schema is missing, or if this user may not use it.
pub(super) const VERSION_OF_SCHEMA: &str = "SELECT lockcore1.version()";

/// After so long, a connection that has sent no notifications tries again to send them.
const QUIET: Duration = Duration::from_secs(5);

/// A statement, and the types of its parameters. Without these types the driver would ask the
/// server for them.
#[derive(Debug)]
pub(super) struct Call {
    text: &'static str,
    types: &'static [Type],
}

macro_rules! calls {
    ($($(#[$doc:meta])* $name:ident = $text:literal ($($kind:ident),*);)*) => {
        $(
            $(#[$doc])*
            pub(super) const $name: Call = Call { text: $text, types: &[$(Type::$kind),*] };
        )*
    };
}

calls! {
    ENQUEUE = "SELECT * FROM lockcore1.enqueue($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
        (UUID, TEXT, INT4, INT4, INT8, BOOL, INT8, INT8, TEXT, BOOL);
    RENEW = "SELECT * FROM lockcore1.renew($1, $2, $3, $4)"
        (TEXT_ARRAY, UUID_ARRAY, INT4_ARRAY, INT8_ARRAY);
    RELEASE = "SELECT * FROM lockcore1.release($1, $2, $3)" (TEXT_ARRAY, UUID_ARRAY, BOOL_ARRAY);
    ADOPT = "SELECT * FROM lockcore1.adopt($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
        (TEXT, UUID, INT8, INT4, INT4, UUID, INT8, INT8, TEXT, BOOL);
    ASK_BACK = "SELECT * FROM lockcore1.ask_back($1, $2, $3)" (TEXT, UUID, TEXT);
    INSPECT = "SELECT * FROM lockcore1.inspect($1)" (TEXT);
    LIST = "SELECT * FROM lockcore1.list($1, $2, $3, $4)" (TEXT, TEXT, TEXT, INT4);
    OVERVIEW = "SELECT * FROM lockcore1.overview($1, $2, $3, $4)" (TEXT, TEXT, TEXT, INT4);
    STORED = "SELECT * FROM lockcore1.stored($1)" (TEXT);
    RESIZE = "SELECT * FROM lockcore1.resize($1, $2, $3, $4, $5)" (UUID, TEXT, INT4, UUID, INT4);
    FORGET = "SELECT lockcore1.forget($1)" (TEXT);
    COUNTER = "SELECT * FROM lockcore1.counter($1)" (TEXT);
    SET_COUNTER = "SELECT * FROM lockcore1.set_counter($1, $2, $3, $4, $5)"
        (TEXT, BYTEA, BYTEA, INT8, TEXT);
    SWEEP = "SELECT * FROM lockcore1.sweep($1)" (TEXT);
    FLUSH = "SELECT lockcore1.flush($1)" (TEXT);
    /// Ends what the server does for clients of this user, if it has lasted for so many milliseconds.
    END_WAITS = "SELECT pg_catalog.pg_cancel_backend(a.pid) FROM pg_catalog.pg_stat_activity AS a \
        WHERE a.usename = current_user AND a.application_name = 'lockcore' \
        AND a.wait_event IN ('SyncRep', 'advisory') \
        AND a.query_start < clock_timestamp() - $1 * interval '1 ms'" (INT8);
    /// Settings for an operator, as text.
    SETTINGS = "SELECT current_setting('fsync') AS fsync, \
        current_setting('autovacuum') AS autovacuum, \
        (pg_catalog.pg_notification_queue_usage() > 0.01)::text AS notifications_pile_up, \
        EXISTS (SELECT 1 FROM pg_catalog.pg_class AS c \
                JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace \
                WHERE n.nspname = 'lockcore1' AND c.relkind = 'r' \
                AND c.relpersistence = 'u')::text AS unlogged" ();
}

/// The statements of one connection.
pub(super) struct Calls {
    client: Client,
    /// Whether the next request may find another connection of the server.
    moves: bool,
    prepared: Mutex<HashMap<&'static str, Statement>>,
    quiet: Mutex<Option<Instant>>,
}

pub(super) type Parameter<'a> = &'a (dyn ToSql + Sync);

impl Calls {
    pub(super) fn new(client: Client, moves: bool) -> Self {
        Self {
            client,
            moves,
            prepared: Mutex::default(),
            quiet: Mutex::default(),
        }
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    /// Runs a statement, as one transaction. Returns all rows when it is committed.
    ///
    /// If the future is dropped, the server may still run the statement. If two callers prepare the
    /// same statement at once, one of the two is closed again.
    pub(super) async fn ask(
        &self,
        call: &Call,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<PgRow>, StoreError> {
        if self.moves {
            return self.ask_once(call, parameters).await;
        }
        let statement = self.prepared(call).await?;
        self.notify_again();
        let mut rows = self.client.query(&statement, parameters).await;
        if matches!(&rows, Err(error) if error.code() == Some(&SqlState::PROGRAM_LIMIT_EXCEEDED)) {
            self.notify_nobody();
            rows = self.client.query(&statement, parameters).await;
        }
        rows.map_err(failed)
    }

    /// If the queue of notifications is full, nothing that would send one can be committed: no release
    /// that wakes a waiter, and no renewal that finds a dead holder. So the functions send none on this
    /// connection for a while. Those who would be told look at their next renewal.
    fn notify_nobody(&self) {
        // Requests are carried out in the order in which they are sent. Nobody needs the answer.
        if self.quiet().replace(Instant::now()).is_none() {
            let set = self.client.batch_execute("SET lockcore1.quiet = on");
            let _ = set.now_or_never();
        }
    }

    /// Lets the functions send notifications again after a while.
    fn notify_again(&self) {
        let mut quiet = self.quiet();
        if quiet.is_some_and(|since| since.elapsed() > QUIET) {
            *quiet = None;
            let reset = self.client.batch_execute("RESET lockcore1.quiet");
            let _ = reset.now_or_never();
        }
    }

    /// Since when the functions send no notifications.
    fn quiet(&self) -> MutexGuard<'_, Option<Instant>> {
        self.quiet.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same without a name, in one step. It leaves nothing at a pooler.
    pub(super) async fn ask_once(
        &self,
        call: &Call,
        parameters: &[Parameter<'_>],
    ) -> Result<Vec<PgRow>, StoreError> {
        let typed = parameters.iter().copied().zip(call.types.iter().cloned());
        let typed: Vec<_> = typed.collect();
        let rows = self.client.query_typed(call.text, &typed).await;
        rows.map_err(failed)
    }

    /// As [`ask`](Self::ask), as a transaction that is committed when it is flushed: see `durable`.
    pub(super) async fn ask_and_flush(
        &self,
        call: &Call,
        parameters: &[Parameter<'_>],
        durability: &'static str,
    ) -> Result<Vec<PgRow>, StoreError> {
        let at = parameters.len() + 1;
        // The server has all rows of the answer before it comes to the first.
        let text = format!(
            "SELECT *, CASE row_number() OVER () WHEN 1 THEN lockcore1.flush(${at}) END FROM ({}) AS answer",
            call.text
        );
        let last: (Parameter<'_>, Type) = (&durability, Type::TEXT);
        let typed = parameters.iter().copied().zip(call.types.iter().cloned());
        let typed: Vec<_> = typed.chain([last]).collect();
        let rows = self.client.query_typed(&text, &typed).await;
        rows.map_err(failed)
    }

    pub(super) async fn prepared(&self, call: &Call) -> Result<Statement, StoreError> {
        let known = self.statements().get(call.text).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        let prepared = self.client.prepare_typed(call.text, call.types).await;
        let statement = prepared.map_err(failed)?;
        self.statements().insert(call.text, statement.clone());
        Ok(statement)
    }

    fn statements(&self) -> MutexGuard<'_, HashMap<&'static str, Statement>> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").finish_non_exhaustive()
    }
}

/// The only row of an answer.
pub(super) fn only(rows: Vec<PgRow>) -> Result<PgRow, StoreError> {
    let row = rows.into_iter().next();
    row.ok_or_else(|| StoreError::new(Fault::Unknown, "PostgreSQL: an answer without a row"))
}

/// An id as a `uuid`.
#[derive(Debug)]
pub(super) struct Uuid(pub(super) Id);

impl ToSql for Uuid {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut bytes::BytesMut,
    ) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        out.extend_from_slice(&self.0.to_bytes());
        Ok(IsNull::No)
    }

    fn accepts(kind: &Type) -> bool {
        *kind == Type::UUID
    }

    to_sql_checked!();
}

impl<'a> FromSql<'a> for Uuid {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(Id::from_bytes(raw.try_into()?)))
    }

    fn accepts(kind: &Type) -> bool {
        *kind == Type::UUID
    }
}

/// An `int` or a `bigint`.
struct Number(i64);

impl<'a> FromSql<'a> for Number {
    fn from_sql(
        kind: &Type,
        raw: &'a [u8],
    ) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(match *kind {
            Type::INT4 => i32::from_sql(kind, raw)?.into(),
            _ => i64::from_sql(kind, raw)?,
        }))
    }

    fn accepts(kind: &Type) -> bool {
        matches!(*kind, Type::INT4 | Type::INT8)
    }
}

/// A `text`, or the bytes of one.
struct Text(String);

impl<'a> FromSql<'a> for Text {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self(String::from_utf8(raw.to_vec())?))
    }

    fn accepts(kind: &Type) -> bool {
        matches!(*kind, Type::TEXT | Type::BYTEA)
    }
}

impl Row for PgRow {
    fn int(&self, column: &'static str) -> Result<Option<i64>, StoreError> {
        let number: Option<Number> = self.try_get(column).map_err(unreadable)?;
        Ok(number.map(|number| number.0))
    }

    fn text(&self, column: &'static str) -> Result<Option<String>, StoreError> {
        let text: Option<Text> = self.try_get(column).map_err(unreadable)?;
        Ok(text.map(|text| text.0))
    }

    fn id(&self, column: &'static str) -> Result<Option<Id>, StoreError> {
        let id: Option<Uuid> = self.try_get(column).map_err(unreadable)?;
        Ok(id.map(|id| id.0))
    }

    fn is(&self, column: &'static str) -> Result<bool, StoreError> {
        let flag: Option<bool> = self.try_get(column).map_err(unreadable)?;
        Ok(flag.unwrap_or(false))
    }
}

/// The request was carried out, but nobody knows the answer.
fn unreadable(error: tokio_postgres::Error) -> StoreError {
    StoreError::new(
        Fault::Unknown,
        format!("PostgreSQL: unreadable answer: {error}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_the_version_of_its_functions_in_both_places() {
        let both = [
            format!("IF lockcore1.version() > {FUNCTIONS} THEN"),
            format!("BEGIN RETURN {FUNCTIONS}; END"),
        ];
        assert!(both.iter().all(|place| SCHEMA.contains(place)), "{both:?}");
    }
}
