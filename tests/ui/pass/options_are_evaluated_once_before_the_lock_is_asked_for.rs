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
    permits = log.note("permits", 1),
    of = log.note("of", 1),
    on_busy = log.note("on_busy", Ok(false)),
    on_error = log.note("on_error", Err(error)),
    min_hold = log.note("min_hold", Duration::from_millis(1)),
    max_hold = log.note("max_hold", Duration::from_mins(1)),
    reentrant = log.note("reentrant", true),
    through_outages = log.note("through_outages", false),
    when = log.note("when", when),
    locks = log.note("locks", locks.clone()),
)]
async fn noted(log: &Log, locks: &Locks, when: bool) -> Result<bool, Error> {
    log.note("body", Ok(true))
}

const ALL: [&str; 11] = [
    "when",
    "key",
    "locks",
    "permits",
    "of",
    "wait",
    "ttl",
    "min_hold",
    "max_hold",
    "reentrant",
    "through_outages",
];

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Error> {
    let locks = &Locks::connect("memory:")?;
    let log = Log::default();

    assert!(noted(&log, locks, true).await?);
    assert_eq!(log.0.take(), [&ALL[..], &["body"]].concat());

    // Options that are not needed are not evaluated.
    assert!(noted(&log, locks, false).await?);
    assert_eq!(log.0.take(), ["when", "body"]);

    let guard = locks.semaphore("1", 1).permits(1).acquire().await?;
    assert!(!noted(&log, locks, true).await?);
    assert_eq!(log.0.take(), [&ALL[..], &["on_busy"]].concat());
    guard.release().await?;

    // Another store is used, because the keeper has not yet removed the waiter above from the first
    // one.
    let locks = &Locks::connect("memory:")?;
    let guard = locks.mutex("1").acquire().await?;
    let error = noted(&log, locks, true).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::CapacityMismatch);
    assert_eq!(log.0.take(), [&ALL[..], &["on_error"]].concat());
    guard.release().await?;
    Ok(())
}
