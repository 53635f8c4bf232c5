//! A service that was made ready for a request, and what becomes of that while the request waits.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::pin;
use std::task::Poll;

use lockcore::Wait;
use tokio::time::timeout;
use tower_service::Service;

/// A service that was made ready. What that has reserved, as the permit of a limit, is kept only as
/// long as nothing has to be waited for: requests that wait for one key must not use up what those for
/// others need.
pub(crate) struct Reserved<S> {
    service: S,
    is_ready: bool,
}

/// The service was not ready in time for this request.
pub(crate) struct NotReady<Q>(pub(crate) Q);

impl<S: Clone> Reserved<S> {
    /// The service that was made ready: it goes along with its request. What is left is a clone, which may
    /// not be ready.
    pub(crate) fn take(ready: &mut S) -> Self {
        let clone = ready.clone();
        Self {
            service: mem::replace(ready, clone),
            is_ready: true,
        }
    }

    /// Gives back what readiness has reserved for a request that is answered without the service.
    pub(crate) fn give_back(ready: &mut S) {
        drop(Self::take(ready));
    }

    /// Waits for something, and if that takes any time gives back what is reserved.
    pub(crate) async fn until<T>(&mut self, event: impl Future<Output = T>) -> T {
        let mut event = pin!(event);
        match poll_fn(|cx| Poll::Ready(event.as_mut().poll(cx))).await {
            Poll::Ready(value) => return value,
            // A clone has reserved nothing, and the one that had is dropped.
            Poll::Pending => self.service = self.service.clone(),
        }
        self.is_ready = false;
        event.await
    }

    /// Asks again for what was given back.
    pub(crate) async fn ready<Q>(&mut self) -> Result<(), S::Error>
    where
        S: Service<Q>,
    {
        if !self.is_ready {
            poll_fn(|cx| self.service.poll_ready(cx)).await?;
            self.is_ready = true;
        }
        Ok(())
    }

    pub(crate) async fn call<Q>(mut self, request: Q) -> Result<S::Response, S::Error>
    where
        S: Service<Q>,
    {
        self.ready().await?;
        let answer = self.service.call(request);
        // Whatever it still holds is let go before the lock is.
        drop(self);
        answer.await
    }

    /// The same, unless it has to be waited longer for the service than `wait`: then the request comes back. What
    /// keeps the service busy may be waiting for the lock.
    pub(crate) async fn call_within<Q>(
        mut self,
        wait: Wait,
        request: Q,
    ) -> Result<Result<S::Response, NotReady<Q>>, S::Error>
    where
        S: Service<Q>,
    {
        if !self.is_ready
            && let Wait::For(wait) = wait
        {
            match timeout(wait, self.ready()).await {
                Ok(ready) => ready?,
                Err(_) => return Ok(Err(NotReady(request))),
            }
        }
        self.call(request).await.map(Ok)
    }
}
