//! A chat with images, recordings or videos as tokens.

use moongate_block_hash::{HashScheme, VllmMediaItem};
use moongate_discovery::EngineKind;
use moongate_tokenize::{ChatBody, PromptError, PromptTokenizer, TemplateTime};

use super::expand::{ExpandedPrompt, expand};
use super::lookup::MediaLookup;
use crate::predict::prompt_tokens::HashedTokens;

/// The tokens of a chat up to the first medium whose tokens are unknown.
pub(in crate::predict) struct MediaPrompt {
    ids: Vec<u32>,
    media: Vec<VllmMediaItem>,
    /// Length of the complete prompt, if that is an estimate.
    estimated_len: Option<usize>,
    counts: MediaCounts,
}

/// Media of a prompt, by what is known of their tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct MediaCounts {
    pub(crate) exact: u32,
    pub(crate) estimated: u32,
}

impl MediaPrompt {
    /// The tokens for an engine of this kind.
    pub(in crate::predict) fn of_chat(
        chat: &ChatBody,
        body: &[u8],
        model: &PromptTokenizer,
        engine: EngineKind,
        lookup: &MediaLookup,
        now: TemplateTime,
    ) -> Result<Self, PromptError> {
        let text = model.render_media_chat(chat, now)?;
        let rendered = model.tokenize_media_chat(&text)?;
        // SGLang's hashes of media are not reported.
        let media = if engine == EngineKind::Vllm { lookup.find(chat, body) } else { None };
        let media = media.unwrap_or_default();
        let estimated = lookup.added_tokens(&media).saturating_add(rendered.ids().len() as u64);
        let estimated = usize::try_from(estimated).unwrap_or(usize::MAX);
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let all = lookup.part_count().max(count(media.len()));
        if let Some(ExpandedPrompt { ids, media, is_complete }) = expand(&rendered.ids().to_vec(), &media) {
            let counts =
                MediaCounts { exact: count(media.len()), estimated: all.saturating_sub(count(media.len())) };
            let estimated_len = (!is_complete).then(|| estimated.max(ids.len() + 1));
            return Ok(Self { ids, media, estimated_len, counts });
        }
        let before = model.tokenize_before_media(&text)?;
        let ids = before.ids().to_vec();
        let estimated_len = Some(estimated.max(ids.len() + 1));
        let counts = MediaCounts { exact: 0, estimated: all };
        Ok(Self { ids, media: Vec::new(), estimated_len, counts })
    }

    pub(in crate::predict) fn ids(&self) -> &[u32] {
        &self.ids
    }

    pub(in crate::predict) fn is_incomplete(&self) -> bool {
        self.estimated_len.is_some()
    }

    /// Length of the complete prompt.
    pub(in crate::predict) fn expected_len(&self) -> usize {
        self.estimated_len.unwrap_or(self.ids.len())
    }

    pub(in crate::predict) fn counts(&self) -> MediaCounts {
        self.counts
    }

    /// The full blocks.
    pub(in crate::predict) fn blocks(&self, scheme: HashScheme) -> HashedTokens {
        if self.media.is_empty() {
            return HashedTokens::of(&self.ids, scheme);
        }
        match scheme.clone().with_media(self.media.clone()) {
            Ok(scheme) => HashedTokens::of(&self.ids, scheme),
            // Only the blocks before the first image are certain.
            Err(_) => {
                let first = self.media.first().map_or(self.ids.len(), |item| item.offset as usize);
                HashedTokens::of(&self.ids[..first.min(self.ids.len())], scheme)
            }
        }
    }
}
