//! The nodes of the URL, how to log in at every node, and the request that asks the nodes where the
//! slots are.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::Value;
use tokio::task::JoinSet;
use url::Url;

use super::map::Map;
use super::question::Question;
use super::receivers::Receivers;
use super::slots;
use crate::backend::redis::access::{Access, Form};
use crate::backend::redis::changed::Changed;
use crate::backend::redis::dial::{Part, settings};
use crate::backend::redis::layout;
use crate::backend::redis::opening::checked;
use crate::backend::redis::owed::Owed;
use crate::backend::redis::views::Address;
use crate::backend::{Fault, StoreError};
use crate::clock::{Clock, Instant};
use crate::error::Error;
use crate::name::Namespace;
use crate::tls::Tls;

const FORM: Form = Form {
    text: "redis+cluster://[[user]:password@]host[:port][,host[:port]…] (rediss+cluster:// with TLS)",
    port: 6379,
    options: &[],
};

/// For how long a map with a lower epoch is not used while many nodes are silent. A master that is
/// cut off from most other masters stops serving after `cluster-node-timeout` (15 s by default). If
/// nodes send a lower epoch for longer than this, the cluster was made anew.
const DOUBT: Duration = Duration::from_secs(60);

/// The nodes of a URL, and how to log in at every node of their cluster.
pub(in crate::backend::redis) struct Seeds {
    pub(super) addresses: Vec<Address>,
    /// How to log in at every node.
    pub(super) access: Access,
    pub(super) receivers: Receivers,
    pub(super) question: Arc<Question>,
    pub(super) owed: Arc<Owed>,
    pub(super) changed: Arc<Changed>,
    /// Nodes that had not answered when a question was given up. Later questions do not wait for
    /// these nodes.
    silent: Mutex<BTreeSet<Address>>,
    /// The map that counts, and when nodes have last sent it. It outlives the connections.
    known: Mutex<Option<(Map, Instant)>>,
}

impl Seeds {
    /// Reads `redis+cluster://…` and `rediss+cluster://…`.
    pub(in crate::backend::redis) fn read(url: &Url, tls: &Tls) -> Result<Self, Error> {
        FORM.ends_with_hosts(url, ", because a cluster has one database")?;
        let (access, _) = FORM.access(url, tls)?;
        Ok(Self {
            addresses: FORM.hosts(url)?,
            access,
            receivers: Receivers::default(),
            question: Arc::default(),
            owed: Arc::default(),
            changed: Arc::default(),
            silent: Mutex::default(),
            known: Mutex::default(),
        })
    }

    pub(in crate::backend::redis) fn silence(&self) -> &'static str {
        match self.access.is_encrypted() {
            true => {
                "; one of the nodes in the URL must answer; servers without TLS are silent: redis+cluster:// is for them"
            }
            false => "; one of the nodes in the URL must answer",
        }
    }

    /// Asks these nodes for the map, all at once. Returns the newest map of the answers, or the
    /// known map if this must not be replaced yet. The function waits until more nodes have
    /// answered than may answer soon. One answer is not enough: it may be from a node that was cut
    /// off from the others, or was stopped for a while.
    ///
    /// If this future is dropped, the requests are cancelled, and the nodes that have not answered
    /// count as silent.
    pub(super) async fn ask(
        self: &Arc<Self>,
        nodes: BTreeSet<Address>,
        namespace: &Namespace,
    ) -> Result<Map, StoreError> {
        let mut asked = JoinSet::new();
        for address in nodes.iter().cloned() {
            let (seeds, namespace) = (Arc::clone(self), namespace.clone());
            asked.spawn(async move {
                let told = seeds.ask_one(&address, &namespace).await;
                (address, told)
            });
        }
        let mut missing = Missing { seeds: self, nodes };
        let (mut best, mut errors, mut answers) = (None::<Map>, Vec::new(), 0);
        while let Some(told) = asked.join_next().await {
            let (node, told) = match told {
                Ok(told) => told,
                Err(ended) => {
                    // The task has panicked, for example because the runtime has no I/O driver. The
                    // core turns this panic into an error.
                    if let Ok(panic) = ended.try_into_panic() {
                        std::panic::resume_unwind(panic);
                    }
                    continue;
                }
            };
            missing.answered(&node);
            match told {
                Ok(map) => {
                    answers += 1;
                    if best.as_ref().is_none_or(|best| map.is_newer_than(best)) {
                        best = Some(map);
                    }
                }
                Err(error) => errors.push(error),
            }
            if answers > missing.count() {
                break;
            }
        }
        let silent = missing.nodes.len();
        // These nodes are only slower than the others, so they do not count as silent.
        missing.nodes.clear();
        let mut best = best.ok_or_else(|| no_map(errors))?;
        best.is_of_few = answers <= silent;
        Ok(self.believed(best))
    }

    async fn ask_one(&self, address: &Address, namespace: &Namespace) -> Result<Map, StoreError> {
        let server = self.access.named(address, Part::Seed)?;
        let encrypted = self.access.is_encrypted();
        let channel = layout::wake_channel(namespace, &slots::channel(0, 0));
        let (connection, _driver) = server.connect(settings()).await?;
        let question = |what: &str| redis::cmd("CLUSTER").arg(what).take();
        let (shards, info) = (question("SHARDS"), question("INFO"));
        let [mut asks, mut asks_too] = [connection.clone(), connection.clone()];
        let answers = async {
            let shards = shards.query_async::<Value>(&mut asks);
            let info = info.query_async::<String>(&mut asks_too);
            // The outer result is `Ok` even if these requests fail, so the errors of the checks
            // come first. They have a better message for a server that is not part of a cluster.
            Ok(tokio::try_join!(shards, info))
        };
        let answers = checked(&server, &connection, namespace, &channel, answers).await?;
        let (shards, info) = answers.map_err(|error| server.failed(error))?;
        let map = Map::parse(shards, &info, address, encrypted).ok_or_else(|| {
            let text = "its answers to CLUSTER SHARDS and CLUSTER INFO cannot be read; a proxy in front of it may \
                        change them";
            server.because(Fault::Retry, text)
        })?;
        if map.lacks_ports {
            let (given, needed) = match encrypted {
                true => (
                    "with TLS",
                    "set tls-cluster yes at the nodes, or write redis+cluster://",
                ),
                false => ("without TLS", "write rediss+cluster://"),
            };
            let text = format!("it names nodes that have no port {given}; {needed}");
            return Err(server.mistake(text));
        }
        Ok(map)
    }

    /// Returns the map that counts: the map of the answers, or the known map if this must not be
    /// replaced yet. The known map may lead to nodes that are silent. In this case requests fail
    /// for at most [`DOUBT`]. Meanwhile no node grants anything if it may have been replaced.
    ///
    /// If a question is given up, it does not call this. If two questions run at the same time, the
    /// map of the second is compared with the map of the first.
    fn believed(&self, told: Map) -> Map {
        let now = Clock::BOOT.now();
        let known = &mut *self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, told_at)) = known
            && told.is_doubtful_beside(known)
            && told_at.until(now) < DOUBT
        {
            return known.clone();
        }
        let told = match known {
            Some((before, _)) => told.after(before),
            None => told,
        };
        known.insert((told, now)).0.clone()
    }

    fn silent(&self) -> MutexGuard<'_, BTreeSet<Address>> {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The nodes that have not answered a question yet. If this value is dropped because the question
/// is given up, these nodes count as silent.
struct Missing<'a> {
    seeds: &'a Seeds,
    nodes: BTreeSet<Address>,
}

impl Missing<'_> {
    fn answered(&mut self, node: &Address) {
        self.nodes.remove(node);
        self.seeds.silent().remove(node);
    }

    /// How many of these nodes may answer soon: those that do not count as silent.
    fn count(&self) -> usize {
        let silent = self.seeds.silent();
        self.nodes.difference(&silent).count()
    }
}

impl Drop for Missing<'_> {
    fn drop(&mut self) {
        self.seeds.silent().append(&mut self.nodes);
    }
}

/// The error if no node has sent a map. It is a mistake that a person must correct only if every
/// node has reported a mistake. Otherwise another node may answer later.
fn no_map(errors: Vec<StoreError>) -> StoreError {
    let is_mistake = |error: &StoreError| error.fault() == Fault::Config;
    let fault = match errors.iter().all(is_mistake) {
        true => Fault::Config,
        false => Fault::Retry,
    };
    let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
    StoreError::new(fault, errors.join("; "))
}

/// Shows neither the user nor the password.
impl fmt::Debug for Seeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seeds")
            .field("addresses", &self.addresses)
            .field("encrypted", &self.access.is_encrypted())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seeds(url: &str) -> Result<Seeds, Error> {
        Seeds::read(&Url::parse(url).unwrap(), &Tls::default())
    }

    #[test]
    fn hosts_user_and_password_are_taken_from_the_url() {
        let seeds = seeds("redis+cluster://ann:p%40ss@h1%3A1,h2,%5B%3A%3A1%5D").unwrap();

        let server = |at: usize| {
            let address = &seeds.addresses[at];
            seeds.access.named(address, Part::Node).unwrap()
        };
        let shown: Vec<_> = (0..3)
            .map(|at| server(at).info.addr().to_string())
            .collect();
        assert_eq!(shown, ["h1:1", "h2:6379", "::1:6379"]);
        let server = server(2);
        let settings = server.info.redis_settings();
        let login = (settings.username(), settings.password());
        assert_eq!(login, (Some("ann"), Some("p@ss")));
        assert!(!format!("{seeds:?}").contains("p@ss"));
    }

    #[test]
    fn a_url_with_more_than_hosts_is_refused() {
        for (url, why) in [
            ("redis+cluster://h/0", "a cluster has one database"),
            ("redis+cluster://h?x=1", "nothing may follow the hosts"),
            ("redis+cluster://h#x", "nothing may follow the hosts"),
            ("redis+cluster://h1,,h2", "a host is missing"),
        ] {
            let error = seeds(url).expect_err(url).to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
