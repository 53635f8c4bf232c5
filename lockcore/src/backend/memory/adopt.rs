//! Tickets that go from one client to another.

use super::line::Holder;
use super::wakes::Wakes;
use super::{MARK, Names, Store};
use crate::backend::{Adoption, Enqueued, Renewed};

impl Store {
    pub(crate) fn adopt(&self, adoption: &Adoption, receiver: u64) -> Enqueued {
        let Adoption {
            from,
            ticket: number,
            enqueue_may_follow,
            request,
        } = adoption;
        let now = self.clock.now();
        // Declared before the mutex guard, so it is dropped after the guard. So the wake-ups are
        // sent after the mutex is unlocked.
        let mut wakes = Wakes::but(request.id);
        let mut names = self.names();
        let Names {
            lines,
            receivers,
            marks,
            ..
        } = &mut *names;
        if marks.get(&request.id).is_some_and(|end| *end > now) {
            return Enqueued::Gone;
        }
        let Some(line) = lines.get_mut(&request.name) else {
            return Enqueued::Gone;
        };
        // Expired tickets are removed first, because they cannot be adopted.
        wakes.collect(line.expire(now), &line.queue, receivers);
        let found = line.queue.find(*from).is_some_and(|(ticket, holds)| {
            let size = (ticket.permits, ticket.capacity);
            let is_it =
                ticket.number == *number && size == (request.permits.get(), request.capacity.get());
            if holds && is_it {
                ticket.payload = Holder {
                    request: request.clone(),
                    receiver,
                    ask: ticket.payload.ask.take(),
                };
            }
            holds && is_it
        });
        if found {
            line.queue.rename(*from, request.id);
            if *enqueue_may_follow {
                marks.retain(|_, end| *end > now);
                marks.insert(*from, now.after(MARK));
            }
        }
        let ends_sooner = line.ends_sooner(request, now);
        let answer = match line.renew(request, now) {
            Renewed::Granted { valid_for } | Renewed::AskedBack { valid_for, .. } => {
                Enqueued::Granted {
                    ticket: line.number(request),
                    valid_for,
                }
            }
            Renewed::Waiting { .. } | Renewed::Lost | Renewed::Failed => Enqueued::Gone,
        };
        if ends_sooner {
            wakes.tell_first(&line.queue, receivers, now);
        }
        if line.is_over() {
            names.end_line(&request.name, now);
        }
        answer
    }
}
