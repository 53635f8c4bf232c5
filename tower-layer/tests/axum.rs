//! Tests of the layer in axum, over real connections.
#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml lets tests unwrap, but not their helpers"
)]

mod common;

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::Path;
use axum::http::{Method, Request, Response, StatusCode};
use axum::routing::{any, get};
use bytes::Bytes;
use common::{SOON, Witness, hold, in_time, lose, memory, nothing_is_left, problem, tickets};
use futures_util::stream;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use lockcore::Locks;
use lockcore_tower::{HeldLock, HeldLocks, Key, LockLayer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tower::ServiceExt;

const NAME: &str = "order:42";

fn by_id(locks: &Locks) -> LockLayer {
    LockLayer::new(locks.clone(), Key::path("id").prefix("order:"))
}

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async { axum::serve(listener, app).await });
    address
}

/// One connection that is kept alive. It closes when this value is dropped.
async fn connect(address: SocketAddr) -> SendRequest<Empty<Bytes>> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (client, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    client
}

fn request(method: Method, path: &str) -> Request<Empty<Bytes>> {
    Request::builder()
        .method(method)
        .uri(path)
        .body(Empty::new())
        .unwrap()
}

/// Sends one request to the router, without a connection.
async fn ask(app: Router, path: &str) -> Response<Body> {
    in_time(app.oneshot(Request::get(path).body(Body::empty()).unwrap()))
        .await
        .unwrap()
}

fn chunks() -> impl stream::Stream<Item = Result<&'static str, Infallible>> {
    stream::iter(["a", "b", "c"].map(Ok))
}

/// If a client reads to the end of a response and sends its next request at once, it must find the
/// key free. On the wire there are several ways to end a response.
#[tokio::test(flavor = "multi_thread")]
async fn the_key_is_free_for_the_next_request_on_the_same_connection() {
    let locks = memory();
    let app = Router::new()
        .route("/full/{id}", get(async || "abc"))
        .route("/empty/{id}", get(async || ()))
        .route("/nothing/{id}", get(async || StatusCode::NO_CONTENT))
        .route("/chunked/{id}", get(async || Body::from_stream(chunks())))
        .route(
            "/declared/{id}",
            get(async || ([("content-length", "3")], Body::from_stream(chunks()))),
        )
        .route(
            "/zero/{id}",
            get(async || {
                let no_chunks = stream::iter(Vec::<Result<&str, Infallible>>::new());
                ([("content-length", "0")], Body::from_stream(no_chunks))
            }),
        )
        .route_layer(by_id(&locks).try_only());
    let mut client = connect(serve(app).await).await;

    let cases = [
        (Method::GET, "/full/42", "abc"),
        (Method::HEAD, "/full/42", ""),
        (Method::GET, "/empty/42", ""),
        (Method::GET, "/nothing/42", ""),
        (Method::GET, "/chunked/42", "abc"),
        (Method::HEAD, "/chunked/42", ""),
        (Method::GET, "/declared/42", "abc"),
        (Method::HEAD, "/declared/42", ""),
        (Method::GET, "/zero/42", ""),
    ];
    for (method, path, expected) in cases {
        for round in 0..200 {
            in_time(client.ready()).await.unwrap();
            let response = in_time(client.send_request(request(method.clone(), path)))
                .await
                .unwrap();
            assert!(
                response.status().is_success(),
                "{method} {path}, {round}: {}",
                response.status()
            );
            if method == Method::HEAD && !path.starts_with("/chunked") {
                assert_eq!(response.headers()["content-length"], "3", "{path}");
            }
            let body = in_time(response.into_body().collect())
                .await
                .unwrap()
                .to_bytes();
            assert_eq!(body, expected, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn the_path_parameter_names_the_lock_as_the_handler_sees_it() {
    let locks = memory();
    let _other = hold(&locks, "order:4 2").await;
    let app = Router::new()
        .route("/orders/{id}", get(async |Path(id): Path<String>| id))
        .route_layer(by_id(&locks).try_only());

    let taken = ask(app.clone(), "/orders/4%202").await;
    let free = ask(app, "/orders/42").await;

    assert_eq!(taken.status(), StatusCode::CONFLICT);
    assert_eq!(problem(taken).await["key"], "order:4 2");
    assert_eq!(free.status(), StatusCode::OK);
}

#[tokio::test]
async fn one_parameter_of_several_names_the_lock() {
    let locks = memory();
    let _other = hold(&locks, "shop:1").await;
    let app = |parameter| {
        let key = Key::path(parameter).prefix("shop:");
        Router::new()
            .route("/shops/{shop}/orders/{id}", get(async || "done"))
            .route_layer(LockLayer::new(locks.clone(), key).try_only())
    };

    assert_eq!(
        ask(app("shop"), "/shops/1/orders/2").await.status(),
        StatusCode::CONFLICT
    );
    assert_eq!(
        ask(app("id"), "/shops/1/orders/2").await.status(),
        StatusCode::OK
    );
}

#[tokio::test]
async fn every_place_that_axum_has_for_a_layer_knows_the_parameter() {
    let locks = memory();
    let _other = hold(&locks, NAME).await;
    let layer = by_id(&locks).try_only();
    let route = || Router::new().route("/orders/{id}", get(async || "done"));

    let apps = [
        route().route_layer(layer.clone()),
        route().layer(layer.clone()),
        Router::new().route("/orders/{id}", get(async || "done").layer(layer.clone())),
        Router::new().route(
            "/orders/{id}",
            get(async || "done").route_layer(layer.clone()),
        ),
        Router::new().nest(
            "/orders/{id}",
            Router::new()
                .route("/", get(async || "done"))
                .route_layer(layer.clone()),
        ),
        Router::new()
            .nest(
                "/orders",
                Router::new().route("/{id}", get(async || "done")),
            )
            .route_layer(layer),
    ];
    for (place, app) in apps.into_iter().enumerate() {
        assert_eq!(
            ask(app, "/orders/42").await.status(),
            StatusCode::CONFLICT,
            "{place}"
        );
    }
}

#[tokio::test]
async fn the_route_names_the_lock_in_every_place_that_axum_has_for_a_layer() {
    let layer = LockLayer::new(memory(), Key::matched_path());
    let name = async |held: HeldLock| held.name().to_owned();
    let route = || Router::new().route("/orders/{id}", get(name));

    let apps = [
        route().route_layer(layer.clone()),
        route().layer(layer.clone()),
        Router::new().route("/orders/{id}", get(name).layer(layer.clone())),
        Router::new().nest(
            "/orders",
            Router::new().route("/{id}", get(name)).layer(layer.clone()),
        ),
        Router::new()
            .nest("/orders", Router::new().route("/{id}", get(name)))
            .route_layer(layer),
    ];
    for (place, app) in apps.into_iter().enumerate() {
        let response = ask(app, "/orders/42").await;
        let name = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(name, "/orders/{id}", "{place}");
    }
}

/// Only routes with a handler are locked here. A method without a handler is refused without a
/// lock.
#[tokio::test]
async fn a_method_without_a_handler_is_refused_without_a_lock() {
    let locks = memory();
    let _other = hold(&locks, NAME).await;
    let layer = by_id(&locks).try_only();
    let by_method = Router::new().route(
        "/orders/{id}",
        axum::routing::post(async || "done").route_layer(layer.clone()),
    );
    let by_route = Router::new()
        .route("/orders/{id}", axum::routing::post(async || "done"))
        .route_layer(layer);
    let ask = async |app: &Router, method: Method| {
        let request = request(method, "/orders/42").map(Body::new);
        in_time(app.clone().oneshot(request))
            .await
            .unwrap()
            .status()
    };

    assert_eq!(ask(&by_method, Method::POST).await, StatusCode::CONFLICT);
    for method in [Method::GET, Method::OPTIONS, Method::DELETE] {
        let status = ask(&by_method, method).await;
        assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
    }
    // The router's own layer does not know which methods have a handler.
    for method in [Method::GET, Method::OPTIONS] {
        assert_eq!(ask(&by_route, method).await, StatusCode::CONFLICT);
    }
}

/// A nested service is not a route of the outer router.
#[tokio::test]
async fn in_a_nested_service_the_parameters_are_known_and_the_route_is_not() {
    let locks = memory();
    let _other = hold(&locks, NAME).await;
    let by_route = LockLayer::new(locks.clone(), Key::matched_path());
    let service = |layer: LockLayer| {
        let inner = tower::service_fn(async |_: Request<Body>| {
            Ok::<_, Infallible>(Response::new(Body::empty()))
        });
        Router::new().nest_service("/orders/{id}", tower::Layer::layer(&layer, inner))
    };

    let parameter = ask(service(by_id(&locks).try_only()), "/orders/42/items").await;
    let route = ask(service(by_route), "/orders/42/items").await;

    assert_eq!(parameter.status(), StatusCode::CONFLICT);
    assert_eq!(route.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert!(
        problem(route).await["detail"]
            .as_str()
            .unwrap()
            .contains("no route")
    );
}

#[tokio::test]
async fn the_last_of_two_parameters_with_one_name_names_the_lock() {
    type Parameters = Path<std::collections::HashMap<String, String>>;
    let inner = Router::new()
        .route(
            "/{id}",
            get(async |held: HeldLock, parameters: Parameters| {
                format!("{} {}", held.name(), parameters["id"])
            }),
        )
        .route_layer(by_id(&memory()));
    let app = Router::new().nest_service("/{id}", inner);

    let response = ask(app, "/7/42").await;

    let body = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(body, "order:42 42");
}

/// Here the layer runs before the router has matched a route.
#[tokio::test]
async fn around_a_whole_router_neither_parameter_nor_route_is_known() {
    let locks = memory();
    for key in [Key::path("id"), Key::matched_path()] {
        let layer = LockLayer::new(locks.clone(), key);
        let app = Router::new().route("/orders/{id}", get(async || "done"));
        let app = tower::Layer::layer(&layer, app);

        let request = Request::get("/orders/42").body(Body::empty()).unwrap();
        let response = in_time(app.oneshot(request)).await.unwrap();

        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
}

#[tokio::test]
async fn a_template_joins_path_and_query() {
    let locks = memory();
    let key = Key::template("{matched_path}#{path.id}#{query.region}");
    let app = Router::new()
        .route(
            "/orders/{id}",
            get(async |held: HeldLock| held.name().to_owned()),
        )
        .route_layer(LockLayer::new(locks, key));

    let named = ask(app.clone(), "/orders/4%232?region=eu").await;
    let refused = ask(app, "/orders/42").await;

    let name = named.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(name, "/orders/{id}#4%232#eu");
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_route_without_the_parameter_is_refused_unless_the_key_is_optional() {
    let locks = memory();
    let route = || {
        Router::new().route(
            "/orders",
            get(async |held: Option<HeldLock>| held.is_none().to_string()),
        )
    };

    let refused = ask(route().route_layer(by_id(&locks)), "/orders").await;
    let fallback = ask(route().layer(by_id(&locks)), "/nowhere").await;
    let optional = LockLayer::new(locks, Key::path("id").optional());
    let passed = ask(route().route_layer(optional), "/orders").await;

    assert_eq!(refused.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert!(
        problem(refused).await["detail"]
            .as_str()
            .unwrap()
            .contains("\"id\"")
    );
    assert_eq!(fallback.status(), StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(
        passed.into_body().collect().await.unwrap().to_bytes(),
        "true"
    );
}

#[tokio::test]
async fn a_parameter_that_cannot_be_a_name_is_answered_with_400() {
    let app = Router::new()
        .route("/orders/{id}", get(async || "done"))
        .route_layer(by_id(&memory()));
    let long = format!("/orders/{}", "x".repeat(5_000));

    for path in ["/orders/%ff", &long] {
        assert_eq!(
            ask(app.clone(), path).await.status(),
            StatusCode::BAD_REQUEST,
            "{path}"
        );
    }
}

#[tokio::test]
async fn the_extractor_gives_the_lock_to_the_handler() {
    let locks = memory();
    let app = Router::new()
        .route(
            "/orders/{id}",
            get(async |held: HeldLock| format!("{} {}", held.name(), held.grant_id())),
        )
        .route_layer(by_id(&locks));

    let body = ask(app, "/orders/42")
        .await
        .into_body()
        .collect()
        .await
        .unwrap()
        .to_bytes();

    let (name, token) = str::from_utf8(&body).unwrap().split_once(' ').unwrap();
    assert_eq!(name, NAME);
    assert_ne!(token.parse::<u64>().unwrap(), 0);
}

#[tokio::test]
async fn the_extractor_gives_several_locks_to_the_handler() {
    let locks = memory();
    let accounts = ["from", "to"].map(|id| Key::path_as::<u64>(id).prefix("account:"));
    let app = Router::new()
        .route(
            "/transfers/{from}/{to}",
            get(async |held: HeldLocks, unlocked: Option<HeldLock>| {
                assert!(unlocked.is_none() && held.is_valid());
                let names = held.iter().map(|lock| lock.name().to_owned());
                names.collect::<Vec<_>>().join(" ")
            }),
        )
        .route_layer(LockLayer::all(locks.clone(), accounts));
    let _other = hold(&locks, "account:8").await;

    let response = ask(app.clone(), "/transfers/07/3").await;
    let names = response.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(names, "account:3 account:7");
    for name in ["account:3", "account:7"] {
        assert_eq!(tickets(&locks, name).await, 0);
    }

    let too_long = Request::get("/transfers/3/8").body(Body::empty()).unwrap();
    let mut refused = tokio::spawn(app.oneshot(too_long));
    common::until_tickets(&locks, "account:8", 2).await;
    assert_eq!(tickets(&locks, "account:3").await, 1);
    refused.abort();
    assert!((&mut refused).await.unwrap_err().is_cancelled());
    nothing_is_left(&locks, "account:3").await;
}

#[tokio::test]
async fn the_extractor_of_several_locks_under_a_layer_of_one_is_answered_with_500() {
    let several = async |held: Option<HeldLocks>, _: HeldLocks| drop(held);
    let one = async |_: HeldLock| ();
    let both = [
        Router::new().route("/{id}", get(several).route_layer(by_id(&memory()))),
        Router::new().route(
            "/{id}",
            get(one).route_layer(LockLayer::all(memory(), [Key::path("id")])),
        ),
    ];

    for app in both {
        let response = ask(app, "/42").await;
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let text = response.into_body().collect().await.unwrap().to_bytes();
        assert!(str::from_utf8(&text).unwrap().contains("HeldLocks"));
    }
}

#[tokio::test]
async fn the_extractor_without_a_layer_is_answered_with_500_that_says_so() {
    let app = Router::new().route("/", get(async |_: HeldLock| ()));

    let response = ask(app, "/").await;

    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let text = response.into_body().collect().await.unwrap().to_bytes();
    assert!(str::from_utf8(&text).unwrap().contains("LockLayer"));
}

#[tokio::test]
async fn a_connection_that_closes_while_the_handler_runs_leaves_nothing_behind() {
    let locks = memory();
    let entered = Arc::new(Notify::new());
    let witness = Witness::of(&locks, NAME);
    let app = Router::new()
        .route(
            "/orders/{id}",
            any({
                let (entered, witness) = (Arc::clone(&entered), witness.clone());
                async move || {
                    let _inside = witness.inside();
                    entered.notify_one();
                    pending::<()>().await;
                }
            }),
        )
        .route_layer(by_id(&locks));
    let mut client = connect(serve(app).await).await;

    let response = tokio::spawn(async move {
        client
            .send_request(request(Method::POST, "/orders/42"))
            .await
            .map(drop)
    });
    in_time(entered.notified()).await;
    response.abort();

    nothing_is_left(&locks, NAME).await;
    assert!(
        witness.saw_tickets() >= Some(1),
        "the handler goes before the lock"
    );
}

#[tokio::test]
async fn a_connection_that_closes_while_streaming_leaves_nothing_behind() {
    let locks = memory();
    let app = Router::new()
        .route(
            "/orders/{id}",
            get(async || {
                let endless = stream::unfold((), async |()| {
                    tokio::task::yield_now().await;
                    Some((Ok::<_, Infallible>(Bytes::from_static(&[0; 1024])), ()))
                });
                Body::from_stream(endless)
            }),
        )
        .route_layer(by_id(&locks));
    let mut client = connect(serve(app).await).await;

    let response = in_time(client.send_request(request(Method::GET, "/orders/42")))
        .await
        .unwrap();
    let mut body = response.into_body();
    assert!(in_time(body.frame()).await.unwrap().is_ok());
    assert_eq!(tickets(&locks, NAME).await, 1);
    drop((body, client));

    nothing_is_left(&locks, NAME).await;
}

#[tokio::test]
async fn a_lock_that_is_lost_while_streaming_breaks_the_response_off() {
    let locks = memory();
    let app = Router::new()
        .route(
            "/orders/{id}",
            get(async || {
                let parts = stream::unfold(true, async |first| {
                    if !first {
                        pending::<()>().await;
                    }
                    Some((Ok::<_, Infallible>("part"), false))
                });
                Body::from_stream(parts)
            }),
        )
        .route_layer(by_id(&locks));
    let mut client = connect(serve(app).await).await;

    let mut body = in_time(client.send_request(request(Method::GET, "/orders/42")))
        .await
        .unwrap()
        .into_body();
    assert!(in_time(body.frame()).await.unwrap().is_ok());
    lose(&locks).await;

    assert!(
        in_time(body.frame()).await.unwrap().is_err(),
        "not the end of the chunks"
    );
}

#[tokio::test]
async fn a_handler_that_panics_releases() {
    let locks = memory();
    let app = Router::new()
        .route(
            "/orders/{id}",
            get(async || {
                if true {
                    panic!("on purpose")
                }
            }),
        )
        .route_layer(by_id(&locks));
    let mut client = connect(serve(app).await).await;

    assert!(
        in_time(client.send_request(request(Method::GET, "/orders/42")))
            .await
            .is_err()
    );

    nothing_is_left(&locks, NAME).await;
}

#[tokio::test]
async fn a_second_request_waits_for_the_first() {
    let locks = memory();
    let (entered, leave) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let app = Router::new()
        .route(
            "/orders/{id}",
            get({
                let (entered, leave) = (Arc::clone(&entered), Arc::clone(&leave));
                async move || {
                    entered.notify_one();
                    leave.notified().await;
                }
            }),
        )
        .route_layer(by_id(&locks).wait(SOON));

    let first = tokio::spawn(ask(app.clone(), "/orders/42"));
    in_time(entered.notified()).await;
    let second = tokio::spawn(ask(app, "/orders/42"));
    common::until_tickets(&locks, NAME, 2).await;
    leave.notify_one();
    assert_eq!(in_time(first).await.unwrap().status(), StatusCode::OK);
    in_time(entered.notified()).await;
    leave.notify_one();

    assert_eq!(in_time(second).await.unwrap().status(), StatusCode::OK);
}
