//! Tests of fencing: which holds have a token for writes, and the checks at the resource that
//! `lockcore::fencing` describes.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::fencing::redis::{CHECK, SET_IF_NEWEST};
use lockcore::fencing::sql::{FENCES, PASS};
use lockcore::{Error, ErrorKind, FencingToken};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection};
use sqlx::{ConnectOptions as _, Connection as _};
use tests::redis_server::RedisServer;

use crate::store::{Kind, Store, give_back, kind};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        only_an_exclusive_lock_has_a_token_to_write_with
        a_lock_that_is_lost_still_has_its_token
    ]
}

pub(crate) fn facts_of_redis(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        redis_compares_tokens_exactly_beyond_the_precision_of_a_double
        redis_refuses_a_text_that_is_no_token
        redis_remembers_a_fence_for_the_requested_time
        redis_lets_no_late_write_in_from_many_clients_at_once
    ]
}

pub(crate) fn facts_of_sqlite(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_row_lets_no_late_write_in_from_many_connections_at_once
        a_fence_lets_no_late_transaction_in_from_many_connections_at_once
        a_fence_is_raised_by_commits_and_lets_equal_tokens_pass
    ]
}

// ---- which holds have a token

async fn only_an_exclusive_lock_has_a_token_to_write_with(store: Store) {
    let locks = store.client();
    let catalog = locks.rwlock("catalog");

    for lock in [locks.mutex("catalog"), catalog.write()] {
        let guard = lock.acquire().await.unwrap();
        let token = guard.fencing_token().unwrap();
        assert_eq!(token.as_i64(), guard.grant_id().as_u64() as i64);
        give_back(guard).await;
    }

    let shared = [
        catalog.read(),
        locks.semaphore("pool", 1).permits(1),
        locks.semaphore("wide pool", 9).permits(9),
    ];
    for lock in shared {
        let guard = lock.acquire().await.unwrap();
        let refused = guard.fencing_token().unwrap_err();
        assert_eq!(refused.name(), Some(guard.name()));
        assert_eq!(kind(Err::<(), _>(refused)), ErrorKind::Config);
        give_back(guard).await;
    }

    // Both guards hold the lock, and only one of them may write.
    let outcome: Result<(), Error> = catalog
        .write()
        .run(async |outer| {
            let again = locks.mutex("catalog").acquire().await?;
            assert_eq!(again.fencing_token()?, outer.fencing_token()?);
            again.release().await?;
            let reads = catalog.read().acquire().await?;
            assert!(reads.fencing_token().is_err());
            reads.release().await?;
            Ok(())
        })
        .await;
    outcome.unwrap();
}

async fn a_lock_that_is_lost_still_has_its_token(store: Store) {
    let locks = store.client();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let token = guard.fencing_token().unwrap();

    locks.shutdown(Duration::from_secs(6)).await.unwrap();

    assert!(!guard.is_valid());
    assert_eq!(guard.fencing_token().unwrap(), token);
}

// ---- Redis

fn set(server: &RedisServer, token: &str, value: &str) -> bool {
    let call = [
        "EVAL",
        SET_IF_NEWEST,
        "2",
        "price:{7}",
        "price:{7}:fence",
        token,
        value,
        "60000",
    ];
    server.command::<u8>(&call) == 1
}

/// Numbers in Lua are doubles. The two numbers of each pair differ by one, but most pairs are equal
/// as doubles.
async fn redis_compares_tokens_exactly_beyond_the_precision_of_a_double(_: Store) {
    let server = RedisServer::start();
    let borders = [
        1_i64,
        9,
        10,
        999_999_999, // the largest number that fits the lower half
        1_000_000_000,
        9_999_999_999,
        (1 << 53) - 1, // the largest number that a double distinguishes from its neighbours
        1 << 53,
        (1 << 53) + 1,
        1_795_168_000_000_000 << 10, // a time of today in microseconds
        (1_795_168_000_000_000 << 10) + 999,
        ((1 << 53) - 2) << 10,
        i64::MAX - 1,
    ];
    for lower in borders {
        let higher = lower + 1;
        server.flush();

        assert!(set(&server, &lower.to_string(), "first"), "{lower}");
        assert!(set(&server, &lower.to_string(), "again"), "{lower}, equal");
        assert!(set(&server, &higher.to_string(), "later"), "{higher}");
        assert!(!set(&server, &lower.to_string(), "late"), "{lower}, late");
        assert!(set(&server, &higher.to_string(), "last"), "{higher}, equal");

        let value: String = server.command(&["GET", "price:{7}"]);
        let fence: i64 = server.command(&["GET", "price:{7}:fence"]);
        assert_eq!((value.as_str(), fence), ("last", higher));
    }
}

async fn redis_refuses_a_text_that_is_no_token(_: Store) {
    let server = RedisServer::start();
    let attempt = |token: &str| {
        server.try_command::<u8>(&["EVAL", SET_IF_NEWEST, "2", "v", "f", token, "x", "0"])
    };
    let no_tokens = [
        "",
        "0",
        "-1",
        "+1",
        "01",
        "1.5",
        "1e3",
        "0x10",
        " 1",
        "9223372036854775808",
        "10000000000000000000",
        "nil",
    ];
    for text in no_tokens {
        let error = attempt(text).expect_err(text);
        assert!(error.to_string().contains("not a fencing token"), "{error}");
        assert_eq!(server.command::<u8>(&["EXISTS", "v", "f"]), 0, "{text}");
    }

    server.command::<()>(&["SET", "f", "something else"]);
    let error = attempt("7").unwrap_err();
    assert!(
        error.to_string().contains("keeps something else"),
        "{error}"
    );
    assert_eq!(server.command::<u8>(&["EXISTS", "v"]), 0);
}

async fn redis_remembers_a_fence_for_the_requested_time(_: Store) {
    let server = RedisServer::start();
    assert!(set(&server, "7", "x"));
    let left: i64 = server.command(&["PTTL", "price:{7}:fence"]);
    assert!((1..=60_000).contains(&left), "{left}");
    assert_eq!(server.command::<i64>(&["PTTL", "price:{7}"]), -1);

    server.command::<u8>(&["EVAL", SET_IF_NEWEST, "2", "v", "f", "7", "x", "0"]);
    assert_eq!(server.command::<i64>(&["PTTL", "f"]), -1);
}

/// Many clients write at once. Each of them writes with every token, in its own order. The fact
/// checks the values that were written, not the replies.
async fn redis_lets_no_late_write_in_from_many_clients_at_once(_: Store) {
    let server = RedisServer::start();
    let append = format!(
        "{CHECK}
        if not fence(KEYS[2], ARGV[1], '0') then return 0 end
        redis.call('RPUSH', KEYS[1], ARGV[1])
        return 1"
    );

    let accepted = from_many_at_once(|tokens| {
        let pass = |token: &FencingToken| {
            let token = token.to_string();
            server.command::<usize>(&["EVAL", &append, "2", "log", "fence", &token])
        };
        tokens.iter().map(pass).sum()
    });

    let log: Vec<i64> = server.command(&["LRANGE", "log", "0", "-1"]);
    assert_never_late(&log, accepted);
}

// ---- SQL

const TABLES: &str = "
    PRAGMA journal_mode = WAL;
    CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT, lock_token BIGINT NOT NULL DEFAULT 0);
    INSERT INTO orders (id) VALUES (42);
    CREATE TABLE log (number INTEGER PRIMARY KEY, token BIGINT);";

async fn open(path: &Path) -> SqliteConnection {
    SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .busy_timeout(Duration::from_secs(30))
        .connect()
        .await
        .unwrap()
}

/// Calls `write` with every token, over several connections. The transaction that writes also
/// appends to the log.
async fn sql_lets_no_late_write_in(store: &Store, write: fn(FencingToken) -> Statement) {
    let path = store.file().folder().join("shop.db");
    let mut shop = open(&path).await;
    sqlx::raw_sql(TABLES).execute(&mut shop).await.unwrap();
    sqlx::raw_sql(FENCES).execute(&mut shop).await.unwrap();

    let accepted = from_many_at_once(|tokens| {
        on_a_runtime(async {
            let mut shop = open(&path).await;
            let mut accepted = 0;
            for token in tokens {
                let mut transaction = shop.begin().await.unwrap();
                let guarded = write(*token).execute(&mut *transaction).await.unwrap();
                if guarded.rows_affected() == 0 {
                    continue;
                }
                sqlx::query("INSERT INTO log (token) VALUES ($1)")
                    .bind(token.as_i64())
                    .execute(&mut *transaction)
                    .await
                    .unwrap();
                transaction.commit().await.unwrap();
                accepted += 1;
            }
            accepted
        })
    });

    let log: Vec<i64> = sqlx::query_scalar("SELECT token FROM log ORDER BY number")
        .fetch_all(&mut shop)
        .await
        .unwrap();
    assert_never_late(&log, accepted);
}

type Statement = sqlx::query::Query<'static, sqlx::Sqlite, sqlx::sqlite::SqliteArguments>;

async fn a_row_lets_no_late_write_in_from_many_connections_at_once(store: Store) {
    sql_lets_no_late_write_in(&store, |token| {
        sqlx::query(
            "UPDATE orders SET state = 'paid', lock_token = $1 WHERE id = $2 AND lock_token <= $1",
        )
        .bind(token.as_i64())
        .bind(42)
    })
    .await;
}

async fn a_fence_lets_no_late_transaction_in_from_many_connections_at_once(store: Store) {
    sql_lets_no_late_write_in(&store, |token| {
        sqlx::query(PASS).bind("order:42").bind(token.as_i64())
    })
    .await;
}

async fn a_fence_is_raised_by_commits_and_lets_equal_tokens_pass(store: Store) {
    let mut shop = open(&store.file().folder().join("shop.db")).await;
    sqlx::raw_sql(FENCES).execute(&mut shop).await.unwrap();
    let pass = |token: i64| sqlx::query(PASS).bind("a").bind(token);

    let mut undone = shop.begin().await.unwrap();
    assert_eq!(
        pass(9).execute(&mut *undone).await.unwrap().rows_affected(),
        1
    );
    undone.rollback().await.unwrap();

    for (token, rows) in [(8, 1), (8, 1), (7, 0), (9, 1)] {
        let passed = pass(token).execute(&mut shop).await.unwrap();
        assert_eq!(passed.rows_affected(), rows, "{token}");
    }
}

// ---- shared by all facts of this file

const CLIENTS: usize = 4;
const TOKENS: i64 = 100;

/// Starts threads that each write with every token, in a roughly rising order. So many writes are
/// accepted and many come late.
fn from_many_at_once(write: impl Fn(&[FencingToken]) -> usize + Send + Sync) -> usize {
    let tokens = |client: usize| {
        let mut random = fastrand::Rng::with_seed(client as u64);
        let mut tokens: Vec<i64> = (1..=TOKENS).collect();
        for few in tokens.chunks_mut(10) {
            random.shuffle(few);
        }
        // Tokens of consecutive numbers are equal as doubles.
        let token = |number: i64| ((1 << 60) + number).to_string().parse().unwrap();
        tokens.into_iter().map(token).collect::<Vec<FencingToken>>()
    };
    let write = Arc::new(write);
    thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| {
                let write = Arc::clone(&write);
                scope.spawn(move || write(&tokens(client)))
            })
            .collect();
        let accepted = clients.into_iter().map(|client| client.join().unwrap());
        accepted.sum()
    })
}

/// Checks the log of accepted writes: tokens never fall.
fn assert_never_late(log: &[i64], accepted: usize) {
    let late = log.windows(2).find(|pair| pair[0] > pair[1]);
    assert_eq!(late, None, "a late write");
    assert_eq!(log.last(), Some(&((1 << 60) + TOKENS)));
    assert_eq!(
        log.len(),
        accepted,
        "accepted and not written, or the reverse"
    );
    let all = CLIENTS * TOKENS as usize;
    assert!(accepted < all, "nothing came late");
}

fn on_a_runtime<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(work)
}
