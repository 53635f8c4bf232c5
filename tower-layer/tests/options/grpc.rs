//! Tests of the answers that gRPC clients get, and of the deadlines of their calls.

use super::*;

fn assert_grpc(headers: &HeaderMap, code: &str, says: &str) {
    assert_eq!(headers["content-type"], "application/grpc+proto");
    assert_eq!(headers["grpc-status"], code);
    let message = headers["grpc-message"].to_str().unwrap();
    assert!(message.contains(says), "{message}");
}

/// Other clients would take the status 200 of a gRPC refusal for success.
#[tokio::test]
async fn only_grpc_clients_get_a_grpc_status() {
    let locks = memory();
    let _other = hold(&locks, NAME).await;
    let layer = one_lock(&locks).try_only();
    let answer = async |method: Method, content: &'static str| {
        let mut request = by_method(method);
        let headers = request.headers_mut();
        headers.insert("content-type", HeaderValue::from_static(content));
        ask(&layer, tokens(), request).await
    };

    for content in [
        "application/grpc",
        "application/grpc+json",
        "application/grpc; a=b",
        "Application/GRPC",
        "application/grpc-web",
        "application/grpc-web+proto",
        "application/grpc-web-text+proto",
    ] {
        let refused = answer(Method::POST, content).await;
        assert_eq!(refused.status(), StatusCode::OK, "{content}");
        assert_eq!(refused.headers()["grpc-status"], "10", "{content}");
        assert_eq!(refused.headers()["content-type"], content);
        for method in [Method::GET, Method::PUT] {
            let refused = answer(method, content).await;
            assert_eq!(refused.status(), StatusCode::CONFLICT, "{content}");
        }
    }
    for content in [
        "application/grpcx",
        "application/grpc-webx",
        "application/grpc-other+proto",
        "application/grpc/proto",
        "application/json",
    ] {
        let refused = answer(Method::POST, content).await;
        assert_eq!(refused.status(), StatusCode::CONFLICT, "{content}");
    }
}

/// Deadlines of calls use tokio's clock, which only moves when no task can run.
#[tokio::test(start_paused = true)]
async fn a_call_keeps_the_lock_no_longer_than_its_deadline() {
    let locks = memory();
    locks.ready(SOON).await.unwrap();
    let layer = one_lock(&locks).ttl(SOON * 10);
    let timeout = || grpc(&[("grpc-timeout", "1S")]);

    // A call whose deadline has passed is not begun.
    let calls = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counts = service_fn({
        let calls = Arc::clone(&calls);
        move |_: In| {
            calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            async { Ok::<_, Infallible>(Response::new(String::new())) }
        }
    });
    let late = ask(&layer, counts, grpc(&[("grpc-timeout", "0n")])).await;
    assert_grpc(late.headers(), "4", "The request was not handled");
    assert_eq!(calls.load(std::sync::atomic::Ordering::SeqCst), 0);

    let (_, service) = endless();
    let stopped = ask(&layer, service, timeout()).await;
    assert_grpc(stopped.headers(), "4", "Deadline passed");
    nothing_is_left(&locks, NAME).await;

    // The deadline ends a stream that no task polls.
    let streams = layer.layer(service_fn(async |_: In| {
        let response = Response::builder().header("content-type", "application/grpc");
        let parts = futures_util::stream::pending::<Result<http_body::Frame<Bytes>, Infallible>>();
        let body = http_body_util::StreamBody::new(parts);
        Ok::<_, Infallible>(response.body(body).unwrap())
    }));
    let response = in_time(streams.clone().oneshot(timeout())).await.unwrap();
    assert_eq!(tickets(&locks, NAME).await, 1);
    nothing_is_left(&locks, NAME).await;
    let mut body = std::pin::pin!(response.into_body());
    let end = in_time(body.frame()).await.unwrap().unwrap();
    assert_eq!(end.trailers_ref().unwrap()["grpc-status"], "4");
    assert!(http_body::Body::is_end_stream(&*body));

    // The deadline also ends a stream while a task waits for its next part.
    let response = in_time(streams.oneshot(timeout())).await.unwrap();
    let waits = tokio::spawn(response.into_body().collect());
    let trailers = in_time(waits).await.unwrap().unwrap();
    assert_eq!(trailers.trailers().unwrap()["grpc-status"], "4");
    nothing_is_left(&locks, NAME).await;
}

#[tokio::test]
async fn a_call_that_asked_for_a_signal_is_not_stopped_by_its_deadline() {
    const DEADLINE: Duration = Duration::from_millis(10);
    let layer = one_lock(&memory()).on_lost(OnLost::Signal);
    let service = service_fn(async |_: In| {
        // The layer has read the deadline before this sleep began. So the deadline has passed when
        // the sleep ends.
        tokio::time::sleep(2 * DEADLINE).await;
        Ok::<_, Infallible>(Response::new("to the end".to_owned()))
    });

    let mut call = grpc(&[]);
    let deadline = format!("{}m", DEADLINE.as_millis()).parse().unwrap();
    call.headers_mut().insert("grpc-timeout", deadline);
    let response = ask(&layer, service, call).await;

    assert_eq!(response.body(), "to the end");
}

#[tokio::test]
async fn grpc_clients_get_a_grpc_status() {
    let store = Store::new();
    let locks = store.client().unwrap();
    let other = hold(&locks, NAME).await;
    let one = one_lock(&locks);
    let of_nobody = LockLayer::new(locks.clone(), Key::metadata("id"));
    let no_ttl = one.clone().ttl(Duration::ZERO);

    let busy = ask(&one.clone().try_only(), tokens(), grpc(&[])).await;
    let bad_key = ask(&of_nobody, tokens(), grpc(&[])).await;
    let misconfigured = ask(&no_ttl, tokens(), grpc(&[])).await;
    other.release().await.unwrap();
    let (entered, service) = endless();
    let lost = tokio::spawn(one.layer(service).oneshot(grpc(&[])));
    in_time(entered.notified()).await;
    store.freeze();
    store.clock().advance(Duration::from_secs(10));
    let lost = in_time(lost).await.unwrap().unwrap();
    let down = ask(&one.wait(Duration::from_millis(20)), tokens(), grpc(&[])).await;

    assert_grpc(busy.headers(), "10", "(key: order:42)");
    assert_grpc(bad_key.headers(), "3", "metadata \"id\"");
    assert_grpc(misconfigured.headers(), "13", "Lock misconfigured");
    assert_grpc(lost.headers(), "2", "Lock lost");
    assert_grpc(down.headers(), "14", "Lock not available");
    for trailers_only in [busy, bad_key, misconfigured, down] {
        assert_eq!(trailers_only.status(), StatusCode::OK);
        assert_eq!(trailers_only.body(), "");
    }
    assert!(http_body::Body::is_end_stream(lost.body()));
}
