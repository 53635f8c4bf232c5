//! The processes below this one: all that a command has started, in whatever process group.
//!
//! This process is the parent of each orphan below it (see `child`). So nothing that a command has
//! started gets out of the tree while this process lives. A process that begins a session of its
//! own, as a daemon does, is not in the tree: it has left on purpose.

use std::fs;

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
/// if the system does not show the processes in `/proc`.
///
/// The kernel lists processes by number, and a process has mostly a greater number than its parent.
/// So the parent is read first. If it ends then, its child has this process as its parent when it is
/// read, and is found too.
pub(crate) fn below() -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let all: Vec<_> = numbers
        .filter_map(Pid::from_raw)
        .filter_map(Process::read)
        .collect();
    below_of(getpid(), &all)
}

fn below_of(root: Pid, all: &[Process]) -> Vec<Process> {
    let mut tree: Vec<_> = all.iter().filter(|it| it.pid == root).copied().collect();
    let mut next = 0;
    while let Some(parent) = tree.get(next).copied() {
        let is_child =
            |it: &&Process| it.parent == parent.pid.as_raw_pid() && it.session == parent.session;
        tree.extend(all.iter().filter(is_child));
        next += 1;
    }
    tree.retain(|it| it.pid != root && !it.is_over);
    tree
}

impl Process {
    /// The number of a process that has ended is given to a new one when all other numbers were
    /// given. So the process is looked at again right before.
    pub(crate) fn signal(self, signal: Signal) -> Result<(), Errno> {
        let is_same = |now: Self| now.began == self.began;
        match Self::read(self.pid).is_some_and(is_same) {
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

    /// Reads `pid (name) state parent group session …`, where the start is field 22. The name may have
    /// spaces and brackets.
    fn parse(pid: Pid, stat: &str) -> Option<Self> {
        let (_, behind) = stat.rsplit_once(") ")?;
        let mut fields = behind.split(' ');
        let state = fields.next()?;
        let parent = fields.next()?.parse().ok()?;
        let session = fields.nth(1)?.parse().ok()?;
        let began = fields.nth(15)?.parse().ok()?;
        Some(Self {
            pid,
            parent,
            session,
            began,
            is_over: matches!(state, "Z" | "X"),
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

    #[test]
    fn a_name_with_brackets_hides_nothing() {
        let stat = |name: &str, state: &str| {
            let numbers = "7 12 3 34816 12 4194304 98 0 0 0 1 2 3 4 20 0 1 0 500 2523136 128";
            Process::parse(pid(12), &format!("12 ({name}) {state} {numbers}"))
        };

        assert_eq!(stat("a) Z 1 (b", "S"), Some(process(12, 7, 3)));
        assert!(stat("sh", "Z").unwrap().is_over);
        assert_eq!(Process::parse(pid(12), "12"), None);
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

        let numbers = |root| -> Vec<_> {
            let tree = below_of(pid(root), &all).into_iter();
            tree.map(|found| found.pid.as_raw_pid()).collect()
        };

        assert_eq!(numbers(12), [13, 16, 9]);
        assert_eq!(numbers(99), [] as [i32; 0]);
    }
}
