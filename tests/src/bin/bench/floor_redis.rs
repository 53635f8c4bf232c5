//! The floors of Redis, the least that a lock can cost there. One floor is `SET NX` and a script
//! that compares and deletes, without a line, a token or a clock. The other is a token in a list
//! that `BLPOP` hands over, without an owner. Nobody should use one of these as a lock.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, FromRedisValue, IntoConnectionInfo as _, cmd};
use tests::measure::{Durations, now};

use crate::floor::{self, Floor, Pair, Token, Turns, contend_when_told, obey_here, on_a_runtime};

pub(crate) const FLOOR: Floor = Floor {
    warm_up: None,
    ping: Some(ping),
    pair: "SET NX + delete",
    pairs: |url, pairs, cold| floor::pairs(RawLock::connect(url), pairs, cold),
    many: |url, tasks, secs| floor::many(RawLock::connect(url), tasks, secs),
    turn: "BLPOP",
    turns: Turns::OfProcesses {
        contend: |runtime, url, key, tasks, secs, out| {
            contend_when_told(runtime, List::of_tasks(url, key, tasks), secs, out);
        },
        obey: |runtime, url, key| obey_here(runtime, List::of_tasks(url, key, 1)),
    },
    second: None,
};

const LEASE_MS: u64 = 30_000;
const DELETE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0";

/// A lock of `SET key id NX PX 30000` and a compare-and-delete.
#[derive(Clone)]
pub(crate) struct RawLock {
    connection: MultiplexedConnection,
    delete: Arc<str>,
    /// The number of pairs so far.
    number: usize,
}

impl RawLock {
    pub(crate) async fn connect(url: String) -> Self {
        let mut connection = connect(&client(&url)).await;
        let load = cmd("SCRIPT").arg("LOAD").arg(DELETE).to_owned();
        let delete: String = ask(&mut connection, &load).await;
        Self {
            connection,
            delete: delete.into(),
            number: 0,
        }
    }
}

impl Pair for RawLock {
    async fn pair(&mut self, key: &str) {
        self.number += 1;
        // The id is as long as a random id of the library.
        let id = format!("{:032x}", self.number);
        let mut set = cmd("SET");
        set.arg(key).arg(&id).arg("NX").arg("PX").arg(LEASE_MS);
        let set: Option<String> = ask(&mut self.connection, &set).await;
        assert_eq!(set.as_deref(), Some("OK"));
        let mut delete = cmd("EVALSHA");
        delete.arg(&*self.delete).arg(1).arg(key).arg(&id);
        let deleted: u32 = ask(&mut self.connection, &delete).await;
        assert_eq!(deleted, 1);
    }
}

/// The time of a round trip, in microseconds.
fn ping(url: String, times: usize) -> f64 {
    on_a_runtime(async move {
        let mut connection = connect(&client(&url)).await;
        let mut took = Vec::with_capacity(times);
        let mut began = now();
        for _ in 0..times {
            let _: String = ask(&mut connection, &cmd("PING")).await;
            let ended = now();
            took.push(ended - began);
            began = ended;
        }
        Durations::new(took).percentile_us(50)
    })
}

/// A token in a list. A task may work when it has popped the token.
pub(crate) struct List {
    connection: MultiplexedConnection,
    pop: Cmd,
    push: Cmd,
}

impl List {
    /// Makes one value for each task. Each value has its own connection, because a pop blocks the
    /// connection.
    pub(crate) async fn of_tasks(url: &str, key: &str, tasks: usize) -> Vec<Self> {
        let client = client(url);
        let mut lists = Vec::new();
        for _ in 0..tasks {
            lists.push(Self {
                connection: connect(&client).await,
                pop: cmd("BLPOP").arg(key).arg(0).to_owned(),
                push: cmd("LPUSH").arg(key).arg("token").to_owned(),
            });
        }
        lists
    }
}

impl Token for List {
    async fn take(&mut self) {
        let _: (String, String) = ask(&mut self.connection, &self.pop).await;
    }

    async fn give_back(&mut self) {
        let _: u64 = ask(&mut self.connection, &self.push).await;
    }
}

async fn ask<T: FromRedisValue>(connection: &mut MultiplexedConnection, command: &Cmd) -> T {
    command.query_async(connection).await.unwrap()
}

fn client(url: &str) -> Client {
    let info = url.into_connection_info().unwrap();
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    Client::open(info.set_tcp_settings(tcp)).unwrap()
}

async fn connect(client: &Client) -> MultiplexedConnection {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_pipeline_buffer_size(1024);
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
        .unwrap()
}
