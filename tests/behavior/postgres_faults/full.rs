//! Facts about a server that has no room: for its tables, or in its queue of notifications.

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use lockcore::backend::{self, EventSink, Namespace};
use tests::eventually::eventually;
use tests::postgres_server::PostgresServer;

use super::holds::Table;
use crate::crowd::SHORT;
use crate::faults::{is_renewed, patient, works_again};
use crate::store::{DEFAULT, Kind, SOON, STALL, Store, begin, give_back, kind, soon, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_full_disk_refuses_locks_and_keeps_those_that_are_held
        a_session_that_does_not_read_its_notifications_is_told
        a_lock_that_cannot_be_handed_over_by_a_notification_is_free_when_its_lease_ends
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
    let held = locks.mutex("held").ttl(SHORT).acquire().await.unwrap();
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
        is_renewed(&held, SHORT).await;
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
    assert_eq!(server.query(left), ["0"]);
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

/// No queue is filled here, which has 8 GB. The function that sends the messages fails as the commit would.
async fn a_lock_that_cannot_be_handed_over_by_a_notification_is_free_when_its_lease_ends(_: Store) {
    let server = PostgresServer::start();
    let client = || patient(server.url()).build().unwrap();
    let (holder, waiter) = (client(), client());
    let guard = holder.mutex("a").ttl(SHORT).acquire().await.unwrap();
    let waits = begin(waiter.mutex("a").wait(STALL));
    tickets(&holder, "a", 2).await;
    let tell = "SELECT pg_get_functiondef('lockcore1.tell'::regproc)";
    let tell = server.query(tell).remove(0);
    server.query(
        "CREATE OR REPLACE FUNCTION lockcore1.tell(messages lockcore1.news[], answered uuid[]) \
         RETURNS void LANGUAGE plpgsql AS $f$ BEGIN \
         IF messages = '{}' THEN RETURN; END IF; \
         RAISE EXCEPTION 'too many notifications in the NOTIFY queue' USING ERRCODE = '54000'; \
         END $f$",
    );

    assert_eq!(kind(guard.release().await), ErrorKind::Unavailable);
    server.query(&tell);

    give_back(soon(waits).await.unwrap().unwrap()).await;
}
