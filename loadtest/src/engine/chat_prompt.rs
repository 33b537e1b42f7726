//! Renders a conversation to tokens, as a chat template does.
//!
//! Only what a template shows is rendered: a tool call's name and arguments, not its id; no members that are null. A
//! conversation that arrives as Messages or Responses and the equal chat completion thus share their prefix.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::response::SimRejection;
use super::tokens::{push_generation_prompt, push_message};
use super::tools::SimToolCall;

/// Renders a conversation to tokens.
pub(crate) fn chat_prompt(
    body: &Map<String, Value>,
) -> Result<(Arc<Vec<u32>>, Option<SimToolCall>), SimRejection> {
    let messages = body
        .get("messages")
        .and_then(Value::as_array)
        .filter(|messages| !messages.is_empty())
        .ok_or_else(|| SimRejection::bad_request("messages: Field required, a non-empty list"))?;
    let mut tokens = Vec::new();
    if let Some(tools) = body.get("tools").filter(|tools| tools.is_array()) {
        push_message(&mut tokens, "tools", &without_nulls(tools).to_string());
    }
    let mut last_user_text = String::new();
    for message in messages {
        let role = message
            .get("role")
            .and_then(Value::as_str)
            .ok_or_else(|| SimRejection::bad_request("messages: every message needs a role"))?;
        let text = message_text(message);
        push_message(&mut tokens, role, &text);
        match role {
            "user" => last_user_text = text,
            // The call that the user asked for is done.
            "tool" => last_user_text.clear(),
            _ => {}
        }
    }
    push_generation_prompt(&mut tokens, "assistant");
    Ok((Arc::new(tokens), SimToolCall::of(body, &last_user_text)))
}

/// Whether a chat completion asks for reasoning. A real model's template decides this; the simulated model reasons only
/// on request.
pub(crate) fn is_thinking_requested(body: &Map<String, Value>) -> bool {
    let effort = body.get("reasoning_effort").and_then(Value::as_str);
    let arguments = body.get("chat_template_kwargs");
    let switch = ["enable_thinking", "thinking"]
        .iter()
        .find_map(|name| arguments.and_then(|arguments| arguments.get(*name)).and_then(Value::as_bool));
    switch.unwrap_or(effort.is_some_and(|effort| effort != "none"))
}

/// The text of a message: reasoning, then content, which is a text or parts, then tool calls. Parts without text count
/// by their JSON.
fn message_text(message: &Value) -> String {
    let reasoning = ["reasoning", "reasoning_content"].iter().find_map(|name| message.get(*name)?.as_str());
    let mut text = reasoning.unwrap_or_default().to_owned();
    match message.get("content") {
        Some(Value::String(content)) => text.push_str(content),
        Some(Value::Array(parts)) => text.extend(parts.iter().map(part_text)),
        _ => {}
    }
    for call in message.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
        text.push_str(&tool_call_text(call));
    }
    text
}

fn part_text(part: &Value) -> String {
    part.get("text").and_then(Value::as_str).map_or_else(|| part.to_string(), str::to_owned)
}

fn tool_call_text(call: &Value) -> String {
    let function = call.get("function").unwrap_or(call);
    let name = function.get("name").and_then(Value::as_str).unwrap_or_default();
    let arguments = match function.get("arguments") {
        Some(Value::String(text)) => {
            serde_json::from_str(text).unwrap_or_else(|_| Value::from(text.as_str()))
        }
        other => other.cloned().unwrap_or_default(),
    };
    serde_json::json!({"name": name, "arguments": arguments}).to_string()
}

/// The value without members that are null, at any depth.
fn without_nulls(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let set = members.iter().filter(|(_, value)| !value.is_null());
            Value::Object(set.map(|(name, value)| (name.clone(), without_nulls(value))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(without_nulls).collect()),
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tokens(body: &Value) -> Vec<u32> {
        chat_prompt(body.as_object().unwrap()).unwrap().0.to_vec()
    }

    #[test]
    fn only_what_a_template_shows_is_rendered() {
        let call = |id: &str, arguments: &str| {
            json!({"messages": [{"role": "assistant", "content": null, "tool_calls": [
                {"id": id, "index": 0, "type": "function", "function": {"name": "f", "arguments": arguments}}]}]})
        };
        assert_eq!(tokens(&call("a", r#"{"x":1}"#)), tokens(&call("b", r#"{ "x": 1 }"#)));
        assert_ne!(tokens(&call("a", r#"{"x":1}"#)), tokens(&call("a", r#"{"x":2}"#)));
        let tools = |function: Value| {
            json!({"messages": [{"role": "user", "content": "hi"}],
                   "tools": [{"type": "function", "function": function}]})
        };
        assert_eq!(
            tokens(&tools(json!({"name": "f", "description": null}))),
            tokens(&tools(json!({"name": "f"})))
        );
    }

    #[test]
    fn reasoning_precedes_content() {
        let split = json!({"messages": [{"role": "assistant", "reasoning": " abc", "content": " def"}]});
        let whole =
            json!({"messages": [{"role": "assistant", "content": [{"type": "text", "text": " abc def"}]}]});
        assert_eq!(tokens(&split), tokens(&whole));
    }

    #[test]
    fn model_thinks_only_on_request() {
        for (body, expected) in [
            (json!({}), false),
            (json!({"reasoning_effort": "low"}), true),
            (json!({"reasoning_effort": "none"}), false),
            (json!({"chat_template_kwargs": {"enable_thinking": true}}), true),
            (json!({"reasoning_effort": "low", "chat_template_kwargs": {"thinking": false}}), false),
        ] {
            assert_eq!(is_thinking_requested(body.as_object().unwrap()), expected, "{body}");
        }
    }
}
