//! The changes of counters whose ids the store may forget, because their answers have come. Plain
//! data.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::backend::MOST_REMEMBERED;
use crate::name::Name;
use crate::request::Id;

/// The ids of changes that were sent once and are answered. The next change of the same counter
/// tells the store to forget them.
///
/// At least the latest [`MOST_REMEMBERED`] ids of all counters are kept, and at most twice as many.
/// Without this bound, a client that changes each counter once would keep an id for each of them.
/// An id that is not kept does no harm: the store forgets each change by itself after a minute.
#[derive(Debug, Default)]
pub(crate) struct Answered(Mutex<Ids>);

#[derive(Debug, Default)]
struct Ids {
    recent: HashMap<Name, Vec<Id>>,
    older: HashMap<Name, Vec<Id>>,
    /// How many ids were noted in `recent`. Some of them may have been taken since.
    noted: usize,
}

impl Answered {
    pub(super) fn note(&self, name: &Name, ids: &[Id]) {
        let mut kept = self.ids();
        for id in ids {
            if kept.noted >= MOST_REMEMBERED {
                kept.older = std::mem::take(&mut kept.recent);
                kept.noted = 0;
            }
            kept.noted += 1;
            kept.recent.entry(name.clone()).or_default().push(*id);
        }
    }

    pub(super) fn take(&self, name: &Name) -> Vec<Id> {
        let mut kept = self.ids();
        let mut ids = kept.recent.remove(name).unwrap_or_default();
        ids.extend(kept.older.remove(name).unwrap_or_default());
        ids
    }

    fn ids(&self) -> MutexGuard<'_, Ids> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Namespace;

    fn name(name: &str) -> Name {
        Name::new(Namespace::new("test").unwrap(), name).unwrap()
    }

    fn noted(answered: &Answered, name: &Name, count: usize) -> Vec<Id> {
        let ids: Vec<_> = (0..count).map(|_| Id::draw().unwrap()).collect();
        ids.iter().for_each(|id| answered.note(name, &[*id]));
        ids
    }

    #[test]
    fn an_answered_change_is_told_once_to_the_store_of_its_own_counter() {
        let (answered, one, other) = (Answered::default(), name("a"), name("b"));
        let ids = noted(&answered, &one, 3);

        assert_eq!(answered.take(&other), []);
        assert_eq!(answered.take(&one), ids);
        assert_eq!(answered.take(&one), []);
    }

    #[test]
    fn the_latest_ids_are_kept_and_old_ones_of_other_counters_are_dropped() {
        let (answered, busy, quiet) = (Answered::default(), name("a"), name("b"));
        noted(&answered, &quiet, 1);

        let ids = noted(&answered, &busy, 3 * MOST_REMEMBERED);

        let kept = answered.take(&busy);
        assert!(kept.len() <= 2 * MOST_REMEMBERED, "{}", kept.len());
        for id in &ids[2 * MOST_REMEMBERED..] {
            assert!(kept.contains(id));
        }
        assert_eq!(answered.take(&quiet), []);
    }
}
