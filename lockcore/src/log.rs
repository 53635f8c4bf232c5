//! The log lines of the keeper's thread. A subscriber is code of the user: it may block or panic.
//! On the keeper's thread both would cost leases. So another thread logs these lines, in order.

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

/// The queue of lines that the keeper's thread has written and the subscriber has not got yet.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Lines>>);

#[derive(Default)]
struct Lines {
    waiting: VecDeque<Box<dyn FnOnce() + Send>>,
    dropped: u64,
    /// Whether a thread is logging the lines at this time.
    said: bool,
}

/// While this exists, no subscriber runs on the thread that has made it.
pub(crate) struct Silence {
    _no_subscriber: DefaultGuard,
}

impl Silence {
    /// From now on, no trace of this thread reaches a subscriber on this thread, and traces of
    /// drivers are lost. Lines of this crate reach the subscriber through [`Log`].
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
            // The panic hook has reported the panic. The next lines must be logged even so.
            let _ = catch_unwind(AssertUnwindSafe(line));
        }
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs code that wakes tasks of the user. A waker is code of the user, and a panic in it must not
/// end the thread that renews the leases. The panic hook reports such a panic.
pub(crate) fn guarded(work: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(work));
}
