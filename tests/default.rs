//! The process-wide default client is made at first use, from the environment.
//!
//! The test starts this program again with `LOCK_URL`, because a program cannot safely change its own environment.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::process::Command;
use std::sync::{Mutex, mpsc};
use std::thread;
use std::time::Duration;

use lockcore::{ErrorKind, Locks, default_locks};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// On a busy machine too, all that is done here takes less.
const SOON: Duration = Duration::from_secs(20);

/// Asks for the default client whenever the library logs, and keeps the first one that it gets.
struct Asks(&'static Mutex<Option<Locks>>);

impl Subscriber for Asks {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("lockcore")
    }

    fn event(&self, _: &Event<'_>) {
        // On another thread: this one may not hold anything that another needs for the default.
        let (tell, told) = mpsc::channel();
        thread::spawn(move || tell.send(default_locks().unwrap()));
        let locks = told.recv_timeout(SOON).expect("it gets the default client");
        self.0.lock().unwrap().get_or_insert(locks);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn a_subscriber_gets_the_default_client_while_another_thread_makes_it() {
    if std::env::var_os("LOCK_URL").is_none() {
        let mut program = Command::new(std::env::current_exe().unwrap());
        let ended = program.env("LOCK_URL", "memory:").status().unwrap();
        return assert!(ended.success());
    }
    static FIRST: Mutex<Option<Locks>> = Mutex::new(None);

    let ours = tracing::subscriber::with_default(Asks(&FIRST), || default_locks().unwrap());

    let first = FIRST.lock().unwrap().take().expect("something was logged");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let held = ours.mutex("a").try_acquire().await.unwrap();
        let refused = first.mutex("a").try_acquire().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy, "they are one client");
        held.release().await.unwrap();
    });
}
