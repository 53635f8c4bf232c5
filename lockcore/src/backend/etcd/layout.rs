//! The keys and the values at the server. With the prefix `/p/` of the URL, the namespace `lock` and
//! the name `order:42`:
//!
//! | key | value | lease |
//! |---|---|---|
//! | `/p/lock:1:{order:42}/t<id>` | a ticket: [`Ticket`] | the client's own |
//! | `/p/lock:1:{order:42}/capacity` | a stored capacity: [`Stored`] | none |
//! | `/p/lock:1:{order:42}/resized` | that of a capacity that was removed | the one for marks, or one for counters |
//! | `/p/lock:1:gone/<id>` | empty: the ticket was released before its enqueue | one for all marks of a client |
//! | `/p/lock:1:clients/<lease>` | empty: what the enqueues of a client compare | the client's own |
//! | `/p/lock:1:counters/{order:42}` | a counter: `counting::Record` | one for counters of this lifetime |
//! | `/p/lock:1:counters/lease-<seconds>` | empty: the key has the newest of these leases | that lease |
//!
//! The number of a ticket is the revision at which its key was created. A ticket that was adopted has
//! another key, and its number is in the value. While a ticket is on its way from one client to
//! another, it has a lease of its own. Braces and slashes of a name
//! are escaped, so two names never have keys that begin with the same line.

use std::time::Duration;

use crate::backend::shown::ASK;
use crate::name::{Name, Namespace, key_prefix};
use crate::request::{FULL, Id, Request};

/// The version of this layout, in every key.
const VERSION: u32 = 1;

/// Bytes of a name that stay readable in a key.
pub(super) const READABLE: usize = 512;

/// Where the keys of a store are.
#[derive(Clone, Debug, Default)]
pub(super) struct Layout {
    pub(super) prefix: String,
}

impl Layout {
    /// The beginning of the keys of all tickets of a name.
    pub(super) fn line(&self, name: &Name) -> String {
        format!("{}{}/", self.prefix, name.key(VERSION, READABLE))
    }

    /// The beginning of the keys of all tickets of all names with this beginning.
    pub(super) fn lines_like(&self, namespace: &Namespace, beginning: &str) -> String {
        let keys = key_prefix(namespace, VERSION, beginning, READABLE);
        format!("{}{keys}", self.prefix)
    }

    /// The mark of a ticket that was released before its enqueue.
    pub(super) fn mark(&self, namespace: &Namespace, id: Id) -> String {
        format!("{}gone/{id}", self.all(namespace))
    }

    /// What the enqueues of a client compare: see `tickets`.
    pub(super) fn client(&self, namespace: &Namespace, lease: i64) -> String {
        format!("{}clients/{lease:x}", self.all(namespace))
    }

    pub(super) fn counter(&self, name: &Name) -> String {
        let all = self.all(name.namespace());
        let key = format!("{}{}", self.prefix, name.key(VERSION, READABLE));
        format!("{all}counters/{}", &key[all.len()..])
    }

    /// The key whose lease is the one for counters of this lifetime in seconds. The keys of counters
    /// go on with a brace.
    pub(super) fn lease_of_counters(&self, namespace: &Namespace, seconds: u64) -> String {
        format!("{}counters/lease-{seconds}", self.all(namespace))
    }

    /// The beginning of all keys of a namespace. No key is equal to it.
    pub(super) fn all(&self, namespace: &Namespace) -> String {
        format!("{}{}:{VERSION}:", self.prefix, namespace.as_str())
    }

    /// The key of a name, from the beginning of the keys of its tickets without the slash.
    pub(super) fn name_of<'a>(&self, line: &'a str) -> Option<&'a str> {
        line.strip_prefix(&*self.prefix)
    }
}

/// The beginning of the keys of all tickets of a line.
pub(super) fn tickets(line: &str) -> String {
    format!("{line}t")
}

/// The key of the ticket that was enqueued with this id.
pub(super) fn ticket(line: &str, id: Id) -> String {
    format!("{line}t{id}")
}

/// The id of the enqueue, from the key of its ticket.
pub(super) fn id_of(line: &str, key: &[u8]) -> Option<Id> {
    let id = key.strip_prefix(line.as_bytes())?.strip_prefix(b"t")?;
    Id::parse(std::str::from_utf8(id).ok()?)
}

/// The key of a stored capacity.
pub(super) fn capacity(line: &str) -> String {
    format!("{line}capacity")
}

/// The key of a stored capacity that was removed.
pub(super) fn resized(line: &str) -> String {
    format!("{line}resized")
}

/// What is known of the capacity of a name: `<capacity or "none"> <through> <change>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    /// `None` after it was removed.
    pub(super) capacity: Option<u32>,
    /// The number of the youngest ticket that held at the last change. All tickets up to this number
    /// hold.
    pub(super) through: i64,
    /// The id of the last change.
    pub(super) change: Id,
}

impl Stored {
    pub(super) fn encode(&self) -> String {
        let capacity = match self.capacity {
            Some(capacity) => capacity.to_string(),
            None => "none".to_owned(),
        };
        format!("{capacity} {} {}", self.through, self.change)
    }

    pub(super) fn decode(value: &[u8]) -> Option<Self> {
        let mut parts = std::str::from_utf8(value).ok()?.split(' ');
        Some(Self {
            capacity: match parts.next()? {
                "none" => None,
                capacity => Some(capacity.parse().ok()?),
            },
            through: parts.next()?.parse().ok()?,
            change: Id::parse(parts.next()?)?,
        })
    }
}

/// The value of a ticket's key: `<permits> <capacity> <ttl> <since>[ <number>]`, the owner on the
/// next line, and an ask-back on the third one. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub(super) permits: u32,
    pub(super) capacity: u32,
    pub(super) ttl: Duration,
    /// When it was enqueued, by the wall clock of its client. Only people see it.
    pub(super) since: u64,
    /// The number of the ticket, if it was adopted. Otherwise the number is the revision at which the
    /// key was created.
    adopted: Option<i64>,
    /// The owner, and behind a line break the ask-back.
    pub(super) owner: String,
}

impl Ticket {
    pub(super) fn of(request: &Request, ttl: Duration, since: u64) -> Self {
        Self {
            permits: request.permits.get(),
            capacity: request.capacity.get(),
            ttl,
            since,
            adopted: None,
            owner: request.owner.to_string(),
        }
    }

    /// The ticket as this request wants it. The number and the ask-back stay.
    pub(super) fn wanted_by(self, request: &Request, ttl: Duration) -> Self {
        let ask = self.owner.split_once(ASK).map(|(_, ask)| ask.to_owned());
        let ticket = Self {
            adopted: self.adopted,
            ..Self::of(request, ttl, self.since)
        };
        match ask {
            Some(ask) => ticket.asked_back(&ask),
            None => ticket,
        }
    }

    /// The ticket with this number as another client adopts it. The ask-back stays.
    pub(super) fn adopted_by(self, request: &Request, ttl: Duration, number: i64) -> Self {
        let adopted = Some(number);
        Self {
            adopted,
            ..self.wanted_by(request, ttl)
        }
    }

    /// The number of the ticket, whose key was created at this revision.
    pub(super) fn number(&self, created: i64) -> i64 {
        self.adopted.unwrap_or(created)
    }

    pub(super) fn encode(&self) -> String {
        let Self {
            permits,
            capacity,
            ttl,
            since,
            adopted,
            owner,
        } = self;
        let ttl = ttl.as_millis().min(u128::from(u64::MAX));
        let number = adopted.map_or_else(String::new, |number| format!(" {number}"));
        format!("{permits} {capacity} {ttl} {since}{number}\n{owner}")
    }

    /// Reads a value. If somebody has written something else over a ticket, this counts as a ticket
    /// that takes everything: its holder may believe in it.
    pub(super) fn decode(value: &[u8]) -> Self {
        Self::parse(value).unwrap_or_else(|| Self {
            permits: FULL.get(),
            capacity: FULL.get(),
            ttl: Duration::ZERO,
            since: 0,
            adopted: None,
            owner: String::new(),
        })
    }

    /// Reads a value. `None` if it is none of ours.
    pub(super) fn parse(value: &[u8]) -> Option<Self> {
        let (numbers, owner) = std::str::from_utf8(value).ok()?.split_once('\n')?;
        let mut numbers = numbers.split(' ');
        Some(Self {
            permits: numbers.next()?.parse().ok()?,
            capacity: numbers.next()?.parse().ok()?,
            ttl: Duration::from_millis(numbers.next()?.parse().ok()?),
            since: numbers.next()?.parse().ok()?,
            adopted: match numbers.next() {
                Some(number) => Some(number.parse().ok()?),
                None => None,
            },
            owner: owner.to_owned(),
        })
    }

    /// Replaces the ask-back.
    pub(super) fn asked_back(mut self, ask: &str) -> Self {
        let owner = self.owner.split(ASK).next().unwrap_or_default();
        self.owner = format!("{owner}{ASK}{ask}");
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> Name {
        Name::new(Namespace::new("lock").unwrap(), name).unwrap()
    }

    fn layout() -> Layout {
        Layout {
            prefix: "/p/".into(),
        }
    }

    #[test]
    fn keys_are_readable_and_lead_back_to_the_name() {
        let (layout, id) = (layout(), Id::parse(&"7".repeat(32)).unwrap());
        let line = layout.line(&name("order:42"));
        let key = ticket(&line, id);
        assert_eq!(key, format!("/p/lock:1:{{order:42}}/t{id}"));
        assert_eq!(id_of(&line, key.as_bytes()), Some(id));
        let line = line.trim_end_matches('/');
        assert_eq!(layout.name_of(line), Some("lock:1:{order:42}"));
        let lock = name("order:42");
        assert_eq!(layout.counter(&lock), "/p/lock:1:counters/{order:42}");
        assert_eq!(
            layout.counter(&lock.value()),
            "/p/lock:1:counters/{order:42}:value"
        );
    }

    /// Otherwise the tickets of one name would be among those of another.
    #[test]
    fn no_line_is_in_another() {
        let names = [
            "a",
            "a/t",
            "a}/",
            "a}",
            "b",
            "gone",
            "counters/",
            "a\0",
            "a b",
        ];
        let long = ["x".repeat(600), "x".repeat(601)];
        let names: Vec<_> = (names.map(str::to_owned).into_iter().chain(long))
            .map(|text| layout().line(&name(&text)))
            .collect();
        for (at, line) in names.iter().enumerate() {
            let others = names.iter().enumerate().filter(|(other, _)| *other != at);
            for (_, other) in others {
                assert!(!other.starts_with(line), "{other} is in {line}");
            }
        }
    }

    #[test]
    fn a_stored_capacity_is_read_as_it_was_written() {
        for capacity in [None, Some(7)] {
            let stored = Stored {
                capacity,
                through: 42,
                change: Id::parse(&"7".repeat(32)).unwrap(),
            };
            assert_eq!(Stored::decode(stored.encode().as_bytes()), Some(stored));
        }
        assert_eq!(Stored::decode(b"7 x"), None);
    }

    #[test]
    fn a_ticket_is_read_as_it_was_written_and_a_damaged_one_takes_everything() {
        let ticket = Ticket {
            permits: 3,
            capacity: 5,
            ttl: Duration::from_secs(10),
            since: 1_700_000_000_000,
            adopted: None,
            owner: "host/1/2 text".into(),
        };
        assert_eq!(Ticket::decode(ticket.encode().as_bytes()), ticket);
        let adopted = Ticket {
            adopted: Some(7),
            ..ticket.clone()
        };
        assert_eq!(Ticket::decode(adopted.encode().as_bytes()), adopted);
        assert_eq!((ticket.number(9), adopted.number(9)), (9, 7));
        let asked = ticket.clone().asked_back("1 a b").asked_back("2 c d");
        assert_eq!(asked.owner, "host/1/2 text\n2 c d");
        assert_eq!(Ticket::decode(asked.encode().as_bytes()), asked);
        for damaged in ["", "x", "1 2 3\nx", "1 2\nx", "-1 1 1 1\n"] {
            assert_eq!(Ticket::decode(damaged.as_bytes()).permits, FULL.get());
        }
    }
}
