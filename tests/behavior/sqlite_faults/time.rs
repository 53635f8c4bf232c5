//! Tests with clocks that jump, and of what remains of a name after some time.

use std::process::Command;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::ErrorKind;
use tests::faketime::{Clock, FakeClock};
use tests::process::Process;

use super::{client, holder};
use crate::store::{Kind, SOON, Store, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_wall_clock_that_jumps_changes_no_lease_and_tokens_rise
        the_remains_of_a_name_are_gone_a_day_later
    ]
}

/// The wall clock of one process jumps while this process holds, waits and requests. Its leases do
/// not follow this clock, and tokens rise in any case.
async fn a_wall_clock_that_jumps_changes_no_lease_and_tokens_rise(store: Store) {
    let locks = client(&store);
    let clock = FakeClock::in_folder(store.file().folder()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_holder"));
    command
        .args(["mutex", "a"])
        .env("LOCK_URL", store.file().url())
        .env("LOCK_NAMESPACE", "test")
        .env("LOCK_TTL", "10s")
        .env("LOCK_WAIT", "20s");
    clock.preload_into(&mut command);
    let mut other = Process::start(&mut command);
    let mut last = 0;
    let by = Duration::from_secs(300);
    for jump in [Clock::Ahead(by), Clock::True, Clock::Behind(by)] {
        let guard = locks.mutex("a").acquire().await.unwrap();
        assert!(guard.grant_id().as_u64() > last, "{jump:?}");
        clock.set(jump);
        other.say("try");
        assert_eq!(other.expect("FAILED", SOON), "Busy", "{jump:?}");
        other.say("acquire");
        tickets(&locks, "a", 2).await;
        let token = guard.grant_id().as_u64();
        give_back(guard).await;

        last = other.expect("HELD", SOON).parse().unwrap();
        assert!(last > token, "{jump:?}");
        let places = locks.inspect("a").await.unwrap();
        assert!(
            places[0].remaining > Duration::from_secs(8)
                && places[0].remaining <= Duration::from_secs(10),
            "{jump:?}: {places:?}"
        );
        assert_eq!(kind(locks.mutex("a").try_acquire().await), ErrorKind::Busy);
        clock.set(Clock::Ahead(2 * by));
        other.say("valid");
        assert_eq!(other.expect("VALID", SOON), "true");
        other.say("release");
        assert_eq!(other.expect("RELEASED", SOON), "Released");
    }
}

async fn the_remains_of_a_name_are_gone_a_day_later(store: Store) {
    let locks = client(&store);
    let held = locks.mutex("held").acquire().await.unwrap();
    for name in ["old", "young"] {
        give_back(locks.mutex(name).acquire().await.unwrap()).await;
    }
    let day = 86_400_000_000u64;
    store.file().query(&format!(
        "UPDATE names SET last = last - {day} WHERE name <> 'test:1:{{young}}'"
    ));
    // This process dies and leaves an expired ticket of a name that nobody else uses.
    let mut dying = holder(&store, "dead");
    dying.acquire();
    dying.kill();
    store.file().query(&format!(
        "UPDATE tickets SET expires_at = expires_at - 100000 WHERE name = (SELECT key FROM names WHERE name = 'test:1:{{dead}}');
         UPDATE names SET last = last - {day} WHERE name = 'test:1:{{dead}}'"
    ));

    // At some acquisitions, chosen at random, the store removes the rows of names that nobody has
    // used for a day. With this number of acquisitions, it certainly does so.
    for _ in 0..251 {
        give_back(locks.mutex("young").acquire().await.unwrap()).await;
    }

    let names = store.file().query("SELECT name FROM names ORDER BY name");
    assert_eq!(names, ["test:1:{held}", "test:1:{young}"]);
    assert_eq!(store.file().litter().len(), 1);
    give_back(held).await;
}
