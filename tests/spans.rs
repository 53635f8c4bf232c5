//! Tests of the span around the time in which work holds a lock: a trace shows what ran under it.
//!
//! This program has only one test, for the reason that `labels.rs` gives.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Path;
use axum::http::Request;
use axum::routing::post;
use futures_util::{FutureExt, stream};
use lockcore::testing::Store as Kit;
use lockcore::{Error, ErrorKind, Locks, distributed_lock};
use lockcore_tower::{Key, LockLayer};
use tower::ServiceExt;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

const MAX_HOLD: Duration = Duration::from_secs(5);

type Fields = BTreeMap<String, String>;

/// A span: its name, its fields, and the span around it.
#[derive(Clone, Debug, Default)]
struct Span {
    name: &'static str,
    fields: Fields,
    around: Option<usize>,
    closed: bool,
}

#[derive(Default)]
struct Collected {
    spans: Vec<Span>,
    /// The message of each event of this test, with the span in which it was sent.
    events: Vec<(String, Option<usize>)>,
}

thread_local! {
    static ENTERED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Collected>>);

struct Read<'a>(&'a mut Fields);

impl Visit for Read<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}

fn here() -> Option<usize> {
    ENTERED.with_borrow(|entered| entered.last().copied())
}

fn index(id: &Id) -> usize {
    id.into_u64() as usize - 1
}

impl Subscriber for Collector {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("lockcore") || metadata.target() == "spans"
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut span = Span {
            name: attributes.metadata().name(),
            around: match attributes.parent() {
                Some(around) => Some(index(around)),
                None => here(),
            },
            ..Span::default()
        };
        attributes.record(&mut Read(&mut span.fields));
        let spans = &mut self.0.lock().unwrap().spans;
        spans.push(span);
        Id::from_u64(spans.len() as u64)
    }

    fn record(&self, id: &Id, values: &Record<'_>) {
        let fields = &mut self.0.lock().unwrap().spans[index(id)].fields;
        values.record(&mut Read(fields));
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::new();
        event.record(&mut Read(&mut fields));
        if event.metadata().target() == "spans" {
            let message = fields.remove("message").unwrap();
            self.0.lock().unwrap().events.push((message, here()));
        }
    }

    fn enter(&self, id: &Id) {
        ENTERED.with_borrow_mut(|entered| entered.push(index(id)));
    }

    fn exit(&self, _: &Id) {
        ENTERED.with_borrow_mut(Vec::pop);
    }

    fn try_close(&self, id: Id) -> bool {
        self.0.lock().unwrap().spans[index(&id)].closed = true;
        true
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}
}

impl Collector {
    /// The spans around the event with this message, the innermost first.
    fn around(&self, message: &str) -> Vec<Span> {
        let collected = self.0.lock().unwrap();
        let event = collected.events.iter().find(|(text, _)| text == message);
        let (_, span) = event.unwrap_or_else(|| panic!("no event {message}"));
        let spans = std::iter::successors(*span, |span| collected.spans[*span].around);
        spans.map(|span| collected.spans[span].clone()).collect()
    }

    /// The fields of the spans of this name, in order.
    fn named(&self, name: &str) -> Vec<Fields> {
        let spans = &self.0.lock().unwrap().spans;
        let named = spans.iter().filter(|span| span.name == name);
        named.map(|span| span.fields.clone()).collect()
    }

    /// How many bodies behind the layer have lost their locks, and have ended.
    fn lost_bodies(&self) -> usize {
        let spans = &self.0.lock().unwrap().spans;
        let is = |span: &&Span, field: &str, value: &str| {
            span.fields.get(field).is_some_and(|it| it == value)
        };
        let of_bodies = spans
            .iter()
            .filter(|span| is(span, "lock.name", "secret:{path.user}"));
        let lost = of_bodies.filter(|span| is(span, "error.type", "lost") && span.closed);
        lost.count()
    }

    /// The one span around the event, which is over.
    fn held(&self, message: &str) -> Fields {
        let around = self.around(message);
        let [span] = &around[..] else {
            panic!("{message}: {around:?}");
        };
        assert!(span.name == "held" && span.closed, "{span:?}");
        span.fields.clone()
    }
}

/// Says where the work is. The work continues in another poll.
async fn at(message: &'static str) {
    tokio::task::yield_now().await;
    tracing::info!(target: "spans", "{message}");
}

#[distributed_lock(key = "secret:{user}", locks = locks)]
async fn annotated(locks: &Locks, user: &str) -> Result<(), Error> {
    at("annotated").await;
    Ok(())
}

/// A body of unknown length, which ends after this work.
fn body(work: impl Future<Output = ()> + Send + 'static) -> Body {
    Body::from_stream(stream::once(work.map(|()| Ok::<_, Infallible>("done"))))
}

#[tokio::test]
async fn work_under_a_lock_runs_in_a_span_with_its_label_and_its_token() {
    let collector = Collector::default();
    let _collects = tracing::subscriber::set_default(collector.clone());
    let kit = Kit::new();
    let locks = kit.client().unwrap();

    annotated(&locks, "ann").await.unwrap();
    let mut token = String::new();
    let lock = locks.mutex("secret:ann").label("run");
    let ran: Result<(), Error> = lock
        .run(async |held| {
            token = held.grant_id().to_string();
            at("run").await;
            Ok(())
        })
        .await;
    ran.unwrap();
    let guard = lock.acquire().await.unwrap();
    guard.while_held(at("while held")).await.unwrap();
    at("beside a guard").await;
    tokio::spawn(guard.scope(at("in another task")))
        .await
        .unwrap()
        .unwrap();
    guard.release().await.unwrap();
    let both = Locks::all([
        locks.mutex("secret:1").label("one"),
        locks.mutex("secret:2"),
    ]);
    let ran: Result<(), Error> = both
        .run(async |_| {
            at("both").await;
            Ok(())
        })
        .await;
    ran.unwrap();
    kit.clock().stop();
    let lost: Result<(), Error> = lock
        .clone()
        .max_hold(MAX_HOLD)
        .run(async |_| {
            at("lost").await;
            kit.clock().advance(MAX_HOLD);
            std::future::pending().await
        })
        .await;
    assert!(matches!(lost.unwrap_err().kind(), ErrorKind::Lost(_)));
    let key = Key::path("user").prefix("secret:");
    let layer = LockLayer::new(locks.clone(), key).label("layer");
    let handler = post(async || at("layer").await).layer(layer);
    let request = Request::post("/ann").body(Body::empty()).unwrap();
    let answer = Router::new().route("/{user}", handler).oneshot(request);
    assert!(answer.await.unwrap().status().is_success());
    // A body that is streamed, one that loses its lock, and one that loses it while nobody reads it.
    let clock = kit.clock().clone();
    let streamed = post(async move |Path(user): Path<String>| match &*user {
        "ann" => body(at("streamed")),
        _ => body(async move {
            at("streamed and lost").await;
            clock.advance(MAX_HOLD);
            std::future::pending().await
        }),
    });
    let key = Key::path("user").prefix("secret:");
    let layer = LockLayer::new(locks.clone(), key).max_hold(MAX_HOLD);
    let streams = Router::new().route("/{user}", streamed.layer(layer));
    let ask = async |path| {
        let request = Request::post(path).body(Body::empty()).unwrap();
        let response = streams.clone().oneshot(request).await.unwrap();
        response.into_body()
    };
    to_bytes(ask("/ann").await, usize::MAX).await.unwrap();
    assert!(to_bytes(ask("/bob").await, usize::MAX).await.is_err());
    let unread = ask("/eve").await;
    kit.clock().advance(MAX_HOLD);
    let lost = || collector.lost_bodies() == 2;
    while !lost() {
        tokio::task::yield_now().await;
    }
    drop(unread);
    let text = locks.mutex("secret:ann").acquire().await.unwrap();
    let text = text.detach().await.unwrap();
    let adopted = locks.adopt(&text).await.unwrap();
    assert!(locks.adopt(&text).await.is_err());
    let named = Locks::connect("memory:").unwrap();
    let ran: Result<(), Error> = named
        .mutex("a")
        .run(async |_| {
            at("named").await;
            Ok(())
        })
        .await;
    ran.unwrap();

    let name = |label: &str| Some(label.to_owned());
    assert_eq!(
        collector.held("annotated").remove("lock.name"),
        name("secret:{user}")
    );
    let run = collector.held("run");
    assert_eq!(run.get("lock.name"), name("run").as_ref());
    assert_eq!(run.get("lock.token"), Some(&token));
    assert_eq!(run.get("error.type"), None);
    for message in ["while held", "in another task"] {
        assert_eq!(collector.held(message).remove("lock.name"), name("run"));
    }
    assert!(collector.around("beside a guard").is_empty());
    let both = collector.around("both");
    let names: Vec<_> = both
        .iter()
        .map(|span| span.fields.get("lock.name"))
        .collect();
    assert_eq!(names, [None, name("one").as_ref()], "{both:?}");
    assert_eq!(collector.held("lost").remove("error.type"), name("lost"));
    assert_eq!(collector.held("layer").remove("lock.name"), name("layer"));
    let label = "secret:{path.user}";
    let streamed = collector.held("streamed");
    assert_eq!(streamed.get("lock.name"), name(label).as_ref());
    assert!(streamed.contains_key("lock.token") && !streamed.contains_key("error.type"));
    assert_eq!(
        collector.held("streamed and lost").remove("error.type"),
        name("lost")
    );
    let system = collector.held("named").remove("db.system.name");
    assert_eq!(system, name("memory"));
    let adopts = collector.named("adopt");
    let token = Some(adopted.grant_id().to_string());
    assert_eq!(adopts[0].get("lock.token"), token.as_ref());
    assert_eq!(adopts[1].get("error.type"), name("lost").as_ref());
    for span in &collector.0.lock().unwrap().spans {
        let shown = span
            .fields
            .values()
            .any(|value| value.contains("secret:ann"));
        let may = matches!(span.name, "acquire" | "adopt");
        assert!(!shown || may, "{span:?}");
    }
}
