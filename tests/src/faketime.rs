//! The wall clock of one server. A test can make it jump, by libfaketime.
//!
//! The server preloads libfaketime. This library reads its offset from a file each time the clock
//! is read, so a jump takes effect at once. The monotonic clock stays correct, as it does when an
//! operator or NTP changes the time of a machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The offset of a server's wall clock from the machine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clock {
    Ahead(Duration),
    True,
    Behind(Duration),
}

/// The clock of one server.
#[derive(Debug)]
pub struct FakeClock {
    library: PathBuf,
    offset: PathBuf,
}

impl FakeClock {
    /// Makes a clock that is correct at first. A file in the folder has its offset.
    pub fn in_folder(folder: &Path) -> Result<Self, String> {
        let clock = Self {
            library: library()?,
            offset: folder.join("clock-offset"),
        };
        clock.set(Clock::True);
        Ok(clock)
    }

    /// Whether libfaketime is installed. The error says how to install it.
    pub fn available() -> Result<(), String> {
        library().map(drop)
    }

    /// Sets the clock. It takes effect when the clock is read next.
    pub fn set(&self, clock: Clock) {
        let offset = match clock {
            Clock::Ahead(by) => format!("+{}\n", by.as_secs_f64()),
            Clock::True => "+0\n".into(),
            Clock::Behind(by) => format!("-{}\n", by.as_secs_f64()),
        };
        // The file is renamed into place, so that the server never reads half an offset.
        let draft = self.offset.with_extension("draft");
        fs::write(&draft, offset).unwrap();
        fs::rename(&draft, &self.offset).unwrap();
    }

    /// Makes the command's process use this clock.
    ///
    /// The C library is loaded before the program's own libraries, so that its `malloc` is used.
    /// Debian's Redis links jemalloc. jemalloc reads the clock while libfaketime waits for its
    /// first memory from jemalloc, so both would hang.
    pub fn preload_into(&self, command: &mut Command) {
        command
            .env(
                "LD_PRELOAD",
                format!("{} libc.so.6", self.library.display()),
            )
            .env("FAKETIME_TIMESTAMP_FILE", &self.offset)
            .env("FAKETIME_NO_CACHE", "1") // with the cache, a jump would take effect up to 10 s late
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("DONT_FAKE_MONOTONIC", "1"); // the name of this variable before libfaketime 0.9.9
    }
}

fn library() -> Result<PathBuf, String> {
    let multiarch = format!("/usr/lib/{}-linux-gnu/faketime", std::env::consts::ARCH);
    // The folders of Debian and Ubuntu, of Fedora, and of Arch.
    let folders = [
        multiarch.as_str(),
        "/usr/lib64/faketime",
        "/usr/lib/faketime",
    ];
    let found = folders
        .map(|folder| Path::new(folder).join("libfaketime.so.1"))
        .into_iter()
        .find(|file| file.exists());
    found.ok_or_else(|| "libfaketime is not installed: apt-get install libfaketime".into())
}
