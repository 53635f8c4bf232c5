//! Compares the macro and `run` with the same function written by hand. They must not cost anything
//! more. Criterion measures the time. Before that, this bench counts the allocations, and fails if
//! there is one too many.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use criterion::{Criterion, criterion_group, criterion_main};
use lockcore::{Error, Locks, distributed_lock};
use tokio::runtime::{Builder, Runtime};

#[distributed_lock(key = "order:{id}", locks = locks)]
async fn annotated(locks: &Locks, id: u64) -> Result<u64, Error> {
    Ok(id + 1)
}

/// Options that have no effect here.
#[distributed_lock(
    key = "order:{id}",
    locks = locks,
    when = id > 0,
    on_busy = Ok(0),
    on_error = Err(error),
    held = lock,
)]
async fn with_options(locks: &Locks, id: u64) -> Result<u64, Error> {
    Ok(id + u64::from(lock.is_some()))
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

/// The allocations of one call in the calling thread. Everything that is made at the first use
/// exists already.
fn allocations<F: Future<Output = Result<u64, Error>>>(call: impl Fn() -> F) -> u64 {
    const CALLS: u64 = 1_000;
    let runtime = Builder::new_current_thread().build().unwrap();
    let calls = |times| {
        runtime.block_on(async {
            for _ in 0..times {
                call().await.unwrap();
            }
        });
    };
    calls(CALLS);
    let counted = allocation_counter::measure(|| calls(CALLS));
    // The division leaves out allocations that happen once in many calls, such as that of a vector
    // that grows.
    counted.count_total / CALLS
}

fn functions(criterion: &mut Criterion) {
    let runtime = Runtime::new().unwrap();
    let locks = Locks::connect("memory:").unwrap();

    let counted = [
        ("by hand", allocations(|| by_hand(&locks, 42))),
        ("run", allocations(|| run(&locks, 42))),
        ("annotated", allocations(|| annotated(&locks, 42))),
        ("with options", allocations(|| with_options(&locks, 42))),
    ];
    for (function, allocations) in counted {
        println!("{function}: {allocations} allocations a call");
        assert!(allocations <= counted[0].1, "more than by hand");
    }
    println!(
        "bytes of the future: by hand {}, run {}, annotated {}, with options {}",
        size_of_val(&by_hand(&locks, 42)),
        size_of_val(&run(&locks, 42)),
        size_of_val(&annotated(&locks, 42)),
        size_of_val(&with_options(&locks, 42)),
    );

    let mut group = criterion.benchmark_group("a locked function");
    group.bench_function("by hand", |bencher| {
        bencher
            .to_async(&runtime)
            .iter(async || by_hand(&locks, 42).await.unwrap());
    });
    group.bench_function("run", |bencher| {
        bencher
            .to_async(&runtime)
            .iter(async || run(&locks, 42).await.unwrap());
    });
    group.bench_function("annotated", |bencher| {
        bencher
            .to_async(&runtime)
            .iter(async || annotated(&locks, 42).await.unwrap());
    });
    group.bench_function("with options", |bencher| {
        bencher
            .to_async(&runtime)
            .iter(async || with_options(&locks, 42).await.unwrap());
    });
    group.finish();
}

criterion_group!(benches, functions);
criterion_main!(benches);
