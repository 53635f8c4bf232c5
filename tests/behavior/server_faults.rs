//! Tests with a store whose server is down, cut off or silent. The facts are the same for every
//! store that has a server, and each fact has its own server. Faults that only one store can have
//! are in a file with its name.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::events::{Event, EventListener};
use lockcore::{Builder, ErrorKind, Locks, LostReason, Release};
use tests::eventually::eventually;
use tests::proxy::Proxy;
use tests::stalls::awake_since;
use tests::stores::Server;
use tests::witness::Witness;
use tokio::sync::Mutex;

use crate::faults::{Work, builder, is_unavailable_within_one_operation, patient};
use crate::store::{
    DEFAULT, Kind, LEASE, SLACK, SOON, STALL, Store, begin, give_back, kind, soon, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT, &format!("{}_faults", store.name());
        a_server_that_is_down_is_unavailable_within_one_operation
        a_free_lock_of_another_server_is_found_behind_twenty_of_a_silent_one
        a_caller_that_waits_through_outages_gets_the_lock_after_them
        a_cut_that_heals_before_the_deadline_loses_nothing
        a_cut_that_outlasts_the_lease_stops_the_work
        a_lost_release_is_repeated
        a_release_of_a_lost_lock_says_that_it_was_lost_while_the_server_is_away
        an_operation_that_a_cut_prevents_says_that_the_lock_was_held
        wake_ups_that_were_cut_off_are_caught_up_on
        a_lost_reply_is_asked_for_again_and_granted_once
        a_downgrade_whose_reply_is_lost_has_let_readers_in_and_no_writer
        a_lease_ends_on_time_while_its_renewal_hangs
    ]
}

/// A ttl so long that renewals are 40 s apart, so that no renewal has an effect on the fact.
const LONG: Duration = LEASE.saturating_mul(2);

/// How long a client needs to reconnect when its server is up, on a busy machine. It pauses for two
/// seconds at most. After that, its first request is sent at once: it does not wait for a renewal,
/// or for the end of an operation, which comes after [`STALL`].
const RECONNECTED: Duration = SOON;

/// A client behind its own proxy, which can be cut.
fn proxied(server: &dyn Server) -> (Proxy, Builder) {
    let (proxy, url) = server.process().unwrap().through_a_proxy();
    (proxy, patient(url))
}

async fn a_server_that_is_down_is_unavailable_within_one_operation(store: Store) {
    let server = store.kind.start();
    let process = server.process().unwrap();
    process.kill();
    let locks = builder(server.url()).op_timeout(SOON / 3).build().unwrap();

    let port = process.port().to_string();
    is_unavailable_within_one_operation(&locks, &[process.says_when_down(), &port]).await;

    let ready = locks.ready(Duration::from_millis(200)).await;
    assert_eq!(kind(ready), ErrorKind::Unavailable);
}

async fn a_free_lock_of_another_server_is_found_behind_twenty_of_a_silent_one(store: Store) {
    let (server, lives) = (store.kind.start(), Locks::connect("memory:").unwrap());
    let (proxy, builder_here) = proxied(&*server);
    // An operation may take 30 s. The client has a connection, or makes its first one.
    for connected in [true, false] {
        let locks = builder_here.clone().build().unwrap();
        if connected {
            give_back(locks.mutex("warm").acquire().await.unwrap()).await;
        }
        proxy.freeze();
        let silent = (0..20).map(|n| locks.mutex(format!("n{n}")));
        let wanted: Vec<_> = silent.chain([lives.mutex("a")]).collect();

        for waits in [true, false] {
            let asked = Instant::now();
            let guard = match waits {
                true => Locks::any(wanted.clone()).acquire().await,
                false => Locks::any(wanted.clone()).try_acquire().await,
            };
            // A tenth of an operation timeout. A lock that takes a whole one comes too late.
            assert!(awake_since(asked) < SOON, "{:?}", awake_since(asked));
            let guard = guard.unwrap();
            assert_eq!(guard.name(), "a");
            give_back(guard).await;
        }
        proxy.thaw();
        tickets(&patient(server.url()).build().unwrap(), "n0", 0).await;
    }
}

async fn a_caller_that_waits_through_outages_gets_the_lock_after_them(store: Store) {
    let server = store.kind.start();
    for frozen in [true, false] {
        let (proxy, url) = server.process().unwrap().through_a_proxy();
        // The timeout is long enough for releases on a busy machine.
        let locks = builder(url).op_timeout(SOON / 3).build().unwrap();
        match frozen {
            true => proxy.freeze(),
            false => proxy.cut(),
        }
        // All of them ask for the same name, so one of them asks the store for the others.
        let lock = locks.mutex("a").wait(STALL);
        let waiting: Vec<_> = (0..3)
            .map(|_| begin(lock.clone().through_outages(true)))
            .collect();
        let several = ["a", "b"].map(|name| locks.mutex(name).through_outages(true));
        let several = Locks::all(several).wait(STALL);
        let several = tokio::spawn(async move { several.acquire().await });
        let short = lock.clone().wait(SOON / 2).through_outages(true);
        let short = begin(short);

        // The first two end after one operation, and the last one after its wait, which is longer.
        let other = locks.mutex("c");
        let (one, other) = tokio::join!(lock.acquire(), other.acquire());
        for fails in [one, other] {
            assert_eq!(kind(fails), ErrorKind::Unavailable);
        }
        let out_of_time = soon(short).await.unwrap().unwrap_err();
        assert!(
            matches!(
                out_of_time.kind(),
                ErrorKind::Unavailable | ErrorKind::Timeout
            ),
            "{out_of_time}"
        );
        match frozen {
            true => proxy.thaw(),
            false => proxy.restore(),
        }

        // Each of them gets the lock. The next one gets it when the one before has given it back.
        let resource = Arc::new(Witness::exclusive());
        let used = waiting.into_iter().map(|waits| {
            let resource = Arc::clone(&resource);
            async move {
                let guard = soon(waits).await.unwrap().unwrap();
                let visit = resource.enter(1);
                tokio::task::yield_now().await;
                drop(visit);
                give_back(guard).await;
            }
        });
        let all = async {
            let all = soon(several).await.unwrap().unwrap();
            let visit = resource.enter(1);
            tokio::task::yield_now().await;
            drop(visit);
            assert_eq!(all.release().await.unwrap(), Release::Released);
        };
        tokio::join!(join_all(used), all);
        resource.assert_no_overlap();
        let elsewhere = patient(server.url()).build().unwrap();
        for name in ["a", "b", "c"] {
            tickets(&elsewhere, name, 0).await;
        }
    }
}

/// The next event about the whole store, or about a lock. A quorum also reports its nodes, one by
/// one.
async fn of_the_store(events: &mut EventListener) -> Option<Event> {
    loop {
        match events.recv().await {
            Some(Event::NodeDown(_) | Event::NodeUp(_)) => {}
            event => return event,
        }
    }
}

async fn a_cut_that_heals_before_the_deadline_loses_nothing(store: Store) {
    let server = store.kind.start();
    let (proxy, builder_here) = proxied(&*server);
    let locks = builder_here.build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    let remaining = guard.remaining();
    let deadline = Instant::now() + remaining; // the real deadline is this or earlier: `remaining` was read first
    let before = proxy.traffic().connections;
    let mut events = locks.events();
    for _ in 0..3 {
        proxy.cut();
        assert_eq!(of_the_store(&mut events).await, Some(Event::Suspended));
        proxy.restore();
        assert_eq!(of_the_store(&mut events).await, Some(Event::Restored));
    }

    eventually("renewed on a new connection", 2 * SOON, async || {
        // The real deadline is this or later: the clock was read first.
        let later = Instant::now() + guard.remaining();
        proxy.traffic().connections > before && later > deadline
    })
    .await;
    assert!(guard.is_valid());
    let elsewhere = patient(server.url()).build().unwrap();
    assert_eq!(elsewhere.inspect("a").await.unwrap().len(), 1);
    give_back(guard).await;
}

/// The fact compares steps: the last step of the work comes before the first step of the next
/// holder.
async fn a_cut_that_outlasts_the_lease_stops_the_work(store: Store) {
    let server = store.kind.start();
    let (proxy, builder_here) = proxied(&*server);
    let ttl = Duration::from_secs(2);
    let locks = builder_here.ttl(ttl).build().unwrap();
    let mut events = locks.events();
    let work = Work::begin(locks.mutex("a")).await;
    proxy.cut();

    // The next holder waits at the store, on a connection that is not cut.
    let elsewhere = patient(server.url()).build().unwrap();
    let next = elsewhere.mutex("a").wait(LEASE).acquire().await.unwrap();
    work.assert_stopped().await;
    // If the machine stands still before the cut is noticed, the loss comes first.
    let told = [
        of_the_store(&mut events).await,
        of_the_store(&mut events).await,
    ];
    assert!(told.contains(&Some(Event::Suspended)), "{told:?}");
    let lost = told.iter().find_map(|event| match event {
        Some(Event::Lost { name, reason, .. }) => Some((name.as_str(), *reason)),
        _ => None,
    });
    assert_eq!(lost, Some(("a", LostReason::Expired)), "{told:?}");
    give_back(next).await;
}

async fn a_lost_release_is_repeated(store: Store) {
    let server = store.kind.start();
    let (proxy, builder_here) = proxied(&*server);
    let elsewhere = patient(server.url()).build().unwrap();
    // The timeout is long enough for an operation that must fail, and for the others, which must
    // succeed on a busy machine.
    let locks = builder_here.op_timeout(SOON / 3).build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    proxy.cut();

    let failed = guard.release().await.unwrap_err();
    assert!(matches!(
        failed.kind(),
        ErrorKind::Unknown | ErrorKind::Unavailable
    ));
    assert!(!elsewhere.inspect("a").await.unwrap().is_empty());
    proxy.restore();

    tickets(&elsewhere, "a", 0).await;
    eventually("nothing is left", SOON, async || {
        server.litter("test").is_empty()
    })
    .await;
}

/// The work before the operation may be done, so its caller must not take it for work that has not
/// begun.
async fn an_operation_that_a_cut_prevents_says_that_the_lock_was_held(store: Store) {
    let server = store.kind.start();
    let (proxy, builder_here) = proxied(&*server);
    // The first operations must succeed on a busy machine, and the others must fail in time.
    let locks = builder_here.op_timeout(SOON / 3).build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    proxy.cut();

    let errors = [
        guard.ensure(2 * LEASE).await.unwrap_err(),
        guard.release().await.unwrap_err(),
    ];
    let not_taken = locks.mutex("b").try_acquire().await.unwrap_err();

    for error in errors {
        assert!(error.was_held(), "{error}");
    }
    assert!(!not_taken.was_held(), "{not_taken}");
}

async fn wake_ups_that_were_cut_off_are_caught_up_on(store: Store) {
    let server = store.kind.start();
    let (proxy, builder_here) = proxied(&*server);
    let locks = patient(server.url()).build().unwrap();
    let cut_off = builder_here.ttl(LONG).build().unwrap();
    for _ in 0..5 {
        let guard = locks.mutex("a").acquire().await.unwrap();
        let waiter = begin(cut_off.mutex("a").wait(LEASE));
        tickets(&locks, "a", 2).await;
        proxy.cut();
        give_back(guard).await; // its wake-up reaches no client
        proxy.restore();
        let restored = Instant::now();

        give_back(waiter.await.unwrap().unwrap()).await;
        let after = awake_since(restored);
        assert!(after < RECONNECTED, "{after:?}");
    }
}

async fn a_lost_reply_is_asked_for_again_and_granted_once(store: Store) {
    let server = store.kind.start();
    let (proxy, builder_here) = proxied(&*server);
    let elsewhere = patient(server.url()).build().unwrap();
    let locks = builder_here.ttl(LONG).build().unwrap();
    give_back(locks.mutex("warm").acquire().await.unwrap()).await;
    let marks = server.process().unwrap().marks();
    for round in 0..10 {
        proxy.lose_replies(marks.enqueue, 1);

        let name = format!("n{round}");
        let asked = Instant::now();
        let guard = locks.mutex(&name).wait(LEASE).acquire().await.unwrap();

        // The repeated request has the id of the first, so it gets the grant of the first. If each
        // of them had taken a ticket, the second ticket would be in line behind the first, and the
        // acquire would take longer.
        let after = awake_since(asked);
        assert!(after < RECONNECTED, "{after:?}");
        assert_eq!(proxy.traffic().replies_lost, round + 1);
        assert_eq!(elsewhere.inspect(&name).await.unwrap().len(), 1);
        let other = elsewhere.mutex(&name).try_acquire().await;
        assert_eq!(kind(other), ErrorKind::Busy);
        give_back(guard).await;
        assert!(elsewhere.inspect(&name).await.unwrap().is_empty());
    }
    eventually("nothing is left", SOON, async || {
        server.litter_but_marks("test").is_empty()
    })
    .await;
}

/// The store has made the ticket smaller, and the client does not know it.
async fn a_downgrade_whose_reply_is_lost_has_let_readers_in_and_no_writer(store: Store) {
    let server = store.kind.start();
    let process = server.process().unwrap();
    let other = patient(server.url()).build().unwrap();
    for acknowledged in [true, false, true, false] {
        // A new proxy each time: after a reset, the keeper also sends the request for the smaller
        // ticket, perhaps late.
        let (proxy, builder_here) = proxied(&*server);
        let locks = builder_here.build().unwrap();
        let mut guard = locks.mutex("a").acquire().await.unwrap();
        let grant = guard.grant_id();
        let reader = begin(other.rwlock("a").read().wait(LEASE));
        tickets(&other, "a", 2).await;
        proxy.lose_replies(process.marks().downgrade, 1);

        assert_eq!(kind(guard.downgrade().await), ErrorKind::Unknown);

        assert_eq!(proxy.traffic().replies_lost, 1);
        let reader = reader.await.unwrap().unwrap();
        assert!(guard.is_valid());
        assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
        let places = other.inspect("a").await.unwrap();
        assert_eq!(places[0].ticket, grant.as_u64() >> 10, "{places:?}");
        if acknowledged {
            let guard = Mutex::new(guard);
            eventually("it is acknowledged", SOON, async || {
                guard.lock().await.downgrade().await.is_ok()
            })
            .await;
            give_back(guard.into_inner()).await;
        } else {
            drop(guard);
        }
        give_back(reader).await;
        eventually("nothing is left", SOON, async || {
            server.litter("test").is_empty()
        })
        .await;
    }
}

async fn a_release_of_a_lost_lock_says_that_it_was_lost_while_the_server_is_away(store: Store) {
    let server = store.kind.start();
    let (proxy, builder_here) = proxied(&*server);
    let locks = builder_here.ttl(Duration::from_secs(2));
    let locks = locks.op_timeout(SOON / 3).build().unwrap(); // a release takes no longer
    let guard = locks.mutex("a").acquire().await.unwrap();
    proxy.cut();
    guard.lost().await;

    assert_eq!(soon(guard.release()).await.unwrap(), Release::AlreadyLost);

    proxy.restore();
    tickets(&patient(server.url()).build().unwrap(), "a", 0).await;
}

async fn a_lease_ends_on_time_while_its_renewal_hangs(store: Store) {
    let server = store.kind.start();
    let (proxy, builder_here) = proxied(&*server);
    let ttl = Duration::from_secs(2);
    let locks = builder_here.ttl(ttl).build().unwrap();
    let guard = locks.mutex("a").acquire().await.unwrap();
    proxy.freeze();
    let frozen = Instant::now();

    let reason = guard.lost().await;

    assert_eq!(reason, LostReason::Expired);
    assert!(
        awake_since(frozen) < ttl + SLACK,
        "{:?}",
        awake_since(frozen)
    );
    // The acknowledgement arrives now. It does not bring the lease back.
    proxy.thaw();
    tickets(&patient(server.url()).build().unwrap(), "a", 0).await;
    assert!(!guard.is_valid());
    assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
}
