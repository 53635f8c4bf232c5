//! A command under a lock: what it is told, and what becomes of it when the lock is lost.

use std::future::pending;
use std::process::ExitCode;
use std::time::Duration;

use lockcore::inspect::visible;
use lockcore::{Error, Held, Release};
use rustix::process::Signal;
use tokio::time::{Instant, sleep_until};

use crate::args::{OnLost, OnRevoke, Under};
use crate::child::{self, Child};
use crate::exit::{self, Exit};
use crate::say::say;
use crate::show;
use crate::signals::Signals;

/// Runs the command to its end. The lock is released by the caller, after this has returned.
///
/// If this future is dropped, the command goes on. No caller drops it: signals are handled here.
pub(crate) async fn supervise(
    held: &Held,
    under: &Under,
    signals: &mut Signals,
) -> Result<ExitCode, Exit> {
    let name = held.name();
    let mut variables = vec![("LOCKCORE_NAME", name.to_owned())];
    if let Ok(token) = held.fencing_token() {
        variables.push((child::TOKEN, token.as_i64().to_string()));
    }
    // What has come before the command starts is not for the command.
    if let Some(signal) = signals.forget() {
        return Err(Exit::interrupted(signal));
    }
    let mut child = Child::start(&under.command, &variables)?;
    let name = visible(name);
    let (mut is_lost, mut is_asked) = (false, false);
    let mut kill_at = None;
    let status = loop {
        tokio::select! {
            // First the end of the command: a command that has ended in time keeps its result.
            biased;
            status = child.ended() => break status?,
            reason = held.lost(), if !is_lost => {
                is_lost = true;
                let then = match under.on_lost {
                    OnLost::Term => "the command is ended",
                    OnLost::Kill => "the command is killed",
                    OnLost::Ignore => "the command goes on without it",
                };
                match under.on_lost {
                    OnLost::Term => {
                        terminate(&mut child);
                        kill_at = after(under.grace);
                    }
                    OnLost::Kill => child.signal(Signal::KILL),
                    OnLost::Ignore => {}
                }
                say(format_args!("{name}: the lock is lost ({reason:?}): {then}"));
            }
            asked = held.revoked(), if !is_asked && !is_lost => {
                is_asked = true;
                if under.on_revoke == OnRevoke::Term {
                    terminate(&mut child);
                }
                say(format_args!(
                    "{name}: {} asks for the lock within {}{}",
                    visible(&asked.by),
                    show::span(asked.grace),
                    match asked.why.as_str() {
                        "" => String::new(),
                        why => format!(": {}", visible(why)),
                    },
                ));
            }
            signal = signals.next() => {
                if child.is_passed(signal.0) {
                    child.signal(signal.0);
                }
            }
            () = at(kill_at) => {
                kill_at = None;
                child.signal(Signal::KILL);
            }
        }
    };
    match is_lost && under.on_lost != OnLost::Ignore {
        // It was said above, at the time of the loss.
        true => Ok(exit::LOST.into()),
        false => Ok(child::code(status)),
    }
}

/// A command that is stopped acts on SIGTERM only after SIGCONT.
fn terminate(child: &mut Child) {
    child.signal(Signal::TERM);
    child.signal(Signal::CONT);
}

/// Says what became of the lock at its end, if that was not said before.
pub(crate) fn tell_end(
    name: &str,
    released: Result<Release, Error>,
    outcome: &Result<ExitCode, Exit>,
) {
    let is_said = matches!(outcome, Ok(code) if *code == ExitCode::from(exit::LOST));
    match released {
        Ok(Release::AlreadyLost) if !is_said => {
            let name = visible(name);
            say(format_args!("{name}: the lock was lost before its release"));
        }
        // A loss was said when it was noticed.
        Ok(_) => {}
        Err(error) => say(error),
    }
}

/// `None` if this time never comes.
pub(crate) fn after(time: Duration) -> Option<Instant> {
    Instant::now().checked_add(time)
}

pub(crate) async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_never_comes_is_no_panic() {
        assert_eq!(after(Duration::MAX), None);
        assert!(after(Duration::from_secs(5)) > Some(Instant::now()));
    }
}
