//! Tests of the name of the lock, of requests that pass without a lock, and of requests that are
//! refused. The tests of path parameters and matched paths are in `axum`.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::convert::Infallible;
use std::fmt;
use std::net::IpAddr;
use std::num::ParseIntError;
use std::str::FromStr;

use common::{In, get, hold, in_time, memory, problem};
use http::{HeaderName, HeaderValue, Method, Response, StatusCode};
use http_body_util::BodyExt;
use lockcore_tower::{IdempotencyKey, Key, LockLayer};
use tower::{Layer, ServiceExt, service_fn};

/// The name of the lock that the handler holds, or `Ok(None)` if it was called without a lock. The
/// error is the answer of the layer: its status and the detail.
async fn locked(key: &Key, request: In) -> Result<Option<String>, (StatusCode, String)> {
    let layer = LockLayer::new(memory(), key.clone());
    let service = layer.layer(service_fn(async |request: In| {
        let held = request.extensions().get::<lockcore::Held>();
        let name = held.map_or("-", |held| held.name()).to_owned();
        Ok::<_, Infallible>(Response::new(name))
    }));
    let response = in_time(service.oneshot(request)).await.unwrap();
    let status = response.status();
    if status != StatusCode::OK {
        let problem = problem(response).await;
        let section = match status {
            StatusCode::BAD_REQUEST => "#lock-key",
            _ => "#lock-misconfigured",
        };
        assert!(problem["type"].as_str().unwrap().ends_with(section));
        return Err((status, problem["detail"].as_str().unwrap().to_owned()));
    }
    let name = response.into_body().collect().await.unwrap().to_bytes();
    Ok(Some(String::from_utf8(name.into()).unwrap()).filter(|name| name != "-"))
}

async fn name(key: &Key, request: In) -> String {
    locked(key, request).await.unwrap().expect("a lock")
}

#[track_caller]
fn assert_refused(
    outcome: &Result<Option<String>, (StatusCode, String)>,
    status: StatusCode,
    says: &str,
) {
    let (actual, detail) = outcome.as_ref().expect_err("refused");
    assert_eq!(*actual, status, "{detail}");
    assert!(detail.contains(says), "{detail}");
}

fn with(header: &str, values: &[&[u8]]) -> In {
    let mut request = get("/");
    for value in values {
        request.headers_mut().append(
            HeaderName::from_bytes(header.as_bytes()).unwrap(),
            HeaderValue::from_bytes(value).unwrap(),
        );
    }
    request
}

#[tokio::test]
async fn a_header_names_the_lock() {
    let key = Key::header("Idempotency-Key").prefix("payment:");

    let request = with("idempotency-key", &["ä 1".as_bytes()]);
    assert_eq!(name(&key, request).await, "payment:ä 1");
}

/// The draft standard has quotation marks, and many clients leave them out.
#[tokio::test]
async fn an_idempotency_key_with_and_without_quotation_marks_is_one_lock() {
    let key = Key::header_as::<IdempotencyKey>("Idempotency-Key").prefix("payment:");
    for (value, text) in [
        (r#""abc""#, "abc"),
        ("abc", "abc"),
        (r#""8e03978e-40d5""#, "8e03978e-40d5"),
        ("8e03978e-40d5", "8e03978e-40d5"),
        (r#""a \"b\" \\, c;d""#, r#"a "b" \, c;d"#),
    ] {
        let request = with("idempotency-key", &[value.as_bytes()]);
        assert_eq!(name(&key, request).await, format!("payment:{text}"));
    }

    let locks = memory();
    let _other = hold(&locks, "payment:abc").await;
    let layer = LockLayer::new(locks, key).try_only();
    let service = layer.layer(service_fn(async |_: In| {
        Ok::<_, Infallible>(Response::new(String::new()))
    }));
    for value in [r#""abc""#, "abc"] {
        let request = with("idempotency-key", &[value.as_bytes()]);
        let taken = service.clone().oneshot(request).await.unwrap();
        assert_eq!(taken.status(), StatusCode::CONFLICT, "{value}");
    }
}

#[tokio::test]
async fn what_could_be_read_in_two_ways_is_no_idempotency_key() {
    let key = Key::header_as::<IdempotencyKey>("idempotency-key");
    let service = LockLayer::new(memory(), key).layer(service_fn(async |_: In| {
        Ok::<_, Infallible>(Response::new(String::new()))
    }));
    for value in [
        "",
        r#""""#,
        r#"""#,
        r#""abc"#,
        r#"abc""#,
        r#""abc" "#,
        r#""abc"; a=1"#,
        r#""a", "b""#,
        r#""a\b""#,
        r#""a\"#,
        "a b",
        "a,b",
        "a;b",
        "ä",
        "\"ä\"",
    ] {
        let request = with("idempotency-key", &[value.as_bytes()]);
        let refused = service.clone().oneshot(request).await.unwrap();
        assert_eq!(refused.status(), StatusCode::BAD_REQUEST, "{value}");
    }
}

#[tokio::test]
async fn a_request_for_a_name_that_is_held_is_refused_with_the_name() {
    let locks = memory();
    let _other = hold(&locks, "payment:1").await;
    let layer = LockLayer::new(locks, Key::header("key").prefix("payment:")).try_only();
    let service = layer.layer(service_fn(async |_: In| {
        Ok::<_, Infallible>(Response::new(String::new()))
    }));

    let taken = service.clone().oneshot(with("key", &[b"1"])).await.unwrap();
    let free = service.oneshot(with("key", &[b"2"])).await.unwrap();

    assert_eq!(taken.status(), StatusCode::CONFLICT);
    assert_eq!(problem(taken).await["key"], "payment:1");
    assert_eq!(free.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_header_that_does_not_name_one_lock_is_refused_and_only_its_lack_is_optional() {
    let long = "x".repeat(5_000);
    let nearly = "x".repeat(4_096);
    let cases: [(&[&[u8]], &str); 6] = [
        (&[], "is missing"),
        (&[b""], "is empty"),
        (&[b"\xff"], "not UTF-8"),
        (&[b"a", b"b"], "more than once"),
        (&[long.as_bytes()], "too long"),
        (&[nearly.as_bytes()], "too long"),
    ];
    for (values, says) in cases {
        let key = Key::header("key").prefix("a:");

        let refused = locked(&key, with("key", values)).await;
        let optional = locked(&key.optional(), with("key", values)).await;

        assert_refused(&refused, StatusCode::BAD_REQUEST, says);
        assert!(refused.unwrap_err().1.contains("header \"key\""));
        match values.is_empty() {
            true => assert_eq!(optional, Ok(None)),
            false => assert_refused(&optional, StatusCode::BAD_REQUEST, says),
        }
    }
}

#[test]
#[should_panic(expected = "not the name of a header")]
fn a_bad_header_name_is_seen_at_the_start() {
    let _ = Key::header("idempotency key");
}

#[tokio::test]
async fn a_query_parameter_names_the_lock_decoded() {
    let key = Key::query("id").prefix("order:");

    let request = get("/orders?x=1&id=a+b%26%C3%A4&idx=2");
    assert_eq!(name(&key, request).await, "order:a b&ä");
}

#[tokio::test]
async fn a_query_parameter_that_does_not_name_one_lock_is_refused() {
    let key = Key::query("id");
    let long = format!("/?id={}", "x".repeat(5_000));
    let cases = [
        ("/", "is missing"),
        ("/?", "is missing"),
        ("/?ID=1", "is missing"),
        ("/?id", "is empty"),
        ("/?id=", "is empty"),
        ("/?id=1&id=1", "more than once"),
        ("/?id=1&%69d=2", "more than once"),
        ("/?id=%ff", "not UTF-8"),
        (&long, "too long"),
    ];
    for (path, says) in cases {
        let refused = locked(&key, get(path)).await;

        assert_refused(&refused, StatusCode::BAD_REQUEST, says);
    }
    assert_eq!(locked(&key.optional(), get("/")).await, Ok(None));
}

#[tokio::test]
async fn an_extension_names_the_lock() {
    #[derive(Clone)]
    struct User {
        id: u64,
    }
    let key = Key::extension(|user: &User| user.id).prefix("user:");

    let mut request = get("/");
    request.extensions_mut().insert(User { id: 7 });
    assert_eq!(name(&key, request).await, "user:7");

    // The server has not added the extension. The client cannot correct this.
    let refused = locked(&key, get("/")).await;
    assert_refused(&refused, StatusCode::INTERNAL_SERVER_ERROR, "User");
    assert_eq!(locked(&key.optional(), get("/")).await, Ok(None));
}

#[tokio::test]
async fn an_extension_that_cannot_be_displayed_does_not_panic() {
    struct Shy;

    impl fmt::Display for Shy {
        fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
            Err(fmt::Error)
        }
    }
    let key = Key::extension(|(): &()| Shy);

    let mut request = get("/");
    request.extensions_mut().insert(());
    let refused = locked(&key, request).await;

    let says = "cannot be displayed";
    assert_refused(&refused, StatusCode::INTERNAL_SERVER_ERROR, says);
}

#[tokio::test]
async fn metadata_and_a_grpc_method_name_the_lock() {
    let by_metadata = Key::metadata("order-id").prefix("order:");
    let by_method = Key::grpc_method();

    let request = with("order-id", &[b"42"]);
    assert_eq!(name(&by_metadata, request).await, "order:42");
    let refused = locked(&by_metadata, get("/")).await;
    assert_refused(&refused, StatusCode::BAD_REQUEST, "metadata \"order-id\"");

    let request = get("/shop.Orders/Settle");
    assert_eq!(name(&by_method, request).await, "shop.Orders/Settle");
    let refused = locked(&by_method, get("/shop.Orders")).await;
    assert_refused(&refused, StatusCode::BAD_REQUEST, "gRPC method");
}

#[test]
#[should_panic(expected = "binary")]
fn binary_metadata_is_refused_at_the_start() {
    let _ = Key::metadata("order-bin");
}

#[tokio::test]
async fn a_template_joins_values_so_that_they_can_be_told_apart() {
    let key = Key::template("cart:{header.x-tenant}:{query.user}/{grpc_method}").prefix("v1:");
    let request = |tenant: &str, path: &str| {
        let mut request = with("x-tenant", &[tenant.as_bytes()]);
        *request.uri_mut() = path.parse().unwrap();
        request
    };

    let plain = name(&key, request("acme", "/a.B/C?user=7")).await;
    let sly = name(&key, request("acme:7", "/a.B/C?user=7%2Fx")).await;

    assert_eq!(plain, "v1:cart:acme:7/a.B%2FC");
    assert_eq!(sly, "v1:cart:acme%3A7:7%2Fx/a.B%2FC");
}

#[tokio::test]
async fn a_template_says_what_is_missing_and_is_bounded_as_a_whole() {
    let key = Key::template("{header.a}:{query.b}");
    let long = "x".repeat(3_000);
    let escaped = ":".repeat(2_000);

    let no_b = locked(&key, with("a", &[b"1"])).await;
    assert_refused(&no_b, StatusCode::BAD_REQUEST, "query parameter \"b\"");

    for value in [&long, &escaped] {
        let mut request = with("a", &[value.as_bytes()]);
        *request.uri_mut() = format!("/?b={long}").parse().unwrap();
        let refused = locked(&key, request).await;
        assert_refused(&refused, StatusCode::BAD_REQUEST, "too long");
    }

    let optional = key.optional();
    assert_eq!(locked(&optional, with("a", &[b"1"])).await, Ok(None));
}

#[tokio::test]
async fn a_typed_value_in_a_template_is_written_by_its_type_and_escaped() {
    let key = Key::template("{header.from:i64}-{header.to:i64}-{header.host}")
        .read_as::<IpAddr>("header.host");
    let request = |from: &'static str, to: &'static str, host: &'static str| {
        let mut request = get("/");
        let headers = [("from", from), ("to", to), ("host", host)];
        for (name, value) in headers {
            let value = HeaderValue::from_static(value);
            request.headers_mut().insert(name, value);
        }
        request
    };

    let plain = name(&key, request("7", "12", "::1")).await;
    let sly = name(&key, request("+007", "-0012", "0:0:0::0:1")).await;
    let no_number = locked(&key, request("7", "", "::1")).await;
    let no_address = locked(&key, request("7", "12", "localhost")).await;

    assert_eq!(plain, "7-12-::1");
    assert_eq!(sly, "7-%2D12-::1");
    assert_refused(&no_number, StatusCode::BAD_REQUEST, "is empty");
    let says = "The header \"host\" is not valid: invalid IP address syntax.";
    assert_refused(&no_address, StatusCode::BAD_REQUEST, says);
}

/// The type writes an empty text, or a very long one.
#[tokio::test]
async fn a_text_that_a_type_writes_has_the_bounds_of_a_text_of_the_client() {
    struct Repeated(usize);

    impl FromStr for Repeated {
        type Err = ParseIntError;

        fn from_str(text: &str) -> Result<Self, ParseIntError> {
            text.parse().map(Self)
        }
    }

    impl fmt::Display for Repeated {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(&"x".repeat(self.0))
        }
    }

    let key = Key::header_as::<Repeated>("times").prefix("a:");

    let nothing = locked(&key, with("times", &[b"0"])).await;
    let long = locked(&key, with("times", &[b"5000"])).await;

    assert_eq!(name(&key, with("times", &[b"02"])).await, "a:xx");
    assert_refused(&nothing, StatusCode::BAD_REQUEST, "is empty");
    assert_refused(&long, StatusCode::BAD_REQUEST, "too long");
}

#[test]
#[should_panic(expected = "`:uuid` is not the name of an integer type")]
fn a_type_that_a_template_has_no_name_for_is_seen_at_the_start() {
    let _ = Key::template("{header.id:uuid}");
}

#[test]
#[should_panic(expected = "`{query.id}` does not occur in it")]
fn a_type_for_a_value_that_is_not_there_is_seen_at_the_start() {
    let _ = Key::template("{header.id}").read_as::<u64>("query.id");
}

#[tokio::test]
async fn a_function_may_name_no_lock_or_refuse_with_its_own_words() {
    let key = Key::from_fn(|request| {
        let Some(page) = request.uri.path().strip_prefix("/pages/") else {
            return Ok(None);
        };
        let page: u64 = page
            .parse()
            .map_err(|error| format!("no page number: {error}{}", "!".repeat(2_000)))?;
        match page {
            0 => Err("There is no page 0.".into()),
            page => Ok(Some(format!("page:{page}"))),
        }
    });

    assert_eq!(name(&key, get("/pages/07")).await, "page:7");
    assert_eq!(locked(&key, get("/")).await, Ok(None));
    for key in [key.clone(), key.optional()] {
        let refused = locked(&key, get("/pages/0")).await;
        assert_refused(&refused, StatusCode::BAD_REQUEST, "There is no page 0.");
        let refused = locked(&key, get("/pages/x")).await;
        assert_refused(&refused, StatusCode::BAD_REQUEST, "invalid digit");
        assert_eq!(refused.unwrap_err().1.len(), 1_000);
    }
}

#[test]
#[should_panic(expected = "`{id}` is none of")]
fn a_bad_template_is_seen_at_the_start() {
    let _ = Key::template("order:{id}");
}

#[tokio::test]
async fn a_request_that_needs_no_lock_passes_without_its_header() {
    let key = Key::header("id").when(|request| !request.method.is_safe());

    assert_eq!(locked(&key, get("/")).await, Ok(None));

    let mut request = with("id", &[b"1"]);
    *request.method_mut() = Method::POST;
    assert_eq!(name(&key, request).await, "1");

    let mut request = get("/");
    *request.method_mut() = Method::POST;
    let refused = locked(&key, request).await;
    assert_refused(&refused, StatusCode::BAD_REQUEST, "header \"id\"");
}
