//! The data of a server that was made once, for all servers of this process. Copying it is faster
//! than making it.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::child::LeashedChild;

/// A folder with data. A process that only waits has the folder as its litter, so it is removed
/// when this process ends in any way.
#[derive(Debug)]
pub(crate) struct Prepared {
    data: PathBuf,
    _waits: LeashedChild,
}

impl Prepared {
    /// A copy of the data of a server that has stopped.
    pub(crate) fn from(data: &Path) -> Self {
        let folder = TempDir::with_prefix("data-").unwrap().keep();
        let kept = folder.join("data");
        copy(data, &kept);
        let mut waits = Command::new("sleep");
        let waits = LeashedChild::spawn(waits.arg("infinity"), Some(&folder)).unwrap();
        Self {
            data: kept,
            _waits: waits,
        }
    }

    /// Copies the data to a folder that is not there yet.
    pub(crate) fn copy_to(&self, data: &Path) {
        copy(&self.data, data);
    }
}

fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status();
    assert!(copied.unwrap().success());
}
