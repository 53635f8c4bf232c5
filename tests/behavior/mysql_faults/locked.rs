//! Facts about rows of the tables that a transaction of somebody else has locked.

use std::future::ready;
use std::sync::Arc;

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::{Locks, Release};
use tests::eventually::eventually;
use tests::mysql_server::{DATABASE, MysqlServer, Session};

use super::{client, with_tables};
use crate::crowd::SHORT;
use crate::faults::{builder, is_renewed, works_again};
use crate::store::{DEFAULT, Kind, LEASE, SOON, STALL, Store, begin, give_back, soon, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_name_that_somebody_else_has_locked_holds_up_no_other_one
        a_release_of_a_name_that_somebody_else_has_locked_holds_up_no_other_one
        a_holder_of_a_name_that_somebody_else_has_locked_loses_no_other_name
        a_holder_of_tickets_that_somebody_else_has_locked_loses_no_other_name
        a_holder_of_a_ticket_that_is_locked_for_a_moment_keeps_it
        a_dead_ticket_that_somebody_else_has_locked_holds_up_no_other_name
        names_that_are_locked_while_their_holder_gives_them_back_are_free_afterwards
        a_sweep_that_waits_for_a_row_holds_up_no_name
        a_sweep_leaves_out_tickets_that_somebody_else_has_locked
        a_read_waits_for_no_row
        a_call_that_was_ended_while_it_waited_is_repeated
        a_call_that_waited_for_too_long_is_repeated_on_its_connection
        a_release_that_meets_a_deadlock_is_carried_out
        a_read_leaves_no_transaction_open
    ]
}

/// Locks rows, until the session rolls back or ends.
fn lock(session: &mut Session, rows: &str) {
    session.run(&format!(
        "BEGIN; SELECT 1 FROM {DATABASE}.lockcore1_{rows} FOR UPDATE"
    ));
}

/// A server, a client of it, and a session that has locked the name `a`.
async fn with_a_locked_name() -> (MysqlServer, Locks, Session) {
    let server = MysqlServer::start();
    let mut session = server.session();
    let locks = with_tables(&server).await;
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    lock(&mut session, "names WHERE name = 'test:1:{a}'");
    (server, locks, session)
}

/// The connections that are in a call while one call waits for a row, each with the number of its
/// statement.
fn waiting(server: &MysqlServer) -> Vec<String> {
    server.query(&format!(
        "SELECT CONCAT(ID, ' ', QUERY_ID) FROM information_schema.PROCESSLIST \
         WHERE DB = '{DATABASE}' AND COMMAND = 'Query' AND 1 = (SELECT VARIABLE_VALUE \
         FROM information_schema.GLOBAL_STATUS \
         WHERE VARIABLE_NAME = 'INNODB_ROW_LOCK_CURRENT_WAITS')"
    ))
}

async fn one_waits(server: &MysqlServer) -> Vec<String> {
    let mut seen = Vec::new();
    eventually("a call waits for the row", SOON, || {
        seen = waiting(server);
        ready(seen.len() == 1)
    })
    .await;
    seen
}

/// The calls of the other name need a connection of their own.
async fn a_name_that_somebody_else_has_locked_holds_up_no_other_one(_: Store) {
    let (server, locks, mut session) = with_a_locked_name().await;

    let waits = begin(locks.mutex("a").wait(STALL));
    let before = one_waits(&server).await;
    give_back(locks.mutex("b").acquire().await.unwrap()).await;
    let after = waiting(&server);

    assert_eq!(
        before, after,
        "the call for the other name did not wait for this one"
    );
    session.run("ROLLBACK");
    give_back(waits.await.unwrap().unwrap()).await;
}

/// The call of the release waits for five seconds. On a machine that stalls it may end before the other
/// name has changed hands, and then this is tried again.
async fn a_release_of_a_name_that_somebody_else_has_locked_holds_up_no_other_one(_: Store) {
    let server = MysqlServer::start();
    let mut session = server.session();
    let locks = with_tables(&server).await;
    for _ in 0..5 {
        let guard = locks.mutex("a").acquire().await.unwrap();
        lock(&mut session, "names WHERE name = 'test:1:{a}'");
        let release = tokio::spawn(guard.release());
        let before = one_waits(&server).await;

        give_back(locks.mutex("b").acquire().await.unwrap()).await;

        let goes_on = waiting(&server) == before;
        session.run("ROLLBACK");
        let released = release.await.unwrap();
        tickets(&locks, "a", 0).await;
        if goes_on {
            assert_eq!(released.unwrap(), Release::Released);
            return;
        }
    }
    panic!("the other name has waited for the release");
}

/// The keeper renews all in one call, if it can.
async fn a_holder_of_a_name_that_somebody_else_has_locked_loses_no_other_name(_: Store) {
    let server = MysqlServer::start();
    let mut session = server.session();
    with_tables(&server).await;
    let locks = builder(server.url()).build().unwrap();
    works_again(&locks, "first", STALL).await;
    let take = |name: &str| {
        let lock = locks.mutex(name).ttl(SHORT);
        async move {
            let lock = lock.wait(SOON).through_outages(true);
            lock.acquire().await.unwrap()
        }
    };
    let locked = take("a").await;
    let mut others = Vec::new();
    for name in ["b", "c", "d"] {
        others.push(take(name).await);
    }
    lock(&mut session, "names WHERE name = 'test:1:{a}'");

    soon(locked.lost()).await;
    for guard in &others {
        is_renewed(guard, SHORT).await;
        assert!(guard.is_valid());
    }

    session.run("ROLLBACK");
    join_all(others.into_iter().map(give_back)).await;
    works_again(&locks, "a", SOON).await;
}

/// More names than a client has connections.
async fn a_holder_of_tickets_that_somebody_else_has_locked_loses_no_other_name(_: Store) {
    let server = MysqlServer::start();
    let mut session = server.session();
    with_tables(&server).await;
    let locks = builder(server.url()).build().unwrap();
    works_again(&locks, "first", STALL).await;
    let take = async |name: &str| {
        let lock = locks.mutex(name).ttl(SHORT).wait(SOON);
        lock.through_outages(true).acquire().await.unwrap()
    };
    let mut locked = Vec::new();
    for number in 0..12 {
        locked.push(take(&format!("a{number}")).await);
    }
    let mut others = Vec::new();
    for name in ["b", "c", "d"] {
        others.push(take(name).await);
    }
    // Otherwise the server locks all rows that it reads.
    session.run("SET TRANSACTION ISOLATION LEVEL READ COMMITTED");
    lock(&mut session, "tickets WHERE name LIKE 'test:1:{a%'");

    for guard in &locked {
        soon(guard.lost()).await;
    }
    for guard in &others {
        is_renewed(guard, SHORT).await;
        assert!(guard.is_valid());
    }

    session.run("ROLLBACK");
    join_all(others.into_iter().map(give_back)).await;
    works_again(&locks, "a0", SOON).await;
}

/// A ticket that a call leaves out is neither lost nor renewed.
async fn a_holder_of_a_ticket_that_is_locked_for_a_moment_keeps_it(_: Store) {
    let server = MysqlServer::start();
    let mut session = server.session();
    with_tables(&server).await;
    let locks = builder(server.url()).build().unwrap();
    works_again(&locks, "first", STALL).await;
    let ttl = 2 * SHORT;
    let mut guards = Vec::new();
    for name in ["a", "b"] {
        let lock = locks.mutex(name).ttl(ttl).wait(SOON);
        guards.push(lock.through_outages(true).acquire().await.unwrap());
    }
    lock(&mut session, "tickets WHERE name = 'test:1:{a}'");

    one_waits(&server).await;
    session.run("ROLLBACK");

    is_renewed(&guards[0], ttl).await;
    assert!(guards.iter().all(|guard| guard.is_valid()));
    join_all(guards.into_iter().map(give_back)).await;
}

/// A renewal of the one that waits behind it, and of another name.
async fn a_dead_ticket_that_somebody_else_has_locked_holds_up_no_other_name(_: Store) {
    let server = MysqlServer::start();
    let mut session = server.session();
    with_tables(&server).await;
    let ticket = |name: &str, number: u32, expires: &str, holds: u32| {
        format!(
            "('{name}', {number}, REPEAT('{number}', 16), 1, 1, 1, {expires}, {holds}, {number}, 0, '')"
        )
    };
    server.query(&format!(
        "INSERT INTO {DATABASE}.lockcore1_names (name) VALUES ('a'), ('b'); \
         INSERT INTO {DATABASE}.lockcore1_tickets VALUES {}, {}, {}",
        ticket("a", 1, "1", 1),
        ticket("a", 2, "1 << 60", 0),
        ticket("b", 3, "1 << 60", 1),
    ));
    let one_permit_for_a_minute = "X'000000010000000003938700'";
    let renew = format!(
        "USE {DATABASE}; SET innodb_lock_wait_timeout = 1; CALL lockcore1_renew(CONCAT( \
         X'000161', X'0001', REPEAT('2', 16), {one_permit_for_a_minute}, \
         X'000162', X'0001', REPEAT('3', 16), {one_permit_for_a_minute}))"
    );
    lock(&mut session, "tickets WHERE name = 'a' AND ticket = 1");

    assert_eq!(server.query(&renew), ["-;3,1,60000000,,;"]);

    session.run("ROLLBACK");
    assert_eq!(server.query(&renew), ["2,1,60000000,,;3,1,60000000,,;"]);
}

async fn names_that_are_locked_while_their_holder_gives_them_back_are_free_afterwards(_: Store) {
    let server = MysqlServer::start();
    let mut session = server.session();
    let locks = with_tables(&server).await;
    for table in ["names", "tickets"] {
        let mut guards = Vec::new();
        for name in ["a", "b", "c"] {
            guards.push(locks.mutex(name).ttl(LEASE).acquire().await.unwrap());
        }
        lock(
            &mut session,
            &format!("{table} WHERE name = 'test:1:{{b}}'"),
        );

        // The keeper gives all back, in one call if it can.
        drop(guards);
        let left = || server.query(&format!("SELECT name FROM {DATABASE}.lockcore1_tickets"));
        eventually("the others are free", 2 * SOON, async || {
            left() == ["test:1:{b}"]
        })
        .await;
        session.run("ROLLBACK");

        eventually("all are free", SOON, async || left().is_empty()).await;
    }
    locks.shutdown(SOON).await.unwrap();
}

/// The sweep removes the name, and then waits for the mark.
async fn a_sweep_that_waits_for_a_row_holds_up_no_name(_: Store) {
    let server = Arc::new(MysqlServer::start());
    let mut session = server.session();
    let locks = with_tables(&server).await;
    server.query(&format!(
        "INSERT INTO {DATABASE}.lockcore1_names (name, last) VALUES ('test:1:{{old}}', 1); \
         INSERT INTO {DATABASE}.lockcore1_marks VALUES (X'00', 'test:1:{{old}}', 1)"
    ));
    lock(&mut session, "marks");
    let sweeps = {
        let server = Arc::clone(&server);
        tokio::task::spawn_blocking(move || {
            let sweep = format!("USE {DATABASE}; CALL lockcore1_sweep('')");
            server.query(&sweep)
        })
    };
    let before = one_waits(&server).await;

    let guard = locks.mutex("old").acquire().await.unwrap();

    assert_eq!(waiting(&server), before, "the sweep still waits");
    session.run("ROLLBACK");
    assert_eq!(sweeps.await.unwrap(), ["NULL"]);
    give_back(guard).await;
    let marks = format!("SELECT COUNT(*) FROM {DATABASE}.lockcore1_marks WHERE expires_at = 1");
    assert_eq!(server.query(&marks), ["0"]);
}

/// A step of the sweep has locked other names.
async fn a_sweep_leaves_out_tickets_that_somebody_else_has_locked(_: Store) {
    let server = MysqlServer::start();
    let mut session = server.session();
    with_tables(&server).await;
    let left = || server.query(&format!("SELECT name FROM {DATABASE}.lockcore1_tickets"));
    let sweep = || {
        let sweep = "SET innodb_lock_wait_timeout = 1; CALL lockcore1_sweep('')";
        server
            .try_query(&format!("USE {DATABASE}; {sweep}"))
            .unwrap();
    };
    for name in ["a", "b", "c"] {
        server.query(&format!(
            "INSERT INTO {DATABASE}.lockcore1_names (name) VALUES ('test:1:{{{name}}}'); \
             INSERT INTO {DATABASE}.lockcore1_tickets \
             VALUES ('test:1:{{{name}}}', 1, '{name}', 1, 1, 1, 1, 1, 0, 0, '')"
        ));
    }
    lock(&mut session, "tickets WHERE name = 'test:1:{b}'");

    sweep();

    assert_eq!(left(), ["test:1:{b}"]);
    session.run("ROLLBACK");
    sweep();
    assert!(left().is_empty());
}

/// Somebody else has locked all rows.
async fn a_read_waits_for_no_row(_: Store) {
    let server = MysqlServer::start();
    let locks = with_tables(&server).await;
    let guard = locks.mutex("a").ttl(LEASE).acquire().await.unwrap();
    let mut other = server.session();
    for table in ["names", "tickets", "marks", "counters"] {
        other.run(&format!(
            "SET autocommit = 0; SELECT 1 FROM {DATABASE}.lockcore1_{table} FOR UPDATE"
        ));
    }

    for call in [
        "look(X'000a746573743a313a7b617d0000000000000001')",
        "inspect('test:1:{a}')",
        "list('', '', 'z', 10)",
        "overview('', '', 'z', 10)",
        "stored('test:1:{a}')",
        "counter('test:1:{a}')",
    ] {
        let call = format!("CALL lockcore1_{call}");
        let rows = server.try_query(&format!(
            "USE {DATABASE}; SET innodb_lock_wait_timeout = 1; {call}"
        ));
        assert_eq!(rows.unwrap().len(), 1, "{call}");
    }
    other.run("ROLLBACK");
    give_back(guard).await;
}

async fn a_call_that_was_ended_while_it_waited_is_repeated(_: Store) {
    let server = MysqlServer::start();
    let mut session = server.session();
    let locks = with_tables(&server).await;
    for what in ["CONNECTION", "QUERY"] {
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
        lock(&mut session, "names WHERE name = 'test:1:{a}'");
        let waits = begin(locks.mutex("a").wait(STALL));
        let waiting = one_waits(&server).await;
        let (connection, _) = waiting[0].split_once(' ').unwrap();

        server.query(&format!("KILL {what} {connection}"));
        session.run("ROLLBACK");

        let guard = waits.await.unwrap().unwrap();
        tickets(&locks, "a", 1).await;
        give_back(guard).await;
    }
}

/// The client waits for the answer for longer than the call waits for the row.
async fn a_call_that_waited_for_too_long_is_repeated_on_its_connection(_: Store) {
    let (server, locks, mut session) = with_a_locked_name().await;
    let waits = begin(locks.mutex("a").wait(STALL));
    let first = one_waits(&server).await;
    let (connection, _) = first[0].split_once(' ').unwrap();

    eventually("another call of the connection waits", STALL, async || {
        let now = waiting(&server);
        now.len() == 1 && now != first && now[0].split_once(' ').unwrap().0 == connection
    })
    .await;

    session.run("ROLLBACK");
    give_back(waits.await.unwrap().unwrap()).await;
    tickets(&locks, "a", 0).await;
}

/// Somebody else locks the ticket and then the name, and has written more, so the server rolls the
/// release back.
async fn a_release_that_meets_a_deadlock_is_carried_out(_: Store) {
    let server = MysqlServer::start();
    let mut session = server.session();
    let locks = with_tables(&server).await;
    let guard = locks.mutex("a").acquire().await.unwrap();
    session.run(&format!(
        "CREATE TABLE {DATABASE}.others (number INT); BEGIN; \
         INSERT INTO {DATABASE}.others SELECT seq FROM {DATABASE}.seq_1_to_1000; \
         SELECT 1 FROM {DATABASE}.lockcore1_tickets FOR UPDATE"
    ));
    let release = tokio::spawn(give_back(guard));
    one_waits(&server).await;

    let locked = session.run(&format!(
        "SELECT name FROM {DATABASE}.lockcore1_names WHERE name = 'test:1:{{a}}' FOR UPDATE"
    ));

    assert_eq!(locked, ["test:1:{a}"], "the other one was not rolled back");
    one_waits(&server).await;
    session.run("ROLLBACK");
    release.await.unwrap();
    tickets(&locks, "a", 0).await;
}

/// As behind a proxy whose connections do not commit by themselves.
async fn a_read_leaves_no_transaction_open(_: Store) {
    let server = MysqlServer::start();
    let locks = client(&server);
    let guard = locks.mutex("a").acquire().await.unwrap();
    locks.counter("a").add(1).await.unwrap();
    let mut session = server.session();
    session.run(&format!("USE {DATABASE}; SET autocommit = 0"));
    for call in [
        "look(X'000a746573743a313a7b617d0000000000000001')",
        "inspect('test:1:{another}')",
        "list('', '', 'z', 10)",
        "overview('', '', 'z', 10)",
        "stored('test:1:{a}')",
        "counter('test:1:{a}')",
    ] {
        session.run(&format!("CALL lockcore1_{call}"));
        let open = session.run("SELECT @@in_transaction");
        assert_eq!(open, ["0"], "{call}");
    }
    give_back(guard).await;
}
