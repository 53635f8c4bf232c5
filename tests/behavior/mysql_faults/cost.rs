//! Facts about how much the server does.

use libtest_mimic::Trial;
use lockcore::{Fair, Locks};
use tests::eventually::eventually;
use tests::mysql_server::{DATABASE, MysqlServer, Session};

use super::with_tables;
use crate::faults::{patient, works_again};
use crate::store::{DEFAULT, Kind, SOON, STALL, Store, give_back};

/// How many statements the server carries out to take a lock that nobody holds, and to release it,
/// with those of the procedures.
const STATEMENTS: u64 = 42;

/// The same for a ticket that waits, and for the release that lets it in.
const OF_A_HAND_OVER: u64 = 172;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_pair_is_two_calls_of_a_few_statements
        a_hand_over_is_two_calls_whatever_looks_are_made
        a_hand_over_is_as_many_statements_with_a_hundred_waiters_as_with_two
        a_list_with_summaries_reads_few_tickets_however_many_there_are
    ]
}

/// The requests of clients that the server has answered, and all statements, with those of procedures.
fn statements(session: &mut Session) -> [u64; 2] {
    let counted = session.run(
        "SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS \
         WHERE VARIABLE_NAME IN ('QUESTIONS', 'QUERIES') ORDER BY VARIABLE_NAME = 'QUERIES'",
    );
    [0, 1].map(|at| counted[at].parse().unwrap())
}

/// Nothing is asked beside the two calls, and no statement comes to the procedures unnoticed.
async fn a_pair_is_two_calls_of_a_few_statements(_: Store) {
    const PAIRS: u64 = 10;
    let server = MysqlServer::start();
    let mut session = server.session();
    let locks = with_tables(&server).await;
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let mut of_a_pair = [0; 2];
    // A sweep may come in between.
    for _ in 0..5 {
        let [first, second] = [(); 2].map(|()| statements(&mut session));
        let before = statements(&mut session);
        for _ in 0..PAIRS {
            give_back(locks.mutex("a").acquire().await.unwrap()).await;
        }
        let after = statements(&mut session);
        let own = |of: usize| second[of] - first[of];
        of_a_pair = [0, 1].map(|of| after[of] - before[of] - own(of));
        if of_a_pair == [2 * PAIRS, STATEMENTS * PAIRS] {
            break;
        }
    }
    assert_eq!(of_a_pair, [2 * PAIRS, STATEMENTS * PAIRS]);
}

/// The one by which the waiter takes its ticket, and the release. How often a waiter looks depends on
/// how long it waits.
async fn a_hand_over_is_two_calls_whatever_looks_are_made(_: Store) {
    const HAND_OVERS: usize = 20;
    let server = MysqlServer::start();
    with_tables(&server).await;
    let [first, second] = [(); 2].map(|()| {
        let builder = patient(server.url()).fair(Fair::Strict);
        builder.build().unwrap()
    });
    // Locks with an owner text do not share a ticket.
    let lock = |locks: &Locks| locks.mutex("a").owner("each").wait(STALL);
    let guard = lock(&first).acquire().await.unwrap();
    works_again(&second, "another", SOON).await;
    server.query("SET GLOBAL log_output = 'TABLE', GLOBAL general_log = ON");

    let waits = (0..HAND_OVERS).map(|number| lock([&first, &second][number % 2]));
    let waits = waits
        .map(|lock| tokio::spawn(async move { give_back(lock.acquire().await.unwrap()).await }));
    let waits: Vec<_> = waits.collect();
    let line = format!("SELECT COUNT(*) FROM {DATABASE}.lockcore1_tickets");
    eventually("the line has formed", SOON, async || {
        server.query(&line) == [(HAND_OVERS + 1).to_string()]
    })
    .await;
    give_back(guard).await;
    for wait in waits {
        wait.await.unwrap();
    }

    let calls = ["enqueue", "release", "renew"].map(|verb| {
        let of = format!("argument LIKE 'CALL lockcore1_{verb}(%'");
        let calls = server.query(&format!(
            "SELECT COUNT(*) FROM mysql.general_log WHERE {of}"
        ));
        calls[0].parse::<usize>().unwrap()
    });
    // The last release is no hand-over.
    assert_eq!(calls, [HAND_OVERS, HAND_OVERS + 1, 0]);
}

/// Of the procedures. A line has the holder in front.
async fn a_hand_over_is_as_many_statements_with_a_hundred_waiters_as_with_two(_: Store) {
    let server = MysqlServer::start();
    with_tables(&server).await;
    let mut session = server.session();
    session.run(&format!("USE {DATABASE}"));
    for waiters in [2, 10, 100] {
        let name = format!("lock:1:{{{waiters}}}");
        let id = |number: usize| format!("{number:032x}");
        let enqueue = |number: usize| {
            let id = id(1000 * waiters + number);
            format!(
                "CALL lockcore1_enqueue(X'{id}', '{name}', 1, 1, 60000000, 1, 0, 0, 'host/1/0')"
            )
        };
        let release = {
            let (length, id) = (name.len(), id(1000 * waiters));
            let name: String = name.bytes().map(|byte| format!("{byte:02x}")).collect();
            format!("CALL lockcore1_release(X'{length:04x}{name}0001{id}00')")
        };
        for number in 0..waiters {
            session.run(&enqueue(number));
        }
        let mut of_calls = 0;
        for call in [enqueue(waiters), release] {
            let [first, second] = [(); 2].map(|()| statements(&mut session));
            let before = statements(&mut session);
            let told = session.run(&call);
            let after = statements(&mut session);
            // Beside the call, the session asks for the end of its answers.
            of_calls += after[1] - before[1] - (second[1] - first[1]) - 1;
            assert_eq!(told.len(), 1, "{told:?}");
        }
        assert_eq!(of_calls, OF_A_HAND_OVER, "{waiters} waiters");
    }
}

/// Lines with one ticket, with a hundred, and with ten thousand.
async fn a_list_with_summaries_reads_few_tickets_however_many_there_are(_: Store) {
    let server = MysqlServer::start();
    with_tables(&server).await;
    let mut session = server.session();
    session.run(&format!(
        "USE {DATABASE}; INSERT INTO lockcore1_tickets \
         SELECT CONCAT('lock:1:{{', l.tickets, '-', n.seq, '}}'), p.seq, \
             UNHEX(MD5(CONCAT(l.tickets, '-', n.seq, '-', p.seq))), 1, 1, 60000000, 1 << 60, p.seq = 1, p.seq, 0, 'host/1/0' \
         FROM (SELECT 1 AS tickets, 5 AS names UNION SELECT 100, 50 UNION SELECT 10000, 3) AS l \
         JOIN seq_1_to_50 AS n ON n.seq <= l.names JOIN seq_1_to_10000 AS p ON p.seq <= l.tickets"
    ));
    // The 3,905 tickets of the shortest lines, and a few of each name.
    for (procedure, most) in [("list", 500), ("overview", 4_500)] {
        session.run("FLUSH STATUS");
        let names = session.run(&format!(
            "CALL lockcore1_{procedure}('lock:1:{{', '', 'lock:1:{{~', 1000)"
        ));
        let read = session.run(
            "SELECT CAST(SUM(VARIABLE_VALUE) AS INT) FROM information_schema.SESSION_STATUS \
             WHERE VARIABLE_NAME IN ('HANDLER_READ_NEXT', 'HANDLER_READ_PREV', 'HANDLER_READ_FIRST')",
        );
        let read: u64 = read[0].parse().unwrap();

        assert!(read < most, "{procedure}: {read} tickets are read");
        assert_eq!(names.len(), 58);
        let name = |row: &String| row.split('\t').next().unwrap().to_owned();
        assert!(names.iter().map(name).is_sorted(), "{names:?}");
        if procedure == "overview" {
            let is_summed_up = |row: &&String| row.split('\t').nth(1) == Some("1");
            assert_eq!(names.iter().filter(is_summed_up).count(), 44);
        }
    }
}
