//! Maps for keys whose hash is already random: ids, which are random numbers, and names, which
//! store a keyed hash.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map of keys whose `Hash` is one random `u64`.
pub(crate) type Prehashed<K, V> = HashMap<K, V, BuildHasherDefault<Identity>>;

/// A hasher that returns the `u64` that the key passes in.
#[derive(Default)]
pub(crate) struct Identity(u64);

impl Hasher for Identity {
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn write(&mut self, bytes: &[u8]) {
        // The keys of these maps never call this method. It computes a valid but poor hash.
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
