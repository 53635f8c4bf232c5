//! Hashing of keys that are random already: ids, and names, which store their keyed hash.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map of keys whose `Hash` is one random `u64`.
pub(crate) type Prehashed<K, V> = HashMap<K, V, BuildHasherDefault<Identity>>;

/// Returns the one `u64` that it is given.
#[derive(Default)]
pub(crate) struct Identity(u64);

impl Hasher for Identity {
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn write(&mut self, bytes: &[u8]) {
        // The keys here do not use this. It is still a hash, but a poor one.
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
