//! The views that a store has for people: tickets ([`Locks::inspect`](crate::Locks::inspect)), and
//! the names in use ([`Locks::list`](crate::Locks::list)).

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::name::{Namespace, of_key};
use crate::request::{FULL, Id};
use crate::token::{FencingToken, GrantId, MAX_TICKET};

/// A ticket as [`Locks::inspect`](crate::Locks::inspect) shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TicketInfo {
    /// The number of the ticket.
    pub ticket: u64,
    /// Whether the ticket holds its permits, as far as the store knows. If not, it waits.
    ///
    /// On ZooKeeper and SQLite, a client that has several tickets of a name in a row lets the next
    /// one in when one of them ends, and then tells the store. So for about one request, or longer
    /// if the client is cut off or killed in between, a ticket that has ended is shown as the
    /// holder, and the holder right behind it as a waiter.
    pub granted: bool,
    /// The number of permits that the ticket holds or waits for.
    pub permits: u32,
    /// The capacity that counts for the ticket: the capacity that is
    /// [stored](crate::semaphore::Semaphore::resize) for the name, or else the capacity in the
    /// ticket's request.
    pub capacity: u32,
    /// How long the ticket lives without a renewal.
    pub remaining: Duration,
    /// How long ago the ticket was requested, if the store can tell. A waiter has waited for all of
    /// this time; a holder may have waited for a part of it. The store compares the clocks of two
    /// servers or machines for this. So show the time to people, and do not base decisions on it.
    pub age: Option<Duration>,
    /// The client that asked: `host/pid/client`. The library sets this.
    pub owner: String,
    /// The text that the application has set: [`Builder::owner`](crate::Builder::owner) or
    /// [`Lock::owner`](crate::Lock::owner). The library cannot check it.
    pub owner_text: Option<String>,
    /// How many tasks wait in memory until this ticket is handed over to them. These are tasks of
    /// the inspecting client. The waiting tasks of other clients are not known.
    pub local_waiters: u32,
    /// What the holder was asked, if somebody has asked it to give the lock up:
    /// [`Locks::revoke`](crate::Locks::revoke).
    pub asked_back: Option<AskedBack>,
    /// The id of the ticket. It is not shown, because everybody who knows it can release the
    /// ticket.
    id: Option<Id>,
}

impl TicketInfo {
    /// A ticket as the store shows it. `owner` is the owner of its
    /// [request](crate::backend::Request::owner), together with the ask-back that may be [stored
    /// after it](crate::backend::Connection::ask_back).
    #[must_use]
    pub fn new(
        ticket: u64,
        granted: bool,
        permits: u32,
        capacity: u32,
        remaining: Duration,
        owner: String,
    ) -> Self {
        let (owner, ask) = match owner.split_once(ASK) {
            Some((owner, ask)) => (owner, AskedBack::parse(ask)),
            None => (&*owner, None),
        };
        let (owner, text) = client_and_text(owner);
        Self {
            ticket,
            granted,
            permits,
            capacity,
            remaining,
            age: None,
            owner,
            owner_text: text,
            local_waiters: 0,
            asked_back: ask,
            id: None,
        }
    }

    /// Adds the [id](crate::backend::Request::id) of the ticket. For a ticket without an id, the
    /// client refuses [`Locks::force_release`](crate::Locks::force_release) and
    /// [`Locks::revoke`](crate::Locks::revoke).
    #[must_use]
    pub fn with_id(mut self, id: Id) -> Self {
        self.id = Some(id);
        self
    }

    /// Adds the time that has passed since the ticket was requested.
    #[must_use]
    pub fn with_age(mut self, age: Duration) -> Self {
        self.age = Some(age);
        self
    }

    /// Whether the ticket excludes all others, or will when it holds: that of a mutex, of the write
    /// side of a read/write lock, or of a reader that has become a
    /// [writer](crate::Guard::try_upgrade). A reader and a semaphore never exclude all others by
    /// themselves, not even with all permits of the semaphore.
    #[must_use]
    pub fn is_exclusive(&self) -> bool {
        // A reader has one permit. No semaphore has so many, and none is stored for such a name.
        self.capacity == FULL.get() && self.permits > 1
    }

    /// The [fencing token](crate::Held::fencing_token) of the first holder of the ticket. `None` if
    /// the ticket is not [exclusive](Self::is_exclusive).
    ///
    /// When a process hands the ticket over from task to task, each holder has a token that is greater
    /// by one than the token before.
    #[must_use]
    pub fn first_token(&self) -> Option<FencingToken> {
        let has_one = self.is_exclusive() && (1..=MAX_TICKET).contains(&self.ticket);
        has_one.then(|| FencingToken::of_exclusive(GrantId::of_ticket(self.ticket, 0)))
    }

    pub(crate) fn id(&self) -> Option<Id> {
        self.id
    }
}

/// The client, and the text that the application has set.
fn client_and_text(owner: &str) -> (String, Option<String>) {
    match owner.split_once(' ') {
        Some((client, text)) => (client.to_owned(), Some(text.to_owned())),
        None => (owner.to_owned(), None),
    }
}

/// Separates the owner of a ticket from the ask-back. No owner contains this character.
pub(super) const ASK: char = '\n';

/// A request to the holder of a lock to give the lock up: see
/// [`Locks::revoke`](crate::Locks::revoke).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AskedBack {
    /// The client that asks: `host/pid/client`. Empty if the store could not tell.
    pub by: String,
    /// Why, as the caller has said. Empty if the store could not tell.
    pub why: String,
    /// How much time the holder has, from when its client learns of the request.
    pub grace: Duration,
}

impl AskedBack {
    pub(crate) fn new(by: &str, why: &str, grace: Duration) -> Self {
        Self {
            by: by.to_owned(),
            why: why.to_owned(),
            grace,
        }
    }

    /// Reads the text that [`Display`](fmt::Display) has written. `None` if it is another text.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut words = text.splitn(3, ' ');
        let (millis, by, why) = (words.next()?, words.next()?, words.next()?);
        let grace = Duration::from_millis(millis.parse().ok()?);
        Some(Self::new(by, why, grace))
    }

    /// The grace of the ask-back that is stored after an owner, if there is one.
    pub(super) fn grace_behind(owner: &str) -> Option<Duration> {
        let (_, ask) = owner.split_once(ASK)?;
        Self::parse(ask).map(|ask| ask.grace)
    }
}

/// The form in which the store keeps an ask-back: the grace in ms, the client, and the reason.
/// Scripts read the grace.
impl fmt::Display for AskedBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.grace.as_millis(), self.by, self.why)
    }
}

/// The names that a store is to list: see [`Connection::list`](crate::backend::Connection::list).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Listing {
    /// The namespace of the names.
    pub namespace: Namespace,
    /// Only names that begin with this text are listed. It has up to 4,096 bytes. If it is empty,
    /// all names are listed.
    pub prefix: String,
    /// Where the page begins: [`Page::next`] of the page before it, or `None` for the first page.
    pub after: Option<Arc<str>>,
    /// At most about this many names, 1 to 1,000.
    pub limit: u32,
    /// Whether the caller wants to know [how many hold and wait](NameInUse::summary). A store that
    /// can tell without a request for each name does so, at least for short lines. The core asks
    /// for the other lines with [`inspect`](crate::backend::Connection::inspect).
    pub summaries: bool,
}

impl Listing {
    /// The first page.
    #[must_use]
    pub fn new(namespace: Namespace, prefix: String, limit: u32) -> Self {
        Self {
            namespace,
            prefix,
            after: None,
            limit,
            summaries: false,
        }
    }
}

/// Some of the names in use. A page may be empty, even if there are further pages.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Page {
    /// The names, in no particular order.
    pub names: Vec<NameInUse>,
    /// Where the next page begins. `None` after the last page.
    pub next: Option<Arc<str>>,
}

impl Page {
    /// A page, and where the next one begins.
    #[must_use]
    pub fn new(names: Vec<NameInUse>, next: Option<Arc<str>>) -> Self {
        Self { names, next }
    }
}

/// A name that has holders or waiters: see [`Locks::list`](crate::Locks::list).
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct NameInUse {
    /// The name, or its beginning.
    pub name: String,
    /// Whether `name` is the whole name. Of a name with more than 512 bytes,
    /// only the beginning is known. [`inspect`](crate::Locks::inspect) and
    /// [`force_release`](crate::Locks::force_release) need the whole name.
    pub is_whole: bool,
    /// The holders and the waiters in a few numbers, if the caller has [asked for
    /// them](crate::inspect::NamesInUse::with_summaries).
    pub summary: Option<Summary>,
}

impl NameInUse {
    /// A name that is known as a whole.
    #[must_use]
    pub fn new(name: String) -> Self {
        Self {
            name,
            is_whole: true,
            summary: None,
        }
    }

    /// Adds the summary of the line of this name.
    #[must_use]
    pub fn with_summary(mut self, summary: Summary) -> Self {
        self.summary = Some(summary);
        self
    }

    /// The name that this [key](crate::backend::Name::key) was made from. `None` if the key was not
    /// made from a name.
    #[cfg_attr(
        not(any(
            feature = "etcd",
            feature = "mysql",
            feature = "postgres",
            feature = "redis",
            feature = "sqlite",
            feature = "zookeeper"
        )),
        allow(dead_code, reason = "memory keeps no keys")
    )]
    pub(crate) fn of_key(key: &str, limit: usize) -> Option<Self> {
        let (name, is_whole) = of_key(key, limit)?;
        Some(Self {
            name,
            is_whole,
            summary: None,
        })
    }
}

/// The line of a name in a few numbers: see [`NameInUse::summary`].
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct Summary {
    /// How many tickets hold, as [`TicketInfo::granted`] says.
    pub holders: u64,
    /// How many tickets wait. Tasks that wait in the memory of a process have no ticket.
    pub waiters: u64,
    /// The [client](TicketInfo::owner) of the oldest ticket that holds. Empty if none holds.
    pub owner: String,
    /// The [text of the application](TicketInfo::owner_text) of the oldest ticket that holds.
    pub owner_text: Option<String>,
    /// The [age](TicketInfo::age) of the oldest ticket that holds.
    pub since: Option<Duration>,
    /// The greatest age of the tickets that wait.
    pub longest_wait: Option<Duration>,
}

impl Summary {
    /// The summary of the tickets that [`inspect`](crate::Locks::inspect) shows.
    #[must_use]
    pub fn of(line: &[TicketInfo]) -> Self {
        let (holders, waiters): (Vec<_>, Vec<_>) = line.iter().partition(|ticket| ticket.granted);
        let first = holders.first();
        Self {
            holders: holders.len() as u64,
            waiters: waiters.len() as u64,
            owner: first.map_or_else(String::new, |first| first.owner.clone()),
            owner_text: first.and_then(|first| first.owner_text.clone()),
            since: first.and_then(|first| first.age),
            longest_wait: waiters.iter().filter_map(|ticket| ticket.age).max(),
        }
    }

    /// Adds the owner of the oldest ticket that holds, as the store keeps it.
    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    pub(super) fn with_owner(mut self, owner: &str) -> Self {
        let owner = owner.split(ASK).next().unwrap_or_default();
        (self.owner, self.owner_text) = client_and_text(owner);
        self
    }
}
