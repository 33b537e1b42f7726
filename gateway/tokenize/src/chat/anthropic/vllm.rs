//! Converts as vLLM does (`vllm/entrypoints/anthropic/serving.py` and `protocol.py`, version 0.32).

use minijinja::Value;

use super::{
    MessageContent, MessageConversion, MessagesBody, block_kind, blocks_of, image_part, message_of,
    result_message, schema, tool_call,
};
use crate::body::ChatBody;
use crate::chat::BILLING_LINE;
use crate::chat::messages::{ObjectBuilder, items, kind_of, member, message, pairs, text_member, text_part};
use crate::chat::rules::TemplateRules;
use crate::chat::tools::{function_tool, tool_name};
use crate::error::PromptError;

const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

const CONVERSION: MessageConversion =
    MessageConversion { system_prompt, inline_system, separator: "", message: convert_message };

pub(super) fn convert(body: &MessagesBody, rules: &TemplateRules<'_>) -> Result<ChatBody, PromptError> {
    let mut reasoning_effort = body.effort(&EFFORTS)?;
    if is_thinking_disabled(body)? {
        reasoning_effort = Some((rules.effort_without_thinking)().to_owned());
    }
    let tools = body.tools.as_ref().map(|tools| tools.iter().map(convert_tool).collect());
    Ok(ChatBody {
        messages: CONVERSION.convert(body, rules.merges_systems)?,
        tools: tools.transpose()?,
        reasoning_effort: reasoning_effort.map(Value::from),
        chat_template_kwargs: body.chat_template_kwargs.clone(),
        ..ChatBody::default()
    })
}

fn is_thinking_disabled(body: &MessagesBody) -> Result<bool, PromptError> {
    let Some(thinking) = &body.thinking else { return Ok(false) };
    match kind_of(thinking).as_deref() {
        Some("disabled") => Ok(true),
        Some("enabled" | "adaptive") => Ok(false),
        _ => Err(PromptError::Malformed("`thinking` has no known `type`".to_owned())),
    }
}

fn system_prompt(given: &Value) -> Result<Vec<String>, PromptError> {
    match given.as_str() {
        Some(text) => Ok((!text.is_empty()).then(|| text.to_owned()).into_iter().collect()),
        None => system_texts(&items(given, "system")?),
    }
}

fn inline_system(inline: &Value) -> Result<Option<String>, PromptError> {
    let text = match MessageContent::of(inline)? {
        MessageContent::Text(text) => {
            let text = text.as_str().unwrap_or_default();
            if text.starts_with(BILLING_LINE) { String::new() } else { text.to_owned() }
        }
        MessageContent::Blocks(blocks) => system_texts(&blocks)?.concat(),
    };
    Ok((!text.is_empty()).then_some(text))
}

/// The texts of a system prompt's blocks, without the line that changes with every request.
fn system_texts(blocks: &[Value]) -> Result<Vec<String>, PromptError> {
    let mut texts = Vec::with_capacity(blocks.len());
    for block in blocks {
        match block_kind(block)?.as_str() {
            "text" => {
                let text = text_member(block, "text")?;
                texts.extend(text.filter(|text| !text.is_empty() && !text.starts_with(BILLING_LINE)));
            }
            // Known to the API, without effect here.
            "image" | "tool_use" | "tool_result" | "tool_reference" | "thinking" | "redacted_thinking" => {}
            other => return Err(PromptError::UnsupportedContent(other.to_owned())),
        }
    }
    Ok(texts)
}

/// The parts of one message of Anthropic's API, which a chat has as members.
#[derive(Default)]
struct MessageParts {
    content: Vec<Value>,
    calls: Vec<Value>,
    reasoning: Option<String>,
}

fn convert_message(role: &'static str, given: &Value, messages: &mut Vec<Value>) -> Result<(), PromptError> {
    if role == "system" {
        messages.extend(inline_system(given)?.map(|text| message(role, text)));
        return Ok(());
    }
    let Some(blocks) = blocks_of(role, given, messages)? else { return Ok(()) };
    let mut parts = MessageParts::default();
    for block in &blocks {
        convert_block(role, block, &mut parts, messages)?;
    }
    let MessageParts { content, calls, reasoning } = parts;
    if role == "user" && content.is_empty() {
        return Ok(());
    }
    messages.push(message_of(role, reasoning, calls, content));
    Ok(())
}

fn convert_block(
    role: &'static str,
    block: &Value,
    parts: &mut MessageParts,
    messages: &mut Vec<Value>,
) -> Result<(), PromptError> {
    match block_kind(block)?.as_str() {
        "text" => {
            let text = text_member(block, "text")?.filter(|text| !text.is_empty());
            parts.content.extend(text.map(text_part));
        }
        "image" => {
            let source = member(block, "source").filter(Value::is_true);
            parts.content.extend(source.map(|source| image_url(&source)).transpose()?.map(image_part));
        }
        "thinking" => {
            if let Some(thinking) = text_member(block, "thinking")? {
                parts.reasoning.get_or_insert_default().push_str(&thinking);
            }
        }
        "tool_use" => parts.calls.push(tool_call(block)?),
        "tool_result" if role == "user" => convert_result(block, messages)?,
        "tool_result" => match member(block, "content").filter(Value::is_true) {
            // vLLM prints blocks as Python does.
            Some(content) if content.as_str().is_none() => {
                return Err(PromptError::UnsupportedContent("tool_result".to_owned()));
            }
            content => {
                let text = content.as_ref().and_then(Value::as_str).unwrap_or_default();
                parts.content.push(text_part(format!("Tool result: {text}")));
            }
        },
        "redacted_thinking" | "tool_reference" => {}
        other => return Err(PromptError::UnsupportedContent(other.to_owned())),
    }
    Ok(())
}

/// A result in a user's message is a message of its own, before the rest of that message.
fn convert_result(block: &Value, messages: &mut Vec<Value>) -> Result<(), PromptError> {
    let id = text_member(block, "tool_use_id")?.unwrap_or_default();
    let mut texts = Vec::new();
    let (mut images, mut references) = (Vec::new(), Vec::new());
    match member(block, "content") {
        Some(text) if text.as_str().is_some() => texts.push(text.to_string()),
        Some(content) => {
            for item in items(&content, "content")? {
                match kind_of(&item).as_deref() {
                    Some("text") => texts.push(text_member(&item, "text")?.unwrap_or_default()),
                    Some("image") => {
                        let source = member(&item, "source")
                            .ok_or_else(|| PromptError::Malformed("an image has no `source`".to_owned()))?;
                        let url = image_url(&source)?;
                        images.extend(url.is_true().then(|| image_part(url)));
                    }
                    Some("tool_reference") => references.extend(reference(&item)),
                    // vLLM skips all others.
                    _ => {}
                }
            }
        }
        None => {}
    }
    messages.push(result_message(&id, Value::from(texts.join("\n"))));
    if !images.is_empty() {
        messages.push(message("user", images));
    }
    if !references.is_empty() {
        messages.push(result_message(&id, Value::from(references)));
    }
    Ok(())
}

fn reference(item: &Value) -> Option<Value> {
    let name = member(item, "tool_name").filter(Value::is_true).or_else(|| member(item, "name"))?;
    let part = ObjectBuilder::default().with("type", "tool_reference").with("name", name.clone());
    name.is_true().then(|| part.build())
}

/// The address of an image: the source's, or the data in one.
fn image_url(source: &Value) -> Result<Value, PromptError> {
    pairs(source, "source")?;
    if kind_of(source).as_deref() == Some("url") {
        return Ok(Value::from(text_member(source, "url")?.unwrap_or_default()));
    }
    let media_type = text_member(source, "media_type")?.unwrap_or_else(|| "image/jpeg".to_owned());
    let data = text_member(source, "data")?.unwrap_or_default();
    Ok(Value::from(format!("data:{media_type};base64,{data}")))
}

fn convert_tool(tool: &Value) -> Result<Value, PromptError> {
    let function = ObjectBuilder::default()
        .with("name", tool_name(tool)?)
        .with_some("description", text_member(tool, "description")?.map(Value::from))
        .with("parameters", schema(tool)?)
        .with_some("strict", member(tool, "strict"))
        .with_some("defer_loading", member(tool, "defer_loading"));
    Ok(function_tool(function))
}
