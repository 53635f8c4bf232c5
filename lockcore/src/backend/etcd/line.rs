//! The tickets of one name, as this client knows them. There is no I/O here.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::layout::{self, Stored, Ticket};
use super::messages::{Event, KeyValue};
use crate::queue::granted_of;
use crate::request::{FULL, Id};

/// A copy of a line: as it was read once, with all events since then.
///
/// The events of a watch come in the order of their revisions, and none is left out. So when a
/// ticket is in the copy, all older tickets that are still there are in the copy too. And what has
/// left the copy has left the line. So a copy that is behind may miss that a ticket holds by now. It
/// never shows a ticket as holding that does not hold.
#[derive(Debug)]
pub(super) struct Copy {
    line: String,
    /// The revision of the last list. Events up to this one are in the list.
    listed: i64,
    /// The revision of the last event.
    told: i64,
    /// By their numbers, so the oldest is the first.
    places: BTreeMap<i64, Place>,
    numbers: HashMap<Id, i64>,
    /// The stored capacity, and what is left of one that was removed.
    stored: Kept,
    removed: Kept,
}

/// A record about the capacity, with the revision at which its key was written. 0 if there is none.
type Kept = (i64, Option<Stored>);

/// A ticket in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) id: Id,
    pub(super) permits: u32,
    pub(super) capacity: u32,
    pub(super) ttl: Duration,
}

impl Copy {
    /// The line as it was listed at this revision.
    pub(super) fn new(line: &str, revision: i64, listed: &[KeyValue]) -> Self {
        let mut copy = Self {
            line: line.to_owned(),
            listed: revision,
            told: revision,
            places: BTreeMap::new(),
            numbers: HashMap::new(),
            stored: (0, None),
            removed: (0, None),
        };
        for kv in listed {
            copy.put(kv);
        }
        copy
    }

    /// Replaces the copy by a later list. Returns whether the list is later.
    pub(super) fn read(&mut self, revision: i64, listed: &[KeyValue]) -> bool {
        let is_later = revision >= self.told;
        if is_later {
            let line = std::mem::take(&mut self.line);
            *self = Self::new(&line, revision, listed);
        }
        is_later
    }

    /// Applies events. Returns the tickets that have left. One that was adopted has not left.
    pub(super) fn apply(&mut self, events: &[Event]) -> Vec<Id> {
        let mut left = Vec::new();
        for event in events {
            let Some(kv) = &event.kv else { continue };
            // Some servers send events again, from the beginning of the watch, after a member has
            // lagged behind. Events of one revision may come in several messages.
            if kv.mod_revision <= self.listed || kv.mod_revision < self.told {
                continue;
            }
            self.told = self.told.max(kv.mod_revision);
            match event.is_delete() {
                true => left.extend(self.delete(&kv.key)),
                false => self.put(kv),
            }
        }
        left
    }

    fn put(&mut self, kv: &KeyValue) {
        if let Some(kept) = self.kept(&kv.key) {
            *kept = (kv.mod_revision, Stored::decode(&kv.value));
            return;
        }
        let Some(id) = layout::id_of(&self.line, &kv.key) else {
            return;
        };
        let ticket = Ticket::decode(&kv.value);
        let number = ticket.number(kv.create_revision);
        let before = self.numbers.insert(id, number);
        if let Some(before) = before.filter(|before| *before != number) {
            self.places.remove(&before);
        }
        let place = Place {
            id,
            permits: ticket.permits,
            capacity: ticket.capacity,
            ttl: ticket.ttl,
        };
        self.places.insert(number, place);
    }

    /// The record that this key has.
    fn kept(&mut self, key: &[u8]) -> Option<&mut Kept> {
        match key.strip_prefix(self.line.as_bytes())? {
            b"capacity" => Some(&mut self.stored),
            b"resized" => Some(&mut self.removed),
            _ => None,
        }
    }

    fn delete(&mut self, key: &[u8]) -> Option<Id> {
        if let Some(kept) = self.kept(key) {
            *kept = (0, None);
            return None;
        }
        let id = layout::id_of(&self.line, key)?;
        let number = self.numbers.remove(&id)?;
        // If the ticket was adopted, the key of its adopter has come first, and has the place. Then
        // the client that gave the ticket away is not to be told that it is gone.
        let is_its_own = self.places.get(&number)?.id == id;
        is_its_own.then(|| {
            self.places.remove(&number);
            id
        })
    }

    /// The tickets that hold, with their numbers, oldest first.
    pub(super) fn holders(&self) -> impl Iterator<Item = (i64, Place)> {
        let terms = self.places.values();
        let terms = terms.map(|place| (place.permits, place.capacity));
        let through = self.last_change().map_or(0, |change| change.through);
        let held = self.places.range(..=through).count();
        let holders = granted_of(terms, self.stored(), held);
        let places = self.places.iter().take(holders);
        places.map(|(number, place)| (*number, *place))
    }

    /// The time after which the first of the holders may be gone, if it is not renewed.
    pub(super) fn soonest(&self) -> Option<Duration> {
        self.holders().map(|(_, place)| place.ttl).min()
    }

    pub(super) fn holds(&self, id: Id) -> bool {
        self.holder(id).is_some()
    }

    /// The ticket with its number, if it holds.
    pub(super) fn holder(&self, id: Id) -> Option<(i64, Place)> {
        self.holders().find(|(_, place)| place.id == id)
    }

    pub(super) fn number(&self, id: Id) -> Option<i64> {
        self.numbers.get(&id).copied()
    }

    /// The capacity that counts: the stored one, or that of the oldest ticket.
    pub(super) fn capacity(&self) -> Option<u32> {
        let oldest = self.places.first_key_value();
        self.stored().or(oldest.map(|(_, place)| place.capacity))
    }

    /// The capacity in use, if a request with this one does not go with it.
    pub(super) fn mismatch(&self, capacity: u32) -> Option<u32> {
        match self.stored() {
            Some(stored) => (capacity == FULL.get()).then_some(stored),
            None => self.capacity().filter(|in_use| *in_use != capacity),
        }
    }

    /// The stored capacity.
    pub(super) fn stored(&self) -> Option<u32> {
        self.stored.1.and_then(|stored| stored.capacity)
    }

    /// The last change of the stored capacity, if it is remembered.
    pub(super) fn last_change(&self) -> Option<Stored> {
        self.stored.1.or(self.removed.1)
    }

    /// Whether all tickets that hold would hold without the record of a change too.
    pub(super) fn holds_without_change(&self) -> bool {
        let terms = self.places.values();
        let terms = terms.map(|place| (place.permits, place.capacity));
        granted_of(terms, None, 0) == self.holders().count()
    }

    /// The revisions at which the keys of the stored capacity, and of a removed one, were written.
    pub(super) fn changes(&self) -> [i64; 2] {
        [self.stored.0, self.removed.0]
    }

    /// The tickets, oldest first.
    pub(super) fn places(&self) -> impl Iterator<Item = (i64, Place)> {
        self.places.iter().map(|(number, place)| (*number, *place))
    }

    pub(super) fn len(&self) -> usize {
        self.places.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "lock:1:{a}/";

    fn id(number: u32) -> Id {
        Id::parse(&format!("{number:032x}")).unwrap()
    }

    fn kv(id: Id, created: i64, modified: i64, permits: u32) -> KeyValue {
        KeyValue {
            key: layout::ticket(LINE, id).into(),
            create_revision: created,
            mod_revision: modified,
            value: format!("{permits} 2 1000 0\nowner").into(),
            lease: 1,
        }
    }

    fn event(kind: i32, kv: KeyValue) -> Event {
        let kv = Some(kv);
        Event {
            kind,
            kv,
            prev_kv: None,
        }
    }

    fn came(id: Id, at: i64) -> Event {
        event(0, kv(id, at, at, 2))
    }

    /// The event of a delete has neither a value nor the revision of the create.
    fn went(id: Id, at: i64) -> Event {
        let key = layout::ticket(LINE, id).into();
        let mod_revision = at;
        let kv = KeyValue {
            key,
            mod_revision,
            ..KeyValue::default()
        };
        event(1, kv)
    }

    fn holders(copy: &Copy) -> Vec<Id> {
        copy.holders().map(|(_, place)| place.id).collect()
    }

    #[test]
    fn a_ticket_holds_when_what_is_older_has_gone() {
        let mut copy = Copy::new(LINE, 10, &[kv(id(1), 8, 8, 2)]);
        assert_eq!(copy.apply(&[came(id(2), 11), came(id(3), 12)]), []);
        assert_eq!(holders(&copy), [id(1)]);
        assert_eq!(copy.apply(&[went(id(1), 13)]), [id(1)]);
        assert_eq!(holders(&copy), [id(2)]);
        assert!(copy.holds(id(2)) && !copy.holds(id(3)));
    }

    #[test]
    fn a_ticket_that_becomes_smaller_keeps_its_place_and_lets_others_in() {
        let tickets = [kv(id(1), 8, 8, 2), kv(id(2), 9, 9, 1)];
        let mut copy = Copy::new(LINE, 10, &tickets);
        assert_eq!(holders(&copy), [id(1)]);
        copy.apply(&[event(0, kv(id(1), 8, 11, 1))]);
        assert_eq!(holders(&copy), [id(1), id(2)]);
        assert_eq!(copy.number(id(1)), Some(8));
    }

    /// A watch may begin before the revision of a later list.
    #[test]
    fn events_that_are_in_the_list_already_change_nothing() {
        let mut copy = Copy::new(LINE, 10, &[kv(id(1), 8, 8, 2)]);
        assert!(copy.read(12, &[kv(id(2), 11, 11, 2)]));
        copy.apply(&[came(id(2), 11), went(id(1), 12), went(id(2), 12)]);
        assert_eq!(holders(&copy), [id(2)]);
    }

    #[test]
    fn a_list_that_is_older_than_the_events_is_not_taken() {
        let mut copy = Copy::new(LINE, 10, &[kv(id(1), 8, 8, 2)]);
        copy.apply(&[went(id(1), 12)]);
        assert!(!copy.read(11, &[kv(id(1), 8, 8, 2)]));
        assert_eq!(copy.len(), 0);
    }

    #[test]
    fn a_ticket_that_comes_again_has_its_new_number_only() {
        let mut copy = Copy::new(LINE, 10, &[kv(id(1), 8, 8, 2)]);
        copy.apply(&[went(id(1), 11), came(id(2), 12), came(id(1), 13)]);
        assert_eq!(holders(&copy), [id(2)]);
        assert_eq!(copy.number(id(1)), Some(13));
        assert_eq!(copy.len(), 2);
    }

    #[test]
    fn a_ticket_that_is_adopted_keeps_its_place_and_has_its_new_id_only() {
        let mut copy = Copy::new(LINE, 10, &[kv(id(1), 8, 8, 2), kv(id(2), 9, 9, 2)]);
        let mut adopted = kv(id(7), 11, 11, 2);
        adopted.value = b"2 2 1000 0 8\nowner".to_vec();
        assert_eq!(copy.apply(&[event(0, adopted), went(id(1), 11)]), []);
        assert_eq!(holders(&copy), [id(7)]);
        assert_eq!((copy.number(id(1)), copy.number(id(7))), (None, Some(8)));
        assert_eq!(copy.apply(&[went(id(7), 12)]), [id(7)]);
        assert_eq!(holders(&copy), [id(2)]);
    }

    fn resized(key: &str, value: &str, at: i64) -> Event {
        let key = format!("{LINE}{key}").into();
        let (mod_revision, value) = (at, format!("{value} {}", id(9)).into());
        event(
            0,
            KeyValue {
                key,
                mod_revision,
                value,
                ..KeyValue::default()
            },
        )
    }

    #[test]
    fn a_smaller_capacity_takes_nothing_back_and_a_larger_one_lets_waiters_in() {
        let tickets = [8, 9, 10].map(|at| kv(id(at as u32), at, at, 1));
        let mut copy = Copy::new(LINE, 10, &tickets);
        assert_eq!(holders(&copy), [id(8), id(9)]);
        copy.apply(&[resized("capacity", "3 9", 11)]);
        assert_eq!(holders(&copy), [id(8), id(9), id(10)]);
        copy.apply(&[resized("capacity", "1 10", 12), came(id(12), 13)]);
        assert_eq!(holders(&copy), [id(8), id(9), id(10)]);
        assert_eq!(
            (copy.mismatch(7), copy.mismatch(FULL.get())),
            (None, Some(1))
        );
        // It is removed: the record of the last change stays for a while.
        let mut gone = went(id(0), 14);
        gone.kv.as_mut().unwrap().key = format!("{LINE}capacity").into();
        copy.apply(&[resized("resized", "none 10", 14), gone]);
        assert_eq!((copy.stored(), copy.capacity()), (None, Some(2)));
        assert_eq!(holders(&copy), [id(8), id(9), id(10)]);
        assert_eq!(copy.changes(), [0, 14]);
    }

    #[test]
    fn keys_that_are_no_tickets_are_not_counted() {
        let mut other = kv(id(1), 8, 8, 2);
        other.key = b"lock:1:{a}/other".to_vec();
        assert_eq!(Copy::new(LINE, 10, &[other]).len(), 0);
    }

    #[test]
    fn an_event_that_comes_twice_is_applied_once() {
        let stored = |at, capacity| {
            let kv = KeyValue {
                key: layout::capacity(LINE).into(),
                mod_revision: at,
                value: format!("{capacity} 0 {:032x}", 7).into(),
                ..KeyValue::default()
            };
            event(0, kv)
        };
        let mut copy = Copy::new(LINE, 10, &[]);
        copy.apply(&[stored(11, 5), stored(12, 1)]);

        copy.apply(&[stored(11, 5)]);

        assert_eq!(copy.capacity(), Some(1));
    }
}
