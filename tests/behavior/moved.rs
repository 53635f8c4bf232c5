//! Addresses that are moved to other servers, while the earlier servers go on as masters: what each
//! form of Redis shares.

use std::any::Any;
use std::time::Duration;

use lockcore::Locks;
use lockcore::events::Event;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;
use tests::witness::Witness;
use tracing::Level;

use crate::faults::{is_renewed, patient};
use crate::store::{SOON, give_back, soon};
use crate::traces::{self, LOGGED};

/// So short that the keeper of a client soon sends a request.
const TTL: Duration = Duration::from_secs(6);

/// How often each client uses the resource.
const SECTIONS: u64 = 20;

/// Servers behind addresses, and the servers that take over their addresses.
pub(crate) struct Place {
    pub(crate) url: String,
    pub(crate) ways: Vec<Proxy>,
    pub(crate) earlier: Vec<RedisServer>,
    pub(crate) later: Vec<RedisServer>,
    /// What else runs until the end.
    pub(crate) beside: Box<dyn Any>,
}

/// A connection with this text has only subscriptions. A client of a cluster has one for its locks.
const LISTENS: &str = "cmd=ssubscribe";

/// The ids of the connections that clients have to this server, the oldest first. Leaves out those
/// whose line has one of these texts.
fn connections(server: &RedisServer, without: &[&str]) -> Vec<String> {
    let list: String = server.command(&["CLIENT", "LIST"]);
    let others = [&["user=harness", "name=sentinel"], without].concat();
    let clients = list
        .lines()
        .filter(|line| !others.iter().any(|other| line.contains(other)));
    let ids = clients.filter_map(|line| line.strip_prefix("id=")?.split(' ').next());
    ids.map(str::to_owned).collect()
}

/// One client loses its caller's connections, and the other one its keeper's. Each of the two finds
/// the later servers on one connection only, and leaves the earlier servers with the other one.
/// Otherwise one of them would take locks at the later servers and the other one at the earlier.
pub(crate) async fn clients_exclude_each_other_after_the_move(place: Place) {
    let mut clients = Vec::new();
    for number in 0..2 {
        let owner = format!("{LOGGED}{number}:{}", place.ways[0].port());
        let locks = patient(&place.url).ttl(TTL).owner(&owner).build().unwrap();
        let of = |server| connections(server, &[LISTENS]);
        let before: Vec<_> = place.earlier.iter().map(of).collect();
        locks.ready(SOON).await.unwrap();
        let guard = locks.mutex(format!("own{number}")).acquire().await.unwrap();
        is_renewed(&guard, TTL).await;
        let mut own = Vec::new();
        for (server, before) in place.earlier.iter().zip(before) {
            let new = || {
                let now = of(server).into_iter();
                now.filter(|id| !before.contains(id)).collect::<Vec<_>>()
            };
            eventually("the client has two connections", SOON, async || {
                new().len() == 2
            })
            .await;
            own.push(new());
        }
        clients.push((locks.events(), locks, owner, guard, own));
    }

    for (way, later) in place.ways.iter().zip(&place.later) {
        way.lead_to(later.port());
    }
    for (at, (.., own)) in clients.iter().enumerate() {
        for (server, ids) in place.earlier.iter().zip(own) {
            server.command::<u64>(&["CLIENT", "KILL", "ID", &ids[at]]);
        }
    }
    eventually("nobody is at the earlier servers", 2 * SOON, async || {
        for (_, locks, ..) in &clients {
            let _ = locks.inspect("a").await; // the next request may open the connection
        }
        place
            .earlier
            .iter()
            .all(|server| connections(server, &[]).is_empty())
    })
    .await;

    let resource = Witness::exclusive();
    let use_it = async |locks: &Locks| {
        for _ in 0..SECTIONS {
            let guard = locks.mutex("a").wait(SOON).acquire().await.unwrap();
            let visit = resource.enter(1);
            tokio::task::yield_now().await;
            drop(visit);
            give_back(guard).await;
        }
    };
    tokio::join!(use_it(&clients[0].1), use_it(&clients[1].1));
    assert_eq!(resource.assert_no_overlap().visits, 2 * SECTIONS);
    for (mut events, locks, owner, guard, _) in clients {
        let _ = guard.release().await; // it may be lost
        let mut expected: Vec<_> = place.ways.iter().map(address).map(Event::Moved).collect();
        while !expected.is_empty() {
            let next = soon(events.recv()).await.unwrap();
            expected.retain(|event| *event != next);
        }
        locks.ready(SOON).await.unwrap();
        let warnings = || {
            let lines = traces::lines(&owner);
            let lines = lines.iter().filter(|line| {
                line.level == Level::WARN && line.text.contains("leads to another server")
            });
            lines.count()
        };
        eventually("each move is logged", SOON, async || {
            warnings() >= place.ways.len()
        })
        .await;
        locks.shutdown(SOON).await.unwrap();
        assert_eq!(warnings(), place.ways.len());
    }
    drop(place.beside);
}

fn address(way: &Proxy) -> String {
    format!("127.0.0.1:{}", way.port())
}
