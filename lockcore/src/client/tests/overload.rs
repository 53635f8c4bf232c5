//! A test of the whole client at a store that cannot renew all leases in time: the callers, the
//! keeper on its thread, and the connection. Time passes only when the test advances the clock, and
//! the test does that only when the keeper has nothing left to do. So the load of the machine changes
//! nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::backend::memory::Memory;
use crate::backend::{Answer, Backend, Capability, Connection, EventSink, Renewed};
use crate::client::pace::BATCH;
use crate::client::shared::Shared;
use crate::client::tracked::{RenewalStage, Tracked};
use crate::clock::Clock;
use crate::error::LostReason;
use crate::locks::Locks;
use crate::request::Request;

const TTL: Duration = Duration::from_secs(4);
/// How long the store takes for a request. This is 500 renewals in a second.
const TAKES: Duration = Duration::from_millis(200);
/// How many requests are on their way to the store or wait there. An answer takes as long as this
/// many requests. So a lease that is nearer to its end than that is renewed in vain.
const IN_FLIGHT: usize = 4;
/// No lease is kept for longer than its ttl, so the store cannot renew more leases than this.
const MOST: usize = BATCH * (TTL.as_millis() / TAKES.as_millis()) as usize;
/// How many leases are kept. A lease is left out if it would be answered with less than an eighth of
/// its ttl left. Renewals are due at slightly different times, so the last batch may not be full.
const PROMISED: usize = MOST / 8 * 7 - (IN_FLIGHT + 1) * BATCH;

/// The memory store, which carries out a request for renewals when the test lets it.
#[derive(Debug)]
struct Slow {
    memory: Memory,
    requests: mpsc::UnboundedSender<Held>,
}

#[derive(Debug)]
struct SlowConnection {
    connection: Arc<dyn Connection>,
    requests: mpsc::UnboundedSender<Held>,
}

/// A request for this number of renewals. The store carries it out after the message.
type Held = (usize, oneshot::Sender<()>);

impl Backend for Slow {
    fn capability(&self) -> Capability {
        let renewals = (IN_FLIGHT * BATCH) as u32;
        self.memory.capability().renewals_in_flight(renewals)
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let (connecting, requests) = (self.memory.connect(events), self.requests.clone());
        Box::pin(async move {
            let connection = connecting.await?;
            Ok(Arc::new(SlowConnection {
                connection,
                requests,
            }) as Arc<dyn Connection>)
        })
    }
}

impl Connection for SlowConnection {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.connection)
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, patience: Duration) -> Answer<Vec<Renewed>> {
        let (carry_out, begins) = oneshot::channel();
        let _ = self.requests.send((tickets.len(), carry_out));
        let connection = Arc::clone(&self.connection);
        Box::pin(async move {
            let _ = begins.await; // the test has ended if this fails
            connection.renew(tickets, patience).await
        })
    }
}

/// The store as the test plays it.
struct Server {
    requests: mpsc::UnboundedReceiver<Held>,
    in_line: VecDeque<Held>,
    clock: Clock,
}

impl Server {
    /// For this number of times, lets the time of one request pass, and answers the oldest one.
    async fn answer(&mut self, shared: &Shared, times: usize) {
        for _ in 0..times {
            let settled = async {
                loop {
                    self.receive();
                    if self.is_settled(shared) {
                        return;
                    }
                    tokio::task::yield_now().await;
                }
            };
            let settled = tokio::time::timeout(Duration::from_secs(30), settled);
            settled.await.expect("the keeper has stopped");
            self.clock.advance(TAKES);
            if let Some((_, carry_out)) = self.in_line.pop_front() {
                // The keeper may have given up meanwhile. The store has taken the time all the same.
                let _ = carry_out.send(());
            }
        }
    }

    fn receive(&mut self) {
        while let Ok(request) = self.requests.try_recv() {
            self.in_line.push_back(request);
        }
    }

    /// Whether the keeper has worked in all answers, and has sent all requests that it may send now,
    /// as far as they were [received](Self::receive).
    fn is_settled(&self, shared: &Shared) -> bool {
        let open = self.in_line.iter().filter(|(_, open)| !open.is_closed());
        let (requests, renewals) = open.fold((0, 0), |(requests, renewals), (tickets, _)| {
            (requests + 1, renewals + tickets)
        });
        let now = self.clock.now();
        let table = shared.table();
        let (mut queued, mut under_way) = (0, 0);
        // A lease that has ended is not renewed any more, whatever its entry says.
        let valid = |tracked: &&Tracked| tracked.lease.deadline() > now;
        for tracked in table.leases.values().filter(valid) {
            match tracked.renewal {
                RenewalStage::Idle => {}
                RenewalStage::Queued(..) => queued += 1,
                RenewalStage::UnderWay => under_way += 1,
            }
        }
        table.due.first().is_none_or(|(due, _)| *due > now)
            && under_way <= renewals
            && (queued == 0 || requests == IN_FLIGHT)
    }
}

/// If the earliest deadline were always first, all requests would be for leases that end before the
/// answer, and nearly all leases would be lost. If the latest deadline were first, the same few
/// leases would be renewed again and again, half as many as are possible.
#[tokio::test]
async fn of_more_leases_than_the_store_can_renew_only_the_surplus_is_lost() {
    let clock = Clock::by_hand();
    clock.stop();
    let (tell, requests) = mpsc::unbounded_channel();
    let store = Slow {
        memory: Memory::new(clock.clone()),
        requests: tell,
    };
    let locks = Locks::builder().op_timeout(2 * TTL);
    let locks = locks.build_with(Arc::new(store), String::new(), clock.clone());
    let locks = locks.expect("a client");
    let mut held = Vec::new();
    for number in 0..2 * MOST {
        let lock = locks.mutex(format!("a{number}")).ttl(TTL);
        held.push(lock.acquire().await.expect("free"));
    }
    let shared = &locks.0.shared;
    let mut server = Server {
        requests,
        in_line: VecDeque::new(),
        clock,
    };

    server.answer(shared, 3 * MOST / BATCH).await;

    let (kept, lost): (Vec<_>, Vec<_>) = held.into_iter().partition(|guard| guard.is_valid());
    assert!((PROMISED..=MOST).contains(&kept.len()), "{}", kept.len());
    for guard in &lost {
        assert_eq!(guard.lost().await, LostReason::Expired);
    }
    server.answer(shared, 4 * MOST / BATCH).await;
    let still = kept.iter().filter(|guard| guard.is_valid()).count();
    assert_eq!(still, kept.len());
}
