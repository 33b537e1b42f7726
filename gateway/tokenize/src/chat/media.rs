//! Images, recordings and videos of a chat. Only engines can convert these to tokens; the text before the first of them has the same
//! tokens, and the same blocks, as in a chat without media.

use std::io::Write;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::messages::{items, member, pairs};
use crate::body::ChatBody;
use crate::error::PromptError;

/// Text in place of media, by what engines call it in a template's input.
const PLACEHOLDERS: [(&str, &str); 3] = [
    ("image", "\u{f8ff}an image\u{f8ff}"),
    ("audio", "\u{f8ff}a recording\u{f8ff}"),
    ("video", "\u{f8ff}a video\u{f8ff}"),
];

/// What a media part contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MediaModality {
    /// A picture.
    Image,
    /// A recording.
    Audio,
    /// A video.
    Video,
}

/// A part of a message that is an image, a recording or a video.
#[derive(Debug, Clone)]
pub struct MediaReference {
    modality: MediaModality,
    part: Value,
    uuid: Option<String>,
}

impl MediaReference {
    /// What it contains.
    #[must_use]
    pub fn modality(&self) -> MediaModality {
        self.modality
    }

    /// The client's name for the content (vLLM).
    #[must_use]
    pub fn uuid(&self) -> Option<&str> {
        self.uuid.as_deref()
    }

    /// Whether the part contains the data, which a name or an address does not.
    #[must_use]
    pub fn is_inline(&self) -> bool {
        self.uuid.is_none() && !has_address(&self.part)
    }

    /// Writes the part as JSON.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_json(&self, out: &mut impl Write) -> std::io::Result<()> {
        serde_json::to_writer(out, &self.part).map_err(std::io::Error::from)
    }
}

/// The media of messages, in order; an error if a part has members or values whose effect on the prompt is not known.
pub(crate) fn media(messages: &[Value]) -> Result<Vec<MediaReference>, PromptError> {
    let mut found = Vec::new();
    for content in messages.iter().filter_map(|message| member(message, "content")) {
        if content.kind() != ValueKind::Seq {
            continue;
        }
        for part in items(&content, "content")? {
            let Some(kind) = medium_of(&part) else { continue };
            found.push(reference(kind, part)?);
        }
    }
    Ok(found)
}

fn reference(kind: &str, part: Value) -> Result<MediaReference, PromptError> {
    // Templates get further members.
    const MEMBERS: [&str; 7] =
        ["type", "image_url", "input_audio", "audio_url", "video_url", "uuid", "detail"];
    let unknown = || PromptError::Multimodal(kind.to_owned());
    let (modality, data) = match kind {
        "image" => (MediaModality::Image, &["image_url"][..]),
        "audio" => (MediaModality::Audio, &["input_audio", "audio_url"][..]),
        _ => (MediaModality::Video, &["video_url"][..]),
    };
    let members = pairs(&part, "content")?;
    let uuid = match member(&part, "uuid") {
        None => None,
        // An engine takes an empty name for one.
        Some(uuid) => Some(uuid.as_str().filter(|uuid| !uuid.is_empty()).ok_or_else(unknown)?.to_owned()),
    };
    let has_data = data.iter().any(|name| member(&part, name).is_some());
    let is_known = members.iter().all(|(name, _)| MEMBERS.contains(&name.as_str()));
    // Engines skip a part without data and name.
    if !is_known || !(has_data || uuid.is_some()) {
        return Err(unknown());
    }
    Ok(MediaReference { modality, part, uuid })
}

/// Whether a member is the address of something whose content may change.
fn has_address(value: &Value) -> bool {
    if let Some(text) = value.as_str() {
        return text.contains("://") && !text.starts_with("data:");
    }
    match value.kind() {
        ValueKind::Map => {
            pairs(value, "content").is_ok_and(|pairs| pairs.iter().any(|(_, value)| has_address(value)))
        }
        _ => false,
    }
}

/// Expected size of the text of a body, most of which are media.
const TEXT_BYTES: usize = 64 << 10;

/// The body with placeholders instead of media.
pub(crate) fn with_placeholders(body: &ChatBody) -> Result<ChatBody, PromptError> {
    let messages = body.messages.iter().map(|message| {
        let content = member(message, "content").filter(|content| content.kind() == ValueKind::Seq);
        let Some(content) = content else { return Ok(message.clone()) };
        let parts: Vec<Value> = items(&content, "content")?.into_iter().map(placeholder_of).collect();
        with_content(message, parts.into())
    });
    let messages = messages.collect::<Result<_, _>>()?;
    Ok(ChatBody { messages, bytes: body.bytes.min(TEXT_BYTES), ..body.clone() })
}

/// The template's input with media instead of placeholders.
pub(crate) fn with_media(messages: &[Value]) -> Result<Vec<Value>, PromptError> {
    let messages = messages.iter().map(|message| {
        let content = member(message, "content").filter(|content| content.kind() == ValueKind::Seq);
        let Some(content) = content else { return Ok(message.clone()) };
        let parts: Vec<Value> = items(&content, "content")?.into_iter().map(media_of).collect();
        with_content(message, parts.into())
    });
    messages.collect()
}

/// The text that two prompts begin with, if it ends before any placeholder.
pub(crate) fn common_text<'a>(with_media: &'a str, with_placeholders: &str) -> Option<&'a str> {
    let differs = |(one, other): &(u8, u8)| one != other;
    let mut end = with_media
        .bytes()
        .zip(with_placeholders.bytes())
        .position(|pair| differs(&pair))
        .unwrap_or_else(|| with_media.len().min(with_placeholders.len()));
    while !with_media.is_char_boundary(end) {
        end -= 1;
    }
    let text = with_media.get(..end)?;
    let is_after_media = PLACEHOLDERS.iter().any(|(_, placeholder)| text.contains(placeholder));
    (!is_after_media).then_some(text)
}

/// What engines call the medium in a template's input; `None` for other parts.
fn medium_of(part: &Value) -> Option<&'static str> {
    match member(part, "type").as_ref().and_then(Value::as_str) {
        Some("image_url" | "input_image") => Some("image"),
        Some("audio_url" | "input_audio") => Some("audio"),
        Some("video_url") => Some("video"),
        _ => None,
    }
}

fn placeholder_of(part: Value) -> Value {
    let Some(kind) = medium_of(&part) else { return part };
    match PLACEHOLDERS.iter().find(|(name, _)| *name == kind) {
        Some((_, placeholder)) => Value::from_pairs([("type", "text"), ("text", *placeholder)]),
        None => part,
    }
}

fn media_of(part: Value) -> Value {
    let text = member(&part, "text");
    let text = text.as_ref().and_then(Value::as_str);
    match PLACEHOLDERS.iter().find(|(_, placeholder)| text == Some(placeholder)) {
        Some((kind, _)) => Value::from_pairs([("type", *kind)]),
        None => part,
    }
}

fn with_content(message: &Value, content: Value) -> Result<Value, PromptError> {
    let mut members = pairs(message, "messages")?;
    for (name, old) in &mut members {
        if name == "content" {
            *old = content.clone();
        }
    }
    Ok(Value::from_pairs(members))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references(content: &serde_json::Value) -> Result<Vec<MediaReference>, PromptError> {
        let message = serde_json::json!({ "role": "user", "content": content });
        media(&[serde_json::from_value(message).unwrap()])
    }

    #[test]
    fn media_are_found_in_order() {
        let found = references(&serde_json::json!([
            { "type": "text", "text": "a://b" },
            { "type": "image_url", "image_url": { "url": "data:image/png;base64,AA//", "detail": "low" } },
            { "type": "video_url", "video_url": { "url": "https://host/v" } },
            { "type": "input_audio", "input_audio": { "data": "AAAA", "format": "wav" } },
            { "type": "image_url", "image_url": null, "uuid": "u" },
        ]))
        .unwrap();
        let kinds: Vec<_> =
            found.iter().map(|found| (found.modality(), found.is_inline(), found.uuid())).collect();
        assert_eq!(
            kinds,
            [
                (MediaModality::Image, true, None),
                (MediaModality::Video, false, None),
                (MediaModality::Audio, true, None),
                (MediaModality::Image, false, Some("u")),
            ]
        );
        let mut json = Vec::new();
        found[1].write_json(&mut json).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(
            json,
            serde_json::json!({ "type": "video_url", "video_url": { "url": "https://host/v" } })
        );
    }

    #[test]
    fn media_with_unknown_effects_are_rejected() {
        for part in [
            serde_json::json!({ "type": "image_url", "image_url": null }),
            serde_json::json!({ "type": "image_url", "image_url": "x", "uuid": 3 }),
            serde_json::json!({ "type": "image_url", "image_url": "x", "min_pixels": 3 }),
        ] {
            assert!(
                matches!(references(&serde_json::json!([part])), Err(PromptError::Multimodal(_))),
                "{part}"
            );
        }
    }

    #[test]
    fn the_common_text_ends_before_media() {
        let [(_, image), ..] = PLACEHOLDERS;
        assert_eq!(common_text("a\u{e9}<image>b", &format!("a\u{e9}{image}b")), Some("a\u{e9}"));
        assert_eq!(common_text("a\u{f8fe}", &format!("a{image}")), Some("a"), "part of a character");
        assert_eq!(common_text(&format!("a{image}b"), &format!("a{image}b")), None, "not replaced");
        assert_eq!(common_text("abc", "ab"), Some("ab"));
    }
}
