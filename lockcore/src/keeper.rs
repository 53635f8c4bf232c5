//! The keeper: one thread per client that renews what the process holds or waits for, says so when
//! a lease has run out, rings alarms, and cleans up after dropped futures and guards. It has a
//! small runtime and a connection of its own, so that nothing a user does to his runtime (block
//! it, pause its clock, shut it down) can cost a lease.
//!
//! Taking tickets is in `acquire`, connections are in `supervise`. What the threads share is the
//! [`Table`]; its mutex is held for a few map operations and never across an await.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread::ThreadId;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use crate::backend::{
    Answer, Backend, Connection, Departure, Enqueued, Fault, Released, Renewed, StoreError, Wake,
};
use crate::clock::{Clock, Instant};
use crate::error::{Error, LostReason};
use crate::lease::{AlreadyLost, Lease};
use crate::name::Namespace;
use crate::request::{Id, Request};
use crate::supervise::{Link, Links, NotConnected};
use crate::token::FencingToken;

/// Tickets in one request: keeps a Redis script well below a millisecond.
const BATCH: usize = 100;

/// The longest sleep while something is due. Timers stand still while the machine is suspended and
/// the lease clock does not; after a resume the keeper catches up within this time.
const LONGEST_NAP: Duration = Duration::from_secs(1);

/// A store that does not answer for longer than this is taken for gone, with what it was sent.
const LONGEST_STALL: Duration = Duration::from_secs(60);

/// What handles, guards, connections and the keeper's thread have in common.
pub(crate) struct Shared {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) clock: Clock,
    pub(crate) namespace: Namespace,
    /// The time that one operation at the store may take, connecting included.
    pub(crate) op_timeout: Duration,
    /// Where the keeper's tasks run.
    pub(crate) keeper: tokio::runtime::Handle,
    pub(crate) links: Links,
    /// The highest ticket number that this client was told, on any name (P6).
    highest_seen: AtomicU64,
    table: Mutex<Table>,
    /// Wakes the keeper before its time.
    due_changed: Notify,
    /// Fires when the last lease and the last clean-up are gone.
    idle: Notify,
    /// Fires when the last handle is gone.
    ends: Notify,
    /// The keeper's own thread.
    thread: OnceLock<ThreadId>,
}

/// Whose connection an operation goes out on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Where {
    /// That of the runtime that the caller runs in.
    Here,
    /// The keeper's.
    Keeper,
}

struct Table {
    /// Every ticket that this process has asked for and not finished with.
    leases: HashMap<Id, Tracked>,
    /// When the keeper must look at a lease: never later than its renewal or its deadline.
    due: BTreeSet<(Instant, Id)>,
    alarms: BTreeMap<(Instant, u64), Waker>,
    alarms_set: u64,
    /// Tickets to be removed that no request carries yet.
    cleanups: Vec<Cleanup>,
    /// Clean-ups that are not finished, queued or under way.
    cleanups_open: usize,
    /// When the keeper will wake by itself; whoever puts in something earlier wakes it.
    next_wake: Instant,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// `shutdown` was called: nothing new is taken.
    ShutDown,
    /// The last handle is gone: the keeper ends when the clean-up is done, at this time at the latest.
    Ending(Instant),
}

struct Tracked {
    lease: Arc<Lease>,
    due: Option<Instant>,
    stage: Stage,
    /// A renewal is under way; its answer sets the next due time.
    renewing: bool,
    /// Its answer may be older than what is asked now: renew again when it is here.
    again: bool,
}

/// How far a ticket has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Asked for; the acquire loop looks after it alone.
    Asked,
    /// In line: renewed whatever the lease says, else it would lose its place.
    Waiting,
    /// In the user's hands.
    Held,
    /// Being released by the user: no later batch renews it, and it is not gone yet.
    Leaving,
}

/// A ticket that nobody wants any more and that may be at the store.
pub(crate) struct Cleanup {
    pub(crate) request: Arc<Request>,
    /// See [`Departure::enqueue_may_follow`].
    pub(crate) ambiguous: bool,
    /// The enqueue whose reply nobody waits for any more. The release must not overtake it: the
    /// keeper finishes it first.
    pub(crate) after: Option<Answer<Enqueued>>,
}

/// What was due when the keeper looked.
#[derive(Default)]
struct Round {
    renew: Vec<Arc<Lease>>,
    expired: Vec<(Arc<Lease>, Stage)>,
    alarms: Vec<Waker>,
    cleanups: Vec<Cleanup>,
    end: bool,
    next: Option<Instant>,
}

/// The thread. Dropping it lets the clean-up finish, for at most one operation timeout.
pub(crate) struct Keeper {
    shared: Arc<Shared>,
    ended: Mutex<mpsc::Receiver<()>>,
}

impl Keeper {
    pub(crate) fn start(
        backend: Arc<dyn Backend>,
        clock: Clock,
        namespace: Namespace,
        op_timeout: Duration,
    ) -> Result<(Self, Arc<Shared>), Error> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| {
                Error::unavailable(format!("cannot start the keeper's runtime: {error}"))
            })?;
        let shared = Arc::new(Shared {
            backend,
            clock,
            namespace,
            op_timeout,
            keeper: runtime.handle().clone(),
            links: Links::default(),
            highest_seen: AtomicU64::new(0),
            table: Mutex::new(Table {
                leases: HashMap::new(),
                due: BTreeSet::new(),
                alarms: BTreeMap::new(),
                alarms_set: 0,
                cleanups: Vec::new(),
                cleanups_open: 0,
                next_wake: Instant::FAR_FUTURE,
                phase: Phase::Open,
            }),
            due_changed: Notify::new(),
            idle: Notify::new(),
            ends: Notify::new(),
            thread: OnceLock::new(),
        });
        let (end, ended) = mpsc::channel();
        let for_thread = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("lockcore-keeper".into())
            .spawn(move || {
                // Nobody else sets it.
                let _ = for_thread.thread.set(std::thread::current().id());
                runtime.block_on(keep(&for_thread));
                for_thread.links.clear();
                drop(runtime);
                drop(end);
            })
            .map_err(|error| {
                Error::unavailable(format!("cannot start the keeper's thread: {error}"))
            })?;
        let keeper = Self {
            shared: Arc::clone(&shared),
            ended: Mutex::new(ended),
        };
        Ok((keeper, shared))
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let patience = self.shared.op_timeout;
        {
            let mut table = self.shared.table();
            table.phase = Phase::Ending(self.shared.clock.now().after(patience));
        }
        self.shared.ends.notify_waiters();
        self.shared.due_changed.notify_one();
        // A waker may drop the last handle on the very thread that would be waited for.
        if self.shared.thread.get() == Some(&std::thread::current().id()) {
            return;
        }
        // The thread drops its end of the channel as its last act; a little more than its own
        // patience lets it say so.
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(patience.saturating_add(Duration::from_millis(50)));
    }
}

async fn keep(shared: &Arc<Shared>) {
    loop {
        let now = shared.clock.now();
        let mut round = shared.table().take_round(now);
        for waker in round.alarms.drain(..) {
            waker.wake();
        }
        for (lease, stage) in round.expired.drain(..) {
            // Marks the loss and fires its signal, also while a renewal hangs.
            if let Some(reason @ (LostReason::Expired | LostReason::MaxHold)) = lease.lost(now) {
                tell_loss(&lease, stage, reason);
            }
        }
        for batch in round.renew.chunks(BATCH) {
            tokio::spawn(renew(Arc::clone(shared), batch.to_vec()));
        }
        let (asked, settled): (Vec<_>, Vec<_>) = round
            .cleanups
            .drain(..)
            .partition(|cleanup| cleanup.after.is_some());
        for cleanup in asked {
            tokio::spawn(finish_asking(Arc::clone(shared), cleanup));
        }
        let mut settled = settled.into_iter();
        loop {
            let batch: Vec<_> = settled.by_ref().take(BATCH).collect();
            if batch.is_empty() {
                break;
            }
            tokio::spawn(depart(Arc::clone(shared), batch));
        }
        if round.end {
            return;
        }
        let due_changed = shared.due_changed.notified();
        match round.next {
            None => due_changed.await,
            Some(next) => {
                let nap = shared.clock.now().until(next).min(LONGEST_NAP);
                let _ = tokio::time::timeout(nap, due_changed).await;
            }
        }
    }
}

/// What an operator wants to know is a lock that was lost; a place in line is taken anew.
fn tell_loss(lease: &Lease, stage: Stage, reason: LostReason) {
    let (lock, token) = (&lease.request.name, FencingToken::of_ticket(lease.ticket()));
    match stage {
        Stage::Held => tracing::warn!(%lock, %token, ?reason, "lock lost"),
        Stage::Asked | Stage::Waiting | Stage::Leaving => {
            tracing::debug!(%lock, ?reason, "ticket lost")
        }
    }
}

/// Renews a batch on the keeper's connection. Whatever goes wrong here changes no deadline.
async fn renew(shared: Arc<Shared>, leases: Vec<Arc<Lease>>) {
    let requests = leases
        .iter()
        .map(|lease| Arc::clone(&lease.request))
        .collect();
    let shortest = leases.iter().map(|lease| lease.request.ttl).min();
    let shortest = shortest.unwrap_or_default();
    // Begun after a third of the ttl, there is time for three attempts of a quarter each.
    let patience = shared.op_timeout.min(shortest / 4);
    let by = shared.clock.now().after(patience);
    let outcome = shared
        .operate(Where::Keeper, by, |connection| connection.renew(requests))
        .await;
    // The supervisor paces the reconnecting; this only keeps a refusing store from being asked in a
    // tight loop.
    let pause = Duration::from_millis(200).min(shortest / 10);
    match outcome {
        Ok((sent, answers)) => {
            for (lease, answer) in leases.iter().zip(answers) {
                shared.renewed(lease, sent, answer, pause);
            }
        }
        Err(error) => {
            tracing::debug!(%error, tickets = leases.len(), "renewal not acknowledged, trying again");
            for lease in &leases {
                let again = shared.clock.now().after(jittered(pause));
                shared.schedule(lease.request.id, again, None);
            }
        }
    }
}

/// Finishes an enqueue that its caller has dropped, and then removes what it may have left.
async fn finish_asking(shared: Arc<Shared>, mut cleanup: Cleanup) {
    let Some(enqueue) = cleanup.after.take() else {
        return;
    };
    let answer = async {
        tokio::select! {
            biased;
            answer = tokio::time::timeout(shared.op_timeout, enqueue) => answer.ok(),
            // Who waits for the end may be what drives the connection that the reply comes on; a
            // mark at the store is better than a lock that stays.
            () = shared.ending() => None,
        }
    };
    let left_behind = match answer.await {
        Some(Ok(Enqueued::Granted { .. } | Enqueued::Waiting { .. })) => true,
        // An earlier try with the same id may still be on its way even so.
        Some(Ok(Enqueued::Busy { .. } | Enqueued::CapacityMismatch { .. } | Enqueued::Gone)) => {
            cleanup.ambiguous
        }
        Some(Err(error)) if error.fault() != Fault::Unknown => cleanup.ambiguous,
        Some(Err(_)) | None => {
            cleanup.ambiguous = true;
            true
        }
    };
    if left_behind {
        depart(shared, vec![cleanup]).await;
    } else {
        shared.cleaned_up(1);
    }
}

/// Releases on the keeper's connection until the store acknowledges, or the tickets have run out
/// there by themselves.
async fn depart(shared: Arc<Shared>, mut batch: Vec<Cleanup>) {
    // A ticket that is at the store ends there with its lease. An enqueue that may still be on its
    // way does not: a server that was stopped reads it when it goes on.
    let patience = |cleanup: &Cleanup| match cleanup.ambiguous {
        true => cleanup.request.ttl.max(LONGEST_STALL),
        false => cleanup.request.ttl,
    };
    let longest = batch.iter().map(patience).max().unwrap_or_default();
    let give_up = shared.clock.now().after(longest).after(shared.op_timeout);
    let mut pause = Duration::from_millis(20);
    loop {
        let departures = batch
            .iter()
            .map(|cleanup| Departure {
                request: Arc::clone(&cleanup.request),
                enqueue_may_follow: cleanup.ambiguous,
            })
            .collect();
        let by = shared.clock.now().after(shared.op_timeout);
        let outcome = shared
            .operate(Where::Keeper, by, |connection| {
                connection.release(departures)
            })
            .await;
        match outcome {
            Ok((_, answers)) => {
                let before = batch.len();
                let mut answers = answers.into_iter();
                batch.retain(|_| answers.next() == Some(Released::Failed));
                shared.cleaned_up(before - batch.len());
                if batch.is_empty() {
                    return;
                }
            }
            Err(error) => {
                tracing::debug!(%error, tickets = batch.len(), "release not acknowledged, trying again");
            }
        }
        if shared.clock.now() >= give_up {
            tracing::warn!(
                tickets = batch.len(),
                "could not release at the store; what is left there ends with its lease"
            );
            return shared.cleaned_up(batch.len());
        }
        tokio::time::sleep(jittered(pause)).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}

impl Shared {
    /// Enters a lease before its first request is sent (P2), so that a wake-up that overtakes the
    /// reply finds it.
    ///
    /// # Errors
    ///
    /// [`LostReason::Shutdown`] once the client is shut down.
    pub(crate) fn arm(&self, lease: &Arc<Lease>) -> Result<(), Error> {
        let mut table = self.table();
        if table.phase != Phase::Open {
            return Err(Error::lost(LostReason::Shutdown));
        }
        let tracked = Tracked {
            lease: Arc::clone(lease),
            due: None,
            stage: Stage::Asked,
            renewing: false,
            again: false,
        };
        table.leases.insert(lease.request.id, tracked);
        Ok(())
    }

    /// Puts a lease into the keeper's care: it is looked at again at `due`.
    pub(crate) fn schedule(&self, id: Id, due: Instant, stage: Option<Stage>) {
        let mut table = self.table();
        let Some(tracked) = table.leases.get_mut(&id) else {
            return;
        };
        if let Some(stage) = stage {
            tracked.stage = stage;
        } else {
            tracked.renewing = false;
        }
        let due = match std::mem::take(&mut tracked.again) {
            true => Instant::from_nanos(0),
            false => due.min(tracked.lease.deadline()),
        };
        let before = tracked.due.replace(due);
        if let Some(before) = before {
            table.due.remove(&(before, id));
        }
        table.due.insert((due, id));
        self.wake_keeper_at(&mut table, due);
    }

    /// Takes a lease out of the keeper's care; no later batch renews it.
    pub(crate) fn disarm(&self, id: Id) {
        let mut table = self.table();
        table.remove(id);
        self.tell_if_idle(&table);
    }

    /// Hands a ticket to the keeper for removal, and takes it out of its care in the same step, so
    /// that there is no moment in which nobody is responsible for it.
    pub(crate) fn clean_up(&self, cleanup: Cleanup) {
        let mut table = self.table();
        table.remove(cleanup.request.id);
        table.cleanups.push(cleanup);
        table.cleanups_open += 1;
        drop(table);
        self.due_changed.notify_one();
    }

    fn cleaned_up(&self, count: usize) {
        let mut table = self.table();
        table.cleanups_open -= count;
        self.tell_if_idle(&table);
        if let Phase::Ending(_) = table.phase {
            self.due_changed.notify_one();
        }
    }

    /// When to renew a lease: after a third of its ttl, so that two renewals may fail before the
    /// lease is at risk, less up to a tenth of that as jitter, so that leases taken together do not
    /// stay together.
    pub(crate) fn renewal_time(lease: &Lease, valid_for: Duration) -> Instant {
        let jitter = (valid_for / 30).mul_f64(fastrand::f64());
        lease.deadline().before(valid_for / 3 * 2 + jitter)
    }

    /// Works an acknowledged renewal into the lease.
    fn renewed(&self, lease: &Arc<Lease>, sent: Instant, answer: Renewed, pause: Duration) {
        let id = lease.request.id;
        let (valid_for, recheck_in) = match answer {
            Renewed::Granted { valid_for } => (valid_for, None),
            Renewed::Waiting {
                valid_for,
                recheck_in,
            } => (valid_for, recheck_in),
            Renewed::Failed => {
                tracing::warn!(lock = %lease.request.name, "the store cannot renew this ticket, trying again");
                return self.schedule(id, self.clock.now().after(jittered(pause)), None);
            }
            Renewed::Lost => {
                let stage = self.table().leases.get(&id).map(|tracked| tracked.stage);
                if lease.lose(LostReason::Taken)
                    && let Some(stage) = stage
                {
                    tell_loss(lease, stage, LostReason::Taken);
                }
                return;
            }
        };
        if lease.extend(sent, valid_for, self.clock.now()) == Err(AlreadyLost) {
            // P3: an acknowledgement that comes too late leads to a release, never to a revival.
            // A guard that still holds this lease releases again when it goes; that finds nothing.
            return self.clean_up(Cleanup {
                request: Arc::clone(&lease.request),
                ambiguous: false,
                after: None,
            });
        }
        let due = if lease.deadline() < lease.hold_until() {
            Self::renewal_time(lease, valid_for)
        } else {
            Instant::FAR_FUTURE
        };
        self.schedule(
            id,
            recheck_in.map_or(due, |recheck| due.min(sent.after(recheck))),
            None,
        );
        if let Renewed::Granted { .. } = answer {
            self.grant_if_waiting(id);
        }
    }

    /// Renews one ticket on the caller's own connection, at once, and works the answer into the
    /// lease: a grant moves its deadline, a loss is final, an error changes nothing.
    pub(crate) async fn renew_now(
        self: &Arc<Self>,
        lease: &Lease,
        by: Instant,
    ) -> Result<Renewed, StoreError> {
        let by = by.min(self.clock.now().after(self.op_timeout));
        let request = Arc::clone(&lease.request);
        let (sent, answers) = self
            .operate(Where::Here, by, |connection| {
                connection.renew(vec![request])
            })
            .await?;
        let renewed = answers.first().copied().unwrap_or(Renewed::Failed);
        match renewed {
            Renewed::Granted { valid_for } | Renewed::Waiting { valid_for, .. } => {
                // An `Err` is a lease that ran out meanwhile; whoever looks at it next finds that.
                let _ = lease.extend(sent, valid_for, self.clock.now());
            }
            Renewed::Lost => {
                lease.lose(LostReason::Taken);
            }
            Renewed::Failed => {
                let text = "the store could not renew the ticket";
                return Err(StoreError::new(Fault::Unknown, text));
            }
        }
        Ok(renewed)
    }

    /// Tells a waiter that its renewal says "granted": its wake-up was lost or is on its way.
    fn grant_if_waiting(&self, id: Id) {
        let table = self.table();
        let Some(tracked) = table.leases.get(&id) else {
            return;
        };
        if tracked.stage != Stage::Waiting {
            return;
        }
        let lease = Arc::clone(&tracked.lease);
        drop(table);
        lease.grant(lease.ticket());
    }

    /// A wake-up. One for a ticket that is not ours, or not any more, grants nothing.
    fn granted(&self, wake: Wake) {
        let lease = self
            .table()
            .leases
            .get(&wake.id)
            .map(|tracked| Arc::clone(&tracked.lease));
        if let Some(lease) = lease {
            lease.grant(wake.ticket);
        }
    }

    /// Wake-ups may have been missed, or the server may have been another for a while: asks after
    /// everything.
    pub(crate) fn renew_everything(&self) {
        let now = self.clock.now();
        let mut table = self.table();
        let mut ids = Vec::new();
        for (id, tracked) in &mut table.leases {
            match tracked.stage {
                Stage::Waiting | Stage::Held if tracked.renewing => tracked.again = true,
                Stage::Waiting | Stage::Held => ids.push(*id),
                Stage::Asked | Stage::Leaving => {}
            }
        }
        for id in ids {
            if let Some(before) = table
                .leases
                .get_mut(&id)
                .and_then(|tracked| tracked.due.replace(now))
            {
                table.due.remove(&(before, id));
            }
            table.due.insert((now, id));
        }
        self.wake_keeper_at(&mut table, now);
    }

    /// A timer on the lease clock that needs nothing of the caller's runtime: neither its time
    /// driver, which may be off, nor its clock, which a test may have paused.
    pub(crate) fn alarm(self: &Arc<Self>, at: Instant) -> Alarm {
        Alarm {
            shared: Arc::clone(self),
            at,
            set: None,
        }
    }

    /// The result of a future, or `None` when the lease clock has reached `at` first.
    pub(crate) async fn by<T>(
        self: &Arc<Self>,
        at: Instant,
        future: impl Future<Output = T>,
    ) -> Option<T> {
        tokio::select! {
            biased;
            result = future => Some(result),
            () = self.alarm(at) => None,
        }
    }

    /// One operation, and the moment before it was sent (P3). Fails when it has not been answered
    /// by `by`, connecting included.
    pub(crate) async fn operate<T>(
        self: &Arc<Self>,
        whose: Where,
        by: Instant,
        verb: impl FnOnce(&dyn Connection) -> Answer<T>,
    ) -> Result<(Instant, T), StoreError> {
        let (link, connection) = self.connection(whose, by).await?;
        let sent = self.clock.now();
        match self.by(by, verb(&*connection)).await {
            Some(Ok(answer)) => Ok((sent, answer)),
            Some(Err(error)) => {
                link.failed(&connection, &error);
                Err(error)
            }
            None => {
                self.unanswered(&link, &connection, sent);
                let text = "the store did not answer in time";
                Err(StoreError::new(Fault::Unknown, text))
            }
        }
    }

    /// A connection that is up, and the link that it is of.
    pub(crate) async fn connection(
        self: &Arc<Self>,
        whose: Where,
        by: Instant,
    ) -> Result<(Arc<Link>, Arc<dyn Connection>), StoreError> {
        loop {
            // Outside of any runtime the keeper's connection serves: slower by a change of threads,
            // and good enough for a release in an odd place.
            let link = match (whose, tokio::runtime::Handle::try_current()) {
                (Where::Here, Ok(runtime)) => self.links.of(self, &runtime),
                (Where::Here, Err(_)) | (Where::Keeper, _) => self.links.of(self, &self.keeper),
            };
            match self.by(by, link.connection()).await {
                Some(Ok(connection)) => return Ok((link, connection)),
                Some(Err(NotConnected::Failed(error))) => return Err(error),
                // Nobody looks after it any more; the next one is another.
                Some(Err(NotConnected::Closed)) => {}
                None => {
                    return Err(link.trouble().unwrap_or_else(|| {
                        let text = "the store could not be reached in time";
                        StoreError::new(Fault::Retry, text)
                    }));
                }
            }
        }
    }

    /// No reply to what was sent at `sent`. Only after a whole operation timeout is that the
    /// connection's fault; a caller's budget may be shorter than what a sound one needs.
    pub(crate) fn unanswered(&self, link: &Link, connection: &Arc<dyn Connection>, sent: Instant) {
        if sent.until(self.clock.now()) >= self.op_timeout {
            link.replace(connection);
        }
    }

    /// Resolves when the last handle is gone.
    async fn ending(&self) {
        loop {
            let ends = self.ends.notified();
            let mut ends = std::pin::pin!(ends);
            // Registered before looking.
            ends.as_mut().enable();
            if let Phase::Ending(_) = self.table().phase {
                return;
            }
            ends.await;
        }
    }

    pub(crate) fn highest_seen(&self) -> u64 {
        self.highest_seen.load(Ordering::Relaxed)
    }

    pub(crate) fn saw_ticket(&self, ticket: u64) {
        self.highest_seen.fetch_max(ticket, Ordering::Relaxed);
    }

    /// Whether anything depends on a connection, so that a broken one must be replaced unasked.
    pub(crate) fn is_busy(&self) -> bool {
        let table = self.table();
        let asked = |tracked: &Tracked| tracked.stage == Stage::Asked;
        table.cleanups_open > 0 || !table.leases.values().all(asked)
    }

    /// Refuses what is new and gives up what waits; held leases stay.
    pub(crate) fn refuse_new(&self) {
        let mut table = self.table();
        if table.phase == Phase::Open {
            table.phase = Phase::ShutDown;
        }
        let waiting = table.leases_where(|stage| matches!(stage, Stage::Asked | Stage::Waiting));
        drop(table);
        for lease in waiting {
            lease.lose(LostReason::Shutdown);
        }
    }

    /// Marks what is still held as lost, so that the work on it stops.
    pub(crate) fn lose_held(&self) {
        let held = self.table().leases_where(|stage| stage == Stage::Held);
        for lease in held {
            if lease.lose(LostReason::Shutdown) {
                tell_loss(&lease, Stage::Held, LostReason::Shutdown);
            }
        }
    }

    /// Releases what is still held, whoever has the guard.
    pub(crate) fn release_held(&self) {
        let held = self.table().leases_where(|stage| stage == Stage::Held);
        for lease in held {
            self.clean_up(Cleanup {
                request: Arc::clone(&lease.request),
                ambiguous: lease.is_ambiguous(),
                after: None,
            });
        }
    }

    /// Waits until nothing is held, waited for, or being cleaned up. Returns how many are left when
    /// `until` has passed.
    pub(crate) async fn idle(self: &Arc<Self>, until: Instant) -> usize {
        loop {
            let idle = self.idle.notified();
            let mut idle = std::pin::pin!(idle);
            // Registered before looking, so that no change is missed in between.
            idle.as_mut().enable();
            let left = {
                let table = self.table();
                table.leases.len() + table.cleanups_open
            };
            if left == 0 || self.clock.now() >= until {
                return left;
            }
            tokio::select! {
                () = idle => {}
                () = self.alarm(until) => {}
            }
        }
    }

    fn tell_if_idle(&self, table: &Table) {
        if table.leases.is_empty() && table.cleanups_open == 0 {
            self.idle.notify_waiters();
        }
    }

    fn wake_keeper_at(&self, table: &mut Table, at: Instant) {
        if at < table.next_wake {
            table.next_wake = at;
            self.due_changed.notify_one();
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // No code that can panic runs under the mutex; should that change, the maps are still whole.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Everything that is due at `now`, and when to look next.
    fn take_round(&mut self, now: Instant) -> Round {
        let mut round = Round {
            cleanups: std::mem::take(&mut self.cleanups),
            ..Round::default()
        };
        while let Some(entry) = self.alarms.first_entry()
            && entry.key().0 <= now
        {
            round.alarms.push(entry.remove());
        }
        while let Some(&(due, id)) = self.due.first()
            && due <= now
        {
            self.due.remove(&(due, id));
            self.look_at(id, now, &mut round);
        }
        self.fill_batch(now, &mut round);
        let next = [
            self.due.first().map(|due| due.0),
            self.alarms.keys().next().map(|key| key.0),
        ];
        let mut next = next.into_iter().flatten().min();
        if let Phase::Ending(at_the_latest) = self.phase {
            round.end = self.cleanups_open == 0 || now >= at_the_latest;
            next = Some(next.map_or(at_the_latest, |next| next.min(at_the_latest)));
        }
        self.next_wake = next.unwrap_or(Instant::FAR_FUTURE);
        round.next = next;
        round
    }

    fn look_at(&mut self, id: Id, now: Instant, round: &mut Round) {
        let Some(tracked) = self.leases.get_mut(&id) else {
            return;
        };
        tracked.due = None;
        let deadline = tracked.lease.deadline();
        if deadline <= now {
            round
                .expired
                .push((Arc::clone(&tracked.lease), tracked.stage));
            return;
        }
        if !tracked.renewing && (tracked.stage == Stage::Waiting || tracked.lease.wants_renewal()) {
            tracked.renewing = true;
            round.renew.push(Arc::clone(&tracked.lease));
        }
        // The deadline is watched while the renewal is under way.
        tracked.due = Some(deadline);
        self.due.insert((deadline, id));
    }

    /// Takes leases along whose renewal is near, so that the last batch goes out full: fewer, fuller
    /// requests when many leases are held.
    fn fill_batch(&mut self, now: Instant, round: &mut Round) {
        let room = round.renew.len().next_multiple_of(BATCH) - round.renew.len();
        let soon: Vec<(Instant, Id)> = self
            .due
            .iter()
            .take(room)
            .filter(|(due, id)| {
                self.leases.get(id).is_some_and(|tracked| {
                    let near = now.after(tracked.lease.request.ttl / 10);
                    !tracked.renewing && *due <= near && *due < tracked.lease.deadline()
                })
            })
            .copied()
            .collect();
        for entry in soon {
            self.due.remove(&entry);
            self.look_at(entry.1, now, round);
        }
    }

    fn remove(&mut self, id: Id) {
        if let Some(Tracked { due: Some(due), .. }) = self.leases.remove(&id) {
            self.due.remove(&(due, id));
        }
    }

    fn leases_where(&self, wanted: impl Fn(Stage) -> bool) -> Vec<Arc<Lease>> {
        self.leases
            .values()
            .filter(|tracked| wanted(tracked.stage))
            .map(|tracked| Arc::clone(&tracked.lease))
            .collect()
    }
}

/// Resolves when the lease clock has reached a time; rung by the keeper.
pub(crate) struct Alarm {
    shared: Arc<Shared>,
    at: Instant,
    /// The entry in the table, from the first poll on that finds the time not reached.
    set: Option<u64>,
}

impl Future for Alarm {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.shared.clock.now() >= self.at {
            return Poll::Ready(());
        }
        let this = &mut *self;
        let mut table = this.shared.table();
        let number = *this.set.get_or_insert_with(|| {
            table.alarms_set += 1;
            table.alarms_set
        });
        table.alarms.insert((this.at, number), cx.waker().clone());
        this.shared.wake_keeper_at(&mut table, this.at);
        Poll::Pending
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Some(number) = self.set {
            self.shared.table().alarms.remove(&(self.at, number));
        }
    }
}

/// Where a connection tells what the store says unasked. Dropping it says that the connection is
/// of no use any more.
pub struct Events {
    shared: Weak<Shared>,
    receiver: u64,
    namespace: Namespace,
    _closed: oneshot::Sender<()>,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events")
            .field("receiver", &self.receiver)
            .finish_non_exhaustive()
    }
}

impl Events {
    /// A sink, and what resolves when it has been dropped.
    pub(crate) fn new(shared: &Arc<Shared>, receiver: u64) -> (Self, oneshot::Receiver<()>) {
        let (closed, when_closed) = oneshot::channel();
        let events = Self {
            shared: Arc::downgrade(shared),
            receiver,
            namespace: shared.namespace.clone(),
            _closed: closed,
        };
        (events, when_closed)
    }

    /// A number that no other receiver of wake-ups has, and that stays the same when the connection
    /// is replaced: tickets that were enqueued before are woken on the new one.
    #[must_use]
    pub fn receiver(&self) -> u64 {
        self.receiver
    }

    /// The namespace of all names that the client uses.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// A ticket is granted. Callable from any thread; wakes the waiter without blocking.
    pub fn granted(&self, wake: Wake) {
        if let Some(shared) = self.shared.upgrade() {
            shared.granted(wake);
        }
    }

    /// Wake-ups may have been missed: everything is asked after.
    pub fn gap(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.renew_everything();
        }
    }
}

/// Full jitter: anything up to `pause`, but not nothing.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.1 + 0.9 * fastrand::f64())
}
