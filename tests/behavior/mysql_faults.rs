//! Tests with MariaDB servers that crash, end connections and calls, have other settings, or whose
//! tables are missing. Each fact has its own server. A group of facts is the file of this folder.

mod cost;
mod deadlocks;
mod full;
mod locked;
mod settings;

use std::time::Duration;

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::{ErrorKind, Locks};
use tests::eventually::eventually;
use tests::faketime::Clock;
use tests::mysql_server::{DATABASE, HARNESS, MysqlServer, Session, USER};
use tests::proxy::Proxy;
use tests::watch::SECRET;

use crate::crowd::{Crowd, SHORT};
use crate::faults::{builder, is_probed, patient, tokens_rise, works_again};
use crate::store::{
    DEFAULT, Kind, LEASE, SOON, STALL, Store, begin, give_back, kind, soon, tickets,
};

/// What a person runs to make the tables.
const FILE: &str = include_str!("../../lockcore/src/backend/mysql/schema/lockcore1.sql");

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = locked::facts(store);
    facts.extend(cost::facts(store));
    // At equal distances, because each of these loads the machine.
    let deadlocks = deadlocks::facts(store);
    let distance = facts.len() / (deadlocks.len() + 1) + 1;
    for (nth, fact) in deadlocks.into_iter().enumerate() {
        facts.insert(nth * distance, fact);
    }
    facts.extend(full::facts(store));
    facts.extend(settings::facts(store));
    facts.extend(crate::store_facts![store, DEFAULT;
        a_crash_of_the_server_lets_no_second_holder_in
        a_replica_that_was_waited_for_lets_no_second_holder_in_when_it_is_promoted
        an_end_of_all_connections_lets_no_second_holder_in
        a_log_of_statements_is_refused
        a_server_that_takes_no_long_call_is_refused
        a_server_with_odd_defaults_keeps_locks
        a_server_that_takes_no_writes_any_more_is_unavailable
        a_server_without_a_free_connection_is_unavailable
        a_connection_without_traffic_is_probed
        clients_that_find_no_tables_make_them
        a_client_of_a_far_server_makes_the_tables
        clients_wait_while_somebody_runs_the_file
        procedures_of_an_earlier_version_are_replaced_by_a_client_that_may
        procedures_of_a_later_version_stay
        a_file_that_was_run_in_part_is_run_again_by_a_client_that_may
        a_file_that_is_run_in_two_sessions_is_refused
        a_process_that_waits_for_many_names_gets_each
        tables_that_a_user_may_not_make_are_told
        a_user_with_the_rights_of_the_guide_can_touch_no_table
        holders_notice_that_somebody_has_dropped_the_tables
        names_that_look_alike_are_different_names
        tokens_rise_when_the_clock_of_the_server_is_set_back
        a_clock_that_jumps_ahead_ends_leases_and_their_holders_learn_of_it
    ]);
    facts
}

fn client(server: &MysqlServer) -> Locks {
    patient(server.url()).build().unwrap()
}

/// A server with the tables, and a client of the user with the rights of the guide.
async fn with_tables(server: &MysqlServer) -> Locks {
    works_again(&client(server), "first", STALL).await;
    patient(server.url_with_user(USER, SECRET)).build().unwrap()
}

/// A crash of the machine would lose what is not on the disk. One of the server alone does not.
async fn a_crash_of_the_server_lets_no_second_holder_in(_: Store) {
    let server = MysqlServer::start();
    let crash = || {
        server.kill();
        server.restart();
    };
    Crowd::survives(&server.url(), crash).await;
}

async fn a_replica_that_was_waited_for_lets_no_second_holder_in_when_it_is_promoted(_: Store) {
    let old = MysqlServer::primary(&[]);
    let new = old.replica(old.port());
    let address = Proxy::to(old.port());
    let crowd = Crowd::begin(&old.url_at(address.port()), SHORT);
    crowd.visits(fastrand::usize(20..120)).await;
    let fail_over = || {
        old.kill();
        new.promote();
        address.lead_to(new.port());
    };
    crowd.crash(fail_over, true).await;
    crowd.visits(100).await;
    crowd.end().await;
}

/// Ends the connections of all clients, or only what they carry out at this moment.
fn kill(server: &MysqlServer, session: &mut Session, what: &str) {
    let clients = server.query(&format!(
        "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = '{DATABASE}'"
    ));
    // Some may have gone.
    for client in clients {
        session.run(&format!("KILL {what} {client}"));
    }
}

async fn an_end_of_all_connections_lets_no_second_holder_in(_: Store) {
    let server = MysqlServer::start();
    let mut session = server.session();
    let crowd = Crowd::begin(&server.url(), LEASE);
    for _ in 0..5 {
        for what in ["CONNECTION", "QUERY"] {
            crowd.visits(fastrand::usize(5..50)).await;
            kill(&server, &mut session, what);
        }
    }
    crowd.visits(100).await;
    crowd.end().await;
}

async fn a_log_of_statements_is_refused(_: Store) {
    let server = MysqlServer::with(&[
        "--log-bin=log",
        "--server-id=1",
        "--binlog-format=STATEMENT",
    ]);
    let outcome = client(&server).mutex("a").acquire().await;
    let text = outcome.as_ref().unwrap_err().to_string();
    assert_eq!(kind(outcome), ErrorKind::Config);
    assert!(
        text.contains("binlog_format") && text.contains("ROW"),
        "{text}"
    );
}

async fn a_server_that_takes_no_long_call_is_refused(_: Store) {
    let server = MysqlServer::with(&["--max-allowed-packet=1M"]);
    let outcome = client(&server).mutex("a").acquire().await;
    let text = outcome.as_ref().unwrap_err().to_string();
    assert_eq!(kind(outcome), ErrorKind::Config);
    assert!(
        text.contains("max_allowed_packet") && text.contains("4M"),
        "{text}"
    );
}

/// None of them is what the client needs, and each is what some server has.
async fn a_server_with_odd_defaults_keeps_locks(_: Store) {
    let server = MysqlServer::with(&[
        "--transaction-isolation=SERIALIZABLE",
        "--autocommit=0",
        "--sql-mode=ANSI,NO_BACKSLASH_ESCAPES",
        "--default-time-zone=+05:30",
        "--character-set-server=latin1",
        "--collation-server=latin1_german1_ci",
        "--innodb-lock-wait-timeout=1",
        "--wait-timeout=1",
    ]);
    let (locks, other) = (client(&server), client(&server));
    let first = locks.mutex("a\u{e4}").acquire().await.unwrap();
    let waits = begin(other.mutex("a\u{e4}").wait(STALL));
    tickets(&locks, "a\u{e4}", 2).await;
    let listed = locks.list("").with_summaries().next().await.unwrap();
    let listed = listed.unwrap();
    let summary = listed[0].summary.as_ref().unwrap();
    assert_eq!(
        (&*listed[0].name, summary.holders, summary.waiters),
        ("a\u{e4}", 1, 1)
    );
    assert!(summary.since.unwrap() < STALL, "{summary:?}");
    give_back(first).await;
    give_back(waits.await.unwrap().unwrap()).await;

    for _ in 0..3 {
        other.counter("a").add(1).await.unwrap();
    }
    assert_eq!(locks.counter("a").get().await.unwrap().count, 3);
}

/// As an operator makes it who moves the database to another server. The procedures run in the name
/// of a user whom the setting does not bind.
async fn a_server_that_takes_no_writes_any_more_is_unavailable(_: Store) {
    let server = MysqlServer::start();
    with_tables(&server).await;
    let url = server.url_with_user(USER, SECRET);
    // An operation that is refused is repeated for this long.
    let client = || builder(&url).op_timeout(SOON / 3).build().unwrap();
    let locks = client();
    works_again(&locks, "a", SOON).await;
    server.query("SET GLOBAL read_only = ON");

    for locks in [&locks, &client()] {
        let outcome = locks.mutex("a").acquire().await;
        assert_eq!(kind(outcome), ErrorKind::Unavailable);
    }

    server.query("SET GLOBAL read_only = OFF");
    works_again(&locks, "a", SOON).await;
}

async fn a_server_without_a_free_connection_is_unavailable(_: Store) {
    let server = MysqlServer::with(&["--max-connections=10"]);
    with_tables(&server).await;
    let url = server.url_with_user(USER, SECRET);
    let holder = patient(&url).build().unwrap();
    let guard = holder.mutex("a").acquire().await.unwrap();
    eventually("the first client has gone", STALL, async || {
        let first = format!(
            "SELECT COUNT(*) FROM information_schema.PROCESSLIST \
             WHERE USER = '{HARNESS}' AND DB = '{DATABASE}'"
        );
        server.query(&first) == ["0"]
    })
    .await;
    let mut sessions = Vec::new();
    loop {
        let mut session = server.session();
        if session.try_run("SELECT 1").is_none() {
            break;
        }
        sessions.push(session);
    }

    let locks = builder(&url).build().unwrap();
    let outcome = locks.mutex("b").acquire().await;
    assert_eq!(kind(outcome), ErrorKind::Unavailable);
    give_back(guard).await;

    drop(sessions);
    works_again(&locks, "b", SOON).await;
}

async fn a_connection_without_traffic_is_probed(_: Store) {
    let server = MysqlServer::start();
    let locks = patient(server.url()).build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();

    is_probed(server.port()).await;

    give_back(guard).await;
}

async fn clients_that_find_no_tables_make_them(_: Store) {
    for _ in 0..5 {
        let server = MysqlServer::start();
        let clients: Vec<Locks> = (0..4).map(|_| client(&server)).collect();
        let take = clients.iter().map(async |locks| {
            give_back(locks.mutex("a").wait(STALL).acquire().await.unwrap()).await;
        });
        join_all(take).await;
    }
}

/// The procedures are made one after the other, so it takes longer than one operation of the client.
async fn a_client_of_a_far_server_makes_the_tables(_: Store) {
    let server = MysqlServer::start();
    let proxy = Proxy::to(server.port());
    let each_way = Duration::from_millis(15);
    proxy.delay(each_way, each_way);

    let locks = builder(server.url_at(proxy.port())).build().unwrap();
    let lock = locks.mutex("a").wait(STALL).through_outages(true);
    let guard = lock.acquire().await.unwrap();

    assert_eq!(version(&server), VERSION);
    drop(guard);
}

/// What a later version of the file has, and this one has not.
const MARK: &str = "highest = NULL, cap = 0 + NULL";

/// A client with the rights of the guide is not told that a person is to run the file, and one that
/// may replaces nothing.
async fn clients_wait_while_somebody_runs_the_file(_: Store) {
    let server = MysqlServer::start();
    with_tables(&server).await;
    let file = file_of_version(VERSION + 1).replace("highest = NULL, cap = NULL", MARK);
    assert!(file.contains(MARK));
    let begins = file.find("DROP PROCEDURE IF EXISTS lockcore1_walk");
    let (first, second) = file.split_at(begins.unwrap());
    let mut session = server.session();
    session.run(&format!("USE {DATABASE};\n{first}\nDELIMITER ;\nDO 1"));

    let clients = [
        ("a", server.url_with_user(USER, SECRET)),
        ("b", server.url()),
    ];
    let takes = clients.map(|(name, url)| {
        let lock = patient(url).build().unwrap().mutex(name);
        begin(lock.wait(2 * STALL).through_outages(true))
    });
    eventually("both wait for the lock of the file", STALL, async || {
        let waiting = "SELECT COUNT(*) FROM information_schema.PROCESSLIST \
            WHERE STATE = 'User lock'";
        server.query(waiting) == ["2"] || takes.iter().any(tokio::task::JoinHandle::is_finished)
    })
    .await;
    session.run(&format!("DELIMITER //\n{second}\nDO 1"));

    for take in takes {
        give_back(take.await.unwrap().unwrap()).await;
    }
    assert_eq!(version(&server), VERSION + 1);
    let is_new = server.query(&format!(
        "SELECT LOCATE('{MARK}', ROUTINE_DEFINITION) > 0 FROM information_schema.ROUTINES \
         WHERE ROUTINE_NAME = 'lockcore1_take'"
    ));
    assert_eq!(is_new, ["1"]);
}

/// As by a program that spreads statements over several connections.
async fn a_file_that_is_run_in_two_sessions_is_refused(_: Store) {
    let server = MysqlServer::start();
    let begins = FILE.find("DROP PROCEDURE IF EXISTS lockcore1_replace");
    let (_, behind_the_lock) = FILE.split_at(begins.unwrap());

    let refused = server.try_query(&format!("USE {DATABASE};\nDELIMITER //\n{behind_the_lock}"));

    let text = refused.unwrap_err();
    assert!(text.contains("in one session"), "{text}");
    let tables = format!("SHOW TABLES FROM {DATABASE}");
    assert!(server.query(&tables).is_empty());
}

/// The version of the procedures of the file.
const VERSION: u32 = 3;

/// The file, as another version would have it.
fn file_of_version(version: u32) -> String {
    let file = FILE.replace(
        &format!("SELECT {VERSION} AS version"),
        &format!("SELECT {version} AS version"),
    );
    file.replace(
        &format!("lockcore1_replace({VERSION})"),
        &format!("lockcore1_replace({version})"),
    )
}

fn version(server: &MysqlServer) -> u32 {
    let version = server.query(&format!("USE {DATABASE}; CALL lockcore1_version()"));
    version[0].parse().unwrap()
}

async fn procedures_of_an_earlier_version_are_replaced_by_a_client_that_may(_: Store) {
    let server = MysqlServer::start();
    let early = with_tables(&server).await;
    let guard = early.mutex("early").acquire().await.unwrap();
    server.query(&format!("USE {DATABASE}; DROP PROCEDURE lockcore1_version"));
    server.query(&format!("USE {DATABASE};\n{}", file_of_version(0)));
    assert_eq!(version(&server), 0);

    let url = server.url_with_user(USER, SECRET);
    let refused = patient(&url).build().unwrap().mutex("a").acquire().await;
    let text = refused.as_ref().unwrap_err().to_string();
    assert_eq!(kind(refused), ErrorKind::Config, "{text}");
    assert!(text.contains("lockcore1.sql"), "{text}");
    assert_eq!(version(&server), 0);

    let owners: Vec<Locks> = (0..4).map(|_| client(&server)).collect();
    let take = owners.iter().map(async |locks| {
        give_back(locks.mutex("a").wait(STALL).acquire().await.unwrap()).await;
    });
    join_all(take).await;
    assert_eq!(version(&server), VERSION);
    give_back(
        patient(&url)
            .build()
            .unwrap()
            .mutex("a")
            .acquire()
            .await
            .unwrap(),
    )
    .await;
    guard.extend(LEASE).await.unwrap();
    give_back(guard).await;
}

async fn procedures_of_a_later_version_stay(_: Store) {
    let server = MysqlServer::start();
    server.query(&format!(
        "USE {DATABASE};\n{}",
        file_of_version(VERSION + 1)
    ));

    give_back(client(&server).mutex("a").acquire().await.unwrap()).await;
    let refused = server.try_query(&format!("USE {DATABASE};\n{FILE}"));

    let text = refused.unwrap_err();
    assert!(text.contains("a later version"), "{text}");
    assert_eq!(version(&server), VERSION + 1);
}

/// Each part ends behind a procedure that was dropped and is not made yet.
async fn a_file_that_was_run_in_part_is_run_again_by_a_client_that_may(_: Store) {
    let server = MysqlServer::start();
    with_tables(&server).await;
    for procedure in ["take", "release", "sweep"] {
        let made = format!("CREATE PROCEDURE lockcore1_{procedure}(");
        let part = &FILE[..FILE.find(&made).unwrap()];
        server.query(&format!("USE {DATABASE};\n{part}"));

        give_back(client(&server).mutex("a").acquire().await.unwrap()).await;
        assert_eq!(version(&server), VERSION);
    }
}

/// More names than one look asks for. No renewal is due meanwhile, although the line takes long to form.
async fn a_process_that_waits_for_many_names_gets_each(_: Store) {
    let server = MysqlServer::start();
    let (holder, waiter) = (client(&server), client(&server));
    let names: Vec<String> = (0..1_100).map(|number| format!("n{number:04}")).collect();
    let take = names
        .iter()
        .map(|name| begin(holder.mutex(name).ttl(6 * LEASE).wait(LEASE)));
    let mut guards = join_all(take).await;
    let mut waits: Vec<_> = names
        .iter()
        .map(|name| begin(waiter.mutex(name).ttl(6 * LEASE).wait(LEASE)))
        .collect();
    let (last, guard) = (waits.pop().unwrap(), guards.pop().unwrap());
    eventually("the line has formed", 2 * STALL, async || {
        holder.inspect("n1099").await.unwrap().len() == 2
    })
    .await;

    give_back(guard.unwrap().unwrap()).await;

    give_back(soon(last).await.unwrap().unwrap()).await;
    waits.iter().for_each(tokio::task::JoinHandle::abort);
}

async fn tables_that_a_user_may_not_make_are_told(_: Store) {
    let server = MysqlServer::start();
    let locks = patient(server.url_with_user(USER, SECRET)).build().unwrap();
    let missing = locks.mutex("a").acquire().await;
    let text = missing.as_ref().unwrap_err().to_string();
    assert_eq!(kind(missing), ErrorKind::Config);
    assert!(text.contains("lockcore1.sql"), "{text}");

    server.query(&format!("USE {DATABASE};\n{FILE}"));
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}

async fn a_user_with_the_rights_of_the_guide_can_touch_no_table(_: Store) {
    let server = MysqlServer::start();
    let locks = with_tables(&server).await;
    locks.ready(SOON).await.unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;

    let grants = server.query(&format!("SHOW GRANTS FOR {USER}@'%'"));
    let guide = include_str!("../../lockcore/src/backend/mysql/guide.md");
    let stated = guide
        .lines()
        .find(|line| line.starts_with("GRANT "))
        .unwrap();
    let plain = |grant: &str| grant.replace(['`', '\'', ';'], "");
    assert!(
        grants.iter().any(|grant| plain(grant) == plain(stated)),
        "{grants:?}"
    );
    assert_eq!(grants.len(), 2, "{grants:?}");
}

async fn holders_notice_that_somebody_has_dropped_the_tables(_: Store) {
    let server = MysqlServer::start();
    let locks = client(&server);
    let guard = locks.mutex("a").ttl(SHORT).acquire().await.unwrap();
    let token = guard.fencing_token().unwrap();
    server.query(&format!(
        "USE {DATABASE}; DROP TABLE lockcore1_tickets, lockcore1_names, lockcore1_marks, lockcore1_counters"
    ));

    soon(guard.lost()).await;
    let outcome = locks.mutex("b").acquire().await;
    assert_eq!(kind(outcome), ErrorKind::Config);

    server.query(&format!("USE {DATABASE};\n{FILE}"));
    let next = locks.mutex("a").acquire().await.unwrap();
    assert!(next.fencing_token().unwrap() > token);
    give_back(next).await;
}

/// Collations take these for the same text.
async fn names_that_look_alike_are_different_names(_: Store) {
    let server = MysqlServer::start();
    let locks = client(&server);
    let mut guards = Vec::new();
    for name in ["a", "A", "a ", "\u{e1}", "a\u{301}", "\u{ff41}"] {
        guards.push(locks.mutex(name).try_acquire().await.unwrap());
    }
    join_all(guards.into_iter().map(give_back)).await;
}

async fn tokens_rise_when_the_clock_of_the_server_is_set_back(_: Store) {
    let server = MysqlServer::with_clock();
    tokens_rise(&client(&server), |clock| server.set_clock(clock)).await;
}

async fn a_clock_that_jumps_ahead_ends_leases_and_their_holders_learn_of_it(_: Store) {
    let server = MysqlServer::with_clock();
    let (holder, others) = (client(&server), client(&server));
    let guard = holder.mutex("a").ttl(2 * SHORT).acquire().await.unwrap();
    let token = guard.fencing_token().unwrap();
    let waits = begin(others.mutex("a").wait(STALL));
    tickets(&others, "a", 2).await;

    server.set_clock(Clock::Ahead(Duration::from_secs(3600)));

    soon(guard.lost()).await;
    let outcome = soon(waits).await.unwrap();
    // The ticket of the one that waits has ended, too, and it has asked again.
    let next = outcome.unwrap();
    assert!(next.fencing_token().unwrap() > token);
    give_back(next).await;
}
