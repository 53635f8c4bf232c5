#![deny(warnings)]

use std::cell::RefCell;
use std::time::Duration;

use lockcore::{Error, ErrorKind, Locks, distributed_lock};

#[derive(Default)]
struct Log(RefCell<Vec<&'static str>>);

impl Log {
    fn note<T>(&self, what: &'static str, value: T) -> T {
        self.0.borrow_mut().push(what);
        value
    }
}

#[distributed_lock(
    key = "{log.note(\"key\", 1)}",
    wait = log.note("wait", Duration::from_millis(200)),
    ttl = log.note("ttl", Duration::from_secs(5)),
    locks = log.note("locks", locks.clone()),
)]
async fn noted(log: &Log, locks: &Locks) -> Result<(), Error> {
    log.note("body", ());
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let locks = &Locks::connect("memory:")?;

    let log = Log::default();
    noted(&log, locks).await?;
    assert_eq!(*log.0.borrow(), ["key", "locks", "wait", "ttl", "body"]);

    let log = Log::default();
    let guard = locks.mutex("1").acquire().await?;
    assert_eq!(
        noted(&log, locks).await.unwrap_err().kind(),
        ErrorKind::Timeout
    );
    assert_eq!(*log.0.borrow(), ["key", "locks", "wait", "ttl"]);
    guard.release().await?;
    Ok(())
}
