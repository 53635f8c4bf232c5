//! A connection that is up, and the requests that are in flight on it: how many there may be, which
//! request is next, and whether the store answers. Opening and replacing connections is in
//! `supervise`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

#[cfg(feature = "metrics")]
use super::measured::Measured;
use super::pace::BATCH;
use super::window::Window;
use crate::backend::{Answer, Connection, Enqueued};
use crate::clock::Instant;
use crate::log::guarded;
use crate::meter::{Meter, Up};

/// How many enqueues may always be in flight on a connection. This many keep a store busy that is
/// near.
const FEWEST_ENQUEUES: u32 = 32;

/// The verbs of a store's connection, with their gates.
///
/// A store gets only as many requests at a time as it allows ([`Capability::in_flight`]), and fewer
/// if its answers come late. Other requests wait here, in order of arrival. So a burst of requests
/// costs the callers time, but does not delay the renewals and heartbeats on the same connection:
/// these pass no gate.
///
/// Releases have a gate of their own. They free locks that others wait for, so they must not wait
/// behind thousands of enqueues.
///
/// [`Capability::in_flight`]: crate::backend::Capability::in_flight
#[derive(Debug)]
pub(crate) struct Connected {
    connection: Arc<dyn Connection>,
    enqueues: Gate,
    releases: Gate,
    answers: Answers,
    up: Up,
}

/// Whether the store answers on a connection.
///
/// Only a request whose caller has waited for the answer in vain shows that the store is silent. A
/// caller that is dropped does not see its answer, so its request shows nothing. For an enqueue the
/// keeper waits in place of the caller.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    /// How many requests were answered so far.
    count: AtomicU64,
    silence: Mutex<Option<Silence>>,
}

/// A time in which callers waited, and no request was answered.
#[derive(Clone, Copy, Debug)]
struct Silence {
    /// [`Answers::count`] during this time.
    after: u64,
    since: Instant,
    until: Instant,
}

/// A request that was sent, for [`Answers`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlight {
    sent: Instant,
    /// [`Answers::count`] when it was sent.
    after: u64,
}

/// Lets a number of requests through at a time. A request is counted until its [`Pass`] is dropped.
///
/// A pass belongs to a future, and a future may exist without ever being polled again. An example
/// is a `select!` over `&mut future` that has finished. So passes that do not move are [written
/// off](Self::write_off), and the gate gives out others in their place.
#[derive(Debug)]
pub(crate) struct Gate {
    /// How many requests may pass at a time. The permits follow its limit.
    window: Mutex<Window>,
    /// The least that this can be, so that a request with so many tickets can always pass.
    least: u32,
    /// `None` for a store without a limit.
    semaphore: Option<Arc<Semaphore>>,
    /// How many passes were given out or came back so far, in total.
    moves: Arc<AtomicU64>,
    /// How many permits are not added again when passes come back. They belong to passes that were
    /// written off, or the gate has become narrower while they were in use.
    written_off: Arc<AtomicU64>,
}

/// A request is in flight for as long as this lives.
#[derive(Debug)]
pub(crate) struct Pass {
    /// Whether the request had to wait at the gate, so that time has passed.
    pub(crate) has_waited: bool,
    /// The permits, and the two counters of the gate that are updated when the permits come back.
    permit: Option<(OwnedSemaphorePermit, Arc<AtomicU64>, Arc<AtomicU64>)>,
}

/// An enqueue that was sent and has not been answered.
pub(crate) struct Asking {
    pub(crate) answer: Answer<Enqueued>,
    /// The connection on which it was sent.
    pub(crate) connected: Arc<Connected>,
    pub(crate) in_flight: InFlight,
    /// The request counts at its gate for as long as somebody waits for its answer.
    pub(crate) pass: Pass,
}

impl Drop for Pass {
    fn drop(&mut self) {
        let Some((mut permit, moves, written_off)) = self.permit.take() else {
            return;
        };
        moves.fetch_add(1, Ordering::Relaxed);
        let count = permit.num_permits() as u64;
        let order = Ordering::SeqCst;
        let less = |off: u64| Some(off.saturating_sub(count));
        let off = written_off.fetch_update(order, order, less);
        let off = off.unwrap_or_default().min(count);
        if let Some(off) = permit.split(off as usize) {
            off.forget();
        }
        // This lets the next request pass, which wakes its task. The waker is the user's code.
        guarded(|| drop(permit));
    }
}

/// The connection was replaced while a request waited at its gate. Nothing was sent.
#[derive(Debug)]
pub(crate) struct Replaced;

impl Connected {
    /// With `sessions`, renewals and proofs of life share the connection with all other requests.
    /// So its gates begin narrow. Otherwise they begin wide, so that a burst is sent at once.
    pub(crate) fn new(
        connection: Arc<dyn Connection>,
        in_flight: u32,
        sessions: bool,
        meter: &Meter,
    ) -> Self {
        #[cfg(feature = "metrics")]
        let connection = Arc::new(Measured::around(connection, meter.requests()));
        let gate = |least| Gate::between(least, in_flight, !sessions);
        Self {
            connection,
            enqueues: gate(FEWEST_ENQUEUES),
            releases: gate(BATCH as u32),
            answers: Answers::default(),
            up: meter.connected(),
        }
    }

    pub(crate) fn verbs(&self) -> &dyn Connection {
        &*self.connection
    }

    /// The store's own connection, for [`close`](Connection::close).
    pub(crate) fn connection(&self) -> &Arc<dyn Connection> {
        &self.connection
    }

    /// The gate of enqueues. Each enqueue counts as one.
    pub(crate) fn enqueues(&self) -> &Gate {
        &self.enqueues
    }

    /// The gate of releases. Each release counts as many as it has tickets.
    pub(crate) fn releases(&self) -> &Gate {
        &self.releases
    }

    /// Nothing uses the connection any more: requests that wait at its gates fail with
    /// [`Replaced`].
    pub(crate) fn close(&self) {
        self.up.down();
        for gate in [&self.enqueues, &self.releases] {
            if let Some(semaphore) = &gate.semaphore {
                semaphore.close();
            }
        }
    }

    pub(crate) fn answers(&self) -> &Answers {
        &self.answers
    }
}

impl Answers {
    /// Notes that a request is sent at `sent`.
    pub(crate) fn asked(&self, sent: Instant) -> InFlight {
        let after = self.count.load(Ordering::Relaxed);
        InFlight { sent, after }
    }

    /// Notes that a request was answered, whatever the answer says.
    pub(crate) fn answered(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a caller has waited for an answer until `now`, in vain. Returns for how long
    /// callers have waited without any answer. If one answer is late while other answers arrive,
    /// the connection is only slow.
    ///
    /// The waits of several requests count together if no more than `pause` is between them. An
    /// earlier wait shows nothing, because its answer may have come later, when nobody waited.
    pub(crate) fn missed(&self, request: InFlight, now: Instant, pause: Duration) -> Duration {
        let InFlight { sent, after } = request;
        if self.count.load(Ordering::Relaxed) != after {
            return Duration::ZERO;
        }
        let mut silence = self.silence.lock().unwrap_or_else(PoisonError::into_inner);
        let goes_on =
            |silence: &Silence| silence.after == after && sent <= silence.until.after(pause);
        let before = silence.filter(goes_on);
        let since = before.map_or(sent, |silence| silence.since.min(sent));
        *silence = Some(Silence {
            after,
            since,
            until: now,
        });
        since.until(now)
    }
}

impl Gate {
    /// A gate that lets at least `least` and at most `most` requests through at a time. With
    /// `u32::MAX` all requests pass. It begins with `most` if it is wide, and else with `least`.
    fn between(least: u32, most: u32, is_wide: bool) -> Self {
        let bounded = most < u32::MAX;
        let narrow = Window::between(least as usize, most as usize);
        let window = if is_wide { narrow.wide() } else { narrow };
        let limit = window.limit();
        Self {
            least: least.clamp(1, most.max(1)),
            window: Mutex::new(window),
            semaphore: bounded.then(|| Arc::new(Semaphore::new(limit))),
            moves: Arc::default(),
            written_off: Arc::default(),
        }
    }

    /// A pass for this number of tickets, if the gate has room and no other request waits at it.
    pub(crate) fn try_pass(&self, tickets: usize) -> Option<Pass> {
        let Some(semaphore) = &self.semaphore else {
            return Some(Pass {
                has_waited: false,
                permit: None,
            });
        };
        // This does not overtake requests that wait, because permits that become free go to them
        // first.
        let permit = Arc::clone(semaphore).try_acquire_many_owned(self.permits(tickets));
        Some(self.pass(permit.ok()?, false))
    }

    /// Waits for a pass for this number of tickets.
    ///
    /// Cancel safety: if the future is dropped before it resolves, it gives up its position at the
    /// gate.
    pub(crate) async fn wait_for_pass(&self, tickets: usize) -> Result<Pass, Replaced> {
        let Some(semaphore) = &self.semaphore else {
            return Ok(Pass {
                has_waited: true,
                permit: None,
            });
        };
        let permit = Arc::clone(semaphore).acquire_many_owned(self.permits(tickets));
        let permit = permit.await.map_err(|_closed| Replaced)?;
        Ok(self.pass(permit, true))
    }

    /// How many passes were given out or came back so far, in total.
    pub(crate) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    /// No pass has moved since `moves` was read, and the time since then is longer than the store
    /// may take to answer. So the futures that have the passes, or that are next at the gate, are
    /// not polled. The gate makes new passes in place of theirs, once.
    pub(crate) fn write_off(&self, moves: u64) {
        let Some(semaphore) = &self.semaphore else {
            return;
        };
        let order = Ordering::SeqCst;
        let first = (self.moves).compare_exchange(moves, moves + 1, order, order);
        if first.is_ok() && !semaphore.is_closed() {
            let width = self.window().limit();
            self.written_off.fetch_add(width as u64, Ordering::SeqCst);
            guarded(|| semaphore.add_permits(width));
        }
    }

    /// Whether all passes are in use. Then the gate learns from the answers how many there should
    /// be.
    pub(crate) fn is_full(&self) -> bool {
        let semaphore = self.semaphore.as_ref();
        semaphore.is_some_and(|semaphore| semaphore.available_permits() == 0)
    }

    /// A request that has passed was answered after this time, or was not answered in time. Its
    /// caller would have waited for `patience`.
    pub(crate) fn learn(&self, answered_after: Option<Duration>, patience: Duration) {
        let Some(semaphore) = &self.semaphore else {
            return;
        };
        let mut window = self.window();
        let before = window.limit();
        match answered_after {
            Some(after) => window.answered(after, patience),
            None => window.missed(),
        }
        let after = window.limit();
        let order = Ordering::SeqCst;
        if after < before {
            let fewer = (before - after) as u64;
            self.written_off.fetch_add(fewer, order);
        }
        drop(window);
        for _ in before..after {
            let less = |off: u64| off.checked_sub(1);
            if self.written_off.fetch_update(order, order, less).is_err() {
                // This lets the next request pass, as above.
                guarded(|| semaphore.add_permits(1));
            }
        }
    }

    fn window(&self) -> MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request with more tickets than the gate has permits at least takes all of these.
    fn permits(&self, tickets: usize) -> u32 {
        let tickets = u32::try_from(tickets).unwrap_or(u32::MAX);
        tickets.clamp(1, self.least)
    }

    fn pass(&self, permit: OwnedSemaphorePermit, has_waited: bool) -> Pass {
        self.moves.fetch_add(1, Ordering::Relaxed);
        Pass {
            has_waited,
            permit: Some((
                permit,
                Arc::clone(&self.moves),
                Arc::clone(&self.written_off),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_gate_lets_requests_through_that_fit_and_the_others_in_order() {
        let gate = Gate::between(10, 10, false);
        let mut first = pin!(gate.wait_for_pass(8));
        let mut large = pin!(gate.wait_for_pass(100));
        let mut small = pin!(gate.wait_for_pass(1));
        let Poll::Ready(Ok(pass)) = poll(first.as_mut()) else {
            panic!("the gate was free");
        };
        assert!(poll(large.as_mut()).is_pending());
        assert!(poll(small.as_mut()).is_pending(), "it came later");

        drop(pass);

        let Poll::Ready(Ok(pass)) = poll(large.as_mut()) else {
            panic!("nobody is in front");
        };
        assert!(poll(small.as_mut()).is_pending());
        drop(pass);
        assert!(matches!(poll(small.as_mut()), Poll::Ready(Ok(_))));
    }

    fn millis(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    const PAUSE: Duration = Duration::from_secs(1);

    #[test]
    fn short_waits_count_together_until_an_answer_comes() {
        let answers = Answers::default();
        let waits = |from: u64, until: u64| {
            let request = answers.asked(millis(from));
            answers.missed(request, millis(until), PAUSE).as_millis()
        };
        assert_eq!(waits(100, 150), 50);
        assert_eq!(waits(600, 700), 600);
        assert_eq!(waits(1_700, 1_800), 1_700);

        // The request was sent in the silence, and another one is answered while it waits.
        let late = answers.asked(millis(1_900));
        answers.answered();
        assert_eq!(answers.missed(late, millis(2_900), PAUSE), Duration::ZERO);
        assert_eq!(waits(2_900, 3_000), 100);
    }

    #[test]
    fn a_wait_of_long_ago_and_a_request_without_a_wait_do_not_count() {
        let answers = Answers::default();
        let long_ago = answers.asked(millis(100));
        answers.missed(long_ago, millis(900), PAUSE);
        answers.asked(millis(60_000)); // its caller was dropped

        let late = answers.asked(millis(60_100));
        let silence = answers.missed(late, millis(60_200), PAUSE);

        assert_eq!(silence, Duration::from_millis(100));
    }

    #[test]
    fn a_closed_gate_sends_waiters_away() {
        let gate = Gate::between(1, 1, false);
        let mut first = pin!(gate.wait_for_pass(1));
        let mut second = pin!(gate.wait_for_pass(1));
        let Poll::Ready(Ok(_in_flight)) = poll(first.as_mut()) else {
            panic!("the gate was free");
        };
        assert!(poll(second.as_mut()).is_pending());

        if let Some(semaphore) = &gate.semaphore {
            semaphore.close();
        }

        assert!(matches!(poll(second.as_mut()), Poll::Ready(Err(Replaced))));
    }

    #[test]
    fn passes_that_do_not_come_back_are_replaced_once() {
        let gate = Gate::between(2, 2, false);
        let starved = [gate.try_pass(1), gate.try_pass(1)];
        assert!(starved.iter().all(Option::is_some));
        let mut waits = pin!(gate.wait_for_pass(2));
        assert!(poll(waits.as_mut()).is_pending());
        let moves = gate.moves();

        gate.write_off(moves);
        gate.write_off(moves);

        let Poll::Ready(Ok(pass)) = poll(waits.as_mut()) else {
            panic!("its turn has not come");
        };
        assert!(gate.try_pass(1).is_none(), "made anew twice");
        // Passes that come back late are not added to those that replaced them.
        drop(starved);
        assert!(gate.try_pass(1).is_none());
        drop(pass);
        let both = [gate.try_pass(1), gate.try_pass(1)];
        assert!(both.iter().all(Option::is_some) && gate.try_pass(1).is_none());
    }

    #[test]
    fn a_gate_becomes_wider_while_answers_come_soon_and_narrower_when_they_do_not_come() {
        let gate = Gate::between(2, 6, false);
        let passes = |gate: &Gate| std::iter::from_fn(|| gate.try_pass(1)).collect::<Vec<_>>();
        assert_eq!(passes(&gate).len(), 2);
        for _ in 0..10 {
            gate.learn(Some(Duration::from_millis(1)), PAUSE);
        }
        let in_flight = passes(&gate);
        assert_eq!(in_flight.len(), 6);

        gate.learn(None, PAUSE);
        assert!(gate.is_full());
        drop(in_flight);

        assert_eq!(passes(&gate).len(), 3);
        // A request with many tickets passes however narrow the gate is.
        for _ in 0..10 {
            gate.learn(None, PAUSE);
        }
        drop(passes(&gate));
        assert!(gate.try_pass(100).is_some());
        assert_eq!(passes(&gate).len(), 2);

        assert_eq!(passes(&Gate::between(2, 6, true)).len(), 6);
    }
}
