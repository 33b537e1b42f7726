//! The token ids of one prompt, in segments shared between prompts.

use std::sync::Arc;

use crate::error::PromptError;
use crate::truncation::{KeptTokens, PromptTruncation, SpecialTokenCounts};

/// A part of a prompt whose tokens depend on nothing around it.
#[derive(Debug, Clone)]
pub(crate) struct TokenSegment {
    pub(crate) ids: Arc<[u32]>,
    /// Identifies the prompt up to the end of this segment; `None` where the next turn of a conversation may continue differently.
    pub(crate) prefix: Option<u64>,
}

/// Token ids in segments that are shared with other prompts: a later turn copies none of the earlier ids.
#[derive(Debug, Clone, Default)]
pub struct SegmentedTokens {
    segments: Vec<TokenSegment>,
    len: usize,
}

impl SegmentedTokens {
    pub(crate) fn push(&mut self, segment: TokenSegment) {
        self.len += segment.ids.len();
        self.segments.push(segment);
    }

    /// Number of tokens in all segments.
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
        self.segments.iter().filter_map(move |segment| {
            let skipped = skip.min(segment.ids.len());
            skip -= skipped;
            let rest = &segment.ids[skipped..];
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

    /// Beginnings of the prompt that other prompts may share: for each its number of tokens, and a hash of its text with a seed of this
    /// process.
    pub fn prefixes(&self) -> impl Iterator<Item = (usize, u64)> {
        let mut tokens = 0;
        self.segments.iter().map_while(move |segment| {
            tokens += segment.ids.len();
            Some((tokens, segment.prefix?))
        })
    }
}

/// The tokens of a prompt.
#[derive(Debug, Clone)]
pub struct TokenizedPrompt {
    pub(crate) ids: SegmentedTokens,
    pub(crate) special: SpecialTokenCounts,
}

impl TokenizedPrompt {
    /// The prompt's token ids.
    #[must_use]
    pub fn ids(&self) -> &SegmentedTokens {
        &self.ids
    }

    /// The part of the prompt that vLLM computes under a client's limit. `context` is the engine's limit of tokens. A part has no
    /// prefixes.
    ///
    /// # Errors
    /// [`PromptError`] if no tokens remain, or if `context` is required and unknown.
    pub fn truncated(
        self,
        truncation: PromptTruncation,
        context: Option<u32>,
    ) -> Result<TokenizedPrompt, PromptError> {
        let len = self.ids.len();
        let Some(KeptTokens { head, tail }) = truncation.kept(len, self.special, context)? else {
            return Ok(self);
        };
        let start = self.ids.slices().flatten().take(head);
        let end = self.ids.slices_from(len - tail).flatten();
        Ok(Self::of_ids(start.chain(end).copied().collect()))
    }

    pub(crate) fn of_ids(ids: Vec<u32>) -> TokenizedPrompt {
        let mut prompt =
            TokenizedPrompt { ids: SegmentedTokens::default(), special: SpecialTokenCounts::default() };
        prompt.ids.push(TokenSegment { ids: ids.into(), prefix: None });
        prompt
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_start_anywhere() {
        let mut ids = SegmentedTokens::default();
        for (part, prefix) in [(&[1, 2][..], Some(7)), (&[], Some(8)), (&[3, 4, 5], None)] {
            ids.push(TokenSegment { ids: part.into(), prefix });
        }
        assert_eq!((ids.len(), ids.is_empty()), (5, false));
        for from in 0..7 {
            let rest: Vec<u32> = ids.slices_from(from).flatten().copied().collect();
            assert_eq!(rest, [1, 2, 3, 4, 5][from.min(5)..]);
        }
        assert_eq!(ids.to_vec(), [1, 2, 3, 4, 5]);
        assert_eq!(ids.prefixes().collect::<Vec<_>>(), [(2, 7), (2, 8)]);
    }
}
