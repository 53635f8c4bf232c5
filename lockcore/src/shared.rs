//! What handles, guards, connections and the keeper's thread have in common: the table under its
//! mutex, which is held for a few map operations and never across an await, and operations at the
//! store with their deadlines.

use std::future::Future;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use humantime::format_duration;
use tokio::runtime;
use tracing::Level;

use crate::backend::{
    Answer, Backend, Connection, Departure, Fault, Released, Renewed, StoreError, Wake,
};
use crate::clock::{Clock, Instant};
use crate::config::Fair;
use crate::error::{Error, LostReason};
use crate::events::{Event, EventListener, Teller};
use crate::gate::{Connected, Gate, Pass, Replaced};
use crate::lease::{AlreadyLost, Lease, Renewal};
use crate::local::Lanes;
use crate::lock::Wait;
use crate::log::{Log, guarded};
use crate::name::{Name, Namespace};
use crate::request::{Id, Request};
use crate::supervise::{Links, NotConnected};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, Notify};
use crate::table::{Cleanup, Phase, Stage, Table, Tracked};

/// However often a message says so, which somebody may have forged, nobody looks again more often.
const LEAST_RECHECK: Duration = Duration::from_millis(100);

const FORKED: &str =
    "this client was made before a fork, in the parent process; make another in the child";

/// What a client is made with, checked.
pub(crate) struct Settings {
    pub(crate) clock: Clock,
    pub(crate) namespace: Namespace,
    pub(crate) op_timeout: Duration,
    /// Where the store is, to tell it from another and for messages; empty if nobody said so.
    pub(crate) place: String,
    /// For logs.
    pub(crate) owner: Arc<str>,
    pub(crate) defaults: Defaults,
}

/// What a lock does that does not say otherwise.
pub(crate) struct Defaults {
    pub(crate) ttl: Duration,
    pub(crate) wait: Wait,
    pub(crate) fair: Fair,
}

/// What handles, guards, connections and the keeper's thread have in common.
pub(crate) struct Shared {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) clock: Clock,
    pub(crate) namespace: Namespace,
    /// The time that one operation at the store may take, connecting included.
    pub(crate) op_timeout: Duration,
    /// See [`Settings::place`].
    pub(crate) place: String,
    owner: Arc<str>,
    pub(crate) defaults: Defaults,
    /// Where the keeper's tasks run.
    pub(crate) keeper: runtime::Handle,
    pub(crate) links: Links,
    pub(crate) lanes: Lanes,
    /// The process that the client was made in.
    pid: u32,
    /// The highest ticket number that this client was told, on any name.
    highest_seen: AtomicU64,
    /// See [`Shared::epoch`].
    epoch: AtomicU64,
    table: Mutex<Table>,
    /// Wakes the keeper before its time.
    pub(crate) due_changed: Notify,
    /// Fires when the last lease and the last clean-up are gone.
    idle: Notify,
    /// Fires when the last handle is gone.
    pub(crate) ends: Notify,
    pub(crate) teller: Teller,
    /// It was told that the store refuses renewals.
    refusing: AtomicBool,
    /// The end of the client was told.
    told_end: AtomicBool,
    log: Log,
}

/// When a request was sent, by the clock that leases are judged by, and in which
/// [epoch](Shared::epoch).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    pub(crate) at: Instant,
    pub(crate) epoch: u64,
}

/// Whose connection an operation goes out on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Where {
    /// That of the runtime that the caller runs in.
    Here,
    /// The keeper's.
    Keeper,
}
impl Shared {
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        settings: Settings,
        keeper: runtime::Handle,
    ) -> Self {
        let own_for = match settings.defaults.fair {
            Fair::Local(bound) => bound,
            Fair::Strict => Duration::ZERO,
        };
        Self {
            backend,
            clock: settings.clock,
            namespace: settings.namespace,
            op_timeout: settings.op_timeout,
            place: settings.place,
            owner: settings.owner,
            defaults: settings.defaults,
            keeper,
            links: Links::default(),
            lanes: Lanes::new(own_for),
            pid: std::process::id(),
            highest_seen: AtomicU64::new(0),
            epoch: AtomicU64::new(1),
            table: Mutex::default(),
            due_changed: Notify::new(),
            idle: Notify::new(),
            ends: Notify::new(),
            teller: Teller::default(),
            refusing: AtomicBool::new(false),
            told_end: AtomicBool::new(false),
            log: Log::default(),
        }
    }

    /// The store as messages name it.
    pub(crate) fn store(&self) -> &str {
        match self.place.as_str() {
            "" => "the store",
            place => place,
        }
    }

    /// Logs a line, without the caller's thread waiting for the subscriber if it is the keeper's.
    pub(crate) fn log(&self, level: Level, line: impl FnOnce() + Send + 'static) {
        self.log.say(level, &self.keeper, line);
    }

    /// The client begins: said once, on the caller's thread.
    pub(crate) fn tell_start(&self) {
        let Defaults { ttl, wait, fair } = &self.defaults;
        let wait = match wait {
            Wait::For(wait) => format_duration(*wait).to_string(),
            Wait::Forever => "forever".to_owned(),
        };
        let fair = match fair {
            Fair::Local(bound) => format_duration(*bound).to_string(),
            Fair::Strict => "strict".to_owned(),
        };
        tracing::info!(
            store = self.store(),
            namespace = self.namespace.as_str(),
            owner = &*self.owner,
            ttl = %format_duration(*ttl),
            wait,
            fair,
            "lock client started"
        );
    }

    /// The client ends, with so many locks that it could not release: said once, whether it was shut down, or
    /// its last handle went, or both.
    pub(crate) fn tell_end(&self, left: usize) {
        if self.told_end.swap(true, Ordering::SeqCst) {
            return;
        }
        let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
        match left {
            0 => self.log(Level::INFO, move || {
                tracing::info!(store, owner = &*owner, "lock client ended");
            }),
            _ => self.log(Level::WARN, move || {
                tracing::warn!(
                    store,
                    owner = &*owner,
                    left,
                    "lock client ended; the locks that are left end with their leases"
                );
            }),
        }
    }

    /// The store is out of reach: a warning once in an outage, however many connections there are and however
    /// often they are tried, and once more when it turns out to be something that a person must mend.
    pub(crate) fn suspended(&self, error: &StoreError) {
        let is_news = |mistake| self.teller.suspended(self.clock.now(), mistake);
        let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
        let error = error.clone();
        match is_news(error.fault() == Fault::Config) {
            true => self.log(Level::WARN, move || {
                tracing::warn!(store, owner = &*owner, %error, "the lock store is out of reach");
            }),
            false => self.log(Level::DEBUG, move || {
                tracing::debug!(store, owner = &*owner, %error, "the lock store is still out of reach");
            }),
        }
    }

    pub(crate) fn restored(&self) {
        if let Some(since) = self.teller.restored() {
            let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
            let after = since.until(self.clock.now());
            self.log(Level::WARN, move || {
                tracing::warn!(store, owner = &*owner, ?after, "the lock store is back");
            });
        }
    }

    /// What the store says to renewals, for those who watch the client: a ticket that it fails to renew twice in a
    /// row is refused, as the first failure may be about an earlier request that was cut off.
    pub(crate) fn renewals_answered(&self, leases: &[Arc<Lease>], answers: &[Renewed]) {
        let mut accepted = false;
        for (lease, answer) in leases.iter().zip(answers) {
            match answer {
                Renewed::Granted { .. } | Renewed::Waiting { .. } => {
                    lease.renewal_accepted();
                    accepted = true;
                }
                Renewed::Failed if lease.renewal_refused() > 1 => {
                    let name = lease.request.name.as_str().escape_debug();
                    let text = format!("it cannot renew the ticket of \"{name}\"");
                    self.tell_refusal(StoreError::new(Fault::Unknown, text));
                }
                Renewed::Failed | Renewed::Lost => {}
            }
        }
        if accepted {
            self.tell_acceptance();
        }
    }

    /// The store says no to all these renewals, on a sound connection.
    pub(crate) fn renewals_refused(&self, leases: &[Arc<Lease>], error: &StoreError) {
        for lease in leases {
            lease.renewal_refused();
        }
        self.tell_refusal(error.clone());
    }

    /// A warning once, as for an outage.
    fn tell_refusal(&self, error: StoreError) {
        // An outage has been told of.
        let news = !self.teller.is_suspended() && !self.refusing.swap(true, Ordering::SeqCst);
        let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
        if news {
            self.log(Level::WARN, move || {
                tracing::warn!(store, owner = &*owner, %error, "the lock store refuses renewals");
            });
        }
    }

    /// A renewal was accepted: a warning once, when no other ticket is refused any more.
    fn tell_acceptance(&self) {
        if !self.refusing.load(Ordering::SeqCst) {
            return;
        }
        let now = self.clock.now();
        let is_refused = |lease: &Lease| lease.is_refused() && lease.deadline() > now;
        let table = self.table();
        if (table.leases.values()).any(|tracked| is_refused(&tracked.lease)) {
            return;
        }
        drop(table);
        if self.refusing.swap(false, Ordering::SeqCst) {
            let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
            self.log(Level::WARN, move || {
                tracing::warn!(
                    store,
                    owner = &*owner,
                    "the lock store accepts renewals again"
                );
            });
        }
    }

    /// Listens to what the client has to tell.
    pub(crate) fn listen(self: &Arc<Self>) -> EventListener {
        if self.is_forked() {
            // The client is gone there.
            return Teller::default().listen();
        }
        let listener = self.teller.listen();
        self.await_restoration();
        listener
    }

    /// Somebody wants to hear that the store is back: has the keeper's connection opened, in case
    /// that nobody is opening any.
    pub(crate) fn await_restoration(self: &Arc<Self>) {
        // In this order: a forked child must not touch the rest.
        if self.is_forked()
            || !self.teller.is_suspended()
            || !self.teller.is_heard()
            || self.links.have_ended()
        {
            return;
        }
        match self.links.up(&self.keeper) {
            // It was another connection that failed, and is needed no more.
            Some(_) => self.restored(),
            None => drop(self.links.of(self, &self.keeper)),
        }
    }

    /// Enters a lease before its first request is sent, so that a wake-up that overtakes the
    /// reply finds it.
    ///
    /// # Errors
    ///
    /// [`LostReason::Shutdown`] once the client is shut down.
    pub(crate) fn arm(&self, lease: &Arc<Lease>) -> Result<(), Error> {
        let mut table = self.table();
        if table.phase != Phase::Open {
            return Err(Error::shut_down());
        }
        let tracked = Tracked::new(lease, self.epoch());
        table.leases.insert(lease.request.id, tracked);
        Ok(())
    }

    /// The capacity of a name that a guard of this client has, if that is one of the few that it has at
    /// all: for the text of an error, which must not take its time while many are held.
    pub(crate) fn held_among_few(&self, name: &Name) -> Option<NonZeroU32> {
        const FEW: usize = 100;
        let table = self.table();
        let mut few = table.leases.values().take(FEW);
        let held = few.find(|held| held.stage == Stage::Held && held.lease.request.name == *name);
        held.map(|held| held.lease.request.capacity)
    }

    /// Whether this process is a forked child of the one that made the client. The child has neither
    /// the keeper's thread nor connections of its own. What it has are copies: sockets that the parent
    /// talks on, and mutexes that a thread of the parent may have held. So all of it is over there,
    /// and nothing of it may be touched.
    pub(crate) fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    /// # Errors
    ///
    /// `Config` in a [forked child](Self::is_forked).
    pub(crate) fn refuse_forked(&self) -> Result<(), Error> {
        match self.is_forked() {
            true => Err(Error::config(FORKED)),
            false => Ok(()),
        }
    }

    /// Puts a lease into the keeper's care at a stage: it is looked at again at `due`. False if the
    /// keeper has given the ticket back meanwhile, because its task was not polled.
    pub(crate) fn entrust(&self, id: Id, stage: Stage, due: Instant) -> bool {
        let mut table = self.table();
        let Some(tracked) = table.leases.get_mut(&id) else {
            return false;
        };
        tracked.stage = stage;
        let due = tracked.look_by.take().map_or(due, |by| due.min(by));
        self.look_again_at(&mut table, id, due);
        true
    }

    /// Puts a lease that was just granted into the keeper's care. False if the keeper has given the
    /// ticket back meanwhile, because nobody collected it.
    ///
    /// One that has waited has its time for the next renewal. Another, which would differ by the jitter,
    /// could only wake the keeper, at the very moment that the holder wants to go on.
    pub(crate) fn entrust_held(&self, lease: &Lease) -> bool {
        let mut table = self.table();
        let id = lease.request.id;
        let Some(tracked) = table.leases.get_mut(&id) else {
            return false;
        };
        tracked.stage = Stage::Held;
        let due = if lease.wants_renewal() {
            let times = Self::renewal_times(lease, lease.ttl());
            if tracked.due.is_some_and(|due| times.contains(&due)) {
                return true;
            }
            Self::renewal_time(lease, lease.ttl())
        } else {
            Instant::FAR_FUTURE // the keeper only watches the deadline
        };
        self.look_again_at(&mut table, id, due);
        true
    }

    /// An enqueue is being sent. At a store with sessions a ticket stays for as long as the session,
    /// so one whose reply is not looked at, because its task is not polled, is given back by the
    /// keeper when no task that is polled would still be waiting for it. Elsewhere it runs out.
    pub(crate) fn will_be_answered_by(&self, id: Id, by: Instant) {
        if self.backend.capability().sessions {
            let mut table = self.table();
            if let Some(tracked) = table.leases.get_mut(&id) {
                tracked.answer_by = Some(by);
            }
            self.look_again_at(&mut table, id, by);
        }
    }

    /// Leaves a lease that its user is done with in the keeper's care: renewed as before, and given
    /// back at `until`. No shutdown waits for that: see [`settle_kept`](Self::settle_kept).
    pub(crate) fn keep(&self, lease: &Lease, until: Instant) {
        let mut table = self.table();
        let due = table.keep(lease.request.id, until);
        self.wake_keeper_at(&mut table, due);
        // Under the same mutex: a shutdown must not find it kept by nobody.
        let settled = table.phase != Phase::Open && self.settle(&mut table);
        let idle = table.is_awaited_idle();
        drop(table);
        if settled {
            self.due_changed.notify_one();
        }
        self.tell_if(idle);
    }

    /// The client comes to its end: what it keeps is left to the store, with a ttl that ends when it
    /// was to be given back. At a store with sessions tickets have no ttl of their own; there the
    /// keeper gives back what it can, and the session is not closed over what is left.
    fn settle_kept(&self) {
        let settled = self.settle(&mut self.table());
        if settled {
            self.due_changed.notify_one();
        }
    }

    fn settle(&self, table: &mut Table) -> bool {
        !self.backend.capability().sessions && table.settle_kept()
    }

    /// A renewal has come to its end, whichever; the next look is at `due`.
    pub(crate) fn renewal_over(&self, id: Id, due: Instant) {
        let mut table = self.table();
        if let Some(tracked) = table.leases.get_mut(&id) {
            tracked.renewing = false;
            let due = match tracked.was_asked_in(self.epoch()) {
                true => due,
                false => self.clock.now(),
            };
            let due = tracked.look_by.take().map_or(due, |by| due.min(by));
            self.look_again_at(&mut table, id, due);
        }
    }

    /// Has the keeper look at a lease at a time.
    pub(crate) fn look_again(&self, id: Id, due: Instant) {
        self.look_again_at(&mut self.table(), id, due);
    }

    fn look_again_at(&self, table: &mut Table, id: Id, due: Instant) {
        let due = table.look_again_at(id, due);
        self.wake_keeper_at(table, due);
    }

    /// Takes a lease out of the keeper's care; no later batch renews it.
    pub(crate) fn disarm(&self, id: Id) {
        let mut table = self.table();
        table.remove(id);
        let idle = table.is_awaited_idle();
        drop(table);
        self.tell_if(idle);
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

    pub(crate) fn cleaned_up(&self, count: usize) {
        let mut table = self.table();
        table.cleanups_open -= count;
        let idle = table.is_awaited_idle();
        let ending = matches!(table.phase, Phase::Ending(_));
        drop(table);
        self.tell_if(idle);
        if ending {
            self.due_changed.notify_one();
        }
    }

    /// When to renew a lease: after a third of its ttl, so that two renewals may fail before the
    /// lease is at risk, less up to a tenth of that as jitter, so that leases taken together do not
    /// stay together.
    pub(crate) fn renewal_time(lease: &Lease, valid_for: Duration) -> Instant {
        let latest = *Self::renewal_times(lease, valid_for).end();
        latest.before((valid_for / 30).mul_f64(fastrand::f64()))
    }

    fn renewal_times(lease: &Lease, valid_for: Duration) -> RangeInclusive<Instant> {
        let latest = lease.deadline().before(valid_for / 3 * 2);
        latest.before(valid_for / 30)..=latest
    }

    /// Works the answer to a renewal into the lease.
    pub(crate) fn renewed(
        self: &Arc<Self>,
        lease: &Arc<Lease>,
        renewal: Renewal,
        sent: Sent,
        answer: Renewed,
        pause: Duration,
    ) {
        let id = lease.request.id;
        let asked = Arc::clone(&renewal);
        let (valid_for, recheck_in) = match answer {
            Renewed::Granted { valid_for } => (renewal.answered(valid_for), None),
            Renewed::Waiting {
                valid_for,
                recheck_in,
            } => (renewal.answered(valid_for), recheck_in),
            Renewed::Failed => {
                let lock = lease.request.name.clone();
                // The keeper tells of what concerns more than this one.
                self.log(Level::DEBUG, move || {
                    tracing::debug!(%lock, "the store cannot renew this ticket, trying again");
                });
                return self.renewal_over(id, self.clock.now().after(jittered(pause)));
            }
            Renewed::Lost => return self.taken(lease),
        };
        let Sent { at: sent, epoch } = sent;
        lease.confirm(epoch);
        if lease.extend(sent, valid_for, self.clock.now()) == Err(AlreadyLost) {
            // An acknowledgement that comes too late leads to a release, never to a revival.
            // Nobody may have noticed the deadline yet, and after the clean-up the keeper will not. A
            // guard that still holds this lease releases again when it goes; that finds nothing.
            if let Some(reason) = lease.lost(self.clock.now())
                && let Some(stage) = self.stage(id)
            {
                self.lost(lease, stage, reason);
            }
            return self.clean_up(Cleanup::of(lease));
        }
        let due = if lease.deadline() < lease.hold_until() {
            Self::renewal_time(lease, valid_for)
        } else {
            Instant::FAR_FUTURE
        };
        self.renewal_over(
            id,
            recheck_in.map_or(due, |recheck| due.min(sent.after(recheck))),
        );
        if let Renewed::Granted { .. } = answer {
            self.grant_if_waiting(id);
            self.note_acknowledged(lease, &asked);
        }
    }

    /// Has the keeper renew a lease that is held or kept at once, also if it is being renewed already.
    pub(crate) fn renew_soon(&self, id: Id) {
        let mut table = self.table();
        match table.leases.get_mut(&id) {
            Some(tracked) if !matches!(tracked.stage, Stage::Held | Stage::Kept { .. }) => {}
            Some(tracked) if tracked.renewing => tracked.ask_again(),
            Some(_) => self.look_again_at(&mut table, id, self.clock.now()),
            None => {}
        }
    }

    /// Renews one ticket on the caller's own connection, at once, and works the answer into the
    /// lease: a grant moves its deadline, a loss is final, an error changes nothing.
    pub(crate) async fn renew_now(
        self: &Arc<Self>,
        lease: &Arc<Lease>,
        by: Instant,
    ) -> Result<Renewed, StoreError> {
        let now = self.clock.now();
        let by = by.min(now.after(self.op_timeout));
        let renewal = lease.renewal(now);
        let asked = Arc::clone(&renewal);
        let tickets = vec![Arc::clone(&asked)];
        let (sent, answers) = self
            .operate(Where::Here, by, |connection| connection.renew(tickets))
            .await
            .inspect_err(|error| renewal.refused(error))?;
        let renewed = answers.first().copied().unwrap_or(Renewed::Failed);
        match renewed {
            Renewed::Granted { valid_for } | Renewed::Waiting { valid_for, .. } => {
                let valid_for = renewal.answered(valid_for);
                lease.confirm(sent.epoch);
                // An `Err` is a lease that ran out meanwhile; whoever looks at it next finds that.
                let extended = lease.extend(sent.at, valid_for, self.clock.now());
                if let (Ok(()), Renewed::Granted { .. }) = (extended, renewed) {
                    self.note_acknowledged(lease, &asked);
                }
            }
            Renewed::Lost => self.taken(lease),
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
        lease.grant(lease.ticket(), self.clock.now());
    }

    /// A wake-up. One for a ticket that is not ours, or not any more, grants nothing.
    pub(crate) fn granted(&self, wake: Wake) {
        let lease = self
            .table()
            .leases
            .get(&wake.id)
            .map(|tracked| Arc::clone(&tracked.lease));
        if let Some(lease) = lease {
            guarded(|| lease.grant(wake.ticket, self.clock.now()));
        }
    }

    /// Who waits for this ticket is to ask again then, as nobody will tell.
    pub(crate) fn recheck(&self, id: Id, after: Duration) {
        let due = self.clock.now().after(after.max(LEAST_RECHECK));
        let mut table = self.table();
        match table.leases.get_mut(&id) {
            // The answer that is on its way, to its enqueue or a renewal, may not know of this.
            Some(tracked)
                if tracked.stage == Stage::Asked
                    || tracked.stage == Stage::Waiting && tracked.renewing =>
            {
                let by = tracked.look_by.map_or(due, |before| before.min(due));
                tracked.look_by = Some(by);
            }
            Some(tracked) if tracked.stage != Stage::Waiting => {}
            Some(tracked) if tracked.due.is_some_and(|before| before <= due) => {}
            Some(_) => self.look_again_at(&mut table, id, due),
            None => {}
        }
    }

    /// Counts the gaps: the times from which on a wake-up, or the store's data, may have been lost.
    /// What was asked before belongs to an earlier epoch.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::SeqCst)
    }

    /// An identity for a request that is about to be sent.
    pub(crate) fn new_id(&self) -> Result<Id, Error> {
        match self.backend.capability().cross_process {
            true => Id::draw(),
            false => Ok(Id::count()),
        }
    }

    /// For a request that is sent after this.
    pub(crate) fn sent_now(&self) -> Sent {
        Sent {
            at: self.clock.now(),
            epoch: self.epoch(),
        }
    }

    /// A connection is gone, and perhaps the store's data. No ticket is passed on in this process
    /// from now on before the store has been asked whether it stands.
    pub(crate) fn suspect(&self) {
        self.epoch.fetch_add(1, Ordering::SeqCst);
    }

    /// Wake-ups may have been missed, or the server may have been another for a while: everything is
    /// asked after, the earliest deadlines first, and no more at a time than the store carries.
    pub(crate) fn renew_everything(&self) {
        let mut table = self.table();
        // Under the mutex: no round falls between the two.
        self.suspect();
        table.begin_sweep();
        self.wake_keeper_at(&mut table, self.clock.now());
    }

    /// A batch of renewals is over.
    pub(crate) fn batch_over(&self) {
        let others_wait = self.table().renewed();
        if others_wait {
            self.due_changed.notify_one();
        }
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
            // Made when it is polled: most futures here are ready at once.
            () = async { self.alarm(at).await } => None,
        }
    }

    /// One operation that passes no gate, and the moment before it was sent: a lease is counted from
    /// then. Fails when it has not been answered by `by`, connecting included.
    pub(crate) async fn operate<T>(
        self: &Arc<Self>,
        whose: Where,
        by: Instant,
        verb: impl FnOnce(&dyn Connection) -> Answer<T>,
    ) -> Result<(Sent, T), StoreError> {
        if self.is_forked() {
            return Err(StoreError::new(Fault::Config, FORKED));
        }
        let (_, connected) = self.connection(whose, by).await?;
        self.send(&connected, by, verb).await
    }

    /// Releases tickets in one request, from `now` on, when it is its turn. Fails when it has not been sent by
    /// `turn_by`, or not been answered within one operation timeout.
    pub(crate) async fn release(
        self: &Arc<Self>,
        whose: Where,
        now: Instant,
        turn_by: Instant,
        departures: Vec<Departure>,
    ) -> Result<Vec<Released>, StoreError> {
        let mut by = now.after(self.op_timeout);
        loop {
            let (_, connected) = self.connection(whose, by).await?;
            // In flight until the answer is here. Dropped before that, the store may be working on
            // it all the same: then one request more than it carries is in flight for a moment.
            let admitted = self.admit(connected.releases(), departures.len(), turn_by);
            let pass = match admitted.await {
                Some(Ok(pass)) => pass,
                Some(Err(Replaced)) => {
                    by = self.clock.now().after(self.op_timeout).min(turn_by);
                    continue;
                }
                None => {
                    let text = "too many releases are in front of this one";
                    return Err(StoreError::new(Fault::Retry, text));
                }
            };
            if pass.has_waited {
                by = self.clock.now().after(self.op_timeout);
            }
            let sent = self.send(&connected, by, |verbs| verbs.release(departures));
            return sent.await.map(|(_, answers)| answers);
        }
    }

    async fn send<T>(
        self: &Arc<Self>,
        connected: &Connected,
        by: Instant,
        verb: impl FnOnce(&dyn Connection) -> Answer<T>,
    ) -> Result<(Sent, T), StoreError> {
        let sent = self.sent_now();
        connected.asked(sent.at);
        match self.by(by, verb(connected.verbs())).await {
            Some(outcome) => {
                self.links.ended(connected, &outcome);
                outcome.map(|answer| (sent, answer))
            }
            None => {
                self.unanswered(connected);
                let text = format!("{} did not answer in time", self.store());
                Err(StoreError::new(Fault::Unknown, text))
            }
        }
    }

    /// Resolves when so many tickets may pass a gate, at `give_up` at the latest. Before that it waits
    /// for its turn, however long that takes, because the store is at work. If nothing passes the gate
    /// for an operation timeout, it is not the store that the others wait for: then they are passed.
    pub(crate) async fn admit(
        self: &Arc<Self>,
        gate: &Gate,
        tickets: usize,
        give_up: Instant,
    ) -> Option<Result<Pass, Replaced>> {
        match gate.try_pass(tickets) {
            Some(pass) => Some(Ok(pass)),
            // On the heap, because it is seldom.
            None => Box::pin(self.wait_at(gate, tickets, give_up)).await,
        }
    }

    async fn wait_at(
        self: &Arc<Self>,
        gate: &Gate,
        tickets: usize,
        give_up: Instant,
    ) -> Option<Result<Pass, Replaced>> {
        let mut turn = std::pin::pin!(gate.wait_for_pass(tickets));
        loop {
            let moves = gate.moves();
            let look = self.clock.now().after(self.op_timeout);
            if let Some(pass) = self.by(look.min(give_up), turn.as_mut()).await {
                return Some(pass);
            }
            if give_up <= look {
                return None;
            }
            gate.write_off(moves);
        }
    }

    /// A connection that is up, and the runtime that it is of.
    pub(crate) async fn connection(
        self: &Arc<Self>,
        whose: Where,
        by: Instant,
    ) -> Result<(runtime::Id, Arc<Connected>), StoreError> {
        let here = runtime::Handle::try_current().ok();
        let runtime = match whose {
            Where::Here => self.serving(here.as_ref()),
            Where::Keeper => &self.keeper,
        };
        let connection = match self.links.up(runtime) {
            Some(connection) => connection,
            // On the heap, because it is seldom: every future that asks a store would have the room.
            None => Box::pin(self.connected(runtime, by)).await?,
        };
        Ok((runtime.id(), connection))
    }

    async fn connected(
        self: &Arc<Self>,
        runtime: &runtime::Handle,
        by: Instant,
    ) -> Result<Arc<Connected>, StoreError> {
        loop {
            let link = self.links.of(self, runtime);
            match self.by(by, link.connection()).await {
                Some(Ok(connection)) => return Ok(connection),
                Some(Err(NotConnected::Failed(error))) => return Err(error),
                // Nobody looks after it any more; the next one is another.
                Some(Err(NotConnected::Closed)) => {}
                None => {
                    return Err(link.trouble().unwrap_or_else(|| {
                        let (store, hint) = (self.store(), self.backend.silence());
                        let text = format!("{store} could not be reached in time{hint}");
                        StoreError::new(Fault::Retry, text)
                    }));
                }
            }
        }
    }

    /// The runtime whose connection serves callers in `here`. At a store with sessions that is the
    /// keeper's for all: what a session holds must not end with the runtime that asked. Outside of any
    /// runtime it is the keeper's as well: slower by a change of threads, and good enough for a release
    /// in an odd place.
    fn serving<'a>(&'a self, here: Option<&'a runtime::Handle>) -> &'a runtime::Handle {
        let sessions = self.backend.capability().sessions;
        here.filter(|_| !sessions).unwrap_or(&self.keeper)
    }

    /// Whether the wake-ups of what was asked on the connection of a runtime are heard `here`.
    pub(crate) fn is_heard(&self, asked: runtime::Id, here: Option<runtime::Id>) -> bool {
        let sessions = self.backend.capability().sessions;
        asked == here.filter(|_| !sessions).unwrap_or(self.keeper.id())
    }

    /// A request was not answered in time. That is the connection's fault only if nothing at all was
    /// answered on it for an operation timeout (a caller's budget, and a renewal's patience, may be
    /// shorter than what a sound one needs). A store with much to do is late, and another connection
    /// would only add to it.
    pub(crate) fn unanswered(&self, connected: &Connected) {
        if connected.silent_for(self.clock.now()) >= self.op_timeout {
            self.links.replace(connected);
        }
    }

    /// Resolves when the last handle is gone.
    pub(crate) async fn ending(&self) {
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
        self.settle_kept();
        for lease in waiting {
            // Granted in this moment, it may finish as others do.
            let stage = self.stage(lease.request.id);
            if stage != Some(Stage::Held) {
                lease.lose(LostReason::Shutdown);
            }
        }
        self.lanes.close();
    }

    /// The store does not know the ticket.
    fn taken(self: &Arc<Self>, lease: &Arc<Lease>) {
        if lease.lose(LostReason::Taken)
            && let Some(stage) = self.stage(lease.request.id)
        {
            self.lost(lease, stage, LostReason::Taken);
        }
    }

    /// A ticket that its holder gave back was not at the store, and should have been: somebody else may have had
    /// the lock at the same time.
    pub(crate) fn missing(self: &Arc<Self>, lease: &Arc<Lease>) {
        lease.lost(self.clock.now()); // what ran out on the way is no news to anybody
        lease.lose(LostReason::Taken);
        // A renewal that was under way may have found it missing before, when nobody held it any more.
        if lease.lost(self.clock.now()) == Some(LostReason::Taken) {
            self.lost(lease, Stage::Held, LostReason::Taken);
        }
    }

    /// The keeper has given a ticket back, because its task is not polled: the task finds that its
    /// place is lost, should it be polled again.
    pub(crate) fn recalled(self: &Arc<Self>, lease: &Arc<Lease>) {
        let lock = lease.request.name.clone();
        self.log(Level::DEBUG, move || {
            tracing::debug!(%lock, "nobody collected a grant: its future is not polled");
        });
        self.lanes.recalled(self, lease);
        lease.lose(LostReason::Expired);
    }

    fn stage(&self, id: Id) -> Option<Stage> {
        self.table().leases.get(&id).map(|tracked| tracked.stage)
    }

    /// A lease has been found lost: by the keeper, or by its user, who may be faster. What an operator
    /// wants to know is a lock that was lost; a place in line is taken anew.
    pub(crate) fn lost(self: &Arc<Self>, lease: &Arc<Lease>, stage: Stage, reason: LostReason) {
        // A ticket that is being released is expected to go. Whether it was there is known by the answer to
        // its release: see `missing`.
        let is_told = match stage {
            Stage::Leaving => lease.is_told(),
            _ => !lease.tell_loss(),
        };
        if is_told {
            return;
        }
        let (lock, token) = (lease.request.name.clone(), lease.token());
        match stage {
            Stage::Held => {
                self.teller.tell(|| Event::Lost {
                    name: lock.as_str().to_owned(),
                    token,
                    reason,
                });
                self.log(Level::WARN, move || {
                    tracing::warn!(%lock, %token, ?reason, "lock lost");
                });
            }
            // Without renewal it was to end by itself.
            Stage::Kept { .. } if lease.renew => self.log(Level::WARN, move || {
                tracing::warn!(%lock, ?reason, "lock lost before its min_hold was over");
            }),
            Stage::Asked | Stage::Waiting | Stage::Kept { .. } | Stage::Leaving => {
                self.log(Level::DEBUG, move || {
                    tracing::debug!(%lock, ?reason, "ticket lost");
                });
            }
        }
        self.lanes.lost(self, lease);
    }

    /// The last handle is gone.
    pub(crate) fn end(&self) {
        self.table().phase = Phase::Ending(self.clock.now().after(self.op_timeout));
        self.settle_kept();
        self.ends.notify_waiters();
        self.due_changed.notify_one();
    }

    /// Marks what is still held as lost, so that the work on it stops.
    pub(crate) fn lose_held(self: &Arc<Self>) {
        let held = self.table().leases_where(|stage| stage == Stage::Held);
        for lease in held {
            if lease.lose(LostReason::Shutdown) {
                self.lost(&lease, Stage::Held, LostReason::Shutdown);
            }
        }
    }

    /// Releases what is still held, whoever has the guard.
    pub(crate) fn release_held(&self) {
        let held = self.table().leases_where(|stage| stage == Stage::Held);
        for lease in held {
            self.clean_up(Cleanup::of(&lease));
        }
    }

    /// Waits until nothing is used, waited for, or being cleaned up. Returns how many are left when
    /// `until` has passed.
    pub(crate) async fn idle(self: &Arc<Self>, until: Instant) -> usize {
        loop {
            let idle = self.idle.notified();
            let mut idle = std::pin::pin!(idle);
            // Registered before looking, so that no change is missed in between.
            idle.as_mut().enable();
            let left = self.table().await_idle();
            if left == 0 || self.clock.now() >= until {
                return left;
            }
            let _ = self.by(until, idle).await;
        }
    }

    /// The store has acknowledged a renewal; perhaps it was the first of a ticket that only reads on.
    fn note_acknowledged(&self, lease: &Lease, renewal: &Request) {
        if lease.acknowledged(renewal) {
            let (lock, token) = (lease.request.name.clone(), lease.token());
            let permits = renewal.permits;
            self.log(Level::DEBUG, move || {
                tracing::debug!(%lock, %token, permits, "ticket made smaller");
            });
        }
    }

    /// Outside of the table's mutex: this runs wakers, and those may do anything.
    fn tell_if(&self, idle: bool) {
        if idle {
            guarded(|| self.idle.notify_waiters());
        }
    }

    fn wake_keeper_at(&self, table: &mut Table, at: Instant) {
        if at < table.next_wake {
            table.next_wake = at;
            self.due_changed.notify_one();
        }
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        // No code that can panic runs under the mutex; should that change, the maps are still whole.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Resolves when the lease clock has reached a time; rung by the keeper.
pub(crate) struct Alarm {
    shared: Arc<Shared>,
    at: Instant,
    /// The entry in the table, from the first poll on that finds the time not reached.
    set: Option<u64>,
}

impl Alarm {
    /// Whether it has yet to ring, and does so by then.
    pub(crate) fn will_ring_by(&self, at: Instant) -> bool {
        self.at <= at && self.shared.clock.now() < self.at
    }
}

impl Future for Alarm {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // Who waits for ever is not woken by the clock.
        if self.at == Instant::FAR_FUTURE {
            return Poll::Pending;
        }
        if self.shared.clock.now() >= self.at {
            return Poll::Ready(());
        }
        let this = &mut *self;
        let waker = cx.waker().clone();
        let mut table = this.shared.table();
        let number = *this.set.get_or_insert_with(|| {
            table.alarms_set += 1;
            table.alarms_set
        });
        let before = table.alarms.insert((this.at, number), waker);
        this.shared.wake_keeper_at(&mut table, this.at);
        drop(table);
        drop(before); // a waker may own anything
        Poll::Pending
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Some(number) = self.set
            && !self.shared.is_forked()
        {
            let waker = self.shared.table().alarms.remove(&(self.at, number));
            drop(waker);
        }
    }
}

/// Full jitter: anything up to `pause`, but not nothing.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.1 + 0.9 * fastrand::f64())
}

#[cfg(test)]
impl Settings {
    pub(crate) fn of_tests() -> Self {
        Self {
            clock: Clock::BOOT,
            namespace: Namespace::new("test").expect("a namespace"),
            op_timeout: Duration::from_secs(1),
            place: String::new(),
            owner: "test".into(),
            defaults: Defaults {
                ttl: Duration::from_secs(10),
                wait: Wait::Forever,
                fair: Fair::Strict,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;
    use crate::backend::memory::Memory;

    fn shared(settings: Settings) -> Arc<Shared> {
        let memory = Arc::new(Memory::new(Clock::BOOT));
        let runtime = tokio::runtime::Handle::current();
        Arc::new(Shared::new(memory, settings, runtime))
    }

    /// The machine slept, or the store took its time: the reply is worked in before the keeper has
    /// looked at the deadline, and takes the lease out of its sight.
    #[tokio::test]
    async fn a_loss_that_a_late_acknowledgement_finds_is_told() {
        let clock = Clock::by_hand();
        let shared = shared(Settings {
            clock: clock.clone(),
            ..Settings::of_tests()
        });
        let mut events = shared.teller.listen();
        let lease = Arc::new(crate::lease::tests::lease());
        shared.arm(&lease).expect("open");
        let ttl = Duration::from_secs(10);
        let sent = clock.now();
        lease.answered(7, sent, ttl);
        shared.entrust_held(&lease);
        let waits = Arc::clone(&lease);
        let its_clock = clock.clone();
        let lost = tokio::spawn(async move { waits.until_lost(&its_clock).await });
        tokio::task::yield_now().await;

        clock.suspend(Duration::from_secs(3600));
        let granted = Renewed::Granted { valid_for: ttl };
        let renewal = lease.renewal(sent);
        let sent = Sent { at: sent, epoch: 1 };
        shared.renewed(&lease, renewal, sent, granted, Duration::ZERO);

        let told = tokio::time::timeout(Duration::from_secs(5), lost).await;
        assert_eq!(told.expect("told").expect("no panic"), LostReason::Expired);
        let event = tokio::time::timeout(Duration::from_secs(5), events.next()).await;
        assert!(matches!(event, Ok(Some(Event::Lost { .. }))), "{event:?}");
        assert_eq!(shared.table().cleanups.len(), 1);
    }

    /// It would wake the keeper's thread for nothing, at the worst moment.
    #[tokio::test]
    async fn a_grant_in_line_is_renewed_when_its_wait_would_have_been() {
        let clock = Clock::by_hand();
        let shared = shared(Settings {
            clock: clock.clone(),
            ..Settings::of_tests()
        });
        let lease = Arc::new(crate::lease::tests::lease());
        shared.arm(&lease).expect("open");
        let ttl = lease.request.ttl;
        lease.answered(7, clock.now(), ttl);
        let due = || {
            shared
                .table()
                .leases
                .values()
                .next()
                .and_then(|lease| lease.due)
        };

        let in_line = Shared::renewal_time(&lease, ttl);
        shared.entrust(lease.request.id, Stage::Waiting, in_line);
        shared.entrust_held(&lease);
        assert_eq!(due(), Some(in_line));

        // But for one that had to look sooner, at the end of another's lease.
        shared.entrust(lease.request.id, Stage::Waiting, clock.now());
        shared.entrust_held(&lease);
        assert!(due() > Some(clock.now()));
    }

    #[tokio::test]
    async fn who_waits_asks_again_when_it_is_told_to_and_not_without_end() {
        let clock = Clock::by_hand();
        clock.stop();
        let shared = shared(Settings {
            clock: clock.clone(),
            ..Settings::of_tests()
        });
        let lease = Arc::new(crate::lease::tests::lease());
        shared.arm(&lease).expect("open");
        let (id, ttl) = (lease.request.id, lease.request.ttl);
        lease.answered(7, clock.now(), ttl);
        let in_line = Shared::renewal_time(&lease, ttl);
        let told = |stage, after| {
            shared.entrust(id, stage, in_line);
            shared.recheck(id, after);
            shared.table().leases.get(&id).and_then(|lease| lease.due)
        };

        let soon = Duration::from_secs(1);
        assert_eq!(told(Stage::Waiting, soon), Some(clock.now().after(soon)));
        let forged = told(Stage::Waiting, Duration::ZERO);
        assert_eq!(forged, Some(clock.now().after(LEAST_RECHECK)));
        assert_eq!(told(Stage::Waiting, Duration::MAX), Some(in_line));
        assert_eq!(told(Stage::Held, soon), Some(in_line));

        // While the answer to its enqueue, or to a renewal, is under way.
        for stage in [Stage::Asked, Stage::Waiting] {
            let due = || shared.table().leases.get(&id).and_then(|lease| lease.due);
            shared.entrust(id, stage, in_line);
            shared.table().leases.get_mut(&id).expect("there").renewing = true;
            shared.recheck(id, soon);
            shared.recheck(id, Duration::ZERO);
            shared.recheck(id, soon);
            assert_eq!(due(), Some(in_line), "not before the answer");
            match stage {
                Stage::Asked => assert!(shared.entrust(id, Stage::Waiting, in_line)),
                _ => shared.renewal_over(id, in_line),
            }
            assert_eq!(due(), Some(clock.now().after(LEAST_RECHECK)));
            // And once.
            shared.renewal_over(id, in_line);
            assert_eq!(due(), Some(in_line));
        }
    }

    /// Runs on a thread of its own, because a deadlock could not be ended.
    fn without_deadlock(code: impl FnOnce(&tokio::runtime::Runtime) + Send + 'static) {
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .expect("a runtime");
            let _here = runtime.enter();
            code(&runtime);
            let _ = done.send(());
        });
        let waited = is_done.recv_timeout(Duration::from_secs(10));
        assert!(waited.is_ok(), "deadlock, or a panic");
    }

    /// What a waker does when it is woken, or goes.
    struct Runs(Mutex<Option<Box<dyn FnOnce() + Send>>>);

    impl std::task::Wake for Runs {
        fn wake(self: Arc<Self>) {
            let code = self.0.lock().expect("no panic").take();
            if let Some(code) = code {
                code();
            }
        }
    }

    #[test]
    fn a_waker_may_own_a_guard_and_be_dropped_anywhere() {
        without_deadlock(|runtime| {
            let locks = crate::Locks::connect("memory:").expect("a client");
            let held = runtime.block_on(locks.mutex("a").acquire());
            let other = runtime.block_on(locks.mutex("b").acquire());
            let waker = Waker::from(Arc::new(Runs(Mutex::new(Some(Box::new(move || {
                drop(other);
            }))))));
            let lock = locks.mutex("a");
            let mut waits = Box::pin(lock.acquire());
            let mut cx = Context::from_waker(&waker);
            assert!(waits.as_mut().poll(&mut cx).is_pending());
            drop(waker);
            drop(waits);
            drop(held);
        });
    }

    #[test]
    fn a_waker_may_use_the_client_that_wakes_it() {
        without_deadlock(|runtime| {
            let locks = crate::Locks::connect("memory:").expect("a client");
            let held = runtime.block_on(locks.mutex("a").acquire()).expect("free");
            let other = locks.clone();
            // An executor that polls at once.
            let waker = Waker::from(Arc::new(Runs(Mutex::new(Some(Box::new(move || {
                let again = std::pin::pin!(other.shutdown(Duration::ZERO));
                let _ = again.poll(&mut Context::from_waker(Waker::noop()));
            }))))));
            let mut shutdown = Box::pin(locks.shutdown(Duration::from_secs(20)));
            let mut cx = Context::from_waker(&waker);
            assert!(shutdown.as_mut().poll(&mut cx).is_pending());
            runtime.block_on(held.release()).expect("released");
        });
    }
}
