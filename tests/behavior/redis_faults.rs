//! Tests with Redis servers that are down, full, read-only, slow or restarted, and with servers
//! that have wrong data or a wrong clock. Each fact has its own server. This file has what the
//! groups of facts share. The groups are the files of this folder.

mod cuts;
mod data;
mod failovers;
mod floods;
mod keepers;
mod moved;
mod outages;
mod refusals;
mod replies;

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::Locks;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;
use tests::stores::Server as _;

use crate::faults::{builder, patient};
use crate::store::Kind;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let groups = [
        outages::facts,
        replies::facts,
        cuts::facts,
        refusals::facts,
        data::facts,
        failovers::facts,
        floods::facts,
        keepers::facts,
        moved::facts,
    ];
    groups.into_iter().flat_map(|facts| facts(store)).collect()
}

fn client(server: &RedisServer) -> Locks {
    patient(server.url()).build().unwrap()
}

/// A client for operations that must fail soon.
fn hasty(server: &RedisServer) -> Locks {
    let builder = builder(server.url()).op_timeout(Duration::from_secs(4));
    builder.build().unwrap()
}

fn through(proxy: &Proxy) -> Locks {
    patient(proxy.url()).build().unwrap()
}

async fn nothing_left(server: &RedisServer) {
    eventually("nothing is left", Duration::from_secs(3), async || {
        server.litter("test").is_empty()
    })
    .await;
}
