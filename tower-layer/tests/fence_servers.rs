//! Tests with a writer and the service that it writes to, over real connections: axum by HTTP/1 and
//! HTTP/2, and tonic.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::task::{Context, Poll};

use axum::extract::{Extension, Path};
use axum::routing::post;
use axum::{Router, body::Body};
use bytes::{Buf, BufMut, Bytes};
use common::{in_time, memory, problem};
use futures_util::future::BoxFuture;
use futures_util::stream;
use http::uri::PathAndQuery;
use http::{Request, StatusCode, Version};
use http_body_util::BodyExt;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lockcore::{FencingToken, Guard, Locks};
use lockcore_tower::{FenceLayer, Key, TOKEN_HEADER, TokenLayer, TokenService};
use tokio::net::TcpListener;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::{Channel, Server};
use tonic::{Code, Status};
use tower::{Layer, Service, ServiceExt};

/// The token of a holder that does not know that its lock is gone, and the guard of the later
/// holder.
async fn late_and_later(locks: &Locks) -> (FencingToken, Guard) {
    let late = locks.mutex("account:7").acquire().await.unwrap();
    let token = late.fencing_token().unwrap();
    late.release().await.unwrap();
    (token, locks.mutex("account:7").acquire().await.unwrap())
}

// ---- axum

async fn accounts() -> SocketAddr {
    let book = async |Path(id): Path<u64>, Extension(token): Extension<FencingToken>| {
        format!("account {id} booked under {token}")
    };
    let app = Router::new()
        .route("/accounts/{id}/book", post(book))
        .route_layer(FenceLayer::new(Key::path_as::<u64>("id")));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, app).await });
    address
}

async fn only_the_latest_holder_writes(version: Version) {
    let locks = memory();
    let (late, guard) = late_and_later(&locks).await;
    let token = guard.fencing_token().unwrap();
    let url = format!("http://{}/accounts/7/book", accounts().await);
    let client: Client<_, Body> = Client::builder(TokioExecutor::new())
        .http2_only(version == Version::HTTP_2)
        .build_http();
    let client = TokenLayer::new().layer(client);
    let ask = async |request: http::request::Builder| {
        let request = request.method("POST").uri(&url).body(Body::empty());
        let answer = client.clone().oneshot(request.unwrap());
        let answer = in_time(answer).await.unwrap();
        assert_eq!(answer.version(), version);
        answer
    };

    for _ in 0..2 {
        let answer = ask(Request::builder().extension(guard.held())).await;
        assert_eq!(answer.status(), StatusCode::OK);
        let said = answer.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(said, format!("account 7 booked under {token}"));
    }
    let refused = ask(Request::builder().header(TOKEN_HEADER, late.as_i64())).await;
    assert_eq!(refused.status(), StatusCode::PRECONDITION_FAILED);
    assert_eq!(problem(refused).await["status"], 412);
    let without = ask(Request::builder()).await;
    assert_eq!(problem(without).await["status"], 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn over_http_1_only_the_latest_holder_writes() {
    only_the_latest_holder_writes(Version::HTTP_11).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn over_http_2_only_the_latest_holder_writes() {
    only_the_latest_holder_writes(Version::HTTP_2).await;
}

// ---- tonic, with a service and a codec written by hand instead of generated

#[derive(Clone, Default)]
struct Bytewise;

impl Codec for Bytewise {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Bytewise {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Bytewise {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

/// Answers with the token that it may write with.
#[derive(Clone)]
struct Accounts;

impl tonic::server::NamedService for Accounts {
    const NAME: &'static str = "bank.Accounts";
}

impl Service<Request<tonic::body::Body>> for Accounts {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        let book = tower::service_fn(async |request: tonic::Request<Bytes>| {
            let token = request.extensions().get::<FencingToken>().copied();
            let token = token.ok_or_else(|| Status::internal("no token"))?;
            Ok(tonic::Response::new(Bytes::from(token.to_string())))
        });
        Box::pin(async move {
            Ok(tonic::server::Grpc::new(Bytewise)
                .unary(book, request)
                .await)
        })
    }
}

async fn grpc_accounts() -> Channel {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = stream::unfold(listener, async |listener| {
        let accepted = listener.accept().await.map(|(connection, _)| connection);
        Some((accepted, listener))
    });
    let server = Server::builder()
        .layer(FenceLayer::new(Key::header("account-id")))
        .add_service(Accounts);
    tokio::spawn(server.serve_with_incoming(connections));
    let endpoint = Channel::from_shared(format!("http://{address}")).unwrap();
    endpoint.connect().await.unwrap()
}

async fn book(
    channel: &TokenService<Channel>,
    with: impl FnOnce(&mut tonic::Request<Bytes>),
) -> Result<Bytes, Status> {
    let mut request = tonic::Request::new(Bytes::new());
    request
        .metadata_mut()
        .insert("account-id", "7".parse().unwrap());
    with(&mut request);
    let mut client = tonic::client::Grpc::new(channel.clone());
    client.ready().await.map_err(Status::from_error)?;
    let path = PathAndQuery::from_static("/bank.Accounts/Book");
    let answer = in_time(client.unary(request, path, Bytewise)).await?;
    Ok(answer.into_inner())
}

#[tokio::test(flavor = "multi_thread")]
async fn over_grpc_only_the_latest_holder_writes() {
    let locks = memory();
    let (late, guard) = late_and_later(&locks).await;
    let channel = TokenLayer::new().layer(grpc_accounts().await);

    let booked = book(&channel, |request| {
        request.extensions_mut().insert(guard.held());
    });
    let token = guard.fencing_token().unwrap().to_string();
    assert_eq!(booked.await.unwrap(), token);

    let metadata = |token: String| {
        move |request: &mut tonic::Request<Bytes>| {
            let token = token.parse().unwrap();
            request.metadata_mut().insert("lock-fencing-token", token);
        }
    };
    let refused = book(&channel, metadata(late.to_string()))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(refused.message().contains("lower"), "{refused}");
    let malformed = book(&channel, metadata("five".into())).await.unwrap_err();
    assert_eq!(malformed.code(), Code::InvalidArgument, "{malformed}");
    let missing = book(&channel, |_| {}).await.unwrap_err();
    assert_eq!(missing.code(), Code::InvalidArgument, "{missing}");
}
