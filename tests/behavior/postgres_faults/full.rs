//! Facts about a server that has no room: for its tables, or in its queue of notifications.

use libtest_mimic::Trial;
use lockcore::backend::{self, EventSink, Namespace};
use lockcore::{ErrorKind, Release};
use tests::eventually::eventually;
use tests::postgres_server::PostgresServer;
use tests::proxy::Proxy;

use super::holds::Table;
use crate::crowd::SHORT;
use crate::faults::{is_renewed, patient, works_again};
use crate::store::{DEFAULT, Kind, SOON, STALL, Store, begin, give_back, kind, soon, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_full_disk_refuses_locks_and_keeps_those_that_are_held
        a_session_that_does_not_read_its_notifications_is_told
        locks_change_hands_although_the_queue_of_notifications_is_full
    ]
}

/// A page of a table.
const PAGE: u64 = 8192;

/// No file may be longer. Those of the server's log have 16 MB. Of the page behind that, half is written,
/// as on a disk that becomes full.
const LONGEST: u64 = 2048 * PAGE + PAGE / 2;

/// Fills the table of the tickets up to the longest file. The first row goes into the page with the
/// tickets, and leaves room there for new versions of these alone. Each other row has its own page.
fn fill(server: &PostgresServer) {
    server.query(
        "ALTER TABLE lockcore1.tickets ALTER owner SET STORAGE PLAIN; \
         INSERT INTO lockcore1.tickets SELECT 'filler', t, gen_random_uuid(), 1, 1, 1, \
         9000000000000000, true, t, 0, repeat('x', CASE t WHEN 1 THEN 5300 ELSE 7000 END) \
         FROM generate_series(1, 2048) AS t",
    );
    let size = server.query("SELECT pg_relation_size('lockcore1.tickets')");
    assert_eq!(size, [(2048 * PAGE).to_string()]);
    server.limit_files(Some(LONGEST));
}

async fn a_full_disk_refuses_locks_and_keeps_those_that_are_held(_: Store) {
    let server = PostgresServer::start();
    let client = || patient(server.url()).build().unwrap();
    let (locks, other) = (client(), client());
    let ttl = 2 * SHORT;
    let held = locks.mutex("held").ttl(ttl).acquire().await.unwrap();
    let released = locks.mutex("released").acquire().await.unwrap();
    fill(&server);

    let mut more = Vec::new();
    let refused = loop {
        match locks.mutex(format!("{}", more.len())).acquire().await {
            Ok(guard) => more.push(guard),
            Err(error) => break error,
        }
    };
    assert!(more.len() < 5, "{} locks more", more.len());
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    let text = refused.to_string();
    assert!(
        text.contains("could not extend file") && text.contains("free disk space"),
        "{text}"
    );
    for _ in 0..2 {
        is_renewed(&held, ttl).await;
    }
    assert!(held.is_valid());
    let outcome = other.mutex("held").try_acquire().await;
    assert!(matches!(
        kind(outcome),
        ErrorKind::Busy | ErrorKind::Unavailable
    ));
    give_back(released).await;
    tickets(&other, "released", 0).await;

    server.limit_files(None);
    works_again(&other, "a", SOON).await;
    give_back(held).await;
    for guard in more {
        give_back(guard).await;
    }
    let left = "SELECT count(*) FROM lockcore1.tickets WHERE name <> 'filler'";
    eventually("nothing is left", SOON, async || {
        server.query(left) == ["0"]
    })
    .await;
}

/// The messages need one hundredth of the queue.
async fn a_session_that_does_not_read_its_notifications_is_told(_: Store) {
    let server = PostgresServer::start();
    let events = EventSink::new(1, Namespace::new("test").unwrap(), |_| ());
    let store = backend::open(&server.url()).unwrap();
    let connection = store.connect(events).await.unwrap();
    let stuck = Table::open(&server).await;
    stuck.run("LISTEN news").await;
    stuck.run("BEGIN; SELECT 1").await;
    let told = async || {
        let warnings = connection.check().await.unwrap();
        let is_told = |warning: &String| warning.contains("queue of notifications");
        warnings.iter().any(is_told)
    };
    assert!(!told().await);

    server.query(
        "SELECT pg_notify('news', repeat('x', 7900) || n) FROM generate_series(1, 11000) AS n",
    );

    assert!(told().await);
    stuck.run("COMMIT").await;
    eventually("it has read them", SOON, async || !told().await).await;
}

/// No queue is filled here, which has 8 GB. What sends the messages fails, as the commit would.
async fn locks_change_hands_although_the_queue_of_notifications_is_full(_: Store) {
    let server = PostgresServer::with(&["log_statement=all"]);
    let client = || patient(server.url()).ttl(SHORT).build().unwrap();
    let (holder, waiter, other) = (client(), client(), client());
    let guard = holder.mutex("a").acquire().await.unwrap();
    let waits = begin(waiter.mutex("a").wait(STALL));
    tickets(&holder, "a", 2).await;
    let proxy = Proxy::to(server.port());
    let cut_off = patient(server.url_at(proxy.port())).ttl(SHORT).build();
    let cut_off = cut_off.unwrap();
    let writer = cut_off.rwlock("b").write().acquire().await.unwrap();
    let reads = [&waiter, &other].map(|locks| begin(locks.rwlock("b").read().wait(STALL)));
    tickets(&holder, "b", 3).await;
    let tell = "SELECT pg_get_functiondef('lockcore1.tell'::regproc)";
    let tell = server.query(tell).remove(0);
    server.query(
        "CREATE FUNCTION lockcore1.fail(text, text) RETURNS void LANGUAGE plpgsql AS $f$ BEGIN \
         RAISE EXCEPTION 'too many notifications in the NOTIFY queue' USING ERRCODE = '54000'; \
         END $f$",
    );
    server.query(&tell.replace("pg_notify", "fail"));

    // The release wakes a waiter.
    assert_eq!(guard.release().await.unwrap(), Release::Released);
    give_back(soon(waits).await.unwrap().unwrap()).await;
    // The reader that looks finds the writer dead, and so wakes the other one.
    proxy.cut();
    for reader in reads {
        give_back(soon(reader).await.unwrap().unwrap()).await;
    }
    proxy.restore();
    drop(writer);

    server.query(&tell);
    eventually("the clients notify each other again", SOON, async || {
        give_back(holder.mutex("a").acquire().await.unwrap()).await;
        let log = server.log_from(0);
        log.contains("statement: RESET lockcore1.quiet")
    })
    .await;
}
