//! The table of tickets and clean-ups: tasks and guards put entries in, and the keeper takes them
//! out.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::{TTL, Thread, client, in_every_order, name, poll_once, request, spawn, wait_for};
use crate::acquire::Grant;
use crate::acquire::handle::Client;
use crate::acquire::lanes::Lanes;
use crate::acquire::pending::{Pending, Progress};
use crate::acquire::spec::Spec;
use crate::backend::{Enqueued, Renewed};
use crate::client::lease::Lease;
use crate::client::shared::Shared;
use crate::client::tracked::Stage;
use crate::clock::Instant;
use crate::error::{ErrorKind, LostReason};
use crate::hold::Guard;
use crate::options::{OnLost, OnRevoke};
use crate::request::{FULL, Id};

const GRANTED: Enqueued = Enqueued::Granted {
    ticket: 7,
    valid_for: TTL,
};
const RENEWED: Renewed = Renewed::Granted { valid_for: TTL };

/// A ticket that the store has granted and that has no guard yet.
fn granted(shared: &Arc<Shared>) -> Arc<Lease> {
    let mut pending = asked(shared);
    let progress = pending.answered(GRANTED, shared.sent_now());
    assert!(matches!(progress, Ok(Progress::Granted(_))));
    pending.into_lease().expect("it was collected in time")
}

fn asked(shared: &Arc<Shared>) -> Pending {
    let lease = Arc::new(Lease::new(Arc::new(request(FULL)), true));
    Pending::of(shared, lease).unwrap()
}

fn guard(client: &Arc<Client>, lease: Arc<Lease>) -> Guard {
    let spec = Spec {
        client,
        name: &name(),
        permits: FULL,
        capacity: FULL,
        ttl: TTL,
        renew: true,
        owner: &client.owner.whole,
        through_outages: false,
        limited: false,
        linger: Duration::ZERO,
        reentrant: true,
        on_lost: OnLost::Cancel,
        on_revoke: OnRevoke::Finish,
        label: None,
        meter: client.shared.meter.lock(None),
    };
    Guard::of(Grant::Ticket(lease, client.shared.clock.now()), &spec)
}

/// The keeper, which runs until the last handle of the client is gone. Its store acknowledges every
/// release at once.
struct Keeper {
    thread: Thread<()>,
    // A mutex of std, because no thread holds it over a step of loom.
    cleaned: Arc<std::sync::Mutex<Vec<Id>>>,
}

impl Keeper {
    fn start(shared: &Arc<Shared>) -> Self {
        let cleaned = Arc::<std::sync::Mutex<Vec<Id>>>::default();
        let thread = spawn({
            let (shared, cleaned) = (Arc::clone(shared), Arc::clone(&cleaned));
            move || {
                loop {
                    let round =
                        shared
                            .table()
                            .take_round(shared.clock.now(), shared.epoch(), false);
                    let ids = round.cleanups.iter().map(|cleanup| cleanup.request.id);
                    cleaned.lock().unwrap().extend(ids);
                    if !round.cleanups.is_empty() {
                        shared.cleaned_up(round.cleanups.len());
                    }
                    if round.end {
                        return;
                    }
                    wait_for(shared.due_changed.notified());
                }
            }
        });
        Self { thread, cleaned }
    }

    fn has_cleaned(&self) -> Vec<Id> {
        self.cleaned.lock().unwrap().clone()
    }

    fn end(self) -> Vec<Id> {
        self.thread.join().unwrap();
        self.cleaned.lock().unwrap().clone()
    }
}

fn is_empty(shared: &Shared) -> bool {
    let table = shared.table();
    assert_eq!(table.leases.len(), table.due.len(), "watched and not there");
    table.leases.is_empty() && table.cleanups.is_empty() && table.cleanups_open == 0
}

#[test]
fn a_guard_that_is_dropped_is_cleaned_up_once_and_the_shutdown_that_waits_is_told() {
    in_every_order(|| {
        let shared = client();
        let client = Client::without_thread(&shared, Lanes::new(&shared));
        let guard = guard(&client, granted(&shared));
        let id = guard.held().lease().request.id;
        let keeper = Keeper::start(&shared);
        let dropping = spawn(move || drop(guard));

        assert_eq!(wait_for(shared.idle(Instant::FAR_FUTURE)), 0);
        assert_eq!(keeper.has_cleaned(), [id], "not yet");

        drop(client);
        dropping.join().unwrap();
        assert_eq!(keeper.end(), [id]);
        assert!(is_empty(&shared));
    });
}

#[test]
fn of_the_guards_of_one_hold_the_last_gives_it_back() {
    in_every_order(|| {
        let shared = client();
        let client = Client::without_thread(&shared, Lanes::new(&shared));
        let first = guard(&client, granted(&shared));
        let (second, held) = (first.reenter().unwrap(), first.held());
        let id = held.lease().request.id;
        let dropping = [first, second].map(|guard| spawn(move || drop(guard)));

        if let Some(third) = held.guard(true) {
            let watched = shared.table().leases.contains_key(&id);
            assert!(watched, "a guard of what was given back");
            drop(third);
        }

        for dropping in dropping {
            dropping.join().unwrap();
        }
        let cleanups = std::mem::take(&mut shared.table().cleanups);
        assert_eq!(cleanups.len(), 1);
        shared.cleaned_up(1);
        assert!(is_empty(&shared));
    });
}

#[test]
fn a_release_that_is_dropped_half_way_is_the_keepers() {
    in_every_order(|| {
        let shared = client();
        let client = Client::without_thread(&shared, Lanes::new(&shared));
        let guard = guard(&client, granted(&shared));
        let id = guard.held().lease().request.id;
        let keeper = Keeper::start(&shared);
        // There is no connection, so the future is dropped while it waits for a connection.
        let releasing = spawn(move || drop(poll_once(guard.release())));

        assert_eq!(wait_for(shared.idle(Instant::FAR_FUTURE)), 0);
        assert_eq!(keeper.has_cleaned(), [id], "not yet");

        drop(client);
        releasing.join().unwrap();
        assert_eq!(keeper.end(), [id]);
        assert!(is_empty(&shared));
    });
}

#[test]
fn a_renewal_in_flight_brings_nothing_back_that_was_released() {
    for answer in [RENEWED, Renewed::Lost, Renewed::Failed] {
        in_every_order(move || {
            let shared = client();
            let lease = granted(&shared);
            shared.entrust_held(&lease);
            let id = lease.request.id;
            let renewing = spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let sent = shared.sent_now();
                    shared.renewed(&lease, lease.renewal(sent.at), sent, answer, TTL)
                }
            });
            let releasing = spawn({
                let shared = Arc::clone(&shared);
                move || {
                    shared.table().leave(id);
                    shared.disarm(id);
                }
            });

            assert_eq!(wait_for(shared.idle(Instant::FAR_FUTURE)), 0);

            assert!(is_empty(&shared));
            renewing.join().unwrap();
            releasing.join().unwrap();
            assert!(is_empty(&shared));
        });
    }
}

#[test]
fn a_renewal_that_was_too_late_and_the_guard_leave_nothing_open() {
    in_every_order(|| {
        let shared = client();
        let client = Client::without_thread(&shared, Lanes::new(&shared));
        let lease = granted(&shared);
        let id = lease.request.id;
        let guard = guard(&client, Arc::clone(&lease));
        let sent = shared.sent_now();
        shared.clock.advance(TTL);
        let keeper = Keeper::start(&shared);
        let renewing = spawn({
            let (shared, client) = (Arc::clone(&shared), Arc::clone(&client));
            move || {
                shared.renewed(&lease, lease.renewal(sent.at), sent, RENEWED, TTL);
                drop(client);
            }
        });

        drop(guard);
        drop(client);

        renewing.join().unwrap();
        let cleaned = keeper.end();
        // Each of the two threads may clean up once. The second release would find no ticket.
        assert!(matches!(cleaned.len(), 1 | 2) && cleaned.iter().all(|other| *other == id));
        assert!(is_empty(&shared));
    });
}

#[test]
fn a_request_during_a_shutdown_is_refused_or_lost_and_leaves_nothing() {
    in_every_order(|| {
        let shared = client();
        let client = Client::without_thread(&shared, Lanes::new(&shared));
        let keeper = Keeper::start(&shared);
        let asking = spawn({
            let client = Arc::clone(&client);
            move || {
                let shared = &client.shared;
                let lease = Arc::new(Lease::new(Arc::new(request(FULL)), true));
                let mut pending = match Pending::of(shared, Arc::clone(&lease)) {
                    Ok(pending) => pending,
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Lost(LostReason::Shutdown));
                        return None;
                    }
                };
                let progress = pending.answered(GRANTED, shared.sent_now());
                if matches!(progress, Ok(Progress::Granted(_)))
                    && let Some(lease) = pending.into_lease()
                {
                    drop(guard(&client, lease));
                }
                Some(lease.request.id)
            }
        });

        shared.refuse_new();
        shared.lose_held();
        shared.release_the_rest();
        assert_eq!(wait_for(shared.idle(Instant::FAR_FUTURE)), 0);

        drop(client);
        let asked = asking.join().unwrap();
        let mut cleaned = keeper.end();
        // The ticket may be cleaned up by its user and by the shutdown.
        cleaned.dedup();
        assert_eq!(cleaned, Vec::from_iter(asked));
        assert!(is_empty(&shared));
    });
}

#[test]
fn a_ticket_that_waits_during_a_shutdown_is_lost() {
    in_every_order(|| {
        let shared = client();
        let asking = spawn({
            let shared = Arc::clone(&shared);
            move || {
                let lease = Arc::new(Lease::new(Arc::new(request(FULL)), true));
                let mut pending = Pending::of(&shared, Arc::clone(&lease)).ok()?;
                let answer = Enqueued::Waiting {
                    ticket: 7,
                    valid_for: TTL,
                    recheck_in: None,
                    ahead: None,
                };
                if pending.answered(answer, shared.sent_now()).unwrap() == Progress::Waiting {
                    let progress = wait_for(pending.stand_in_line(Instant::FAR_FUTURE));
                    assert_eq!(progress, Progress::Lost);
                }
                Some(())
            }
        });

        shared.refuse_new();

        let asked = asking.join().unwrap();
        assert_eq!(shared.table().cleanups.len(), usize::from(asked.is_some()));
        assert!(shared.table().leases.is_empty());
    });
}

#[test]
fn a_ticket_that_was_never_asked_for_leaves_nothing() {
    in_every_order(|| {
        let shared = client();
        let pending = [asked(&shared), asked(&shared)];
        let dropping = pending.map(|pending| spawn(move || drop(pending)));

        assert_eq!(wait_for(shared.idle(Instant::FAR_FUTURE)), 0);

        assert!(is_empty(&shared));
        for dropping in dropping {
            dropping.join().unwrap();
        }
    });
}

#[test]
fn the_keeper_ends_after_the_last_clean_up() {
    in_every_order(|| {
        let shared = client();
        let client = Client::without_thread(&shared, Lanes::new(&shared));
        let guard = guard(&client, granted(&shared));
        drop(client);
        let keeper = spawn({
            let shared = Arc::clone(&shared);
            move || {
                let mut releases = Vec::new();
                loop {
                    let round =
                        shared
                            .table()
                            .take_round(shared.clock.now(), shared.epoch(), false);
                    let count = round.cleanups.len();
                    if count > 0 {
                        // The store is slow to acknowledge, so another thread ends the clean-up
                        // later.
                        let shared = Arc::clone(&shared);
                        releases.push(spawn(move || shared.cleaned_up(count)));
                    }
                    if round.end {
                        assert!(is_empty(&shared));
                        return releases;
                    }
                    wait_for(shared.due_changed.notified());
                }
            }
        });

        // The guard is the last handle of the client.
        drop(guard);

        let releases = keeper.join().unwrap();
        assert_eq!(releases.len(), 1);
        for release in releases {
            release.join().unwrap();
        }
    });
}

#[test]
fn a_task_that_waits_for_a_time_is_woken_at_it() {
    in_every_order(|| {
        let shared = client();
        let over = Arc::new(crate::sync::atomic::AtomicBool::new(false));
        let keeper = spawn({
            let (shared, over) = (Arc::clone(&shared), Arc::clone(&over));
            move || {
                loop {
                    let now = shared.clock.now();
                    let round = shared.table().take_round(now, shared.epoch(), false);
                    for waker in round.alarms {
                        waker.wake();
                    }
                    if over.load(Ordering::Acquire) {
                        return;
                    }
                    match round.next {
                        // The advance stands for the keeper's sleep.
                        Some(next) => shared.clock.advance(now.until(next)),
                        None => wait_for(shared.due_changed.notified()),
                    }
                }
            }
        });

        let at = shared.clock.now().after(Duration::from_secs(1));
        wait_for(shared.alarm(at));
        assert!(shared.clock.now() >= at);

        over.store(true, Ordering::Release);
        shared.due_changed.notify_one();
        keeper.join().unwrap();
    });
}

#[test]
fn after_a_gap_a_renewal_is_begun_even_if_one_is_under_way() {
    in_every_order(|| {
        let shared = client();
        let lease = granted(&shared);
        shared.entrust(lease.request.id, Stage::Held, shared.clock.now());
        // An atomic of std, because counting must not be a step of its own in loom.
        let begun = Arc::new(AtomicUsize::new(0));
        let begin = {
            let (shared, begun) = (Arc::clone(&shared), Arc::clone(&begun));
            move || {
                let round = shared
                    .table()
                    .take_round(shared.clock.now(), shared.epoch(), false);
                begun.fetch_add(round.renew.len(), Ordering::Relaxed);
                let batches = round.renew.into_iter();
                batches.flat_map(|(_, batch)| batch).collect::<Vec<_>>()
            }
        };
        let renewing = spawn({
            let (shared, begin) = (Arc::clone(&shared), begin.clone());
            move || {
                for lease in begin() {
                    let sent = shared.sent_now();
                    shared.renewed(&lease, lease.renewal(sent.at), sent, RENEWED, TTL);
                }
            }
        });

        shared.renew_everything();
        let before = begun.load(Ordering::Relaxed);

        renewing.join().unwrap();
        let _ = begin();
        assert!(begun.load(Ordering::Relaxed) > before);
    });
}
