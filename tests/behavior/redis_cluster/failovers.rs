//! A master is replaced by its replica because it was killed or because it froze. Each fact has its own cluster.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Guard, Locks, LostReason, Release};
use tests::eventually::eventually;
use tests::redis_cluster::Cluster;
use tests::redis_server::RedisServer;
use tests::witness::{FencedResource, Witness};

use super::{LONG_WAIT, TIMEOUT, TTL, client, key, nothing_left};
use crate::faults::{builder, works_again};
use crate::store::{Kind, SOON, STALL, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_cluster";
        a_killed_master_is_replaced_and_costs_nobody_a_lock_or_a_place
        a_frozen_master_is_replaced_and_lets_nobody_in_when_it_wakes
        a_lock_unknown_to_the_new_master_is_lost_and_its_late_write_refused
        a_master_that_is_down_costs_the_locks_of_other_masters_nothing
        a_cluster_that_restarts_without_its_data_is_noticed
    ]
}

async fn is_renewed(guard: &Guard) {
    let before = Instant::now() + guard.remaining();
    eventually("renewed", 2 * TTL, async || {
        Instant::now() + guard.remaining() > before + TTL / 6
    })
    .await;
}

/// A name that begins like this, in a slot of another master.
fn elsewhere(cluster: &Cluster, than: &RedisServer, begin: &str) -> String {
    let mut names = (0..).map(|number| format!("{begin}{number}"));
    let is_elsewhere = |name: &String| cluster.master_of(&key(name)).port() != than.port();
    names.find(is_elsewhere).unwrap()
}

/// One client holds, two wait in line, one releases during the outage, and one asks during it. Afterwards nobody has
/// lost anything. All names are at the master that breaks.
async fn nobody_loses_anything(cluster: &Cluster, breaks: impl FnOnce(&RedisServer)) {
    let url = cluster.url();
    let [holds, waits, waits_too] = [(); 3].map(|()| client(&url));
    // An operation of this client does not last as long as the outage.
    let others = builder(&url).ttl(TTL).build().unwrap();
    let old = cluster.master_of(&key("a"));
    let here = |number: u32| {
        let mut names = (number * 1000..).map(|number| format!("n{number}"));
        names.find(|name| cluster.master_of(&key(name)).port() == old.port())
    };
    let (b, c, d) = (here(1).unwrap(), here(2).unwrap(), here(3).unwrap());
    let resource = Witness::exclusive();
    let guard = holds.mutex("a").acquire().await.unwrap();
    let visit = resource.enter(1);
    let first = begin(waits.mutex("a").wait(LONG_WAIT));
    tickets(&holds, "a", 2).await;
    let second = begin(waits_too.mutex("a").wait(LONG_WAIT));
    tickets(&holds, "a", 3).await;
    let released = others.mutex(&b).acquire().await.unwrap();
    cluster.wait_until_replicated();

    breaks(old);
    let began = Instant::now();
    let release = tokio::spawn(released.release());
    if let Err(error) = others.mutex(&d).try_acquire().await {
        let kind = error.kind();
        let is_expected = matches!(kind, ErrorKind::Unavailable | ErrorKind::Unknown);
        assert!(is_expected, "{error}");
    }
    works_again(&others, &c, LONG_WAIT).await;
    println!("a lock was granted after {:?}", began.elapsed());
    cluster.wait_for_another_master_than(old.port(), &key("a"));
    match release.await.unwrap() {
        Ok(release) => assert_eq!(release, Release::Released),
        Err(error) => assert!(
            matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown),
            "{error}"
        ),
    }
    is_renewed(&guard).await;
    // A question that is on its way to the old master fails.
    eventually("the line is at the new master", LONG_WAIT, async || {
        let line = client(&url).inspect("a").await;
        line.is_ok_and(|line| line.len() == 3)
    })
    .await;
    let mut token = guard.grant_id().as_u64();
    drop(visit);
    give_back(guard).await;
    for next in [first, second] {
        let next = next.await.unwrap().unwrap();
        let visit = resource.enter(1);
        assert!(next.grant_id().as_u64() > token);
        token = next.grant_id().as_u64();
        drop(visit);
        give_back(next).await;
    }
    resource.assert_no_overlap();
    nothing_left(cluster, &["a", &b, &c, &d]).await;
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
    is_renewed(&guard).await;
    give_back(guard).await;
}

/// The shortest way to two holders, which the guide describes.
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

/// Without any failover: the slots of the dead master stay unserved.
async fn a_master_that_is_down_costs_the_locks_of_other_masters_nothing(_: Store) {
    let partial = ["--cluster-require-full-coverage", "no"];
    let cluster = Cluster::with(3, false, TIMEOUT, &partial);
    let url = cluster.url();
    let dead = cluster.master_of(&key("a"));
    let [there, there_too] = ["there", "too"].map(|begin| elsewhere(&cluster, dead, begin));
    let [locks, others] = [(); 2].map(|()| builder(&url).ttl(TTL).build().unwrap());
    let here = locks.mutex("a").acquire().await.unwrap();
    let guard = locks.mutex(&there).acquire().await.unwrap();
    let next = begin(others.mutex(&there).wait(LONG_WAIT));
    tickets(&locks, &there, 2).await;

    dead.kill();

    // A request for the dead master fails within one operation, and names it.
    let error = others.mutex("a").try_acquire().await.unwrap_err();
    let kind = error.kind();
    assert!(
        matches!(kind, ErrorKind::Unavailable | ErrorKind::Unknown),
        "{error}"
    );
    // One lock of each master: all or nothing.
    let both = Locks::all([others.mutex(&there_too), others.mutex("a")]);
    both.try_acquire().await.unwrap_err();
    is_renewed(&guard).await;
    let began = Instant::now();
    give_back(guard).await;
    let next = next.await.unwrap().unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(2),
        "{:?}",
        began.elapsed()
    );
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
