//! The log lines of the keeper's thread. A subscriber is the user's code: it may block or panic, and on the keeper's
//! thread either would cost leases. So those lines are logged on another thread, in order.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tracing::Level;
use tracing::dispatcher::{self, DefaultGuard, Dispatch};
use tracing::level_filters::LevelFilter;

/// The most lines that wait for a subscriber that blocks. Further lines are dropped and counted.
const MOST_WAITING: usize = 10_000;

thread_local! {
    static ON_KEEPER: Cell<bool> = const { Cell::new(false) };
}

/// Lines on their way from the keeper's thread to the subscriber.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Lines>>);

#[derive(Default)]
struct Lines {
    waiting: VecDeque<Box<dyn FnOnce() + Send>>,
    dropped: u64,
    /// A thread is logging them.
    said: bool,
}

/// Keeps subscribers off the thread that made it, until it is dropped there.
pub(crate) struct Silence {
    _no_subscriber: DefaultGuard,
}

impl Silence {
    /// From now on, nothing that this thread traces reaches a subscriber, not even traces of drivers. Our own lines do,
    /// through [`Log`].
    pub(crate) fn on_this_thread() -> Self {
        ON_KEEPER.set(true);
        Self {
            _no_subscriber: dispatcher::set_default(&Dispatch::none()),
        }
    }
}

impl Log {
    /// Logs a line: on this thread, or on another one if this thread must not wait.
    pub(crate) fn say(&self, level: Level, keeper: &Handle, line: impl FnOnce() + Send + 'static) {
        if level > LevelFilter::current() {
            return;
        }
        if !ON_KEEPER.get() {
            return line();
        }
        let mut lines = self.lines();
        if lines.waiting.len() >= MOST_WAITING {
            lines.dropped += 1;
            return;
        }
        lines.waiting.push_back(Box::new(line));
        if !std::mem::replace(&mut lines.said, true) {
            drop(lines);
            let log = self.clone();
            keeper.spawn_blocking(move || log.say_all());
        }
    }

    fn say_all(&self) {
        loop {
            let (line, dropped) = {
                let mut lines = self.lines();
                let line = lines.waiting.pop_front();
                lines.said = line.is_some();
                (line, std::mem::take(&mut lines.dropped))
            };
            if dropped > 0 {
                let _ = catch_unwind(|| tracing::warn!(dropped, "the subscriber was too slow"));
            }
            let Some(line) = line else { return };
            // The panic hook has reported the panic. The lines behind this one still have to be logged.
            let _ = catch_unwind(AssertUnwindSafe(line));
        }
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs code that wakes users' tasks or notifies them. Their wakers are users' code: a panic in one must not end the
/// thread that keeps the leases. The panic hook has reported it.
pub(crate) fn guarded(work: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(work));
}
