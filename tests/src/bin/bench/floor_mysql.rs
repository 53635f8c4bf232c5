//! The floors of MySQL and MariaDB. One floor is the writes that a pair of ours cannot do without, in
//! the same two transactions, but without procedures: a row for the ticket, and the last number of
//! the name. The other is `GET_LOCK` (the peer), which has no lease and no token, and ends with its
//! connection. So each task has its own.

use std::sync::Arc;

use sqlx::mysql::{MySqlPool, MySqlPoolOptions};
use sqlx::{AssertSqlSafe, Connection as _, MySqlConnection};

use crate::floor::{self, Floor, Pair, Token, Turns, contend_when_told, obey_here};

pub(crate) const FLOOR: Floor = Floor {
    warm_up: None,
    ping: None,
    pair: "the writes alone",
    pairs: |url, pairs, cold| floor::pairs(Rows::connect(url), pairs, cold),
    many: |url, tasks, secs| floor::many(Rows::connect(url), tasks, secs),
    turn: "GET_LOCK",
    turns: Turns::OfProcesses {
        contend: |runtime, url, key, tasks, secs, out| {
            contend_when_told(runtime, UserLock::of_tasks(url, key, tasks), secs, out);
        },
        obey: |runtime, url, key| obey_here(runtime, UserLock::of_tasks(url, key, 1)),
    },
    second: None,
};

/// As many connections as a runtime of a client of ours has under load.
const CONNECTIONS: u32 = 4;

const TABLES: &str = "
    CREATE TABLE IF NOT EXISTS floor_names (
        name VARBINARY(700) NOT NULL PRIMARY KEY, last BIGINT NOT NULL) ENGINE = InnoDB;
    CREATE TABLE IF NOT EXISTS floor_tickets (
        name VARBINARY(700) NOT NULL, ticket BIGINT NOT NULL, id BINARY(16) NOT NULL,
        owner VARBINARY(2000) NOT NULL, PRIMARY KEY (name, ticket), UNIQUE KEY (id)) ENGINE = InnoDB";

/// A ticket that is written and removed.
#[derive(Clone)]
pub(crate) struct Rows {
    pool: MySqlPool,
    /// The names that have a row.
    known: Arc<std::sync::Mutex<std::collections::HashSet<String>>>,
}

impl Rows {
    pub(crate) async fn connect(url: String) -> Self {
        let options = MySqlPoolOptions::new()
            .max_connections(CONNECTIONS)
            .test_before_acquire(false);
        let pool = options.connect(&url).await.unwrap();
        let rows = Self {
            pool,
            known: Arc::default(),
        };
        rows.ask(TABLES.to_owned()).await;
        rows
    }

    async fn ask(&self, statements: String) {
        let statements = sqlx::raw_sql(AssertSqlSafe(statements));
        statements.execute(&self.pool).await.unwrap();
    }
}

impl Pair for Rows {
    async fn pair(&mut self, key: &str) {
        // Our first pair of a name makes this row, too.
        let is_new = self.known.lock().unwrap().insert(key.to_owned());
        if is_new {
            let name = format!("INSERT IGNORE INTO floor_names VALUES ('{key}', 0)");
            self.ask(name).await;
        }
        let (ticket, id) = (fastrand::u32(..), fastrand::u128(..));
        self.ask(format!(
            "INSERT INTO floor_tickets VALUES ('{key}', {ticket}, X'{id:032x}', 'host/12345/0123456789abcdef')"
        ))
        .await;
        self.ask(format!(
            "BEGIN; DELETE FROM floor_tickets WHERE id = X'{id:032x}'; \
             UPDATE floor_names SET last = {ticket} WHERE name = '{key}'; COMMIT"
        ))
        .await;
    }
}

/// A lock of a connection.
pub(crate) struct UserLock {
    connection: MySqlConnection,
    key: String,
}

impl UserLock {
    /// Makes one value for each task.
    pub(crate) async fn of_tasks(url: &str, key: &str, tasks: usize) -> Vec<Self> {
        let mut locks = Vec::new();
        for _ in 0..tasks {
            locks.push(Self {
                connection: MySqlConnection::connect(url).await.unwrap(),
                key: key.to_owned(),
            });
        }
        locks
    }

    async fn ask(&mut self, statement: &'static str) {
        let answer = sqlx::query_scalar::<_, i64>(statement).bind(&self.key);
        let answer = answer.fetch_one(&mut self.connection).await.unwrap();
        assert_eq!(answer, 1);
    }
}

impl Token for UserLock {
    async fn take(&mut self) {
        self.ask("SELECT GET_LOCK(?, 3600)").await;
    }

    async fn give_back(&mut self) {
        self.ask("SELECT RELEASE_LOCK(?)").await;
    }
}
