//! The name of a lock, and the key that is made from it for stores with limits on keys.

use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::{Arc, LazyLock};

use sha2::{Digest, Sha256};

use crate::error::Error;

/// Separates namespace, layout version and name in a key.
const SEPARATOR: char = ':';

/// The longest name, in bytes. A longer name is refused, because it is probably a mistake. If a
/// store has shorter keys, a shortened form with a hash stands for a name that does not fit.
pub(crate) const MAX_NAME_LEN: usize = 4096;
const MAX_NAMESPACE_LEN: usize = 64;

/// The first part of all names, which separates the applications that use one store
/// (`LOCK_NAMESPACE`).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Namespace(Arc<str>);

impl Namespace {
    /// Checks a namespace: 1 to 64 characters of `a-z A-Z 0-9 . _ -`.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for anything else. The separator `:` is refused
    /// because the namespace `a:b` with the name `c`, and the namespace `a` with the name `b:c`,
    /// would be one key.
    pub fn new(namespace: &str) -> Result<Self, Error> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if namespace.is_empty()
            || namespace.len() > MAX_NAMESPACE_LEN
            || !namespace.chars().all(allowed)
        {
            return Err(Error::config(format!(
                "namespace {namespace:?} is not usable: it takes 1 to {MAX_NAMESPACE_LEN} characters of a-z A-Z 0-9 . _ -"
            )));
        }
        Ok(Self(namespace.into()))
    }

    /// The namespace as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The name of one lock inside a namespace: any UTF-8 of 1 to 4,096 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name(Arc<Parts>);

#[derive(Debug, PartialEq, Eq)]
struct Parts {
    /// The hash of the name, with a random key, so that nobody can choose names that collide. It is
    /// computed once, because maps use it often.
    hash: u64,
    namespace: Namespace,
    name: String,
    /// Whether this is the name of the value beside the lock, and not of the lock.
    is_value: bool,
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl Name {
    /// Checks the length; every character is allowed.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) when the name is empty or longer than 4,096 bytes.
    pub fn new(namespace: Namespace, name: impl Into<String>) -> Result<Self, Error> {
        let name = name.into();
        if name.is_empty() {
            return Err(Error::config(
                "the name of a lock is empty: everything that builds such a name would share one lock",
            ));
        }
        if name.len() > MAX_NAME_LEN {
            return Err(Error::config(format!(
                "the name of a lock has {} bytes and at most {MAX_NAME_LEN} are allowed; lock a hash of it instead",
                name.len()
            )));
        }
        Ok(Self::of(namespace, name, false))
    }

    fn of(namespace: Namespace, name: String, is_value: bool) -> Self {
        static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        Self(Arc::new(Parts {
            hash: KEY.hash_one((namespace.as_str(), &name, is_value)),
            namespace,
            name,
            is_value,
        }))
    }

    /// The name of the value that holders of this lock [write](crate::backend::CountOp::Write). It
    /// differs from all names of locks, and its key differs too. So a store keeps a value in the
    /// way in which it keeps a counter, and needs no code for values.
    #[must_use]
    pub fn value(&self) -> Self {
        Self::of(self.0.namespace.clone(), self.0.name.clone(), true)
    }

    /// The namespace.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.0.namespace
    }

    /// The name as the user gave it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0.name
    }

    /// The key for a store that takes printable text of at most `limit` bytes after the prefix:
    /// `namespace:version:{name}`. Two names never have the same key.
    ///
    /// The name is in braces, so that a Redis Cluster keeps all keys of one name in one slot.
    /// Inside the braces `{ } / %`, white space and control characters are written `%XX`. If the
    /// name is then longer than `limit`, the key has a readable prefix of it and the SHA-256 of the
    /// whole name. Such a key is longer than every key without a hash, so the two kinds cannot
    /// collide.
    ///
    /// The name of a [value](Self::value) has the key of its lock, followed by `:value`.
    #[must_use]
    pub fn key(&self, version: u32, limit: usize) -> String {
        let mut key = format!(
            "{}{SEPARATOR}{version}{SEPARATOR}{{",
            self.0.namespace.as_str()
        );
        let start = key.len();
        for c in self.0.name.chars() {
            push_escaped(&mut key, c);
        }
        if key.len() - start > limit {
            let mut cut = start + limit;
            while !key.is_char_boundary(cut) {
                cut -= 1;
            }
            key.truncate(cut);
            let digest = Sha256::digest(self.0.name.as_bytes());
            key.push('~');
            for byte in digest {
                push_hex(&mut key, byte);
            }
        }
        key.push('}');
        if self.0.is_value {
            key.push_str(":value");
        }
        key
    }
}

/// The beginning of the [keys](Name::key) of all names that begin with `prefix`. If `prefix` is
/// longer than the readable part of a key, the keys of some other names begin with the same text.
#[cfg_attr(
    not(any(
        feature = "etcd",
        feature = "mysql",
        feature = "postgres",
        feature = "redis",
        feature = "sqlite",
        feature = "zookeeper"
    )),
    allow(dead_code, reason = "memory keeps no keys")
)]
pub(crate) fn key_prefix(
    namespace: &Namespace,
    version: u32,
    prefix: &str,
    limit: usize,
) -> String {
    let mut key = format!("{}{SEPARATOR}{version}{SEPARATOR}{{", namespace.as_str());
    let start = key.len();
    for c in prefix.chars() {
        push_escaped(&mut key, c);
    }
    let mut cut = key.len().min(start + limit);
    while !key.is_char_boundary(cut) {
        cut -= 1;
    }
    key.truncate(cut);
    key
}

/// The name from which a [key](Name::key) with this limit was made. The flag tells whether the name
/// is complete: of a long name the key contains only the readable part. `None` if `key` is no such
/// key.
pub(crate) fn of_key(key: &str, limit: usize) -> Option<(String, bool)> {
    let text = key[key.find('{')? + 1..].strip_suffix('}')?;
    let hash = text.len().checked_sub(65).and_then(|at| text.get(at..));
    let is_hash = |hash: &str| {
        let digits = hash.strip_prefix('~');
        digits.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    let readable = match text.len() > limit && hash.is_some_and(is_hash) {
        true => &text[..text.len() - 65],
        false => text,
    };
    let mut bytes = Vec::with_capacity(readable.len());
    let mut rest = readable.as_bytes();
    while let Some((byte, behind)) = rest.split_first() {
        rest = behind;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let digits = rest
            .get(..2)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        let escaped = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match escaped {
            Some(byte) => {
                bytes.push(byte);
                rest = &rest[2..];
            }
            // The readable part of a long name may end in the middle of an escape.
            None => break,
        }
    }
    // It may also end in the middle of a character whose bytes are escaped.
    let whole = readable.len() == text.len();
    let name = match String::from_utf8(bytes) {
        Ok(name) => name,
        Err(_) if whole => return None,
        Err(error) => {
            let valid = error.utf8_error().valid_up_to();
            String::from_utf8_lossy(&error.as_bytes()[..valid]).into_owned()
        }
    };
    Some((name, whole))
}

fn push_escaped(key: &mut String, c: char) {
    if matches!(c, '{' | '}' | '/' | '%') || c.is_control() || c.is_whitespace() {
        let mut utf8 = [0; 4];
        for byte in c.encode_utf8(&mut utf8).bytes() {
            key.push('%');
            push_hex(key, byte);
        }
    } else {
        key.push(c);
    }
}

fn push_hex(key: &mut String, byte: u8) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    key.push(DIGITS[usize::from(byte >> 4)].into());
    key.push(DIGITS[usize::from(byte & 15)].into());
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Control characters in a name must not reach a terminal or split a log line.
        self.0.name.escape_debug().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn key(namespace: &str, name: &str, limit: usize) -> String {
        let namespace = Namespace::new(namespace).unwrap();
        Name::new(namespace, name).unwrap().key(1, limit)
    }

    #[test]
    fn a_plain_name_stays_readable() {
        assert_eq!(key("lock", "order:42", 200), "lock:1:{order:42}");
    }

    #[test]
    fn delimiters_are_escaped() {
        assert_eq!(
            key("lock", "a}{b/%\0\r\n", 200),
            "lock:1:{a%7d%7bb%2f%25%00%0d%0a}"
        );
    }

    #[test]
    fn a_name_is_read_back_from_its_key() {
        let long = format!("{}😀 {}", "x".repeat(500), "y".repeat(100));
        let looks_hashed = format!("a~{}", "0".repeat(64));
        for name in [
            "order:42",
            "a}{b/%\0\r\n",
            "%25",
            "😀\u{2028}",
            &looks_hashed,
        ] {
            assert_eq!(
                of_key(&key("lock", name, 512), 512),
                Some((name.to_owned(), true))
            );
        }
        for limit in 490..512 {
            let (read, whole) = of_key(&key("lock", &long, limit), limit).unwrap();
            assert!(
                !whole && read.len() + 12 > limit && long.starts_with(&read),
                "{read}"
            );
        }
        for not_a_key in ["", "lock:1:", "lock:1:{", "lock:1:{a}:line", "lock:1:{%ff}"] {
            assert_eq!(of_key(not_a_key, 512), None, "{not_a_key}");
        }
    }

    #[test]
    fn keys_of_names_with_a_beginning_begin_with_it() {
        let namespace = Namespace::new("lock").unwrap();
        for (prefix, name) in [("", "a"), ("a", "a"), ("a b/", "a b/c"), ("😀", "😀😀")] {
            let begins = key_prefix(&namespace, 1, prefix, 512);
            assert!(key("lock", name, 512).starts_with(&begins), "{begins}");
        }
        let long = "/".repeat(600);
        assert!(key("lock", &long, 512).starts_with(&key_prefix(&namespace, 1, &long, 512)));
    }

    #[test]
    fn namespaces_with_a_separator_are_refused() {
        for bad in ["", "a:b", "a b", "{a}", "ä", &"n".repeat(65)] {
            assert!(Namespace::new(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn empty_and_endless_names_are_refused() {
        let namespace = Namespace::new("lock").unwrap();
        assert!(Name::new(namespace.clone(), "").is_err());
        assert!(Name::new(namespace.clone(), "x".repeat(MAX_NAME_LEN + 1)).is_err());
        assert!(Name::new(namespace, "x".repeat(MAX_NAME_LEN)).is_ok());
    }

    /// There is no collision in at least 1,000,000 pairs: 2,000 names make 1,999,000 pairs. The
    /// names are built from parts that collide easily: escapes, their escaped forms, hashed forms,
    /// common prefixes.
    #[test]
    fn no_two_names_share_a_key() {
        let mut random = fastrand::Rng::with_seed(7);
        let pieces = [
            "a",
            "%",
            "%25",
            "%7d",
            "}",
            "{",
            "/",
            "~",
            "\0",
            "\r\n",
            " ",
            "ä",
            "\u{2028}",
            "😀",
            ":",
            "lock:1:",
            "aaaaaaaaaaaaaaaa",
        ];
        let mut seen: HashMap<String, String> = HashMap::new();
        while seen.len() < 2_000 {
            let length = random.usize(1..12);
            let name: String = (0..length)
                .map(|_| *random.choice(&pieces).unwrap())
                .collect();
            for name in [name.clone(), key("lock", &name, 32)] {
                let key = key("lock", &name, 32);
                assert!(!key.contains(char::is_whitespace) && !key.contains(char::is_control));
                if let Some(other) = seen.insert(key, name.clone()) {
                    assert_eq!(other, name, "two names, one key");
                }
            }
        }
    }
}
