//! The `durability` of a URL: which replicas and disks must have a write before it counts, and the
//! command that waits for them.

use std::fmt;
use std::time::Duration;

use redis::{Cmd, Value};

/// The option of a URL.
pub(super) const OPTION: &str = "durability";

/// The values of the option, for error messages.
const VALUES: &str =
    "durability=replicas:N, durability=fsync or durability=fsync+replicas:N, with N from 1 to 100";

/// Reads the value of the option. The error lists the values.
pub(super) fn option(value: &str) -> Result<Durability, String> {
    Durability::parse(value)
        .ok_or_else(|| format!("the durability in the URL is unknown; write {VALUES}"))
}

/// The greatest number of replicas. No master has so many, so a greater number is a mistake.
const MOST_REPLICAS: u32 = 100;

/// The places that must have a write before it counts: replicas, the server's own disk, or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Durability {
    /// Whether the server's disk must have the write. If replicas are asked for as well, their
    /// disks must have it too.
    fsync: bool,
    /// The number of replicas that must have the write. It is 0 only with `fsync`.
    replicas: u32,
}

impl Durability {
    /// `None` for anything but [`VALUES`].
    fn parse(value: &str) -> Option<Self> {
        let (fsync, rest) = match value.strip_prefix("fsync") {
            Some("") => {
                return Some(Self {
                    fsync: true,
                    replicas: 0,
                });
            }
            Some(rest) => (true, rest.strip_prefix('+')?),
            None => (false, value),
        };
        let number = rest.strip_prefix("replicas:")?;
        let is_plain = number.bytes().all(|digit| digit.is_ascii_digit());
        let replicas = number.parse().ok().filter(|_| is_plain)?;
        (1..=MOST_REPLICAS)
            .contains(&replicas)
            .then_some(Self { fsync, replicas })
    }

    /// Whether at least one replica must have a write.
    pub(super) fn awaits_replicas(self) -> bool {
        self.replicas > 0
    }

    /// The name of the command that waits, as the server's access lists write it.
    pub(super) fn command_name(self) -> &'static str {
        if self.fsync { "waitaof" } else { "wait" }
    }

    /// The command that waits until the replicas and disks have all earlier writes of its
    /// connection, or until this time is over. The server runs nothing else on the connection in
    /// the meantime.
    pub(super) fn wait(self, within: Duration) -> Cmd {
        self.wait_for(self.replicas, within)
    }

    /// A command that fails if the server cannot wait in this way, or if the user may not ask for
    /// it. It waits for no replica.
    pub(super) fn attempt(self) -> Cmd {
        self.wait_for(0, Duration::ZERO)
    }

    fn wait_for(self, replicas: u32, within: Duration) -> Cmd {
        let mut wait = Cmd::new();
        match self.fsync {
            true => wait.arg("WAITAOF").arg(1).arg(replicas),
            false => wait.arg("WAIT").arg(replicas),
        };
        // For the server, 0 means "for ever".
        wait.arg(within.as_millis().max(1) as u64); // far less than 2⁶⁴
        wait
    }

    /// Says what is missing, by the answer to the [wait](Self::wait). `None` if nothing is missing.
    pub(super) fn shortfall(self, answer: Value) -> Result<Option<String>, redis::ParsingError> {
        let of = self.replicas;
        if !self.fsync {
            let have: u32 = redis::from_redis_value(answer)?;
            let text = || format!("{have} of {of} replicas have acknowledged the write");
            return Ok((have < of).then(text));
        }
        let (here, have): (u32, u32) = redis::from_redis_value(answer)?;
        let has = if here == 0 { "has not" } else { "has" };
        let here_too = format!("the server {has} written it to its disk");
        Ok(match (here > 0 && have >= of, of) {
            (true, _) => None,
            (false, 0) => Some(here_too),
            (false, _) => Some(format!(
                "{have} of {of} replicas have written it to their disks, and {here_too}"
            )),
        })
    }

    /// Says what has not happened yet. For a [wait](Self::wait) without an answer.
    pub(super) fn missing(self) -> &'static str {
        match (self.fsync, self.replicas) {
            (false, _) => "too few replicas have acknowledged the write",
            (true, 0) => "the server has not written it to its disk",
            (true, _) => "too few replicas have written it to their disks, or the server has not",
        }
    }

    /// A warning for an operator, if more replicas follow the master than must have a lock.
    pub(super) fn leaves_out(self, follow: u32) -> Option<String> {
        let whole = Self {
            replicas: follow,
            ..self
        };
        (follow > self.replicas).then(|| {
            format!(
                "the URL says durability={self}, and {follow} replicas follow the Redis master: if one that does not have a \
                 lock is promoted, others get it too. Write durability={whole}"
            )
        })
    }

    /// What an operator can do if the wait is never satisfied in time.
    pub(super) fn advice(self) -> &'static str {
        match (self.fsync, self.replicas) {
            (false, _) => {
                "see INFO replication at the master: that many replicas must follow; if they are only slow, raise LOCK_OP_TIMEOUT"
            }
            (true, 0) => {
                "set appendfsync always at the server; with everysec it takes up to a second, so raise LOCK_OP_TIMEOUT to 4s"
            }
            (true, _) => {
                "set appendonly yes and appendfsync always at the master and its replicas; see INFO replication there"
            }
        }
    }
}

/// Writes the value as in the URL.
impl fmt::Display for Durability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.fsync, self.replicas) {
            (true, 0) => f.write_str("fsync"),
            (true, replicas) => write!(f, "fsync+replicas:{replicas}"),
            (false, replicas) => write!(f, "replicas:{replicas}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_three_forms_with_a_sane_number_are_read() {
        for value in ["replicas:1", "replicas:100", "fsync", "fsync+replicas:2"] {
            let read = Durability::parse(value).map(|read| read.to_string());
            assert_eq!(read.as_deref(), Some(value));
        }
        for value in [
            "",
            "replicas",
            "replicas:",
            "replicas:0",
            "replicas:101",
            "replicas:+1",
            "replicas:-1",
            "replicas:99999999999",
            "replicas:1+fsync",
            "replicas:1 ",
            "fsync+",
            "fsync+replicas:0",
            "fsync replicas:1",
            "fsyncreplicas:1",
            "majority",
            "Fsync",
        ] {
            assert_eq!(Durability::parse(value), None, "{value}");
        }
    }

    #[test]
    fn an_answer_that_falls_short_is_told_with_both_numbers() {
        let short = |value: &str, answer| {
            let durability = Durability::parse(value).unwrap();
            durability.shortfall(answer).unwrap().unwrap_or_default()
        };
        let both = |here, there| Value::Array(vec![Value::Int(here), Value::Int(there)]);

        let text = short("replicas:2", Value::Int(1));
        assert_eq!(text, "1 of 2 replicas have acknowledged the write");
        for more in [2, 3] {
            assert_eq!(short("replicas:2", Value::Int(more)), "");
        }
        assert!(short("fsync", both(0, 3)).contains("has not written"));
        assert_eq!(short("fsync", both(1, 0)), "");
        assert!(short("fsync+replicas:2", both(1, 1)).contains("1 of 2 replicas"));
        assert!(short("fsync+replicas:2", both(0, 2)).contains("has not written"));
        assert_eq!(short("fsync+replicas:2", both(1, 2)), "");
    }

    /// A wait without an end would block the connection for ever.
    #[test]
    fn a_wait_always_has_an_end() {
        for value in ["replicas:1", "fsync"] {
            let durability = Durability::parse(value).unwrap();
            for wait in [durability.attempt(), durability.wait(Duration::ZERO)] {
                let packed = wait.get_packed_command();
                assert!(packed.ends_with(b"$1\r\n1\r\n"), "{packed:?}");
            }
        }
    }
}
