//! Tests of the rounds: which tickets are renewed, and in which batches.

use std::time::Duration;

use super::*;
use crate::client::lease;

const EPOCH: u64 = 1;

/// How many batches are in flight at a store that has not answered yet.
const FIRST: usize = super::super::pace::LEAST;

/// A table for a store that wants at most this number of batches of renewals in flight.
fn table(batches: usize) -> Table {
    Table::new((batches * BATCH).try_into().unwrap())
}

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
    let mut table = table(64);
    let leases = (FIRST + 2) * BATCH;
    hold(&mut table, leases, Duration::from_secs(10));

    let round = table.take_round(at(103), EPOCH, false);
    assert_eq!(round.renew.len(), FIRST);
    assert!(round.renew.iter().all(|(_, batch)| batch.len() == BATCH));
    let full = table.take_round(at(103), EPOCH, false);
    assert!(full.renew.is_empty());
    // The keeper watches the end of leases whose renewal is queued.
    assert!(full.next <= Some(at(110)));

    let end = |table: &mut Table| table.renewed(Kind::Held, Outcome::Failed);
    assert!(end(&mut table), "others wait for the room");
    assert_eq!(table.take_round(at(103), EPOCH, false).renew.len(), 1);
    assert!(end(&mut table));
    assert_eq!(table.take_round(at(103), EPOCH, false).renew.len(), 1);
    assert!(!end(&mut table));
}

#[test]
fn a_short_lease_is_not_renewed_in_one_batch_with_long_ones() {
    let mut table = table(64);
    hold(&mut table, 50, Duration::from_secs(10));
    hold(&mut table, 1, Duration::from_secs(4));

    let round = table.take_round(at(103), EPOCH, false);

    let sizes: Vec<_> = round.renew.iter().map(|(_, batch)| batch.len()).collect();
    assert_eq!(sizes, [1, 50], "the one that ends first goes first");
}

#[test]
fn after_a_gap_everything_is_asked_after_once_in_bounded_steps() {
    let mut table = table(64);
    let leases = 3 * FIRST * BATCH;
    hold(&mut table, leases, Duration::from_secs(10));
    let after = EPOCH + 1;
    table.begin_sweep();

    let (mut asked, mut rounds) = (Vec::new(), 0);
    loop {
        let round = table.take_round(at(101), after, false);
        assert!(round.renew.len() <= FIRST);
        if round.renew.is_empty() {
            break;
        }
        rounds += 1;
        for (kind, batch) in round.renew {
            asked.extend(batch.iter().map(|lease| lease.request.id));
            for lease in batch {
                let tracked = table.leases.get_mut(&lease.request.id).unwrap();
                tracked.renewal = RenewalStage::Idle;
                table.set_recheck(lease.request.id, at(104));
            }
            table.renewed(kind, Outcome::Failed);
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
    let mut table = table(64);
    let tracked = Tracked {
        stage: Stage::Held,
        ..Tracked::new(&lease, EPOCH)
    };
    table.leases.insert(id, tracked);
    table.set_recheck(id, at(103));

    table.leave(id);

    let round = table.take_round(at(103), EPOCH, false);
    assert!(round.renew.is_empty(), "renewed");
    assert_eq!(round.next, Some(lease.deadline()));
    let round = table.take_round(at(110), EPOCH, false);
    assert_eq!(round.expired.len(), 1, "not watched any more");
}

/// A store for which time passes in steps. It answers a request some time after it has come, and
/// only so many renewals in a second.
struct Store {
    round_trip: Duration,
    renewals_per_second: u64,
    free_at: Instant,
    /// The batches in flight: when each is answered, and when it was sent.
    in_flight: Vec<(Instant, Instant, Kind, Vec<Arc<Lease>>)>,
}

impl Store {
    fn new(round_trip: Duration, renewals_per_second: u64) -> Self {
        Self {
            round_trip,
            renewals_per_second,
            free_at: at(0),
            in_flight: Vec::new(),
        }
    }

    fn send(&mut self, now: Instant, kind: Kind, batch: Vec<Arc<Lease>>) {
        let nanos = 1_000_000_000 / self.renewals_per_second * batch.len() as u64;
        self.free_at = self.free_at.max(now).after(Duration::from_nanos(nanos));
        let answered = self.free_at.after(self.round_trip);
        self.in_flight.push((answered, now, kind, batch));
    }
}

/// Keeps the leases of a table for this time. Returns how many have run out, and what was told.
fn keep(
    table: &mut Table,
    store: &mut Store,
    seconds: std::ops::Range<u64>,
) -> (Vec<(Stage, Id)>, Vec<Overload>) {
    keep_in(table, store, seconds, false)
}

/// [`keep`], in an outage or not.
fn keep_in(
    table: &mut Table,
    store: &mut Store,
    seconds: std::ops::Range<u64>,
    outage: bool,
) -> (Vec<(Stage, Id)>, Vec<Overload>) {
    let (mut over, mut told) = (Vec::new(), Vec::new());
    let mut now = at(seconds.start);
    while now < at(seconds.end) {
        let (answered, waits): (Vec<_>, Vec<_>) = std::mem::take(&mut store.in_flight)
            .into_iter()
            .partition(|(answered, ..)| *answered <= now);
        store.in_flight = waits;
        for (_, sent, kind, batch) in answered {
            for lease in &batch {
                let id = lease.request.id;
                let Some(tracked) = table.leases.get_mut(&id) else {
                    continue;
                };
                tracked.renewal = RenewalStage::Idle;
                let ttl = lease.request.ttl;
                if lease.extend(sent, ttl, now).is_ok() {
                    table.set_recheck(id, sent.after(ttl / 3));
                }
            }
            let outcome = Outcome::Answered {
                tickets: batch.len(),
                after: sent.until(now),
                patience: Duration::from_secs(1),
            };
            table.renewed(kind, outcome);
        }
        let round = table.take_round(now, EPOCH, outage);
        for (kind, batch) in round.renew {
            store.send(now, kind, batch);
        }
        for (lease, stage) in round.expired {
            table.remove(lease.request.id);
            over.push((stage, lease.request.id));
        }
        if let Some(overload) = round.overload {
            told.push(overload);
        }
        now = now.after(Duration::from_millis(5));
    }
    (over, told)
}

#[test]
fn leases_are_kept_however_far_the_store_is() {
    for millis in [1, 100, 400] {
        let mut table = table(64);
        hold(&mut table, 10_000, Duration::from_secs(10));
        let mut store = Store::new(Duration::from_millis(millis), 1_000_000);

        let (over, told) = keep(&mut table, &mut store, 100..140);

        assert_eq!((over.len(), told), (0, vec![]), "{millis} ms");
    }
}

#[test]
fn of_too_many_leases_only_the_surplus_is_lost_and_it_is_told_once() {
    let mut table = table(64);
    hold(&mut table, 20_000, Duration::from_secs(10));
    // Leases that are left out with an eighth of their ttl are renewed after some 8.8 seconds at the
    // latest. So this is enough for 17,600. All leases end at the same time at first, and before it
    // there is time for 14,000.
    let mut store = Store::new(Duration::from_millis(1), 2_000);

    let (over, told) = keep(&mut table, &mut store, 100..140);

    assert!((4_000..9_000).contains(&over.len()), "{}", over.len());
    let [Overload { leases, rate, .. }] = told[..] else {
        panic!("{told:?}");
    };
    assert!((15_000..=20_000).contains(&leases) && (1_500.0..2_500.0).contains(&rate));
    // The others are safe from now on.
    let (over, _) = keep(&mut table, &mut store, 140..180);
    assert_eq!(over.len(), 0);
}

/// An outage has a warning of its own, which is told in place of an overload.
#[test]
fn an_overload_that_an_outage_has_hidden_is_told_after_it() {
    let mut table = table(64);
    hold(&mut table, 20_000, Duration::from_secs(10));
    let mut store = Store::new(Duration::from_millis(1), 1_000);
    let (over, told) = keep_in(&mut table, &mut store, 100..111, true);
    assert!(!over.is_empty() && told.is_empty());

    store.renewals_per_second = 300;
    let (_, told) = keep(&mut table, &mut store, 110..130);

    assert_eq!(told.len(), 1);
}

/// The earliest deadline first, and nothing else, would cost 13,700 leases.
#[test]
fn a_store_that_becomes_slow_costs_only_the_surplus_and_no_more_after_a_stall() {
    let mut table = table(64);
    hold(&mut table, 20_000, Duration::from_secs(10));
    let mut store = Store::new(Duration::from_millis(1), 20_000);
    let (over, _) = keep(&mut table, &mut store, 100..110);
    assert_eq!(over.len(), 0);

    store.renewals_per_second = 1_500;

    let (over, _) = keep(&mut table, &mut store, 110..140);
    assert!((5_000..12_000).contains(&over.len()), "{}", over.len());
    // A stall that is shorter than the distance to the deadline which those that are kept have.
    for second in [140, 160] {
        store.free_at = at(second + 1);
        let (over, _) = keep(&mut table, &mut store, second..second + 20);
        assert_eq!(over.len(), 0);
    }
}

/// A stall of the store for half a ttl, which is an outage, costs no lease.
#[test]
fn after_a_stall_no_lease_is_left_out() {
    let mut table = table(64);
    hold(&mut table, 20_000, Duration::from_secs(10));
    let mut store = Store::new(Duration::from_millis(10), 20_000);
    let (over, _) = keep(&mut table, &mut store, 100..110);
    assert_eq!(over.len(), 0);

    store.free_at = at(114);

    let (over, told) = keep(&mut table, &mut store, 110..140);
    assert_eq!((over.len(), told), (0, vec![]));
}

#[test]
fn waiters_are_renewed_beside_holders_and_never_at_their_cost() {
    let mut table = table(64);
    hold(&mut table, 1_000, Duration::from_secs(10));
    for lease in hold(&mut table, 20_000, Duration::from_secs(10)) {
        table.leases.get_mut(&lease.request.id).unwrap().stage = Stage::Waiting;
    }
    let mut store = Store::new(Duration::from_millis(50), 100_000);
    let (over, _) = keep(&mut table, &mut store, 100..120);
    assert_eq!(over.len(), 0);

    store.renewals_per_second = 1_500;

    let (over, _) = keep(&mut table, &mut store, 120..150);
    let holders = over.iter().filter(|(stage, _)| *stage == Stage::Held);
    assert_eq!(holders.count(), 0);
    assert!((8_000..18_000).contains(&over.len()), "{}", over.len());
}

#[test]
fn a_waiter_whose_renewal_is_queued_is_renewed_as_a_holder_once_it_holds() {
    let mut table = table(64);
    let lease = hold(&mut table, 1, Duration::from_secs(10)).remove(0);
    let id = lease.request.id;
    table.leases.get_mut(&id).unwrap().stage = Stage::Waiting;
    for _ in 0..FIRST {
        table.waiting.pace.begin();
    }
    assert!(table.take_round(at(103), EPOCH, false).renew.is_empty());

    table.hold(id);

    let round = table.take_round(at(103), EPOCH, false);
    let [(Kind::Held, batch)] = &round.renew[..] else {
        panic!("{} batches", round.renew.len());
    };
    assert_eq!(batch.len(), 1);
}

/// A cleanup of a held lease, after which another task may go on with the ticket.
fn give_back(table: &mut Table, lease: &Arc<Lease>) {
    let cleanup = Cleanup {
        held: Some(Arc::clone(lease)),
        may_go_on: true,
        ..Cleanup::of(lease)
    };
    assert!(table.give_back(cleanup, Some(at(101))).is_none());
}

#[test]
fn a_ticket_is_taken_back_until_its_release_begins() {
    let mut table = table(64);
    let lease = hold(&mut table, 1, Duration::from_secs(10)).remove(0);
    lease.confirm(EPOCH);
    let (id, name) = (lease.request.id, lease.request.name.clone());

    give_back(&mut table, &lease);
    assert!(table.take_back(&name, EPOCH, |_| false).is_none());
    assert!(
        table.take_back(&name, EPOCH + 1, |_| true).is_none(),
        "a gap"
    );
    let taken = table.take_back(&name, EPOCH, |_| true).unwrap();
    assert!(Arc::ptr_eq(taken.held.as_ref().unwrap(), &lease));
    assert_eq!(table.leases[&id].stage, Stage::Held);
    assert!(table.leftovers.of(&name).is_some(), "its wakers have run");
    drop(taken);
    assert!(table.leftovers.of(&name).is_none() && table.cleanups_open == 0);
    assert!(table.take_round(at(101), EPOCH, false).cleanups.is_empty());

    give_back(&mut table, &lease);
    let round = table.take_round(at(101), EPOCH, false);
    assert_eq!(round.cleanups.len(), 1);
    assert!(table.take_back(&name, EPOCH, |_| true).is_none());
    assert!(table.leftovers.of(&name).is_some(), "the keeper has it");
    drop(round);
    assert!(table.leftovers.of(&name).is_none());
}

/// The one behind it holds, so nobody else may.
#[test]
fn a_ticket_that_has_let_another_in_is_not_taken_back() {
    let mut table = table(64);
    let lease = hold(&mut table, 1, Duration::from_secs(10)).remove(0);
    let follower = Arc::new(lease::tests::lease_for(Duration::from_secs(10)));
    lease.confirm(EPOCH);
    table
        .leases
        .insert(follower.request.id, Tracked::new(&follower, EPOCH));
    let name = lease.request.name.clone();
    assert!(!table.follow(lease.request.id, &follower));

    let cleanup = Cleanup {
        held: Some(Arc::clone(&lease)),
        may_go_on: true,
        ..Cleanup::of(&lease)
    };
    let next = table.give_back(cleanup, Some(at(101))).unwrap();

    assert!(Arc::ptr_eq(&next, &follower));
    assert!(table.take_back(&name, EPOCH, |_| true).is_none());
}

/// A ticket that may go on has not ended. It ends when its release begins, or when one behind it is
/// known. Then nobody goes on with it.
#[test]
fn a_ticket_that_was_given_back_lets_in_one_that_comes_later_or_goes_on() {
    let mut table = table(64);
    let leases = hold(&mut table, 2, Duration::from_secs(10));
    let late = Arc::new(lease::tests::lease_for(Duration::from_secs(10)));
    for lease in &leases {
        lease.confirm(EPOCH);
        give_back(&mut table, lease);
    }
    let [first, second] = [0, 1].map(|at| leases[at].request.clone());

    assert!(table.follow(first.id, &late));
    assert!(!table.follow(first.id, &late), "it has let in two");
    let mut goes_on = Vec::new();
    while let Some(taken) = table.take_back(&first.name, EPOCH, |_| true) {
        goes_on.push(taken.request.id);
    }
    assert_eq!(goes_on, [second.id], "two hold");

    give_back(&mut table, &leases[1]);
    drop(table.take_round(at(101), EPOCH, false));
    assert!(table.follow(second.id, &late));
}
