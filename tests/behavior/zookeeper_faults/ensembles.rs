//! Tests with ensembles of three servers. One of the servers is cut off, hangs or dies.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{Builder, Fair};
use tests::eventually::eventually;
use tests::zookeeper_ensemble::Ensemble;
use tests::zookeeper_server::ZooKeeperServer;
use zookeeper_client::Client;

use crate::faults;
use crate::store::{Kind, SOON, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store, crate::store::DEFAULT;
        a_leader_without_followers_answers_probes_and_no_checks
        a_server_that_hangs_costs_no_lease_while_others_answer
        a_crowd_overlaps_nowhere_while_leaders_die
    ];
    for _ in 0..if tests::fact::long() { 20 } else { 1 } {
        facts.extend(crate::store_facts![store, crate::store::DEFAULT;
            a_follower_cut_off_from_its_leader_lets_no_second_holder_in
            a_leader_cut_off_in_silence_lets_no_second_holder_in
            a_leader_that_is_deposed_untold_lets_no_second_holder_in
        ]);
    }
    facts
}

/// The settings of a client, with the default times, because the facts are about time. An operation
/// that hangs on a cut-off server must end before that server notices the cut.
fn builder(url: String) -> Builder {
    faults::builder(url).fair(Fair::Strict)
}

/// The server of the holder answers the holder even after the cut.
async fn a_follower_cut_off_from_its_leader_lets_no_second_holder_in(_: Store) {
    let ensemble = Ensemble::with_bridges();
    let follower = ensemble.followers()[1];
    no_second_holder(&ensemble, follower, Ensemble::cut_off).await;
    assert_eq!(
        follower.role().as_deref(),
        Some("follower"),
        "it noticed too early for this to be a test"
    );
}

/// All three servers notice the cut at the same time: the followers notice that their leader is
/// silent, and the leader notices that its followers are silent.
async fn a_leader_cut_off_in_silence_lets_no_second_holder_in(_: Store) {
    let ensemble = Ensemble::with_bridges();
    no_second_holder(&ensemble, ensemble.leader(), Ensemble::cut_off).await;
}

/// The followers elect another leader long before the old leader notices this. Meanwhile the old
/// leader answers `sync`.
async fn a_leader_that_is_deposed_untold_lets_no_second_holder_in(_: Store) {
    let ensemble = Ensemble::with_bridges();
    let leader = ensemble.leader();
    no_second_holder(&ensemble, leader, Ensemble::cut_off_untold).await;
    assert_eq!(
        leader.role().as_deref(),
        Some("leader"),
        "it noticed too early for this to be a test"
    );
}

/// The client's proof that its session lives relies on this fact. A majority must write down each
/// check, even a check that fails.
async fn a_leader_without_followers_answers_probes_and_no_checks(_: Store) {
    let ensemble = Ensemble::with_bridges();
    let leader = ensemble.leader();
    // A server answers the requests of a connection in order, so each request waits for the check
    // before it. Therefore the three kinds of requests use separate connections.
    let [probing, checking, failing] = [(); 3].map(|()| async {
        Client::connector()
            .with_session_timeout(4 * SOON)
            .connect(&format!("127.0.0.1:{}", leader.port()))
            .await
            .unwrap()
    });
    let (probing, checking, failing) = tokio::join!(probing, checking, failing);
    let check = async |client: &Client, path| {
        let mut writes = client.new_multi_writer();
        writes.add_check_version(path, -1).unwrap();
        writes.commit().await
    };
    assert!(check(&checking, "/").await.is_ok());
    assert!(check(&failing, "/none").await.is_err());

    ensemble.cut_off(leader);
    let unanswered = async |client: &Client, path| {
        let answer = tokio::time::timeout(Duration::from_secs(4), check(client, path)).await;
        assert!(answer.is_err(), "{path}: {answer:?}");
    };
    tokio::join!(unanswered(&checking, "/"), unanswered(&failing, "/none"));

    probing.sync("/").await.unwrap();
    assert_eq!(leader.role().as_deref(), Some("leader"));
}

/// The server of the first holder is cut off. The second holder waits at another server.
async fn no_second_holder(
    ensemble: &Ensemble,
    server: &ZooKeeperServer,
    cut_off: fn(&Ensemble, &ZooKeeperServer),
) {
    let ttl = Duration::from_secs(3);
    let there = builder(server.url()).ttl(ttl).build().unwrap();
    // The time of its operations is not examined.
    let elsewhere = builder(ensemble.servers()[0].url()).op_timeout(SOON / 2);
    let elsewhere = elsewhere.build().unwrap();
    faults::no_second_holder(&there, &elsewhere, || cut_off(ensemble, server)).await;
}

/// The connections to the frozen server stay open, but no answers come.
async fn a_server_that_hangs_costs_no_lease_while_others_answer(_: Store) {
    let ensemble = Ensemble::start();
    // Each commit of these servers waits for a disk that other facts also use, so the ttl is long.
    let ttl = Duration::from_secs(8);
    let followers = ensemble.followers();
    let mut guards = Vec::new();
    // Each client picks a random server. The loop ends when one follower has at least eight
    // clients. The test freezes this follower later. Some of its clients will then, by chance,
    // connect to it once more before they try another server.
    let hangs = loop {
        assert!(guards.len() < 200, "all are served by the leader");
        let locks = builder(ensemble.url()).ttl(ttl).build().unwrap();
        let lock = locks.mutex(format!("a{}", guards.len()));
        guards.push(lock.through_outages(true).acquire().await.unwrap());
        if let Some(busy) = followers.iter().find(|server| server.sessions() >= 8) {
            break busy;
        }
    };
    println!(
        "{} of {} are served by the one",
        hangs.sessions(),
        guards.len()
    );

    faults::nothing_is_lost(guards, ttl, || hangs.freeze()).await;

    hangs.thaw();
}

async fn a_crowd_overlaps_nowhere_while_leaders_die(_: Store) {
    let ensemble = &Ensemble::start();
    faults::a_crowd_overlaps_nowhere(&ensemble.url(), || {
        let leader = ensemble.leader();
        leader.kill();
        move || {
            leader.restart();
            ensemble.wait_until_complete();
        }
    })
    .await;
    let leader = ensemble.leader();
    eventually("nothing is left", SOON, async || {
        leader.ephemerals("/test:1/").is_empty()
    })
    .await;
}
