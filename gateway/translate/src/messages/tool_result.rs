//! Contents of tool results.

use serde_json::value::RawValue;

use crate::chat::{ChatContent, ChatPart};
use crate::error::Untranslatable;
use crate::json::{JsonObject, array, text};

use super::content::{block_text, unsupported_block};
use super::image::image_part;

/// The contents of a tool result, each for a message of its own: chat templates expand references to tools only at the start of one.
pub(super) fn tool_result_contents(result: &mut JsonObject<'_>) -> Result<Vec<ChatContent>, Untranslatable> {
    let empty = || vec![ChatContent::Text(String::new())];
    let path = result.path_of("content");
    let Some(content) = result.take("content") else { return Ok(empty()) };
    if let Some(text) = text(content, &path)? {
        return Ok(vec![ChatContent::Text(text)]);
    }
    let mut groups: Vec<Vec<ChatPart>> = Vec::new();
    for (at, block) in array(content, &path)?.into_iter().enumerate() {
        let block = JsonObject::read(block, format!("{path}[{at}]"))?;
        let Some(part) = result_part(block)? else { continue };
        match groups.last_mut() {
            Some(group) if is_reference(group.first()) == is_reference(Some(&part)) => group.push(part),
            _ => groups.push(vec![part]),
        }
    }
    if groups.is_empty() {
        return Ok(empty());
    }
    Ok(groups.into_iter().map(ChatContent::from_parts).collect())
}

fn is_reference(part: Option<&ChatPart>) -> bool {
    matches!(part, Some(ChatPart::ToolReference { .. }))
}

fn result_part(mut block: JsonObject<'_>) -> Result<Option<ChatPart>, Untranslatable> {
    let kind = block.required_text("type")?;
    block.ignore(&["cache_control"]);
    let part = match kind.as_str() {
        "text" => non_empty(block_text(&mut block)?),
        "image" => Some(image_part(&mut block)?),
        "search_result" => non_empty(search_result_text(&mut block)?),
        "tool_reference" => {
            let name = match block.text("tool_name")? {
                Some(name) => name,
                None => block.required_text("name")?,
            };
            Some(ChatPart::ToolReference { name })
        }
        _ => return Err(unsupported_block(&block, &kind)),
    };
    block.reject_rest()?;
    Ok(part)
}

fn non_empty(text: String) -> Option<ChatPart> {
    (!text.is_empty()).then_some(ChatPart::Text { text })
}

/// A search result as the text that SGLang makes of it.
pub(super) fn search_result_text(block: &mut JsonObject<'_>) -> Result<String, Untranslatable> {
    if let Some(mut citations) = block.object("citations")? {
        if citations.parsed::<bool>("enabled")? == Some(true) {
            return Err(Untranslatable::unsupported(
                block.path_of("citations"),
                "chat completions have no citations",
            ));
        }
        citations.reject_rest()?;
    }
    let mut lines = Vec::new();
    for (name, label) in [("title", "Title"), ("source", "Source")] {
        let value = block.text(name)?.filter(|value| !value.is_empty());
        lines.extend(value.map(|value| format!("{label}: {value}")));
    }
    let path = block.path_of("content");
    let mut texts = Vec::new();
    for (at, part) in block.parsed::<Vec<&RawValue>>("content")?.unwrap_or_default().into_iter().enumerate() {
        let mut part = JsonObject::read(part, format!("{path}[{at}]"))?;
        let kind = part.required_text("type")?;
        if kind != "text" {
            return Err(unsupported_block(&part, &kind));
        }
        texts.extend(Some(block_text(&mut part)?).filter(|text| !text.is_empty()));
        part.ignore(&["cache_control"]);
        part.reject_rest()?;
    }
    if !texts.is_empty() {
        lines.push(format!("Content: {}", texts.join("\n")));
    }
    Ok(lines.join("\n"))
}
