//! The names that a request locks: one name, from a `Key`, or several.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::request::Parts;

use crate::guard::LockNames;
use crate::key::Key;
use crate::refusal::Problem;

/// Finds the names of the locks that a request takes together: see
/// [`LockLayer::all`](crate::LockLayer::all).
///
/// Use a list of [`Key`]s if the number of names is fixed, and [`from_fn`](Self::from_fn) if it
/// depends on the request.
///
/// ```
/// use lockcore_tower::{Key, Keys};
///
/// let keys = Keys::from(["from", "to"].map(|id| Key::query_as::<u64>(id).prefix("account:")));
/// # drop(keys);
/// ```
///
/// If a key lets a request pass ([`Key::optional`], [`Key::when`]), it adds no name. If no key adds
/// a name, the request passes **without a lock**. If several keys find the same name, it is locked
/// once.
#[derive(Clone)]
#[must_use = "keys do nothing until they are given to a layer"]
pub struct Keys(Which);

#[derive(Clone)]
enum Which {
    /// The key of a layer that takes one lock.
    One(Key),
    Each(Vec<Key>),
    Fn(Arc<Find>, usize),
}

type Find = dyn Fn(&Parts) -> Result<Vec<String>, Cow<'static, str>> + Send + Sync;

impl Keys {
    /// `find` makes the names from the head of the request. With an empty list the request passes
    /// without a lock. If a name is in the list several times, it is locked once. After an error
    /// the answer is 400, and **the client sees the text of the error**, up to 1,000 bytes.
    ///
    /// If a request names more than `most` different locks, the answer is 400. The limit is
    /// necessary because a request waits for its locks one after the other. Meanwhile other requests
    /// wait for the locks that the request has already.
    ///
    /// As with [`Key::from_fn`], each thing should have one name: parse what the handler parses.
    ///
    /// # Panics
    ///
    /// If `most` is zero.
    ///
    /// ```
    /// use lockcore_tower::Keys;
    ///
    /// // As in `x-accounts: 7, 3`.
    /// let keys = Keys::from_fn(10, |request| {
    ///     let Some(accounts) = request.headers.get("x-accounts") else {
    ///         return Ok(Vec::new()); // no lock
    ///     };
    ///     let accounts = accounts.to_str().map_err(|_| "x-accounts is not ASCII")?;
    ///     let names = accounts.split(',').map(|account| {
    ///         let account: u64 = account.trim().parse().map_err(|error| format!("no account: {error}"))?;
    ///         Ok(format!("account:{account}"))
    ///     });
    ///     names.collect()
    /// });
    /// # drop(keys);
    /// ```
    #[track_caller]
    pub fn from_fn(
        most: usize,
        find: impl Fn(&Parts) -> Result<Vec<String>, Cow<'static, str>> + Send + Sync + 'static,
    ) -> Self {
        assert!(most > 0, "0 names at most: no request could be locked");
        Self(Which::Fn(Arc::new(find), most))
    }

    pub(crate) fn one(key: Key) -> Self {
        Self(Which::One(key))
    }

    /// Whether the list is empty, so that no request can be locked.
    pub(crate) fn are_none(&self) -> bool {
        matches!(&self.0, Which::Each(keys) if keys.is_empty())
    }

    /// The templates as the label of the locks. `None` if a function makes a part of a name.
    pub(crate) fn label(&self) -> Option<String> {
        let labels: Option<Vec<_>> = match &self.0 {
            Which::One(key) => return key.label(),
            Which::Each(keys) => keys.iter().map(Key::label).collect(),
            Which::Fn(..) => None,
        };
        Some(labels?.join(", "))
    }

    /// The names to lock; `None` if the request needs no lock.
    pub(crate) fn find(&self, parts: &mut Parts) -> Result<Option<LockNames>, Problem> {
        match &self.0 {
            Which::One(key) => Ok(key.find(parts)?.map(LockNames::One)),
            Which::Each(keys) => {
                let found = keys.iter().map(|key| key.find(parts));
                let names: Vec<_> = found
                    .filter_map(Result::transpose)
                    .collect::<Result<_, _>>()?;
                Ok(LockNames::all(names))
            }
            Which::Fn(find, most) => {
                let names = find(parts).map_err(Problem::refused_by_a_function)?;
                let names = LockNames::all(names);
                match names.as_ref().map(|names| names.as_slice().len()) {
                    Some(count) if count > *most => Err(Problem::bad_key(format!(
                        "The request names {count} different locks; it may name {most}."
                    ))),
                    _ => Ok(names),
                }
            }
        }
    }
}

impl From<Vec<Key>> for Keys {
    fn from(keys: Vec<Key>) -> Self {
        Self(Which::Each(keys))
    }
}

impl<const N: usize> From<[Key; N]> for Keys {
    fn from(keys: [Key; N]) -> Self {
        Self::from(Vec::from(keys))
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Which::One(key) => fmt::Debug::fmt(key, f),
            Which::Each(keys) => f.debug_list().entries(keys).finish(),
            Which::Fn(_, most) => write!(f, "Keys(a function, at most {most} names)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_label_is_the_template_unless_a_function_makes_a_part_of_the_name() {
        let label = |key: Key| Keys::one(key).label();
        let text = |text: &str| Some(text.to_owned());

        let key = Key::template("{{a}}:{header.X-Tenant}:{query.page:u32}:{grpc_method}");
        assert_eq!(
            label(key),
            text("{a}:{header.x-tenant}:{query.page}:{grpc_method}")
        );
        let key = Key::metadata_as::<u64>("order-id").prefix("order:");
        assert_eq!(label(key), text("order:{metadata.order-id}"));
        #[cfg(feature = "axum")]
        {
            let key = Key::path_as::<u64>("id").prefix("order:");
            assert_eq!(label(key), text("order:{path.id}"));
            assert_eq!(label(Key::matched_path()), text("{matched_path}"));
        }
        let secret = || Key::from_fn(|_| Ok(Some("secret".to_owned()))).prefix("a:");
        assert_eq!(label(secret()), None);
        assert_eq!(label(Key::extension(|id: &u64| *id)), None);
        let several = |from, to| Keys::from([from, to]).label();
        let [from, to] = ["from", "to"].map(Key::query);
        assert_eq!(several(from.clone(), to), text("{query.from}, {query.to}"));
        assert_eq!(several(from, secret()), None);
        assert_eq!(Keys::from_fn(2, |_| Ok(Vec::new())).label(), None);
    }
}
