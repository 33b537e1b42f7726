//! The tokens of one prompt.

use std::sync::Arc;

/// A stretch of a prompt: text and its ids. Shared between the turns of a conversation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) text: Box<str>,
    pub(crate) ids: Box<[u32]>,
}

/// Token ids in stretches that are shared with other prompts: a follow-up turn copies none of the ids before it.
#[derive(Debug, Clone)]
pub struct Ids {
    chunks: Arc<[Arc<Chunk>]>,
    len: usize,
}

impl Ids {
    pub(crate) fn new(chunks: Vec<Arc<Chunk>>) -> Ids {
        let len = chunks.iter().map(|chunk| chunk.ids.len()).sum();
        Ids { chunks: chunks.into(), len }
    }

    pub(crate) fn chunks(&self) -> &[Arc<Chunk>] {
        &self.chunks
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no token.
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

    /// All ids in one piece.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u32> {
        let mut ids = Vec::with_capacity(self.len);
        self.slices().for_each(|slice| ids.extend_from_slice(slice));
        ids
    }
}

/// The tokens of a prompt, and what was kept with the conversation that it continues.
#[derive(Debug, Clone)]
pub struct Prompt<S> {
    pub(crate) ids: Ids,
    pub(crate) common: usize,
    pub(crate) slot: Option<S>,
    /// Chunks at the start that no text belongs to: special tokens put before it.
    pub(crate) lead: usize,
    /// Chunks, counted from the start, that end at a cut.
    pub(crate) closed: usize,
    /// Chunks, counted from the start, that came from the cache.
    pub(crate) found: usize,
}

impl<S> Prompt<S> {
    /// The prompt's token ids.
    #[must_use]
    pub fn ids(&self) -> &Ids {
        &self.ids
    }

    /// How many tokens, counted from the start, are those of the prompt to which [`Prompt::slot`] belongs. 0 if there is none.
    #[must_use]
    pub fn common_with_cache(&self) -> usize {
        self.common
    }

    /// What was kept with the earlier prompt ([`crate::Model::remember`]). It belongs to all of that prompt's tokens, of which
    /// only the first [`Prompt::common_with_cache`] are this one's.
    #[must_use]
    pub fn slot(&self) -> Option<&S> {
        self.slot.as_ref()
    }

    pub(crate) fn of_ids(ids: Vec<u32>) -> Prompt<S> {
        let chunk = Chunk { text: Box::default(), ids: ids.into() };
        Prompt { ids: Ids::new(vec![Arc::new(chunk)]), common: 0, slot: None, lead: 0, closed: 0, found: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_start_anywhere() {
        let chunk = |ids: &[u32]| Arc::new(Chunk { text: Box::default(), ids: ids.into() });
        let ids = Ids::new(vec![chunk(&[1, 2]), chunk(&[]), chunk(&[3, 4, 5])]);
        assert_eq!((ids.len(), ids.is_empty()), (5, false));
        for from in 0..7 {
            let rest: Vec<u32> = ids.slices_from(from).flatten().copied().collect();
            assert_eq!(rest, [1, 2, 3, 4, 5][from.min(5)..]);
        }
        assert_eq!(ids.to_vec(), [1, 2, 3, 4, 5]);
    }
}
