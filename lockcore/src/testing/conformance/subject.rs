//! The store under test.

use std::sync::Arc;

use crate::backend::Backend;
use crate::builder::Builder;
use crate::error::Error;
use crate::locks::Locks;

/// The store that the facts are checked on. Every function that opens a store is a `Subject`.
pub trait Subject: Send + Sync + 'static {
    /// Opens the store, as another process would. Each call opens it again. A store that exists
    /// only inside one process returns the same store at each call.
    fn backend(&self) -> Arc<dyn Backend>;

    /// Makes a client of the store. The default puts [`backend`](Self::backend) into the builder.
    ///
    /// # Errors
    ///
    /// The errors of [`Builder::build`].
    fn client(&self, builder: Builder) -> Result<Locks, Error> {
        builder.backend(self.backend()).build()
    }
}

impl<F: Fn() -> Arc<dyn Backend> + Send + Sync + 'static> Subject for F {
    fn backend(&self) -> Arc<dyn Backend> {
        self()
    }
}
