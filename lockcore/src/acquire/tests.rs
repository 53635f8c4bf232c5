//! Tests of the acquire loop, with a store that the test plays.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::acquire::lanes::{Arrived, Handover, Lanes};
use crate::acquire::pending::{Pending, Progress};
use crate::backend::{self, memory::Memory};
use crate::backend::{
    Answer, Backend, Capability, Connection, Departure, Enqueued, EventSink, Released, Renewed,
    TicketInfo,
};
use crate::client::lease::Lease;
use crate::client::settings::{Defaults, Settings};
use crate::client::shared::Shared;
use crate::clock::Clock;
use crate::locks::Locks;
use crate::name::{Name, Namespace};
use crate::options::{Fair, Wait};
use crate::request::{FULL, Request};

const TTL: Duration = Duration::from_secs(10);

/// A store that puts the first request in line, and answers no other.
#[derive(Clone, Debug)]
struct OneInLine {
    asked: mpsc::UnboundedSender<Arc<Request>>,
    events: Arc<Mutex<Vec<EventSink>>>,
    others: Arc<AtomicBool>,
}

impl Backend for OneInLine {
    fn capability(&self) -> Capability {
        Capability::new()
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        self.events.lock().expect("no panic").push(events);
        let connection: Arc<dyn Connection> = Arc::new(self.clone());
        Box::pin(std::future::ready(Ok(connection)))
    }
}

impl Connection for OneInLine {
    fn enqueue(&self, request: Arc<Request>, _patience: Duration) -> Answer<Enqueued> {
        let waiting = Enqueued::Waiting {
            ticket: 7,
            valid_for: request.ttl,
            recheck_in: None,
            ahead: None,
        };
        let _ = self.asked.send(request);
        match self.others.swap(true, Ordering::SeqCst) {
            false => Box::pin(std::future::ready(Ok(waiting))),
            true => Box::pin(std::future::pending()),
        }
    }

    fn renew(&self, _: Vec<Arc<Request>>, _patience: Duration) -> Answer<Vec<Renewed>> {
        Box::pin(std::future::pending())
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        let released = vec![Released::Released; tickets.len()];
        Box::pin(std::future::ready(Ok(released)))
    }

    fn inspect(&self, _: Name) -> Answer<Vec<TicketInfo>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn forget(&self, _: Name) -> Answer<()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn check(&self) -> Answer<Vec<String>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }
}

fn is_pending<T>(future: Pin<&mut impl Future<Output = T>>) -> bool {
    let mut cx = Context::from_waker(Waker::noop());
    future.poll(&mut cx).is_pending()
}

async fn next(requests: &mut mpsc::UnboundedReceiver<Arc<Request>>) -> Arc<Request> {
    let next = tokio::time::timeout(Duration::from_secs(10), requests.recv());
    next.await
        .expect("nobody asks")
        .expect("the store is there")
}

/// The machine sleeps for longer than the lease. After that a wake-up arrives before the keeper
/// checks the lease. So the leader finds its ticket lost, and asks again. Then it is not polled any
/// more.
#[tokio::test]
async fn a_leader_that_has_lost_its_place_and_is_not_polled_is_replaced() {
    let (asked, mut requests) = mpsc::unbounded_channel();
    let events = Arc::<Mutex<Vec<EventSink>>>::default();
    let store = OneInLine {
        asked,
        events: Arc::clone(&events),
        others: Arc::default(),
    };
    let clock = Clock::by_hand();
    let locks = Locks::builder();
    let locks = locks.build_with(Arc::new(store), String::new(), clock.clone());
    let locks = locks.expect("a client");
    locks.ready(TTL).await.expect("connected");
    let lock = locks.mutex("a").ttl(TTL).wait(Wait::Forever);
    let mut starved = pin!(lock.acquire());
    assert!(is_pending(starved.as_mut()));
    let in_line = next(&mut requests).await;

    clock.suspend(2 * TTL);
    for sink in &*events.lock().expect("no panic") {
        sink.granted(backend::Wake::new(in_line.id, 7));
    }
    assert!(is_pending(starved.as_mut()));
    next(&mut requests).await;
    let other = lock.clone();
    let other = tokio::spawn(async move { other.acquire().await });
    let name = locks.name("a").expect("a name");
    let waits = async {
        while locks.0.lanes.waiting(&name) == 0 {
            tokio::task::yield_now().await;
        }
    };
    let waits = tokio::time::timeout(Duration::from_secs(10), waits);
    waits.await.expect("it does not wait");
    clock.advance(2 * TTL);

    next(&mut requests).await;
    other.abort();
}

/// Tells whether the lanes and the table answer while the waker is called.
struct Asks {
    shared: Arc<Shared>,
    lanes: Arc<Lanes>,
    name: Name,
    answered: Mutex<Option<bool>>,
}

impl Wake for Asks {
    fn wake(self: Arc<Self>) {
        let (tell, told) = std::sync::mpsc::channel();
        let it = Arc::clone(&self);
        std::thread::spawn(move || {
            let _ = (it.lanes.waiting(&it.name), it.shared.left(&it.name));
            tell.send(())
        });
        let answer = told.recv_timeout(Duration::from_secs(5));
        *self.answered.lock().expect("no panic") = Some(answer.is_ok());
    }
}

/// A caller that does not wait for holders waits for the release of a ticket, and another caller goes
/// on with this ticket. There is no keeper here, so the release does not begin.
#[tokio::test]
async fn a_caller_that_waits_for_a_release_is_woken_when_no_mutex_is_held() {
    let memory = Arc::new(Memory::new(Clock::BOOT));
    let settings = Settings {
        defaults: Defaults {
            ttl: TTL,
            wait: Wait::Forever,
            fair: Fair::Local(TTL),
            through_outages: false,
            linger: Duration::ZERO,
        },
        ..Settings::of_tests()
    };
    let here = tokio::runtime::Handle::current();
    let shared = Arc::new(Shared::new(memory, settings, here, |_, _| ()).expect("a client"));
    let lanes = Lanes::new(&shared);
    let name = Name::new(Namespace::new("test").expect("valid"), "a").expect("valid");
    let arrive = || lanes.arrive(&name, TTL, true, false, shared.clock.now());
    let Arrived::Given(Handover::Leader(leader)) = arrive() else {
        panic!("there is somebody already");
    };
    let id = shared.new_id().expect("an id");
    let request = Request::new(name.clone(), id, FULL, FULL, TTL);
    let lease = Arc::new(Lease::new(Arc::new(request), true));
    let mut pending = Pending::of(&shared, lease).expect("open");
    let granted = Enqueued::Granted {
        ticket: 7,
        valid_for: TTL,
    };
    let granted = pending.answered(granted, shared.sent_now());
    let Ok(Progress::Granted(since)) = granted else {
        panic!("{granted:?}");
    };
    let lease = pending.into_lease().expect("collected");
    drop(leader.granted(lease, since));
    let asks = Arc::new(Asks {
        shared: Arc::clone(&shared),
        lanes: Arc::clone(&lanes),
        name: name.clone(),
        answered: Mutex::default(),
    });
    let waker = Waker::from(Arc::clone(&asks));
    let mut gone = pin!(shared.left(&name).expect("its release is due").gone());
    let polled = gone.as_mut().poll(&mut Context::from_waker(&waker));
    assert!(polled.is_pending());

    let goes_on = arrive();

    assert!(matches!(goes_on, Arrived::Given(Handover::Share(_))));
    let answered = *asks.answered.lock().expect("no panic");
    assert_eq!(answered, Some(true), "a mutex was held");
}
