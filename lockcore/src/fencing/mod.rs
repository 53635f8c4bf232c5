//! Fencing: refusing a late write where it arrives. For SQL databases and for Redis; for services
//! behind HTTP or gRPC there is `FenceLayer` in `lockcore-tower`.
//!
//! A lock alone cannot keep a late write out. A process can be stopped between its last look at the
//! lock and the write: for seconds, by a garbage collector next door, a full disk, a suspended
//! machine. Meanwhile its lease ends, somebody else gets the lock and writes, and then the first one
//! goes on with what it was about to do. The lock was right all the time, and the data is wrong.
//!
//! So the resource itself remembers the highest token that has written to it, and refuses lower
//! ones, *in the same step as the write*. What is sent is the [`WriteToken`] of an exclusive lock:
//!
//! | where the data is | what checks |
//! |---|---|
//! | a row of a table | a column beside it: [a guarded update](sql#a-column-in-the-row) |
//! | several rows, or a write that has no row | [a table of fences](sql#a-table-of-fences), passed in the same transaction |
//! | Redis | [a script](redis) |
//! | another service | the header `lock-fencing-token` and `FenceLayer`, best before one of the above |
//!
//! # The rules
//!
//! - **One resource, one lock.** Whoever writes to the resource writes under the lock of the same
//!   name, at the same store. Tokens of different names order nothing.
//! - **Equal passes, lower does not.** One holder may write as often as he likes.
//! - **The check belongs to the write**: one statement, one transaction, one script. A check that
//!   comes before the write leaves the gap that it is meant to close.
//! - **What is forgotten passes.** A row that was deleted, a fence that has expired or was lost with
//!   its data lets a late write in again. Mark as deleted, where a late write must not bring back.
//! - **Another store counts differently.** After a move, say from Redis to ZooKeeper, new tokens may
//!   be lower than those that the resource remembers, and all is refused: set the columns back to 0
//!   while nobody writes. The same holds when the store has lost its data *and* its clock went back.

pub mod redis;
pub mod sql;

#[cfg(doc)]
use crate::WriteToken;
