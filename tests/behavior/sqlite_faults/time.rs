//! Tests with clocks that jump, and of what remains of a name after some time.

use std::process::Command;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Locks};
use tests::faketime::{Clock, FakeClock};
use tests::process::Process;

use super::{client, holder};
use crate::store::{Kind, LEASE, SOON, Store, give_back, kind, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_wall_clock_that_jumps_changes_no_lease_and_tokens_rise
        the_remains_of_a_name_are_gone_a_day_later
        a_wall_clock_that_is_ahead_in_one_process_removes_no_counter
        a_counter_is_removed_when_the_machine_has_run_for_its_time
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
        .env("LOCK_TTL", "60s")
        .env("LOCK_OP_TIMEOUT", "30s")
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
            places[0].remaining > LEASE / 2 && places[0].remaining <= LEASE,
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

/// The wall clock of one process is years ahead. This process reads and changes counters, and makes
/// so many requests that it sweeps the file.
async fn a_wall_clock_that_is_ahead_in_one_process_removes_no_counter(store: Store) {
    let locks = client(&store);
    assert!(locks.latch("a").try_set(3).await.unwrap());
    locks.counter("kept").add(1_000).await.unwrap();
    let leader = locks.mutex("leader").acquire().await.unwrap();
    leader.set_value("10.0.0.7").await.unwrap();
    let semaphore = locks.semaphore("uploads", 5);
    semaphore.resize(8).await.unwrap();
    semaphore.forget_capacity().await.unwrap();
    let changes = || store.file().query("SELECT change FROM capacities");
    let forgotten = changes();
    assert_eq!(forgotten.len(), 1);

    let clock = FakeClock::in_folder(store.file().folder()).unwrap();
    clock.set(Clock::Ahead(Duration::from_secs(5 * 365 * 24 * 60 * 60)));
    let mut command = Command::new(env!("CARGO_BIN_EXE_latch"));
    command
        .arg("a")
        .env("LOCK_URL", store.file().url())
        .env("LOCK_NAMESPACE", "test");
    clock.preload_into(&mut command);
    let mut ahead = Process::start(&mut command);
    ahead.say("down 1");
    assert_eq!(ahead.expect("LEFT", SOON), "2");
    ahead.say("add 251");
    ahead.expect("DONE", 3 * SOON);

    assert_eq!(locks.latch("a").count().await.unwrap(), 2 + 251);
    assert_eq!(locks.counter("kept").get().await.unwrap().count, 1_000);
    let value = locks.value("leader").get().await.unwrap();
    assert_eq!(&*value.expect("it is gone").text, "10.0.0.7");
    assert_eq!(changes(), forgotten);
    give_back(leader).await;
}

/// The file's own clock goes on after a restart of the machine, from the last use that it knows.
async fn a_counter_is_removed_when_the_machine_has_run_for_its_time(store: Store) {
    let locks = client(&store);
    let day = Duration::from_secs(86_400);
    for name in ["short", "long"] {
        let keep = if name == "short" { day } else { 60 * day };
        locks.counter(name).keep(keep).add(7).await.unwrap();
    }
    let values = async |locks: &Locks| {
        let read = async |name: &str| locks.counter(name).get().await.unwrap().count;
        [read("short").await, read("long").await]
    };
    // The machine has run for a week before it restarts, and the other counter was used meanwhile.
    store.file().query(
        "UPDATE counters SET used = used + 7 * 86400 WHERE name LIKE '%long%';
         UPDATE store SET ahead = ahead + 7 * 86400",
    );
    assert_eq!(values(&locks).await, [0, 7]);
    locks.counter("short").keep(day).add(7).await.unwrap();
    locks.shutdown(SOON).await.unwrap();
    let used = || store.file().query("SELECT max(used) FROM counters");
    let before = used();

    // The file has the id and the beginning of another boot.
    store
        .file()
        .query("UPDATE store SET boot = 'another', booted_at = 0");
    drop(locks); // which closes the file
    let locks = client(&store);

    assert_eq!(values(&locks).await, [7, 7]);
    assert_eq!(store.file().query("SELECT epoch FROM store"), ["2"]);
    locks.counter("new").add(1).await.unwrap();
    let passed = used()[0].parse::<u64>().unwrap() - before[0].parse::<u64>().unwrap();
    assert!(passed < 60, "{passed} s have passed");

    // When a counter's time is over, the sweep removes its row.
    store
        .file()
        .query("UPDATE store SET ahead = ahead + 40 * 86400");
    for _ in 0..251 {
        locks.counter("new").add(1).await.unwrap();
    }
    let names = store
        .file()
        .query("SELECT name FROM counters ORDER BY name");
    assert_eq!(names, ["test:1:{long}", "test:1:{new}"]);
}
