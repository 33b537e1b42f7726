//! Converts as SGLang does (`srt/entrypoints/anthropic/serving.py` and `protocol.py`, version 0.5.23).

use minijinja::Value;

use super::{
    MessageContent, MessageConversion, MessagesBody, block_kind, blocks_of, content_of, image_part,
    message_of, result_message, schema, tool_call,
};
use crate::body::ChatBody;
use crate::chat::messages::{ObjectBuilder, items, kind_of, member, message, text_member, text_part};
use crate::chat::tools::{function_tool, tool_name};
use crate::error::PromptError;
use crate::python_text::strip;

const EFFORTS: [&str; 6] = ["minimal", "low", "medium", "high", "xhigh", "max"];
/// Prefixes of the types of tools that Anthropic's servers execute. SGLang drops these tools.
const SERVER_TOOLS: [&str; 4] = ["web_search_", "computer_", "bash_", "text_editor_"];

const CONVERSION: MessageConversion =
    MessageConversion { system_prompt, inline_system, separator: "\n", message: convert_message };

pub(super) fn convert(body: &MessagesBody, merges_systems: bool) -> Result<ChatBody, PromptError> {
    if body.thinking.is_some() {
        // Its effect depends on the engine's reasoning parser.
        return Err(PromptError::UnsupportedMember("thinking"));
    }
    let tools = convert_tools(body.tools.as_deref().unwrap_or_default())?;
    // Set after the request was built, it has no effect on the variables for thinking, as it has in a chat.
    let effort = body.effort(&EFFORTS)?;
    let variables = effort.map(|effort| {
        let effort = if effort == "xhigh" { "max".to_owned() } else { effort };
        Value::from_pairs([("reasoning_effort", effort)])
    });
    Ok(ChatBody {
        messages: CONVERSION.convert(body, merges_systems)?,
        tool_choice: convert_choice(body.tool_choice.as_ref(), &tools)?,
        tools: (!tools.is_empty()).then_some(tools),
        chat_template_kwargs: variables,
        ..ChatBody::default()
    })
}

fn system_prompt(given: &Value) -> Result<Vec<String>, PromptError> {
    if let Some(text) = given.as_str() {
        return Ok((!strip(text).is_empty()).then(|| text.to_owned()).into_iter().collect());
    }
    let mut texts = system_texts(&items(given, "system")?)?;
    texts.retain(|text| !text.is_empty());
    Ok(texts)
}

/// Without the white space around it.
fn inline_system(inline: &Value) -> Result<Option<String>, PromptError> {
    let texts = match MessageContent::of(inline)? {
        MessageContent::Text(text) => vec![text.as_str().unwrap_or_default().to_owned()],
        MessageContent::Blocks(blocks) => system_texts(&blocks)?,
    };
    let stripped: Vec<&str> = texts.iter().map(|text| strip(text)).filter(|text| !text.is_empty()).collect();
    Ok((!stripped.is_empty()).then(|| stripped.join("\n")))
}

fn system_texts(blocks: &[Value]) -> Result<Vec<String>, PromptError> {
    let mut texts = Vec::with_capacity(blocks.len());
    for block in blocks {
        match block_kind(block)?.as_str() {
            "text" => texts.push(required_text(block)?),
            "image" | "tool_use" | "tool_result" | "tool_reference" | "thinking" | "redacted_thinking"
            | "search_result" => {}
            other => return Err(PromptError::UnsupportedContent(other.to_owned())),
        }
    }
    Ok(texts)
}

fn required_text(block: &Value) -> Result<String, PromptError> {
    text_member(block, "text")?.ok_or_else(|| PromptError::Malformed("a text block has no `text`".to_owned()))
}

fn convert_message(role: &'static str, given: &Value, messages: &mut Vec<Value>) -> Result<(), PromptError> {
    let Some(blocks) = blocks_of(role, given, messages)? else { return Ok(()) };
    let (mut content, mut calls) = (Vec::new(), Vec::new());
    for block in &blocks {
        match block_kind(block)?.as_str() {
            "text" => content.push(text_part(required_text(block)?)),
            "image" => content.extend(image(member(block, "source").as_ref())?),
            "tool_use" => calls.push(tool_call(block)?),
            "tool_result" if role == "user" => {
                flush(&mut content, messages);
                convert_result(block, messages)?;
            }
            "tool_result" => {
                let (_, text) = result_contents(block)?;
                content.push(text_part(format!("Tool result: {text}")));
            }
            "tool_reference" => {}
            "thinking" if role != "assistant" || thought(block)?.is_empty() => {}
            "redacted_thinking" if role != "assistant" => {}
            // How earlier thoughts are written depends on the engine's reasoning parser; hidden ones are rejected.
            other => return Err(PromptError::UnsupportedContent(other.to_owned())),
        }
    }
    if content.is_empty() && calls.is_empty() {
        if role != "user" {
            messages.push(message(role, ""));
        }
        return Ok(());
    }
    messages.push(message_of(role, None, calls, content));
    Ok(())
}

fn thought(block: &Value) -> Result<String, PromptError> {
    Ok(text_member(block, "thinking")?.unwrap_or_default())
}

/// What stands before a result becomes a message before it.
fn flush(content: &mut Vec<Value>, messages: &mut Vec<Value>) {
    if !content.is_empty() {
        messages.push(message("user", content_of(std::mem::take(content))));
    }
}

fn convert_result(block: &Value, messages: &mut Vec<Value>) -> Result<(), PromptError> {
    let id = text_member(block, "tool_use_id")?.filter(|id| !id.is_empty());
    let id = id.or(text_member(block, "id")?).unwrap_or_default();
    for content in result_contents(block)?.0 {
        messages.push(result_message(&id, content));
    }
    Ok(())
}

/// The contents of a result's messages, and its text.
fn result_contents(block: &Value) -> Result<(Vec<Value>, String), PromptError> {
    let content = match member(block, "content") {
        None => return Ok((vec![Value::from("")], String::new())),
        Some(text) if text.as_str().is_some() => return Ok((vec![text.clone()], text.to_string())),
        Some(content) => items(&content, "content")?,
    };
    let (mut parts, mut texts) = (Vec::new(), Vec::new());
    for item in &content {
        match block_kind(item)?.as_str() {
            "text" => {
                let text = required_text(item)?;
                if !text.is_empty() {
                    parts.push(text_part(text.as_str()));
                    texts.push(text);
                }
            }
            "image" => parts.extend(image(member(item, "source").as_ref())?),
            "tool_use" | "tool_result" | "thinking" | "redacted_thinking" => {}
            other => return Err(PromptError::UnsupportedContent(other.to_owned())),
        }
    }
    let contents = if parts.is_empty() { Value::from("") } else { content_of(parts) };
    Ok((vec![contents], texts.join("\n")))
}

fn image(source: Option<&Value>) -> Result<Option<Value>, PromptError> {
    let Some(source) = source else { return Ok(None) };
    let url = if kind_of(source).as_deref() == Some("base64") {
        let media_type = text_member(source, "media_type")?.unwrap_or_else(|| "image/png".to_owned());
        let data = text_member(source, "data")?.filter(|data| !data.is_empty());
        data.map(|data| format!("data:{media_type};base64,{data}"))
    } else {
        text_member(source, "url")?.filter(|url| !url.is_empty())
    };
    Ok(url.map(|url| image_part(Value::from(url))))
}

fn convert_tools(tools: &[Value]) -> Result<Vec<Value>, PromptError> {
    let mut converted = Vec::with_capacity(tools.len());
    for tool in tools {
        let kind = kind_of(tool);
        if kind.is_some_and(|kind| SERVER_TOOLS.iter().any(|prefix| kind.starts_with(prefix))) {
            continue;
        }
        let function = ObjectBuilder::default()
            .with("name", tool_name(tool)?)
            .with("description", text_member(tool, "description")?.unwrap_or_default())
            .with("parameters", schema(tool)?)
            .with("strict", member(tool, "strict").unwrap_or_else(|| Value::from(false)));
        let converted_tool = ObjectBuilder::default()
            .with("type", "function")
            .with_some("defer_loading", member(tool, "defer_loading"))
            .with("function", function.build());
        converted.push(converted_tool.build());
    }
    Ok(converted)
}

fn convert_choice(choice: Option<&Value>, tools: &[Value]) -> Result<Option<Value>, PromptError> {
    let Some(choice) = choice else { return Ok(None) };
    let missing = || PromptError::Malformed("`tool_choice` requires a tool that is missing".to_owned());
    match kind_of(choice).as_deref() {
        Some("none") => Ok(Some(Value::from("none"))),
        Some("auto") => Ok(None),
        Some("any") if tools.is_empty() => Err(missing()),
        Some("any") => Ok(Some(Value::from("required"))),
        Some("tool") => {
            let name = member(choice, "name").ok_or_else(missing)?;
            let is_chosen = |tool: &Value| {
                member(tool, "function").and_then(|function| member(&function, "name")) == Some(name.clone())
            };
            if !tools.iter().any(is_chosen) {
                return Err(missing());
            }
            Ok(Some(function_tool(ObjectBuilder::default().with("name", name))))
        }
        _ => Err(PromptError::Malformed("`tool_choice` has no known `type`".to_owned())),
    }
}
