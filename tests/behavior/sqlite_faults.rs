//! SQLite files that are locked, removed, read-only, somebody else's or broken, and processes that share one.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Locks, LostReason};
use tests::eventually::eventually;
use tests::faketime::{Clock, FakeClock};
use tests::process::{Holder, HolderOptions, Process};

use crate::store::{Kind, SOON, Store, assert_nothing_left, give_back, kind, tickets};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        the_file_and_what_lies_beside_it_are_for_their_owner_only
        a_file_that_another_program_keeps_locked_is_unavailable_within_one_operation
        a_lock_outlasts_a_file_that_is_locked_for_less_than_its_lease
        a_file_that_is_removed_costs_the_lock_and_tokens_still_rise
        a_file_that_is_replaced_costs_the_lock_and_tokens_still_rise
        a_path_that_cannot_be_used_says_why
        a_file_that_may_only_be_read_is_a_mistake
        the_database_of_another_program_is_left_alone
        a_file_of_another_layout_is_refused
        a_broken_file_is_an_error_and_no_lock
        clients_of_one_process_meet_whatever_they_call_the_file
        processes_that_come_first_at_once_agree_on_one_file
        processes_exclude_each_other_in_the_order_of_their_tickets
        processes_killed_at_random_moments_leave_a_sound_file
        a_release_in_another_process_is_found_within_moments
        a_lock_that_another_process_holds_for_long_costs_no_transactions
        a_hand_over_between_processes_costs_as_many_transactions_with_ten_waiters_as_with_one
        a_wall_clock_that_jumps_changes_no_lease_and_tokens_rise
        what_remains_of_a_name_is_gone_a_day_later
    ]
}

fn holder(store: &Store, name: &str) -> Holder {
    holder_of(&store.file().url(), name)
}

fn holder_of(url: &str, name: &str) -> Holder {
    let options = HolderOptions {
        namespace: "test".into(),
        ttl: Duration::from_secs(20),
        ..HolderOptions::mutex(url, name)
    };
    Holder::start(env!("CARGO_BIN_EXE_holder"), &options)
}

fn client(store: &Store) -> Locks {
    builder(&store.file().url()).build().unwrap()
}

fn builder(url: &str) -> lockcore::Builder {
    Locks::builder().url(url).namespace("test")
}

/// H50–59.
async fn the_file_and_what_lies_beside_it_are_for_their_owner_only(store: Store) {
    let guard = client(&store).mutex("a").acquire().await.unwrap();

    let mut names = BTreeSet::new();
    for entry in fs::read_dir(store.file().folder()).unwrap() {
        let entry = entry.unwrap();
        let mode = entry.metadata().unwrap().mode() & 0o777;
        assert_eq!(mode, 0o600, "{:?}", entry.file_name());
        names.insert(entry.file_name().into_string().unwrap());
    }
    let expected = ["locks.db", "locks.db-shm", "locks.db-wal"];
    assert_eq!(names.iter().collect::<Vec<_>>(), expected);
    give_back(guard).await;
}

async fn a_file_that_another_program_keeps_locked_is_unavailable_within_one_operation(
    store: Store,
) {
    let op_timeout = Duration::from_millis(400);
    let locks = builder(&store.file().url())
        .op_timeout(op_timeout)
        .build()
        .unwrap();
    let held = locks.mutex("held").acquire().await.unwrap();
    for connected in [true, false] {
        let writer = store.file().lock();
        let locks = match connected {
            true => locks.clone(),
            false => builder(&store.file().url())
                .op_timeout(op_timeout)
                .build()
                .unwrap(),
        };
        for waits in [true, false] {
            let lock = locks.mutex("a").wait(SOON);
            let started = Instant::now();
            let outcome = match waits {
                true => lock.acquire().await,
                false => lock.try_acquire().await,
            };
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(error.to_string().contains("locked"), "{error}");
            assert!(
                started.elapsed() < op_timeout + Duration::from_millis(300),
                "{:?}",
                started.elapsed()
            );
        }
        drop(writer);
        eventually("nothing is left", SOON, async || {
            store.file().litter().len() == 1
        })
        .await;
        give_back(locks.mutex("a").acquire().await.unwrap()).await;
    }
    give_back(held).await;
}

async fn a_lock_outlasts_a_file_that_is_locked_for_less_than_its_lease(store: Store) {
    let lock = client(&store).mutex("a").ttl(Duration::from_secs(2));
    let guard = lock.acquire().await.unwrap();
    for _ in 0..2 {
        let writer = store.file().lock();
        tokio::time::sleep(Duration::from_millis(1200)).await; // over the next renewal
        drop(writer);
        eventually("renewed", SOON, async || {
            guard.remaining() > Duration::from_millis(1500)
        })
        .await;
    }

    assert!(guard.is_valid());
    give_back(guard).await;
    assert_nothing_left(&store, &client(&store), "a").await;
}

async fn a_file_that_is_removed_costs_the_lock_and_tokens_still_rise(store: Store) {
    loses_the_lock(store, |path| {
        for beside in ["", "-wal", "-shm"] {
            fs::remove_file(format!("{}{beside}", path.display())).unwrap();
        }
    })
    .await;
}

async fn a_file_that_is_replaced_costs_the_lock_and_tokens_still_rise(store: Store) {
    loses_the_lock(store, |path| {
        let new = path.with_extension("new");
        fs::write(&new, "").unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
        for beside in ["-wal", "-shm"] {
            fs::remove_file(format!("{}{beside}", path.display())).unwrap();
        }
        fs::rename(new, path).unwrap();
    })
    .await;
}

/// In this process and in another.
async fn loses_the_lock(store: Store, lose: impl Fn(&Path)) {
    let ttl = Duration::from_millis(900);
    let locks = client(&store);
    let ours = locks.mutex("ours").ttl(ttl).acquire().await.unwrap();
    let options = HolderOptions {
        namespace: "test".into(),
        ttl,
        ..HolderOptions::mutex(&store.file().url(), "theirs")
    };
    let mut other = Holder::start(env!("CARGO_BIN_EXE_holder"), &options);
    let theirs = other.acquire();

    lose(&store.file().path());
    let next = locks.mutex("theirs").try_acquire().await.unwrap();
    assert!(next.token().as_u64() > theirs);
    assert_eq!(other.lost(SOON), "Taken");
    assert_eq!(ours.lost().await, LostReason::Taken);
    let again = locks.mutex("ours").try_acquire().await.unwrap();

    assert!(again.token() > ours.token());
    assert_eq!(other.release(), "AlreadyLost");
    assert_eq!(other.try_acquire(), Err("Busy".into()));
    give_back(next).await;
    give_back(again).await;
}

async fn a_path_that_cannot_be_used_says_why(store: Store) {
    let folder = store.file().folder();
    fs::write(
        folder.join("text"),
        "not a database, but long enough to be looked at ".repeat(99),
    )
    .unwrap();
    fs::create_dir(folder.join("folder")).unwrap();
    for (path, why) in [
        ("missing/locks.db", "the folder does not exist"),
        ("folder", "it is a folder"),
        ("text/locks.db", "Not a directory"),
        ("text", "something else"),
    ] {
        let url = format!("sqlite:{}", folder.join(path).display());
        let started = Instant::now();
        let error = builder(&url)
            .build()
            .unwrap()
            .mutex("a")
            .wait(SOON)
            .acquire()
            .await
            .unwrap_err();

        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains(why), "{error}");
        assert!(error.to_string().contains(path), "{error}");
        assert!(started.elapsed() < Duration::from_secs(1));
    }
    let error = Locks::connect("sqlite::memory:").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("\"memory:\""), "{error}");
    let text = fs::read_to_string(folder.join("text")).unwrap();
    assert!(text.starts_with("not a database"), "it was written to");
}

async fn a_file_that_may_only_be_read_is_a_mistake(store: Store) {
    give_back(client(&store).mutex("a").acquire().await.unwrap()).await;
    eventually("closed", SOON, async || {
        !store.file().folder().join("locks.db-wal").exists()
    })
    .await;
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(&store.file().path(), 0o444);
    mode(store.file().folder(), 0o555);

    // Nothing is forbidden to root.
    let mut helper = Command::new(program_for_all(&store));
    if fs::metadata("/proc/self").unwrap().uid() == 0 {
        helper.uid(65_534).gid(65_534);
    }
    helper
        .args(["mutex", "a"])
        .env("LOCK_URL", store.file().url())
        .env("LOCK_WAIT", "5s");
    let mut helper = Process::start(&mut helper);
    for command in ["acquire", "try"] {
        helper.say(command);
        assert_eq!(helper.expect("FAILED", SOON), "Config");
    }
    drop(helper);
    mode(store.file().folder(), 0o755);
}

/// The holder program where every user can start it.
fn program_for_all(store: &Store) -> PathBuf {
    let program = store.file().folder().join("holder");
    fs::copy(env!("CARGO_BIN_EXE_holder"), &program).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    program
}

async fn the_database_of_another_program_is_left_alone(store: Store) {
    drop(fs::File::create(store.file().path()).unwrap());
    store.file().query("CREATE TABLE orders (id INTEGER)");

    let error = client(&store).mutex("a").acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("another program"), "{error}");
    let tables = store.file().query("SELECT name FROM sqlite_schema");
    assert_eq!(tables, ["orders"]);
    assert_eq!(store.file().query("PRAGMA journal_mode"), ["delete"]);
}

/// P9.
async fn a_file_of_another_layout_is_refused(store: Store) {
    let mut other = holder(&store, "a");
    let token = other.acquire();
    store.file().query("PRAGMA user_version = 2");

    let error = client(&store).mutex("a").try_acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("layout version 2"), "{error}");
    let known = store.file().query("SELECT ticket FROM tickets");
    assert_eq!(known, [(token >> 10).to_string()]);
}

async fn a_broken_file_is_an_error_and_no_lock(store: Store) {
    give_back(client(&store).mutex("a").acquire().await.unwrap()).await;
    eventually("closed", SOON, async || {
        !store.file().folder().join("locks.db-wal").exists()
    })
    .await;
    let whole = fs::read(store.file().path()).unwrap();
    for broken_from in [0, 100, 4096] {
        let mut broken = whole.clone();
        broken[broken_from..].fill(0xa5);
        fs::write(store.file().path(), broken).unwrap();

        let locks = client(&store);
        let started = Instant::now();
        for _ in 0..2 {
            let outcome = locks.mutex("a").wait(SOON).acquire().await;
            assert_eq!(kind(outcome), ErrorKind::Config, "from {broken_from}");
        }
        assert!(started.elapsed() < SOON);
    }
    // Whoever repairs it need not restart anybody.
    let locks = client(&store);
    assert_eq!(
        kind(locks.mutex("a").try_acquire().await),
        ErrorKind::Config
    );
    for beside in ["", "-wal", "-shm"] {
        let _ = fs::remove_file(format!("{}{beside}", store.file().path().display()));
    }
    eventually("repaired", SOON, async || {
        locks.mutex("a").try_acquire().await.is_ok()
    })
    .await;
}

async fn clients_of_one_process_meet_whatever_they_call_the_file(store: Store) {
    let folder = store.file().folder();
    let link = folder.join("link.db");
    let locks = client(&store);
    let guard = locks.mutex("a").acquire().await.unwrap();
    std::os::unix::fs::symlink(store.file().path(), &link).unwrap();
    fs::create_dir(folder.join("b c")).unwrap();

    for path in [
        "link.db",
        "b%20c/../locks.db",
        "b c/../link.db",
        "./locks.db",
    ] {
        let other = builder(&format!("sqlite:{}/{path}", folder.display()))
            .build()
            .unwrap();
        assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
        let lock = other.mutex("a").wait(SOON);
        let waiter = tokio::spawn(async move { lock.acquire().await });
        tickets(&client(&store), "a", 2).await;
        waiter.abort();
        tickets(&client(&store), "a", 1).await;
    }
    give_back(guard).await;
    // One handle for all of them.
    let file = fs::canonicalize(store.file().path()).unwrap();
    let opened = fs::read_dir("/proc/self/fd").unwrap();
    let opened = opened.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    assert_eq!(opened.filter(|opened| *opened == file).count(), 1);
    drop(locks);
}

async fn processes_that_come_first_at_once_agree_on_one_file(store: Store) {
    for round in 0..5 {
        let path = store.file().folder().join(format!("round{round}.db"));
        let url = format!("sqlite:{}", path.display());
        let mut holders: Vec<_> = (0..6).map(|_| holder_of(&url, "a")).collect();
        for holder in &mut holders {
            holder.ask_to_acquire();
        }

        one_after_another(&mut holders, 1);
    }
}

/// H29, in real processes: each asks anew as soon as it has let go.
async fn processes_exclude_each_other_in_the_order_of_their_tickets(store: Store) {
    let mut holders: Vec<_> = (0..4).map(|_| holder(&store, "a")).collect();
    for holder in &mut holders {
        holder.ask_to_acquire();
    }

    let rounds = if tests::fact::long() { 500 } else { 50 };
    one_after_another(&mut holders, rounds);
    assert_nothing_left(&store, &client(&store), "a").await;
}

/// Lets each hold `rounds` times. While one holds none of the others says so, and the tokens rise.
fn one_after_another(holders: &mut [Holder], rounds: usize) {
    let mut left = vec![rounds; holders.len()];
    let mut last = 0;
    while left.iter().any(|left| *left > 0) {
        let (at, token) = next_held(holders);
        assert!(token > last, "{token} after {last}");
        last = token;
        for (other, holder) in holders.iter_mut().enumerate() {
            let heard = holder.process().hear(Duration::from_millis(1));
            assert_eq!(heard, None, "{other} holds while {at} does");
        }
        left[at] -= 1;
        holders[at].process().say("release");
        if left[at] > 0 {
            holders[at].ask_to_acquire();
        }
        assert_eq!(holders[at].process().expect("RELEASED", SOON), "Released");
    }
}

fn next_held(holders: &mut [Holder]) -> (usize, u64) {
    let give_up = Instant::now() + 2 * SOON;
    loop {
        for (at, holder) in holders.iter_mut().enumerate() {
            if let Some(line) = holder.process().hear(Duration::from_micros(200)) {
                let token = line.strip_prefix("HELD ").expect("granted");
                return (at, token.parse().unwrap());
            }
        }
        assert!(Instant::now() < give_up, "nobody gets the lock");
    }
}

/// Also in the middle of a transaction, and of a checkpoint.
async fn processes_killed_at_random_moments_leave_a_sound_file(store: Store) {
    let mut random = fastrand::Rng::with_seed(5);
    let rounds = if tests::fact::long() { 300 } else { 30 };
    let url = store.file().url();
    let locks = client(&store);
    for round in 0..rounds {
        let options = HolderOptions {
            namespace: "test".into(),
            ttl: Duration::from_millis(100),
            ..HolderOptions::mutex(&url, "a")
        };
        let mut dying = Holder::start(env!("CARGO_BIN_EXE_holder"), &options);
        dying.acquire();
        for _ in 0..400 {
            dying.process().say("release");
            dying.process().say("acquire");
        }
        tokio::time::sleep(Duration::from_micros(random.u64(..30_000))).await;
        dying.kill();

        let lock = locks.mutex("a").ttl(Duration::from_millis(300));
        let guard = lock.wait(SOON).acquire().await.unwrap();
        assert!(guard.is_valid(), "round {round}");
        give_back(guard).await;
    }
    assert_eq!(store.file().query("PRAGMA integrity_check"), ["ok"]);
    assert_nothing_left(&store, &locks, "a").await;
}

/// W5, roughly: this machine runs other tests as well.
async fn a_release_in_another_process_is_found_within_moments(store: Store) {
    let locks = client(&store);
    let mut took = Vec::new();
    for round in 0..20 {
        let mut other = holder(&store, "a");
        other.acquire();
        let lock = locks.mutex("a").wait(SOON);
        let waiter = tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            (guard, Instant::now())
        });
        tickets(&locks, "a", 2).await;
        if round == 0 {
            // By then it is looked for as rarely as ever.
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        other.release();
        let released = Instant::now();
        let (guard, held) = waiter.await.unwrap();
        took.push(held.saturating_duration_since(released));
        assert!(took[round] < Duration::from_millis(500), "{took:?}");
        // It has its whole time: what the releaser cut off was given back.
        assert!(locks.inspect("a").await.unwrap()[0].remaining > Duration::from_secs(9));
        give_back(guard).await;
    }
    took.sort();
    println!(
        "release in another process to the next holder: {:?} in the middle of 20",
        took[10]
    );
    assert!(took[10] < Duration::from_millis(100), "{took:?}");
}

/// How many transactions have been committed to the file, from the header of its shared index. Read by another process:
/// closing a file of ours would drop SQLite's locks on it.
fn commits(store: &Store) -> u64 {
    let index = store.file().folder().join("locks.db-shm");
    let said = Command::new("od")
        .args(["-An", "-tu4", "-j8", "-N4"])
        .arg(index)
        .output()
        .unwrap();
    String::from_utf8(said.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap()
}

/// H24.
async fn a_lock_that_another_process_holds_for_long_costs_no_transactions(store: Store) {
    let locks = builder(&store.file().url())
        .ttl(Duration::from_secs(60)) // no renewal falls into the count
        .build()
        .unwrap();
    let options = HolderOptions {
        namespace: "test".into(),
        ttl: Duration::from_secs(60),
        ..HolderOptions::mutex(&store.file().url(), "a")
    };
    let mut other = Holder::start(env!("CARGO_BIN_EXE_holder"), &options);
    other.acquire();
    let mut waiters = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let lock = locks.mutex("a").wait(3 * SOON);
        waiters.spawn(async move { give_back(lock.acquire().await.unwrap()).await });
    }
    eventually("the line has formed", SOON, async || {
        store.file().litter().len() > 1
    })
    .await;

    tokio::time::sleep(Duration::from_millis(300)).await; // the line settles
    let before = commits(&store);
    tokio::time::sleep(Duration::from_millis(1500)).await; // what is counted is what happens in a time
    assert_eq!(commits(&store), before);

    other.release();
    while let Some(done) = waiters.join_next().await {
        done.unwrap();
    }
}

/// H24, P7.
async fn a_hand_over_between_processes_costs_as_many_transactions_with_ten_waiters_as_with_one(
    store: Store,
) {
    let mut spent = Vec::new();
    for waiters in [1, 10] {
        let options = HolderOptions {
            namespace: "test".into(),
            ttl: Duration::from_secs(60),
            ..HolderOptions::mutex(&store.file().url(), "a")
        };
        let start = || Holder::start(env!("CARGO_BIN_EXE_holder"), &options);
        let mut first = start();
        first.acquire();
        let mut line: Vec<Holder> = Vec::new();
        for number in 0..waiters {
            let mut holder = start();
            holder.ask_to_acquire();
            line.push(holder);
            eventually("in line", SOON, async || {
                store.file().litter().len() == number + 2
            })
            .await;
        }

        let before = commits(&store);
        first.release();
        let (at, _) = next_held(&mut line);
        assert_eq!(at, 0);
        tokio::time::sleep(Duration::from_millis(200)).await; // whoever else is woken has time to show
        spent.push(commits(&store) - before);
        for holder in line {
            holder.kill();
        }
        store.file().query("DELETE FROM tickets");
    }

    println!("transactions for a hand-over with 1 and 10 waiters: {spent:?}");
    // The release, and that of the next in line to make it its own.
    assert_eq!(spent, [2, 2]);
}

/// H4: the wall clock of one process jumps while it holds, waits and asks. Leases do not follow it, and tokens still rise.
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
        assert!(guard.token().as_u64() > last, "{jump:?}");
        clock.set(jump);
        other.say("try");
        assert_eq!(other.expect("FAILED", SOON), "Busy", "{jump:?}");
        other.say("acquire");
        tickets(&locks, "a", 2).await;
        let token = guard.token().as_u64();
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

/// H8.
async fn what_remains_of_a_name_is_gone_a_day_later(store: Store) {
    let locks = client(&store);
    let held = locks.mutex("held").acquire().await.unwrap();
    for name in ["old", "young"] {
        give_back(locks.mutex(name).acquire().await.unwrap()).await;
    }
    let day = 86_400_000_000u64;
    store.file().query(&format!(
        "UPDATE names SET last = last - {day} WHERE name <> 'test:1:{{young}}'"
    ));
    // A dead ticket that nobody asks after.
    let mut dying = holder(&store, "dead");
    dying.acquire();
    dying.kill();
    store.file().query(&format!(
        "UPDATE tickets SET expires_at = expires_at - 100000 WHERE name = (SELECT key FROM names WHERE name = 'test:1:{{dead}}');
         UPDATE names SET last = last - {day} WHERE name = 'test:1:{{dead}}'"
    ));

    // As often as a sweep is sure to come by.
    for _ in 0..251 {
        give_back(locks.mutex("young").acquire().await.unwrap()).await;
    }

    let names = store.file().query("SELECT name FROM names ORDER BY name");
    assert_eq!(names, ["test:1:{held}", "test:1:{young}"]);
    assert_eq!(store.file().litter().len(), 1);
    give_back(held).await;
}
