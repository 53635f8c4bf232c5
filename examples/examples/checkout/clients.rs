//! The customers: each of them buys again and again until the shop is sold out, and tries again
//! after a refusal.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::http::{Request, Response, StatusCode, header};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio_util::sync::CancellationToken;

use crate::print;
use crate::shop::{self, BuyError, ITEM, Shop};
use crate::stock::Buyer;

/// The pause after a refusal that does not say when to try again.
const PAUSE: Duration = Duration::from_millis(500);
/// The longest pause of a client, even if a refusal asks for a longer one. With it, the example
/// does not seem to hang.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How a client buys its tickets.
#[derive(Clone, Debug)]
pub enum Way {
    /// Real requests to the shop's server, over connections that stay open.
    Http(Arc<Http>),
    /// Calls of the annotated function.
    Call(Arc<Shop>),
    /// Calls of the same function without the annotation.
    UnlockedCall(Arc<Shop>),
}

/// Why a purchase failed, and when it may be tried again.
#[derive(Debug)]
struct Refusal {
    why: String,
    retry_in: Duration,
}

/// Buys until everything is sold or the shop is `closing`.
pub async fn buy_until_sold_out(
    buyer: Buyer,
    way: Way,
    shop: Arc<Shop>,
    closing: CancellationToken,
) {
    loop {
        // A purchase is never dropped half-way: when the shop closes, the purchase is refused or
        // completed.
        let pause = match way.buy(buyer.client).await {
            Ok(Some(_ticket)) => time_to_think(),
            Ok(None) => return,
            Err(_) if closing.is_cancelled() => return,
            Err(refusal) => {
                print::refusal(buyer, &refusal.why);
                // The verdict shows the failures. An error of this write is ignored, because the
                // client cannot do anything about it.
                let _ = shop.stock.note_failure(&refusal.why);
                refusal.retry_in
            }
        };
        if closing
            .run_until_cancelled(tokio::time::sleep(pause))
            .await
            .is_none()
        {
            return;
        }
    }
}

/// A pause between two purchases. It is long enough that, without a lock, the shop sells most
/// tickets once or twice, and not once to each client.
fn time_to_think() -> Duration {
    Duration::from_millis(fastrand::u64(0..60))
}

impl Way {
    async fn buy(&self, client: u32) -> Result<Option<u32>, Refusal> {
        match self {
            Self::Http(http) => http.buy(client).await,
            Self::Call(shop) => Ok(shop::buy(shop, ITEM, client, Instant::now()).await?),
            Self::UnlockedCall(shop) => Ok(shop::buy_unlocked(shop, client).await?),
        }
    }
}

/// An HTTP client of the shop's server.
#[derive(Debug)]
pub struct Http {
    client: HttpClient<HttpConnector, Body>,
    server: SocketAddr,
}

impl Http {
    pub fn new(server: SocketAddr) -> Self {
        let client = HttpClient::builder(TokioExecutor::new()).build_http();
        Self { client, server }
    }

    async fn buy(&self, client: u32) -> Result<Option<u32>, Refusal> {
        let request = Request::post(format!("http://{}/buy/{ITEM}/{client}", self.server))
            .body(Body::empty())
            .map_err(Refusal::of)?;
        let response = self.client.request(request).await.map_err(Refusal::of)?;
        let status = response.status();
        let retry_in = retry_after(&response);
        let body = to_bytes(Body::new(response.into_body()), 64 * 1024)
            .await
            .map_err(Refusal::of)?;
        let body = String::from_utf8_lossy(&body);
        match status {
            StatusCode::OK => Ok(Some(body.parse().map_err(Refusal::of)?)),
            StatusCode::GONE => Ok(None),
            // 409: another request held the lock for too long. 503: the store of the locks cannot
            // be reached.
            _ => Err(Refusal {
                why: format!("{status}: {}", detail(&body)),
                retry_in,
            }),
        }
    }
}

fn retry_after<B>(response: &Response<B>) -> Duration {
    let seconds = response.headers().get(header::RETRY_AFTER);
    let seconds = seconds.and_then(|value| value.to_str().ok()?.parse().ok());
    seconds
        .map_or(PAUSE, Duration::from_secs)
        .min(LONGEST_PAUSE)
}

/// The `detail` of an `application/problem+json`; any other body as it is.
fn detail(body: &str) -> String {
    let problem: Option<serde_json::Value> = serde_json::from_str(body).ok();
    let detail = problem
        .as_ref()
        .and_then(|problem| problem.get("detail")?.as_str());
    detail.unwrap_or(body).to_owned()
}

impl Refusal {
    fn of(error: impl std::error::Error) -> Self {
        Self {
            why: error.to_string(),
            retry_in: PAUSE,
        }
    }
}

impl From<BuyError> for Refusal {
    fn from(error: BuyError) -> Self {
        let retry_after = match &error {
            BuyError::Lock(error) => error.retry_after(),
            BuyError::Stock(_) => None,
        };
        Self {
            why: error.to_string(),
            retry_in: retry_after.unwrap_or(PAUSE).min(LONGEST_PAUSE),
        }
    }
}
