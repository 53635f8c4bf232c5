//! The changes of counters whose ids the store may forget, because their answers have come. Plain
//! data.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::name::Name;
use crate::request::Id;

/// The most ids of answered changes that are kept until the next request. If one more comes, all
/// kept ids are dropped. That does no harm: the store forgets each change by itself after a minute.
const MOST_ANSWERED: usize = 1_000;

/// The ids of changes that were sent once and are answered. The next change of the same counter
/// tells the store to forget them.
#[derive(Debug, Default)]
pub(crate) struct Answered(Mutex<Ids>);

#[derive(Debug, Default)]
struct Ids {
    of: HashMap<Name, Vec<Id>>,
    all: usize,
}

impl Answered {
    pub(super) fn note(&self, name: &Name, id: Id) {
        let mut ids = self.ids();
        if ids.all >= MOST_ANSWERED {
            *ids = Ids::default();
        }
        ids.all += 1;
        ids.of.entry(name.clone()).or_default().push(id);
    }

    pub(super) fn take(&self, name: &Name) -> Vec<Id> {
        let mut ids = self.ids();
        let of = ids.of.remove(name).unwrap_or_default();
        ids.all -= of.len();
        of
    }

    fn ids(&self) -> MutexGuard<'_, Ids> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
