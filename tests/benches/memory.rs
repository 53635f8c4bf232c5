//! The memory store: what a lock costs when no server is asked. The bar is 1 µs for a pair; tokio's mutex, which knows
//! neither names nor leases, is the floor.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use criterion::{Criterion, criterion_group, criterion_main};
use lockcore::{Error, Locks};
use tokio::runtime::Runtime;
use tokio::sync::Mutex;

fn pairs(criterion: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let lock = Locks::connect("memory:").unwrap().mutex("a");
    let mutex = Mutex::new(());
    let mut group = criterion.benchmark_group("memory");
    group.bench_function("acquire and release", |bencher| {
        bencher.to_async(&runtime).iter(async || {
            let guard = lock.acquire().await.unwrap();
            guard.release().await.unwrap()
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
