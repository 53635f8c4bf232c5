//! The shop: two ways to buy, and the lock that both take. This is the file to read first; the rest of the example is
//! the crowd around it.

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
use lockcore_tower::{Held, Key, LockLayer};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::print;
use crate::stock::{Buyer, Stock, Through};

/// What is for sale. Both ways to buy lock `stock:concert`, and so exclude each other.
pub const ITEM: &str = "concert";
/// How long the layer lets a request stand in line before it answers 409. The function says the same where it is
/// annotated.
const WAIT: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct Shop {
    pub stock: Stock,
    /// Which of the processes this is, for the printed lines.
    pub process: u32,
}

/// Why nothing could be bought.
#[derive(Debug, thiserror::Error)]
pub enum BuyError {
    /// An annotated function returns the lock's errors as its own: it needs this `From`.
    #[error(transparent)]
    Lock(#[from] lockcore::Error),
    #[error("the stock: {0}")]
    Stock(#[from] io::Error),
}

/// One way to buy: a function that is locked by its annotation. `None` means sold out.
///
/// The lock is taken before the body and released after it, whichever way the body is left; if the lock is lost, the
/// body is stopped at its next `.await`.
#[distributed_lock(key = "stock:{item}", wait = "30s", held = held)]
pub async fn buy(
    shop: &Shop,
    item: &str,
    client: u32,
    asked: Instant,
) -> Result<Option<u32>, BuyError> {
    let waited = asked.elapsed();
    let buyer = shop.buyer(client, Through::Function);
    let ticket = shop.stock.sell(buyer, waited).await?;
    if let Some(ticket) = ticket {
        print::sale(buyer, ticket, held.fencing_token()?, waited);
    }
    Ok(ticket)
}

/// The other way: a route that is locked by a layer. Its handler runs while the lock is held, and the lock is kept until
/// the response has been sent.
pub fn locked_service(shop: Arc<Shop>) -> Result<Router, lockcore::Error> {
    let locks = lockcore::default_locks()?; // what `main` gave to `lockcore::set_default`
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
    held: Held,
) -> Result<Response, BuyError> {
    let waited = arrived.elapsed();
    let buyer = shop.buyer(client, Through::Layer);
    if item != ITEM {
        return Ok(StatusCode::NOT_FOUND.into_response());
    }
    let ticket = shop.stock.sell(buyer, waited).await?;
    if let Some(ticket) = ticket {
        print::sale(buyer, ticket, held.fencing_token()?, waited);
    }
    Ok(answer(ticket))
}

/// The same two ways without a lock, to see what it is good for.
pub async fn buy_unlocked(shop: &Shop, client: u32) -> Result<Option<u32>, BuyError> {
    let buyer = shop.buyer(client, Through::Function);
    Ok(shop.stock.sell(buyer, Duration::ZERO).await?)
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
    Ok(answer(shop.stock.sell(buyer, Duration::ZERO).await?))
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
    /// Serves on a free port of this machine until `closing`, then finishes what it has begun.
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

/// When a request came in, before it stood in line for the lock.
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
