//! One story per file, in `examples/`. Here is only what all of them end with; and the README's code is compiled.

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use lockcore::Locks;
use tokio::signal::unix::{SignalKind, signal};

/// How long what holds a lock may go on after Ctrl-C.
const GRACE: Duration = Duration::from_secs(2);

/// Tells a story to its end, or until Ctrl-C or SIGTERM. Either way the clients leave no lock behind: who waits is
/// refused, who holds may finish, and what is held after that is released.
pub async fn tell<'a>(
    clients: impl IntoIterator<Item = &'a Locks>,
    story: impl Future<Output = Result<(), Box<dyn Error + Send + Sync>>>,
) -> ExitCode {
    let told = tokio::select! {
        told = story => told.map(|()| ExitCode::SUCCESS),
        // 128 + the number of the signal, as shells have it.
        () = of(SignalKind::interrupt()) => Ok(ExitCode::from(130)),
        () = of(SignalKind::terminate()) => Ok(ExitCode::from(143)),
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

async fn of(kind: SignalKind) {
    match signal(kind) {
        Ok(mut signal) => {
            signal.recv().await;
        }
        Err(_) => std::future::pending().await, // then it ends the process, and the leases run out
    }
}

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
