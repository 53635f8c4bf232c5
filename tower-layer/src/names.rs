//! Counts the different names that a layer locks in a period. With a limit, clients that choose the
//! names cannot fill the store.
//!
//! The names are in a Bloom filter. Unlike a set, the filter needs only 4 bytes for a name of any
//! length, and no mutex. If the name of a request is known, the request only reads the filter. One
//! new name in a million is mistaken for a known name, and is not counted.

use std::fmt;
use std::hash::RandomState;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use fastbloom::AtomicBloomFilter;

/// The probability that a new name is mistaken for a known name. With the usual one percent, one
/// percent of the new names would pass in spite of the limit.
const TAKEN_FOR_KNOWN: f64 = 1e-6;

/// The largest limit. With this number of names the filter takes 400 MB.
const MOST: usize = 100_000_000;

/// The names that a layer and its clones have seen in the current period, which is called the
/// window.
pub(crate) struct Names {
    most: usize,
    per: Duration,
    began: Instant,
    /// The number of the window that the following fields belong to, or [`CHANGING`].
    window: AtomicU64,
    count: AtomicUsize,
    /// The hasher has a random key, so nobody can choose names that collide.
    seen: AtomicBloomFilter<RandomState>,
    /// Whether a warning has been logged that this window is full.
    told: AtomicBool,
}

/// The value of `window` while a thread empties the filter for the next window.
const CHANGING: u64 = u64::MAX;

impl Names {
    /// # Panics
    ///
    /// Unless both are more than zero, and `most` is not more than [`MOST`].
    #[track_caller]
    pub(crate) fn at_most(most: usize, per: Duration) -> Self {
        assert!(
            (1..=MOST).contains(&most) && !per.is_zero(),
            "{most} names in {per:?}: both are more than zero, and the names at most {MOST}"
        );
        let filter = AtomicBloomFilter::with_false_pos(TAKEN_FOR_KNOWN);
        Self {
            most,
            per,
            began: Instant::now(),
            window: AtomicU64::new(0),
            count: AtomicUsize::new(0),
            seen: filter.hasher(RandomState::new()).expected_items(most),
            told: AtomicBool::new(false),
        }
    }

    /// Lets a name pass if it is known in this window, or counts it as a new name.
    ///
    /// # Errors
    ///
    /// The time until the next window begins, if there is no room for another name in this window.
    pub(crate) fn admit(&self, name: &str) -> Result<(), Duration> {
        self.admit_at(name, self.began.elapsed())
    }

    /// Checks whether the names of one request would pass, without counting them.
    pub(crate) fn look(&self, names: &[String]) -> Result<(), Duration> {
        self.look_at(names, self.began.elapsed())
    }

    fn look_at(&self, names: &[String], now: Duration) -> Result<(), Duration> {
        if !self.is_current(now) {
            return Ok(());
        }
        let new = names
            .iter()
            .filter(|name| !self.seen.contains(*name))
            .count();
        let room = self.most.saturating_sub(self.count.load(Ordering::Relaxed));
        if new <= room {
            return Ok(());
        }
        self.tell();
        Err(self.per - in_window(now, self.per))
    }

    fn admit_at(&self, name: &str, now: Duration) -> Result<(), Duration> {
        if !self.is_current(now) {
            return Ok(());
        }
        let hash = self.seen.source_hash(name);
        if self.seen.contains_hash(hash) {
            return Ok(());
        }
        let one_more = |count| (count < self.most).then(|| count + 1);
        let counted = self
            .count
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more);
        if counted.is_err() {
            self.tell();
            return Err(self.per - in_window(now, self.per));
        }
        // `insert_hash` is true if another request has inserted and counted this name in the
        // meantime. If two requests insert the name at the same moment, both may count it.
        if self.seen.insert_hash(hash) {
            self.uncount();
        }
        Ok(())
    }

    /// Takes one name back from the count. The count does not go below zero, because a new window
    /// may have begun since the name was counted.
    fn uncount(&self) {
        let one_less = |count: usize| count.checked_sub(1);
        let _ = self
            .count
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
    }

    /// Begins the window of `now`, if it is a new window. Returns false while another thread begins
    /// it, which takes less than a millisecond for a million names. Requests in this time pass
    /// without being counted.
    fn is_current(&self, now: Duration) -> bool {
        let current = number(now, self.per);
        let window = self.window.load(Ordering::Acquire);
        // If a request has read the clock before another thread began a new window, it counts in
        // the new window.
        if window == CHANGING || window >= current {
            return window != CHANGING;
        }
        let begins =
            self.window
                .compare_exchange(window, CHANGING, Ordering::Acquire, Ordering::Relaxed);
        if begins.is_err() {
            return false;
        }
        self.seen.clear();
        self.count.store(0, Ordering::Relaxed);
        self.told.store(false, Ordering::Relaxed);
        self.window.store(current, Ordering::Release);
        true
    }

    /// Logs the first refusal of a window, not every one.
    fn tell(&self) {
        if !self.told.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                most = self.most,
                per = ?self.per,
                "a lock layer has met as many different names as it may, and refuses requests with others; see \
                 LockLayer::max_names"
            );
        }
    }
}

/// How many windows of `per` have ended.
fn number(now: Duration, per: Duration) -> u64 {
    let number = now.as_nanos() / per.as_nanos();
    u64::try_from(number).map_or(CHANGING - 1, |number| number.min(CHANGING - 1))
}

/// How much of the current window has passed: less than `per`.
fn in_window(now: Duration, per: Duration) -> Duration {
    let nanos = now.as_nanos() % per.as_nanos();
    let [seconds, nanos] = [nanos / 1_000_000_000, nanos % 1_000_000_000];
    Duration::new(
        u64::try_from(seconds).unwrap_or(u64::MAX),
        u32::try_from(nanos).unwrap_or(0),
    )
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Names")
            .field("most", &self.most)
            .field("per", &self.per)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn known_names_pass_and_new_ones_are_refused_when_the_window_is_full() {
        let names = Names::at_most(3, HOUR);
        let at = |seconds| Duration::from_secs(seconds);
        for _ in 0..2 {
            for name in ["a", "b", "c"] {
                assert_eq!(names.admit_at(name, at(1)), Ok(()), "{name}");
            }
        }

        assert_eq!(names.admit_at("d", at(600)), Err(at(3_000)));
        assert_eq!(names.admit_at("a", at(600)), Ok(()));
        assert_eq!(names.admit_at("e", at(3_599)), Err(at(1)));
    }

    #[test]
    fn each_window_begins_with_no_name() {
        let names = Names::at_most(1, HOUR);
        assert_eq!(names.admit_at("a", HOUR / 2), Ok(()));
        assert_eq!(names.admit_at("b", HOUR / 2), Err(HOUR / 2));

        // Several windows later, with no request in between.
        assert_eq!(names.admit_at("b", HOUR * 9), Ok(()));
        assert_eq!(names.admit_at("a", HOUR * 9), Err(HOUR));
        // This request has read the clock before the request that began the window.
        assert_eq!(names.admit_at("b", HOUR * 8), Ok(()));
    }

    /// The layer looks before it reads the body of a request, so a look may be the first call in a
    /// window.
    #[test]
    fn a_look_at_the_beginning_of_a_window_finds_it_empty() {
        let names = Names::at_most(1, HOUR);
        let new = ["b".to_owned()];
        assert_eq!(names.admit_at("a", HOUR / 2), Ok(()));
        assert_eq!(names.look_at(&new, HOUR / 2), Err(HOUR / 2));

        assert_eq!(names.look_at(&new, HOUR), Ok(()));

        assert!(!names.told.load(Ordering::Relaxed));
        assert_eq!(names.admit_at("b", HOUR), Ok(()));
        assert_eq!(names.look_at(&new, HOUR), Ok(()), "it is known");
        let two = ["b".to_owned(), "c".to_owned()];
        assert_eq!(names.look_at(&two, HOUR), Err(HOUR));
    }

    /// Many threads in several windows: no more names pass than the bound allows, and no name is
    /// counted twice.
    #[test]
    fn from_many_threads_as_many_names_pass_as_the_bound_allows() {
        const MOST: usize = 1_000;
        const THREADS: usize = 4;
        let names = Names::at_most(MOST, HOUR);
        for window in 0..20 {
            let now = HOUR * window;
            // One thread begins the window. Names that arrive in the meantime would not be counted.
            assert_eq!(names.admit_at("first", now), Ok(()));
            let admitted: usize = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..THREADS)
                    .map(|thread| {
                        let names = &names;
                        scope.spawn(move || {
                            let mine = (0..MOST).map(|number| format!("{thread}:{number}"));
                            mine.filter(|name| names.admit_at(name, now).is_ok())
                                .count()
                        })
                    })
                    .collect();
                threads.into_iter().map(|it| it.join().unwrap()).sum()
            });

            assert!(admitted + 1 >= MOST, "{admitted}");
            // One in a million refused names is not counted.
            assert!(admitted < MOST + 10, "{admitted}");
        }
    }

    /// Two requests have the same new name. The slower one takes its count back, but a third
    /// request has begun the next window in the meantime.
    #[test]
    fn a_count_that_is_taken_back_after_its_window_does_not_fill_the_next() {
        let names = Names::at_most(2, HOUR);
        assert_eq!(names.admit_at("a", HOUR / 2), Ok(()));
        assert_eq!(names.count.fetch_add(1, Ordering::Relaxed), 1);
        assert!(names.is_current(HOUR));

        names.uncount();

        assert_eq!(names.admit_at("b", HOUR), Ok(()));
        assert_eq!(names.admit_at("c", HOUR), Ok(()));
        assert_eq!(names.admit_at("d", HOUR), Err(HOUR));
    }

    /// Clients cannot get past the bound by trying many names.
    #[test]
    fn at_most_a_few_names_beyond_the_bound_pass() {
        let names = Names::at_most(1_000, HOUR);
        let admitted = (0..100_000).filter(|it| names.admit_at(&format!("{it}"), HOUR / 2).is_ok());

        let admitted = admitted.count();

        assert!((1_000..=1_010).contains(&admitted), "{admitted}");
    }

    #[test]
    fn a_name_takes_four_bytes() {
        let names = Names::at_most(1_000_000, HOUR);

        assert!(names.seen.num_bits() <= 4 * 8 * 1_000_000);
    }
}
