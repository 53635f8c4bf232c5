//! Tests of bodies whose lock is lost, or held for too long.

use super::*;

fn is_lost(error: &BoxError) -> bool {
    reason(error) == LostReason::Shutdown
}

fn reason(error: &BoxError) -> LostReason {
    let error = error.downcast_ref::<lockcore::Error>();
    match error.expect("an error of the lock").kind() {
        ErrorKind::Lost(reason) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_body_that_loses_its_lock_while_it_waits_ends_in_an_error() {
    let locks = memory();
    let witness = Witness::of(&locks, NAME);
    let (_script, body) = Scripted::new();

    let mut body = respond(&locks, request(), Response::new(body.seen_by(&witness)))
        .await
        .into_body();
    let reader = tokio::spawn(async move {
        let part = body.frame().await;
        (part, body.frame().await.is_none())
    });
    // This returns when the reader has woken up and has dropped the body, and then the guard.
    lose(&locks).await;

    let (part, ends_there) = in_time(reader).await.unwrap();
    assert!(is_lost(&part.unwrap().unwrap_err()));
    assert!(ends_there);
    assert_eq!(
        witness.saw_tickets(),
        Some(1),
        "the body goes before the lock"
    );
}

#[tokio::test]
async fn a_body_that_is_always_ready_is_not_polled_again_once_the_lock_is_lost() {
    let locks = memory();
    let (script, body) = Scripted::new();

    let mut body = begun(&locks, &script, Response::new(body)).await;
    lose(&locks).await;
    script.data("two");

    assert!(is_lost(&in_time(body.frame()).await.unwrap().unwrap_err()));
}

#[tokio::test]
async fn a_frame_that_was_held_back_does_not_pass_for_the_end_when_the_lock_is_lost() {
    let locks = memory();
    let (script, body) = Scripted::new();

    let mut body = respond(&locks, request(), Response::new(body.of_size(2)))
        .await
        .into_body();
    script.data("ab");
    assert!(body.frame().now_or_never().is_none());
    lose(&locks).await;

    assert!(is_lost(&in_time(body.frame()).await.unwrap().unwrap_err()));
    assert!(in_time(body.frame()).await.is_none());
}

/// A server does not poll a body while its client reads nothing.
#[tokio::test]
async fn a_body_that_nobody_polls_is_dropped_when_its_lock_is_lost() {
    let locks = memory();
    let witness = Witness::of(&locks, NAME);
    let (script, body) = Scripted::new();

    let mut body = begun(&locks, &script, Response::new(body.seen_by(&witness))).await;
    assert!(body.frame().now_or_never().is_none());
    lose(&locks).await;

    assert_eq!(
        witness.saw_tickets(),
        Some(1),
        "the body goes before the lock"
    );
    assert!(is_lost(&in_time(body.frame()).await.unwrap().unwrap_err()));
    assert!(in_time(body.frame()).await.is_none());
}

#[tokio::test]
async fn a_body_that_nobody_polls_ends_with_the_longest_hold_and_then_the_lock_does() {
    let store = Store::new();
    store.clock().stop();
    let locks = store.client().unwrap();
    let witness = Witness::of(&locks, NAME);
    let longest = Duration::from_secs(1);
    let layer = by_path(&locks).max_hold(longest);
    let (script, body) = Scripted::new();

    let response = Response::new(body.seen_by(&witness));
    let mut body = respond_under(layer, request(), response).await.into_body();
    script.data("one");
    assert_eq!(data(&mut body).await, "one");
    assert!(body.frame().now_or_never().is_none());
    assert_eq!(tickets(&locks, NAME).await, 1);

    store.clock().advance(longest);

    until_tickets(&locks, NAME, 0).await;
    assert_eq!(
        witness.saw_tickets(),
        Some(1),
        "the body goes before the lock"
    );
    let error = in_time(body.frame()).await.unwrap().unwrap_err();
    assert_eq!(reason(&error), LostReason::MaxHold);
    assert!(in_time(body.frame()).await.is_none());
}

/// One task ends the body at an arbitrary point while another task reads it.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_whose_longest_hold_ends_while_it_is_read_ends_once() {
    let locks = memory();
    let mut read = 0;
    while read < 100 {
        let witness = Witness::of(&locks, NAME);
        let layer = by_path(&locks)
            .ttl(SOON * 10)
            .max_hold(Duration::from_millis(5));
        let inside = witness.inside();
        let parts = futures_util::stream::unfold(inside, async |inside| {
            tokio::task::yield_now().await;
            Some((
                Ok::<_, Infallible>(Frame::data(Bytes::from("part"))),
                inside,
            ))
        });
        let response = Response::new(http_body_util::StreamBody::new(Box::pin(parts)));
        let response = respond_under(layer, request(), response).await;
        if response.status() == StatusCode::SERVICE_UNAVAILABLE {
            // The longest hold was over before the head of the response was sent.
            nothing_is_left(&locks, NAME).await;
            continue;
        }
        read += 1;
        let mut body = response.into_body();

        let error = in_time(async {
            loop {
                if let Err(error) = body.frame().await.expect("no end that looks like one") {
                    break error;
                }
            }
        })
        .await;

        assert_eq!(reason(&error), LostReason::MaxHold);
        assert!(body.frame().now_or_never().unwrap().is_none());
        drop(body);
        nothing_is_left(&locks, NAME).await;
        assert!(
            witness.saw_tickets() >= Some(1),
            "the body goes before the lock"
        );
    }
}

fn grpc(content_type: &'static str, body: Scripted) -> (Request<Empty<Bytes>>, Response<Scripted>) {
    let content = HeaderValue::from_static("application/grpc");
    let mut request = request();
    *request.method_mut() = Method::POST;
    request.headers_mut().insert("content-type", content);
    let response = Response::builder().header("content-type", content_type);
    (request, response.body(body).unwrap())
}

#[tokio::test]
async fn a_grpc_stream_that_loses_its_lock_ends_in_a_status() {
    let locks = memory();
    let (script, body) = Scripted::new();
    let (request, response) = grpc("application/grpc", body);

    let mut body = respond(&locks, request, response).await.into_body();
    script.data("one");
    assert_eq!(data(&mut body).await, "one");
    lose(&locks).await;

    let end = in_time(body.frame()).await.unwrap().unwrap();
    let trailers = end.into_trailers().expect("trailers");
    assert_eq!(trailers["grpc-status"], "2");
    assert!(
        trailers["grpc-message"]
            .to_str()
            .unwrap()
            .contains("Lock lost")
    );
    assert!(body.is_end_stream());
    assert!(in_time(body.frame()).await.is_none());
}

#[tokio::test]
async fn a_stream_that_has_no_trailers_to_say_so_ends_in_an_error_although_grpc_was_asked_for() {
    for content_type in ["application/grpc-web+proto", "text/plain"] {
        let locks = memory();
        let (script, body) = Scripted::new();
        let (request, response) = grpc(content_type, body);

        let mut body = respond(&locks, request, response).await.into_body();
        script.data("one");
        assert_eq!(data(&mut body).await, "one");
        lose(&locks).await;

        assert!(is_lost(&in_time(body.frame()).await.unwrap().unwrap_err()));
    }
}
