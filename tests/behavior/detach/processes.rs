//! Tests of locks that one process gives to another. Some of the processes are killed.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use tests::process::{Holder, HolderOptions};
use tests::stalls::awake_since;
use tests::witness::FencedResource;

use crate::processes::moments;
use crate::store::{DEFAULT, Kind, SOON, Store, assert_nothing_left, begin, give_back, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    if !store.capability().adopts {
        return Vec::new();
    }
    crate::store_facts![store, DEFAULT;
        a_process_that_is_killed_after_its_detach_does_not_matter
        an_adopter_that_is_killed_is_followed_when_its_lease_is_over
        a_second_process_does_not_adopt_what_the_first_has
    ]
}

fn process(store: &Store, ttl: Duration) -> Holder {
    let options = HolderOptions {
        namespace: store.namespace.clone(),
        ttl,
        ..HolderOptions::mutex(&store.url(), "a")
    };
    Holder::start(env!("CARGO_BIN_EXE_holder"), &options)
}

/// A chain of processes, each of which is killed as soon as it has given the lock away.
async fn a_process_that_is_killed_after_its_detach_does_not_matter(store: Store) {
    let locks = store.client();
    let resource = FencedResource::default();
    let ttl = Duration::from_secs(30);
    let mut holder = process(&store, ttl);
    let token = holder.acquire();
    let waiter = begin(locks.mutex("a").wait(6 * SOON));
    tickets(&locks, "a", 2).await;

    for _ in 0..3 {
        resource.write(token).unwrap();
        let text = holder.detach();
        holder.kill();
        holder = process(&store, ttl);
        assert_eq!(holder.adopt(&text), Ok(token));
        assert!(holder.is_valid() && !waiter.is_finished());
    }

    resource.write(token).unwrap();
    assert_eq!(holder.release(), "Released");
    let next = waiter.await.unwrap().unwrap();
    assert!(next.grant_id().as_u64() > token);
    resource.write(next.grant_id().as_u64()).unwrap();
    give_back(next).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn an_adopter_that_is_killed_is_followed_when_its_lease_is_over(store: Store) {
    let locks = store.client();
    let ttl = Duration::from_secs(4); // a helper that stalls keeps its lease until it is killed
    let (mut gives, mut takes) = (process(&store, ttl), process(&store, ttl));
    // The adopting process is connected now, so that it uses the text in time.
    takes.acquire();
    assert_eq!(takes.release(), "Released");
    let token = gives.acquire();
    let text = gives.detach();
    assert_eq!(takes.adopt(&text), Ok(token));
    let waiter = begin(locks.mutex("a").ttl(Duration::from_secs(60)).wait(3 * SOON));
    tickets(&locks, "a", 2).await;

    takes.kill();
    let killed = Instant::now();
    let next = waiter.await.unwrap().unwrap();

    let after = awake_since(killed);
    assert!(after < ttl + moments(&store), "{after:?}");
    assert!(next.grant_id().as_u64() > token);
    assert_eq!(gives.adopt(&text), Err("Lost(Taken)".into()));
    assert!(next.is_valid());
    give_back(next).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_second_process_does_not_adopt_what_the_first_has(store: Store) {
    let locks = store.client();
    let ttl = Duration::from_secs(30);
    let (mut gives, mut takes, mut late) = (
        process(&store, ttl),
        process(&store, ttl),
        process(&store, ttl),
    );
    let token = gives.acquire();
    let text = gives.detach();
    assert_eq!(takes.adopt(&text), Ok(token));

    for process in [&mut late, &mut gives] {
        assert_eq!(process.adopt(&text), Err("Lost(Taken)".into()));
        assert_eq!(process.try_acquire(), Err("Busy".into()));
    }

    assert!(takes.is_valid());
    assert_eq!(takes.release(), "Released");
    assert_eq!(late.adopt(&text), Err("Lost(Taken)".into()));
    assert!(late.try_acquire().unwrap() > token);
    assert_eq!(late.release(), "Released");
    assert_nothing_left(&store, &locks, "a").await;
}
