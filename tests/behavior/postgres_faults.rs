//! Tests with PostgreSQL servers that crash, end processes of clients, have other settings, or lack
//! the schema. Each fact has its own server. Some groups of facts are the files of this folder.

mod cost;
mod full;
mod holds;
mod standbys;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::backend::{
    self, Departure, Enqueued, EventSink, FULL, Id, Name, Namespace, Released, Request,
};
use lockcore::{ErrorKind, Locks};
use tests::eventually::eventually;
use tests::faketime::Clock;
use tests::postgres_server::{Pooler, PostgresServer, USER};
use tests::proxy::Proxy;
use tests::watch::SECRET;
use tests::witness::Witness;

use holds::Table;

use crate::crowd::{Crowd, SHORT};
use crate::faults::{builder, is_probed, patient, tokens_rise, works_again};
use crate::store::{
    DEFAULT, Kind, LEASE, PATIENCE, SOON, STALL, Store, begin, give_back, kind, soon, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = holds::facts(store);
    facts.extend(cost::facts(store));
    facts.extend(full::facts(store));
    facts.extend(standbys::facts(store));
    facts.extend(crate::store_facts![store, DEFAULT;
        a_crash_of_the_server_lets_no_second_holder_in
        what_a_client_was_told_before_a_crash_counts_after_it
        a_holder_that_a_crash_has_put_back_in_line_stays_alone
        an_end_of_all_processes_of_clients_lets_no_second_holder_in
        clients_that_find_no_schema_make_one
        a_schema_that_a_user_may_not_make_is_told
        functions_of_an_earlier_version_are_replaced_by_a_client_that_may
        functions_of_a_later_version_stay
        a_database_with_another_default_isolation_has_locks_all_the_same
        an_old_snapshot_elsewhere_stops_nobody
        a_user_with_the_rights_of_the_guide_can_touch_no_table
        a_user_with_a_scram_password_logs_in
        a_sweep_removes_every_dead_line_and_keeps_its_numbers
        a_pooler_in_transaction_mode_is_refused_and_nothing_is_left_there
        clients_that_look_behind_a_pooler_exclude_each_other_and_leave_nothing_there
        a_database_that_is_only_read_is_unavailable
        a_server_without_a_free_connection_is_unavailable
        a_connection_without_traffic_is_probed
        a_request_for_a_hundred_names_takes_one_lock_for_each
        tokens_rise_when_the_clock_of_the_server_is_set_back
        a_clock_that_jumps_ahead_ends_leases_and_their_holders_learn_of_it
    ]);
    facts
}

/// The server writes its log so rarely that nearly all releases and grants of the last moments are
/// lost. Each crash comes at another moment.
async fn a_crash_of_the_server_lets_no_second_holder_in(_: Store) {
    let server = PostgresServer::with(&["wal_writer_delay=10s"]);
    let crash = || {
        server.kill();
        server.restart();
    };
    Crowd::survives(&server.url(), crash).await;
}

/// Nothing but the flushes of the clients writes the log of this server to the disk.
fn lazy_server() -> PostgresServer {
    PostgresServer::with(&["wal_writer_delay=10s", "autovacuum=off"])
}

async fn what_a_client_was_told_before_a_crash_counts_after_it(_: Store) {
    let server = lazy_server();
    let crash = || {
        server.kill();
        server.restart();
    };
    let client = || patient(server.url()).build().unwrap();
    let (holder, other) = (client(), client());

    let granted = holder.mutex("granted").acquire().await.unwrap();
    crash();
    let outcome = other.mutex("granted").try_acquire().await;
    assert_eq!(kind(outcome), ErrorKind::Busy);
    give_back(granted).await;

    // This client cannot renew the lease once more.
    let proxy = Proxy::to(server.port());
    let cut_off = patient(server.url_at(proxy.port())).build().unwrap();
    let renewed = cut_off.mutex("renewed").ttl(SHORT).acquire().await.unwrap();
    renewed.extend(LEASE).await.unwrap();
    proxy.cut();
    crash();
    let outcome = other.mutex("renewed").wait(2 * SHORT).acquire().await;
    assert_eq!(kind(outcome), ErrorKind::Timeout);
    proxy.restore();
    give_back(renewed).await;

    let detached = holder.mutex("adopted").acquire().await.unwrap();
    let text = detached.detach().await.unwrap();
    let adopted = other.adopt(&text).await.unwrap();
    crash();
    give_back(adopted).await;

    holder.semaphore("resized", 4).resize(2).await.unwrap();
    crash();
    let capacity = other.semaphore("resized", 4).capacity().await;
    assert_eq!(capacity.unwrap(), 2);
}

/// The crash undoes the release by which the holder was granted. So the ticket that was released
/// is there again, in front of the holder's, until its lease ends.
///
/// Nothing may write the release to the disk before the crash. So no client renews a ticket
/// meanwhile, because a flush would follow. And the server writes each page of its log that is
/// full, so the release is at the beginning of a page.
async fn a_holder_that_a_crash_has_put_back_in_line_stays_alone(_: Store) {
    let server = lazy_server();
    let ttl = Duration::from_secs(60);
    let client = |ttl| patient(server.url()).ttl(ttl).build().unwrap();
    let (first, next, third) = (client(ttl), client(ttl), client(SHORT));
    let resource = Arc::new(Witness::exclusive());
    let released = first.mutex("a").acquire().await.unwrap();
    let waits = begin(next.mutex("a").wait(SOON));
    tickets(&first, "a", 2).await;
    eventually("both clients have flushed", SOON, async || {
        let flushed = "SELECT count(*) FROM pg_stat_activity \
            WHERE query LIKE 'SELECT lockcore1.flush(%' AND state = 'idle'";
        server.query(flushed) == ["2"]
    })
    .await;
    server.query("SELECT pg_switch_wal()");
    give_back(released).await;
    let guard = waits.await.unwrap().unwrap();

    let visit = resource.enter(1);
    let holders = || server.query("SELECT ticket FROM lockcore1.tickets WHERE granted");
    let told = holders();
    server.kill();
    server.restart();

    let back = holders();
    assert!(back.len() == 1 && back != told, "{back:?} after {told:?}");
    let visits = Arc::clone(&resource);
    let lock = third.mutex("a").wait(2 * SOON);
    let waits = tokio::spawn(async move {
        let guard = lock.acquire().await.unwrap();
        drop(visits.enter(1));
        give_back(guard).await;
    });
    tickets(&third, "a", 3).await;
    guard.extend(ttl).await.unwrap();
    assert_eq!(holders(), back);

    server.query("UPDATE lockcore1.tickets SET expires_at = 0 WHERE granted");
    eventually("granted once more", SOON, async || holders() == told).await;
    guard.extend(ttl).await.unwrap();
    drop(visit);
    give_back(guard).await;
    waits.await.unwrap();
    resource.assert_no_overlap();
}

async fn an_end_of_all_processes_of_clients_lets_no_second_holder_in(_: Store) {
    let server = PostgresServer::start();
    let crowd = Crowd::begin(&server.url(), LEASE);
    for _ in 0..10 {
        crowd.visits(fastrand::usize(5..50)).await;
        server.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE application_name = 'lockcore'",
        );
    }
    crowd.visits(100).await;
    crowd.end().await;
}

/// One of them makes it, and the others leave it alone: all of it is of one transaction.
async fn clients_that_find_no_schema_make_one(_: Store) {
    for _ in 0..5 {
        let server = PostgresServer::without_schema();
        let clients: Vec<Locks> = (0..4)
            .map(|_| patient(server.url()).build().unwrap())
            .collect();
        let take = clients.iter().map(async |locks| {
            give_back(locks.mutex("a").wait(STALL).acquire().await.unwrap()).await;
        });
        join_all(take).await;
        let made_by = server.query(
            "SELECT DISTINCT xmin::text FROM (SELECT xmin FROM pg_namespace \
             WHERE nspname = 'lockcore1' UNION ALL SELECT xmin FROM pg_proc \
             WHERE pronamespace = 'lockcore1'::regnamespace) AS made",
        );
        assert_eq!(made_by.len(), 1, "{made_by:?}");
    }
}

async fn a_schema_that_a_user_may_not_make_is_told(_: Store) {
    let server = PostgresServer::without_schema();
    let url = server.url_with_user(USER, SECRET);
    let missing = patient(&url).build().unwrap().mutex("a").acquire().await;
    let text = missing.as_ref().unwrap_err().to_string();
    assert_eq!(kind(missing), ErrorKind::Config);
    assert!(text.contains("lockcore1.sql"), "{text}");

    // Somebody else makes it, and forgets the rights.
    let maker = patient(server.url()).build().unwrap();
    give_back(maker.mutex("a").acquire().await.unwrap()).await;
    let forbidden = patient(&url).build().unwrap().mutex("a").acquire().await;
    let text = forbidden.as_ref().unwrap_err().to_string();
    assert_eq!(kind(forbidden), ErrorKind::Config);
    assert!(text.contains("GRANT USAGE"), "{text}");
}

fn make_version(server: &PostgresServer, version: u32) {
    server.query(&format!(
        "CREATE OR REPLACE FUNCTION lockcore1.version() RETURNS int LANGUAGE plpgsql \
         AS $f$ BEGIN RETURN {version}; END $f$; \
         CREATE OR REPLACE FUNCTION lockcore1.hold(n text, token bigint) RETURNS void \
         LANGUAGE plpgsql AS $f$ BEGIN RETURN; END $f$"
    ));
}

/// The functions keep their rights, and serve a client that has connected before.
async fn functions_of_an_earlier_version_are_replaced_by_a_client_that_may(_: Store) {
    let server = PostgresServer::start();
    let url = server.url_with_user(USER, SECRET);
    let early = patient(&url).build().unwrap();
    let guard = early.mutex("early").acquire().await.unwrap();
    let version = || server.query("SELECT lockcore1.version()");
    let ours = version();
    make_version(&server, 1);

    let refused = patient(&url).build().unwrap().mutex("a").acquire().await;
    let text = refused.as_ref().unwrap_err().to_string();
    assert_eq!(kind(refused), ErrorKind::Config);
    assert!(
        text.contains("version 1") && text.contains("lockcore1.sql"),
        "{text}"
    );
    assert_eq!(version(), ["1"]);

    let owners = (0..4).map(|_| patient(server.url()).build().unwrap());
    let owners: Vec<Locks> = owners.collect();
    let take = owners.iter().map(async |locks| {
        give_back(locks.mutex("a").wait(STALL).acquire().await.unwrap()).await;
    });
    join_all(take).await;
    assert_eq!(version(), ours);
    let not_held = server.try_query("SELECT lockcore1.hold('a', 1024)");
    assert!(not_held.is_err());
    let late = patient(&url).build().unwrap();
    give_back(late.mutex("a").acquire().await.unwrap()).await;
    guard.extend(LEASE).await.unwrap();
    give_back(guard).await;
}

async fn functions_of_a_later_version_stay(_: Store) {
    let server = PostgresServer::start();
    make_version(&server, 1_000);

    let locks = patient(server.url()).build().unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let file = include_str!("../../lockcore/src/backend/postgres/schema/lockcore1.sql");
    let refused = format!("{:?}", server.try_query(file).unwrap_err());

    assert!(refused.contains("LC002"), "{refused}");
    assert_eq!(server.query("SELECT lockcore1.version()"), ["1000"]);
}

async fn a_database_with_another_default_isolation_has_locks_all_the_same(_: Store) {
    let server = PostgresServer::with(&["default_transaction_isolation=serializable"]);
    let crowd = Crowd::begin(&server.url(), LEASE);
    crowd.visits(100).await;
    crowd.end().await;
}

/// No removed row leaves the tables meanwhile.
async fn an_old_snapshot_elsewhere_stops_nobody(_: Store) {
    let server = PostgresServer::start();
    let crowd = Crowd::begin(&server.url(), LEASE);
    let elsewhere = Table::open(&server).await;
    elsewhere
        .run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT lockcore1.version()")
        .await;
    crowd.visits(500).await;
    elsewhere.run("COMMIT").await;
    crowd.end().await;
}

/// All facts use this user. Nothing that goes wrong in a client can damage what the functions keep.
async fn a_user_with_the_rights_of_the_guide_can_touch_no_table(_: Store) {
    let server = PostgresServer::start();
    let tables_where = |condition: &str| {
        server.query(&format!(
            "SELECT relname FROM pg_class WHERE relkind = 'r' \
             AND relnamespace = 'lockcore1'::regnamespace AND {condition} ORDER BY relname"
        ))
    };
    let all = "SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER";
    let tables = tables_where("true");
    assert_eq!(tables, ["counters", "marks", "names", "tickets"]);
    let open = tables_where(&format!("has_table_privilege('{USER}', oid, '{all}')"));
    assert_eq!(open, [""; 0]);
    let makes = format!("SELECT has_schema_privilege('{USER}', 'lockcore1', 'CREATE')");
    assert_eq!(server.query(&makes), ["f"]);

    let locks = patient(server.url_with_user(USER, SECRET)).build().unwrap();
    locks.ready(SOON).await.unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}

async fn a_user_with_a_scram_password_logs_in(_: Store) {
    let server = PostgresServer::start();
    server.query(&format!(
        "SET password_encryption = 'scram-sha-256'; ALTER USER {USER} PASSWORD '{SECRET}'"
    ));
    let hash = server.query("SELECT left(rolpassword, 13) FROM pg_authid WHERE rolname = 'locks'");
    assert_eq!(hash, ["SCRAM-SHA-256"]);
    let locks = patient(server.url_with_user(USER, SECRET)).build().unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;

    let wrong = patient(server.url_with_user(USER, "another"))
        .build()
        .unwrap();
    assert_eq!(kind(wrong.mutex("a").acquire().await), ErrorKind::Config);
}

/// Many names have more than one dead ticket, and a long line stands between them.
async fn a_sweep_removes_every_dead_line_and_keeps_its_numbers(_: Store) {
    let server = PostgresServer::start();
    let insert = |name: &str, names: u32, numbers: &str, expires_at: u64| {
        server.query(&format!(
            "INSERT INTO lockcore1.tickets SELECT {name}, t, gen_random_uuid(), 1, 1, 1, \
             {expires_at}, false, t, 0, '' \
             FROM generate_series(1, {names}) AS n, generate_series({numbers}) AS t"
        ));
    };
    insert(
        "'test:1:{' || n || '}'",
        500,
        "9000000000000001, 9000000000000003",
        1,
    );
    insert("'test:1:{250+}'", 1, "1, 1500", 9_000_000_000_000_000);

    let (mut after, mut steps) = (String::new(), 0);
    loop {
        let last = server.query(&format!("SELECT coalesce(lockcore1.sweep('{after}'), '')"));
        if last == [""] {
            break;
        }
        after.clone_from(&last[0]);
        steps += 1;
        assert!(steps < 20, "no end after {steps} steps: {after}");
    }

    let left = server
        .query("SELECT DISTINCT name || ' ' || count(*) FROM lockcore1.tickets GROUP BY name");
    assert_eq!(left, ["test:1:{250+} 1500"]);
    let numbers = "SELECT count(*) FROM lockcore1.names WHERE last = 9000000000000003";
    assert_eq!(server.query(numbers), ["500"]);
}

/// A later client would find on the connections of the pooler what an earlier one has left there.
async fn a_pooler_in_transaction_mode_is_refused_and_nothing_is_left_there(_: Store) {
    for durability in ["off", "on"] {
        let server = PostgresServer::start();
        let pooler = Pooler::of(&server);
        for _ in 0..3 {
            let url = format!("{}?durability={durability}", pooler.url());
            let outcome = patient(url).build().unwrap().mutex("a").acquire().await;
            let text = outcome.as_ref().unwrap_err().to_string();
            assert_eq!(kind(outcome), ErrorKind::Config, "{text}");
            assert!(
                text.contains("pooler") && text.contains("session mode"),
                "{text}"
            );
            eventually("the client has gone", SOON, async || {
                server.query("SELECT count(*) FROM pg_stat_activity WHERE state <> 'idle'") == ["1"]
            })
            .await;
            assert_nothing_left_at(&pooler);
        }
    }
}

/// The pooler has two connections to the server for all clients.
async fn clients_that_look_behind_a_pooler_exclude_each_other_and_leave_nothing_there(_: Store) {
    let server = PostgresServer::start();
    let pooler = Pooler::of(&server);
    let url = format!("{}?wakeups=look", pooler.url());
    let crowd = Crowd::begin(&url, LEASE);
    let client = || patient(&url).build().unwrap();
    let (holder, waiter) = (client(), client());
    for _ in 0..5 {
        let guard = holder.mutex("b").acquire().await.unwrap();
        let waits = begin(waiter.mutex("b").wait(STALL));
        tickets(&holder, "b", 2).await;
        give_back(guard).await;
        give_back(soon(waits).await.unwrap().unwrap()).await;
        holder.counter("c").add(1).await.unwrap();
    }
    assert_eq!(waiter.counter("c").get().await.unwrap().count, 5);
    crowd.visits(100).await;
    crowd.end().await;

    assert_nothing_left_at(&pooler);
}

fn assert_nothing_left_at(pooler: &Pooler) {
    let left = "SELECT (SELECT count(*) FROM pg_listening_channels()) \
        + (SELECT count(*) FROM pg_prepared_statements) \
        + (SELECT count(*) FROM pg_settings WHERE source = 'session' AND name IN \
           ('synchronous_commit', 'client_min_messages', 'enable_seqscan', 'jit', \
            'default_transaction_isolation', 'statement_timeout'))";
    assert_eq!(pooler.query_each(left), ["0", "0"]);
}

/// As an administrator makes it who moves the database to another server.
async fn a_database_that_is_only_read_is_unavailable(_: Store) {
    let server = PostgresServer::start();
    let url = server.url_with_user(USER, SECRET);
    // An operation that is refused is repeated for this long.
    let locks = builder(&url).op_timeout(SOON / 3).build().unwrap();
    works_again(&locks, "a", SOON).await;
    server.set("SET default_transaction_read_only = on");
    eventually("no lock is granted", SOON, async || {
        locks.mutex("a").acquire().await.is_err()
    })
    .await;
    let outcome = locks.mutex("a").acquire().await;
    assert_eq!(kind(outcome), ErrorKind::Unavailable);

    server.set("RESET default_transaction_read_only");
    works_again(&locks, "a", SOON).await;
}

async fn a_server_without_a_free_connection_is_unavailable(_: Store) {
    let server = PostgresServer::with(&["max_connections=4", "superuser_reserved_connections=1"]);
    let url = server.url_with_user(USER, SECRET);
    let holder = patient(&url).build().unwrap();
    let guard = holder.mutex("a").acquire().await.unwrap();

    let locks = builder(&url).build().unwrap();
    let outcome = locks.mutex("b").acquire().await;
    assert_eq!(kind(outcome), ErrorKind::Unavailable);

    give_back(guard).await;
    drop(holder);
    works_again(&locks, "b", SOON).await;
}

async fn a_connection_without_traffic_is_probed(_: Store) {
    let server = PostgresServer::start();
    let locks = patient(server.url()).build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();

    is_probed(server.port()).await;

    give_back(guard).await;
}

/// The core renews and releases up to a hundred tickets in one request. The server has room for hardly more
/// locks than that.
async fn a_request_for_a_hundred_names_takes_one_lock_for_each(_: Store) {
    let server = PostgresServer::with(&[
        "max_locks_per_transaction=10",
        "max_connections=10",
        "autovacuum_max_workers=1",
        "max_worker_processes=0",
    ]);
    let namespace = Namespace::new("test").unwrap();
    let events = EventSink::new(1, namespace.clone(), |_| ());
    let store = backend::open(&server.url()).unwrap();
    let connection = store.connect(events).await.unwrap();
    let tickets = (0..100).map(|number| {
        let name = Name::new(namespace.clone(), format!("n{number}")).unwrap();
        let id = Id::parse(&format!("{number:032}")).unwrap();
        Arc::new(Request::new(name, id, FULL, FULL, LEASE))
    });
    let tickets: Vec<_> = tickets.collect();
    for ticket in &tickets {
        let taken = connection.enqueue(Arc::clone(ticket), PATIENCE).await;
        assert!(matches!(taken, Ok(Enqueued::Granted { .. })), "{taken:?}");
    }

    let renewed = connection.renew(tickets.clone(), PATIENCE).await.unwrap();
    assert!(renewed.iter().all(|answer| answer.holds()), "{renewed:?}");
    let departures = tickets
        .into_iter()
        .map(|ticket| Departure::new(ticket, true));
    let released = connection.release(departures.collect()).await.unwrap();

    assert_eq!(released, [Released::Released; 100]);
}

async fn tokens_rise_when_the_clock_of_the_server_is_set_back(_: Store) {
    let server = PostgresServer::with_clock();
    tokens_rise(&patient(server.url()).build().unwrap(), |clock| {
        server.set_clock(clock)
    })
    .await;
}

async fn a_clock_that_jumps_ahead_ends_leases_and_their_holders_learn_of_it(_: Store) {
    let server = PostgresServer::with_clock();
    let [holder, others] = [(); 2].map(|()| patient(server.url()).build().unwrap());
    let guard = holder.mutex("a").ttl(SHORT).acquire().await.unwrap();
    let token = guard.fencing_token().unwrap();
    let waits = begin(others.mutex("a").wait(STALL));
    tickets(&others, "a", 2).await;

    server.set_clock(Clock::Ahead(Duration::from_secs(3600)));

    soon(guard.lost()).await;
    // The ticket of the one that waits has ended, too, and it has asked again.
    let next = waits.await.unwrap().unwrap();
    assert!(next.fencing_token().unwrap() > token);
    give_back(next).await;
}
