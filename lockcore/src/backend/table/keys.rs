//! The keys of names in a table. They sort by their bytes.

use crate::name::{Name, Namespace, key_prefix};

/// Bytes of a name that stay readable in a key.
pub(super) const READABLE: usize = 512;

/// The key of a name, in this version of the layout.
pub(crate) fn key(name: &Name, version: u32) -> String {
    name.key(version, READABLE)
}

/// The beginning of the keys of all names that begin with `prefix`.
pub(crate) fn keys_like(namespace: &Namespace, version: u32, prefix: &str) -> String {
    key_prefix(namespace, version, prefix, READABLE)
}

/// A text that sorts after all keys with this beginning. Behind the beginning, a key has at most
/// [`READABLE`] bytes of a name. Then it has a brace, or a tilde if the name is longer. Both sort
/// before the largest character. This text has one more of the largest character than fits into
/// these bytes.
pub(crate) fn behind(beginning: &str) -> String {
    const LAST: char = char::MAX;
    let most = READABLE / LAST.len_utf8() + 1;
    let ends = std::iter::repeat_n(LAST, most);
    beginning.chars().chain(ends).collect()
}
