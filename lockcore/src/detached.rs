//! The text of a detached lock, from which another process adopts the lock. The code that writes
//! and reads the text is here; [`Guard::detach`](crate::Guard::detach) and
//! [`Locks::adopt`](crate::Locks::adopt) use it.

use std::fmt;
use std::num::NonZeroU32;
use std::str::{FromStr, Split};
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::name::{MAX_NAME_LEN, Name, Namespace};
use crate::request::{FULL, Id};
use crate::token::GrantId;

/// The first field: the kind of the text, and the version of its format. When the format changes,
/// the number changes. Each version refuses the texts of other versions.
const WORD: &str = "lockcore";
const VERSION: u32 = 1;

/// Separates the fields.
const SEPARATOR: char = '.';

/// No text that is written here is longer than this, even if every byte of its name is escaped.
const LONGEST: usize = 3 * MAX_NAME_LEN + 512;

/// A lock that was detached.
///
/// It contains everything that the store compares. It contains nothing about the store itself: no
/// address and no credentials.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Detached {
    /// The id of the ticket. Everybody who knows it can adopt the lock, or release it.
    pub(crate) id: Id,
    pub(crate) grant: GrantId,
    /// Whether an enqueue with this id may arrive at the store later.
    pub(crate) enqueue_may_follow: bool,
    pub(crate) permits: NonZeroU32,
    pub(crate) capacity: NonZeroU32,
    pub(crate) ttl: Duration,
    pub(crate) name: Name,
}

impl Detached {
    /// Reads a text, which may be damaged or made up. White space around the text is ignored.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config). The error does not repeat the text, because errors are
    /// logged.
    pub(crate) fn parse(text: &str, ours: &Namespace) -> Result<Self, Error> {
        let text = text.trim();
        if text.len() > LONGEST {
            return Err(refused(format_args!(
                "it has {} bytes, and the longest such text has fewer",
                text.len()
            )));
        }
        let not_one = || refused("it is not the text that Guard::detach returns");
        let version = text.strip_prefix(WORD).ok_or_else(not_one)?;
        let (version, _) = version.split_once(SEPARATOR).ok_or_else(not_one)?;
        match number::<u32>(version) {
            Some(VERSION) => {}
            Some(other) => {
                return Err(refused(format_args!(
                    "it has form {other}, and this version of lockcore reads form {VERSION}"
                )));
            }
            None => return Err(not_one()),
        }
        let damaged = || refused("it is damaged: a part of it is missing or was changed");
        let (fields, check) = text.rsplit_once(SEPARATOR).ok_or_else(damaged)?;
        if check != self::check(fields) {
            return Err(damaged());
        }
        let read = Self::of_fields(&mut fields.split(SEPARATOR), ours)?;
        // The text must be the only form of this lock that `Display` writes.
        match read.to_string() == text {
            true => Ok(read),
            false => Err(damaged()),
        }
    }

    fn of_fields(fields: &mut Split<'_, char>, ours: &Namespace) -> Result<Self, Error> {
        let mut next = |what| fields.next().ok_or_else(|| unusable(what));
        next("version")?;
        let id = Id::parse(next("id")?).ok_or_else(|| unusable("id"))?;
        let grant = number(next("token")?).and_then(GrantId::of_number);
        let grant = grant.ok_or_else(|| unusable("token"))?;
        let enqueue_may_follow = match next("mark")? {
            "0" => false,
            "1" => true,
            _ => return Err(unusable("mark")),
        };
        let permits: NonZeroU32 = number(next("permits")?).ok_or_else(|| unusable("permits"))?;
        let capacity: NonZeroU32 = number(next("capacity")?).ok_or_else(|| unusable("capacity"))?;
        if permits > capacity || capacity > FULL {
            return Err(unusable("capacity"));
        }
        let ttl = number(next("ttl")?).map(Duration::from_millis);
        let ttl = ttl.ok_or_else(|| unusable("ttl"))?;
        let namespace = unescaped(next("namespace")?).and_then(|text| Namespace::new(&text).ok());
        let namespace = namespace.ok_or_else(|| unusable("namespace"))?;
        if namespace != *ours {
            return Err(refused(format_args!(
                "the lock is of the namespace {:?}, and this client has {:?} (LOCK_NAMESPACE)",
                namespace.as_str(),
                ours.as_str()
            )));
        }
        let name = unescaped(next("name")?).ok_or_else(|| unusable("name"))?;
        let name = Name::new(namespace, name).map_err(|_| unusable("name"))?;
        Ok(Self {
            id,
            grant,
            enqueue_may_follow,
            permits,
            capacity,
            ttl,
            name,
        })
    }
}

/// The text consists of letters, digits and `. _ - : / ~ %`. So it can be an argument, an
/// environment variable or a header.
impl fmt::Display for Detached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut name = String::with_capacity(self.name.as_str().len());
        push_escaped(&mut name, self.name.as_str());
        let mut namespace = String::new();
        push_escaped(&mut namespace, self.name.namespace().as_str());
        let fields = format!(
            "{WORD}{VERSION}.{}.{}.{}.{}.{}.{}.{namespace}.{name}",
            self.id,
            self.grant,
            u8::from(self.enqueue_may_follow),
            self.permits,
            self.capacity,
            self.ttl.as_millis(),
        );
        let check = check(&fields);
        write!(f, "{fields}{SEPARATOR}{check}")
    }
}

/// A checksum that finds damage. It does not prove who has written the text.
fn check(fields: &str) -> String {
    let digest = Sha256::digest(fields.as_bytes());
    let first = [digest[0], digest[1], digest[2], digest[3]];
    format!("{:08x}", u32::from_be_bytes(first))
}

fn refused(why: impl fmt::Display) -> Error {
    Error::config(format!("not adopted: {why}"))
}

fn unusable(field: &str) -> Error {
    refused(format_args!(
        "its {field} is missing or not usable; it was not written by Guard::detach"
    ))
}

/// Parses a number. Accepts only one form of each number: without a sign, and without leading
/// zeros.
fn number<T: FromStr + fmt::Display>(text: &str) -> Option<T> {
    let number: T = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

fn push_escaped(to: &mut String, text: &str) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' | b':' | b'/' | b'~' => {
                to.push(byte.into());
            }
            _ => {
                to.push('%');
                to.push(DIGITS[usize::from(byte >> 4)].into());
                to.push(DIGITS[usize::from(byte & 15)].into());
            }
        }
    }
}

fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        let (high, low) = (digit()?, digit()?);
        bytes.push((high * 16 + low) as u8); // two digits
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn ours() -> Namespace {
        Namespace::new("shop.eu-1").unwrap()
    }

    fn detached(name: &str) -> Detached {
        Detached {
            id: Id::draw().unwrap(),
            grant: GrantId::of_ticket(1_763_858_000_000_000, 3),
            enqueue_may_follow: false,
            permits: FULL,
            capacity: FULL,
            ttl: Duration::from_secs(10),
            name: Name::new(ours(), name).unwrap(),
        }
    }

    fn sealed(fields: &str) -> String {
        format!("{fields}.{}", check(fields))
    }

    fn refusal(text: &str) -> String {
        let error = Detached::parse(text, &ours()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{text:?}");
        error.to_string()
    }

    #[test]
    fn a_text_is_read_as_it_was_written_and_fits_a_header() {
        let longest = "\u{10ffff}".repeat(MAX_NAME_LEN / 4);
        for name in ["order:42", "a.b%c d", "\0\r\n{}", "%41", "ä", &longest] {
            let written = Detached {
                enqueue_may_follow: name == "ä",
                permits: NonZeroU32::MIN,
                ..detached(name)
            };
            let text = written.to_string();

            assert_eq!(Detached::parse(&text, &ours()).unwrap(), written);
            let spaced = format!(" {text}\r\n");
            assert_eq!(Detached::parse(&spaced, &ours()).unwrap(), written);
            assert!(text.bytes().all(|byte| byte.is_ascii_graphic()));
            assert!(text.len() < LONGEST);
        }
        let short = detached("order:42").to_string();
        assert!(short.len() < 200 && short.contains("order:42"), "{short}");
    }

    /// Each byte in turn is removed, doubled, and replaced by other bytes.
    #[test]
    fn damage_is_found_and_the_text_is_not_repeated_in_the_error() {
        let text = detached("order:42").to_string();
        let id = &text[10..42];
        for at in 0..text.len() {
            let (before, byte, behind) = (&text[..at], &text[at..=at], &text[at + 1..]);
            let mut damaged = vec![
                before.to_owned(),
                format!("{before}{behind}"),
                format!("{before}{byte}{byte}{behind}"),
            ];
            for other in [
                "0", "1", "f", "F", ".", "%", "+", " ", "\0", "é", "\u{2028}",
            ] {
                if other != byte {
                    damaged.push(format!("{before}{other}{behind}"));
                }
            }
            for damaged in damaged {
                // A space at the end is ignored, so it is no damage.
                if damaged.trim() != text {
                    assert!(!refusal(&damaged).contains(id), "{damaged}");
                }
            }
        }
    }

    #[test]
    fn a_text_that_was_made_up_is_refused_whatever_is_in_it() {
        let mut random = fastrand::Rng::with_seed(7);
        let pieces = [
            "lockcore1",
            "lockcore",
            ".",
            "..",
            "0",
            "1",
            "-1",
            "+1",
            "007",
            "%",
            "%4",
            "%zz",
            "%FF",
            "shop%2Eeu-1",
            "1073741824",
            "1073741825",
            "18446744073709551616",
            "9223372036854775807",
            "00000000000000000000000000000001",
            "\u{10ffff}",
            "\0",
            "order:42",
            " ",
            "é",
        ];
        for _ in 0..50_000 {
            let pieces = (0..random.usize(..14)).map(|_| pieces[random.usize(..pieces.len())]);
            let text = pieces
                .collect::<Vec<_>>()
                .join(random.choice(["", "."]).unwrap_or("."));
            for text in [sealed(&text), text] {
                if let Ok(read) = Detached::parse(&text, &ours()) {
                    assert_eq!(read.to_string(), text.trim(), "two ways to write one grant");
                }
            }
        }
        let text = sealed(&"lockcore1.".repeat(2_000));
        assert!(refusal(&text).contains("20009 bytes"), "{}", refusal(&text));
    }

    #[test]
    fn a_field_out_of_bounds_is_named_even_if_the_rest_fits() {
        let good =
            "lockcore1.00000000000000000000000000000001.1806190592000003.0.1.5.10000.shop%2Eeu-1.a";
        let fields: Vec<&str> = good.split('.').collect();
        let read = |at: usize, field: &str| {
            let mut fields = fields.clone();
            fields[at] = field;
            refusal(&sealed(&fields.join(".")))
        };
        for (at, fields, named) in [
            (1, &["", "1", "g0000000000000000000000000000001"][..], "id"),
            (2, &["0", "1023", "9223372036854775808", "-1", "x"], "token"),
            (3, &["", "2", "00", "true"], "mark"),
            (4, &["0", "-1", "4294967296", "01"], "permits"),
            (4, &["6"], "capacity"),
            (5, &["0", "1073741825"], "capacity"),
            (6, &["", "18446744073709551616", "1e3"], "ttl"),
            (7, &["", "shop/eu", "%"], "namespace"),
            (8, &["", "%", "%4", "%C3", "%FF"], "name"),
        ] {
            for field in fields {
                let refusal = read(at, field);
                assert!(refusal.contains(&format!("its {named} is")), "{refusal}");
            }
        }
        let long = "a".repeat(MAX_NAME_LEN + 1);
        assert!(read(8, &long).contains("its name is"));
        // If a name could be escaped more than necessary, there would be a second text for one
        // grant.
        assert!(read(8, "%61").contains("damaged"));
        let foreign = read(7, "shop%2Eus-1");
        assert!(
            foreign.contains("shop.us-1") && foreign.contains("shop.eu-1"),
            "{foreign}"
        );
        let later = refusal(&sealed(&good.replacen('1', "2", 1)));
        assert!(later.contains("form 2"), "{later}");
    }
}
