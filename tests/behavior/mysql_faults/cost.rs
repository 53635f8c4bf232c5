//! Facts about how much the server does.

use libtest_mimic::Trial;
use tests::mysql_server::{DATABASE, MysqlServer, Session};

use super::with_tables;
use crate::store::{DEFAULT, Kind, Store, give_back};

/// How many statements the server carries out to take a lock that nobody holds, and to release it,
/// with those of the procedures.
const STATEMENTS: u64 = 103;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_pair_is_two_calls_of_a_few_statements
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
