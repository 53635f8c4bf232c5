//! Tests with nodes that are down, cut off or slow, and with clients that each get the locks of
//! some of the nodes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::{ErrorKind, Guard, Lock, Locks, LostReason};
use tests::eventually::eventually;
use tests::ports::free_port;
use tests::proxy::Proxy;
use tests::redis_quorum::{Quorum, url};
use tests::redis_server::RedisServer;
use tests::stalls::awake_since;
use tests::stores::Server as _;
use tests::witness::Witness;
use tokio::sync::Barrier;

use super::{client, has_drawn, has_ticket, held_everywhere, nothing_is_left_at, proxied};
use crate::faults::{a_shutdown_ends_the_first_use, builder, holder};
use crate::store::{Kind, LEASE, SLACK, SOON, Store, give_back, kind, soon};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_quorum";
        with_two_of_five_nodes_killed_locks_work
        with_two_of_five_nodes_frozen_locks_work
        with_two_of_five_nodes_cut_off_locks_work
        with_two_of_five_nodes_frozen_a_contended_lock_is_waited_for
        with_three_of_five_nodes_killed_nobody_gets_in_and_nothing_is_left
        with_three_of_five_nodes_frozen_nobody_gets_in_and_nothing_is_left
        nodes_that_come_back_vote_again
        clients_that_split_the_nodes_are_parted
        a_slow_node_does_not_slow_a_pair
        a_process_killed_while_it_holds_lets_others_in_after_its_ttl
        a_semaphore_needs_so_many_nodes_that_it_never_gives_more_than_it_has
        a_ticket_is_shown_as_held_although_a_node_does_not_answer
        a_node_that_does_not_answer_hides_no_other_capacity
        the_same_server_under_two_names_is_refused
        a_quorum_says_that_it_keeps_no_counters
        a_number_that_is_written_to_some_nodes_only_leaves_nothing
        a_shutdown_during_the_first_use_ends_it_and_leaves_nothing
    ]
}

async fn is_renewed(guard: &Guard, ttl: Duration) {
    let before = Instant::now() + guard.remaining();
    eventually("renewed", 2 * ttl, async || {
        Instant::now() + guard.remaining() > before + ttl / 6
    })
    .await;
}

/// Holds one lock while two nodes break. This lock is kept, and other locks are acquired and
/// released.
async fn locks_work_without(set: &Quorum, two: impl FnOnce(), url: &str) {
    const TTL: Duration = Duration::from_secs(12);
    let locks = builder(url).ttl(TTL).op_timeout(SOON).build().unwrap();
    let guard = held_everywhere(&locks, &set.nodes).await;

    two();

    for _ in 0..3 {
        give_back(soon(locks.mutex("b").acquire()).await.unwrap()).await;
    }
    is_renewed(&guard, TTL).await;
    let elsewhere = client(url);
    assert_eq!(
        kind(elsewhere.mutex("a").try_acquire().await),
        ErrorKind::Busy
    );
    give_back(guard).await;
    give_back(
        soon(elsewhere.mutex("a").wait(SOON).acquire())
            .await
            .unwrap(),
    )
    .await;
}

async fn with_two_of_five_nodes_killed_locks_work(_: Store) {
    let set = Quorum::start(5);
    let kill = || set.nodes[..2].iter().for_each(RedisServer::kill);
    locks_work_without(&set, kill, &set.url()).await;
}

async fn with_two_of_five_nodes_frozen_locks_work(_: Store) {
    let set = Quorum::start(5);
    let freeze = || set.nodes[..2].iter().for_each(RedisServer::freeze);
    locks_work_without(&set, freeze, &set.url()).await;
    set.nodes[..2].iter().for_each(RedisServer::thaw);
}

async fn with_two_of_five_nodes_cut_off_locks_work(_: Store) {
    let set = Quorum::start(5);
    let (proxies, url) = proxied(&set);
    let cut = || proxies[..2].iter().for_each(Proxy::cut);
    locks_work_without(&set, cut, &url).await;
}

/// Another client has the lock at one of the three nodes that answer. Then only the frozen nodes could
/// make a majority, and a caller must not spend all of its operation timeout on them.
async fn with_two_of_five_nodes_frozen_a_contended_lock_is_waited_for(_: Store) {
    let set = Quorum::start(5);
    let contends = builder(set.url())
        .ttl(LEASE)
        .op_timeout(Duration::from_secs(4));
    let clients = [(); 3].map(|()| contends.clone().build().unwrap());
    for locks in &clients {
        give_back(held_everywhere(locks, &set.nodes).await).await;
    }
    let [one, other] = [0, 1].map(|at| client(&set.nodes[at].url()));
    let left_over = one.mutex("a").acquire().await.unwrap();
    set.nodes[3..].iter().for_each(RedisServer::freeze);

    let resource = Witness::exclusive();
    let use_it = async |locks: &Locks| {
        for _ in 0..3 {
            let guard = locks.mutex("a").wait(LEASE).acquire().await.unwrap();
            let visit = resource.enter(1);
            tokio::task::yield_now().await;
            drop(visit);
            give_back(guard).await;
        }
    };
    let given_back = async {
        has_ticket(&other).await; // one of them has asked, and has the lock at this node
        give_back(left_over).await;
    };
    let [first, second, third] = clients.each_ref();
    tokio::join!(use_it(first), use_it(second), use_it(third), given_back);

    assert_eq!(resource.assert_no_overlap().visits, 9);
    set.nodes[3..].iter().for_each(RedisServer::thaw);
    nothing_is_left_at(&set.nodes).await;
}

/// One client holds a lock and others request locks. The holder keeps its lock exactly to the end
/// of its lease. Returns the clients, which clean up when the nodes are back.
async fn nobody_gets_in(set: &Quorum, breaks: impl FnOnce(), told: ErrorKind) -> [Locks; 2] {
    const TTL: Duration = Duration::from_secs(5);
    let locks = builder(set.url())
        .ttl(TTL)
        .op_timeout(SOON)
        .build()
        .unwrap();
    let others = client(&set.url());
    give_back(others.mutex("b").acquire().await.unwrap()).await;
    let guard = locks.mutex("a").acquire().await.unwrap();
    let deadline = Instant::now() + guard.remaining();

    breaks();
    let broken = Instant::now();

    let ask = async |name| others.mutex(name).wait(SOON).acquire().await.unwrap_err();
    let holds = async {
        assert_eq!(soon(guard.lost()).await, LostReason::Expired);
        // The lock may have been renewed just before the nodes broke.
        assert!(Instant::now() + Duration::from_millis(100) >= deadline);
        // After the nodes broke, only a minority renews the lock, which does not count.
        let awake = awake_since(broken);
        assert!(awake < TTL + SLACK, "{awake:?}");
    };
    let (one, other, ()) = tokio::join!(ask("a"), ask("b"), holds);
    for error in [one, other] {
        let text = error.to_string();
        assert_eq!(error.kind(), told, "{text}");
        assert!(
            ["of 5 nodes are up", "no connection", "did not answer"]
                .iter()
                .any(|part| text.contains(part)),
            "{text}"
        );
    }
    [locks, others]
}

async fn with_three_of_five_nodes_killed_nobody_gets_in_and_nothing_is_left(_: Store) {
    let set = Quorum::start(5);
    let kill = || set.nodes[..3].iter().for_each(RedisServer::kill);
    let clients = nobody_gets_in(&set, kill, ErrorKind::Unavailable).await;
    for node in &set.nodes[3..] {
        let litter = node.litter_but_marks("test");
        assert!(litter.iter().all(|key| !key.contains("{b}")), "{litter:?}");
    }

    set.nodes[..3].iter().for_each(RedisServer::restart);

    let locks = client(&set.url());
    for name in ["a", "b"] {
        give_back(locks.mutex(name).wait(SOON).acquire().await.unwrap()).await;
    }
    nothing_is_left_at(&set.nodes).await;
    drop(clients);
}

async fn with_three_of_five_nodes_frozen_nobody_gets_in_and_nothing_is_left(_: Store) {
    let set = Quorum::start(5);
    let freeze = || set.nodes[..3].iter().for_each(RedisServer::freeze);
    // A frozen server may carry out the request later, so its outcome is unknown.
    let clients = nobody_gets_in(&set, freeze, ErrorKind::Unknown).await;

    set.nodes[..3].iter().for_each(RedisServer::thaw);

    let locks = client(&set.url());
    for name in ["a", "b"] {
        give_back(locks.mutex(name).wait(SOON).acquire().await.unwrap()).await;
    }
    nothing_is_left_at(&set.nodes).await;
    drop(clients);
}

async fn nodes_that_come_back_vote_again(_: Store) {
    let set = Quorum::start(5);
    let locks = client(&set.url());
    for pair in [[0, 1], [2, 3], [4, 0]] {
        give_back(locks.mutex("a").wait(SOON).acquire().await.unwrap()).await;
        for at in pair {
            set.nodes[at].kill();
        }
        give_back(locks.mutex("a").wait(SOON).acquire().await.unwrap()).await;
        for at in pair {
            set.nodes[at].restart();
        }
        // The connections of this client reach the nodes again.
        give_back(held_everywhere(&locks, &set.nodes).await).await;
    }
}

/// One node is down. Each client reaches two of the others earlier than the rest. So if both
/// clients request at the same time, each of them gets two nodes, and neither has three.
async fn clients_that_split_the_nodes_are_parted(_: Store) {
    let set = Quorum::start(5);
    set.nodes[4].kill();
    let mut proxies = Vec::new();
    let mut through = |far: [usize; 2]| {
        let ports: Vec<_> = (0..5)
            .map(|at| {
                let proxy = Proxy::to(set.nodes[at].port());
                if far.contains(&at) {
                    let delay = Duration::from_millis(3);
                    proxy.delay(delay, Duration::ZERO);
                }
                let port = proxy.port();
                proxies.push(proxy);
                port
            })
            .collect();
        client(&url(ports))
    };
    let clients = [through([0, 1]), through([2, 3])];
    let (together, witness) = (Arc::new(Barrier::new(2)), Arc::new(Witness::exclusive()));
    let tasks = clients.map(|locks| {
        let (together, witness) = (Arc::clone(&together), Arc::clone(&witness));
        tokio::spawn(async move {
            let mut longest = Duration::ZERO;
            for _ in 0..100 {
                together.wait().await;
                let asked = Instant::now();
                let guard = locks.mutex("a").wait(SOON).acquire().await.unwrap();
                longest = longest.max(awake_since(asked));
                let visit = witness.enter(1);
                drop(visit);
                give_back(guard).await;
            }
            longest
        })
    });
    for task in tasks {
        println!("the longest wait took {:?}", task.await.unwrap());
    }
    assert_eq!(witness.assert_no_overlap().visits, 200);
}

async fn a_slow_node_does_not_slow_a_pair(_: Store) {
    let set = Quorum::start(5);
    let slow = Proxy::to(set.nodes[0].port());
    let others = set.nodes[1..].iter().map(RedisServer::port);
    let locks = client(&url([slow.port()].into_iter().chain(others)));
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    slow.delay(Duration::from_millis(500), Duration::from_millis(500));

    let began = Instant::now();
    for _ in 0..20 {
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
    }

    let took = awake_since(began);
    println!("20 pairs took {took:?}");
    assert!(took < SOON, "{took:?}");
    // At the slow node, requests arrive in the order in which they were sent.
    nothing_is_left_at(&set.nodes).await;
}

async fn a_process_killed_while_it_holds_lets_others_in_after_its_ttl(_: Store) {
    let set = Quorum::start(5);
    let ttl = Duration::from_secs(2);
    let mut dying = holder(&set.url(), "a", ttl);
    let token = dying.acquire();
    let locks = client(&set.url());

    dying.kill();
    let killed = Instant::now();
    let next = locks.mutex("a").wait(SOON).acquire().await.unwrap();

    let after = awake_since(killed);
    // The nodes may stall for three seconds. The waiter's own renewal would come after twenty.
    assert!(after < ttl + SLACK + Duration::from_secs(3), "{after:?}");
    assert!(next.grant_id().as_u64() > token);
    give_back(next).await;
}

/// Any two of the three nodes could have room for two holders. Then three clients that reach two
/// nodes each could all hold.
async fn a_semaphore_needs_so_many_nodes_that_it_never_gives_more_than_it_has(_: Store) {
    let set = Quorum::start(3);
    let of = |reached: [usize; 2]| {
        let reached = reached.map(|at| set.nodes[at].port());
        client(&url(reached.into_iter().chain([free_port()])))
    };
    for reached in [[0, 1], [1, 2], [0, 2]] {
        let locks = of(reached);
        let permit = locks.semaphore("s", 2).permits(1);
        let error = permit.wait(SOON / 20).acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        assert!(
            text.contains("2 of 3 nodes are up, and 3 are needed"),
            "{text}"
        );
        // A semaphore with one permit is like a mutex, and a majority is enough.
        let one = locks
            .semaphore("one", 1)
            .permits(1)
            .acquire()
            .await
            .unwrap();
        give_back(one).await;
    }

    let locks = client(&set.url());
    let permit = || locks.semaphore("s", 2);
    let both = [permit(), permit()]
        .map(|permit| async move { permit.permits(1).acquire().await.unwrap() });
    for guard in join_all(both).await {
        assert_eq!(
            kind(permit().permits(2).try_acquire().await),
            ErrorKind::Busy
        );
        give_back(guard).await;
    }
}

/// A semaphore of two needs all three nodes.
async fn a_ticket_is_shown_as_held_although_a_node_does_not_answer(_: Store) {
    let set = Quorum::start(3);
    let locks = client(&set.url());
    let held = async |count| {
        let places = locks.inspect("s").await.unwrap();
        places.len() == count && places.iter().all(|place| place.granted)
    };
    let pool = locks.semaphore("s", 2);
    let guards = [pool.permits(1), pool.permits(1)].map(|permit| permit.wait(SOON));
    let guards = join_all(guards.iter().map(Lock::acquire)).await;
    assert!(held(2).await);
    // If all nodes answer, it is certain that a ticket at one node does not count.
    let alone = client(&set.nodes[0].url());
    let left_over = alone.mutex("one").acquire().await.unwrap();
    eventually("all have answered", SOON, async || {
        let places = locks.inspect("one").await.unwrap();
        places.len() == 1 && !places[0].granted
    })
    .await;

    set.nodes[2].freeze();
    assert!(held(2).await);
    set.nodes[2].kill();
    assert!(held(2).await);

    give_back(left_over).await;
    drop(guards);
}

async fn a_node_that_does_not_answer_hides_no_other_capacity(_: Store) {
    let set = Quorum::start(3);
    let locks = client(&set.url());
    let guard = locks.semaphore("s", 2).permits(1).acquire().await.unwrap();
    let others = client(&set.url());
    // After this, the client is connected to all three nodes.
    give_back(others.semaphore("b", 2).permits(1).acquire().await.unwrap()).await;

    set.nodes[2].freeze();

    let other_size = others.semaphore("s", 3).permits(1);
    assert_eq!(
        kind(other_size.try_acquire().await),
        ErrorKind::CapacityMismatch
    );
    set.nodes[2].thaw();
    give_back(guard).await;
}

async fn the_same_server_under_two_names_is_refused(_: Store) {
    let set = Quorum::start(2);
    let [one, other] = [0, 1].map(|at| set.nodes[at].port());
    let again = Proxy::to(one);
    let locks = client(&url([one, other, again.port()]));

    let error = locks.ready(SOON).await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config);
    let text = error.to_string();
    assert!(
        text.contains("it is the same server as 127.0.0.1"),
        "{text}"
    );
    // The second URL of the same server does not vote.
    set.nodes[1].kill();
    let error = locks.mutex("a").try_acquire().await.unwrap_err();
    assert_ne!(error.kind(), ErrorKind::Busy);
    let thrice = [one, again.port()].into_iter();
    let third = Proxy::to(one);
    let error = client(&url(thrice.chain([third.port()])))
        .mutex("a")
        .acquire()
        .await;
    assert_eq!(kind(error), ErrorKind::Config);
}

async fn a_quorum_says_that_it_keeps_no_counters(_: Store) {
    let set = Quorum::start(3);
    let locks = client(&set.url());

    for error in [
        locks.counter("a").get().await.unwrap_err(),
        locks.latch("a").count_down().await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Config);
        let text = error.to_string();
        assert!(text.contains("this store cannot keep counters"), "{text}");
    }
}

/// Two nodes write a greater number for the ticket, and their replies are lost. Another node is
/// down.
async fn a_number_that_is_written_to_some_nodes_only_leaves_nothing(_: Store) {
    let set = Quorum::start(5);
    set.nodes[4].kill();
    let (proxies, url) = proxied(&set);
    let locks = client(&url);
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let mut token = 0;
    for minutes in 1..=20 {
        for node in &set.nodes[..2] {
            has_drawn(node, Duration::from_secs(60 * minutes));
        }
        for proxy in &proxies[..2] {
            // The script that writes a greater number is the only one with this number of
            // arguments.
            proxy.lose_replies(b"*6\r\n$7\r\nEVALSHA", 1);
        }

        let guard = locks.mutex("a").wait(SOON).acquire().await.unwrap();

        let next = guard.grant_id().as_u64();
        assert!(next > token, "{next} after {token}");
        token = next;
        give_back(guard).await;
    }
    let lost: u64 = proxies
        .iter()
        .map(|proxy| proxy.traffic().replies_lost)
        .sum();
    println!("{lost} replies were lost");
    assert!(lost > 0);
    nothing_is_left_at(&set.nodes[..4]).await;
}

async fn a_shutdown_during_the_first_use_ends_it_and_leaves_nothing(_: Store) {
    let set = Quorum::start(3);
    let (proxies, url) = proxied(&set);

    a_shutdown_ends_the_first_use(&url, &proxies).await;

    for node in &set.nodes {
        assert_eq!(node.keys("*"), Vec::<String>::new());
    }
}
