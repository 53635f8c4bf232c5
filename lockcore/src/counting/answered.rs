//! The changes of counters whose ids the store may forget, because their answers have come. Plain
//! data.

use std::collections::HashMap;

use super::MOST_REMEMBERED;
use crate::name::Name;
use crate::request::Id;

/// The ids of changes that were sent once and are answered. The next change of the same counter
/// tells the store to forget them.
///
/// At least the latest [`MOST_REMEMBERED`] ids of all counters are kept, and at most twice as many.
/// Without this bound, a client that changes each counter once would keep an id for each of them.
/// An id that is not kept does no harm: the store forgets each change by itself after a minute.
#[derive(Debug, Default)]
pub(crate) struct Answered {
    recent: HashMap<Name, Vec<Id>>,
    older: HashMap<Name, Vec<Id>>,
    /// How many ids were noted in `recent`. Some of them may have been taken since.
    noted: usize,
}

impl Answered {
    pub(crate) fn note(&mut self, name: &Name, ids: &[Id]) {
        for id in ids {
            if self.noted >= MOST_REMEMBERED {
                self.older = std::mem::take(&mut self.recent);
                self.noted = 0;
            }
            self.noted += 1;
            self.recent.entry(name.clone()).or_default().push(*id);
        }
    }

    pub(crate) fn take(&mut self, name: &Name) -> Vec<Id> {
        let mut ids = self.recent.remove(name).unwrap_or_default();
        ids.extend(self.older.remove(name).unwrap_or_default());
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::Namespace;

    fn name(name: &str) -> Name {
        Name::new(Namespace::new("test").unwrap(), name).unwrap()
    }

    fn noted(answered: &mut Answered, name: &Name, count: usize) -> Vec<Id> {
        let ids: Vec<_> = (0..count).map(|_| Id::draw().unwrap()).collect();
        ids.iter().for_each(|id| answered.note(name, &[*id]));
        ids
    }

    #[test]
    fn an_answered_change_is_told_once_to_the_store_of_its_own_counter() {
        let (mut answered, one, other) = (Answered::default(), name("a"), name("b"));
        let ids = noted(&mut answered, &one, 3);

        assert_eq!(answered.take(&other), []);
        assert_eq!(answered.take(&one), ids);
        assert_eq!(answered.take(&one), []);
    }

    #[test]
    fn the_latest_ids_are_kept_and_old_ones_of_other_counters_are_dropped() {
        let (mut answered, busy, quiet) = (Answered::default(), name("a"), name("b"));
        noted(&mut answered, &quiet, 1);

        let ids = noted(&mut answered, &busy, 3 * MOST_REMEMBERED);

        let kept = answered.take(&busy);
        assert!(kept.len() <= 2 * MOST_REMEMBERED, "{}", kept.len());
        for id in &ids[2 * MOST_REMEMBERED..] {
            assert!(kept.contains(id));
        }
        assert_eq!(answered.take(&quiet), []);
    }
}
