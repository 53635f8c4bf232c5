//! Tests of downgrades whose request or reply is lost, held back or refused, on the store for
//! tests.

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::Fault;
use lockcore::rwlock::RwLock;
use lockcore::testing::{Hold, Store as Kit, Verb};
use lockcore::{Error, ErrorKind, Fair, Guard, Locks, Release};
use tests::eventually::eventually;
use tokio::task::JoinHandle;

use super::{at_once, begin, inside};
use crate::store::{DEFAULT, Kind, LEASE, SOON, STALL, Store, give_back, kind, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_downgrade_that_is_not_acknowledged_is_a_read_hold_and_is_asked_for_again
        a_lease_without_renewal_is_asked_for_again_too
        a_write_released_while_its_last_read_ends_was_not_lost
        a_write_dropped_while_its_last_read_ends_is_kept_for_readers
        a_ticket_on_its_way_to_the_readers_is_passed_on_to_nobody
        an_acknowledgement_of_an_earlier_renewal_lets_nobody_in
    ]
}

fn kit() -> (Kit, Locks, Locks) {
    let kit = Kit::new();
    let patient = || Locks::builder().ttl(LEASE).op_timeout(STALL);
    let locks = kit.client_with(patient());
    let other = kit.another_process().client_with(patient());
    (kit, locks.unwrap(), other.unwrap())
}

/// The store may have carried out the downgrade. So the guard only reads from now on, and the
/// keeper repeats the request.
async fn a_downgrade_that_is_not_acknowledged_is_a_read_hold_and_is_asked_for_again(_: Store) {
    type Befall = fn(&Kit);
    let faults: [(Befall, ErrorKind); 6] = [
        (|kit| kit.lose_next_reply(Verb::Renew), ErrorKind::Unknown),
        (|kit| kit.lose_next_request(Verb::Renew), ErrorKind::Unknown),
        (
            |kit| kit.fail_next(Verb::Renew, Fault::Retry),
            ErrorKind::Unavailable,
        ),
        (
            |kit| kit.fail_next(Verb::Renew, Fault::Refused),
            ErrorKind::Unavailable,
        ),
        (
            |kit| kit.fail_next(Verb::Renew, Fault::Unknown),
            ErrorKind::Unknown,
        ),
        // The caller does not get `Config`, because `Config` would mean that nothing has changed.
        (
            |kit| kit.fail_next(Verb::Renew, Fault::Config),
            ErrorKind::Unavailable,
        ),
    ];
    for (befall, expected) in faults {
        for released in [false, true] {
            let (kit, locks, other) = kit();
            let catalog = locks.rwlock("c");
            let mut guard = catalog.write().acquire().await.unwrap();
            let inner = inside(&guard, catalog.read()).await;
            let reader = begin(other.rwlock("c").read());
            tickets(&locks, "c", 2).await;
            befall(&kit);

            let outcome = match released {
                true => guard.release().await.map(drop),
                false => {
                    let outcome = guard.downgrade().await;
                    assert_eq!(kind(guard.fencing_token()), ErrorKind::Config);
                    drop(guard);
                    outcome
                }
            };
            assert_eq!(kind(outcome), expected);

            assert!(inner.is_valid());
            give_back(at_once(reader).await).await;
            assert_eq!(kind(other.mutex("c").try_acquire().await), ErrorKind::Busy);
            give_back(inner).await;
            tickets(&locks, "c", 0).await;
        }
    }
}

async fn a_lease_without_renewal_is_asked_for_again_too(_: Store) {
    let (kit, locks, other) = kit();
    let lock = locks.rwlock("c").write().renew(false);
    let mut guard = lock.acquire().await.unwrap();
    let reader = begin(other.rwlock("c").read());
    tickets(&locks, "c", 2).await;
    kit.lose_next_request(Verb::Renew);

    assert_eq!(kind(guard.downgrade().await), ErrorKind::Unknown);

    give_back(at_once(reader).await).await;
    give_back(guard).await;
}

/// A write hold with a read hold inside. The write hold is being released. The request that makes
/// its ticket a reader's ticket has arrived at the store and is held back.
async fn releasing(
    kit: &Kit,
    catalog: &RwLock,
    min_hold: Duration,
) -> (JoinHandle<Result<Release, Error>>, Guard, Hold) {
    let write = catalog.write().min_hold(min_hold);
    let guard = write.acquire().await.unwrap();
    let inner = inside(&guard, catalog.read()).await;
    let mut asked = kit.hold_next(Verb::Renew);
    let releasing = tokio::spawn(guard.release());
    asked.arrived().await;
    (releasing, inner, asked)
}

/// The last read hold ends while the request of `releasing` is in flight, so nobody needs the
/// answer. The lock was held until its end. So the release reports no loss, whatever the answer is.
async fn a_write_released_while_its_last_read_ends_was_not_lost(_: Store) {
    for dropped in [true, false] {
        let (kit, locks, _) = kit();
        let (releasing, inner, asked) = releasing(&kit, &locks.rwlock("c"), Duration::ZERO).await;
        match dropped {
            true => drop(inner),
            false => give_back(inner).await,
        }
        asked.let_go();

        assert_eq!(releasing.await.unwrap().unwrap(), Release::Released);
        tickets(&locks, "c", 0).await;
    }
}

/// The release is dropped before the answer to its downgrade comes. `min_hold` keeps the ticket,
/// and the keeper repeats the downgrade.
async fn a_write_dropped_while_its_last_read_ends_is_kept_for_readers(_: Store) {
    let kit = Kit::new();
    let builder = || Locks::builder().ttl(LEASE);
    let locks = kit.client_with(builder()).unwrap();
    let other = kit.another_process().client_with(builder()).unwrap();
    let min_hold = Duration::from_secs(3600);
    let (releasing, inner, asked) = releasing(&kit, &locks.rwlock("c"), min_hold).await;
    let reader = begin(other.rwlock("c").read());
    tickets(&locks, "c", 2).await;
    drop(inner);
    releasing.abort();
    releasing.await.unwrap_err();

    give_back(at_once(reader).await).await;
    assert_eq!(kind(other.mutex("c").try_acquire().await), ErrorKind::Busy);
    asked.let_go();
}

/// The future of the downgrade is dropped while its request is in flight. The store may already
/// have granted readers of other clients, so no writer of this process may get the ticket.
async fn a_ticket_on_its_way_to_the_readers_is_passed_on_to_nobody(_: Store) {
    let kit = Kit::new();
    let fair = Locks::builder().fair(Fair::Local(Duration::from_secs(60)));
    let locks = kit.client_with(fair.ttl(LEASE).op_timeout(STALL)).unwrap();
    let other = kit.another_process().client().unwrap();
    let catalog = locks.rwlock("c");
    let mut guard = catalog.write().acquire().await.unwrap();
    let ticket = guard.grant_id().as_u64() >> 10;
    let writer = begin(catalog.write());
    tickets(&locks, "c", 2).await;
    let mut asked = kit.hold_next(Verb::Renew);
    {
        let mut downgrade = std::pin::pin!(guard.downgrade());
        tokio::select! {
            _ = &mut downgrade => panic!("not answered yet"),
            () = asked.arrived() => {}
        }
    }
    // The writer sends its own request to the store. It does not wait for the answer to the
    // downgrade.
    eventually("the writer is in line at the store", SOON, async || {
        other.inspect("c").await.unwrap().len() == 2
    })
    .await;
    drop(guard);
    let writer = at_once(writer).await;

    assert_ne!(writer.grant_id().as_u64() >> 10, ticket);
    asked.let_go();
    give_back(writer).await;
    tickets(&locks, "c", 0).await;
}

/// The earlier renewal was sent while the ticket was a writer's ticket. So its acknowledgement does
/// not confirm the downgrade.
async fn an_acknowledgement_of_an_earlier_renewal_lets_nobody_in(_: Store) {
    let kit = Kit::new();
    kit.clock().stop();
    let fair = Locks::builder().fair(Fair::Local(Duration::from_secs(3600)));
    let locks = kit.client_with(fair).unwrap();
    let catalog = locks.rwlock("c");
    let mut guard = catalog.write().acquire().await.unwrap();
    let mut of_the_writer = kit.hold_next(Verb::Renew);
    kit.clock().advance(Duration::from_secs(4));
    of_the_writer.arrived().await;
    let before = guard.remaining();
    kit.fail_next(Verb::Renew, Fault::Unknown);
    assert_eq!(kind(guard.downgrade().await), ErrorKind::Unknown);
    // The keeper's next renewal is held back, and so are all that follow it.
    let mut again = kit.hold_next(Verb::Renew);

    of_the_writer.let_go();
    eventually("it is worked in", SOON, async || guard.remaining() > before).await;
    let places = locks.inspect("c").await.unwrap();
    assert_eq!(places[0].permits, lockcore::backend::FULL.get());
    let reader = begin(catalog.read());
    tickets(&locks, "c", 2).await;
    assert_eq!(
        locks.inspect("c").await.unwrap().len(),
        2,
        "the reader has joined the ticket"
    );

    again.arrived().await;
    again.let_go();
    give_back(at_once(reader).await).await;
    give_back(guard).await;
}
