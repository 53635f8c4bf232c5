//! Tests of barriers: no party passes before all parties have come. A party that has given up or
//! died is not counted.

mod double;
mod kit;
mod processes;
mod servers;

use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::barrier::{Barrier, BarrierWaitResult};
use lockcore::{Error, ErrorKind};
use tokio::task::JoinHandle;

use crate::giving_up::polled;
use crate::store::{DEFAULT, Kind, LEASE, SOON, Store, kind, soon, tickets};

pub(crate) use self::kit::facts as facts_of_the_kit;
pub(crate) use self::processes::facts as facts_of_processes;
pub(crate) use self::servers::facts as facts_of_servers;

/// Facts about one process, for stores with counters.
pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store, DEFAULT;
        all_go_on_when_the_last_has_come_and_it_is_the_leader
        one_party_too_few_does_not_go_on
        parties_that_give_up_are_not_counted
        a_party_that_comes_alone_again_and_again_never_goes_on
        more_parties_than_one_round_has_make_up_several
        parties_that_come_again_and_again_stay_together
        a_party_dropped_at_any_poll_frees_its_place
        a_barrier_that_is_not_usable_is_refused
    ];
    facts.extend(double::facts(store));
    if store.capability().resizes {
        facts.extend(crate::store_facts![store, DEFAULT;
            a_name_with_a_stored_capacity_is_refused_and_later_rounds_are_whole
        ]);
    }
    facts
}

/// How long a party waits that must give up, in facts that do not depend on its error.
const BRIEF: Duration = Duration::from_secs(1);

/// The wait of a party that must get [`ErrorKind::Timeout`]. A party whose enqueue has no answer
/// when its wait is over gets another error. So this wait is longer than a stall of a busy machine:
/// one of 1.8 s was seen.
const ANSWERED: Duration = Duration::from_secs(5);

type Waiting = JoinHandle<Result<BarrierWaitResult, Error>>;

/// A party that waits in a task.
fn waits(barrier: &Barrier) -> Waiting {
    let barrier = barrier.clone();
    tokio::spawn(async move { barrier.wait_for_all().await })
}

async fn passed(waiting: Waiting) -> bool {
    soon(waiting).await.unwrap().unwrap().is_leader()
}

async fn all_go_on_when_the_last_has_come_and_it_is_the_leader(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let here = locks.barrier("a", 3).wait(2 * SOON);
    for round in 0..5 {
        let first = waits(&here);
        tickets(&other, "a", 1).await;
        let second = waits(&other.barrier("a", 3).wait(2 * SOON));
        tickets(&other, "a", 2).await;
        assert!(!first.is_finished() && !second.is_finished(), "{round}");

        let last = soon(here.wait_for_all()).await.unwrap();

        assert!(last.is_leader());
        assert!(!passed(first).await && !passed(second).await);
        tickets(&locks, "a", 0).await;
    }
}

/// Each party has its place long before its wait is over, and learns that it was not counted.
async fn one_party_too_few_does_not_go_on(store: Store) {
    let locks = store.client();
    let barrier = locks.barrier("a", 3);
    let brief = barrier.clone().wait(ANSWERED);

    let (one, two) = tokio::join!(brief.wait_for_all(), brief.wait_for_all());

    assert_eq!(kind(one), ErrorKind::Timeout);
    let error = two.unwrap_err();
    assert_eq!(
        (error.kind(), error.name()),
        (ErrorKind::Timeout, Some("a"))
    );
    tickets(&locks, "a", 0).await;
    // The barrier is ready for the next round.
    let three = [(); 3].map(|()| waits(&barrier));
    for party in three {
        passed(party).await;
    }
}

/// If the barrier counted a party that has given up, a later party would pass with it, and get no
/// error. Which error a party gets when it gives up depends on how fast the store answers.
async fn parties_that_give_up_are_not_counted(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let barrier = locks.barrier("a", 2).wait(BRIEF);
    for number in 0..4 {
        let barrier = match number % 2 {
            0 => barrier.clone(),
            _ => other.barrier("a", 2).wait(BRIEF),
        };
        let outcome = barrier.wait_for_all().await;
        assert!(outcome.is_err(), "party {number}: {outcome:?}");
    }
    tickets(&locks, "a", 0).await;
}

/// The keeper may not have released the places of the earlier calls yet.
async fn a_party_that_comes_alone_again_and_again_never_goes_on(store: Store) {
    const TRIES: u64 = 100;
    let locks = store.client();
    let (barrier, double) = (locks.barrier("a", 2), locks.double_barrier("b", 2));
    for number in 0..TRIES {
        // The calls end at different steps.
        let time = Duration::from_millis(1 + number % 25);
        let waited = tokio::time::timeout(time, barrier.wait_for_all());
        let entered = tokio::time::timeout(time, double.enter());

        let (waited, entered) = tokio::join!(waited, entered);

        assert!(!matches!(waited, Ok(Ok(_))), "try {number}: it went on");
        assert!(!matches!(entered, Ok(Ok(_))), "try {number}: it entered");
    }
    tickets(&locks, "a", 0).await;
    tickets(&locks, "b", 0).await;
}

async fn more_parties_than_one_round_has_make_up_several(store: Store) {
    let clients = [store.client(), store.client()];
    let parties: Vec<_> = (0..12)
        .map(|number| waits(&clients[number % 2].barrier("a", 3).wait(2 * SOON)))
        .collect();
    let mut leaders = 0;
    for party in parties {
        leaders += u32::from(passed(party).await);
    }
    assert_eq!(leaders, 4);
    tickets(&clients[0], "a", 0).await;
}

async fn parties_that_come_again_and_again_stay_together(store: Store) {
    const ROUNDS: usize = 20;
    let parties = (0..3).map(|_| {
        let barrier = store.client().barrier("a", 3).wait(2 * SOON);
        tokio::spawn(async move {
            let mut leads = 0;
            for _ in 0..ROUNDS {
                leads += usize::from(barrier.wait_for_all().await.unwrap().is_leader());
            }
            leads
        })
    });
    let parties: Vec<_> = parties.collect();
    let mut leads = 0;
    for party in parties {
        leads += party.await.unwrap();
    }
    assert_eq!(leads, ROUNDS, "one in each round");
}

async fn a_party_dropped_at_any_poll_frees_its_place(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let barrier = locks.barrier("a", 2).wait(2 * SOON);
    // A round may count a party whose future is dropped. So this party enters the barrier again
    // after each round.
    let again = other.barrier("a", 2).wait(6 * SOON);
    let stays = tokio::spawn(async move {
        loop {
            let _ = again.wait_for_all().await.unwrap();
        }
    });
    for polls in 1.. {
        tickets(&locks, "a", 1).await;
        if let Some(outcome) = polled(barrier.wait_for_all(), polls).await {
            let _ = outcome.unwrap();
            println!("{} drops", polls - 1);
            break;
        }
    }
    tickets(&locks, "a", 1).await;
    stays.abort();
    tickets(&locks, "a", 0).await;
}

async fn a_barrier_that_is_not_usable_is_refused(store: Store) {
    let locks = store.client();
    for (name, parties) in [
        ("a", 0),
        ("a", Barrier::MAX_PARTIES + 1),
        ("a", u32::MAX),
        ("", 2),
    ] {
        let refused = locks.barrier(name, parties).wait_for_all().await;
        assert_eq!(kind(refused), ErrorKind::Config, "{name:?} {parties}");
    }
    let no_lease = locks.barrier("a", 2).ttl(Duration::ZERO);
    assert_eq!(kind(no_lease.wait_for_all().await), ErrorKind::Config);

    let two = waits(&locks.barrier("a", 2).ttl(LEASE));
    tickets(&locks, "a", 1).await;
    let three = locks.barrier("a", 3).wait_for_all().await.unwrap_err();
    assert_eq!(three.kind(), ErrorKind::CapacityMismatch);
    let told = three.to_string();
    assert!(
        told.contains("for 3 parties") && told.contains("for 2 parties"),
        "{told}"
    );
    assert_eq!(
        kind(locks.mutex("a").acquire().await),
        ErrorKind::CapacityMismatch
    );
    soon(locks.barrier("a", 2).wait_for_all()).await.unwrap();
    passed(two).await;
    // A round of one party.
    let alone = soon(locks.barrier("b", 1).wait_for_all()).await;
    assert!(alone.unwrap().is_leader());
}

/// If the capacity were larger than the barrier needs, a third party would get a place too. Then
/// the parties could not know which of them are in the same round.
async fn a_name_with_a_stored_capacity_is_refused_and_later_rounds_are_whole(store: Store) {
    let (locks, operator) = (store.client(), store.client());
    let pool = operator.semaphore("a", 6);
    let barrier = locks.barrier("a", 2).wait(6 * SOON);
    let double = locks.double_barrier("a", 2).wait(6 * SOON);
    for capacity in [9, 100] {
        pool.resize(capacity).await.unwrap();

        let one = soon(barrier.wait_for_all()).await.unwrap_err();

        let told = (one.kind(), one.name());
        assert_eq!(told, (ErrorKind::CapacityMismatch, Some("a")));
        let several = [(); 3].map(|()| waits(&barrier));
        for party in several {
            let refused = soon(party).await.unwrap();
            assert_eq!(kind(refused), ErrorKind::CapacityMismatch);
        }
        let entered = soon(double.enter()).await.map(drop);
        assert_eq!(kind(entered), ErrorKind::CapacityMismatch);
        tickets(&locks, "a", 0).await;
    }

    pool.forget_capacity().await.unwrap();

    let parties = [(); 4].map(|()| waits(&barrier));
    let mut leaders = 0;
    for party in parties {
        leaders += u32::from(passed(party).await);
    }
    assert_eq!(leaders, 2);
    tickets(&locks, "a", 0).await;
}
