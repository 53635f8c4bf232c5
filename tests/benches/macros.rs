//! The macro and `run` beside the same function written by hand: they must not cost time of their own.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use criterion::{Criterion, criterion_group, criterion_main};
use lockcore::{Error, Locks, distributed_lock};
use tokio::runtime::Runtime;

#[distributed_lock(key = "order:{id}", locks = locks)]
async fn annotated(locks: &Locks, id: u64) -> Result<u64, Error> {
    Ok(id + 1)
}

async fn run(locks: &Locks, id: u64) -> Result<u64, Error> {
    let lock = locks.mutex(format!("order:{id}"));
    lock.run(async |_| Ok(id + 1)).await
}

async fn by_hand(locks: &Locks, id: u64) -> Result<u64, Error> {
    let guard = locks.mutex(format!("order:{id}")).acquire().await?;
    let next = id + 1;
    guard.release().await?;
    Ok(next)
}

fn functions(criterion: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let locks = Locks::connect("memory:").unwrap();
    let mut group = criterion.benchmark_group("a locked function");
    group.bench_function("annotated", |bencher| {
        bencher
            .to_async(&runtime)
            .iter(async || annotated(&locks, 42).await.unwrap());
    });
    group.bench_function("run", |bencher| {
        bencher
            .to_async(&runtime)
            .iter(async || run(&locks, 42).await.unwrap());
    });
    group.bench_function("by hand", |bencher| {
        bencher
            .to_async(&runtime)
            .iter(async || by_hand(&locks, 42).await.unwrap());
    });
    group.finish();
}

criterion_group!(benches, functions);
criterion_main!(benches);
