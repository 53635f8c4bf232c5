//! The line inside the process, and the hand-overs in it.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use super::process::{Process, TICKET, alone, granted};
use super::{
    BOUND, TTL, Thread, client, client_with, in_every_order, name, poll_once, request, spawn,
    wait_for,
};
use crate::acquire::Grant;
use crate::acquire::handle::Client;
use crate::acquire::lanes::{Arrived, Handover, Lanes, Leader, Share, Waiting};
use crate::acquire::pending::{Pending, Progress};
use crate::acquire::spec::Spec;
use crate::backend::{Enqueued, Wake};
use crate::client::lease::Lease;
use crate::client::shared::{LeaseObserver, Shared};
use crate::clock::Instant;
use crate::error::{Error, ErrorKind, LostReason};
use crate::hold::Guard;
use crate::options::{Fair, OnLost, OnRevoke};
use crate::request::{FULL, Id};
use crate::sync::atomic::{AtomicBool, AtomicU32, Ordering};

const WRITES: bool = true;
const READS: bool = false;

fn model(model: impl Fn(&Arc<Process>) + Send + Sync + 'static) {
    in_every_order(move || {
        let process = Process::new();
        model(&process);
        process.is_clean();
    });
}

/// The keeper, which rings the alarms that are due.
struct Bell {
    process: Arc<Process>,
    over: Arc<AtomicBool>,
    thread: Thread<()>,
}

impl Bell {
    /// Starts the keeper. At some moment it advances the clock to the bound.
    fn at_the_bound(process: &Arc<Process>, holder: &Share) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let thread = spawn({
            let (process, over) = (Arc::clone(process), Arc::clone(&over));
            let lease = Arc::clone(holder.lease());
            move || {
                let shared = &process.shared;
                // This makes a step that loom can order between the steps in which other threads
                // read the lease.
                let now = shared.clock.now();
                lease.extend(now, TTL, now).unwrap();
                shared.clock.advance(BOUND);
                loop {
                    process.keep();
                    if over.load(Ordering::Acquire) {
                        return;
                    }
                    wait_for(shared.due_changed.notified());
                }
            }
        });
        Self {
            process: Arc::clone(process),
            over,
            thread,
        }
    }

    fn stop(self) {
        self.over.store(true, Ordering::Release);
        self.process.shared.due_changed.notify_one();
        self.thread.join().unwrap();
    }
}

/// Runs the code on a thread of its own.
macro_rules! thread {
    ($process:ident, $body:expr) => {{
        let $process = Arc::clone($process);
        spawn(move || $body)
    }};
}

#[test]
fn tasks_that_come_together_use_the_ticket_one_after_the_other() {
    model(|process| {
        let others =
            [(), ()].map(|()| thread!(process, process.use_alone(process.take(WRITES).unwrap())));
        process.use_alone(process.take(WRITES).unwrap());
        for other in others {
            other.join().unwrap();
        }
    });
}

#[test]
fn a_ticket_that_was_dropped_goes_on_or_is_released_and_not_both() {
    model(|process| {
        let holder = process.holder(WRITES);
        let keeping = thread!(process, process.keep());
        let other = thread!(process, process.use_alone(process.take(WRITES).unwrap()));
        process.use_alone(holder);
        process.use_alone(process.take(WRITES).unwrap());
        keeping.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn a_ticket_offered_to_a_waiter_that_goes_is_passed_on() {
    model(|process| {
        let holder = process.holder(WRITES);
        let (goes, stays) = (process.waiter(WRITES), process.waiter(WRITES));
        let going = spawn(move || drop(goes));
        let staying = thread!(process, {
            let handover = wait_for(stays);
            process.use_alone(process.follow(handover, WRITES).unwrap());
        });
        process.use_alone(holder);
        going.join().unwrap();
        staying.join().unwrap();
        assert_eq!(process.tickets.lock().unwrap().len(), 1, "it was passed on");
    });
}

#[test]
fn a_ticket_offered_to_the_last_waiter_that_goes_is_released() {
    model(|process| {
        let holder = process.holder(WRITES);
        let waiters = [process.waiter(WRITES), process.waiter(WRITES)];
        let going = waiters.map(|waiter| spawn(move || drop(waiter)));
        process.use_alone(holder);
        for going in going {
            going.join().unwrap();
        }
    });
}

/// With [`Fair::Strict`], a group that gathers may ask in the end, whatever becomes of the group before
/// it and of its own leader.
#[test]
fn a_group_that_gathers_asks_in_the_end() {
    for answered in [true, false] {
        in_every_order(move || {
            let process = &Process::of(client_with(Fair::Strict));
            let first = process.leader(WRITES);
            let (second, joins) = (process.leader(WRITES), process.waiter(WRITES));
            let gives_up = thread!(process, {
                let _ = poll_once(
                    process
                        .lanes
                        .gather_until(&second.role, Instant::FAR_FUTURE),
                );
                drop(second);
            });
            let third = thread!(process, {
                let Some(Handover::Leader(leader)) = wait_for(joins) else {
                    panic!("the ticket of another group");
                };
                wait_for(
                    process
                        .lanes
                        .gather_until(&leader.role, Instant::FAR_FUTURE),
                );
                process.use_ticket(process.ask(leader, WRITES));
            });
            match answered {
                true => process.use_ticket(process.ask(first, WRITES)),
                false => drop(first),
            }
            gives_up.join().unwrap();
            third.join().unwrap();
            process.is_clean();
        });
    }
}

#[test]
fn a_release_leaves_a_ticket_with_its_heir_or_to_the_caller() {
    model(|process| {
        let holder = process.holder(WRITES);
        let goes = process.waiter(WRITES);
        let going = spawn(move || drop(goes));
        let coming = thread!(process, process.use_alone(process.take(WRITES).unwrap()));
        let lease = Arc::clone(holder.lease());
        if holder.leave().is_some() {
            process
                .shared
                .clean_up(crate::client::tracked::Cleanup::of(&lease));
        }
        going.join().unwrap();
        coming.join().unwrap();
    });
}

#[test]
fn leadership_offered_to_a_waiter_that_goes_is_passed_on() {
    model(|process| {
        let leader = process.leader(WRITES);
        let (goes, stays) = (process.waiter(WRITES), process.waiter(WRITES));
        let going = spawn(move || drop(goes));
        let staying = thread!(process, {
            let handover = wait_for(stays);
            process.use_alone(process.follow(handover, WRITES).unwrap());
        });
        drop(leader);
        going.join().unwrap();
        staying.join().unwrap();
    });
}

#[test]
fn leadership_offered_to_the_last_waiter_that_goes_ends() {
    model(|process| {
        let leader = process.leader(WRITES);
        let waiters = [process.waiter(WRITES), process.waiter(WRITES)];
        let going = waiters.map(|waiter| spawn(move || drop(waiter)));
        drop(leader);
        for going in going {
            going.join().unwrap();
        }
    });
}

#[test]
fn a_task_that_comes_when_a_leader_ends_is_not_forgotten() {
    model(|process| {
        let leader = process.leader(WRITES);
        let goes = process.waiter(WRITES);
        let going = spawn(move || drop(goes));
        let coming = thread!(process, process.use_alone(process.take(WRITES).unwrap()));
        drop(leader);
        going.join().unwrap();
        coming.join().unwrap();
    });
}

#[test]
fn a_place_at_the_store_is_inherited_by_the_waiter_that_stays() {
    model(|process| {
        let mut leader = process.leader(WRITES);
        let (place, wake) = process.place(WRITES);
        leader.pending = Some(place);
        let (goes, stays) = (process.waiter(WRITES), process.waiter(WRITES));
        let going = spawn(move || drop(goes));
        let staying = thread!(process, {
            let handover = wait_for(stays);
            process.use_alone(process.follow(handover, WRITES).unwrap());
        });
        let store = thread!(process, process.shared.granted(wake));
        // The leader stands in line at the store, and then gives up.
        let place = leader.pending.as_mut().unwrap();
        let _ = poll_once(place.stand_in_line(Instant::FAR_FUTURE));
        drop(leader);
        for thread in [going, staying, store] {
            thread.join().unwrap();
        }
        assert_eq!(process.tickets.lock().unwrap().len(), 1, "it was inherited");
    });
}

#[test]
fn a_place_at_the_store_without_an_heir_is_given_up() {
    model(|process| {
        let mut leader = process.leader(WRITES);
        let (place, wake) = process.place(WRITES);
        leader.pending = Some(place);
        let goes = process.waiter(WRITES);
        let going = spawn(move || drop(goes));
        let store = thread!(process, process.shared.granted(wake));
        drop(leader);
        going.join().unwrap();
        store.join().unwrap();
    });
}

#[test]
fn a_waiter_that_cannot_use_the_place_takes_one_of_its_own() {
    model(|process| {
        let mut leader = process.leader(READS);
        leader.pending = Some(process.place(READS).0);
        let (goes, stays) = (process.waiter(READS), process.waiter(WRITES));
        let going = spawn(move || drop(goes));
        let staying = thread!(process, {
            let handover = wait_for(stays);
            process.use_alone(process.follow(handover, WRITES).unwrap());
        });
        drop(leader);
        going.join().unwrap();
        staying.join().unwrap();
    });
}

#[test]
fn the_last_of_two_readers_releases_their_ticket() {
    model(|process| {
        let first = process.holder(READS);
        let second = process.take(READS).unwrap();
        let second = spawn(move || drop(second));
        let third = thread!(process, drop(process.take(READS).unwrap()));
        drop(first);
        second.join().unwrap();
        third.join().unwrap();
    });
}

#[test]
fn a_ticket_offered_to_a_reader_that_goes_while_the_last_one_leaves_is_released() {
    model(|process| {
        let holder = process.holder(READS);
        let leader = process.leader(WRITES);
        let goes = process.waiter(READS);
        let going = spawn(move || drop(goes));
        let leaving = spawn(move || drop(holder));
        drop(leader);
        going.join().unwrap();
        leaving.join().unwrap();
    });
}

#[test]
fn of_two_writers_behind_a_reader_one_is_at_the_store() {
    model(|process| {
        let holder = process.holder(READS);
        let writing =
            [(), ()].map(|()| thread!(process, process.use_ticket(process.take(WRITES).unwrap())));
        for writing in writing {
            writing.join().unwrap();
        }
        drop(holder);
    });
}

#[test]
fn readers_are_let_in_together_and_the_writer_behind_them_alone() {
    model(|process| {
        let leader = process.leader(READS);
        let (reads, writes) = (process.waiter(READS), process.waiter(WRITES));
        let reading = thread!(process, {
            let handover = wait_for(reads);
            drop(process.follow(handover, READS).unwrap());
        });
        let writing = thread!(process, {
            let handover = wait_for(writes);
            process.use_ticket(process.follow(handover, WRITES).unwrap());
        });
        let share = process.ask(leader, READS);
        reading.join().unwrap();
        drop(share);
        writing.join().unwrap();
    });
}

#[test]
fn a_loss_sends_a_waiter_to_the_store_and_the_lost_ticket_is_released_by_its_user() {
    model(|process| {
        let holder = process.holder(WRITES);
        let (goes, stays) = (process.waiter(WRITES), process.waiter(WRITES));
        let lease = Arc::clone(holder.lease());
        let losing = thread!(process, {
            assert!(lease.lose(LostReason::Taken));
            process.lanes.retire(&lease);
        });
        let going = spawn(move || drop(goes));
        let staying = thread!(process, {
            let handover = wait_for(stays);
            process.use_ticket(process.follow(handover, WRITES).unwrap());
        });
        process.use_ticket(holder);
        for thread in [losing, going, staying] {
            thread.join().unwrap();
        }
    });
}

#[test]
fn at_the_bound_a_waiter_is_sent_to_the_store() {
    model(|process| {
        let holder = process.holder(WRITES);
        let waits = process.waiter(WRITES);
        let bell = Bell::at_the_bound(process, &holder);
        let waiting = thread!(process, {
            let handover = wait_for(waits);
            process.use_ticket(process.follow(handover, WRITES).unwrap());
        });
        process.use_ticket(holder);
        waiting.join().unwrap();
        bell.stop();
    });
}

#[test]
fn a_waiter_that_goes_at_the_bound_leaves_nothing() {
    model(|process| {
        let holder = process.holder(WRITES);
        let goes = process.waiter(WRITES);
        let bell = Bell::at_the_bound(process, &holder);
        let going = spawn(move || drop(goes));
        process.use_ticket(holder);
        going.join().unwrap();
        bell.stop();
    });
}

#[test]
fn a_task_that_comes_at_the_bound_is_sent_to_the_store() {
    model(|process| {
        let holder = process.holder(WRITES);
        let bell = Bell::at_the_bound(process, &holder);
        // The holder stays until the other task is served.
        let share = process.take(WRITES).unwrap();
        assert_ne!(share.lease().request.id, holder.lease().request.id);
        drop(share);
        drop(holder);
        bell.stop();
    });
}

#[test]
fn a_shutdown_sends_everybody_away_and_leaves_the_holder_alone() {
    model(|process| {
        let holder = process.holder(WRITES);
        let waits = process.waiter(WRITES);
        let waiting = thread!(process, {
            let handover = wait_for(waits);
            if let Some(share) = process.follow(handover, WRITES) {
                process.use_alone(share);
            }
        });
        let coming = thread!(process, {
            if let Some(share) = process.take(WRITES) {
                process.use_alone(share);
            }
        });
        let closing = thread!(process, Arc::clone(&process.lanes).close());
        process.use_alone(holder);
        for thread in [waiting, coming, closing] {
            thread.join().unwrap();
        }
        assert!(process.take(WRITES).is_none(), "closed");
    });
}

#[test]
fn a_waiter_during_a_shutdown_need_not_wait_for_the_holder() {
    model(|process| {
        let holder = process.holder(WRITES);
        let waits = process.waiter(WRITES);
        let waiting = thread!(process, {
            assert!(process.follow(wait_for(waits), WRITES).is_none());
        });
        let coming = thread!(process, assert!(process.take(WRITES).is_none()));
        Arc::clone(&process.lanes).close();
        waiting.join().unwrap();
        coming.join().unwrap();
        drop(holder);
    });
}

#[test]
fn a_leader_that_ends_in_a_shutdown_leaves_nothing() {
    model(|process| {
        let leader = process.leader(WRITES);
        let (goes, stays) = (process.waiter(WRITES), process.waiter(WRITES));
        let going = spawn(move || drop(goes));
        let staying = thread!(process, {
            let handover = wait_for(stays);
            if let Some(share) = process.follow(handover, WRITES) {
                process.use_alone(share);
            }
        });
        let closing = thread!(process, Arc::clone(&process.lanes).close());
        drop(leader);
        for thread in [going, staying, closing] {
            thread.join().unwrap();
        }
    });
}

#[test]
fn when_the_store_fails_another_task_tries_again() {
    model(|process| {
        let leader = process.leader(WRITES);
        let (goes, stays) = (process.waiter(WRITES), process.waiter(WRITES));
        let going = spawn(move || drop(goes));
        let staying = thread!(process, {
            let handover = wait_for(stays);
            process.use_alone(process.follow(handover, WRITES).unwrap());
        });
        leader.failed(&Error::unavailable("down"));
        going.join().unwrap();
        staying.join().unwrap();
    });
}

/// The last writer and the last reader end at the same time. If a writer gets the ticket, it writes
/// alone, and the ticket does not become a read ticket while it writes.
#[test]
fn a_ticket_is_passed_on_to_a_writer_or_becomes_a_readers() {
    model(|process| {
        let client = Client::without_thread(&process.shared, Arc::clone(&process.lanes));
        let name = name();
        let spec = |permits| Spec {
            client: &client,
            name: &name,
            permits,
            capacity: FULL,
            ttl: TTL,
            renew: true,
            owner: &client.owner.whole,
            through_outages: false,
            linger: std::time::Duration::ZERO,
            limited: false,
            reentrant: true,
            on_lost: OnLost::Cancel,
            on_revoke: OnRevoke::Finish,
            label: None,
            meter: client.shared.meter.lock(None),
        };
        let writes = Guard::of(
            Grant::Share(process.holder(WRITES), process.shared.clock.now()),
            &spec(FULL),
        );
        let outer = writes.held().guard(READS).unwrap();
        let reads = Guard::inside(outer, None, &spec(NonZeroU32::MIN));
        let waits = process.waiter(WRITES);
        let waiting = thread!(process, {
            let share = process.follow(wait_for(waits), WRITES).unwrap();
            let lease = Arc::clone(share.lease());
            assert!(lease.is_exclusive());
            process.use_ticket(share);
            assert!(
                lease.is_exclusive(),
                "it became a reader's under its writer"
            );
        });
        let writing = spawn(move || drop(writes));
        drop(reads);
        writing.join().unwrap();
        waiting.join().unwrap();
        drop(client);
    });
}

#[test]
fn readers_join_a_ticket_that_became_a_readers_and_writers_do_not() {
    model(|process| {
        let holder = process.holder(WRITES);
        let lease = Arc::clone(holder.lease());
        let coming = thread!(process, {
            let share = process.take(READS).unwrap();
            assert!(share.lease().is_shared());
            drop(share);
        });
        let writing = thread!(process, {
            let share = process.take(WRITES).unwrap();
            assert!(share.lease().is_exclusive());
            process.use_ticket(share);
        });
        let keeping = thread!(process, {
            // The store acknowledges the renewal as it was sent.
            let renewal = lease.renewal(process.shared.clock.now());
            if lease.acknowledged(&renewal) {
                process.lanes.mode_changed(&lease);
            }
        });
        holder.lease().shrink();
        process.lanes.mode_changed(holder.lease());
        drop(holder);
        for thread in [coming, writing, keeping] {
            thread.join().unwrap();
        }
    });
}
