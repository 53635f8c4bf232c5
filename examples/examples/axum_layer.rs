//! An axum service: requests for the same order wait for each other, requests for different orders
//! do not.
//!
//! ```text
//! cargo run --release --example axum_layer                              # tells a story
//! cargo run --release --example axum_layer -- --serve 127.0.0.1:3000   # serves, for curl
//! ```
//!
//! The locks are in the memory of this process. With `LOCK_URL=redis://127.0.0.1/` before the
//! command they are in that Redis, and all processes of the service share them. To try that, serve
//! on two ports and send requests for one order to both.

use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Path, State};
use axum::http::{Method, Request, StatusCode};
use axum::routing::{Router, get, post};
use clap::Parser;
use examples::{Orders, READY, expect};
use futures_util::stream;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lockcore::Locks;
use lockcore_tower::{HeldLock, Key, LockLayer};
use tokio::net::TcpListener;

type Failure = Box<dyn Error + Send + Sync>;

/// How long a step of the work takes in the story. It is long enough that two concurrent requests
/// overlap.
const STEP: Duration = Duration::from_millis(100);
/// How long a step takes with `--serve`, for a person who tries the service with two terminals.
const SLOW_STEP: Duration = Duration::from_secs(1);

#[derive(Clone)]
struct Work {
    orders: Orders,
    step: Duration,
}

fn router(locks: Locks, work: Work) -> Router {
    // The key is `order:7` for the path /orders/7 and the paths below it. It is the same for
    // /orders/007, because the handlers read both as order 7. All other code that locks this name
    // is excluded too, such as an annotated function with `key = "order:{id}"`. GET takes the read
    // side.
    let by_order = LockLayer::new(locks.clone(), Key::path_as::<u64>("id").prefix("order:"))
        .read_on_get()
        .wait(Duration::from_secs(2))
        .token_header();
    // The same lock, for clients that do not want to wait.
    let at_once = LockLayer::new(locks, Key::path_as::<u64>("id").prefix("order:"))
        .try_only()
        .busy_status(StatusCode::LOCKED);
    // `route_layer` covers only the methods that have a handler: a request with another method is
    // refused without waiting for the lock.
    Router::new()
        .route("/orders/{id}", get(look).route_layer(by_order.clone()))
        .route(
            "/orders/{id}/settle",
            post(settle).route_layer(by_order.clone()),
        )
        .route("/orders/{id}/export", get(export).route_layer(by_order))
        .route("/orders/{id}/cancel", post(cancel).route_layer(at_once))
        .with_state(work)
}

async fn look(State(work): State<Work>, Path(id): Path<u64>) -> String {
    let _visit = work.orders.visit("look", id);
    tokio::time::sleep(work.step).await;
    format!("order {id}\n")
}

/// `HeldLock` has the fencing token; pass it on with every write.
async fn settle(State(work): State<Work>, Path(id): Path<u64>, held: HeldLock) -> String {
    let _visit = work.orders.visit("settle", id);
    tokio::time::sleep(work.step).await;
    format!("order {id} settled by grant {}\n", held.grant_id())
}

/// The lock is kept until the response body has ended.
async fn export(State(work): State<Work>, Path(id): Path<u64>) -> Body {
    let visit = work.orders.visit("export", id);
    Body::from_stream(stream::unfold(
        (visit, 1),
        move |(visit, page)| async move {
            if page > 3 {
                return None;
            }
            tokio::time::sleep(work.step).await;
            let text = Bytes::from(format!("page {page}\n"));
            Some((Ok::<_, std::io::Error>(text), (visit, page + 1)))
        },
    ))
}

async fn cancel(State(work): State<Work>, Path(id): Path<u64>) -> &'static str {
    let _visit = work.orders.visit("cancel", id);
    "cancelled\n"
}

/// An axum service whose requests for the same order wait for each other.
#[derive(Debug, Parser)]
struct Args {
    /// Serve here until Ctrl-C or SIGTERM, as on 127.0.0.1:3000, instead of telling a story
    #[arg(long, value_name = "ADDRESS")]
    serve: Option<SocketAddr>,
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let args = Args::parse();
    let locks = examples::locks_in_memory()?;
    match args.serve {
        Some(address) => serve(address, locks).await?,
        None => return Ok(examples::tell([&locks], story(locks.clone())).await),
    }
    Ok(ExitCode::SUCCESS)
}

async fn serve(address: SocketAddr, locks: Locks) -> Result<(), Box<dyn Error>> {
    // A wrong URL or password is an error here, and not in each request.
    locks.ready(READY).await?;
    let listener = TcpListener::bind(address)
        .await
        .map_err(|error| format!("cannot listen on {address}: {error}; choose another port"))?;
    let address = listener.local_addr()?;
    let work = Work {
        orders: Orders::default(),
        step: SLOW_STEP,
    };
    println!("serving on {address}, until Ctrl-C or SIGTERM. Copy a line into another terminal:\n");
    let orders = format!("http://{address}/orders");
    println!("two at once for one order, the second waits; and one for another, which does not:");
    println!(
        "  curl -i -X POST {orders}/7/settle & curl -i -X POST {orders}/007/settle & curl -i -X POST {orders}/8/settle; wait"
    );
    println!("while a response is sent, its order is locked: 423, as this one does not wait:");
    println!("  curl -N {orders}/7/export & sleep 1; curl -i -X POST {orders}/7/cancel; wait");
    println!("no order: 400");
    println!("  curl -i -X POST {orders}/x/settle");
    let server = axum::serve(listener, router(locks.clone(), work));
    let server = server.with_graceful_shutdown(lockcore::stop_signal());
    // After a signal, requests may end within five seconds. Then they are stopped, and their locks
    // are released. A second signal ends the server at once.
    let served = locks.run_until_stopped(server, Duration::from_secs(5));
    served.await?.transpose()?;
    println!("stopped");
    Ok(())
}

async fn story(locks: Locks) -> Result<(), Failure> {
    let orders = Orders::default();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let shop = Shop(listener.local_addr()?);
    let work = Work {
        orders: orders.clone(),
        step: STEP,
    };
    let service = router(locks, work);
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

    /// The answer as one line of text.
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
