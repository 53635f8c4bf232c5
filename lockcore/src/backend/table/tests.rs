use std::collections::HashMap;
use std::num::NonZeroU32;

use super::*;
use crate::backend::{Count, CountOp, Outcome, ResizeOp};
use crate::name::{Name, Namespace};

/// A row of texts. A column that is not there is null.
#[derive(Default)]
struct Texts(HashMap<&'static str, String>);

fn row<const N: usize>(columns: [(&'static str, &str); N]) -> Texts {
    let columns = columns.map(|(column, value)| (column, value.to_owned()));
    Texts(HashMap::from(columns))
}

impl Row for Texts {
    fn int(&self, column: &'static str) -> Result<Option<i64>, StoreError> {
        let parsed = self.0.get(column).map(|text| text.parse());
        parsed.transpose().map_err(|_| damaged(column))
    }

    fn text(&self, column: &'static str) -> Result<Option<String>, StoreError> {
        Ok(self.0.get(column).cloned())
    }

    fn id(&self, column: &'static str) -> Result<Option<Id>, StoreError> {
        Ok(self.0.get(column).and_then(|text| Id::parse(text)))
    }

    fn is(&self, column: &'static str) -> Result<bool, StoreError> {
        Ok(self.0.get(column).is_some_and(|text| text == "t"))
    }
}

const TTL: Duration = Duration::from_secs(3);

#[test]
fn each_outcome_of_an_enqueue_is_an_answer() {
    let soonest = Some(Duration::from_micros(1_500));
    for (found, expected) in [
        (
            row([("outcome", "0"), ("ticket", "17")]),
            Enqueued::Granted {
                ticket: 17,
                valid_for: TTL,
            },
        ),
        (
            row([("outcome", "1"), ("ticket", "17"), ("soonest_in", "1500")]),
            Enqueued::Waiting {
                ticket: 17,
                valid_for: TTL,
                recheck_in: soonest,
                ahead: None,
            },
        ),
        (
            row([("outcome", "2"), ("soonest_in", "1500")]),
            Enqueued::Busy { retry_in: soonest },
        ),
        (
            // The holder's lease ended between the walk and the answer.
            row([("outcome", "2"), ("soonest_in", "-7")]),
            Enqueued::Busy {
                retry_in: Some(Duration::ZERO),
            },
        ),
        (
            row([("outcome", "3"), ("in_use", "5")]),
            Enqueued::CapacityMismatch { in_use: 5 },
        ),
        (row([("outcome", "4")]), Enqueued::Gone),
    ] {
        assert_eq!(enqueued(&found, TTL).unwrap(), expected);
    }
    let exhausted = enqueued(&row([("outcome", "5")]), TTL).unwrap_err();
    assert_eq!(exhausted.fault(), Fault::Refused);
}

#[test]
fn an_answer_that_lacks_what_it_must_have_is_an_error_and_no_grant() {
    for found in [
        row([]),
        row([("outcome", "0")]),
        row([("outcome", "1")]),
        row([("outcome", "3")]),
        row([("outcome", "6"), ("ticket", "17")]),
        row([("outcome", "0"), ("ticket", "seventeen")]),
    ] {
        let error = enqueued(&found, TTL).unwrap_err();
        assert_eq!(error.fault(), Fault::Unknown, "{error}");
    }
    assert!(renewed(&row([("ticket", "17"), ("holds", "t")])).is_err());
}

#[test]
fn a_renewed_ticket_holds_or_waits_or_is_lost() {
    let valid_for = Duration::from_millis(2);
    for (found, expected) in [
        (row([]), Renewed::Lost),
        (
            row([("ticket", "17"), ("ttl", "2000"), ("holds", "t")]),
            Renewed::Granted { valid_for },
        ),
        (
            row([
                ("ticket", "17"),
                ("ttl", "2000"),
                ("holds", "t"),
                ("owner", "h/1/1\n3000 h/2/1 why"),
            ]),
            Renewed::AskedBack {
                valid_for,
                grace: TTL,
            },
        ),
        (
            row([("ticket", "17"), ("ttl", "2000"), ("soonest_in", "2000")]),
            Renewed::Waiting {
                valid_for,
                recheck_in: Some(valid_for),
                grace: None,
            },
        ),
    ] {
        assert_eq!(renewed(&found).unwrap(), expected);
    }
}

#[test]
fn a_change_of_a_capacity_is_judged_by_the_change_that_is_stored() {
    let id = |digit: char| Id::parse(&digit.to_string().repeat(32)).unwrap();
    let name = Name::new(Namespace::new("test").unwrap(), "a").unwrap();
    let op = ResizeOp::Set {
        capacity: Some(3),
        after: Some(id('a')),
        stated: NonZeroU32::MIN,
    };
    let resize = Resize::new(name, id('b'), op);
    for (change, in_use, expected) in [
        ("b", None, ResizeOutcome::Applied),
        ("a", Some("5"), ResizeOutcome::Mismatch { in_use: 5 }),
        ("a", None, ResizeOutcome::Kept),
        ("c", Some("5"), ResizeOutcome::Kept),
    ] {
        let mut found = row([("capacity", "4")]);
        found.0.insert("change", change.repeat(32));
        found
            .0
            .extend(in_use.map(|in_use| ("in_use", in_use.to_owned())));
        let change = found.id("change").unwrap();
        let answer = resized(&found, &resize).unwrap();
        assert_eq!(answer, Resized::new(Some(4), change, expected));
    }
}

#[test]
fn a_page_that_is_not_full_is_the_last() {
    let listing = Listing::new(Namespace::new("test").unwrap(), String::new(), 2);
    let rows = ["test:1:{a}", "test:1:{b}"].map(|key| row([("name", key)]));
    let full = page(&rows, &listing).unwrap();
    assert_eq!(full.next.as_deref(), Some("test:1:{b}"));
    let last = page(&rows[..1], &listing).unwrap();
    assert_eq!((last.names[0].name.as_str(), last.next), ("a", None));
}

#[test]
fn a_line_that_was_not_summed_up_has_no_summary() {
    let mut listing = Listing::new(Namespace::new("test").unwrap(), String::new(), 9);
    listing.summaries = true;
    let rows = [
        row([
            ("name", "test:1:{a}"),
            ("holders", "1"),
            ("waiters", "2"),
            ("owner", "host/1/a billing\n7000 host/2/b x"),
            ("since", "3000000"),
            ("longest_wait", "2000000"),
        ]),
        row([("name", "test:1:{long}")]),
        row([
            ("name", "test:1:{gone}"),
            ("holders", "0"),
            ("waiters", "0"),
        ]),
    ];
    let names = page(&rows, &listing).unwrap().names;
    let summary = names[0].summary.as_ref().unwrap();
    assert_eq!((summary.holders, summary.waiters), (1, 2));
    assert_eq!(summary.owner, "host/1/a");
    assert_eq!(summary.owner_text.as_deref(), Some("billing"));
    assert_eq!(summary.since, Some(Duration::from_secs(3)));
    assert_eq!(summary.longest_wait, Some(Duration::from_secs(2)));
    assert_eq!((&names[1].summary, &names[2].summary), (&None, &None));
}

#[test]
fn keys_with_a_beginning_sort_between_it_and_the_text_behind_it() {
    let namespace = Namespace::new("test").unwrap();
    let of = |name: &str| key(&Name::new(namespace.clone(), name).unwrap(), 1);
    let beginning = keys_like(&namespace, 1, "a");
    let last = behind(&beginning);
    for name in ["a", "a~", "az", &"a\u{10ffff}".repeat(400)] {
        let key = of(name);
        assert!(beginning <= key && key < last, "{key}");
    }
    assert!(of("b") > last || of("b") < beginning);
}

#[test]
fn a_counter_is_written_only_if_it_changes_or_was_not_used_for_long() {
    let name = Name::new(Namespace::new("test").unwrap(), "a").unwrap();
    let id = Id::draw().unwrap();
    let add = CountOp::Add {
        delta: 2,
        floor: None,
    };
    let clock = Duration::from_secs(1_000);
    let damaged = || StoreError::new(Fault::Config, "damaged");

    let nothing = row([("now", "1000")]);
    let read = Count::new(name.clone(), Id::draw().unwrap(), CountOp::Read);
    let Step::Answer(answer) = step(&nothing, &read, clock, clock, damaged).unwrap() else {
        panic!("a read of a counter that is not there writes nothing");
    };
    assert_eq!((answer.count, answer.generation), (0, 0));

    let added = step(
        &nothing,
        &Count::new(name.clone(), id, add.clone()),
        clock,
        clock,
        damaged,
    );
    let Step::Write {
        was,
        data,
        life,
        answer,
        news,
    } = added.unwrap()
    else {
        panic!("a change is written");
    };
    assert_eq!((was, answer.count, news), (None, 2, true));

    let life = life.to_string();
    let mut stored = row([("used", "1000"), ("now", "1000")]);
    stored.0.extend([("data", data), ("life", life)]);
    let again = step(
        &stored,
        &Count::new(name.clone(), id, add.clone()),
        clock,
        clock,
        damaged,
    );
    let Step::Answer(answer) = again.unwrap() else {
        panic!("a repetition writes nothing");
    };
    assert_eq!((answer.count, answer.outcome), (2, Outcome::Applied));

    stored.0.insert("now", (1_000 + 86_400).to_string());
    let noted = step(&stored, &read, clock, clock, damaged).unwrap();
    assert!(
        matches!(noted, Step::Write { news: false, .. }),
        "{noted:?}"
    );

    stored.0.insert("now", i64::from(i32::MAX).to_string());
    let over = step(&stored, &read, clock, clock, damaged).unwrap();
    assert!(matches!(over, Step::Answer(answer) if answer.count == 0));

    let mut other = row([("used", "1000"), ("now", "1000"), ("life", "9")]);
    other.0.insert("data", "not a counter".into());
    assert_eq!(
        step(&other, &read, clock, clock, damaged)
            .unwrap_err()
            .fault(),
        Fault::Config
    );
}
