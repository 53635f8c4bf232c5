//! The layer of an HTTP client whose requests write under a lock: it sends the lock's fencing token
//! with each request.

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{HeaderValue, Request};
use lockcore::multi::MultiHeld;
use lockcore::{FencingToken, Held};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use crate::frame::BoxError;
use crate::header::TOKEN_HEADER;

/// Sends the fencing token of a lock with a request, as the header (in gRPC: the metadata)
/// `lock-fencing-token`. It is for clients that are tower services of [`http::Request`]: those of
/// hyper-util, and tonic's channels. [`FenceLayer`](crate::FenceLayer) is its counterpart.
///
/// The extensions of the request say which lock it belongs to: put a [`lockcore::Held`] there. (In
/// tonic: `tonic::Request::extensions_mut`.) A handler under [several locks](crate::LockLayer::all)
/// gets the `Held` of each name from [`MultiHeld::get`](lockcore::multi::MultiHeld::get).
///
/// | the extensions have | the request |
/// |---|---|
/// | an exclusive lock that is held | is sent with its token, which replaces the header if there is one |
/// | a lock that is lost | fails with `Lost`, and is not sent |
/// | the read side of a lock, or a semaphore | fails with `Config`, and is not sent |
/// | several locks, and no single one | fails, and is not sent |
/// | no lock | is sent unchanged; if it has the header, the header stays |
///
/// The failures of a single lock are a [`lockcore::Error`]. A lock may be lost after the request
/// was sent and before it arrives. For this case the receiver compares the token.
///
/// A service that forwards requests from outside must remove the header first. Otherwise a stranger
/// could send the largest possible token, and the fence would refuse all other requests.
///
/// ```
/// use http::Request;
/// use lockcore_tower::TokenLayer;
/// use tower::{Layer, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// # let http_client = service_fn(async |request: Request<()>| Ok::<_, std::io::Error>(request));
/// let client = TokenLayer::new().layer(http_client);
///
/// let locks = lockcore::Locks::connect("memory:")?;
/// let guard = locks.mutex("account:7").acquire().await?;
/// let request = Request::post("http://accounts/7/book")
///     .extension(guard.held())
///     .body(())?;
/// # let sent =
/// client.oneshot(request).await?;
/// # assert_eq!(sent.headers()["lock-fencing-token"], guard.fencing_token()?.to_string().as_str());
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[must_use = "a layer does nothing until it is added to a service"]
#[non_exhaustive]
pub struct TokenLayer;

impl TokenLayer {
    /// A layer; it has no options.
    pub fn new() -> Self {
        Self
    }
}

impl<S> Layer<S> for TokenLayer {
    type Service = TokenService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        TokenService { inner }
    }
}

/// A client that adds tokens to its requests. Made by [`TokenLayer`].
#[derive(Clone, Debug)]
pub struct TokenService<S> {
    inner: S,
}

impl<S, B> Service<Request<B>> for TokenService<S>
where
    S: Service<Request<B>>,
    S::Error: Into<BoxError>,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = TokenFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let way = match request.extensions().get().map(token_of) {
            Some(Err(error)) => Way::Refused { error: Some(error) },
            Some(Ok(token)) => {
                // The value contains only decimal digits.
                if let Ok(value) = HeaderValue::try_from(token.to_string()) {
                    request.headers_mut().insert(TOKEN_HEADER, value);
                }
                Way::Sent {
                    inner: self.inner.call(request),
                }
            }
            // With several locks it is not clear which token to send. Without a token, a fence
            // could let a late write pass.
            None if request.extensions().get::<MultiHeld>().is_some() => Way::Refused {
                error: Some(
                    "the request is under several locks: put the Held of the one whose resource it writes to into its \
                     extensions, by MultiHeld::get"
                        .into(),
                ),
            },
            None => Way::Sent {
                inner: self.inner.call(request),
            },
        };
        TokenFuture { way }
    }
}

/// The fencing token of a lock that is held and exclusive.
fn token_of(held: &Held) -> Result<FencingToken, BoxError> {
    let token = held.fencing_token()?;
    // With a time of zero, `ensure` is ready on the first poll.
    let held_now = pin!(held.ensure(Duration::ZERO));
    match held_now.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(held) => held.map(|()| token).map_err(Into::into),
        Poll::Pending => Err("it cannot be said at once whether the lock is held".into()),
    }
}

pin_project! {
    /// The future of a [`TokenService`].
    ///
    /// # Cancel safety
    /// As the inner service's future.
    #[must_use = "futures do nothing unless polled"]
    pub struct TokenFuture<F> {
        #[pin]
        way: Way<F>,
    }
}

pin_project! {
    #[project = WayProj]
    enum Way<F> {
        Sent { #[pin] inner: F },
        Refused { error: Option<BoxError> },
    }
}

impl<F, R, E> Future for TokenFuture<F>
where
    F: Future<Output = Result<R, E>>,
    E: Into<BoxError>,
{
    type Output = Result<R, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().way.project() {
            WayProj::Sent { inner } => inner.poll(cx).map_err(Into::into),
            WayProj::Refused { error } => match error.take() {
                Some(error) => Poll::Ready(Err(error)),
                // The future was polled after it had ended.
                None => Poll::Pending,
            },
        }
    }
}

impl<F> fmt::Debug for TokenFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenFuture").finish_non_exhaustive()
    }
}
