//! The guide. Each module here is a page of text and has no code.
//!
//! | page | answers |
//! |---|---|
//! | [`promises`] | what can I rely on, and which test proves it? |
//! | [`fenced_write`] | how do I make a resource refuse a write that comes late? |
//! | [`recipes`] | how do I write a nightly job, a consumer, a leader, a worker that stops in good order …? |
//! | [`operations`] | something waits for a lock: who holds it, why, and how do I free it? |
//! | [`trouble`] | what happens if the store is down, the lock is lost, the process is killed …? |
//! | [`versions`] | what happens while two versions of a service, or of this crate, run side by side? |
//! | [`defaults`] | why is this the default? |
//! | [`logs`] | what is logged at which level, and what does a line mean? |
//! | [`metrics`] | which numbers does a client give, and which of them should I watch? |
//! | [`from_flag_row`] | my lock is a column `locked` of a table: how do I get from there to a lease? |
//! | [`from_redisson`], [`from_curator`], [`from_others`] | I know Redisson, Curator, ShedLock, redis-py or etcd: what are the names here? |
//!
//! # Stores
//!
//! Each store has a page: how to write its URL, which servers it needs, what it can promise, what
//! it keeps at the server, what a lock costs, and which rights the user needs. All pages are here,
//! also those of stores whose feature is off.
//!
//! | page | store |
//! |---|---|
//! | [`memory`] | `memory:`, inside one process |
//! | [`sqlite`] | `sqlite:`, a file, for the processes of one machine |
//! | [`etcd`] | `etcd://`, an etcd ensemble |
//! | [`postgres`] | `postgres://`, a PostgreSQL server |
//! | [`mysql`] | `mysql://`, a MariaDB or MySQL server |
//! | [`redis`] | `redis://` and `rediss://`, one Redis or Valkey server; `redis+sentinel://` and `rediss+sentinel://`, the one that sentinels name; `redis+cluster://` and `rediss+cluster://`, a Redis Cluster |
//! | [`redis_quorum`] | `redlock://` and `redlock+tls://`, a majority of independent Redis or Valkey servers |
//! | [`zookeeper`] | `zookeeper://` and `zookeeper+tls://`, an ensemble |
//!
//! What they can do:
//!
//! | store | waiters of all processes stand in one line | a waiter in another process learns of its grant | longest ttl | `revoke`, `list` and `resize` | `detach` and `adopt` | counters, latches, values, barriers and elections | their changes are pushed (or else read ten times a second) | `linger` has an effect | clock that ends a lease |
//! |---|---|---|---|---|---|---|---|---|---|
//! | `memory` | yes | (has one process) | a year | yes | yes | yes | yes | no | since boot |
//! | `sqlite` | yes | it looks, after 2 to 50 ms | a year | yes | yes | yes | no | no | since boot |
//! | `postgres` | yes | by a notification | a year | yes | yes | yes | yes | no | wall |
//! | `postgres`, `wakeups=look` | yes | it looks, within 100 ms | a year | yes | yes | yes | no | no | wall |
//! | `mysql` | yes | it looks, after 2 to 100 ms | a year | yes | yes | yes | no | no | wall |
//! | `redis`, `redis+sentinel` | yes | by a message | 12 hours | yes | yes | yes | yes | yes | wall |
//! | `redis+cluster` | yes | by a message | 12 hours | yes | yes | yes | no | no | wall |
//! | `redlock` | no | it asks again, within 400 ms | 2 minutes | no | no | no | no | no | wall |
//! | `etcd` | yes | by a watch | that of the session | yes | yes | yes | yes | no | monotonic |
//! | `zookeeper` | yes | by a watch | that of the session | yes | no | yes | yes | no | monotonic |

// The pages are also read on GitHub, so each link has a label that is defined twice: at the end of its
// page, with a file, and in `links.md`, with an item. The first definition of a label counts.

#[doc = include_str!("links.md")]
#[doc = include_str!("promises.md")]
pub mod promises {}

#[doc = include_str!("links.md")]
#[doc = include_str!("fenced_write.md")]
pub mod fenced_write {}

#[doc = include_str!("links.md")]
#[doc = include_str!("recipes.md")]
pub mod recipes {}

#[doc = include_str!("links.md")]
#[doc = include_str!("operations.md")]
pub mod operations {}

#[doc = include_str!("links.md")]
#[doc = include_str!("trouble.md")]
pub mod trouble {}

#[doc = include_str!("links.md")]
#[doc = include_str!("versions.md")]
pub mod versions {}

#[doc = include_str!("links.md")]
#[doc = include_str!("defaults.md")]
pub mod defaults {}

#[doc = include_str!("links.md")]
#[doc = include_str!("logs.md")]
pub mod logs {}

#[doc = include_str!("links.md")]
#[doc = include_str!("metrics.md")]
pub mod metrics {}

#[doc = include_str!("links.md")]
#[doc = include_str!("from_redisson.md")]
pub mod from_redisson {}

#[doc = include_str!("links.md")]
#[doc = include_str!("from_curator.md")]
pub mod from_curator {}

#[doc = include_str!("links.md")]
#[doc = include_str!("from_flag_row.md")]
pub mod from_flag_row {}

#[doc = include_str!("links.md")]
#[doc = include_str!("from_others.md")]
pub mod from_others {}

#[doc = include_str!("links.md")]
#[doc = include_str!("../backend/memory/guide.md")]
pub mod memory {}

#[doc = include_str!("links.md")]
#[doc = include_str!("../backend/sqlite/guide.md")]
pub mod sqlite {}

#[doc = include_str!("links.md")]
#[doc = include_str!("../backend/etcd/guide.md")]
pub mod etcd {}

#[doc = include_str!("links.md")]
#[doc = include_str!("../backend/postgres/guide.md")]
#[doc = "\n# The file\n\n```sql"]
#[doc = include_str!("../backend/postgres/schema/lockcore1.sql")]
#[doc = "```"]
pub mod postgres {}

#[doc = include_str!("links.md")]
#[doc = include_str!("../backend/mysql/guide.md")]
#[doc = "\n# The file\n\n```sql"]
#[doc = include_str!("../backend/mysql/schema/lockcore1.sql")]
#[doc = "```"]
pub mod mysql {}

#[doc = include_str!("links.md")]
#[doc = include_str!("../backend/redis/guide.md")]
pub mod redis {}

#[doc = include_str!("links.md")]
#[doc = include_str!("../backend/redis/quorum/guide.md")]
pub mod redis_quorum {}

#[doc = include_str!("links.md")]
#[doc = include_str!("../backend/zookeeper/guide.md")]
pub mod zookeeper {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use crate::backend::{Capability, open};

    /// Adds the name of every function in the Rust files of a folder.
    fn collect_functions(folder: &Path, names: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect_functions(&path, names);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let signatures = text.split("fn ").skip(1);
                names.extend(
                    signatures
                        .filter_map(|rest| rest.split_once('('))
                        .map(|(name, _)| name.to_owned()),
                );
            }
        }
    }

    /// A row of the table of stores, without its first cell. `None` stands for a cell that no
    /// capability decides.
    fn words(can: Capability) -> [Option<&'static str>; 9] {
        let word = |yes| Some(if yes { "yes" } else { "no" });
        let longest = match can.longest_ttl.as_secs() {
            _ if can.sessions => Some("that of the session"),
            31_557_600 => Some("a year"),
            43_200 => Some("12 hours"),
            120 => Some("2 minutes"),
            other => panic!("no row has a longest ttl of {other} s"),
        };
        assert!(can.asks_back == can.lists && can.lists == can.resizes);
        let lingers = can.tells_holders && !can.answers_at_once;
        [
            word(can.queues),
            None,
            longest,
            word(can.asks_back),
            word(can.adopts),
            word(can.counters),
            word(can.watches),
            word(lingers),
            None,
        ]
    }

    #[test]
    fn the_table_of_stores_says_what_their_capabilities_are() {
        let mut checked = 0;
        for (row, url) in [
            ("`memory`", "memory:"),
            ("`sqlite`", "sqlite:locks.db"),
            ("`postgres`", "postgres://u@h/d"),
            (
                "`postgres`, `wakeups=look`",
                "postgres://u@h/d?wakeups=look",
            ),
            ("`mysql`", "mysql://u@h/d"),
            ("`redis`, `redis+sentinel`", "redis://h"),
            ("`redis`, `redis+sentinel`", "redis+sentinel://h/s"),
            ("`redis+cluster`", "redis+cluster://h"),
            ("`redlock`", "redlock://h1,h2,h3"),
            ("`etcd`", "etcd://h"),
            ("`zookeeper`", "zookeeper://h"),
        ] {
            let start = format!("//! | {row} |");
            let line = (include_str!("mod.rs").lines())
                .find(|line| line.starts_with(&start))
                .unwrap();
            let cells: Vec<_> = line[start.len()..].split('|').map(str::trim).collect();
            let store = match open(url) {
                Ok(store) => store,
                Err(error) if error.to_string().contains("is not in this build") => continue,
                Err(error) => panic!("{url}: {error}"),
            };
            for (cell, word) in cells.iter().zip(words(store.capability())) {
                assert!(word.is_none_or(|word| word == *cell), "{url}: {line}");
            }
            checked += 1;
        }
        assert!(checked > 0);
    }

    #[test]
    fn every_test_and_file_that_the_promises_name_exists() {
        let core = Path::new(env!("CARGO_MANIFEST_DIR"));
        let suite = core.join("../tests");
        if !suite.join("behavior").is_dir() {
            return; // The published crate comes without the suite.
        }
        let mut functions = BTreeSet::new();
        for folder in [
            core.join("src"),
            suite.join("behavior"),
            suite.join("layer"),
        ] {
            collect_functions(&folder, &mut functions);
        }

        let page = include_str!("promises.md");
        let quoted = page.split('`').skip(1).step_by(2);
        let (paths, code): (Vec<_>, Vec<_>) = quoted.partition(|quoted| quoted.contains('/'));
        let tests: Vec<_> = code
            .into_iter()
            .filter(|code| code.matches('_').count() > 2)
            .collect();
        assert!(tests.len() > 30, "only {tests:?} are named");
        let missing: Vec<_> = tests
            .iter()
            .filter(|test| !functions.contains(**test))
            .collect();
        assert!(
            missing.is_empty(),
            "the page names tests that do not exist: {missing:?}"
        );
        for path in paths {
            assert!(core.join("..").join(path).exists(), "the page names {path}");
        }
    }
}
