//! Tests of the list of names in use that a client gets. The answers of stores are checked in
//! `testing::conformance`.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::{Connection, Renewed, Request};
use lockcore::{Error, ErrorKind, Guard, Locks};
use tests::eventually::eventually;
use tests::postgres_server::PostgresServer;
use tests::redis_server::RedisServer;
use tests::stores::redis::{USER, documented, grant};
use tests::watch::SECRET;
use tokio::task::JoinHandle;

use crate::hostile::{random_id, request, stranger, with};
use crate::store::{
    Kind, PATIENCE, SOON, Store, assert_nothing_left, begin, give_back, kind, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    if !store.capability().lists {
        return Vec::new();
    }
    crate::store_facts![store, crate::store::DEFAULT;
        every_name_of_the_namespace_that_is_held_or_waited_for_is_listed
        a_listing_that_was_dropped_goes_on_where_it_was
        a_prefix_that_no_name_can_have_is_refused
        names_are_summed_up_without_a_request_for_each
        lines_that_the_store_does_not_sum_up_are_inspected
    ]
}

pub(crate) fn facts_of_redis(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        without_the_right_to_scan_only_the_list_is_refused
        keys_of_others_are_passed_over
        a_step_of_the_list_reads_a_thousand_keys_and_four_thousand_rows_at_most
        a_name_whose_tickets_are_dead_is_not_in_use
        a_name_with_a_stored_capacity_whose_tickets_are_dead_is_not_in_use
    ]
}

pub(crate) fn facts_of_postgres(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_list_with_summaries_reads_few_tickets_however_many_there_are
    ]
}

/// The names in use that begin with the prefix.
pub(crate) async fn listed(locks: &Locks, prefix: &str, page: u32) -> Vec<String> {
    let (mut pages, mut names) = (locks.list(prefix).page_size(page), Vec::new());
    while let Some(page) = pages.next().await.unwrap() {
        assert!(!page.is_empty());
        names.extend(page.into_iter().map(|used| used.name));
    }
    assert_eq!(pages.next().await.unwrap(), None);
    names.sort_unstable();
    names.dedup(); // on Redis a name may be listed twice
    names
}

async fn every_name_of_the_namespace_that_is_held_or_waited_for_is_listed(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let elsewhere = store.client();
    let mut guards = Vec::new();
    for number in 10..30 {
        guards.push(locks.mutex(format!("a:{number}")).acquire().await.unwrap());
    }
    guards.push(other.mutex("b").acquire().await.unwrap());
    let waits = begin(locks.mutex("b"));
    tickets(&other, "b", 2).await;
    let pool = other.semaphore("pool", 3);
    guards.push(pool.permits(2).acquire().await.unwrap());

    for page in [0, 1, 6, u32::MAX] {
        let mut expected: Vec<_> = (10..30).map(|number| format!("a:{number}")).collect();
        assert_eq!(listed(&elsewhere, "a:", page).await, expected);
        expected.extend(["b".to_owned(), "pool".to_owned()]);
        assert_eq!(listed(&locks, "", page).await, expected);
    }
    for guard in guards {
        give_back(guard).await;
    }
    assert_eq!(listed(&locks, "", 6).await, ["b"]);
    give_back(waits.await.unwrap().unwrap()).await;
    assert_nothing_left(&store, &locks, "b").await;
    assert_eq!(listed(&locks, "", 6).await, Vec::<String>::new());
}

/// The names in use with their holders, their waiters, and the text of the first holder.
async fn summed_up(locks: &Locks) -> Vec<(String, u64, u64, Option<String>)> {
    let (mut pages, mut names) = (locks.list("").with_summaries(), Vec::new());
    while let Some(page) = pages.next().await.unwrap() {
        names.extend(page.into_iter().map(|used| {
            let summary = used.summary.expect("each name is summed up");
            assert_eq!(summary.since.is_some(), summary.holders > 0);
            assert_eq!(summary.longest_wait.is_some(), summary.waiters > 0);
            assert!(summary.owner.contains('/'), "{summary:?}");
            let (holders, waiters) = (summary.holders, summary.waiters);
            (used.name, holders, waiters, summary.owner_text)
        }));
    }
    names.sort_unstable();
    names.dedup();
    names
}

/// Twenty names that are held, one of which has a waiter, and a semaphore with two holders.
async fn busy(store: &Store) -> (Vec<Guard>, JoinHandle<Result<Guard, Error>>) {
    let (locks, other) = (store.client(), store.client());
    let mut guards = Vec::new();
    for number in 10..30 {
        let lock = locks.mutex(format!("a:{number}")).owner("billing");
        guards.push(lock.acquire().await.unwrap());
    }
    let pool = locks.semaphore("pool", 3);
    for _ in 0..2 {
        guards.push(pool.acquire().await.unwrap());
    }
    let waits = begin(other.mutex("a:10"));
    tickets(&locks, "a:10", 2).await;
    (guards, waits)
}

fn summaries_of_busy() -> Vec<(String, u64, u64, Option<String>)> {
    let held = (10..30).map(|number| {
        let waiters = u64::from(number == 10);
        (
            format!("a:{number}"),
            1,
            waiters,
            Some("billing".to_owned()),
        )
    });
    held.chain([("pool".to_owned(), 2, 0, None)]).collect()
}

async fn names_are_summed_up_without_a_request_for_each(store: Store) {
    let (locks, counts) = store.counted(store.fair);
    let (guards, waits) = busy(&store).await;

    assert_eq!(summed_up(&locks).await, summaries_of_busy());

    assert_eq!(counts.inspected(), 0);
    give_all_back(guards, waits).await;
}

async fn lines_that_the_store_does_not_sum_up_are_inspected(store: Store) {
    let (locks, counts) = store.counted(store.fair);
    let (guards, waits) = busy(&store).await;
    counts.hide_summaries();

    assert_eq!(summed_up(&locks).await, summaries_of_busy());

    assert!(
        counts.inspected() >= 21,
        "on Redis a name may be listed twice"
    );
    give_all_back(guards, waits).await;
}

async fn give_all_back(guards: Vec<Guard>, waits: JoinHandle<Result<Guard, Error>>) {
    for guard in guards {
        give_back(guard).await;
    }
    give_back(waits.await.unwrap().unwrap()).await;
}

async fn a_listing_that_was_dropped_goes_on_where_it_was(store: Store) {
    let locks = store.client();
    let mut guards = Vec::new();
    for number in 10..20 {
        guards.push(locks.mutex(format!("a:{number}")).acquire().await.unwrap());
    }
    let (mut pages, mut names) = (locks.list("a:").page_size(3), Vec::new());
    loop {
        // The future is dropped after one poll, unless it is ready by then.
        let page = match tokio::time::timeout(Duration::ZERO, pages.next()).await {
            Ok(page) => page,
            Err(_) => pages.next().await,
        };
        match page.unwrap() {
            Some(page) => names.extend(page.into_iter().map(|used| used.name)),
            None => break,
        }
    }

    names.sort_unstable();
    names.dedup();
    let expected: Vec<_> = (10..20).map(|number| format!("a:{number}")).collect();
    assert_eq!(names, expected);
    for guard in guards {
        give_back(guard).await;
    }
}

async fn a_prefix_that_no_name_can_have_is_refused(store: Store) {
    let locks = store.client();

    assert_eq!(
        kind(locks.list("x".repeat(4097)).next().await),
        ErrorKind::Config
    );
    assert_eq!(locks.list("x".repeat(4096)).next().await.unwrap(), None);
}

async fn without_the_right_to_scan_only_the_list_is_refused(_: Store) {
    let server = RedisServer::start();
    let words = documented("lock", SECRET);
    server.command::<()>(&words.iter().map(String::as_str).collect::<Vec<_>>());
    let url = server.url_with_user(USER, SECRET);
    let locks = Locks::builder().url(url).op_timeout(SOON);
    let locks = locks.build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();

    let error = locks.list("").next().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("scan"), "{error}");
    assert!(error.to_string().contains("Minimum rights"), "{error}");
    give_back(guard).await;
    grant(&server, "lock", SECRET);
    assert_eq!(listed(&locks, "", 5).await, Vec::<String>::new());
}

/// Some of these keys look like keys of lock names.
async fn keys_of_others_are_passed_over(_: Store) {
    let server = RedisServer::start();
    for number in 0..500 {
        server.command::<()>(&["SET", &format!("other:{number}"), "x"]);
    }
    for key in [
        "lock:1:{list}",
        "lock:1:{text}",
        "lock:1:{short}",
        "lock:2:{a}",
        "lock:1:{%ff}",
    ] {
        match key {
            "lock:1:{list}" => server.command::<()>(&["LPUSH", key, "x"]),
            "lock:1:{short}" => server.command::<()>(&["SET", key, "0000000000000001"]),
            _ => server.command::<()>(&["SET", key, &"x".repeat(100)]),
        }
    }
    let locks = Locks::builder().url(server.url()).op_timeout(SOON);
    let locks = locks.build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();

    assert_eq!(listed(&locks, "", 1).await, ["a"]);

    give_back(guard).await;
}

/// Each name has sixteen places for waiters, and nobody is there any more.
async fn a_step_of_the_list_reads_a_thousand_keys_and_four_thousand_rows_at_most(_: Store) {
    let server = RedisServer::start();
    let names = "for name = 1, 2000 do
        redis.call('SET', 'lock:1:{' .. name .. '}',
            '0000000000000001L00000000000000000000000001000000000001700000000001073741824')
    end";
    server.command::<()>(&["EVAL", names, "0"]);
    let locks = Locks::builder().url(server.url()).op_timeout(SOON);
    let locks = locks.build().unwrap();
    let before = server.command_stats();

    listed(&locks, "", 1_000).await;

    let calls = server.command_stats_since(&before);
    let (steps, lines) = (calls["scan"], calls["hmget"]);
    assert!(steps >= 2, "{calls:?}");
    assert!(lines <= steps * 4_096 / 16, "{calls:?}");
}

async fn a_name_whose_tickets_are_dead_is_not_in_use(store: Store) {
    let locks = store.client();
    let holder = stranger(&store).await;
    // One holder, several holders, several with a waiter behind them, and one with a waiter.
    let mut tickets = Vec::new();
    for (name, permits) in [
        ("one", &[1][..]),
        ("two", &[1, 1]),
        ("three", &[1, 1, 1]),
        ("all", &[2, 2]),
    ] {
        tickets.extend(enqueued(&holder, &store, name, 2, permits).await);
    }
    let used = ["all", "one", "three", "two"];
    assert_eq!(listed(&locks, "", 5).await, used);

    die(&holder, tickets).await;
    for name in used {
        eventually("nobody holds or waits", SOON, async || {
            locks.inspect(name).await.unwrap().is_empty()
        })
        .await;
    }

    assert_eq!(listed(&locks, "", 5).await, Vec::<String>::new());
    holder.close().await;
}

async fn enqueued(
    holder: &Arc<dyn Connection>,
    store: &Store,
    name: &str,
    of: u32,
    permits: &[u32],
) -> Vec<Arc<Request>> {
    let mut tickets = Vec::new();
    for permits in permits {
        let ticket = with(&request(store, name, &random_id()), |request| {
            request.permits = NonZeroU32::new(*permits).unwrap();
            request.capacity = NonZeroU32::new(of).unwrap();
        });
        let _ = holder.enqueue(Arc::clone(&ticket), PATIENCE).await.unwrap();
        tickets.push(ticket);
    }
    tickets
}

/// Renews the tickets for a second. Nobody renews them after that.
async fn die(holder: &Arc<dyn Connection>, tickets: Vec<Arc<Request>>) {
    let tickets = tickets
        .iter()
        .map(|ticket| with(ticket, |request| request.ttl = Duration::from_secs(1)));
    let renewed = holder.renew(tickets.collect(), PATIENCE).await.unwrap();
    assert!(!renewed.contains(&Renewed::Lost), "{renewed:?}");
}

/// Its key does not expire, because it has the capacity.
async fn a_name_with_a_stored_capacity_whose_tickets_are_dead_is_not_in_use(store: Store) {
    let locks = store.client();
    let pool = locks.semaphore("a", 5);
    let others = locks.semaphore("a", 7);
    let holder = stranger(&store).await;
    for dead in 1..=3 {
        pool.resize(2).await.unwrap();
        // One holder, several holders, and several with a waiter behind them. Nobody renews them.
        let tickets = enqueued(&holder, &store, "a", 5, &vec![1; dead]).await;
        die(&holder, tickets).await;
        eventually("nobody holds or waits", SOON, async || {
            locks.inspect("a").await.unwrap().is_empty()
        })
        .await;

        assert_eq!(listed(&locks, "", 5).await, Vec::<String>::new());
        assert_eq!(others.capacity().await.unwrap(), 2);
        others.forget_capacity().await.unwrap();
        assert_eq!(others.capacity().await.unwrap(), 7);
        assert_eq!(listed(&locks, "", 5).await, Vec::<String>::new());
    }
    holder.close().await;
}

/// Lines with one ticket, with a hundred, and with ten thousand.
async fn a_list_with_summaries_reads_few_tickets_however_many_there_are(_: Store) {
    let server = PostgresServer::start();
    server.query(
        "INSERT INTO lockcore1.tickets (name, ticket, id, permits, capacity, ttl, expires_at, granted, place, receiver, owner)
         SELECT format('lock:1:{%s-%s}', tickets, line), place, gen_random_uuid(), 1, 1, 60000000, 1::bigint << 60,
                place = 1, place, 0, 'host/1/0'
         FROM (VALUES (1, 5), (100, 50), (10000, 3)) lengths (tickets, lines), generate_series(1, lines) line,
              generate_series(1, tickets) place;
         ANALYZE lockcore1.tickets",
    );
    let read = "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables WHERE relname = 'tickets'";
    let list =
        "SELECT name FROM lockcore1.overview('lock:1:{', '', 'lock:1:{~', 1000) WHERE holders > 0";

    // All of this is one transaction, and each statement has its answer.
    let mut answers = server.query(&format!("BEGIN; {read}; {list}; {read}; COMMIT"));

    let last: u64 = answers.pop().unwrap().parse().unwrap();
    let first: u64 = answers.remove(0).parse().unwrap();
    // The 3,905 tickets of the shortest lines, and a few of each name.
    assert!(last - first < 4_500, "{} tickets are read", last - first);
    let summed_up = |tickets: &str| answers.iter().filter(|name| name.contains(tickets)).count();
    let counts = ["{1-", "{100-", "{10000-"].map(summed_up);
    assert_eq!(counts, [5, 39, 0], "{answers:?}");
    assert!(answers.is_sorted(), "{answers:?}");
}
