//! How tickets are written: keys, channels and scripts. All of it is wire format.

use std::sync::LazyLock;

use crate::name::{Name, Namespace};

/// In every key and channel. Versions of the library that write differently have another number
/// here, and so do not see each other; a change of it is a breaking release. 1 is the first that is released.
const VERSION: u32 = 1;

/// Bytes of a name that stay readable in a key.
const READABLE: usize = 512;

/// The key of one name. Scripts make the others of the name from it: see `scripts/line.lua`.
pub(super) fn key(name: &Name) -> String {
    name.key(VERSION, READABLE)
}

/// A key as names have them, and none of them.
pub(super) fn some_key(namespace: &Namespace) -> String {
    format!("{}:{VERSION}:{{}}", namespace.as_str())
}

/// The channel of one receiver. Scripts make it of what is in front of the brace in a key.
pub(super) fn wake_channel(namespace: &Namespace, receiver: &str) -> String {
    format!("{}:{VERSION}:wake:{receiver}", namespace.as_str())
}

/// A script and the hash that the server knows it by.
pub(super) struct Script {
    pub(super) source: String,
    pub(super) sha1: String,
}

impl Script {
    /// `-- include line.lua` stands for that file, and so for `record.lua`: what comes before it needs none
    /// of it, and is spared the making of its functions.
    fn new(source: &str) -> Self {
        let line = include_str!("scripts/line.lua");
        let record = include_str!("scripts/record.lua");
        let source = source.replace("-- include line.lua", line);
        let source = source.replace("-- include record.lua", record);
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
pub(super) static INSPECT: LazyLock<Script> = script!("scripts/inspect.lua");
pub(super) static FORGET: LazyLock<Script> = script!("scripts/forget.lua");

#[cfg(test)]
pub(super) fn scripts() -> impl Iterator<Item = &'static Script> {
    [&ENQUEUE, &RENEW, &RELEASE, &INSPECT, &FORGET]
        .into_iter()
        .map(|script| &**script)
}
