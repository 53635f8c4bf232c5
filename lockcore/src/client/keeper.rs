//! The keeper: one thread per client. It renews the tickets that the process holds or waits for,
//! reports a lease that has run out, wakes the tasks whose alarm is due, and cleans up after
//! dropped futures and guards. It has a small runtime and a connection of its own. So users may
//! block their runtimes, pause their clocks or shut them down, and no lease is lost by that.
//!
//! Taking tickets is in `acquire`, connections are in `supervise`, and the list of due work is in
//! `table`.

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::ThreadId;
use std::time::Duration;

use tracing::Level;

use super::calls::{OWN, Where};
use super::gate::{Asking, Connected};
use super::lease::{LONGEST_STALL, Lease};
use super::pace::{BATCH, Outcome};
use super::settings::Settings;
use super::shared::Shared;
use super::supervise;
use super::table::Phase;
use super::tracked::{Cleanup, Kind, Stage};
use crate::backend::{
    Backend, Connection, Departure, Enqueued, Fault, Released, Renewed, StoreError,
};
use crate::clock::Instant;
use crate::error::{Error, LostReason};
use crate::log::{Silence, guarded};
use crate::meter;
use crate::pauses::{Pauses, jittered};
use crate::request::{Id, Request};

/// The longest sleep while something is due. Timers stand still while the machine is suspended, but
/// the lease clock does not. After a resume the keeper catches up within this time.
const LONGEST_NAP: Duration = Duration::from_secs(1);

/// How many operation timeouts a renewal waits for its answer, if its lease can wait for so long. A
/// busy store that answers late has renewed the tickets. Nobody waits for a renewal, unlike for
/// other requests.
const RENEWAL_TIMEOUTS: u32 = 3;

/// How long the client waits at its end for log lines that are not written yet.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// The keeper's thread. Dropping this waits until the clean-up is done, for at most about one
/// operation timeout.
pub(crate) struct Keeper {
    shared: Arc<Shared>,
    thread: ThreadId,
    ended: Mutex<mpsc::Receiver<()>>,
}

impl Keeper {
    pub(crate) fn start(
        backend: Arc<dyn Backend>,
        settings: Settings,
    ) -> Result<(Self, Arc<Shared>), Error> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| {
                Error::unavailable(format!("cannot start the keeper's runtime: {error}"))
            })?;
        let keeper = runtime.handle().clone();
        let shared = Arc::new(Shared::new(backend, settings, keeper, supervise::begin)?);
        let (end, ended) = mpsc::channel();
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("lockcore-keeper".into())
            .spawn(move || {
                let silence = Silence::on_this_thread();
                runtime.block_on(async {
                    keep(&for_thread).await;
                    close(&for_thread).await;
                });
                // A subscriber that blocks must not delay the end of the thread, or the drop of the
                // last handle.
                runtime.shutdown_timeout(LAST_WORDS);
                drop(silence);
                drop(end);
            })
            .map_err(|error| {
                Error::unavailable(format!("cannot start the keeper's thread: {error}"))
            })?;
        let keeper = Self {
            shared: Arc::clone(&shared),
            thread: thread.thread().id(),
            ended: Mutex::new(ended),
        };
        Ok((keeper, shared))
    }

    /// A keeper without a thread, for a loom model that does the work of the thread itself.
    #[cfg(all(test, lockcore_loom))]
    pub(crate) fn without_thread(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            thread: std::thread::current().id(),
            ended: Mutex::new(mpsc::channel().1),
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // A forked child does not have the parent's threads.
        if self.shared.is_forked() {
            return;
        }
        let patience = self.shared.op_timeout;
        self.shared.end();
        // The last handle may be dropped by a waker on this very thread. Then the thread must not
        // wait for itself.
        if self.thread == std::thread::current().id() {
            return self.shared.tell_end(0);
        }
        // The thread drops its end of the channel as its last action. The thread itself may take
        // one operation timeout. The 50 ms more give it time to drop that end.
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(patience.saturating_add(Duration::from_millis(50)));
        let left = self.shared.table().cleanups_open;
        // A subscriber is the user's code and may panic. If this is a drop during a panic, a second
        // panic would abort the process.
        guarded(|| self.shared.tell_end(left));
    }
}

async fn keep(shared: &Arc<Shared>) {
    loop {
        // Taken before the clock is read, so that no advance of a test clock is missed.
        let advanced = shared.clock.advanced();
        let now = shared.clock.now();
        let (epoch, outage) = (shared.epoch(), shared.teller.is_suspended());
        let mut round = shared.table().take_round(now, epoch, outage);
        shared.meter.cleanups_begun(round.cleanups.len());
        for waker in round.alarms.drain(..) {
            guarded(|| waker.wake());
        }
        for lease in round.recalled.drain(..) {
            guarded(|| shared.recalled(&lease));
        }
        for (lease, stage) in round.expired.drain(..) {
            expired(shared, &lease, stage, now);
        }
        if let Some(overload) = round.overload {
            shared.tell_overload(overload);
        }
        for (kind, batch) in round.renew.drain(..) {
            tokio::spawn(renew(Arc::clone(shared), kind, batch));
        }
        begin_cleanups(shared, std::mem::take(&mut round.cleanups));
        if round.end {
            return;
        }
        let due_changed = shared.due_changed.notified();
        match round.next {
            None => due_changed.await,
            Some(next) => {
                let nap = shared.clock.time_to(next).min(LONGEST_NAP);
                tokio::select! {
                    () = due_changed => {}
                    () = advanced => {}
                    () = tokio::time::sleep(nap) => {}
                }
            }
        }
    }
}

/// Marks a lease as lost and notifies its user, even while a renewal hangs. Gives the ticket back, if
/// nobody else does.
fn expired(shared: &Arc<Shared>, lease: &Arc<Lease>, stage: Stage, now: Instant) {
    let sessions = shared.capability.sessions;
    let mut reason = None;
    guarded(|| reason = lease.lost(now));
    let Some(reason) = reason.or_else(|| lease.lost(now)) else {
        // The user has extended the lease since the round was taken.
        return shared.recheck_at(lease.request.id, now);
    };
    guarded(|| shared.lost(lease, stage, reason));
    // Without sessions, the store's clock ends the ticket there. The user of a held lease takes it
    // out of the table. A kept lease has no user any more, so it is taken out below. The acquire
    // loop cleans up a waiting ticket.
    match stage {
        Stage::Lingering { .. } => shared.clean_up(Cleanup::of(lease)),
        Stage::Held | Stage::Kept { .. } if sessions => shared.clean_up(Cleanup::of(lease)),
        // The ticket was asked back, and somebody waits for the lock. So the keeper releases the
        // ticket at once, and does not leave its end to the store's clock. If the user releases it
        // as well, the store answers that it does not have the ticket.
        Stage::Held | Stage::Kept { .. } if reason == LostReason::Revoked => {
            shared.clean_up(Cleanup::of(lease));
        }
        Stage::Kept { .. } => drop(shared.disarm(lease.request.id)),
        // The task may not be polled, and the session keeps the ticket at the store. So the keeper
        // gives the ticket back.
        Stage::Waiting | Stage::Leaving if sessions => shared.clean_up(Cleanup::of(lease)),
        _ => {}
    }
}

fn begin_cleanups(shared: &Arc<Shared>, cleanups: Vec<Cleanup>) {
    let (asked, settled): (Vec<_>, Vec<_>) = cleanups
        .into_iter()
        .partition(|cleanup| cleanup.after.is_some());
    for cleanup in asked {
        tokio::spawn(finish_asking(Arc::clone(shared), cleanup));
    }
    let (kept, settled): (Vec<_>, Vec<_>) = settled
        .into_iter()
        .partition(|cleanup| cleanup.keep_until.is_some());
    for batch in in_batches(kept) {
        tokio::spawn(leave_kept(Arc::clone(shared), batch));
    }
    for batch in in_batches(settled) {
        tokio::spawn(depart(Arc::clone(shared), batch));
    }
}

fn in_batches<T>(all: Vec<T>) -> impl Iterator<Item = Vec<T>> {
    let mut all = all.into_iter();
    std::iter::from_fn(move || {
        let batch: Vec<_> = all.by_ref().take(BATCH).collect();
        (!batch.is_empty()).then_some(batch)
    })
}

/// Closes the connection to the store, in the time that is left for the end of the client.
async fn close(shared: &Shared) {
    let at_the_latest = match shared.table().phase {
        Phase::Ending(at_the_latest) => at_the_latest,
        Phase::Open | Phase::ShutDown => return,
    };
    // A session that is not closed ends when it times out, and then the tickets that are kept in it
    // end too.
    if shared.table().keeps() {
        return;
    }
    // The loop that rings alarms has ended, so this uses the timer of the keeper's runtime.
    let rest = shared.clock.time_to(at_the_latest);
    if tokio::time::timeout(rest, shared.links.end())
        .await
        .is_err()
    {
        shared.log(Level::DEBUG, || {
            tracing::debug!("no time to close the connection; the store will notice");
        });
    }
}

/// Renews a batch. If the keeper has no connection and does not get one within [`OWN`], the batch is
/// sent on a connection that a runtime of a caller lends. That runtime may be blocked from now on,
/// or the connection may be dead. So if the keeper gets its own connection before the first attempt
/// has ended, the batch is sent on that one too. A ticket may be renewed twice by this.
async fn renew(shared: Arc<Shared>, kind: Kind, leases: Vec<Arc<Lease>>) {
    let mut renewing = Renewing {
        shared: Arc::clone(&shared),
        kind,
        outcome: Outcome::Failed,
        leases: leases.into_iter(),
        pause: Duration::ZERO,
    };
    let own = OWN.min(renewing.patience() / 4);
    if let Some(lent) = shared.lent(own).await {
        tokio::select! {
            biased;
            () = renewing.attempt(Some(&lent)) => return,
            () = shared.keeper_is_up() => {}
        }
    }
    renewing.attempt(None).await;
}

/// A batch of renewals that is in flight. When this is dropped, for whatever reason, the leases
/// without an answer are renewed again after a pause.
struct Renewing {
    shared: Arc<Shared>,
    kind: Kind,
    /// Of the latest attempt.
    outcome: Outcome,
    /// The leases without an answer.
    leases: std::vec::IntoIter<Arc<Lease>>,
    pause: Duration,
}

impl Renewing {
    fn patience(&self) -> Duration {
        let now = self.shared.clock.now();
        let leases = self.leases.as_slice().iter();
        let patience = leases.map(|lease| lease.renewal_patience(now)).min();
        patience.unwrap_or_default()
    }

    /// Renews the leases on a connection that is lent, or on the keeper's. If the whole request
    /// fails, no deadline changes.
    async fn attempt(&mut self, lent: Option<&Connected>) {
        let patience = self.patience();
        let shared = &self.shared;
        let now = shared.clock.now();
        let leases = self.leases.as_slice().iter();
        // Reconnecting has its own pauses, in `supervise`. This pause is for a store that answers
        // and refuses, so that the keeper does not ask it in a tight loop.
        let pause = Duration::from_millis(200).min(patience / 5 * 2);
        self.pause = pause;
        // The requests that are sent. The answers are about these requests, in this order.
        let renewals: Vec<_> = leases.map(|lease| lease.renewal(now)).collect();
        let asked = renewals.iter().map(|renewal| Arc::clone(renewal)).collect();
        let by = now.after(patience.min(shared.op_timeout.saturating_mul(RENEWAL_TIMEOUTS)));
        let verb = |connection: &dyn Connection, patience| connection.renew(asked, patience);
        let outcome = match lent {
            Some(lent) => shared.send_lent(lent, by, verb).await,
            None => shared.operate(Where::Keeper, by, verb).await,
        };
        match outcome {
            Ok((sent, answers)) => {
                self.outcome = Outcome::Answered {
                    tickets: answers.len(),
                    after: sent.at.until(shared.clock.now()),
                    patience: sent.at.until(by),
                };
                shared.renewals_answered(self.leases.as_slice(), &answers);
                // The store may send too few answers. Then the remaining renewals count as not
                // answered.
                for (renewal, answer) in renewals.into_iter().zip(answers) {
                    let Some(lease) = self.leases.next() else {
                        break;
                    };
                    let shared = &self.shared;
                    guarded(|| shared.renewed(&lease, renewal, sent, answer, pause));
                }
            }
            Err(error) => {
                for renewal in &renewals {
                    renewal.refused(&error);
                }
                drop(renewals);
                self.outcome = match error.fault() {
                    Fault::Unknown => Outcome::Missed,
                    _ => Outcome::Failed,
                };
                self.not_acknowledged(&error);
            }
        }
    }

    fn not_acknowledged(&mut self, error: &StoreError) {
        let (lost, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.leases)
            .partition(|lease| error.lost().contains(&lease.request.id));
        self.leases = rest.into_iter();
        let shared = &self.shared;
        shared.meter.renewals(meter::Renewal::Lost, lost.len());
        for lease in lost {
            guarded(|| shared.taken(&lease));
        }
        let tickets = self.leases.len();
        shared.meter.renewals(meter::Renewal::Failed, tickets);
        if matches!(error.fault(), Fault::Refused | Fault::Config) || error.is_halfway() {
            shared.renewals_refused(self.leases.as_slice(), error);
        }
        let error = error.clone();
        shared.log(Level::DEBUG, move || {
            tracing::debug!(%error, tickets, "renewal not acknowledged, trying again");
        });
    }
}

impl Drop for Renewing {
    fn drop(&mut self) {
        for lease in self.leases.by_ref() {
            let again = self.shared.clock.now().after(jittered(self.pause));
            self.shared.renewal_over(lease.request.id, again);
        }
        self.shared.batch_over(self.kind, self.outcome);
    }
}

/// Awaits the answer to an enqueue that its caller has dropped, and then removes the ticket that it
/// may have left.
async fn finish_asking(shared: Arc<Shared>, mut cleanup: Cleanup) {
    let Some(asking) = cleanup.after.take() else {
        return;
    };
    let left_behind = match answer_to(&shared, asking).await {
        Some(Ok(Enqueued::Granted { .. } | Enqueued::Waiting { .. })) => true,
        // Even after these answers, an earlier attempt with the same id may arrive at the store
        // later.
        Some(Ok(Enqueued::Busy { .. } | Enqueued::CapacityMismatch { .. } | Enqueued::Gone)) => {
            cleanup.ambiguous
        }
        Some(Err(error)) if error.fault() != Fault::Unknown => {
            cleanup.ambiguous || error.is_halfway()
        }
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

/// Awaits the answer to an enqueue in place of its caller. Returns `None` if no answer comes within
/// one operation timeout, or by the end of the client.
async fn answer_to(shared: &Arc<Shared>, asking: Asking) -> Option<Result<Enqueued, StoreError>> {
    let Asking {
        answer,
        connected,
        in_flight,
        pass: _counts_until_the_answer,
    } = asking;
    let by = shared.clock.now().after(shared.op_timeout);
    let answer = tokio::select! {
        biased;
        answer = shared.by(by, answer) => answer,
        // The last handle of the client may be dropped on the runtime that drives this connection.
        // That drop blocks the runtime and waits for the keeper, so the reply cannot come.
        // Therefore the keeper stops waiting here, and releases with a note that the enqueue may
        // follow. The store keeps a mark for that, which is better than a lock that stays.
        () = shared.ending() => return None,
    };
    match &answer {
        Some(outcome) => shared.links.ended(&connected, outcome),
        // The driver of the connection is on the caller's runtime, which the caller may block.
        None if shared.links.is_driven(&connected).await => {
            shared.unanswered(&connected, in_flight);
        }
        None => {}
    }
    answer
}

/// Leaves kept tickets (`min_hold`) at the store so that they end there at the right time. Each
/// ticket is renewed once more, with the time that remains as its ttl. The keeper tries until the
/// store acknowledges this, or until that time has come. If the store never acknowledges it, the
/// ticket ends with its lease, as after a crash.
async fn leave_kept(shared: Arc<Shared>, mut batch: Vec<Cleanup>) {
    let mut pauses = Pauses::between(Duration::from_millis(20), Duration::from_secs(1));
    loop {
        let now = shared.clock.now();
        let rest = |cleanup: &Cleanup| {
            let until = cleanup.keep_until.unwrap_or(now);
            // Stores count in milliseconds, so this rounds up.
            now.until(until) + Duration::from_millis(1)
        };
        let before = batch.len();
        batch.retain(|cleanup| cleanup.keep_until > Some(now));
        shared.cleaned_up(before - batch.len());
        if batch.is_empty() {
            return;
        }
        let longest = shared.capability.longest_ttl;
        let renewals = batch.iter().map(|cleanup| {
            Arc::new(Request {
                ttl: rest(cleanup).min(longest),
                ..Request::clone(&cleanup.request)
            })
        });
        let renewals: Vec<_> = renewals.collect();
        let by = now.after(shared.op_timeout);
        let outcome = shared
            .operate(Where::Keeper, by, |connection, patience| {
                connection.renew(renewals, patience)
            })
            .await;
        match outcome {
            Ok((_, answers)) => {
                let before = batch.len();
                let mut answers = answers.into_iter();
                batch.retain(|_| {
                    let answer = answers.next().unwrap_or(Renewed::Failed);
                    answer == Renewed::Failed
                });
                shared.cleaned_up(before - batch.len());
                if batch.is_empty() {
                    return;
                }
            }
            Err(error) => {
                let before = batch.len();
                batch.retain(|cleanup| !error.lost().contains(&cleanup.request.id));
                shared.cleaned_up(before - batch.len());
                let tickets = batch.len();
                shared.log(Level::DEBUG, move || {
                    tracing::debug!(%error, tickets, "min_hold not acknowledged, trying again");
                });
            }
        }
        let again = shared.clock.now().after(pauses.draw());
        shared.alarm(again).await;
    }
}

/// Releases tickets. The keeper tries until the store acknowledges, or until the tickets must have
/// run out at the store by themselves.
async fn depart(shared: Arc<Shared>, mut batch: Vec<Cleanup>) {
    // A ticket that is at the store ends there with its lease. An enqueue that is in flight may
    // arrive later than that: a server that was stopped reads it when it continues.
    let patience = |cleanup: &Cleanup| match cleanup.ambiguous {
        true => cleanup.request.ttl.max(LONGEST_STALL),
        false => cleanup.request.ttl,
    };
    let longest = batch.iter().map(patience).max().unwrap_or_default();
    let give_up = match shared.capability.sessions {
        // The ticket stays as long as the session of this process, which may be for ever. If the
        // session has ended while the store was out of reach, the store answers "not found", which
        // ends the loop as well.
        true => Instant::FAR_FUTURE,
        false => shared.clock.now().after(longest).after(shared.op_timeout),
    };
    let mut pauses = Pauses::between(Duration::from_millis(20), Duration::from_secs(1));
    loop {
        match try_to_depart(&shared, &mut batch, give_up).await {
            Ok(answers) => {
                let before = batch.len();
                let mut answers = answers.into_iter();
                let (mut missing, mut gone) = (Vec::new(), Vec::new());
                // The store may send too few answers. Then the remaining tickets count as not
                // answered.
                batch.retain_mut(|cleanup| {
                    let answer = answers.next().unwrap_or(Released::Failed);
                    // Only the first answer shows whether a ticket was missing. After an attempt
                    // that failed, that attempt may have removed the ticket.
                    let held = cleanup.held.take();
                    missing.extend(held.filter(|_| answer == Released::NotFound));
                    let stays = answer == Released::Failed;
                    gone.extend((!stays).then_some(cleanup.request.id));
                    stays
                });
                for lease in missing {
                    guarded(|| shared.missing(&lease));
                }
                change_counters(&shared, &gone).await;
                shared.cleaned_up(before - batch.len());
                if batch.is_empty() {
                    return;
                }
            }
            Err(error) => {
                let tickets = batch.len();
                if error.fault() == Fault::Unknown || error.is_halfway() {
                    batch.iter_mut().for_each(|cleanup| cleanup.held = None);
                }
                shared.log(Level::DEBUG, move || {
                    tracing::debug!(%error, tickets, "release not acknowledged, trying again");
                });
            }
        }
        if shared.clock.now() >= give_up {
            let tickets = batch.len();
            shared.log(Level::WARN, move || {
                tracing::warn!(
                    tickets,
                    "could not release at the store; what is left there ends with its lease"
                );
            });
            for cleanup in &batch {
                shared.table().at_end.remove(&cleanup.request.id);
            }
            return shared.cleaned_up(batch.len());
        }
        let again = shared.clock.now().after(pauses.draw());
        shared.alarm(again).await;
    }
}

/// Releases tickets in one request. If the keeper has no connection, the request is sent on one that
/// is lent, and also on the keeper's own as soon as it is up: see [`renew`].
async fn try_to_depart(
    shared: &Arc<Shared>,
    batch: &mut [Cleanup],
    give_up: Instant,
) -> Result<Vec<Released>, StoreError> {
    let departures = |batch: &[Cleanup]| {
        let departures = batch.iter().map(|cleanup| Departure {
            request: Arc::clone(&cleanup.request),
            enqueue_may_follow: cleanup.ambiguous,
        });
        departures.collect()
    };
    if let Some(lent) = shared.lent(OWN).await {
        tokio::select! {
            biased;
            outcome = shared.release_lent(&lent, give_up, departures(batch)) => return outcome,
            () = shared.keeper_is_up() => {}
        }
        // The first request may have been carried out. So it is no loss if the second finds
        // nothing.
        batch.iter_mut().for_each(|cleanup| cleanup.held = None);
    }
    let now = shared.clock.now();
    let departures = departures(batch);
    shared
        .release(Where::Keeper, now, give_up, departures)
        .await
}

/// Makes the changes that [`Shared::change_at_end`] has asked for.
async fn change_counters(shared: &Arc<Shared>, gone: &[Id]) {
    let mut changes = Vec::new();
    {
        let mut table = shared.table();
        for change in gone.iter().filter_map(|id| table.at_end.remove(id)) {
            // Most tickets of one name ask for the same change.
            if !changes.contains(&change) {
                changes.push(change);
            }
        }
    }
    shared.tell_ends_of_tickets(changes).await;
}
