//! Facts about how much a client asks of the server. The server logs each statement before it
//! carries it out, and so counts them.

use std::collections::BTreeMap;

use libtest_mimic::Trial;
use lockcore::{Fair, Locks};
use tests::eventually::eventually;
use tests::postgres_server::PostgresServer;

use crate::faults::patient;
use crate::store::{DEFAULT, Kind, LEASE, SOON, STALL, Store, begin, give_back, soon, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_pair_is_two_calls_and_one_flush
        a_hand_over_is_two_calls_and_one_flush
        a_client_listens_only_while_its_tickets_wait
    ]
}

const TIMES: usize = 10;

fn server() -> PostgresServer {
    PostgresServer::with(&["log_statement=all"])
}

fn client(server: &PostgresServer) -> Locks {
    let builder = patient(server.url()).fair(Fair::Strict);
    builder.build().unwrap()
}

/// How often each function was called from this byte of the log on. Left out are the functions that
/// a look at a line, a new connection and the sweep call.
fn calls(server: &PostgresServer, from: usize) -> BTreeMap<String, usize> {
    let mut calls = BTreeMap::new();
    for line in server.log_from(from).lines() {
        let Some((_, call)) = line
            .split_once("FROM lockcore1.")
            .or_else(|| line.split_once("SELECT lockcore1."))
        else {
            continue;
        };
        let (name, _) = call.split_once('(').unwrap();
        if !["inspect", "version", "sweep"].contains(&name) {
            *calls.entry(name.to_owned()).or_default() += 1;
        }
    }
    calls
}

fn two_calls_and_one_flush() -> BTreeMap<String, usize> {
    let calls = ["enqueue", "flush", "release"];
    calls.map(|name| (name.to_owned(), TIMES)).into()
}

async fn a_pair_is_two_calls_and_one_flush(_: Store) {
    let server = server();
    let locks = client(&server);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let from = server.log_length();

    for _ in 0..TIMES {
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
    }

    assert_eq!(calls(&server, from), two_calls_and_one_flush());
}

/// The flush is the waiter's, when it comes into the line. Its grant waits for no disk.
async fn a_hand_over_is_two_calls_and_one_flush(_: Store) {
    let server = server();
    let clients = [client(&server), client(&server)];
    let mut guard = clients[1].mutex("a").acquire().await.unwrap();
    let from = server.log_length();

    for turn in 0..TIMES {
        let waits = begin(clients[turn % 2].mutex("a").wait(STALL));
        tickets(&clients[0], "a", 2).await;
        give_back(guard).await;
        guard = soon(waits).await.unwrap().unwrap();
    }

    assert_eq!(calls(&server, from), two_calls_and_one_flush());
    give_back(guard).await;
}

async fn a_client_listens_only_while_its_tickets_wait(_: Store) {
    let server = server();
    let (holder, waiter) = (client(&server), client(&server));
    let guard = holder.mutex("a").acquire().await.unwrap();
    // Each new connection listens for a moment.
    for locks in [&holder, &waiter] {
        locks.ready(STALL).await.unwrap();
    }
    let connected = server.log_length();
    let stopped = || {
        let log = server.log_from(connected);
        log.matches("statement: UNLISTEN \"lockcore1.").count()
    };

    let given_up = begin(waiter.mutex("a").wait(LEASE));
    // Its client answers behind the enqueue, so it listens by then.
    tickets(&waiter, "a", 2).await;
    given_up.abort();
    eventually(
        "the waiter's client does not listen any more",
        SOON,
        async || stopped() == 1,
    )
    .await;

    // The next ticket that waits is woken all the same.
    let waits = begin(waiter.mutex("a").wait(STALL));
    tickets(&holder, "a", 2).await;
    give_back(guard).await;
    give_back(soon(waits).await.unwrap().unwrap()).await;
    eventually("it has listened again", SOON, async || stopped() == 2).await;
}
