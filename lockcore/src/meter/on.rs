//! With the feature `metrics`: the handles that a client emits through.
//!
//! A recorder is code of the user. It must not block, which is a rule of the crate `metrics`. If it
//! panics, the panic hook reports the panic, and the client goes on. A forked child emits nothing:
//! a thread of the parent may have held a mutex of the recorder at the fork.
//!
//! A handle belongs to the recorder that was there when the handle was made. So what raises a gauge
//! and what lowers it again always use the same handle.

use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, Unit};

use super::{HandOver, Renewal};
use crate::error::{Error, ErrorKind, LostReason};
use crate::fork::Process;
use crate::log::guarded;

/// The value of the label `lock` for locks that have no label. The name of a lock is no substitute:
/// names have no bound, and each would be a time series of its own.
const OTHER: &str = "other";

/// The value of the label `store` for a store outside of this crate, and for one whose address is
/// not shown.
const OTHER_STORE: &str = "other";

const METADATA: Metadata<'static> = Metadata::new("lockcore", Level::INFO, None);

/// A metric: its name, its kind, its unit, and what it counts.
struct Metric {
    name: &'static str,
    kind: Kind,
    unit: Unit,
    text: &'static str,
}

#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

const ACQUISITIONS: &str = "lockcore_acquisitions_total";
const WAIT: &str = "lockcore_wait_seconds";
const HOLD: &str = "lockcore_hold_seconds";
const RENEWALS: &str = "lockcore_renewals_total";
const RENEWAL_LATE: &str = "lockcore_renewal_late_seconds";
const LOST: &str = "lockcore_lost_total";
const HAND_OVERS: &str = "lockcore_hand_overs_total";
const HELD: &str = "lockcore_held";
const WAITING: &str = "lockcore_waiting";
const CLEANUPS_OPEN: &str = "lockcore_cleanups_open";
const CONNECTED: &str = "lockcore_connected";
const STORE_REQUEST: &str = "lockcore_store_request_seconds";
const RECONNECTS: &str = "lockcore_reconnects_total";

/// All metrics. The texts are those of the table in the guide.
const ALL: &[Metric] = &[
    Metric {
        name: ACQUISITIONS,
        kind: Kind::Counter,
        unit: Unit::Count,
        text: "Callers that asked for a lock and are done with asking",
    },
    Metric {
        name: WAIT,
        kind: Kind::Histogram,
        unit: Unit::Seconds,
        text: "How long the callers that got a lock waited for it",
    },
    Metric {
        name: HOLD,
        kind: Kind::Histogram,
        unit: Unit::Seconds,
        text: "How long locks were held, counted at the end of each hold",
    },
    Metric {
        name: HELD,
        kind: Kind::Gauge,
        unit: Unit::Count,
        text: "Holds that have not ended",
    },
    Metric {
        name: WAITING,
        kind: Kind::Gauge,
        unit: Unit::Count,
        text: "Callers that ask for a lock at this moment",
    },
    Metric {
        name: LOST,
        kind: Kind::Counter,
        unit: Unit::Count,
        text: "Locks that were lost while they were held",
    },
    Metric {
        name: HAND_OVERS,
        kind: Kind::Counter,
        unit: Unit::Count,
        text: "Locks that went from one holder to the next",
    },
    Metric {
        name: RENEWALS,
        kind: Kind::Counter,
        unit: Unit::Count,
        text: "Renewals of tickets, held and waiting ones",
    },
    Metric {
        name: RENEWAL_LATE,
        kind: Kind::Histogram,
        unit: Unit::Seconds,
        text: "How long after a third of the ttl a renewal was acknowledged",
    },
    Metric {
        name: CLEANUPS_OPEN,
        kind: Kind::Gauge,
        unit: Unit::Count,
        text: "Tickets that the keeper is removing at the store",
    },
    Metric {
        name: CONNECTED,
        kind: Kind::Gauge,
        unit: Unit::Count,
        text: "Connections to the store that are up",
    },
    Metric {
        name: RECONNECTS,
        kind: Kind::Counter,
        unit: Unit::Count,
        text: "Connections that were made again",
    },
    Metric {
        name: STORE_REQUEST,
        kind: Kind::Histogram,
        unit: Unit::Seconds,
        text: "How long the store took to answer",
    },
];

impl Metric {
    fn describe(&self, recorder: &dyn Recorder) {
        let (name, unit, text) = (self.name.into(), Some(self.unit), self.text.into());
        match self.kind {
            Kind::Counter => recorder.describe_counter(name, unit, text),
            Kind::Gauge => recorder.describe_gauge(name, unit, text),
            Kind::Histogram => recorder.describe_histogram(name, unit, text),
        }
    }
}

/// What all handles of some metrics have in common.
#[derive(Clone)]
struct Series {
    process: Process,
    labels: Vec<Label>,
}

impl Series {
    fn with(&self, label: &'static str, value: &'static str) -> Self {
        let mut series = self.clone();
        series.labels.push(Label::from_static_parts(label, value));
        series
    }

    fn counter(&self, name: &'static str) -> Counter {
        let made = self.made(name, |recorder, key| {
            recorder.register_counter(key, &METADATA)
        });
        made.unwrap_or_else(Counter::noop)
    }

    fn gauge(&self, name: &'static str) -> Gauge {
        let made = self.made(name, |recorder, key| {
            recorder.register_gauge(key, &METADATA)
        });
        made.unwrap_or_else(Gauge::noop)
    }

    fn histogram(&self, name: &'static str) -> Histogram {
        let made = self.made(name, |recorder, key| {
            recorder.register_histogram(key, &METADATA)
        });
        made.unwrap_or_else(Histogram::noop)
    }

    fn made<T>(&self, name: &'static str, make: impl Fn(&dyn Recorder, &Key) -> T) -> Option<T> {
        let key = Key::from_parts(name, self.labels.clone());
        let make = || metrics::with_recorder(|recorder| make(recorder, &key));
        catch_unwind(AssertUnwindSafe(make)).ok()
    }

    fn emit(&self, emit: impl FnOnce()) {
        if self.process.is_this() {
            guarded(emit);
        }
    }
}

/// The metrics of one client.
pub(crate) struct Meter {
    series: Series,
    /// The metrics of the locks without a label.
    others: OnceLock<LockMeter>,
    locks: Mutex<HashMap<&'static str, LockMeter>>,
    renewed: Counter,
    lost: Counter,
    failed: Counter,
    renewal_late: Histogram,
    reconnects: Counter,
    connected: Gauge,
    cleanups_open: Gauge,
    /// How much this client has added to the gauge.
    open: AtomicUsize,
    requests: Requests,
}

impl Meter {
    /// `place` is the address of the store, as messages show it. Only its scheme is used.
    pub(crate) fn new(place: &str, namespace: &str, process: &Process) -> Self {
        let describe = |recorder: &dyn Recorder| {
            ALL.iter().for_each(|metric| metric.describe(recorder));
        };
        guarded(|| metrics::with_recorder(describe));
        let series = Series {
            process: process.clone(),
            labels: vec![
                Label::new("store", kind_of(place)),
                Label::new("namespace", namespace.to_owned()),
            ],
        };
        let renewals = |outcome| series.with("outcome", outcome).counter(RENEWALS);
        Self {
            renewed: renewals("renewed"),
            lost: renewals("lost"),
            failed: renewals("failed"),
            renewal_late: series.histogram(RENEWAL_LATE),
            reconnects: series.counter(RECONNECTS),
            connected: series.gauge(CONNECTED),
            cleanups_open: series.gauge(CLEANUPS_OPEN),
            open: AtomicUsize::new(0),
            requests: Requests(Arc::new(Answered {
                series: series.clone(),
                answered: Default::default(),
            })),
            others: OnceLock::new(),
            locks: Mutex::default(),
            series,
        }
    }

    /// The metrics of the locks with this label.
    pub(crate) fn lock(&self, label: Option<&'static str>) -> LockMeter {
        // A thread of the parent may have held the mutex at the fork.
        if !self.series.process.is_this() {
            return LockMeter::NONE;
        }
        // Not under the mutex, because this runs code of the recorder.
        let made = |label| LockMeter(Some(Arc::new(OfLock::new(self.series.with("lock", label)))));
        let Some(label) = label else {
            return self.others.get_or_init(|| made(OTHER)).clone();
        };
        let locks = || self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        let known = locks().get(label).cloned();
        known.unwrap_or_else(|| {
            let made = made(label);
            locks().entry(label).or_insert(made).clone()
        })
    }

    /// The metrics of the requests to the store.
    pub(crate) fn requests(&self) -> Requests {
        self.requests.clone()
    }

    /// The store has answered, or has not answered, these renewals.
    pub(crate) fn renewals(&self, outcome: Renewal, count: usize) {
        if count == 0 {
            return;
        }
        let counter = match outcome {
            Renewal::Renewed => &self.renewed,
            Renewal::Lost => &self.lost,
            Renewal::Failed => &self.failed,
        };
        self.series.emit(|| counter.increment(count as u64));
    }

    /// A renewal was acknowledged this long after its time. `None` if it had no time.
    pub(crate) fn renewal_late(&self, by: impl FnOnce() -> Option<Duration>) {
        if let Some(by) = by() {
            self.series.emit(|| self.renewal_late.record(by));
        }
    }

    /// A connection was lost and is up again.
    pub(crate) fn reconnected(&self) {
        self.series.emit(|| self.reconnects.increment(1));
    }

    /// A connection is up.
    pub(crate) fn connected(&self) -> Up {
        let (series, gauge) = (self.series.clone(), self.connected.clone());
        series.emit(|| gauge.increment(1.0));
        Up {
            series,
            gauge,
            is_down: AtomicBool::new(false),
        }
    }

    /// The keeper begins to remove these tickets at the store.
    pub(crate) fn cleanups_begun(&self, count: usize) {
        if count > 0 {
            self.open.fetch_add(count, Ordering::SeqCst);
            let emit = || self.cleanups_open.increment(count as f64);
            self.series.emit(emit);
        }
    }

    /// The keeper is done with these tickets.
    pub(crate) fn cleaned_up(&self, count: usize) {
        if count > 0 {
            self.open.fetch_sub(count, Ordering::SeqCst);
            let emit = || self.cleanups_open.decrement(count as f64);
            self.series.emit(emit);
        }
    }
}

/// The client has ended, perhaps with clean-ups that it could not finish.
impl Drop for Meter {
    fn drop(&mut self) {
        self.cleaned_up(self.open.load(Ordering::SeqCst));
    }
}

/// The kind of a store: the scheme of its URL, without the way to the server.
fn kind_of(place: &str) -> String {
    let scheme = place.split_once(':').map_or("", |(scheme, _)| scheme);
    let plain = scheme.trim_end_matches("+tls").trim_end_matches("+unix");
    match plain.replace("rediss", "redis") {
        kind if kind.is_empty() => OTHER_STORE.to_owned(),
        kind => kind,
    }
}

/// The metrics of the locks with one label.
#[derive(Clone)]
pub(crate) struct LockMeter(Option<Arc<OfLock>>);

struct OfLock {
    series: Series,
    granted: Counter,
    cancelled: Counter,
    wait: Histogram,
    hold: Histogram,
    held: Gauge,
    waiting: Gauge,
    busy: OnceLock<Counter>,
    timeout: OnceLock<Counter>,
    in_process: OnceLock<Counter>,
    at_store: OnceLock<Counter>,
}

impl OfLock {
    fn new(series: Series) -> Self {
        let asked = |outcome| series.with("outcome", outcome).counter(ACQUISITIONS);
        // A query for what was added sees no first loss whose series begins with it. So the series
        // of the two that are alarming begin with zero.
        for reason in ["expired", "taken"] {
            let _ = series.with("reason", reason).counter(LOST);
        }
        Self {
            granted: asked("granted"),
            cancelled: asked("cancelled"),
            wait: series.histogram(WAIT),
            hold: series.histogram(HOLD),
            held: series.gauge(HELD),
            waiting: series.gauge(WAITING),
            busy: OnceLock::new(),
            timeout: OnceLock::new(),
            in_process: OnceLock::new(),
            at_store: OnceLock::new(),
            series,
        }
    }

    fn hand_overs(&self, by: HandOver) -> &Counter {
        let (counter, place) = match by {
            HandOver::Process => (&self.in_process, "process"),
            HandOver::Store => (&self.at_store, "store"),
        };
        counter.get_or_init(|| self.series.with("where", place).counter(HAND_OVERS))
    }
}

impl LockMeter {
    /// Counts nothing.
    pub(crate) const NONE: Self = Self(None);

    fn emit(&self, emit: impl FnOnce(&OfLock)) {
        if let Some(of_lock) = &self.0 {
            of_lock.series.emit(|| emit(of_lock));
        }
    }

    /// A caller asks for a lock. If the value is dropped, the caller has given up.
    pub(crate) fn asks(&self) -> Asking {
        self.emit(|lock| lock.waiting.increment(1.0));
        Asking {
            meter: self.clone(),
            is_open: true,
        }
    }

    /// A hold begins.
    pub(crate) fn held(&self) {
        self.emit(|lock| lock.held.increment(1.0));
    }

    /// A hold has ended, lost or not.
    pub(crate) fn ended(&self, held_for: impl FnOnce() -> Duration) {
        self.emit(|lock| {
            lock.held.decrement(1.0);
            lock.hold.record(held_for());
        });
    }

    /// A lock was lost while it was held.
    pub(crate) fn lost(&self, reason: LostReason) {
        let reason = match reason {
            LostReason::Expired => "expired",
            LostReason::Taken => "taken",
            LostReason::Shutdown => "shutdown",
            LostReason::MaxHold => "max_hold",
            LostReason::Revoked => "revoked",
            LostReason::Released => "released",
            LostReason::Forked => "forked",
        };
        self.emit(|lock| {
            lock.series
                .with("reason", reason)
                .counter(LOST)
                .increment(1)
        });
    }
}

/// A caller that asks for a lock.
pub(crate) struct Asking {
    meter: LockMeter,
    is_open: bool,
}

impl Asking {
    pub(crate) fn granted(mut self, waited: Duration, by: Option<HandOver>) {
        self.is_open = false;
        self.meter.emit(|lock| {
            lock.granted.increment(1);
            lock.wait.record(waited);
            if let Some(by) = by {
                lock.hand_overs(by).increment(1);
            }
        });
    }

    pub(crate) fn refused(mut self, error: &Error) {
        self.is_open = false;
        let kind = error.kind();
        self.meter.emit(|lock| {
            let asked = || {
                let series = lock.series.with("outcome", kind.code());
                series.counter(ACQUISITIONS)
            };
            match kind {
                ErrorKind::Busy => lock.busy.get_or_init(asked).increment(1),
                ErrorKind::Timeout => lock.timeout.get_or_init(asked).increment(1),
                _ => asked().increment(1),
            }
        });
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.meter.emit(|lock| {
            lock.waiting.decrement(1.0);
            if self.is_open {
                lock.cancelled.increment(1);
            }
        });
    }
}

/// A connection that is up, until it is [down](Self::down) or dropped.
pub(crate) struct Up {
    series: Series,
    gauge: Gauge,
    is_down: AtomicBool,
}

impl Up {
    pub(crate) fn down(&self) {
        if !self.is_down.swap(true, Ordering::SeqCst) {
            self.series.emit(|| self.gauge.decrement(1.0));
        }
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        self.down();
    }
}

/// The requests to a store: the verbs of its contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Enqueue,
    Renew,
    Release,
    Inspect,
    List,
    AskBack,
    Detach,
    Adopt,
    Resize,
    Forget,
    Count,
    Watch,
    Unwatch,
    Check,
}

impl Verb {
    const NAMES: [&str; 14] = [
        "enqueue", "renew", "release", "inspect", "list", "ask_back", "detach", "adopt", "resize",
        "forget", "count", "watch", "unwatch", "check",
    ];
}

/// The metrics of the requests of one client.
#[derive(Clone)]
pub(crate) struct Requests(Arc<Answered>);

struct Answered {
    series: Series,
    /// The handles for requests that were answered, by verb. All others are seldom.
    answered: [OnceLock<Histogram>; Verb::NAMES.len()],
}

impl Requests {
    /// A request is sent.
    pub(crate) fn begin(&self, verb: Verb) -> Asked {
        Asked {
            requests: self.clone(),
            verb,
            since: Instant::now(),
            outcome: "unanswered",
        }
    }

    fn of(&self, verb: Verb, outcome: &'static str) -> Histogram {
        let verb = self.0.series.with("verb", Verb::NAMES[verb as usize]);
        verb.with("outcome", outcome).histogram(STORE_REQUEST)
    }
}

/// A request that was sent. If nobody waits for its answer to the end, it is unanswered: an
/// operation timeout is over, or the caller was dropped.
pub(crate) struct Asked {
    requests: Requests,
    verb: Verb,
    since: Instant,
    outcome: &'static str,
}

impl Asked {
    pub(crate) fn ended(mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Asked {
    /// The outcome of a request that was carried out.
    pub(crate) const OK: &str = "ok";
}

impl Drop for Asked {
    fn drop(&mut self) {
        let Requests(requests) = &self.requests;
        requests.series.emit(|| {
            let took = self.since.elapsed();
            match self.outcome {
                Self::OK => {
                    let answered = &requests.answered[self.verb as usize];
                    let first = || self.requests.of(self.verb, Self::OK);
                    answered.get_or_init(first).record(took);
                }
                outcome => self.requests.of(self.verb, outcome).record(took),
            }
        });
    }
}

/// The meters show no numbers: the recorder has them.
macro_rules! shown_by_name {
    ($($meter:ident),*) => {$(
        impl fmt::Debug for $meter {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(stringify!($meter))
            }
        }
    )*};
}

shown_by_name!(Meter, LockMeter, Up, Requests);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_the_guide_has_exactly_these_metrics() {
        let page = include_str!("../guide/metrics.md");
        let row = |metric: &Metric| {
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Histogram => "histogram",
            };
            (
                metric.name.to_owned(),
                kind.to_owned(),
                metric.text.to_owned(),
            )
        };
        let rows = page.lines().filter_map(|line| {
            let line = line.strip_prefix("| `lockcore_")?;
            let mut cells = line.split('|').map(str::trim);
            let name = format!("lockcore_{}", cells.next()?.trim_end_matches('`'));
            Some((name, cells.next()?.to_owned(), cells.nth(1)?.to_owned()))
        });

        assert_eq!(
            rows.collect::<Vec<_>>(),
            ALL.iter().map(row).collect::<Vec<_>>()
        );
    }

    #[test]
    fn the_kind_of_a_store_is_its_scheme_without_the_way_to_the_server() {
        let kinds = [
            ("memory:", "memory"),
            ("redis://a:6379/1", "redis"),
            ("rediss://a", "redis"),
            ("redis+unix:/run/redis.sock", "redis"),
            ("rediss+sentinel://a,b/master", "redis+sentinel"),
            ("redis+cluster://a", "redis+cluster"),
            ("redlock+tls://a,b,c", "redlock"),
            ("zookeeper+tls://a", "zookeeper"),
            ("postgres+tls://a/db", "postgres"),
            ("etcd+tls://a", "etcd"),
            ("sqlite:/tmp/a.db", "sqlite"),
            ("", "other"),
        ];
        for (place, kind) in kinds {
            assert_eq!(kind_of(place), kind, "{place}");
        }
    }
}
