//! Tests of counters: how long they are kept, and many writers of one counter.

use libtest_mimic::Trial;
use lockcore::Locks;
use tests::zookeeper_server::ZooKeeperServer;
use zookeeper_client::{Acls, Client, CreateMode};

use super::{client, operator};
use crate::store::{Kind, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_new_counter_removes_those_beside_it_whose_time_is_over
    ]
}

const FOLDER: &str = "/test:1/counters";

/// The node of the only counter.
async fn node(operator: &Client) -> (String, String) {
    for bucket in operator.list_children(FOLDER).await.unwrap() {
        let bucket = format!("{FOLDER}/{bucket}");
        if let Some(name) = operator.list_children(&bucket).await.unwrap().pop() {
            return (bucket, name);
        }
    }
    panic!("there is no counter");
}

/// The time of a counter is in its node. The test writes the nodes of two counters itself: the time
/// of the first is zero, so it is over, and that of the second is an hour.
async fn a_new_counter_removes_those_beside_it_whose_time_is_over(_: Store) {
    let server = ZooKeeperServer::start();
    let locks: Locks = client(&server);
    let operator = operator(&server).await;
    locks.counter("a").add(1).await.unwrap();
    let (bucket, a) = node(&operator).await;
    let (data, _) = operator.get_data(&format!("{bucket}/{a}")).await.unwrap();
    let line = String::from_utf8(data).unwrap();
    let month = (30 * 24 * 60 * 60).to_string();
    assert_eq!(
        line.lines().next().unwrap().split(' ').nth(3),
        Some(month.as_str())
    );
    let node = CreateMode::Persistent.with_acls(Acls::anyone_all());
    for (name, keep) in [("over", 0), ("young", 3_600)] {
        let data = format!("7 1 1 {keep}\n");
        let path = format!("{bucket}/{name}");
        let created = operator.create(&path, data.as_bytes(), &node);
        created.await.unwrap();
    }

    // This counter is created once more, and with it the others of its folder are checked.
    operator
        .delete(&format!("{bucket}/{a}"), None)
        .await
        .unwrap();
    locks.counter("a").add(1).await.unwrap();

    tests::eventually::eventually("it is removed", crate::store::SOON, async || {
        let mut names = operator.list_children(&bucket).await.unwrap();
        names.sort();
        let mut left = vec![a.clone(), "young".to_owned()];
        left.sort();
        names == left
    })
    .await;
}
