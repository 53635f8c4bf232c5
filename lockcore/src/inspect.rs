//! For operators: who holds a lock and who waits for it ([`Locks::inspect`]), which names are in use
//! ([`Locks::list`]), and a form of these texts that is safe to show ([`visible`]).

use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};

use crate::backend::{Listing, Page, StoreError};
use crate::client::calls::Where;
use crate::error::Error;
use crate::locks::Locks;
use crate::name::MAX_NAME_LEN;

pub use crate::backend::{NameInUse, Summary, TicketInfo};

/// How many names a page has by default, and at most.
const PAGE: (u32, u32) = (100, 1_000);

/// How many names are inspected at the same time, if the store has not summed up their lines.
const AT_A_TIME: usize = 16;

impl Locks {
    /// Shows the holders and the waiters of a name, the oldest first. This is a snapshot, which may
    /// be out of date when it arrives. Show it to people; do not base decisions on it. Other programs
    /// have written the texts: see [`visible`].
    ///
    /// [`TicketInfo::owner`] names the machine, the process and the client.
    /// [`TicketInfo::owner_text`] is the text that the application has set. A ticket that is handed
    /// over inside a process keeps its owner. To read the text that the holder has written beside
    /// the lock, use [`value`](Self::value).
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) and [`Config`](crate::ErrorKind::Config).
    ///
    /// # Cancel safety
    ///
    /// Safe: it only reads.
    pub async fn inspect(&self, name: impl Into<String>) -> Result<Vec<TicketInfo>, Error> {
        let name = self.name(name)?;
        let mut places = self.0.shared.inspect(&name).await?;
        let ours = |place: &&mut TicketInfo| place.owner == self.0.owner.client;
        if let Some(youngest) = places.iter_mut().rev().find(ours) {
            youngest.local_waiters = self.0.lanes.waiting(&name);
        }
        Ok(places)
    }

    /// Lists the names of this client's namespace that have holders or waiters and begin with
    /// `prefix`, in pages. An empty prefix lists all.
    ///
    /// The list is for people and reports. Do not base decisions on it, because names come into use
    /// and go out of use while it is made. A name that is in use the whole time is listed, with one
    /// exception: in a Redis Cluster a name may be missing if its slot moves, or if a replica takes
    /// over from its master, while the list is made. On Redis a name may be listed twice.
    ///
    /// A store keeps the beginning of a long name and a hash of the rest. Of such a name the list has
    /// only the beginning, and [`is_whole`](NameInUse::is_whole) is false. To inspect or free this
    /// lock, a caller must know its whole name.
    ///
    /// The costs differ. On **Redis** the listing walks over *all* keys of the database, even with
    /// a prefix (`SCAN`; never `KEYS`). A step has ten keys per name of a page, and at most a
    /// thousand. The server serves other requests between two steps. In a cluster the listing walks
    /// over each master. On **ZooKeeper** each page reads all names of the namespace, in one answer.
    /// With more than about ten thousand names this answer exceeds a server's limit
    /// (`jute.maxbuffer`, one megabyte), and the request fails. On **etcd** a request reads up to a
    /// thousand keys with the prefix, those of tickets and of stored capacities. On **SQLite**,
    /// **PostgreSQL** and **MySQL** the listing reads only the names with the prefix, by an index. In
    /// **memory** each page reads all names. Acquire and release do not cost more because of the
    /// listing.
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
    ///
    /// // How many hold and wait, without a request for each name.
    /// let mut pages = locks.list("order:").with_summaries();
    /// while let Some(page) = pages.next().await? {
    ///     for used in page {
    ///         println!("{}: {:?}", used.name, used.summary);
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

/// The names in use, in pages: see [`Locks::list`].
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

    /// Each name gets a [summary](NameInUse::summary): how many hold and wait, and for how long. A
    /// name without one is too long for the list.
    ///
    /// The stores send the summaries of short lines with the page: lines of up to a few dozen
    /// tickets, or of a hundred on SQLite and PostgreSQL, until a page has about 4,000 tickets. The
    /// other lines are [inspected](Locks::inspect): one more request for each of these names, and up
    /// to 16 at a time. So are all lines of a store that cannot sum up, for example one from
    /// outside of this crate.
    ///
    /// With 1,000 names in use, a waiter at every tenth, and pages of 1,000 names, a list takes 2
    /// requests on Redis, PostgreSQL and MySQL, 3 on etcd, and 16 on ZooKeeper.
    pub fn with_summaries(mut self) -> Self {
        self.listing.summaries = true;
        self
    }

    /// The next page, which has at least one name. `None` after the last page.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable), and [`Config`](crate::ErrorKind::Config)
    /// when the prefix is longer than 4,096 bytes, the user has no right to list (on Redis:
    /// `+scan`), or the store has no such operation. After an error, the next call asks for the
    /// same page again.
    ///
    /// # Cancel safety
    ///
    /// Safe: if the future is dropped, the next call continues from the same place.
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
            let Page { names, next } = page;
            let names = match self.listing.summaries {
                true => self.summed_up(names).await?,
                false => names,
            };
            self.over = next.is_none();
            self.listing.after = next;
            if !names.is_empty() {
                return Ok(Some(names));
            }
        }
        Ok(None)
    }

    /// Inspects the names that the store has not summed up. Leaves out those that have gone out of
    /// use by then.
    async fn summed_up(&self, names: Vec<NameInUse>) -> Result<Vec<NameInUse>, Error> {
        let summed_up = names.into_iter().map(async |mut used| {
            if used.is_whole && used.summary.is_none() {
                let name = self.locks.name(&used.name)?;
                let line = self.locks.0.shared.inspect(&name).await?;
                if line.is_empty() {
                    return Ok(None);
                }
                used.summary = Some(Summary::of(&line));
            }
            Ok(Some(used))
        });
        let summed_up = stream::iter(summed_up).buffered(AT_A_TIME);
        summed_up
            .try_filter_map(async |used| Ok(used))
            .try_collect()
            .await
    }
}

/// A text of one line in which people see each character.
///
/// Names, owners and reasons are written by other programs. On a terminal, a control character in
/// them moves the cursor or clears the screen. An invisible character, or a mark that only changes
/// the direction of the text, lets two names look the same. This function replaces such a character
/// by its escape, as in a string of Rust.
///
/// Letters that look alike, accents and all kinds of spaces stay, and so does a backslash: two names
/// may still look the same.
///
/// The result is for people. It is not escaped for HTML, for a shell or for JSON.
///
/// # Examples
///
/// ```
/// use lockcore::inspect::visible;
///
/// assert_eq!(visible("order:42"), "order:42");
/// assert_eq!(visible("order:\u{1b}[2J42"), r"order:\u{1b}[2J42");
/// assert_eq!(visible("order:42\u{200b}"), r"order:42\u{200b}");
/// assert_eq!(visible("Müller 日本"), "Müller 日本");
/// ```
pub fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() || is_invisible(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

/// Invisible characters, and marks that only change the direction of the text: `Bidi_Control`,
/// `Default_Ignorable_Code_Point` and separators of lines, in Unicode 16.
fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}'
        | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}'
        | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}'
        | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use super::visible;

    #[test]
    fn no_character_of_a_name_is_hidden_or_changes_the_terminal() {
        for (name, shown) in [
            ("a\u{1b}[2Jb\r\nc", r"a\u{1b}[2Jb\r\nc"),
            ("order:42\u{202e}", r"order:42\u{202e}"),
            ("order:42\u{ad}", r"order:42\u{ad}"),
            ("order:\u{61c}42", r"order:\u{61c}42"),
            ("order:42\u{e0041}", r"order:42\u{e0041}"),
            ("Müller 日本", "Müller 日本"),
        ] {
            assert_eq!(visible(name), shown);
        }
    }
}
