//! The live page, asked as a browser asks it.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use lockcore::testing::Store;
use lockcore::{Guard, Locks};
use lockcore_tower::Dashboard;
use tower::ServiceExt as _;

const SOON: Duration = Duration::from_secs(30);

async fn ask(page: &Router, request: Request<Body>) -> Response<Body> {
    page.clone().oneshot(request).await.unwrap()
}

async fn text(response: Response<Body>) -> String {
    let body = response.into_body().collect().await.unwrap();
    String::from_utf8(body.to_bytes().to_vec()).unwrap()
}

fn get(uri: &str) -> Request<Body> {
    Request::get(uri).body(Body::empty()).unwrap()
}

async fn shows(page: &Router, uri: &str) -> String {
    let response = ask(page, get(uri)).await;
    assert_eq!(response.status(), StatusCode::OK, "{uri}");
    text(response).await
}

fn router(dashboard: Dashboard) -> Router {
    Router::new().nest("/locks", dashboard.into_router())
}

async fn held(locks: &Locks, name: &str) -> Guard {
    locks.mutex(name).acquire().await.unwrap()
}

/// The ticket of the holder.
async fn ticket(locks: &Locks, name: &str) -> u64 {
    locks.inspect(name).await.unwrap()[0].ticket
}

#[tokio::test]
async fn names_and_lines_are_shown_and_nothing_from_outside_is_markup() {
    let locks = Locks::connect("memory:").unwrap();
    let name = "<script>alert(1)</script>&\"'";
    let _guard = held(&locks, name).await;
    let _other = held(&locks, "order:1").await;
    let page = router(Dashboard::new(locks));

    let names = shows(&page, "/locks").await;
    assert!(
        names.contains("order:1") && names.contains("&lt;script&gt;alert"),
        "{names}"
    );
    assert!(!names.contains("<script>alert"), "{names}");

    let (_, link) = names.split_once("<a href=\"?name=%3Cscript").unwrap();
    let (link, _) = link.split_once('"').unwrap();
    let line = shows(&page, &format!("/locks?name=%3Cscript{link}")).await;
    assert!(
        line.contains("holds") && !line.contains("<script>alert"),
        "{line}"
    );
    assert!(!line.contains("take away"), "it changes nothing: {line}");

    assert!(shows(&page, "/locks?name=nobody").await.contains("Free."));
    assert!(
        !shows(&page, "/locks?begin=order")
            .await
            .contains("&lt;script")
    );
}

#[tokio::test]
async fn the_page_loads_nothing_and_is_kept_nowhere() {
    let page = router(Dashboard::new(Locks::connect("memory:").unwrap()));

    let response = ask(&page, get("/locks")).await;

    let headers = response.headers().clone();
    let policy = headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none';"), "{policy}");
    let (_, nonce) = policy.split_once("script-src 'nonce-").unwrap();
    let (nonce, _) = nonce.split_once('\'').unwrap();
    assert_eq!(nonce.len(), 32);
    assert_eq!(headers[header::CACHE_CONTROL], "no-store");
    assert!(!headers.contains_key(header::SET_COOKIE));
    let text = text(response).await;
    assert!(
        text.contains(&format!("<script nonce=\"{nonce}\">")),
        "{text}"
    );
    assert!(!text.contains("://"), "{text}");
}

async fn stream(page: &Router) -> Body {
    let events = Request::get("/locks?name=order:1").header(header::ACCEPT, "text/event-stream");
    let response = ask(page, events.body(Body::empty()).unwrap()).await;
    assert_eq!(
        response.headers()[header::CONTENT_TYPE],
        "text/event-stream"
    );
    response.into_body()
}

#[tokio::test]
async fn a_change_is_pushed_to_a_page_that_is_open() {
    let locks = Locks::connect("memory:").unwrap();
    let guard = held(&locks, "order:1").await;
    let page = router(Dashboard::new(locks.clone()).every(Duration::ZERO));
    let mut body = stream(&page).await;
    // A browser opens the next stream when one ends.
    let mut pushed = async |part: &str| {
        let mut all = String::new();
        while !all.contains(part) {
            match tokio::time::timeout(SOON, body.frame()).await.expect(part) {
                Some(frame) => {
                    let data = frame.unwrap().into_data().unwrap();
                    all.push_str(std::str::from_utf8(&data).unwrap());
                }
                None => body = stream(&page).await,
            }
        }
    };
    pushed("holds").await;

    guard.release().await.unwrap();

    pushed("Free.").await;
}

async fn frame(body: &mut Body) -> Option<String> {
    let frame = tokio::time::timeout(SOON, body.frame()).await.unwrap()?;
    let data = frame.unwrap().into_data().unwrap();
    Some(String::from_utf8(data.to_vec()).unwrap())
}

#[tokio::test]
async fn a_stream_that_has_not_seen_the_store_says_so_and_ends_in_time() {
    let store = Store::new();
    let builder = Locks::builder().op_timeout(4 * SOON);
    let page = router(Dashboard::new(store.client_with(builder).unwrap()));
    store.freeze();

    // The look of one of them gets no answer. The other one waits.
    let ends = async |mut body: Body| {
        let told = frame(&mut body).await.unwrap();
        assert!(told.contains("event: late\n"), "{told}");
        assert!(frame(&mut body).await.is_none());
    };
    tokio::join!(ends(stream(&page).await), ends(stream(&page).await));
}

#[tokio::test]
async fn a_stream_begins_with_the_look_of_its_page() {
    let store = Store::new();
    let builder = Locks::builder().op_timeout(4 * SOON);
    let locks = store.client_with(builder).unwrap();
    let _guard = held(&locks, "order:1").await;
    let page = router(Dashboard::new(locks).every(100 * SOON));
    shows(&page, "/locks?name=order:1").await;
    store.freeze();

    let told = frame(&mut stream(&page).await).await.unwrap();
    // So the guard can be released.
    store.thaw();

    assert!(told.contains("holds"), "{told}");
}

#[tokio::test]
async fn only_an_exclusive_ticket_has_all_permits_and_a_token() {
    let locks = Locks::connect("memory:").unwrap();
    let writer = held(&locks, "order:1").await;
    let pool = locks.semaphore("pool", 1).acquire().await.unwrap();
    let page = router(Dashboard::new(locks));

    let line = shows(&page, "/locks?name=order:1").await;
    let token = writer.fencing_token().unwrap();
    assert!(line.contains(&format!(">{token}</td>")), "{line}");
    assert!(line.contains(">all</td>"), "{line}");

    let line = shows(&page, "/locks?name=pool").await;
    assert!(!line.contains(&pool.grant_id().to_string()), "{line}");
    assert!(line.contains(">1 of 1</td>"), "{line}");
}

#[tokio::test]
async fn names_are_found_by_a_part() {
    let locks = Locks::connect("memory:").unwrap();
    let _paid = held(&locks, "order:1:paid").await;
    let _open = held(&locks, "order:2:open").await;
    let _other = held(&locks, "cart:3:paid").await;
    let page = router(Dashboard::new(locks));

    let names = shows(&page, "/locks?begin=order&part=paid").await;

    assert!(names.contains("order:1:paid"), "{names}");
    assert!(!names.contains("order:2"), "{names}");
    assert!(!names.contains("cart:3"), "{names}");
}

#[tokio::test]
async fn of_many_names_those_with_the_most_waiters_are_shown() {
    let store = Store::new();
    let locks = store.client().unwrap();
    let mut guards = Vec::new();
    for number in 0..510 {
        guards.push(held(&locks, &format!("order:{number}")).await);
    }
    guards.push(held(&locks, "stock").await);
    let other = store.another_process().client().unwrap();
    let waiter = tokio::spawn(async move { held(&other, "stock").await });
    let page = router(Dashboard::new(locks.clone()));
    while locks.inspect("stock").await.unwrap().len() < 2 {
        tokio::task::yield_now().await;
    }

    let names = shows(&page, "/locks").await;

    let first = names.split("<a href=\"?name=").nth(1).unwrap();
    assert!(first.starts_with("stock"), "{first}");
    assert_eq!(names.matches("<a href=\"?name=").count(), 500);
    assert!(names.contains("the 500 names with the most waiters"));
    waiter.abort();
}

#[tokio::test]
async fn losses_of_this_process_are_shown() {
    let locks = Locks::connect("memory:").unwrap();
    let all = router(Dashboard::new(locks.clone()));
    let orders = router(Dashboard::new(locks.clone()).prefix("order:"));
    let guard = held(&locks, "stock").await;
    assert!(!shows(&all, "/locks").await.contains("This process"));

    let ticket = ticket(&locks, "stock").await;
    locks.force_release("stock", ticket).await.unwrap();
    guard.lost().await;

    let began = std::time::Instant::now();
    while !shows(&all, "/locks").await.contains("lost stock (Taken)") {
        assert!(began.elapsed() < SOON);
        tokio::task::yield_now().await;
    }
    assert!(
        shows(&all, "/locks?name=stock")
            .await
            .contains("lost stock")
    );
    assert!(
        !shows(&all, "/locks?name=order:1")
            .await
            .contains("lost stock")
    );
    assert!(!shows(&orders, "/locks").await.contains("lost stock"));
}

#[tokio::test]
async fn invisible_characters_of_a_name_are_seen() {
    let locks = Locks::connect("memory:").unwrap();
    let _guard = held(&locks, "order:1\u{202e}").await;
    let _other = held(&locks, "order:1\u{ad}").await;
    let page = router(Dashboard::new(locks));

    let names = shows(&page, "/locks").await;

    assert!(names.contains("order:1\\u{202e}"), "{names}");
    assert!(names.contains("order:1\\u{ad}"), "{names}");
    assert!(!names.contains('\u{202e}'), "{names}");
}

/// The page that asks for a confirmation: its cookie and the fields of its form.
async fn question(page: &Router, name: &str, ticket: u64, action: &str) -> (String, String) {
    let uri = format!("/locks?name={name}&ticket={ticket}&action={action}");
    let response = ask(page, get(&uri)).await;
    let cookie = response.headers()[header::SET_COOKIE].to_str().unwrap();
    assert!(cookie.ends_with("; HttpOnly; SameSite=Strict"), "{cookie}");
    let cookie = cookie.split(';').next().unwrap().to_owned();
    let text = text(response).await;
    let (_, token) = text.split_once("name=\"token\" value=\"").unwrap();
    let token = token.split('"').next().unwrap();
    assert!(cookie.ends_with(token));
    (
        cookie,
        format!("token={token}&name={name}&ticket={ticket}&action={action}"),
    )
}

fn post(fields: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::builder().method(Method::POST).uri("/locks?");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Body::from(fields.to_owned())).unwrap()
}

#[tokio::test]
async fn a_form_that_is_not_of_this_page_is_refused() {
    let locks = Locks::connect("memory:").unwrap();
    let guard = held(&locks, "order:1").await;
    let ticket = ticket(&locks, "order:1").await;
    let page = router(Dashboard::new(locks).actions(true));
    let (cookie, fields) = question(&page, "order:1", ticket, "release").await;
    let (_, without) = fields.split_once('&').unwrap();
    let other = format!("token={}&{without}", "0".repeat(32));
    let empty = format!("token=&{without}");
    let from = |origin| [("cookie", &*cookie), ("host", "a.test"), ("origin", origin)];
    let forged: [(&str, &[(&str, &str)]); 8] = [
        (&fields, &[]),
        (without, &[("cookie", &cookie)]),
        (&other, &[("cookie", &cookie)]),
        (&empty, &[("cookie", "lockcore-form=")]),
        (
            &fields,
            &[("cookie", &cookie), ("sec-fetch-site", "cross-site")],
        ),
        (
            &fields,
            &[("cookie", &cookie), ("sec-fetch-site", "same-site")],
        ),
        (&fields, &from("http://b.a.test")),
        (&fields, &from("null")),
    ];

    for (fields, headers) in forged {
        let response = ask(&page, post(fields, headers)).await;
        assert_eq!(
            response.status(),
            StatusCode::FORBIDDEN,
            "{fields} {headers:?}"
        );
    }

    guard.ensure(Duration::ZERO).await.unwrap();
    let headers = from("http://a.test");
    let response = ask(&page, post(&fields, &headers)).await;
    assert_eq!(response.status(), StatusCode::SEE_OTHER);
    assert_eq!(response.headers()[header::LOCATION], "?name=order%3A1");
    assert!(shows(&page, "/locks?name=order:1").await.contains("Free."));
}

#[tokio::test]
async fn a_holder_that_is_asked_learns_why() {
    let locks = Locks::connect("memory:").unwrap();
    let guard = held(&locks, "order:1").await;
    let ticket = ticket(&locks, "order:1").await;
    let page = router(Dashboard::new(locks).actions(true));
    let (cookie, fields) = question(&page, "order:1", ticket, "revoke").await;

    let fields = format!("{fields}&why=deploy");
    let response = ask(&page, post(&fields, &[("cookie", &cookie)])).await;

    assert_eq!(response.status(), StatusCode::SEE_OTHER);
    let asked = tokio::time::timeout(SOON, guard.revoked()).await.unwrap();
    assert_eq!(asked.why, "deploy");
    assert!(
        shows(&page, "/locks?name=order:1")
            .await
            .contains(": deploy")
    );
}

#[tokio::test]
async fn an_operator_learns_at_once_that_a_holder_cannot_be_asked() {
    let locks = Locks::connect("memory:").unwrap();
    let _guard = held(&locks, "order:1").await;
    let ticket = ticket(&locks, "order:1").await;
    let page = router(Dashboard::new(locks).actions(true));
    let (cookie, fields) = question(&page, "order:1", ticket, "revoke").await;

    let fields = format!("{fields}&why={}", "%C3%BC".repeat(40));
    let response = ask(&page, post(&fields, &[("cookie", &cookie)])).await;

    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    let text = text(response).await;
    assert!(text.contains("64 bytes"), "{text}");
}

#[tokio::test]
async fn a_page_without_actions_and_a_page_with_a_prefix_act_on_nothing_else() {
    let locks = Locks::connect("memory:").unwrap();
    let guard = held(&locks, "stock").await;
    let ticket = ticket(&locks, "stock").await;
    let free = router(Dashboard::new(locks.clone()).actions(true));
    let (cookie, fields) = question(&free, "stock", ticket, "release").await;
    let cookie = [("cookie", &*cookie)];

    let reads = router(Dashboard::new(locks.clone()));
    let orders = router(Dashboard::new(locks).prefix("order:").actions(true));
    for page in [&reads, &orders] {
        let response = ask(page, post(&fields, &cookie)).await;
        assert_eq!(response.status(), StatusCode::FORBIDDEN);
    }

    let asks = format!("/locks?name=stock&ticket={ticket}&action=release");
    assert_eq!(
        ask(&reads, get(&asks)).await.status(),
        StatusCode::FORBIDDEN
    );
    let status = ask(&orders, get("/locks?name=stock")).await.status();
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(!shows(&orders, "/locks").await.contains("stock"));
    guard.ensure(Duration::ZERO).await.unwrap();
}
