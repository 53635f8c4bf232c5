//! Counters at the connection: the answer to each request, and what it changes.

use std::sync::Arc;
use std::task::{Context, Poll};

use super::fact::{Fact, group_of};
use super::kit::{Asker, Store};
use crate::backend::{
    Capability, Count, CountOp, Counted, Enqueued, Id, MAX_COUNT, OnlyIf, Outcome,
};

pub(super) fn all() -> Vec<Fact> {
    group_of!["counters", false, with_counters;
        a_counter_that_nobody_has_changed_is_zero_and_a_read_makes_none
        a_change_is_carried_out_once_however_often_it_is_sent
        a_change_that_was_refused_stays_refused_when_it_comes_again
        a_floor_bounds_a_decrease_and_nothing_else
        a_counter_is_set_on_condition_of_its_value_or_its_version
        each_set_begins_a_generation_and_no_add_does
        beyond_the_largest_value_nothing_is_changed
        the_counter_of_a_name_is_not_its_line
        names_have_counters_of_their_own
        changes_of_several_connections_all_count
        a_change_that_is_dropped_at_any_poll_may_be_repeated
        random_changes_are_answered_as_by_plain_arithmetic
        changes_at_the_same_time_are_answered_as_if_made_one_after_the_other
    ]
}

pub(super) fn with_counters(capability: &Capability) -> Result<(), &'static str> {
    match capability.counters {
        true => Ok(()),
        false => Err("it has no counters"),
    }
}

pub(super) fn add(delta: i64) -> CountOp {
    CountOp::Add { delta, floor: None }
}

fn floored(delta: i64, floor: i64) -> CountOp {
    let floor = Some(floor);
    CountOp::Add { delta, floor }
}

pub(super) fn set(count: i64) -> CountOp {
    let only_if = None;
    CountOp::Set { count, only_if }
}

fn set_if(count: i64, only_if: OnlyIf) -> CountOp {
    let only_if = Some(only_if);
    CountOp::Set { count, only_if }
}

pub(super) fn request(store: &Store, name: &str, op: CountOp) -> Arc<Count> {
    Arc::new(Count::new(store.name(name), Id::draw().unwrap(), op))
}

pub(super) async fn asks(store: &Store, client: &Asker, name: &str, op: CountOp) -> Counted {
    client.count(&request(store, name, op)).await
}

async fn a_counter_that_nobody_has_changed_is_zero_and_a_read_makes_none(store: Store) {
    let client = store.connect().await;

    for _ in 0..2 {
        let read = asks(&store, &client, "a", CountOp::Read).await;
        assert_eq!(read, Counted::new(0, 0, 0, Outcome::Applied));
    }
    let floored = asks(&store, &client, "a", floored(-1, 0)).await;
    assert_eq!(floored, Counted::new(0, 0, 0, Outcome::Kept));

    let one = asks(&store, &client, "a", add(1)).await;
    assert_eq!((one.count, one.outcome), (1, Outcome::Applied));
    assert!(one.generation > 0 && one.version > 0, "{one:?}");
    assert_eq!(asks(&store, &client, "a", CountOp::Read).await, one);
    client.close().await;
}

async fn a_change_is_carried_out_once_however_often_it_is_sent(store: Store) {
    let (client, other) = (store.connect().await, store.connect().await);
    let begins = request(&store, "a", set(10));
    let begun = client.count(&begins).await;
    let adds = request(&store, "a", add(-3));
    let added = client.count(&adds).await;
    assert_eq!(added.count, 7);

    // The client acts as if it had no answer: it sends the request again, and over another
    // connection too.
    assert_eq!(client.count(&adds).await, added);
    assert_eq!(other.count(&adds).await, added);
    let later = asks(&store, &client, "a", add(1)).await;
    assert_eq!(later.count, 8);
    assert_eq!(other.count(&adds).await, added);
    assert_eq!(other.count(&begins).await, begun);

    let read = asks(&store, &client, "a", CountOp::Read).await;
    assert_eq!((read.count, read.version), (8, later.version));
    // This request tells the store that the client has the answer to `begins`. So the store may
    // forget that change, but must remember the others.
    let mut count = Count::new(store.name("a"), Id::draw().unwrap(), add(1));
    count.answered = vec![begins.id];
    assert_eq!(client.count(&Arc::new(count)).await.count, 9);
    assert_eq!(client.count(&adds).await, added);
    client.close().await;
    other.close().await;
}

async fn a_change_that_was_refused_stays_refused_when_it_comes_again(store: Store) {
    let client = store.connect().await;
    let down = request(&store, "a", floored(-1, 0));
    let swaps = request(&store, "a", set_if(9, OnlyIf::Count(5)));
    assert_eq!(client.count(&down).await.outcome, Outcome::Kept);
    assert_eq!(client.count(&swaps).await.outcome, Outcome::Kept);
    asks(&store, &client, "a", set(5)).await.is(5);

    // Copies of the two requests arrive late. The clients that sent them have had their answers.
    client.count(&down).await.is(0);
    client.count(&swaps).await.is(0);

    asks(&store, &client, "a", CountOp::Read).await.is(5);
    client.close().await;
}

async fn a_floor_bounds_a_decrease_and_nothing_else(store: Store) {
    let client = store.connect().await;
    asks(&store, &client, "a", set(5)).await.is(5);
    for (op, value, outcome) in [
        (floored(-3, 0), 2, Outcome::Applied),
        (floored(-3, 0), 0, Outcome::Applied),
        (floored(-3, 0), 0, Outcome::Kept),
        (add(-3), -3, Outcome::Applied),
        (floored(-3, 0), -3, Outcome::Kept),
        (floored(2, 0), -1, Outcome::Applied),
        (floored(-3, -2), -2, Outcome::Applied),
        (add(0), -2, Outcome::Applied),
    ] {
        let counted = asks(&store, &client, "a", op.clone()).await;
        assert_eq!((counted.count, counted.outcome), (value, outcome), "{op:?}");
    }
    client.close().await;
}

async fn a_counter_is_set_on_condition_of_its_value_or_its_version(store: Store) {
    let client = store.connect().await;
    let first = asks(&store, &client, "a", set_if(5, OnlyIf::Count(0))).await;
    assert_eq!((first.count, first.outcome), (5, Outcome::Applied));
    let again = asks(&store, &client, "a", set_if(6, OnlyIf::Count(0))).await;
    assert_eq!((again.count, again.outcome), (5, Outcome::Kept));

    // After these two changes the counter has the same value, and another version.
    asks(&store, &client, "a", add(1)).await.is(6);
    let now = asks(&store, &client, "a", add(-1)).await;
    let stale = asks(
        &store,
        &client,
        "a",
        set_if(7, OnlyIf::Version(first.version)),
    )
    .await;
    assert_eq!((stale.count, stale.outcome), (5, Outcome::Kept));
    let swapped = asks(
        &store,
        &client,
        "a",
        set_if(7, OnlyIf::Version(now.version)),
    )
    .await;
    assert_eq!((swapped.count, swapped.outcome), (7, Outcome::Applied));
    assert!(swapped.version > now.version && now.version > first.version);
    // A counter that does not exist has the version 0.
    let born = asks(&store, &client, "b", set_if(1, OnlyIf::Version(0))).await;
    assert_eq!(born.outcome, Outcome::Applied);
    client.close().await;
}

async fn each_set_begins_a_generation_and_no_add_does(store: Store) {
    let client = store.connect().await;
    let mut generations = Vec::new();
    for _ in 0..3 {
        let set = asks(&store, &client, "a", set(1)).await;
        let added = asks(&store, &client, "a", add(1)).await;
        let kept = asks(&store, &client, "a", set_if(1, OnlyIf::Count(9))).await;
        assert_eq!(added.generation, set.generation);
        assert_eq!(kept.generation, set.generation);
        assert!(added.version > set.version);
        generations.push(set.generation);
    }
    assert!(
        generations.windows(2).all(|pair| pair[0] < pair[1]),
        "{generations:?}"
    );
    client.close().await;
}

async fn beyond_the_largest_value_nothing_is_changed(store: Store) {
    let client = store.connect().await;
    for sign in [1, -1] {
        let most = asks(&store, &client, "a", set(sign * MAX_COUNT)).await;
        most.is(sign * MAX_COUNT);
        for op in [
            add(sign),
            add(sign * MAX_COUNT),
            add(i64::MAX),
            add(i64::MIN),
            set(sign * (MAX_COUNT + 1)),
            set(i64::MAX),
            set(i64::MIN),
        ] {
            let counted = asks(&store, &client, "a", op.clone()).await;
            assert_eq!(counted.outcome, Outcome::Overflow, "{op:?}");
            assert_eq!(counted.version, most.version, "{op:?}");
            counted.is(sign * MAX_COUNT);
        }
        // Exact to the last digit.
        let less = asks(&store, &client, "a", add(-sign)).await;
        less.is(sign * (MAX_COUNT - 1));
    }
    client.close().await;
}

async fn the_counter_of_a_name_is_not_its_line(store: Store) {
    let client = store.connect().await;
    let holds = store.writer("a");
    client.holds(&holds).await;

    asks(&store, &client, "a", add(3)).await.is(3);

    assert_eq!(client.inspect(store.name("a")).await.len(), 1);
    let waits = client.enqueue(&store.writer("a")).await;
    assert!(matches!(waits, Enqueued::Waiting { .. }));
    asks(&store, &client, "a", CountOp::Read).await.is(3);
    client.close().await;
}

async fn names_have_counters_of_their_own(store: Store) {
    let client = store.connect().await;
    let names = ["a", "b", "a:count", "a/b", "{a}", "a\0b", "ä 😀"];
    for (at, name) in (1..).zip(names) {
        asks(&store, &client, name, add(at)).await.is(at);
    }
    for (at, name) in (1..).zip(names) {
        asks(&store, &client, name, CountOp::Read).await.is(at);
    }
    client.close().await;
}

async fn changes_of_several_connections_all_count(store: Store) {
    const EACH: i64 = 20;
    let mut adders = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let client = store.connect().await;
        let counts = (0..EACH).map(|_| request(&store, "a", add(1)));
        let counts: Vec<_> = counts.collect();
        adders.spawn(async move {
            let mut versions = Vec::new();
            for count in counts {
                versions.push(client.count(&count).await.version);
            }
            client.close().await;
            versions
        });
    }
    let mut versions = adders.join_all().await.concat();

    let client = store.connect().await;
    asks(&store, &client, "a", CountOp::Read).await.is(4 * EACH);
    versions.sort_unstable();
    versions.dedup();
    assert_eq!(
        versions.len(),
        4 * EACH as usize,
        "two changes, one version"
    );
    client.close().await;
}

async fn a_change_that_is_dropped_at_any_poll_may_be_repeated(store: Store) {
    let client = store.connect().await;
    for polls in 0..6 {
        let count = request(&store, "a", add(1));
        let mut asking = client.connection.count(Arc::clone(&count));
        for _ in 0..polls {
            let polled = |cx: &mut Context<'_>| Poll::Ready(asking.as_mut().poll(cx).is_ready());
            if std::future::poll_fn(polled).await {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(asking);
        client.count(&count).await.is(polls + 1);
    }
    client.close().await;
}

/// The rule of a counter as plain arithmetic.
#[derive(Default)]
struct Model {
    value: i64,
    generation: u64,
    version: u64,
    /// Each request, with its answer.
    asked: Vec<(Arc<Count>, Counted)>,
}

impl Model {
    /// Checks an answer against the model, and changes the model.
    fn answered(&mut self, count: &Arc<Count>, answer: Counted, seed: u64) {
        let (value, outcome) = match &count.op {
            CountOp::Read => (self.value, Outcome::Applied),
            CountOp::Add { delta, floor } => {
                let sum = i128::from(self.value) + i128::from(*delta);
                let floor = i128::from(floor.unwrap_or(i64::MIN).min(self.value));
                let sum = if *delta < 0 { sum.max(floor) } else { sum };
                match sum {
                    sum if sum.unsigned_abs() > MAX_COUNT as u128 => {
                        (self.value, Outcome::Overflow)
                    }
                    sum if sum == i128::from(self.value) && *delta != 0 => {
                        (self.value, Outcome::Kept)
                    }
                    sum => (sum as i64, Outcome::Applied),
                }
            }
            CountOp::Set { count, only_if } => match only_if {
                Some(OnlyIf::Count(at)) if *at != self.value => (self.value, Outcome::Kept),
                Some(OnlyIf::Version(at)) if *at != self.version => (self.value, Outcome::Kept),
                _ => (*count, Outcome::Applied),
            },
            CountOp::Write(_) => unreachable!("counters are not written"),
        };
        let context = format!("seed {seed}, {count:?}");
        assert_eq!(
            (answer.count, answer.outcome),
            (value, outcome),
            "{context}"
        );
        let is_set = matches!(count.op, CountOp::Set { .. }) && outcome == Outcome::Applied;
        if is_set || value != self.value {
            assert!(answer.version > self.version, "{context}");
        } else {
            assert_eq!(answer.version, self.version, "{context}");
        }
        if is_set || self.generation == 0 && value != 0 {
            assert!(answer.generation > self.generation, "{context}");
        } else {
            assert_eq!(answer.generation, self.generation, "{context}");
        }
        (self.value, self.generation) = (answer.count, answer.generation);
        self.version = answer.version;
        if count.op != CountOp::Read {
            self.asked.push((Arc::clone(count), answer));
        }
    }
}

async fn random_changes_are_answered_as_by_plain_arithmetic(store: Store) {
    let clients = [store.connect().await, store.connect().await];
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut models = [Model::default(), Model::default()];
    for _ in 0..200 {
        let client = random.choice(&clients).unwrap();
        let at = random.usize(..models.len());
        let (name, model) = (["a", "b"][at], &mut models[at]);
        let number = match random.u8(..8) {
            0 => MAX_COUNT,
            1 => -MAX_COUNT,
            2 => 0,
            _ => random.i64(-9..=9),
        };
        let op = match random.u8(..8) {
            0 => CountOp::Read,
            1 => set(number),
            2 => set_if(number, OnlyIf::Count(random.i64(-2..=2))),
            3 => set_if(
                number,
                OnlyIf::Version(model.version - random.u64(..=1).min(model.version)),
            ),
            4 | 5 => floored(number, random.i64(-2..=2)),
            6 => add(number),
            _ => {
                // A copy of an earlier request arrives.
                if let Some((count, answer)) = random.choice(&model.asked) {
                    assert_eq!(client.count(count).await, *answer, "seed {seed}");
                }
                continue;
            }
        };
        let count = request(&store, name, op);
        let answer = client.count(&count).await;
        model.answered(&count, answer, seed);
    }
    let [one, other] = clients;
    one.close().await;
    other.close().await;
}

/// The versions tell the order in which the changes were made.
async fn changes_at_the_same_time_are_answered_as_if_made_one_after_the_other(store: Store) {
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let client = store.connect().await;
        let ops = (0..25).map(|_| match random.u8(..5) {
            0 => set(random.i64(-9..=9)),
            1 => floored(random.i64(-9..=-1), 0),
            2 => set_if(random.i64(-9..=9), OnlyIf::Count(random.i64(-2..=2))),
            3 => CountOp::Read,
            _ => add(random.i64(1..=9)),
        });
        let counts: Vec<_> = ops.map(|op| request(&store, "a", op)).collect();
        clients.spawn(async move {
            let mut answered = Vec::new();
            for count in counts {
                answered.push((count.op.clone(), client.count(&count).await));
            }
            client.close().await;
            answered
        });
    }
    let answered = clients.join_all().await;

    for of_one_client in &answered {
        let in_order = of_one_client.is_sorted_by_key(|(_, answer)| answer.version);
        assert!(in_order, "seed {seed}: {of_one_client:?}");
    }
    // Of all answers with one version, the change that made the version comes first. The requests
    // that only found the version follow.
    let mut all = answered.concat();
    all.sort_by_key(|(_, answer)| answer.version);
    let mut model = Model::default();
    for version in all.chunk_by(|one, other| one.1.version == other.1.version) {
        let is_new = |(op, answer): &&(CountOp, Counted)| {
            let applied = answer.outcome == Outcome::Applied;
            applied && *op != CountOp::Read && answer.version > 0
        };
        let makes = version.iter().filter(is_new);
        let finds = version.iter().filter(|one| !is_new(one));
        for (op, answer) in makes.chain(finds) {
            model.answered(&request(&store, "a", op.clone()), answer.clone(), seed);
        }
    }
}

impl Counted {
    pub(super) fn is(&self, value: i64) {
        assert_eq!(self.count, value, "{self:?}");
    }
}
