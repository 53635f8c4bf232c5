//! Tests of the fencing tokens of several locks.

use super::*;

/// The handler writes to accounts of another service, which has a fence in front of each account.
#[tokio::test]
async fn each_write_goes_out_with_the_token_of_its_own_name() {
    let locks = memory();
    let fence = FenceLayer::new(Key::header("account"));
    let written = Arc::new(AtomicUsize::new(0));
    let accounts = fence.layer(service_fn({
        let written = Arc::clone(&written);
        move |_: In| {
            written.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, Infallible>(Whole::default()) }
        }
    }));
    let write = |account: &str| Request::post("/").header("account", account);
    let client = TokenLayer::new().layer(accounts.clone());
    let service = by_segments(&locks).layer(service_fn(move |request: In| {
        let held = request.extensions().get::<MultiHeld>().unwrap().clone();
        let client = client.clone();
        async move {
            let mut tokens = Vec::new();
            for lock in held.iter() {
                let request = write(lock.name()).extension(lock.clone());
                let request = request.body(Empty::new()).unwrap();
                let answer = client.clone().oneshot(request).await.unwrap();
                assert_eq!(answer.status(), StatusCode::OK);
                tokens.push(lock.fencing_token().unwrap().to_string());
            }
            Ok::<_, Infallible>(Response::new(tokens.join(" ")))
        }
    }));
    let tokens = async |path: &str| {
        let response = in_time(service.clone().oneshot(get(path))).await.unwrap();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let tokens = String::from_utf8(body.into()).unwrap();
        tokens.split(' ').map(str::to_owned).collect::<Vec<_>>()
    };

    // The name `busy` has had more holders than `quiet`, so its tokens differ.
    for _ in 0..5 {
        tokens("/busy").await;
    }
    let late = tokens("/busy/quiet").await;
    let now = tokens("/quiet/busy").await;
    assert_ne!(late[0], late[1], "each has a token of its own");
    let before = written.load(Ordering::SeqCst);
    for (account, late, now) in [("busy", &late[0], &now[0]), ("quiet", &late[1], &now[1])] {
        for (token, expected) in [
            (late, StatusCode::PRECONDITION_FAILED),
            (now, StatusCode::OK),
        ] {
            let request = write(account).header(TOKEN_HEADER, token.as_str());
            let request = request.body(Empty::new()).unwrap();
            let answer = in_time(accounts.clone().oneshot(request)).await.unwrap();
            assert_eq!(answer.status(), expected, "{account} under {token}");
        }
    }
    assert_eq!(written.load(Ordering::SeqCst), before + 2);
}

#[tokio::test]
async fn the_response_of_several_locks_has_no_token() {
    let layer = by_segments(&memory()).token_header();

    let response = ask(&layer, get("/a")).await;

    assert_eq!(response.status(), StatusCode::OK);
    assert!(!response.headers().contains_key(TOKEN_HEADER));
}
