//! The beginnings of keys, up to the first separator: models, mostly.

use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

/// Prefixes that are told apart; the first stands for keys without one, the last for all others.
const MAX_PREFIXES: usize = 256;
const OTHERS: u8 = u8::MAX;
/// From this length on, hexadecimal digits before a separator are a hash and not a name.
const HASH_DIGITS: usize = 16;
/// The longest prefix.
const MAX_LENGTH: usize = 128;

/// All prefixes that have been seen.
#[derive(Debug)]
pub(crate) struct PrefixTable {
    list: ArcSwap<Vec<Arc<str>>>,
    changes: Mutex<()>,
}

fn prefix(key: &str) -> &str {
    let Some(end) = key.bytes().take(MAX_LENGTH).position(|byte| matches!(byte, b'_' | b'@' | b':' | b'/'))
    else {
        return "";
    };
    let prefix = key.get(..end).unwrap_or_default();
    let is_hash = prefix.len() >= HASH_DIGITS && prefix.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_hash { "" } else { prefix }
}

impl PrefixTable {
    pub(crate) fn new() -> Self {
        Self { list: ArcSwap::from_pointee(vec!["".into()]), changes: Mutex::new(()) }
    }

    /// The place of a key's prefix.
    pub(crate) fn index_of(&self, key: &str) -> u8 {
        let prefix = prefix(key);
        if prefix.is_empty() {
            return 0;
        }
        let find = |list: &[Arc<str>]| list.iter().position(|it| **it == *prefix);
        let known = find(&self.list.load());
        let at = known.or_else(|| {
            let _changing = self.changes.lock();
            let mut list = Vec::clone(&self.list.load());
            let known = find(&list);
            if known.is_some() || list.len() >= MAX_PREFIXES - 1 {
                return known;
            }
            list.push(prefix.into());
            let at = list.len() - 1;
            self.list.store(Arc::new(list));
            Some(at)
        });
        at.and_then(|at| u8::try_from(at).ok()).unwrap_or(OTHERS)
    }

    /// The prefix in a place; nothing for the place of all others.
    pub(crate) fn name(&self, at: u8) -> Option<Arc<str>> {
        self.list.load().get(usize::from(at)).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "hundreds of copies of a long list take minutes")]
    fn hashes_are_no_names_and_names_are_bounded() {
        assert_eq!(prefix("Qwen-Qwen3-32B_cf97adee_0_k"), "Qwen-Qwen3-32B");
        assert_eq!(prefix("cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72_0_k"), "");
        assert_eq!((prefix("model@1@0@abc"), prefix("plain"), prefix("_x")), ("model", "", ""));
        let prefixes = PrefixTable::new();
        assert_eq!((prefixes.index_of("a_1"), prefixes.index_of("b_1"), prefixes.index_of("a_2")), (1, 2, 1));
        for number in 0..400 {
            prefixes.index_of(&format!("model{number}_1"));
        }
        assert_eq!((prefixes.index_of("another_1"), prefixes.index_of("b_7")), (OTHERS, 2));
        assert_eq!((prefixes.name(1).as_deref(), prefixes.name(OTHERS)), (Some("a"), None));
    }
}
