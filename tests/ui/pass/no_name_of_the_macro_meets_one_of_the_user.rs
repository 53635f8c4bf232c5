#![allow(dead_code, non_snake_case, unused_macros)]

use lockcore::distributed_lock;

// The macro uses these names too, and must not find these items.
enum Result {}
enum Option {}
struct String;
struct Duration;
fn Ok() {}
fn Err() {}
mod core {}
trait Into {}
macro_rules! format {
    () => {};
}
macro_rules! stringify {
    () => {};
}

type Answer = ::core::result::Result<u8, lockcore::Error>;

#[distributed_lock(key = "{key}:{guard}", wait = "1s", locks = locks)]
async fn template(
    key: u8,
    guard: u8,
    lock: u8,
    error: u8,
    output: u8,
    locks: &lockcore::Locks,
) -> Answer {
    let run = key + guard + lock + error + output;
    Answer::Ok(run)
}

#[distributed_lock(key = ["a", "b"].concat(), ttl = ::core::time::Duration::from_secs(key.into()), locks = lock)]
async fn expressions(key: u8, lock: &lockcore::Locks) -> Answer {
    Answer::Ok(key)
}

/// `error` is the only name that the macro gives to the user's code, and only in these two options.
#[distributed_lock(
    key = "{when}",
    when = when > 0,
    reentrant = wait > 0,
    through_outages = wait > 0,
    locks = locks,
    try,
    on_busy = Answer::Ok({
        let _: lockcore::Error = error;
        lock + body
    }),
    on_error = Answer::Err({
        let _: &str = returned;
        error
    }),
)]
async fn instead(
    when: u8,
    wait: u8,
    body: u8,
    lock: u8,
    error: u8,
    returned: &str,
    locks: &lockcore::Locks,
) -> Answer {
    Answer::Ok(error + body)
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() {
    let locks = lockcore::Locks::connect("memory:").unwrap();

    assert_eq!(template(1, 2, 3, 4, 5, &locks).await.unwrap(), 15);
    assert_eq!(expressions(9, &locks).await.unwrap(), 9);
    assert_eq!(instead(1, 1, 2, 3, 4, "", &locks).await.unwrap(), 6);
    let guard = locks.mutex("1").acquire().await.unwrap();
    assert_eq!(instead(1, 1, 2, 3, 4, "", &locks).await.unwrap(), 5);
    guard.release().await.unwrap();
}
