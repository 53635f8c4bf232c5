//! Tests of the layer in a plain server of hyper's, over real connections of HTTP/1 and HTTP/2.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use common::*;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Frame;
use http_body_util::{BodyExt, Empty, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use lockcore::testing::Store;
use lockcore_tower::LockLayer;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tower::{Layer, service_fn};

const NAME: &str = "order:42";
const PATH: &str = "/order:42";

const BOTH: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Starts a server. The layer is in front of the handler.
async fn serve<F>(
    version: Version,
    layer: LockLayer,
    handler: impl Fn(Request<Incoming>) -> F + Clone + Send + 'static,
) -> SocketAddr
where
    F: Future<Output = Response<Body>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = layer.layer(service_fn(move |request| {
        let response = handler(request);
        async { Ok::<_, Infallible>(response.await) }
    }));
    let service = TowerToHyperService::new(service);
    tokio::spawn(async move {
        loop {
            let io = TokioIo::new(listener.accept().await.unwrap().0);
            let service = service.clone();
            if version == Version::HTTP_2 {
                let mut server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                server.enable_connect_protocol();
                tokio::spawn(server.serve_connection(io, service));
            } else {
                let server = hyper::server::conn::http1::Builder::new();
                tokio::spawn(server.serve_connection(io, service));
            }
        }
    });
    address
}

/// One connection. It closes when this value is dropped.
enum Client {
    Http1(http1::SendRequest<Empty<Bytes>>, JoinHandle<()>),
    Http2(http2::SendRequest<Empty<Bytes>>, JoinHandle<()>),
}

impl Client {
    async fn connect(version: Version, address: SocketAddr) -> Self {
        let io = TokioIo::new(TcpStream::connect(address).await.unwrap());
        if version == Version::HTTP_2 {
            let handshake = http2::handshake(TokioExecutor::new(), io).await;
            let (client, connection) = handshake.unwrap();
            Self::Http2(client, tokio::spawn(async { drop(connection.await) }))
        } else {
            let (client, connection) = http1::handshake(io).await.unwrap();
            Self::Http1(client, tokio::spawn(async { drop(connection.await) }))
        }
    }

    async fn send(&mut self, mut request: In) -> hyper::Result<Response<Incoming>> {
        match self {
            Self::Http1(client, _) => {
                in_time(client.ready()).await?;
                in_time(client.send_request(request)).await
            }
            Self::Http2(client, _) => {
                let path = request.uri().path();
                *request.uri_mut() = format!("http://localhost{path}").parse().unwrap();
                in_time(client.ready()).await?;
                in_time(client.send_request(request)).await
            }
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let (Self::Http1(_, connection) | Self::Http2(_, connection)) = self;
        connection.abort();
    }
}

fn text(text: &'static str) -> Response<Body> {
    Response::new(Full::from(text).boxed_unsync())
}

fn streamed(frames: impl stream::Stream<Item = Frame<Bytes>> + Send + 'static) -> Response<Body> {
    Response::new(StreamBody::new(frames.map(Ok)).boxed_unsync())
}

fn data(text: &'static str) -> Frame<Bytes> {
    Frame::data(text.into())
}

/// A response that sends one part, and then nothing for ever.
fn endless() -> Response<Body> {
    streamed(stream::iter([data("part")]).chain(stream::pending()))
}

fn at(path: &str, method: Method) -> In {
    let mut request = get(path);
    *request.method_mut() = method;
    request
}

/// If a client reads to the end of a response and sends its next request at once, it must find the
/// key free. On the wire there are several ways to end a response.
#[tokio::test(flavor = "multi_thread")]
async fn the_key_is_free_for_the_next_request_on_the_same_connection() {
    for version in BOTH {
        let layer = LockLayer::new(memory(), lockcore_tower::Key::template(NAME)).try_only();
        let address = serve(version, layer, async |request: Request<Incoming>| {
            let trailers = HeaderMap::from_iter(
                [("x-end", "1")]
                    .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value))),
            );
            let parts = stream::iter(["a", "b", "c"].map(data));
            match request.uri().path() {
                "/full" => text("abc"),
                "/empty" => Response::new(Empty::new().boxed_unsync()),
                "/trailers" => streamed(parts.chain(stream::iter([Frame::trailers(trailers)]))),
                "/streamed" => streamed(parts),
                _ => {
                    let mut response = streamed(parts);
                    let length = HeaderValue::from_static("3");
                    response.headers_mut().insert("content-length", length);
                    response
                }
            }
        })
        .await;
        let mut client = Client::connect(version, address).await;

        for (path, expected) in [
            ("/full", "abc"),
            ("/empty", ""),
            ("/trailers", "abc"),
            ("/streamed", "abc"),
            ("/declared", "abc"),
        ] {
            for method in [Method::GET, Method::HEAD] {
                let expected = if method == Method::HEAD { "" } else { expected };
                for round in 0..100 {
                    let response = client.send(at(path, method.clone())).await.unwrap();
                    let status = response.status();
                    assert_eq!(
                        status,
                        StatusCode::OK,
                        "{version:?} {method} {path} {round}"
                    );
                    let body = in_time(response.into_body().collect()).await.unwrap();
                    assert_eq!(body.to_bytes(), expected, "{version:?} {method} {path}");
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_many_connections_never_overlap() {
    for version in BOTH {
        let (inside, calls) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let locks = memory();
        let address = serve(version, by_path(&locks), {
            let (inside, calls) = (Arc::clone(&inside), Arc::clone(&calls));
            move |_| {
                let (inside, calls) = (Arc::clone(&inside), Arc::clone(&calls));
                async move {
                    // The request counts as inside the handler until the end of its body.
                    streamed(stream::unfold(0, move |part| {
                        let (inside, calls) = (Arc::clone(&inside), Arc::clone(&calls));
                        async move {
                            if part == 0 {
                                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                                calls.fetch_add(1, Ordering::SeqCst);
                            }
                            tokio::task::yield_now().await;
                            if part == 3 {
                                inside.fetch_sub(1, Ordering::SeqCst);
                                return None;
                            }
                            Some((data("part"), part + 1))
                        }
                    }))
                }
            }
        })
        .await;

        let clients = (0..8).map(|_| {
            tokio::spawn(async move {
                let mut client = Client::connect(version, address).await;
                for _ in 0..10 {
                    let response = client.send(get(PATH)).await.unwrap();
                    assert_eq!(response.status(), StatusCode::OK);
                    let body = in_time(response.into_body().collect()).await;
                    assert_eq!(body.unwrap().to_bytes(), "partpartpart");
                }
            })
        });
        for client in futures_util::future::join_all(clients).await {
            client.unwrap();
        }
        assert_eq!(calls.load(Ordering::SeqCst), 80);
    }
}

/// Over HTTP/2 only the stream ends, and the connection stays.
#[tokio::test]
async fn a_client_that_goes_away_leaves_nothing_behind() {
    for version in BOTH {
        let locks = memory();
        let entered = Arc::new(Notify::new());
        let witness = Witness::of(&locks, NAME);
        let address = serve(version, by_path(&locks), {
            let (entered, witness) = (Arc::clone(&entered), witness.clone());
            move |request: Request<Incoming>| {
                let (entered, witness) = (Arc::clone(&entered), witness.clone());
                async move {
                    if request.method() == Method::GET {
                        return endless();
                    }
                    let _inside = witness.inside();
                    entered.notify_one();
                    pending().await
                }
            }
        })
        .await;

        // The client goes away while its request waits.
        let other = hold(&locks, NAME).await;
        gives_up_when(
            version,
            address,
            at(PATH, Method::POST),
            until_tickets(&locks, NAME, 2),
        )
        .await;
        until_tickets(&locks, NAME, 1).await;
        other.release().await.unwrap();

        // The client goes away while its request is handled.
        gives_up_when(version, address, at(PATH, Method::POST), entered.notified()).await;
        nothing_is_left(&locks, NAME).await;
        assert!(
            witness.saw_tickets() >= Some(1),
            "the handler goes before the lock"
        );

        // The client goes away while it receives the answer.
        let mut client = Client::connect(version, address).await;
        let mut body = client.send(get(PATH)).await.unwrap().into_body();
        assert!(in_time(body.frame()).await.unwrap().is_ok());
        assert_eq!(tickets(&locks, NAME).await, 1);
        drop(body);
        if version == Version::HTTP_11 {
            drop(client);
        }
        nothing_is_left(&locks, NAME).await;
    }
}

/// Drops a request at the moment of `event`. Over HTTP/1 this closes its connection.
async fn gives_up_when(
    version: Version,
    address: SocketAddr,
    request: In,
    event: impl Future<Output = ()>,
) {
    let mut client = Client::connect(version, address).await;
    let answered = tokio::select! {
        answer = client.send(request) => Some(answer),
        () = in_time(event) => None,
    };
    assert!(answered.is_none(), "{answered:?}");
    if version == Version::HTTP_2 {
        // The connection still works.
        let free = client.send(get("/order:43")).await.unwrap();
        assert_eq!(free.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_lock_that_is_lost_before_the_headers_is_answered_with_503() {
    for version in BOTH {
        let store = Store::new();
        let locks = store.client().unwrap();
        let entered = Arc::new(Notify::new());
        let address = serve(version, by_path(&locks), {
            let entered = Arc::clone(&entered);
            move |_| {
                let entered = Arc::clone(&entered);
                async move {
                    entered.notify_one();
                    pending().await
                }
            }
        })
        .await;
        let mut client = Client::connect(version, address).await;

        let request = tokio::spawn(async move { client.send(get(PATH)).await });
        in_time(entered.notified()).await;
        store.freeze();
        store.clock().advance(Duration::from_secs(10));

        let response = in_time(request).await.unwrap().unwrap();
        assert_eq!(
            response.status(),
            StatusCode::SERVICE_UNAVAILABLE,
            "{version:?}"
        );
        problem_of(response, "lock-lost").await;
        store.thaw();
    }
}

#[tokio::test]
async fn a_lock_that_is_lost_while_streaming_breaks_the_response_off() {
    for version in BOTH {
        for declared in [false, true] {
            let store = Store::new();
            let locks = store.client().unwrap();
            let address = serve(version, by_path(&locks), move |_| async move {
                let mut response = endless();
                if declared {
                    let length = HeaderValue::from_static("1000");
                    response.headers_mut().insert("content-length", length);
                }
                response
            })
            .await;
            let mut client = Client::connect(version, address).await;

            let mut body = client.send(get(PATH)).await.unwrap().into_body();
            let first = in_time(body.frame()).await.unwrap().unwrap();
            assert_eq!(first.into_data().unwrap(), "part");
            store.freeze();
            store.clock().advance(Duration::from_secs(10));

            let error = in_time(body.frame())
                .await
                .expect("not the end")
                .unwrap_err();
            // Over HTTP/1 the connection closes in the middle of the body. Over HTTP/2 RST_STREAM
            // comes, and the connection stays open.
            let how = match version {
                Version::HTTP_2 => "Reset",
                _ => "UnexpectedEof",
            };
            assert!(format!("{error:?}").contains(how), "{declared}: {error:?}");
            store.thaw();
        }
    }
}

/// The connection stays, but all buffers are full, so the server does not poll the body.
#[tokio::test]
async fn a_client_that_stops_reading_keeps_the_lock_no_longer_than_it_may() {
    for version in BOTH {
        let store = Store::new();
        store.clock().stop();
        let locks = store.client().unwrap();
        let longest = Duration::from_secs(1);
        let layer = by_path(&locks).max_hold(longest);
        let parts = Arc::new(AtomicUsize::new(0));
        let sent = Arc::clone(&parts);
        let address = serve(version, layer, move |_| {
            let sent = Arc::clone(&sent);
            let part = stream::repeat(Bytes::from_static(&[0; 65_536]));
            let parts = part.map(move |part| {
                sent.fetch_add(1, Ordering::SeqCst);
                Frame::data(part)
            });
            async { streamed(parts) }
        })
        .await;
        let mut client = Client::connect(version, address).await;

        let response = client.send(get(PATH)).await.unwrap();
        // The server runs between these steps, until all buffers are full.
        let mut last = 0;
        while std::mem::replace(&mut last, parts.load(Ordering::SeqCst)) != last || last == 0 {
            for _ in 0..1_000 {
                tokio::task::yield_now().await;
            }
        }
        assert_eq!(tickets(&locks, NAME).await, 1);
        store.clock().advance(longest);

        nothing_is_left(&locks, NAME).await;
        // Frames that were in flight arrive. After them the body must not end as if it were
        // complete.
        let mut body = response.into_body();
        let end = loop {
            match in_time(body.frame()).await {
                Some(Ok(_)) => {}
                end => break end,
            }
        };
        assert!(end.is_some_and(|end| end.is_err()), "{version:?}");
    }
}

#[tokio::test]
async fn a_handler_that_panics_leaves_nothing_behind() {
    for version in BOTH {
        let locks = memory();
        let address = serve(version, by_path(&locks), async |_| panic!("on purpose")).await;
        let mut client = Client::connect(version, address).await;

        assert!(client.send(get(PATH)).await.is_err(), "{version:?}");
        nothing_is_left(&locks, NAME).await;
    }
}

#[tokio::test]
async fn a_request_for_an_upgrade_is_refused_and_the_connection_works_on() {
    for version in BOTH {
        let locks = memory();
        let address = serve(version, by_path(&locks), async |_| text("done")).await;
        let mut client = Client::connect(version, address).await;

        let mut request = get(PATH);
        if version == Version::HTTP_2 {
            *request.method_mut() = Method::CONNECT;
            let web_socket = hyper::ext::Protocol::from_static("websocket");
            request.extensions_mut().insert(web_socket);
        } else {
            let headers = request.headers_mut();
            headers.insert("connection", HeaderValue::from_static("Upgrade"));
            headers.insert("upgrade", HeaderValue::from_static("websocket"));
        }
        // The first answer also tells the client that the server supports extended CONNECT.
        assert_eq!(
            client.send(get(PATH)).await.unwrap().status(),
            StatusCode::OK
        );
        let refused = client.send(request).await.unwrap();
        assert_eq!(refused.status(), StatusCode::NOT_IMPLEMENTED, "{version:?}");
        drop(in_time(refused.into_body().collect()).await);

        assert_eq!(
            client.send(get(PATH)).await.unwrap().status(),
            StatusCode::OK
        );
    }
}
