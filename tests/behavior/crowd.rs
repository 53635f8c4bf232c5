//! Tasks that use a lock while their server crashes, for the facts about stores that a crash may put
//! back to an earlier time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tests::eventually::eventually;
use tests::witness::Witness;

use crate::faults::{is_renewed, patient};
use crate::store::{LEASE, SOON};

/// The ttl where a crash undoes releases. Each ticket that is back after the crash keeps its name
/// taken for this long. A visitor leaves when a third of it is left, and the machine may stand still
/// at this moment.
pub(crate) const SHORT: Duration = Duration::from_secs(6);

/// Tasks of two clients that take a lock again and again, and visit a resource. Errors do not end
/// them.
///
/// Whoever visits while the server crashes stays until the server has renewed the lease, or until
/// the lease is in danger. So a client that gets in after the crash meets this visitor.
pub(crate) struct Crowd {
    resource: Arc<Witness>,
    visits: Arc<AtomicUsize>,
    crashes: Arc<AtomicBool>,
    staying: Arc<AtomicUsize>,
    stops: Arc<AtomicBool>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Crowd {
    pub(crate) fn begin(url: &str, ttl: Duration) -> Self {
        let mut crowd = Self {
            resource: Arc::new(Witness::exclusive()),
            visits: Arc::default(),
            crashes: Arc::default(),
            staying: Arc::default(),
            stops: Arc::default(),
            tasks: Vec::new(),
        };
        let newest = Arc::new(AtomicUsize::new(0));
        for _ in 0..2 {
            let locks = patient(url).fair(lockcore::Fair::Strict).build().unwrap();
            for _ in 0..2 {
                let lock = locks.mutex("a").ttl(ttl).wait(2 * LEASE);
                let (resource, newest) = (Arc::clone(&crowd.resource), Arc::clone(&newest));
                let (visits, stops) = (Arc::clone(&crowd.visits), Arc::clone(&crowd.stops));
                let (crashes, staying) = (Arc::clone(&crowd.crashes), Arc::clone(&crowd.staying));
                crowd.tasks.push(tokio::spawn(async move {
                    while !stops.load(Ordering::Relaxed) {
                        let Ok(guard) = lock.acquire().await else {
                            continue;
                        };
                        let token = guard.fencing_token().unwrap().as_i64() as usize;
                        let visit = resource.enter(1);
                        let before = newest.fetch_max(token, Ordering::SeqCst);
                        assert!(before < token, "{token} after {before}");
                        tokio::task::yield_now().await;
                        if crashes.load(Ordering::SeqCst) {
                            staying.fetch_add(1, Ordering::SeqCst);
                            let over = async {
                                eventually("the crash is over", LEASE, async || {
                                    !crashes.load(Ordering::SeqCst)
                                })
                                .await;
                                is_renewed(&guard, ttl).await;
                            };
                            tokio::select! {
                                () = over => {}
                                _ = guard.in_danger() => {}
                            }
                        }
                        drop(visit);
                        visits.fetch_add(1, Ordering::Relaxed);
                        // After a crash the outcome may be unknown. The keeper repeats it.
                        let _ = guard.release().await;
                        // Now and then nobody has a ticket. A crash that loses a grant then lets
                        // the next one in at once.
                        let pause = Duration::from_millis(fastrand::u64(..50));
                        tokio::time::sleep(pause).await;
                    }
                }));
            }
        }
        crowd
    }

    /// The server crashes again and again, each time at another moment.
    pub(crate) async fn survives(url: &str, crash: impl Fn()) {
        let rounds = if tests::fact::long() { 20 } else { 3 };
        let crowd = Self::begin(url, SHORT);
        for round in 0..rounds {
            crowd.visits(fastrand::usize(20..120)).await;
            crowd.crash(&crash, round % 2 == 0).await;
        }
        crowd.visits(100).await;
        crowd.end().await;
    }

    pub(crate) async fn visits(&self, more: usize) {
        let enough = self.visits.load(Ordering::Relaxed) + more;
        eventually("more visits", 4 * LEASE, async || {
            self.visits.load(Ordering::Relaxed) >= enough
        })
        .await;
    }

    /// The server crashes. With `stays`, it does so when somebody is sure to visit.
    pub(crate) async fn crash(&self, crash: impl FnOnce(), stays: bool) {
        let before = self.staying.load(Ordering::SeqCst);
        self.crashes.store(true, Ordering::SeqCst);
        if stays {
            eventually("somebody stays", SOON, async || {
                self.staying.load(Ordering::SeqCst) > before
            })
            .await;
        }
        crash();
        self.crashes.store(false, Ordering::SeqCst);
    }

    pub(crate) async fn end(self) {
        self.stops.store(true, Ordering::Relaxed);
        for task in join_all(self.tasks).await {
            task.unwrap();
        }
        self.resource.assert_no_overlap();
    }
}
