//! Hash maps for keys that need little hashing: names, which carry their hash, and numbers that no outside
//! party chooses.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
};

pub(crate) type SpreadMap<K, V> = HashMap<K, V, BuildHasherDefault<Spread>>;

/// Multiplies a key by 2^64 ÷ the golden ratio (Knuth, The Art of Computer Programming 3, 6.4), so that
/// consecutive numbers do not share their upper bits, which the map compares first.
#[derive(Default)]
pub(crate) struct Spread(u64);

impl Hasher for Spread {
    fn write_u64(&mut self, key: u64) {
        self.0 = (self.0 ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
