//! Provides what the facts about failing stores share, for every store: clients and helper
//! processes, checks of the store, and work that a loss must stop. The checks show that a store is
//! unavailable, or that it works again. Facts about one store are in the files with its name.

use std::future::ready;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lockcore::{Builder, Error, ErrorKind, Guard, Held, Lock, Locks, LostReason, Release};
use tests::eventually::eventually;
use tests::faketime::Clock;
use tests::process::{Holder, HolderOptions, Process};
use tests::proxy::Proxy;
use tests::stalls::awake_since;
use tests::witness::{FileWitness, Witness};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::store::{LEASE, SOON, STALL, begin, give_back, kind, soon, tickets};

/// Each fact has its own store, so one namespace is enough.
const NAMESPACE: &str = "test";

/// A client with all defaults: an operation may take a second, and a lease lasts ten.
pub(crate) fn builder(url: impl Into<String>) -> Builder {
    Locks::builder().url(url).namespace(NAMESPACE)
}

/// A client that allows more time, for operations that must succeed: a stalled machine must not
/// look like a failing store.
pub(crate) fn patient(url: impl Into<String>) -> Builder {
    builder(url).op_timeout(STALL).ttl(LEASE)
}

/// A helper process that uses a mutex.
pub(crate) fn holder(url: &str, name: &str, ttl: Duration) -> Holder {
    // One second is the default. It is not raised, because in these facts the store is what fails.
    start_holder(
        url,
        name,
        ttl,
        vec![("LOCK_OP_TIMEOUT".into(), "1s".into())],
    )
}

/// A helper process for a fact in which the store does not fail. On a busy machine an operation may
/// take longer than the default timeout.
pub(crate) fn patient_holder(url: &str, name: &str, ttl: Duration) -> Holder {
    start_holder(url, name, ttl, Vec::new())
}

fn start_holder(url: &str, name: &str, ttl: Duration, variables: Vec<(String, String)>) -> Holder {
    let options = HolderOptions {
        namespace: NAMESPACE.into(),
        ttl,
        variables,
        ..HolderOptions::mutex(url, name)
    };
    Holder::start(env!("CARGO_BIN_EXE_holder"), &options)
}

/// Checks a store that does not answer, with a client whose operations may take `SOON / 3`. A caller
/// that waits and a caller that does not wait both get an error that contains all parts of `why`.
pub(crate) async fn is_unavailable_within_one_operation(locks: &Locks, why: &[&str]) {
    for waits in [true, false] {
        let lock = locks.mutex("a").wait(3 * SOON);
        let started = Instant::now();
        let outcome = if waits {
            lock.acquire().await
        } else {
            lock.try_acquire().await
        };
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(!error.may_hold());
        let text = error.to_string();
        assert!(why.iter().all(|word| text.contains(word)), "{text}");
        assert!(awake_since(started) < 2 * SOON / 3); // two operations
    }
}

pub(crate) async fn works_again(locks: &Locks, name: &str, within: Duration) {
    eventually("works again", within, async || {
        match locks.mutex(name).acquire().await {
            Ok(guard) => guard.release().await.is_ok(),
            Err(_) => false,
        }
    })
    .await;
}

/// Resolves at the next renewal of a lease.
pub(crate) async fn is_renewed(guard: &Guard, ttl: Duration) {
    let before = Instant::now() + guard.remaining();
    eventually("renewed", 2 * ttl, async || {
        Instant::now() + guard.remaining() > before + ttl / 6
    })
    .await;
}

/// The proxies hold back everything that the client sends to its store, so the client cannot
/// connect when it is used for the first time. A shutdown does not wait for this connection.
/// Afterwards the client has no connection.
pub(crate) async fn a_shutdown_ends_the_first_use(url: &str, proxies: &[Proxy]) {
    proxies.iter().for_each(Proxy::freeze);
    // The request may take much longer than the shutdown.
    let locks = builder(url).op_timeout(6 * SOON).build().unwrap();
    let first = begin(locks.mutex("a").wait(6 * SOON));
    eventually("it connects", SOON, async || {
        proxies.iter().any(|proxy| proxy.open_connections() > 0)
    })
    .await;

    locks.shutdown(SOON).await.unwrap();

    let outcome = soon(first).await.unwrap();
    assert_eq!(kind(outcome), ErrorKind::Lost(LostReason::Shutdown));
    drop(locks);
    proxies.iter().for_each(Proxy::thaw);
    eventually("all connections are closed", SOON, async || {
        proxies.iter().all(|proxy| proxy.open_connections() == 0)
    })
    .await;
}

fn is_about_the_outage(error: &Error) {
    let kind = error.kind();
    assert!(
        matches!(kind, ErrorKind::Unavailable | ErrorKind::Unknown),
        "{error}"
    );
}

/// A store of several servers. One server breaks, and another server with the same data replaces
/// it.
pub(crate) struct Outage<'a> {
    pub(crate) url: String,
    pub(crate) ttl: Duration,
    /// Three names at the server that breaks. The first is held and waited for, the second is
    /// released during the outage, and the third is requested during the outage.
    pub(crate) names: [&'a str; 3],
}

impl Outage<'_> {
    /// One client holds a lock, two clients wait in line for it, and a fourth releases one lock and
    /// requests another during the outage. Afterwards nobody has lost anything. `breaks` returns
    /// when the server is broken, and `granted_again` when another server has granted a lock.
    pub(crate) async fn costs_nobody_a_lock_or_a_place(
        self,
        breaks: impl FnOnce(),
        granted_again: impl AsyncFnOnce(),
    ) {
        let Self { url, ttl, names } = self;
        let [held, given_back, asked] = names;
        // This client's operations time out before the outage ends.
        let others = builder(&url).ttl(ttl).build().unwrap();
        let patient = || builder(&url).ttl(ttl).op_timeout(SOON).build().unwrap();
        let [holds, waits, waits_too] = [(); 3].map(|()| patient());
        let resource = Witness::exclusive();
        let guard = holds.mutex(held).acquire().await.unwrap();
        let visit = resource.enter(1);
        let mut line = Vec::new();
        for client in [&waits, &waits_too] {
            line.push(begin(client.mutex(held).wait(2 * STALL)));
            tickets(&holds, held, line.len() + 1).await;
        }
        let released = others.mutex(given_back).acquire().await.unwrap();

        breaks();
        let began = Instant::now();
        let release = tokio::spawn(released.release());
        if let Err(error) = others.mutex(asked).try_acquire().await {
            is_about_the_outage(&error);
        }
        granted_again().await;
        println!("a lock was granted after {:?}", began.elapsed());
        // Either the release fails and the keeper repeats it, or the old or the new server
        // acknowledges it.
        match release.await.unwrap() {
            Ok(release) => assert_eq!(release, Release::Released),
            Err(error) => is_about_the_outage(&error),
        }
        is_renewed(&guard, ttl).await;
        // A request that is in flight to the old server fails, so the test repeats it.
        eventually("the line is at the new server", 2 * STALL, async || {
            let line = patient().inspect(held).await;
            line.is_ok_and(|line| line.len() == 3)
        })
        .await;
        let mut token = guard.grant_id().as_u64();
        drop(visit);
        give_back(guard).await;
        for next in line {
            let next = next.await.unwrap().unwrap();
            let visit = resource.enter(1);
            assert!(next.grant_id().as_u64() > token);
            token = next.grant_id().as_u64();
            drop(visit);
            give_back(next).await;
        }
        resource.assert_no_overlap();
        for name in names {
            tickets(&holds, name, 0).await;
        }
    }
}

/// Work that makes one step after another. Its lock has failed if it makes a step after the next
/// holder was granted.
pub(crate) struct Work {
    pub(crate) held: Held,
    next_is_in: Arc<AtomicBool>,
    task: JoinHandle<Result<(), Error>>,
}

impl Work {
    pub(crate) async fn begin(lock: Lock) -> Self {
        let (begun, has_begun) = oneshot::channel();
        let next_is_in = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&next_is_in);
        let task = tokio::spawn(async move {
            lock.run(async |held| {
                begun.send(held).unwrap();
                while !seen.load(Ordering::SeqCst) {
                    tokio::time::sleep(Duration::from_millis(1)).await; // a step
                }
                Ok::<_, Error>(())
            })
            .await
        });
        Self {
            held: has_begun.await.unwrap(),
            next_is_in,
            task,
        }
    }

    /// Checks that the work has ended with a loss. Call this when the next holder is granted.
    pub(crate) async fn assert_stopped(self) {
        self.next_is_in.store(true, Ordering::SeqCst);
        assert_eq!(
            kind(self.task.await.unwrap()),
            ErrorKind::Lost(LostReason::Expired)
        );
    }
}

/// Waits until the lease was proved again after the grant, at a store with sessions.
pub(crate) async fn is_proved_again(held: &Held) {
    let mut left = held.remaining();
    eventually("it is proved again", SOON, || {
        let before = std::mem::replace(&mut left, held.remaining());
        ready(left > before)
    })
    .await;
}

/// Sets the clock of a server back and ahead by hours. Tokens rise all the same.
pub(crate) async fn tokens_rise(locks: &Locks, set_clock: impl Fn(Clock)) {
    let hour = Duration::from_secs(3600);
    let mut before = None;
    for clock in [
        Clock::True,
        Clock::Behind(hour),
        Clock::Ahead(hour),
        Clock::Behind(2 * hour),
    ] {
        set_clock(clock);
        let guard = locks.mutex("a").acquire().await.unwrap();
        let token = Some(guard.fencing_token().unwrap());
        assert!(token > before, "{token:?} after {before:?} at {clock:?}");
        before = token;
        give_back(guard).await;
    }
}

/// Compares the steps of the work of two holders. `breaks` cuts the first one off from the servers
/// that serve the second one.
pub(crate) async fn no_second_holder(there: &Locks, elsewhere: &Locks, breaks: impl FnOnce()) {
    there.ready(SOON).await.unwrap();
    elsewhere.ready(SOON).await.unwrap();
    let work = Work::begin(there.mutex("a").through_outages(true)).await;
    let held = work.held.clone();
    is_proved_again(&held).await;
    let lock = elsewhere.mutex("a").wait(LEASE);
    let waiter = begin(lock.through_outages(true));
    tickets(elsewhere, "a", 2).await;

    breaks();
    let broken = Instant::now();
    let losing = held.clone();
    let lost = tokio::spawn(async move {
        losing.lost().await;
        Instant::now()
    });
    let next = waiter.await.unwrap().unwrap();
    let granted = Instant::now();
    let overlap = held.remaining();
    if !overlap.is_zero() {
        println!("two valid holders, for {overlap:?} at least");
    }
    work.assert_stopped().await;

    let lost = lost.await.unwrap();
    println!(
        "lost {:?} after the cut, and the next granted {:?} later",
        lost - broken,
        granted - lost
    );
    give_back(next).await;
}

/// `breaks` breaks a part of the store. For two ttls after that, all these locks are held.
pub(crate) async fn nothing_is_lost(guards: Vec<Guard>, ttl: Duration, breaks: impl FnOnce()) {
    join_all(guards.iter().map(|guard| is_proved_again(guard))).await;
    breaks();
    let broken = Instant::now();
    let mut lost = tokio::task::JoinSet::new();
    for guard in &guards {
        let held = (**guard).clone();
        lost.spawn(async move { held.lost().await });
    }

    let first = tokio::time::timeout(2 * ttl, lost.join_next()).await;

    assert!(first.is_err(), "lost after {:?}", broken.elapsed());
    let (mut failed, all) = (0, guards.len());
    for guard in guards {
        match guard.release().await {
            Ok(release) => assert_eq!(release, Release::Released),
            Err(error) => {
                is_about_the_outage(&error);
                failed += 1;
            }
        }
    }
    // A part of the store is still broken, but by now the clients have left it.
    assert!(failed <= all / 4, "{failed} of {all} releases failed");
}

/// A process whose eight tasks pass the lock `a` on in strict order. Each has it for this time, so
/// that the others are in line.
pub(crate) fn passing_on(url: &str, folder: &Path, ttl: Duration, stay: Duration) -> Process {
    Process::start(
        Command::new(env!("CARGO_BIN_EXE_crowd"))
            .args(["a", "8", "600"])
            .arg(folder)
            .args(["--stay", &format!("{}ms", stay.as_millis())])
            .env("LOCK_URL", url)
            .env("LOCK_NAMESPACE", NAMESPACE)
            .env("LOCK_FAIR", "strict")
            .env("LOCK_TTL", format!("{}s", ttl.as_secs()))
            .env("LOCK_WAIT", "60s"),
    )
}

/// Four processes, with sixteen tasks each, use one name. Twice, `breaks` breaks the store, and
/// returns how to repair it.
pub(crate) async fn a_crowd_overlaps_nowhere<R: FnOnce()>(url: &str, breaks: impl Fn() -> R) {
    let folder = tempfile::tempdir().unwrap();
    let seconds = if tests::fact::long() { 60 } else { 45 };
    let mut crowd: Vec<Process> = (0..4)
        .map(|_| {
            Process::start(
                Command::new(env!("CARGO_BIN_EXE_crowd"))
                    .args(["a", "16", &seconds.to_string()])
                    .arg(folder.path())
                    .env("LOCK_URL", url)
                    .env("LOCK_NAMESPACE", NAMESPACE)
                    .env("LOCK_TTL", "6s")
                    .env("LOCK_WAIT", "20s")
                    .env("LOCK_FAIR", "strict"),
            )
        })
        .collect();
    let witness = FileWitness::in_folder(folder.path());
    let mut visits = 0;
    for _ in 0..2 {
        eventually("the crowd moves", 2 * SOON, async || {
            witness.visits() > visits + 200
        })
        .await;
        let repairs = breaks();
        let broken = Instant::now();
        visits = witness.visits();
        eventually("the crowd moves again", 2 * SOON, async || {
            witness.visits() > visits + 200
        })
        .await;
        println!("broken, 200 visits later: {:?}", broken.elapsed());
        repairs();
        visits = witness.visits();
    }
    let (mut done, mut errors) = (0, 0);
    for process in &mut crowd {
        let told = process.expect("DONE", Duration::from_secs(seconds) + 2 * SOON);
        let (visited, failed) = told.split_once(' ').unwrap();
        done += visited.parse::<u64>().unwrap();
        errors += failed.parse::<u64>().unwrap();
    }
    let tokens = std::fs::read_to_string(folder.path().join("tokens")).unwrap();
    let tokens: Vec<u64> = tokens.lines().map(|token| token.parse().unwrap()).collect();
    let out_of_order = tokens.windows(2).filter(|pair| pair[0] >= pair[1]).count();

    println!(
        "{done} visits, {errors} errors, {} overlaps, {out_of_order} tokens out of order",
        witness.overlaps().len()
    );
    witness.assert_no_overlap();
    assert_eq!(out_of_order, 0);
}

/// Waits until the kernel probes all connections of this process to this port. So it notices that the
/// machine at the other end has gone without notice, although nothing is sent.
pub(crate) async fn is_probed(port: u16) {
    // What the kernel calls the timer of a connection that waits for nothing but the next probe.
    const PROBE: &str = "02";
    eventually("all connections are probed", SOON, async || {
        let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let timers = sockets.lines().filter_map(|socket| timer(socket, port));
        let timers: Vec<_> = timers.collect();
        !timers.is_empty() && timers.iter().all(|timer| *timer == PROBE)
    })
    .await;
}

/// The timer that runs for a connection to this port, from its line in the list of the kernel.
fn timer(socket: &str, port: u16) -> Option<&str> {
    let mut fields = socket.split_whitespace().skip(2);
    let (_, to) = fields.next()?.split_once(':')?;
    let is_open = fields.next()? == "01";
    let (timer, _) = fields.nth(1)?.split_once(':')?;
    (is_open && u16::from_str_radix(to, 16) == Ok(port)).then_some(timer)
}
