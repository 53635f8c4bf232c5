//! Tests with files that are locked, removed, replaced or broken.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::backend::{self, EventSink, Namespace};
use lockcore::{ErrorKind, LostReason};
use tests::eventually::eventually;
use tests::stalls::awake_since;

use super::client;
use crate::faults::{builder, patient_holder};
use crate::store::{Kind, SLACK, SOON, Store, assert_nothing_left, give_back, kind};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_file_that_another_program_keeps_locked_is_unavailable_within_one_operation
        a_lock_outlasts_a_file_that_is_locked_for_less_than_its_lease
        a_file_that_is_removed_costs_the_lock_and_tokens_still_rise
        a_file_that_is_replaced_costs_the_lock_and_tokens_still_rise
        a_broken_file_is_an_error_and_no_lock
        a_damaged_counter_is_an_error_and_stays_as_it_is
        a_file_or_a_folder_that_may_not_be_written_is_named
        ready_warns_of_a_log_that_a_reader_keeps_large
    ]
}

async fn a_file_that_another_program_keeps_locked_is_unavailable_within_one_operation(
    store: Store,
) {
    // The timeout is longer than the slack, so that two operations would take longer than one and
    // the slack.
    let op_timeout = Duration::from_secs(2);
    let locks = builder(store.file().url())
        .op_timeout(op_timeout)
        .build()
        .unwrap();
    // The lease is longer than the file is locked in total, because nothing can be renewed
    // meanwhile.
    let held = locks.mutex("held").ttl(6 * SOON).acquire().await;
    let held = held.unwrap();
    for connected in [true, false] {
        let writer = store.file().lock();
        let locks = match connected {
            true => locks.clone(),
            false => builder(store.file().url())
                .op_timeout(op_timeout)
                .build()
                .unwrap(),
        };
        for waits in [true, false] {
            let lock = locks.mutex("a").wait(SOON);
            // The caller's wait may end while SQLite is trying to write, which takes a few
            // milliseconds each time. The error is `Unknown` in this case, and the test acquires
            // again until the error tells why.
            eventually("told why", SOON, async || {
                let started = Instant::now();
                let outcome = match waits {
                    true => lock.acquire().await,
                    false => lock.try_acquire().await,
                };
                let took = awake_since(started);
                assert!(took < op_timeout + SLACK, "{took:?}");
                let error = outcome.unwrap_err();
                match error.kind() {
                    ErrorKind::Unavailable => {
                        assert!(error.to_string().contains("locked"), "{error}");
                        true
                    }
                    kind => {
                        assert_eq!(kind, ErrorKind::Unknown, "{error}");
                        false
                    }
                }
            })
            .await;
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
    let ttl = Duration::from_secs(8);
    let lock = builder(store.file().url()).build().unwrap();
    let lock = lock.mutex("a").ttl(ttl);
    let guard = lock.acquire().await.unwrap();
    for _ in 0..2 {
        let writer = store.file().lock();
        // The renewal was due when two thirds of the ttl were left.
        eventually("a renewal is overdue", SOON, async || {
            guard.remaining() < ttl / 2
        })
        .await;
        drop(writer);
        eventually("renewed", SOON, async || guard.remaining() > ttl * 3 / 4).await;
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

/// A holder in this process and a holder in another process both lose their lock.
async fn loses_the_lock(store: Store, lose: impl Fn(&Path)) {
    let ttl = Duration::from_secs(9);
    let locks = client(&store);
    let ours = locks.mutex("ours").ttl(ttl).acquire().await.unwrap();
    let mut other = patient_holder(&store.file().url(), "theirs", ttl);
    let theirs = other.acquire();

    lose(&store.file().path());
    let next = locks.mutex("theirs").try_acquire().await.unwrap();
    assert!(next.grant_id().as_u64() > theirs);
    assert_eq!(other.lost(SOON), "Taken");
    assert_eq!(ours.lost().await, LostReason::Taken);
    let again = locks.mutex("ours").try_acquire().await.unwrap();

    assert!(again.fencing_token().unwrap() > ours.fencing_token().unwrap());
    assert_eq!(other.release(), "AlreadyLost");
    assert_eq!(other.try_acquire(), Err("Busy".into()));
    give_back(next).await;
    give_back(again).await;
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
        assert!(awake_since(started) < SOON);
    }
    // After a repair, all processes work without a restart.
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

/// The last two records have valid numbers, which the next change would overflow.
async fn a_damaged_counter_is_an_error_and_stays_as_it_is(store: Store) {
    let counter = client(&store).counter("a");
    for damaged in [
        "",
        "text",
        "1 2",
        "9223372036854775807 1 1",
        "1 1 18446744073709551615",
    ] {
        counter.set(1).await.unwrap();
        let write = format!("UPDATE counters SET data = '{damaged}'");
        store.file().query(&write);

        assert_eq!(kind(counter.get().await), ErrorKind::Config, "{damaged}");
        for delta in [1, -1] {
            let error = counter.add(delta).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config, "{damaged}: {error}");
            assert!(error.to_string().contains("delete it"), "{error}");
        }

        assert_eq!(store.file().query("SELECT data FROM counters"), [damaged]);
        store.file().query("DELETE FROM counters");
    }
}

/// SQLite itself says only that it cannot open the file.
async fn a_file_or_a_folder_that_may_not_be_written_is_named(store: Store) {
    let locks = client(&store);
    locks.counter("a").add(1).await.unwrap();
    drop(locks);
    let (file, folder) = (store.file().path(), store.file().folder().to_owned());
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
    let in_folder = format!("make files in the folder {}", folder.display());
    let log = PathBuf::from(format!("{}-wal", file.display()));
    eventually("the file is closed", SOON, async || !log.exists()).await;
    for (of_file, of_folder, expected) in [
        (0o444, 0o755, format!("read and write {}", file.display())),
        (0o666, 0o555, in_folder),
    ] {
        mode(&file, of_file).unwrap();
        mode(&folder, of_folder).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_latch"));
        command.arg("a").env("LOCK_URL", store.file().url());
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if fs::metadata(&file).unwrap().uid() == 0 {
            command.uid(65_534); // root may write everything
        }
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"add 1\n").unwrap();
        let output = child.wait_with_output().unwrap();

        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains(&expected), "{told}");
        assert!(!told.contains("code: 14"), "{told}");
        let answer = String::from_utf8(output.stdout).unwrap();
        assert_eq!(answer.trim(), "FAILED Config");
        mode(&folder, 0o755).unwrap();
    }
}

async fn ready_warns_of_a_log_that_a_reader_keeps_large(store: Store) {
    let locks = client(&store);
    locks.counter("a").add(1).await.unwrap();
    let events = EventSink::new(1, Namespace::new("test").unwrap(), |_| ());
    let connection = backend::open(&store.file().url()).unwrap().connect(events);
    let connection = connection.await.unwrap();
    assert_eq!(connection.check().await.unwrap(), Vec::<String>::new());
    let reader = store.file().read();

    store.file().query(
        "CREATE TABLE other (data BLOB); INSERT INTO other VALUES (randomblob(70000000)); DELETE FROM other;",
    );

    let warnings = connection.check().await.unwrap();
    assert!(warnings[0].contains("-wal has "), "{warnings:?}");
    assert!(warnings[0].contains("read transaction"), "{warnings:?}");
    drop(reader);
}
