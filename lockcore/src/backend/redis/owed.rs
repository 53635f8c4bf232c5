//! The releases that must still get to a server, although their callers have their answers. There are
//! two kinds:
//!
//! - A master has acknowledged a release shortly before another server has replaced it. The new master
//!   may not have received the release, and would keep the name taken until the lease ends. So the
//!   client repeats the release there.
//! - A node of a quorum has not acknowledged a release, for example because it cannot be reached.
//!
//! All connections of a client share these lists. A connection takes releases out, and sends them. It
//! is harmless to repeat a release that has already arrived, because no id is used again.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::backend::events::Timer;
use crate::backend::{Departure, Released};
use crate::clock::{Clock, Instant};
use crate::name::Name;
use crate::pauses::Pauses;

/// The most releases in one request that a store sends by itself. The core has the same limit for
/// its batches.
pub(super) const BATCH: usize = 100;

/// How long a release that was acknowledged is remembered. It is forgotten when the same master
/// acknowledges a later one after this time. From the promotion of a replica until clients leave the
/// old master it takes a second or two.
const RECENT: Duration = Duration::from_secs(3);

/// The most releases that a list has. If there are more, the oldest stay, and the tickets of the
/// others end with their ttl. For a master that was replaced, the oldest are the ones that matter: the
/// new master has the holders of the moment of its promotion, and the first releases after that
/// moment are theirs.
const MOST: usize = 10_000;

/// The lists of a client: one for each master, by its address, or one for a node of a quorum.
#[derive(Default)]
pub(super) struct Owed {
    lists: Mutex<Lists>,
    more: Notify,
}

/// The oldest releases come first.
type Lists = BTreeMap<Arc<str>, VecDeque<Release>>;

struct Release {
    at: Instant,
    /// When the ticket has expired at every server. Nobody has renewed it since `at`.
    until: Instant,
    /// The name of its list.
    list: Arc<str>,
    departure: Departure,
    /// This is dropped when the release is done with.
    _until_done: Option<UntilDone>,
}

pub(super) type UntilDone = Arc<dyn Any + Send + Sync>;

impl Owed {
    /// Remembers the releases that this master has acknowledged by these answers.
    pub(super) fn acknowledged(
        &self,
        master: &Arc<str>,
        departures: Vec<Departure>,
        answers: &[Released],
    ) {
        let at = Clock::BOOT.now();
        let mut lists = self.lists();
        let list = lists.entry(Arc::clone(master)).or_default();
        while list
            .front()
            .is_some_and(|oldest| oldest.at.until(at) > RECENT)
        {
            list.pop_front();
        }
        let acknowledged = departures.into_iter().zip(answers);
        let acknowledged = acknowledged.filter(|(_, answer)| **answer != Released::Failed);
        let room = MOST.saturating_sub(list.len());
        list.extend(acknowledged.take(room).map(|(departure, _)| Release {
            at,
            until: at.after(departure.request.ttl),
            list: Arc::clone(master),
            departure,
            _until_done: None,
        }));
    }

    /// Keeps releases that the node of this list has not acknowledged, until its tickets have expired
    /// there. `lives` is how long each of them may live there.
    pub(super) fn put(
        &self,
        departures: &[Departure],
        lives: impl Fn(&Departure) -> Duration,
        until_done: Option<&UntilDone>,
    ) {
        let (at, of_node) = (Clock::BOOT.now(), Arc::<str>::default());
        let mut lists = self.lists();
        let list = lists.entry(Arc::clone(&of_node)).or_default();
        let room = MOST.saturating_sub(list.len());
        list.extend(departures.iter().take(room).map(|departure| Release {
            at,
            until: at.after(lives(departure)),
            list: Arc::clone(&of_node),
            departure: departure.clone(),
            _until_done: until_done.cloned(),
        }));
        drop(lists);
        self.more.notify_waiters();
    }

    /// Takes out at most [`BATCH`] releases. `stays` says of a release in the list of a master whether
    /// it is not taken. How long ago a release was does not count, unless its ticket has expired:
    /// after a master has died, it takes as long as the operators have configured until another server
    /// replaces it.
    pub(super) fn take(&self, mut stays: impl FnMut(&str, &Departure) -> bool) -> Taken<'_> {
        let now = Clock::BOOT.now();
        let mut left = VecDeque::new();
        self.lists().retain(|master, list| {
            for _ in 0..list.len() {
                let Some(next) = list.pop_front().filter(|next| now < next.until) else {
                    continue;
                };
                match left.len() < BATCH && !stays(master, &next.departure) {
                    true => left.push_back(next),
                    false => list.push_back(next),
                }
            }
            !list.is_empty()
        });
        Taken { owed: self, left }
    }

    /// Takes out the next releases, whichever they are. Waits until there are some.
    ///
    /// Several connections of a client may wait here, each in a runtime of its own. A runtime may
    /// be blocked, so all of them are woken, and the first one takes the releases. If that runtime
    /// is blocked before it has sent them, they stay with it until it continues or ends.
    ///
    /// If the future is dropped, no release is lost.
    pub(super) async fn next(&self) -> Taken<'_> {
        loop {
            // This future is enabled before the look at the list. So releases that are put before
            // the look are found there, and releases that are put after it wake this task.
            let mut more = pin!(self.more.notified());
            more.as_mut().enable();
            let taken = self.take(|_, _| false);
            if !taken.left.is_empty() {
                return taken;
            }
            more.await;
        }
    }

    /// Repeats the releases of earlier masters at the present ones, until all are carried out or the
    /// tickets have expired. A new master may refuse them for some time: if it has the setting
    /// `min-replicas-to-write`, it refuses them until it has a replica.
    ///
    /// `masters` says of a name which master has it, if one has, as long as the connection exists.
    /// `send` sends releases to a master, and returns its answers. Each release is with one connection
    /// at a time.
    ///
    /// One batch is sent to one master after the other, so that renewals do not wait behind all of
    /// them. If a master answers none of a batch, the others get theirs first. After a pause it is
    /// tried again what has failed.
    ///
    /// No caller waits for this. If the future is dropped because the connection ends, the releases
    /// that are left are remembered, for the next connection.
    pub(super) async fn repeat<M, F>(
        &self,
        masters: impl Fn() -> Option<M>,
        send: impl Fn(Vec<Departure>) -> F,
        timer: &Timer,
    ) where
        M: Fn(&Name) -> Option<Arc<str>>,
        F: Future<Output = Vec<Option<Released>>>,
    {
        let (mut failing, mut pauses) = (BTreeSet::new(), Pauses::default());
        // The releases that have failed since the last pause. When they are dropped, they are
        // remembered again. The latest are dropped first, so the oldest are in front again.
        let mut failed = VecDeque::new();
        while let Some(master_of) = masters() {
            let mut master = None;
            let mut batch = self.take(|old, departure| {
                let new = master_of(&departure.request.name);
                match new.filter(|new| !failing.contains(new) && **new != *old) {
                    None => true,
                    Some(new) => new != *master.get_or_insert_with(|| Arc::clone(&new)),
                }
            });
            let Some(master) = master else {
                if failed.is_empty() {
                    return;
                }
                failed.clear();
                failing.clear();
                timer(pauses.draw()).await;
                continue;
            };
            let answers = send(batch.departures()).await;
            if answers.iter().all(Option::is_none) {
                failing.insert(master);
            }
            if !batch.answered(answers) {
                failed.push_front(batch);
            }
        }
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Owed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owed").finish_non_exhaustive()
    }
}

/// Releases that are being sent. When this value is dropped, the releases that were not carried out are
/// remembered again. So none is lost if the task that sends them ends.
pub(super) struct Taken<'a> {
    owed: &'a Owed,
    left: VecDeque<Release>,
}

impl Taken<'_> {
    pub(super) fn departures(&self) -> Vec<Departure> {
        let left = self.left.iter();
        left.map(|release| release.departure.clone()).collect()
    }

    /// Takes the answers to these releases, as far as there are any. Returns whether all of them were
    /// carried out.
    pub(super) fn answered(&mut self, answers: impl IntoIterator<Item = Option<Released>>) -> bool {
        let mut answers = answers.into_iter();
        (self.left).retain(|_| {
            let answer = answers.next().flatten();
            matches!(answer, None | Some(Released::Failed))
        });
        self.left.is_empty()
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if self.left.is_empty() {
            return;
        }
        let now = Clock::BOOT.now();
        let mut lists = self.owed.lists();
        for mut release in self.left.drain(..).rev() {
            release.at = now; // or a later release at the same master would forget it
            let list = lists.entry(Arc::clone(&release.list)).or_default();
            list.push_front(release);
            list.truncate(MOST);
        }
        drop(lists);
        self.owed.more.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::name::Namespace;
    use crate::request::{FULL, Id, Request};

    fn departure(name: &str) -> Departure {
        Departure {
            request: Arc::new(Request {
                name: Name::new(Namespace::new("test").unwrap(), name).unwrap(),
                id: Id::draw().unwrap(),
                permits: FULL,
                capacity: FULL,
                ttl: Duration::from_secs(60),
                wait: false,
                name_ahead: false,
                lingers: false,
                highest_seen: 0,
                owner: "test".into(),
            }),
            enqueue_may_follow: false,
        }
    }

    /// The names of all releases that no list of this master has. They go back when this is over.
    fn elsewhere(owed: &Owed, master: &str) -> Vec<String> {
        let mut all = Vec::new();
        loop {
            let taken = owed.take(|of, _| of == master);
            if taken.left.is_empty() {
                break;
            }
            all.push(taken);
        }
        let left = all.iter().flat_map(|taken| &taken.left);
        let names = left.map(|release| release.departure.request.name.as_str().to_owned());
        let names = names.collect();
        while all.pop().is_some() {}
        names
    }

    fn acknowledged(owed: &Owed, master: &str, departures: Vec<Departure>) {
        let answers = vec![Released::Released; departures.len()];
        owed.acknowledged(&master.into(), departures, &answers);
    }

    #[test]
    fn releases_of_another_master_are_handed_out_once_and_the_rest_comes_back() {
        let owed = Owed::default();
        acknowledged(&owed, "a", ["x", "y"].map(departure).into());
        acknowledged(&owed, "b", ["z"].map(departure).into());

        let mut again = owed.take(|master, _| master == "b");
        assert_eq!(again.departures().len(), 2);
        assert!(elsewhere(&owed, "b").is_empty());
        again.answered([Some(Released::Released)]);
        drop(again);

        assert_eq!(elsewhere(&owed, "c"), ["y", "z"]);
    }

    #[test]
    fn releases_that_failed_at_the_new_master_are_repeated_at_the_next_connection() {
        use Released::{Failed, NotFound};

        let owed = Owed::default();
        let departures = ["w", "x", "y", "z"].map(departure);
        acknowledged(&owed, "a", departures.into());

        let mut again = owed.take(|master, _| master == "b");
        // The last of them has no answer.
        assert!(!again.answered([Some(Failed), Some(NotFound), None]));
        drop(again);

        assert_eq!(elsewhere(&owed, "b"), ["w", "y", "z"]);
    }

    #[test]
    fn a_release_that_the_master_could_not_carry_out_is_not_repeated_at_another() {
        let owed = Owed::default();
        let answers = [Released::Failed, Released::NotFound];
        owed.acknowledged(&"a".into(), ["x", "y"].map(departure).into(), &answers);

        assert_eq!(elsewhere(&owed, "b"), ["y"]);
    }

    #[test]
    fn releases_that_are_put_back_stay_and_the_latest_make_room() {
        let owed = Owed::default();
        acknowledged(&owed, "a", vec![departure("oldest")]);
        let again = owed.take(|master, _| master == "b");
        acknowledged(&owed, "a", vec![departure("x"); MOST]);

        drop(again);

        let names = elsewhere(&owed, "c");
        assert_eq!((names.len(), names[0].as_str()), (MOST, "oldest"));
    }

    #[test]
    fn a_batch_is_handed_out_and_what_has_expired_is_forgotten() {
        let owed = Owed::default();
        let expired = departure("expired");
        let short = Arc::new(Request {
            ttl: Duration::ZERO,
            ..Request::clone(&expired.request)
        });
        let batch = vec![departure("x"); BATCH];
        let rest = [
            vec![Departure::new(short, false)],
            batch,
            vec![departure("z")],
        ];
        acknowledged(&owed, "a", rest.concat());

        let part = owed.take(|_, _| false);
        assert_eq!(part.departures().len(), BATCH);
        assert_eq!(elsewhere(&owed, "b"), ["z"]);
        drop(part);

        let names = elsewhere(&owed, "b");
        assert_eq!((names.len(), names[0].as_str()), (BATCH + 1, "x"));
    }

    #[test]
    fn the_oldest_releases_are_remembered_if_there_are_too_many() {
        let owed = Owed::default();
        acknowledged(&owed, "a", vec![departure("oldest")]);
        acknowledged(&owed, "a", vec![departure("x"); MOST]);

        let names = elsewhere(&owed, "b");

        assert_eq!((names.len(), names[0].as_str()), (MOST, "oldest"));
    }

    fn put_one(owed: &Owed) {
        owed.put(&[departure("x")], |departure| departure.request.ttl, None);
    }

    /// Two connections wait. The runtime of the first one is blocked, so its task is never polled
    /// again.
    #[test]
    fn a_connection_in_a_blocked_runtime_keeps_no_release_from_the_others() {
        let owed = Owed::default();
        let (mut blocked, mut waits) = (pin!(owed.next()), pin!(owed.next()));
        assert!(blocked.as_mut().now_or_never().is_none());
        assert!(waits.as_mut().now_or_never().is_none());

        put_one(&owed);

        let taken = waits.now_or_never().expect("is not woken");
        assert_eq!(taken.departures().len(), 1);
    }

    #[test]
    fn releases_that_were_not_sent_wake_the_connections_that_wait() {
        let owed = Owed::default();
        put_one(&owed);
        let taken = owed.next().now_or_never().unwrap();
        let (mut blocked, mut waits) = (pin!(owed.next()), pin!(owed.next()));
        assert!(blocked.as_mut().now_or_never().is_none());
        assert!(waits.as_mut().now_or_never().is_none());

        drop(taken);

        let taken = waits.now_or_never().expect("is not woken");
        assert_eq!(taken.departures().len(), 1);
    }
}
