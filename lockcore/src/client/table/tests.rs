//! Tests of the rounds: which tickets are renewed, and in which batches.

use std::time::Duration;

use super::*;
use crate::client::lease;

const EPOCH: u64 = 1;

fn at(seconds: u64) -> Instant {
    Instant::from_nanos(seconds * 1_000_000_000)
}

/// Makes `count` leases that are held from second 100 on, and due for renewal in second 103.
fn hold(table: &mut Table, count: usize, ttl: Duration) -> Vec<Arc<Lease>> {
    let held = (0..count).map(|_| {
        let lease = Arc::new(lease::tests::lease_for(ttl));
        lease.answered(7, at(100), ttl);
        let tracked = Tracked {
            stage: Stage::Held,
            ..Tracked::new(&lease, EPOCH)
        };
        let id = lease.request.id;
        table.leases.insert(id, tracked);
        table.set_recheck(id, at(103));
        lease
    });
    held.collect()
}

#[test]
fn batches_under_way_are_bounded_and_the_rest_follows() {
    let mut table = Table::default();
    let leases = (MOST_RENEWALS + 2) * BATCH;
    hold(&mut table, leases, Duration::from_secs(10));

    let round = table.take_round(at(103), EPOCH);
    assert_eq!(round.renew.len(), MOST_RENEWALS);
    assert!(round.renew.iter().all(|batch| batch.len() == BATCH));
    let full = table.take_round(at(103), EPOCH);
    assert!(full.renew.is_empty());
    // The keeper watches the end of leases whose renewal is queued.
    assert!(full.next <= Some(at(110)));

    assert!(table.renewed(), "others wait for the room");
    assert_eq!(table.take_round(at(103), EPOCH).renew.len(), 1);
    assert!(table.renewed());
    assert_eq!(table.take_round(at(103), EPOCH).renew.len(), 1);
    assert!(!table.renewed());
}

#[test]
fn a_short_lease_is_not_renewed_in_one_batch_with_long_ones() {
    let mut table = Table::default();
    hold(&mut table, 50, Duration::from_secs(10));
    hold(&mut table, 1, Duration::from_secs(4));

    let round = table.take_round(at(103), EPOCH);

    let sizes: Vec<_> = round.renew.iter().map(Vec::len).collect();
    assert_eq!(sizes, [1, 50], "the one that ends first goes first");
}

#[test]
fn after_a_gap_everything_is_asked_after_once_in_bounded_steps() {
    let mut table = Table::default();
    let leases = 3 * MOST_RENEWALS * BATCH;
    hold(&mut table, leases, Duration::from_secs(10));
    let after = EPOCH + 1;
    table.begin_sweep();

    let (mut asked, mut rounds) = (Vec::new(), 0);
    loop {
        let round = table.take_round(at(101), after);
        assert!(round.renew.len() <= MOST_RENEWALS);
        if round.renew.is_empty() {
            break;
        }
        rounds += 1;
        for batch in round.renew {
            asked.extend(batch.iter().map(|lease| lease.request.id));
            for lease in batch {
                let tracked = table.leases.get_mut(&lease.request.id).unwrap();
                tracked.renewal = RenewalStage::Idle;
                table.set_recheck(lease.request.id, at(104));
            }
            table.renewed();
        }
    }

    assert_eq!(rounds, 3);
    assert_eq!(asked.len(), leases);
    asked.sort();
    asked.dedup();
    assert_eq!(asked.len(), leases, "one was asked after twice");
}

#[test]
fn a_ticket_that_is_being_released_is_watched_and_not_renewed() {
    let lease = Arc::new(lease::tests::lease());
    lease.answered(7, at(100), Duration::from_secs(10));
    let id = lease.request.id;
    let mut table = Table::default();
    let tracked = Tracked {
        stage: Stage::Held,
        ..Tracked::new(&lease, EPOCH)
    };
    table.leases.insert(id, tracked);
    table.set_recheck(id, at(103));

    table.leave(id);

    let round = table.take_round(at(103), EPOCH);
    assert!(round.renew.is_empty(), "renewed");
    assert_eq!(round.next, Some(lease.deadline()));
    let round = table.take_round(at(110), EPOCH);
    assert_eq!(round.expired.len(), 1, "not watched any more");
}
