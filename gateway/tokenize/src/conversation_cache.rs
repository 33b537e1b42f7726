//! Cache of earlier prompts, so that only the new text of a conversation's next turn is tokenized.
//!
//! A prompt is cached in chunks that end at cuts ([`crate::tokenize::SplitPoints`]), and indexed by its last few cuts and by some earlier
//! ones, at growing distances: a template may rewrite the end of a prompt (it drops the reasoning of earlier turns), so the newest cut
//! may be missing in the next turn. A new prompt is searched backwards for an indexed cut. Then the texts are compared, so hash
//! collisions do no harm.

use std::hash::BuildHasher;
use std::sync::Arc;

use foldhash::quality::RandomState;
use moka::policy::EvictionPolicy;
use moka::sync::Cache;

use crate::error::PromptError;
use crate::prompt::{SharedTokenIds, TokenChunk, TokenizedPrompt};
use crate::tokenize::Tokenizer;
use crate::truncation::SpecialTokenCounts;

/// Number of bytes before a cut that are hashed for the index.
const WINDOW: usize = 512;
/// Maximum number of lookups per new prompt.
const MAX_LOOKUPS: usize = 1024;
/// Maximum number of cuts of new text from which the indexed ones are chosen.
const MAX_NEW_CUTS: usize = 4096;
/// Number of newest cuts that are all indexed; further back the distances double.
const INDEXED_NEWEST_CUTS: usize = 4;
/// Maximum number of chunks of a prompt. Beyond it, the older half is merged into one.
const MAX_CHUNKS: usize = 512;
/// Overhead of an entry in bytes, besides its text and ids.
const ENTRY_OVERHEAD_BYTES: usize = 256;

/// Earlier prompts of one model, with LRU eviction.
pub(crate) struct ModelConversationCache<S> {
    cache: ConversationCache<S>,
    /// Number of the model in the keys of the shared cache.
    owner: u32,
    hasher: RandomState,
}

/// Cached prompts of all models; the number in the key is the model's.
pub(crate) type ConversationCache<S> = Cache<(u32, u64), PromptPrefixEntry<S>>;

/// A cache of at most `bytes` of texts and ids. Every prompt counts in full, although prompts of one conversation share memory.
pub(crate) fn conversation_cache<S: Clone + Send + Sync + 'static>(bytes: u64) -> ConversationCache<S> {
    Cache::builder()
        .max_capacity(bytes)
        .weigher(|_, entry: &PromptPrefixEntry<S>| entry.weight)
        .eviction_policy(EvictionPolicy::lru())
        .build()
}

/// A cut of a cached prompt.
#[derive(Clone)]
pub(crate) struct PromptPrefixEntry<S> {
    cached: Arc<CachedPrompt<S>>,
    /// Number of chunks before the cut.
    chunks: usize,
    /// This entry's share of the prompt's size in bytes.
    weight: u32,
}

struct CachedPrompt<S> {
    ids: SharedTokenIds,
    leading_chunks: usize,
    slot: S,
}

impl<S: Clone + Send + Sync + 'static> ModelConversationCache<S> {
    /// A view of the shared cache for the prompts of one `owner`.
    pub(crate) fn new(cache: ConversationCache<S>, owner: u32) -> ModelConversationCache<S> {
        ModelConversationCache { cache, owner, hasher: RandomState::default() }
    }

    /// Tokenizes `text`, reusing the longest cached prefix. `special` adds the tokenizer's special tokens around it.
    pub(crate) fn tokens(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        special: bool,
    ) -> Result<TokenizedPrompt<S>, PromptError> {
        let (before, after) =
            if special { tokenizer.surrounding_special_tokens() } else { (&[][..], &[][..]) };
        let lead = usize::from(!before.is_empty());
        let known = self.find(tokenizer, text, special);
        let (mut chunks, start) = match &known {
            Some((entry, at)) => (entry.cached.ids.chunks()[..entry.chunks].to_vec(), *at),
            None => (special_chunks(before), 0),
        };
        let found = if known.is_some() { chunks.len() } else { 0 };
        let common = chunks[..found].iter().map(|chunk| chunk.ids.len()).sum();
        let mut from = start;
        for cut in chosen_cuts(tokenizer, text, start) {
            chunks.push(Arc::new(encoded(tokenizer, &text[from..cut])?));
            from = cut;
        }
        let mut closed = chunks.len();
        let mut found_now = found;
        if closed > MAX_CHUNKS {
            let merged = merge_older(&mut chunks, lead);
            closed -= merged;
            found_now = found_now.saturating_sub(merged);
        }
        if from < text.len() {
            chunks.push(Arc::new(encoded(tokenizer, &text[from..])?));
        }
        chunks.extend(special_chunks(after));
        let slot = known.map(|(entry, _)| entry.cached.slot.clone());
        Ok(TokenizedPrompt {
            ids: SharedTokenIds::new(chunks),
            cached_tokens: common,
            slot,
            special: SpecialTokenCounts { before: before.len(), after: after.len() },
            leading_chunks: lead,
            closed_chunks: closed,
            cached_chunks: found_now,
        })
    }

    /// Caches a prompt with the caller's data for it.
    pub(crate) fn insert(&self, prompt: &TokenizedPrompt<S>, slot: S) {
        let chunks = prompt.ids.chunks();
        // All edges of the new text, which are few, and some of the older ones, so that these are not evicted first.
        let older = prompt.cached_chunks.saturating_sub(prompt.leading_chunks);
        let edges: Vec<usize> = (prompt.cached_chunks.max(prompt.leading_chunks) + 1..=prompt.closed_chunks)
            .chain(backoff_positions(older).map(|back| prompt.cached_chunks - back))
            .collect();
        if edges.is_empty() {
            return;
        }
        let bytes: usize = chunks.iter().map(|chunk| chunk.text.len() + 4 * chunk.ids.len() + 64).sum();
        let weight = u32::try_from(bytes / edges.len() + ENTRY_OVERHEAD_BYTES).unwrap_or(u32::MAX);
        let cached =
            Arc::new(CachedPrompt { ids: prompt.ids.clone(), leading_chunks: prompt.leading_chunks, slot });
        for edge in edges {
            let key = self.key_of_chunks(&chunks[..edge], prompt.leading_chunks > 0);
            self.cache.insert(key, PromptPrefixEntry { cached: Arc::clone(&cached), chunks: edge, weight });
        }
    }

    /// The last cut in `text` up to which a cached prompt is identical.
    fn find(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        special: bool,
    ) -> Option<(PromptPrefixEntry<S>, usize)> {
        let special = special && !tokenizer.surrounding_special_tokens().0.is_empty();
        let mut end = text.len();
        for _ in 0..MAX_LOOKUPS {
            let at = tokenizer.cuts().last(text, end)?;
            let key = self.key(at, special, &text.as_bytes()[at.saturating_sub(WINDOW)..at]);
            if let Some(entry) = self.cache.get(&key)
                && (entry.cached.leading_chunks > 0) == special
                && starts_with(&text.as_bytes()[..at], &entry.cached.ids.chunks()[..entry.chunks])
            {
                return Some((entry, at));
            }
            end = at.checked_sub(1)?;
        }
        None
    }

    fn key(&self, at: usize, special: bool, window: &[u8]) -> (u32, u64) {
        (self.owner, self.hasher.hash_one((at, special, window)))
    }

    fn key_of_chunks(&self, chunks: &[Arc<TokenChunk>], special: bool) -> (u32, u64) {
        let at = chunks.iter().map(|chunk| chunk.text.len()).sum();
        let mut window = Vec::with_capacity(WINDOW);
        for chunk in chunks.iter().rev() {
            let bytes = chunk.text.as_bytes();
            let wanted = (WINDOW - window.len()).min(bytes.len());
            window.splice(0..0, bytes[bytes.len() - wanted..].iter().copied());
            if window.len() == WINDOW {
                break;
            }
        }
        self.key(at, special, &window)
    }
}

/// Whether `text` is exactly these chunks.
fn starts_with(text: &[u8], chunks: &[Arc<TokenChunk>]) -> bool {
    let mut rest = text;
    for chunk in chunks {
        let Some(after) = rest.strip_prefix(chunk.text.as_bytes()) else { return false };
        rest = after;
    }
    rest.is_empty()
}

fn encoded(tokenizer: &Tokenizer, text: &str) -> Result<TokenChunk, PromptError> {
    Ok(TokenChunk { ids: tokenizer.encode(text)?.into(), text: text.into() })
}

/// Special tokens as a chunk without text.
fn special_chunks(ids: &[u32]) -> Vec<Arc<TokenChunk>> {
    if ids.is_empty() {
        return Vec::new();
    }
    vec![Arc::new(TokenChunk { text: Box::default(), ids: ids.into() })]
}

/// Indices of the cuts to index, counted from the newest of `count`: 0, 1, 2, 3, then 5, 7, 11, 19 and so on.
fn backoff_positions(count: usize) -> impl Iterator<Item = usize> {
    let older = std::iter::successors(Some(2), |distance| Some(distance * 2))
        .map(|distance| INDEXED_NEWEST_CUTS - 1 + distance);
    (0..INDEXED_NEWEST_CUTS).chain(older).take_while(move |back| *back < count)
}

/// Cuts of `text` behind `start` that become edges of chunks, in order.
fn chosen_cuts(tokenizer: &Tokenizer, text: &str, start: usize) -> Vec<usize> {
    let mut cuts = Vec::new();
    let mut end = text.len();
    while cuts.len() < MAX_NEW_CUTS
        && let Some(at) = tokenizer.cuts().last(text, end)
        && at > start
    {
        cuts.push(at);
        end = at - 1;
    }
    let mut chosen: Vec<usize> = backoff_positions(cuts.len()).map(|back| cuts[back]).collect();
    chosen.reverse();
    chosen
}

/// Merges the older half into one chunk. Returns by how many the number of chunks decreased.
fn merge_older(chunks: &mut Vec<Arc<TokenChunk>>, lead: usize) -> usize {
    let half = chunks.len() / 2;
    let older = &chunks[lead..half];
    let text: String = older.iter().map(|chunk| &*chunk.text).collect();
    let ids: Vec<u32> = older.iter().flat_map(|chunk| chunk.ids.iter().copied()).collect();
    let fewer = older.len() - 1;
    chunks.splice(lead..half, [Arc::new(TokenChunk { text: text.into(), ids: ids.into() })]);
    fewer
}
