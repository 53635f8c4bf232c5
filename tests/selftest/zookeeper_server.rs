//! Tests of the ZooKeeper servers and ensembles that the harness starts.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::Locks;
use tests::eventually::wait_until;
use tests::zookeeper_ensemble::Ensemble;
use tests::zookeeper_server::ZooKeeperServer;

use crate::facts;

const SOON: Duration = Duration::from_secs(10);

pub(crate) fn facts() -> Vec<Trial> {
    facts![ZooKeeperServer::available();
        a_server_serves_and_is_gone_when_stopped
        a_restarted_server_keeps_its_data_and_an_emptied_one_does_not
        a_frozen_server_answers_after_the_thaw
        packets_are_counted_without_the_questions
        an_ensemble_elects_another_leader
        a_bridged_server_follows_and_does_not_notice_that_it_is_cut_off
        a_leader_is_deposed_and_does_not_notice
    ]
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
}

/// Holds a lock while a part of a test runs.
fn holding(url: &str, piece: impl FnOnce()) {
    let locks = Locks::builder().url(url).namespace("test").build().unwrap();
    let guard = runtime().block_on(locks.mutex("a").acquire()).unwrap();
    piece();
    drop(guard);
}

fn a_server_serves_and_is_gone_when_stopped() {
    let server = ZooKeeperServer::start();
    assert_eq!(server.role().as_deref(), Some("standalone"));

    server.stop();

    assert!(!server.serves());
}

fn a_restarted_server_keeps_its_data_and_an_emptied_one_does_not() {
    let server = ZooKeeperServer::start();
    holding(&server.url(), || {
        let before = server.ephemerals("/test:1/");
        assert_eq!(before.len(), 1);

        server.kill();
        server.restart();
        assert_eq!(server.ephemerals("/test:1/"), before);

        server.restart_empty();
        assert!(server.ephemerals("/test:1/").is_empty());
    });
}

fn a_frozen_server_answers_after_the_thaw() {
    let server = ZooKeeperServer::start();

    server.freeze();
    assert!(!server.serves());
    server.thaw();

    wait_until("answers", SOON, || server.serves());
}

fn packets_are_counted_without_the_questions() {
    let server = ZooKeeperServer::start();

    let before = server.packets();
    let nothing = server.packets().since(before);
    let mut stranger = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port())).unwrap();
    stranger.write_all(b"ruok").unwrap();
    stranger.read_to_string(&mut String::new()).unwrap();
    let spent = server.packets().since(before);

    assert_eq!((nothing.received, nothing.sent), (0, 0));
    assert_eq!((spent.received, spent.sent), (1, 1));
}

fn an_ensemble_elects_another_leader() {
    let ensemble = Ensemble::start();
    assert_eq!(ensemble.followers().len(), 2);
    let old = ensemble.leader();
    old.kill();

    let new = ensemble.leader();
    assert_ne!(new.port(), old.port());
    old.restart();

    ensemble.wait_until_complete();
    assert_eq!(ensemble.leader().port(), new.port());
}

fn a_bridged_server_follows_and_does_not_notice_that_it_is_cut_off() {
    let ensemble = Ensemble::with_bridges();
    let follower = ensemble.followers()[1];

    ensemble.cut_off(follower);
    std::thread::sleep(Duration::from_secs(5)); // half of the time after which a server notices

    assert_eq!(follower.role().as_deref(), Some("follower"));
    assert_ne!(ensemble.leader().port(), follower.port());
}

fn a_leader_is_deposed_and_does_not_notice() {
    let ensemble = Ensemble::with_bridges();
    let (leader, followers) = (ensemble.leader(), ensemble.followers());

    ensemble.cut_off_untold(leader);

    wait_until("another leads", SOON, || {
        let leads = |server: &&ZooKeeperServer| server.role().as_deref() == Some("leader");
        followers.iter().copied().any(|server| leads(&server))
    });
    assert_eq!(leader.role().as_deref(), Some("leader"));
}
