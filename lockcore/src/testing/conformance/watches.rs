//! Which clients are told of a change of a counter, and the primitives that wait for such changes.

use super::counters::{add, asks, request, set, with_counters};
use super::fact::{Fact, group_of};
use super::kit::Store;
use super::steps::soon;
use crate::backend::{Capability, CountOp};

pub(super) fn all() -> Vec<Fact> {
    let told = group_of!["counters", false, that_watches;
        each_client_that_watches_is_told_once_of_a_change_and_no_other_is
        a_read_and_a_repetition_are_told_to_nobody
        a_client_that_watches_no_more_is_not_told
        a_client_that_watches_again_is_told_again
    ];
    let by_clients = group_of!["counters", true, with_counters;
        a_latch_opens_at_zero_for_all_who_wait_and_stays_open
        a_waiter_has_waited_for_one_generation
        a_counter_tells_its_changes_to_those_who_follow_it
    ];
    [told, by_clients].concat()
}

pub(super) fn that_watches(capability: &Capability) -> Result<(), &'static str> {
    match capability.watches {
        true => with_counters(capability),
        false => Err("it pushes no changes of counters"),
    }
}

async fn each_client_that_watches_is_told_once_of_a_change_and_no_other_is(store: Store) {
    let mut watchers = [store.connect().await, store.connect().await];
    let mut other = store.connect().await;
    for watcher in &watchers {
        watcher.watch(store.name("a")).await;
        watcher.watch(store.name("a")).await;
    }
    other.watch(store.name("b")).await;

    asks(&store, &other, "a", add(1)).await.is(1);

    for watcher in &mut watchers {
        watcher.expect_told_of(&store.name("a")).await;
    }
    // Pushes arrive in order. The push of another counter comes next, so there was none in between.
    asks(&store, &other, "b", set(1)).await.is(1);
    other.expect_told_of(&store.name("b")).await;
    for watcher in &mut watchers {
        watcher.watch(store.name("end")).await;
    }
    asks(&store, &other, "end", set(1)).await.is(1);
    for watcher in &mut watchers {
        watcher.expect_told_of(&store.name("end")).await;
    }
    let [one, two] = watchers;
    for client in [one, two, other] {
        client.close().await;
    }
}

async fn a_read_and_a_repetition_are_told_to_nobody(store: Store) {
    let mut client = store.connect().await;
    client.watch(store.name("a")).await;
    asks(&store, &client, "a", CountOp::Read).await.is(0);
    let changes = request(&store, "a", set(3));
    client.count(&changes).await.is(3);
    client.expect_told_of(&store.name("a")).await;
    asks(&store, &client, "a", CountOp::Read).await.is(3);
    client.count(&changes).await.is(3);

    client.watch(store.name("end")).await;
    asks(&store, &client, "end", set(1)).await.is(1);
    client.expect_told_of(&store.name("end")).await;
    client.close().await;
}

async fn a_client_that_watches_no_more_is_not_told(store: Store) {
    let mut client = store.connect().await;
    for name in ["a", "end"] {
        client.watch(store.name(name)).await;
    }
    let ended = client.connection.unwatch(store.name("a")).await;
    ended.unwrap();

    asks(&store, &client, "a", add(1)).await.is(1);
    asks(&store, &client, "end", add(1)).await.is(1);

    client.expect_told_of(&store.name("end")).await;
    client.close().await;
}

async fn a_client_that_watches_again_is_told_again(store: Store) {
    let mut client = store.connect().await;
    for round in 1..=20 {
        client.watch(store.name("a")).await;
        asks(&store, &client, "a", add(1)).await.is(round);
        client.expect_told_of(&store.name("a")).await;
        let ended = client.connection.unwatch(store.name("a")).await;
        ended.unwrap();
    }
    client.close().await;
}

async fn a_latch_opens_at_zero_for_all_who_wait_and_stays_open(store: Store) {
    let (here, there) = (store.client(), store.client());
    let latch = there.latch("a");
    assert!(latch.try_set(3).await.unwrap());
    assert!(!latch.try_set(3).await.unwrap());
    let mut waiters = tokio::task::JoinSet::new();
    for locks in [&here, &there] {
        for _ in 0..5 {
            let latch = locks.latch("a");
            waiters.spawn(async move { latch.wait_for_zero().await });
        }
    }
    assert_eq!(here.latch("a").count_down().await.unwrap(), 2);
    assert_eq!(latch.count_down_by(2).await.unwrap(), 0);
    for outcome in soon(waiters.join_all()).await {
        outcome.unwrap();
    }
    soon(here.latch("a").wait_for_zero()).await.unwrap();
    assert_eq!(latch.count_down().await.unwrap(), 0);
    assert_eq!(here.latch("a").count().await.unwrap(), 0);
}

async fn a_waiter_has_waited_for_one_generation(store: Store) {
    let locks = store.client();
    let latch = locks.latch("a");
    assert!(latch.try_set(1).await.unwrap());
    let waits = tokio::spawn({
        let latch = store.client().latch("a");
        async move { latch.wait_for_zero().await }
    });
    // If the waiter has not begun to wait yet, it waits for the second generation.
    latch.count_down().await.unwrap();
    assert!(latch.try_set(1).await.unwrap());
    latch.reset().await.unwrap();
    assert!(latch.try_set(1).await.unwrap());
    latch.count_down().await.unwrap();
    soon(waits).await.unwrap().unwrap();
}

async fn a_counter_tells_its_changes_to_those_who_follow_it(store: Store) {
    let counter = store.client().counter("a");
    let mut changes = store.client().counter("a").changes();
    assert_eq!(soon(changes.next()).await.unwrap().count, 0);
    for expected in 1..=3 {
        let now = counter.add(1).await.unwrap();
        assert_eq!(soon(changes.next()).await.unwrap(), now);
        assert_eq!(now.count, expected);
    }
    let now = counter.get().await.unwrap();
    let swapped = counter.compare_and_set(now.version, 10).await.unwrap();
    let stale = counter.compare_and_set(now.version, 11).await.unwrap();
    assert_eq!(stale, Err(swapped.unwrap()));
    assert_eq!(soon(changes.next()).await.unwrap().count, 10);
}
