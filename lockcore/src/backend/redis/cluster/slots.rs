//! The slots of a cluster: the slot of a key, and the channels of wake-ups, one for each slot.

use std::sync::{Arc, LazyLock};

use crate::backend::redis::layout;
use crate::name::Name;

/// How many slots a cluster has.
pub(super) const SLOTS: u16 = 16_384;

/// The slot of a key: by its hash tag, or by the whole key if it has none.
pub(super) fn of(key: &str) -> u16 {
    let tag = key
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .map(|(tag, _)| tag)
        .filter(|tag| !tag.is_empty());
    crc16(tag.unwrap_or(key).as_bytes()) % SLOTS
}

/// The slot of all keys of a name.
pub(super) fn of_name(name: &Name) -> u16 {
    of(&layout::key(name))
}

/// The channel of a receiver in this slot, without its prefix.
pub(super) fn channel(receiver: u64, slot: u16) -> Arc<str> {
    format!("{receiver:016x}{{{:x}}}", TAGS[usize::from(slot)]).into()
}

/// For each slot, the smallest number that is in this slot if it is written in hexadecimal digits.
/// With these numbers as hash tags, channels are short, whatever the names in the slot are.
static TAGS: LazyLock<Vec<u32>> = LazyLock::new(|| {
    let mut tags = vec![None; usize::from(SLOTS)];
    let mut missing = tags.len();
    let mut number = 0_u32;
    while missing > 0 {
        let tag = &mut tags[usize::from(crc16(format!("{number:x}").as_bytes()) % SLOTS)];
        if tag.is_none() {
            *tag = Some(number);
            missing -= 1;
        }
        number += 1;
    }
    tags.into_iter().flatten().collect()
});

/// CRC-16/XMODEM, as the servers compute it.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (crc << 8) ^ REMAINDERS[usize::from((crc >> 8) as u8 ^ byte)]
    })
}

/// For each value of the first byte, its remainder.
const REMAINDERS: [u16; 256] = {
    let mut remainders = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = ((byte as u16) << 8, 0);
        while bit < 8 {
            crc = if crc & 0x8000 == 0 {
                crc << 1
            } else {
                (crc << 1) ^ 0x1021
            };
            bit += 1;
        }
        remainders[byte] = crc;
        byte += 1;
    }
    remainders
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_that_of_the_hash_tag() {
        // The first is from the specification of the cluster.
        assert_eq!(crc16(b"123456789"), 0x31C3);
        assert_eq!(of("lock:1:{user1000}:line"), of("user1000"));
        assert_eq!(of("lock:1:{user1000}:gone:{x}"), of("user1000"));
        assert_eq!(of("{}x"), crc16(b"{}x") % SLOTS);
        assert_eq!(of("{x"), crc16(b"{x") % SLOTS);
    }

    #[test]
    fn the_channel_of_a_slot_is_in_the_slot_and_short() {
        for slot in 0..SLOTS {
            let channel = channel(u64::MAX, slot);
            assert_eq!(of(&channel), slot);
            assert!(channel.len() <= 24, "{channel}");
            assert!(
                !channel.contains(':'),
                "{channel} ends the field of a record"
            );
        }
    }
}
