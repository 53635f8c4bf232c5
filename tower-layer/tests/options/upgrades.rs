//! Tests with requests that ask for an upgraded connection.

use super::*;

fn upgrades() -> [In; 7] {
    [
        // Servers and frameworks accept less than the standard requires.
        with(&[("connection", "keep-alive"), ("upgrade", "websocket")]),
        with(&[("connection", "upgrade-insecure"), ("upgrade", "websocket")]),
        with(&[("connection", "Upgrade"), ("upgrade", "websocket")]),
        with(&[
            ("connection", "keep-alive"),
            ("connection", "a, UPGRADE ,b"),
            ("upgrade", "h2c"),
            ("upgrade", "WebSocket"),
        ]),
        with(&[("connection", "upgrade"), ("upgrade", "h2c, websocket")]),
        with(&[("connection", "upgrade"), ("upgrade", "x/1 ,websocket/13")]),
        by_method(Method::CONNECT),
    ]
}

#[tokio::test]
async fn a_request_for_an_upgrade_is_refused() {
    let layer = one_lock(&memory());

    for request in upgrades() {
        let response = ask(&layer, tokens(), request).await;

        assert_eq!(response.status(), StatusCode::NOT_IMPLEMENTED);
        assert!(response.headers().get("retry-after").is_none());
        let problem: serde_json::Value = serde_json::from_str(response.body()).unwrap();
        assert!(problem["type"].as_str().unwrap().ends_with("#lock-upgrade"));
        assert_eq!(problem["key"], NAME);
    }
}

#[tokio::test]
async fn a_request_for_an_upgrade_is_locked_until_its_answer_where_that_was_chosen() {
    let locks = memory();
    let layer = one_lock(&locks).upgrades(Upgrades::HandshakeOnly);

    for request in upgrades() {
        let response = ask(&layer, tokens(), request).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_ne!(response.body(), "-");
        nothing_is_left(&locks, NAME).await;
    }
}

/// A handler may switch protocols although the layer saw no request for it.
#[tokio::test]
async fn a_handler_that_upgrades_unasked_does_not_get_through() {
    let locks = memory();
    let switches = service_fn(async |_: In| {
        let mut response = http::Response::new(Full::new(Bytes::new()));
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        Ok::<_, std::convert::Infallible>(response)
    });

    let refused = ask(&one_lock(&locks), switches, post()).await;

    assert_eq!(refused.status(), StatusCode::NOT_IMPLEMENTED);
    nothing_is_left(&locks, NAME).await;
}

#[tokio::test]
async fn a_request_that_is_not_for_an_upgrade_is_locked() {
    let requests = [
        // `curl --http2` and nginx send these headers.
        with(&[
            ("connection", "Upgrade, HTTP2-Settings"),
            ("upgrade", "h2c"),
        ]),
        with(&[("connection", "upgrade")]),
        // As HTTP requires, a server that does not know the protocol ignores the header.
        with(&[("connection", "upgrade"), ("upgrade", "x/1")]),
        with(&[
            ("connection", "upgrade"),
            ("upgrade", "websockets, TLS/1.0"),
        ]),
    ];
    for upgrades in [Upgrades::Refuse, Upgrades::HandshakeOnly] {
        let layer = one_lock(&memory()).upgrades(upgrades);
        for request in &requests {
            let response = ask(&layer, tokens(), request.clone()).await;
            assert_eq!(response.status(), StatusCode::OK);
            assert_ne!(response.body(), "-");
        }
    }
    let free = LockLayer::new(memory(), Key::header("none").optional());
    for request in self::upgrades() {
        assert_eq!(ask(&free, tokens(), request).await.body(), "-");
    }
}
