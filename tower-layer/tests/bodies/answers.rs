//! Tests that the end of a body waits for the store's answer to the release.

use super::*;

/// The releases at a store that answers them only when the test allows it.
#[derive(Clone, Debug, Default)]
struct Releases {
    asked: Arc<Notify>,
    acknowledge: Arc<Notify>,
}

impl Releases {
    /// A client of such a store.
    fn held_back() -> (Locks, Self) {
        let releases = Self::default();
        let of_the_store = releases.clone();
        let store = around(backend::open("memory:").unwrap(), move |connection| {
            Slow(connection, of_the_store.clone())
        });
        (Locks::with_backend(store).unwrap(), releases)
    }
}

#[derive(Debug)]
struct Slow(Arc<dyn Connection>, Releases);

impl Connection for Slow {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.0)
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        let Releases { asked, acknowledge } = self.1.clone();
        let releasing = self.0.release(tickets);
        Box::pin(async move {
            asked.notify_one();
            acknowledge.notified().await;
            releasing.await
        })
    }
}

#[tokio::test]
async fn the_end_waits_for_the_stores_answer_to_the_release() {
    let (locks, releases) = Releases::held_back();
    let (script, body) = Scripted::new();

    let mut body = respond(&locks, request(), Response::new(body))
        .await
        .into_body();
    script.end();
    assert!(body.frame().now_or_never().is_none());
    in_time(releases.asked.notified()).await;
    assert!(body.frame().now_or_never().is_none());
    assert!(!body.is_end_stream());

    releases.acknowledge.notify_one();
    assert!(in_time(body.frame()).await.is_none());
}

#[tokio::test]
async fn the_head_of_an_empty_response_waits_for_the_stores_answer_to_the_release() {
    let (locks, releases) = Releases::held_back();

    let response = tokio::spawn(async move {
        respond(&locks, request(), Response::new(Empty::<Bytes>::new())).await
    });
    in_time(releases.asked.notified()).await;
    assert!(!response.is_finished());

    releases.acknowledge.notify_one();
    assert!(in_time(response).await.unwrap().body().is_end_stream());
}

#[tokio::test]
async fn a_store_that_does_not_answer_the_release_does_not_spoil_the_response() {
    let (locks, releases) = Releases::held_back();

    let response = respond(
        &locks,
        request(),
        Response::new(Full::new(Bytes::from("all"))),
    )
    .await;

    // The body ends after one operation timeout, which is a second.
    assert_eq!(whole(response).await, "all");
    releases.acknowledge.notify_one();
}

/// Layers for timeouts and for CORS answer with such a body.
#[tokio::test]
async fn a_default_body_has_ended_without_a_lock() {
    let mut body = LockBody::<Scripted>::default();

    assert!(body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(0));
    assert!(in_time(body.frame()).await.is_none());
}
