use std::time::Duration;

use lockcore::{Error, ErrorKind, Locks, Wait, distributed_lock};

const BRIEFLY: Duration = Duration::from_millis(100);

struct Settings {
    wait: Duration,
}

#[distributed_lock(key = "a", try, locks = locks)]
async fn not_at_all(locks: &Locks) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "a", wait = "100ms", ttl = "1m 30s", locks = locks)]
async fn literals(locks: &Locks) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "a", wait = BRIEFLY, ttl = BRIEFLY * 1000, locks = locks)]
async fn constants(locks: &Locks) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "a", wait = settings.wait / 2, locks = locks)]
async fn arguments(locks: &Locks, settings: &Settings) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "a", wait = wait, locks = locks)]
async fn wait_or_forever(locks: &Locks, wait: Wait) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "a", wait = "forever", locks = locks)]
async fn forever(locks: &Locks) -> Result<(), Error> {
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Error> {
    let locks = &Locks::connect("memory:")?;
    let settings = &Settings { wait: BRIEFLY };
    let kind = |refused: Result<(), Error>| refused.unwrap_err().kind();
    let held = locks.mutex("a").acquire().await?;

    assert_eq!(kind(not_at_all(locks).await), ErrorKind::Busy);
    assert_eq!(kind(literals(locks).await), ErrorKind::Timeout);
    assert_eq!(kind(constants(locks).await), ErrorKind::Timeout);
    assert_eq!(kind(arguments(locks, settings).await), ErrorKind::Timeout);
    assert_eq!(
        kind(wait_or_forever(locks, Wait::For(BRIEFLY)).await),
        ErrorKind::Timeout
    );
    let waited = tokio::time::timeout(BRIEFLY * 5, forever(locks)).await;
    // If the process stalled for longer than its lease, it has lost the lock. In this case the
    // failure of this assertion says nothing about the wait.
    assert!(
        waited.is_err(),
        "taken, while another held it: {}",
        held.is_valid()
    );

    held.release().await?;
    // This call must come first: the keeper has not yet removed the waiter that was dropped above.
    forever(locks).await?;
    not_at_all(locks).await
}
