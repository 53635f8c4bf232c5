//! Tests of a client without a store, and in `overload` with one that is too slow.

mod overload;

use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use super::events::Event;
use super::lease::Lease;
use super::lease::tests::lease;
use super::settings::Settings;
use super::shared::{Sent, Shared};
use super::tickets::LEAST_RECHECK;
use super::tracked::{RenewalStage, Stage};
use crate::backend::Renewed;
use crate::backend::memory::Memory;
use crate::clock::Clock;
use crate::error::LostReason;

/// A client with this clock, and a lease in its table whose enqueue is in flight.
fn asked_by(clock: &Clock) -> (Arc<Shared>, Arc<Lease>) {
    let memory = Arc::new(Memory::new(Clock::BOOT));
    let settings = Settings {
        clock: clock.clone(),
        ..Settings::of_tests()
    };
    let runtime = tokio::runtime::Handle::current();
    let shared = Arc::new(Shared::new(memory, settings, runtime, |_, _| ()).unwrap());
    let lease = Arc::new(lease());
    shared.arm(&lease).expect("open");
    (shared, lease)
}

/// The machine slept, or the store was slow. The reply is applied before the keeper has checked the
/// deadline, and removes the lease from the table.
#[tokio::test]
async fn a_loss_that_a_late_acknowledgement_finds_is_told() {
    let clock = Clock::by_hand();
    let (shared, lease) = asked_by(&clock);
    let mut events = shared.teller.listen();
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
    let event = tokio::time::timeout(Duration::from_secs(5), events.recv()).await;
    assert!(matches!(event, Ok(Some(Event::Lost { .. }))), "{event:?}");
    assert_eq!(shared.table().cleanups.len(), 1);
}

/// A new renewal time would wake the keeper's thread for nothing, just when the holder begins its
/// work.
#[tokio::test]
async fn a_grant_in_line_is_renewed_when_its_wait_would_have_been() {
    let clock = Clock::by_hand();
    let (shared, lease) = asked_by(&clock);
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

    // A time that is too late does not stay.
    shared.entrust(lease.request.id, Stage::Waiting, lease.deadline());
    shared.entrust_held(&lease);
    let times = Shared::renewal_times(&lease, ttl);
    assert!(due().is_some_and(|due| times.contains(&due)));
}

#[tokio::test]
async fn a_renewal_in_time_is_not_late_if_the_store_gives_less_than_was_asked_for() {
    let clock = Clock::by_hand();
    clock.stop();
    let (_, lease) = asked_by(&clock);
    let given = lease.request.ttl / 2;
    lease.answered(7, clock.now(), given);

    let due = *Shared::renewal_times(&lease, given).end();

    let moment = Duration::from_millis(1);
    assert_eq!(Shared::late(&lease, due), Some(Duration::ZERO));
    assert_eq!(Shared::late(&lease, due.after(moment)), Some(moment));
    assert_eq!(Shared::late(&lease, lease.deadline()), None, "it is over");
}

/// The holder has a grace from when it learns of the ask-back, and the caller waits meanwhile.
#[tokio::test]
async fn a_ticket_that_is_asked_back_while_it_is_granted_is_rechecked_soon() {
    for stage in [Stage::Asked, Stage::Waiting, Stage::Held] {
        let clock = Clock::by_hand();
        clock.stop();
        let (shared, lease) = asked_by(&clock);
        let (id, ttl) = (lease.request.id, lease.request.ttl);
        let due = || shared.table().leases.get(&id).and_then(|lease| lease.due);
        if stage == Stage::Asked {
            shared.recheck(id, Duration::ZERO);
        }
        lease.answered(7, clock.now(), ttl);
        if stage != Stage::Asked {
            shared.entrust(id, stage, Shared::renewal_time(&lease, ttl));
            shared.recheck(id, Duration::ZERO);
        }

        shared.entrust_held(&lease);

        assert_eq!(due(), Some(clock.now().after(LEAST_RECHECK)), "{stage:?}");
    }
}

#[tokio::test]
async fn a_waiter_rechecks_when_it_is_told_to_and_not_too_often() {
    let clock = Clock::by_hand();
    clock.stop();
    let (shared, lease) = asked_by(&clock);
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
    // A held ticket is rechecked too, because it may have been asked back.
    assert_eq!(told(Stage::Held, soon), Some(clock.now().after(soon)));
    assert_eq!(told(Stage::Leaving, soon), Some(in_line));

    // The answer to the ticket's enqueue, or to its renewal, is in flight.
    for stage in [Stage::Asked, Stage::Waiting] {
        let due = || shared.table().leases.get(&id).and_then(|lease| lease.due);
        shared.entrust(id, stage, in_line);
        shared.table().leases.get_mut(&id).expect("there").renewal = RenewalStage::UnderWay;
        shared.recheck(id, soon);
        shared.recheck(id, Duration::ZERO);
        shared.recheck(id, soon);
        assert_eq!(due(), Some(in_line), "not before the answer");
        match stage {
            Stage::Asked => assert!(shared.entrust(id, Stage::Waiting, in_line)),
            _ => drop(shared.renewal_over(id, in_line)),
        }
        assert_eq!(due(), Some(clock.now().after(LEAST_RECHECK)));
        // The early recheck happens only once.
        shared.renewal_over(id, in_line);
        assert_eq!(due(), Some(in_line));
    }
}

#[tokio::test]
async fn a_held_ticket_that_changes_while_it_is_renewed_is_renewed_once_more() {
    let clock = Clock::by_hand();
    clock.stop();
    let (shared, lease) = asked_by(&clock);
    let (id, ttl) = (lease.request.id, lease.request.ttl);
    lease.answered(7, clock.now(), ttl);
    let later = Shared::renewal_time(&lease, ttl);
    let due = || shared.table().leases.get(&id).and_then(|lease| lease.due);
    shared.entrust(id, Stage::Held, later);
    shared.table().leases.get_mut(&id).expect("there").renewal = RenewalStage::UnderWay;

    shared.recheck_now(id);

    assert_eq!(due(), Some(later), "not before the answer");
    shared.renewal_over(id, later);
    assert_eq!(due(), Some(clock.now()));
    // The early recheck happens only once.
    shared.renewal_over(id, later);
    assert_eq!(due(), Some(later));
}

#[tokio::test]
async fn a_ticket_that_is_asked_back_while_it_is_granted_and_renewed_is_rechecked_after_that() {
    let clock = Clock::by_hand();
    clock.stop();
    let (shared, lease) = asked_by(&clock);
    let (id, ttl) = (lease.request.id, lease.request.ttl);
    lease.answered(7, clock.now(), ttl);
    let later = Shared::renewal_time(&lease, ttl);
    shared.entrust(id, Stage::Waiting, later);
    shared.table().leases.get_mut(&id).expect("there").renewal = RenewalStage::UnderWay;

    shared.recheck(id, Duration::ZERO);
    shared.entrust_held(&lease);
    shared.renewal_over(id, later);

    let due = shared.table().leases.get(&id).and_then(|lease| lease.due);
    assert_eq!(due, Some(clock.now().after(LEAST_RECHECK)));
}

/// Runs the code on a thread of its own, because a deadlocked thread cannot be ended.
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

/// A waker that runs this code when it is woken. If it is dropped without that, it drops the code.
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
        // This waker behaves like that of an executor that polls at once.
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
