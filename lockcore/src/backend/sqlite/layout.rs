//! How tickets are written: the file's tables and statements, and the clock of its times. All of it
//! is wire format.

#[cfg(any(target_os = "linux", target_os = "android"))]
use std::{fmt::Display, io::ErrorKind};

use crate::backend::{Fault, StoreError, table};
use crate::name::Name;

/// The layout version. It is in the file's header and in every key, and the store refuses a file of
/// another version. So a change of this number is a breaking release.
pub(super) const VERSION: u32 = 1;

/// "lock" in the file's header, so that the database of another program is not used by mistake.
pub(super) const APPLICATION: i64 = 0x6c6f_636b;

pub(super) const TABLES: &str = include_str!("schema/tables.sql");
pub(super) const COUNTERS: &str = include_str!("schema/counters.sql");
pub(super) const CAPACITIES: &str = include_str!("schema/capacities.sql");
pub(super) const SETTINGS: &str = include_str!("schema/settings.sql");
pub(super) const SCRATCH: &str = include_str!("schema/scratch.sql");

/// The statements of an operation are one text. SQLite's thread runs it to its end by itself. So
/// the file is never locked while that thread waits for another thread to be scheduled.
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
pub(super) const RESIZE: &str = verb!("schema/ask_resize.sql", "schema/resize.sql");
pub(super) const CAPACITY: &str = include_str!("schema/capacity.sql");
pub(super) const GRANTED: &str = include_str!("schema/granted.sql");
pub(super) const INSPECT: &str = include_str!("schema/inspect.sql");
pub(super) const LIST: &str = include_str!("schema/list.sql");
pub(super) const OVERVIEW: &str = include_str!("schema/overview.sql");
pub(super) const ASK_BACK: &str = include_str!("schema/ask_back.sql");
pub(super) const ADOPT: &str = include_str!("schema/adopt.sql");
pub(super) const FORGET: &str = include_str!("schema/forget.sql");
pub(super) const COUNTER: &str = include_str!("schema/counter.sql");
pub(super) const SET_COUNTER: &str = include_str!("schema/set_counter.sql");
pub(super) const BEGIN_EPOCH: &str = include_str!("schema/begin_epoch.sql");
pub(super) const SWEEP: &str = include_str!("schema/sweep.sql");

/// The key of a name in the file.
pub(super) fn key(name: &Name) -> String {
    table::key(name, VERSION)
}

/// The requests by id, as `schema/ask_many.sql` takes them. Ids are hexadecimal, so nothing in them
/// needs escaping.
pub(super) fn object<T: std::fmt::Display>(
    asked: impl Iterator<Item = (T, u32, Option<i64>)>,
) -> String {
    let asked = asked.map(|(id, number, ttl)| match ttl {
        Some(ttl) => format!("\"{id}\":[{number},{ttl}]"),
        None => format!("\"{id}\":[{number},null]"),
    });
    format!("{{{}}}", asked.collect::<Vec<_>>().join(","))
}

/// Milliseconds of the clock by which tickets expire.
///
/// All processes that share the file are on one machine. So they share this clock, and each of them
/// measures its own leases by it, too. The clock includes the time of a suspend, and nobody can set
/// it. So a jump of the wall clock does not change any lease. The clock begins again with each
/// boot: see [`Boot`].
pub(super) fn now_millis() -> i64 {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let millis = crate::clock::Clock::BOOT.now().as_nanos() / 1_000_000;
    // These systems have no id of a boot, so times must mean the same in all boots.
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let millis = wall_micros().unsigned_abs() / 1000;
    i64::try_from(millis).unwrap_or(i64::MAX)
}

/// Microseconds of the wall clock. Ticket numbers follow it, so that they also rise over a new file
/// and a new boot.
pub(super) fn wall_micros() -> i64 {
    // If the clock shows a time before 1970, this is 0. Ticket numbers are then counted up from the
    // last one.
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(0))
}

/// How many ids of one boot a file has at most.
const MOST_IDS: usize = 16;

/// Identifies the boot that the times in a file belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Boot {
    /// The kernel's id of the boot. Some containers see an id of their own, so a file may have
    /// several, with a space between them.
    pub(super) ids: String,
    /// When the clock began, in milliseconds of the wall clock. It changes when somebody sets the
    /// wall clock.
    pub(super) booted_at: i64,
}

impl Boot {
    /// The present boot. If the kernel's id cannot be read, this is an error. Without the id,
    /// setting the wall clock would look like a reboot, and live tickets would be removed as
    /// tickets of an earlier boot.
    pub(super) fn now() -> Result<Self, StoreError> {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let (id, booted_at) = {
            const ID: &str = "/proc/sys/kernel/random/boot_id";
            let unreadable = |fault, why: &dyn Display| {
                StoreError::new(fault, format!("cannot read {ID}: {why}"))
            };
            let id = std::fs::read_to_string(ID).map_err(|error| {
                let fault = match error.kind() {
                    ErrorKind::NotFound | ErrorKind::PermissionDenied => Fault::Config,
                    // For example, no file descriptor is free.
                    _ => Fault::Retry,
                };
                unreadable(fault, &error)
            })?;
            let id = id.trim().to_owned();
            if id.is_empty() {
                return Err(unreadable(Fault::Config, &"it is empty"));
            }
            (id, wall_micros() / 1000 - now_millis())
        };
        // All boots have the same id here, because times mean the same in all of them.
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let (id, booted_at) = (String::new(), 0);
        Ok(Self { ids: id, booted_at })
    }

    /// Whether `now`, the present boot, is this one for sure.
    pub(super) fn has_id_of(&self, now: &Self) -> bool {
        self.ids.split(' ').any(|id| id == now.ids)
    }

    /// Whether `now`, the present boot, is probably this one although it has another id: their
    /// beginnings differ by at most two seconds.
    ///
    /// A reboot usually changes the beginning, because more than two seconds pass between the
    /// beginnings of two boots. But a machine without a battery for its clock may begin every boot
    /// at the same wall time. So the tickets decide: see `settle` in `file`.
    pub(super) fn began_with(&self, now: &Self) -> bool {
        self.booted_at.abs_diff(now.booted_at) <= 2000
    }

    /// The ids of this boot and of `now`: at most [`MOST_IDS`], the first one and the latest. Later
    /// the wall clock may be set, and then only the ids tell that the boot is the same. The first
    /// one is usually the machine's own, and the others are those of containers.
    pub(super) fn with_id_of(&self, now: &Self) -> String {
        let mut ids: Vec<_> = self.ids.split(' ').collect();
        if ids.len() == MOST_IDS {
            ids.remove(1);
        }
        ids.push(&now.ids);
        ids.join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_is_told_from_the_next_and_not_from_itself_in_a_container_or_after_a_clock_was_set() {
        let boot = Boot {
            ids: "a b".into(),
            booted_at: 1_000_000,
        };
        let with = |id: &str, booted_at| Boot {
            ids: id.into(),
            booted_at,
        };

        for known in ["a", "b"] {
            assert!(boot.has_id_of(&with(known, 9)), "the wall clock was set");
        }
        let container = with("c", 1_000_900);
        assert!(boot.began_with(&container) && !boot.has_id_of(&container));
        assert!(!boot.began_with(&with("c", 1_100_000)), "a reboot");
        assert!(Boot::now().unwrap().has_id_of(&Boot::now().unwrap()));
    }

    #[test]
    fn a_boot_has_the_first_id_and_those_that_came_last() {
        let mut boot = Boot {
            ids: "0".into(),
            booted_at: 0,
        };
        for id in 1..=MOST_IDS {
            let ids = id.to_string();
            boot.ids = boot.with_id_of(&Boot { ids, booted_at: 0 });
        }

        let latest = (2..=MOST_IDS).map(|id| format!(" {id}"));
        assert_eq!(boot.ids, format!("0{}", String::from_iter(latest)));
    }

    #[test]
    fn an_object_is_valid_json() {
        assert_eq!(object::<&str>([].into_iter()), "{}");
        let two = object([("a", 1, None), ("b", 2, Some(3))].into_iter());
        assert_eq!(two, r#"{"a":[1,null],"b":[2,3]}"#);
    }
}
