//! Tests with processes that share a file: their order, how soon they notice a release, and
//! processes that are killed.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use tests::process::Holder;
use tests::stalls::awake_since;

use super::{client, holder, next_held};
use crate::faults::{patient, patient_holder};
use crate::store::{Kind, LEASE, SOON, Store, assert_nothing_left, begin, give_back, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        processes_that_come_first_at_once_agree_on_one_file
        processes_exclude_each_other_in_the_order_of_their_tickets
        processes_killed_at_random_moments_leave_a_sound_file
        a_release_in_another_process_is_found_within_moments
        after_the_first_in_line_gives_up_the_next_rechecks_a_dead_holder
    ]
}

async fn processes_that_come_first_at_once_agree_on_one_file(store: Store) {
    for round in 0..5 {
        let path = store.file().folder().join(format!("round{round}.db"));
        let url = format!("sqlite:{}", path.display());
        let mut holders: Vec<_> = (0..6)
            .map(|_| patient_holder(&url, "a", 3 * SOON))
            .collect();
        for holder in &mut holders {
            holder.ask_to_acquire();
        }

        one_after_another(&mut holders, 1);
    }
}

/// Four real processes. Each of them enqueues again as soon as it has released.
async fn processes_exclude_each_other_in_the_order_of_their_tickets(store: Store) {
    let url = store.file().url();
    let mut holders: Vec<_> = (0..4)
        .map(|_| patient_holder(&url, "a", 3 * SOON))
        .collect();
    for holder in &mut holders {
        holder.ask_to_acquire();
    }

    let rounds = if tests::fact::long() { 500 } else { 50 };
    one_after_another(&mut holders, rounds);
    assert_nothing_left(&store, &client(&store), "a").await;
}

/// Each process holds `rounds` times. While one of them holds, no other does, and the tokens rise.
fn one_after_another(holders: &mut [Holder], rounds: usize) {
    let mut left = vec![rounds; holders.len()];
    let mut last = 0;
    while left.iter().any(|left| *left > 0) {
        let (at, token) = next_held(holders);
        assert!(token > last, "{token} after {last}");
        last = token;
        for (other, holder) in holders.iter_mut().enumerate() {
            let heard = holder.process().hear(Duration::from_millis(1));
            assert_eq!(heard, None, "{other} holds while {at} does");
        }
        left[at] -= 1;
        holders[at].process().say("release");
        if left[at] > 0 {
            holders[at].ask_to_acquire();
        }
        assert_eq!(holders[at].process().expect("RELEASED", SOON), "Released");
    }
}

/// A kill may come in the middle of a transaction or a checkpoint.
async fn processes_killed_at_random_moments_leave_a_sound_file(store: Store) {
    let mut random = fastrand::Rng::with_seed(5);
    let rounds = if tests::fact::long() { 300 } else { 30 };
    let url = store.file().url();
    let locks = client(&store);
    for round in 0..rounds {
        let mut dying = patient_holder(&url, "a", Duration::from_millis(100));
        dying.acquire();
        for _ in 0..400 {
            dying.process().say("release");
            dying.process().say("acquire");
        }
        // The process is killed in the middle of these commands. It continues while the test reads
        // its answers.
        for _ in 0..random.u32(..40) {
            let answer = dying.process().hear(SOON);
            assert!(answer.is_some(), "it does not answer");
        }
        dying.kill();

        let lock = locks.mutex("a").wait(SOON);
        let guard = lock.acquire().await.unwrap();
        assert!(guard.is_valid(), "round {round}");
        give_back(guard).await;
    }
    assert_eq!(store.file().query("PRAGMA integrity_check"), ["ok"]);
    assert_nothing_left(&store, &locks, "a").await;
}

/// After this time a waiter reads the file at its slowest pace. No event shows these reads, so the
/// test sleeps.
const SLOWED_DOWN: Duration = Duration::from_secs(1);

/// The number of rounds in which the waiter has slowed down.
const SLOW_ROUNDS: usize = 3;

/// A rough version of the hand-over benchmark. Its limits are wide, because this machine runs other
/// tests as well.
async fn a_release_in_another_process_is_found_within_moments(store: Store) {
    let locks = client(&store);
    let mut took = Vec::new();
    for round in 0..20 {
        let mut other = holder(&store, "a");
        other.acquire();
        let lock = locks.mutex("a").ttl(LEASE).wait(SOON);
        let waiter = tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            (guard, Instant::now())
        });
        tickets(&locks, "a", 2).await;
        if round < SLOW_ROUNDS {
            tokio::time::sleep(SLOWED_DOWN).await;
        }
        other.release();
        let released = Instant::now();
        let (guard, held) = waiter.await.unwrap();
        took.push(held.saturating_duration_since(released));
        // The lease of the grant has its whole time. The releaser had shortened it, and the new
        // holder has extended it again.
        assert!(locks.inspect("a").await.unwrap()[0].remaining > LEASE - SOON);
        give_back(guard).await;
    }
    // A pace that is too slow shows in most of these rounds, and a stall of the machine in one.
    let mut slowed = took[..SLOW_ROUNDS].to_vec();
    slowed.sort();
    let middle = slowed[SLOW_ROUNDS / 2];
    assert!(middle < Duration::from_millis(500), "{took:?}");
    took.sort();
    println!(
        "release in another process to the next holder: {:?} in the middle of 20",
        took[10]
    );
    assert!(took[10] < Duration::from_millis(100), "{took:?}");
}

/// The next waiter rechecks when the dead holder's lease ends. It does not wait for its own
/// renewal, a third of its ttl away. This waiter is in this process, or in another one.
async fn after_the_first_in_line_gives_up_the_next_rechecks_a_dead_holder(store: Store) {
    let (url, long) = (store.file().url(), Duration::from_secs(60));
    let client = || patient(&url).ttl(long).build().unwrap();
    let locks = client();
    for elsewhere in [false, true] {
        let ttl = Duration::from_secs(5);
        let mut dying = patient_holder(&url, "a", ttl);
        dying.acquire();
        let first = begin(locks.mutex("a").wait(3 * SOON));
        tickets(&locks, "a", 2).await;
        let mut other = patient_holder(&url, "a", long);
        let here = match elsewhere {
            true => {
                other.ask_to_acquire();
                None
            }
            false => Some(begin(client().mutex("a").wait(3 * SOON))),
        };
        tickets(&locks, "a", 3).await;

        dying.kill();
        let died = Instant::now();
        first.abort();
        match here {
            Some(here) => give_back(here.await.unwrap().unwrap()).await,
            None => {
                other.held(3 * SOON);
                other.release();
            }
        }

        let took = awake_since(died);
        assert!(took < ttl + SOON, "elsewhere {elsewhere}: {took:?}");
    }
}
