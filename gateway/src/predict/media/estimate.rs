//! Estimated tokens of images, audio and video, which only engines can count exactly.

use moongate_tokenize::ImageTokenRule;

use crate::request_body::{MediaKind, MediaPart, MediaParts};

/// Tokens per second of a recording: those of Qwen2-Audio and Qwen2.5-Omni.
const AUDIO_TOKENS_PER_SECOND: u64 = 25;
/// Assumed duration of a recording at an address.
const DEFAULT_AUDIO_SECONDS: u64 = 30;
/// Tokens of a video: 32 frames, vLLM's default, of 640 × 360 pixels in Qwen2.5-VL, which merges two frames.
const VIDEO_TOKENS: u64 = 5_000;

/// Tokens of all parts in a model with this rule for images.
pub(in crate::predict) fn estimate(parts: &MediaParts, images: ImageTokenRule) -> u64 {
    let listed: u64 = parts.listed().iter().map(|part| estimate_part(part, images)).sum();
    listed + u64::from(parts.unlisted()) * u64::from(images.tokens(None))
}

pub(super) fn estimate_part(part: &MediaPart, images: ImageTokenRule) -> u64 {
    match part.kind {
        MediaKind::Image => images.tokens(part.size.map(|size| (size.width, size.height))).into(),
        MediaKind::Audio => part.seconds.map_or(DEFAULT_AUDIO_SECONDS, u64::from) * AUDIO_TOKENS_PER_SECOND,
        MediaKind::Video => VIDEO_TOKENS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request_body::{InferenceApi, RoutingFields};

    #[test]
    fn every_kind_of_part_has_an_estimate() {
        let tokens = |content: &str, images| {
            let body = format!(r#"{{"messages":[{{"content":{content}}}]}}"#);
            let fields = RoutingFields::read(InferenceApi::Chat, body.as_bytes()).unwrap();
            fields.media.map_or(0, |media| estimate(&media, images))
        };
        let qwen = ImageTokenRule::Squares { side: 28, min_pixels: 3136, max_pixels: 1_003_520 };
        let png =
            r#"[{"image_url":{"url":"data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACgAAAAeCAIAAADRv8uK"}}]"#;
        assert_eq!(tokens(png, qwen), 6);
        assert_eq!(tokens(png, ImageTokenRule::Fixed(256)), 256);
        let others = r#"[{"video_url":{"url":"https://a"}},{"audio_url":{"url":"https://a"}},{"image_url":"https://a"}]"#;
        assert_eq!(tokens(others, ImageTokenRule::Unknown), 5_000 + 750 + 1_000);
        assert_eq!(tokens(r#""text""#, qwen), 0);
    }
}
