//! The floor of `memory:` is a map from names to tokio's mutexes. A program without other
//! processes, leases and tokens would use such a map.

use std::collections::HashMap;
use std::future::ready;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Mutex as Lock, OwnedMutexGuard};

use crate::floor::{self, Floor, Pair, Token, Turns};

pub(crate) const FLOOR: Floor = Floor {
    warm_up: None,
    ping: None,
    pair: "sharded Mutex",
    pairs: |_, pairs, cold| floor::pairs(ready(Map::default()), pairs, cold),
    many: |_, tasks, secs| floor::many(ready(Map::default()), tasks, secs),
    turn: "tokio Mutex",
    turns: Turns::Here(|tasks, secs| floor::contend_here(Map::of_tasks(tasks), secs)),
    second: None,
};

const SHARDS: usize = 16;

type Shard = Mutex<HashMap<String, Arc<Lock<()>>>>;

#[derive(Clone, Default)]
pub(crate) struct Map(Arc<Shards>);

#[derive(Default)]
struct Shards {
    hasher: RandomState,
    shards: [Shard; SHARDS],
}

impl Map {
    /// Tasks that hand one name of a new map to each other.
    pub(crate) fn of_tasks(tasks: usize) -> Vec<OneName> {
        let map = Self::default();
        let one = |_| OneName {
            map: map.clone(),
            held: None,
        };
        (0..tasks).map(one).collect()
    }

    async fn lock(&self, name: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut shard = self
                .shard(name)
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            Arc::clone(shard.entry(name.to_owned()).or_default())
        };
        lock.lock_owned().await
    }

    /// Unlocks, and removes the name if no task uses it.
    fn unlock(&self, name: &str, guard: OwnedMutexGuard<()>) {
        drop(guard);
        let mut shard = self
            .shard(name)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if shard
            .get(name)
            .is_some_and(|lock| Arc::strong_count(lock) == 1)
        {
            shard.remove(name);
        }
    }

    fn shard(&self, name: &str) -> &Shard {
        &self.0.shards[self.0.hasher.hash_one(name) as usize % SHARDS]
    }
}

impl Pair for Map {
    async fn pair(&mut self, key: &str) {
        let guard = self.lock(key).await;
        self.unlock(key, guard);
    }
}

/// A task's access to the name that all tasks contend for.
pub(crate) struct OneName {
    map: Map,
    held: Option<OwnedMutexGuard<()>>,
}

impl Token for OneName {
    async fn take(&mut self) {
        self.held = Some(self.map.lock("a").await);
    }

    async fn give_back(&mut self) {
        if let Some(guard) = self.held.take() {
            self.map.unlock("a", guard);
        }
    }
}
