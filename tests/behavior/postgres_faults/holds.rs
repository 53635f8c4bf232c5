//! Facts about `lockcore1.hold`: a transaction of the user that holds a lock. What they protect is
//! a row without a token. Only exclusion keeps it right.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::fencing::sql::{HOLD, postgres_key};
use lockcore::{ErrorKind, Guard, Locks, Release};
use tests::eventually::eventually;
use tests::postgres_server::{PostgresServer, USER};
use tests::proxy::Proxy;
use tests::watch::SECRET;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, Error as PgError, NoTls};

use crate::faults::patient;
use crate::store::{DEFAULT, Kind, SOON, STALL, Store, begin, give_back, kind, tickets};

const TTL: Duration = Duration::from_secs(1);

/// What `hold` says of a lock that is not held any more.
const NOT_HELD: &str = "LC001";

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_transaction_that_holds_a_lock_keeps_it_when_the_lease_ends
        a_release_takes_effect_when_the_transaction_that_holds_the_lock_ends
        a_release_of_several_locks_leaves_the_one_that_a_transaction_holds
        a_transaction_is_refused_when_the_lock_has_gone
        a_transaction_with_a_snapshot_from_before_the_grant_is_refused
        a_sweep_leaves_a_ticket_that_a_transaction_holds
        a_renewal_passes_a_transaction_that_holds_the_lock
        a_row_without_a_token_loses_no_change_when_leases_end_in_transactions
    ]
}

/// A user's own connection, with the rights of a client of the locks and no others.
pub(super) struct Table {
    client: Client,
    driver: JoinHandle<Result<(), PgError>>,
}

impl Drop for Table {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Table {
    pub(super) async fn open(server: &PostgresServer) -> Self {
        let stream = tokio::net::TcpStream::connect(("127.0.0.1", server.port())).await;
        let mut login = tokio_postgres::Config::new();
        let login = login.user(USER).password(SECRET).dbname("postgres");
        let (client, connection) = login.connect_raw(stream.unwrap(), NoTls).await.unwrap();
        let driver = tokio::spawn(connection);
        Self { client, driver }
    }

    pub(super) async fn run(&self, statement: &str) {
        self.client.batch_execute(statement).await.unwrap();
    }

    /// Begins a transaction that holds the lock.
    async fn hold(&self, guard: &Guard) -> Result<(), PgError> {
        self.run("BEGIN").await;
        let (key, token) = (postgres_key(guard), guard.fencing_token().unwrap().as_i64());
        self.client.query_one(HOLD, &[&key, &token]).await.map(drop)
    }

    async fn count(&self) -> i32 {
        let row = self.client.query_one("SELECT count FROM visits", &[]);
        row.await.unwrap().get(0)
    }
}

fn server() -> PostgresServer {
    let server = PostgresServer::start();
    server.query(&format!(
        "CREATE TABLE visits (count int NOT NULL); INSERT INTO visits VALUES (0); \
         GRANT SELECT, UPDATE ON visits TO {USER}"
    ));
    server
}

fn client(server: &PostgresServer) -> Locks {
    patient(server.url()).build().unwrap()
}

/// The lease has ended at the server.
async fn is_over(server: &PostgresServer) {
    eventually("the lease has ended", SOON, async || {
        let ended = "SELECT count(*) FROM lockcore1.tickets \
            WHERE granted AND expires_at <= lockcore1.now_micros()";
        server.query(ended) == ["1"]
    })
    .await;
}

async fn a_transaction_that_holds_a_lock_keeps_it_when_the_lease_ends(_: Store) {
    let server = server();
    let proxy = Proxy::to(server.port());
    let cut_off = patient(server.url_at(proxy.port())).build().unwrap();
    let others = client(&server);
    let (table, after) = (Table::open(&server).await, Table::open(&server).await);
    // It is held until the transaction holds it, too, on a busy machine.
    let guard = cut_off.mutex("a").ttl(4 * TTL).acquire().await.unwrap();
    table.hold(&guard).await.unwrap();
    let waits = begin(others.mutex("a").wait(2 * STALL));
    tickets(&others, "a", 2).await;

    proxy.cut();
    is_over(&server).await;

    // The next look at the line, of any client, would let the next one in.
    let busy = others.mutex("a").try_acquire().await;
    assert_eq!(kind(busy), ErrorKind::Busy);
    let granted = "SELECT count(*) FROM lockcore1.tickets \
        WHERE granted AND expires_at > lockcore1.now_micros()";
    assert_eq!(server.query(granted), ["0"]);
    assert!(!waits.is_finished());
    table.run("UPDATE visits SET count = count + 1").await;
    table.run("COMMIT").await;
    let next = waits.await.unwrap().unwrap();
    after.hold(&next).await.unwrap();
    assert_eq!(after.count().await, 1);
    after.run("COMMIT").await;
    give_back(next).await;
    proxy.restore();
}

async fn a_release_takes_effect_when_the_transaction_that_holds_the_lock_ends(_: Store) {
    let server = server();
    let (holder, others) = (client(&server), client(&server));
    let table = Table::open(&server).await;
    let guard = holder.mutex("a").acquire().await.unwrap();
    table.hold(&guard).await.unwrap();
    let waits = begin(others.mutex("a").wait(2 * STALL));
    tickets(&others, "a", 2).await;

    assert_eq!(guard.release().await.unwrap(), Release::Released);

    // Neither this release nor another client waits for the transaction.
    let busy = holder.mutex("a").try_acquire().await;
    assert_eq!(kind(busy), ErrorKind::Busy);
    give_back(holder.mutex("b").acquire().await.unwrap()).await;
    assert!(!waits.is_finished());
    table.run("COMMIT").await;
    give_back(waits.await.unwrap().unwrap()).await;
    tickets(&others, "a", 0).await;
    assert_eq!(
        server.query("SELECT count(*) FROM lockcore1.tickets"),
        ["0"]
    );
}

/// As the keeper releases several locks: in one call.
async fn a_release_of_several_locks_leaves_the_one_that_a_transaction_holds(_: Store) {
    let server = server();
    let (holder, others) = (client(&server), client(&server));
    let table = Table::open(&server).await;
    let guard = holder.mutex("a").acquire().await.unwrap();
    let other = holder.mutex("b").acquire().await.unwrap();
    table.hold(&guard).await.unwrap();
    let left = "SELECT count(*) FROM lockcore1.tickets";

    // It waits for no row.
    let released = server.query(
        "SET lock_timeout = '30s'; SELECT count(*) FROM lockcore1.release(ARRAY(SELECT name FROM lockcore1.tickets ORDER BY name), \
         ARRAY(SELECT id FROM lockcore1.tickets ORDER BY name), ARRAY[false, false]) AS r WHERE r.was_there",
    );

    assert_eq!(released, ["2"]);
    assert_eq!(server.query(left), ["1"]);
    give_back(others.mutex("b").try_acquire().await.unwrap()).await;
    let busy = others.mutex("a").try_acquire().await;
    assert_eq!(kind(busy), ErrorKind::Busy);
    table.run("COMMIT").await;
    give_back(others.mutex("a").try_acquire().await.unwrap()).await;
    assert_eq!(server.query(left), ["0"]);
    drop((guard, other));
}

async fn a_transaction_is_refused_when_the_lock_has_gone(_: Store) {
    let server = server();
    let proxy = Proxy::to(server.port());
    let cut_off = patient(server.url_at(proxy.port())).build().unwrap();
    let others = client(&server);
    let table = Table::open(&server).await;
    let code = async |guard: &Guard| {
        let refused = table.hold(guard).await.unwrap_err();
        table.run("ROLLBACK").await;
        refused.code().map(|code| code.code().to_owned())
    };
    let late = cut_off.mutex("a").ttl(TTL).acquire().await.unwrap();
    proxy.cut();
    is_over(&server).await;

    assert_eq!(code(&late).await.as_deref(), Some(NOT_HELD));
    let next = others.mutex("a").wait(STALL).acquire().await.unwrap();
    assert_eq!(code(&late).await.as_deref(), Some(NOT_HELD));

    give_back(next).await;
    proxy.restore();
}

/// The next holder has waited in line when its snapshot was taken. What the earlier one has written
/// since is not in it.
async fn a_transaction_with_a_snapshot_from_before_the_grant_is_refused(_: Store) {
    let server = server();
    let (holder, others) = (client(&server), client(&server));
    let (first, table) = (Table::open(&server).await, Table::open(&server).await);
    let guard = holder.mutex("a").acquire().await.unwrap();
    let waits = begin(others.mutex("a").wait(2 * STALL));
    tickets(&others, "a", 2).await;
    table
        .run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count FROM visits")
        .await;
    first.hold(&guard).await.unwrap();
    first
        .run("UPDATE visits SET count = count + 1; COMMIT")
        .await;
    give_back(guard).await;
    let next = waits.await.unwrap().unwrap();

    let (token, key) = (next.fencing_token().unwrap().as_i64(), postgres_key(&next));
    let refused = table.client.query_one(HOLD, &[&key, &token]).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code().map(|code| code.code()), Some("22023"));
    table.run("ROLLBACK").await;
    give_back(next).await;
}

/// Dead tickets that nobody waits behind are removed by the sweep alone.
async fn a_sweep_leaves_a_ticket_that_a_transaction_holds(_: Store) {
    let server = server();
    let proxy = Proxy::to(server.port());
    let cut_off = patient(server.url_at(proxy.port())).build().unwrap();
    let table = Table::open(&server).await;
    let guard = cut_off.mutex("a").acquire().await.unwrap();
    table.hold(&guard).await.unwrap();
    proxy.cut();
    server.query("UPDATE lockcore1.tickets SET expires_at = 0");
    let swept = || {
        server.query("SELECT lockcore1.sweep('')");
        server.query("SELECT count(*) FROM lockcore1.tickets")
    };

    assert_eq!(swept(), ["1"]);
    table.run("COMMIT").await;
    assert_eq!(swept(), ["0"]);
    proxy.restore();
}

async fn a_renewal_passes_a_transaction_that_holds_the_lock(_: Store) {
    let server = server();
    let holder = client(&server);
    let table = Table::open(&server).await;
    let guard = holder.mutex("a").ttl(SOON).acquire().await.unwrap();
    table.hold(&guard).await.unwrap();

    guard.extend(STALL).await.unwrap();

    table.run("COMMIT").await;
    // The row that was renewed is locked, too.
    table.hold(&guard).await.unwrap();
    let waits = begin(client(&server).mutex("a").wait(2 * STALL));
    tickets(&holder, "a", 2).await;
    guard.release().await.unwrap();
    assert!(!waits.is_finished());
    table.run("COMMIT").await;
    give_back(waits.await.unwrap().unwrap()).await;
}

/// Lets all who can get the lock now visit first. As long as a transaction holds it, nobody can.
async fn lets_others_in(server: &PostgresServer, onlooker: &Locks, table: &Table) {
    let granted = "SELECT count(*) FROM lockcore1.tickets \
        WHERE granted AND expires_at > lockcore1.now_micros()";
    let before = table.count().await;
    // The next look at the line, of any client, lets the next one in.
    let _ = onlooker.mutex("a").try_acquire().await;
    if server.query(granted) != ["0"] {
        eventually("another one has visited", SOON, async || {
            table.count().await > before
        })
        .await;
    }
}

/// Each visit reads the count, and writes it later. Now and then the visitor is cut off from its
/// lock in between, until its lease has ended. A visit of somebody else would be lost then.
async fn a_row_without_a_token_loses_no_change_when_leases_end_in_transactions(_: Store) {
    let server = Arc::new(server());
    let commits = Arc::new(AtomicUsize::new(0));
    let visitors = (0..4).map(|_| {
        let (server, commits) = (Arc::clone(&server), Arc::clone(&commits));
        tokio::spawn(async move {
            let proxy = Proxy::to(server.port());
            let locks = patient(server.url_at(proxy.port())).build().unwrap();
            let onlooker = client(&server);
            let table = Table::open(&server).await;
            for visit in 0..6 {
                let lock = locks.mutex("a").ttl(TTL).wait(2 * STALL);
                let Ok(guard) = lock.acquire().await else {
                    continue;
                };
                if table.hold(&guard).await.is_err() {
                    table.run("ROLLBACK").await;
                    continue;
                }
                let count = table.count().await;
                if visit % 3 == 2 {
                    proxy.cut();
                    is_over(&server).await;
                    lets_others_in(&server, &onlooker, &table).await;
                    proxy.restore();
                }
                let write = format!("UPDATE visits SET count = {} + 1; COMMIT", count);
                table.run(&write).await;
                commits.fetch_add(1, Ordering::SeqCst);
                drop(guard);
            }
        })
    });
    for visitor in join_all(visitors).await {
        visitor.unwrap();
    }

    let counted = server.query("SELECT count FROM visits");
    let commits = commits.load(Ordering::SeqCst);
    assert_eq!(counted, [commits.to_string()]);
    assert!(commits >= 12, "only {commits} visits");
}
