//! Fencing between services: the layer of the one that is written to. What it remembers is in
//! `seen`, which requests pass in `gate`; the layer of the one that writes is in `token`.

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

/// As many resources as fit into some 20 MB, if their names are as long as names of locks usually are.
const MOST: usize = 100_000;
/// Much longer than a process is stopped without somebody's noticing.
const AT_LEAST: Duration = Duration::from_secs(3600);

/// Refuses requests that come late: those whose fencing token is lower than the highest that was
/// seen for the same resource. For the service that is *written to* by who holds a lock; the writer
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
/// The handler finds the token in the extensions, as `lockcore::WriteToken` (in axum:
/// `Extension<WriteToken>`).
///
/// | the request's token | HTTP | gRPC |
/// |---|---|---|
/// | is the highest seen, or equal | goes on to the handler | |
/// | is lower | [412](crate#write-refused) | FAILED_PRECONDITION |
/// | is missing, there twice, or not a token | [400](crate#fencing-token) | INVALID_ARGUMENT |
/// | no room to remember another resource | [503](crate#fence-full) | UNAVAILABLE |
///
/// 412 and not 409, which [`LockLayer`](crate::LockLayer) answers when another *holds* the lock: that
/// is worth trying again, and this is not. The token is a condition that the client has set, and it
/// will never be true again; the lock has gone to somebody else.
///
/// # What it closes, and what not
///
/// Comparing is not enough: a request may pass, stand still in its handler, and write after a later
/// one has. So requests of different tokens for one resource do not overlap: one with a higher token
/// shuts out those with lower ones at once, and waits until those that have begun have *answered*.
/// Requests of the same token run side by side, as their sender wants. A handler that never ends
/// keeps the next holder out as long as the next holder's client waits; put a timeout inside.
///
/// A request that waits gives back what the inner service has reserved for it, such as the permit of a
/// `ConcurrencyLimit`, and asks for it again when the requests with lower tokens have ended: so requests that wait for one
/// resource do not keep out those for others. Until it has that again, it keeps out the next holder.
///
/// That closes the gap for what the handler itself awaits, in this process, as long as it runs. It
/// does not for
///
/// - **several processes** of the service, each of which has seen something else;
/// - **a restart**, which forgets everything;
/// - what a handler has *spawned*, what it does while its response body is sent, and what is on its
///   way to a database when the handler is dropped because its client went away.
///
/// Where the data is can do better: in the handler, write with the token
/// ([`lockcore::fencing`]). This layer before it saves the work of requests that are known to be
/// late, and is all there is for a resource that cannot compare: a device, a file, somebody else's
/// service.
///
/// The header is believed: whoever may call the service may send the largest token there is, and shut
/// out everybody else. Put the layer behind authentication.
///
/// Clones, and all services that are made by them, share one memory.
#[derive(Clone, Debug)]
#[must_use = "a layer does nothing until it is added to a service"]
pub struct FenceLayer(Gate);

impl FenceLayer {
    /// Fences, for each request, the resource that `key` finds in it. A request for which the key
    /// finds nothing and that it lets pass is not checked.
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

    /// Lets a request without a token pass **unchecked**, beside all others: for reads, or until all
    /// callers send one. A token that is not one is refused all the same. Default: 400.
    pub fn optional(mut self) -> Self {
        self.0.optional = true;
        self
    }

    /// How many resources are remembered, and how long at least after the last request for one.
    /// Default: 100,000, an hour; that is good for 27 new resources a second.
    ///
    /// What is forgotten lets a late write in. So nothing is forgotten as long as there is room, and
    /// nothing ever before its time: when all that is remembered is younger, requests for *other*
    /// resources are answered with 503. Let the time be longer than a writer can be stopped and come
    /// back, and the number larger than that of the resources that are written to in that time. Each
    /// takes some 200 bytes and its name, of up to 4,096 bytes where callers choose it.
    ///
    /// Forgets what was remembered before the call.
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
