//! What `memory:` is compared with: tokio's mutex in a map of names, which is what one would write by hand where no
//! other process, lease or token is needed.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, PoisonError};

use tests::measure::{Durations, now};
use tests::turns::{Contention, Turn};
use tokio::runtime::Runtime;
use tokio::sync::{Mutex as Lock, OwnedMutexGuard};
use tokio::task::{JoinSet, coop};

use crate::floor_redis::Floor;

const KEYS: usize = 256;
const SHARDS: usize = 16;

type Shard = Mutex<HashMap<String, Arc<Lock<()>>>>;

#[derive(Default)]
struct Map {
    hasher: RandomState,
    shards: [Shard; SHARDS],
}

impl Map {
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

    /// Names that nobody wants any more do not stay.
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
        &self.shards[self.hasher.hash_one(name) as usize % SHARDS]
    }
}

pub(crate) fn pairs(pairs: usize, cold: bool) -> Floor {
    on_a_runtime(async move |map| {
        let keys = if cold { pairs } else { KEYS };
        let keys: Vec<String> = (0..keys).map(|i| format!("w1k{i}")).collect();
        let mut took = Vec::with_capacity(pairs);
        let mut began = now();
        for key in keys.iter().cycle().take(pairs) {
            let guard = map.lock(key).await;
            map.unlock(key, guard);
            let ended = now();
            took.push(ended - began);
            began = ended;
        }
        Floor {
            p50_us: Durations::new(took).percentile_us(50),
        }
    })
}

/// Pairs a second of many tasks, each with a name of its own.
pub(crate) fn many(tasks: usize, secs: f64) -> f64 {
    on_a_runtime(async move |map| {
        let end = now() + (secs * 1e9) as u64;
        let mut working: JoinSet<usize> = (0..tasks)
            .map(|task| {
                let (map, key) = (Arc::clone(&map), format!("w2k{task}"));
                async move {
                    let mut pairs = 0;
                    while now() < end {
                        let guard = map.lock(&key).await;
                        map.unlock(&key, guard);
                        pairs += 1;
                        coop::consume_budget().await;
                    }
                    pairs
                }
            })
            .collect();
        let mut pairs = 0;
        while let Some(done) = working.join_next().await {
            pairs += done.unwrap();
        }
        pairs as f64 / secs
    })
}

/// True hand-overs a second of many tasks at one name.
pub(crate) fn contend(tasks: usize, secs: f64) -> f64 {
    on_a_runtime(async move |map| {
        let start = now();
        let end = start + (secs * 1e9) as u64;
        let mut working: JoinSet<Vec<Turn>> = (0..tasks)
            .map(|task| {
                let map = Arc::clone(&map);
                async move {
                    let mut turns = Vec::new();
                    loop {
                        let asked = now();
                        if asked >= end {
                            return turns;
                        }
                        let guard = map.lock("a").await;
                        turns.push(Turn {
                            asked,
                            acquired: now(),
                            release_called: now(),
                            task: task as u64,
                        });
                        map.unlock("a", guard);
                    }
                }
            })
            .collect();
        let mut turns = Vec::new();
        while let Some(done) = working.join_next().await {
            turns.extend(done.unwrap());
        }
        Contention::of(&turns, start, secs).true_hand_overs_s
    })
}

fn on_a_runtime<T: Send + 'static, F>(work: impl FnOnce(Arc<Map>) -> F + Send + 'static) -> T
where
    F: Future<Output = T> + Send + 'static,
{
    let runtime = Runtime::new().unwrap();
    runtime
        .block_on(runtime.spawn(work(Arc::new(Map::default()))))
        .unwrap()
}
