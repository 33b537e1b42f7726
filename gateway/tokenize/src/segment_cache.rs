//! Cache of texts with their tokens, so that text which is sent again is not tokenized again.
//!
//! A prompt is divided into segments whose tokens depend on nothing around them. Where they end depends only on the text before their end
//! since the last end, so that prompts with a common beginning, and messages that are in several prompts, have common segments. Each is
//! cached once, whichever prompts contain it. Texts are not kept: a segment is found by a seeded hash of its text and by its length.

use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::quality::RandomState;
use moka::policy::EvictionPolicy;
use moka::sync::Cache;

use crate::error::PromptError;
use crate::prompt::TokenizedPrompt;
use crate::segmented_text::{SegmentedText, SharedText};
use crate::tokenize::Tokenizer;

/// Shorter segments cost more to find, and of longer ones more is tokenized for a prompt that ends with new text.
const LENGTHS: SegmentLengths = SegmentLengths { full: 4 << 10, least: 512 };
/// Overhead of an entry in bytes, besides its ids.
const ENTRY_OVERHEAD_BYTES: usize = 160;

/// Tokens of segments of all models, by the model's number and the hash of the text.
pub(crate) type SegmentCache = Cache<(u32, u64), CachedSegment, RandomState>;

#[derive(Clone)]
pub(crate) struct CachedSegment {
    /// Length of the text in bytes.
    text_bytes: u32,
    ids: Arc<[u32]>,
}

/// A cache of at most `bytes`.
pub(crate) fn segment_cache(bytes: u64) -> SegmentCache {
    Cache::builder()
        .max_capacity(bytes)
        .weigher(|_, entry: &CachedSegment| {
            u32::try_from(4 * entry.ids.len() + ENTRY_OVERHEAD_BYTES).unwrap_or(u32::MAX)
        })
        .eviction_policy(EvictionPolicy::lru())
        .build_with_hasher(RandomState::default())
}

/// A view of the cache for the texts of one model.
pub(crate) struct ModelSegmentCache {
    cache: SegmentCache,
    owner: u32,
    hasher: RandomState,
    lengths: SegmentLengths,
}

/// Where segments end, in bytes.
#[derive(Clone, Copy)]
struct SegmentLengths {
    /// At the first position behind this many bytes at which the text may be split.
    full: usize,
    /// At an added token, where a message may begin, behind at least this many bytes.
    least: usize,
}

impl ModelSegmentCache {
    pub(crate) fn new(cache: SegmentCache, owner: u32) -> ModelSegmentCache {
        ModelSegmentCache { cache, owner, hasher: RandomState::default(), lengths: LENGTHS }
    }

    /// Tokenizes `text`, of which cached segments are not tokenized again. `special` adds the tokenizer's special tokens around it.
    pub(crate) fn tokens(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        special: bool,
    ) -> Result<TokenizedPrompt, PromptError> {
        SegmentedText::new(SharedText::Borrowed(text), special, tokenizer, self).into_prompt(tokenizer, self)
    }

    /// Where the segments of `text`, which begins with a segment, end, in order; the rest behind the last end belongs to no segment.
    pub(crate) fn ends(&self, tokenizer: &Tokenizer, text: &str) -> Vec<usize> {
        self.lengths.ends(tokenizer, text)
    }

    /// Identifies the prefix that consists of special tokens only.
    pub(crate) fn first_prefix(&self, special: &[u32]) -> u64 {
        self.hasher.hash_one((self.owner, special))
    }

    /// Identifies the prefix that is longer by a text with this hash.
    pub(crate) fn next_prefix(&self, prefix: u64, hash: u64) -> u64 {
        self.hasher.hash_one((prefix, hash))
    }

    /// A seeded hash of a segment's text.
    pub(crate) fn hash(&self, text: &str) -> u64 {
        self.hasher.hash_one(text)
    }

    /// The tokens of a segment with this text, whose hash is `hash`.
    pub(crate) fn segment(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        hash: u64,
    ) -> Result<Arc<[u32]>, PromptError> {
        let key = (self.owner, hash);
        let text_bytes = u32::try_from(text.len()).unwrap_or(u32::MAX);
        if let Some(cached) = self.cache.get(&key).filter(|cached| cached.text_bytes == text_bytes) {
            return Ok(cached.ids);
        }
        let ids: Arc<[u32]> = tokenizer.encode(text)?.into();
        self.cache.insert(key, CachedSegment { text_bytes, ids: ids.clone() });
        Ok(ids)
    }
}

impl SegmentLengths {
    /// See [`ModelSegmentCache::ends`].
    fn ends(self, tokenizer: &Tokenizer, text: &str) -> Vec<usize> {
        let mut cuts = cuts(tokenizer, text).into_iter().rev().peekable();
        let mut ends = Vec::with_capacity(text.len() / self.full + 1);
        let mut start = 0;
        loop {
            while cuts.next_if(|&cut| cut < start + self.least).is_some() {}
            let limit = cuts.peek().copied().unwrap_or(text.len());
            let split = tokenizer.words().first(&text[..limit], start + self.full);
            let Some(end) = split.or_else(|| cuts.next()) else { return ends };
            ends.push(end);
            start = end;
        }
    }
}

/// All cuts behind added tokens, the last one first.
fn cuts(tokenizer: &Tokenizer, text: &str) -> Vec<usize> {
    let mut cuts = Vec::new();
    let mut end = text.len();
    while let Some(at) = tokenizer.cuts().last(text, end) {
        cuts.push(at);
        end = at - 1;
    }
    cuts
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::LazyLock;

    use proptest::prelude::*;

    use super::*;
    use crate::files::ModelFiles;

    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/small");
        Tokenizer::load(&ModelFiles::read(&folder).unwrap()).unwrap()
    });

    fn short_segments(cache: SegmentCache) -> ModelSegmentCache {
        ModelSegmentCache {
            lengths: SegmentLengths { full: 24, least: 8 },
            ..ModelSegmentCache::new(cache, 0)
        }
    }

    #[test]
    fn prompts_share_the_segments_of_their_beginning() {
        let cache = ModelSegmentCache::new(segment_cache(1 << 20), 0);
        let begin =
            "<|im_start|>system\nBe brief and exact. ".to_owned() + &"Some words here. ".repeat(2_000);
        let tokens = |end: &str| cache.tokens(&TOKENIZER, &format!("{begin}{end}"), false).unwrap();
        let prefixes = |prompt: &TokenizedPrompt| prompt.ids().prefixes().collect::<Vec<_>>();
        let (one, other) = (prefixes(&tokens("one")), prefixes(&tokens("another end <|im_end|>")));
        assert!(one.len() > 6 && one == other[..one.len()], "{one:?} {other:?}");
        cache.cache.run_pending_tasks();
        assert!(cache.cache.entry_count() <= other.len() as u64, "each segment is cached once");
        let special = cache.tokens(&TOKENIZER, &begin, true).unwrap();
        assert!(prefixes(&special).iter().all(|prefix| !one.contains(prefix)), "special tokens matter");
    }

    #[test]
    fn segments_are_evicted_beyond_the_limit() {
        let cache = ModelSegmentCache::new(segment_cache(100_000), 0);
        for number in 0..100 {
            cache.tokens(&TOKENIZER, &format!("word {number} again ").repeat(1_000), false).unwrap();
        }
        cache.cache.run_pending_tasks();
        assert!((50_000..=100_000).contains(&cache.cache.weighted_size()), "{}", cache.cache.weighted_size());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn segments_have_the_tokens_of_the_whole_text(
            pieces in prop::collection::vec(prop_oneof![
                4 => "[a-zA-Z ]{0,30}",
                2 => "[a-z]{1,9}( [a-z]{1,9}){0,9}",
                1 => any::<String>(),
                2 => prop::sample::select(vec![
                    "<|im_start|>", "<|im_end|>", "<think>", "<|im_", "|>", "\n", "  ", " \u{301}", "e\u{301} a\u{301}", "'s we've ", "世界",
                    "\r\n", "1 2", "a 1", " a", "a ",
                ]).prop_map(str::to_owned),
            ], 0..40),
        ) {
            static CACHE: LazyLock<ModelSegmentCache> = LazyLock::new(|| short_segments(segment_cache(1 << 20)));
            let text = pieces.concat();
            let prompt = CACHE.tokens(&TOKENIZER, &text, false).unwrap();
            prop_assert_eq!(prompt.ids().to_vec(), TOKENIZER.encode(&text).unwrap());
        }
    }
}
