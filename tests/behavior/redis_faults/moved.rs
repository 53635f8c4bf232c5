//! Tests with an address that is moved to another server, while the earlier server goes on as a
//! master.

use libtest_mimic::Trial;
use lockcore::events::{Event, EventListener};
use lockcore::{Error, ErrorKind, Guard, Locks, LostReason, Release};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;
use tests::stores::redis::{USER, grant};
use tests::watch::SECRET;
use tracing::Level;

use super::client;
use crate::faults::patient;
use crate::moved::{self, Place};
use crate::store::{Kind, SOON, Store, give_back, kind, soon};
use crate::traces::{self, LOGGED};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        clients_exclude_each_other_after_the_move
        a_client_whose_first_connection_finds_another_server_leaves_the_earlier_one
        a_client_whose_last_connection_finds_another_server_leaves_the_earlier_one
        ready_finds_out_that_the_address_leads_to_another_server
        a_restart_of_the_server_is_not_another_server
        without_the_right_to_info_a_client_works
    ]
}

async fn clients_exclude_each_other_after_the_move(_: Store) {
    let (earlier, later) = (RedisServer::start(), RedisServer::start());
    let way = Proxy::to(earlier.port());
    let place = Place {
        url: way.url(),
        ways: vec![way],
        earlier: vec![earlier],
        later: vec![later],
        beside: Box::new(()),
    };
    moved::clients_exclude_each_other_after_the_move(place).await;
}

/// Two masters, and a client of the first with all its connections. A lock of the client is held.
struct Moved {
    earlier: RedisServer,
    later: RedisServer,
    proxy: Proxy,
    locks: Locks,
    owner: String,
    events: EventListener,
    guard: Guard,
}

impl Moved {
    async fn begin(mark: &str) -> Self {
        let (earlier, later) = (RedisServer::start(), RedisServer::start());
        let proxy = Proxy::to(earlier.port());
        let owner = format!("{LOGGED}{mark}");
        // This ttl is so long that only the other server can end the lease in time.
        let locks = patient(proxy.url()).owner(&owner).build().unwrap();
        locks.ready(SOON).await.unwrap();
        let guard = locks.mutex("a").acquire().await.unwrap();
        Self {
            events: locks.events(),
            earlier,
            later,
            proxy,
            locks,
            owner,
            guard,
        }
    }

    /// The ids of the client's connections at the earlier server, the oldest first.
    fn connections(&self) -> Vec<String> {
        let list: String = self.earlier.command(&["CLIENT", "LIST"]);
        let others = list.lines().filter(|line| !line.contains("user=harness"));
        let ids = others.filter_map(|line| line.strip_prefix("id=")?.split(' ').next());
        ids.map(str::to_owned).collect()
    }

    /// The client has left the earlier server, has reported this, and has lost its lock.
    async fn leaves_the_earlier_server(mut self) {
        let reported = Event::Moved(format!("127.0.0.1:{}", self.proxy.port()));
        let next = soon(self.events.recv()).await;
        assert_eq!(next, Some(reported));
        let lost = tokio::time::timeout(SOON, self.guard.lost()).await;
        assert_eq!(lost.expect("not lost"), LostReason::Taken);
        eventually("nobody is at the earlier server", SOON, async || {
            self.connections().is_empty()
        })
        .await;
        assert_eq!(self.guard.release().await.unwrap(), Release::AlreadyLost);
        // Both sides of the client are at the later server: it takes a lock there, and renews it.
        let guard = self.locks.mutex("a").ttl(SOON / 2).acquire().await.unwrap();
        let others = client(&self.later).mutex("a").try_acquire().await;
        assert_eq!(kind(others), ErrorKind::Busy);
        let kept = tokio::time::timeout(SOON / 4 * 3, guard.lost()).await;
        kept.expect_err("it is renewed elsewhere");
        give_back(guard).await;
        self.locks.ready(SOON).await.unwrap();
        let warned = traces::lines(&self.owner);
        let warned = warned.iter().filter(|line| {
            line.level == Level::WARN && line.text.contains("leads to another server")
        });
        assert_eq!(warned.count(), 1);
    }
}

/// The client has two connections. After one of them was closed, it finds the later server.
async fn one_of_its_connections_is_closed(mark: &str, which: impl FnOnce(&[String]) -> &String) {
    let moved = Moved::begin(mark).await;
    let connections = moved.connections();
    assert_eq!(connections.len(), 2);

    moved.proxy.lead_to(moved.later.port());
    let id = which(&connections);
    moved.earlier.command::<u64>(&["CLIENT", "KILL", "ID", id]);

    let mut moved = moved;
    let next = soon(moved.events.recv()).await;
    assert_eq!(next, Some(Event::Suspended)); // for the connection that was closed
    moved.leaves_the_earlier_server().await;
}

async fn a_client_whose_first_connection_finds_another_server_leaves_the_earlier_one(_: Store) {
    one_of_its_connections_is_closed("first", |ids| &ids[0]).await;
}

async fn a_client_whose_last_connection_finds_another_server_leaves_the_earlier_one(_: Store) {
    one_of_its_connections_is_closed("last", |ids| &ids[1]).await;
}

async fn ready_finds_out_that_the_address_leads_to_another_server(_: Store) {
    let moved = Moved::begin("ready").await;

    moved.proxy.lead_to(moved.later.port());
    let error: Error = moved.locks.ready(SOON).await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let text = error.to_string();
    assert!(text.contains("leads to another server"), "{text}");
    moved.leaves_the_earlier_server().await;
}

async fn a_restart_of_the_server_is_not_another_server(_: Store) {
    let server = RedisServer::start();
    let locks = client(&server);
    locks.ready(SOON).await.unwrap();
    let mut events = locks.events();
    let guard = locks.mutex("a").acquire().await.unwrap();

    server.restart();

    let lost = tokio::time::timeout(SOON, guard.lost()).await;
    assert_eq!(lost.expect("not lost"), LostReason::Taken);
    locks.ready(SOON).await.unwrap();
    drop((guard, locks));
    while let Some(event) = events.recv().await {
        assert!(!matches!(event, Event::Moved(_)), "{event:?}");
    }
}

async fn without_the_right_to_info_a_client_works(_: Store) {
    let server = RedisServer::start();
    grant(&server, "lock", SECRET);
    server.command::<()>(&["ACL", "SETUSER", USER, "-info"]);
    let url = server.url_with_user(USER, SECRET);
    let locks = patient(url).namespace("lock").build().unwrap();

    locks.ready(SOON).await.unwrap();

    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}
