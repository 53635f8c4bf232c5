//! Tests with a layer that reads the body of a request before it asks for the lock.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request as AxumRequest};
use axum::middleware::{Next, from_fn};
use axum::routing::post;
use bytes::Bytes;
use common::*;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Frame;
use http_body_util::channel::{Channel, Sender};
use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use lockcore::Locks;
use lockcore_tower::read::BodyFirst;
use lockcore_tower::{BoxError, Key, LockLayer, RequestBody};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tower::{Layer, ServiceExt, service_fn};

const NAME: &str = "order:42";
const PATH: &str = "/order:42";
const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];
const LIMIT: usize = 8_000_000;

type Body = UnsyncBoxBody<Bytes, Infallible>;

fn body_first(locks: &Locks) -> LockLayer<BodyFirst> {
    let layer = LockLayer::new(locks.clone(), Key::template(NAME)).wait(SOON * 2);
    layer.read_body_first(LIMIT, SOON * 2)
}

/// A server that sends bodies back. It notifies for each request before the layer asks for the
/// lock.
async fn serve(layer: LockLayer<BodyFirst>) -> (SocketAddr, Arc<Notify>) {
    let arrived = Arc::new(Notify::new());
    let tell = from_fn({
        let arrived = Arc::clone(&arrived);
        move |request: AxumRequest, next: Next| {
            arrived.notify_one();
            next.run(request)
        }
    });
    let echo = post(async |body: Bytes| body).layer(DefaultBodyLimit::disable());
    let app = Router::new().route(PATH, echo.route_layer(layer).layer(tell));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, app).await });
    (address, arrived)
}

/// Sends one request on its own connection. The connection closes when the task is aborted.
fn send(
    version: Version,
    address: SocketAddr,
    body: Body,
) -> JoinHandle<hyper::Result<Response<Incoming>>> {
    tokio::spawn(async move {
        let io = TokioIo::new(TcpStream::connect(address).await.unwrap());
        let request = Request::post(format!("http://{address}{PATH}"));
        let request = request.body(body).unwrap();
        if version == Version::HTTP_2 {
            let (mut client, connection) = http2::handshake(TokioExecutor::new(), io).await?;
            let answer = client.send_request(request);
            tokio::select! {
                answer = answer => answer,
                end = connection => panic!("{end:?}"),
            }
        } else {
            let (mut client, connection) = http1::handshake(io).await?;
            let answer = client.send_request(request);
            let mut connection = Box::pin(connection);
            tokio::select! {
                answer = answer => {
                    tokio::spawn(connection);
                    answer
                }
                end = &mut connection => panic!("{end:?}"),
            }
        }
    })
}

fn by_hand() -> (Sender<Bytes, Infallible>, Body) {
    let (send, body) = Channel::new(4);
    (send, body.boxed_unsync())
}

#[tokio::test]
async fn a_body_that_comes_slowly_holds_no_lock() {
    for version in BOTH {
        let locks = memory();
        let (address, arrived) = serve(body_first(&locks)).await;
        let (mut sender, body) = by_hand();

        let response = send(version, address, body);
        sender.send_data("slow".into()).await.unwrap();
        in_time(arrived.notified()).await;
        let other = hold(&locks, NAME).await;
        sender.send_data("ly".into()).await.unwrap();
        drop(sender);
        until_tickets(&locks, NAME, 2).await;
        other.release().await.unwrap();

        let response = in_time(response).await.unwrap().unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{version:?}");
        let body = in_time(response.into_body().collect()).await.unwrap();
        assert_eq!(body.to_bytes(), "slowly", "{version:?}");
        assert_eq!(tickets(&locks, NAME).await, 0);
    }
}

#[tokio::test]
async fn a_client_that_goes_away_while_it_sends_its_body_leaves_nothing_behind() {
    for version in BOTH {
        let locks = memory();
        let (address, arrived) = serve(body_first(&locks)).await;
        let (mut sender, body) = by_hand();

        let request = send(version, address, body);
        sender.send_data("slow".into()).await.unwrap();
        in_time(arrived.notified()).await;
        request.abort();

        nothing_is_left(&locks, NAME).await;
    }
}

// ---- without a server

type Parts = UnsyncBoxBody<Bytes, io::Error>;

fn parts(parts: impl stream::Stream<Item = io::Result<Frame<Bytes>>> + Send + 'static) -> Parts {
    StreamBody::new(parts).boxed_unsync()
}

fn data(data: &'static [u8]) -> io::Result<Frame<Bytes>> {
    Ok(Frame::data(Bytes::from_static(data)))
}

/// Sends a request. Its handler reads the body, and answers with its size, trailers and data.
async fn ask(layer: LockLayer<BodyFirst>, request: Request<Parts>) -> Response<Bytes> {
    let service = layer.layer(service_fn(async |request: Request<RequestBody<Parts>>| {
        let size = http_body::Body::size_hint(request.body()).exact();
        let body = request.into_body().collect().await.unwrap();
        let trailers = body.trailers().is_some();
        let text = format!("{size:?} {trailers} {:?}", body.to_bytes());
        Ok::<_, Infallible>(Response::new(text))
    }));
    let (head, body) = in_time(service.oneshot(request))
        .await
        .unwrap()
        .into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Response::from_parts(head, body)
}

fn of(body: Parts) -> Request<Parts> {
    Request::post(PATH).body(body).unwrap()
}

#[tokio::test]
async fn the_handler_gets_the_body_as_it_was_sent() {
    let locks = memory();
    let end = HeaderMap::from_iter([("x-end".parse().unwrap(), HeaderValue::from_static("1"))]);
    let whole = stream::iter([data(b"ab"), data(b""), data(b"c"), Ok(Frame::trailers(end))]);

    let full = ask(body_first(&locks), of(parts(whole))).await;
    let empty = ask(body_first(&locks), of(parts(stream::empty()))).await;

    assert_eq!(full.body(), r#"Some(3) true b"abc""#);
    assert_eq!(empty.body(), r#"Some(0) false b"""#);
}

#[tokio::test]
async fn a_body_that_cannot_be_read_is_refused_without_a_lock() {
    let locks = memory();
    let _other = hold(&locks, NAME).await;
    let layer = || {
        let layer = LockLayer::new(locks.clone(), Key::template(NAME)).try_only();
        layer.read_body_first(3, Duration::from_millis(50))
    };
    let too_large = || parts(stream::iter([data(b"ab"), data(b"cd")]));
    let declared = Full::new(Bytes::from("abcd")).map_err(|never| match never {});
    let too_slow = || parts(stream::iter([data(b"ab")]).chain(stream::pending()));
    let broken = parts(stream::iter([data(b"ab"), Err(io::Error::other("torn"))]));
    let fits = parts(stream::iter([data(b"abc")]));

    for (body, status) in [
        (too_large(), StatusCode::PAYLOAD_TOO_LARGE),
        (declared.boxed_unsync(), StatusCode::PAYLOAD_TOO_LARGE),
        (too_slow(), StatusCode::REQUEST_TIMEOUT),
        (broken, StatusCode::BAD_REQUEST),
        // This is the first body that is read, so the layer asks for its lock.
        (fits, StatusCode::CONFLICT),
    ] {
        let response = ask(layer(), of(body)).await;
        assert_eq!(response.status(), status);
        let problem: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
        assert_eq!(problem["status"], status.as_u16());
        let is_of_the_body = problem["type"].as_str().unwrap().ends_with("#request-body");
        assert_eq!(is_of_the_body, status != StatusCode::CONFLICT);
    }

    let grpc = async |body, timeout| {
        let mut request = of(body);
        for (name, value) in [
            ("content-type", "application/grpc"),
            ("grpc-timeout", timeout),
        ] {
            let value = HeaderValue::from_static(value);
            request.headers_mut().insert(name, value);
        }
        ask(layer(), request).await.headers()["grpc-status"].clone()
    };
    assert_eq!(grpc(too_large(), "10S").await, "8");
    assert_eq!(grpc(too_slow(), "10S").await, "4");
    // The client's own deadline ends before the time of the layer.
    let patient = body_first(&locks);
    let mut request = of(too_slow());
    for (name, value) in [
        ("content-type", "application/grpc"),
        ("grpc-timeout", "20m"),
    ] {
        let value = HeaderValue::from_static(value);
        request.headers_mut().insert(name, value);
    }
    assert_eq!(ask(patient, request).await.headers()["grpc-status"], "4");
}

/// Clients whose bodies are refused must not use up the names of other clients.
#[tokio::test]
async fn a_request_that_is_refused_for_its_body_uses_up_no_name() {
    let key = Key::header("id");
    let layer = LockLayer::new(memory(), key).max_names(1, Duration::from_secs(3600));
    let layer = layer.read_body_first(3, Duration::from_millis(50));
    let named = |id: &'static str, body| {
        let mut request = of(body);
        let id = HeaderValue::from_static(id);
        request.headers_mut().insert("id", id);
        request
    };
    let too_large = parts(stream::iter([data(b"ab"), data(b"cd")]));
    let too_slow = parts(stream::pending());
    let broken = parts(stream::iter([Err(io::Error::other("torn"))]));

    for (id, body, status) in [
        ("large", too_large, StatusCode::PAYLOAD_TOO_LARGE),
        ("slow", too_slow, StatusCode::REQUEST_TIMEOUT),
        ("broken", broken, StatusCode::BAD_REQUEST),
        ("good", parts(stream::empty()), StatusCode::OK),
    ] {
        let response = ask(layer.clone(), named(id, body)).await;
        assert_eq!(response.status(), status, "{id}");
    }
    // If there is no room for the name, the body is not read. The read would take too long.
    let refused = ask(layer, named("other", parts(stream::pending()))).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
}

/// Many requests may ask for one hot key, and their bodies must take no memory.
#[tokio::test]
async fn a_request_that_finds_the_line_of_its_key_full_is_refused_before_its_body_is_read() {
    let locks = memory();
    let layer = body_first(&locks).max_waiting(1);
    let other = hold(&locks, NAME).await;
    let waiting = tokio::spawn(ask(layer.clone(), of(parts(stream::empty()))));
    until_tickets(&locks, NAME, 2).await;
    let unread = stream::once(async { panic!("somebody reads this body") });

    let refused = ask(layer.clone(), of(parts(unread))).await;

    assert_eq!(refused.status(), StatusCode::CONFLICT);
    assert!(refused.headers().contains_key("retry-after"));
    let problem: serde_json::Value = serde_json::from_slice(refused.body()).unwrap();
    assert!(problem["type"].as_str().unwrap().ends_with("#lock-held"));
    assert_eq!(problem["key"], NAME);
    other.release().await.unwrap();
    assert_eq!(in_time(waiting).await.unwrap().status(), StatusCode::OK);
    // The refused request does not count as waiting. A free key is locked even if no request may
    // wait.
    for layer in [layer.clone(), layer.max_waiting(0)] {
        let response = ask(layer, of(parts(stream::empty()))).await;
        assert_eq!(response.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_body_of_a_request_that_passes_without_a_lock_is_not_read() {
    let layer = LockLayer::new(memory(), Key::header("id").optional()).pass_options();
    let layer = layer.read_body_first(1, Duration::ZERO);
    let service = layer.layer(service_fn(async |request: Request<RequestBody<Parts>>| {
        let mut body = request.into_body();
        let first = body.frame().await.unwrap().unwrap();
        Ok::<_, BoxError>(Response::new(Full::new(first.into_data().unwrap())))
    }));
    let mut options = of(parts(
        stream::iter([data(b"first")]).chain(stream::pending()),
    ));
    *options.method_mut() = Method::OPTIONS;
    options
        .headers_mut()
        .insert("id", HeaderValue::from_static("7"));
    let without = of(parts(
        stream::iter([data(b"first")]).chain(stream::pending()),
    ));

    for request in [options, without] {
        let response = in_time(service.clone().oneshot(request)).await.unwrap();
        let body = response.into_body().collect().await.unwrap();
        assert_eq!(body.to_bytes(), "first");
    }
}
