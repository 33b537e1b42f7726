//! Words that were tokenized recently, and their tokens.

use super::word_table::{WordKey, hash};

/// Size of a cache in entries; 512 KiB, which stays in a processor's own cache.
const ENTRIES: usize = 1 << 14;
/// Words of more tokens are not kept.
pub(super) const MAX_TOKENS: usize = 3;

#[derive(Clone, Copy)]
#[repr(C, align(32))]
struct Entry {
    key: WordKey,
    count: u32,
    tokens: [u32; MAX_TOKENS],
}

/// A cache for one thread at a time. A word replaces the one that has the same place.
pub(super) struct WordCache {
    entries: Box<[Entry]>,
}

impl WordCache {
    pub(super) fn new() -> Self {
        let empty = Entry { key: 0, count: 0, tokens: [0; MAX_TOKENS] };
        Self { entries: vec![empty; ENTRIES].into_boxed_slice() }
    }

    /// Appends the tokens of a word to `tokens`, which `tokenize` does if the word is not in the cache.
    #[inline]
    pub(super) fn tokens(
        &mut self,
        key: WordKey,
        tokens: &mut Vec<u32>,
        tokenize: impl FnOnce(&mut Vec<u32>),
    ) {
        let entry = &mut self.entries[hash(key) as usize % ENTRIES];
        if entry.key == key {
            match entry.count {
                1 => tokens.push(entry.tokens[0]),
                count => tokens.extend_from_slice(&entry.tokens[..count as usize]),
            }
            return;
        }
        let before = tokens.len();
        tokenize(tokens);
        let new = &tokens[before..];
        if new.len() <= MAX_TOKENS {
            entry.key = key;
            entry.count = new.len() as u32;
            entry.tokens[..new.len()].copy_from_slice(new);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_tokenized_once_unless_it_has_many_tokens() {
        let mut cache = WordCache::new();
        let mut calls = 0;
        let mut tokens = Vec::new();
        for (key, count) in [(1, 1), (2, 3), (3, 4), (1, 1), (2, 3), (3, 4)] {
            cache.tokens(key, &mut tokens, |tokens| {
                calls += 1;
                tokens.extend(0..count);
            });
        }
        assert_eq!(calls, 4, "a word of four tokens is not kept");
        assert_eq!(tokens, [[0, 0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 0, 1, 2, 3]].concat());
    }
}
