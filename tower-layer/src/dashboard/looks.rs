//! How the streams share their looks at the store: one look serves all streams that want the same.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex as Turn;
use tokio::time::Instant;

use super::look::{Look, Wanted};

/// A stream of changes ends after this time, and the browser opens another one. So a server that
/// waits for the end of its requests before it stops does not wait for longer.
pub(super) const LONGEST_STREAM: Duration = Duration::from_secs(4);

/// A look of a stream is followed by a pause of this many times as long, for all streams.
const PAUSES: u32 = 4;

/// A look, and when it ended.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) look: Arc<Look>,
    pub(super) at: Instant,
}

#[derive(Clone, Debug)]
pub(super) struct Looks {
    every: Duration,
    /// The latest look for each page. Old ones are removed.
    latest: Arc<Mutex<HashMap<Wanted, Seen>>>,
    /// The streams look one after the other, and not before this time.
    not_before: Arc<Turn<Instant>>,
}

impl Looks {
    pub(super) fn new(every: Duration) -> Self {
        Self {
            every,
            latest: Arc::default(),
            not_before: Arc::new(Turn::new(Instant::now())),
        }
    }

    /// The latest look, if another stream has made it less than `every` before this call or later.
    /// Otherwise this stream makes one when its turn comes. `None` if the stream ends before.
    ///
    /// If the future is dropped while the look is made, the look is completed for other streams.
    pub(super) async fn next(
        &self,
        wanted: &Wanted,
        ends: Instant,
        look: impl Future<Output = Look> + Send + 'static,
    ) -> Option<Seen> {
        let asked = Instant::now();
        let turn = async {
            let not_before = Arc::clone(&self.not_before).lock_owned().await;
            if let Some(seen) = self.fresh(wanted, asked) {
                return Err(seen);
            }
            tokio::time::sleep_until(*not_before).await;
            Ok(not_before)
        };
        let mut not_before = match tokio::time::timeout_at(ends, turn).await.ok()? {
            Ok(turn) => turn,
            Err(seen) => return Some(seen),
        };
        let (looks, wanted) = (self.clone(), wanted.clone());
        // A task, because the look may take longer than this stream.
        let look = tokio::spawn(async move {
            let began = Instant::now();
            let look = look.await;
            // A store that does not answer needs no rest, and all pages are to learn of it soon.
            if !matches!(look, Look::Failed(_)) {
                *not_before = Instant::now() + began.elapsed() * PAUSES;
            }
            looks.note(wanted, Arc::new(look))
        });
        tokio::time::timeout_at(ends, look).await.ok()?.ok()
    }

    /// Keeps a look for the streams that want the same.
    pub(super) fn note(&self, wanted: Wanted, look: Arc<Look>) -> Seen {
        let at = Instant::now();
        let seen = Seen { look, at };
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        // No stream has asked earlier than this.
        let longest = self.every.saturating_add(LONGEST_STREAM);
        latest.retain(|_, seen| seen.at.elapsed() < longest);
        latest.insert(wanted, seen.clone());
        seen
    }

    fn fresh(&self, wanted: &Wanted, asked: Instant) -> Option<Seen> {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = latest.get(wanted)?;
        let age = asked.saturating_duration_since(seen.at);
        (age < self.every).then(|| seen.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use lockcore::Error;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A store whose looks take this long.
    struct Store {
        takes: Duration,
        is_down: bool,
        looks: Arc<AtomicU32>,
    }

    impl Store {
        fn new(takes: Duration, is_down: bool) -> Self {
            Self {
                takes,
                is_down,
                looks: Arc::default(),
            }
        }

        fn look(&self) -> impl Future<Output = Look> + use<> {
            let (takes, is_down, looks) = (self.takes, self.is_down, Arc::clone(&self.looks));
            async move {
                looks.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(takes).await;
                match is_down {
                    true => Look::Failed(Error::unavailable("down")),
                    false => Look::Line(Vec::new()),
                }
            }
        }

        /// Streams for these names, all at once: when each has its look.
        async fn shown<const N: usize>(&self, names: [&str; N]) -> Vec<Option<Duration>> {
            let (looks, began) = (Looks::new(SECOND), Instant::now());
            let streams = names.map(async |name| {
                let name = Some(name.to_owned());
                let wanted = Wanted {
                    name,
                    ..Wanted::default()
                };
                let seen = looks
                    .next(&wanted, began + LONGEST_STREAM, self.look())
                    .await;
                seen.map(|_| began.elapsed())
            });
            futures_util::future::join_all(streams).await
        }

        fn looks(&self) -> u32 {
            self.looks.load(Ordering::Relaxed)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn all_pages_that_want_the_same_learn_of_an_outage_from_one_look() {
        let store = Store::new(SECOND, true);

        let shown = store.shown(["a"; 6]).await;

        assert_eq!(shown, [Some(SECOND); 6]);
        assert_eq!(store.looks(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_is_down_is_looked_at_for_the_next_page_without_a_rest() {
        let store = Store::new(SECOND, true);

        let shown = store.shown(["a", "b", "c"]).await;

        assert_eq!(shown, [1, 2, 3].map(|turn| Some(SECOND * turn)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_answers_has_a_rest_before_the_look_for_another_page() {
        let store = Store::new(SECOND / 2, false);

        let shown = store.shown(["a", "b", "a", "c"]).await;

        // The third stream has the look of the first one when its turn comes.
        let times = [SECOND / 2, 3 * SECOND, 3 * SECOND].map(Some);
        assert_eq!(shown[..3], times);
        assert_eq!(shown[3], None, "its turn comes after the end of the stream");
        assert_eq!(store.looks(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_takes_longer_than_a_stream_is_for_the_next_one() {
        let store = Store::new(LONGEST_STREAM + SECOND, false);
        let (looks, wanted) = (Looks::new(SECOND), Wanted::default());
        let stream = async || {
            let ends = Instant::now() + LONGEST_STREAM;
            looks.next(&wanted, ends, store.look()).await
        };

        assert!(stream().await.is_none());
        assert!(stream().await.is_some());

        assert_eq!(store.looks(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_does_not_get_the_same_look_twice() {
        let store = Store::new(SECOND / 10, false);
        let (looks, wanted) = (Looks::new(SECOND), Wanted::default());
        let far = Instant::now() + 60 * SECOND;

        let first = looks.next(&wanted, far, store.look()).await.unwrap();
        let other = looks.next(&wanted, far, store.look()).await.unwrap();
        assert_eq!(other.at, first.at, "another stream that begins now");
        tokio::time::sleep_until(first.at + SECOND).await;
        let second = looks.next(&wanted, far, store.look()).await.unwrap();

        assert!(second.at > first.at);
        assert_eq!(store.looks(), 2);
    }
}
