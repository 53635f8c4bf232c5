//! How tickets, halts and stored capacities are written: paths, names of nodes, and their data. All
//! of it is wire format. The rule which tickets of a line hold is in `row`.

use std::collections::HashSet;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use crate::backend::{NameInUse, Resize, ResizeOp};
use crate::name::{Name, Namespace, key_prefix};
use crate::request::{FULL, Id, Request};

/// The layout version, which is a part of every path. Versions of the library with different
/// numbers do not see each other's tickets. So a change of the number is a breaking release. The
/// first released number is 1.
const VERSION: u32 = 1;

/// Bytes of a name that stay readable in a path. ZooKeeper itself has no limit below a megabyte.
const READABLE: usize = 512;

/// The path of the node whose children are the tickets of one name. It is below the chroot:
/// `/lock:1/{order:42}`.
#[derive(Clone, Debug)]
pub(super) struct Parent {
    /// `/lock:1`, the folder of all names of the namespace.
    pub(super) folder: String,
    /// `/lock:1/{order:42}`.
    pub(super) path: String,
}

impl Parent {
    pub(super) fn of(name: &Name) -> Self {
        let key = name.key(VERSION, READABLE);
        // Neither namespace nor version has a brace.
        let (folder, name) = key.split_at(key.find('{').unwrap_or(key.len()));
        let folder = format!("/{}", folder.trim_end_matches(':'));
        let mut path = format!("{folder}/");
        for c in name.chars() {
            push(&mut path, c);
        }
        Self { folder, path }
    }

    /// The first part of the name of a new ticket's node. The server appends the sequence number.
    pub(super) fn prefix(&self, request: &Request, client: u32) -> String {
        format!(
            "{}/{}-{}-{}-{}-{client:08x}-",
            self.path,
            request.id,
            request.permits,
            request.capacity,
            request.ttl.as_millis()
        )
    }

    /// The first part of the name of the node of a new [halt](Ticket::is_halt). The server appends
    /// the sequence number.
    pub(super) fn halt(&self, id: Id, resize: &Resize, client: u32) -> String {
        let only = match resize.op {
            ResizeOp::Set {
                capacity: None,
                stated,
                ..
            } => stated.get(),
            _ => 0,
        };
        format!("{}/{id}-0-{only}-0-{client:08x}-", self.path)
    }

    /// The path of a ticket after `request` has made it smaller. All other parts of its name stay,
    /// so the ticket keeps its position in line.
    pub(super) fn smaller(&self, path: &str, request: &Request) -> Option<String> {
        let node = path.strip_prefix(&self.path)?.strip_prefix('/')?;
        let mut fields: Vec<&str> = node.splitn(6, '-').collect();
        let permits = request.permits.to_string();
        *fields.get_mut(1)? = &permits;
        Some(self.child(&fields.join("-")))
    }

    pub(super) fn child(&self, node: &str) -> String {
        format!("{}/{node}", self.path)
    }
}

/// The path of the folder of all names of a namespace.
pub(super) fn folder(namespace: &Namespace) -> String {
    let beginning = key_prefix(namespace, VERSION, "", READABLE);
    format!("/{}", beginning.trim_end_matches([':', '{']))
}

/// The beginning of the nodes of all names that begin with `prefix`. These nodes are in the folder
/// of the namespace.
pub(super) fn nodes_like(namespace: &Namespace, prefix: &str) -> String {
    let key = key_prefix(namespace, VERSION, prefix, READABLE);
    let mut node = String::new();
    for c in key[key.find('{').unwrap_or(key.len())..].chars() {
        push(&mut node, c);
    }
    node
}

/// The name that belongs to a node in the folder of a namespace.
pub(super) fn name_of(node: &str) -> Option<NameInUse> {
    NameInUse::of_key(node, READABLE)
}

/// The path of the counter of a name: `/lock:1/counters/5f/{order:42}`. Counters are spread over
/// 256 folders, so that a client can list a folder.
#[derive(Clone, Debug)]
pub(super) struct CounterPath {
    /// The folders above the node, from the outermost: the folder of all names, the folder of all
    /// counters, and the folder that contains this counter.
    pub(super) folders: [String; 3],
    pub(super) path: String,
}

impl CounterPath {
    pub(super) fn of(name: &Name) -> Self {
        let Parent { folder, path } = Parent::of(name);
        // No name has a folder like this, because the node of a name begins with a brace.
        let counters = format!("{folder}/counters");
        let bucket = format!("{counters}/{:02x}", Sha256::digest(path.as_bytes())[0]);
        let path = format!("{bucket}{}", &path[folder.len()..]);
        Self {
            folders: [folder, counters, bucket],
            path,
        }
    }
}

/// Appends a character to a path. ZooKeeper refuses private use characters, specials, and all
/// characters beyond the basic plane. (ZooKeeper is written in Java, where each character beyond
/// the basic plane is two characters.) This function escapes all of them. The key has escaped every
/// `%` of the name before, and has escaped none of these characters. So two names cannot have the
/// same path.
fn push(path: &mut String, c: char) {
    if matches!(u32::from(c), 0xe000..=0xf8ff | 0xfff0..) {
        for byte in c.encode_utf8(&mut [0; 4]).bytes() {
            path.push_str(&format!("%{byte:02x}"));
        }
    } else {
        path.push(c);
    }
}

/// A ticket, read from the name of its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    pub(super) id: Id,
    pub(super) permits: u32,
    pub(super) capacity: u32,
    pub(super) ttl: Duration,
    /// The lower half of the session id. It tells the sessions in a line apart, in most cases.
    pub(super) client: u32,
    /// The sequence number of the node, which gives the position in line. It has 32 bits, so it
    /// becomes negative after 2³¹ tickets. When the parent node is deleted and created again, the
    /// numbering starts again. Compare two numbers with [`is_older`], and only for tickets under
    /// the same parent node.
    pub(super) sequence: i32,
    /// `<id>-<permits>-<capacity>-<ttl millis>-<client>-<sequence>`.
    pub(super) node: String,
}

impl Ticket {
    /// Whether the ticket needs all permits, so that it can only hold alone. No stored capacity
    /// changes this.
    pub(super) fn wants_all(&self) -> bool {
        self.permits == FULL.get()
    }

    /// Whether this is the halt of a change of the capacity, and not a ticket: see `capacities`.
    /// The `capacity` of a halt is the only capacity that tickets may state after the change. It is
    /// 0 if semaphores may state any capacity after the change.
    pub(super) fn is_halt(&self) -> bool {
        self.permits == 0
    }

    /// `None` for a node that is not a ticket of this library.
    pub(super) fn parse(node: &str) -> Option<Self> {
        let mut fields = node.splitn(6, '-');
        let mut next = || fields.next();
        Some(Self {
            id: Id::parse(next()?)?,
            permits: next()?.parse().ok()?,
            capacity: next()?.parse().ok()?,
            ttl: Duration::from_millis(next()?.parse().ok()?),
            client: u32::from_str_radix(next()?, 16).ok()?,
            sequence: wrapped(next()?.parse().ok()?),
            node: node.into(),
        })
    }
}

/// The data of a ticket's node.
///
/// A new node has the owner alone. The number of a ticket is the id of the transaction that created
/// its first node, and its ttl is in the name of the node. The data is written again if a client
/// asks the ticket back, if the lease is extended, and into the new node of a ticket that was made
/// smaller. Then a last line has the number and the ttl. An ask-back is in a line of its own in
/// front of this last line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Data {
    /// The owner, followed by the ask-back if there is one.
    pub(super) owner: String,
    pub(super) number: u64,
    /// The longest ttl with which the ticket was renewed: see `tickets::renew`.
    pub(super) ttl: Duration,
}

impl Data {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let (owner, number, millis) = (&self.owner, self.number, self.ttl.as_millis());
        format!("{owner}\n{number} {millis}").into_bytes()
    }

    /// Reads the data of a node. `created` is the id of the transaction that created the node, and
    /// `ttl` is the ttl in its name.
    pub(super) fn read(data: &[u8], created: u64, ttl: Duration) -> Self {
        let text = String::from_utf8_lossy(data);
        Self::parse(&text).unwrap_or_else(|| Self {
            owner: text.into_owned(),
            number: created,
            ttl,
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let (owner, last) = text.rsplit_once('\n')?;
        let (number, millis) = last.split_once(' ')?;
        Some(Self {
            owner: owner.to_owned(),
            number: number.parse().ok()?,
            ttl: Duration::from_millis(millis.parse().ok()?),
        })
    }
}

/// Sequence numbers have 32 bits today. If a later server has longer numbers, their lower half
/// gives the same order.
pub(super) const fn wrapped(sequence: i64) -> i32 {
    sequence as i32
}

/// Whether the ticket with the number `one` is older than the ticket with the number `other`. Both
/// must be under the same parent node. There, two numbers in use are never 2³¹ apart.
pub(super) const fn is_older(one: i32, other: i32) -> bool {
    one.wrapping_sub(other) < 0
}

/// The node of a stored capacity. Its name is `capacity-<permits>-<number>-<change>`, and it has no
/// data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    /// `None` if the capacity was forgotten. The name of the node then has `none` in place of the
    /// permits.
    pub(super) capacity: Option<u32>,
    /// All tickets with numbers up to this number hold. They held at the last change.
    pub(super) through: u64,
    /// The id of the change.
    pub(super) change: Id,
    pub(super) node: String,
}

impl Stored {
    pub(super) fn new(capacity: Option<u32>, through: u64, change: Id) -> Self {
        let permits = capacity.map_or_else(|| "none".to_owned(), |permits| permits.to_string());
        Self {
            capacity,
            through,
            change,
            node: format!("capacity-{permits}-{through}-{change}"),
        }
    }

    pub(super) fn parse(node: &str) -> Option<Self> {
        let mut fields = node.strip_prefix("capacity-")?.splitn(3, '-');
        let capacity = match fields.next()? {
            "none" => None,
            permits => Some(permits.parse().ok()?),
        };
        let through = fields.next()?.parse().ok()?;
        let change = Id::parse(fields.next()?)?;
        Some(Self::new(capacity, through, change))
    }
}

/// The tickets and halts among the children of a parent, oldest first.
pub(super) fn in_line(children: &[String]) -> Vec<Ticket> {
    let mut tickets: Vec<Ticket> = children.iter().filter_map(|c| Ticket::parse(c)).collect();
    if let Some(any) = tickets.first().map(|ticket| ticket.sequence) {
        tickets.sort_unstable_by_key(|ticket| ticket.sequence.wrapping_sub(any));
    }
    tickets
}

/// How many sessions have tickets in a line.
pub(super) fn clients<'a>(line: impl IntoIterator<Item = &'a Ticket>) -> usize {
    let clients: HashSet<u32> = line.into_iter().map(|ticket| ticket.client).collect();
    clients.len()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::num::NonZeroU32;

    use super::*;
    use crate::name::Namespace;

    fn path(name: &str) -> String {
        Parent::of(&Name::new(Namespace::new("lock").unwrap(), name).unwrap()).path
    }

    fn node(permits: u32, capacity: u32, sequence: i64) -> String {
        format!(
            "{}-{permits}-{capacity}-10000-0000c11e-{sequence:010}",
            Id::draw().unwrap()
        )
    }

    #[test]
    fn a_plain_name_stays_readable() {
        let parent = Parent::of(&Name::new(Namespace::new("lock").unwrap(), "order:42").unwrap());

        assert_eq!(parent.folder, "/lock:1");
        assert_eq!(parent.path, "/lock:1/{order:42}");
    }

    /// The characters that `PathUtils` of the server refuses. The server checks each half of a
    /// surrogate pair alone.
    #[test]
    fn no_path_has_a_character_that_zookeeper_refuses() {
        for name in [
            "/",
            "a/b",
            "..",
            ".",
            "\0",
            "\u{7f}",
            "\u{9f}",
            "\u{e000}",
            "\u{f8ff}",
            "\u{fff0}",
            "\u{fffd}",
            "😀",
            "\u{10ffff}",
            "{",
            "}",
            "%",
        ] {
            let path = path(name);
            let refused =
                |half: u16| matches!(half, 0..=0x1f | 0x7f..=0x9f | 0xd800..=0xf8ff | 0xfff0..);
            assert!(!path.encode_utf16().any(refused), "{path:?}");
            assert_eq!(path.matches('/').count(), 2, "{path:?}");
        }
    }

    #[test]
    fn no_two_names_share_a_path() {
        let mut random = fastrand::Rng::with_seed(8);
        let pieces = [
            "a",
            "%",
            "%f0%9f%98%80",
            "😀",
            "\u{e000}",
            "%ee%80%80",
            "}",
            "/",
            "~",
            "\0",
            "ä",
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        ];
        let mut seen: HashMap<String, String> = HashMap::new();
        while seen.len() < 2_000 {
            let name: String = (0..random.usize(1..12))
                .map(|_| *random.choice(&pieces).unwrap())
                .collect();
            if let Some(other) = seen.insert(path(&name), name.clone()) {
                assert_eq!(other, name, "two names, one path");
            }
        }
    }

    #[test]
    fn a_node_can_be_read_back_and_others_are_none_of_ours() {
        let ticket = Ticket::parse(&node(3, 5, 17)).unwrap();
        assert_eq!(
            (ticket.permits, ticket.capacity, ticket.sequence),
            (3, 5, 17)
        );
        assert_eq!(ticket.ttl, Duration::from_secs(10));
        // The server prints a number beyond 2³¹ like this.
        assert_eq!(
            Ticket::parse(&node(1, 1, -2_147_483_648)).unwrap().sequence,
            i32::MIN
        );

        for other in [
            "",
            "x",
            "lock-0000000001",
            &node(1, 1, 1)[1..],
            "0-1-1-1-1-1",
        ] {
            assert_eq!(Ticket::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_ticket_that_is_made_smaller_is_the_same_but_for_its_permits() {
        let name = Name::new(Namespace::new("lock").unwrap(), "a-b").unwrap();
        let parent = Parent::of(&name);
        for sequence in [17, -2_147_483_648] {
            let before = Ticket::parse(&node(3, 5, sequence)).unwrap();
            let request = Request {
                name: name.clone(),
                id: before.id,
                permits: NonZeroU32::new(2).unwrap(),
                capacity: NonZeroU32::new(5).unwrap(),
                ttl: before.ttl,
                wait: true,
                name_ahead: false,
                lingers: false,
                highest_seen: 0,
                owner: "".into(),
            };

            let path = parent.smaller(&parent.child(&before.node), &request);

            let path = path.unwrap();
            let after = Ticket::parse(&path[parent.path.len() + 1..]).unwrap();
            let expected = Ticket {
                permits: 2,
                node: after.node.clone(),
                ..before
            };
            assert_eq!(after, expected);
            assert_eq!(path, parent.child(&after.node));
        }
    }

    #[test]
    fn data_that_is_written_again_is_read_back_and_an_owner_alone_is_one() {
        let named = Duration::from_secs(1);
        let written = |owner: &str| Data {
            owner: owner.into(),
            number: 7,
            ttl: Duration::from_secs(60),
        };
        for owner in ["host/1/2", "host/1/2 shop 7", "a\n500 host/2/3 why"] {
            let data = written(owner);
            assert_eq!(Data::read(&data.to_bytes(), 9, named), data);
        }
        for alone in ["host/1/2", "", "a\nb", "a\n7", "a\n7 x"] {
            let data = Data::read(alone.as_bytes(), 9, named);
            assert_eq!((data.owner.as_str(), data.number), (alone, 9));
            assert_eq!(data.ttl, named);
        }
    }

    /// This happens after 2³¹ tickets of one busy name.
    #[test]
    fn the_line_keeps_its_order_when_the_numbers_wrap() {
        let numbers = [2_147_483_647, -2_147_483_648, 2_147_483_646, -2_147_483_647];
        let children: Vec<String> = numbers.iter().map(|&number| node(1, 1, number)).collect();

        let sorted: Vec<i32> = in_line(&children).iter().map(|t| t.sequence).collect();

        assert_eq!(sorted, [i32::MAX - 1, i32::MAX, i32::MIN, i32::MIN + 1]);
    }

    #[test]
    fn a_stored_capacity_is_read_back_and_is_no_ticket() {
        for capacity in [Some(0), Some(FULL.get() - 1), None] {
            let stored = Stored::new(capacity, 0x5_0000_0007, Id::draw().unwrap());
            assert_eq!(Stored::parse(&stored.node), Some(stored.clone()));
            assert_eq!(Ticket::parse(&stored.node), None);
        }
        for other in [node(1, 1, 1), "capacity".into(), "capacity-1-2-x".into()] {
            assert_eq!(Stored::parse(&other), None, "{other}");
        }
    }
}
