//! The value of the header `Idempotency-Key`.

use std::fmt;
use std::str::FromStr;

/// The value of the header `Idempotency-Key`, as the draft standard of the IETF defines it: a
/// string of [structured fields](https://www.rfc-editor.org/rfc/rfc9651#name-strings), in quotation
/// marks. Many clients leave the quotation marks out. So `"abc"` and `abc` are one key, and one
/// lock:
///
/// ```
/// use lockcore_tower::{IdempotencyKey, Key};
///
/// let key = Key::header_as::<IdempotencyKey>("idempotency-key").prefix("payment:");
/// # drop(key);
/// let (standard, bare): (IdempotencyKey, IdempotencyKey) = ("\"abc\"".parse()?, "abc".parse()?);
/// assert_eq!(standard, bare);
/// assert_eq!(standard.as_str(), "abc");
/// # Ok::<_, lockcore_tower::NotAnIdempotencyKey>(())
/// ```
///
/// A handler that compares keys must read them in the same way as the layer, with [`FromStr`].
/// [`Display`](fmt::Display) writes the key without quotation marks.
///
/// In quotation marks, a key may contain spaces and all other printable characters of ASCII; `\"`
/// and `\\` stand for `"` and `\`. Without quotation marks, it may not contain spaces, commas,
/// semicolons, quotation marks and backslashes. The layer answers 400 to all other values, to an
/// empty key, and to a key with parameters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdempotencyKey(String);

impl IdempotencyKey {
    /// The key without its quotation marks.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for IdempotencyKey {
    type Err = NotAnIdempotencyKey;

    fn from_str(value: &str) -> Result<Self, Self::Err> {
        let key = match value.strip_prefix('"') {
            Some(rest) => unquoted(rest)?,
            None if value.chars().all(is_bare) => value.to_owned(),
            None => return Err(NotAnIdempotencyKey("it needs quotation marks")),
        };
        match key.is_empty() {
            true => Err(NotAnIdempotencyKey("it is empty")),
            false => Ok(Self(key)),
        }
    }
}

/// The string whose first quotation mark has been read.
fn unquoted(rest: &str) -> Result<String, NotAnIdempotencyKey> {
    let mut key = String::new();
    let mut chars = rest.chars();
    while let Some(char) = chars.next() {
        match char {
            '"' if chars.as_str().is_empty() => return Ok(key),
            '"' => {
                return Err(NotAnIdempotencyKey(
                    "there is more after its quotation marks",
                ));
            }
            '\\' => match chars.next() {
                Some(escaped @ ('"' | '\\')) => key.push(escaped),
                _ => return Err(NotAnIdempotencyKey("only \\\" and \\\\ are escapes")),
            },
            ' '..='~' => key.push(char),
            _ => {
                return Err(NotAnIdempotencyKey(
                    "it has a character that is not printable ASCII",
                ));
            }
        }
    }
    Err(NotAnIdempotencyKey("its last quotation mark is missing"))
}

fn is_bare(char: char) -> bool {
    char.is_ascii_graphic() && !matches!(char, '"' | '\\' | ',' | ';')
}

impl fmt::Display for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a text is no [`IdempotencyKey`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAnIdempotencyKey(&'static str);

impl fmt::Display for NotAnIdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for NotAnIdempotencyKey {}
