//! A counter, and the value that holders write: what may be asked of them, the answer, and the rule as plain code. No
//! clock and no I/O: times are numbers that the caller passes in. A store adds storage, and a way to tell those who
//! watch. Both are records of one kind. A record is a counter or a value because of its [name](Name::value) alone.

use std::fmt::Write as _;
use std::sync::Arc;

use crate::hash::Prehashed;
use crate::name::Name;
use crate::request::Id;
use crate::token::FencingToken;

/// The largest value of a counter: 2⁵³ − 1. The smallest is its negative. All values between are exact in a double, in
/// which scripts and JSON keep numbers.
pub const MAX_COUNT: i64 = (1 << 53) - 1;

/// The longest text that can be [written](CountOp::Write), in bytes.
pub const MAX_TEXT: usize = 1_024;

/// For how long a store remembers a change by its id, in milliseconds. It is far longer than a request can wait in a
/// socket, and than the core repeats one.
pub(crate) const REMEMBERED_MILLIS: u64 = 60_000;

/// A change is refused if so many others of the counter are remembered. That many take half of the megabyte that a node
/// of ZooKeeper may have.
pub const MOST_REMEMBERED: usize = 5_000;

/// A request about the counter of a name. That counter and the tickets of the name have nothing to do with each other.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Count {
    /// The name of the counter, or of the [value](Name::value).
    pub name: Name,
    /// The identity of the request. A store remembers a change by it for a minute, and answers a repetition as it
    /// answered the first time. It does not remember reads.
    pub id: Id,
    /// The operation.
    pub op: CountOp,
    /// Earlier changes of this counter that were sent once and are answered, so that they cannot come again. The store
    /// need not remember them any more.
    pub answered: Vec<Id>,
}

impl Count {
    /// A request without [`answered`](Self::answered) changes.
    #[must_use]
    pub fn new(name: Name, id: Id, op: CountOp) -> Self {
        Self {
            name,
            id,
            op,
            answered: Vec::new(),
        }
    }
}

/// An operation on a counter. A counter that does not exist counts as 0, with the generation 0 and the version 0.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CountOp {
    /// Only answer.
    Read,
    /// Add to the value.
    Add {
        /// How much, or how much less.
        delta: i64,
        /// A sum below this becomes this. A value that is at or below it is not made smaller. Bounds only a negative
        /// `delta`.
        floor: Option<i64>,
    },
    /// Set the value. If it is carried out, the counter has a new generation, even if the value is the same.
    Set {
        /// The value from then on.
        value: i64,
        /// Otherwise nothing is changed.
        only_if: Option<OnlyIf>,
    },
    /// Write a text, of at most [`MAX_TEXT`] bytes, unless one was written with a greater token. If it is carried out,
    /// there is a new version, even if the text is the same.
    Write(Written),
}

/// A text that the holder of a lock has written: its value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// The fencing token of the holder.
    pub token: FencingToken,
    /// Up to 1,024 bytes of any UTF-8.
    pub text: Arc<str>,
}

impl Written {
    /// A text, and the token of the grant under which it is written.
    #[must_use]
    pub fn new(token: FencingToken, text: impl Into<Arc<str>>) -> Self {
        let text = text.into();
        Self { token, text }
    }
}

/// When a counter may be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnlyIf {
    /// It has this value.
    Value(i64),
    /// Nobody has changed it since it had this version.
    Version(u64),
}

/// The answer to a [`Count`]: the counter after it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct Counted {
    /// The value.
    pub value: i64,
    /// Changes whenever the counter is set, or begins to exist. A generation never comes back. 0 if there is no such
    /// counter.
    pub generation: u64,
    /// Rises with every change of the value or the generation. 0 if there is no such counter.
    pub version: u64,
    /// The effect of the request.
    pub outcome: Outcome,
    /// The latest value that was written. Only in the answer to a read.
    pub written: Option<Written>,
}

impl Counted {
    /// A counter as it is after a request. Nothing was written.
    pub const fn new(value: i64, generation: u64, version: u64, outcome: Outcome) -> Self {
        Self {
            value,
            generation,
            version,
            outcome,
            written: None,
        }
    }

    /// The same, with what was written.
    pub fn with(mut self, written: Written) -> Self {
        self.written = Some(written);
        self
    }
}

/// The effect of a request on a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// It was carried out.
    Applied,
    /// The floor, the condition, or a text that was written with a greater token forbids it. Nothing was changed.
    Kept,
    /// The value would be beyond [`MAX_COUNT`] or its negative, or the text is too long. Nothing was changed.
    Overflow,
}

/// A counter as a store keeps it, with the changes that it remembers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    value: i64,
    generation: u64,
    version: u64,
    written: Option<Written>,
    /// The changes by their ids: when each was made, in milliseconds, and its answer.
    remembered: Prehashed<Id, (u64, Counted)>,
    /// Old changes are forgotten when there are more than this.
    room: usize,
}

/// The result of a request for the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Carried {
    /// The record is as it was: the request reads, or it is a repetition.
    Answered(Counted),
    /// The record must be stored. With `news`, those who watch it are told.
    Changed { answer: Counted, news: bool },
    /// As many changes as possible are remembered. Nothing was changed.
    Crowded,
}

/// The effect of a change on a record.
enum Change {
    Nothing,
    Add(i64),
    Set(i64),
    Write(Written),
}

/// Records with fewer remembered changes than this are not searched for old ones, if they are kept in memory.
const FEW: usize = 64;

impl Record {
    /// Carries out a request. `now` is in milliseconds. A new version is at least `version`.
    pub(crate) fn carry_out(&mut self, count: &Count, now: u64, version: u64) -> Carried {
        if let Some((_, answer)) = self.remembered.get(&count.id) {
            return Carried::Answered(answer.clone());
        }
        let Some((outcome, change)) = self.change(&count.op) else {
            let mut answer = self.counted(Outcome::Applied);
            answer.written = self.written.clone();
            return Carried::Answered(answer);
        };
        for id in &count.answered {
            self.remembered.remove(id);
        }
        self.forget_old(now);
        if self.remembered.len() >= MOST_REMEMBERED {
            return Carried::Crowded;
        }
        let before = self.version;
        if !matches!(change, Change::Nothing) {
            self.version = version.max(self.version + 1);
            if self.generation == 0 || matches!(change, Change::Set(_)) {
                self.generation = self.version;
            }
        }
        match change {
            Change::Nothing => {}
            Change::Add(value) | Change::Set(value) => self.value = value,
            Change::Write(written) => self.written = Some(written),
        }
        let answer = self.counted(outcome);
        self.remembered.insert(count.id, (now, answer.clone()));
        Carried::Changed {
            answer,
            news: self.version != before,
        }
    }

    /// The effect of an operation. `None` if it only reads.
    fn change(&self, op: &CountOp) -> Option<(Outcome, Change)> {
        let fits = |value: i64| value.unsigned_abs() <= MAX_COUNT.unsigned_abs();
        let refused = |outcome| (outcome, Change::Nothing);
        Some(match *op {
            CountOp::Read => return None,
            CountOp::Add { delta, .. } if !fits(delta) => refused(Outcome::Overflow),
            CountOp::Add { delta, floor } => {
                // Both are far from the ends of 64 bits.
                let sum = self.value + delta;
                let sum = match floor {
                    Some(floor) if delta < 0 => sum.max(floor.min(self.value)),
                    _ => sum,
                };
                match sum {
                    sum if !fits(sum) => refused(Outcome::Overflow),
                    sum if sum != self.value => (Outcome::Applied, Change::Add(sum)),
                    _ if delta == 0 => (Outcome::Applied, Change::Nothing),
                    _ => refused(Outcome::Kept),
                }
            }
            CountOp::Set { value, only_if } => {
                let may = match only_if {
                    None => true,
                    Some(OnlyIf::Value(value)) => self.value == value,
                    Some(OnlyIf::Version(version)) => self.version == version,
                };
                match may {
                    _ if !fits(value) => refused(Outcome::Overflow),
                    true => (Outcome::Applied, Change::Set(value)),
                    false => refused(Outcome::Kept),
                }
            }
            CountOp::Write(ref new) => match &self.written {
                _ if new.text.len() > MAX_TEXT => refused(Outcome::Overflow),
                Some(written) if new.token < written.token => refused(Outcome::Kept),
                _ => (Outcome::Applied, Change::Write(new.clone())),
            },
        })
    }

    fn counted(&self, outcome: Outcome) -> Counted {
        Counted::new(self.value, self.generation, self.version, outcome)
    }

    fn forget_old(&mut self, now: u64) {
        if self.remembered.len() < self.room {
            return;
        }
        // A time in the future is of a clock that was set back since, or has begun again.
        self.remembered
            .retain(|_, (at, _)| now.abs_diff(*at) <= REMEMBERED_MILLIS);
        self.room = (2 * self.remembered.len()).clamp(FEW, MOST_REMEMBERED);
    }

    /// Whether the counter exists.
    #[cfg_attr(
        not(any(feature = "sqlite", feature = "zookeeper")),
        allow(dead_code, reason = "other stores keep no text of it")
    )]
    pub(crate) fn exists(&self) -> bool {
        self.generation != 0
    }

    /// This change is made when the record is written, and the store does not know that time. The next client that reads
    /// the record does: see [`made_at`](Self::made_at).
    #[cfg_attr(
        not(feature = "zookeeper"),
        allow(dead_code, reason = "other stores know the time of a write")
    )]
    pub(crate) fn made_by_this_write(&mut self, id: Id) {
        if let Some((at, _)) = self.remembered.get_mut(&id) {
            *at = 0;
        }
    }

    /// The record was written at this time.
    #[cfg_attr(
        not(feature = "zookeeper"),
        allow(dead_code, reason = "other stores know the time of a write")
    )]
    pub(crate) fn made_at(&mut self, at: u64) {
        for (made, _) in self.remembered.values_mut() {
            if *made == 0 {
                *made = at;
            }
        }
    }

    /// The record as text: a line with value, generation and version, and a line for each remembered change. If something
    /// was written, a line with `=` and its token follows, and then the written text as it is. This is wire format.
    #[cfg_attr(
        not(any(feature = "sqlite", feature = "zookeeper")),
        allow(dead_code, reason = "other stores keep no text of it")
    )]
    pub(crate) fn encode(&self) -> String {
        let Self {
            value,
            generation,
            version,
            ..
        } = self;
        let mut text = format!("{value} {generation} {version}\n");
        for (id, (at, answer)) in &self.remembered {
            let Counted {
                value,
                generation,
                version,
                outcome,
                ..
            } = answer;
            let outcome = match outcome {
                Outcome::Applied => 'a',
                Outcome::Kept => 'k',
                Outcome::Overflow => 'o',
            };
            // Writing into a string does not fail.
            let _ = writeln!(text, "{id} {at} {outcome} {value} {generation} {version}");
        }
        if let Some(Written {
            token,
            text: written,
        }) = &self.written
        {
            let _ = write!(text, "={token}\n{written}");
        }
        text
    }

    /// Reads what [`encode`](Self::encode) has written. `None` for anything else.
    #[cfg_attr(
        not(any(feature = "sqlite", feature = "zookeeper")),
        allow(dead_code, reason = "other stores keep no text of it")
    )]
    pub(crate) fn decode(text: &str) -> Option<Self> {
        // No line in front of the written text has this character.
        let (text, written) = match text.split_once("\n=") {
            Some((text, written)) => (text, Some(written.split_once('\n')?)),
            None => (text, None),
        };
        let written = match written {
            Some((token, text)) => Some(Written::new(token.parse().ok()?, text)),
            None => None,
        };
        let mut lines = text.lines();
        let mut fields = lines.next()?.split(' ');
        let mut record = Self {
            written,
            value: fields.next()?.parse().ok()?,
            generation: fields.next()?.parse().ok()?,
            version: fields.next()?.parse().ok()?,
            ..Self::default()
        };
        for line in lines {
            let mut fields = line.split(' ');
            let id = Id::parse(fields.next()?)?;
            let at = fields.next()?.parse().ok()?;
            let outcome = match fields.next()? {
                "a" => Outcome::Applied,
                "k" => Outcome::Kept,
                "o" => Outcome::Overflow,
                _ => return None,
            };
            let value = fields.next()?.parse().ok()?;
            let generation = fields.next()?.parse().ok()?;
            let answer = Counted::new(value, generation, fields.next()?.parse().ok()?, outcome);
            record.remembered.insert(id, (at, answer));
        }
        // So that the next value and the next version are numbers too.
        let most = MAX_COUNT.unsigned_abs();
        let is_sound = record.value.unsigned_abs() <= most && record.version <= most;
        is_sound.then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Namespace;

    fn count(op: CountOp) -> Count {
        let name = Name::new(Namespace::new("lock").unwrap(), "a").unwrap();
        Count::new(name, Id::draw().unwrap(), op)
    }

    fn add(delta: i64) -> CountOp {
        CountOp::Add { delta, floor: None }
    }

    #[test]
    fn a_record_is_read_back_as_it_was_written() {
        let mut record = Record::default();
        let set = CountOp::Set {
            value: -5,
            only_if: None,
        };
        for op in [set, add(MAX_COUNT), add(3 - MAX_COUNT), add(-MAX_COUNT)] {
            assert!(matches!(
                record.carry_out(&count(op), 7, 100),
                Carried::Changed { .. }
            ));
        }
        let read = Record::decode(&record.encode()).unwrap();
        assert_eq!(
            Record {
                room: record.room,
                ..read
            },
            record
        );

        for other in ["", "1", "1 2", "1 2 3\nx", "a 1 1", "1 2 3\n0 0 a 1 1 1"] {
            assert_eq!(Record::decode(other), None, "{other}");
        }
    }

    /// Otherwise the next change would pass the numbers of the record.
    #[test]
    fn a_record_with_numbers_that_no_change_makes_is_not_read() {
        let most = MAX_COUNT;
        for sound in [format!("{most} 1 {most}"), format!("-{most} 1 1")] {
            let mut record = Record::decode(&sound).expect(&sound);
            let _ = record.carry_out(&count(add(1)), 5, 1);
            let _ = record.carry_out(&count(add(-1)), 5, 1);
        }
        let beyond = most + 1;
        for damaged in [
            format!("{beyond} 1 1"),
            format!("-{beyond} 1 1"),
            format!("{} 1 1", i64::MIN),
            format!("{} 1 1", i64::MAX),
            format!("1 1 {beyond}"),
            format!("1 1 {}", u64::MAX),
        ] {
            assert_eq!(Record::decode(&damaged), None, "{damaged}");
        }
    }

    #[test]
    fn a_change_is_forgotten_a_minute_later_or_when_its_client_has_the_answer() {
        let mut record = Record::default();
        let (first, second) = (count(add(1)), count(add(1)));
        let _ = record.carry_out(&first, 1_000, 1);
        let _ = record.carry_out(&second, 1_000, 1);
        let repeated = record.carry_out(&first, 2_000, 1);
        assert!(matches!(repeated, Carried::Answered(answer) if answer.value == 1));

        let mut third = count(add(1));
        third.answered = vec![second.id];
        let _ = record.carry_out(&third, 3_000, 1);
        assert_eq!(record.remembered.len(), 2);

        record.room = 0;
        let _ = record.carry_out(&count(add(1)), 61_001, 1);
        assert!(!record.remembered.contains_key(&first.id));
        assert!(record.remembered.contains_key(&third.id));
    }

    #[test]
    fn a_counter_that_remembers_too_many_changes_takes_no_other() {
        let mut record = Record::default();
        for _ in 0..MOST_REMEMBERED {
            assert!(matches!(
                record.carry_out(&count(add(1)), 5, 1),
                Carried::Changed { .. }
            ));
        }
        assert_eq!(record.carry_out(&count(add(1)), 5, 1), Carried::Crowded);
        assert!(record.encode().len() < 500_000);

        let later = 6 + REMEMBERED_MILLIS;
        assert!(matches!(
            record.carry_out(&count(add(1)), later, 1),
            Carried::Changed { .. }
        ));
    }

    #[test]
    fn the_floor_bounds_what_makes_the_value_smaller() {
        let floored = |delta| CountOp::Add {
            delta,
            floor: Some(0),
        };
        let mut record = Record::default();
        let mut carried = |op| match record.carry_out(&count(op), 5, 1) {
            Carried::Changed { answer, news } => (answer.value, answer.outcome, news),
            other => panic!("{other:?}"),
        };
        assert_eq!(carried(floored(-1)), (0, Outcome::Kept, false));
        assert_eq!(carried(add(5)), (5, Outcome::Applied, true));
        assert_eq!(carried(floored(-3)), (2, Outcome::Applied, true));
        assert_eq!(carried(floored(-3)), (0, Outcome::Applied, true));
        assert_eq!(carried(floored(-3)), (0, Outcome::Kept, false));
        assert_eq!(carried(add(-3)), (-3, Outcome::Applied, true));
        assert_eq!(carried(floored(-3)), (-3, Outcome::Kept, false));
        assert_eq!(carried(floored(2)), (-1, Outcome::Applied, true));
    }
}
