//! Tests with ensembles of three members. One of the members is cut off, hangs or dies.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{Builder, Fair};
use tests::etcd_ensemble::EtcdEnsemble;
use tests::etcd_server::EtcdServer;
use tests::eventually::eventually;

use crate::faults::{self, is_proved_again};
use crate::store::{DEFAULT, Kind, SOON, Store, begin, give_back, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store, DEFAULT;
        a_member_that_hangs_costs_no_lease_while_others_answer
        a_crowd_overlaps_nowhere_while_leaders_die
    ];
    for _ in 0..if tests::fact::long() { 20 } else { 2 } {
        facts.extend(crate::store_facts![store, DEFAULT;
            a_follower_cut_off_from_its_leader_lets_no_second_holder_in
            a_leader_cut_off_in_silence_lets_no_second_holder_in
            a_leader_cut_off_by_resets_lets_no_second_holder_in
            a_leader_that_is_deposed_untold_lets_no_second_holder_in
            a_leader_that_is_stopped_lets_no_second_holder_in
            a_leader_that_dies_costs_no_lock_and_no_place
        ]);
    }
    facts
}

/// The settings of a client, with the default times, because the facts are about time.
fn builder(url: String) -> Builder {
    faults::builder(url).fair(Fair::Strict)
}

/// The holder's client has this member only.
async fn no_second_holder(
    ensemble: &EtcdEnsemble,
    member: &EtcdServer,
    breaks: fn(&EtcdEnsemble, &EtcdServer),
) {
    let ttl = Duration::from_secs(3);
    let there = builder(member.url()).ttl(ttl).build().unwrap();
    let mut others = ensemble.members().iter();
    let other = others.find(|other| other.port() != member.port()).unwrap();
    // The time of its operations is not examined.
    let elsewhere = builder(other.url()).op_timeout(SOON / 2);
    let elsewhere = elsewhere.build().unwrap();
    faults::no_second_holder(&there, &elsewhere, || breaks(ensemble, member)).await;
}

/// The member of the holder does not know at first that it is alone.
async fn a_follower_cut_off_from_its_leader_lets_no_second_holder_in(_: Store) {
    let ensemble = EtcdEnsemble::start();
    let follower = ensemble.followers()[1];
    no_second_holder(&ensemble, follower, EtcdEnsemble::cut_off).await;
}

async fn a_leader_cut_off_in_silence_lets_no_second_holder_in(_: Store) {
    let ensemble = EtcdEnsemble::start();
    no_second_holder(&ensemble, ensemble.leader(), EtcdEnsemble::cut_off).await;
}

async fn a_leader_cut_off_by_resets_lets_no_second_holder_in(_: Store) {
    let ensemble = EtcdEnsemble::start();
    no_second_holder(&ensemble, ensemble.leader(), EtcdEnsemble::reset).await;
}

/// Meanwhile the old leader answers keep-alives.
async fn a_leader_that_is_deposed_untold_lets_no_second_holder_in(_: Store) {
    let ensemble = EtcdEnsemble::start();
    no_second_holder(&ensemble, ensemble.leader(), EtcdEnsemble::cut_off_untold).await;
}

/// When it goes on, it may believe for a moment that it leads.
async fn a_leader_that_is_stopped_lets_no_second_holder_in(_: Store) {
    let ensemble = EtcdEnsemble::start();
    let leader = ensemble.leader();
    no_second_holder(&ensemble, leader, |_, leader| leader.freeze()).await;
    leader.thaw();
}

async fn a_leader_that_dies_costs_no_lock_and_no_place(_: Store) {
    let ensemble = EtcdEnsemble::start();
    let ttl = Duration::from_secs(15);
    let clients = [(); 2].map(|()| {
        let builder = builder(ensemble.url()).ttl(ttl).op_timeout(SOON / 2);
        builder.build().unwrap()
    });
    let [holder, waiter] = &clients;
    holder.ready(SOON).await.unwrap();
    waiter.ready(SOON).await.unwrap();
    let guard = holder.mutex("a").acquire().await.unwrap();
    let waits = begin(waiter.mutex("a").wait(4 * SOON));
    tickets(holder, "a", 2).await;
    is_proved_again(&guard).await;
    let leader = ensemble.leader();

    leader.kill();
    let killed = Instant::now();
    eventually("another lock is granted", 2 * SOON, async || {
        match holder.mutex("b").acquire().await {
            Ok(other) => other.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
    println!(
        "a lock was granted {:?} after the leader died",
        killed.elapsed()
    );
    is_proved_again(&guard).await;
    assert!(guard.is_valid());
    let token = guard.grant_id().as_u64();
    give_back(guard).await;
    let next = waits.await.unwrap().unwrap();
    assert!(next.grant_id().as_u64() > token);
    give_back(next).await;
}

/// The connections to the member stay open, but no answers come.
async fn a_member_that_hangs_costs_no_lease_while_others_answer(_: Store) {
    let ensemble = EtcdEnsemble::start();
    let ttl = Duration::from_secs(8);
    // Each client picks a random member.
    let mut guards = Vec::new();
    for number in 0..12 {
        let locks = builder(ensemble.url()).ttl(ttl).build().unwrap();
        let lock = locks.mutex(format!("a{number}"));
        guards.push(lock.through_outages(true).acquire().await.unwrap());
    }

    let hangs = ensemble.followers()[0];
    faults::nothing_is_lost(guards, ttl, || hangs.freeze()).await;

    hangs.thaw();
}

async fn a_crowd_overlaps_nowhere_while_leaders_die(_: Store) {
    let ensemble = &EtcdEnsemble::start();
    faults::a_crowd_overlaps_nowhere(&ensemble.url(), || {
        let leader = ensemble.leader();
        leader.kill();
        move || ensemble.restart(leader)
    })
    .await;
    let member = &ensemble.members()[0];
    eventually("nothing is left", SOON, async || {
        member.keys("test:1:{").is_empty()
    })
    .await;
}
