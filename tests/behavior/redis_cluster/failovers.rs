//! Tests with a master that is replaced by its replica, because the master was killed or because it
//! froze. Each fact has its own cluster.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::{ErrorKind, Guard, Locks, LostReason, Release};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_cluster::{Cluster, NEVER};
use tests::redis_server::RedisServer;
use tests::stalls::awake_since;
use tests::witness::{FencedResource, Witness};

use super::{LONG_WAIT, TIMEOUT, TTL, client, key};
use crate::counters::servers::Replaced;
use crate::faults::{Outage, builder, is_renewed, works_again};
use crate::store::{Kind, SOON, STALL, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_cluster";
        a_killed_master_is_replaced_and_costs_nobody_a_lock_or_a_place
        a_frozen_master_is_replaced_and_lets_nobody_in_when_it_wakes
        a_lock_unknown_to_the_new_master_is_lost_and_its_late_write_refused
        a_release_that_the_new_master_had_not_received_is_repeated_there
        counts_that_the_new_master_had_not_received_are_repeated_there_and_count_once
        changes_without_an_answer_when_the_master_is_replaced_count_once
        a_change_at_the_new_master_comes_after_the_earlier_ones_of_its_client
        changes_that_the_new_master_refuses_at_first_are_repeated_until_it_has_them
        a_release_that_one_new_master_refuses_is_repeated_and_holds_up_none_at_another
        releases_that_always_fail_at_the_new_master_hold_up_no_other
        a_master_that_is_down_costs_the_locks_of_other_masters_nothing
        a_cluster_that_restarts_without_its_data_is_noticed
        a_master_that_is_demoted_costs_its_waiters_no_place_and_no_wake_up
    ]
}

/// A name with this prefix in a slot of another master.
fn elsewhere(cluster: &Cluster, than: &RedisServer, begin: &str) -> String {
    let mut names = (0..).map(|number| format!("{begin}{number}"));
    let is_elsewhere = |name: &String| cluster.master_of(&key(name)).port() != than.port();
    names.find(is_elsewhere).unwrap()
}

/// Checks that no client loses a lock or its position in line when a master breaks. All names of
/// this check are at that master.
async fn nobody_loses_anything(cluster: &Cluster, breaks: impl FnOnce(&RedisServer)) {
    let url = cluster.url();
    let old = cluster.master_of(&key("a"));
    let mut names = (0..).map(|number| format!("n{number}"));
    let mut here = || names.find(|name| cluster.master_of(&key(name)).port() == old.port());
    let [given_back, asked, granted] = [(); 3].map(|()| here().unwrap());
    let others = builder(&url).ttl(TTL).build().unwrap();
    let outage = Outage {
        url,
        ttl: TTL,
        names: ["a", &given_back, &asked],
    };
    let breaks = || {
        cluster.wait_until_replicated();
        breaks(old);
    };
    let granted_again = async || {
        works_again(&others, &granted, LONG_WAIT).await;
        cluster.wait_for_another_master_than(old.port(), &key("a"));
    };
    outage
        .costs_nobody_a_lock_or_a_place(breaks, granted_again)
        .await;
}

async fn a_killed_master_is_replaced_and_costs_nobody_a_lock_or_a_place(_: Store) {
    let cluster = Cluster::start(TIMEOUT);
    nobody_loses_anything(&cluster, RedisServer::kill).await;
}

async fn a_frozen_master_is_replaced_and_lets_nobody_in_when_it_wakes(_: Store) {
    let cluster = Cluster::start(TIMEOUT);
    let old = cluster.master_of(&key("a"));
    nobody_loses_anything(&cluster, RedisServer::freeze).await;
    let locks = client(&cluster.url());
    let guard = locks.mutex("a").acquire().await.unwrap();

    old.thaw();

    for _ in 0..20 {
        let other = client(&cluster.url()).mutex("a").try_acquire().await;
        assert_eq!(kind(other), ErrorKind::Busy);
    }
    eventually("the old master is a replica", LONG_WAIT, async || {
        let told = old.try_command::<String>(&["INFO", "replication"]);
        told.is_ok_and(|told| told.contains("role:slave"))
    })
    .await;
    is_renewed(&guard, TTL).await;
    give_back(guard).await;
}

/// The fact shows the shortest sequence of events that leads to two holders at once. The guide
/// describes this sequence.
async fn a_lock_unknown_to_the_new_master_is_lost_and_its_late_write_refused(_: Store) {
    let cluster = Cluster::start(TIMEOUT);
    let locks = client(&cluster.url());
    let resource = FencedResource::default();
    let old = cluster.master_of(&key("a"));
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    cluster.wait_until_replicated();
    cluster.stop_replication(old);
    let first = locks.mutex("a").acquire().await.unwrap();
    resource.write(first.grant_id().as_u64()).unwrap();

    old.kill();
    cluster.wait_for_another_master_than(old.port(), &key("a"));
    let next = client(&cluster.url());
    let next = next.mutex("a").wait(LONG_WAIT).acquire().await.unwrap();
    resource.write(next.grant_id().as_u64()).unwrap();

    let told = tokio::time::timeout(TTL / 3 + SOON, first.lost()).await;
    assert_eq!(told.expect("is not told"), LostReason::Taken);
    let late = resource.write(first.grant_id().as_u64()).unwrap_err();
    assert_eq!(late.highest, next.grant_id().as_u64());
    assert_eq!(first.release().await.unwrap(), Release::AlreadyLost);
    give_back(next).await;
}

/// The new master has the ticket, because it has not received the release. If the client did not
/// repeat the release there, the ticket would stay until its lease ends. Meanwhile the client
/// releases other locks at another master.
async fn a_release_that_the_new_master_had_not_received_is_repeated_there(_: Store) {
    let cluster = Cluster::start(TIMEOUT);
    let locks = client(&cluster.url());
    let old = cluster.master_of(&key("a"));
    let there = elsewhere(&cluster, old, "there");
    let long = locks.mutex("a").ttl(4 * LONG_WAIT);
    let guard = long.acquire().await.unwrap();
    cluster.wait_until_replicated();
    cluster.stop_replication(old);
    give_back(guard).await;

    old.kill();

    let others = client(&cluster.url());
    let releases_elsewhere = async {
        loop {
            // This may fail while no node serves the slots of the old master. The pause leaves the
            // processor to the servers then.
            drop(locks.mutex(&there).wait(SOON).acquire().await);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        () = works_again(&others, "a", LONG_WAIT) => {}
        () = releases_elsewhere => {}
    }
}

/// The new master has received a part of the changes. Others change the counter there meanwhile. The
/// client sends no further request.
async fn counts_that_the_new_master_had_not_received_are_repeated_there_and_count_once(_: Store) {
    let cluster = Cluster::start(NEVER);
    let locks = client(&cluster.url());
    let old = cluster.master_of(&key("a"));
    let sum = locks.counter("a");
    for total in 1..=10 {
        assert_eq!(sum.add(1).await.unwrap().count, total);
    }
    cluster.wait_until_replicated();
    cluster.stop_replication(old);
    for total in 11..=20 {
        assert_eq!(sum.add(1).await.unwrap().count, total);
    }

    // At once, because a change is repeated for half a minute only.
    cluster.fail_over_with_loss(old);

    let others = client(&cluster.url()).counter("a");
    others.add(1_000).await.unwrap();
    eventually("all changes are there", LONG_WAIT, async || {
        others.get().await.unwrap().count == 1_020
    })
    .await;
    assert_eq!(sum.add(1).await.unwrap().count, 1_021);
}

/// The old master has carried the changes out, and the proxy loses its answers. The new master has
/// received the changes, or it has received neither these nor the one before them.
async fn changes_without_an_answer_when_the_master_is_replaced_count_once(_: Store) {
    for are_received in [true, false] {
        let cluster = Cluster::with(1, true, NEVER, &[]);
        let [old, new] = &cluster.nodes[..] else {
            panic!()
        };
        let way = Proxy::to(old.port());
        cluster.announce(old, way.port());
        let replaced = Replaced {
            locks: client(&cluster.url()),
            others: client(&cluster.url()),
            old,
            way: &way,
        };
        let part = || {
            old.wait_until_received_by(new);
            if !are_received {
                cluster.stop_replication(old);
            }
        };
        let replace = || {
            let mut words = vec!["CLUSTER", "FAILOVER"];
            match are_received {
                true => old.wait_until_received_by(new),
                false => words.push("FORCE"),
            }
            cluster.promote(new, old, &words);
        };
        replaced
            .changes_without_an_answer_count_once(part, replace)
            .await;
    }
}

/// The request of the client goes to the old master first, which redirects it.
async fn a_change_at_the_new_master_comes_after_the_earlier_ones_of_its_client(_: Store) {
    let cluster = Cluster::start(NEVER);
    let (locks, others) = (client(&cluster.url()), client(&cluster.url()));
    let old = cluster.master_of(&key("a"));
    let (sum, seen) = (locks.counter("a"), others.counter("a"));
    sum.add(1).await.unwrap();
    cluster.wait_until_replicated();
    cluster.stop_replication(old);
    for total in 2..=20 {
        assert_eq!(sum.add(1).await.unwrap().count, total);
    }

    cluster.fail_over_with_loss(old);
    assert_eq!(sum.set(5).await.unwrap().count, 5);

    for counter in [&sum, &seen] {
        assert_eq!(counter.get().await.unwrap().count, 5);
    }
    assert_eq!(sum.add(1).await.unwrap().count, 6);
}

/// A new master that has the setting `min-replicas-to-write` refuses all writes until it has its
/// replicas. The client sends no further request.
async fn changes_that_the_new_master_refuses_at_first_are_repeated_until_it_has_them(_: Store) {
    let cluster = Cluster::start(NEVER);
    let locks = client(&cluster.url());
    let old = cluster.master_of(&key("n0"));
    let refuses = cluster.replica_of(old);
    let want = |replicas: &str| {
        refuses.command::<()>(&["CONFIG", "SET", "min-replicas-to-write", replicas]);
    };
    let names = (0..).map(|number| format!("n{number}"));
    let here = names.filter(|name| cluster.master_of(&key(name)).port() == old.port());
    let names: Vec<String> = here.take(50).collect();
    locks.counter(&names[0]).get().await.unwrap();
    cluster.wait_until_replicated();
    cluster.stop_replication(old);
    let adds = names
        .iter()
        .map(async |name| locks.counter(name).add(1).await);
    for added in join_all(adds).await {
        assert_eq!(added.unwrap().count, 1);
    }
    want("9");

    cluster.fail_over_with_loss(old);
    eventually("the changes were refused", LONG_WAIT, async || {
        let told: String = refuses.command(&["INFO", "errorstats"]);
        told.contains("errorstat_NOREPLICAS")
    })
    .await;
    want("0");

    let others = client(&cluster.url());
    eventually("all changes are there", LONG_WAIT, async || {
        let counts = names
            .iter()
            .map(async |name| others.counter(name).get().await);
        let counts = join_all(counts).await;
        counts
            .into_iter()
            .all(|now| now.is_ok_and(|now| now.count == 1))
    })
    .await;
}

/// A new master that has the setting `min-replicas-to-write` refuses all writes until it has its
/// replicas. While it refuses the release, another master is replaced too.
async fn a_release_that_one_new_master_refuses_is_repeated_and_holds_up_none_at_another(_: Store) {
    let cluster = Cluster::start(NEVER);
    let (locks, others) = (client(&cluster.url()), client(&cluster.url()));
    let first = cluster.master_of(&key("a"));
    let there = elsewhere(&cluster, first, "there");
    let second = cluster.master_of(&key(&there));
    let refuses = cluster.replica_of(first);
    let want = |replicas: &str| {
        refuses.command::<()>(&["CONFIG", "SET", "min-replicas-to-write", replicas]);
    };
    let [here, at_second] = ["a", &there].map(|name| locks.mutex(name).ttl(4 * LONG_WAIT));
    let [guard, other] = [
        here.acquire().await.unwrap(),
        at_second.acquire().await.unwrap(),
    ];
    cluster.wait_until_replicated();
    cluster.stop_replication(first);
    give_back(guard).await;
    want("9");

    cluster.fail_over_with_loss(first);
    eventually("the release was refused", LONG_WAIT, async || {
        // A read, which the new master does not refuse, shows this client the new master.
        drop(locks.inspect("a").await);
        let told: String = refuses.command(&["INFO", "errorstats"]);
        told.contains("errorstat_NOREPLICAS")
    })
    .await;
    cluster.stop_replication(second);
    give_back(other).await;
    cluster.fail_over_with_loss(second);

    // Another new master carries its release out, while the first one refuses.
    eventually("the other release is repeated", LONG_WAIT, async || {
        let left = locks.inspect(&there).await;
        left.is_ok_and(|tickets| tickets.is_empty())
    })
    .await;
    tickets(&locks, "a", 1).await;
    want("0");
    works_again(&others, "a", LONG_WAIT).await;
    super::nothing_left(&cluster, &["a", &there]).await;
}

/// There are so many of them that they fill a whole batch, and they come first. At the new master
/// their keys hold something else.
async fn releases_that_always_fail_at_the_new_master_hold_up_no_other(_: Store) {
    let cluster = Cluster::start(NEVER);
    let locks = client(&cluster.url());
    let old = cluster.master_of(&key("a"));
    let names = (0..).map(|number| format!("n{number}"));
    let here = names.filter(|name| cluster.master_of(&key(name)).port() == old.port());
    let names: Vec<String> = here.take(100).collect();
    let mut guards = Vec::new();
    for name in names.iter().map(String::as_str).chain(["a"]) {
        let long = locks.mutex(name).ttl(4 * LONG_WAIT);
        guards.push(long.acquire().await.unwrap());
    }
    let last = guards.pop().unwrap();
    for name in &names {
        old.command::<()>(&["SET", &key(name), "something else"]);
    }
    cluster.wait_until_replicated();
    cluster.stop_replication(old);
    for name in &names {
        old.command::<()>(&["DEL", &key(name)]);
    }
    for released in join_all(guards.into_iter().map(Guard::release)).await {
        assert_eq!(released.unwrap(), Release::AlreadyLost);
    }
    give_back(last).await;

    cluster.fail_over_with_loss(old);

    eventually("the last release is repeated", LONG_WAIT, async || {
        let left = locks.inspect("a").await;
        left.is_ok_and(|tickets| tickets.is_empty())
    })
    .await;
}

/// No node replaces the dead master, so its slots stay unserved.
async fn a_master_that_is_down_costs_the_locks_of_other_masters_nothing(_: Store) {
    let partial = ["--cluster-require-full-coverage", "no"];
    let cluster = Cluster::with(3, false, TIMEOUT, &partial);
    let url = cluster.url();
    let dead = cluster.master_of(&key("a"));
    let [there, there_too] = ["there", "too"].map(|begin| elsewhere(&cluster, dead, begin));
    let builder = builder(&url).ttl(TTL).op_timeout(Duration::from_secs(3));
    let [locks, others] = [(); 2].map(|()| builder.clone().build().unwrap());
    let here = locks.mutex("a").acquire().await.unwrap();
    let guard = locks.mutex(&there).acquire().await.unwrap();
    let next = begin(others.mutex(&there).ttl(3 * TTL).wait(LONG_WAIT));
    tickets(&locks, &there, 2).await;

    dead.kill();

    // A request to the dead master fails within one operation timeout, and its error names the
    // master.
    let error = others.mutex("a").try_acquire().await.unwrap_err();
    let kind = error.kind();
    assert!(
        matches!(kind, ErrorKind::Unavailable | ErrorKind::Unknown),
        "{error}"
    );
    // This needs a lock at each of two masters. Both locks are acquired, or none.
    let both = Locks::all([others.mutex(&there_too), others.mutex("a")]);
    both.try_acquire().await.unwrap_err();
    is_renewed(&guard, TTL).await;
    let began = Instant::now();
    give_back(guard).await;
    let next = next.await.unwrap().unwrap();
    let awake = awake_since(began);
    assert!(awake < Duration::from_secs(5), "{awake:?}"); // the next renewal comes later
    give_back(next).await;
    for name in [&there, &there_too] {
        tickets(&locks, name, 0).await;
    }
    let told = tokio::time::timeout(TTL + SOON, here.lost()).await;
    assert_eq!(told.expect("is not told"), LostReason::Expired);
    dead.restart();
    works_again(&locks, "a", LONG_WAIT).await;
}

async fn a_cluster_that_restarts_without_its_data_is_noticed(_: Store) {
    let cluster = Cluster::of_one();
    let locks = client(&cluster.url());
    let guard = locks.mutex("a").ttl(4 * LONG_WAIT).acquire().await.unwrap();

    cluster.nodes[0].kill();
    cluster.nodes[0].restart();

    let told = tokio::time::timeout(STALL, guard.lost()).await;
    assert_eq!(told.expect("is not told"), LostReason::Taken);
    give_back(locks.mutex("a").wait(SOON).acquire().await.unwrap()).await;
}

/// The clients of the waiters send no request during the failover. But the demoted master ends
/// their subscriptions, so they subscribe at the new master. If a wake-up reached no client there,
/// the next waiter would not be granted within the time limit.
async fn a_master_that_is_demoted_costs_its_waiters_no_place_and_no_wake_up(_: Store) {
    let cluster = Cluster::start(NEVER);
    let url = cluster.url();
    let old = cluster.master_of(&key("a"));
    let new = cluster.replica_of(old);
    // The time between two renewals is 40 s.
    let patient = builder(&url).ttl(4 * 3 * SOON).op_timeout(SOON);
    let clients = [(); 3].map(|()| patient.clone().build().unwrap());
    let mut last = clients[0].mutex("a").acquire().await.unwrap();
    let mut line = Vec::new();
    for locks in &clients[1..] {
        line.push(begin(locks.mutex("a").wait(LONG_WAIT)));
        tickets(&clients[0], "a", 1 + line.len()).await;
    }
    cluster.wait_until_replicated();
    // Those of the waiters. The holder listens from its first renewal on.
    let channels: Vec<String> = old.command(&["PUBSUB", "SHARDCHANNELS", "test:*"]);
    assert_eq!(channels.len(), 2);

    cluster.fail_over(old);

    eventually("both listen there", SOON, async || {
        let there: Vec<String> = new.command(&["PUBSUB", "SHARDCHANNELS", "test:*"]);
        channels.iter().all(|channel| there.contains(channel))
    })
    .await;
    let resource = Witness::exclusive();
    for next in line {
        let token = last.grant_id().as_u64();
        give_back(last).await;
        let next = tokio::time::timeout(SOON, next).await;
        last = next.expect("was not woken").unwrap().unwrap();
        drop(resource.enter(1));
        assert!(last.grant_id().as_u64() > token);
    }
    give_back(last).await;
    resource.assert_no_overlap();
    super::nothing_left(&cluster, &["a"]).await;
}
