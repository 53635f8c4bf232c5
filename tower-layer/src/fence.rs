//! Fencing between services: the layer of the service that receives a write. `seen` remembers the
//! tokens, `gate` decides which requests pass. The layer of the service that sends the write is in
//! `token`.

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

/// The default number of resources. They fit into about 20 MB, if their names have the usual length
/// of lock names.
const MOST: usize = 100_000;
/// The default time for which a resource is remembered. It is much longer than a process is usually
/// stopped before somebody notices.
const AT_LEAST: Duration = Duration::from_secs(3600);

/// Refuses requests that come late: requests whose fencing token is lower than the highest token
/// seen for the same resource. It is for the service that *receives* the write. The service that
/// holds the lock and sends the write uses [`TokenLayer`].
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
/// | is the highest seen, or equal | is passed to the handler | |
/// | is lower | [412](crate#write-refused) | FAILED_PRECONDITION |
/// | is missing, there twice, or not a token | [400](crate#fencing-token) | INVALID_ARGUMENT |
/// | no room to remember another resource | [503](crate#fence-full) | UNAVAILABLE |
///
/// A late request gets 412, and not the 409 of a [`LockLayer`](crate::LockLayer) whose lock another
/// request *holds*. After a 409 the client may try again. But a late token never becomes the
/// highest again, because the lock has gone to another holder.
///
/// # What it closes, and what not
///
/// A comparison of tokens is not enough. A request may pass, stop in its handler for a while, and
/// write after a later request has written. So requests with different tokens for one resource do
/// not overlap:
///
/// - From the arrival of a request with a higher token, requests with lower tokens are refused.
/// - The request with the higher token waits until the requests with lower tokens that have begun
///   have *answered*.
/// - Requests with the same token run side by side.
///
/// If a handler never ends, the request of the next holder waits as long as its client allows. So
/// put a timeout inside this layer.
///
/// Before a request waits, it gives back what the inner service has reserved for it, such as the
/// permit of a `ConcurrencyLimit`. It reserves the permit again when the requests with lower tokens
/// have ended. So requests that wait for one resource do not block requests for other resources. A
/// request begins when it has its permit again. If a request with a higher token has come by then,
/// the waiting request is late.
///
/// The layer protects everything that the handler itself awaits, in this process, for as long as
/// the process runs. It does not protect against
///
/// - **several processes** of the service: each process knows only the tokens that it has seen
///   itself;
/// - **a restart**, which forgets all tokens;
/// - tasks that a handler has *spawned*, and work that it does while its response body is sent;
/// - writes that are in flight to a database when the handler is dropped because its client has
///   gone.
///
/// A database that compares tokens protects against these too: write with the token in the handler
/// ([`lockcore::fencing`]). With such a database, this layer only saves the work of requests that
/// are known to be late. If the resource cannot compare tokens, such as a device, a file, or a
/// service of another company, this layer is the only protection.
///
/// The layer trusts the header: any caller can send the largest possible token, and all other
/// requests are refused after that. Put the layer behind authentication.
///
/// Clones of the layer, and all services that they make, share the remembered tokens.
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is added to a service"]
pub struct FenceLayer(Gate);

impl FenceLayer {
    /// A layer that fences, for each request, the resource that `key` finds in the request. If the
    /// key lets a request pass, the layer does not check it.
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

    /// Lets a request without a token pass **unchecked**, at the same time as all others. Use this
    /// for reads, and for the time until all callers send a token. A header that is not a token is
    /// refused even so. Default: a request without a token gets 400.
    pub fn optional(mut self) -> Self {
        self.0.optional = true;
        self
    }

    /// How many resources are remembered, and for how long at least after the last request for a
    /// resource. Default: 100,000 resources, an hour. This allows 27 new resources per second.
    ///
    /// When a resource is forgotten, a late write to it passes. So a resource is forgotten only
    /// when the room is needed for another, and never before this time is over. If there is no
    /// room, requests for *new* resources get a 503. Choose a time that is longer than a writer can
    /// be paused. Choose a number that is larger than the number of resources that are written to
    /// in this time. Each resource takes about 200 bytes and its name, which has up to 4,096 bytes
    /// if callers choose it.
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
