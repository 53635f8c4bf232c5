//! What this process knows about its lease: its tickets, and the lines and counters that it follows.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::line::Copy;
use super::messages::{
    Event, KeyValue, WatchCancel, WatchCreate, WatchOp, WatchRequest, WatchResponse, behind,
};
use super::proof::Proof;
use crate::backend::{EventSink, StoreError, Wake};
use crate::clock::Instant;
use crate::name::Name;
use crate::request::{Id, Request};

/// For how long a line is followed after the last waiter, in case that another one comes. Its watch
/// costs a message for each change of the line.
const LINGER: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct State {
    pub(super) proof: Proof,
    /// Why the lease is over, if it is.
    pub(super) over: Option<StoreError>,
    pub(super) mine: HashMap<Id, Mine>,
    /// What needs the connection. `None` while there is none.
    pub(super) attached: Option<Attached>,
    /// The number of the last connection.
    pub(super) connections: u64,
    /// The lease of the marks, and when it was asked for.
    pub(super) marks: Option<(i64, Instant)>,
    /// For leases of counters: until when each certainly lives.
    pub(super) known: HashMap<i64, Instant>,
    /// The newest lease for each lifetime of counters, in seconds.
    pub(super) of_counters: HashMap<u64, i64>,
}

/// What ends with the connection.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) events: Arc<EventSink>,
    watches: mpsc::UnboundedSender<WatchRequest>,
    last_watch: i64,
    /// By the number of the watch.
    followed: HashMap<i64, Followed>,
    pub(super) lines: HashMap<String, Line>,
    counters: HashMap<Name, Counter>,
}

#[derive(Debug)]
enum Followed {
    Line(String),
    Counter(Name),
}

/// A line that is followed.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) copy: Copy,
    watch: i64,
    /// When it was read last.
    pub(super) read: Instant,
    /// When a request needed it last.
    used: Instant,
}

/// A counter that is watched.
#[derive(Debug)]
struct Counter {
    watch: i64,
    is_told: bool,
    /// Who waits until the server has begun.
    waiting: Vec<oneshot::Sender<()>>,
}

/// A ticket of this process.
#[derive(Clone, Debug)]
pub(super) struct Mine {
    pub(super) line: String,
    /// `None` while no enqueue was answered.
    pub(super) number: Option<i64>,
    pub(super) permits: u32,
    /// The ttl that its key shows.
    pub(super) ttl: Duration,
    /// Once set, this stays set.
    pub(super) granted: bool,
    /// When its key was last read. `None` if it must be read again.
    pub(super) seen: Option<Instant>,
    /// The key is gone, although this process has not deleted it.
    pub(super) lost: bool,
    /// A delete was sent.
    pub(super) leaving: bool,
    /// Until when the core may want the ticket back, if it was to be [detached](super::tickets::detach).
    pub(super) detached: Option<Instant>,
}

impl Mine {
    pub(super) fn is_waiting(&self) -> bool {
        self.number.is_some() && !self.granted && !self.lost && !self.leaving
    }

    /// Whether its line must be followed: it waits, or its enqueue may still be answered.
    fn needs_line(&self) -> bool {
        self.is_waiting() || (self.number.is_none() && !self.leaving)
    }
}

impl State {
    pub(super) fn new(proof: Proof) -> Self {
        Self {
            proof,
            over: None,
            mine: HashMap::new(),
            attached: None,
            connections: 0,
            marks: None,
            known: HashMap::new(),
            of_counters: HashMap::new(),
        }
    }

    /// Attaches a connection. Returns its number, and the requests for watches that it is to send.
    pub(super) fn attach(
        &mut self,
        events: Arc<EventSink>,
    ) -> (u64, mpsc::UnboundedReceiver<WatchRequest>) {
        let (watches, asked) = mpsc::unbounded_channel();
        self.connections += 1;
        self.attached = Some(Attached {
            events,
            watches,
            last_watch: 0,
            followed: HashMap::new(),
            lines: HashMap::new(),
            counters: HashMap::new(),
        });
        (self.connections, asked)
    }

    /// The connection with this number has ended. Returns what must be dropped outside of the
    /// mutex: the core does something when the events are dropped.
    pub(super) fn detach(&mut self, connection: u64) -> Option<Attached> {
        if self.connections != connection {
            return None;
        }
        // After a gap, every ticket is looked at.
        for mine in self.mine.values_mut() {
            mine.seen = None;
        }
        self.attached.take()
    }

    /// An enqueue of this request is about to be sent.
    pub(super) fn asks(&mut self, request: &Request, line: &str, ttl: Duration) {
        self.mine.entry(request.id).or_insert_with(|| Mine {
            line: line.to_owned(),
            number: None,
            permits: request.permits.get(),
            ttl,
            granted: false,
            seen: None,
            lost: false,
            leaving: false,
            detached: None,
        });
    }

    /// A ticket of ours is in its line.
    pub(super) fn stands(&mut self, id: Id, number: i64, granted: bool, now: Instant) {
        if let Some(mine) = self.mine.get_mut(&id) {
            if mine.number.is_some_and(|before| before != number) {
                // The earlier ticket with this id is gone: another client has adopted or deleted it.
                (mine.granted, mine.lost, mine.detached) = (false, false, None);
            }
            mine.number = Some(number);
            mine.granted |= granted;
            mine.seen = Some(now);
        }
    }

    /// Whether the copy of this line is certain to show the place of a new ticket.
    pub(super) fn line(&mut self, line: &str, now: Instant) -> Option<&Line> {
        let line = self.attached.as_mut()?.lines.get_mut(line)?;
        line.used = now;
        Some(line)
    }

    /// A line was read. Follows it from this revision on, if that is asked for or done already.
    /// Returns the tickets of ours that hold because of it.
    pub(super) fn read(
        &mut self,
        line: &str,
        (revision, listed): (i64, &[KeyValue]),
        follow: bool,
        now: Instant,
    ) -> Vec<Wake> {
        let Some(attached) = &mut self.attached else {
            return Vec::new();
        };
        match attached.lines.get_mut(line) {
            Some(followed) => {
                followed.copy.read(revision, listed);
                followed.read = now;
            }
            None if follow => {
                let watch =
                    attached.watch(Followed::Line(line.to_owned()), |watch_id| WatchCreate {
                        key: line.into(),
                        range_end: behind(line),
                        start_revision: revision + 1,
                        prev_kv: false,
                        watch_id,
                        fragment: true,
                    });
                let copy = Copy::new(line, revision, listed);
                let (read, used) = (now, now);
                let followed = Line {
                    copy,
                    watch,
                    read,
                    used,
                };
                attached.lines.insert(line.to_owned(), followed);
            }
            None => {}
        }
        self.grant(line)
    }

    /// Grants the tickets of ours that hold, as the copy of the line shows. Returns those that
    /// waited.
    pub(super) fn grant(&mut self, line: &str) -> Vec<Wake> {
        let line = self
            .attached
            .as_ref()
            .and_then(|attached| attached.lines.get(line));
        let mut wakes = Vec::new();
        for (number, place) in line.into_iter().flat_map(|line| line.copy.holders()) {
            if let Some(mine) = self.mine.get_mut(&place.id)
                && mine.number == Some(number)
                && mine.is_waiting()
            {
                mine.granted = true;
                // An ask-back may be in the key.
                mine.seen = None;
                wakes.push(Wake::new(place.id, number.unsigned_abs()));
            }
        }
        wakes
    }

    /// Applies what a watch of this connection has told. `None` if the watch has ended, so that
    /// something was missed. An earlier connection may still tell something. Its watches have the same
    /// numbers, and they may be ahead of those of the present one, so it is not believed.
    pub(super) fn told(&mut self, connection: u64, answer: &WatchResponse) -> Option<Told> {
        let mut told = Told::default();
        let is_present = self.connections == connection;
        let Some(attached) = self.attached.as_mut().filter(|_| is_present) else {
            return Some(told);
        };
        let id = answer.watch_id;
        if answer.canceled {
            // We have ended the watch ourselves if it is not known any more.
            return match attached.followed.remove(&id) {
                Some(Followed::Line(line)) => {
                    attached.lines.remove(&line);
                    None
                }
                Some(Followed::Counter(name)) => {
                    attached.counters.remove(&name);
                    None
                }
                None => Some(told),
            };
        }
        match attached.followed.get(&id) {
            Some(Followed::Counter(name)) => {
                let name = name.clone();
                let Some(counter) = attached.counters.get_mut(&name) else {
                    return Some(told);
                };
                counter.is_told |= answer.created;
                if counter.is_told {
                    for waiting in counter.waiting.drain(..) {
                        let _ = waiting.send(()); // The caller may be gone.
                    }
                }
                // A read that only prolongs the life of a counter writes it as it was.
                let is_news = |event: &Event| {
                    let value = event.kv.as_ref().map(|kv| &kv.value);
                    value != event.prev_kv.as_ref().map(|kv| &kv.value) || event.is_delete()
                };
                told.changed = answer.events.iter().any(is_news).then_some(name);
            }
            Some(Followed::Line(line)) => {
                let line = line.clone();
                let copy = attached.lines.get_mut(&line).map(|line| &mut line.copy);
                let left = copy.map_or_else(Vec::new, |copy| copy.apply(&answer.events));
                for id in left {
                    if let Some(mine) = self.mine.get_mut(&id)
                        && mine.number.is_some()
                        && !mine.leaving
                    {
                        mine.lost = true;
                        told.lost.push(id);
                    }
                }
                told.granted = self.grant(&line);
            }
            None => {}
        }
        Some(told)
    }

    /// Begins to watch a counter. `None` if there is no connection. Otherwise, who tells that the
    /// server has begun.
    pub(super) fn watch(&mut self, name: &Name, key: &str) -> Option<oneshot::Receiver<()>> {
        let attached = self.attached.as_mut()?;
        let (begun, begins) = oneshot::channel();
        if !attached.counters.contains_key(name) {
            let watch = attached.watch(Followed::Counter(name.clone()), |watch_id| WatchCreate {
                key: key.into(),
                range_end: Vec::new(),
                start_revision: 0,
                prev_kv: true,
                watch_id,
                fragment: false,
            });
            let counter = Counter {
                watch,
                is_told: false,
                waiting: Vec::new(),
            };
            attached.counters.insert(name.clone(), counter);
        }
        if let Some(counter) = attached.counters.get_mut(name) {
            match counter.is_told {
                true => drop(begun.send(())),
                false => counter.waiting.push(begun),
            }
        }
        Some(begins)
    }

    pub(super) fn unwatch(&mut self, name: &Name) {
        if let Some(attached) = &mut self.attached
            && let Some(counter) = attached.counters.remove(name)
        {
            attached.cancel(counter.watch);
        }
    }

    /// Forgets the tickets that were given away, and stops following the lines that nobody of ours
    /// waits in.
    pub(super) fn sweep(&mut self, now: Instant) {
        (self.mine).retain(|_, mine| mine.detached.is_none_or(|until| until > now));
        let Some(attached) = &mut self.attached else {
            return;
        };
        if attached.lines.is_empty() {
            return;
        }
        let waiting = self.mine.values().filter(|mine| mine.needs_line());
        let needed: HashSet<&str> = waiting.map(|mine| mine.line.as_str()).collect();
        let mut ended = Vec::new();
        attached.lines.retain(|key, line| {
            let is_kept = needed.contains(key.as_str()) || line.used.after(LINGER) > now;
            if !is_kept {
                ended.push(line.watch);
            }
            is_kept
        });
        for watch in ended {
            attached.cancel(watch);
        }
    }
}

/// What the core is to be told.
#[derive(Debug, Default)]
pub(super) struct Told {
    pub(super) granted: Vec<Wake>,
    pub(super) lost: Vec<Id>,
    pub(super) changed: Option<Name>,
}

impl Attached {
    fn watch(&mut self, followed: Followed, create: impl FnOnce(i64) -> WatchCreate) -> i64 {
        self.last_watch += 1;
        let watch = self.last_watch;
        self.followed.insert(watch, followed);
        self.send(WatchOp::Create(create(watch)));
        watch
    }

    fn cancel(&mut self, watch: i64) {
        self.followed.remove(&watch);
        self.send(WatchOp::Cancel(WatchCancel { watch_id: watch }));
    }

    fn send(&self, request: WatchOp) {
        let request = Some(request);
        // If the stream has ended, so has the connection, and the core opens another one.
        let _ = self.watches.send(WatchRequest { request });
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::name::Namespace;

    const LINE: &str = "lock:1:{a}/";
    const TTL: Duration = Duration::from_secs(10);
    const NOW: Instant = Instant::from_nanos(1_000_000_000);

    fn namespace() -> Namespace {
        Namespace::new("lock").unwrap()
    }

    fn attach(state: &mut State) -> u64 {
        let events = EventSink::new(1, namespace(), |_| {});
        state.attach(Arc::new(events)).0
    }

    fn tickets(state: &State) -> usize {
        let attached = state.attached.as_ref().unwrap();
        attached.lines[LINE].copy.len()
    }

    #[test]
    fn a_watch_of_an_earlier_connection_is_not_believed() {
        let mut state = State::new(Proof::new(TTL, NOW));
        let connections = [(); 2].map(|()| {
            let connection = attach(&mut state);
            state.read(LINE, (10, &[]), true, NOW);
            connection
        });
        let kv = KeyValue {
            key: super::super::layout::ticket(LINE, Id::draw().unwrap()).into(),
            create_revision: 11,
            mod_revision: 11,
            value: "1 1 1000 0\nowner".into(),
            ..KeyValue::default()
        };
        let news = WatchResponse {
            watch_id: 1,
            events: vec![Event {
                kv: Some(kv),
                ..Event::default()
            }],
            ..WatchResponse::default()
        };

        state.told(connections[0], &news);
        assert_eq!(tickets(&state), 0);
        state.told(connections[1], &news);
        assert_eq!(tickets(&state), 1);
    }

    #[test]
    fn a_line_is_followed_while_an_enqueue_is_not_answered() {
        let mut state = State::new(Proof::new(TTL, NOW));
        attach(&mut state);
        state.read(LINE, (10, &[]), true, NOW);
        let name = Name::new(namespace(), "a").unwrap();
        let (id, one) = (Id::draw().unwrap(), NonZeroU32::MIN);
        state.asks(&Request::new(name, id, one, one, TTL), LINE, TTL);
        let is_followed = |state: &State| !state.attached.as_ref().unwrap().lines.is_empty();

        let late = NOW.after(LINGER * 2);
        state.sweep(late);
        assert!(is_followed(&state));
        state.mine.clear();
        state.sweep(late);
        assert!(!is_followed(&state));
    }
}
