//! How tickets are written at the server: keys, channels and scripts. All of it is wire format.

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

/// A script, and the hash by which the server knows it.
pub(super) struct Script {
    pub(super) source: String,
    pub(super) sha1: String,
}

impl Script {
    /// Replaces `-- include line.lua` by the text of that file, and in the same way the other shared
    /// files. If a file is included twice, its text is only at the first place. A fast path in front
    /// of an include does not use the functions in it. So it does not pay for creating them.
    fn new(source: &str) -> Self {
        let mut source = source.to_owned();
        for (include, text) in SHARED {
            source = source.replacen(include, text, 1).replace(include, "");
        }
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

    /// The fields of a record and their length in bytes, up to the fields without a fixed end.
    const RECORD: [(&str, usize); 8] = [
        ("number", NUMBER),
        ("expires", EXPIRES),
        ("id", 32),
        (":", 1),
        ("permits", CAPACITY),
        (": behind permits", 1),
        ("capacity", CAPACITY),
        (": behind capacity", 1),
    ];

    /// The fields of a state with a line, up to the record of the only holder.
    const HEAD: [(&str, usize); 7] = [
        ("last", NUMBER),
        ("L", 1),
        ("marks", EXPIRES),
        ("head", 13),
        ("next", 13),
        ("out", 10),
        ("capacity", 10),
    ];

    /// The fields behind [`HEAD`], in a state with a stored capacity.
    const STORED: [(&str, usize); 2] = [("stored", CAPACITY), ("change", 32)];

    /// The digits that all numbers of the same thousand seconds have in common.
    const THOUSAND_SECONDS: [usize; 2] = [1, 7];

    /// The digits of a number that are its time in milliseconds.
    const MILLISECONDS: [usize; 2] = [1, NUMBER - 3];

    /// The position of the first byte of one field, and of the last byte of another. Positions
    /// begin at 1, as in Lua.
    fn span(fields: &[(&str, usize)], from: &str, to: &str) -> [usize; 2] {
        let place = |name| fields.iter().position(|field| field.0 == name).expect(name);
        let bytes = |fields: &[(&str, usize)]| fields.iter().map(|field| field.1).sum::<usize>();
        let (from, to) = (place(from), place(to));
        [bytes(&fields[..from]) + 1, bytes(&fields[..=to])]
    }

    /// The scripts contain the positions as plain numbers. A function call for each of them would
    /// take longer than the work itself.
    #[test]
    fn scripts_read_and_write_values_only_at_the_places_of_fields() {
        let record = |from, to| span(&RECORD, from, to);
        let head = |from, to| span(&HEAD, from, to);
        let behind_head = head("last", "capacity")[1];
        let id = record("id", "id")[1] - record("number", "expires")[1];
        let mut spans = Vec::new();
        for (name, _) in RECORD {
            let [from, to] = record(name, name);
            spans.push([from, to]);
            spans.push([behind_head + from, behind_head + to]);
            // The argument of an enqueue is a record without its number.
            if from > NUMBER {
                spans.push([from - NUMBER, to - NUMBER]);
            }
        }
        spans.extend(HEAD.map(|(name, _)| head(name, name)));
        let stored = |name| span(&STORED, name, name).map(|at| at + behind_head);
        spans.extend(STORED.map(|(name, _)| stored(name)));
        spans.extend([
            record("number", ":"),
            record("number", "capacity"),
            record("id", "capacity"),
            record("number", "expires"),
            record(":", ": behind capacity"),
            head("last", "marks"),
            head("L", "marks"),
            head("L", "head"),
            head("L", "next"),
            THOUSAND_SECONDS,
            MILLISECONDS,
            [1, id], // the id in the argument of a release
        ]);
        let tails = [
            record("id", "id")[0],
            record(": behind permits", ": behind permits")[0],
            record(": behind capacity", ": behind capacity")[1] + 1,
            head("next", "next")[0],
            head("out", "out")[0],
            head("capacity", "capacity")[0],
            1, // of the record of the only holder, behind the first `at` bytes
            behind_head + 1,
            stored("change")[1] + 1,
            id + 1,
        ];
        let bytes = [
            (head("L", "L")[0], "76"),
            (head("L", "L")[0], "82"), // R
            (record(":", ":")[0], "58"),
            (record("expires", "expires")[0], "43"),
            (record(": behind capacity", ": behind capacity")[0], "61"), // =
            (record(": behind capacity", ": behind capacity")[0], "126"), // ~
        ];

        for script in scripts() {
            check_pieces(script, &spans, &tails);
            check_bytes(script, &bytes);
        }
        let enqueue = &ENQUEUE.source;
        assert!(enqueue.contains(&format!("#number == {NUMBER}")));
        assert!(enqueue.contains(&format!("'%0{NUMBER}d'")));
        assert!(enqueue.contains(&format!("'%0{EXPIRES}d'")));
        assert!(enqueue.contains(&format!("#was == {NUMBER}")));
        assert!(enqueue.contains(&format!("#was > {behind_head}")));
        assert!(enqueue.contains(&format!("in_line and {behind_head}")));
    }

    /// Checks that a script cuts a value only at these spans, or from these places to its end.
    fn check_pieces(script: &Script, spans: &[[usize; 2]], tails: &[usize]) {
        for call in script.source.split("sub(").skip(1) {
            let call = call.split(')').next().unwrap_or_default();
            let places = call.split(", ").skip(1).map(|place| {
                let place = place.trim_start_matches("at + ").parse::<usize>();
                place.unwrap_or_else(|_| panic!("{call} names no places"))
            });
            match places.collect::<Vec<_>>()[..] {
                [from, to] => assert!(spans.contains(&[from, to]), "{call}"),
                [from] => assert!(tails.contains(&from), "{call}"),
                _ => panic!("{call}"),
            }
        }
    }

    /// Checks that a script compares single bytes only at these places, and with these values.
    fn check_bytes(script: &Script, bytes: &[(usize, &str)]) {
        for call in script.source.split("string.byte(").skip(1) {
            let call = call.replacen("at + ", "", 1);
            let is_known = |(at, byte): &(usize, &str)| {
                let known = [format!(", {at}) == {byte}"), format!(", {at}) ~= {byte}")];
                known
                    .iter()
                    .any(|known| call[..call.len().min(24)].contains(known))
            };
            assert!(bytes.iter().any(is_known), "{}", &call[..24]);
        }
    }
}
