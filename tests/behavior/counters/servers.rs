//! Tests of counters at real servers. A proxy loses the servers' answers and messages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libtest_mimic::Trial;
use lockcore::Locks;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;
use tests::stores::ServerProcess as _;

use crate::faults::patient;
use crate::store::{DEFAULT, Kind, SOON, Store};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_change_whose_reply_is_lost_counts_once
        cuts_at_random_neither_lose_nor_double_a_change
        a_latch_that_opens_while_its_waiters_are_cut_off_lets_them_go_on
    ]
}

async fn a_change_whose_reply_is_lost_counts_once(store: Store) {
    let server = store.kind.start();
    let process = server.process().unwrap();
    let (proxy, url) = process.through_a_proxy();
    let counter = patient(url).build().unwrap().counter("a");
    let mut expected = counter.add(1).await.unwrap().count;
    for round in 0..10 {
        proxy.lose_replies(process.marks().count, 1);

        expected += 3;
        assert_eq!(counter.add(3).await.unwrap().count, expected);

        assert_eq!(proxy.traffic().replies_lost, round + 1);
    }
    let elsewhere = patient(server.url()).build().unwrap();
    let read = elsewhere.counter("a").get().await.unwrap();
    assert_eq!(read.count, expected);
}

async fn cuts_at_random_neither_lose_nor_double_a_change(store: Store) {
    const CUTS: usize = 10;
    let server = store.kind.start();
    let (proxy, url) = server.process().unwrap().through_a_proxy();
    let over = Arc::new(AtomicBool::new(false));
    let mut adders = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let counter = patient(&url).build().unwrap().counter("a");
        let over = Arc::clone(&over);
        adders.spawn(async move {
            let mut added = 0;
            while !over.load(Ordering::SeqCst) {
                counter.add(1).await.unwrap();
                added += 1;
            }
            added
        });
    }
    for _ in 0..CUTS {
        // The cut comes after a random number of further requests.
        let next = proxy.traffic().chunks_up + fastrand::u64(1..50);
        eventually("requests pass", 6 * SOON, async || {
            proxy.traffic().chunks_up >= next
        })
        .await;
        proxy.cut_clients();
        proxy.restore();
    }
    over.store(true, Ordering::SeqCst);
    let added: i64 = adders.join_all().await.into_iter().sum();

    let elsewhere = patient(server.url()).build().unwrap();
    let read = elsewhere.counter("a").get().await.unwrap();
    assert_eq!(read.count, added);
}

async fn a_latch_that_opens_while_its_waiters_are_cut_off_lets_them_go_on(store: Store) {
    let server = store.kind.start();
    let (proxy, url) = server.process().unwrap().through_a_proxy();
    let cut_off = patient(url).build().unwrap();
    let elsewhere = patient(server.url()).build().unwrap().latch("a");
    assert!(elsewhere.try_set(3).await.unwrap());
    let mut changes = cut_off.counter("a").changes();
    assert_eq!(changes.next().await.unwrap().count, 3);
    let waits = cut_off.latch("a").wait(6 * SOON);
    let waits = tokio::spawn(async move { waits.wait_for_zero().await });
    // When this task has seen the second change, no look is in flight. So the next look is caused
    // by a push or by the break.
    for left in [2, 1] {
        assert_eq!(elsewhere.count_down().await.unwrap(), left);
        assert_eq!(changes.next().await.unwrap().count, left as i64);
    }
    let mut events = cut_off.events();

    proxy.cut();
    assert_eq!(
        events.recv().await,
        Some(lockcore::events::Event::Suspended)
    );
    assert_eq!(elsewhere.count_down().await.unwrap(), 0);
    assert!(!waits.is_finished());
    proxy.restore();

    tokio::time::timeout(4 * SOON, waits)
        .await
        .expect("it goes on")
        .unwrap()
        .unwrap();
    assert_eq!(changes.next().await.unwrap().count, 0);
}

/// A Redis master that another server replaces while changes have no answer.
pub(crate) struct Replaced<'a> {
    /// A client that reaches the old master through the proxy.
    pub(crate) locks: Locks,
    /// A client that has changed nothing before.
    pub(crate) others: Locks,
    pub(crate) old: &'a RedisServer,
    pub(crate) way: &'a Proxy,
}

impl Replaced<'_> {
    /// `part` may part the new master from the old one, so that it does not receive the changes, nor
    /// one before them that has an answer.
    pub(crate) async fn changes_without_an_answer_count_once(
        self,
        part: impl FnOnce(),
        replace: impl FnOnce(),
    ) {
        let Self {
            locks,
            others,
            old,
            way,
        } = self;
        let sum = locks.counter("sum").wait(6 * SOON);
        let latch = locks.latch("latch").wait(6 * SOON);
        let add = old.marks().count;
        assert!(latch.try_set(3).await.unwrap());
        assert_eq!(sum.add(1).await.unwrap().count, 1);
        part();
        assert_eq!(sum.add(10).await.unwrap().count, 11);

        way.lose_replies(add, usize::MAX);
        let changes = async move { tokio::join!(sum.add(100), latch.count_down()) };
        let changes = tokio::spawn(changes);
        let there = |name: &str| {
            let key = format!("test:1:{{{name}}}:count");
            old.command::<String>(&["HGET", &key, "is"])
        };
        eventually("the old master has made both", SOON, async || {
            there("sum").starts_with("111 ") && there("latch").starts_with("2 ")
        })
        .await;
        assert!(!changes.is_finished());
        replace();
        // The old master redirects them by now, if it is a node of a cluster.
        way.lose_replies(add, 0);

        let (added, counted_down) = changes.await.unwrap();
        assert_eq!(added.unwrap().count, 111);
        assert_eq!(counted_down.unwrap(), 2);
        let read = others.counter("sum").get().await.unwrap();
        assert_eq!(read.count, 111);
        assert_eq!(others.latch("latch").count().await.unwrap(), 2);
    }
}
