//! The names in use, page by page. `Locks::inspect` in `locks` shows the holders and waiters of one name.

use crate::backend::{Listing, NameInUse, StoreError};
use crate::client::calls::Where;
use crate::error::Error;
use crate::locks::Locks;
use crate::name::MAX_NAME_LEN;

/// How many names a page has by default, and at most.
const PAGE: (u32, u32) = (100, 1_000);

impl Locks {
    /// Lists the names of this client's namespace that have holders or waiters and begin with `prefix`, in pages. An
    /// empty prefix lists all.
    ///
    /// It is for people and reports, not for decisions: names come and go while it runs. A name that is in use the whole
    /// time is listed. On Redis it may be listed twice.
    ///
    /// The costs: on **Redis** a walk over *all* keys of the database, whatever the prefix, in steps of ten keys per
    /// name of a page (`SCAN`; never `KEYS`). Other requests are served between two steps. In a cluster it walks over
    /// each master. On **ZooKeeper** the names of the namespace are read for each page, in one answer. Beyond some ten
    /// thousand names that answer exceeds a server's limit (`jute.maxbuffer`, one megabyte), and the request fails. On
    /// **SQLite** an index leads to the prefix. In **memory** all names are looked at, for each page. Taking and releasing
    /// locks costs nothing more because of it.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let guard = locks.mutex("order:42").acquire().await?;
    ///
    /// let mut pages = locks.list("order:");
    /// while let Some(page) = pages.next().await? {
    ///     for used in page {
    ///         println!("{}: {:?}", used.name, locks.inspect(&used.name).await?);
    ///     }
    /// }
    /// # drop(guard);
    /// # Ok(()) }
    /// ```
    pub fn list(&self, prefix: impl Into<String>) -> NamesInUse {
        let namespace = self.0.shared.namespace.clone();
        NamesInUse {
            locks: self.clone(),
            listing: Listing::new(namespace, prefix.into(), PAGE.0),
            over: false,
        }
    }
}

/// The names in use, page by page: see [`Locks::list`].
#[derive(Debug)]
#[must_use = "nothing is listed before `next` is called"]
pub struct NamesInUse {
    locks: Locks,
    listing: Listing,
    over: bool,
}

impl NamesInUse {
    /// About how many names a page has: 1 to 1,000. Default: 100.
    pub fn page_size(mut self, names: u32) -> Self {
        self.listing.limit = names.clamp(1, PAGE.1);
        self
    }

    /// The next page, which has at least one name. `None` after the last page.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable), and [`Config`](crate::ErrorKind::Config) when the prefix is longer
    /// than 4,096 bytes, when the user may not list (on Redis: `+scan`), or when the store has no such operation. The
    /// next call tries again.
    ///
    /// # Cancel safety
    ///
    /// Safe: the next call goes on where this one was.
    pub async fn next(&mut self) -> Result<Option<Vec<NameInUse>>, Error> {
        if self.listing.prefix.len() > MAX_NAME_LEN {
            return Err(Error::config(format!(
                "no name begins with {} bytes: names have at most {MAX_NAME_LEN}",
                self.listing.prefix.len()
            )));
        }
        let shared = &self.locks.0.shared;
        while !self.over {
            let by = shared.clock.now().after(shared.op_timeout);
            let listing = self.listing.clone();
            let page = shared.operate(Where::Here, by, |connection, _| connection.list(listing));
            let (_, page) = page.await.map_err(StoreError::unavailable_unless_config)?;
            self.over = page.next.is_none();
            self.listing.after = page.next;
            if !page.names.is_empty() {
                return Ok(Some(page.names));
            }
        }
        Ok(None)
    }
}
