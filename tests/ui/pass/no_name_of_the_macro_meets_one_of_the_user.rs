#![deny(warnings)]
#![allow(dead_code, non_snake_case, unused_macros)]

use lockcore::distributed_lock;

// None of these is what the macro means by the name.
enum Result {}
enum Option {}
struct String;
struct Duration;
fn Ok() {}
fn Err() {}
mod std {}
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

#[distributed_lock(key = ["a", "b"].concat(), ttl = key, locks = lock)]
async fn expressions(key: ::core::time::Duration, lock: &lockcore::Locks) -> Answer {
    Answer::Ok(key.as_secs() as u8)
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let locks = lockcore::Locks::connect("memory:").unwrap();

    assert_eq!(template(1, 2, 3, 4, 5, &locks).await.unwrap(), 15);
    assert_eq!(
        expressions(::core::time::Duration::from_secs(9), &locks)
            .await
            .unwrap(),
        9
    );
}
