//! The resource that a lock protects. It notices when visits overlap, and it does not use the lock.
//! A test must begin a visit after the lock was granted, and end the visit before the lock is
//! released. So an overlap means that the lock failed.
//!
//! [`Witness`] watches inside one process, and [`FileWitness`] across several. [`FencedResource`]
//! refuses writes with old tokens. If a process may be *frozen* during its visit, use
//! [`FencedResource`]. The visit of a frozen process does not end when the lease ends. So both
//! witnesses would report an overlap although no lock has failed.

use std::fs::{self, File, TryLockError};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use lockcore::testing::conformance::{Visit, Witness};

/// Notices overlaps among processes of one machine. All of them must use the same folder.
///
/// A visit takes `flock`s. If another visit has one of them already, the visits overlap. So the
/// witness compares no clocks. If a process is killed during its visit, the kernel ends the visit.
/// If a process is *frozen*, its visit does not end: for such processes use a [`FencedResource`].
#[derive(Debug)]
pub struct FileWitness {
    folder: PathBuf,
}

/// A visit to the resource. It ends when this value is dropped or the process dies.
#[derive(Debug)]
#[must_use = "the visit ends when this is dropped"]
pub struct FileVisit {
    locked: Vec<File>,
}

impl Drop for FileVisit {
    fn drop(&mut self) {
        // Closing the file is not enough. A child that is just being started has a copy of the open
        // file for a moment, and this copy would keep the lock.
        for file in &self.locked {
            let _ = file.unlock();
        }
    }
}

impl FileWitness {
    /// A witness with all its files in this folder, which must exist.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
        }
    }

    pub fn write(&self) -> FileVisit {
        self.enter_with(|| {
            let file = self.open("resource");
            free(file.try_lock()).then_some(vec![file])
        })
    }

    pub fn read(&self) -> FileVisit {
        self.enter_with(|| {
            let file = self.open("resource");
            free(file.try_lock_shared()).then_some(vec![file])
        })
    }

    /// Takes `permits` of `capacity` numbered slots. Every visitor must state the same capacity.
    pub fn enter(&self, permits: u32, capacity: u32) -> FileVisit {
        self.enter_with(|| {
            let slots = (0..capacity).filter_map(|slot| {
                let file = self.open(&format!("slot-{slot}"));
                free(file.try_lock()).then_some(file)
            });
            let taken: Vec<File> = slots.take(permits as usize).collect();
            (taken.len() == permits as usize).then_some(taken)
        })
    }

    /// The number of visits of all processes.
    pub fn visits(&self) -> usize {
        self.log().lines().count()
    }

    /// The visits that began although there was no room. Each line names its process.
    pub fn overlaps(&self) -> Vec<String> {
        self.log()
            .lines()
            .filter(|line| line.starts_with("overlap"))
            .map(ToOwned::to_owned)
            .collect()
    }

    /// Panics when anything overlapped.
    pub fn assert_no_overlap(&self) {
        assert_eq!(self.overlaps(), Vec::<String>::new());
    }

    fn enter_with(&self, take: impl FnOnce() -> Option<Vec<File>>) -> FileVisit {
        // Only one visitor enters at a time. So a taken slot was taken before this visit began, and
        // all slots are checked at one moment.
        let door = self.open("door");
        door.lock().unwrap();
        let taken = take();
        let what = if taken.is_some() { "visit" } else { "overlap" };
        // This is one short write in append mode, so that lines of several processes do not mix.
        let line = format!("{what} by process {}\n", std::process::id());
        self.open("log").write_all(line.as_bytes()).unwrap();
        FileVisit {
            locked: taken.unwrap_or_default(),
        }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    fn open(&self, name: &str) -> File {
        File::options()
            .create(true)
            .append(true)
            .open(self.path(name))
            .unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        Path::new(&self.folder).join(name)
    }
}

/// Whether the lock was free. Only a lock of another visitor is an overlap. A file system without
/// locks is an error.
fn free(tried: Result<(), TryLockError>) -> bool {
    match tried {
        Ok(()) => true,
        Err(TryLockError::WouldBlock) => false,
        Err(TryLockError::Error(error)) => panic!("cannot lock a file of the witness: {error}"),
    }
}

/// A resource that remembers the highest fencing token and refuses lower ones.
#[derive(Debug, Default)]
pub struct FencedResource {
    log: Mutex<FenceLog>,
}

/// The writes that a fenced resource has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FenceLog {
    pub highest: u64,
    pub accepted: u64,
    pub refused: u64,
}

/// The error of a write whose token is lower than one seen before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    pub token: u64,
    pub highest: u64,
}

impl FencedResource {
    /// Writes with a token. A token that is equal to the highest is accepted, because one holder
    /// may write many times.
    pub fn write(&self, token: u64) -> Result<(), Refused> {
        let mut log = self.lock();
        if token < log.highest {
            log.refused += 1;
            return Err(Refused {
                token,
                highest: log.highest,
            });
        }
        log.highest = token;
        log.accepted += 1;
        Ok(())
    }

    pub fn log(&self) -> FenceLog {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, FenceLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visits_one_after_the_other_do_not_overlap() {
        let witness = Witness::exclusive();

        drop(witness.enter(1));
        drop(witness.enter(1));

        let seen = witness.assert_no_overlap();
        assert_eq!((seen.visits, seen.most_at_once), (2, 1));
    }

    #[test]
    #[should_panic(expected = "visits overlapped at capacity 1")]
    fn two_visits_at_once_to_an_exclusive_resource_overlap() {
        let witness = Witness::exclusive();

        let (_one, _other) = (witness.enter(1), witness.enter(1));

        witness.assert_no_overlap();
    }

    #[test]
    fn permits_up_to_the_capacity_fit_and_one_more_overlaps() {
        let witness = Witness::of(10);

        let (_five, _also_five) = (witness.enter(5), witness.enter(5));
        assert_eq!(witness.assert_no_overlap().most_permits, 10);
        let _one_more = witness.enter(1);

        assert_eq!(witness.seen().overlaps, 1);
    }

    #[test]
    fn readers_share_and_a_writer_among_them_overlaps() {
        let witness = Witness::readers_and_writers();

        let (_one, _other) = (witness.read(), witness.read());
        assert_eq!(witness.assert_no_overlap().most_at_once, 2);
        let _writer = witness.write();

        assert_eq!(witness.seen().overlaps, 1);
    }

    // A `flock` belongs to the open file. So two values in one process act like two processes.
    // tests/selftest has a test with a process that is killed inside.

    #[test]
    fn file_visits_one_after_the_other_do_not_overlap() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (
            FileWitness::in_folder(folder.path()),
            FileWitness::in_folder(folder.path()),
        );

        drop(one.write());
        drop(other.write());
        drop((one.read(), other.read()));

        assert_eq!(one.visits(), 4);
        other.assert_no_overlap();
    }

    #[test]
    fn a_file_writer_overlaps_with_a_reader_and_with_a_writer() {
        let folder = tempfile::tempdir().unwrap();
        let witness = FileWitness::in_folder(folder.path());

        let _writer = witness.write();
        let (_other, _reader) = (witness.write(), witness.read());

        assert_eq!(witness.overlaps().len(), 2);
        assert!(witness.overlaps()[0].contains(&std::process::id().to_string()));
    }

    #[test]
    fn file_permits_up_to_the_capacity_fit_and_one_more_overlaps() {
        let folder = tempfile::tempdir().unwrap();
        let witness = FileWitness::in_folder(folder.path());

        let (two, one) = (witness.enter(2, 3), witness.enter(1, 3));
        witness.assert_no_overlap();
        drop(witness.enter(1, 3));
        assert_eq!(witness.overlaps().len(), 1);
        drop((two, one));
        let _three = witness.enter(3, 3);

        assert_eq!(witness.overlaps().len(), 1);
    }

    #[test]
    fn a_fenced_resource_refuses_lower_tokens_and_counts_them() {
        let resource = FencedResource::default();

        assert_eq!(resource.write(7), Ok(()));
        assert_eq!(resource.write(7), Ok(()));
        assert_eq!(resource.write(9), Ok(()));
        assert_eq!(
            resource.write(7),
            Err(Refused {
                token: 7,
                highest: 9
            })
        );

        assert_eq!(
            resource.log(),
            FenceLog {
                highest: 9,
                accepted: 3,
                refused: 1
            }
        );
    }
}
