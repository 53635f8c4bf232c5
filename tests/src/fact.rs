//! A fact of the suite as a libtest-mimic trial. If the fact cannot run, it shows as ignored, with
//! the reason. But if the runner demands every server, as `tests/run` does, a fact without its
//! server fails with the reason. A fact never passes because its server is missing.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use libtest_mimic::{Failed, Trial};

use crate::stalls;

/// Makes a trial of a fact. `needs` tells whether the fact can run here, for example
/// [`RedisServer::available`](crate::redis_server::RedisServer::available). If it is `Err`, the
/// fact does not run: it shows as ignored with this reason, or fails with this reason if every
/// server is required.
pub fn fact(
    name: impl Into<String>,
    needs: Result<(), String>,
    body: impl FnOnce() + Send + 'static,
) -> Trial {
    judge(name.into(), needs, servers_required(), body)
}

/// Like [`fact`], but `may` tells whether the user of this process has the rights that the fact
/// needs. If it is `Err`, the fact shows as ignored with this reason, even if the runner demands
/// every server, because a server cannot change the rights.
pub fn fact_if_allowed(
    name: impl Into<String>,
    may: Result<(), String>,
    body: impl FnOnce() + Send + 'static,
) -> Trial {
    judge(name.into(), may, false, body)
}

/// Whether a missing server is a failure. `tests/run` sets this.
pub fn servers_required() -> bool {
    is_on("LOCKCORE_REQUIRE_SERVERS")
}

/// Whether soaks and large histories run too. `tests/run --long` sets this.
pub fn long() -> bool {
    is_on("LOCKCORE_LONG")
}

fn judge(
    name: String,
    needs: Result<(), String>,
    required: bool,
    body: impl FnOnce() + Send + 'static,
) -> Trial {
    match needs {
        Ok(()) => Trial::test(name.clone(), move || run(&name, body)),
        Err(reason) if required => Trial::test(name, move || Err(Failed::from(reason))),
        // The reason is given as the *kind* of the trial, because libtest-mimic prints the kind in
        // brackets before the name, also if the trial is ignored.
        Err(reason) => Trial::test(name, || Ok(()))
            .with_kind(reason)
            .with_ignored_flag(true),
    }
}

/// How long each fact has taken that this process has run.
static TOOK: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

/// Prints the facts that have taken longest, and the sum of all. With several threads, the time of
/// the whole run is at least that of its longest fact.
pub fn print_the_slowest() {
    let mut took = std::mem::take(&mut *TOOK.lock().unwrap_or_else(PoisonError::into_inner));
    took.sort_unstable_by(|one, other| other.cmp(one));
    let sum: Duration = took.iter().map(|(took, _)| took).sum();
    println!(
        "{} facts took {sum:.0?} in the sum; the slowest:",
        took.len()
    );
    for (took, name) in took.iter().take(20) {
        println!("{took:>7.1?}  {name}");
    }
}

thread_local! {
    /// The place in the source of the last panic of this thread.
    static PANICKED_AT: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs a fact. If the fact fails, tells where, and for how long the machine stalled meanwhile. A
/// failure during a stall is a failure too, because a lock must be safe during a stall.
fn run(name: &str, body: impl FnOnce()) -> Result<(), Failed> {
    static NOTE_PLACES: Once = Once::new();
    NOTE_PLACES.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let place = panic.location().map_or(String::new(), ToString::to_string);
            PANICKED_AT.set(place);
            print(panic);
        }));
    });
    let began = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(body));
    let took = (began.elapsed(), name.to_owned());
    TOOK.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(took);
    result.map_err(|panic| {
        let stalled = match stalls::stalled_since(began) {
            Duration::ZERO => String::new(),
            stalled => format!("; the machine stood still for {stalled:.1?} while this ran"),
        };
        let place = PANICKED_AT.take();
        Failed::from(format!("{place}: {}{stalled}", text_of(&*panic)))
    })
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("a panic without a text")
}

fn is_on(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| value == "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fact_that_cannot_run_is_ignored_and_says_why() {
        let trial = judge(
            "sleeps".into(),
            Err("no bed".into()),
            false,
            || unreachable!(),
        );

        assert!(trial.has_ignored_flag());
        assert_eq!(trial.kind(), "no bed");
    }

    #[test]
    fn a_fact_that_fails_tells_why_and_where() {
        let failed = run("fails", || panic!("on {}", "purpose")).unwrap_err();

        let text = failed.message().unwrap();
        assert!(text.contains("src/fact.rs:"), "{text}");
        assert!(text.contains(": on purpose"), "{text}");
    }

    #[test]
    fn a_fact_that_cannot_run_is_not_ignored_where_servers_are_required() {
        let trial = judge(
            "sleeps".into(),
            Err("no bed".into()),
            true,
            || unreachable!(),
        );

        assert!(!trial.has_ignored_flag());
    }
}
