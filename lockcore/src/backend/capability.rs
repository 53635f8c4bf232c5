//! The capability of a store: what it can do.

use std::time::Duration;

/// 365.25 days. Messages call this a year.
const YEAR: Duration = Duration::from_secs(31_557_600);

/// The promises of a store. Each fact of `testing::conformance` is checked only on stores that
/// promise what the fact needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capability {
    /// Other processes see the tickets. If not, ids of requests need to differ only within this
    /// process. The core then counts them instead of drawing them at random, which saves a system
    /// call.
    pub cross_process: bool,
    /// A release wakes the next in line. If not, waiters learn of their grant from their renewals.
    pub pushes: bool,
    /// A request that may wait stands in line at the store. If not, the store never answers
    /// [`Enqueued::Waiting`](super::Enqueued::Waiting). It answers
    /// [`Enqueued::Busy`](super::Enqueued::Busy) to a request that may wait. The core then asks
    /// again, with a new id, for as long as the caller waits.
    pub queues: bool,
    /// The longest ttl that a ticket may have.
    pub longest_ttl: Duration,
    /// A ticket ends with the session of the client that took it, and not by its own ttl. So all
    /// runtimes of a process use the one connection that the keeper drives, and tickets outlive the
    /// runtime that took them. When a lease has run out, the keeper removes the ticket of that
    /// lease, and repeats this until the store acknowledges it.
    pub sessions: bool,
    /// How many enqueues the core sends on a connection at the same time, at most. The same limit
    /// counts for the tickets of releases. While answers come late, the core sends fewer. Further
    /// requests wait in the core until it is their turn, in order of arrival. Renewals do not wait
    /// for a turn. So a burst of requests delays a renewal by no more than this many requests take.
    /// With `u32::MAX` no request waits.
    pub in_flight: u32,
    /// How many renewals of held tickets the core has in flight at most. The core has at most a
    /// quarter of this number of renewals of waiters in flight beside them.
    ///
    /// The core sends 100 renewals in one request, and usually has no more than eight such requests
    /// in flight. It has more in flight if the answers take long and there are many tickets to
    /// renew, and fewer again after an answer has not come in time.
    pub renewals_in_flight: u32,
    /// A wake-up grants the ticket. If not, the store may not be sure of the grant when it sends
    /// the wake-up. The waiter then renews its ticket, and holds it when the answer is
    /// [`Renewed::Granted`](super::Renewed::Granted).
    pub wake_ups_grant: bool,
    /// The verbs never block, and their futures answer when they are polled for the first time. So
    /// the drop of a guard releases its ticket itself, and does not leave that to the keeper.
    pub answers_at_once: bool,
    /// The store names the ticket ahead of a waiter:
    /// [`Enqueued::Waiting`](super::Enqueued::Waiting). With this the store also promises that it
    /// loses no ticket that it has acknowledged, not even in a failover, unless it loses all of
    /// them. Otherwise a waiter that is lost could hold beside the one that the store lets in.
    pub names_ahead: bool,
    /// The store tells the client of a ticket that [lingers](crate::backend::Request::lingers) when
    /// somebody begins to wait behind it. Such a store has a [queue](Self::queues) and
    /// [pushes](Self::pushes).
    pub tells_holders: bool,
    /// The store implements [`Connection::ask_back`](super::Connection::ask_back), and its
    /// [`inspect`](super::Connection::inspect) tells the ids of tickets.
    pub asks_back: bool,
    /// The store implements [`Connection::list`](super::Connection::list).
    pub lists: bool,
    /// The store implements [`Connection::adopt`](super::Connection::adopt): a held lock can be
    /// handed over to another client.
    pub adopts: bool,
    /// The store implements [`Connection::resize`](super::Connection::resize).
    pub resizes: bool,
    /// The store has counters: [`Connection::count`](super::Connection::count).
    pub counters: bool,
    /// The store pushes changes of counters: [`Connection::watch`](super::Connection::watch). If
    /// not, a client that waits for a change of a counter reads it ten times a second.
    pub watches: bool,
}

impl Capability {
    /// A store that several processes share. Requests queue at the store, and wake-ups are pushed
    /// and grant. A ttl may be up to a year, and 1,000 requests and 6,400 renewals may be in flight.
    /// Holders are not told of waiters, tickets cannot be asked back or handed over, names cannot be
    /// listed, capacities cannot be stored, and there are no counters.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            cross_process: true,
            pushes: true,
            queues: true,
            longest_ttl: YEAR,
            sessions: false,
            in_flight: 1_000,
            renewals_in_flight: 6_400,
            wake_ups_grant: true,
            answers_at_once: false,
            names_ahead: false,
            tells_holders: false,
            asks_back: false,
            lists: false,
            adopts: false,
            resizes: false,
            counters: false,
            watches: false,
        }
    }

    /// Sets [`cross_process`](Self::cross_process).
    #[must_use]
    pub const fn cross_process(mut self, yes: bool) -> Self {
        self.cross_process = yes;
        self
    }

    /// Sets [`pushes`](Self::pushes).
    #[must_use]
    pub const fn pushes(mut self, yes: bool) -> Self {
        self.pushes = yes;
        self
    }

    /// Sets [`queues`](Self::queues).
    #[must_use]
    pub const fn queues(mut self, yes: bool) -> Self {
        self.queues = yes;
        self
    }

    /// Sets [`longest_ttl`](Self::longest_ttl).
    #[must_use]
    pub const fn longest_ttl(mut self, ttl: Duration) -> Self {
        self.longest_ttl = ttl;
        self
    }

    /// Sets [`sessions`](Self::sessions).
    #[must_use]
    pub const fn sessions(mut self, yes: bool) -> Self {
        self.sessions = yes;
        self
    }

    /// Sets [`in_flight`](Self::in_flight), at least 1.
    #[must_use]
    pub const fn in_flight(mut self, requests: u32) -> Self {
        self.in_flight = if requests == 0 { 1 } else { requests };
        self
    }

    /// Sets [`renewals_in_flight`](Self::renewals_in_flight). The core has at least one request in
    /// flight.
    #[must_use]
    pub const fn renewals_in_flight(mut self, renewals: u32) -> Self {
        self.renewals_in_flight = renewals;
        self
    }

    /// Sets [`wake_ups_grant`](Self::wake_ups_grant).
    #[must_use]
    pub const fn wake_ups_grant(mut self, yes: bool) -> Self {
        self.wake_ups_grant = yes;
        self
    }

    /// Sets [`answers_at_once`](Self::answers_at_once).
    #[must_use]
    pub const fn answers_at_once(mut self, yes: bool) -> Self {
        self.answers_at_once = yes;
        self
    }

    /// Sets [`names_ahead`](Self::names_ahead).
    #[must_use]
    pub const fn names_ahead(mut self, yes: bool) -> Self {
        self.names_ahead = yes;
        self
    }

    /// Sets [`tells_holders`](Self::tells_holders).
    #[must_use]
    pub const fn tells_holders(mut self, yes: bool) -> Self {
        self.tells_holders = yes;
        self
    }

    /// Sets [`asks_back`](Self::asks_back).
    #[must_use]
    pub const fn asks_back(mut self, yes: bool) -> Self {
        self.asks_back = yes;
        self
    }

    /// Sets [`lists`](Self::lists).
    #[must_use]
    pub const fn lists(mut self, yes: bool) -> Self {
        self.lists = yes;
        self
    }

    /// Sets [`adopts`](Self::adopts).
    #[must_use]
    pub const fn adopts(mut self, yes: bool) -> Self {
        self.adopts = yes;
        self
    }

    /// Sets [`resizes`](Self::resizes).
    #[must_use]
    pub const fn resizes(mut self, yes: bool) -> Self {
        self.resizes = yes;
        self
    }

    /// Sets [`counters`](Self::counters).
    #[must_use]
    pub const fn counters(mut self, yes: bool) -> Self {
        self.counters = yes;
        self
    }

    /// Sets [`watches`](Self::watches).
    #[must_use]
    pub const fn watches(mut self, yes: bool) -> Self {
        self.watches = yes;
        self
    }
}

impl Default for Capability {
    fn default() -> Self {
        Self::new()
    }
}
