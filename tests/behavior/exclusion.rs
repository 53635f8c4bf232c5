//! Tests of how long a waiter waits. Facts about exclusion and order are in
//! `lockcore::testing::conformance`.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::stalls::awake_since;

use crate::store::{Kind, SLACK, SOON, Store, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store; a_wait_ends_with_timeout_when_it_is_over]
}

async fn a_wait_ends_with_timeout_when_it_is_over(store: Store) {
    let _guard = store.client().mutex("a").acquire().await.unwrap();
    let locks = store.client();
    // The first use of a client also connects. This fact measures only the wait.
    locks.ready(SOON).await.unwrap();

    let wait = Duration::from_millis(300);
    let mut late = Duration::ZERO;
    for _ in 0..5 {
        let started = Instant::now();
        let error = locks.mutex("a").wait(wait).acquire().await.unwrap_err();
        let waited = started.elapsed();

        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(waited >= wait, "{waited:?}");
        late += awake_since(started).saturating_sub(wait);
    }
    // On an idle machine each wait ends within 50 ms. The fact checks the sum of five waits. A
    // client that checks the time only once a second could be late by less than the slack in a
    // single wait.
    let on_an_idle_machine = 5 * Duration::from_millis(50);
    assert!(late < on_an_idle_machine + SLACK, "{late:?}");
    tickets(&locks, "a", 1).await;
}
