//! The tickets of a client that wait, and the wake-ups for them.
//!
//! A wake-up grants a ticket. But the enqueue of a ticket counts only when the disk has it, and a
//! wake-up may come before that. If the server crashed then, the holder would have no ticket. So a
//! wake-up that comes while the enqueue is under way is kept here, and the enqueue answers that the
//! ticket is granted. If the future of the enqueue is dropped, the wake-up is dropped with it. The
//! core asks again with the same id, or releases the ticket.
//!
//! A connection listens only while tickets that were enqueued on it wait, because each connection
//! that listens costs the server some time at each message to any other. The tickets may be renewed
//! and released on other connections of the client. So all connections of a client share this list.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::backend::{Enqueued, Renewed, Wake};
use crate::clock::{Clock, Instant};
use crate::request::{Id, Request};

/// The tickets of a client that wait at the server or are on their way there.
#[derive(Debug, Default)]
pub(super) struct Waits(Mutex<HashMap<Id, Waiting>>);

#[derive(Debug)]
struct Waiting {
    /// The connection that hears of the grant.
    receiver: u64,
    attempt: u64,
    /// When the ticket is gone at the latest, unless it is renewed.
    ends: Instant,
    /// `None` when the enqueue was answered. Until then, the numbers of the grants that have come.
    early: Option<Vec<u64>>,
}

impl Waits {
    /// An enqueue begins. Call this before it is sent. Returns the number of this attempt: if its
    /// future is dropped, it goes on beside the next attempt with the same id.
    pub(super) fn ask(&self, request: &Request, receiver: u64) -> u64 {
        static ATTEMPTS: AtomicU64 = AtomicU64::new(1);
        let attempt = ATTEMPTS.fetch_add(1, Ordering::Relaxed);
        let ends = end(request.ttl);
        let waiting = Waiting {
            receiver,
            attempt,
            ends,
            early: Some(Vec::new()),
        };
        self.list().insert(request.id, waiting);
        attempt
    }

    /// An enqueue counts, with this answer. Returns the answer for the core. If another attempt has
    /// begun since, the wake-up is for that one.
    pub(super) fn asked(&self, id: Id, attempt: u64, answer: Enqueued) -> Enqueued {
        let mut list = self.list();
        if (list.get(&id)).is_none_or(|waiting| waiting.attempt != attempt) {
            return answer;
        }
        let Enqueued::Waiting {
            ticket, valid_for, ..
        } = answer
        else {
            list.remove(&id);
            return answer;
        };
        let Some(waiting) = list.get_mut(&id) else {
            return answer;
        };
        let early = waiting.early.take().unwrap_or_default();
        if !early.contains(&ticket) {
            return answer;
        }
        list.remove(&id);
        Enqueued::Granted { ticket, valid_for }
    }

    /// A wake-up has come. Returns whether to tell the core now.
    pub(super) fn is_due(&self, wake: Wake) -> bool {
        let mut list = self.list();
        match list.get_mut(&wake.id) {
            Some(Waiting {
                early: Some(early), ..
            }) => {
                early.push(wake.ticket);
                false
            }
            _ => {
                list.remove(&wake.id);
                true
            }
        }
    }

    /// A renewal counts, with this answer.
    pub(super) fn renewed(&self, id: Id, answer: Renewed) {
        let mut list = self.list();
        match answer {
            Renewed::Waiting { valid_for, .. } => {
                if let Some(waiting) = list.get_mut(&id) {
                    waiting.ends = end(valid_for);
                }
            }
            _ => {
                list.remove(&id);
            }
        }
    }

    /// An enqueue has taken no ticket.
    pub(super) fn failed(&self, id: Id, attempt: u64) {
        let mut list = self.list();
        if (list.get(&id)).is_some_and(|waiting| waiting.attempt == attempt) {
            list.remove(&id);
        }
    }

    /// A ticket has left.
    pub(super) fn left(&self, id: Id) {
        self.list().remove(&id);
    }

    /// Whether a ticket waits whose grant this connection hears of.
    pub(super) fn is_any_of(&self, receiver: u64) -> bool {
        let now = Clock::BOOT.now();
        let mut list = self.list();
        list.retain(|_, waiting| waiting.ends > now);
        list.values().any(|waiting| waiting.receiver == receiver)
    }

    fn list(&self) -> MutexGuard<'_, HashMap<Id, Waiting>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn end(ttl: Duration) -> Instant {
    Clock::BOOT.now().after(ttl)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::name::{Name, Namespace};

    const TTL: Duration = Duration::from_secs(10);

    fn request() -> Request {
        let name = Name::new(Namespace::new("test").unwrap(), "a").unwrap();
        let one = NonZeroU32::MIN;
        Request::new(name, Id::draw().unwrap(), one, one, TTL)
    }

    fn waiting(ticket: u64) -> Enqueued {
        Enqueued::Waiting {
            ticket,
            valid_for: TTL,
            recheck_in: None,
            ahead: None,
        }
    }

    #[test]
    fn a_grant_that_comes_before_the_enqueue_counts_is_its_answer() {
        let (waits, request) = (Waits::default(), request());
        let first = waits.ask(&request, 1);
        assert!(!waits.is_due(Wake::new(request.id, 17)));
        let granted = Enqueued::Granted {
            ticket: 17,
            valid_for: TTL,
        };
        assert_eq!(waits.asked(request.id, first, waiting(17)), granted);
        assert!(!waits.is_any_of(1));

        // The message was about an earlier ticket with this id.
        let second = waits.ask(&request, 1);
        assert!(!waits.is_due(Wake::new(request.id, 17)));
        assert_eq!(waits.asked(request.id, second, waiting(18)), waiting(18));
        assert!(waits.is_any_of(1) && !waits.is_any_of(2));

        // From now on the core is told at once.
        assert!(waits.is_due(Wake::new(request.id, 18)));
        assert!(!waits.is_any_of(1));
    }

    #[test]
    fn an_attempt_that_was_given_up_takes_no_grant_from_the_next_one() {
        let (waits, request) = (Waits::default(), request());
        let given_up = waits.ask(&request, 1);
        let again = waits.ask(&request, 1);
        assert!(!waits.is_due(Wake::new(request.id, 17)));

        assert_eq!(waits.asked(request.id, given_up, waiting(17)), waiting(17));
        waits.failed(request.id, given_up);
        let granted = Enqueued::Granted {
            ticket: 17,
            valid_for: TTL,
        };
        assert_eq!(waits.asked(request.id, again, waiting(17)), granted);
    }

    #[test]
    fn a_connection_listens_until_its_last_ticket_has_left_the_line() {
        let waits = Waits::default();
        for leave in [
            &(|id| waits.renewed(id, Renewed::Lost)) as &dyn Fn(Id),
            &|id| waits.renewed(id, Renewed::Granted { valid_for: TTL }),
            &|id| waits.left(id),
            &|id| {
                let valid_for = Duration::ZERO;
                let (recheck_in, grace) = (None, None);
                let answer = Renewed::Waiting {
                    valid_for,
                    recheck_in,
                    grace,
                };
                waits.renewed(id, answer);
            },
        ] {
            let request = request();
            let attempt = waits.ask(&request, 1);
            assert_eq!(waits.asked(request.id, attempt, waiting(1)), waiting(1));
            assert!(waits.is_any_of(1));
            leave(request.id);
            assert!(!waits.is_any_of(1));
        }
    }
}
