//! Tests of barriers on the store for tests. This store loses, holds back or forgets the messages
//! that a fact names.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use libtest_mimic::Trial;
use lockcore::backend::{Answer, Connection, Count, Counted, Name, TicketInfo};
use lockcore::barrier::Barrier;
use lockcore::double_barrier::Left;
use lockcore::testing::{Store as Kit, Verb, around};
use lockcore::{Error, ErrorKind, Locks, LostReason};
use tests::eventually::eventually;

use super::{passed, waits};
use crate::late::LateAnswers;
use crate::store::{A_FEW_MILLIS, DEFAULT, Kind, SOON, STALL, Store, kind, soon, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        lost_requests_and_replies_keep_no_party_back
        lost_requests_and_replies_keep_nobody_inside
        a_list_that_is_late_or_doubled_lets_no_party_go_on_alone_or_twice
        a_list_from_before_a_party_gave_up_does_not_count_it
        a_party_that_gave_up_before_the_round_was_proposed_is_not_in_it
        a_party_whose_time_is_over_goes_on_if_it_was_counted
        a_party_does_not_wait_much_longer_than_it_was_told
        a_party_that_stays_inside_for_long_can_leave
        a_store_that_has_lost_its_data_lets_nobody_go_on
        a_party_that_was_frozen_beyond_its_lease_joins_the_next_round
        a_client_that_is_shut_down_does_not_wait
        a_store_that_panics_once_lets_all_parties_go_on
        a_party_with_a_wait_of_zero_waits_for_nobody
        a_party_that_lost_its_place_after_it_agreed_is_told_that_it_may_be_counted
    ]
}

const VERBS: [Verb; 6] = [
    Verb::Count,
    Verb::Enqueue,
    Verb::Inspect,
    Verb::Renew,
    Verb::Watch,
    Verb::Release,
];

async fn lost_requests_and_replies_keep_no_party_back(_: Store) {
    for verb in VERBS {
        for after in 0..6 {
            for lose in [Kit::lose_next_reply, Kit::lose_next_request] {
                let kit = Kit::new();
                let client = || kit.client_with(Locks::builder().op_timeout(STALL));
                let (locks, other) = (client().unwrap(), client().unwrap());
                let first = waits(&locks.barrier("a", 2).wait(SOON));
                tickets(&other, "a", 1).await;
                let second = other.barrier("a", 2).wait(SOON);
                let mut second = Box::pin(second.wait_for_all());
                // The fault hits the next request of this kind. How far the two parties are by then
                // depends on `after`.
                let mut early = None;
                for _ in 0..after {
                    tokio::select! {
                        biased;
                        outcome = &mut second => {
                            early = Some(outcome);
                            break;
                        }
                        () = tokio::task::yield_now() => {}
                    }
                }
                lose(&kit, verb);
                let second = async {
                    match early {
                        Some(outcome) => outcome,
                        None => soon(second).await,
                    }
                };
                let (second, first) = tokio::join!(second, passed(first));
                assert!(second.unwrap().is_leader() && !first, "{verb:?}");
            }
        }
    }
}

async fn lost_requests_and_replies_keep_nobody_inside(_: Store) {
    for verb in VERBS {
        for lose in [Kit::lose_next_reply, Kit::lose_next_request] {
            let kit = Kit::new();
            let client = || kit.client_with(Locks::builder().op_timeout(STALL));
            let (locks, other) = (client().unwrap(), client().unwrap());
            let barrier = |locks: &Locks| locks.double_barrier("a", 2).wait(2 * SOON);
            lose(&kit, verb);
            let (first, second) = (barrier(&locks), barrier(&other));
            let (first, second) = soon(async { tokio::join!(first.enter(), second.enter()) }).await;
            lose(&kit, verb);
            let both = async { tokio::join!(first.unwrap().leave(), second.unwrap().leave()) };
            let (first, second) = soon(both).await;
            assert_eq!(
                (first.unwrap(), second.unwrap()),
                (Left::All, Left::All),
                "{verb:?}"
            );
        }
    }
}

/// Two processes, and in each of them a barrier for two parties.
fn two() -> (Kit, Barrier, Kit, Barrier) {
    let here = Kit::new();
    let there = here.another_process();
    let barrier = |kit: &Kit| kit.client().unwrap().barrier("a", 2).wait(SOON);
    let (ours, theirs) = (barrier(&here), barrier(&there));
    (here, ours, there, theirs)
}

/// How long a party waits. The clock of these facts stands still until a fact advances it by this
/// time.
const WAIT: Duration = Duration::from_secs(60);

/// A client of a kit whose clock stands still. After [`WAIT`] no renewal is due yet, and no request
/// has timed out.
fn patient(kit: &Kit) -> Locks {
    kit.clock().stop();
    let builder = Locks::builder().ttl(60 * WAIT).op_timeout(10 * WAIT);
    kit.client_with(builder).unwrap()
}

/// The list of each party is held back. Then both parties find the round complete, and both change
/// the counter.
async fn a_list_that_is_late_or_doubled_lets_no_party_go_on_alone_or_twice(_: Store) {
    let here = Kit::new();
    let there = here.another_process();
    let (locks, other) = (patient(&here), patient(&there));
    let watches = here.another_process().client().unwrap();
    for _ in 0..3 {
        let mut looks = [
            here.hold_next(Verb::Inspect),
            there.hold_next(Verb::Inspect),
        ];
        let parties = [&locks, &other].map(|locks| waits(&locks.barrier("a", 2).wait(WAIT)));
        for look in &mut looks {
            soon(look.arrived()).await;
        }
        assert!(parties.iter().all(|party| !party.is_finished()));

        for look in looks {
            look.let_go();
        }

        let mut leaders = 0;
        for party in parties {
            leaders += u32::from(passed(party).await);
        }
        assert_eq!(leaders, 1);
        tickets(&watches, "a", 0).await;
    }
    // No complete round is left over that a single party could use.
    let mut list = here.hold_next(Verb::Inspect);
    let alone = waits(&locks.barrier("a", 2).wait(WAIT));
    soon(list.arrived()).await;
    list.let_go();
    assert!(passed(waits(&other.barrier("a", 2).wait(WAIT))).await);
    assert!(!passed(alone).await);
}

async fn a_list_from_before_a_party_gave_up_does_not_count_it(_: Store) {
    let (here, late) = (Kit::new(), LateAnswers::default());
    let there = here.another_process();
    let locks = patient(&here);
    let first = waits(&locks.barrier("a", 2).wait(WAIT));
    tickets(&locks, "a", 1).await;
    // The second party has requested the list, and the store has answered that both are there. The
    // answer is held back.
    let mut list = late.hold_list(2);
    let mut second = waits(&late.client_of(&there).barrier("a", 2).wait(6 * SOON));
    list.is_made().await;

    here.clock().advance(WAIT);
    assert_eq!(kind(soon(first).await.unwrap()), ErrorKind::Timeout);
    tickets(&locks, "a", 1).await;
    let mut another_place = there.hold_next(Verb::Enqueue);
    list.let_go();

    tokio::select! {
        early = &mut second => panic!("it went on alone: {early:?}"),
        () = another_place.arrived() => {}
    }
    another_place.let_go();
    let third = waits(&locks.barrier("a", 2).wait(WAIT));
    assert_ne!(passed(third).await, passed(second).await, "one leads");
}

async fn a_party_that_gave_up_before_the_round_was_proposed_is_not_in_it(_: Store) {
    let here = Kit::new();
    let there = here.another_process();
    let locks = patient(&here);
    let first = waits(&locks.barrier("a", 2).wait(WAIT));
    tickets(&locks, "a", 1).await;
    // The second party reads the counter and sees two places. Its proposal is held back, and it
    // does not send the proposal a second time.
    let mut read = there.hold_next(Verb::Count);
    let mut second = waits(&patient(&there).barrier("a", 2).wait(2 * WAIT));
    soon(read.arrived()).await;
    let mut proposal = there.hold_next(Verb::Count);
    read.let_go();
    soon(proposal.arrived()).await;

    here.clock().advance(WAIT);
    assert_eq!(kind(soon(first).await.unwrap()), ErrorKind::Timeout);
    tickets(&locks, "a", 1).await;
    let mut another_place = there.hold_next(Verb::Enqueue);
    proposal.let_go();

    tokio::select! {
        early = &mut second => panic!("it went on alone: {early:?}"),
        () = another_place.arrived() => {}
    }
    another_place.let_go();
    let third = waits(&locks.barrier("a", 2).wait(WAIT));
    assert_ne!(passed(third).await, passed(second).await, "one leads");
}

/// The first party agrees to the round. Its list is held back, so the second party completes the
/// round.
async fn a_party_whose_time_is_over_goes_on_if_it_was_counted(_: Store) {
    let here = Kit::new();
    let there = here.another_process();
    let (locks, other) = (patient(&here), patient(&there));
    let mut watch = here.hold_next(Verb::Watch);
    let first = waits(&locks.barrier("a", 2).wait(WAIT));
    soon(watch.arrived()).await;
    let mut agrees = here.hold_next(Verb::Renew);
    watch.let_go();
    let second = waits(&other.barrier("a", 2).wait(2 * WAIT));
    soon(agrees.arrived()).await;
    let mut list = here.hold_next(Verb::Inspect);
    agrees.let_go();
    soon(list.arrived()).await;
    // The second party lists again after a pause.
    eventually("the second goes on", SOON, async || {
        here.clock().advance(A_FEW_MILLIS);
        second.is_finished()
    })
    .await;
    assert!(passed(second).await);
    assert!(!first.is_finished());

    here.clock().advance(WAIT);

    assert!(!passed(first).await);
    drop(list);
}

/// A party that has agreed gives the proposed round up after its wait. If the store does not
/// answer, it waits for one operation timeout.
async fn a_party_does_not_wait_much_longer_than_it_was_told(_: Store) {
    const OP_TIMEOUT: Duration = Duration::from_secs(5);
    const BRIEF: Duration = Duration::from_secs(20);
    let here = Kit::new();
    let there = here.another_process();
    here.clock().stop();
    let builder = Locks::builder().ttl(60 * WAIT).op_timeout(OP_TIMEOUT);
    let locks = here.client_with(builder).unwrap();
    let other = patient(&there);
    let mut never_agrees = there.hold_next(Verb::Renew);
    let second = waits(&other.barrier("a", 2).wait(2 * WAIT));
    tickets(&other, "a", 1).await;
    let first = waits(&locks.barrier("a", 2).wait(BRIEF));
    soon(never_agrees.arrived()).await;
    eventually("the first agrees", SOON, async || {
        let places = other.inspect("a").await.unwrap();
        places.iter().any(|place| place.permits == 2)
    })
    .await;

    // From here on the store does not answer what the first party asks about the counter.
    let held = [(); 50].map(|()| here.hold_next(Verb::Count));
    here.clock().advance(BRIEF);
    eventually("the first gives up", SOON, async || {
        here.clock().advance(OP_TIMEOUT / 10);
        first.is_finished()
    })
    .await;

    let error = soon(first).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
    drop(held);
    // The keeper releases the ticket of the party. If it has to repeat the release, it pauses until
    // the clock has moved. It must not wait for the end of the lease.
    eventually("the place is free", SOON, async || {
        here.clock().advance(A_FEW_MILLIS);
        other.inspect("a").await.unwrap().len() == 1
    })
    .await;
    second.abort();
}

/// A store keeps a counter that nobody uses for 30 days.
async fn a_party_that_stays_inside_for_long_can_leave(_: Store) {
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);
    let kit = Kit::new();
    let locks = kit.client_with(Locks::builder().ttl(4 * DAY)).unwrap();
    let barrier = locks.double_barrier("a", 2).wait(100 * DAY);
    let (first, second) = tokio::join!(barrier.enter(), barrier.enter());
    let (first, second) = (first.unwrap(), second.unwrap());
    for day in 0..32 {
        kit.clock().advance(DAY);
        eventually("it is renewed", SOON, async || {
            [&first, &second]
                .iter()
                .all(|party| party.remaining() > 5 * DAY / 2)
        })
        .await;
        assert!(first.is_valid() && second.is_valid(), "day {day}");
    }

    let (first, second) = soon(async { tokio::join!(first.leave(), second.leave()) }).await;

    assert_eq!((first.unwrap(), second.unwrap()), (Left::All, Left::All));
}

async fn a_store_that_has_lost_its_data_lets_nobody_go_on(_: Store) {
    for breaks in [false, true] {
        let (here, ours, _, theirs) = two();
        let other = here.client().unwrap();
        // In one case a first round has created the counter. In the other case there is no counter
        // yet.
        if breaks {
            let (one, two) = tokio::join!(ours.wait_for_all(), theirs.wait_for_all());
            assert!(one.is_ok() && two.is_ok());
            tickets(&other, "a", 0).await;
        }
        let old = waits(&ours);
        tickets(&other, "a", 1).await;

        here.lose_data();
        if breaks {
            here.break_connections();
        }
        let news = [waits(&theirs), waits(&theirs)];
        let all = [old].into_iter().chain(news).enumerate();
        let mut parties: FuturesUnordered<_> = all
            .map(|(at, party)| async move { (at, party.await.unwrap()) })
            .collect();

        // Two pass. The old party is one of them only if it has taken another place in time. If it
        // has agreed before it found its place lost, it cannot know.
        let is_told = |at: usize, error: Error| {
            assert_eq!(at, 0, "{error}");
            let is_told = matches!(
                error.kind(),
                ErrorKind::Unavailable | ErrorKind::Unknown | ErrorKind::Lost(LostReason::Taken)
            );
            assert!(is_told, "{error}");
        };
        let mut passed = 0;
        while passed < 2 {
            match soon(parties.next()).await.unwrap() {
                (_, Ok(_)) => passed += 1,
                (at, Err(error)) => is_told(at, error),
            }
        }
        // The third gets an error, or waits at another place.
        if !parties.is_empty() {
            let waits = eventually("it waits", SOON, async || {
                // This connection may have been broken too.
                let places = other.inspect("a").await;
                places.is_ok_and(|places| places.len() == 1)
            });
            tokio::select! {
                third = parties.next() => {
                    let (at, outcome) = third.unwrap();
                    is_told(at, outcome.expect_err("it went on as a third of two"));
                }
                () = waits => {}
            }
        }
    }
}

async fn a_party_that_was_frozen_beyond_its_lease_joins_the_next_round(_: Store) {
    let (here, ours, there, theirs) = two();
    let other = here.client().unwrap();
    let frozen = waits(&theirs.wait(6 * SOON));
    tickets(&other, "a", 1).await;

    there.freeze();
    here.clock().advance(Duration::from_secs(20));
    let (one, two) = tokio::join!(ours.wait_for_all(), ours.wait_for_all());
    assert!(one.is_ok() && two.is_ok());
    there.thaw();

    // It has another place.
    tickets(&other, "a", 1).await;
    assert!(!frozen.is_finished(), "it went on as a third of two");
    let next = waits(&ours);
    assert_ne!(passed(next).await, passed(frozen).await, "one leads");
}

async fn a_client_that_is_shut_down_does_not_wait(_: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    let waiting = waits(&locks.barrier("a", 2).wait(6 * SOON));
    tickets(&kit.client().unwrap(), "a", 1).await;

    locks.shutdown(Duration::from_secs(1)).await.unwrap();

    let kind = kind(soon(waiting).await.unwrap());
    assert_eq!(kind, ErrorKind::Lost(LostReason::Shutdown));
}

/// The clock stands still, so no wait ends.
async fn a_party_with_a_wait_of_zero_waits_for_nobody(_: Store) {
    let kit = Kit::new();
    let there = kit.another_process();
    let (locks, other) = (patient(&kit), patient(&there));
    let alone = locks.barrier("a", 2).wait(Duration::ZERO);
    assert_eq!(kind(soon(alone.wait_for_all()).await), ErrorKind::Timeout);
    tickets(&locks, "a", 0).await;

    let first = locks.double_barrier("b", 2).wait(WAIT);
    let first = tokio::spawn(async move { first.enter().await });
    tickets(&other, "b", 1).await;
    let second = other.double_barrier("b", 2).wait(Duration::ZERO);
    let second = soon(second.enter()).await.unwrap();
    let first = soon(first).await.unwrap().unwrap();

    assert_eq!(kind(soon(second.leave()).await), ErrorKind::Timeout);
    assert_eq!(soon(first.leave()).await.unwrap(), Left::NotAll);
}

/// The first party agrees and is frozen. The second gives the proposal up when both leases are over.
async fn a_party_that_lost_its_place_after_it_agreed_is_told_that_it_may_be_counted(_: Store) {
    let (here, ours, there, theirs) = two();
    let other = here.client().unwrap();
    let frozen = waits(&theirs.wait(6 * SOON));
    tickets(&other, "a", 1).await;
    let mut agrees = here.hold_next(Verb::Renew);
    let second = waits(&ours.wait(6 * SOON));
    soon(agrees.arrived()).await;
    let places = async || other.inspect("a").await.unwrap();
    eventually("the first agrees", SOON, async || {
        places().await.iter().any(|place| place.permits == 2)
    })
    .await;
    let last = places().await.iter().map(|place| place.ticket).max();

    there.freeze();
    here.clock().advance(Duration::from_secs(20));
    agrees.let_go();
    eventually("the second has another place", SOON, async || {
        places().await.iter().any(|place| Some(place.ticket) > last)
    })
    .await;
    there.thaw();

    let error = soon(frozen).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
    assert!(error.to_string().contains("lost"), "{error}");
    second.abort();
}

/// A store that panics when the keeper of a client sends the next request with this verb.
#[derive(Debug)]
struct Panics {
    connection: Arc<dyn Connection>,
    at: Arc<Mutex<Option<Verb>>>,
}

impl Panics {
    fn meet(&self, verb: Verb) {
        let mut at = self.at.lock().unwrap();
        let is_keeper = std::thread::current().name() == Some("lockcore-keeper");
        if is_keeper && *at == Some(verb) {
            *at = None;
            drop(at);
            panic!("on purpose: {verb:?}");
        }
    }
}

impl Connection for Panics {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.connection)
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        self.meet(Verb::Inspect);
        self.connection.inspect(name)
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        self.meet(Verb::Count);
        self.connection.count(count)
    }

    fn watch(&self, name: Name) -> Answer<()> {
        self.meet(Verb::Watch);
        self.connection.watch(name)
    }
}

/// Parties of one client wait for the lists and the looks that its keeper makes.
async fn a_store_that_panics_once_lets_all_parties_go_on(_: Store) {
    for verb in [Verb::Inspect, Verb::Count, Verb::Watch] {
        let at = Arc::new(Mutex::new(Some(verb)));
        let panics = Arc::clone(&at);
        let store = around(Arc::new(Kit::new()), move |connection| Panics {
            connection,
            at: Arc::clone(&panics),
        });
        let locks = Locks::with_backend(store).unwrap();

        let parties = [(); 2].map(|()| waits(&locks.barrier("a", 2).wait(2 * SOON)));

        let [first, second] = parties;
        assert_ne!(passed(first).await, passed(second).await, "{verb:?}");
        assert_eq!(*at.lock().unwrap(), None, "it has not panicked");
    }
}
