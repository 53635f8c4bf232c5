//! Tests of fences, and of the tokens in requests to them, step by step. `fence_servers` has the
//! tests over real connections.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use common::{in_time, memory, problem};
use futures_util::FutureExt;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::{Empty, Full};
use lockcore::testing::Store;
use lockcore::{ErrorKind, FencingToken, Locks, LostReason};
use lockcore_tower::{
    FenceLayer, FenceService, Key, LockBody, ResponseFuture, TOKEN_HEADER, TokenLayer,
};
use tokio::sync::Notify;
use tower::limit::ConcurrencyLimitLayer;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_test::mock::{self, Handle, Mock, Spawn};

type In = Request<Empty<Bytes>>;
type Out = Response<Full<Bytes>>;

const HOUR: Duration = Duration::from_secs(3600);

fn fence() -> FenceLayer {
    FenceLayer::new(Key::header("account-id"))
}

/// A service with a fence in front, and the handle of the inner service.
type Fenced = (Spawn<FenceService<Mock<In, Out>>>, Handle<In, Out>);

fn fenced(fence: &FenceLayer) -> Fenced {
    mock::spawn_with(|inner| fence.layer(inner))
}

fn bare(account: &str) -> In {
    let request = Request::post("/").header("account-id", account);
    request.body(Empty::new()).unwrap()
}

fn request(account: &str, token: &str) -> In {
    let mut request = bare(account);
    let token = HeaderValue::from_str(token).unwrap();
    request.headers_mut().insert(TOKEN_HEADER, token);
    request
}

fn ok() -> Out {
    Out::new("written".into())
}

type Call = ResponseFuture<<Mock<In, Out> as Service<In>>::Future, Full<Bytes>, tower::BoxError>;

/// Calls the service. The inner service is ready for one request.
fn call((service, handle): &mut Fenced, request: In) -> Pin<Box<Call>> {
    handle.allow(1);
    assert!(service.poll_ready().is_ready());
    Box::pin(service.call(request))
}

/// Waits until a handler has begun. Returns its request, and the sender for its answer.
async fn begun(mock: &mut Handle<In, Out>) -> (In, mock::SendResponse<Out>) {
    in_time(mock.next_request()).await.unwrap()
}

/// Sends one request. Its handler always answers.
async fn alone(fence: &FenceLayer, request: In) -> StatusCode {
    let service = fence.layer(service_fn(async |_: In| Ok::<_, tower::BoxError>(ok())));
    in_time(service.oneshot(request)).await.unwrap().status()
}

#[tokio::test]
async fn a_lower_token_is_refused_with_412_and_the_handler_does_not_see_it() {
    let fence = fence();
    assert_eq!(alone(&fence, request("7", "2048")).await, StatusCode::OK);

    let unreached = service_fn(async |_: In| -> Result<Out, tower::BoxError> {
        panic!("the handler should not be called")
    });
    let late = fence.layer(unreached).oneshot(request("7", "2047"));
    let response = in_time(late).await.unwrap();

    assert_eq!(response.status(), StatusCode::PRECONDITION_FAILED);
    assert!(!response.headers().contains_key("retry-after"));
    let problem = problem(response).await;
    assert_eq!(problem["status"], 412);
    let section = problem["type"].as_str().unwrap();
    assert!(section.ends_with("#write-refused"), "{section}");
}

#[tokio::test]
async fn an_equal_token_passes_again_and_each_resource_has_a_fence_of_its_own() {
    let fence = fence();
    for (account, token, expected) in [
        ("7", "2048", StatusCode::OK),
        ("7", "2048", StatusCode::OK),
        ("8", "1024", StatusCode::OK),
        ("7", "1024", StatusCode::PRECONDITION_FAILED),
        ("7", "2049", StatusCode::OK),
        ("7", "2048", StatusCode::PRECONDITION_FAILED),
        ("8", "1024", StatusCode::OK),
        // As doubles, the first two tokens would be equal. As texts, the last one would be the
        // highest.
        ("9", "9223372036854775806", StatusCode::OK),
        ("9", "9223372036854775805", StatusCode::PRECONDITION_FAILED),
        ("9", "999", StatusCode::PRECONDITION_FAILED),
    ] {
        // Each request gets a new service of the layer. The layer, and not the service, remembers
        // the tokens, so the fence knows the tokens of the earlier requests.
        let status = alone(&fence.clone(), request(account, token)).await;
        assert_eq!(status, expected, "{account} {token}");
    }
}

#[tokio::test]
async fn a_request_without_one_token_is_answered_with_400() {
    let fence = fence();
    let mut twice = request("7", "1024");
    twice
        .headers_mut()
        .append(TOKEN_HEADER, HeaderValue::from_static("1024"));
    let mut requests = vec![bare("7"), twice];
    for text in ["", "0", "-5", "+5", "05", "five", "9223372036854775808"] {
        requests.push(request("7", text));
    }
    for request in requests {
        let headers = format!("{:?}", request.headers());
        assert_eq!(
            alone(&fence, request).await,
            StatusCode::BAD_REQUEST,
            "{headers}"
        );
    }
    let without_resource = Request::post("/").body(Empty::new()).unwrap();
    assert_eq!(
        alone(&fence, without_resource).await,
        StatusCode::BAD_REQUEST
    );
}

#[tokio::test]
async fn an_optional_token_may_be_missing_but_not_wrong() {
    let fence = fence().optional();

    assert_eq!(alone(&fence, request("7", "2048")).await, StatusCode::OK);
    assert_eq!(alone(&fence, bare("7")).await, StatusCode::OK);
    let late = alone(&fence, request("7", "1024")).await;
    assert_eq!(late, StatusCode::PRECONDITION_FAILED);
    let wrong = alone(&fence, request("7", "five")).await;
    assert_eq!(wrong, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_request_that_the_key_lets_pass_is_not_checked() {
    let fence = FenceLayer::new(Key::from_fn(|_| Ok(None)));

    assert_eq!(alone(&fence, request("7", "2048")).await, StatusCode::OK);
    assert_eq!(alone(&fence, request("7", "1024")).await, StatusCode::OK);
    assert_eq!(alone(&fence, bare("7")).await, StatusCode::OK);
}

#[tokio::test]
async fn the_handler_finds_the_token_to_write_with() {
    let mut service = fenced(&fence());
    let _response = tokio::spawn(call(&mut service, request("7", "2048")));

    let (seen, _) = begun(&mut service.1).await;

    let token: FencingToken = "2048".parse().unwrap();
    assert_eq!(seen.extensions().get(), Some(&token));
}

/// If the fence only compared tokens, a request could pass, stop for a while, and write after a
/// later request.
#[tokio::test]
async fn a_higher_token_waits_until_the_lower_ones_have_answered() {
    let mut service = fenced(&fence());
    let first = tokio::spawn(call(&mut service, request("7", "1024")));
    let (_, first_writes) = begun(&mut service.1).await;
    let same_holder = tokio::spawn(call(&mut service, request("7", "1024")));
    let (_, same_writes) = begun(&mut service.1).await;

    let mut later = call(&mut service, request("7", "2048"));
    assert!(later.as_mut().now_or_never().is_none());
    assert!(
        service.1.next_request().now_or_never().is_none(),
        "overlaps"
    );

    // Requests with lower tokens that arrive now are too late.
    let late = in_time(call(&mut service, request("7", "1024")))
        .await
        .unwrap();
    assert_eq!(late.status(), StatusCode::PRECONDITION_FAILED);

    first_writes.send_response(ok());
    assert_eq!(in_time(first).await.unwrap().unwrap().status(), 200);
    assert!(later.as_mut().now_or_never().is_none());
    assert!(
        service.1.next_request().now_or_never().is_none(),
        "overlaps"
    );

    same_writes.send_response(ok());
    assert_eq!(in_time(same_holder).await.unwrap().unwrap().status(), 200);
    let later = tokio::spawn(later);
    let (_, later_writes) = begun(&mut service.1).await;
    later_writes.send_response(ok());
    assert_eq!(in_time(later).await.unwrap().unwrap().status(), 200);
}

/// If a waiting request kept its permit, requests for one resource would block the requests for all
/// other resources.
#[tokio::test]
async fn a_request_that_waits_for_lower_tokens_keeps_no_place_in_the_service() {
    let (entered, ends) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let limited = ConcurrencyLimitLayer::new(2).layer(service_fn({
        let (entered, ends) = (Arc::clone(&entered), Arc::clone(&ends));
        move |request: In| {
            let (entered, ends) = (Arc::clone(&entered), Arc::clone(&ends));
            async move {
                if request.headers()[TOKEN_HEADER] == "1" {
                    entered.notify_one();
                    ends.notified().await;
                }
                Ok::<_, tower::BoxError>(ok())
            }
        }
    }));
    let service = fence().layer(limited);

    let first = tokio::spawn(service.clone().oneshot(request("7", "1")));
    in_time(entered.notified()).await;
    let mut waits = Box::pin(service.clone().oneshot(request("7", "2")));
    assert!(waits.as_mut().now_or_never().is_none());

    let beside = in_time(service.oneshot(request("8", "2"))).await.unwrap();
    assert_eq!(beside.status(), StatusCode::OK);
    ends.notify_one();
    let first = in_time(first).await.unwrap().unwrap();
    assert_eq!(first.status(), StatusCode::OK);
    assert_eq!(in_time(waits).await.unwrap().status(), StatusCode::OK);
}

/// Returns a request with token 2 that no lower token blocks any more, and the handle of its
/// service, which has no permit left.
async fn one_waits_for_its_busy_service(
    fence: &FenceLayer,
) -> (
    impl Future<Output = Result<Response<LockBody<Full<Bytes>>>, tower::BoxError>>
    + Send
    + Unpin
    + use<>,
    Handle<In, Out>,
) {
    let (service, mut handle) = mock::pair::<In, Out>();
    let service = fence.layer(service);
    handle.allow(2);
    let first = tokio::spawn(service.clone().oneshot(request("7", "1")));
    let (_, first_ends) = begun(&mut handle).await;
    let mut waits = Box::pin(service.clone().oneshot(request("7", "2")));
    assert!(waits.as_mut().now_or_never().is_none());
    handle.allow(0);
    first_ends.send_response(ok());
    let first = in_time(first).await.unwrap().unwrap();
    assert_eq!(first.status(), StatusCode::OK);
    assert!(waits.as_mut().now_or_never().is_none());
    (waits, handle)
}

/// The request has given back its permit of the service when it began to wait.
#[tokio::test]
async fn the_service_is_made_ready_again_before_a_request_that_has_waited_is_handled() {
    let (waits, mut handle) = one_waits_for_its_busy_service(&fence()).await;
    assert!(handle.next_request().now_or_never().is_none());

    handle.allow(1);
    let waits = tokio::spawn(waits);

    let (request, ends) = begun(&mut handle).await;
    assert_eq!(request.headers()[TOKEN_HEADER], "2");
    ends.send_response(ok());
    let waited = in_time(waits).await.unwrap().unwrap();
    assert_eq!(waited.status(), StatusCode::OK);
}

/// While a request waits for its service, it does not keep requests with higher tokens out.
/// Otherwise it could block the request for which its service waits.
#[tokio::test]
async fn a_request_that_waits_for_its_busy_service_keeps_no_higher_token_out() {
    let fence = fence();
    let (waits, mut handle) = one_waits_for_its_busy_service(&fence).await;

    let (other, mut other_handle) = mock::pair::<In, Out>();
    other_handle.allow(1);
    let higher = tokio::spawn(fence.layer(other).oneshot(request("7", "3")));
    let (_, higher_ends) = begun(&mut other_handle).await;

    handle.allow(1);
    let late = in_time(waits).await.unwrap();
    assert_eq!(late.status(), StatusCode::PRECONDITION_FAILED);
    higher_ends.send_response(ok());
    in_time(higher).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_waiting_request_is_refused_when_a_higher_token_comes() {
    let mut service = fenced(&fence());
    let first = tokio::spawn(call(&mut service, request("7", "1")));
    let (_, first_writes) = begun(&mut service.1).await;
    let mut second = call(&mut service, request("7", "2"));
    assert!(second.as_mut().now_or_never().is_none());

    let mut third = call(&mut service, request("7", "3"));
    assert!(third.as_mut().now_or_never().is_none());

    // The second request is refused at once, and not only after the end of the first.
    let refused = in_time(second).await.unwrap();
    assert_eq!(refused.status(), StatusCode::PRECONDITION_FAILED);
    first_writes.send_response(ok());
    in_time(first).await.unwrap().unwrap();
    let third = tokio::spawn(third);
    let (_, third_writes) = begun(&mut service.1).await;
    third_writes.send_response(ok());
    assert_eq!(in_time(third).await.unwrap().unwrap().status(), 200);
}

#[tokio::test]
async fn a_client_that_goes_away_lets_the_next_in_and_its_token_stays_seen() {
    let mut service = fenced(&fence());
    let first = tokio::spawn(call(&mut service, request("7", "1")));
    let (_, _first_writes) = begun(&mut service.1).await;
    let mut gone = call(&mut service, request("7", "5"));
    assert!(gone.as_mut().now_or_never().is_none());
    let next = tokio::spawn(call(&mut service, request("7", "5")));

    drop(gone);
    first.abort();
    assert!(in_time(first).await.is_err());

    let (_, next_writes) = begun(&mut service.1).await;
    next_writes.send_response(ok());
    assert_eq!(in_time(next).await.unwrap().unwrap().status(), 200);
    let late = in_time(call(&mut service, request("7", "4")))
        .await
        .unwrap();
    assert_eq!(late.status(), StatusCode::PRECONDITION_FAILED);
}

#[tokio::test]
async fn a_handler_that_panics_or_fails_lets_the_next_in() {
    let fence = fence();
    let failing = fence.layer(service_fn(async |_: In| -> Result<Out, tower::BoxError> {
        Err("no".into())
    }));
    let error = in_time(failing.oneshot(request("7", "1"))).await;
    assert_eq!(error.unwrap_err().to_string(), "no");
    let panicking = fence.layer(service_fn(async |_: In| -> Result<Out, tower::BoxError> {
        panic!("on purpose")
    }));
    let panicked = tokio::spawn(panicking.oneshot(request("7", "2")));
    assert!(in_time(panicked).await.unwrap_err().is_panic());

    assert_eq!(alone(&fence, request("7", "3")).await, StatusCode::OK);
}

#[tokio::test]
async fn a_full_memory_forgets_nothing_young_and_refuses_others_with_503() {
    let fence = fence().remember(1, HOUR);
    assert_eq!(alone(&fence, request("7", "5")).await, StatusCode::OK);

    let other = alone(&fence, request("8", "5")).await;

    assert_eq!(other, StatusCode::SERVICE_UNAVAILABLE);
    let late = alone(&fence, request("7", "4")).await;
    assert_eq!(late, StatusCode::PRECONDITION_FAILED);
    assert_eq!(alone(&fence, request("7", "5")).await, StatusCode::OK);
}

// ---- the client

async fn sent(request: In) -> Result<In, tower::BoxError> {
    let echo = service_fn(async |request: In| Ok::<_, tower::BoxError>(request));
    in_time(TokenLayer::new().layer(echo).oneshot(request)).await
}

fn kind(outcome: Result<In, tower::BoxError>) -> ErrorKind {
    let error = outcome.expect_err("should not have been sent");
    error.downcast::<lockcore::Error>().unwrap().kind()
}

#[tokio::test]
async fn a_request_under_several_locks_is_not_sent_without_saying_which_token_it_takes() {
    let locks = memory();
    let both = Locks::all([locks.mutex("account:7"), locks.mutex("account:8")]);
    let both = both.acquire().await.unwrap();
    let token = both.get("account:7").unwrap().fencing_token().unwrap();
    let mut under_both = request("7", "1");
    under_both.extensions_mut().insert(both.held());
    let error = sent(under_both.clone()).await.unwrap_err();
    assert!(error.to_string().contains("MultiHeld::get"), "{error}");

    let one = both.get("account:7").unwrap().clone();
    under_both.extensions_mut().insert(one);
    let sent = sent(under_both).await.unwrap();
    assert_eq!(sent.headers()[TOKEN_HEADER], token.to_string());
}

#[tokio::test]
async fn a_request_under_a_lock_takes_its_token_along_and_another_goes_as_it_is() {
    let locks = memory();
    let guard = locks.mutex("account:7").acquire().await.unwrap();
    let token = guard.fencing_token().unwrap().to_string();

    // A token that the request has already may belong to a lock that was held before.
    let mut under_lock = request("7", "1");
    under_lock.extensions_mut().insert(guard.held());
    let under_lock = sent(under_lock).await.unwrap();
    let values: Vec<_> = under_lock.headers().get_all(TOKEN_HEADER).iter().collect();
    assert_eq!(values, [&*token]);

    let without = sent(bare("7")).await.unwrap();
    assert!(!without.headers().contains_key(TOKEN_HEADER));
    let by_hand = sent(request("7", "5")).await.unwrap();
    assert_eq!(by_hand.headers()[TOKEN_HEADER], "5");
}

#[tokio::test]
async fn a_lock_that_is_lost_or_shared_sends_nothing() {
    let store = Store::new();
    let locks = store.client().unwrap();
    let catalog = locks.rwlock("catalog");
    let reader = catalog.read().acquire().await.unwrap();
    let permit = locks.semaphore("pool", 1).permits(1);
    let permit = permit.acquire().await.unwrap();
    let released = locks.mutex("b").acquire().await.unwrap();
    let after = released.held();
    released.release().await.unwrap();
    let lost = locks.mutex("c").acquire().await.unwrap();

    let mut cases = vec![
        (reader.held(), ErrorKind::Config),
        (permit.held(), ErrorKind::Config),
        (after, ErrorKind::Lost(LostReason::Released)),
    ];
    for (held, expected) in cases.drain(..) {
        let mut request = bare("7");
        request.extensions_mut().insert(held);
        assert_eq!(kind(sent(request).await), expected);
    }
    store.freeze();
    store.clock().advance(Duration::from_secs(10));
    let mut request = bare("7");
    request.extensions_mut().insert(lost.held());
    let expected = ErrorKind::Lost(LostReason::Expired);
    assert_eq!(kind(sent(request).await), expected);
}
