//! Words that are one token, by their bytes.

use std::collections::HashMap;

use foldhash::fast::RandomState;

/// Longest word whose bytes fit a [`WordKey`].
pub(super) const MAX_KEY_BYTES: usize = 15;
const SLOTS: usize = 3;

/// A word of 1 to 15 bytes: its bytes in little-endian order, and its length in the highest byte. Zero is no word.
pub(super) type WordKey = u128;

/// The key of `text[start..end]`, which has at most [`MAX_KEY_BYTES`] bytes.
#[inline]
pub(super) fn word_key(text: &[u8], start: usize, end: usize) -> WordKey {
    let length = end - start;
    let bytes = match text.get(start..start + 16).and_then(|bytes| <[u8; 16]>::try_from(bytes).ok()) {
        Some(bytes) => u128::from_le_bytes(bytes) & !(u128::MAX << (8 * length)),
        None => {
            let mut bytes = [0; 16];
            bytes[..length].copy_from_slice(&text[start..end]);
            u128::from_le_bytes(bytes)
        }
    };
    bytes | (length as u128) << 120
}

/// Spreads the key's bits over all of the hash.
#[inline]
pub(super) fn hash(key: WordKey) -> u64 {
    let low = (key as u64) ^ 0x9e37_79b9_7f4a_7c15;
    let high = ((key >> 64) as u64) ^ 0xd6e8_feb8_6659_fd93;
    let product = u128::from(low) * u128::from(high);
    (product >> 64) as u64 ^ product as u64
}

/// A line of the processor's cache.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Bucket {
    keys: [WordKey; SLOTS],
    tokens: [u32; SLOTS],
}

/// A hash table of words; most lookups read one line.
pub(super) struct WordTable {
    buckets: Box<[Bucket]>,
    long: HashMap<Box<[u8]>, u32, RandomState>,
}

impl WordTable {
    pub(super) fn new<'a>(words: impl Iterator<Item = (&'a [u8], u32)>) -> Self {
        let mut short = Vec::new();
        let mut long = HashMap::default();
        for (word, token) in words {
            match word.len() {
                0 => {}
                1..=MAX_KEY_BYTES => short.push((word_key(word, 0, word.len()), token)),
                _ => drop(long.insert(word.into(), token)),
            }
        }
        long.shrink_to_fit();
        // At most two of three slots are used on average, so a free one ends most searches at once.
        let empty = Bucket { keys: [0; SLOTS], tokens: [0; SLOTS] };
        let mut table = Self { buckets: vec![empty; short.len() / 2 + 1].into_boxed_slice(), long };
        short.into_iter().for_each(|(key, token)| table.insert(key, token));
        table
    }

    #[inline]
    fn home(&self, key: WordKey) -> usize {
        ((u128::from(hash(key)) * self.buckets.len() as u128) >> 64) as usize
    }

    fn insert(&mut self, key: WordKey, token: u32) {
        let mut at = self.home(key);
        loop {
            let bucket = &mut self.buckets[at];
            if let Some(slot) = bucket.keys.iter().position(|&used| used == 0 || used == key) {
                (bucket.keys[slot], bucket.tokens[slot]) = (key, token);
                return;
            }
            at = (at + 1) % self.buckets.len();
        }
    }

    /// The token of a word of up to [`MAX_KEY_BYTES`].
    #[inline]
    pub(super) fn get(&self, key: WordKey) -> Option<u32> {
        let mut at = self.home(key);
        loop {
            let bucket = &self.buckets[at];
            for slot in 0..SLOTS {
                if bucket.keys[slot] == key {
                    return Some(bucket.tokens[slot]);
                }
            }
            if bucket.keys[SLOTS - 1] == 0 {
                return None;
            }
            at = (at + 1) % self.buckets.len();
        }
    }

    /// The token of a longer word.
    pub(super) fn get_long(&self, word: &[u8]) -> Option<u32> {
        self.long.get(word).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_by_their_bytes() {
        let words: Vec<String> =
            (0..5_000_u32).map(|number| format!("{:x}", number.wrapping_mul(0x9e37_79b9))).collect();
        let long = ["sixteen letters.", "a word of more than fifteen bytes"];
        let all = words.iter().map(String::as_str).chain(long);
        let table = WordTable::new(all.zip(0..).map(|(word, token)| (word.as_bytes(), token)));
        for (word, token) in words.iter().zip(0..) {
            let text = format!("<{word}> and more text behind it");
            assert_eq!(table.get(word_key(text.as_bytes(), 1, 1 + word.len())), Some(token), "{word}");
        }
        assert_eq!(table.get_long(long[1].as_bytes()), Some(5_001));
        assert_eq!(table.get_long(b"sixteen letters!"), None);
        assert_eq!(table.get(word_key(b"absent", 0, 6)), None);
    }

    #[test]
    fn a_key_depends_on_the_word_only() {
        let text = b"0123456789abcdefghi";
        for length in 1..=MAX_KEY_BYTES {
            let at_end = word_key(&text[..length], 0, length);
            assert_eq!(word_key(text, 0, length), at_end, "{length}");
            assert_ne!(word_key(b"________________", 0, length), at_end);
        }
        assert_ne!(word_key(b"a\0", 0, 1), word_key(b"a\0", 0, 2));
    }
}
