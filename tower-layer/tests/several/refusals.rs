//! Tests of the wait for several locks, and of the answers of a layer that refuses.

use super::*;

#[tokio::test]
async fn a_refusal_tells_all_names_and_which_of_them_was_not_free() {
    let locks = memory();
    let _other = hold(&locks, "b").await;
    let layer = by_segments(&locks).wait(Duration::from_millis(20));

    let refused = ask(&layer, get("/c/b/a")).await;

    assert_eq!(refused.status(), StatusCode::CONFLICT);
    assert!(refused.headers().contains_key("retry-after"));
    let problem = problem(refused).await;
    assert_eq!(problem["key"], "b");
    assert_eq!(problem["keys"], serde_json::json!(["a", "b", "c"]));
    for name in ["a", "c"] {
        nothing_is_left(&locks, name).await;
    }
}

#[tokio::test]
async fn a_refusal_tells_no_name_where_keys_are_hidden() {
    let locks = memory();
    let _other = hold(&locks, "b").await;
    let layer = by_segments(&locks).try_only().hide_key();
    let refuses = layer.clone().refuse_with(|refusal| {
        assert_eq!((refusal.key(), refusal.keys().len()), (None, 0));
        Response::new(Bytes::new())
    });
    let tells = by_segments(&locks).try_only().refuse_with(|refusal| {
        let response = Response::builder().status(refusal.status());
        let keys = refusal.keys().join(" ");
        response.body(Bytes::from(keys)).unwrap()
    });

    let hidden = problem(ask(&layer, get("/a/b")).await).await;
    assert!(hidden.get("key").is_none() && hidden.get("keys").is_none());
    let own = ask(&refuses, get("/a/b")).await;
    assert_eq!(own.status(), StatusCode::OK);
    let told = ask(&tells, get("/a/b")).await.into_body().collect().await;
    assert_eq!(told.unwrap().to_bytes(), "a b");
}

#[tokio::test]
async fn an_upgrade_under_several_locks_is_refused_with_their_names() {
    let layer = by_segments(&memory());
    let mut upgrades = get("/a/b");
    let web_socket = HeaderValue::from_static("websocket");
    upgrades.headers_mut().insert("upgrade", web_socket);

    let refused = problem(ask(&layer, upgrades).await).await;
    let switches = service_fn(async |_: In| {
        let response = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS);
        Ok::<_, Infallible>(response.body(Full::<Bytes>::default()).unwrap())
    });
    let replaced = in_time(layer.layer(switches).oneshot(get("/a/b"))).await;
    let replaced = problem(replaced.unwrap()).await;

    for problem in [refused, replaced] {
        assert_eq!(problem["status"], 501);
        assert_eq!(problem["keys"], serde_json::json!(["a", "b"]));
    }
}

/// The first lock uses up a part of the wait. The second gets the rest.
#[tokio::test]
async fn the_wait_is_one_for_all_locks() {
    let store = Store::new();
    store.clock().stop();
    let locks = store.client().unwrap();
    let (first, _second) = (hold(&locks, "a").await, hold(&locks, "b").await);
    let layer = by_segments(&store.client().unwrap()).wait(Duration::from_secs(4));

    let waits = tokio::spawn(layer.layer(names()).oneshot(get("/a/b")));
    until_tickets(&locks, "a", 2).await;
    store.clock().advance(Duration::from_secs(3));
    first.release().await.unwrap();
    until_tickets(&locks, "b", 2).await;
    assert!(!waits.is_finished());
    store.clock().advance(Duration::from_secs(1));

    let refused = in_time(waits).await.unwrap().unwrap();
    assert_eq!(refused.status(), StatusCode::CONFLICT);
    assert_eq!(problem(refused).await["key"], "b");
}

#[tokio::test]
async fn a_request_counts_as_waiting_for_each_of_its_names() {
    let locks = memory();
    let other = hold(&locks, "b").await;
    let layer = by_segments(&locks).wait(SOON * 2).max_waiting(1);

    let waits = tokio::spawn(layer.layer(names()).oneshot(get("/a/b")));
    until_tickets(&locks, "b", 2).await;
    // The refusal comes at once. The wait is longer than `in_time` allows.
    assert_eq!(status(&layer, "/b").await, StatusCode::CONFLICT);
    assert_eq!(status(&layer, "/a/c").await, StatusCode::CONFLICT);
    assert_eq!(status(&layer, "/c").await, StatusCode::OK);

    other.release().await.unwrap();
    let response = in_time(waits).await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    drop(response);
    // No request waits any more.
    assert_eq!(status(&layer, "/a/b").await, StatusCode::OK);
}

#[tokio::test]
async fn each_name_of_a_request_counts_among_those_of_the_layer() {
    const HOUR: Duration = Duration::from_secs(3600);
    let layer = by_segments(&memory()).max_names(2, HOUR);

    assert_eq!(status(&layer, "/a/b").await, StatusCode::OK);
    assert_eq!(status(&layer, "/b/a").await, StatusCode::OK);
    let refused = ask(&layer, get("/a/c")).await;

    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    problem_of(refused, "lock-names").await;
}

/// A request whose body never comes.
fn never_sent(path: &str) -> Request<UnsyncBoxBody<Bytes, Infallible>> {
    let never = futures_util::stream::pending::<Result<Frame<Bytes>, Infallible>>();
    let body = StreamBody::new(never).boxed_unsync();
    Request::post(path).body(body).unwrap()
}

#[tokio::test]
async fn a_name_too_many_or_a_full_line_is_refused_before_the_body_is_read() {
    const HOUR: Duration = Duration::from_secs(3600);
    let locks = memory();
    let _other = hold(&locks, "b").await;
    let layer = by_segments(&locks).max_names(2, HOUR).max_waiting(1);
    let layer = layer.wait(SOON * 2).read_body_first(100, SOON);
    let service = layer.layer(service_fn(async |_: Request<_>| {
        Ok::<_, Infallible>(Whole::default())
    }));
    let empty = get("/a/b").map(|body| body.boxed_unsync());
    let waits = tokio::spawn(service.clone().oneshot(empty));
    until_tickets(&locks, "b", 2).await;

    for (path, expected) in [
        ("/a/b", StatusCode::CONFLICT),
        ("/a/c", StatusCode::SERVICE_UNAVAILABLE),
    ] {
        let refused = in_time(service.clone().oneshot(never_sent(path))).await;
        assert_eq!(refused.unwrap().status(), expected, "{path}");
    }
    waits.abort();
}

#[tokio::test]
async fn two_new_names_are_refused_before_the_body_is_read_where_there_is_room_for_one() {
    const HOUR: Duration = Duration::from_secs(3600);
    let layer = by_segments(&memory()).max_names(2, HOUR);
    let layer = layer.wait(SOON * 2).read_body_first(100, SOON);
    let service = layer.layer(service_fn(async |_: Request<_>| {
        Ok::<_, Infallible>(Whole::default())
    }));
    let first = get("/x").map(|body| body.boxed_unsync());
    assert_eq!(
        service.clone().oneshot(first).await.unwrap().status(),
        StatusCode::OK
    );

    let refused = in_time(service.clone().oneshot(never_sent("/a/b"))).await;

    let refused = refused.unwrap();
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(
        problem(refused).await["keys"],
        serde_json::json!(["a", "b"])
    );
}
