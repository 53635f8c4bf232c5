//! Tests of the acquire loop, with a store that the test plays.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use tokio::sync::mpsc;

use crate::backend::{
    Answer, Backend, Capability, Connection, Departure, Enqueued, EventSink, Released, Renewed,
    TicketInfo, Wake,
};
use crate::clock::Clock;
use crate::locks::Locks;
use crate::name::Name;
use crate::options::Wait;
use crate::request::Request;

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
        sink.granted(Wake::new(in_line.id, 7));
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
