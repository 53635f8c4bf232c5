//! A server that becomes a replica, and a replica that becomes the master: nothing is lost, no clock moves, and no
//! connection is closed.

use std::sync::Arc;

use libtest_mimic::Trial;
use lockcore::Lock;
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;
use tests::witness::Witness;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{client, nothing_left, through};
use crate::store::{Kind, SOON, Store, give_back, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_waiter_at_the_old_master_does_not_hold_beside_another
    ]
}

/// Takes the lock, tells that it has come in, and stays in the resource until it is told to leave, or loses the lock.
struct Visit {
    came_in: oneshot::Receiver<()>,
    leave: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Visit {
    fn begin(lock: Lock, resource: &Arc<Witness>) -> Self {
        let (tell, came_in) = oneshot::channel();
        let (leave, told_to_leave) = oneshot::channel();
        let resource = Arc::clone(resource);
        let task = tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            let visit = resource.enter(1);
            tell.send(()).unwrap();
            tokio::select! {
                _ = guard.lost() => {}
                _ = told_to_leave => {}
            }
            drop(visit);
            give_back(guard).await;
        });
        Self {
            came_in,
            leave,
            task,
        }
    }

    async fn comes_in(&mut self) {
        let came_in = tokio::time::timeout(SOON, &mut self.came_in);
        came_in.await.expect("does not come in").unwrap();
    }

    async fn leaves(self) {
        self.leave.send(()).unwrap();
        self.task.await.unwrap();
    }
}

/// H60: the release on the new master finds that nobody hears the waiter's message there, and cuts its turn short. The
/// waiter must not hear of its turn in another way.
async fn a_waiter_at_the_old_master_does_not_hold_beside_another(_: Store) {
    let old = RedisServer::start();
    let new = RedisServer::replica_of(&old);
    let [holds, stays, moves] = [(); 3].map(|()| Proxy::to(old.port()));
    let resource = Arc::new(Witness::exclusive());
    // Renewals are 40 s apart.
    let lock = |proxy| through(proxy).mutex("a").ttl(4 * 3 * SOON).wait(6 * SOON);
    let guard = lock(&holds).acquire().await.unwrap();
    let mut waits_there = Visit::begin(lock(&stays), &resource);
    tickets(&client(&old), "a", 2).await;
    let mut waits_here = Visit::begin(lock(&moves), &resource);
    tickets(&client(&old), "a", 3).await;
    let line: Vec<String> = old.command(&["LRANGE", "test:1:{a}:queue", "0", "-1"]);
    let last: String = old.command(&["HGET", "test:1:{a}", &line[2]]);
    let channel = format!("test:1:wake:{}", last.split(':').nth(5).unwrap());

    old.fail_over_to(&new);
    for proxy in [&holds, &moves] {
        proxy.lead_to(new.port());
        proxy.cut();
        proxy.restore();
    }
    eventually("the last in line listens there", SOON, async || {
        let (_, count): (String, u64) = new.command(&["PUBSUB", "NUMSUB", &channel]);
        count == 1
    })
    .await;
    give_back(guard).await;

    // The turn of the first in line is over after two seconds.
    waits_here.comes_in().await;
    assert_eq!(resource.assert_no_overlap().visits, 1);

    // The waiter that stayed comes in when it has moved too, and not before.
    stays.lead_to(new.port());
    stays.cut();
    stays.restore();
    waits_here.leaves().await;
    waits_there.comes_in().await;
    waits_there.leaves().await;
    assert_eq!(resource.assert_no_overlap().visits, 2);
    nothing_left(&new).await;
}
