//! Values beside locks: which writes succeed, what a read returns, and which clients are told of a
//! change.

use std::sync::Arc;

use super::counters::with_counters;
use super::fact::{Fact, group_of};
use super::kit::{Asker, Store, kind};
use super::steps::soon;
use super::watches::that_watches;
use crate::backend::{Count, CountOp, Counted, Id, MAX_COUNT, MAX_TEXT, Outcome, Written};
use crate::error::ErrorKind;
use crate::token::FencingToken;

pub(super) fn all() -> Vec<Fact> {
    let any = group_of!["values", false, with_counters;
        a_value_is_read_as_it_was_written
        a_value_is_replaced_by_the_same_token_or_a_greater_one
        tokens_are_compared_to_the_last_digit
        a_text_that_is_too_long_is_not_written
        a_value_is_written_once_however_often_it_is_sent
        a_value_a_counter_and_a_line_of_one_name_are_three_things
        random_values_are_kept_as_in_plain_memory
        values_at_the_same_time_end_on_the_greatest_token
    ];
    let told = group_of!["values", false, that_watches;
        a_client_that_watches_is_told_of_each_value_and_not_of_the_counter
    ];
    let by_clients = group_of!["values", true, with_counters;
        the_next_holder_finds_the_last_value
        a_value_is_told_to_those_who_follow_it
        a_former_holder_cannot_replace_the_value_of_a_later_one
        only_an_exclusive_holder_writes_a_value
    ];
    [any, told, by_clients].concat()
}

const LARGEST: i64 = i64::MAX;

fn token(number: i64) -> FencingToken {
    number.to_string().parse().unwrap()
}

fn written(number: i64, text: &str) -> Written {
    Written::new(token(number), text)
}

fn request(store: &Store, op: CountOp) -> Arc<Count> {
    Arc::new(Count::new(store.name("a").value(), Id::draw().unwrap(), op))
}

async fn writes(store: &Store, client: &Asker, number: i64, text: &str) -> Counted {
    let op = CountOp::Write(written(number, text));
    client.count(&request(store, op)).await
}

async fn reads(store: &Store, client: &Asker) -> Counted {
    client.count(&request(store, CountOp::Read)).await
}

async fn a_value_is_read_as_it_was_written(store: Store) {
    let (client, other) = (store.connect().await, store.connect().await);
    let nothing = Counted::new(0, 0, 0, Outcome::Applied);
    assert_eq!(reads(&store, &client).await, nothing);

    let longest = "ä".repeat(MAX_TEXT / 2);
    let texts = [
        "plain",
        "",
        "a\0b\0",
        "\n=7\nx\r\n\n",
        "=",
        "1 2 3\n",
        " 😀 '\"\\ {}",
        longest.as_str(),
    ];
    for (number, text) in (1..).zip(texts) {
        let answer = writes(&store, &client, number, text).await;
        assert_eq!((answer.outcome, &answer.written), (Outcome::Applied, &None));
        for asker in [&client, &other] {
            let read = reads(&store, asker).await;
            assert_eq!(read.written, Some(written(number, text)));
            assert_eq!(read.version, answer.version);
        }
    }
    client.close().await;
    other.close().await;
}

async fn a_value_is_replaced_by_the_same_token_or_a_greater_one(store: Store) {
    let client = store.connect().await;
    let mut version = 0;
    for (number, text, outcome) in [
        (7, "first", Outcome::Applied),
        (7, "second", Outcome::Applied),
        // Another write of the same text also makes a new version, because a caller may have to
        // read again.
        (7, "second", Outcome::Applied),
        (6, "late", Outcome::Kept),
        (8, "third", Outcome::Applied),
        (7, "late", Outcome::Kept),
        // A token like this comes from a wrong clock, or from a program that invents tokens.
        (LARGEST, "from the future", Outcome::Applied),
        (9, "too late for all", Outcome::Kept),
        (LARGEST, "again", Outcome::Applied),
    ] {
        let answer = writes(&store, &client, number, text).await;
        assert_eq!(answer.outcome, outcome, "{number} {text}");
        let read = reads(&store, &client).await;
        let is_there = read.written == Some(written(number, text));
        assert_eq!(is_there, outcome == Outcome::Applied, "{read:?}");
        assert_eq!(read.version > version, is_there, "{read:?}");
        version = read.version;
    }
    client.close().await;
}

async fn tokens_are_compared_to_the_last_digit(store: Store) {
    let client = store.connect().await;
    // Doubles cannot tell the numbers of the last three pairs apart. A comparison of texts puts 9
    // after 10.
    for (lower, higher) in [
        (9, 10),
        (99_999, 100_000),
        (MAX_COUNT, MAX_COUNT + 1),
        (MAX_COUNT + 2, MAX_COUNT + 3),
        (LARGEST - 2, LARGEST - 1),
    ] {
        let first = writes(&store, &client, higher, "later").await;
        assert_eq!(first.outcome, Outcome::Applied, "{higher}");
        let late = writes(&store, &client, lower, "earlier").await;
        assert_eq!(late.outcome, Outcome::Kept, "{lower} after {higher}");
        let read = reads(&store, &client).await;
        assert_eq!(read.written, Some(written(higher, "later")));
    }
    client.close().await;
}

async fn a_text_that_is_too_long_is_not_written(store: Store) {
    let client = store.connect().await;
    let fits = writes(&store, &client, 5, &"x".repeat(MAX_TEXT)).await;
    assert_eq!(fits.outcome, Outcome::Applied);
    let huge = 100 * MAX_TEXT;
    for (number, bytes) in [(5, MAX_TEXT + 1), (6, MAX_TEXT + 1), (4, huge), (6, huge)] {
        let answer = writes(&store, &client, number, &"y".repeat(bytes)).await;
        assert_eq!(answer.outcome, Outcome::Overflow, "{bytes} bytes");
        assert_eq!(answer.version, fits.version);
    }
    let read = reads(&store, &client).await;
    assert_eq!(read.written, Some(written(5, &"x".repeat(MAX_TEXT))));
    client.close().await;
}

async fn a_value_is_written_once_however_often_it_is_sent(store: Store) {
    let (client, other) = (store.connect().await, store.connect().await);
    let first = request(&store, CountOp::Write(written(7, "first")));
    let answer = client.count(&first).await;
    assert_eq!(other.count(&first).await, answer);
    let refused = request(&store, CountOp::Write(written(6, "late")));
    let refusal = client.count(&refused).await;
    assert_eq!(refusal.outcome, Outcome::Kept);
    let second = writes(&store, &client, 7, "second").await;

    // The first write comes once more, although the holder has written another value since.
    assert_eq!(other.count(&first).await, answer);
    assert_eq!(other.count(&refused).await, refusal);

    let read = reads(&store, &client).await;
    assert_eq!(read.written, Some(written(7, "second")));
    assert_eq!(read.version, second.version);
    // This request tells the store that the client has the answer to the first write. So the store
    // may forget the id of that write. This must not change the value, which a later write has set.
    let op = CountOp::Write(written(8, "third"));
    let mut third = Count::new(store.name("a").value(), Id::draw().unwrap(), op);
    third.answered = vec![first.id];
    assert_eq!(
        client.count(&Arc::new(third)).await.outcome,
        Outcome::Applied
    );
    let read = reads(&store, &client).await;
    assert_eq!(read.written, Some(written(8, "third")));
    client.close().await;
    other.close().await;
}

async fn a_value_a_counter_and_a_line_of_one_name_are_three_things(store: Store) {
    let client = store.connect().await;
    client.holds(&store.writer("a")).await;
    let value = writes(&store, &client, 5, "text").await;
    let add = CountOp::Add {
        delta: 3,
        floor: None,
    };
    let count = Count::new(store.name("a"), Id::draw().unwrap(), add);
    let counted = client.count(&Arc::new(count)).await;
    assert_eq!(counted.count, 3);
    // These names look like the keys of values.
    for name in ["a:value", "{a}:value", "a}:value"] {
        let read = Count::new(store.name(name), Id::draw().unwrap(), CountOp::Read);
        let read = client.count(&Arc::new(read)).await;
        assert_eq!((read.version, read.written), (0, None), "{name}");
    }

    let read = Count::new(store.name("a"), Id::draw().unwrap(), CountOp::Read);
    assert_eq!(client.count(&Arc::new(read)).await, counted);
    let read = reads(&store, &client).await;
    assert_eq!((read.count, read.version), (0, value.version));
    assert_eq!(read.written, Some(written(5, "text")));
    assert_eq!(client.inspect(store.name("a")).await.len(), 1);
    client.close().await;
}

async fn random_values_are_kept_as_in_plain_memory(store: Store) {
    let clients = [store.connect().await, store.connect().await];
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut model, mut version) = (None::<Written>, 0);
    let mut asked: Vec<(Arc<Count>, Counted)> = Vec::new();
    for _ in 0..150 {
        let client = random.choice(&clients).unwrap();
        let number = match random.u8(..4) {
            0 => random.i64(MAX_COUNT..MAX_COUNT + 5),
            _ => random.i64(1..20),
        };
        let op = match random.u8(..4) {
            0 => CountOp::Read,
            1 => {
                // A copy of an earlier request arrives.
                if let Some((count, answer)) = random.choice(&asked) {
                    assert_eq!(client.count(count).await, *answer, "seed {seed}");
                }
                continue;
            }
            _ => CountOp::Write(written(number, &"z".repeat(random.usize(..9)))),
        };
        let count = request(&store, op.clone());
        let answer = client.count(&count).await;
        if let CountOp::Write(new) = op {
            let is_late = model.as_ref().is_some_and(|model| new.token < model.token);
            let outcome = if is_late {
                Outcome::Kept
            } else {
                Outcome::Applied
            };
            assert_eq!(answer.outcome, outcome, "seed {seed}, {count:?}");
            assert_eq!(answer.version > version, !is_late, "seed {seed}, {count:?}");
            if !is_late {
                (model, version) = (Some(new), answer.version);
            }
            asked.push((count, answer));
        } else {
            assert_eq!(answer.written, model, "seed {seed}");
            assert_eq!(answer.version, version, "seed {seed}");
        }
    }
    for client in clients {
        client.close().await;
    }
}

async fn values_at_the_same_time_end_on_the_greatest_token(store: Store) {
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut writers = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let client = store.connect().await;
        let requests = (0..15).map(|_| random.i64(1..1_000));
        let requests = requests.map(|number| (number, written(number, &number.to_string())));
        let requests: Vec<_> = requests
            .map(|(number, written)| (number, request(&store, CountOp::Write(written))))
            .collect();
        writers.spawn(async move {
            let mut answers = Vec::new();
            for (number, count) in requests {
                let answer = client.count(&count).await;
                answers.push((number, answer.version, answer.outcome));
            }
            client.close().await;
            answers
        });
    }
    let mut answers = writers.join_all().await.concat();

    // Sorted in the order in which the writes were carried out, the tokens never fall.
    answers.retain(|(_, _, outcome)| *outcome == Outcome::Applied);
    answers.sort_by_key(|(_, version, _)| *version);
    let (last, version, _) = *answers.last().unwrap();
    assert!(
        answers.is_sorted_by_key(|(number, ..)| *number),
        "seed {seed}"
    );
    let client = store.connect().await;
    let read = reads(&store, &client).await;
    let expected = (Some(written(last, &last.to_string())), version);
    assert_eq!((read.written, read.version), expected, "seed {seed}");
    client.close().await;
}

async fn a_client_that_watches_is_told_of_each_value_and_not_of_the_counter(store: Store) {
    let mut client = store.connect().await;
    let value = store.name("a").value();
    client.watch(value.clone()).await;
    for number in [7, 7, 8] {
        let answer = writes(&store, &client, number, "same").await;
        assert_eq!(answer.outcome, Outcome::Applied);
        client.expect_told_of(&value).await;
    }
    let _ = reads(&store, &client).await;
    // The client does not watch the counter of the same name.
    let add = CountOp::Add {
        delta: 1,
        floor: None,
    };
    let count = Count::new(store.name("a"), Id::draw().unwrap(), add);
    let _ = client.count(&Arc::new(count.clone())).await;

    // The next message is that of another name, so this change sent none.
    client.watch(store.name("end")).await;
    let count = Count::new(store.name("end"), Id::draw().unwrap(), count.op);
    let _ = client.count(&Arc::new(count)).await;
    client.expect_told_of(&store.name("end")).await;
    client.close().await;
}

async fn the_next_holder_finds_the_last_value(store: Store) {
    let (here, there) = (store.client(), store.client());
    let guard = soon(here.mutex("a").acquire()).await.unwrap();
    assert_eq!(guard.value().await.unwrap(), None);
    guard.set_value("page 1").await.unwrap();
    guard.set_value("page 2").await.unwrap();
    let token = guard.fencing_token().unwrap();
    let seen = there.value("a").get().await.unwrap().unwrap();
    assert_eq!((seen.token, &*seen.text), (token, "page 2"));
    // The number of the token is the number of the holder's ticket.
    assert_eq!(here.inspect("a").await.unwrap()[0].ticket, token.ticket());
    guard.release().await.unwrap();

    for locks in [&there, &here] {
        let next = soon(locks.mutex("a").acquire()).await.unwrap();
        let left = next.value().await.unwrap().unwrap();
        assert_eq!((left.token, &*left.text), (token, "page 2"));
        next.release().await.unwrap();
    }
}

async fn a_value_is_told_to_those_who_follow_it(store: Store) {
    let (here, there) = (store.client(), store.client());
    let mut changes = there.value("a").changes();
    assert_eq!(soon(changes.next()).await.unwrap(), None);
    for text in ["one", "two", "two"] {
        let guard = soon(here.mutex("a").acquire()).await.unwrap();
        guard.set_value(text).await.unwrap();
        let seen = soon(changes.next()).await.unwrap().unwrap();
        assert_eq!(
            (seen.token, &*seen.text),
            (guard.fencing_token().unwrap(), text)
        );
        guard.release().await.unwrap();
    }
}

async fn a_former_holder_cannot_replace_the_value_of_a_later_one(store: Store) {
    let (here, there) = (store.client(), store.client());
    let former = soon(here.mutex("a").acquire()).await.unwrap();
    let place = here.inspect("a").await.unwrap().remove(0);
    // The former holder is not told of the release. It believes in its lease until its next
    // renewal.
    soon(there.force_release("a", place.ticket)).await.unwrap();
    let later = soon(there.mutex("a").acquire()).await.unwrap();
    later.set_value("later").await.unwrap();

    let late = soon(former.set_value("late")).await;

    assert!(matches!(kind(late), ErrorKind::Lost(_)));
    assert_eq!(
        &*there.value("a").get().await.unwrap().unwrap().text,
        "later"
    );
    later.release().await.unwrap();
}

async fn only_an_exclusive_holder_writes_a_value(store: Store) {
    let locks = store.client();
    let reader = soon(locks.rwlock("a").read().acquire()).await.unwrap();
    assert_eq!(kind(reader.set_value("x").await), ErrorKind::Config);
    let permit = soon(locks.semaphore("b", 3).acquire()).await.unwrap();
    assert_eq!(kind(permit.set_value("x").await), ErrorKind::Config);
    let guard = soon(locks.mutex("c").acquire()).await.unwrap();
    let long = "x".repeat(MAX_TEXT + 1);
    assert_eq!(kind(guard.set_value(long).await), ErrorKind::Config);
    for name in ["a", "b", "c"] {
        assert_eq!(locks.value(name).get().await.unwrap(), None);
    }
    let held = guard.held();
    guard.release().await.unwrap();
    assert!(matches!(
        kind(held.set_value("x").await),
        ErrorKind::Lost(_)
    ));
}
