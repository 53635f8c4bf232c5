//! Measures the memory store: the cost of a lock without a server. A pair must take at most 0.8 µs,
//! and a pair that ends with a drop at most 2.5 µs.
//! The least possible cost is that of tokio's mutex, which has no names and no leases. Criterion
//! measures the time. Before that, this bench counts the allocations, and fails if there is one too
//! many.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use criterion::{Criterion, criterion_group, criterion_main};
use lockcore::{Error, Lock, Locks};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Mutex;

/// The allocations of one pair in the calling thread. Everything that is made at the first use
/// exists already.
fn allocations(lock: &Lock) -> u64 {
    const PAIRS: u64 = 1_000;
    let runtime = Builder::new_current_thread().build().unwrap();
    let pairs = || {
        runtime.block_on(async {
            for _ in 0..PAIRS {
                lock.acquire().await.unwrap().release().await.unwrap();
            }
        });
    };
    pairs();
    allocation_counter::measure(pairs).count_total / PAIRS
}

fn pairs(criterion: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let lock = Locks::connect("memory:").unwrap().mutex("a");
    // The request, the lease and the hold, an answer of each of the two verbs, and the lists of a
    // release.
    let allocations = allocations(&lock);
    println!("acquire and release: {allocations} allocations");
    assert!(allocations <= 7, "more than before");
    let mutex = Mutex::new(());
    let mut group = criterion.benchmark_group("memory");
    group.bench_function("acquire and release", |bencher| {
        bencher.to_async(&runtime).iter(async || {
            let guard = lock.acquire().await.unwrap();
            guard.release().await.unwrap()
        });
    });
    group.bench_function("acquire and drop", |bencher| {
        bencher.to_async(&runtime).iter(async || {
            drop(lock.acquire().await.unwrap());
        });
    });
    group.bench_function("try_acquire and release", |bencher| {
        bencher.to_async(&runtime).iter(async || {
            let guard = lock.try_acquire().await.unwrap();
            guard.release().await.unwrap()
        });
    });
    group.bench_function("run", |bencher| {
        bencher.to_async(&runtime).iter(async || {
            let answer = lock.run(async |held| Ok::<_, Error>(held.grant_id()));
            answer.await.unwrap()
        });
    });
    group.bench_function("floor: tokio Mutex", |bencher| {
        bencher.to_async(&runtime).iter(async || {
            drop(mutex.lock().await);
        });
    });
    group.finish();
}

criterion_group!(benches, pairs);
criterion_main!(benches);
