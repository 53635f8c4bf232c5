//! The processes below this one: all that a command has started, in whatever process group.
//!
//! This process is the parent of each orphan below it (see `child`). So nothing that a command has
//! started gets out of the tree while this process lives. A process that begins a session of its
//! own, as a daemon does, is not in the tree: it has left on purpose.

use std::fs;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpid, kill_process};

/// A process as `/proc` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    parent: i32,
    session: i32,
    /// In ticks since the start of the machine.
    began: u64,
    /// It has ended, and its parent has not read how.
    is_over: bool,
}

/// The tree without this process and those that have ended, each parent before its children. Empty
/// if `/proc` does not show the processes, or shows them with the numbers of another namespace.
///
/// It is also without those of `before`, and what they start. What they leave behind when they end
/// is in it: nothing tells such an orphan from one of the command.
///
/// The kernel lists processes by number, and a process has mostly a greater number than its parent.
/// So the parent is read first. If it ends then, its child has this process as its parent when it is
/// read, and is found too.
pub(crate) fn below(before: &[Process]) -> Vec<Process> {
    let own = getpid();
    let number = own.as_raw_pid().to_string();
    if !fs::read_link("/proc/self").is_ok_and(|shown| shown == Path::new(&number)) {
        return Vec::new();
    }
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let all: Vec<_> = numbers
        .filter_map(Pid::from_raw)
        .filter_map(Process::read)
        .collect();
    below_of(own, &all, before)
}

fn below_of(root: Pid, all: &[Process], before: &[Process]) -> Vec<Process> {
    let mut tree: Vec<_> = all.iter().filter(|it| it.pid == root).copied().collect();
    let mut next = 0;
    while let Some(parent) = tree.get(next).copied() {
        let is_child =
            |it: &&Process| it.parent == parent.pid.as_raw_pid() && it.session == parent.session;
        let is_new = |it: &&Process| !before.iter().any(|other| other.is(it));
        tree.extend(all.iter().filter(is_child).filter(is_new));
        next += 1;
    }
    tree.retain(|it| it.pid != root && !it.is_over);
    tree
}

impl Process {
    /// Whether both are the same process. The number of one that has ended is given to a new one
    /// when all other numbers were given.
    fn is(&self, other: &Self) -> bool {
        (self.pid, self.began) == (other.pid, other.began)
    }

    /// Looks right before whether the number still names this process.
    pub(crate) fn signal(self, signal: Signal) -> Result<(), Errno> {
        match Self::read(self.pid).is_some_and(|now| now.is(&self)) {
            true => match kill_process(self.pid, signal) {
                Err(Errno::SRCH) => Ok(()),
                sent => sent,
            },
            false => Ok(()),
        }
    }

    /// `None` if there is no such process.
    fn read(pid: Pid) -> Option<Self> {
        let stat = fs::read(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
        Self::parse(pid, &String::from_utf8_lossy(&stat))
    }

    /// Reads `pid (name) state parent group session …`, where the number of threads is field 20, and
    /// the start is field 22. The name may have spaces and brackets.
    fn parse(pid: Pid, stat: &str) -> Option<Self> {
        let (_, behind) = stat.rsplit_once(") ")?;
        let mut fields = behind.split(' ');
        let state = fields.next()?;
        let parent = fields.next()?.parse().ok()?;
        let session = fields.nth(1)?.parse().ok()?;
        let threads: u32 = fields.nth(13)?.parse().ok()?;
        let began = fields.nth(1)?.parse().ok()?;
        Some(Self {
            pid,
            parent,
            session,
            began,
            // The state is that of the main thread, and others may go on without it.
            is_over: matches!(state, "Z" | "X") && threads < 2,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pid(number: i32) -> Pid {
        Pid::from_raw(number).unwrap()
    }

    fn process(number: i32, parent: i32, session: i32) -> Process {
        let pid = pid(number);
        Process {
            pid,
            parent,
            session,
            began: 500,
            is_over: false,
        }
    }

    fn stat(name: &str, state: &str, threads: u32) -> Option<Process> {
        let (front, back) = (
            "7 12 3 34816 12 4194304 98 0 0 0 1 2 3 4 20 0",
            "0 500 2523136 128",
        );
        let stat = format!("12 ({name}) {state} {front} {threads} {back}");
        Process::parse(pid(12), &stat)
    }

    fn numbers(tree: Vec<Process>) -> Vec<i32> {
        let pids = tree.into_iter().map(|found| found.pid.as_raw_pid());
        pids.collect()
    }

    #[test]
    fn a_name_with_brackets_hides_nothing() {
        assert_eq!(stat("a) Z 1 (b", "S", 1), Some(process(12, 7, 3)));
        assert_eq!(Process::parse(pid(12), "12"), None);
    }

    #[test]
    fn a_process_ends_with_its_last_thread() {
        assert!(stat("sh", "Z", 1).unwrap().is_over);
        assert!(!stat("sh", "Z", 2).unwrap().is_over);
    }

    #[test]
    fn the_tree_has_all_below_but_not_those_that_have_ended_or_left_the_session() {
        let over = Process {
            is_over: true,
            ..process(14, 13, 3)
        };
        let all = [
            process(3, 1, 3),   // the shell
            process(9, 16, 3),  // the numbers have begun again
            process(12, 3, 3),  // this process
            process(13, 12, 3), // the command
            over,
            process(15, 13, 15), // a daemon
            process(16, 13, 3),
            process(17, 3, 3), // another one in the same pipe
            process(18, 15, 15),
        ];

        assert_eq!(numbers(below_of(pid(12), &all, &[])), [13, 16, 9]);
        assert_eq!(numbers(below_of(pid(99), &all, &[])), [] as [i32; 0]);
    }

    #[test]
    fn what_was_there_before_the_command_is_not_in_the_tree() {
        let log = process(13, 12, 3);
        let before_a_new_one = Process {
            began: 400,
            ..process(15, 12, 3)
        };
        let all = [
            process(12, 3, 3), // this process
            log,
            process(14, 13, 3),
            process(15, 12, 3), // the command
            process(16, 15, 3),
        ];

        let tree = below_of(pid(12), &all, &[log, before_a_new_one]);

        assert_eq!(numbers(tree), [15, 16]);
    }
}
