//! A gRPC service whose calls for the same order wait for each other, streams included.
//!
//! ```text
//! cargo run --release --example tonic_layer
//! ```
//!
//! A layer sees the head of a call and not its message, so the client says in its metadata which order it is about. The
//! locks are in the memory of this process; with `Locks::from_env()` and `LOCK_URL=redis://…` they hold for all processes
//! of the service.

#[rustfmt::skip]
#[allow(clippy::pedantic, missing_debug_implementations, reason = "generated")]
mod orders;

use std::error::Error;
use std::pin::Pin;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt as _, stream};
use lockcore::{Held, Locks};
use lockcore_tower::{Key, LockLayer};
use orders::orders_client::OrdersClient;
use orders::orders_server::{Orders, OrdersServer};
use orders::{Order, Page, Receipt};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status};

type Failure = Box<dyn Error + Send + Sync>;

/// What a step of the work takes. Long enough that two calls at once meet.
const STEP: Duration = Duration::from_millis(40);
/// The key of the metadata.
const ORDER: &str = "order-id";

struct Shop;

#[tonic::async_trait]
impl Orders for Shop {
    async fn settle(&self, request: Request<Order>) -> Result<Response<Receipt>, Status> {
        let token = token(&request)?;
        tokio::time::sleep(STEP).await;
        let text = format!("order {} settled under token {token}", request.get_ref().id);
        Ok(Response::new(Receipt { text }))
    }

    type ExportStream = Pin<Box<dyn Stream<Item = Result<Page, Status>> + Send>>;

    /// The lock is kept until the last page has been sent.
    async fn export(
        &self,
        request: Request<Order>,
    ) -> Result<Response<Self::ExportStream>, Status> {
        token(&request)?;
        let pages = stream::iter(1..=3).then(|number| async move {
            tokio::time::sleep(STEP).await;
            Ok(Page { number })
        });
        Ok(Response::new(Box::pin(pages)))
    }
}

/// Pass it on with every write.
fn token(request: &Request<Order>) -> Result<lockcore::FencingToken, Status> {
    let held = request.extensions().get::<Held>();
    let held = held.ok_or_else(|| Status::internal("there is no LockLayer around this service"))?;
    Ok(held.token())
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let locks = Locks::connect("memory:")?;
    Ok(examples::tell([&locks], story(locks.clone())).await)
}

async fn story(locks: Locks) -> Result<(), Failure> {
    let by_order = LockLayer::new(locks, Key::metadata(ORDER).prefix("order:"));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}", listener.local_addr()?);
    let server = Server::builder()
        .layer(by_order)
        .add_service(OrdersServer::new(Shop))
        .serve_with_incoming(TcpListenerStream::new(listener));
    tokio::spawn(server);
    let client = Client {
        stub: OrdersClient::connect(address).await?,
        began: Instant::now(),
    };

    println!("settle order 7 twice and order 8 once, at the same time:");
    let (one, two, other) = tokio::join!(client.settle(7), client.settle(7), client.settle(8));
    let (one, two, other) = (one?, two?, other?);
    expect("of order 7 one after the other", one.abs_diff(two) >= STEP)?;
    expect("order 8 beside them", other < one.max(two))?;

    println!("\nexport order 7, page by page, and settle it meanwhile:");
    let mut pages = client.export(7).await?;
    let (last_page, settled) = tokio::join!(client.read(&mut pages), client.settle(7));
    expect(
        "settled behind the last page",
        settled? > last_page? + STEP / 2,
    )?;

    println!("\nsettle order 7 while it is exported, but within 100 ms:");
    let mut pages = client.export(7).await?;
    let mut hurried = request(7);
    hurried.set_timeout(Duration::from_millis(100));
    let (last_page, refused) = tokio::join!(client.read(&mut pages), async {
        let refused = client.stub.clone().settle(hurried).await.map(drop);
        client.says(refusal(&refused));
        refused
    });
    last_page?;
    expect(
        "the client's deadline ended its wait",
        refused.is_err_and(is_deadline),
    )?;

    println!("\nforget to say which order:");
    let nameless = client.stub.clone().settle(Order { id: 7 }).await.map(drop);
    client.says(refusal(&nameless));
    expect(
        "no call without a lock",
        nameless.is_err_and(|status| status.code() == Code::InvalidArgument),
    )?;

    println!("\neach came when nobody was in its way");
    Ok(())
}

fn refusal(answer: &Result<(), Status>) -> String {
    match answer {
        Ok(()) => "settled".to_owned(),
        Err(status) => format!("{:?}: {}", status.code(), status.message()),
    }
}

/// By the layer, which leaves the line in time to say so; or by the client itself.
fn is_deadline(status: Status) -> bool {
    matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled)
}

fn expect(what: &str, so: bool) -> Result<(), Failure> {
    match so {
        true => Ok(()),
        false => Err(format!("expected: {what}").into()),
    }
}

fn request(id: u64) -> Request<Order> {
    let mut request = Request::new(Order { id });
    request.metadata_mut().insert(ORDER, id.into());
    request
}

struct Client {
    stub: OrdersClient<Channel>,
    began: Instant,
}

impl Client {
    fn says(&self, what: impl std::fmt::Display) {
        println!("{:>6} ms  {what}", self.began.elapsed().as_millis());
    }

    /// Returns when it was done.
    async fn settle(&self, id: u64) -> Result<Duration, Status> {
        let receipt = self.stub.clone().settle(request(id)).await?;
        self.says(receipt.into_inner().text);
        Ok(self.began.elapsed())
    }

    async fn export(&self, id: u64) -> Result<tonic::Streaming<Page>, Status> {
        Ok(self.stub.clone().export(request(id)).await?.into_inner())
    }

    /// Returns when the last page was there.
    async fn read(&self, pages: &mut tonic::Streaming<Page>) -> Result<Duration, Status> {
        while let Some(page) = pages.message().await? {
            self.says(format_args!("page {}", page.number));
        }
        Ok(self.began.elapsed())
    }
}
