//! How a request reaches a node of a cluster.

use std::sync::{Arc, OnceLock};

use redis::{ErrorKind, RedisError, ServerErrorKind};

/// How a request reached a node, and to which other node its answer redirects.
#[derive(Clone, Debug, Default)]
pub(super) struct Hop {
    /// The address of the node.
    pub(super) node: Arc<str>,
    /// Whether the request is sent with `ASKING`, to a node that does not serve the slot yet.
    pub(super) asking: bool,
    pub(super) redirect: Arc<OnceLock<Redirect>>,
}

#[derive(Debug)]
pub(super) struct Redirect {
    /// Whether the redirect is an `ASK`, which is for this request only.
    pub(super) asking: bool,
    /// The address, as the node has written it.
    pub(super) to: String,
}

impl Hop {
    /// Remembers the redirect, if a node has answered with this error.
    pub(super) fn note(&self, error: &RedisError) {
        if let Some((to, _)) = error.redirect_node() {
            let asking = error.kind() == ErrorKind::Server(ServerErrorKind::Ask);
            let to = to.to_owned();
            let _ = self.redirect.set(Redirect { asking, to }); // a request has one answer
        }
    }

    pub(super) fn redirect(&self) -> Option<&Redirect> {
        self.redirect.get()
    }
}
