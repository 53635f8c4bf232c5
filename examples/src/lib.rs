//! The code that the examples in `examples/` share: the store of their locks, the end of a story,
//! and a resource that counts its visitors. A story is the run of an example. This crate also
//! compiles the code of the README.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lockcore::Locks;
use tokio::sync::Notify;

/// How long a store may take to answer at the start. With a wrong URL or password, an example fails
/// here, and not at its first lock.
pub const READY: Duration = Duration::from_secs(10);

/// After Ctrl-C or SIGTERM, a holder may continue for this long.
const GRACE: Duration = Duration::from_secs(2);

/// The longest time for a story, which is far longer than any story takes. If a story hangs, it
/// fails after this time.
const LONGEST: Duration = Duration::from_secs(60);

/// A client of the store in LOCK_URL; without LOCK_URL, a client with locks in the memory of this
/// process.
pub fn locks_in_memory() -> Result<Locks, lockcore::Error> {
    match std::env::var_os("LOCK_URL") {
        Some(_) => Locks::from_env(),
        None => Locks::connect("memory:"),
    }
}

/// A client of the store in LOCK_URL; without LOCK_URL, a client with locks in a file in `folder`.
/// Use it for several processes.
pub fn locks_in(folder: &Path) -> Result<Locks, Box<dyn Error + Send + Sync>> {
    match std::env::var_os("LOCK_URL") {
        Some(url) if url.as_encoded_bytes().starts_with(b"memory:") => Err(
            "processes do not share what is in their memory: set LOCK_URL to another store, or not at all".into(),
        ),
        Some(_) => Ok(Locks::from_env()?),
        None => Ok(Locks::connect(&format!("sqlite:{}", folder.join("locks.db").display()))?),
    }
}

/// Checks the stores of the clients, and runs an example to its end, until Ctrl-C or SIGTERM, or
/// until `LONGEST` has passed. In all three cases it then shuts the clients down, so that they leave no lock behind. Waiters are refused,
/// holders may finish within `GRACE`, and after that the clients release the remaining locks.
pub async fn tell<'a>(
    clients: impl IntoIterator<Item = &'a Locks>,
    story: impl Future<Output = Result<(), Box<dyn Error + Send + Sync>>>,
) -> ExitCode {
    let clients: Vec<&Locks> = clients.into_iter().collect();
    let story = async {
        for locks in &clients {
            locks.ready(READY).await?;
        }
        story.await
    };
    let told = tokio::select! {
        told = story => told.map(|()| ExitCode::SUCCESS),
        () = tokio::time::sleep(LONGEST) => Err(format!("it did not end within {LONGEST:?}").into()),
        // The exit code that shells show after Ctrl-C.
        () = lockcore::stop_signal() => Ok(ExitCode::from(130)),
    };
    for locks in clients {
        if let Err(error) = locks.shutdown(GRACE).await {
            eprintln!("{error}");
        }
    }
    told.unwrap_or_else(|error| {
        eprintln!("not as it should be: {error}");
        ExitCode::FAILURE
    })
}

pub fn expect(what: &str, so: bool) -> Result<(), Box<dyn Error + Send + Sync>> {
    match so {
        true => Ok(()),
        false => Err(format!("expected: {what}").into()),
    }
}

/// The resource that the locks of a story protect. It only counts the visitors of each order.
#[derive(Clone, Debug, Default)]
pub struct Orders(Arc<(Mutex<Counts>, Notify)>);

#[derive(Debug, Default)]
struct Counts {
    inside: BTreeMap<u64, usize>,
    /// The most visitors at once, since the last call of `most`.
    most: BTreeMap<u64, usize>,
    most_at_all: usize,
    visits: BTreeMap<&'static str, usize>,
}

/// A visitor of an order. The visit ends when this value is dropped.
#[derive(Debug)]
#[must_use = "the visit ends when this is dropped"]
pub struct Visit(Orders, u64);

impl Orders {
    fn counts<T>(&self, code: impl FnOnce(&mut Counts) -> T) -> T {
        code(&mut self.0.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn visit(&self, what: &'static str, id: u64) -> Visit {
        self.counts(|counts| {
            let inside = counts.inside.entry(id).or_default();
            *inside += 1;
            let most = counts.most.entry(id).or_default();
            *most = (*most).max(*inside);
            counts.most_at_all = counts.most_at_all.max(counts.inside.values().sum());
            *counts.visits.entry(what).or_default() += 1;
        });
        self.0.1.notify_waiters();
        Visit(self.clone(), id)
    }

    /// How many visitors were at an order at once.
    pub fn most(&self, id: u64) -> usize {
        self.counts(|counts| counts.most.remove(&id).unwrap_or_default())
    }

    pub fn most_at_all(&self) -> usize {
        self.counts(|counts| counts.most_at_all)
    }

    pub fn visits(&self, what: &str) -> usize {
        self.counts(|counts| counts.visits.get(what).copied().unwrap_or_default())
    }

    /// Resolves when the next visit of this kind begins after this call.
    pub fn next_visit(&self, what: &str) -> impl Future<Output = ()> {
        let before = self.visits(what);
        async move {
            loop {
                let changed = self.0.1.notified();
                if self.visits(what) > before {
                    return;
                }
                changed.await;
            }
        }
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.counts(|counts| {
            if let Some(inside) = counts.inside.get_mut(&self.1) {
                *inside -= 1;
            }
        });
    }
}

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
