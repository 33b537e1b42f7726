//! From a chat completion's response to a message.

use serde::Serialize;
use serde_json::value::RawValue;

use crate::chat::{ChatCompletion, ChatToolCall};
use crate::error::UntranslatableResponse;

use super::stop::{ChatEnd, MessageUsage, StopState, message_id};

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "message")]
struct Message<'a> {
    id: String,
    role: &'static str,
    model: &'a str,
    content: Vec<ContentBlock>,
    #[serde(flatten)]
    stop: StopState,
    usage: MessageUsage,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum ContentBlock {
    Text(TextBlock),
    Thinking(ThinkingBlock),
    ToolUse(ToolUseBlock),
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "text")]
struct TextBlock {
    text: String,
}

/// Engines sign nothing, and Anthropic's clients require the member.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "thinking")]
struct ThinkingBlock {
    thinking: String,
    signature: &'static str,
}

#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "tool_use")]
struct ToolUseBlock {
    id: String,
    name: String,
    input: Box<RawValue>,
}

/// Translates the response of a chat completion to a message. Of several choices it is the first.
///
/// # Errors
///
/// [`UntranslatableResponse`] if the response is not a complete chat completion.
pub fn chat_to_messages(response: &[u8]) -> Result<Vec<u8>, UntranslatableResponse> {
    let completion: ChatCompletion<'_> = serde_json::from_slice(response)?;
    let mut choice = completion.choices.into_iter().next().ok_or(UntranslatableResponse::NoChoice)?;
    let not_finished = || UntranslatableResponse::NotFinished(choice.finish_reason.clone());
    let finish_reason = choice.finish_reason.as_deref().ok_or_else(not_finished)?;
    let calls = choice.message.tool_calls.take().unwrap_or_default();
    let end = ChatEnd {
        finish_reason,
        matched_stop: choice.matched_stop.as_ref().or(choice.stop_reason.as_ref()),
        calls_tools: !calls.is_empty(),
    };
    let stop = end.stop().ok_or_else(not_finished)?;
    let mut content = Vec::with_capacity(calls.len() + 2);
    if let Some(thinking) = choice.message.take_reasoning() {
        content.push(ContentBlock::Thinking(ThinkingBlock { thinking, signature: "" }));
    }
    if let Some(text) = choice.message.take_text() {
        content.push(ContentBlock::Text(TextBlock { text }));
    }
    for (at, call) in calls.into_iter().enumerate() {
        let id = call.id.clone().unwrap_or_else(|| format!("call_{}_{at}", completion.id));
        content.push(ContentBlock::ToolUse(tool_use(call, id, finish_reason == "length")?));
    }
    if content.is_empty() {
        // Clients expect a block.
        content.push(ContentBlock::Text(TextBlock { text: String::new() }));
    }
    Ok(serde_json::to_vec(&Message {
        id: message_id(&completion.id),
        role: "assistant",
        model: &completion.model,
        content,
        stop,
        usage: completion.usage.map(MessageUsage::from).unwrap_or_default(),
    })?)
}

fn tool_use(
    call: ChatToolCall<'_>,
    id: String,
    is_truncated: bool,
) -> Result<ToolUseBlock, UntranslatableResponse> {
    let function = call.function;
    let arguments = function.as_ref().map(|function| function.arguments()).transpose()?.unwrap_or_default();
    let name = function.and_then(|function| function.name).unwrap_or_default();
    // A tool without parameters may be called without arguments.
    let arguments = if arguments.trim().is_empty() { "{}".to_owned() } else { arguments };
    let input = match RawValue::from_string(arguments) {
        Ok(input) if input.get().starts_with('{') => input,
        // The stop reason says that the arguments are incomplete.
        _ if is_truncated => RawValue::from_string("{}".to_owned())?,
        _ => return Err(UntranslatableResponse::ToolArguments { tool: name }),
    };
    Ok(ToolUseBlock { id, name, input })
}
