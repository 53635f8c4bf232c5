//! Several locks for one request: all or none of them, from the wait to the end of the body.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

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
use lockcore::testing::{Forward, Store, around};
use lockcore::{ErrorKind, Locks, LostReason, MultiHeld};
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

/// Requests of two processes move money between accounts, which they name in every order. Each request reads two
/// balances, and writes them after a pause.
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

// ---- the wait and the answers

#[tokio::test]
async fn a_refusal_tells_all_names_and_which_of_them_was_not_free() {
    let locks = memory();
    let _other = hold(&locks, "b").await;
    let layer = by_segments(&locks).wait(Duration::from_millis(20));

    let refused = ask(&layer, get("/c/b/a")).await;

    assert_eq!(refused.status(), StatusCode::CONFLICT);
    assert!(refused.headers().contains_key("retry-after"));
    let problem = problem(refused).await;
    assert_eq!(problem["key"], "b");
    assert_eq!(problem["keys"], serde_json::json!(["a", "b", "c"]));
    for name in ["a", "c"] {
        nothing_is_left(&locks, name).await;
    }
}

#[tokio::test]
async fn a_refusal_tells_no_name_where_keys_are_hidden() {
    let locks = memory();
    let _other = hold(&locks, "b").await;
    let layer = by_segments(&locks).try_only().hide_key();
    let refuses = layer.clone().refuse_with(|refusal| {
        assert_eq!((refusal.key(), refusal.keys().len()), (None, 0));
        Response::new(Bytes::new())
    });
    let tells = by_segments(&locks).try_only().refuse_with(|refusal| {
        let response = Response::builder().status(refusal.status());
        let keys = refusal.keys().join(" ");
        response.body(Bytes::from(keys)).unwrap()
    });

    let hidden = problem(ask(&layer, get("/a/b")).await).await;
    assert!(hidden.get("key").is_none() && hidden.get("keys").is_none());
    let own = ask(&refuses, get("/a/b")).await;
    assert_eq!(own.status(), StatusCode::OK);
    let told = ask(&tells, get("/a/b")).await.into_body().collect().await;
    assert_eq!(told.unwrap().to_bytes(), "a b");
}

#[tokio::test]
async fn an_upgrade_under_several_locks_is_refused_with_their_names() {
    let layer = by_segments(&memory());
    let mut upgrades = get("/a/b");
    let web_socket = HeaderValue::from_static("websocket");
    upgrades.headers_mut().insert("upgrade", web_socket);

    let refused = problem(ask(&layer, upgrades).await).await;
    let switches = service_fn(async |_: In| {
        let response = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS);
        Ok::<_, Infallible>(response.body(Full::<Bytes>::default()).unwrap())
    });
    let replaced = in_time(layer.layer(switches).oneshot(get("/a/b"))).await;
    let replaced = problem(replaced.unwrap()).await;

    for problem in [refused, replaced] {
        assert_eq!(problem["status"], 501);
        assert_eq!(problem["keys"], serde_json::json!(["a", "b"]));
    }
}

/// The first lock uses up a part of the wait. The second gets the rest.
#[tokio::test]
async fn the_wait_is_one_for_all_locks() {
    let store = Store::new();
    store.clock().stop();
    let locks = store.client().unwrap();
    let (first, _second) = (hold(&locks, "a").await, hold(&locks, "b").await);
    let layer = by_segments(&store.client().unwrap()).wait(Duration::from_secs(4));

    let waits = tokio::spawn(layer.layer(names()).oneshot(get("/a/b")));
    until_tickets(&locks, "a", 2).await;
    store.clock().advance(Duration::from_secs(3));
    first.release().await.unwrap();
    until_tickets(&locks, "b", 2).await;
    assert!(!waits.is_finished());
    store.clock().advance(Duration::from_secs(1));

    let refused = in_time(waits).await.unwrap().unwrap();
    assert_eq!(refused.status(), StatusCode::CONFLICT);
    assert_eq!(problem(refused).await["key"], "b");
}

#[tokio::test]
async fn a_request_counts_as_waiting_for_each_of_its_names() {
    let locks = memory();
    let other = hold(&locks, "b").await;
    let layer = by_segments(&locks).wait(SOON * 2).max_waiting(1);

    let waits = tokio::spawn(layer.layer(names()).oneshot(get("/a/b")));
    until_tickets(&locks, "b", 2).await;
    // The refusal comes at once. The wait is longer than `in_time` allows.
    assert_eq!(status(&layer, "/b").await, StatusCode::CONFLICT);
    assert_eq!(status(&layer, "/a/c").await, StatusCode::CONFLICT);
    assert_eq!(status(&layer, "/c").await, StatusCode::OK);

    other.release().await.unwrap();
    let response = in_time(waits).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    drop(response);
    // No request waits any more.
    assert_eq!(status(&layer, "/a/b").await, StatusCode::OK);
}

#[tokio::test]
async fn each_name_of_a_request_counts_among_those_of_the_layer() {
    const HOUR: Duration = Duration::from_secs(3600);
    let layer = by_segments(&memory()).max_names(2, HOUR);

    assert_eq!(status(&layer, "/a/b").await, StatusCode::OK);
    assert_eq!(status(&layer, "/b/a").await, StatusCode::OK);
    let refused = ask(&layer, get("/a/c")).await;

    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    let problem = problem(refused).await;
    assert!(problem["type"].as_str().unwrap().ends_with("#lock-names"));
}

/// A request whose body never comes.
fn never_sent(path: &str) -> Request<UnsyncBoxBody<Bytes, Infallible>> {
    let never = futures_util::stream::pending::<Result<Frame<Bytes>, Infallible>>();
    let body = StreamBody::new(never).boxed_unsync();
    Request::post(path).body(body).unwrap()
}

#[tokio::test]
async fn a_name_too_many_or_a_full_line_is_refused_before_the_body_is_read() {
    const HOUR: Duration = Duration::from_secs(3600);
    let locks = memory();
    let _other = hold(&locks, "b").await;
    let layer = by_segments(&locks).max_names(2, HOUR).max_waiting(1);
    let layer = layer.wait(SOON * 2).read_body_first(100, SOON);
    let service = layer.layer(service_fn(async |_: Request<_>| {
        Ok::<_, Infallible>(Whole::default())
    }));
    let empty = get("/a/b").map(|body| body.boxed_unsync());
    let waits = tokio::spawn(service.clone().oneshot(empty));
    until_tickets(&locks, "b", 2).await;

    for (path, expected) in [
        ("/a/b", StatusCode::CONFLICT),
        ("/a/c", StatusCode::SERVICE_UNAVAILABLE),
    ] {
        let refused = in_time(service.clone().oneshot(never_sent(path))).await;
        assert_eq!(refused.unwrap().status(), expected, "{path}");
    }
    waits.abort();
}

#[tokio::test]
async fn two_new_names_are_refused_before_the_body_is_read_where_there_is_room_for_one() {
    const HOUR: Duration = Duration::from_secs(3600);
    let layer = by_segments(&memory()).max_names(2, HOUR);
    let layer = layer.wait(SOON * 2).read_body_first(100, SOON);
    let service = layer.layer(service_fn(async |_: Request<_>| {
        Ok::<_, Infallible>(Whole::default())
    }));
    let first = get("/x").map(|body| body.boxed_unsync());
    assert_eq!(
        service.clone().oneshot(first).await.unwrap().status(),
        StatusCode::OK
    );

    let refused = in_time(service.clone().oneshot(never_sent("/a/b"))).await;

    let refused = refused.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        problem(refused).await["keys"],
        serde_json::json!(["a", "b"])
    );
}

// ---- clean-up

#[tokio::test]
async fn a_request_for_several_locks_that_is_dropped_after_any_number_of_polls_leaves_nothing_behind()
 {
    let locks = memory();
    let layer = by_segments(&locks);

    let polls = drop_request_after_each_poll(&locks, &["a", "b"], &layer, "/a/b").await;

    // It was dropped before the handler, in it, and before each of the three answers of the body.
    assert!(polls >= 5, "{polls}");
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
        let parts = [Frame::data(Bytes::from("all"))].map(Ok::<_, Infallible>);
        let body = StreamBody::new(futures_util::stream::iter(parts));
        Ok::<_, Infallible>(Response::new(body))
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

/// Otherwise a lock that the handler takes would wait for the request itself.
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

// ---- losses

/// Deletes a ticket at the store, as an operator can do by hand.
#[derive(Debug, Default)]
struct Deleting {
    /// Whether the tickets of "b" are deleted.
    deleted: Arc<AtomicBool>,
}

#[derive(Debug)]
struct DeletingConnection(Arc<dyn Connection>, Arc<AtomicBool>);

impl Forward for DeletingConnection {
    fn inner(&self) -> &Arc<dyn Connection> {
        &self.0
    }

    fn renew(&self, tickets: Vec<Arc<backend::Request>>) -> Answer<Vec<Renewed>> {
        let deleted = self.1.load(Ordering::SeqCst);
        let lost = tickets
            .iter()
            .map(|ticket| deleted && ticket.name.as_str() == "b");
        let lost: Vec<_> = lost.collect();
        let renewed = self.0.renew(tickets);
        Box::pin(async move {
            let renewed = renewed.await?.into_iter().zip(lost);
            Ok(renewed
                .map(|(renewed, lost)| if lost { Renewed::Lost } else { renewed })
                .collect())
        })
    }
}

impl Deleting {
    fn client(&self) -> Locks {
        let deleted = Arc::clone(&self.deleted);
        let store = around(backend::open("memory:").unwrap(), move |connection| {
            DeletingConnection(connection, Arc::clone(&deleted))
        });
        Locks::with_backend(store).unwrap()
    }

    /// Deletes the ticket of "b", and requests a renewal of it. Returns when the client knows that it is lost.
    async fn lose_b(&self, held: &MultiHeld) {
        self.deleted.store(true, Ordering::SeqCst);
        let renewed = held.get("b").unwrap().ensure(Duration::from_secs(10));
        let lost = in_time(renewed).await.unwrap_err();
        assert_eq!(lost.kind(), ErrorKind::Lost(LostReason::Taken));
        assert!(held.get("a").unwrap().is_valid(), "the other one is held");
    }
}

#[tokio::test]
async fn a_handler_that_loses_one_of_its_locks_is_stopped_and_the_others_are_free() {
    let store = Deleting::default();
    let locks = store.client();
    let (held, service) = endless();
    let request = tokio::spawn(by_segments(&locks).layer(service).oneshot(get("/a/b")));
    let held = in_time(held).await.unwrap();

    store.lose_b(&held).await;

    let response = in_time(request).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(!response.headers().contains_key("retry-after"));
    let problem = problem(response).await;
    assert!(problem["type"].as_str().unwrap().ends_with("#lock-lost"));
    assert_eq!(problem["key"], "b");
    assert_eq!(problem["keys"], serde_json::json!(["a", "b"]));
    nothing_is_left(&locks, "a").await;
}

/// Returns a response whose body sends nothing, and its locks.
async fn streaming(
    layer: LockLayer,
    content_type: &'static str,
) -> (
    MultiHeld,
    Response<LockBody<impl http_body::Body<Data = Bytes, Error = Infallible> + Send>>,
) {
    let held = Arc::new(Mutex::new(None));
    let service = layer.layer(service_fn({
        let held = Arc::clone(&held);
        move |request: In| {
            *held.lock().unwrap() = request.extensions().get::<MultiHeld>().cloned();
            let parts = futures_util::stream::pending::<Result<Frame<Bytes>, Infallible>>();
            let response = Response::builder().header("content-type", content_type);
            let response = response.body(StreamBody::new(parts)).unwrap();
            async { Ok::<_, Infallible>(response) }
        }
    }));
    let mut request = get("/a/b");
    *request.method_mut() = Method::POST;
    let content = HeaderValue::from_static(content_type);
    request.headers_mut().insert("content-type", content);
    let response = in_time(service.oneshot(request)).await.unwrap();
    let held = held.lock().unwrap().take().unwrap();
    (held, response)
}

#[tokio::test]
async fn a_response_that_loses_one_of_its_locks_ends_in_an_error_and_the_others_are_free() {
    for watched in [false, true] {
        let store = Deleting::default();
        let locks = store.client();
        let mut layer = by_segments(&locks);
        if watched {
            layer = layer.max_hold(SOON * 100);
        }
        let (held, response) = streaming(layer, "text/plain").await;
        let reader = tokio::spawn(response.into_body().collect());

        store.lose_b(&held).await;

        let error = in_time(reader).await.unwrap().err().unwrap();
        let error: &lockcore::Error = error.downcast_ref().unwrap();
        assert_eq!(error.kind(), ErrorKind::Lost(LostReason::Taken));
        assert_eq!(error.name(), Some("b"));
        nothing_is_left(&locks, "a").await;
    }
}

#[tokio::test]
async fn a_grpc_stream_that_loses_one_of_its_locks_ends_in_a_status_that_names_it() {
    let store = Deleting::default();
    let locks = store.client();
    let (held, response) = streaming(by_segments(&locks), "application/grpc").await;
    let reader = tokio::spawn(response.into_body().collect());

    store.lose_b(&held).await;

    let collected = in_time(reader).await.unwrap().unwrap();
    let trailers = collected.trailers().unwrap();
    assert_eq!(trailers["grpc-status"], "14");
    let message = trailers["grpc-message"].to_str().unwrap();
    assert!(message.ends_with("(key: b)"), "{message}");
}

#[tokio::test]
async fn the_longest_hold_ends_all_locks_although_nobody_polls_the_body() {
    let store = Store::new();
    store.clock().stop();
    let locks = store.client().unwrap();
    let longest = Duration::from_secs(10);
    // The lease lasts longer than the longest hold.
    let layer = by_segments(&locks).ttl(longest * 10).max_hold(longest);
    let (held, response) = streaming(layer, "text/plain").await;
    assert!(held.is_valid());

    store.clock().advance(longest);

    let (lost, reason) = in_time(held.lost()).await;
    assert_eq!((lost.name(), reason), ("a", LostReason::MaxHold));
    assert!(held.iter().all(|held| !held.is_valid()));
    for name in ["a", "b"] {
        until_tickets(&locks, name, 0).await;
    }
    let error = in_time(response.into_body().collect()).await.err().unwrap();
    assert!(error.is::<lockcore::Error>());
}

/// The first lock is lost while the request waits for the second. The handler is not called, so the client may try
/// again.
#[tokio::test]
async fn a_request_that_loses_a_lock_before_it_has_all_is_told_to_try_again() {
    let store = Store::new();
    let (other, locks) = (store.client().unwrap(), store.client().unwrap());
    let _held = hold(&other, "b").await;
    let waits = tokio::spawn(by_segments(&locks).layer(names()).oneshot(get("/a/b")));
    until_tickets(&other, "b", 2).await;

    lose(&locks).await;

    let response = in_time(waits).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(response.headers().contains_key("retry-after"));
    let problem = problem(response).await;
    assert!(
        problem["type"]
            .as_str()
            .unwrap()
            .ends_with("#lock-unavailable")
    );
}

// ---- tokens

/// The handler writes to accounts of another service, which has a fence in front of each account.
#[tokio::test]
async fn each_write_goes_out_with_the_token_of_its_own_name() {
    let locks = memory();
    let fence = FenceLayer::new(Key::header("account"));
    let written = Arc::new(AtomicUsize::new(0));
    let accounts = fence.layer(service_fn({
        let written = Arc::clone(&written);
        move |_: In| {
            written.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, Infallible>(Whole::default()) }
        }
    }));
    let write = |account: &str| Request::post("/").header("account", account);
    let client = TokenLayer::new().layer(accounts.clone());
    let service = by_segments(&locks).layer(service_fn(move |request: In| {
        let held = request.extensions().get::<MultiHeld>().unwrap().clone();
        let client = client.clone();
        async move {
            let mut tokens = Vec::new();
            for lock in held.iter() {
                let request = write(lock.name()).extension(lock.clone());
                let request = request.body(Empty::new()).unwrap();
                let answer = client.clone().oneshot(request).await.unwrap();
                assert_eq!(answer.status(), StatusCode::OK);
                tokens.push(lock.fencing_token().unwrap().to_string());
            }
            Ok::<_, Infallible>(Response::new(tokens.join(" ")))
        }
    }));
    let tokens = async |path: &str| {
        let response = in_time(service.clone().oneshot(get(path))).await.unwrap();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let tokens = String::from_utf8(body.into()).unwrap();
        tokens.split(' ').map(str::to_owned).collect::<Vec<_>>()
    };

    // The name `busy` has had more holders than `quiet`, so its tokens differ.
    for _ in 0..5 {
        tokens("/busy").await;
    }
    let late = tokens("/busy/quiet").await;
    let now = tokens("/quiet/busy").await;
    assert_ne!(late[0], late[1], "each has a token of its own");
    let before = written.load(Ordering::SeqCst);
    for (account, late, now) in [("busy", &late[0], &now[0]), ("quiet", &late[1], &now[1])] {
        for (token, expected) in [
            (late, StatusCode::PRECONDITION_FAILED),
            (now, StatusCode::OK),
        ] {
            let request = write(account).header(TOKEN_HEADER, token.as_str());
            let request = request.body(Empty::new()).unwrap();
            let answer = in_time(accounts.clone().oneshot(request)).await.unwrap();
            assert_eq!(answer.status(), expected, "{account} under {token}");
        }
    }
    assert_eq!(written.load(Ordering::SeqCst), before + 2);
}

#[tokio::test]
async fn the_response_of_several_locks_has_no_token() {
    let layer = by_segments(&memory()).token_header();

    let response = ask(&layer, get("/a")).await;

    assert_eq!(response.status(), StatusCode::OK);
    assert!(!response.headers().contains_key(TOKEN_HEADER));
}
