//! Images, audio and video in a prompt. Their data is not text of the prompt: engines convert it to a number of tokens that
//! depends on pixels or seconds.

use super::image_size::{PixelSize, base64_bytes};

/// Maximum number of parts whose size is stored. Engines accept a few.
const MAX_LISTED: usize = 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MediaKind {
    Image,
    Audio,
    Video,
}

/// One image, recording or video.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MediaPart {
    pub(crate) kind: MediaKind,
    /// Size of an image in the request; `None` for an address.
    pub(crate) size: Option<PixelSize>,
    /// Seconds of a recording in the request.
    pub(crate) seconds: Option<u32>,
}

/// The parts of a chat.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MediaParts {
    listed: Vec<MediaPart>,
    unlisted: u32,
}

impl MediaKind {
    /// The kind of a content part's member that has media as its value.
    pub(super) fn of_key(key: &str) -> Option<Self> {
        match key {
            // Anthropic's images are in `source`.
            "image_url" | "image" | "source" => Some(Self::Image),
            "input_audio" | "audio_url" => Some(Self::Audio),
            "video_url" | "video" => Some(Self::Video),
            _ => None,
        }
    }
}

/// Whether a member has the arguments of a tool, in Anthropic's `tool_use`.
pub(super) fn is_tool_input(key: &str) -> bool {
    key == "input"
}

impl MediaParts {
    pub(crate) fn listed(&self) -> &[MediaPart] {
        &self.listed
    }

    /// Number of further parts.
    pub(crate) fn unlisted(&self) -> u32 {
        self.unlisted
    }

    /// Adds a part; the strings in its value follow.
    pub(super) fn begin(&mut self, kind: MediaKind) {
        if self.listed.len() < MAX_LISTED {
            self.listed.push(MediaPart { kind, size: None, seconds: None });
        } else {
            self.unlisted = self.unlisted.saturating_add(1);
        }
    }

    /// Removes the part that was added last: its value is null.
    pub(super) fn cancel(&mut self) {
        match self.unlisted.checked_sub(1) {
            Some(unlisted) => self.unlisted = unlisted,
            None => drop(self.listed.pop()),
        }
    }

    /// A string in the value of the part that was added last.
    pub(super) fn add_text(&mut self, text: &str) {
        let Some(part) = self.listed.last_mut().filter(|_| self.unlisted == 0) else { return };
        match part.kind {
            MediaKind::Image => part.size = part.size.or_else(|| PixelSize::of_data(text)),
            MediaKind::Audio => part.seconds = part.seconds.or_else(|| seconds(text)),
            MediaKind::Video => {}
        }
    }
}

/// Duration of a recording: exact for WAV, and otherwise that of 128 kbit/s. `None` for an address or a word.
fn seconds(text: &str) -> Option<u32> {
    const BYTES_PER_SECOND: u64 = 16_000;
    /// Shortest data; shorter strings name a format.
    const MIN_BASE64: usize = 64;
    let data = match text.split_once(";base64,") {
        Some((media_type, data)) if media_type.len() < 128 => data,
        _ if text.contains("://") => return None,
        _ => text,
    };
    if data.len() < MIN_BASE64 {
        return None;
    }
    let rate = wav_bytes_per_second(data).unwrap_or(BYTES_PER_SECOND);
    let bytes = data.len() as u64 / 4 * 3;
    Some(u32::try_from(bytes.div_ceil(rate)).unwrap_or(u32::MAX))
}

fn wav_bytes_per_second(data: &str) -> Option<u64> {
    let is_wav = base64_bytes(data, 0)? == *b"RIFF" && base64_bytes(data, 8)? == *b"WAVE";
    let rate = u32::from_le_bytes(base64_bytes(data, 28)?);
    (is_wav && rate > 0).then_some(rate.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request_body::{InferenceApi, RoutingFields};

    const PNG: &str = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACgAAAAeCAIAAADRv8uK";

    fn read(content: &str) -> (u64, Vec<MediaPart>) {
        let body = format!(r#"{{"messages":[{{"role":"user","content":{content}}}]}}"#);
        let fields = RoutingFields::read(InferenceApi::Chat, body.as_bytes()).unwrap();
        (fields.prompt_bytes, fields.media.unwrap().listed().to_vec())
    }

    fn image(size: Option<(u32, u32)>) -> MediaPart {
        let size = size.map(|(width, height)| PixelSize { width, height });
        MediaPart { kind: MediaKind::Image, size, seconds: None }
    }

    #[test]
    fn data_is_not_text_of_the_prompt() {
        let data = format!("{PNG}{}", "A".repeat(400_000));
        let content = format!(
            r#"[{{"type":"text","text":"What?"}},{{"type":"image_url","image_url":{{"url":"{data}","detail":"low"}}}}]"#
        );
        // user, text, What?, image_url
        assert_eq!(read(&content), (22, vec![image(Some((40, 30)))]));
        let escaped = content.replace("image/png", "image\\/png");
        assert_eq!(read(&escaped).1, [image(Some((40, 30)))]);
    }

    #[test]
    fn every_form_of_a_part_counts_once() {
        let remote = r#"[{"type":"image_url","image_url":"https://host/a.png"},{"type":"text","text":"","image_url":null}]"#;
        assert_eq!(read(remote).1, [image(None)]);
        let nested = r#"[{"video_url":{"url":"https://host/v","image_url":{"video":"x"}}},{"image":{}}]"#;
        let kinds: Vec<MediaKind> = read(nested).1.iter().map(|part| part.kind).collect();
        assert_eq!(kinds, [MediaKind::Video, MediaKind::Image]);
        let many = format!("[{}]", vec![r#"{"image":1}"#; MAX_LISTED + 2].join(","));
        let body =
            format!(r#"{{"messages":[{{"content":{many}}}],"image_url":"x","tools":[{{"image":1}}]}}"#);
        let media = RoutingFields::read(InferenceApi::Chat, body.as_bytes()).unwrap().media.unwrap();
        assert_eq!((media.listed().len(), media.unlisted()), (MAX_LISTED, 2));
    }

    #[test]
    fn recordings_have_a_duration() {
        let seconds = |data: &str, key: &str| {
            read(&format!(r#"[{{"{key}":{{"format":"wav","data":"{data}"}}}}]"#)).1[0].seconds
        };
        // A header of WAV with 32,000 bytes per second.
        let wav =
            format!("UklGRiQAAABXQVZFZm10IBAAAAABAAEAgD4AAAB9AAACABAAZGF0YQAAAAA{}", "A".repeat(256_000));
        assert_eq!(seconds(&wav, "input_audio"), Some(7));
        assert_eq!(seconds(&format!("data:audio/mp3;base64,{}", "A".repeat(128_000)), "audio_url"), Some(6));
        assert_eq!(
            seconds("https://host/a.mp3?aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "audio_url"),
            None
        );
    }
}
