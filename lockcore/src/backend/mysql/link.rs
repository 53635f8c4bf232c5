//! The connections of a client to the server, and what the answers tell of other tickets.
//!
//! The server carries out the calls of a connection one by one, and each waits for the disk. So a
//! link opens more connections while calls wait, up to [`MOST`], and closes them again when they are
//! idle. All take the next call from one queue.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::AbortHandle;

use super::calls::Call;
use super::config::Server;
use super::dial::{Settings, ask_for_room, dial, settings};
use super::errors::failed;
use super::settled::Settled;
use super::wire::{Failure, Row, Wire};
use crate::backend::events::Timer;
use crate::backend::table::{Looks, Upkeep};
use crate::backend::{EventSink, Fault, StoreError, Wake};
use crate::clock::Clock;
use crate::request::Id;

/// So many connections at most. A server allows 151 by default, to all its clients.
const MOST: usize = 4;

/// So many connections at most wait at the server for the rows of names that a call for several names
/// has skipped. The others are left for calls that need not wait.
pub(super) const MOST_WAIT: usize = 2;

/// A connection that opened later than the first is closed after this time without a call.
const IDLE: Duration = Duration::from_secs(5);

/// The longest pause between two looks.
const LATEST_LOOK: Duration = Duration::from_millis(100);

/// When calls have waited for so long for a connection, another one is opened. The calls under way
/// may wait at the server for rows that somebody has locked.
const STUCK: Duration = Duration::from_millis(20);

/// A call that meets a deadlock is made so many more times.
const DEADLOCKS: u32 = 2;

/// What the links of a client share.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) server: Arc<Server>,
    links: Mutex<HashMap<u64, Weak<Inner>>>,
    /// The tickets whose state is being asked for. The answer tells of a grant, so no look does.
    asked: Mutex<Vec<Id>>,
    settled: Settled,
}

/// Where a ticket stands: the key of its name, and its number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Spot {
    pub(super) name: Arc<str>,
    pub(super) ticket: u64,
}

/// The clock that [`Looks`] count by.
pub(super) fn now_millis() -> i64 {
    i64::try_from(Clock::BOOT.now().as_nanos() / 1_000_000).unwrap_or(i64::MAX)
}

/// Tickets whose state is being asked for, until this is dropped.
pub(super) struct Asking<'s> {
    store: &'s Store,
    ids: Vec<Id>,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let mut asked = self.store.asked();
        for id in &self.ids {
            // Another request may ask for the same ticket.
            if let Some(at) = asked.iter().position(|asked| asked == id) {
                asked.swap_remove(at);
            }
        }
    }
}

/// A call on its way to a connection.
struct Job {
    text: Vec<u8>,
    /// The answer is about these tickets, so no wake-up tells of them.
    answered: Vec<Id>,
    reply: oneshot::Sender<Result<Vec<Row>, StoreError>>,
    /// Dropped when the call has ended, even if nobody waits for its answer any more.
    _leave: Option<Leave>,
}

/// The permission to wait at the server for a row that somebody has locked.
pub(super) type Leave = OwnedSemaphorePermit;

/// The connections of one runtime. They end with the last copy of this value.
pub(super) struct Link {
    pub(super) inner: Arc<Inner>,
    tasks: Vec<AbortHandle>,
}

pub(super) struct Inner {
    store: Arc<Store>,
    pub(super) receiver: u64,
    /// `None` when the connections have ended.
    events: Mutex<Option<Arc<EventSink>>>,
    ended: watch::Sender<bool>,
    /// Of the server of the first connection.
    settings: Settings,
    /// How long an operation of the client may take.
    pub(super) op_timeout: Duration,
    pub(super) timer: Timer,
    queue: mpsc::UnboundedSender<Job>,
    /// A worker that waits for a call holds this mutex.
    jobs: tokio::sync::Mutex<mpsc::UnboundedReceiver<Job>>,
    /// See [`MOST_WAIT`].
    may_wait: Arc<Semaphore>,
    /// How many connections there are, or are being opened.
    open: AtomicUsize,
    more: Mutex<Vec<AbortHandle>>,
    runtime: Handle,
    pub(super) looks: Mutex<Looks<Spot>>,
    /// A ticket begins to wait.
    pub(super) waits: Notify,
    pub(super) upkeep: Upkeep,
}

impl Store {
    pub(super) fn new(server: Server) -> Self {
        Self {
            server: Arc::new(server),
            links: Mutex::default(),
            asked: Mutex::default(),
            settled: Settled::default(),
        }
    }

    fn asked(&self) -> MutexGuard<'_, Vec<Id>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn asking(&self, ids: Vec<Id>) -> Asking<'_> {
        self.asked().extend(&ids);
        Asking { store: self, ids }
    }

    pub(super) fn is_asked(&self, id: Id) -> bool {
        self.asked().contains(&id)
    }

    fn links(&self) -> MutexGuard<'_, HashMap<u64, Weak<Inner>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn link(&self, receiver: u64) -> Option<Arc<Inner>> {
        self.links().get(&receiver)?.upgrade()
    }

    /// The link on which this ticket was enqueued, if it waits.
    fn link_of(&self, id: Id) -> Option<Arc<Inner>> {
        let links: Vec<_> = self.links().values().filter_map(Weak::upgrade).collect();
        links.into_iter().find(|link| link.looks().is_waiting(id))
    }

    /// Notes the new end of a ticket that waits. A renewal may come on another link than the
    /// enqueue, whose tasks look for it.
    pub(super) fn waits(&self, renewed_on: &Arc<Inner>, id: Id, spot: Spot, ttl: Duration) {
        match self.link_of(id) {
            Some(link) => link.waits(id, spot, ttl),
            None => renewed_on.waits(id, spot, ttl),
        }
    }

    /// Notes that a ticket does not wait any more, and that its client knows that.
    pub(super) fn settled(&self, id: Id) {
        if let Some(link) = self.link_of(id) {
            link.looks().settled(id);
        }
        self.settled.note(id);
    }

    /// Notes that a ticket holds, and tells its client so if it has waited.
    pub(super) fn granted(&self, wake: Wake) {
        match self.link_of(wake.id) {
            Some(link) => link.granted(wake),
            None => self.settled(wake.id),
        }
    }

    /// The link that tells of a grant of this ticket: the one on which it waits. After a
    /// reconnection, a ticket that was not renewed yet waits on none. `None` if its client knows of
    /// the grant.
    fn teller(&self, id: Id, receiver: Option<u64>) -> Option<Arc<Inner>> {
        self.link_of(id).or_else(|| {
            let is_unknown = !self.settled.has(id);
            self.link(receiver.filter(|_| is_unknown)?)
        })
    }

    /// Tells of tickets of this client that were granted by a call: `<receiver>:<id>:<ticket>,…`.
    /// Other clients look.
    fn tell(&self, told: &str, answered: &[Id]) {
        for grant in told.split(',') {
            let mut parts = grant.split(':');
            let receiver = parts
                .next()
                .and_then(|receiver| receiver.parse::<i64>().ok());
            let id = parts.next().and_then(Id::parse);
            let ticket = parts.next().and_then(|ticket| ticket.parse().ok());
            if let (Some(id), Some(ticket)) = (id, ticket)
                && !answered.contains(&id)
                && let Some(link) = self.teller(id, receiver.map(i64::cast_unsigned))
            {
                link.granted(Wake::new(id, ticket));
            }
        }
    }
}

impl Link {
    /// Begins to work on this connection.
    pub(super) fn begin(
        store: &Arc<Store>,
        wire: Wire,
        settings: Settings,
        events: EventSink,
    ) -> Self {
        let (queue, jobs) = mpsc::unbounded_channel();
        let inner = Arc::new(Inner {
            store: Arc::clone(store),
            receiver: events.receiver(),
            op_timeout: events.op_timeout(),
            timer: events.timer(),
            events: Mutex::new(Some(Arc::new(events))),
            ended: watch::Sender::new(false),
            settings,
            queue,
            jobs: tokio::sync::Mutex::new(jobs),
            may_wait: Arc::new(Semaphore::new(MOST_WAIT)),
            open: AtomicUsize::new(1),
            more: Mutex::default(),
            runtime: Handle::current(),
            looks: Mutex::new(Looks::new(LATEST_LOOK)),
            waits: Notify::new(),
            upkeep: Upkeep::default(),
        });
        store.links().insert(inner.receiver, Arc::downgrade(&inner));
        let work = tokio::spawn(work(Arc::clone(&inner), wire, true));
        let tasks = vec![work.abort_handle()];
        Self { inner, tasks }
    }

    /// Begins a task that ends with the connections.
    pub(super) fn spawn<T>(&mut self, task: impl FnOnce(Arc<Inner>) -> T)
    where
        T: Future<Output = ()> + Send + 'static,
    {
        let task = tokio::spawn(task(Arc::clone(&self.inner)));
        self.tasks.push(task.abort_handle());
    }
}

/// The tasks share `Inner`, so it would not be dropped by itself.
impl Drop for Link {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        self.inner.end();
        let mut links = self.inner.store.links();
        // The next link of this receiver may be there already.
        let ours = Arc::downgrade(&self.inner);
        if links
            .get(&self.inner.receiver)
            .is_some_and(|link| link.ptr_eq(&ours))
        {
            links.remove(&self.inner.receiver);
        }
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link({:?})", self.inner.store.server)
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Inner({:?})", self.store.server)
    }
}

impl Inner {
    pub(super) fn store(&self) -> &Store {
        &self.store
    }

    pub(super) fn looks(&self) -> MutexGuard<'_, Looks<Spot>> {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call, as one transaction. Returns all rows when it is committed.
    ///
    /// If the future is dropped before a connection has taken the call, it is not made. After that
    /// it is carried out, and its wake-ups are sent.
    pub(super) async fn ask(
        self: &Arc<Self>,
        call: Call,
        answered: Vec<Id>,
    ) -> Result<Vec<Row>, StoreError> {
        self.ask_with(call, answered, None).await
    }

    /// Resolves when a call for a name that was skipped may be made.
    pub(super) async fn leave(&self) -> Option<Leave> {
        // The semaphore is never closed.
        Arc::clone(&self.may_wait).acquire_owned().await.ok()
    }

    /// The same as [`ask`](Self::ask). Such a call may wait at the server.
    pub(super) async fn ask_with(
        self: &Arc<Self>,
        call: Call,
        answered: Vec<Id>,
        leave: Option<Leave>,
    ) -> Result<Vec<Row>, StoreError> {
        const ENDED: &str = "MySQL: the connection has ended";
        let mut end = self.ended.subscribe();
        if *end.borrow() {
            return Err(StoreError::replace(Fault::Retry, ENDED));
        }
        let (reply, mut answer) = oneshot::channel();
        let job = Job {
            text: call.text(),
            answered,
            reply,
            _leave: leave,
        };
        let _ = self.queue.send(job); // the other end is a part of this
        loop {
            tokio::select! {
                biased;
                answer = &mut answer => return answer.map_err(|_| StoreError::broken(ENDED))?,
                // The call may be on its way.
                _ = end.wait_for(|ended| *ended) => return Err(StoreError::broken(ENDED)),
                () = (self.timer)(STUCK) => {}
            }
            if self.is_stuck() {
                self.grow();
            }
        }
    }

    /// Notes that a ticket of this link waits.
    pub(super) fn waits(&self, id: Id, spot: Spot, ttl: Duration) {
        let millis = i64::try_from(ttl.as_millis()).unwrap_or(i64::MAX);
        let ends = now_millis().saturating_add(millis);
        // It may have been refused before.
        self.store.settled.forget(id);
        let mut looks = self.looks();
        // Of the tickets of a name, only the first one looks.
        let line = Spot {
            name: Arc::clone(&spot.name),
            ticket: 0,
        };
        let is_first = (looks.first_behind(Some(line)))
            .is_none_or(|(first, _)| first.name != spot.name || first.ticket >= spot.ticket);
        looks.waits(id, spot, ends, is_first);
        drop(looks);
        self.waits.notify_one();
    }

    /// Tells the client that a ticket is granted.
    pub(super) fn granted(&self, wake: Wake) {
        self.store.settled(wake.id);
        if let Some(events) = self.events() {
            events.granted(wake);
        }
    }

    /// The client of this ticket is to renew it.
    pub(super) fn recheck(&self, id: Id) {
        if let Some(events) = self.events() {
            events.recheck(id, Duration::ZERO);
        }
    }

    fn events(&self) -> Option<Arc<EventSink>> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.clone()
    }

    /// Ends all connections. The core learns of it, because the events are dropped.
    fn end(&self) {
        let events = (self.events.lock().unwrap_or_else(PoisonError::into_inner)).take();
        drop(events);
        self.ended.send_replace(true);
        let more = std::mem::take(&mut *self.more.lock().unwrap_or_else(PoisonError::into_inner));
        more.iter().for_each(AbortHandle::abort);
    }

    /// Whether a call waits, and no connection is idle.
    fn is_stuck(&self) -> bool {
        self.jobs.try_lock().is_ok_and(|jobs| !jobs.is_empty())
    }

    /// Opens another connection, if there may be more. The address may lead to another server by
    /// now, which has not the same tickets. Then all connections end.
    fn grow(self: &Arc<Self>) {
        let grown = self
            .open
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |open| {
                (open < MOST).then_some(open + 1)
            });
        if grown.is_err() {
            return;
        }
        let inner = Arc::clone(self);
        let task = self.runtime.spawn(async move {
            match another(&inner.store.server, inner.op_timeout).await {
                Ok((wire, settings)) if settings == inner.settings => {
                    work(Arc::clone(&inner), wire, false).await;
                }
                Ok(_) => inner.end(),
                // The server may have no room for more. The first connection works on.
                Err(_) => (inner.timer)(IDLE).await,
            }
            inner.open.fetch_sub(1, Ordering::Relaxed);
        });
        let mut more = self.more.lock().unwrap_or_else(PoisonError::into_inner);
        more.retain(|task| !task.is_finished());
        more.push(task.abort_handle());
    }
}

/// Fails if the server has little room left: the last connections are for clients that have none.
async fn another(server: &Server, op_timeout: Duration) -> Result<(Wire, Settings), StoreError> {
    let mut wire = dial(server, op_timeout).await?;
    if !ask_for_room(&mut wire).await? {
        return Err(StoreError::new(
            Fault::Retry,
            "MySQL: few connections are left",
        ));
    }
    let settings = settings(&mut wire).await?;
    Ok((wire, settings))
}

/// Takes calls from the queue and makes them on this connection, until the connection ends. When the
/// first connection ends, or one in the middle of a call, the link ends.
async fn work(inner: Arc<Inner>, mut wire: Wire, is_first: bool) {
    loop {
        let idle = async {
            match is_first {
                true => std::future::pending().await,
                false => (inner.timer)(IDLE).await,
            }
        };
        let job = tokio::select! {
            biased;
            job = next(&inner) => job,
            () = wire.ended() => None,
            () = idle => return,
        };
        let Some(job) = job else { break };
        // The caller has gone, and nothing was sent.
        if job.reply.is_closed() {
            continue;
        }
        let answer = carry_out(&inner.store, &mut wire, &job).await;
        let is_refused = matches!(answer, Err(Failure::Refused { .. }));
        let answer = answer.map_err(failed);
        let ends = matches!(&answer, Err(error) if error.is_broken());
        // A call that was ended by somebody does not roll back by itself. The next one on this
        // connection would commit what it has left.
        let rolled_back = !is_refused || ends || wire.ask(b"ROLLBACK").await.is_ok();
        // A caller that has gone needs no answer.
        let _ = job.reply.send(answer);
        if ends || !rolled_back {
            inner.end();
            return;
        }
    }
    if is_first {
        inner.end();
    }
}

/// Makes a call, and tells of the grants that its answer names.
async fn carry_out(store: &Store, wire: &mut Wire, job: &Job) -> Result<Vec<Row>, Failure> {
    let _under_way = store.settled.begin_call();
    let mut answer = wire.ask(&job.text).await;
    // The server has rolled the call back, because somebody who has locked rows of these tables waited
    // for it, too. It is carried out when the other one is done. The core repeats most verbs, but it
    // tells the caller of a release that fails. So this is not left to it.
    for _ in 0..DEADLOCKS {
        match answer {
            Err(Failure::Refused { code: 1213, .. }) => answer = wire.ask(&job.text).await,
            _ => break,
        }
    }
    let rows = answer?;
    // If the caller has gone, nobody learns anything from the answer.
    let answered = match job.reply.is_closed() {
        true => &[][..],
        false => &job.answered,
    };
    for row in &rows {
        // A call that grants nothing to others has no such column.
        if let Ok(Some(told)) = row.get("told") {
            store.tell(&String::from_utf8_lossy(told), answered);
        }
    }
    Ok(rows)
}

/// The next call. If others wait behind it, another connection helps.
async fn next(inner: &Arc<Inner>) -> Option<Job> {
    let mut jobs = inner.jobs.lock().await;
    let job = jobs.recv().await;
    if !jobs.is_empty() {
        inner.grow();
    }
    job
}
