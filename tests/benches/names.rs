//! Measures the cost of names as keys: a plain name is copied, a name with other characters is
//! escaped, and a long name is hashed.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use criterion::{Criterion, criterion_group, criterion_main};
use lockcore::backend::{Name, Namespace};

/// The length up to which a name is readable in its Redis key.
const LIMIT: usize = 512;

fn keys(criterion: &mut Criterion) {
    let namespace = Namespace::new("lock").unwrap();
    let mut group = criterion.benchmark_group("Name::key");
    for (kind, name) in [
        ("plain", "order:42".to_owned()),
        ("escaped", "cart/{42} of a user".to_owned()),
        ("hashed", "order:42/".repeat(100)),
    ] {
        let name = Name::new(namespace.clone(), name).unwrap();
        group.bench_function(kind, |bencher| bencher.iter(|| name.key(1, LIMIT)));
    }
    group.finish();
}

criterion_group!(benches, keys);
criterion_main!(benches);
