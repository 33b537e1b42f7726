//! The token ids of one prompt, in chunks shared between prompts.

use std::sync::Arc;

use crate::error::PromptError;
use crate::truncation::{KeptTokens, PromptTruncation, SpecialTokenCounts};

/// A chunk of a prompt: text and its ids. Shared between the turns of a conversation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TokenChunk {
    pub(crate) text: Box<str>,
    pub(crate) ids: Box<[u32]>,
}

/// Token ids in chunks that are shared with other prompts: a later turn copies none of the earlier ids.
#[derive(Debug, Clone)]
pub struct SharedTokenIds {
    chunks: Arc<[Arc<TokenChunk>]>,
    len: usize,
}

impl SharedTokenIds {
    pub(crate) fn new(chunks: Vec<Arc<TokenChunk>>) -> SharedTokenIds {
        let len = chunks.iter().map(|chunk| chunk.ids.len()).sum();
        SharedTokenIds { chunks: chunks.into(), len }
    }

    pub(crate) fn chunks(&self) -> &[Arc<TokenChunk>] {
        &self.chunks
    }

    /// Number of tokens in all chunks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the prompt has no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The ids in order, as slices.
    pub fn slices(&self) -> impl Iterator<Item = &[u32]> {
        self.slices_from(0)
    }

    /// The ids from position `from` on, as slices.
    pub fn slices_from(&self, from: usize) -> impl Iterator<Item = &[u32]> {
        let mut skip = from;
        self.chunks.iter().filter_map(move |chunk| {
            let skipped = skip.min(chunk.ids.len());
            skip -= skipped;
            let rest = &chunk.ids[skipped..];
            (!rest.is_empty()).then_some(rest)
        })
    }

    /// All ids as one vector.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u32> {
        let mut ids = Vec::with_capacity(self.len);
        self.slices().for_each(|slice| ids.extend_from_slice(slice));
        ids
    }
}

/// The tokens of a prompt, and the caller's data of the cached conversation that it continues.
#[derive(Debug, Clone)]
pub struct TokenizedPrompt<S> {
    pub(crate) ids: SharedTokenIds,
    pub(crate) cached_tokens: usize,
    pub(crate) slot: Option<S>,
    pub(crate) special: SpecialTokenCounts,
    /// Number of chunks without text at the start: special tokens before the text.
    pub(crate) leading_chunks: usize,
    /// Number of chunks, counted from the start, that end at a cut.
    pub(crate) closed_chunks: usize,
    /// Number of chunks, counted from the start, that came from the cache.
    pub(crate) cached_chunks: usize,
}

impl<S> TokenizedPrompt<S> {
    /// The prompt's token ids.
    #[must_use]
    pub fn ids(&self) -> &SharedTokenIds {
        &self.ids
    }

    /// Number of leading tokens shared with the cached prompt to which [`TokenizedPrompt::slot`] belongs. 0 if there is none.
    #[must_use]
    pub fn cached_prefix_tokens(&self) -> usize {
        self.cached_tokens
    }

    /// The caller's data of the cached prompt ([`crate::PromptTokenizer::cache_conversation`]). It covers all of that prompt's tokens, of
    /// which only the first [`TokenizedPrompt::cached_prefix_tokens`] are shared with this one.
    #[must_use]
    pub fn slot(&self) -> Option<&S> {
        self.slot.as_ref()
    }

    /// The part of the prompt that vLLM computes under a client's limit. `context` is the engine's limit of tokens. A part has no cached
    /// conversation.
    ///
    /// # Errors
    /// [`PromptError`] if no tokens remain, or if `context` is required and unknown.
    pub fn truncated(
        self,
        truncation: PromptTruncation,
        context: Option<u32>,
    ) -> Result<TokenizedPrompt<S>, PromptError> {
        let len = self.ids.len();
        let Some(KeptTokens { head, tail }) = truncation.kept(len, self.special, context)? else {
            return Ok(self);
        };
        let start = self.ids.slices().flatten().take(head);
        let end = self.ids.slices_from(len - tail).flatten();
        Ok(Self::of_ids(start.chain(end).copied().collect()))
    }

    pub(crate) fn of_ids(ids: Vec<u32>) -> TokenizedPrompt<S> {
        let chunk = TokenChunk { text: Box::default(), ids: ids.into() };
        TokenizedPrompt {
            ids: SharedTokenIds::new(vec![Arc::new(chunk)]),
            cached_tokens: 0,
            slot: None,
            special: SpecialTokenCounts::default(),
            leading_chunks: 0,
            closed_chunks: 0,
            cached_chunks: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_start_anywhere() {
        let chunk = |ids: &[u32]| Arc::new(TokenChunk { text: Box::default(), ids: ids.into() });
        let ids = SharedTokenIds::new(vec![chunk(&[1, 2]), chunk(&[]), chunk(&[3, 4, 5])]);
        assert_eq!((ids.len(), ids.is_empty()), (5, false));
        for from in 0..7 {
            let rest: Vec<u32> = ids.slices_from(from).flatten().copied().collect();
            assert_eq!(rest, [1, 2, 3, 4, 5][from.min(5)..]);
        }
        assert_eq!(ids.to_vec(), [1, 2, 3, 4, 5]);
    }
}
