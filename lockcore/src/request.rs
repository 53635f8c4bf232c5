//! The request to a store: a ticket for a number of permits of a name.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::error::Error;
use crate::name::Name;

/// The capacity of a mutex and of a read/write lock: a writer takes all of it, a reader one permit.
///
/// It is a part of the wire format: versions of this crate with different values would not exclude
/// each other.
pub const FULL: NonZeroU32 = NonZeroU32::new(1 << 30).expect("not zero");

/// The permits that a reader takes to become a writer, in addition to the one that it has.
pub(crate) const ALL_BUT_ONE: NonZeroU32 = NonZeroU32::new(FULL.get() - 1).expect("not zero");

/// The identity of one request: of a ticket, of a change of a counter, or of a change of a stored
/// capacity. Everybody who knows the id of a ticket can release the ticket. An id has 128 bits from
/// the operating system's random generator, drawn before the first byte of the request is sent. At
/// a store that only this process can reach, ids are counted instead.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Id(u128);

impl Hash for Id {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0 as u64); // half of the bits are random enough
    }
}

impl Id {
    /// Draws an id for a request that is about to be sent.
    ///
    /// Each id costs one system call. No id is drawn in advance, because a copy of the process's
    /// memory would contain the same id. Two clones of a virtual machine, or of a checkpointed
    /// process, would send requests with this id. The store would give both the same ticket.
    /// Without ids in advance, this can only happen to a copy that is made between this call and
    /// the answer to the request.
    pub(crate) fn draw() -> Result<Self, Error> {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).map_err(|error| {
            Error::unavailable(format!(
                "the operating system has no random numbers: {error}"
            ))
        })?;
        Ok(Self(u128::from_ne_bytes(bytes)))
    }

    /// Counts an id, for a store that only this process can reach. A copy of the process's memory
    /// also contains a copy of this store, so the same id in the copy names another ticket.
    pub(crate) fn count() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let count = LAST.fetch_add(1, Ordering::Relaxed);
        // Maps use the low half as the hash, so the count is spread over this half. It is
        // multiplied by 2⁶⁴ divided by the golden ratio, rounded to an odd number, so that two
        // counts never collide (Knuth, The Art of Computer Programming, vol. 3, 6.4).
        let spread = count.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(u128::from(count) << 64 | u128::from(spread))
    }

    /// The id as a UUID of a database has it.
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// The id of these bytes: see [`to_bytes`](Self::to_bytes).
    #[cfg(any(feature = "mysql", feature = "postgres"))]
    pub(crate) fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(bytes))
    }

    /// Parses the text that `Display` writes. `None` for anything else.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let well_formed = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        well_formed.then(|| u128::from_str_radix(text, 16).ok().map(Self))?
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Shows only a part of the id. Everybody who knows the whole id can release the ticket, and many
/// people read logs.
impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}…", self.0 >> 96)
    }
}

/// A request for a ticket, as a store sees it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    /// The name of the lock.
    pub name: Name,
    /// The identity of the ticket. If the same request is sent again with this id, it finds the
    /// ticket of the first one.
    pub id: Id,
    /// How many permits, at most `capacity`.
    pub permits: NonZeroU32,
    /// How many permits there are on this name.
    pub capacity: NonZeroU32,
    /// How long the ticket lives without a renewal, as holder and as waiter.
    pub ttl: Duration,
    /// Whether to queue when the permits are not free. If false, a refused request leaves no ticket
    /// at the store.
    pub wait: bool,
    /// Whether the answer may name the ticket [ahead](crate::backend::Enqueued::Waiting::ahead).
    /// The core asks for it only if the store [can](crate::backend::Capability::names_ahead).
    pub name_ahead: bool,
    /// Whether the client may keep the ticket for a moment after its use
    /// ([`Lock::linger`](crate::Lock::linger)). The store tells the client of the ticket by
    /// [`EventSink::wanted`](crate::backend::EventSink::wanted), as it sends a wake-up, in two
    /// cases:
    ///
    /// - This ticket holds, nobody waits, and a ticket comes into the line behind it. This is told
    ///   each time that a line begins.
    /// - A request that does not wait is refused because this ticket, the only one, holds.
    ///
    /// The message may be lost, doubled or late, and may come before the answer to the enqueue of this
    /// ticket. A store need not send it about a ticket that has waited, was adopted or became smaller.
    /// The core asks for it only if the store [can](crate::backend::Capability::tells_holders), and only
    /// for a ticket that wants [everything](FULL).
    pub lingers: bool,
    /// The highest ticket number that this client has seen on any name. A store that has lost its
    /// data continues above this number, unless the number is more than a day ahead of the store's
    /// clock.
    pub highest_seen: u64,
    /// The owner of the ticket, for people: `host/pid/client`, followed by a space and the
    /// application's text, if the application has set one. It has no control characters and no line
    /// breaks. [`TicketInfo::new`](crate::inspect::TicketInfo::new) splits it again.
    pub owner: Arc<str>,
}

impl Request {
    /// A request that does not wait, does not ask for the ticket ahead, does not linger, and has an
    /// empty owner. All fields can be changed afterwards.
    #[must_use]
    pub fn new(
        name: Name,
        id: Id,
        permits: NonZeroU32,
        capacity: NonZeroU32,
        ttl: Duration,
    ) -> Self {
        Self {
            name,
            id,
            permits,
            capacity,
            ttl,
            wait: false,
            name_ahead: false,
            lingers: false,
            highest_seen: 0,
            owner: Arc::default(),
        }
    }
}

impl Request {
    /// Whether the request asks for all of a mutex or of a read/write lock.
    pub(crate) fn wants_all(&self) -> bool {
        self.permits == FULL && self.capacity == FULL
    }
}

/// The error of a request for a name that is in use with another capacity.
pub(crate) fn mismatch(asked: NonZeroU32, in_use: u32) -> Error {
    let meaning = |capacity: u32| match capacity == FULL.get() {
        true => "as a mutex or read/write lock".to_owned(),
        false => format!("as a semaphore of {capacity}"),
    };
    Error::capacity_mismatch(&meaning(asked.get()), &meaning(in_use))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn counted_ids_differ_in_the_half_that_maps_hash_by() {
        let halves: HashSet<u64> = (0..10_000).map(|_| Id::count().0 as u64).collect();

        assert_eq!(halves.len(), 10_000);
    }

    #[test]
    fn an_id_can_be_read_back_and_its_debug_form_gives_it_not_away() {
        let id = Id::draw().unwrap();
        let text = id.to_string();

        assert_eq!(Id::parse(&text), Some(id));
        assert!(!format!("{id:?}").contains(&text[8..]));
    }
}
