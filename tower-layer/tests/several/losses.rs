//! Tests in which one of several locks is lost, or held for too long.

use super::*;

/// Deletes a ticket at the store, as an operator can do by hand.
#[derive(Debug, Default)]
struct Deleting {
    /// Whether the tickets of "b" are deleted.
    deleted: Arc<AtomicBool>,
}

#[derive(Debug)]
struct DeletingConnection(Arc<dyn Connection>, Arc<AtomicBool>);

impl Connection for DeletingConnection {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.0)
    }

    fn renew(
        &self,
        tickets: Vec<Arc<backend::Request>>,
        patience: Duration,
    ) -> Answer<Vec<Renewed>> {
        let deleted = self.1.load(Ordering::SeqCst);
        let lost = tickets
            .iter()
            .map(|ticket| deleted && ticket.name.as_str() == "b");
        let lost: Vec<_> = lost.collect();
        let renewed = self.0.renew(tickets, patience);
        Box::pin(async move {
            let renewed = renewed.await?.into_iter().zip(lost);
            Ok(renewed
                .map(|(renewed, lost)| if lost { Renewed::Lost } else { renewed })
                .collect())
        })
    }
}

impl Deleting {
    fn client(&self) -> Locks {
        let deleted = Arc::clone(&self.deleted);
        let store = around(backend::open("memory:").unwrap(), move |connection| {
            DeletingConnection(connection, Arc::clone(&deleted))
        });
        Locks::with_backend(store).unwrap()
    }

    /// Deletes the ticket of "b", and requests a renewal of this ticket. Returns when the client
    /// knows that the lock is lost.
    async fn lose_b(&self, held: &MultiHeld) {
        self.deleted.store(true, Ordering::SeqCst);
        let renewed = held.get("b").unwrap().ensure(Duration::from_secs(10));
        let lost = in_time(renewed).await.unwrap_err();
        assert_eq!(lost.kind(), ErrorKind::Lost(LostReason::Taken));
        assert!(held.get("a").unwrap().is_valid(), "the other one is held");
    }
}

#[tokio::test]
async fn a_handler_that_loses_one_of_its_locks_is_stopped_and_the_others_are_free() {
    let store = Deleting::default();
    let locks = store.client();
    let (held, service) = endless();
    let request = tokio::spawn(by_segments(&locks).layer(service).oneshot(get("/a/b")));
    let held = in_time(held).await.unwrap();

    store.lose_b(&held).await;

    let response = in_time(request).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(!response.headers().contains_key("retry-after"));
    let problem = problem_of(response, "lock-lost").await;
    assert_eq!(problem["key"], "b");
    assert_eq!(problem["keys"], serde_json::json!(["a", "b"]));
    nothing_is_left(&locks, "a").await;
}

/// Returns a response whose body sends nothing, and the locks of the request.
async fn streaming(
    layer: LockLayer,
    content_type: &'static str,
) -> (
    MultiHeld,
    Response<LockBody<impl http_body::Body<Data = Bytes, Error = Infallible> + Send>>,
) {
    let held = Arc::new(Mutex::new(None));
    let service = layer.layer(service_fn({
        let held = Arc::clone(&held);
        move |request: In| {
            *held.lock().unwrap() = request.extensions().get::<MultiHeld>().cloned();
            let parts = futures_util::stream::pending::<Result<Frame<Bytes>, Infallible>>();
            let response = Response::builder().header("content-type", content_type);
            let response = response.body(StreamBody::new(parts)).unwrap();
            async { Ok::<_, Infallible>(response) }
        }
    }));
    let mut request = get("/a/b");
    *request.method_mut() = Method::POST;
    let content = HeaderValue::from_static(content_type);
    request.headers_mut().insert("content-type", content);
    let response = in_time(service.oneshot(request)).await.unwrap();
    let held = held.lock().unwrap().take().unwrap();
    (held, response)
}

#[tokio::test]
async fn a_response_that_loses_one_of_its_locks_ends_in_an_error_and_the_others_are_free() {
    for watched in [false, true] {
        let store = Deleting::default();
        let locks = store.client();
        let mut layer = by_segments(&locks);
        if watched {
            layer = layer.max_hold(SOON * 100);
        }
        let (held, response) = streaming(layer, "text/plain").await;
        let reader = tokio::spawn(response.into_body().collect());

        store.lose_b(&held).await;

        let error = in_time(reader).await.unwrap().err().unwrap();
        let error: &lockcore::Error = error.downcast_ref().unwrap();
        assert_eq!(error.kind(), ErrorKind::Lost(LostReason::Taken));
        assert_eq!(error.name(), Some("b"));
        nothing_is_left(&locks, "a").await;
    }
}

#[tokio::test]
async fn a_grpc_stream_that_loses_one_of_its_locks_ends_in_a_status_that_names_it() {
    let store = Deleting::default();
    let locks = store.client();
    let (held, response) = streaming(by_segments(&locks), "application/grpc").await;
    let reader = tokio::spawn(response.into_body().collect());

    store.lose_b(&held).await;

    let collected = in_time(reader).await.unwrap().unwrap();
    let trailers = collected.trailers().unwrap();
    assert_eq!(trailers["grpc-status"], "2");
    let message = trailers["grpc-message"].to_str().unwrap();
    assert!(message.ends_with("(key: b)"), "{message}");
}

#[tokio::test]
async fn the_longest_hold_ends_all_locks_although_nobody_polls_the_body() {
    let store = Store::new();
    store.clock().stop();
    let locks = store.client().unwrap();
    let longest = Duration::from_secs(10);
    // The lease lasts longer than the longest hold.
    let layer = by_segments(&locks).ttl(longest * 10).max_hold(longest);
    let (held, response) = streaming(layer, "text/plain").await;
    assert!(held.is_valid());

    store.clock().advance(longest);

    let (lost, reason) = in_time(held.lost()).await;
    assert_eq!((lost.name(), reason), ("a", LostReason::MaxHold));
    assert!(held.iter().all(|held| !held.is_valid()));
    for name in ["a", "b"] {
        until_tickets(&locks, name, 0).await;
    }
    let error = in_time(response.into_body().collect()).await.err().unwrap();
    assert!(error.is::<lockcore::Error>());
}

/// The first lock is lost while the request waits for the second. The handler is not called, so the
/// client may try again.
#[tokio::test]
async fn a_request_that_loses_a_lock_before_it_has_all_is_told_to_try_again() {
    let store = Store::new();
    let (other, locks) = (store.client().unwrap(), store.client().unwrap());
    let _held = hold(&other, "b").await;
    let waits = tokio::spawn(by_segments(&locks).layer(names()).oneshot(get("/a/b")));
    until_tickets(&other, "b", 2).await;

    lose(&locks).await;

    let response = in_time(waits).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(response.headers().contains_key("retry-after"));
    problem_of(response, "lock-unavailable").await;
}
