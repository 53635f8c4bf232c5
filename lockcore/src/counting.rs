//! Counters, and the values that holders write: the requests, the answers, and the rule as plain
//! code. There is no clock and no I/O here: the caller passes times in as numbers. A store adds the
//! storage, and the pushes to clients that watch. Counters and values are records of one kind. Only
//! the [name](Name::value) of a record tells whether it is a counter or a value.

pub(crate) mod answered;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use crate::hash::Prehashed;
use crate::name::Name;
use crate::request::Id;
use crate::token::FencingToken;

/// The largest count of a counter: 2⁵³ − 1. The smallest is its negative. A double represents all
/// values between them exactly. Scripts and JSON keep numbers in doubles.
pub const MAX_COUNT: i64 = (1 << 53) - 1;

/// The longest text that can be [written](CountOp::Write), in bytes.
pub const MAX_TEXT: usize = 1_024;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// For how long a store keeps a counter or a value after its last use, if no client has stated
/// another time.
pub const KEEP: Duration = DAY.saturating_mul(30);

/// The bounds of the time for which a counter can be kept: a minute, for which changes are
/// remembered, and a hundred years.
pub(crate) const KEEPS: [Duration; 2] = [Duration::from_secs(60), DAY.saturating_mul(36_525)];

/// For how long a store remembers a change by its id, in milliseconds. This is far longer than a
/// request can wait in a socket. It is also longer than the 30 seconds for which the core repeats a
/// request. So a repetition never finds its change forgotten.
pub(crate) const REMEMBERED_MILLIS: u64 = 60_000;

/// The most changes that a store remembers for one counter. When there are so many, a further
/// change is refused. They take half of the megabyte that a node of ZooKeeper may have.
pub const MOST_REMEMBERED: usize = 5_000;

/// A request about the counter of a name. The counter is independent of the tickets of the name.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Count {
    /// The name of the counter, or of the [value](Name::value).
    pub name: Name,
    /// The identity of the request. A store remembers the id of a change for a minute, with the
    /// answer. It gives the same answer to a repetition with this id, and does not make the change
    /// again. It does not remember reads.
    pub id: Id,
    /// The operation.
    pub op: CountOp,
    /// Earlier changes of this counter that were sent once and were answered. They cannot arrive
    /// again, so the store can forget them.
    pub answered: Vec<Id>,
    /// For how long the store keeps the counter after its last use: a minute to 100 years. A
    /// [set](CountOp::Set) that is carried out states it anew. Every other change that is carried
    /// out can only make it longer. With `None` it stays as it is, and is [`KEEP`] for a new
    /// counter.
    pub keep: Option<Duration>,
}

impl Count {
    /// A request without [`answered`](Self::answered) changes, which does not say for how long the
    /// counter is [kept](Self::keep).
    #[must_use]
    pub fn new(name: Name, id: Id, op: CountOp) -> Self {
        Self {
            name,
            id,
            op,
            answered: Vec::new(),
            keep: None,
        }
    }

    /// [`keep`](Self::keep) in seconds.
    pub(crate) fn keep_seconds(&self) -> Option<u64> {
        let [least, most] = KEEPS;
        self.keep.map(|keep| keep.clamp(least, most).as_secs())
    }
}

/// An operation on a counter. A counter that does not exist counts as 0, with the generation 0 and
/// the version 0.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CountOp {
    /// Only answer.
    Read,
    /// Add to the count.
    Add {
        /// The number to add. It may be negative.
        delta: i64,
        /// The lower bound of the sum. A smaller sum becomes the floor. A count that is at or below
        /// the floor is not made smaller. A `delta` that is positive ignores the floor.
        floor: Option<i64>,
    },
    /// Set the count. If the condition holds, the counter gets a new generation, even if the count
    /// is the same.
    Set {
        /// The new count.
        count: i64,
        /// The condition. If it does not hold, nothing is changed. `None` for no condition.
        only_if: Option<OnlyIf>,
    },
    /// Write a text, of at most [`MAX_TEXT`] bytes, unless the present text was written with a
    /// greater token. A write makes a new version, even if the text is the same.
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

/// A condition for setting a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnlyIf {
    /// The counter has this count.
    Count(i64),
    /// Nobody has changed the counter since it had this version.
    Version(u64),
}

/// The answer to a [`Count`]: the counter after the request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct Counted {
    /// The count.
    pub count: i64,
    /// Changes whenever the counter is set or created. The same generation never comes twice. 0 if
    /// there is no such counter.
    pub generation: u64,
    /// Rises with every change of the count or the generation. 0 if there is no such counter.
    pub version: u64,
    /// The effect of the request.
    pub outcome: Outcome,
    /// The latest value that was written. Only in the answer to a read.
    pub written: Option<Written>,
}

impl Counted {
    /// A counter as it is after a request, without a written value.
    pub const fn new(count: i64, generation: u64, version: u64, outcome: Outcome) -> Self {
        Self {
            count,
            generation,
            version,
            outcome,
            written: None,
        }
    }

    /// The same answer, with the written value.
    pub fn with(mut self, written: Written) -> Self {
        self.written = Some(written);
        self
    }
}

/// The effect of a request on a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The request was carried out.
    Applied,
    /// Nothing was changed, because of the floor, the condition, or a text with a greater token.
    Kept,
    /// Nothing was changed, because the count would be beyond [`MAX_COUNT`] or its negative, or
    /// because the text is too long.
    Overflow,
}

/// A counter as a store keeps it, with the changes that it remembers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Record {
    count: i64,
    generation: u64,
    version: u64,
    /// For how many seconds the record is kept after its last use.
    keep: u64,
    written: Option<Written>,
    /// The remembered changes by their ids. Each has the time of the change in milliseconds, and
    /// the answer.
    remembered: Prehashed<Id, (u64, Counted)>,
    /// When more changes than this are remembered, the old ones are removed.
    room: usize,
}

/// What a request has done to the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Carried {
    /// The record has not changed: the request is a read or a repetition.
    Answered(Counted),
    /// The record has changed, and the store must write it. If `news` is true, the store must also
    /// push to the clients that watch.
    Changed { answer: Counted, news: bool },
    /// Nothing was changed, because [`MOST_REMEMBERED`] changes are remembered already.
    Crowded,
}

/// The effect of a change on a record.
enum Change {
    Nothing,
    Add(i64),
    Set(i64),
    Write(Written),
}

/// If a record is kept in memory, it is searched for old changes only when it remembers more
/// changes than this.
const FEW: usize = 64;

impl Record {
    /// Carries out a request. `now` is in milliseconds. `version` is the least number for a new
    /// version.
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
        match count.keep_seconds() {
            Some(keep) if matches!(change, Change::Set(_)) => self.keep = keep,
            Some(keep) if !matches!(change, Change::Nothing) => self.keep = self.keep.max(keep),
            _ => {}
        }
        if self.keep == 0 {
            self.keep = KEEP.as_secs();
        }
        match change {
            Change::Nothing => {}
            Change::Add(count) | Change::Set(count) => self.count = count,
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
        let fits = |count: i64| count.unsigned_abs() <= MAX_COUNT.unsigned_abs();
        let refused = |outcome| (outcome, Change::Nothing);
        Some(match *op {
            CountOp::Read => return None,
            CountOp::Add { delta, .. } if !fits(delta) => refused(Outcome::Overflow),
            CountOp::Add { delta, floor } => {
                // The sum of both fits into 64 bits.
                let sum = self.count + delta;
                let sum = match floor {
                    Some(floor) if delta < 0 => sum.max(floor.min(self.count)),
                    _ => sum,
                };
                match sum {
                    sum if !fits(sum) => refused(Outcome::Overflow),
                    sum if sum != self.count => (Outcome::Applied, Change::Add(sum)),
                    _ if delta == 0 => (Outcome::Applied, Change::Nothing),
                    _ => refused(Outcome::Kept),
                }
            }
            CountOp::Set { count, only_if } => {
                let may = match only_if {
                    None => true,
                    Some(OnlyIf::Count(count)) => self.count == count,
                    Some(OnlyIf::Version(version)) => self.version == version,
                };
                match may {
                    _ if !fits(count) => refused(Outcome::Overflow),
                    true => (Outcome::Applied, Change::Set(count)),
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
        Counted::new(self.count, self.generation, self.version, outcome)
    }

    fn forget_old(&mut self, now: u64) {
        if self.remembered.len() < self.room {
            return;
        }
        // If the time of a change is in the future, the clock was set back or started anew since.
        // Such a change is removed too, when the difference is large enough.
        self.remembered
            .retain(|_, (at, _)| now.abs_diff(*at) <= REMEMBERED_MILLIS);
        self.room = (2 * self.remembered.len()).clamp(FEW, MOST_REMEMBERED);
    }

    /// For how long a store must keep the record after its last use.
    pub(crate) fn keep(&self) -> Duration {
        Duration::from_secs(self.keep)
    }

    /// A store notes a read only if the last use that it has noted is older than this. So most
    /// reads write nothing.
    #[cfg_attr(
        not(any(
            feature = "mysql",
            feature = "postgres",
            feature = "sqlite",
            feature = "zookeeper"
        )),
        allow(dead_code, reason = "other stores note each use")
    )]
    pub(crate) fn slack(&self) -> Duration {
        (self.keep() / 2).min(DAY / 2)
    }

    /// For how long a store keeps the record after the last use that it has noted.
    #[cfg_attr(
        not(any(
            feature = "mysql",
            feature = "postgres",
            feature = "sqlite",
            feature = "zookeeper"
        )),
        allow(dead_code, reason = "other stores note each use")
    )]
    pub(crate) fn life(&self) -> Duration {
        self.keep() + self.slack()
    }

    /// Whether the counter exists.
    #[cfg_attr(
        not(any(
            feature = "etcd",
            feature = "mysql",
            feature = "postgres",
            feature = "sqlite",
            feature = "zookeeper"
        )),
        allow(dead_code, reason = "other stores do not ask this")
    )]
    pub(crate) fn exists(&self) -> bool {
        self.generation != 0
    }

    /// Marks a change that is made by this write of the record, because the writing client does not
    /// know the time of the write. The next client that reads the record knows it: see
    /// [`made_at`](Self::made_at).
    #[cfg_attr(
        not(feature = "zookeeper"),
        allow(dead_code, reason = "other stores know the time of a write")
    )]
    pub(crate) fn made_by_this_write(&mut self, id: Id) {
        if let Some((at, _)) = self.remembered.get_mut(&id) {
            *at = 0;
        }
    }

    /// Sets the time of the marked changes: the time at which the record was written.
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

    /// The record as text. The first line has count, generation, version and keep, and each
    /// remembered change has a line. If there is a written value, a line with `=` and its token follows, and
    /// then the text of the value, unchanged. This is a wire format.
    #[cfg_attr(
        not(any(
            feature = "etcd",
            feature = "mysql",
            feature = "postgres",
            feature = "sqlite",
            feature = "zookeeper"
        )),
        allow(dead_code, reason = "other stores keep no text of it")
    )]
    pub(crate) fn encode(&self) -> String {
        let Self {
            count,
            generation,
            version,
            keep,
            ..
        } = self;
        let mut text = format!("{count} {generation} {version} {keep}\n");
        for (id, (at, answer)) in &self.remembered {
            let Counted {
                count,
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
            let _ = writeln!(text, "{id} {at} {outcome} {count} {generation} {version}");
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
        not(any(
            feature = "etcd",
            feature = "mysql",
            feature = "postgres",
            feature = "sqlite",
            feature = "zookeeper"
        )),
        allow(dead_code, reason = "other stores keep no text of it")
    )]
    pub(crate) fn decode(text: &str) -> Option<Self> {
        // No line before the written text contains a `=`.
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
            count: fields.next()?.parse().ok()?,
            generation: fields.next()?.parse().ok()?,
            version: fields.next()?.parse().ok()?,
            keep: fields.next()?.parse().ok()?,
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
            let count = fields.next()?.parse().ok()?;
            let generation = fields.next()?.parse().ok()?;
            let answer = Counted::new(count, generation, fields.next()?.parse().ok()?, outcome);
            record.remembered.insert(id, (at, answer));
        }
        // With this check the next count and the next version are valid numbers too.
        let most = MAX_COUNT.unsigned_abs();
        let [_, longest] = KEEPS;
        let is_sound = record.count.unsigned_abs() <= most
            && record.version <= most
            && record.keep <= longest.as_secs();
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
            count: -5,
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

        for other in [
            "",
            "1",
            "1 2 3",
            "1 2 3 4\nx",
            "a 1 1 1",
            "1 2 3 4\n0 0 a 1 1 1",
        ] {
            assert_eq!(Record::decode(other), None, "{other}");
        }
    }

    /// If such a record were read, the next change would exceed the range of its numbers.
    #[test]
    fn a_record_with_numbers_that_no_change_makes_is_not_read() {
        let most = MAX_COUNT;
        for sound in [format!("{most} 1 {most} 60"), format!("-{most} 1 1 60")] {
            let mut record = Record::decode(&sound).expect(&sound);
            let _ = record.carry_out(&count(add(1)), 5, 1);
            let _ = record.carry_out(&count(add(-1)), 5, 1);
        }
        let beyond = most + 1;
        for damaged in [
            format!("{beyond} 1 1 60"),
            format!("-{beyond} 1 1 60"),
            format!("{} 1 1 60", i64::MIN),
            format!("{} 1 1 60", i64::MAX),
            format!("1 1 {beyond} 60"),
            format!("1 1 {} 60", u64::MAX),
            format!("1 1 1 {}", u64::MAX),
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
        assert!(matches!(repeated, Carried::Answered(answer) if answer.count == 1));

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
    fn a_set_states_how_long_the_record_is_kept_and_an_add_makes_it_only_longer() {
        let hours = |hours: u64| Duration::from_secs(hours * 3_600);
        let set = |only_if| CountOp::Set { count: 1, only_if };
        let mut record = Record::default();
        let mut unstated = Record::default();
        let _ = unstated.carry_out(&count(add(1)), 5, 1);
        assert_eq!(unstated.keep(), KEEP);
        for (op, keep, kept) in [
            (add(1), Some(hours(2)), hours(2)),
            (add(1), Some(hours(1)), hours(2)),
            (add(1), Some(hours(3)), hours(3)),
            (set(None), Some(hours(1)), hours(1)),
            (set(None), None, hours(1)),
            (add(1), None, hours(1)),
            (set(Some(OnlyIf::Count(9))), Some(hours(9)), hours(1)),
            (add(1), Some(Duration::MAX), KEEPS[1]),
            (set(None), Some(Duration::ZERO), KEEPS[0]),
        ] {
            let count = Count { keep, ..count(op) };
            let _ = record.carry_out(&count, 5, 1);
            assert_eq!(record.keep(), kept, "{count:?}");
            assert!(record.life() <= kept + kept / 2);
        }
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
            Carried::Changed { answer, news } => (answer.count, answer.outcome, news),
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
