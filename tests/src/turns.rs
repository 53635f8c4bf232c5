//! The record of a contended lock: when each task requested it, held it and released it. `load`
//! writes the record. `bench` reads and evaluates it. It finds overlaps from these times alone,
//! independently of the lock.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use crate::measure::{Durations, seconds};

/// One acquisition, or a wait without a grant. Times are nanoseconds of
/// [`now`](crate::measure::now).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    pub asked: u64,
    /// Zero if the task was waiting at the end.
    pub acquired: u64,
    /// Just before the call of `release`.
    pub release_called: u64,
    pub task: u64,
}

/// The size of a [`Turn`] in a file: its fields in this order, little-endian.
const ROW: usize = 4 * size_of::<u64>();

pub fn write<'a>(
    turns: impl IntoIterator<Item = &'a Turn>,
    file: &mut impl Write,
) -> io::Result<()> {
    for turn in turns {
        for field in [turn.asked, turn.acquired, turn.release_called, turn.task] {
            file.write_all(&field.to_le_bytes())?;
        }
    }
    Ok(())
}

pub fn read(file: &mut impl Read) -> io::Result<Vec<Turn>> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let (rows, rest) = bytes.as_chunks::<ROW>();
    if !rest.is_empty() {
        return Err(io::Error::other("the last row is cut off"));
    }
    Ok(rows
        .iter()
        .map(|row| {
            let (fields, _) = row.as_chunks();
            Turn {
                asked: u64::from_le_bytes(fields[0]),
                acquired: u64::from_le_bytes(fields[1]),
                release_called: u64::from_le_bytes(fields[2]),
                task: u64::from_le_bytes(fields[3]),
            }
        })
        .collect())
}

/// The figures from the turns of all tasks at one lock.
#[derive(Clone, Debug)]
pub struct Contention {
    pub acquisitions: usize,
    /// Hand-overs per second from one holder to the next. The next field counts only those that
    /// went to another task.
    pub hand_overs_s: f64,
    pub true_hand_overs_s: f64,
    /// The acquisitions of the task that had fewest. The next field is for the task that had most.
    pub fewest: usize,
    pub most: usize,
    /// Acquisitions that came before the previous holder called `release`. Each of them means that
    /// the lock failed.
    pub overlaps: usize,
    pub waits: Durations,
    pub still_waiting: usize,
}

impl Contention {
    /// Evaluates the turns of several tasks. Counts acquisitions within `secs` after `start`, and
    /// overlaps at any time.
    pub fn of(turns: &[Turn], start: u64, secs: f64) -> Self {
        let end = start + (secs * 1e9) as u64;
        let mut held: Vec<&Turn> = turns.iter().filter(|turn| turn.acquired != 0).collect();
        held.sort_unstable_by_key(|turn| turn.acquired);
        let mut per_task: BTreeMap<u64, usize> = turns.iter().map(|turn| (turn.task, 0)).collect();
        let (mut hand_overs, mut to_another, mut overlaps, mut free_at) = (0, 0, 0, 0);
        for pair in held.windows(2) {
            let [before, next] = pair else { continue };
            free_at = before.release_called.max(free_at);
            overlaps += usize::from(next.acquired < free_at);
            if (start..end).contains(&next.acquired) {
                hand_overs += 1;
                to_another += u32::from(before.task != next.task);
            }
        }
        held.retain(|turn| (start..end).contains(&turn.acquired));
        for turn in &held {
            *per_task.entry(turn.task).or_default() += 1;
        }
        let length = seconds(end - start);
        Self {
            acquisitions: held.len(),
            hand_overs_s: f64::from(hand_overs) / length,
            true_hand_overs_s: f64::from(to_another) / length,
            fewest: per_task.values().min().copied().unwrap_or(0),
            most: per_task.values().max().copied().unwrap_or(0),
            overlaps,
            waits: Durations::new(held.iter().map(|turn| turn.acquired - turn.asked)),
            still_waiting: turns.iter().filter(|turn| turn.acquired == 0).count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(asked: u64, acquired: u64, release_called: u64, task: u64) -> Turn {
        Turn {
            asked,
            acquired,
            release_called,
            task,
        }
    }

    #[test]
    fn turns_are_read_as_they_were_written() {
        let turns = [turn(1, 2, 3, 4), turn(5, 0, 0, 6)];
        let mut file = Vec::new();

        write(&turns, &mut file).unwrap();

        assert_eq!(read(&mut &file[..]).unwrap(), turns);
        assert!(read(&mut &file[1..]).is_err());
    }

    #[test]
    fn only_hand_overs_to_another_task_are_true() {
        let turns = [
            turn(10, 12, 20, 0),
            turn(21, 22, 30, 0),
            turn(11, 32, 40, 1),
            turn(33, 0, 0, 2),
        ];

        let seen = Contention::of(&turns, 10, 1e-9 * 100.0);

        assert_eq!(seen.acquisitions, 3);
        assert_eq!(seen.hand_overs_s, 2e7);
        assert_eq!(seen.true_hand_overs_s, 1e7);
        assert_eq!((seen.fewest, seen.most), (0, 2));
        assert_eq!((seen.overlaps, seen.still_waiting), (0, 1));
    }

    #[test]
    fn a_holder_inside_another_s_turn_is_an_overlap() {
        let turns = [
            turn(0, 10, 100, 0),
            turn(0, 20, 30, 1),
            turn(0, 50, 60, 2),
            turn(0, 101, 102, 1),
        ];

        assert_eq!(Contention::of(&turns, 0, 1.0).overlaps, 2);
    }
}
