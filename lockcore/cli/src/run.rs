//! `lockcore run`: a command under a lock.

use std::process::ExitCode;

use lockcore::inspect::visible;
use lockcore::{Error, ErrorKind, Held, Lock, Locks};
use tokio::time::Instant;

use crate::args::Run;
use crate::exit::Exit;
use crate::say::say;
use crate::show;
use crate::signals::Signals;
use crate::supervise::{after, at, supervise, tell_end};
use crate::until_signal;

pub(crate) async fn run(locks: &Locks, run: Run, signals: &mut Signals) -> Result<ExitCode, Exit> {
    let lock = lock(locks, &run);
    // If a signal comes first, the wait is dropped, and the client gives up the place in line.
    let taken = until_signal(signals, async {
        match run.try_only {
            true => lock.try_acquire().await,
            false => lock.acquire().await,
        }
    });
    let guard = match taken.await? {
        Ok(guard) => guard,
        Err(error) => return Err(not_taken(locks, &run.name, run.busy_exit_code, error).await),
    };
    let least = run.min_hold.map(after);
    let outcome = supervise(&guard, &run.under, signals).await;
    // A store with sessions ends the locks of a process together with its session. Elsewhere the
    // client leaves a lock at the store for the rest of its `min_hold`.
    if let Some(until) = least
        && locks.capability().sessions
    {
        stay(&guard, until, signals).await;
    }
    tell_end(&run.name, guard.release().await, &outcome);
    outcome
}

/// Keeps the lock until this time, or for ever with `None`, unless it is lost, or a signal asks this
/// process to end.
async fn stay(held: &Held, until: Option<Instant>, signals: &mut Signals) {
    let name = visible(held.name());
    if !signals.is_asked_to_end() {
        tokio::select! {
            _ = signals.next_to_end() => {}
            // It is said by the caller.
            _ = held.lost() => return,
            () = at(until) => return,
        }
    }
    if until.is_none_or(|until| Instant::now() < until) {
        say(format_args!(
            "{name}: the lock is released before its --min-hold is over, because it ends with this process"
        ));
    }
}

fn lock(locks: &Locks, run: &Run) -> Lock {
    let name = run.name.as_str();
    let mut lock = match run.of {
        Some(of) => locks.semaphore(name, of).permits(run.permits.unwrap_or(1)),
        None if run.shared => locks.rwlock(name).read(),
        None => locks.mutex(name),
    };
    if let Some(wait) = run.wait {
        lock = lock.wait(wait);
    }
    if let Some(ttl) = run.ttl {
        lock = lock.ttl(ttl);
    }
    if let Some(min_hold) = run.min_hold {
        lock = lock.min_hold(min_hold);
    }
    if let Some(max_hold) = run.max_hold {
        lock = lock.max_hold(max_hold);
    }
    lock
}

/// The error, and who holds the lock if that is why. The code is `busy` then.
pub(crate) async fn not_taken(locks: &Locks, name: &str, busy: u8, error: Error) -> Exit {
    let is_busy = matches!(error.kind(), ErrorKind::Busy | ErrorKind::Timeout);
    let exit = Exit::from(error);
    if !is_busy {
        return exit;
    }
    if busy == 0 {
        // No failure: a line for it would be a mail of cron.
        return Exit::silent(0);
    }
    // Only to help: without an answer the error stands alone.
    let line = locks.inspect(name).await.unwrap_or_default();
    let holder = line.iter().find(|place| place.granted);
    let exit = match holder {
        Some(place) => exit.with(&format!("; held by {}", show::holder(place))),
        None => exit,
    };
    Exit { code: busy, ..exit }
}
