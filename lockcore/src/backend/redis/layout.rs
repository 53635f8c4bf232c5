//! How tickets are written at the server: keys, channels and scripts. All of it is wire format. The
//! values are drawn in `scripts/places.txt`.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use crate::backend::NameInUse;
use crate::name::{Name, Namespace, key_prefix};

/// The version of the format. It is a part of every key and channel. So versions of the library
/// with different formats have different numbers, and do not see each other's tickets. A change of
/// this number is a breaking release. 1 is the first number that is released.
const VERSION: u32 = 1;

/// How many bytes of a name stay readable in a key.
const READABLE: usize = 512;

/// The digits of a ticket's number, and of its expiry. A record begins with these two: see
/// `scripts/record.lua`.
pub(super) const NUMBER: usize = 16;
pub(super) const EXPIRES: usize = 13;
/// The digits of a ticket's capacity, and of its permits.
pub(super) const CAPACITY: usize = 10;

/// The first key of one name. Scripts make the name's other keys from it: see `scripts/line.lua`.
pub(super) fn key(name: &Name) -> String {
    name.key(VERSION, READABLE)
}

/// The pattern that matches the first keys of all names with this prefix, in the form that `SCAN`
/// takes.
pub(super) fn keys_like(namespace: &Namespace, prefix: &str) -> String {
    let prefix = key_prefix(namespace, VERSION, prefix, READABLE);
    let mut pattern = String::with_capacity(prefix.len() + 2);
    for c in prefix.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    // Only the first key of a name ends with the brace.
    pattern + "*}"
}

/// The name whose first key this is.
pub(super) fn name_of(key: &str) -> Option<NameInUse> {
    NameInUse::of_key(key, READABLE)
}

/// The key of the counter of a name, and the channel for the clients that watch it. Both are in the
/// slot of the name. The channel of a receiver never begins with a brace. So no receiver listens to
/// such a channel.
pub(super) fn counter(name: &Name) -> (String, String) {
    let key = key(name);
    let (folder, tag) = key.split_at(key.find('{').unwrap_or(key.len()));
    let channel = format!("{folder}wake:{tag}");
    (format!("{key}:count"), channel)
}

/// A key in the form of the keys of names. No name has this key.
pub(super) fn some_key(namespace: &Namespace) -> String {
    format!("{}:{VERSION}:{{}}", namespace.as_str())
}

/// The channel of a receiver at one server, without its prefix.
pub(super) fn channel(receiver: u64) -> Arc<str> {
    format!("{receiver:016x}").into()
}

/// The channel of one receiver. Scripts build its name from two parts: the part of a key in front
/// of the brace, and the channel in the record of a ticket. In a cluster the receiver ends with a
/// hash tag.
pub(super) fn wake_channel(namespace: &Namespace, receiver: &str) -> String {
    format!("{}:{VERSION}:wake:{receiver}", namespace.as_str())
}

/// The shared parts of the scripts. Each of them includes only files that come later in this list.
const SHARED: [(&str, &str); 4] = [
    (
        "-- include tickets.lua",
        include_str!("scripts/tickets.lua"),
    ),
    ("-- include line.lua", include_str!("scripts/line.lua")),
    ("-- include fields.lua", include_str!("scripts/fields.lua")),
    ("-- include record.lua", include_str!("scripts/record.lua")),
];

/// The places of the fields, by the names that the scripts use.
static PLACES: LazyLock<HashMap<String, &str>> = LazyLock::new(|| {
    let mut places = HashMap::new();
    for line in include_str!("scripts/places.txt").lines() {
        let words: Vec<_> = line.split_whitespace().collect();
        if let [name, from, to] = words[..]
            && [from, to]
                .iter()
                .all(|place| place.parse::<usize>().is_ok())
        {
            places.insert(name.to_owned(), from);
            places.insert(format!("{name}_END"), to);
        }
    }
    places
});

/// Writes the numbers of places in place of their names.
fn with_numbers(source: &str) -> String {
    let is_end = |c: char| !(c.is_ascii_alphanumeric() || c == '_');
    let words = source.split_inclusive(is_end).map(|word| {
        let name = word.trim_end_matches(is_end);
        match PLACES.get(name) {
            Some(number) => format!("{number}{}", &word[name.len()..]),
            None => word.to_owned(),
        }
    });
    words.collect()
}

/// A script, and the hash by which the server knows it.
pub(super) struct Script {
    pub(super) source: String,
    pub(super) sha1: String,
}

impl Script {
    /// Replaces `-- include line.lua` by the text of that file, and in the same way the other shared
    /// files. If a file is included twice, its text is only at the first place. A fast path in front
    /// of an include does not use the functions in it. So it does not pay for creating them.
    ///
    /// The names in `scripts/places.txt` become numbers.
    fn new(source: &str) -> Self {
        let mut source = source.to_owned();
        for (include, text) in SHARED {
            source = source.replacen(include, text, 1).replace(include, "");
        }
        let source = with_numbers(&source);
        let sha1 = redis::Script::new(&source).get_hash().to_owned();
        Self { source, sha1 }
    }
}

macro_rules! script {
    ($file:literal) => {
        LazyLock::new(|| Script::new(include_str!($file)))
    };
}

pub(super) static ENQUEUE: LazyLock<Script> = script!("scripts/enqueue.lua");
pub(super) static RENEW: LazyLock<Script> = script!("scripts/renew.lua");
pub(super) static RELEASE: LazyLock<Script> = script!("scripts/release.lua");
pub(super) static RAISE: LazyLock<Script> = script!("scripts/raise.lua");
pub(super) static INSPECT: LazyLock<Script> = script!("scripts/inspect.lua");
pub(super) static LIST: LazyLock<Script> = script!("scripts/list.lua");
pub(super) static ASK: LazyLock<Script> = script!("scripts/ask.lua");
pub(super) static ADOPT: LazyLock<Script> = script!("scripts/adopt.lua");
pub(super) static RESIZE: LazyLock<Script> = script!("scripts/resize.lua");
pub(super) static FORGET: LazyLock<Script> = script!("scripts/forget.lua");
pub(super) static PROBE: LazyLock<Script> = script!("scripts/probe.lua");
pub(super) static COUNT: LazyLock<Script> = script!("scripts/count.lua");

#[cfg(test)]
pub(super) fn scripts() -> impl Iterator<Item = &'static Script> {
    [
        &ENQUEUE, &RENEW, &RELEASE, &RAISE, &INSPECT, &LIST, &ASK, &ADOPT, &RESIZE, &FORGET,
        &PROBE, &COUNT,
    ]
    .into_iter()
    .map(|script| &**script)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(name: &str) -> usize {
        let place = PLACES
            .get(name)
            .unwrap_or_else(|| panic!("{name} is no place"));
        place.parse().unwrap()
    }

    /// The length of a field.
    fn length(name: &str) -> usize {
        place(&format!("{name}_END")) + 1 - place(name)
    }

    #[test]
    fn the_fields_of_each_value_follow_each_other() {
        let record = [
            "NUMBER",
            "EXPIRES",
            "ID",
            "BEFORE_PERMITS",
            "PERMITS",
            "BEHIND_PERMITS",
            "CAPACITY",
            "MARK",
            "CHANNEL",
        ];
        let line = ["LAST", "FORM", "MARKS", "HEAD", "NEXT", "OUT", "OF", "SOLO"];
        let resized = ["OF", "STORED", "CHANGE", "STORED_SOLO"];
        let released = ["LEAVING", "LEAVING_MARK"];
        for fields in [&record[..], &line, &resized, &released] {
            for two in fields.windows(2) {
                let end = place(&format!("{}_END", two[0]));
                assert_eq!(end + 1, place(two[1]), "{two:?}");
            }
        }
        assert_eq!([place("NUMBER"), place("LAST"), place("LEAVING")], [1; 3]);
        // The argument of an enqueue is a record without its number.
        for name in ["ID", "PERMITS", "CAPACITY"] {
            assert_eq!(place(&format!("ASKED_{name}")), place(name) - NUMBER);
            assert_eq!(length(&format!("ASKED_{name}")), length(name));
        }
        // The ttl stands where the expiry is, with a plus in front of it.
        assert_eq!((place("ASKED_TTL"), length("ASKED_TTL")), (1, EXPIRES));
        assert_eq!(place("SOLO_ID"), place("OF_END") + place("ID"));
        let lengths = [
            "NUMBER", "LAST", "EXPIRES", "MARKS", "PERMITS", "CAPACITY", "OUT", "STORED",
        ];
        let digits = [
            NUMBER, NUMBER, EXPIRES, EXPIRES, CAPACITY, CAPACITY, CAPACITY, CAPACITY,
        ];
        assert_eq!(lengths.map(length), digits);
        assert_eq!([length("ID"), length("CHANGE"), length("LEAVING")], [32; 3]);
    }

    /// A number would have no name, and nobody would notice if it were wrong.
    #[test]
    fn scripts_read_and_write_values_only_at_places_with_names() {
        let verbs = [
            include_str!("scripts/enqueue.lua"),
            include_str!("scripts/renew.lua"),
            include_str!("scripts/release.lua"),
            include_str!("scripts/raise.lua"),
            include_str!("scripts/inspect.lua"),
            include_str!("scripts/list.lua"),
            include_str!("scripts/ask.lua"),
            include_str!("scripts/adopt.lua"),
            include_str!("scripts/resize.lua"),
            include_str!("scripts/forget.lua"),
            include_str!("scripts/probe.lua"),
            include_str!("scripts/count.lua"),
        ];
        let shared = SHARED.map(|(_, source)| source);
        for source in verbs.into_iter().chain(shared) {
            for call in ["sub(", "string.byte("] {
                for call in source.split(call).skip(1) {
                    let call = call.split(')').next().unwrap_or_default();
                    let places = call.split(", ").skip(1).map(|it| {
                        let it = it.trim_start_matches("at + ");
                        if it == "1" { 1 } else { place(it) } // behind the first `at` bytes
                    });
                    let places: Vec<_> = places.collect();
                    assert!((1..=2).contains(&places.len()), "{call}");
                    assert!(places.is_sorted(), "{call}");
                }
            }
        }
    }

    #[test]
    fn names_in_scripts_become_numbers() {
        let source = "sub(was, ID, ID_END) -- VALID, ID: at + ID\n#was == LAST_END";
        let sent = "sub(was, 30, 61) -- VALID, 30: at + 30\n#was == 16";
        assert_eq!(with_numbers(source), sent);
    }
}
