//! A service that is ready for a request, and the permit that readiness has reserved while the
//! request waits.

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::task::Poll;

use lockcore::Wait;
use tokio::time::timeout;
use tower_service::Service;

/// A service that is ready. Readiness may have reserved a permit, such as that of a limit. This
/// value keeps the permit only as long as the request does not have to wait. Otherwise requests
/// that wait for one key would use up the permits that requests for other keys need.
pub(crate) struct Reserved<S> {
    service: S,
    is_ready: bool,
}

/// The error that the service was not ready in time for this request.
pub(crate) struct NotReady<Q>(pub(crate) Q);

impl<S: Clone> Reserved<S> {
    /// Takes the ready service, for this request. A clone, which may not be ready, stays in its
    /// place.
    pub(crate) fn take(ready: &mut S) -> Self {
        let clone = ready.clone();
        Self {
            service: mem::replace(ready, clone),
            is_ready: true,
        }
    }

    /// Gives back what readiness has reserved. This is for a request that is answered without the
    /// service.
    pub(crate) fn give_back(ready: &mut S) {
        drop(Self::take(ready));
    }

    /// Waits for `event`. If the event is not ready at once, gives back what readiness has
    /// reserved.
    ///
    /// The event is borrowed. An `async fn` keeps its argument and the pinned copy of it, so its
    /// future has room for both.
    pub(crate) async fn until<T>(&mut self, mut event: Pin<&mut impl Future<Output = T>>) -> T {
        match poll_fn(|cx| Poll::Ready(event.as_mut().poll(cx))).await {
            Poll::Ready(value) => return value,
            // The clone has reserved nothing. The assignment drops the service that has reserved a
            // permit.
            Poll::Pending => self.service = self.service.clone(),
        }
        self.is_ready = false;
        event.await
    }

    /// Makes the service ready again, if its permit was given back.
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

    /// Calls the service after [`ready`](Self::ready). Drops what the service holds at once, so
    /// before the lock is released.
    pub(crate) fn call<Q>(mut self, request: Q) -> S::Future
    where
        S: Service<Q>,
    {
        debug_assert!(self.is_ready, "ready() comes first");
        self.service.call(request)
    }

    /// Makes the service ready, and calls it. Returns the request if the service is not ready after
    /// `wait`. The service may be busy with a request that waits for this lock. `calls` runs right
    /// before the call.
    pub(crate) async fn call_within<Q>(
        mut self,
        wait: Wait,
        request: Q,
        calls: impl FnOnce(),
    ) -> Result<Result<S::Response, NotReady<Q>>, S::Error>
    where
        S: Service<Q>,
    {
        match wait {
            _ if self.is_ready => {}
            Wait::For(wait) => match timeout(wait, self.ready()).await {
                Ok(ready) => ready?,
                Err(_) => return Ok(Err(NotReady(request))),
            },
            _ => self.ready().await?,
        }
        calls();
        self.call(request).await.map(Ok)
    }
}
