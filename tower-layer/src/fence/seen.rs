//! The highest token seen for each resource, and the requests that run or wait. Nothing here
//! depends on HTTP.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lockcore::FencingToken;
use tokio::sync::Notify;

/// The memory of a fence. Its mutex is locked for a few map operations, never across an await.
pub(crate) struct Seen {
    most: usize,
    at_least: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    fences: HashMap<Arc<str>, Fence>,
    /// The resources that no request uses. The resource that has been unused for longest comes
    /// first.
    idle: BTreeMap<u64, (Instant, Arc<str>)>,
    next: u64,
    /// Whether the last request for a new resource found no room.
    full: bool,
}

/// One resource. All requests that run have the same token, `running_under`. A request with a
/// higher token begins when they have ended. A request with a lower token is refused.
struct Fence {
    highest: FencingToken,
    running: usize,
    running_under: FencingToken,
    /// The number of requests that run or wait.
    inside: usize,
    /// The key in `idle`; `None` while a request runs or waits.
    idle_as: Option<u64>,
    /// Notifies when the last running request has ended, and when `highest` rises. The first
    /// request that waits creates it.
    changed: Option<Arc<Notify>>,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shut {
    /// A higher token has been seen.
    Late,
    /// There is no room to remember another resource before this time has passed. It takes longer
    /// if a request uses the oldest resource in this time.
    Full { room_in: Duration },
}

impl Seen {
    pub(crate) fn new(most: usize, at_least: Duration) -> Self {
        Self {
            most,
            at_least,
            state: Mutex::default(),
        }
    }

    /// Compares a token with the highest token, and makes it the highest if it is greater. This is
    /// one step. After that, no request with a lower token begins.
    pub(crate) fn enter(self: &Arc<Self>, key: &str, token: FencingToken) -> Result<Pass, Shut> {
        let mut state = self.state();
        let known = state.fences.get_key_value(key);
        let key: Arc<str> = match known.map(|(key, _)| Arc::clone(key)) {
            Some(key) => key,
            None => {
                self.make_room(&mut state)?;
                key.into()
            }
        };
        let State { fences, idle, .. } = &mut *state;
        let fence = fences.entry(Arc::clone(&key));
        let fence = fence.or_insert_with(|| Fence::new(token));
        if token < fence.highest {
            return Err(Shut::Late);
        }
        if token > fence.highest {
            fence.highest = token;
            fence.tell();
        }
        fence.inside += 1;
        if let Some(number) = fence.idle_as.take() {
            idle.remove(&number);
        }
        Ok(Pass {
            seen: Arc::clone(self),
            key,
            token,
            begun: false,
        })
    }

    /// Makes room for a new resource, if there is none. It forgets the resource that has been
    /// unused for longest, if this time is long enough.
    fn make_room(&self, state: &mut State) -> Result<(), Shut> {
        if state.fences.len() < self.most {
            return Ok(());
        }
        let oldest = state.idle.first_entry();
        let idle_for = oldest.as_ref().map(|oldest| oldest.get().0.elapsed());
        let room_in = self.at_least.saturating_sub(idle_for.unwrap_or_default());
        let (Some(oldest), true) = (oldest, room_in.is_zero()) else {
            // Log only the first refusal, not every one.
            if !std::mem::replace(&mut state.full, true) {
                let most = self.most;
                tracing::warn!(
                    most,
                    "a fence has no room to remember another resource; see FenceLayer::remember"
                );
            }
            return Err(Shut::Full { room_in });
        };
        let (_, key) = oldest.remove();
        state.fences.remove(&key);
        state.full = false;
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under the mutex. Even if that changes, the maps stay
        // consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Fence {
    fn new(token: FencingToken) -> Self {
        Self {
            highest: token,
            running: 0,
            running_under: token,
            inside: 0,
            idle_as: None,
            changed: None,
        }
    }

    /// Whether a request with this token may run now.
    fn lets_in(&self, token: FencingToken) -> bool {
        self.running == 0 || self.running_under == token
    }

    fn tell(&self) {
        if let Some(changed) = &self.changed {
            changed.notify_waiters();
        }
    }
}

/// A request that has been admitted. When this value is dropped, requests that wait for its end can
/// begin.
pub(crate) struct Pass {
    seen: Arc<Seen>,
    key: Arc<str>,
    token: FencingToken,
    begun: bool,
}

impl Pass {
    /// Waits until no request with a lower token runs. Fails with `Late` if a higher token has been
    /// seen in the meantime.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the request has not begun.
    pub(crate) async fn until_first(&mut self) -> Result<(), Shut> {
        loop {
            let changed = {
                let mut state = self.seen.state();
                let fence = self.fence(&mut state)?;
                if fence.lets_in(self.token) {
                    return Ok(());
                }
                let changed = fence.changed.get_or_insert_default();
                // Created under the mutex, so that it sees every later change, even before it is
                // polled.
                Arc::clone(changed).notified_owned()
            };
            changed.await;
        }
    }

    /// Begins if no request with a lower token runs. Returns whether it has begun. Fails with
    /// `Late` if a higher token has been seen.
    pub(crate) fn begin(&mut self) -> Result<bool, Shut> {
        let mut state = self.seen.state();
        let fence = self.fence(&mut state)?;
        let begins = fence.lets_in(self.token);
        if begins {
            fence.running += 1;
            fence.running_under = self.token;
        }
        drop(state);
        self.begun = begins;
        Ok(begins)
    }

    /// The fence of this resource. It exists as long as a request runs or waits.
    fn fence<'a>(&self, state: &'a mut State) -> Result<&'a mut Fence, Shut> {
        let fence = state.fences.get_mut(&self.key).ok_or(Shut::Late)?;
        match self.token < fence.highest {
            true => Err(Shut::Late),
            false => Ok(fence),
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut state = self.seen.state();
        let State {
            fences, idle, next, ..
        } = &mut *state;
        let Some(fence) = fences.get_mut(&self.key) else {
            return;
        };
        if self.begun {
            fence.running -= 1;
            if fence.running == 0 {
                fence.tell();
            }
        }
        fence.inside -= 1;
        if fence.inside == 0 {
            fence.changed = None;
            fence.idle_as = Some(*next);
            idle.insert(*next, (Instant::now(), Arc::clone(&self.key)));
            *next += 1;
        }
    }
}

impl fmt::Debug for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seen")
            .field("most", &self.most)
            .field("at_least", &self.at_least)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn token(number: i64) -> FencingToken {
        number.to_string().parse().unwrap()
    }

    fn seen(most: usize, at_least: Duration) -> Arc<Seen> {
        Arc::new(Seen::new(most, at_least))
    }

    #[test]
    fn a_young_resource_is_not_forgotten_for_another() {
        let seen = seen(2, HOUR);
        drop(seen.enter("a", token(5)));
        drop(seen.enter("b", token(5)));

        let full = seen.enter("c", token(5)).err();
        let Some(Shut::Full { room_in }) = full else {
            panic!("{full:?}");
        };
        assert!(room_in > HOUR * 9 / 10, "{room_in:?}");

        assert_eq!(seen.enter("a", token(4)).err(), Some(Shut::Late));
        assert!(seen.enter("b", token(5)).is_ok());
    }

    #[test]
    fn the_least_recently_used_resource_is_forgotten_first_and_one_in_use_never() {
        let seen = seen(3, Duration::ZERO);
        let _in_use = seen.enter("a", token(5));
        drop(seen.enter("b", token(5)));
        drop(seen.enter("c", token(5)));
        drop(seen.enter("b", token(5)));

        drop(seen.enter("d", token(5)));

        assert_eq!(seen.enter("a", token(4)).err(), Some(Shut::Late));
        assert_eq!(seen.enter("b", token(4)).err(), Some(Shut::Late));
        assert!(seen.enter("c", token(4)).is_ok(), "forgotten");
    }

    #[test]
    fn a_memory_full_of_resources_in_use_takes_no_more() {
        let seen = seen(1, Duration::ZERO);
        let in_use = seen.enter("a", token(5));
        let full = seen.enter("b", token(5)).err();
        assert!(matches!(full, Some(Shut::Full { .. })), "{full:?}");

        drop(in_use);

        assert!(seen.enter("b", token(5)).is_ok());
    }

    /// Checks the protected resource itself: each request writes its token to a variable, pauses,
    /// and reads the variable again.
    #[test]
    fn from_many_threads_no_two_tokens_overlap_and_none_comes_late() {
        const TOKENS: i64 = 400;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(4)
            .enable_time()
            .build()
            .unwrap();
        let seen = seen(1, HOUR);
        let (resource, refused) = (AtomicI64::new(0), AtomicUsize::new(0));
        let (resource, refused) = (Arc::new(resource), Arc::new(refused));
        let requests: Vec<_> = (0..3 * TOKENS)
            .map(|number| {
                // Each token has three requests: one in time, and two that come 7 and 14 tokens
                // later.
                let token = token((number / 3 + 1 - (number % 3) * 7).max(1));
                let (seen, resource) = (Arc::clone(&seen), Arc::clone(&resource));
                let refused = Arc::clone(&refused);
                runtime.spawn(async move {
                    let Ok(mut pass) = seen.enter("a", token) else {
                        return refused.fetch_add(1, Ordering::SeqCst);
                    };
                    if pass.until_first().await.is_err() || pass.begin() != Ok(true) {
                        return refused.fetch_add(1, Ordering::SeqCst);
                    }
                    let before = resource.swap(token.as_i64(), Ordering::SeqCst);
                    assert!(before <= token.as_i64(), "late");
                    tokio::task::yield_now().await;
                    let after = resource.load(Ordering::SeqCst);
                    assert_eq!(after, token.as_i64(), "overlapped");
                    0
                })
            })
            .collect();
        runtime.block_on(async {
            for request in requests {
                let ended = tokio::time::timeout(Duration::from_secs(10), request).await;
                ended.expect("hangs").unwrap();
            }
        });

        assert_eq!(resource.load(Ordering::SeqCst), TOKENS);
        assert!(refused.load(Ordering::SeqCst) > 0, "nothing came late");
    }
}
