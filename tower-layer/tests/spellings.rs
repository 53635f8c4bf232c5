//! Tests with one id in several spellings, over real connections. The handlers act on the parsed
//! value, so requests with different spellings of one id must not overlap.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use axum::Router;
use axum::extract::{Extension, Path, State};
use axum::routing::post;
use bytes::Bytes;
use common::{in_time, memory, problem};
use futures_util::future::join_all;
use http::{HeaderMap, Request, StatusCode, Uri};
use http_body_util::Empty;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lockcore::inspect::TicketInfo;
use lockcore::{FencingToken, Locks};
use lockcore_tower::{FenceLayer, Key, LockLayer, TOKEN_HEADER};
use tokio::net::TcpListener;

/// Parsed as numbers, all of them are 12.
const SPELLINGS: [&str; 4] = ["12", "012", "%31%32", "+12"];
/// The names of these spellings under a raw key. If nothing decodes `%31%32`, the spelling 0012
/// replaces it.
const NAMES: [&str; 4] = ["order:12", "order:012", "order:+12", "order:0012"];

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, app).await });
    address
}

async fn ask(request: http::request::Builder) -> http::Response<hyper::body::Incoming> {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let request = request.body(Empty::<Bytes>::new()).unwrap();
    in_time(client.request(request)).await.unwrap()
}

/// The handlers of order 12.
#[derive(Clone)]
struct Order12 {
    locks: Locks,
    inside: Arc<AtomicU32>,
    most_inside: Arc<AtomicU32>,
    done: Arc<AtomicU32>,
}

impl Order12 {
    fn new(locks: &Locks) -> Self {
        Self {
            locks: locks.clone(),
            inside: Arc::default(),
            most_inside: Arc::default(),
            done: Arc::default(),
        }
    }

    /// Returns when each request is done, in a handler, or waiting. By then, all requests that are
    /// handled at the same time as this one have been counted.
    async fn settle(&self, id: u64) {
        assert_eq!(id, 12);
        let inside = self.inside.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_inside.fetch_max(inside, Ordering::SeqCst);
        in_time(async {
            loop {
                // A request goes from waiting to inside to done, and this counts in the opposite
                // order. So a request that moves during the count may be missed, but is never
                // counted twice.
                let mut here = self.done.load(Ordering::SeqCst);
                here += self.inside.load(Ordering::SeqCst);
                for name in NAMES {
                    here += waiting(&self.locks, name).await;
                }
                if here as usize == SPELLINGS.len() {
                    break;
                }
                tokio::task::yield_now().await;
            }
        })
        .await;
        self.inside.fetch_sub(1, Ordering::SeqCst);
        self.done.fetch_add(1, Ordering::SeqCst);
    }
}

/// The number of waiters for a name, at the store and inside this client.
async fn waiting(locks: &Locks, name: &str) -> u32 {
    let places = locks.inspect(name).await.unwrap();
    let waiting = |place: &TicketInfo| u32::from(!place.granted) + place.local_waiters;
    places.iter().map(waiting).sum()
}

/// Sends a request in each spelling at the same time. Returns how many handlers of order 12
/// overlapped.
async fn most_at_once(
    locks: &Locks,
    app: Router<Order12>,
    request: impl Fn(SocketAddr, &str) -> http::request::Builder,
) -> u32 {
    let order = Order12::new(locks);
    let address = serve(app.with_state(order.clone())).await;
    let asked = SPELLINGS.map(|spelling| ask(request(address, spelling)));
    for answer in join_all(asked).await {
        assert_eq!(answer.status(), StatusCode::OK);
    }
    order.most_inside.load(Ordering::SeqCst)
}

async fn settle(State(order): State<Order12>, Path(id): Path<u64>) {
    order.settle(id).await;
}

fn by_path(address: SocketAddr, spelling: &str) -> http::request::Builder {
    Request::post(format!("http://{address}/orders/{spelling}"))
}

fn app(locks: &Locks, key: Key) -> Router<Order12> {
    Router::new()
        .route("/orders/{id}", post(settle))
        .route_layer(LockLayer::new(locks.clone(), key))
}

#[tokio::test(flavor = "multi_thread")]
async fn all_spellings_of_a_path_parameter_are_one_lock() {
    let locks = memory();
    for key in [
        Key::path_as::<u64>("id").prefix("order:"),
        Key::template("order:{path.id:u64}"),
        Key::template("order:{path.id}").read_as::<u64>("path.id"),
    ] {
        assert_eq!(most_at_once(&locks, app(&locks, key), by_path).await, 1);
    }
}

/// This shows that the other tests here can fail. The docs of the raw keys warn of the overlap.
#[tokio::test(flavor = "multi_thread")]
async fn a_raw_key_lets_the_spellings_in_beside_each_other() {
    let locks = memory();
    let key = Key::path("id").prefix("order:");

    let most = most_at_once(&locks, app(&locks, key), by_path).await;

    assert_eq!(most, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_spellings_of_a_query_parameter_are_one_lock() {
    let locks = memory();
    let settle = async |State(order): State<Order12>, uri: Uri| {
        let query = uri.query().unwrap();
        let mut pairs = form_urlencoded::parse(query.as_bytes());
        let (_, id) = pairs.find(|(name, _)| name == "id").unwrap();
        order.settle(id.parse().unwrap()).await;
    };
    let by_query = |address: SocketAddr, spelling: &str| {
        // In a query, a plus is a blank.
        let spelling = spelling.replace('+', "%2B");
        Request::post(format!("http://{address}/orders?id={spelling}"))
    };
    for key in [
        Key::query_as::<u64>("id").prefix("order:"),
        Key::template("order:{query.id:u64}"),
    ] {
        let layer = LockLayer::new(locks.clone(), key);
        let app = Router::new()
            .route("/orders", post(settle))
            .route_layer(layer);
        assert_eq!(most_at_once(&locks, app, by_query).await, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_spellings_of_a_header_are_one_lock() {
    let locks = memory();
    let settle = async |State(order): State<Order12>, headers: HeaderMap| {
        let id = headers["order-id"].to_str().unwrap();
        order.settle(id.parse().unwrap()).await;
    };
    let by_header = |address: SocketAddr, spelling: &str| {
        // Headers are not percent-encoded.
        let spelling = spelling.replace("%31%32", "0012");
        Request::post(format!("http://{address}/orders")).header("order-id", spelling)
    };
    for key in [
        Key::header_as::<u64>("order-id").prefix("order:"),
        Key::metadata_as::<u64>("order-id").prefix("order:"),
        Key::template("order:{header.order-id:u64}"),
    ] {
        let layer = LockLayer::new(locks.clone(), key);
        let app = Router::new()
            .route("/orders", post(settle))
            .route_layer(layer);
        assert_eq!(most_at_once(&locks, app, by_header).await, 1);
    }
}

/// The write with the higher token must be the last one, in every spelling of the account.
#[tokio::test(flavor = "multi_thread")]
async fn all_spellings_of_a_resource_have_one_fence() {
    let written = Arc::new(AtomicI64::new(0));
    let write = {
        let written = Arc::clone(&written);
        async move |Path(account): Path<u64>, Extension(token): Extension<FencingToken>| {
            assert_eq!(account, 1);
            written.store(token.as_i64(), Ordering::SeqCst);
        }
    };
    let app = Router::new()
        .route("/accounts/{id}", post(write))
        .route_layer(FenceLayer::new(Key::path_as::<u64>("id")));
    let address = serve(app).await;
    let write = async |account: &str, token: i64| {
        let url = format!("http://{address}/accounts/{account}");
        let request = Request::post(url).header(TOKEN_HEADER, token);
        ask(request).await.status()
    };

    assert_eq!(write("1", 2).await, StatusCode::OK);
    for late in ["01", "+1", "%31", "1"] {
        let status = write(late, 1).await;
        assert_eq!(status, StatusCode::PRECONDITION_FAILED, "{late}");
    }
    assert_eq!(write("001", 3).await, StatusCode::OK);
    assert_eq!(written.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn a_value_that_is_not_of_its_type_is_refused_and_says_why() {
    let app = Router::new()
        .route("/orders/{id}", post(async || "reached"))
        .route_layer(LockLayer::new(
            memory(),
            Key::path_as::<u64>("id").optional(),
        ));
    let address = serve(app).await;
    for id in ["x", "-1", "12x", "99999999999999999999"] {
        let refused = ask(Request::post(format!("http://{address}/orders/{id}"))).await;

        assert_eq!(refused.status(), StatusCode::BAD_REQUEST, "{id}");
        let detail = problem(refused).await["detail"].to_string();
        assert!(detail.contains("path parameter"), "{detail}");
        assert!(detail.contains("is not valid: "), "{detail}");
    }
}
