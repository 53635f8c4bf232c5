//! Clients send the same payment more than once. For each `Idempotency-Key`, one request runs at a
//! time.
//!
//! ```text
//! cargo run --release --example one_at_a_time_per_key                                # locks in a file
//! LOCK_URL=redis://127.0.0.1/ cargo run --release --example one_at_a_time_per_key
//! ```
//!
//! Two instances of the service share their locks in a store, as two processes would. If a client
//! gets no answer in time, it sends its payment again, perhaps to the other instance, while the
//! first request is being handled. With the layer, the second request waits for the first. Then the
//! second request finds in the books that the payment is done. The layer does not look into the
//! books: it only lets the requests run one after the other.

use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Request, StatusCode};
use axum::routing::{Router, post};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lockcore::Locks;
use lockcore_tower::{IdempotencyKey, Key, LockLayer};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

const KEY: &str = "idempotency-key";
/// How long the bank takes for a payment. It is long enough that all copies of a payment overlap.
const BANK: Duration = Duration::from_millis(60);

/// The books of both instances. In a real service this is a database.
#[derive(Debug, Default)]
struct Books {
    /// How often each key has been paid.
    paid: BTreeMap<String, u32>,
    /// How many requests with each key are being handled.
    at_it: BTreeMap<String, u32>,
    most_at_once: u32,
}

#[derive(Clone, Debug)]
struct Instance {
    number: usize,
    began: Instant,
    books: Arc<Mutex<Books>>,
}

impl Instance {
    fn books<T>(&self, code: impl FnOnce(&mut Books) -> T) -> T {
        code(&mut self.books.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn says(&self, key: &str, what: &str) {
        let at = self.began.elapsed().as_millis();
        println!("{at:>5} ms  instance {}  {key:<8}  {what}", self.number);
    }

    fn router(self, locks: Locks) -> Router {
        // `"abc"` and `abc` are one key, in the name of the lock and in the books. Clients choose the names, and a store remembers each name for a while. So the number of
        // names in an hour is limited.
        let key = Key::header_as::<IdempotencyKey>(KEY).prefix("payment:");
        let one_at_a_time = LockLayer::new(locks, key).max_names(10_000, Duration::from_secs(3600));
        Router::new()
            .route("/payments", post(pay))
            .route_layer(one_at_a_time)
            .with_state(self)
    }
}

/// Checks whether the payment is done, pays, and writes the payment into the books. No second
/// request for this key may come between these steps.
async fn pay(
    State(instance): State<Instance>,
    headers: HeaderMap,
) -> Result<&'static str, StatusCode> {
    // This reads the key as the layer does.
    let key = headers.get(KEY).and_then(|key| key.to_str().ok());
    let key = key.and_then(|key| key.parse::<IdempotencyKey>().ok());
    let Some(key) = key.map(|key| key.to_string()) else {
        return Err(StatusCode::BAD_REQUEST);
    };
    let done = instance.books(|books| {
        let at_it = books.at_it.entry(key.clone()).or_default();
        *at_it += 1;
        books.most_at_once = books.most_at_once.max(*at_it);
        books.paid.contains_key(&key)
    });
    let answer = if done {
        instance.says(&key, "paid already");
        "paid before"
    } else {
        instance.says(&key, "pays …");
        tokio::time::sleep(BANK).await;
        instance.says(&key, "      … paid");
        "paid"
    };
    instance.books(|books| {
        if !done {
            *books.paid.entry(key.clone()).or_default() += 1;
        }
        *books.at_it.entry(key).or_default() -= 1;
    });
    Ok(answer)
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error + Send + Sync>> {
    let folder = tempfile::tempdir()?;
    let client = || examples::locks_in(folder.path());
    let clients = [client()?, client()?];
    Ok(examples::tell(&clients, story(&clients)).await)
}

async fn story(clients: &[Locks]) -> Result<(), Box<dyn Error + Send + Sync>> {
    println!("three payments, each sent four times at once, to two instances of the service:\n");
    let books = Arc::new(Mutex::new(Books::default()));
    let mut servers = JoinSet::new();
    let mut addresses = Vec::new();
    for (number, locks) in clients.iter().enumerate() {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        addresses.push(listener.local_addr()?);
        let instance = Instance {
            number,
            began: Instant::now(),
            books: Arc::clone(&books),
        };
        let router = instance.router(locks.clone());
        servers.spawn(async move { axum::serve(listener, router).await });
    }

    let mut senders = JoinSet::new();
    for copy in 0..4 {
        for key in ["rent", "bread", "coffee"] {
            // The standard has quotation marks, and many clients leave them out.
            let key = match copy < 2 {
                true => format!("\"{key}\""),
                false => key.to_owned(),
            };
            senders.spawn(send(addresses[copy % addresses.len()], key));
        }
    }
    let mut answers = BTreeMap::<String, u32>::new();
    while let Some(answer) = senders.join_next().await {
        *answers.entry(answer??).or_default() += 1;
    }

    let books = books.lock().unwrap_or_else(PoisonError::into_inner);
    let (payments, most) = (books.paid.values().sum::<u32>(), books.most_at_once);
    println!("\nthe answers: {answers:?}");
    println!(
        "12 requests were handled, at most {most} at a time for a key; {payments} payments were made"
    );
    println!(
        "\nThe layer let each of them through, one after the other. That nobody paid twice is because"
    );
    println!("`pay` looks first: a lock keeps requests apart, it does not replay an answer.");
    let expected = BTreeMap::from([("paid".to_owned(), 3), ("paid before".to_owned(), 9)]);
    if (most, payments) != (1, 3) || answers != expected {
        return Err("somebody paid twice, or was not answered".into());
    }
    Ok(())
}

async fn send(server: SocketAddr, key: String) -> Result<String, Box<dyn Error + Send + Sync>> {
    let request = Request::post(format!("http://{server}/payments")).header(KEY, key);
    let client = Client::builder(TokioExecutor::new()).build_http();
    let response = client.request(request.body(Body::empty())?).await?;
    let status = response.status();
    let body = to_bytes(Body::new(response.into_body()), 64 * 1024).await?;
    let text = String::from_utf8_lossy(&body).into_owned();
    match status {
        StatusCode::OK => Ok(text),
        _ => Err(format!("{status}: {text}").into()),
    }
}
