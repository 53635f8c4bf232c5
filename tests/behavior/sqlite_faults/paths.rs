//! Tests of the paths that a URL may name, of several names for one file, and of the users that may
//! access it.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::{ErrorKind, Locks, LostReason, Release};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use tests::eventually::eventually;
use tests::process::Process;
use tests::sqlite_file::SqliteFile;
use tests::stalls::awake_since;

use super::{client, holder, holder_of};
use crate::faults::{self, builder, is_renewed};
use crate::store::{Kind, SOON, Store, begin, give_back, kind, soon, tickets};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store, crate::store::DEFAULT;
        the_file_and_the_files_beside_it_are_for_their_owner_only
        a_path_that_cannot_be_used_says_why
        a_file_that_may_only_be_read_is_a_mistake
        the_database_of_another_program_is_left_alone
        a_file_of_another_layout_is_refused
        a_file_from_before_the_first_release_is_refused
        clients_of_one_process_meet_under_any_name_of_the_file
        a_link_that_leads_to_another_file_costs_the_lock
        a_file_with_two_names_is_refused_until_it_has_one
        a_process_without_file_descriptors_finds_the_store_unavailable_and_then_goes_on
    ];
    let namespace = namespace_with_mounts();
    facts.push(tests::fact::fact_if_allowed(
        "sqlite::sqlite_faults::a_file_that_is_mounted_by_itself_is_refused_and_its_folder_is_not",
        namespace.clone().map(drop),
        move || {
            a_file_that_is_mounted_by_itself_is_refused_and_its_folder_is_not(namespace.unwrap());
        },
    ));
    facts
}

async fn the_file_and_the_files_beside_it_are_for_their_owner_only(store: Store) {
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
            .op_timeout(SOON)
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
        assert!(awake_since(started) < SOON / 2); // at once
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

    // Permissions do not stop root, so the helper runs as another user.
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

/// Copies the holder program to a place where every user can start it.
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

async fn a_file_from_before_the_first_release_is_refused(store: Store) {
    let mut other = holder(&store, "a");
    other.acquire();
    (store.file()).query("ALTER TABLE tickets DROP COLUMN named");

    let error = client(&store).mutex("a").try_acquire().await.unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("first release"), "{error}");
}

async fn clients_of_one_process_meet_under_any_name_of_the_file(store: Store) {
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
        let other = builder(format!("sqlite:{}/{path}", folder.display()))
            .build()
            .unwrap();
        assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
        let waiter = begin(other.mutex("a").wait(SOON));
        tickets(&client(&store), "a", 2).await;
        waiter.abort();
        tickets(&client(&store), "a", 1).await;
    }
    give_back(guard).await;
    // All clients share one open file.
    let file = fs::canonicalize(store.file().path()).unwrap();
    let opened = fs::read_dir("/proc/self/fd").unwrap();
    let opened = opened.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    assert_eq!(opened.filter(|opened| *opened == file).count(), 1);
    drop(locks);
}

/// A deployment replaces the link while the old process holds a lock. A process that starts after
/// that uses the new file.
async fn a_link_that_leads_to_another_file_costs_the_lock(store: Store) {
    let folder = store.file().folder();
    let link = folder.join("current");
    for release in ["r1", "r2"] {
        fs::create_dir(folder.join(release)).unwrap();
    }
    std::os::unix::fs::symlink("r1", &link).unwrap();
    let url = format!("sqlite:{}/current/locks.db", folder.display());
    let locks = builder(&url).build().unwrap();
    let ttl = Duration::from_secs(9);
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    let token = guard.fencing_token().unwrap();
    // Now the keeper's connection is open too, and leads to the old file.
    is_renewed(&guard, ttl).await;

    let next = folder.join("next");
    std::os::unix::fs::symlink("r2", &next).unwrap();
    fs::rename(&next, &link).unwrap();

    let mut new = holder_of(&url, "a");
    assert!(i64::try_from(new.acquire()).unwrap() > token.as_i64());
    assert_eq!(soon(guard.lost()).await, LostReason::Taken);
    assert_eq!(guard.release().await.unwrap(), Release::AlreadyLost);
    assert_eq!(kind(locks.mutex("a").try_acquire().await), ErrorKind::Busy);
    new.release();
    give_back(locks.mutex("a").acquire().await.unwrap()).await;
}

/// SQLite makes a separate log for each name of a file, and so separate locks.
async fn a_file_with_two_names_is_refused_until_it_has_one(store: Store) {
    let locks = client(&store);
    let guard = locks.mutex("a").acquire().await.unwrap();
    let link = store.file().folder().join("other.db");
    let url = format!("sqlite:{}", link.display());
    fs::hard_link(store.file().path(), &link).unwrap();

    // The second name is tried in another process and in this one. The first name is tried in this
    // process, where it is open.
    assert_eq!(holder_of(&url, "a").try_acquire(), Err("Config".into()));
    for locks in [&builder(&url).build().unwrap(), &locks] {
        let error = locks.mutex("b").try_acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("hard links"), "{error}");
    }

    fs::remove_file(&link).unwrap();
    eventually("it is used again", SOON, async || {
        locks.mutex("b").try_acquire().await.is_ok()
    })
    .await;
    give_back(guard).await;
}

/// Options for `unshare` that make a namespace in which this user may mount.
type Namespace = &'static [&'static str];

/// Works for root and for an ordinary user, who becomes root inside the namespace only.
fn namespace_with_mounts() -> Result<Namespace, String> {
    let folder = std::env::temp_dir();
    let mut reason = String::new();
    for options in [
        &["--mount"] as Namespace,
        &["--user", "--map-root-user", "--mount"],
    ] {
        let mut command = Command::new("unshare");
        command
            .args(options)
            .args(["mount", "--bind"])
            .args([&folder, &folder]);
        match command.output() {
            Ok(output) if output.status.success() => return Ok(options),
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                reason = format!("cannot mount: {}", said.trim());
            }
            Err(error) => reason = format!("unshare: {error}"),
        }
    }
    Err(reason)
}

/// Containers mount a volume of a single file like this.
fn a_file_that_is_mounted_by_itself_is_refused_and_its_folder_is_not(namespace: Namespace) {
    let file = SqliteFile::new();
    let mut first = holder_of(&file.url(), "a");
    first.acquire();
    let other = file.folder().join("other");
    fs::create_dir(&other).unwrap();
    fs::write(other.join("locks.db"), "").unwrap();
    for (what, at, answer) in [
        (file.path(), other.join("locks.db"), "Config"),
        (file.folder().to_owned(), other.clone(), "Busy"),
    ] {
        let mut command = Command::new("unshare");
        let script = "mount --bind \"$1\" \"$2\" && shift 2 && exec \"$@\"";
        command
            .args(namespace)
            .args(["sh", "-c", script, "sh"])
            .args([&what, &at])
            .args([env!("CARGO_BIN_EXE_holder"), "mutex", "a"])
            .env(
                "LOCK_URL",
                format!("sqlite:{}", other.join("locks.db").display()),
            )
            .env("LOCK_NAMESPACE", "test");
        let mut second = Process::start(&mut command);
        second.say("try");
        assert_eq!(second.expect("FAILED", SOON), answer, "{what:?}");
    }
    assert!(first.is_valid());
}

/// After its files were deleted, the process must open them again, but it has too few file
/// descriptors. It may fail at the file, at its log, at the log's index, or at the boot id of the
/// kernel.
async fn a_process_without_file_descriptors_finds_the_store_unavailable_and_then_goes_on(
    store: Store,
) {
    let mut other = faults::holder(&store.file().url(), "a", 2 * SOON);
    let id = other.process().pid();
    let limit = |most: Option<u64>| {
        let maximum = getrlimit(Resource::Nofile).maximum;
        let current = most.or(maximum);
        let pid = Pid::from_raw(id.cast_signed());
        prlimit(pid, Resource::Nofile, Rlimit { current, maximum }).unwrap();
    };
    for left in 0..=3 {
        other.acquire();
        other.release();
        // Descriptors of other files stay open.
        let stays = |number: &u64| {
            let opened = fs::read_link(format!("/proc/{id}/fd/{number}"));
            opened.is_ok_and(|opened| !opened.starts_with(store.file().folder()))
        };
        limit((0..).filter(|number| !stays(number)).nth(left));
        for beside in ["", "-wal", "-shm"] {
            fs::remove_file(format!("{}{beside}", store.file().path().display())).unwrap();
        }

        let outcome = other.try_acquire();
        assert_eq!(outcome, Err("Unavailable".into()), "{left} left");

        limit(None);
    }
    other.acquire();
}
