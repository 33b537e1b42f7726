//! The part of a chat before its first image, recording or video. Only engines can convert these to tokens; the text before them has the same
//! tokens, and the same blocks, as in a chat without media.

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

fn placeholder_of(part: Value) -> Value {
    let kind = match member(&part, "type").as_ref().and_then(Value::as_str) {
        Some("image_url" | "input_image") => "image",
        Some("audio_url" | "input_audio") => "audio",
        Some("video_url") => "video",
        _ => return part,
    };
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

    #[test]
    fn the_common_text_ends_before_media() {
        let [(_, image), ..] = PLACEHOLDERS;
        assert_eq!(common_text("a\u{e9}<image>b", &format!("a\u{e9}{image}b")), Some("a\u{e9}"));
        assert_eq!(common_text("a\u{f8fe}", &format!("a{image}")), Some("a"), "part of a character");
        assert_eq!(common_text(&format!("a{image}b"), &format!("a{image}b")), None, "not replaced");
        assert_eq!(common_text("abc", "ab"), Some("ab"));
    }
}
