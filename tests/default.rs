//! Tests of the process-wide default client, which the library makes from the environment at the
//! first use.
//!
//! Each test starts this program again with `LOCK_URL`, because a program cannot safely change its
//! own environment.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::fmt::Debug;
use std::process::Command;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use lockcore::{ErrorKind, Locks, LostReason, default_locks};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// A time that is longer than any step of these tests takes on a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// Calls a function whenever the library logs. The function runs on another thread, and the logging
/// thread waits for its end. So the function would hang if the logging thread held a lock that
/// other threads need for the default client.
struct Calls(fn());

impl Subscriber for Calls {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("lockcore")
    }

    fn event(&self, _: &Event<'_>) {
        let (tell, told) = mpsc::channel();
        let call = self.0;
        thread::spawn(move || {
            call();
            tell.send(())
        });
        told.recv_timeout(SOON).expect("the call returns");
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Whether this process runs only this test, with `LOCK_URL` and these variables. If not, starts
/// such a process and waits for it.
fn is_alone_with(test: &str, variables: &[&str]) -> bool {
    if std::env::var_os("LOCK_URL").is_some() {
        return true;
    }
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", test]).env("LOCK_URL", "memory:");
    program.envs(variables.iter().map(|variable| (variable, "/tmp")));
    assert!(program.status().unwrap().success());
    false
}

fn is_alone(test: &str) -> bool {
    is_alone_with(test, &[])
}

#[test]
fn a_subscriber_gets_the_default_client_while_another_thread_makes_it() {
    if !is_alone("a_subscriber_gets_the_default_client_while_another_thread_makes_it") {
        return;
    }
    static FIRST: Mutex<Option<Locks>> = Mutex::new(None);
    let asks = || {
        let locks = default_locks().unwrap();
        FIRST.lock().unwrap().get_or_insert(locks);
    };

    let ours = tracing::subscriber::with_default(Calls(asks), || default_locks().unwrap());

    let first = FIRST.lock().unwrap().take().expect("something was logged");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let held = ours.mutex("a").try_acquire().await.unwrap();
        let refused = first.mutex("a").try_acquire().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy, "they are one client");
        held.release().await.unwrap();
    });
}

/// If the client took the lock, a request at the end of the process could take a lock, and nobody
/// would wait for its release.
#[test]
fn a_default_client_that_is_shut_down_while_it_is_made_takes_no_lock() {
    if !is_alone("a_default_client_that_is_shut_down_while_it_is_made_takes_no_lock") {
        return;
    }
    let shuts_down = || {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        runtime.block_on(lockcore::shutdown(SOON)).unwrap();
    };

    // While a client is made, the library logs its start.
    let late = tracing::subscriber::with_default(Calls(shuts_down), || default_locks().unwrap());

    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        for locks in [late, default_locks().unwrap()] {
            let refused = locks.mutex("a").try_acquire().await.unwrap_err();
            assert_eq!(
                refused.kind(),
                ErrorKind::Lost(LostReason::Shutdown),
                "{refused}"
            );
        }
        lockcore::shutdown(SOON).await.unwrap();
    });
}

/// This program has no `LOCK_URL`, as a test of annotated code has none.
#[test]
fn a_task_that_was_spawned_inside_of_with_default_is_told_what_it_has_lost() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let locks = Locks::connect("memory:").unwrap();
    let spawns = async {
        default_locks().unwrap();
        tokio::spawn(async { default_locks().map(drop) })
            .await
            .unwrap()
    };

    let lost = runtime.block_on(lockcore::with_default(locks, spawns));

    let text = lost.unwrap_err().to_string();
    assert!(text.contains("LOCK_URL is not set"), "{text}");
    let reason = "with_default does not apply to tasks that its future spawns";
    assert!(text.contains(reason), "{text}");
}

/// The warnings that the library logs.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("lockcore") && *metadata.level() == Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        struct Message<'a>(&'a Warnings);
        impl Visit for Message<'_> {
            fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
                self.0.0.lock().unwrap().push(format!("{value:?}"));
            }
        }
        event.record(&mut Message(self));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The task finds a store, but another one than the caller of `with_default` has chosen.
#[test]
fn a_task_that_was_spawned_inside_of_with_default_and_finds_lock_url_is_warned_of_once() {
    if !is_alone(
        "a_task_that_was_spawned_inside_of_with_default_and_finds_lock_url_is_warned_of_once",
    ) {
        return;
    }
    let warnings = Warnings::default();
    let count = || {
        let warnings = warnings.0.lock().unwrap();
        let lost = "with_default does not apply to tasks that its future spawns";
        let named = warnings.iter().filter(|it| it.contains(lost)).count();
        assert_eq!(named, warnings.len(), "{warnings:?}");
        named
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let locks = Locks::connect("memory:").unwrap();
    let spawns = || {
        lockcore::with_default(locks.clone(), async {
            default_locks().unwrap();
            tokio::spawn(async { default_locks().map(drop) })
                .await
                .unwrap()
        })
    };

    tracing::subscriber::with_default(warnings.clone(), || {
        default_locks().unwrap();
        assert_eq!(count(), 0, "nobody has called with_default yet");
        runtime.block_on(spawns()).unwrap();
        assert_eq!(count(), 1);
        runtime.block_on(spawns()).unwrap();
        assert_eq!(count(), 1, "only once");
    });
}

#[test]
fn a_task_outside_of_with_default_that_finds_the_client_of_set_default_is_no_warning() {
    if !is_alone(
        "a_task_outside_of_with_default_that_finds_the_client_of_set_default_is_no_warning",
    ) {
        return;
    }
    let warnings = Warnings::default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();

    tracing::subscriber::with_default(warnings.clone(), || {
        lockcore::set_default(Locks::from_env().unwrap()).unwrap();
        let inside = async { default_locks().map(drop) };
        runtime
            .block_on(lockcore::with_default(
                Locks::connect("memory:").unwrap(),
                inside,
            ))
            .unwrap();
        default_locks().unwrap();
    });

    assert_eq!(*warnings.0.lock().unwrap(), [""; 0]);
}

/// Such variables come with a machine, a container or a shell, and stop no service.
#[test]
fn a_variable_that_is_like_one_of_ours_is_one_warning_and_none_stops_anything() {
    let foreign = ["LOCK_DIR", "LOCK_TMP", "LOCK_UID", "LOCK_TAG", "LOCK_DRY"];
    let alike = ["LOCK_TTY", "LOCK_TIMEOUT", "LOCK_LEASE", "LOCKS_URL"];
    let variables = [&foreign[..], &alike[..]].concat();
    if !is_alone_with(
        "a_variable_that_is_like_one_of_ours_is_one_warning_and_none_stops_anything",
        &variables,
    ) {
        return;
    }
    let warnings = Warnings::default();

    let locks = tracing::subscriber::with_default(warnings.clone(), || default_locks().unwrap());

    let warnings = warnings.0.lock().unwrap().clone();
    for variable in &alike {
        let named = format!("the environment has {variable},");
        let count = warnings.iter().filter(|it| it.contains(&named)).count();
        assert_eq!(count, 1, "{variable}: {warnings:?}");
    }
    assert_eq!(warnings.len(), alike.len(), "{warnings:?}");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let held = locks.mutex("a").try_acquire().await.unwrap();
        held.release().await.unwrap();
    });
}
