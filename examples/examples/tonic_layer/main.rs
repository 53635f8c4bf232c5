//! A gRPC service: calls for the same order wait for each other, including streams.
//!
//! ```text
//! cargo run --release --example tonic_layer                                # locks in the memory of this process
//! LOCK_URL=redis://127.0.0.1/ cargo run --release --example tonic_layer   # for all processes of the service
//! ```
//!
//! A layer sees the metadata of a call and not its message. So the client sends the order id in the
//! metadata.

#[rustfmt::skip]
#[allow(clippy::pedantic, missing_debug_implementations, reason = "generated")]
mod orders;

use std::error::Error;
use std::pin::Pin;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use examples::{Orders as Visitors, expect};
use futures_util::{Stream, stream};
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

/// How long a step of the work takes. It is long enough that two concurrent calls overlap.
const STEP: Duration = Duration::from_millis(100);
/// The metadata key of the order id.
const ORDER: &str = "order-id";

struct Shop(Visitors);

#[tonic::async_trait]
impl Orders for Shop {
    async fn settle(&self, request: Request<Order>) -> Result<Response<Receipt>, Status> {
        let token = token(&request)?;
        let _visit = self.0.visit("settle", request.get_ref().id);
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
        let visit = self.0.visit("export", request.get_ref().id);
        let pages = stream::unfold((visit, 1), |(visit, number)| async move {
            if number > 3 {
                return None;
            }
            tokio::time::sleep(STEP).await;
            Some((Ok(Page { number }), (visit, number + 1)))
        });
        Ok(Response::new(Box::pin(pages)))
    }
}

/// Returns the fencing token; pass it on with every write.
fn token(request: &Request<Order>) -> Result<lockcore::FencingToken, Status> {
    let held = request.extensions().get::<Held>();
    let held = held.ok_or_else(|| Status::internal("there is no LockLayer around this service"))?;
    let token = held.fencing_token();
    token.map_err(|error| Status::internal(error.to_string()))
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let locks = examples::locks_in_memory()?;
    Ok(examples::tell([&locks], story(locks.clone())).await)
}

async fn story(locks: Locks) -> Result<(), Failure> {
    let visitors = Visitors::default();
    let by_order = LockLayer::new(locks, Key::metadata_as::<u64>(ORDER).prefix("order:"));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = format!("http://{}", listener.local_addr()?);
    let server = Server::builder()
        .layer(by_order)
        .add_service(OrdersServer::new(Shop(visitors.clone())))
        .serve_with_incoming(TcpListenerStream::new(listener));
    tokio::spawn(server);
    let client = Client {
        stub: OrdersClient::connect(address).await?,
        began: Instant::now(),
    };

    println!("settle order 7 twice and order 8 once, at the same time:");
    let (one, two, other) = tokio::join!(client.settle(7), client.settle(7), client.settle(8));
    one.and(two).and(other)?;
    expect("of order 7 one after the other", visitors.most(7) == 1)?;
    expect("order 8 beside them", visitors.most_at_all() == 2)?;

    println!("\nexport order 7, page by page, and settle it meanwhile:");
    let mut pages = client.export(7).await?;
    let (exported, settled) = tokio::join!(client.read(&mut pages), client.settle(7));
    exported.and(settled)?;
    expect("settled behind the last page", visitors.most(7) == 1)?;

    println!("\nsettle order 7 while it is exported, but within 200 ms:");
    let mut pages = client.export(7).await?;
    let mut hurried = request(7);
    hurried.set_timeout(Duration::from_millis(200));
    let (exported, refused) = tokio::join!(client.read(&mut pages), client.try_to_settle(hurried));
    exported?;
    expect("the client's deadline ended its wait", is_deadline(refused))?;

    println!("\nforget to say which order:");
    let nameless = client.try_to_settle(Request::new(Order { id: 7 })).await;
    expect("no call without a lock", nameless == Code::InvalidArgument)?;

    println!("\neach came when nobody was in its way");
    Ok(())
}

/// Either the layer ends the wait before the deadline and answers `DeadlineExceeded`, or the client
/// ends the call itself.
fn is_deadline(code: Code) -> bool {
    matches!(code, Code::DeadlineExceeded | Code::Cancelled)
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

    async fn settle(&self, id: u64) -> Result<(), Status> {
        let receipt = self.stub.clone().settle(request(id)).await?;
        self.says(receipt.into_inner().text);
        Ok(())
    }

    async fn try_to_settle(&self, request: Request<Order>) -> Code {
        match self.stub.clone().settle(request).await {
            Ok(_) => Code::Ok,
            Err(status) => {
                self.says(format_args!("{:?}: {}", status.code(), status.message()));
                status.code()
            }
        }
    }

    async fn export(&self, id: u64) -> Result<tonic::Streaming<Page>, Status> {
        Ok(self.stub.clone().export(request(id)).await?.into_inner())
    }

    async fn read(&self, pages: &mut tonic::Streaming<Page>) -> Result<(), Status> {
        while let Some(page) = pages.message().await? {
            self.says(format_args!("page {}", page.number));
        }
        Ok(())
    }
}
