//! The signals that the tool receives: which of them end it, and which it passes on to a command.

use std::io;

use futures_util::future::{FutureExt as _, select_all};
use rustix::process::Signal as Number;
use tokio::signal::unix::{self, SignalKind};

/// A signal that the tool has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signal(pub(crate) Number);

/// The signals that ask a process to end.
const TO_END: [Number; 4] = [Number::INT, Number::TERM, Number::HUP, Number::QUIT];
/// Signals that mean something to some programs only.
const OTHERS: [Number; 2] = [Number::USR1, Number::USR2];

/// From [`listen`](Self::listen) on, these signals do not end the process by themselves.
pub(crate) struct Signals {
    to_end: Vec<(Number, unix::Signal)>,
    others: Vec<(Number, unix::Signal)>,
    /// Whether one that asks this process to end was received.
    is_asked: bool,
}

impl Signals {
    /// A signal that the process was started to ignore stays ignored, here and in the commands that
    /// it starts: `nohup` works in front of the tool.
    pub(crate) fn listen() -> io::Result<Self> {
        let ignored = ignored();
        let listen = |signals: &[Number]| {
            let heard = signals.iter().filter(|signal| !is_in(ignored, **signal));
            heard
                .map(|signal| {
                    Ok((
                        *signal,
                        unix::signal(SignalKind::from_raw(signal.as_raw()))?,
                    ))
                })
                .collect::<io::Result<Vec<_>>>()
        };
        Ok(Self {
            to_end: listen(&TO_END)?,
            others: listen(&OTHERS)?,
            is_asked: false,
        })
    }

    /// The next signal. Cancel safety: safe, because a signal is kept until it is received.
    pub(crate) async fn next(&mut self) -> Signal {
        let signal = next_of(self.to_end.iter_mut().chain(&mut self.others)).await;
        self.is_asked |= TO_END.contains(&signal.0);
        signal
    }

    /// Whether a signal was received that asks this process to end.
    pub(crate) fn is_asked_to_end(&self) -> bool {
        self.is_asked
    }

    /// Drops the signals that have come and were not received. Returns the first of those that ask
    /// this process to end.
    pub(crate) fn forget(&mut self) -> Option<Signal> {
        while next_of(self.others.iter_mut()).now_or_never().is_some() {}
        let mut first = None;
        while let Some(signal) = self.next_to_end().now_or_never() {
            first = first.or(Some(signal));
        }
        first
    }

    /// The next signal that asks this process to end. Cancel safety: safe.
    pub(crate) async fn next_to_end(&mut self) -> Signal {
        let signal = next_of(self.to_end.iter_mut()).await;
        self.is_asked = true;
        signal
    }
}

async fn next_of(signals: impl Iterator<Item = &mut (Number, unix::Signal)>) -> Signal {
    let each = signals.map(|(number, signal)| signal.recv().map(|_| *number).boxed_local());
    let each: Vec<_> = each.collect();
    match each.is_empty() {
        true => std::future::pending().await,
        false => Signal(select_all(each).await.0),
    }
}

impl Signal {
    pub(crate) fn number(self) -> u8 {
        u8::try_from(self.0.as_raw()).unwrap_or(u8::MAX)
    }
}

/// The set of the signals that this process ignores, one bit for each. Only Linux tells.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.unwrap_or_default()
}

fn is_in(set: u64, signal: Number) -> bool {
    set >> (signal.as_raw() - 1) & 1 == 1
}
