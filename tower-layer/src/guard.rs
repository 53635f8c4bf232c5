//! One lock or several, as one thing: only this file tells them apart. The names of a request, the lock that
//! is asked for, the guard that it becomes, and the view of what is held.

use std::future::Future;
use std::slice;

use futures_util::future::Either;
use http::Extensions;
use lockcore::{Error, Guard, Held, Lock, MultiGuard, MultiHeld, MultiLock};

/// The names that one request locks.
#[derive(Debug)]
pub(crate) enum LockNames {
    One(String),
    /// At least one, none twice, in order.
    All(Vec<String>),
}

pub(crate) enum AnyLock {
    One(Lock),
    All(MultiLock),
}

/// Dropping it releases in the background, as with each of the two.
#[must_use = "the locks are released as soon as the guard is dropped"]
pub(crate) enum AnyGuard {
    One(Guard),
    All(MultiGuard),
}

#[derive(Clone)]
pub(crate) enum AnyHeld {
    One(Held),
    All(MultiHeld),
}

impl LockNames {
    /// Each name once. `None` if there are none, which means no lock.
    pub(crate) fn all(mut names: Vec<String>) -> Option<Self> {
        names.sort_unstable();
        names.dedup();
        (!names.is_empty()).then_some(Self::All(names))
    }

    pub(crate) fn as_slice(&self) -> &[String] {
        match self {
            Self::One(name) => slice::from_ref(name),
            Self::All(names) => names,
        }
    }
}

impl AnyLock {
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind, with one lock and with several.
    pub(crate) async fn acquire(&self) -> Result<AnyGuard, Error> {
        Ok(match self {
            Self::One(lock) => AnyGuard::One(lock.acquire().await?),
            Self::All(locks) => AnyGuard::All(locks.acquire().await?),
        })
    }
}

impl AnyGuard {
    pub(crate) fn held(&self) -> AnyHeld {
        match self {
            Self::One(guard) => AnyHeld::One(guard.held()),
            Self::All(guard) => AnyHeld::All(guard.held()),
        }
    }

    /// Releases and waits for it, so that a client's next request finds the key free. A store that does
    /// not answer does not spoil the response: the keeper goes on trying.
    pub(crate) async fn release(self) {
        let released = match self {
            Self::One(guard) => guard.release().await,
            Self::All(guard) => guard.release().await,
        };
        if let Err(error) = released {
            tracing::debug!(%error, "the response is done; its lock is released in the background");
        }
    }
}

impl AnyHeld {
    pub(crate) fn names(&self) -> LockNames {
        match self {
            Self::One(held) => LockNames::One(held.name().to_owned()),
            Self::All(held) => {
                LockNames::All(held.iter().map(|held| held.name().to_owned()).collect())
            }
        }
    }

    /// Whether all are held at this moment.
    pub(crate) fn is_valid(&self) -> bool {
        match self {
            Self::One(held) => held.is_valid(),
            Self::All(held) => held.is_valid(),
        }
    }

    /// The grant of the only lock, as a number. Several locks have no common one.
    pub(crate) fn grant_id(&self) -> Option<u64> {
        match self {
            Self::One(held) => Some(held.grant_id().as_u64()),
            Self::All(_) => None,
        }
    }

    /// For the handler, instead of what a layer around this one has put there.
    pub(crate) fn insert_into(&self, extensions: &mut Extensions) {
        extensions.remove::<Held>();
        extensions.remove::<MultiHeld>();
        match self.clone() {
            Self::One(held) => extensions.insert(held).map(drop),
            Self::All(held) => extensions.insert(held).map(drop),
        };
    }

    pub(crate) fn enter<T>(&self, code: impl FnOnce() -> T) -> T {
        match self {
            Self::One(held) => held.enter(code),
            Self::All(held) => held.enter(code),
        }
    }

    /// Not an `async fn`, which would keep the body twice.
    pub(crate) fn while_held<T>(
        &self,
        body: impl Future<Output = T>,
    ) -> impl Future<Output = Result<T, Error>> {
        match self {
            Self::One(held) => Either::Left(held.while_held(body)),
            Self::All(held) => Either::Right(held.while_held(body)),
        }
    }
}
