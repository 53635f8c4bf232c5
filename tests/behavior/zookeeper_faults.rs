//! Tests with ZooKeeper servers that are down, restarted, cut off or deposed, and with sessions
//! that end. Each fact has its own servers. This file has what the groups of facts share. The
//! groups are the files of this folder.

mod alone;
mod capacities;
mod counters;
mod crowds;
mod cuts;
mod damaged;
mod ensembles;
mod outages;
mod renewals;
mod replies;
mod rights;
mod sessions;
mod turns;

use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::{self, Connection, EventSink, Namespace};
use lockcore::{Builder, Fair, Locks};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::zookeeper_server::ZooKeeperServer;
use zookeeper_client::Client;

use crate::faults;
use crate::store::{Kind, SOON};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [
        alone::facts,
        capacities::facts,
        counters::facts,
        crowds::facts,
        outages::facts,
        renewals::facts,
        replies::facts,
        cuts::facts,
        sessions::facts,
        rights::facts,
        ensembles::facts,
        damaged::facts,
        turns::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

/// The settings of a client. The facts examine requests to the server, so every acquisition gets
/// its own ticket.
fn builder(url: String) -> Builder {
    faults::patient(url).fair(Fair::Strict)
}

fn client(server: &ZooKeeperServer) -> Locks {
    builder(server.url()).build().unwrap()
}

fn through(proxy: &Proxy) -> Locks {
    builder(proxied(proxy)).build().unwrap()
}

fn proxied(proxy: &Proxy) -> String {
    format!("zookeeper://127.0.0.1:{}", proxy.port())
}

async fn nothing_left(server: &ZooKeeperServer) {
    eventually("nothing is left", SOON, async || {
        server.ephemerals("/").is_empty()
    })
    .await;
}

/// A connection of the library without a client above it, as the core opens one. `receiver` is
/// another number for each connection.
async fn connection(url: &str, receiver: u64) -> Arc<dyn Connection> {
    let events = EventSink::new(receiver, namespace(), |_| ());
    let store = backend::open(url).unwrap();
    store.connect(events).await.unwrap()
}

/// The namespace of the clients.
fn namespace() -> Namespace {
    Namespace::new("test").unwrap()
}

/// A plain ZooKeeper client that reads nodes directly. With a short session, it would give up its
/// connection while the machine stands still.
async fn operator(server: &ZooKeeperServer) -> Client {
    Client::connector()
        .with_session_timeout(6 * SOON)
        .connect(&format!("127.0.0.1:{}", server.port()))
        .await
        .unwrap()
}

/// A client for facts that count packets. Its session is so long that it sends no probe in the
/// counted time.
fn counted(server: &ZooKeeperServer) -> Locks {
    builder(server.url() + "?session_timeout=280s")
        .ttl(Duration::from_secs(120))
        .wait(3 * SOON)
        .build()
        .unwrap()
}
