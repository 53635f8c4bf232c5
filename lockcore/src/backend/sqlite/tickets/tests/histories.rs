//! Random requests of two processes, compared with the rule in plain code.

use super::*;
use crate::queue::{NewTicket, NoTicket, Queue};

#[test]
fn random_histories_keep_to_the_rule_and_every_grant_is_told_once() {
    for seed in 0..100 {
        let mut random = fastrand::Rng::with_seed(seed);
        let capacity = random.u32(1..6);
        let folder = tempfile::tempdir().unwrap();
        let mut processes = [Process::start(&folder, 1), Process::start(&folder, 2)];
        let mut rule: Queue<usize> = Queue::default();
        let mut asked: Vec<(Arc<Request>, usize)> = Vec::new();
        for step in 0..60 {
            let at = random.usize(..2);
            let before = holders(&rule);
            let picked = random.usize(..asked.len().max(1));
            let what = random.u8(0..6);
            match (what, asked.get(picked).cloned()) {
                (0..=2, _) | (_, None) => {
                    let other = u32::from(random.u8(..8) == 0);
                    let mut new = request(random.u32(1..=capacity), capacity + other);
                    Arc::get_mut(&mut new).unwrap().wait = random.bool();
                    rule.expire(1);
                    let expected = rule.enqueue(NewTicket {
                        id: new.id,
                        permits: new.permits.get(),
                        capacity: new.capacity.get(),
                        expires_at: 9,
                        floor: 0,
                        wait: new.wait,
                        payload: at,
                    });
                    let answer = processes[at].enqueue(&new).unwrap();
                    match (expected, answer) {
                        (Ok((_, true)), Enqueued::Granted { .. })
                        | (Ok((_, false)), Enqueued::Waiting { .. }) => asked.push((new, at)),
                        (Err(NoTicket::Busy), Enqueued::Busy { .. })
                        | (Err(NoTicket::CapacityMismatch(_)), Enqueued::CapacityMismatch { .. }) =>
                            {}
                        differ => panic!("seed {seed}, step {step}: {differ:?}"),
                    }
                    if let Ok((_, true)) = expected {
                        // The answer tells of the grant of the new ticket, so no wake-up does.
                        let mut granted = newly(&rule, &before);
                        granted.pop();
                        told(&mut processes, &granted, seed, step);
                        continue;
                    }
                }
                (3, Some((old, of))) => {
                    let lives = rule
                        .find(old.id)
                        .is_some_and(|(found, _)| found.expires_at > 1);
                    let known = rule.find(old.id).is_some();
                    let mut renewal = Request::clone(&old);
                    if random.bool() {
                        let most = NonZeroU32::new(random.u32(1..=capacity)).unwrap();
                        renewal.permits = renewal.permits.min(most);
                    }
                    if known {
                        rule.expire(1);
                    }
                    if lives {
                        rule.shrink(old.id, renewal.permits.get());
                    }
                    let expected = lives.then(|| rule.find(old.id).unwrap().1);
                    let answer = processes[of].renew(&Arc::new(renewal));
                    match (expected, answer) {
                        (Some(true), Renewed::Granted { .. }) => {
                            // If the renewed ticket is granted now, the answer tells of it, and no
                            // wake-up does.
                            let mut granted = newly(&rule, &before);
                            granted.retain(|(id, _)| *id != old.id);
                            told(&mut processes, &granted, seed, step);
                            continue;
                        }
                        (Some(false), Renewed::Waiting { .. }) | (None, Renewed::Lost) => {}
                        differ => panic!("seed {seed}, step {step}: {differ:?}"),
                    }
                }
                (4, Some((old, of))) => {
                    let known = rule.find(old.id).is_some();
                    if known {
                        rule.remove(old.id);
                        rule.expire(1);
                    }
                    let answer = processes[of].release(&old, false);
                    assert_eq!(
                        answer == Released::Released,
                        known,
                        "seed {seed}, step {step}"
                    );
                }
                (_, Some((old, _))) => {
                    if let Some((ticket, _)) = rule.find(old.id) {
                        ticket.expires_at = 1;
                    }
                    processes[at].end(&old);
                    continue;
                }
            }
            let granted = newly(&rule, &before);
            told(&mut processes, &granted, seed, step);

            if rule.tickets().all(|(ticket, _)| ticket.expires_at > 1) {
                let expected: Vec<_> = rule
                    .tickets()
                    .map(|(ticket, holds)| (ticket.permits, holds))
                    .collect();
                let places = processes[at].places();
                let found: Vec<_> = places
                    .iter()
                    .map(|place| (place.permits, place.granted))
                    .collect();
                assert_eq!(found, expected, "seed {seed}, step {step}");
                assert!(places.is_sorted_by_key(|place| place.ticket));
            }
        }
    }
}

fn holders(rule: &Queue<usize>) -> Vec<(Id, usize)> {
    rule.holders()
        .map(|ticket| (ticket.id, ticket.payload))
        .collect()
}

fn newly(rule: &Queue<usize>, before: &[(Id, usize)]) -> Vec<(Id, usize)> {
    let mut holders = holders(rule);
    holders.retain(|holder| !before.contains(holder));
    holders
}

/// Checks that each process gets a wake-up for each of its own new grants, or finds them when it
/// checks the file. It must get no other wake-ups.
fn told(processes: &mut [Process; 2], granted: &[(Id, usize)], seed: u64, step: u32) {
    for (at, process) in processes.iter_mut().enumerate() {
        look(&mut process.file, &mut process.wakes).unwrap();
        let mut expected: Vec<Id> = granted
            .iter()
            .filter(|(_, of)| *of == at)
            .map(|(id, _)| *id)
            .collect();
        let mut told = process.told();
        expected.sort();
        told.sort();
        assert_eq!(told, expected, "seed {seed}, step {step}, process {at}");
    }
}
