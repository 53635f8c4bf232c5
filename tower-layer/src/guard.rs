//! Types for one lock or several: the names of a request, the lock that it asks for, the guard that
//! it gets, and the view of the held lock. Only this file distinguishes one lock from several.

use std::future::Future;
use std::slice;

use futures_util::future::Either;
use http::Extensions;
use lockcore::multi::{MultiGuard, MultiHeld, MultiLock};
use lockcore::{Error, ErrorKind, Guard, Held, Lock, LostReason};
use tracing::Span;

/// The names that one request locks.
#[derive(Debug)]
pub(crate) enum LockNames {
    One(String),
    /// At least one name, sorted, without duplicates.
    All(Vec<String>),
}

pub(crate) enum AnyLock {
    One(Lock),
    All(MultiLock),
}

/// The guard of one lock or of several. The drop of a guard releases in the background.
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
    /// Sorts the names and removes duplicates. Returns `None` if there are no names, which means no
    /// lock.
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
    /// Dropping the future leaves nothing behind, for one lock and for several.
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

    /// Ends the guard of a lock whose loss has stopped the work. The work has been dropped before
    /// this call. If the lock was [asked back](is_asked_back), the store still has the ticket: this
    /// releases the lock, and waits for the release. After any other loss, it only drops the guard,
    /// and does not wait.
    ///
    /// # Cancel safety
    ///
    /// As [`release`](Self::release).
    pub(crate) async fn give_up(self, lost: &Error) {
        if is_asked_back(lost) {
            self.release().await;
        }
    }

    /// Releases, and waits for the release, so that the client's next request finds the key free.
    /// If the store does not answer, the layer sends the response, and the keeper repeats the
    /// release.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the keeper releases.
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

/// Whether the lock was lost because somebody has asked the holder to give it up. In this case the
/// layer waits for the release before it answers, so that the HTTP client finds the lock free.
/// After any other loss the store may be out of reach, so the layer does not wait. `Guard::run`
/// does the same.
pub(crate) fn is_asked_back(lost: &Error) -> bool {
    lost.kind() == ErrorKind::Lost(LostReason::Revoked)
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

    /// Whether all locks are held now.
    pub(crate) fn is_valid(&self) -> bool {
        match self {
            Self::One(held) => held.is_valid(),
            Self::All(held) => held.is_valid(),
        }
    }

    /// The grant of the only lock, as a number. `None` for several locks, because they have no
    /// common grant.
    pub(crate) fn grant_id(&self) -> Option<u64> {
        match self {
            Self::One(held) => Some(held.grant_id().as_u64()),
            Self::All(_) => None,
        }
    }

    /// Adds the view for the handler, and removes the view that an outer layer has added.
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

    /// A span for work under the locks.
    pub(crate) fn span(&self) -> Span {
        match self {
            Self::One(held) => held.span(),
            Self::All(held) => held.span(),
        }
    }

    /// This is not an `async fn`, because the future of an `async fn` would contain the body twice.
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
