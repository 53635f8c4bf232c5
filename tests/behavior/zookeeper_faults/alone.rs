//! Names that one client uses alone: their parent is created and deleted with the ticket.

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Locks};
use tests::eventually::eventually;
use tests::zookeeper_server::ZooKeeperServer;

use super::{client, counted, operator};
use crate::store::{Kind, SOON, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        an_uncontended_pair_costs_two_requests_and_leaves_nothing
        a_name_that_was_contended_costs_three_requests_and_no_failed_ones
        a_parent_that_another_client_has_made_is_no_proof_of_being_first
    ]
}

async fn pair(locks: &Locks, name: &str) {
    give_back(locks.mutex(name).acquire().await.unwrap()).await;
}

/// Whether the name was used before or not.
async fn an_uncontended_pair_costs_two_requests_and_leaves_nothing(_: Store) {
    let server = ZooKeeperServer::start();
    let locks = counted(&server);
    pair(&locks, "used").await;
    for used in [true, false] {
        let before = server.packets();
        for number in 0..50 {
            let name = if used {
                "used"
            } else {
                &format!("new{number}")
            };
            pair(&locks, name).await;
        }
        let spent = server.packets().since(before);
        println!("50 pairs, used before: {used}: {spent:?}");
        assert_eq!((spent.received, spent.sent), (100, 100));
    }
    let operator = operator(&server).await;
    let names = operator.list_children("/test:1").await.unwrap();
    assert!(names.is_empty(), "{names:?}");
}

/// A client that has met others at a name does not try to be alone there, as long as the parent exists.
async fn a_name_that_was_contended_costs_three_requests_and_no_failed_ones(_: Store) {
    let server = ZooKeeperServer::start();
    let (locks, other) = (counted(&server), client(&server));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let waiter = begin(other.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    give_back(guard).await;
    give_back(waiter.await.unwrap().unwrap()).await;
    drop(other);
    eventually("the other is gone", SOON, async || server.sessions() == 1).await;

    let before = server.packets();
    for _ in 0..50 {
        pair(&locks, "a").await;
    }

    let spent = server.packets().since(before);
    assert_eq!((spent.received, spent.sent), (150, 150));
}

async fn a_parent_that_another_client_has_made_is_no_proof_of_being_first(_: Store) {
    let server = ZooKeeperServer::start();
    let (one, other) = (client(&server), client(&server));
    for _ in 0..3 {
        pair(&one, "a").await;
        let guard = other.mutex("a").acquire().await.unwrap();

        let tried = one.mutex("a").try_acquire().await;

        assert_eq!(kind(tried), ErrorKind::Busy);
        give_back(guard).await;
    }
}
