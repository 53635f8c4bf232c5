//! Tests of barriers at real servers. A proxy cuts a party off.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::Wait;
use lockcore::events::GrantEvent;
use tests::eventually::eventually;

use super::{passed, waits};
use crate::faults::patient;
use crate::store::{DEFAULT, Kind, SOON, Store, soon};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_party_that_was_cut_off_for_longer_than_its_lease_takes_another_place
    ]
}

/// A store with sessions allows no shorter ttl.
const TTL: Duration = Duration::from_secs(4);

async fn a_party_that_was_cut_off_for_longer_than_its_lease_takes_another_place(store: Store) {
    let server = store.kind.start();
    let (proxy, url) = server.process().unwrap().through_a_proxy();
    let cut_off = patient(url).ttl(TTL).build().unwrap();
    let elsewhere = patient(server.url()).build().unwrap();
    let mut events = cut_off.events();
    let mut grants = cut_off.mutex("a").grants();
    let first = waits(&cut_off.barrier("a", 2).wait(Wait::Forever));
    // If the party were cut off before the answer, it would have no place that it could lose.
    let granted = soon(grants.recv()).await;
    assert!(matches!(granted, Some(GrantEvent::Granted(_))));

    proxy.cut();
    let lost = async {
        while !matches!(
            events.recv().await,
            Some(lockcore::events::Event::Lost { .. })
        ) {}
    };
    tokio::time::timeout(SOON, lost).await.expect("lost");
    eventually("its lease ends", SOON, async || {
        elsewhere.inspect("a").await.unwrap().is_empty()
    })
    .await;
    assert!(!first.is_finished());
    proxy.restore();

    // A cluster may first learn of its nodes again, with pauses in between.
    eventually("it has another place", 4 * SOON, async || {
        !elsewhere.inspect("a").await.unwrap().is_empty()
    })
    .await;
    let second = waits(&elsewhere.barrier("a", 2).wait(2 * SOON));
    assert!(passed(second).await && !passed(first).await);
}
