//! The harness of the behaviour suite: servers that it starts itself and can stop, freeze, kill and cut off, helper
//! processes that may die, and witnesses that tell whether a lock really excluded.
//!
//! | module | what it gives |
//! |---|---|
//! | [`stores`] | the list of stores, and everything that the suite has to know of one in particular |
//! | [`redis_server`] | a real Redis on a free port, with verbs for every way it can fail |
//! | [`redis_sentinels`] | a Redis master with its replicas, and the sentinels that watch them |
//! | [`certificates`] | a CA of our own, and certificates of every quality |
//! | [`zookeeper_server`] | the same for ZooKeeper, one server or an ensemble of three |
//! | [`sqlite_file`] | a SQLite file, looked at and broken from outside |
//! | [`faketime`] | a wall clock of one server that can be made to jump |
//! | [`proxy`] | a TCP proxy that cuts, freezes, delays and loses replies |
//! | [`process`] | helper processes that are told what to do line by line, and the lock holder among them |
//! | [`child`] | a child process that dies with us, even when we are killed |
//! | [`witness`] | the protected resource: sees overlap without knowing the lock |
//! | [`fact`] | a test case that shows as ignored, with the reason, when it cannot run |
//! | [`watch`] | a test program whose output is searched for secrets |
//! | [`eventually`] | waiting for something to become true, with a deadline |
//! | [`stalls`] | time without that in which the machine stood still |
//! | [`toolchain`] | whether this is the toolchain that expected output belongs to |
//! | [`ports`] | loopback ports that nobody else gets |
//! | [`measure`], [`turns`] | what the programs `load` and `bench` measure with, and the record of who held a lock when |
//!
//! Whatever goes wrong in the harness itself panics with what to do about it: its only callers are tests.

#![allow(
    clippy::unwrap_used,
    reason = "all of this is test code, where a panic is the report"
)]

pub use lockcore::testing::conformance::stalls;

pub mod certificates;
pub mod child;
pub mod eventually;
pub mod fact;
pub mod faketime;
pub mod measure;
pub mod ports;
pub mod process;
pub mod proxy;
pub mod redis_sentinels;
pub mod redis_server;
pub mod sqlite_file;

pub mod stores;
pub mod toolchain;
pub mod turns;
pub mod watch;
pub mod witness;
pub mod zookeeper_server;
