//! Tests with slots that move from one master to another, and with names in different slots.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::backend::{
    self, Departure, Enqueued, EventSink, FULL, Fault, Id, Name, Namespace, Released, Request,
    Resize, ResizeOp, ResizeOutcome,
};
use lockcore::{Error, ErrorKind, Guard, Lock, Locks};
use tests::eventually::eventually;
use tests::redis_cluster::{Cluster, NEVER, slot};
use tests::redis_server::RedisServer;
use tests::witness::Witness;
use tokio::task::JoinHandle;

use super::{LONG_WAIT, TTL, client, key, nothing_left, redirections};
use crate::faults::builder;
use crate::store::{Kind, PATIENCE, SOON, STALL, Store, begin, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT, "redis_cluster";
        a_slot_that_moves_under_a_hold_costs_it_nothing
        a_slot_that_moves_under_a_line_costs_nobody_a_place_or_a_wake_up
        a_name_whose_keys_are_on_two_nodes_lets_nobody_in_out_of_turn
        a_name_that_is_alone_can_be_used_while_its_slot_moves
        a_waiter_that_comes_while_its_slot_moves_waits_and_gets_its_turn
        a_mark_that_is_on_its_way_keeps_a_late_request_out
        a_redirection_that_leads_to_its_own_node_ends
        names_on_two_nodes_are_acquired_together_or_not_at_all
        the_slot_of_a_name_is_where_the_server_looks_for_it
        the_channel_of_each_slot_is_where_the_server_looks_for_it
        an_uncontended_pair_costs_what_it_costs_at_one_server
        a_hand_over_costs_what_it_costs_at_one_server
        a_lock_is_handed_over_while_its_slot_moves
        a_capacity_changes_while_its_slot_moves
    ]
}

/// Three masters without replicas, because no node fails in these facts.
fn masters() -> Cluster {
    Cluster::with(3, false, NEVER, &[])
}

fn another<'a>(cluster: &'a Cluster, than: &RedisServer) -> &'a RedisServer {
    let mut nodes = cluster.nodes.iter();
    nodes.find(|node| node.port() != than.port()).unwrap()
}

/// Puts three clients in line for a name that `holder` holds.
async fn line(holder: &Locks, url: &str, name: &str) -> Vec<JoinHandle<Result<Guard, Error>>> {
    let mut line = Vec::new();
    for place in 0..3 {
        let lock: Lock = client(url).mutex(name).wait(LONG_WAIT);
        line.push(begin(lock));
        tickets(holder, name, place + 2).await;
    }
    line
}

/// Checks that the waiters of `line` are granted in order, each of them at once.
async fn are_served(line: Vec<JoinHandle<Result<Guard, Error>>>, mut last: Guard) {
    let resource = Witness::exclusive();
    for next in line {
        let token = last.grant_id().as_u64();
        give_back(last).await;
        // Without a wake-up, a waiter would learn of its grant only at its next renewal, a third of
        // the ttl later.
        let next = tokio::time::timeout(TTL / 5, next).await;
        last = next.expect("was not woken").unwrap().unwrap();
        drop(resource.enter(1));
        assert!(last.grant_id().as_u64() > token);
    }
    give_back(last).await;
    resource.assert_no_overlap();
}

async fn a_slot_that_moves_under_a_hold_costs_it_nothing(_: Store) {
    let cluster = masters();
    let locks = client(&cluster.url());
    let guard = locks.mutex("a").acquire().await.unwrap();
    let old = cluster.master_of(&key("a"));

    let new = cluster.move_slot_of(&key("a"));

    assert_ne!(old.port(), new.port());
    guard.extend(TTL).await.unwrap();
    assert_eq!(
        kind(client(&cluster.url()).mutex("a").try_acquire().await),
        ErrorKind::Busy
    );
    give_back(guard).await;
    assert_eq!(new.keys("test:*"), [key("a")]);
    assert_eq!(old.keys("test:*"), Vec::<String>::new());
}

/// When the slot moves, the server ends the subscriptions of the waiters. The renewals of the
/// waiters subscribe at the new master.
async fn a_slot_that_moves_under_a_line_costs_nobody_a_place_or_a_wake_up(_: Store) {
    let cluster = masters();
    let url = cluster.url();
    let locks = client(&url);
    let guard = locks.mutex("a").acquire().await.unwrap();
    let line = line(&locks, &url, "a").await;

    let new = cluster.move_slot_of(&key("a"));

    eventually("the waiters listen at the new master", SOON, async || {
        let channels: Vec<String> = new.command(&["PUBSUB", "SHARDCHANNELS", "test:*"]);
        channels.len() == 3
    })
    .await;
    are_served(line, guard).await;
    nothing_left(&cluster, &["a"]).await;
}

/// The key with the state of the name has moved, and the key with its line has not. So the new node
/// has a name without a line.
async fn a_name_whose_keys_are_on_two_nodes_lets_nobody_in_out_of_turn(_: Store) {
    let cluster = masters();
    let url = cluster.url();
    let locks = client(&url);
    let (mutex, shared) = ("a", "b");
    let guard = locks.mutex(mutex).acquire().await.unwrap();
    let line = line(&locks, &url, mutex).await;
    let semaphore = |locks: &Locks| locks.semaphore(shared, 2).permits(1);
    let mut several = Vec::new();
    for _ in 0..2 {
        several.push(semaphore(&client(&url)).acquire().await.unwrap());
    }
    let mut moving = Vec::new();
    for name in [mutex, shared] {
        let old = cluster.master_of(&key(name));
        let new = another(&cluster, old);
        let slot = cluster.begin_moving(&key(name), new);
        cluster.move_key(old, new, &key(name));
        moving.push((slot, old, new));
    }

    // No node has both keys, so no node may grant a request.
    let hasty = || {
        builder(&url)
            .op_timeout(Duration::from_millis(300))
            .build()
            .unwrap()
    };
    for _ in 0..5 {
        for outcome in [
            hasty().mutex(mutex).try_acquire().await,
            semaphore(&hasty()).try_acquire().await,
            hasty().semaphore(shared, 2).permits(2).try_acquire().await,
        ] {
            let error = outcome.expect_err("let in");
            let kind = error.kind();
            let is_refused = matches!(
                kind,
                ErrorKind::Unavailable | ErrorKind::Unknown | ErrorKind::Busy
            );
            assert!(is_refused, "{error}");
        }
    }

    for (slot, old, new) in moving {
        cluster.finish_moving(slot, old, new);
    }
    let mut later = Vec::new();
    for guard in several {
        guard.ensure(TTL / 2).await.unwrap();
        assert_eq!(
            kind(semaphore(&client(&url)).try_acquire().await),
            ErrorKind::Busy
        );
        let next = semaphore(&client(&url)).wait(LONG_WAIT);
        let next = begin(next);
        give_back(guard).await;
        let next = next.await.unwrap().unwrap();
        later.push(next);
    }
    for guard in later {
        give_back(guard).await;
    }
    tickets(&locks, mutex, 4).await;
    eventually("all waiters listen", SOON, async || {
        let new = cluster.master_of(&key(mutex));
        let channels: Vec<String> = new.command(&["PUBSUB", "SHARDCHANNELS", "test:*"]);
        channels.len() >= 3
    })
    .await;
    are_served(line, guard).await;
}

/// A name with one holder has one key. This key is at the old node or at the new node.
async fn a_name_that_is_alone_can_be_used_while_its_slot_moves(_: Store) {
    let cluster = masters();
    let url = cluster.url();
    let locks = client(&url);
    let guard = locks.mutex("a").acquire().await.unwrap();
    let old = cluster.master_of(&key("a"));
    let new = another(&cluster, old);
    let slot = cluster.begin_moving(&key("a"), new);

    for (ttl, moves) in [(2 * TTL, false), (3 * TTL, true)] {
        if moves {
            cluster.move_key(old, new, &key("a"));
        }
        guard.extend(ttl).await.unwrap();
        let other = client(&url).mutex("a").try_acquire().await;
        assert_eq!(kind(other), ErrorKind::Busy);
    }
    give_back(guard).await;
    // The key with the last number has moved, so the new node makes this grant.
    give_back(locks.mutex("a").acquire().await.unwrap()).await;

    cluster.finish_moving(slot, old, new);
    nothing_left(&cluster, &["a"]).await;
}

/// The keys of the name have arrived at the new node. But this node accepts no subscriptions in the
/// slot before the move is complete.
async fn a_waiter_that_comes_while_its_slot_moves_waits_and_gets_its_turn(_: Store) {
    let cluster = masters();
    let url = cluster.url();
    let locks = client(&url);
    let guard = locks.mutex("a").acquire().await.unwrap();
    let first = begin(client(&url).mutex("a").wait(LONG_WAIT));
    tickets(&locks, "a", 2).await;
    let old = cluster.master_of(&key("a"));
    let new = another(&cluster, old);
    let slot = cluster.begin_moving(&key("a"), new);
    for key in [key("a"), format!("{}:line", key("a"))] {
        cluster.move_key(old, new, &key);
    }

    let asked = |node: &RedisServer| *node.command_stats().get("asking").unwrap_or(&0);
    let second = begin(client(&url).mutex("a").wait(LONG_WAIT));
    tickets(&locks, "a", 3).await;
    // The second waiter cannot be woken, so it rechecks. For each recheck, the old node redirects
    // the request to the new node (`ASK`).
    eventually("they have looked several times", LONG_WAIT, async || {
        asked(new) >= 16
    })
    .await;
    assert_eq!(redirections(new), 0, "taken for the owner");

    cluster.finish_moving(slot, old, new);
    eventually("the waiters listen at the new master", SOON, async || {
        let channels: Vec<String> = new.command(&["PUBSUB", "SHARDCHANNELS", "test:*"]);
        channels.len() == 2
    })
    .await;
    are_served(vec![first, second], guard).await;
    nothing_left(&cluster, &["a"]).await;
}

/// A caller gave up its request, and the release left a mark. The state of the name has moved to
/// the new node, and the mark has not. If the request arrived late and got a ticket, no client
/// would renew this ticket, and it would keep others out for a ttl.
async fn a_mark_that_is_on_its_way_keeps_a_late_request_out(_: Store) {
    let cluster = masters();
    let namespace = Namespace::new("test").unwrap();
    let name = Name::new(namespace.clone(), "a").unwrap();
    let request = Request::new(name, Id::parse(&"7".repeat(32)).unwrap(), FULL, FULL, TTL);
    let request = Arc::new(request);
    let store = backend::open(&cluster.url()).unwrap();
    let events = EventSink::new(1, namespace, |_| ());
    let store = store.connect(events).await.unwrap();
    let release = || store.release(vec![Departure::new(Arc::clone(&request), true)]);
    assert_eq!(release().await.unwrap(), [Released::NotFound]);
    let old = cluster.master_of(&key("a"));
    let new = another(&cluster, old);
    let slot = cluster.begin_moving(&key("a"), new);
    cluster.move_key(old, new, &key("a"));

    let late = store.enqueue(Arc::clone(&request), PATIENCE).await;
    let error = late.expect_err("has taken a ticket");
    let is_refused = matches!(error.fault(), Fault::Retry | Fault::Unknown);
    assert!(is_refused, "{error}");
    // This release may fail. If it left a second mark at the new node, the first mark could not
    // move there.
    let _ = release().await;

    cluster.finish_moving(slot, old, new);
    assert_eq!(
        store.enqueue(request, PATIENCE).await.unwrap(),
        Enqueued::Gone
    );
}

/// The new owner does not know that it owns the slot. So the old node redirects a request to the
/// new node, and the new node redirects it to the old node.
async fn a_redirection_that_leads_to_its_own_node_ends(_: Store) {
    let cluster = masters();
    let url = cluster.url();
    let locks = builder(&url)
        .op_timeout(Duration::from_secs(2))
        .build()
        .unwrap();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
    let old = cluster.master_of(&key("a"));
    let new = another(&cluster, old);
    let number = slot(old, &key("a")).to_string();
    let before = redirections(old);
    let id: String = new.command(&["CLUSTER", "MYID"]);
    // A node does not give a slot away while it has keys in the slot.
    old.flush();
    old.command::<()>(&["CLUSTER", "SETSLOT", &number, "NODE", &id]);

    let error = locks.mutex("a").try_acquire().await.unwrap_err();

    // On a slow machine, the operation timeout may end while the last request is in flight.
    let is_over = matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown);
    assert!(is_over, "{error}");
    let asked = redirections(old) - before;
    println!("asked {asked} times");
    assert!((1..50).contains(&asked), "asked {asked} times");
    new.command::<()>(&["CLUSTER", "SETSLOT", &number, "NODE", &id]);
    let locks = client(&url);
    give_back(locks.mutex("a").wait(SOON).acquire().await.unwrap()).await;
}

async fn names_on_two_nodes_are_acquired_together_or_not_at_all(_: Store) {
    let cluster = masters();
    let url = cluster.url();
    let (locks, others) = (client(&url), client(&url));
    let names: Vec<_> = (0..6).map(|number| format!("n{number}")).collect();
    let ports = names
        .iter()
        .map(|name| cluster.master_of(&key(name)).port());
    let ports: std::collections::BTreeSet<_> = ports.collect();
    assert!(ports.len() > 1, "all names are at one node");
    let held = others.mutex(&names[5]).acquire().await.unwrap();

    let all = Locks::all(names.iter().map(|name| locks.mutex(name)));
    assert_eq!(kind(all.try_acquire().await), ErrorKind::Busy);
    for name in &names[..5] {
        tickets(&locks, name, 0).await;
    }
    give_back(held).await;
    let all = all.acquire().await.unwrap();
    for name in &names {
        assert_eq!(
            kind(others.mutex(name).try_acquire().await),
            ErrorKind::Busy
        );
    }
    drop(all);
    for name in &names {
        tickets(&locks, name, 0).await;
    }
}

/// The library computes the node of each name. A wrong slot would cost a redirection for each name.
async fn the_slot_of_a_name_is_where_the_server_looks_for_it(_: Store) {
    let cluster = masters();
    let locks = client(&cluster.url());
    // These acquisitions open the connections to all nodes.
    for number in 0..50 {
        give_back(
            locks
                .mutex(format!("warm{number}"))
                .acquire()
                .await
                .unwrap(),
        )
        .await;
    }
    let before: u64 = cluster.nodes.iter().map(redirections).sum();

    for name in ["a", "ä", "a}{b", "with space", "x/y%", &"long".repeat(200)] {
        give_back(locks.mutex(name).acquire().await.unwrap()).await;
    }
    for number in 0..200 {
        give_back(
            locks
                .mutex(format!("name{number}"))
                .acquire()
                .await
                .unwrap(),
        )
        .await;
    }

    let after: u64 = cluster.nodes.iter().map(redirections).sum();
    assert_eq!(after, before, "requests were redirected");
}

/// Each slot gets one request. The ticket at the store contains the channel of its wake-up. This
/// channel must be in the slot of the name.
async fn the_channel_of_each_slot_is_where_the_server_looks_for_it(_: Store) {
    let cluster = Cluster::of_one();
    let server = redis::Client::open(cluster.nodes[0].url()).unwrap();
    let mut server = server.get_connection().unwrap();
    let mut key_slots = |keys: &[String]| -> Vec<usize> {
        let mut questions = redis::pipe();
        for key in keys {
            questions.cmd("CLUSTER").arg("KEYSLOT").arg(key);
        }
        questions.query(&mut server).unwrap()
    };
    let mut names = vec![None; 16_384];
    let mut from = 0;
    while names.iter().any(Option::is_none) {
        let some: Vec<_> = (from..from + 20_000).map(|n| format!("n{n}")).collect();
        for (name, slot) in some.iter().zip(key_slots(&some)) {
            names[slot] = Some(name.clone());
        }
        from += 20_000;
    }
    let names: Vec<_> = names.into_iter().flatten().collect();
    let namespace = Namespace::new("test").unwrap();
    let events = EventSink::new(u64::MAX, namespace.clone(), |_| ());
    let store = backend::open(&cluster.url()).unwrap();
    let store = store.connect(events).await.unwrap();

    for (page, names) in names.chunks(512).enumerate() {
        let requests = names.iter().enumerate().map(|(at, name)| {
            let name = Name::new(namespace.clone(), name).unwrap();
            let id = Id::parse(&format!("{:032x}", page * 512 + at)).unwrap();
            store.enqueue(
                Arc::new(Request::new(name, id, FULL, FULL, STALL)),
                PATIENCE,
            )
        });
        for outcome in join_all(requests).await {
            assert!(matches!(outcome.unwrap(), Enqueued::Granted { .. }));
        }
    }

    let mut questions = redis::pipe();
    for name in &names {
        questions.get(key(name));
    }
    let mut server = redis::Client::open(cluster.nodes[0].url()).unwrap();
    let records: Vec<String> = questions.query(&mut server).unwrap();
    let channel = |record: &String| {
        let channel = record[84..].split(':').next().unwrap();
        format!("test:1:wake:{channel}")
    };
    let channels: Vec<_> = records.iter().map(channel).collect();
    for (slot, of_channel) in key_slots(&channels).into_iter().enumerate() {
        assert_eq!(of_channel, slot, "{}", channels[slot]);
    }
}

/// A client subscribes when it waits for the first time in a while. A pair of acquire and release
/// that does not wait costs no subscription.
async fn an_uncontended_pair_costs_what_it_costs_at_one_server(_: Store) {
    let cluster = masters();
    let locks = client(&cluster.url());
    let pair = async || give_back(locks.mutex("a").acquire().await.unwrap()).await;
    pair().await;
    let node = cluster.master_of(&key("a"));
    let before = node.command_stats();

    for _ in 0..10 {
        pair().await;
    }

    let mut since = node.command_stats_since(&before);
    since.retain(|command, _| !command.starts_with("cluster"));
    println!("{since:?}");
    assert_eq!(since["evalsha"], 20, "{since:?}");
    assert!(!since.contains_key("ssubscribe"), "{since:?}");
}

/// The counting begins when both clients have subscribed in the slot.
async fn a_hand_over_costs_what_it_costs_at_one_server(_: Store) {
    let cluster = masters();
    let url = cluster.url();
    let clients = [client(&url), client(&url)];
    let node = cluster.master_of(&key("a"));
    let line = format!("{}:line", key("a"));
    let mut holder = clients[0].mutex("a").acquire().await.unwrap();
    let mut before = node.command_stats();
    for round in 1..=14 {
        // By round 5, each client has waited at least once and is subscribed.
        if round == 5 {
            before = node.command_stats();
        }
        let next = begin(clients[round % 2].mutex("a").wait(LONG_WAIT));
        eventually("it waits", SOON, async || {
            node.command::<u64>(&["HLEN", &line]) == 2
        })
        .await;
        give_back(holder).await;
        holder = next.await.unwrap().unwrap();
    }

    let since = node.command_stats_since(&before);
    println!("ten hand-overs: {since:?}");
    assert_eq!((since["evalsha"], since["spublish"]), (20, 10), "{since:?}");
    assert!(!since.contains_key("ssubscribe"), "{since:?}");
    give_back(holder).await;
}

/// One name has one key, and this key has moved. The other name has several keys, and no node has
/// all of them.
async fn a_lock_is_handed_over_while_its_slot_moves(_: Store) {
    let cluster = masters();
    let url = cluster.url();
    let (locks, other) = (client(&url), client(&url));
    let guard = locks.mutex("a").acquire().await.unwrap();
    let permit = |locks: &Locks| locks.semaphore("b", 2).permits(1);
    let beside = permit(&other).acquire().await.unwrap();
    let given = permit(&locks).acquire().await.unwrap();
    let id = given.grant_id();
    let texts = [guard.detach().await.unwrap(), given.detach().await.unwrap()];
    let mut moving = Vec::new();
    for name in ["a", "b"] {
        let old = cluster.master_of(&key(name));
        let new = another(&cluster, old);
        let slot = cluster.begin_moving(&key(name), new);
        cluster.move_key(old, new, &key(name));
        moving.push((slot, old, new));
    }

    let adopted = other.adopt(&texts[0]).await.unwrap();
    let hasty = builder(&url).op_timeout(Duration::from_millis(300));
    let hasty = hasty.build().unwrap();
    let error = hasty.adopt(&texts[1]).await.unwrap_err();
    let is_refused = matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown);
    assert!(is_refused, "{error}");

    for (slot, old, new) in moving {
        cluster.finish_moving(slot, old, new);
    }
    give_back(adopted).await;
    let adopted = other.adopt(&texts[1]).await.unwrap();
    assert_eq!(adopted.grant_id(), id);
    assert_eq!(
        kind(permit(&client(&url)).try_acquire().await),
        ErrorKind::Busy
    );
    give_back(adopted).await;
    give_back(beside).await;
    nothing_left(&cluster, &["a", "b"]).await;
}

/// The state of the name has arrived at the new node. The mark of a forgotten capacity has not.
async fn a_capacity_changes_while_its_slot_moves(_: Store) {
    let cluster = masters();
    let url = cluster.url();
    let locks = client(&url);
    let pool = locks.semaphore("a", 2);
    let guard = pool.acquire().await.unwrap();
    pool.resize(3).await.unwrap();
    let old = cluster.master_of(&key("a"));
    let new = another(&cluster, old);
    let slot = cluster.begin_moving(&key("a"), new);
    cluster.move_key(old, new, &key("a"));

    assert_eq!(pool.add_permits(1).await.unwrap(), 4);
    assert_eq!(client(&url).semaphore("a", 2).capacity().await.unwrap(), 4);
    cluster.finish_moving(slot, old, new);
    assert_eq!(pool.capacity().await.unwrap(), 4);
    let beside = pool.acquire().await.unwrap();

    // The late change below is from a client that has read the capacity before it was forgotten.
    let namespace = Namespace::new("test").unwrap();
    let name = Name::new(namespace.clone(), "a").unwrap();
    let store = backend::open(&url).unwrap();
    let store = store.connect(EventSink::new(1, namespace, |_| ()));
    let store = store.await.unwrap();
    let resize = |id: &str, op| Arc::new(Resize::new(name.clone(), Id::parse(id).unwrap(), op));
    let set = |capacity, after| ResizeOp::Set {
        capacity,
        after,
        stated: std::num::NonZeroU32::new(2).unwrap(),
    };
    let read = store.resize(resize(&"1".repeat(32), ResizeOp::Read)).await;
    let before = read.unwrap().change;
    assert!(before.is_some());
    pool.forget_capacity().await.unwrap();
    let (old, new) = (new, another(&cluster, new));
    let slot = cluster.begin_moving(&key("a"), new);
    // All keys of the line arrive. So nothing but the mark can refuse the change.
    for part in ["", ":line", ":ends"] {
        cluster.move_key(old, new, &(key("a") + part));
    }

    // This change is valid only if no capacity was ever stored. At the new node it looks like that,
    // because the mark is missing there.
    let late = store
        .resize(resize(&"2".repeat(32), set(Some(9), None)))
        .await;
    let error = late.expect_err("it was made");
    let is_refused = matches!(error.fault(), Fault::Retry | Fault::Unknown);
    assert!(is_refused, "{error}");
    cluster.finish_moving(slot, old, new);
    for after in [None, before] {
        let late = store
            .resize(resize(&"2".repeat(32), set(Some(9), after)))
            .await;
        assert_eq!(late.unwrap().outcome, ResizeOutcome::Kept);
    }
    assert_eq!(pool.capacity().await.unwrap(), 2);
    give_back(guard).await;
    give_back(beside).await;
}
