//! A process whose tasks share tickets, as the models of its [lines](super::lane) use it.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use super::{TTL, client, name, request, wait_for};
use crate::acquire::lanes::{Arrived, Handover, Lanes, Leader, Share, Waiting};
use crate::acquire::pending::{Pending, Progress};
use crate::backend::{Enqueued, Wake};
use crate::client::lease::Lease;
use crate::client::shared::Shared;
use crate::clock::Instant;
use crate::error::{ErrorKind, LostReason};
use crate::request::{FULL, Id};
use crate::sync::atomic::{AtomicU32, Ordering};

pub(super) const TICKET: u64 = 7;

/// A process, and a store that grants every request at once. Whether the store may grant is not
/// tested here. Each ticket has its own count of users.
pub(super) struct Process {
    pub(super) shared: Arc<Shared>,
    pub(super) lanes: Arc<Lanes>,
    /// How many tasks use any ticket now.
    pub(super) users: AtomicU32,
    pub(super) at_the_store: AtomicU32,
    // Mutexes of std, because no thread holds them over a step of loom.
    pub(super) tickets: std::sync::Mutex<HashMap<Id, Arc<AtomicU32>>>,
    cleaned: std::sync::Mutex<Vec<Id>>,
}

impl Process {
    pub(super) fn new() -> Arc<Self> {
        Self::of(client())
    }

    pub(super) fn of(shared: Arc<Shared>) -> Arc<Self> {
        Arc::new(Self {
            lanes: Lanes::new(&shared),
            shared,
            users: AtomicU32::new(0),
            at_the_store: AtomicU32::new(0),
            tickets: std::sync::Mutex::default(),
            cleaned: std::sync::Mutex::default(),
        })
    }

    pub(super) fn arrive(&self, exclusive: bool) -> Arrived {
        let now = self.shared.clock.now();
        self.lanes.arrive(&name(), TTL, exclusive, true, now)
    }

    /// The leader: the task that comes first.
    pub(super) fn leader(&self, exclusive: bool) -> Leader {
        match self.arrive(exclusive) {
            Arrived::Given(Handover::Leader(leader)) => leader,
            _ => panic!("there is somebody already"),
        }
    }

    /// The task that comes first, after the store has granted its ticket.
    pub(super) fn holder(&self, exclusive: bool) -> Share {
        let leader = self.leader(exclusive);
        self.ask(leader, exclusive)
    }

    pub(super) fn waiter(&self, exclusive: bool) -> Waiting {
        match self.arrive(exclusive) {
            Arrived::Waits(waiting) => waiting,
            _ => panic!("there is nothing to wait for"),
        }
    }

    /// Does what `acquire` does. `None` when the client is shut down.
    pub(super) fn take(&self, exclusive: bool) -> Option<Share> {
        match self.arrive(exclusive) {
            Arrived::Given(handover) => self.follow(handover, exclusive),
            Arrived::Waits(waiting) => self.follow(wait_for(waiting), exclusive),
            Arrived::Busy(_) | Arrived::Crowded | Arrived::OwnTicket => {
                panic!("a waiter is not sent away")
            }
        }
    }

    pub(super) fn follow(
        &self,
        handover: impl Into<Option<Handover>>,
        exclusive: bool,
    ) -> Option<Share> {
        // A hand-over is taken back only if the clock is advanced by a ttl, which no model does.
        match handover.into().expect("nothing is taken back") {
            Handover::Share(share) => Some(share),
            Handover::Leader(mut leader) => Some(match leader.pending.take() {
                None => self.ask(leader, exclusive),
                Some(mut pending) => {
                    let progress = wait_for(pending.stand_in_line(Instant::FAR_FUTURE));
                    granted(leader, pending, progress)
                }
            }),
            Handover::Refused(error) => {
                assert_eq!(error.kind(), ErrorKind::Lost(LostReason::Shutdown));
                None
            }
        }
    }

    pub(super) fn ask(&self, leader: Leader, exclusive: bool) -> Share {
        let (mut pending, _) = self.pending(exclusive);
        let answer = Enqueued::Granted {
            ticket: TICKET,
            valid_for: TTL,
        };
        let mut progress = None;
        alone(&self.at_the_store, || {
            progress = pending.answered(answer, self.shared.sent_now()).ok();
        });
        granted(leader, pending, progress.expect("an answer"))
    }

    /// A ticket in the store's line.
    pub(super) fn place(&self, exclusive: bool) -> (Pending, Wake) {
        let (mut pending, id) = self.pending(exclusive);
        let answer = Enqueued::Waiting {
            ticket: TICKET,
            valid_for: TTL,
            recheck_in: None,
            ahead: None,
        };
        let progress = pending.answered(answer, self.shared.sent_now());
        assert_eq!(progress.unwrap(), Progress::Waiting);
        (pending, Wake { id, ticket: TICKET })
    }

    pub(super) fn pending(&self, exclusive: bool) -> (Pending, Id) {
        let request = request(if exclusive { FULL } else { NonZeroU32::MIN });
        let id = request.id;
        let users = Arc::new(AtomicU32::new(0));
        self.tickets.lock().unwrap().insert(id, users);
        let lease = Arc::new(Lease::new(Arc::new(request), true));
        (Pending::of(&self.shared, lease).unwrap(), id)
    }

    /// Uses the ticket, and checks that no other task uses this ticket.
    pub(super) fn use_ticket(&self, share: Share) {
        let id = share.lease().request.id;
        let users = Arc::clone(&self.tickets.lock().unwrap()[&id]);
        alone(&users, || {
            let cleaned = self.cleaned.lock().unwrap();
            assert!(!cleaned.contains(&id), "the keeper has released it");
        });
        drop(share);
    }

    /// Uses the ticket, and checks that no other task of the process uses any ticket.
    pub(super) fn use_alone(&self, share: Share) {
        alone(&self.users, || ());
        self.use_ticket(share);
    }

    /// Checks that nothing is left, and that every ticket was given to the keeper exactly once.
    pub(super) fn is_clean(&self) {
        self.keep();
        assert!(self.lanes.is_empty(), "a lane is left");
        let table = self.shared.table();
        assert!(table.leases.is_empty() && table.due.is_empty());
        assert!(table.alarms.is_empty());
        assert_eq!(table.cleanups_open, 0);
        let mut cleaned = self.cleaned.lock().unwrap().clone();
        let mut tickets: Vec<_> = self.tickets.lock().unwrap().keys().copied().collect();
        cleaned.sort();
        tickets.sort();
        assert_eq!(cleaned, tickets);
    }

    /// One round of the keeper.
    pub(super) fn keep(&self) {
        let round =
            self.shared
                .table()
                .take_round(self.shared.clock.now(), self.shared.epoch(), false);
        let cleanups = round.cleanups.iter().map(|cleanup| cleanup.request.id);
        self.cleaned.lock().unwrap().extend(cleanups);
        self.shared.cleaned_up(round.cleanups.len());
        for waker in round.alarms {
            waker.wake();
        }
    }
}

pub(super) fn granted(leader: Leader, pending: Pending, progress: Progress) -> Share {
    let Progress::Granted(since) = progress else {
        panic!("{progress:?}");
    };
    let lease = pending.into_lease().expect("it was collected in time");
    let share = leader.granted(lease, since);
    share.expect("the leader was not late")
}

pub(super) fn alone(users: &AtomicU32, work: impl FnOnce()) {
    assert_eq!(users.fetch_add(1, Ordering::Relaxed), 0, "two are in");
    work();
    assert_eq!(users.fetch_sub(1, Ordering::Relaxed), 1, "two are in");
}
