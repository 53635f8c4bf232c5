//! Tests with a server that becomes a replica while its replica becomes the master. No data is
//! lost, no clock jumps, and no connection is closed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Lock};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;
use tests::witness::Witness;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::{client, nothing_left, through};
use crate::faults::{builder, works_again};
use crate::store::{Kind, SOON, Store, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_waiter_at_the_old_master_does_not_hold_beside_another
        a_client_whose_address_leads_to_the_new_master_is_there_in_a_moment
        a_replica_answers_nothing_before_it_is_the_master
    ]
}

/// A task that acquires the lock, reports its grant, and stays in the resource until it is told to
/// leave or loses the lock.
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

/// The waiter listens at the old master. The release at the new master finds that nobody hears the
/// waiter's wake-up there, and shortens the waiter's lease. The old master must not tell the waiter
/// of this grant in another way.
async fn a_waiter_at_the_old_master_does_not_hold_beside_another(_: Store) {
    let old = RedisServer::start();
    let new = RedisServer::replica_of(&old);
    let [holds, stays, moves] = [(); 3].map(|()| Proxy::to(old.port()));
    let resource = Arc::new(Witness::exclusive());
    // Renewals are 40 s apart, so no renewal has an effect here.
    let lock = |proxy| through(proxy).mutex("a").ttl(4 * 3 * SOON).wait(6 * SOON);
    let guard = lock(&holds).acquire().await.unwrap();
    let mut waits_there = Visit::begin(lock(&stays), &resource);
    tickets(&client(&old), "a", 2).await;
    let mut waits_here = Visit::begin(lock(&moves), &resource);
    tickets(&client(&old), "a", 3).await;
    let last: String = old.command(&["HGET", "test:1:{a}:line", "0000000000002"]);
    let channel = format!("test:1:wake:{}", last.split(':').nth(3).unwrap());

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

    // The lease of the waiter that stayed ends after two seconds.
    waits_here.comes_in().await;
    assert_eq!(resource.assert_no_overlap().visits, 1);

    // The waiter that stayed holds only after it has moved to the new master too.
    stays.lead_to(new.port());
    stays.cut();
    stays.restore();
    waits_here.leaves().await;
    waits_there.comes_in().await;
    waits_there.leaves().await;
    assert_eq!(resource.assert_no_overlap().visits, 2);
    nothing_left(&new).await;
}

/// The connections of the client lead to the old master. This server is healthy, but it refuses
/// every write.
async fn a_client_whose_address_leads_to_the_new_master_is_there_in_a_moment(_: Store) {
    let mut old = RedisServer::start();
    let proxy = Proxy::to(old.port());
    let locks = builder(proxy.url()).op_timeout(SOON).build().unwrap();
    let lock = locks.mutex("a").ttl(Duration::from_secs(9));
    let guard = lock.acquire().await.unwrap();
    for round in 0..3 {
        let new = RedisServer::replica_of(&old);
        let before = guard.remaining();
        old.fail_over_to(&new);
        proxy.lead_to(new.port());
        let failed_over = Instant::now();

        // The first operation after the failover finds the new master.
        let name = format!("n{round}");
        give_back(locks.mutex(name).acquire().await.unwrap()).await;

        println!("recovered in {:?}", failed_over.elapsed());
        // The keeper has its own connection, which also moves.
        eventually("it is renewed there", SOON, async || {
            guard.remaining() > before.max(Duration::from_secs(8))
        })
        .await;
        old = new;
    }
    give_back(guard).await;
    nothing_left(&old).await;
}

/// A replica must not answer from its own data. It may be behind its master, and the client would
/// stay connected to it.
async fn a_replica_answers_nothing_before_it_is_the_master(_: Store) {
    let old = RedisServer::start();
    let new = RedisServer::replica_of(&old);
    let guard = client(&old).mutex("a").acquire().await.unwrap();
    let quick = builder(new.url()).op_timeout(Duration::from_millis(300));
    let locks = quick.build().unwrap();

    let refused = [
        kind(locks.mutex("a").try_acquire().await),
        kind(locks.mutex("b").acquire().await),
        kind(locks.inspect("a").await),
    ];

    assert_eq!(refused, [ErrorKind::Unavailable; 3]);
    let error = locks.mutex("a").acquire().await.unwrap_err();
    assert!(
        error.to_string().contains("connect to its master"),
        "{error}"
    );
    drop(guard);
    old.fail_over_to(&new);
    works_again(&locks, "b", SOON).await;
}
