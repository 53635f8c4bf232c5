//! The keeper: one thread per client that renews what the process holds or waits for, says so when
//! a lease has run out, rings alarms, and cleans up after dropped futures and guards. It has a
//! small runtime and a connection of its own, so that nothing a user does to his runtime (block
//! it, pause its clock, shut it down) can cost a lease.
//!
//! Taking tickets is in `acquire`, connections are in `supervise`, and what is to be done when is
//! in `table`.

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::ThreadId;
use std::time::Duration;

use crate::backend::{Backend, Departure, Enqueued, Fault, Released};
use crate::clock::Instant;
use crate::error::Error;
use crate::lease::Lease;
use crate::shared::{Settings, Shared, Where, jittered};
use crate::table::{BATCH, Cleanup, Phase, Stage};

/// The longest sleep while something is due. Timers stand still while the machine is suspended and
/// the lease clock does not; after a resume the keeper catches up within this time.
const LONGEST_NAP: Duration = Duration::from_secs(1);

/// A store that does not answer for longer than this is taken for gone, with what it was sent.
const LONGEST_STALL: Duration = Duration::from_secs(60);

/// The thread. Dropping it lets the clean-up finish, for at most one operation timeout.
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
        let shared = Arc::new(Shared::new(backend, settings, keeper));
        let (end, ended) = mpsc::channel();
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("lockcore-keeper".into())
            .spawn(move || {
                runtime.block_on(async {
                    keep(&for_thread).await;
                    close(&for_thread).await;
                });
                drop(runtime);
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

    /// For a model, which plays the thread.
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
        let patience = self.shared.op_timeout;
        {
            let mut table = self.shared.table();
            table.phase = Phase::Ending(self.shared.clock.now().after(patience));
        }
        self.shared.ends.notify_waiters();
        self.shared.due_changed.notify_one();
        // A waker may drop the last handle on the very thread that would be waited for.
        if self.thread == std::thread::current().id() {
            return;
        }
        // The thread drops its end of the channel as its last act; a little more than its own
        // patience lets it say so.
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = ended.recv_timeout(patience.saturating_add(Duration::from_millis(50)));
    }
}

async fn keep(shared: &Arc<Shared>) {
    let sessions = shared.backend.capability().sessions;
    loop {
        // Before the clock is looked at, so that no turn of it is missed.
        let turned = shared.clock.turned();
        let now = shared.clock.now();
        let mut round = shared.table().take_round(now);
        for waker in round.alarms.drain(..) {
            waker.wake();
        }
        for (lease, stage) in round.expired.drain(..) {
            // Marks the loss and fires its signal, also while a renewal hangs.
            match lease.lost(now) {
                Some(reason) => {
                    shared.lost(&lease, stage, reason);
                    // Elsewhere the store's clock ends what is held, and its user takes it out of the
                    // table, or nobody if he is done with it. Waiters are cleaned up by the acquire loop.
                    match stage {
                        Stage::Held | Stage::Kept { .. } if sessions => {
                            shared.clean_up(Cleanup::of(&lease));
                        }
                        Stage::Kept { .. } => shared.disarm(lease.request.id),
                        _ => {}
                    }
                }
                // Prolonged by its user since the round was taken.
                None => shared.look_again(lease.request.id, now),
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
                let nap = shared.clock.time_to(next).min(LONGEST_NAP);
                tokio::select! {
                    () = due_changed => {}
                    () = turned => {}
                    () = tokio::time::sleep(nap) => {}
                }
            }
        }
    }
}

/// Leaves the store in what remains of the time that the end may take.
async fn close(shared: &Shared) {
    let at_the_latest = match shared.table().phase {
        Phase::Ending(at_the_latest) => at_the_latest,
        Phase::Open | Phase::ShutDown => return,
    };
    // Nobody rings alarms any more.
    let rest = shared.clock.time_to(at_the_latest);
    if tokio::time::timeout(rest, shared.links.end())
        .await
        .is_err()
    {
        tracing::debug!("no time to close the connection; the store will notice");
    }
}

/// Renews a batch on the keeper's connection. Whatever goes wrong here changes no deadline.
async fn renew(shared: Arc<Shared>, leases: Vec<Arc<Lease>>) {
    // What is asked for, that is what the answers are about.
    let now = shared.clock.now();
    let renewals: Vec<_> = leases.iter().map(|lease| lease.renewal(now)).collect();
    let asked = renewals.iter().map(|renewal| Arc::clone(renewal)).collect();
    let shortest = leases.iter().map(|lease| lease.request.ttl).min();
    let shortest = shortest.unwrap_or_default();
    // Begun after a third of the ttl, there is time for three attempts of a quarter each.
    let patience = shared.op_timeout.min(shortest / 4);
    let by = now.after(patience);
    let outcome = shared
        .operate(Where::Keeper, by, |connection| connection.renew(asked))
        .await;
    // The supervisor paces the reconnecting; this only keeps a refusing store from being asked in a
    // tight loop.
    let pause = Duration::from_millis(200).min(shortest / 10);
    match outcome {
        Ok((sent, answers)) => {
            for ((lease, renewal), answer) in leases.iter().zip(renewals).zip(answers) {
                shared.renewed(lease, renewal, sent, answer, pause);
            }
        }
        Err(error) => {
            tracing::debug!(%error, tickets = leases.len(), "renewal not acknowledged, trying again");
            for renewal in &renewals {
                renewal.refused(&error);
            }
            for lease in &leases {
                let again = shared.clock.now().after(jittered(pause));
                shared.renewal_over(lease.request.id, again);
            }
        }
    }
}

/// Finishes an enqueue that its caller has dropped, and then removes what it may have left.
async fn finish_asking(shared: Arc<Shared>, mut cleanup: Cleanup) {
    let Some(enqueue) = cleanup.after.take() else {
        return;
    };
    let by = shared.clock.now().after(shared.op_timeout);
    let answer = async {
        tokio::select! {
            biased;
            answer = shared.by(by, enqueue) => answer,
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
    let give_up = match shared.backend.capability().sessions {
        // It stays as long as this process's session does, which may be for ever. A session that
        // ended while the store was away is acknowledged as well, by "not found".
        true => Instant::FAR_FUTURE,
        false => shared.clock.now().after(longest).after(shared.op_timeout),
    };
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
        let again = shared.clock.now().after(jittered(pause));
        shared.alarm(again).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}
