//! Tests of the layer in a tonic server, called by a tonic client.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;
#[path = "common/text.rs"]
mod text;

use std::convert::Infallible;
use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use common::{SOON, in_time, memory, nothing_is_left, tickets};
use futures_util::{Stream, StreamExt, future::BoxFuture, stream};
use http::uri::PathAndQuery;
use lockcore::Locks;
use lockcore::backend::Fault;
use lockcore::testing::{Store, Verb};
use lockcore_tower::{Key, LockLayer, WorkLayer};
use text::Text;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::server::NamedService;
use tonic::service::LayerExt;
use tonic::transport::{Channel, Server};
use tonic::{Code, Request, Response, Status, Streaming};
use tower::{Service, service_fn};

const NAME: &str = "order:42";

/// A service with a method of each kind. In a real program, this code is generated from a `.proto`
/// file.
#[derive(Clone, Default)]
struct Orders {
    entered: Arc<Notify>,
}

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
        let entered = Arc::clone(&self.entered);
        let mut grpc = tonic::server::Grpc::new(Text);
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/shop.Orders/Settle" => grpc.unary(service_fn(settle), request).await,
                "/shop.Orders/Hang" => {
                    let hang = service_fn(move |_: Request<String>| {
                        entered.notify_one();
                        pending::<Result<Response<String>, Status>>()
                    });
                    grpc.unary(hang, request).await
                }
                "/shop.Orders/Watch" => grpc.server_streaming(service_fn(watch), request).await,
                "/shop.Orders/Upload" => grpc.client_streaming(service_fn(upload), request).await,
                "/shop.Orders/Chat" => grpc.streaming(service_fn(chat), request).await,
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

async fn settle(request: Request<String>) -> Result<Response<String>, Status> {
    if let Some(held) = request.extensions().get::<lockcore::multi::MultiHeld>() {
        let names = held.iter().map(|lock| lock.name().to_owned());
        return Ok(Response::new(names.collect::<Vec<_>>().join(" ")));
    }
    let held = request.extensions().get::<lockcore::Held>();
    let name = held.map_or("-", |held| held.name());
    Ok(Response::new(name.to_owned()))
}

type Texts = Pin<Box<dyn Stream<Item = Result<String, Status>> + Send>>;

/// Streams as many texts as the request says. If the request is not a number, the stream sends one
/// text and does not end.
async fn watch(request: Request<String>) -> Result<Response<Texts>, Status> {
    let first = stream::once(async { Ok("1".to_owned()) });
    Ok(Response::new(match request.into_inner().parse::<usize>() {
        Ok(number) => Box::pin(stream::iter(1..=number).map(|n| Ok(n.to_string()))),
        Err(_) => Box::pin(first.chain(stream::pending())),
    }))
}

async fn upload(request: Request<Streaming<String>>) -> Result<Response<String>, Status> {
    let messages = request.into_inner().count().await;
    Ok(Response::new(messages.to_string()))
}

async fn chat(request: Request<Streaming<String>>) -> Result<Response<Texts>, Status> {
    Ok(Response::new(Box::pin(request.into_inner())))
}

fn by_order(locks: &Locks) -> LockLayer {
    LockLayer::new(locks.clone(), Key::metadata("order-id").prefix("order:"))
}

/// A client of a server. The layer is around the whole server.
async fn served_under(layer: LockLayer, orders: Orders) -> Client {
    client_of(|incoming| {
        let server = Server::builder().layer(layer).add_service(orders);
        server.serve_with_incoming(incoming)
    })
    .await
}

async fn client_of<F>(serve: impl FnOnce(TcpListenerStream) -> F) -> Client
where
    F: Future<Output: Send> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(TcpListenerStream::new(listener)));
    let endpoint = Channel::from_shared(format!("http://{address}")).unwrap();
    Client(endpoint.connect().await.unwrap())
}

struct Client(Channel);

impl Client {
    async fn ready(&self) -> Grpc<Channel> {
        let mut client = Grpc::new(self.0.clone());
        in_time(client.ready()).await.unwrap();
        client
    }

    async fn unary(&self, method: &'static str, order: &str) -> Result<String, Status> {
        self.send(method, of_order(order, String::new())).await
    }

    async fn send(&self, method: &'static str, request: Request<String>) -> Result<String, Status> {
        let mut client = self.ready().await;
        let response = client.unary(request, path(method), Text).await;
        Ok(response?.into_inner())
    }

    /// Calls `Watch`. The server sends `messages` messages. If this is not a number, the server
    /// sends one message, and the stream does not end.
    async fn watch(&self, messages: &str) -> Result<Streaming<String>, Status> {
        let request = of_order("42", messages.to_owned());
        let mut client = self.ready().await;
        let response = client.server_streaming(request, path("Watch"), Text);
        Ok(in_time(response).await?.into_inner())
    }
}

fn path(method: &'static str) -> PathAndQuery {
    format!("/shop.Orders/{method}").parse().unwrap()
}

fn of_order<T>(order: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    let order = order.parse().unwrap();
    request.metadata_mut().insert("order-id", order);
    request
}

/// Messages that the test sends one by one.
fn by_hand() -> (mpsc::UnboundedSender<String>, Request<Messages>) {
    let (send, mut receive) = mpsc::unbounded_channel();
    let messages: Messages = Box::pin(stream::poll_fn(move |cx| receive.poll_recv(cx)));
    (send, of_order("42", messages))
}

type Messages = Pin<Box<dyn Stream<Item = String> + Send>>;

#[track_caller]
fn assert_status<T: std::fmt::Debug>(outcome: Result<T, Status>, code: Code, says: &str) {
    let status = outcome.expect_err("refused");
    assert_eq!(status.code(), code, "{status}");
    assert!(status.message().contains(says), "{status}");
}

#[tokio::test]
async fn a_unary_call_runs_under_its_lock_and_lets_it_go() {
    let locks = memory();
    let client = served_under(by_order(&locks).try_only(), Orders::default()).await;

    for round in 0..200 {
        let name = in_time(client.unary("Settle", "42")).await;
        assert_eq!(name.unwrap(), NAME, "{round}");
    }
    assert_eq!(tickets(&locks, NAME).await, 0);
}

#[tokio::test]
async fn a_call_takes_several_locks_and_is_told_which_of_them_was_not_free() {
    let locks = memory();
    let accounts = ["from", "to"].map(|id| Key::metadata_as::<u64>(id).prefix("account:"));
    let layer = LockLayer::all(locks.clone(), accounts).try_only();
    let client = served_under(layer, Orders::default()).await;
    let transfer = || {
        let mut request = Request::new(String::new());
        request.metadata_mut().insert("from", "7".parse().unwrap());
        request.metadata_mut().insert("to", "3".parse().unwrap());
        client.send("Settle", request)
    };

    let names = in_time(transfer()).await.unwrap();
    assert_eq!(names, "account:3 account:7");
    let other = common::hold(&locks, "account:7").await;
    let refused = in_time(transfer()).await;

    assert_status(refused, Code::Aborted, "(key: account:7)");
    nothing_is_left(&locks, "account:3").await;
    other.release().await.unwrap();
    assert_eq!(in_time(transfer()).await.unwrap(), names);
}

#[tokio::test]
async fn a_stream_from_the_server_keeps_the_lock_until_its_end() {
    let locks = memory();
    let client = served_under(by_order(&locks).try_only(), Orders::default()).await;

    for _ in 0..200 {
        let messages: Vec<_> = client.watch("3").await.unwrap().collect().await;
        assert_eq!(messages.len(), 3);
        assert!(messages.iter().all(Result::is_ok));
        assert_eq!(tickets(&locks, NAME).await, 0);
    }

    let mut endless = client.watch("no end").await.unwrap();
    assert_eq!(in_time(endless.message()).await.unwrap().unwrap(), "1");
    assert_eq!(tickets(&locks, NAME).await, 1);
    let busy = in_time(client.unary("Settle", "42")).await;
    assert_status(busy, Code::Aborted, "(key: order:42)");
    // The client drops the stream.
    drop(endless);
    nothing_is_left(&locks, NAME).await;
}

#[tokio::test]
async fn a_stream_from_the_client_and_one_both_ways_keep_the_lock_until_their_end() {
    let locks = memory();
    let client = served_under(by_order(&locks).try_only(), Orders::default()).await;

    let (send, request) = by_hand();
    let mut grpc = client.ready().await;
    let upload =
        tokio::spawn(async move { grpc.client_streaming(request, path("Upload"), Text).await });
    send.send("a".to_owned()).unwrap();
    common::until_tickets(&locks, NAME, 1).await;
    drop(send);
    let response: Response<String> = in_time(upload).await.unwrap().unwrap();
    assert_eq!(response.into_inner(), "1");
    assert_eq!(tickets(&locks, NAME).await, 0);

    let (send, request) = by_hand();
    let mut grpc = client.ready().await;
    let chat = in_time(grpc.streaming(request, path("Chat"), Text)).await;
    let mut chat: Streaming<String> = chat.unwrap().into_inner();
    for message in ["a", "b"] {
        send.send(message.to_owned()).unwrap();
        let echo = in_time(chat.message()).await.unwrap();
        assert_eq!(echo.as_deref(), Some(message));
        assert_eq!(tickets(&locks, NAME).await, 1);
    }
    drop(send);
    assert_eq!(in_time(chat.message()).await.unwrap(), None);
    assert_eq!(tickets(&locks, NAME).await, 0);
}

#[tokio::test]
async fn a_stream_from_the_client_may_be_read_before_its_lock_is_asked_for() {
    let locks = memory();
    let layer = by_order(&locks).read_body_first(1_000, SOON);
    let client = client_of(|incoming| {
        let mut server = Server::builder().layer(layer);
        let server = server.add_service(Orders::default());
        server.serve_with_incoming(incoming)
    })
    .await;

    let (send, request) = by_hand();
    let mut grpc = client.ready().await;
    for message in ["a", "b", "c"] {
        send.send(message.to_owned()).unwrap();
    }
    drop(send);
    let response = in_time(grpc.client_streaming(request, path("Upload"), Text)).await;
    let response: Response<String> = response.unwrap();

    assert_eq!(response.into_inner(), "3");
    assert_eq!(tickets(&locks, NAME).await, 0);
}

#[tokio::test]
async fn a_call_that_is_refused_is_told_why() {
    let store = Store::new();
    let locks = store.client().unwrap();
    let held_for = Duration::from_secs(3600);
    let other = locks.mutex(NAME).ttl(held_for).try_acquire().await.unwrap();
    let layer = by_order(&locks).ttl(held_for).wait(held_for);
    let client = Arc::new(served_under(layer, Orders::default()).await);
    let misconfigured = by_order(&locks).ttl(Duration::ZERO);
    let misconfigured = served_under(misconfigured, Orders::default()).await;

    let mut hurried = of_order("42", String::new());
    // Tonic's timers use real time, so this deadline does not pass in tonic. The test advances the
    // clock of the store until the deadline passes there.
    let deadline = Duration::from_secs(600);
    hurried.set_timeout(deadline);
    let calling = Arc::clone(&client);
    let late = tokio::spawn(async move { calling.send("Settle", hurried).await });
    common::until_tickets(&locks, NAME, 2).await;
    store.clock().advance(deadline);
    let late = in_time(late).await.unwrap();
    let no_key = client.send("Settle", Request::new(String::new())).await;
    let no_ttl = misconfigured.unary("Settle", "7").await;
    other.release().await.unwrap();

    assert_status(late, Code::DeadlineExceeded, "Locked by another");
    assert_status(no_key, Code::InvalidArgument, "order-id");
    assert_status(no_ttl, Code::Internal, "misconfigured");
}

#[tokio::test]
async fn a_call_whose_lock_is_lost_is_stopped_and_told() {
    let store = Store::new();
    let there = store.another_process();
    let locks = there.client().unwrap();
    let orders = Orders::default();
    let client = served_under(by_order(&locks), orders.clone()).await;

    let hangs = tokio::spawn(async move { (client.unary("Hang", "42").await, client) });
    in_time(orders.entered.notified()).await;
    there.freeze();
    store.clock().advance(Duration::from_secs(10));
    let (stopped, client) = in_time(hangs).await.unwrap();

    assert_status(stopped, Code::Unknown, "Lock lost");
    there.thaw();
    nothing_is_left(&locks, NAME).await;
    assert_eq!(client.unary("Settle", "42").await.unwrap(), NAME);
}

#[tokio::test]
async fn a_stream_whose_lock_is_lost_ends_in_a_status_that_says_so() {
    let store = Store::new();
    let locks = store.client().unwrap();
    let client = served_under(by_order(&locks), Orders::default()).await;

    let mut endless = client.watch("no end").await.unwrap();
    assert_eq!(in_time(endless.message()).await.unwrap().unwrap(), "1");
    store.freeze();
    store.clock().advance(Duration::from_secs(10));

    let end = in_time(endless.message()).await;
    assert_status(end, Code::Unknown, "Lock lost");
}

#[tokio::test]
async fn the_layer_may_stand_around_one_service() {
    let locks = memory();
    let layer = LockLayer::new(locks.clone(), Key::grpc_method());
    let client = client_of(|incoming| {
        let orders = layer.named_layer(Orders::default());
        Server::builder()
            .add_service(orders)
            .serve_with_incoming(incoming)
    })
    .await;

    let name = in_time(client.unary("Settle", "42")).await;
    assert_eq!(name.unwrap(), "shop.Orders/Settle");
}

/// A client may take the lock before its call. Only tonic can make tonic's transport errors, so the
/// layer answers a refusal with a response.
#[tokio::test]
async fn calls_of_a_client_under_the_layer_for_any_service_wait_or_are_told_later() {
    let locks = memory();
    let orders = Orders::default();
    let server = LockLayer::new(memory(), Key::metadata("none").optional());
    let client = served_under(server, orders.clone()).await;
    let lock = {
        let locks = locks.clone();
        move |call: &http::Request<Body>| {
            let id = call.headers()["order-id"].to_str().unwrap();
            let lock = locks.mutex(format!("order:{id}"));
            Ok::<_, tonic::transport::Error>(Some(lock.wait(Duration::ZERO)))
        }
    };
    let layer = WorkLayer::with_lock(lock)
        .on_busy(|_, error| Ok(lockcore_tower::status(&error).into_http()))
        .on_error(|error| Ok(lockcore_tower::status(&error).into_http()));
    let channel = tower::Layer::layer(&layer, client.0.clone());
    let call = async |method, order| {
        let mut grpc = Grpc::new(channel.clone());
        in_time(grpc.ready()).await.unwrap();
        let answer = grpc.unary(of_order(order, String::new()), path(method), Text);
        in_time(answer).await.map(Response::<String>::into_inner)
    };

    let mut hangs = Box::pin(call("Hang", "42"));
    tokio::select! {
        answer = &mut hangs => panic!("{answer:?}"),
        () = orders.entered.notified() => {}
    }
    assert_status(call("Settle", "42").await, Code::Aborted, "(key: order:42)");
    assert_eq!(call("Settle", "43").await.unwrap(), "-");
    drop(hangs);
    nothing_is_left(&locks, NAME).await;
    assert_eq!(call("Settle", "42").await.unwrap(), "-");
}

#[tokio::test]
async fn a_handler_that_takes_a_lock_itself_answers_as_the_layer_does() {
    let store = Store::new();
    let locks = store.client().unwrap();
    let _other = common::hold(&locks, NAME).await;

    let settled = common::hold(&locks, "settled").await;
    store.fail_next(Verb::Release, Fault::Refused);
    let unreleased = settled.release().await.unwrap_err();
    let busy = locks.mutex(NAME).try_acquire().await.unwrap_err();
    let misconfigured = locks.mutex("").try_acquire().await.unwrap_err();
    let held = common::hold(&locks, "held").await;
    let ending = locks.shutdown(Duration::ZERO);
    let (lost, _) = futures_util::future::join(held.while_held(pending::<()>()), ending).await;
    let lost = lost.unwrap_err();
    let down = locks.mutex("other").try_acquire().await.unwrap_err();

    let status = |error| Err::<(), _>(lockcore_tower::status(error));
    assert_status(status(&busy), Code::Aborted, "(key: order:42)");
    let hidden = lockcore_tower::status_without_key(&busy);
    assert_eq!(hidden.code(), Code::Aborted);
    assert!(!hidden.message().contains(NAME), "{hidden}");
    assert_status(status(&misconfigured), Code::Internal, "misconfigured");
    // The work of a refused request was not begun. The work of a request that lost its lock may be
    // done in part.
    assert_status(
        status(&down),
        Code::Unavailable,
        "The request was not handled",
    );
    // Some clients and proxies repeat a call with the status UNAVAILABLE by themselves.
    assert_status(status(&lost), Code::Unknown, "Lock lost");
    assert_status(status(&unreleased), Code::Unknown, "Lock uncertain");
}
