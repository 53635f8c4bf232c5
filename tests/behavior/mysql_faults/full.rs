//! Facts about a server that has no room for another page. What it cannot write to a table space of the
//! largest size, it cannot write to a full disk either.

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::mysql_server::{DATABASE, MysqlServer};

use super::client;
use crate::crowd::SHORT;
use crate::faults::{is_renewed, works_again};
use crate::store::{DEFAULT, Kind, SOON, Store, give_back, kind, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_full_table_space_refuses_locks_and_keeps_those_that_are_held
    ]
}

/// A server whose tables are all in one file, which may not become larger than this.
fn small() -> MysqlServer {
    MysqlServer::with(&[
        "--innodb-file-per-table=OFF",
        "--innodb-data-file-path=ibdata1:4M:autoextend:max:20M",
    ])
}

/// Writes rows until the server has no room for another one. It keeps some room back for its own work,
/// such as the removal of rows. Rows of several pages would use that up too.
fn fill(server: &MysqlServer) {
    let row = "INSERT INTO filler VALUES (REPEAT('x', 7900));".repeat(2_000);
    let refused = server.try_query(&format!(
        "USE {DATABASE}; CREATE TABLE filler (data VARCHAR(8000)) CHARACTER SET latin1; {row}"
    ));
    let refused = refused.unwrap_err();
    assert!(refused.contains("ERROR 1114"), "{refused}");
}

async fn a_full_table_space_refuses_locks_and_keeps_those_that_are_held(_: Store) {
    let server = small();
    let (locks, other) = (client(&server), client(&server));
    let ttl = 2 * SHORT; // filling the table space is work for the server too
    let held = locks.mutex("held").ttl(ttl).acquire().await.unwrap();
    let released = locks.mutex("released").acquire().await.unwrap();
    fill(&server);

    // The rows of some of these names fill a page.
    let mut more = Vec::new();
    let refused = loop {
        let name = format!("{:0>500}", more.len());
        match locks.mutex(name).acquire().await {
            Ok(guard) if more.len() < 2_000 => more.push(guard),
            Ok(_) => panic!("there is room"),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    let text = refused.to_string();
    assert!(
        text.contains("is full") && text.contains("free disk space"),
        "{text}"
    );
    for _ in 0..2 {
        is_renewed(&held, ttl).await;
    }
    assert!(held.is_valid());
    let busy = other.mutex("held").try_acquire().await;
    assert_eq!(kind(busy), ErrorKind::Busy);
    give_back(released).await;
    tickets(&other, "released", 0).await;

    server.query(&format!("DROP TABLE {DATABASE}.filler"));
    works_again(&other, "a", SOON).await;
    give_back(held).await;
    for guard in more {
        give_back(guard).await;
    }
    let left = format!("SELECT COUNT(*) FROM {DATABASE}.lockcore1_tickets");
    assert_eq!(server.query(&left), ["0"]);
}
