//! How tickets are written: the file's tables and statements, and the clock that its times are of. All of it is wire
//! format.

#[cfg(any(target_os = "linux", target_os = "android"))]
use std::io::ErrorKind;

use crate::backend::{Fault, StoreError};
use crate::name::Name;

/// In the file's header and in every key. A file of another version is refused; a change of it is a breaking release.
pub(super) const VERSION: u32 = 1;

/// "lock" in the file's header, so that the database of another program is not taken for ours.
pub(super) const APPLICATION: i64 = 0x6c6f_636b;

/// Bytes of a name that stay readable in a key.
const READABLE: usize = 512;

pub(super) const TABLES: &str = include_str!("schema/tables.sql");
pub(super) const SCRATCH: &str = include_str!("schema/scratch.sql");

/// The statements of a verb are one text, run to its end by the driver's thread without asking back: the file is not
/// locked for as long as it takes some other thread to be scheduled.
macro_rules! verb {
    ($ask:literal, $verb:literal) => {
        concat!(
            include_str!($ask),
            include_str!("schema/line.sql"),
            include_str!($verb)
        )
    };
}

pub(super) const ENQUEUE: &str = verb!("schema/ask_one.sql", "schema/enqueue.sql");
pub(super) const RENEW: &str = verb!("schema/ask_many.sql", "schema/renew.sql");
pub(super) const RELEASE: &str = verb!("schema/ask_many.sql", "schema/release.sql");
pub(super) const GRANTED: &str = include_str!("schema/granted.sql");
pub(super) const INSPECT: &str = include_str!("schema/inspect.sql");
pub(super) const FORGET: &str = include_str!("schema/forget.sql");
pub(super) const SWEEP: &str = include_str!("schema/sweep.sql");

/// What the file knows a name by.
pub(super) fn key(name: &Name) -> String {
    name.key(VERSION, READABLE)
}

/// What is asked of each id as `schema/ask_many.sql` takes it; ids are hexadecimal, so that nothing in them needs escaping.
pub(super) fn object<T: std::fmt::Display>(
    asked: impl Iterator<Item = (T, u32, Option<i64>)>,
) -> String {
    let asked = asked.map(|(id, number, ttl)| match ttl {
        Some(ttl) => format!("\"{id}\":[{number},{ttl}]"),
        None => format!("\"{id}\":[{number},null]"),
    });
    format!("{{{}}}", asked.collect::<Vec<_>>().join(","))
}

/// Milliseconds of the clock that tickets expire by.
///
/// All processes that share the file share the machine, and so the clock that they judge their own leases by: it counts
/// suspend, and nobody can set it, so that a wall clock that jumps neither ends a lease nor prolongs one. What it
/// does not outlast is the boot: see [`Boot`].
pub(super) fn now_millis() -> i64 {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let millis = crate::clock::Clock::BOOT.now().as_nanos() / 1_000_000;
    // Where a boot cannot be told from the next one, times have to mean the same in both.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let millis = wall_micros().unsigned_abs() / 1000;
    i64::try_from(millis).unwrap_or(i64::MAX)
}

/// Microseconds of the wall clock: what ticket numbers follow, so that they rise over a new file and a new boot too.
pub(super) fn wall_micros() -> i64 {
    // Before 1970 the numbers simply count up from what they were.
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(0))
}

/// Which run of the machine's clock the times of a file are of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Boot {
    /// The kernel's id of the boot; some containers are shown one of their own.
    pub(super) id: String,
    /// When the clock began, in milliseconds of the wall clock; moves when somebody sets that.
    pub(super) booted_at: i64,
}

impl Boot {
    /// That of now. Without the kernel's id a clock that was set could not be told from a reboot, and live tickets would
    /// be taken for those of the boot before.
    pub(super) fn now() -> Result<Self, StoreError> {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let (id, booted_at) = {
            const ID: &str = "/proc/sys/kernel/random/boot_id";
            let id = std::fs::read_to_string(ID).map_err(|error| {
                let fault = match error.kind() {
                    ErrorKind::NotFound | ErrorKind::PermissionDenied => Fault::Config,
                    // No file descriptor is left, for example.
                    _ => Fault::Retry,
                };
                StoreError::new(fault, format!("cannot read {ID}: {error}"))
            })?;
            let booted_at = wall_micros() / 1000 - now_millis();
            (id.trim().to_owned(), booted_at)
        };
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let (id, booted_at) = (String::new(), 0);
        Ok(Self { id, booted_at })
    }

    /// Whether times of the one mean the same in the other: if either of the two says so. A reboot changes both, as more
    /// than two seconds pass from the beginning of one boot to that of the next.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let same_id = !self.id.is_empty() && self.id == other.id;
        same_id || self.booted_at.abs_diff(other.booted_at) <= 2000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_is_told_from_the_next_and_not_from_itself_in_a_container_or_after_a_clock_was_set() {
        let boot = Boot {
            id: "a".into(),
            booted_at: 1_000_000,
        };
        let with = |id: &str, booted_at| Boot {
            id: id.into(),
            booted_at,
        };

        assert!(
            boot.is_same(&with("a", 9_000_000)),
            "the wall clock was set"
        );
        assert!(boot.is_same(&with("b", 1_000_900)), "a container");
        assert!(!boot.is_same(&with("b", 1_100_000)), "a reboot");
        assert!(!with("", 0).is_same(&with("", 9_000_000)));
        assert!(Boot::now().unwrap().is_same(&Boot::now().unwrap()));
    }

    #[test]
    fn an_object_is_what_json_takes() {
        assert_eq!(object::<&str>([].into_iter()), "{}");
        let two = object([("a", 1, None), ("b", 2, Some(3))].into_iter());
        assert_eq!(two, r#"{"a":[1,null],"b":[2,3]}"#);
    }
}
