//! The store under test.

use std::sync::Arc;

use crate::backend::Backend;
use crate::builder::Builder;
use crate::error::Error;
use crate::locks::Locks;

/// The store that the facts are checked on. A function that opens the store is one.
pub trait Subject: Send + Sync + 'static {
    /// The store, as another process would open it: each call opens it again. A store that is in one process only
    /// returns the same store.
    fn backend(&self) -> Arc<dyn Backend>;

    /// A client of the store. The default puts [`backend`](Self::backend) into the builder.
    ///
    /// # Errors
    ///
    /// Those of [`Builder::build`].
    fn client(&self, builder: Builder) -> Result<Locks, Error> {
        builder.backend(self.backend()).build()
    }
}

impl<F: Fn() -> Arc<dyn Backend> + Send + Sync + 'static> Subject for F {
    fn backend(&self) -> Arc<dyn Backend> {
        self()
    }
}
