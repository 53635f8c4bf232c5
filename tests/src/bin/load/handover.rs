//! The mode `w5`: acquires and releases on command, and reports the times. Two of these processes
//! show the time from the release in one to the grant of the waiter in the other.

use serde_json::json;
use tests::measure::now;

use crate::client::{Client, Driver, Failures, say};

/// Prints `READY`. After that, it acquires at each line `a` and prints `A <acquired>`, and releases
/// at each line `r` and prints `R <before the release> <after>`. If the acquire or the release
/// fails, it prints `E`.
pub(crate) async fn obey(client: &Client, key: &str) {
    let mut failures = Failures::default();
    client.warm_up(&mut failures).await;
    let lock = client.lock(key);
    let mut held = None;
    let mut acquisitions = 0;
    let mut driver = Driver::listen();
    say("READY");
    while let Some(word) = driver.hear().await {
        match (word.as_str(), held.take()) {
            ("a", None) => {
                let acquired = lock.acquire().await;
                let time = now();
                held = failures.note(acquired);
                acquisitions += u64::from(held.is_some());
                match &held {
                    Some(_) => say(&format!("A {time}")),
                    None => say("E"),
                }
            }
            ("r", Some(guard)) => {
                let before = now();
                let released = guard.release().await;
                let after = now();
                failures.note_release(released);
                say(&format!("R {before} {after}"));
            }
            (_, still) => {
                held = still;
                eprintln!("load: {word:?} is not possible now: `a` acquires, then `r` releases");
                say("E");
            }
        }
    }
    client.report(&failures, json!({"acquisitions": acquisitions}));
}
