//! Guarded writes for SQL databases, as SQL text for any client library. The examples use sqlx, and
//! the last one tokio-postgres.
//!
//! # A column in the row
//!
//! The row remembers the token that wrote it last:
//!
//! ```sql
//! ALTER TABLE orders ADD COLUMN lock_token BIGINT NOT NULL DEFAULT 0;
//!
//! UPDATE orders SET state = ?, lock_token = ? WHERE id = ? AND lock_token <= ?;
//! ```
//!
//! This is standard SQL; PostgreSQL uses `$1` for `?`. The number of affected rows tells the
//! result:
//!
//! | rows | the write |
//! |---|---|
//! | 1 | was done |
//! | 0 | was **not** done: refused, or there is no such row. To tell which, look for the row in the same transaction |
//!
//! A refusal is not an error, because an update of no rows succeeds. So check the number.
//!
//! ```
//! use lockcore::FencingToken;
//! use sqlx::SqlitePool;
//!
//! #[derive(Debug)]
//! enum PayError {
//!     /// A later holder of the lock has written here.
//!     Refused,
//!     NoSuchOrder,
//!     Sql(sqlx::Error),
//! }
//! # impl From<sqlx::Error> for PayError { fn from(error: sqlx::Error) -> Self { Self::Sql(error) } }
//!
//! async fn pay(orders: &SqlitePool, id: i64, token: FencingToken) -> Result<(), PayError> {
//!     let mut transaction = orders.begin().await?;
//!     let written = sqlx::query(
//!         "UPDATE orders SET state = 'paid', lock_token = $1 WHERE id = $2 AND lock_token <= $1",
//!     )
//!     .bind(token.as_i64())
//!     .bind(id)
//!     .execute(&mut *transaction)
//!     .await?;
//!     if written.rows_affected() == 0 {
//!         let there = sqlx::query("SELECT 1 FROM orders WHERE id = $1")
//!             .bind(id)
//!             .fetch_optional(&mut *transaction)
//!             .await?;
//!         return Err(match there {
//!             Some(_) => PayError::Refused,
//!             None => PayError::NoSuchOrder,
//!         });
//!     }
//!     Ok(transaction.commit().await?)
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let locks = lockcore::Locks::connect("memory:")?;
//! # let one = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1); // each would be a database of its own
//! # let connect = async |url| one.connect(url).await;
//! let orders = connect("sqlite::memory:").await?;
//! # sqlx::raw_sql("CREATE TABLE orders (id BIGINT PRIMARY KEY, state TEXT, lock_token BIGINT NOT NULL DEFAULT 0);
//! #               INSERT INTO orders (id) VALUES (42)").execute(&orders).await?;
//! let guard = locks.mutex("order:42").acquire().await?;
//! let late = guard.fencing_token()?;
//! guard.release().await?;
//! let guard = locks.mutex("order:42").acquire().await?;
//!
//! pay(&orders, 42, guard.fencing_token()?).await.unwrap();
//! pay(&orders, 42, guard.fencing_token()?).await.unwrap(); // the same holder, again
//! assert!(matches!(pay(&orders, 42, late).await, Err(PayError::Refused)));
//! assert!(matches!(pay(&orders, 7, late).await, Err(PayError::NoSuchOrder)));
//! # Ok(()) }
//! ```
//!
//! If the row may not exist yet, insert and guard it in one statement: `INSERT … ON CONFLICT (id)
//! DO UPDATE SET …, lock_token = excluded.lock_token WHERE orders.lock_token <=
//! excluded.lock_token`.
//!
//! **MySQL and MariaDB** count the rows that were *changed*. With the flag `CLIENT_FOUND_ROWS` they
//! count the rows that were found; sqlx sets this flag. Without the flag, writing the same values
//! again under the same token counts 0, and looks like a refusal. They have no `ON CONFLICT …
//! WHERE`.
//!
//! **Isolation.** With `READ COMMITTED`, the default of PostgreSQL, a guarded write waits for an
//! earlier transaction on the same row, and then compares the token that this transaction has
//! written. With `REPEATABLE READ` and `SERIALIZABLE` it fails instead, with SQLSTATE 40001. This
//! error says nothing about the fence: the late write of an earlier holder can cause it for the
//! newest holder. So repeat the whole transaction, as always after this error. The repetition is
//! written or refused.
//!
//! # A table of fences
//!
//! Use a table of fences for a write that has no single row for the token. [`FENCES`] makes the
//! table, and [`PASS`] is the first statement of the transaction.
//!
//! ```
//! use lockcore::fencing::sql::{FENCES, PASS};
//! use lockcore::FencingToken;
//! use sqlx::SqlitePool;
//!
//! /// False: refused, and nothing was written.
//! async fn close(books: &SqlitePool, month: &str, token: FencingToken) -> sqlx::Result<bool> {
//!     let mut transaction = books.begin().await?;
//!     let passed = sqlx::query(PASS)
//!         .bind(month)
//!         .bind(token.as_i64())
//!         .execute(&mut *transaction)
//!         .await?;
//!     if passed.rows_affected() == 0 {
//!         return Ok(false);
//!     }
//!     sqlx::query("INSERT INTO closed SELECT * FROM entries WHERE month = $1")
//!         .bind(month)
//!         .execute(&mut *transaction)
//!         .await?;
//!     sqlx::query("DELETE FROM entries WHERE month = $1")
//!         .bind(month)
//!         .execute(&mut *transaction)
//!         .await?;
//!     transaction.commit().await?;
//!     Ok(true)
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let one = sqlx::sqlite::SqlitePoolOptions::new().max_connections(1); // each would be a database of its own
//! # let connect = async |url| one.connect(url).await;
//! let books = connect("sqlite::memory:").await?;
//! sqlx::raw_sql(FENCES).execute(&books).await?;
//! # sqlx::raw_sql("CREATE TABLE entries (month TEXT); CREATE TABLE closed (month TEXT)").execute(&books).await?;
//! # let (early, late): (FencingToken, FencingToken) = ("1024".parse()?, "2048".parse()?);
//! assert!(close(&books, "2026-10", late).await?);
//! assert!(!close(&books, "2026-10", early).await?);
//! # Ok(()) }
//! ```
//!
//! # A transaction that holds the lock
//!
//! If the locks are in PostgreSQL ([`guide::postgres`](crate::guide::postgres)) and the data is in
//! the same database, the data needs no token. [`HOLD`] is the first statement of the transaction.
//! From then to the end of the transaction no other client gets the lock, whatever happens to the
//! lease and to this process.
//!
//! Run the transaction in a task that owns the guard, as here. A future that is dropped while it
//! commits leaves a `COMMIT` on its way. If the guard were dropped with it, the next task of this
//! process could get the same ticket, and read what is there before that `COMMIT`.
//!
#![cfg_attr(feature = "postgres", doc = "```no_run")]
#![cfg_attr(not(feature = "postgres"), doc = "```ignore")]
//! use lockcore::Guard;
//! use lockcore::fencing::sql::{HOLD, postgres_key};
//! use tokio_postgres::Client;
//!
//! type Failure = Box<dyn std::error::Error + Send + Sync>;
//!
//! async fn sell(mut stock: Client, guard: Guard) -> Result<i32, Failure> {
//!     let sells = async move {
//!         let token = guard.fencing_token()?.as_i64();
//!         let sale = stock.transaction().await?;
//!         sale.query_one(HOLD, &[&postgres_key(&guard), &token]).await?;
//!         let row = sale.query_one("SELECT tickets FROM stock", &[]).await?;
//!         let ticket: i32 = row.get(0);
//!         sale.execute("UPDATE stock SET tickets = $1", &[&(ticket - 1)]).await?;
//!         sale.commit().await?;
//!         guard.release().await?;
//!         Ok(ticket)
//!     };
//!     tokio::spawn(sells).await?
//! }
//! ```

/// Makes the table `lockcore_fences (resource, highest)` if it does not exist. For PostgreSQL and
/// SQLite.
///
/// In MySQL and MariaDB, make `resource` a column of bytes: `resource VARBINARY(3072) NOT NULL
/// PRIMARY KEY`. In columns of text, names that differ can be equal: most collations ignore the
/// case, and `utf8mb4_bin` ignores spaces at the end. 3,072 bytes are the longest key of InnoDB.
/// The name of a lock can have up to 4,096 bytes. If yours can be longer than the column, store
/// `SHA2(?, 256)` of every name instead.
///
/// A row stays until somebody deletes it. Delete the rows of resources that nobody will write to
/// any more.
pub const FENCES: &str = include_str!("sql/fences.sql");

/// Lets a token pass the fence of a resource if no higher token has passed before, and raises the
/// fence to the token. For PostgreSQL and SQLite. Arguments: `$1` is the name of the resource (for
/// example the name of the lock), and `$2` is
/// [`FencingToken::as_i64`](crate::FencingToken::as_i64).
///
/// Rows affected: 1 means that the token has passed; **0 means that it is refused**, and the
/// transaction must be rolled back. Run this statement first in the transaction of the write. The
/// row stays locked until the transaction ends. So a write under another token comes wholly before
/// or wholly after this transaction. With `REPEATABLE READ` and `SERIALIZABLE`, PostgreSQL may end
/// this statement with SQLSTATE 40001. Then repeat the transaction: see [above](self).
///
/// MySQL and MariaDB need two statements instead, and the flag `CLIENT_FOUND_ROWS`. The number of
/// rows of the second statement is the result:
///
/// ```sql
/// INSERT INTO lockcore_fences (resource, highest) VALUES (?, 0)
/// ON DUPLICATE KEY UPDATE highest = highest;
/// UPDATE lockcore_fences SET highest = ? WHERE resource = ? AND highest <= ?;
/// ```
///
/// The first statement locks the row for this transaction alone. With `INSERT IGNORE`, two
/// transactions would first share the row, and then deadlock at the `UPDATE`. `INSERT IGNORE` also
/// cuts names that are too long, without an error.
pub const PASS: &str = include_str!("sql/pass.sql");

/// Holds a lock to the end of the transaction in which this runs. For PostgreSQL, if the locks are
/// in the same database. Arguments: `$1` is the [key](postgres_key) of the lock (`text`), and `$2` is
/// [`FencingToken::as_i64`](crate::FencingToken::as_i64) (`bigint`). It returns one row without a
/// value, and takes well under a millisecond.
///
/// If the lock is not held any more, the statement fails with SQLSTATE `LC001`. If it succeeds, no
/// other client is granted the lock before the transaction ends. A lease may end meanwhile, and a
/// guard may be released: the next holder waits for the end of the transaction all the same. Nobody
/// tells it of that end, so it looks every 100 ms.
///
/// - **The transaction must be `READ COMMITTED`**, the default of PostgreSQL. With another isolation
///   the statement fails with SQLSTATE 22023: a snapshot from before the grant shows old data. In a
///   read-only transaction it fails with 25006.
/// - **Outside of any savepoint.** If a savepoint is rolled back, the hold that was begun behind it
///   ends without an error.
/// - **Holders in one process may share a ticket.** When a task hands the lock to the next task of
///   its process, the ticket stays the same, so `HOLD` accepts the token of the earlier task too. It
///   keeps out other processes. So end the transaction before you release the guard, and see
///   [above](self#a-transaction-that-holds-the-lock) for futures that are dropped. The same is true of
///   a token that is used after its lock was detached: an adopted lock keeps its number.
/// - **End the transaction before you downgrade or release permits.** It keeps a ticket where it is,
///   and not its size.
/// - **Wait for no other lock inside of the transaction.** Its holder may wait for this one, and no
///   server and no client notices that.
/// - Keep the transaction short. `idle_in_transaction_session_timeout` ends one whose process stands
///   still between two statements. It ends no statement that runs, and no prepared transaction.
/// - It needs the right to EXECUTE the function `lockcore1.hold`. The user of the transaction need
///   not be that of the locks.
/// - For a shared lock, pass [`GrantId::as_u64`](crate::GrantId::as_u64) as an `i64`. Then nobody gets
///   the exclusive lock before the transaction ends.
/// - An adoption of the ticket fails with `Unavailable` while the transaction is open.
pub const HOLD: &str = "SELECT lockcore1.hold($1, $2)";

/// The key by which the tables of PostgreSQL know the lock of this grant. For [`HOLD`].
#[cfg(feature = "postgres")]
#[cfg_attr(docsrs, doc(cfg(feature = "postgres")))]
#[must_use]
pub fn postgres_key(held: &crate::Held) -> String {
    crate::backend::postgres::key(held.locked())
}
