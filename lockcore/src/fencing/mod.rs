//! Fencing: refusing a late write at the resource. This module is for SQL databases and for Redis.
//! For services behind HTTP or gRPC there is `FenceLayer` in `lockcore-tower`.
//!
//! A lock alone cannot refuse a late write. A process can be stopped for seconds between its last
//! check of the lock and its write: by garbage collection, a full disk, or a suspend of the
//! machine. Meanwhile its lease ends, and somebody else gets the lock and writes. Then the first
//! process continues with its write. The lock has worked correctly all the time, and the data is
//! wrong.
//!
//! So the resource itself remembers the highest token that has written to it, and refuses lower
//! tokens, *in the same step as the write*. The token to send is the [`FencingToken`] of an
//! exclusive lock:
//!
//! | where the data is | what checks |
//! |---|---|
//! | a row of a table | a column beside it: [a guarded update](sql#a-column-in-the-row) |
//! | several rows, or a write that has no row | [a table of fences](sql#a-table-of-fences), checked in the same transaction |
//! | the database of PostgreSQL that has the locks | [the transaction holds the lock](sql#a-transaction-that-holds-the-lock), and no token is stored |
//! | Redis | [a script](redis) |
//! | another service | the header `lock-fencing-token` and `FenceLayer`, best together with one of the above in that service |
//!
//! # The rules
//!
//! - **One resource, one lock.** Every writer of the resource uses the lock of the same name, at
//!   the same store. Tokens of different names have no order.
//! - **An equal token passes, a lower one does not.** One holder may write any number of times.
//! - **The check is a part of the write**: one statement, one transaction, one script. If the check
//!   comes before the write, a process can be stopped between the two, as above.
//! - **A forgotten token lets late writes pass.** If a row was deleted, or a fence has expired or
//!   was lost with its data, a late write passes. If a late write must not bring a row back, mark
//!   the row as deleted instead of deleting it.
//! - **Another store counts differently.** After a move, for example from Redis to ZooKeeper, new
//!   tokens may be lower than the tokens that the resource remembers. Then the resource refuses all
//!   writes. So set the columns back to 0 while nobody writes. The same is true when the store has
//!   lost its data *and* its clock went back, and always after a ZooKeeper or an etcd was set up anew
//!   or restored from a backup.

pub mod redis;
pub mod sql;

pub use crate::token::ParseTokenError;

#[cfg(doc)]
use crate::FencingToken;
