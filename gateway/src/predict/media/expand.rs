//! From the tokens of a rendered chat to those that the engine computes.

use std::sync::Arc;

use moongate_block_hash::VllmMediaItem;
use moongate_tokenize::MediaModality;

use super::MediumTokens;

/// One medium of a prompt.
#[derive(Debug, Clone)]
pub(super) struct PromptMedium {
    pub(super) modality: MediaModality,
    /// `None` if they are unknown.
    pub(super) tokens: Option<Arc<MediumTokens>>,
}

/// The tokens of a prompt up to the first medium whose tokens are unknown.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ExpandedPrompt {
    pub(super) ids: Vec<u32>,
    pub(super) media: Vec<VllmMediaItem>,
    /// Whether all tokens are known.
    pub(super) is_complete: bool,
}

/// Replaces the placeholders in `rendered` by the tokens of the media. `None` if the first medium is unknown, or if it is uncertain which
/// tokens are placeholders: a client's text may contain their names.
pub(super) fn expand(rendered: &[u32], media: &[PromptMedium]) -> Option<ExpandedPrompt> {
    let placeholders = placeholders(media);
    let mut distinct: Vec<&[u32]> = placeholders.iter().flatten().copied().collect();
    distinct.sort_unstable();
    distinct.dedup();
    for placeholder in distinct {
        let expected = placeholders.iter().filter(|other| **other == Some(placeholder)).count();
        if occurrences(rendered, placeholder) != expected {
            return None;
        }
    }
    let mut expanded = ExpandedPrompt { ids: Vec::new(), media: Vec::new(), is_complete: true };
    let mut rest = rendered;
    for (medium, placeholder) in media.iter().zip(placeholders) {
        let Some(placeholder) = placeholder else {
            expanded.is_complete = false;
            break;
        };
        let at = position(rest, placeholder)?;
        expanded.ids.extend_from_slice(&rest[..at]);
        rest = &rest[at + placeholder.len()..];
        let Some(known) = &medium.tokens else {
            expanded.is_complete = false;
            break;
        };
        expanded.media.push(VllmMediaItem {
            identifier: known.identifier.clone(),
            offset: u32::try_from(expanded.ids.len()).ok()?,
            length: u32::try_from(known.tokens.len()).ok()?,
        });
        expanded.ids.extend_from_slice(&known.tokens);
    }
    if expanded.media.is_empty() {
        return None;
    }
    if expanded.is_complete {
        expanded.ids.extend_from_slice(rest);
    }
    Some(expanded)
}

/// The placeholder of each medium: its own, or that of another one of its modality.
fn placeholders(media: &[PromptMedium]) -> Vec<Option<&[u32]>> {
    let first_of = |modality| {
        let mut same = media.iter().filter(|medium| medium.modality == modality);
        same.find_map(|medium| medium.tokens.as_ref())
    };
    let [image, audio, video] =
        [MediaModality::Image, MediaModality::Audio, MediaModality::Video].map(first_of);
    let of = |medium: &PromptMedium| match medium.modality {
        MediaModality::Image => image,
        MediaModality::Audio => audio,
        MediaModality::Video => video,
    };
    let tokens = media.iter().map(|medium| (medium, of(medium)));
    tokens.map(|(medium, same)| medium.tokens.as_ref().or(same).map(|medium| &*medium.placeholder)).collect()
}

fn position(ids: &[u32], pattern: &[u32]) -> Option<usize> {
    ids.windows(pattern.len().max(1)).position(|window| window == pattern)
}

fn occurrences(ids: &[u32], pattern: &[u32]) -> usize {
    ids.windows(pattern.len().max(1)).filter(|window| *window == pattern).count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const IMAGE: u32 = 900;
    const VIDEO: u32 = 901;

    fn known(placeholder: u32, count: usize) -> PromptMedium {
        let modality = if placeholder == IMAGE { MediaModality::Image } else { MediaModality::Video };
        let medium = MediumTokens {
            placeholder: [placeholder].into(),
            tokens: vec![placeholder; count].into(),
            identifier: format!("{placeholder}/{count}").into(),
        };
        PromptMedium { modality, tokens: Some(Arc::new(medium)) }
    }

    fn unknown(modality: MediaModality) -> PromptMedium {
        PromptMedium { modality, tokens: None }
    }

    /// Tokens, ranges of media, and whether that is all.
    type Expanded = (Vec<u32>, Vec<(u32, u32)>, bool);

    fn ids(expanded: Option<ExpandedPrompt>) -> Option<Expanded> {
        let ExpandedPrompt { ids, media, is_complete } = expanded?;
        Some((ids, media.iter().map(|item| (item.offset, item.length)).collect(), is_complete))
    }

    #[test]
    fn placeholders_are_replaced_in_order() {
        let rendered = [1, IMAGE, 2, VIDEO, IMAGE, 3];
        let media = [known(IMAGE, 2), known(VIDEO, 1), known(IMAGE, 3)];
        let expected = vec![1, IMAGE, IMAGE, 2, VIDEO, IMAGE, IMAGE, IMAGE, 3];
        assert_eq!(ids(expand(&rendered, &media)), Some((expected, vec![(1, 2), (4, 1), (5, 3)], true)));
    }

    #[test]
    fn the_tokens_end_before_an_unknown_medium() {
        let rendered = [1, IMAGE, 2, IMAGE, 3];
        let image = unknown(MediaModality::Image);
        let found = ids(expand(&rendered, &[known(IMAGE, 2), image.clone()]));
        assert_eq!(found, Some((vec![1, IMAGE, IMAGE, 2], vec![(1, 2)], false)));
        assert_eq!(ids(expand(&rendered, &[image, known(IMAGE, 2)])), None);
        // How many of the tokens between them belong to the video is unknown.
        let video = unknown(MediaModality::Video);
        let found = ids(expand(&[1, IMAGE, 2, VIDEO, 3], &[known(IMAGE, 2), video]));
        assert_eq!(found, Some((vec![1, IMAGE, IMAGE], vec![(1, 2)], false)));
    }

    #[test]
    fn placeholders_in_the_clients_text_are_not_confused() {
        assert_eq!(expand(&[1, IMAGE, 2, IMAGE, 3], &[known(IMAGE, 2)]), None);
        assert_eq!(expand(&[1, 2, 3], &[known(IMAGE, 2)]), None);
        // The template moved the video before the image.
        assert_eq!(expand(&[VIDEO, 1, IMAGE], &[known(IMAGE, 2), known(VIDEO, 2)]), None);
    }

    proptest! {
        #[test]
        fn no_prompt_panics(
            rendered in prop::collection::vec(897..903_u32, 0..12),
            media in prop::collection::vec((any::<bool>(), 0..4_usize), 0..5),
        ) {
            let media: Vec<_> = media
                .iter()
                .map(|&(is_image, count)| match (is_image, count) {
                    (_, 0) => unknown(MediaModality::Image),
                    (true, count) => known(IMAGE, count),
                    (false, count) => known(VIDEO, count),
                })
                .collect();
            if let Some(expanded) = expand(&rendered, &media) {
                let end = expanded.media.last().map_or(0, |item| item.offset + item.length);
                prop_assert!(end as usize <= expanded.ids.len());
            }
        }
    }
}
