//! Tests with a master that is replaced: on request, because it was killed, because it froze, or
//! because only the sentinels cannot reach it. Each fact has its own servers and sentinels.

use std::time::Duration;

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::{ErrorKind, Guard, LostReason, Release};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_sentinels::{NEVER, SERVICE, Sentinels};
use tests::redis_server::RedisServer;
use tests::witness::{FencedResource, Witness};

use super::{TTL, client};
use crate::counters::servers::Replaced;
use crate::faults::{Outage, builder, is_renewed, works_again};
use crate::store::{Kind, SOON, STALL, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_sentinel";
        a_failover_that_is_asked_for_costs_nobody_a_lock_or_a_place
        a_killed_master_is_replaced_and_costs_nobody_a_lock_or_a_place
        a_frozen_master_is_replaced_and_lets_nobody_in_when_it_wakes
        a_master_that_only_the_sentinels_have_given_up_is_left
        a_lock_unknown_to_the_new_master_is_lost_and_its_late_write_refused
        a_release_that_the_new_master_had_not_received_is_repeated_there
        counts_that_the_new_master_had_not_received_are_repeated_there_and_count_once
        changes_without_an_answer_when_the_master_is_replaced_count_once
        the_latest_second_of_a_busy_counter_is_repeated_at_the_new_master
        a_release_that_the_new_master_refuses_at_first_is_repeated_until_it_is_done
        releases_that_always_fail_at_the_new_master_hold_up_no_other
        a_master_that_counts_its_replicas_grants_nothing_that_could_be_lost
    ]
}

/// The time after which the sentinels replace a silent master. A master that stands still for three
/// seconds stays.
const DOWN_AFTER: Duration = Duration::from_secs(5);

const LONG_WAIT: Duration = Duration::from_secs(60);

/// Checks that no client holds these names or waits for them. Some keys may remain: keys that keep
/// tokens rising, and marks of requests that were given up during the outage. A mark stays for a
/// minute.
async fn nothing_left(set: &Sentinels, names: &[&str]) {
    let locks = client(&set.url());
    for name in names {
        tickets(&locks, name, 0).await;
    }
}

async fn nobody_loses_anything(set: &Sentinels, breaks: impl FnOnce(&Sentinels)) {
    let url = set.url();
    let old = set.master().port();
    // The operations of this client may take longer than the outage.
    let asks = builder(&url).ttl(TTL).op_timeout(STALL).build().unwrap();
    let outage = Outage {
        url,
        ttl: TTL,
        names: ["a", "b", "d"],
    };
    let breaks = || {
        set.wait_until_replicated();
        breaks(set);
    };
    let granted_again = async || {
        let lock = asks.mutex("c").wait(LONG_WAIT);
        give_back(lock.acquire().await.unwrap()).await;
        assert_ne!(set.master().port(), old);
    };
    outage
        .costs_nobody_a_lock_or_a_place(breaks, granted_again)
        .await;
}

async fn a_failover_that_is_asked_for_costs_nobody_a_lock_or_a_place(_: Store) {
    let set = Sentinels::start(DOWN_AFTER);
    nobody_loses_anything(&set, Sentinels::fail_over).await;
    nothing_left(&set, &["c"]).await;
}

async fn a_killed_master_is_replaced_and_costs_nobody_a_lock_or_a_place(_: Store) {
    let set = Sentinels::start(DOWN_AFTER);
    nobody_loses_anything(&set, |set| set.master().kill()).await;
    nothing_left(&set, &["c"]).await;
}

async fn a_frozen_master_is_replaced_and_lets_nobody_in_when_it_wakes(_: Store) {
    let set = Sentinels::start(DOWN_AFTER);
    let old = set.master();
    let locks = client(&set.url());
    let guard = locks.mutex("held").acquire().await.unwrap();
    nobody_loses_anything(&set, |set| set.master().freeze()).await;

    old.thaw();

    // These requests come at different times: before the sentinels make the old master a replica,
    // and after that.
    for _ in 0..20 {
        let other = client(&set.url()).mutex("held").try_acquire().await;
        assert_eq!(kind(other), ErrorKind::Busy);
    }
    eventually("the old master is a replica", LONG_WAIT, async || {
        // A sentinel closes all connections of a server that it makes a replica. This includes the
        // connection of the harness.
        let told = old.try_command::<String>(&["INFO", "replication"]);
        told.is_ok_and(|told| told.contains("role:slave"))
    })
    .await;
    is_renewed(&guard, TTL).await;
    give_back(guard).await;
    nothing_left(&set, &["c", "held"]).await;
}

/// The old master remains a master, answers its clients and closes no connection. The clients learn
/// of the new master only from the message of the sentinels.
async fn a_master_that_only_the_sentinels_have_given_up_is_left(_: Store) {
    let set = Sentinels::start(DOWN_AFTER);
    let locks = client(&set.url());
    let short = locks.mutex("short").ttl(Duration::from_secs(6));
    let (guard, short) = (
        locks.mutex("a").acquire().await.unwrap(),
        short.acquire().await.unwrap(),
    );
    set.wait_until_replicated();
    let old = set.master();
    let resource = Witness::exclusive();

    let visit = resource.enter(1);
    set.hide_the_master();
    set.wait_for_another_master_than(old.port());

    let channels = || old.command::<Vec<String>>(&["PUBSUB", "CHANNELS", "test:*"]);
    eventually("nobody listens at the old master", SOON, async || {
        channels().is_empty()
    })
    .await;
    assert!(
        old.command::<String>(&["INFO", "replication"])
            .contains("role:master"),
        "it was demoted, which closes connections"
    );
    // The leases continue at the new master, so no other client gets the locks.
    let others = client(&set.url());
    let next = begin(others.mutex("short").wait(LONG_WAIT));
    tokio::time::timeout(Duration::from_secs(8), short.lost())
        .await
        .expect_err("lost, though it was renewed in time");
    drop(visit);
    give_back(short).await;
    let next = next.await.unwrap().unwrap();
    drop(resource.enter(1));
    give_back(next).await;
    resource.assert_no_overlap();
    give_back(guard).await;
    nothing_left(&set, &["a", "short"]).await;
    set.show(old);
}

/// The fact shows the shortest sequence of events that leads to two holders at once. The guide
/// describes this sequence.
async fn a_lock_unknown_to_the_new_master_is_lost_and_its_late_write_refused(_: Store) {
    let set = Sentinels::start(DOWN_AFTER);
    let locks = client(&set.url());
    let resource = FencedResource::default();
    let old = set.master();
    // This acquisition connects the client. So the grant below takes no longer than one request.
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    set.stop_replication();
    let first = locks.mutex("a").acquire().await.unwrap();
    resource.write(first.grant_id().as_u64()).unwrap();

    old.kill();
    set.wait_for_another_master_than(old.port());
    let next = client(&set.url());
    let next = next.mutex("a").wait(LONG_WAIT).acquire().await.unwrap();
    resource.write(next.grant_id().as_u64()).unwrap();

    // The first holder learns of its loss from the first answer of the new master, not at the end
    // of its lease.
    let told = tokio::time::timeout(TTL / 3 + SOON, first.lost()).await;
    assert_eq!(told.expect("is not told"), LostReason::Taken);
    let late = resource.write(first.grant_id().as_u64()).unwrap_err();
    assert_eq!(late.highest, next.grant_id().as_u64());
    assert_eq!(first.release().await.unwrap(), Release::AlreadyLost);
    give_back(next).await;
    nothing_left(&set, &["a", "warm"]).await;
}

/// The new master has the ticket, because it has not received the release. If the client did not
/// repeat the release there, the ticket would stay until its lease ends.
async fn a_release_that_the_new_master_had_not_received_is_repeated_there(_: Store) {
    let set = Sentinels::start(NEVER);
    let locks = client(&set.url());
    let long = locks.mutex("a").ttl(4 * LONG_WAIT);
    let guard = long.acquire().await.unwrap();
    set.wait_until_replicated();
    set.stop_replication();
    give_back(guard).await;

    set.fail_over();

    let others = client(&set.url());
    let next = begin(others.mutex("a").wait(2 * LONG_WAIT));
    let next = tokio::time::timeout(LONG_WAIT, next).await;
    give_back(next.expect("it is still taken").unwrap().unwrap()).await;
    nothing_left(&set, &["a"]).await;
}

/// The new master has received some of the changes, and others change the counters there before this
/// client does. A value and a latch are counters too.
async fn counts_that_the_new_master_had_not_received_are_repeated_there_and_count_once(_: Store) {
    let set = Sentinels::start(NEVER);
    let (locks, quiet) = (client(&set.url()), client(&set.url()));
    let (sum, quiet_sum) = (locks.counter("sum"), quiet.counter("sum"));
    let (latch, highest) = (locks.latch("latch"), locks.counter("highest"));
    assert!(latch.try_set(5).await.unwrap());
    for total in 1..=10 {
        assert_eq!(sum.add(1).await.unwrap().count, total);
    }
    assert_eq!(latch.count_down().await.unwrap(), 4);
    highest.set(7).await.unwrap();
    set.wait_until_replicated();
    set.stop_replication();
    for total in 11..=20 {
        assert_eq!(sum.add(1).await.unwrap().count, total);
    }
    assert_eq!(quiet_sum.add(100).await.unwrap().count, 120);
    assert_eq!(latch.count_down().await.unwrap(), 3);
    let seen = highest.set(8).await.unwrap();
    let swapped = highest.compare_and_set(seen.version, 9).await.unwrap();
    assert_eq!(swapped.unwrap().count, 9);

    set.fail_over();

    // A client that has changed nothing before.
    let others = client(&set.url());
    others.counter("sum").add(1_000).await.unwrap();
    eventually("all changes are there", LONG_WAIT, async || {
        others
            .counter("sum")
            .get()
            .await
            .is_ok_and(|now| now.count == 1_120)
    })
    .await;
    eventually("the latch is as it was", LONG_WAIT, async || {
        others
            .latch("latch")
            .count()
            .await
            .is_ok_and(|count| count == 3)
    })
    .await;
    eventually("it was set", LONG_WAIT, async || {
        others
            .counter("highest")
            .get()
            .await
            .is_ok_and(|now| now.count == 9)
    })
    .await;
    // What these clients do next counts on top of it.
    assert_eq!(sum.add(1).await.unwrap().count, 1_121);
    assert_eq!(quiet_sum.add(1).await.unwrap().count, 1_122);
    assert_eq!(latch.count_down().await.unwrap(), 2);
}

/// The old master has carried the changes out, and the proxy loses its answers. The new master has
/// received the changes, or it has received neither these nor the one before them.
async fn changes_without_an_answer_when_the_master_is_replaced_count_once(_: Store) {
    for are_received in [true, false] {
        let set = Sentinels::start(NEVER);
        let old = set.master();
        let way = Proxy::to(old.port());
        let bulk = |port: u16| format!("$5\r\n{port}\r\n");
        let sentinels: Vec<_> = (set.sentinels.iter())
            .map(|sentinel| {
                let proxy = Proxy::to(sentinel.port());
                proxy.rename(bulk(old.port()).as_bytes(), bulk(way.port()).as_bytes());
                proxy
            })
            .collect();
        let hosts: Vec<_> = (sentinels.iter())
            .map(|proxy| format!("127.0.0.1:{}", proxy.port()))
            .collect();
        let replaced = Replaced {
            locks: client(&format!("redis+sentinel://{}/{SERVICE}", hosts.join(","))),
            others: client(&set.url()),
            old,
            way: &way,
        };
        let part = || {
            set.wait_until_replicated();
            if !are_received {
                set.stop_replication();
            }
        };
        let replace = || {
            if are_received {
                set.wait_until_replicated();
            }
            set.fail_over();
        };
        replaced
            .changes_without_an_answer_count_once(part, replace)
            .await;
    }
}

/// Two clients together make more changes than the server may remember. Both have made some of the
/// latest. The new master has the first half.
async fn the_latest_second_of_a_busy_counter_is_repeated_at_the_new_master(_: Store) {
    const EARLIER: i64 = 2_000;
    const LATEST: i64 = 600;
    let set = Sentinels::start(NEVER);
    let clients = [client(&set.url()), client(&set.url())];
    let sums = clients.each_ref().map(|locks| locks.counter("sum"));
    let add = async |times: i64| {
        let adds = sums.iter().map(|sum| async move {
            for _ in 0..times / 100 {
                let some = join_all((0..100).map(|_| sum.add(1)));
                assert!(some.await.iter().all(Result::is_ok));
            }
        });
        join_all(adds).await;
    };
    add(EARLIER).await;
    set.wait_until_replicated();
    set.stop_replication();
    add(LATEST).await;
    let sum = 2 * (EARLIER + LATEST);
    assert_eq!(sums[0].get().await.unwrap().count, sum);

    set.fail_over();

    let others = client(&set.url()).counter("sum");
    eventually("all changes are there", LONG_WAIT, async || {
        others.get().await.is_ok_and(|now| now.count == sum)
    })
    .await;
    assert_eq!(sums[1].add(1).await.unwrap().count, sum + 1);
}

/// A new master that has the setting `min-replicas-to-write` refuses all writes until it has its
/// replicas.
async fn a_release_that_the_new_master_refuses_at_first_is_repeated_until_it_is_done(_: Store) {
    let set = Sentinels::start(NEVER);
    let locks = client(&set.url());
    let long = locks.mutex("a").ttl(4 * LONG_WAIT);
    let guard = long.acquire().await.unwrap();
    set.wait_until_replicated();
    let want = |server: &RedisServer, replicas: &str| {
        server.command::<()>(&["CONFIG", "SET", "min-replicas-to-write", replicas]);
    };
    set.stop_replication();
    give_back(guard).await;
    for server in &set.servers[1..] {
        want(server, "9");
    }

    set.fail_over();
    let master = set.master();
    let refused = || {
        let told: String = master.command(&["INFO", "errorstats"]);
        told.contains("errorstat_NOREPLICAS")
    };
    eventually("the release was refused", LONG_WAIT, async || refused()).await;
    want(master, "0");

    let others = client(&set.url());
    let next = begin(others.mutex("a").wait(2 * LONG_WAIT));
    let next = tokio::time::timeout(LONG_WAIT, next).await;
    give_back(next.expect("it is still taken").unwrap().unwrap()).await;
    nothing_left(&set, &["a"]).await;
}

/// There are so many of them that they fill a whole batch, and they come first. At the new master
/// their keys hold something else.
async fn releases_that_always_fail_at_the_new_master_hold_up_no_other(_: Store) {
    // With a short time, replicas that have not followed for ten times as long are not promoted.
    let set = Sentinels::start(NEVER);
    let locks = client(&set.url());
    let names: Vec<String> = (0..100).map(|number| format!("n{number}")).collect();
    let mut guards = Vec::new();
    for name in names.iter().map(String::as_str).chain(["a"]) {
        let long = locks.mutex(name).ttl(4 * LONG_WAIT);
        guards.push(long.acquire().await.unwrap());
    }
    let last = guards.pop().unwrap();
    let old = set.master();
    let keys: Vec<String> = names
        .iter()
        .map(|name| format!("test:1:{{{name}}}"))
        .collect();
    let foreign = keys.iter().flat_map(|key| [key, "something else"]);
    let foreign: Vec<&str> = ["MSET"].into_iter().chain(foreign).collect();
    old.command::<()>(&foreign);
    set.wait_until_replicated();
    set.stop_replication();
    let gone: Vec<&str> = ["DEL"]
        .into_iter()
        .chain(keys.iter().map(String::as_str))
        .collect();
    old.command::<()>(&gone);
    for released in join_all(guards.into_iter().map(Guard::release)).await {
        assert_eq!(released.unwrap(), Release::AlreadyLost);
    }
    give_back(last).await;

    set.fail_over();

    let others = client(&set.url());
    works_again(&others, "a", LONG_WAIT).await;
    nothing_left(&set, &["a"]).await;
}

/// The servers have the setting `min-replicas-to-write`, as `ready` recommends.
async fn a_master_that_counts_its_replicas_grants_nothing_that_could_be_lost(_: Store) {
    let counts = [
        "--min-replicas-to-write",
        "1",
        "--min-replicas-max-lag",
        "2",
    ];
    let set = Sentinels::with(DOWN_AFTER, &counts);
    let locks = client(&set.url());
    locks.ready(STALL).await.unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    set.hide_the_master();
    set.stop_replication();

    eventually("the old master refuses", SOON, async || {
        let old = builder(format!("redis://127.0.0.1:{}", set.servers[0].port()));
        match old.build().unwrap().mutex("a").try_acquire().await {
            Ok(guard) => {
                give_back(guard).await;
                false
            }
            Err(error) => {
                error.kind() == ErrorKind::Unavailable && error.to_string().contains("NOREPLICAS")
            }
        }
    })
    .await;
    // These clients find the new master through the sentinels.
    works_again(&locks, "a", LONG_WAIT).await;
}
