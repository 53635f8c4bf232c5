//! The shop: two ways to buy, and the lock that both take. Read this file first. The rest of the
//! example simulates the customers and checks the result.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Extension, Path, Request, State};
use axum::http::StatusCode;
use axum::middleware::map_request;
use axum::response::{IntoResponse, Response};
use axum::routing::{Router, post};
use lockcore::distributed_lock;
use lockcore_tower::{HeldLock, Key, LockLayer};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::print;
use crate::stock::{Buyer, Stock, Through};

/// The item for sale. Both ways to buy lock `stock:concert`, so they exclude each other.
pub const ITEM: &str = "concert";
/// How long the layer lets a request wait before it answers 409. The annotation of the function has
/// the same time.
const WAIT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct Shop {
    pub stock: Stock,
    /// The number of this process, for the printed lines.
    pub process: u32,
}

/// Why a purchase failed.
#[derive(Debug, thiserror::Error)]
pub enum BuyError {
    /// An annotated function returns errors of the lock as its own errors. So its error type needs
    /// this `From`.
    #[error(transparent)]
    Lock(#[from] lockcore::Error),
    #[error("the stock: {0}")]
    Stock(#[from] io::Error),
}

/// One way to buy: a function with the annotation. `None` means sold out.
///
/// The lock is taken before the body. It is released when the body returns, fails, panics or is
/// dropped. If the lock is lost, the body is stopped at its next `.await`.
#[distributed_lock(key = "stock:{item}", wait = "30s", held = held)]
pub async fn buy(
    shop: &Shop,
    item: &str,
    client: u32,
    asked: Instant,
) -> Result<Option<u32>, BuyError> {
    let waited = asked.elapsed();
    let buyer = shop.buyer(client, Through::Function);
    let ticket = shop.stock.sell(buyer, waited, Some(&held)).await?;
    if let Some(ticket) = ticket {
        print::sale(buyer, ticket, held.fencing_token()?, waited);
    }
    Ok(ticket)
}

/// The other way to buy: a route with a layer. Its handler runs while the lock is held, and the
/// lock is kept until the response has been sent.
pub fn locked_service(shop: Arc<Shop>) -> Result<Router, lockcore::Error> {
    let locks = lockcore::default_locks()?; // the client that `main` passed to `lockcore::set_default`
    let one_at_a_time = LockLayer::new(locks, Key::path("item").prefix("stock:")).wait(WAIT);
    Ok(Router::new()
        .route("/buy/{item}/{client}", post(sell_locked))
        .route_layer(one_at_a_time)
        .layer(map_request(note_arrival))
        .with_state(shop))
}

async fn sell_locked(
    State(shop): State<Arc<Shop>>,
    Path((item, client)): Path<(String, u32)>,
    Extension(Arrived(arrived)): Extension<Arrived>,
    held: HeldLock,
) -> Result<Response, BuyError> {
    let waited = arrived.elapsed();
    let buyer = shop.buyer(client, Through::Layer);
    if item != ITEM {
        return Ok(StatusCode::NOT_FOUND.into_response());
    }
    let ticket = shop.stock.sell(buyer, waited, Some(&held.0)).await?;
    if let Some(ticket) = ticket {
        print::sale(buyer, ticket, held.fencing_token()?, waited);
    }
    Ok(answer(ticket))
}

/// The two ways to buy without a lock, to show what the lock prevents.
pub async fn buy_unlocked(shop: &Shop, client: u32) -> Result<Option<u32>, BuyError> {
    let buyer = shop.buyer(client, Through::Function);
    Ok(shop.stock.sell(buyer, Duration::ZERO, None).await?)
}

pub fn unlocked_service(shop: Arc<Shop>) -> Router {
    Router::new()
        .route("/buy/{item}/{client}", post(sell_unlocked))
        .with_state(shop)
}

async fn sell_unlocked(
    State(shop): State<Arc<Shop>>,
    Path((_, client)): Path<(String, u32)>,
) -> Result<Response, BuyError> {
    let buyer = shop.buyer(client, Through::Layer);
    Ok(answer(shop.stock.sell(buyer, Duration::ZERO, None).await?))
}

impl Shop {
    fn buyer(&self, client: u32, through: Through) -> Buyer {
        Buyer {
            process: self.process,
            client,
            through,
        }
    }
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    pub address: SocketAddr,
    task: JoinHandle<io::Result<()>>,
}

impl Server {
    /// Serves on a free port of this machine until `closing`, and then completes the requests that
    /// have begun.
    pub async fn start(service: Router, closing: CancellationToken) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let server =
            axum::serve(listener, service).with_graceful_shutdown(closing.cancelled_owned());
        Ok(Self {
            address,
            task: tokio::spawn(server.into_future()),
        })
    }

    pub async fn ended(self) -> io::Result<()> {
        self.task.await?
    }
}

/// The time when a request arrived, before it waited for the lock.
#[derive(Clone, Copy)]
struct Arrived(Instant);

async fn note_arrival(mut request: Request) -> Request {
    request.extensions_mut().insert(Arrived(Instant::now()));
    request
}

fn answer(ticket: Option<u32>) -> Response {
    match ticket {
        Some(ticket) => ticket.to_string().into_response(),
        None => StatusCode::GONE.into_response(),
    }
}

impl IntoResponse for BuyError {
    fn into_response(self) -> Response {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}
