//! Tests of the time between the head of a response and its end: how long the layer keeps the lock,
//! and which events end the lock.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod answers;
#[path = "../common/mod.rs"]
mod common;
mod losses;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use common::*;
use futures_util::FutureExt;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Empty, Full};
use lockcore::backend::{self, Answer, Connection, Departure, Released};
use lockcore::testing::{Store, around};
use lockcore::{ErrorKind, Locks, LostReason};
use lockcore_tower::{BoxError, LockBody, LockLayer};
use tokio::sync::{Notify, mpsc};
use tower::{Layer, ServiceExt, service_fn};

const NAME: &str = "order:42";

fn request() -> Request<Empty<Bytes>> {
    get("/order:42")
}

/// Sends a request. Its handler answers with `response`.
async fn respond<B>(
    locks: &Locks,
    request: Request<Empty<Bytes>>,
    response: Response<B>,
) -> Response<LockBody<B>>
where
    B: Body<Error: Into<BoxError>> + Send + 'static,
{
    respond_under(by_path(locks), request, response).await
}

async fn respond_under<B>(
    layer: LockLayer,
    request: Request<Empty<Bytes>>,
    response: Response<B>,
) -> Response<LockBody<B>>
where
    B: Body<Error: Into<BoxError>> + Send + 'static,
{
    let response = Arc::new(Mutex::new(Some(response)));
    let service = layer.layer(service_fn(move |_| {
        let response = response.lock().unwrap().take().expect("one request");
        async { Ok::<_, Infallible>(response) }
    }));
    in_time(service.oneshot(request)).await.unwrap()
}

/// The handler takes the lock of its own request again, and the body takes the lock again while it
/// is sent.
#[tokio::test]
async fn handler_and_body_re_enter_the_lock_of_their_request() {
    struct Again(Locks);

    impl Body for Again {
        type Data = Bytes;
        type Error = BoxError;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
            let lock = self.0.mutex(NAME);
            let again = lock.try_acquire().now_or_never().expect("no round trip");
            Poll::Ready(again.err().map(|error| Err(error.into())))
        }
    }

    let locks = memory();
    let inside = locks.clone();
    let service = by_path(&locks).layer(service_fn(move |_| {
        let locks = inside.clone();
        async move {
            let guard = locks.mutex(NAME).try_acquire().await.expect("re-entered");
            guard.release().await.expect("released");
            Ok::<_, Infallible>(Response::new(Again(locks)))
        }
    }));

    let response = in_time(service.oneshot(request())).await.unwrap();
    response.into_body().collect().await.expect("re-entered");
    nothing_is_left(&locks, NAME).await;
}

/// A body that sends the parts that the test gives it. It need not know its end in advance.
struct Scripted {
    parts: mpsc::UnboundedReceiver<Result<Frame<Bytes>, &'static str>>,
    size: SizeHint,
    knows_its_end: bool,
    _inside: Option<Inside>,
}

struct Script(mpsc::UnboundedSender<Result<Frame<Bytes>, &'static str>>);

impl Scripted {
    fn new() -> (Script, Self) {
        let (script, parts) = mpsc::unbounded_channel();
        let body = Self {
            parts,
            size: SizeHint::new(),
            knows_its_end: false,
            _inside: None,
        };
        (Script(script), body)
    }

    fn of_size(mut self, bytes: u64) -> Self {
        self.size = SizeHint::with_exact(bytes);
        self
    }

    fn knowing_its_end(mut self) -> Self {
        self.knows_its_end = true;
        self
    }

    fn seen_by(mut self, witness: &Witness) -> Self {
        self._inside = Some(witness.inside());
        self
    }
}

impl Script {
    fn data(&self, data: &'static str) {
        let _ = self.0.send(Ok(Frame::data(data.into())));
    }

    fn trailers(&self) {
        let trailers = HeaderMap::from_iter([(
            "grpc-status".parse().unwrap(),
            HeaderValue::from_static("0"),
        )]);
        let _ = self.0.send(Ok(Frame::trailers(trailers)));
    }

    fn error(&self) {
        let _ = self.0.send(Err("torn"));
    }

    fn end(self) {}
}

impl Body for Scripted {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        self.parts.poll_recv(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.knows_its_end && self.parts.is_closed() && self.parts.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::clone(&self.size)
    }
}

async fn data<B: Body<Error: Into<BoxError>>>(body: &mut LockBody<B>) -> Bytes
where
    LockBody<B>: Unpin,
{
    let frame = in_time(body.frame())
        .await
        .expect("not the end")
        .expect("no error");
    frame.into_data().expect("data")
}

/// Sends a request and reads the first part of its response.
async fn begun(locks: &Locks, script: &Script, response: Response<Scripted>) -> LockBody<Scripted> {
    let mut body = respond(locks, request(), response).await.into_body();
    script.data("one");
    assert_eq!(data(&mut body).await, "one");
    body
}

#[tokio::test]
async fn the_lock_is_kept_until_the_body_ends_and_is_free_when_the_end_is_seen() {
    let locks = memory();
    let (script, body) = Scripted::new();

    let mut body = respond(&locks, request(), Response::new(body))
        .await
        .into_body();
    assert_eq!(tickets(&locks, NAME).await, 1);
    assert!(body.frame().now_or_never().is_none());
    script.data("one");
    assert_eq!(data(&mut body).await, "one");
    assert_eq!(tickets(&locks, NAME).await, 1);

    script.end();
    assert!(in_time(body.frame()).await.is_none());
    assert_eq!(tickets(&locks, NAME).await, 0);
    assert!(body.is_end_stream());
    assert!(
        in_time(body.frame()).await.is_none(),
        "the end stays the end"
    );
}

#[tokio::test]
async fn the_last_frame_of_a_body_that_knows_its_end_comes_when_the_lock_is_free() {
    let locks = memory();

    let mut body = respond(
        &locks,
        request(),
        Response::new(Full::new(Bytes::from("all"))),
    )
    .await
    .into_body();
    assert!(!body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(3));
    // The lock does not wait for a client that reads slowly.
    assert_eq!(tickets(&locks, NAME).await, 0);

    assert_eq!(data(&mut body).await, "all");
    assert!(body.is_end_stream(), "a server does not ask again");
}

#[tokio::test]
async fn a_body_of_unknown_size_may_know_its_last_frame() {
    let locks = memory();
    let (script, body) = Scripted::new();
    script.data("one");
    script.data("two");
    script.end();

    let mut body = respond(&locks, request(), Response::new(body.knowing_its_end()))
        .await
        .into_body();
    // Two parts are made before the head of the response is sent.
    assert_eq!(tickets(&locks, NAME).await, 0);

    assert_eq!(data(&mut body).await, "one");
    assert_eq!(data(&mut body).await, "two");
    assert!(body.is_end_stream());
}

#[tokio::test]
async fn an_empty_body_ends_before_the_head_is_sent() {
    let locks = memory();

    let body = respond(&locks, request(), Response::new(Empty::<Bytes>::new()))
        .await
        .into_body();

    assert_eq!(tickets(&locks, NAME).await, 0);
    assert!(body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(0));
}

#[tokio::test]
async fn the_answer_to_head_ends_before_it_is_sent_and_still_tells_the_size() {
    let locks = memory();
    let witness = Witness::of(&locks, NAME);
    let (_script, body) = Scripted::new();
    let body = body.of_size(1_000).seen_by(&witness);

    let mut head = request();
    *head.method_mut() = Method::HEAD;
    let body = respond(&locks, head, Response::new(body)).await.into_body();

    assert_eq!(tickets(&locks, NAME).await, 0);
    assert_eq!(
        witness.saw_tickets(),
        Some(1),
        "the body goes before the lock"
    );
    assert_eq!(body.size_hint().exact(), Some(1_000));
    assert!(
        !body.is_end_stream(),
        "a server would not look at the size then"
    );
    assert!(in_time(body.collect()).await.unwrap().to_bytes().is_empty());
}

#[tokio::test]
async fn a_status_without_a_body_ends_before_it_is_sent() {
    for status in [
        StatusCode::NO_CONTENT,
        StatusCode::NOT_MODIFIED,
        StatusCode::SWITCHING_PROTOCOLS,
    ] {
        let locks = memory();
        let (_script, body) = Scripted::new();

        let mut response = Response::new(body);
        *response.status_mut() = status;
        let _response = respond(&locks, request(), response).await;

        assert_eq!(tickets(&locks, NAME).await, 0, "{status}");
    }
}

#[tokio::test]
async fn the_frame_that_completes_the_declared_length_comes_when_the_lock_is_free() {
    for by_header in [true, false] {
        let locks = memory();
        let (script, body) = Scripted::new();
        let response = if by_header {
            Response::builder()
                .header("content-length", "4")
                .body(body)
                .unwrap()
        } else {
            Response::new(body.of_size(4))
        };

        let mut body = respond(&locks, request(), response).await.into_body();
        script.data("ab");
        script.data("cd");
        assert_eq!(data(&mut body).await, "ab");

        // The body may still work after its last byte, and must do so under the lock.
        assert!(body.frame().now_or_never().is_none());
        assert_eq!(tickets(&locks, NAME).await, 1);
        script.data("");
        assert!(body.frame().now_or_never().is_none());
        script.end();
        assert_eq!(data(&mut body).await, "cd");
        assert_eq!(tickets(&locks, NAME).await, 0);
        assert!(in_time(body.frame()).await.is_none());
    }
}

#[tokio::test]
async fn parts_that_are_all_ready_before_the_head_come_through_whole() {
    let locks = memory();
    let (script, body) = Scripted::new();
    script.data("abc");
    script.data("de");
    script.end();

    let response = respond(&locks, request(), Response::new(body.of_size(5))).await;
    let mut body = response.into_body();

    assert_eq!(data(&mut body).await, "abc");
    assert_eq!(data(&mut body).await, "de");
    assert_eq!(tickets(&locks, NAME).await, 0);
    assert!(in_time(body.frame()).await.is_none());
}

#[tokio::test]
async fn trailers_after_the_declared_length_are_kept() {
    let locks = memory();
    let (script, body) = Scripted::new();

    let mut body = respond(&locks, request(), Response::new(body.of_size(2)))
        .await
        .into_body();
    script.data("ab");
    script.trailers();

    assert_eq!(data(&mut body).await, "ab");
    assert_eq!(tickets(&locks, NAME).await, 0);
    assert!(!body.is_end_stream());
    assert!(in_time(body.frame()).await.unwrap().unwrap().is_trailers());
    assert!(body.is_end_stream());
}

#[tokio::test]
async fn a_body_that_is_longer_than_declared_comes_through_whole() {
    let locks = memory();
    let (script, body) = Scripted::new();

    let body = respond(&locks, request(), Response::new(body.of_size(2)))
        .await
        .into_body();
    for part in ["ab", "", "cd", "ef"] {
        script.data(part);
    }
    script.end();

    assert_eq!(in_time(body.collect()).await.unwrap().to_bytes(), "abcdef");
    assert_eq!(tickets(&locks, NAME).await, 0);
}

#[tokio::test]
async fn trailers_come_when_the_lock_is_free() {
    let locks = memory();
    let (script, body) = Scripted::new();

    let mut body = begun(&locks, &script, Response::new(body)).await;
    script.trailers();

    // The script has not ended, but no reader polls a body after its trailers.
    let trailers = in_time(body.frame())
        .await
        .unwrap()
        .unwrap()
        .into_trailers()
        .unwrap();
    assert_eq!(trailers["grpc-status"], "0");
    assert_eq!(tickets(&locks, NAME).await, 0);
}

#[tokio::test]
async fn a_body_of_trailers_only_ends_before_the_head_is_sent() {
    let locks = memory();
    let (script, body) = Scripted::new();
    script.trailers();

    let mut body = respond(&locks, request(), Response::new(body.of_size(0)))
        .await
        .into_body();

    assert_eq!(tickets(&locks, NAME).await, 0);
    assert!(!body.is_end_stream());
    assert!(in_time(body.frame()).await.unwrap().unwrap().is_trailers());
    assert!(body.is_end_stream());
}

#[tokio::test]
async fn an_error_of_the_body_comes_through_when_the_lock_is_free() {
    let locks = memory();
    let (script, body) = Scripted::new();

    let mut body = respond(&locks, request(), Response::new(body))
        .await
        .into_body();
    script.error();

    let error = in_time(body.frame()).await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "torn");
    assert_eq!(tickets(&locks, NAME).await, 0);
    assert!(in_time(body.frame()).await.is_none());
}

#[tokio::test]
async fn a_client_that_goes_away_while_streaming_takes_the_body_along_and_then_the_lock() {
    let locks = memory();
    let witness = Witness::of(&locks, NAME);
    let (script, body) = Scripted::new();

    let mut body = begun(&locks, &script, Response::new(body.seen_by(&witness))).await;
    assert!(body.frame().now_or_never().is_none());
    drop(body);

    nothing_is_left(&locks, NAME).await;
    assert_eq!(
        witness.saw_tickets(),
        Some(1),
        "the body goes before the lock"
    );
}

#[tokio::test]
async fn the_body_goes_before_the_lock_at_its_end_too() {
    let locks = memory();
    let witness = Witness::of(&locks, NAME);
    let (script, body) = Scripted::new();

    let body = respond(&locks, request(), Response::new(body.seen_by(&witness)))
        .await
        .into_body();
    script.end();
    in_time(body.collect()).await.unwrap();

    assert_eq!(witness.saw_tickets(), Some(1));
}

#[tokio::test]
async fn a_request_that_waits_is_let_in_by_the_end_of_the_body() {
    let locks = memory();
    let (script, body) = Scripted::new();

    let body = respond(&locks, request(), Response::new(body))
        .await
        .into_body();
    let next = {
        let locks = locks.clone();
        tokio::spawn(async move {
            respond(&locks, request(), Response::new(Empty::<Bytes>::new()))
                .await
                .status()
        })
    };
    until_tickets(&locks, NAME, 2).await;
    script.data("one");
    script.end();
    in_time(body.collect()).await.unwrap();

    assert_eq!(in_time(next).await.unwrap(), StatusCode::OK);
    assert_eq!(tickets(&locks, NAME).await, 0);
}
