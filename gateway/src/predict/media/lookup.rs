//! What is known of the images, recordings and videos of one request.

use std::sync::Arc;

use moongate_tokenize::{ChatBody, ImageTokenRule, MediaModality, MediaReference};

use super::cache::MediaTokenCache;
use super::estimate::{estimate, estimate_part};
use super::expand::PromptMedium;
use super::query::{MediaOptions, MediaQuery};
use crate::request_body::{MediaKind, MediaParts};

/// Maximum number of queries that one request starts. The next request with its media continues.
const MAX_QUERIES: usize = 16;

/// Finds the tokens of a request's media. Those that are unknown are queried in the background.
#[derive(Debug, Clone)]
pub(in crate::predict) struct MediaLookup {
    pub(in crate::predict) cache: Arc<MediaTokenCache>,
    pub(in crate::predict) model: Arc<str>,
    /// Whether an engine returns the tokens of media.
    pub(in crate::predict) may_query: bool,
    /// For estimates.
    pub(in crate::predict) rule: ImageTokenRule,
    pub(in crate::predict) parts: MediaParts,
}

impl MediaLookup {
    /// The media of a chat, in order; `None` if they are not all understood.
    pub(super) fn find(&self, chat: &ChatBody, body: &[u8]) -> Option<Vec<PromptMedium>> {
        let options = MediaOptions::read(body)?;
        let references = chat.media().ok()?;
        let mut missing = 0;
        let find = |reference: &MediaReference| {
            let key = self.cache.key(&self.model, &options, reference);
            let tokens = self.cache.get(key);
            missing += usize::from(tokens.is_none());
            if tokens.is_none() && self.may_query && missing <= MAX_QUERIES {
                self.cache.query_once(key, || MediaQuery::new(key, &self.model, &options, reference));
            }
            PromptMedium { modality: reference.modality(), tokens }
        };
        Some(references.iter().map(find).collect())
    }

    /// Number of media in the request.
    pub(super) fn part_count(&self) -> u32 {
        u32::try_from(self.parts.listed().len()).unwrap_or(u32::MAX).saturating_add(self.parts.unlisted())
    }

    /// Estimated number of tokens that the media add to a rendered chat, less those of their placeholders.
    pub(super) fn added_tokens(&self, media: &[PromptMedium]) -> u64 {
        let parts = self.parts.listed();
        let has_same_kinds = parts.len() == media.len()
            && self.parts.unlisted() == 0
            && parts.iter().zip(media).all(|(part, medium)| modality(part.kind) == medium.modality);
        if !has_same_kinds {
            return estimate(&self.parts, self.rule);
        }
        let added = parts.iter().zip(media).map(|(part, medium)| match &medium.tokens {
            Some(medium) => medium.tokens.len().saturating_sub(medium.placeholder.len()) as u64,
            // Most placeholders are one token.
            None => estimate_part(part, self.rule).saturating_sub(1),
        });
        added.sum()
    }
}

fn modality(kind: MediaKind) -> MediaModality {
    match kind {
        MediaKind::Image => MediaModality::Image,
        MediaKind::Audio => MediaModality::Audio,
        MediaKind::Video => MediaModality::Video,
    }
}
