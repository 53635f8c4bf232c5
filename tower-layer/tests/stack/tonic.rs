//! Stacks in tonic, called by a client of tonic.

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use lockcore::{Held, Locks};
use lockcore_tower::{Key, LockLayer};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::server::NamedService;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status};
use tower::limit::ConcurrencyLimitLayer;
use tower::{Service, ServiceBuilder, service_fn};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::request_id::{MakeRequestUuid, PropagateRequestIdLayer, SetRequestIdLayer};
use tower_http::trace::TraceLayer;

use super::common::{SOON, hold, in_time, memory, nothing_is_left, tickets};
use super::text::Text;
use super::{Duration, MOST, NAME, SHORT, cors, timeout};

/// Methods that answer, never answer, and panic.
#[derive(Clone)]
struct Orders;

impl NamedService for Orders {
    const NAME: &'static str = "shop.Orders";
}

impl Service<http::Request<Body>> for Orders {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = request.uri().path().to_owned();
        let answer = service_fn(move |request: Request<String>| {
            let method = method.clone();
            async move {
                match method.as_str() {
                    "/shop.Orders/Hang" => pending().await,
                    "/shop.Orders/Panic" => panic!("on purpose"),
                    _ => {}
                }
                let held = request.extensions().get::<Held>().unwrap();
                Ok::<_, Status>(Response::new(held.name().to_owned()))
            }
        });
        let mut grpc = tonic::server::Grpc::new(Text);
        Box::pin(async move { Ok(grpc.unary(answer, request).await) })
    }
}

fn by_order(locks: &Locks) -> LockLayer {
    LockLayer::new(locks.clone(), Key::metadata("order-id").prefix("order:")).try_only()
}

type Serving = BoxFuture<'static, Result<(), tonic::transport::Error>>;

fn outside(locks: &Locks, after: Duration, incoming: TcpListenerStream) -> Serving {
    let layers = ServiceBuilder::new()
        .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
        .layer(TraceLayer::new_for_grpc())
        .layer(PropagateRequestIdLayer::x_request_id())
        .layer(RequestBodyLimitLayer::new(MOST))
        .layer(CatchPanicLayer::new())
        .layer(cors())
        .layer(timeout(after))
        .layer(CompressionLayer::new())
        .layer(by_order(locks));
    let server = Server::builder().layer(layers.into_inner());
    Box::pin({ server }.add_service(Orders).serve_with_incoming(incoming))
}

fn inside(locks: &Locks, after: Duration, incoming: TcpListenerStream) -> Serving {
    let layers = ServiceBuilder::new()
        .layer(by_order(locks))
        .layer(SetRequestIdLayer::x_request_id(MakeRequestUuid))
        .layer(TraceLayer::new_for_grpc())
        .layer(PropagateRequestIdLayer::x_request_id())
        .layer(RequestBodyLimitLayer::new(MOST))
        .layer(CatchPanicLayer::new())
        .layer(cors())
        .layer(timeout(after))
        .layer(CompressionLayer::new());
    let server = Server::builder().layer(layers.into_inner());
    Box::pin({ server }.add_service(Orders).serve_with_incoming(incoming))
}

/// With the limits of tower. Their errors become a gRPC status in tonic.
fn limited(locks: &Locks, after: Duration, incoming: TcpListenerStream) -> Serving {
    let layers = ServiceBuilder::new()
        .layer(CatchPanicLayer::new())
        .layer(timeout(after))
        .load_shed()
        .layer(ConcurrencyLimitLayer::new(1))
        .buffer(4)
        .layer(by_order(locks))
        .load_shed()
        .layer(ConcurrencyLimitLayer::new(1))
        .buffer(4);
    let server = Server::builder().layer(layers.into_inner());
    Box::pin({ server }.add_service(Orders).serve_with_incoming(incoming))
}

type Stack = fn(&Locks, Duration, TcpListenerStream) -> Serving;

const STACKS: [(&str, Stack); 3] = [
    ("outside", outside),
    ("inside", inside),
    ("limited", limited),
];

struct Client(Channel);

impl Client {
    /// A client of a server with this stack.
    async fn of(stack: Stack, locks: &Locks, after: Duration) -> Self {
        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)));
        let listener = listener.await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(stack(locks, after, TcpListenerStream::new(listener)));
        let endpoint = Channel::from_shared(format!("http://{address}")).unwrap();
        Self(endpoint.connect().await.unwrap())
    }

    async fn call(&self, method: &'static str) -> Result<String, Status> {
        let mut client = Grpc::new(self.0.clone());
        in_time(client.ready()).await.unwrap();
        let mut request = Request::new(String::new());
        request
            .metadata_mut()
            .insert("order-id", "42".parse().unwrap());
        let path = format!("/shop.Orders/{method}").parse().unwrap();
        let response = in_time(client.unary(request, path, Text)).await?;
        Ok(response.into_inner())
    }
}

#[tokio::test]
async fn a_call_runs_under_its_lock_through_all_layers() {
    for (stack, serve) in STACKS {
        let locks = memory();
        let client = Client::of(serve, &locks, SOON).await;

        for _ in 0..3 {
            assert_eq!(client.call("Settle").await.unwrap(), NAME, "{stack}");
            assert_eq!(tickets(&locks, NAME).await, 0, "{stack}");
        }
    }
}

#[tokio::test]
async fn a_call_whose_lock_is_held_is_aborted_through_all_layers() {
    for (stack, serve) in STACKS {
        let locks = memory();
        let client = Client::of(serve, &locks, SOON).await;
        let _other = hold(&locks, NAME).await;

        let refused = client.call("Settle").await.unwrap_err();

        assert_eq!(refused.code(), Code::Aborted, "{stack}: {refused}");
    }
}

#[tokio::test]
async fn a_call_that_takes_too_long_or_panics_fails_and_lets_its_lock_go() {
    for (stack, serve) in STACKS {
        for (method, after) in [("Hang", SHORT), ("Panic", SOON)] {
            let locks = memory();
            let client = Client::of(serve, &locks, after).await;

            let failed = client.call(method).await.unwrap_err();

            assert_ne!(failed.code(), Code::Aborted, "{stack} {method}: {failed}");
            nothing_is_left(&locks, NAME).await;
        }
    }
}
