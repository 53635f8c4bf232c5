//! Tests of nodes with data that this library did not write.

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::zookeeper_server::ZooKeeperServer;

use super::{client, operator};
use crate::store::{Kind, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "zookeeper_faults";
        a_damaged_counter_is_an_error_and_stays_as_it_is
    ]
}

async fn a_damaged_counter_is_an_error_and_stays_as_it_is(_: Store) {
    let server = ZooKeeperServer::start();
    let (locks, operator) = (client(&server), operator(&server).await);
    let counter = locks.counter("a");
    assert_eq!(counter.add(5).await.unwrap().count, 5);
    let folder = "/test:1/counters";
    let bucket = operator.list_children(folder).await.unwrap().pop().unwrap();
    let path = format!("{folder}/{bucket}/{{a}}");
    let (sound, _) = operator.get_data(&path).await.unwrap();
    let id = "7".repeat(32);
    for damaged in [
        b"".as_slice(),
        b"5",
        b"5 1",
        b"5 1 1 1\n7",
        b"x 1 1\n",
        b"5 -1 1\n",
        b"\xff\xfe",
        b"9007199254740992 1 1\n",
        b"-9007199254740992 1 1\n",
        b"9223372036854775807 1 1\n",
        b"99999999999999999999 1 1\n",
        b"5 1 9007199254740992\n",
        b"5 1 18446744073709551615\n",
        b"5 99999999999999999999 1\n",
        b"5 1 1\n=x\npage 7",
        b"5 1 1\n=7",
        b"5 1 1\n7 1 a 5 1 1\n",
        format!("5 1 1\n{id} 1 z 5 1 1\n").as_bytes(),
        format!("5 1 1\n{id} -1 a 5 1 1\n").as_bytes(),
        format!("5 1 1\n{id} 1 a 5 1\n").as_bytes(),
        &[b'7'; 100_000],
    ] {
        let shown = String::from_utf8_lossy(&damaged[..damaged.len().min(60)]);
        operator.set_data(&path, damaged, None).await.unwrap();

        let answers = [
            counter.get().await.map(drop),
            counter.add(1).await.map(drop),
            counter.set(7).await.map(drop),
        ];

        for answer in answers {
            let error = answer.expect_err(&shown);
            assert_eq!(error.kind(), ErrorKind::Config, "{shown}: {error}");
            let text = error.to_string();
            assert!(text.contains(&path) && text.contains("remove it"), "{text}");
        }
        let (data, _) = operator.get_data(&path).await.unwrap();
        assert_eq!(data, damaged, "{shown}");
    }
    operator.set_data(&path, &sound, None).await.unwrap();
    assert_eq!(counter.add(1).await.unwrap().count, 6);
}
