//! Fencing between services: the layer of the service that is written to. `seen` remembers the tokens, `gate` decides
//! which requests pass. The layer of the service that writes is in `token`.

mod gate;
mod seen;
mod service;
mod token;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use tower_layer::Layer;

use crate::key::Key;
use crate::refusal::{Answers, Refusal};
use gate::Gate;
use seen::Seen;
pub use service::FenceService;
pub use token::{TokenFuture, TokenLayer, TokenService};

/// The number of resources that fit into about 20 MB, if their names have the usual length of lock names.
const MOST: usize = 100_000;
/// Much longer than a process is usually stopped before somebody notices.
const AT_LEAST: Duration = Duration::from_secs(3600);

/// Refuses requests that come late: those with a fencing token that is lower than the highest one
/// seen for the same resource. It is for the service that is *written to*; the service that holds the lock and writes
/// uses [`TokenLayer`].
///
/// ```
/// use lockcore_tower::{FenceLayer, Key};
///
/// // The resource is what is locked: the writer holds the lock of that name.
/// let fence = FenceLayer::new(Key::header_as::<u64>("account-id"));
/// # drop(fence);
/// ```
///
/// The handler finds the token in the extensions, as `lockcore::FencingToken` (in axum:
/// `Extension<FencingToken>`).
///
/// | the request's token | HTTP | gRPC |
/// |---|---|---|
/// | is the highest seen, or equal | goes on to the handler | |
/// | is lower | [412](crate#write-refused) | FAILED_PRECONDITION |
/// | is missing, there twice, or not a token | [400](crate#fencing-token) | INVALID_ARGUMENT |
/// | no room to remember another resource | [503](crate#fence-full) | UNAVAILABLE |
///
/// A late request gets 412, and not the 409 of a [`LockLayer`](crate::LockLayer) whose lock another request *holds*:
/// after a 409 the client may try again, but a late token never becomes the highest again. The lock has gone to another
/// holder.
///
/// # What it closes, and what not
///
/// To compare tokens is not enough: a request may pass, stop in its handler for a while, and write after a later
/// request has. So requests with different tokens for one resource do not overlap. A request with a higher token
/// shuts out lower ones at once, and waits until those that have begun have *answered*.
/// Requests with the same token run side by side. A handler that never ends
/// keeps the next holder out for as long as that one's client waits; put a timeout inside.
///
/// A request that waits gives back what the inner service has reserved for it, such as the permit of a
/// `ConcurrencyLimit`, and asks for it again when the requests with lower tokens have ended. So requests that wait for
/// one resource do not keep out requests for others. A request begins when it has its permit again. If a request with a
/// higher token has come by then, it is late.
///
/// This protects everything that the handler itself awaits, in this process, for as long as the process runs. It
/// does not protect against
///
/// - **several processes** of the service: each knows only the tokens that it has seen itself;
/// - **a restart**, which forgets all tokens;
/// - tasks that a handler has *spawned*, work that it does while its response body is sent, and writes that are on
///   their way to a database when the handler is dropped because its client went away.
///
/// A database that compares tokens protects against these too: write with the token in the handler
/// ([`lockcore::fencing`]). This layer then saves the work of requests that are known to be late. For a resource that
/// cannot compare tokens, such as a device, a file, or a service of another company, this layer is all there is.
///
/// The layer trusts the header: any caller can send the largest possible token, and so shut
/// out all others. Put the layer behind authentication.
///
/// Clones, and all services that are made by them, share one memory.
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is added to a service"]
pub struct FenceLayer(Gate);

impl FenceLayer {
    /// Fences, for each request, the resource that `key` finds in it. A request that the key lets pass is not checked.
    pub fn new(key: Key) -> Self {
        Self(Gate {
            key,
            optional: false,
            seen: Arc::new(Seen::new(MOST, AT_LEAST)),
            answers: Answers::default(),
        })
    }

    /// Makes the responses to HTTP requests that are [refused](crate#answers): see
    /// [`LockLayer::refuse_with`](crate::LockLayer::refuse_with).
    pub fn refuse_with<B: Into<Bytes>>(
        mut self,
        make: impl Fn(Refusal<'_>) -> Response<B> + Send + Sync + 'static,
    ) -> Self {
        self.0.answers.make_with(make);
        self
    }

    /// Lets a request without a token pass **unchecked**, and beside all others. This is for reads, and for the time
    /// until all callers send a token. A header that is not a token is still refused. Default: 400.
    pub fn optional(mut self) -> Self {
        self.0.optional = true;
        self
    }

    /// How many resources are remembered, and for how long at least after the last request for one.
    /// Default: 100,000 resources, an hour. That allows 27 new resources a second.
    ///
    /// A resource that is forgotten lets late writes in. So resources are only forgotten when there is no room for
    /// another, and never before this time is over: until then, requests for *new*
    /// resources are answered with 503. Choose a time that is longer than a writer can be paused, and a number that is
    /// larger than the number of resources that are written to in that time. Each
    /// takes some 200 bytes and its name, of up to 4,096 bytes where callers choose it.
    ///
    /// A call of this method forgets all resources that were remembered before.
    pub fn remember(mut self, resources: usize, at_least: Duration) -> Self {
        self.0.seen = Arc::new(Seen::new(resources, at_least));
        self
    }
}

impl<S> Layer<S> for FenceLayer {
    type Service = FenceService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        FenceService::new(inner, self.0.clone())
    }
}
