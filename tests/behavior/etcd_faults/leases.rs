//! Tests of the leases at the server, and of people who delete leases and keys.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use libtest_mimic::Trial;
use lockcore::backend::{self, Departure, Enqueued, EventSink, FULL, Id, Name, Released, Request};
use lockcore::{ErrorKind, LostReason};
use tests::etcd_server::EtcdServer;
use tests::eventually::eventually;

use super::{client, namespace};
use crate::faults::{builder, is_renewed, patient, works_again};
use crate::giving_up::polled;
use crate::store::{
    DEFAULT, Kind, LEASE, PATIENCE, SOON, STALL, Store, begin, give_back, kind, soon, tickets,
};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_client_that_ends_leaves_no_lease
        the_counters_of_all_clients_share_a_lease
        a_holder_whose_lease_somebody_revokes_learns_it
        a_holder_whose_key_somebody_deletes_learns_it
        a_ticket_that_somebody_has_written_over_is_put_right
        a_permit_that_somebody_has_written_over_is_put_right
        a_holder_whose_ticket_somebody_has_made_smaller_learns_it
        a_revocation_changes_no_ticket_that_somebody_has_written_over
        a_holder_whose_adopted_ticket_somebody_has_written_over_learns_it
        a_lock_with_a_short_ttl_ends_beside_one_with_a_long_ttl
        a_ticket_that_is_kept_after_its_detach_does_not_end_with_its_own_lease
        a_client_with_a_shorter_lease_adopts_and_renews
        a_release_is_marked_after_somebody_has_revoked_the_lease_of_marks
        a_counter_is_read_after_somebody_has_revoked_the_lease_of_counters
    ]
}

/// A lease that is not revoked stays at the server until its ttl is over.
async fn a_client_that_ends_leaves_no_lease(_: Store) {
    let server = EtcdServer::start();
    for _ in 0..20 {
        let locks = client(&server);
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
        assert_eq!(server.leases().len(), 1);

        drop(locks);

        assert_eq!(server.leases(), [""; 0]);
    }
}

/// Such a lease stays for two months. Programs may start every minute.
async fn the_counters_of_all_clients_share_a_lease(_: Store) {
    let server = EtcdServer::start();
    for round in 0..3 {
        let clients = [(); 5].map(|()| client(&server));
        let added = clients.iter().enumerate().map(async |(number, locks)| {
            locks.counter(format!("c{number}")).add(1).await.unwrap();
            locks.counter("all").add(1).await.unwrap().count
        });
        join_all(added).await;
        let count = clients[0].counter("all").get().await.unwrap().count;
        assert_eq!(count, 5 * (round + 1));
        drop(clients);
    }
    assert_eq!(server.leases().len(), 1);

    let leases = server.leases();
    server.ctl(&["lease", "revoke", &leases[0]]);
    let locks = client(&server);
    assert_eq!(locks.counter("all").get().await.unwrap().count, 0);
    assert_eq!(locks.counter("all").add(1).await.unwrap().count, 1);
}

async fn a_holder_whose_lease_somebody_revokes_learns_it(_: Store) {
    let server = EtcdServer::start();
    // The clients look after their leases every two seconds.
    let (holder, waiter) = (
        builder(server.url()).op_timeout(STALL).build().unwrap(),
        builder(server.url()).op_timeout(STALL).build().unwrap(),
    );
    let guard = holder.mutex("a").acquire().await.unwrap();
    let lease = server.leases().pop().unwrap();
    let waits = begin(waiter.mutex("a").wait(3 * SOON));
    tickets(&holder, "a", 2).await;

    server.ctl(&["lease", "revoke", &lease]);

    let next = soon(waits).await.unwrap().unwrap();
    soon(guard.lost()).await;
    assert!(!guard.is_valid());
    give_back(next).await;
    works_again(&holder, "a", SOON).await;
}

async fn a_holder_whose_key_somebody_deletes_learns_it(_: Store) {
    let server = EtcdServer::start();
    let (holder, waiter) = (
        builder(server.url()).op_timeout(STALL).build().unwrap(),
        builder(server.url()).op_timeout(STALL).build().unwrap(),
    );
    let guard = holder.mutex("a").acquire().await.unwrap();
    let other = holder.mutex("b").acquire().await.unwrap();

    server.ctl(&["del", "--prefix", "test:1:{a}/"]);

    let next = waiter.mutex("a").acquire().await.unwrap();
    soon(guard.lost()).await;
    assert!(other.is_valid());
    give_back(next).await;
    give_back(other).await;
    works_again(&holder, "a", SOON).await;
}

/// As an operator does with `etcdctl put`: with and without the lease of the key.
async fn a_ticket_that_somebody_has_written_over_is_put_right(_: Store) {
    for options in [&[][..], &["--ignore-lease"]] {
        let server = EtcdServer::start();
        let (holder, waiter) = (client(&server), client(&server));
        let guard = holder.mutex("a").acquire().await.unwrap();
        let (key, value, lease) = ticket(&server);
        let waits = begin(waiter.mutex("a").wait(STALL));
        tickets(&holder, "a", 2).await;

        server.ctl(&[&["put", &key, "x"], options].concat());
        guard.extend(LEASE).await.unwrap();

        let now = server.ctl(&["get", &key, "--print-value-only"]);
        assert_eq!(terms(&now), terms(&value));
        let of_lease = server.ctl(&["lease", "timetolive", &lease, "--keys"]);
        assert!(of_lease.contains(&key), "{of_lease}");
        assert!(guard.is_valid() && !waits.is_finished());
        give_back(guard).await;
        give_back(soon(waits).await.unwrap().unwrap()).await;
    }
}

/// Meanwhile, the ticket counts as one that takes all permits.
async fn a_permit_that_somebody_has_written_over_is_put_right(_: Store) {
    let server = EtcdServer::start();
    let (holder, other) = (client(&server), client(&server));
    let pool = other.semaphore("a", 2);
    let guard = holder.semaphore("a", 2).acquire().await.unwrap();
    let (key, ..) = ticket(&server);

    server.ctl(&["put", &key, "x"]);
    let refused = kind(pool.try_acquire().await);
    assert_eq!(refused, ErrorKind::CapacityMismatch);
    guard.extend(LEASE).await.unwrap();

    let second = pool.try_acquire().await.unwrap();
    assert_eq!(kind(pool.try_acquire().await), ErrorKind::Busy);
    assert!(guard.is_valid());
    give_back(guard).await;
    give_back(second).await;
}

/// The value is one of ours, for one permit of five.
async fn a_holder_whose_ticket_somebody_has_made_smaller_learns_it(_: Store) {
    let server = EtcdServer::start();
    let (holder, other) = (client(&server), client(&server));
    let guard = holder.semaphore("a", 5).permits(5).acquire().await.unwrap();
    let waits = begin(other.semaphore("a", 5).permits(1).wait(STALL));
    tickets(&holder, "a", 2).await;
    let mut keys = server.keys("test:1:{a}/t");
    keys.retain(|key| {
        server
            .ctl(&["get", key, "--print-value-only"])
            .starts_with("5 5 ")
    });

    server.ctl(&["put", &keys[0], "1 5 10000 0\nsomebody"]);

    let next = soon(waits).await.unwrap().unwrap();
    let lost = kind(guard.extend(LEASE).await);
    assert_eq!(lost, ErrorKind::Lost(LostReason::Taken));
    drop(guard);
    give_back(next).await;
}

/// Nobody can read the ttl of such a ticket, so the operator does not know how long to wait.
async fn a_revocation_changes_no_ticket_that_somebody_has_written_over(_: Store) {
    let server = EtcdServer::start();
    let holder = client(&server);
    let other = builder(server.url()).op_timeout(SOON / 3).build().unwrap();
    let guard = holder.mutex("a").acquire().await.unwrap();
    let place = other.inspect("a").await.unwrap().remove(0);
    let (key, ..) = ticket(&server);
    server.ctl(&["put", &key, "x"]);

    let refused = other.revoke("a", place.ticket, Duration::ZERO, "x").await;
    let refused = refused.unwrap_err();

    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.to_string().contains("written over"), "{refused}");
    let value = server.ctl(&["get", &key, "--print-value-only"]);
    assert_eq!(value.trim_end(), "x");
    guard.extend(LEASE).await.unwrap();
    assert!(guard.is_valid());
    give_back(guard).await;
}

/// The number of such a ticket is in its value. So it stands behind the one that has come before it was
/// adopted.
async fn a_holder_whose_adopted_ticket_somebody_has_written_over_learns_it(_: Store) {
    let server = EtcdServer::start();
    let [first, holder, waiter] = [(); 3].map(|()| client(&server));
    let guard = first.mutex("a").acquire().await.unwrap();
    let waits = begin(waiter.mutex("a").wait(STALL));
    tickets(&first, "a", 2).await;
    let before = server.keys("test:1:{a}/t");
    let guard = holder.adopt(&guard.detach().await.unwrap()).await.unwrap();
    let mut keys = server.keys("test:1:{a}/t");
    keys.retain(|key| !before.contains(key));

    server.ctl(&["put", &keys[0], "x"]);

    let next = soon(waits).await.unwrap().unwrap();
    let lost = kind(guard.extend(LEASE).await);
    assert_eq!(lost, ErrorKind::Lost(LostReason::Taken));
    drop(guard);
    give_back(next).await;
    works_again(&waiter, "a", SOON).await;
}

/// The key of the only ticket at the server, its value and its lease.
fn ticket(server: &EtcdServer) -> (String, String, String) {
    let [key] = server.keys("test:1:{a}/t").try_into().unwrap();
    let value = server.ctl(&["get", &key, "--print-value-only"]);
    let lease = server.leases().into_iter().find(|lease| {
        let told = server.ctl(&["lease", "timetolive", lease, "--keys"]);
        told.contains(&key)
    });
    (key, value, lease.unwrap())
}

/// What a ticket says, without the time of its request.
fn terms(ticket: &str) -> (&str, &str) {
    let (numbers, owner) = ticket.split_once('\n').unwrap();
    let (terms, _) = numbers.rsplit_once(' ').unwrap();
    (terms, owner)
}

/// Both are in one lease, which lasts for the longer ttl.
async fn a_lock_with_a_short_ttl_ends_beside_one_with_a_long_ttl(_: Store) {
    let server = EtcdServer::start();
    let locks = patient(server.url()).ttl(3 * SOON).build().unwrap();
    let long = locks.mutex("long").acquire().await.unwrap();
    let short = locks
        .mutex("short")
        .ttl(Duration::from_secs(1))
        .renew(false);
    let short = short.acquire().await.unwrap();
    assert_eq!(server.leases().len(), 1);

    let others = client(&server);
    let next = others.mutex("short").wait(SOON).acquire().await.unwrap();

    assert!(!short.is_valid() && long.is_valid());
    give_back(next).await;
    give_back(long).await;
    eventually("nothing is left", SOON, async || {
        server.keys("test:1:{").is_empty()
    })
    .await;
}

/// The request to detach it may arrive late, if its caller was dropped.
async fn a_ticket_that_is_kept_after_its_detach_does_not_end_with_its_own_lease(_: Store) {
    let server = EtcdServer::start();
    let store = backend::open(&server.url()).unwrap();
    let events = EventSink::new(1, namespace(), |_| ());
    let connection = store.connect(events).await.unwrap();
    let (name, id) = (
        Name::new(namespace(), "a").unwrap(),
        Id::parse(&"7".repeat(32)).unwrap(),
    );
    let ticket = Arc::new(Request::new(name, id, FULL, FULL, Duration::from_secs(5)));
    let taken = connection.enqueue(Arc::clone(&ticket), PATIENCE).await;
    assert!(matches!(taken, Ok(Enqueued::Granted { .. })), "{taken:?}");
    let holds = async || {
        let renewed = connection.renew(vec![Arc::clone(&ticket)], PATIENCE).await;
        renewed.unwrap()[0].holds()
    };

    for polls in 0.. {
        let detached = polled(connection.detach(Arc::clone(&ticket)), polls).await;
        // A renewal fails if the late request comes between its read and its write.
        eventually("it is kept", SOON, async || holds().await).await;
        if let Some(detached) = detached {
            detached.unwrap();
            println!("dropped at {polls} polls");
            break;
        }
    }

    eventually("its own leases have ended", 2 * SOON, async || {
        server.leases().len() == 1
    })
    .await;
    assert!(holds().await);
    let released = connection.release(vec![Departure::new(ticket, false)]);
    assert_eq!(released.await.unwrap(), [Released::Released]);
}

/// The ttl of the lock is longer than the lease of its adopter.
async fn a_client_with_a_shorter_lease_adopts_and_renews(_: Store) {
    let server = EtcdServer::start();
    let ttl = Duration::from_secs(9);
    let long = patient(server.url()).ttl(10 * ttl).build().unwrap();
    let short = patient(server.url()).ttl(ttl).build().unwrap();
    let guard = long.mutex("a").acquire().await.unwrap();

    let adopted = short.adopt(&guard.detach().await.unwrap()).await.unwrap();

    assert!(adopted.remaining() <= ttl);
    is_renewed(&adopted, ttl).await;
    give_back(adopted).await;
    works_again(&long, "a", SOON).await;
}

/// A mark says that a release has come before its enqueue. The marks of a client share a lease.
async fn a_release_is_marked_after_somebody_has_revoked_the_lease_of_marks(_: Store) {
    let server = EtcdServer::start();
    let store = backend::open(&server.url()).unwrap();
    let events = EventSink::new(1, namespace(), |_| ());
    let connection = store.connect(events).await.unwrap();
    let request = |number: u32| {
        let name = Name::new(namespace(), "a").unwrap();
        let id = Id::parse(&format!("{number:032}")).unwrap();
        Arc::new(Request::new(name, id, FULL, FULL, Duration::from_secs(2)))
    };
    let release = |number| connection.release(vec![Departure::new(request(number), true)]);
    let own = server.leases();
    assert_eq!(release(1).await.unwrap(), [Released::NotFound]);
    let of_marks = added(&server, &own);
    server.ctl(&["lease", "revoke", &of_marks]);

    // The core repeats it too.
    eventually("the release is marked", SOON, async || {
        release(2).await.is_ok()
    })
    .await;

    let late = connection.enqueue(request(2), PATIENCE).await;
    assert!(matches!(late, Ok(Enqueued::Gone)), "{late:?}");
    let next = connection.enqueue(request(3), PATIENCE).await;
    assert!(matches!(next, Ok(Enqueued::Granted { .. })), "{next:?}");
}

/// A read prolongs the life of a counter whose lease is too short.
async fn a_counter_is_read_after_somebody_has_revoked_the_lease_of_counters(_: Store) {
    const KEY: &str = "test:1:counters/{a}";
    let server = EtcdServer::start();
    let locks = client(&server);
    let counter = locks.counter("a");
    locks.ready(SOON).await.unwrap();
    let own = server.leases();
    counter.add(1).await.unwrap();
    let shared = added(&server, &own);

    let value = server.ctl(&["get", KEY, "--print-value-only"]);
    let granted = server.ctl(&["lease", "grant", "60"]);
    let short = granted.split(' ').nth(1).unwrap();
    server.ctl(&["put", KEY, value.trim_end(), &format!("--lease={short}")]);
    server.ctl(&["lease", "revoke", &shared]);
    assert_eq!(counter.get().await.unwrap().count, 1);

    server.ctl(&["lease", "revoke", short]);
    assert_eq!(counter.get().await.unwrap().count, 1);
}

/// The only lease that was not there before.
fn added(server: &EtcdServer, before: &[String]) -> String {
    let mut leases = server.leases();
    leases.retain(|lease| !before.contains(lease));
    let [lease] = leases.try_into().unwrap();
    lease
}
