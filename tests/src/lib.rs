//! The harness of the behaviour suite. It has servers that it starts itself and can stop, freeze,
//! kill and cut off, and helper processes that may die. Its witnesses check whether a lock really
//! excluded others.
//!
//! | module | what it gives |
//! |---|---|
//! | [`stores`] | the list of stores, and everything that the suite has to know about each of them |
//! | [`redis_server`] | a real Redis on a free port, with a method for every way it can fail |
//! | [`redis_quorum`] | independent Redis servers that vote on locks |
//! | [`redis_sentinels`] | a Redis master with its replicas, and the sentinels that watch them |
//! | [`redis_cluster`] | the nodes of a Redis Cluster, and the moving of slots between them |
//! | [`certificates`] | a CA of our own, with valid certificates and one of each bad kind |
//! | [`zookeeper_server`], [`zookeeper_ensemble`] | the same for ZooKeeper: one server, or three that elect a leader |
//! | [`postgres_server`] | a real PostgreSQL with the schema of the library, and statements of the test |
//! | [`mysql_server`] | a real MariaDB with a user for the library, and statements of the test |
//! | [`etcd_server`] | a real etcd server, and what `etcdctl` sees there |
//! | [`sqlite_file`] | a SQLite file that can be read and damaged from outside |
//! | [`browser`] | a browser without a window, for the live page |
//! | [`faketime`] | a wall clock of one server that a test can make jump |
//! | [`proxy`] | a TCP proxy that cuts, freezes, delays and loses replies |
//! | [`process`] | helper processes that take commands line by line, the lock holder among them |
//! | [`candidate`] | processes that campaign in an election, and observe it |
//! | [`child`] | a child process that ends with us, even if we are killed |
//! | `daemon` | a server process with its folder and its log, for every kind of server |
//! | `prepared` | the data of a server that was made once, for all servers of a process |
//! | `unprivileged` | the user for servers that refuse to run as root |
//! | [`witness`] | the protected resource, which detects overlap without knowing the lock |
//! | [`fact`] | a test case that shows as ignored, with the reason, when it cannot run |
//! | [`watch`] | runs a test program and searches its output for secrets |
//! | [`eventually`] | waits for something to become true, with a deadline |
//! | [`stalls`] | measures time without the stalls of the machine |
//! | [`toolchain`] | whether this is the toolchain of the expected output |
//! | [`ports`] | loopback ports that no other process gets |
//! | [`measure`], [`turns`] | how `load` and `bench` measure, and their record of when each task held a lock |
//!
//! A mistake in the use of the harness panics. The message says what to do about it, because only
//! tests use the harness.

#![allow(
    clippy::unwrap_used,
    reason = "all of this is test code, where a panic is the report"
)]

pub use lockcore::testing::conformance::stalls;

pub mod browser;
pub mod candidate;
pub mod certificates;
pub mod child;
mod daemon;
mod elsewhere;
pub mod etcd_ensemble;
pub mod etcd_server;
pub mod eventually;
pub mod fact;
pub mod faketime;
pub mod measure;
pub mod mysql_server;
pub mod ports;
pub mod postgres_server;
mod prepared;
pub mod process;
pub mod proxy;
pub mod redis_cluster;
pub mod redis_quorum;
pub mod redis_sentinels;
pub mod redis_server;
pub mod sqlite_file;

pub mod stores;
pub mod toolchain;
pub mod turns;
mod unprivileged;
pub mod watch;
pub mod witness;
pub mod zookeeper_ensemble;
pub mod zookeeper_server;
