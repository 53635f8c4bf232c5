//! The labels that layers take from the templates of their keys.

use std::collections::HashSet;
use std::sync::{LazyLock, Mutex, PoisonError};

/// How many different labels this process takes from templates. A program has a few layers. This is
/// for one that makes layers all the time, with texts of its clients in their templates: each label
/// is kept for ever, here and in the metrics.
const MOST: usize = 1_000;

static LABELS: LazyLock<Mutex<HashSet<&'static str>>> = LazyLock::new(Mutex::default);

/// The text, kept for ever, as the label of a lock must be. `None` if too many are kept already.
pub(crate) fn kept(text: String) -> Option<&'static str> {
    let mut labels = LABELS.lock().unwrap_or_else(PoisonError::into_inner);
    keep(&mut labels, text)
}

fn keep(labels: &mut HashSet<&'static str>, text: String) -> Option<&'static str> {
    if let Some(label) = labels.get(&*text) {
        return Some(label);
    }
    if labels.len() == MOST {
        return None;
    }
    let label = text.leak();
    labels.insert(label);
    Some(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_makes_up_templates_has_a_bounded_number_of_labels() {
        let mut labels = HashSet::new();
        let mut label = |number: usize| keep(&mut labels, format!("order:{number}"));

        for number in 0..MOST {
            assert!(label(number).is_some());
        }

        assert_eq!(label(MOST), None);
        assert_eq!(label(7), Some("order:7"), "it is kept already");
    }
}
