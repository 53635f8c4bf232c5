//! Finds the word of a list that a misspelt word stands for.

/// The word of this list that was probably meant: the nearest one, if one or two letters differ, and
/// fewer than half of those that were written. With more, any short word would match.
pub(crate) fn nearest<'a>(
    written: &str,
    ours: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let distances = ours.into_iter().map(|ours| {
        let distance = strsim::damerau_levenshtein(ours, written);
        (distance, ours)
    });
    let nearest = distances.min_by_key(|(distance, _)| *distance);
    nearest
        .filter(|(distance, _)| *distance <= 2 && 2 * distance < written.chars().count())
        .map(|(_, ours)| ours)
}
