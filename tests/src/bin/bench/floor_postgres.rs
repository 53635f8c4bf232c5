//! The floors of PostgreSQL, with the driver of our client. One floor is the least that lasts: a row
//! that is written to the disk, and removed without waiting. The other is `pg_advisory_lock` (the
//! peer), which has no lease and no token, and ends with its connection. So each task has its own.

use tokio::net::TcpStream;
use tokio_postgres::config::Host;
use tokio_postgres::{Client, Config, NoTls, Statement};

use crate::floor::{self, Floor, Pair, Token, Turns, contend_when_told, obey_here};

pub(crate) const FLOOR: Floor = Floor {
    warm_up: None,
    ping: None,
    pair: "insert on disk + delete",
    pairs: |url, pairs, cold| floor::pairs(Row::connect(url), pairs, cold),
    many: |url, tasks, secs| floor::many(Row::connect(url), tasks, secs),
    turn: "pg_advisory_lock",
    turns: Turns::OfProcesses {
        contend: |runtime, url, key, tasks, secs, out| {
            contend_when_told(runtime, Advisory::of_tasks(url, key, tasks), secs, out);
        },
        obey: |runtime, url, key| obey_here(runtime, Advisory::of_tasks(url, key, 1)),
    },
    second: None,
};

/// A row of a table. With many tasks, the copies share one connection, as the tasks of a client of
/// ours do.
#[derive(Clone)]
pub(crate) struct Row {
    client: std::sync::Arc<Client>,
    insert: Statement,
    delete: Statement,
}

impl Row {
    pub(crate) async fn connect(url: String) -> Self {
        let client = connect(&url).await;
        let made = "CREATE TABLE IF NOT EXISTS floor (key text PRIMARY KEY)";
        client.batch_execute(made).await.unwrap();
        let insert = "INSERT INTO floor VALUES ($1) \
            RETURNING set_config('synchronous_commit', 'on', true)";
        let delete = "DELETE FROM floor WHERE key = $1 \
            RETURNING set_config('synchronous_commit', 'off', true)";
        Self {
            insert: client.prepare(insert).await.unwrap(),
            delete: client.prepare(delete).await.unwrap(),
            client: client.into(),
        }
    }
}

impl Pair for Row {
    async fn pair(&mut self, key: &str) {
        for statement in [&self.insert, &self.delete] {
            self.client.query_one(statement, &[&key]).await.unwrap();
        }
    }
}

/// An advisory lock of a connection.
pub(crate) struct Advisory {
    client: Client,
    key: String,
    lock: Statement,
    unlock: Statement,
}

impl Advisory {
    /// Makes one value for each task.
    pub(crate) async fn of_tasks(url: &str, key: &str, tasks: usize) -> Vec<Self> {
        let mut locks = Vec::new();
        for _ in 0..tasks {
            let client = connect(url).await;
            let lock = "SELECT pg_advisory_lock(hashtextextended($1, 0))";
            let unlock = "SELECT pg_advisory_unlock(hashtextextended($1, 0))";
            locks.push(Self {
                lock: client.prepare(lock).await.unwrap(),
                unlock: client.prepare(unlock).await.unwrap(),
                client,
                key: key.to_owned(),
            });
        }
        locks
    }

    async fn ask(&self, statement: &Statement) {
        self.client
            .query_one(statement, &[&self.key])
            .await
            .unwrap();
    }
}

impl Token for Advisory {
    async fn take(&mut self) {
        self.ask(&self.lock).await;
    }

    async fn give_back(&mut self) {
        self.ask(&self.unlock).await;
    }
}

async fn connect(url: &str) -> Client {
    let config: Config = url.parse().unwrap();
    let (Some(Host::Tcp(host)), Some(port)) =
        (config.get_hosts().first(), config.get_ports().first())
    else {
        panic!("the floor needs a host and a port");
    };
    let stream = TcpStream::connect((host.as_str(), *port)).await.unwrap();
    stream.set_nodelay(true).unwrap();
    let (client, connection) = config.connect_raw(stream, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}
