//! Tests of several locks for one request: all or none of them, from the wait to the end of the
//! body.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

#[path = "../common/mod.rs"]
mod common;
mod losses;
mod refusals;
mod tokens;

use std::convert::Infallible;
use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use common::*;
use futures_util::FutureExt;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use lockcore::backend::{self, Answer, Connection, Renewed};
use lockcore::multi::MultiHeld;
use lockcore::testing::{Store, around};
use lockcore::{ErrorKind, Locks, LostReason};
use lockcore_tower::{
    FenceLayer, HoldUntil, Key, Keys, LockBody, LockLayer, TOKEN_HEADER, TokenLayer,
};
use tokio::sync::oneshot;
use tower::{Layer, Service, ServiceExt, service_fn};

type Whole = Response<Full<Bytes>>;

/// Locks the segments of the path: `/a/b` takes `a` and `b`, and `/` none.
fn by_segments(locks: &Locks) -> LockLayer {
    let keys = Keys::from_fn(4, |request| {
        let segments = request.uri.path().split('/');
        let names = segments.filter(|name| !name.is_empty());
        Ok(names.map(str::to_owned).collect())
    });
    LockLayer::all(locks.clone(), keys)
}

/// A handler that answers with the names that it holds.
fn names()
-> impl Service<In, Response = Whole, Error = Infallible, Future: Send> + Clone + Send + 'static {
    service_fn(async |request: In| {
        let held = request.extensions().get::<MultiHeld>();
        let names = held.map(|held| {
            held.iter()
                .map(|it| it.name())
                .collect::<Vec<_>>()
                .join(" ")
        });
        Ok(Response::new(names.unwrap_or("-".to_owned()).into()))
    })
}

async fn ask(layer: &LockLayer, request: In) -> Response<LockBody<Full<Bytes>>> {
    in_time(layer.layer(names()).oneshot(request))
        .await
        .unwrap()
}

async fn text(layer: &LockLayer, request: In) -> Bytes {
    let response = ask(layer, request).await;
    assert_eq!(response.status(), StatusCode::OK);
    response.into_body().collect().await.unwrap().to_bytes()
}

async fn status(layer: &LockLayer, path: &str) -> StatusCode {
    ask(layer, get(path)).await.status()
}

/// A handler that never ends. The test receives the locks that it holds.
fn endless() -> (
    oneshot::Receiver<MultiHeld>,
    impl Service<In, Response = Whole, Error = Infallible, Future: Send> + Clone + Send + 'static,
) {
    let (entered, held) = oneshot::channel();
    let entered = Arc::new(Mutex::new(Some(entered)));
    let service = service_fn(move |request: In| {
        let held = request.extensions().get::<MultiHeld>().unwrap().clone();
        let entered = entered.lock().unwrap().take().expect("one request");
        async move {
            entered.send(held).unwrap();
            pending().await
        }
    });
    (held, service)
}

// ---- exclusion

/// Requests of two processes move money between accounts, which they name in every order. Each
/// request reads two balances, and writes them after a pause.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_that_share_any_name_never_overlap_and_none_waits_in_a_circle() {
    const ACCOUNTS: usize = 4;
    const REQUESTS: usize = 120;
    struct Bank {
        balances: [AtomicI64; ACCOUNTS],
        inside: [AtomicUsize; ACCOUNTS],
    }
    let bank = Arc::new(Bank {
        balances: std::array::from_fn(|_| AtomicI64::new(100)),
        inside: Default::default(),
    });
    let transfer = {
        let bank = Arc::clone(&bank);
        service_fn(move |request: In| {
            let bank = Arc::clone(&bank);
            async move {
                let accounts = request.uri().path()[1..].split('/');
                let accounts: Vec<usize> = accounts.map(|it| it.parse().unwrap()).collect();
                for account in &accounts {
                    let others = bank.inside[*account].fetch_add(1, Ordering::SeqCst);
                    assert_eq!(others, 0, "two requests for account {account}");
                }
                let (from, to) = (accounts[0], accounts[1]);
                let read = |account: usize| bank.balances[account].load(Ordering::SeqCst);
                let (less, more) = (read(from) - 1, read(to) + 1);
                tokio::task::yield_now().await;
                bank.balances[from].store(less, Ordering::SeqCst);
                bank.balances[to].store(more, Ordering::SeqCst);
                for account in &accounts {
                    bank.inside[*account].fetch_sub(1, Ordering::SeqCst);
                }
                Ok::<_, Infallible>(Whole::default())
            }
        })
    };
    let store = Store::new();
    let processes = [store.clone(), store.another_process()];
    let layers = processes.map(|store| by_segments(&store.client().unwrap()).wait(SOON));

    let requests = (0..REQUESTS).map(|number| {
        let from = number % ACCOUNTS;
        let to = (from + 1 + number / ACCOUNTS % (ACCOUNTS - 1)) % ACCOUNTS;
        // Every third request locks one more account.
        let third = (0..ACCOUNTS).find(|it| number % 3 == 0 && *it != from && *it != to);
        let path = match third {
            Some(third) => format!("/{from}/{to}/{third}"),
            None => format!("/{from}/{to}"),
        };
        let service = layers[number % 2].layer(transfer.clone());
        tokio::spawn(service.oneshot(get(&path)))
    });
    for response in in_time(futures_util::future::join_all(requests)).await {
        assert_eq!(response.unwrap().unwrap().status(), StatusCode::OK);
    }

    let total: i64 = bank
        .balances
        .iter()
        .map(|it| it.load(Ordering::SeqCst))
        .sum();
    assert_eq!(total, 100 * ACCOUNTS as i64);
}

#[tokio::test]
async fn a_request_that_shares_no_name_is_handled_beside_one_that_holds_several() {
    let locks = memory();
    let layer = by_segments(&locks).try_only();
    let (held, service) = endless();
    let request = tokio::spawn(layer.layer(service).oneshot(get("/a/b")));
    in_time(held).await.unwrap();

    for (path, expected) in [
        ("/c/d", StatusCode::OK),
        ("/b/c", StatusCode::CONFLICT),
        ("/a", StatusCode::CONFLICT),
    ] {
        assert_eq!(status(&layer, path).await, expected, "{path}");
    }
    request.abort();
}

#[tokio::test]
async fn requests_that_read_share_all_names_and_exclude_those_that_write_one() {
    let locks = memory();
    let layer = by_segments(&locks).read_on_get().try_only();
    let reader = locks.rwlock("b").read().acquire().await.unwrap();

    assert_eq!(status(&layer, "/a/b").await, StatusCode::OK);
    let mut writes = get("/a/b");
    *writes.method_mut() = Method::POST;
    assert_eq!(ask(&layer, writes).await.status(), StatusCode::CONFLICT);
    reader.release().await.unwrap();

    let permits = by_segments(&locks).permits(2, 3).try_only();
    let other = locks.semaphore("pool", 3).permits(2).acquire().await;
    assert_eq!(status(&permits, "/disk/pool").await, StatusCode::CONFLICT);
    drop(other);
}

// ---- which names

#[tokio::test]
async fn a_name_that_is_found_twice_is_locked_once() {
    let locks = memory();
    assert_eq!(text(&by_segments(&locks), get("/b/a/b/a")).await, "a b");

    // If the name were locked twice, the permits would add up to four, and there are only three.
    let permits = by_segments(&locks).permits(2, 3);
    assert_eq!(text(&permits, get("/c/c")).await, "c");
}

#[tokio::test]
async fn a_request_without_any_name_passes_without_a_lock() {
    let locks = memory();
    locks.shutdown(SOON).await.unwrap();
    let keys = ["from", "to"].map(|id| Key::query_as::<u64>(id).optional());

    assert_eq!(text(&by_segments(&locks), get("/")).await, "-");
    let by_keys = LockLayer::all(locks, keys);
    assert_eq!(text(&by_keys, get("/")).await, "-");
}

#[tokio::test]
async fn each_key_of_a_list_adds_a_name_or_refuses_the_request() {
    let locks = memory();
    let key = |id| Key::query_as::<u64>(id).prefix("account:");
    let fee = key("fee").optional();
    let layer = LockLayer::all(locks, [key("to"), key("from"), fee]);

    let two = text(&layer, get("/?from=07&to=3")).await;
    assert_eq!(two, "account:3 account:7");
    let three = text(&layer, get("/?from=7&to=3&fee=5")).await;
    assert_eq!(three, "account:3 account:5 account:7");
    for bad in ["/?from=7", "/?from=7&to=x", "/?from=7&to=3&fee=x"] {
        let refused = ask(&layer, get(bad)).await;
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST, "{bad}");
    }
}

#[tokio::test]
async fn more_names_than_a_request_may_have_are_answered_with_400() {
    let layer = by_segments(&memory());

    assert_eq!(text(&layer, get("/a/b/c/d/a/b/c/d")).await, "a b c d");
    let refused = ask(&layer, get("/a/b/c/d/e")).await;

    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    let problem = problem(refused).await;
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("names 5 different locks; it may name 4"));
}

#[tokio::test]
async fn the_text_that_a_function_refuses_with_is_shown_and_cut() {
    let keys = Keys::from_fn(1, |_| Err("ä".repeat(600).into()));
    let refused = ask(&LockLayer::all(memory(), keys), get("/a")).await;

    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    let problem = problem(refused).await;
    assert_eq!(problem["detail"], "ä".repeat(500));
}

#[test]
#[should_panic(expected = "every request pass without a lock")]
fn a_layer_without_keys_is_seen_at_the_start() {
    let _ = LockLayer::all(memory(), []);
}

#[test]
#[should_panic(expected = "0 names at most")]
fn a_bound_of_no_names_for_a_request_is_seen_at_the_start() {
    let _ = Keys::from_fn(0, |_| Ok(Vec::new()));
}

// ---- clean-up

#[tokio::test]
async fn a_request_for_several_locks_that_is_dropped_after_any_number_of_polls_leaves_nothing_behind()
 {
    let locks = memory();
    let layer = by_segments(&locks);

    let polls = drop_request_after_each_poll(&locks, &["a", "b"], &layer, "/a/b").await;

    // The request was dropped before the handler, in the handler, and before each of the last two
    // parts of the body.
    assert!(polls >= 4, "{polls}");
}

#[tokio::test]
async fn a_request_that_goes_away_while_it_waits_for_the_rest_gives_its_locks_back() {
    let locks = memory();
    let other = hold(&locks, "b").await;
    let service = by_segments(&locks).layer(names());

    for polls in 0..10 {
        let mut request = Box::pin(service.clone().oneshot(get("/a/b")));
        for _ in 0..polls {
            assert!(request.as_mut().now_or_never().is_none());
        }
        drop(request);
        nothing_is_left(&locks, "a").await;
        until_tickets(&locks, "b", 1).await;
    }
    let waits = tokio::spawn(service.oneshot(get("/a/b")));
    until_tickets(&locks, "b", 2).await;
    assert_eq!(tickets(&locks, "a").await, 1, "it has the first");
    waits.abort();
    nothing_is_left(&locks, "a").await;
    other.release().await.unwrap();
    nothing_is_left(&locks, "b").await;
}

#[tokio::test]
async fn a_handler_that_panics_or_fails_gives_all_locks_back() {
    let locks = memory();
    let layer = by_segments(&locks);
    let panics = layer.layer(service_fn(async |_: In| -> Result<Whole, &str> {
        panic!("on purpose")
    }));
    let fails = layer.layer(service_fn(async |_: In| Err::<Whole, _>("fails")));

    let panicked = tokio::spawn(panics.oneshot(get("/a/b"))).await;
    assert!(panicked.unwrap_err().is_panic());
    for name in ["a", "b"] {
        nothing_is_left(&locks, name).await;
    }
    let failed = in_time(fails.oneshot(get("/a/b"))).await;
    assert_eq!(failed.err(), Some("fails"));
    for name in ["a", "b"] {
        assert_eq!(tickets(&locks, name).await, 0);
    }
}

#[tokio::test]
async fn all_locks_are_kept_until_the_end_of_the_body_or_of_the_head() {
    let locks = memory();
    let streamed = service_fn(async |_: In| {
        let body = StreamBody::new(futures_util::stream::once(async {
            tokio::task::yield_now().await;
            Ok::<_, Infallible>(Frame::data(Bytes::from("all")))
        }));
        Ok::<_, Infallible>(Response::new(Box::pin(body)))
    });
    let both = async || (tickets(&locks, "a").await, tickets(&locks, "b").await);

    let kept = by_segments(&locks).layer(streamed);
    let response = in_time(kept.oneshot(get("/a/b"))).await.unwrap();
    assert_eq!(both().await, (1, 1));
    in_time(response.into_body().collect()).await.unwrap();
    assert_eq!(both().await, (0, 0));

    let let_go = by_segments(&locks).hold_until(HoldUntil::Headers);
    let response = in_time(let_go.layer(streamed).oneshot(get("/a/b"))).await;
    assert_eq!(both().await, (0, 0));
    in_time(response.unwrap().into_body().collect())
        .await
        .unwrap();
}

/// Without re-entry, a handler that takes one of these locks would wait for its own request.
#[tokio::test]
async fn handler_and_body_re_enter_each_of_the_locks() {
    let locks = memory();
    let again = {
        let locks = locks.clone();
        async move || {
            for name in ["a", "b"] {
                let lock = locks.mutex(name).wait(Duration::ZERO);
                lock.acquire().await.unwrap().release().await.unwrap();
            }
        }
    };
    let service = by_segments(&locks).layer(service_fn(move |_: In| {
        let again = again.clone();
        async move {
            again().await;
            let part = async move {
                again().await;
                Ok::<_, Infallible>(Frame::data(Bytes::from("taken again")))
            };
            let body = StreamBody::new(futures_util::stream::once(part));
            Ok::<_, Infallible>(Response::new(body))
        }
    }));

    let response = in_time(service.oneshot(get("/a/b"))).await.unwrap();
    let body = in_time(response.into_body().collect()).await.unwrap();
    assert_eq!(body.to_bytes(), "taken again");
}

#[tokio::test]
async fn an_inner_layer_re_enters_the_locks_of_the_outer_one() {
    let locks = memory();
    let outer = by_segments(&locks);
    let inner = LockLayer::all(locks.clone(), ["b", "c"].map(Key::template));

    let response = in_time(outer.layer(inner.layer(names())).oneshot(get("/a/b"))).await;

    let body = response.unwrap().into_body().collect().await.unwrap();
    assert_eq!(body.to_bytes(), "b c", "those of the innermost");
    for name in ["a", "b", "c"] {
        assert_eq!(tickets(&locks, name).await, 0);
    }
}
