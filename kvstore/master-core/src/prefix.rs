//! Key prefixes up to the first separator, mostly model names, as metric labels.

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::indices::PrefixIndex;

/// Number of distinct prefixes; the first index stands for keys without a prefix, the last for all others.
const MAX_PREFIXES: usize = 256;
/// From this length on, a prefix of hexadecimal digits is a hash, not a name.
const HASH_DIGITS: usize = 16;
/// Maximum length of a prefix in bytes.
const MAX_LENGTH: usize = 128;

/// All prefixes seen so far.
#[derive(Debug)]
pub(crate) struct PrefixTable {
    list: ArcSwap<Vec<Arc<str>>>,
    changes: Mutex<()>,
}

const SEPARATOR: u8 = 1;
const HEX_DIGIT: u8 = 2;

/// What each byte is, so that a key is scanned once.
static BYTE_KINDS: [u8; 256] = {
    let (mut kinds, mut byte) = ([0; 256], 0_u8);
    loop {
        kinds[byte as usize] = match byte {
            b'_' | b'@' | b':' | b'/' => SEPARATOR,
            byte if byte.is_ascii_hexdigit() => HEX_DIGIT,
            _ => 0,
        };
        if byte == u8::MAX {
            break kinds;
        }
        byte += 1;
    }
};

fn prefix(key: &str) -> &str {
    let mut is_hex = true;
    for (end, byte) in key.bytes().take(MAX_LENGTH).enumerate() {
        match BYTE_KINDS[usize::from(byte)] {
            HEX_DIGIT => {}
            SEPARATOR if is_hex && end >= HASH_DIGITS => return "",
            SEPARATOR => return key.get(..end).unwrap_or_default(),
            _ => is_hex = false,
        }
    }
    ""
}

impl PrefixTable {
    pub(crate) fn new() -> Self {
        Self { list: ArcSwap::from_pointee(vec!["".into()]), changes: Mutex::new(()) }
    }

    /// The index of a key's prefix.
    pub(crate) fn index_of(&self, key: &str) -> PrefixIndex {
        let prefix = prefix(key);
        if prefix.is_empty() {
            return PrefixIndex::NO_PREFIX;
        }
        let find = |list: &[Arc<str>]| list.iter().position(|known| **known == *prefix);
        let known = find(&self.list.load());
        let index = known.or_else(|| {
            let _guard = self.changes.lock();
            let mut list = Vec::clone(&self.list.load());
            let known = find(&list);
            if known.is_some() || list.len() >= MAX_PREFIXES - 1 {
                return known;
            }
            list.push(prefix.into());
            let index = list.len() - 1;
            self.list.store(Arc::new(list));
            Some(index)
        });
        index.and_then(PrefixIndex::new).unwrap_or(PrefixIndex::OTHERS)
    }

    /// The prefix at an index; `None` for the index of all others.
    pub(crate) fn name(&self, index: PrefixIndex) -> Option<Arc<str>> {
        self.list.load().get(index.get()).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "hundreds of copies of a long list take minutes")]
    fn hashes_are_not_prefixes_and_prefixes_are_bounded() {
        assert_eq!(prefix("Qwen-Qwen3-32B_cf97adee_0_k"), "Qwen-Qwen3-32B");
        assert_eq!(prefix("cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72_0_k"), "");
        assert_eq!((prefix("model@1@0@abc"), prefix("plain"), prefix("_x")), ("model", "", ""));
        let prefixes = PrefixTable::new();
        let [first, second] = [1, 2].map(|slot| PrefixIndex::new(slot).unwrap());
        let indices = ["a_1", "b_1", "a_2"].map(|key| prefixes.index_of(key));
        assert_eq!(indices, [first, second, first]);
        for number in 0..400 {
            prefixes.index_of(&format!("model{number}_1"));
        }
        assert_eq!((prefixes.index_of("another_1"), prefixes.index_of("b_7")), (PrefixIndex::OTHERS, second));
        assert_eq!((prefixes.name(first).as_deref(), prefixes.name(PrefixIndex::OTHERS)), (Some("a"), None));
    }
}
