//! An axum service whose requests for the same order wait for each other, and for no other.
//!
//! ```text
//! cargo run --release --example axum_layer
//! ```
//!
//! The locks are in the memory of this process. With `LockLayer::new(Locks::from_env()?, …)` and `LOCK_URL=redis://…` they
//! hold for all processes of the service.

use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Path, State};
use axum::http::{Method, Request, StatusCode};
use axum::routing::{Router, get, post};
use examples::{Orders, expect};
use futures_util::stream;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lockcore::Locks;
use lockcore_tower::{Held, Key, LockLayer};
use tokio::net::TcpListener;

type Failure = Box<dyn Error + Send + Sync>;

/// What a step of the work takes. Long enough that two requests at once meet.
const STEP: Duration = Duration::from_millis(100);

fn router(locks: Locks, orders: Orders) -> Router {
    // `order:7` for the path /orders/7 and those below it, and for /orders/007, which is the same order to the handlers.
    // Whoever else locks that name, as an annotated function with `key = "order:{id}"`, is kept out too. GET takes the
    // read side.
    let by_order = LockLayer::new(locks.clone(), Key::path_as::<u64>("id").prefix("order:"))
        .read_on_get()
        .wait(Duration::from_secs(2))
        .token_header();
    // The same lock, for those who would rather not wait.
    let at_once = LockLayer::new(locks, Key::path_as::<u64>("id").prefix("order:"))
        .try_only()
        .busy_status(StatusCode::LOCKED);
    // Around what has a handler: a method that has none is refused without standing in line.
    Router::new()
        .route("/orders/{id}", get(look).route_layer(by_order.clone()))
        .route(
            "/orders/{id}/settle",
            post(settle).route_layer(by_order.clone()),
        )
        .route("/orders/{id}/export", get(export).route_layer(by_order))
        .route("/orders/{id}/cancel", post(cancel).route_layer(at_once))
        .with_state(orders)
}

async fn look(State(orders): State<Orders>, Path(id): Path<u64>) -> String {
    let _visit = orders.visit("look", id);
    tokio::time::sleep(STEP).await;
    format!("order {id}")
}

/// `Held` says under which token; pass it on with every write.
async fn settle(State(orders): State<Orders>, Path(id): Path<u64>, held: Held) -> String {
    let _visit = orders.visit("settle", id);
    tokio::time::sleep(STEP).await;
    format!("settled under token {}", held.token())
}

/// The lock is kept until the body has ended.
async fn export(State(orders): State<Orders>, Path(id): Path<u64>) -> Body {
    let visit = orders.visit("export", id);
    Body::from_stream(stream::unfold((visit, 1), |(visit, page)| async move {
        if page > 3 {
            return None;
        }
        tokio::time::sleep(STEP).await;
        let text = Bytes::from(format!("page {page}\n"));
        Some((Ok::<_, std::io::Error>(text), (visit, page + 1)))
    }))
}

async fn cancel(State(orders): State<Orders>, Path(id): Path<u64>) -> &'static str {
    let _visit = orders.visit("cancel", id);
    "cancelled"
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let locks = Locks::connect("memory:")?;
    Ok(examples::tell([&locks], story(locks.clone())).await)
}

async fn story(locks: Locks) -> Result<(), Failure> {
    let orders = Orders::default();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let shop = Shop(listener.local_addr()?);
    let service = router(locks, orders.clone());
    tokio::spawn(async move { axum::serve(listener, service).await });

    println!("settle order 7 twice and order 8 once, at the same time:");
    let (one, two, other) = tokio::join!(shop.settle(7), shop.settle(7), shop.settle(8));
    println!("  {}\n  {}\n  {}\n", one?, two?, other?);
    expect("of order 7 one after the other", orders.most(7) == 1)?;
    expect("order 8 beside them", orders.most_at_all() == 2)?;

    println!("look at order 7 three times at once:");
    let (one, two, three) = tokio::join!(shop.look(7), shop.look(7), shop.look(7));
    println!("  {}\n  {}\n  {}\n", one?, two?, three?);
    expect("readers beside each other", orders.most(7) == 3)?;

    println!("settle order 7, and cancel it meanwhile, without waiting:");
    let begun = orders.next_visit("settle");
    let meanwhile = async {
        begun.await;
        shop.ask(Method::POST, "/orders/7/cancel").await
    };
    let (settled, refused) = tokio::join!(shop.settle(7), meanwhile);
    println!("  {}\n  {}\n", settled?, refused?);
    expect(
        "who would not wait was refused",
        orders.visits("cancel") == 0,
    )?;

    println!("export order 7, page by page, and settle it meanwhile:");
    let begun = orders.next_visit("export");
    let meanwhile = async {
        begun.await;
        shop.settle(7).await
    };
    let (exported, settled) = tokio::join!(shop.ask(Method::GET, "/orders/7/export"), meanwhile);
    println!("  {}\n  {}\n", exported?, settled?);
    expect("settled behind the last page", orders.most(7) == 1)?;

    println!("each came when nobody was in its way");
    Ok(())
}

/// A client of the service.
#[derive(Clone, Copy)]
struct Shop(SocketAddr);

impl Shop {
    async fn settle(self, id: u64) -> Result<String, Failure> {
        self.ask(Method::POST, &format!("/orders/{id}/settle"))
            .await
    }

    async fn look(self, id: u64) -> Result<String, Failure> {
        self.ask(Method::GET, &format!("/orders/{id}")).await
    }

    /// The answer as a line.
    async fn ask(self, method: Method, path: &str) -> Result<String, Failure> {
        let began = Instant::now();
        let request = Request::builder()
            .method(&method)
            .uri(format!("http://{}{path}", self.0))
            .body(Body::empty())?;
        let client = Client::builder(TokioExecutor::new()).build_http();
        let response = client.request(request).await?;
        let status = response.status();
        let token = response.headers().get("lock-fencing-token").cloned();
        let body = to_bytes(Body::new(response.into_body()), 64 * 1024).await?;
        let body = String::from_utf8_lossy(&body).trim().replace('\n', ", ");
        let took = began.elapsed().as_millis();
        let token = match token {
            Some(token) => format!("; lock-fencing-token: {}", token.to_str()?),
            None => String::new(),
        };
        Ok(format!(
            "{method} {path}  {took} ms  {status}  {body}{token}"
        ))
    }
}
