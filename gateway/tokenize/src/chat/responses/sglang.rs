//! Converts as SGLang does (`srt/entrypoints/openai/serving_responses.py`, `responses_adapters.py` and `protocol.py`, version 0.5.23), for
//! models without a format of their own for tools.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::{ResponsesBody, ResponsesInput, content_parts, item_kind};
use crate::body::ChatBody;
use crate::chat::arguments;
use crate::chat::messages::{ObjectBuilder, items, kind_of, member, pairs, role, text_member, text_part};
use crate::chat::tools::{custom_arguments, custom_parameters, function_tool, tool_call};
use crate::error::PromptError;

/// Before the text of a developer's message, which becomes a system message.
const DEVELOPER_LABEL: &str = "Developer instructions:";

/// Start of reasoning that SGLang has encoded for the client. It is compressed.
const REASONING_STATE: &str = "sglang-reasoning-v1.";

pub(super) fn convert(body: &ResponsesBody, merges_systems: bool) -> Result<ChatBody, PromptError> {
    let mut messages = Vec::new();
    if let Some(instructions) = body.instructions() {
        messages.push(InputMessage::new("system", Value::from(instructions)));
    }
    match &body.input {
        ResponsesInput::Text(text) => messages.push(InputMessage::new("user", Value::from(text.as_str()))),
        ResponsesInput::Items(items) => {
            for item in items {
                messages.extend(convert_item(item)?);
            }
        }
    }
    let mut messages = merge_assistants(messages)?;
    if merges_systems {
        messages = merge_systems(messages)?;
    }
    let tools = convert_tools(body.tools.as_deref().unwrap_or_default())?;
    Ok(ChatBody {
        messages: messages.into_iter().map(InputMessage::build).collect(),
        tool_choice: convert_choice(body.tool_choice.as_ref()),
        tools: (!tools.is_empty()).then_some(tools),
        reasoning_effort: effort(body.reasoning.as_ref())?,
        chat_template_kwargs: body.chat_template_kwargs.clone(),
        ..ChatBody::default()
    })
}

fn effort(reasoning: Option<&Value>) -> Result<Option<Value>, PromptError> {
    let Some(reasoning) = reasoning else { return Ok(None) };
    let members = pairs(reasoning, "reasoning")?;
    if members.iter().any(|(name, _)| name == "reasoning_effort") {
        return Err(PromptError::UnsupportedMember("reasoning"));
    }
    let effort = members.into_iter().find_map(|(name, value)| (name == "effort").then_some(value));
    // The default applies to an object without the member, not to null.
    Ok(Some(effort.unwrap_or_else(|| Value::from("medium"))).filter(|effort| !effort.is_none()))
}

/// A message of the chat that the items of the input are converted to.
#[derive(Default)]
struct InputMessage {
    role: String,
    content: Option<Value>,
    reasoning: Option<String>,
    calls: Vec<Value>,
    phase: Option<Value>,
    others: Vec<(String, Value)>,
}

impl InputMessage {
    fn new(role: &str, content: Value) -> InputMessage {
        InputMessage { role: role.to_owned(), content: Some(content), ..InputMessage::default() }
    }

    fn is_only_reasoning(&self) -> bool {
        self.reasoning.is_some()
            && self.content.is_none()
            && self.calls.is_empty()
            && self.phase.is_none()
            && self.others.is_empty()
    }

    fn build(self) -> Value {
        let own = [
            ("role", Some(Value::from(self.role))),
            ("content", self.content),
            ("reasoning_content", self.reasoning.map(Value::from)),
            ("tool_calls", (!self.calls.is_empty()).then(|| Value::from(self.calls))),
            ("phase", self.phase),
        ];
        let own = own.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        Value::from_pairs(own.chain(self.others))
    }
}

/// The message of an item; `None` for reasoning without text.
fn convert_item(item: &Value) -> Result<Option<InputMessage>, PromptError> {
    match item_kind(item).as_str() {
        "function_call" => {
            let arguments = member(item, "arguments").and_then(|given| arguments::object(&given));
            let empty = || Value::from_pairs(Vec::<(String, Value)>::new());
            call(item, arguments.unwrap_or_else(empty)).map(Some)
        }
        "custom_tool_call" => {
            call(item, custom_arguments(text_member(item, "input")?.unwrap_or_default())).map(Some)
        }
        "function_call_output" | "custom_tool_call_output" => {
            let mut message = InputMessage::new("tool", Value::from(output_text(item)?));
            message.others.extend(member(item, "call_id").map(|id| ("tool_call_id".to_owned(), id)));
            Ok(Some(message))
        }
        "reasoning" => convert_reasoning(item),
        "message" => convert_message(item).map(Some),
        other => Err(PromptError::UnsupportedContent(other.to_owned())),
    }
}

fn call(item: &Value, arguments: Value) -> Result<InputMessage, PromptError> {
    let id = text_member(item, "call_id")?.filter(|id| !id.is_empty()).or(text_member(item, "id")?);
    let name = text_member(item, "name")?
        .ok_or_else(|| PromptError::Malformed("a call of the input has no `name`".to_owned()))?;
    let calls = vec![tool_call(id, name, arguments)];
    Ok(InputMessage { role: "assistant".to_owned(), calls, ..InputMessage::default() })
}

fn output_text(item: &Value) -> Result<String, PromptError> {
    let Some(output) = member(item, "output") else { return Ok(String::new()) };
    if let Some(text) = output.as_str() {
        return Ok(text.to_owned());
    }
    let parts = items(&output, "output")?;
    let texts = parts.iter().map(|part| Ok(text_member(part, "text")?.unwrap_or_default()));
    texts.collect()
}

fn convert_reasoning(item: &Value) -> Result<Option<InputMessage>, PromptError> {
    for name in ["summary", "content"] {
        let parts = member(item, name).map_or(Ok(Vec::new()), |parts| items(&parts, name))?;
        let mut texts = Vec::with_capacity(parts.len());
        for part in &parts {
            texts.extend(text_member(part, "text")?.filter(|text| !text.is_empty()));
        }
        if !texts.is_empty() {
            let reasoning = Some(texts.join("\n"));
            let role = "assistant".to_owned();
            return Ok(Some(InputMessage { role, reasoning, ..InputMessage::default() }));
        }
    }
    // SGLang drops what it did not encode itself.
    let encrypted = member(item, "encrypted_content");
    if encrypted.is_some_and(|blob| blob.as_str().is_some_and(|blob| blob.starts_with(REASONING_STATE))) {
        return Err(PromptError::UnsupportedMember("encrypted_content"));
    }
    Ok(None)
}

fn convert_message(item: &Value) -> Result<InputMessage, PromptError> {
    let mut message = InputMessage { role: role(item)?, ..InputMessage::default() };
    for (name, value) in pairs(item, "input")? {
        match name.as_str() {
            _ if value.is_none() => {}
            "id" | "status" | "type" | "role" => {}
            "content" => message.content = Some(value),
            "phase" => message.phase = Some(value),
            "reasoning_content" | "tool_calls" => return Err(PromptError::UnsupportedContent(name)),
            _ => message.others.push((name, value)),
        }
    }
    if message.role == "developer" {
        message.role = "system".to_owned();
        message.content = message.content.map(labelled).transpose()?;
    }
    if let Some(content) = &message.content
        && let Some(parts) = content_parts(content)?
    {
        let parts: Result<Vec<Value>, PromptError> = parts.iter().map(convert_part).collect();
        message.content = Some(Value::from(parts?));
    }
    Ok(message)
}

fn labelled(content: Value) -> Result<Value, PromptError> {
    let Some(mut parts) = content_parts(&content)? else {
        return Ok(Value::from(format!("{DEVELOPER_LABEL}\n{content}")));
    };
    let text_of = |part: &Value| member(part, "text").filter(|text| text.as_str().is_some());
    match parts.iter().position(|part| text_of(part).is_some()) {
        Some(at) => {
            let mut members = pairs(&parts[at], "content")?;
            for (name, value) in &mut members {
                if name == "text" {
                    *value = Value::from(format!("{DEVELOPER_LABEL}\n{value}"));
                }
            }
            parts[at] = Value::from_pairs(members);
        }
        None => parts.insert(
            0,
            ObjectBuilder::default().with("type", "input_text").with("text", DEVELOPER_LABEL).build(),
        ),
    }
    Ok(Value::from(parts))
}

fn convert_part(part: &Value) -> Result<Value, PromptError> {
    match kind_of(part).as_deref() {
        Some("input_text" | "output_text") => Ok(text_part(text_member(part, "text")?.unwrap_or_default())),
        Some("input_image") => {
            let url =
                member(part, "image_url").ok_or_else(|| PromptError::Multimodal("input_image".to_owned()))?;
            if url.kind() == ValueKind::Map {
                return Err(PromptError::Multimodal("input_image".to_owned()));
            }
            let detail = member(part, "detail").unwrap_or_else(|| Value::from("auto"));
            let url = ObjectBuilder::default().with("url", url).with("detail", detail).build();
            Ok(ObjectBuilder::default().with("type", "image_url").with("image_url", url).build())
        }
        // The preparation of the chat checks the others.
        _ => Ok(part.clone()),
    }
}

/// Consecutive messages of the assistant become one.
fn merge_assistants(messages: Vec<InputMessage>) -> Result<Vec<InputMessage>, PromptError> {
    let mut merged: Vec<InputMessage> = Vec::with_capacity(messages.len());
    for message in messages {
        match merged.last_mut() {
            Some(last)
                if last.role == "assistant"
                    && message.role == "assistant"
                    && (last.phase == message.phase || last.is_only_reasoning()) =>
            {
                merge(last, message)?;
            }
            _ => merged.push(message),
        }
    }
    Ok(merged)
}

fn merge(last: &mut InputMessage, next: InputMessage) -> Result<(), PromptError> {
    if next.phase.is_some() {
        last.phase = next.phase;
    }
    if let Some(content) = next.content.filter(|content| content.as_str() != Some("")) {
        let earlier = last.content.take().filter(|content| content.as_str() != Some(""));
        last.content = Some(match earlier {
            None => content,
            Some(earlier) => joined(&earlier, &content)?,
        });
    }
    last.calls.extend(next.calls);
    if let Some(reasoning) = next.reasoning {
        last.reasoning = Some(match last.reasoning.take() {
            Some(earlier) => format!("{earlier}\n{reasoning}"),
            None => reasoning,
        });
    }
    Ok(())
}

fn joined(first: &Value, second: &Value) -> Result<Value, PromptError> {
    if let (Some(first), Some(second)) = (first.as_str(), second.as_str()) {
        return Ok(Value::from(format!("{first}\n\n{second}")));
    }
    let mut all = Vec::new();
    for content in [first, second] {
        match content_parts(content)? {
            Some(parts) => all.extend(parts),
            None => all.push(text_part(content.clone())),
        }
    }
    Ok(Value::from(all))
}

/// All system messages become one at the start.
fn merge_systems(messages: Vec<InputMessage>) -> Result<Vec<InputMessage>, PromptError> {
    let (systems, others): (Vec<_>, Vec<_>) =
        messages.into_iter().partition(|message| message.role == "system");
    let mut texts = Vec::with_capacity(systems.len());
    for content in systems.iter().filter_map(|system| system.content.as_ref()) {
        match content_parts(content)? {
            None => texts.push(content.to_string()),
            Some(parts) => {
                let text_of = |part: &Value| member(part, "text").filter(|text| text.as_str().is_some());
                texts.extend(parts.iter().filter_map(text_of).map(|text| text.to_string()));
            }
        }
    }
    if texts.is_empty() {
        return Ok(others);
    }
    let first = InputMessage::new("system", Value::from(texts.join("\n\n")));
    Ok(std::iter::once(first).chain(others).collect())
}

fn convert_tools(tools: &[Value]) -> Result<Vec<Value>, PromptError> {
    let mut converted = Vec::with_capacity(tools.len());
    for tool in tools {
        let (description, parameters) = match kind_of(tool).as_deref() {
            Some("function") => (member(tool, "description"), member(tool, "parameters")),
            Some("custom") if member(tool, "name").is_some_and(|name| name.is_true()) => {
                (custom_description(tool)?.map(Value::from), Some(custom_parameters()))
            }
            Some(_) => continue,
            None => return Err(PromptError::Malformed("a tool has no `type`".to_owned())),
        };
        let null = || Value::from(());
        converted.push(function_tool(
            ObjectBuilder::default()
                .with("name", member(tool, "name").unwrap_or_else(null))
                .with("description", description.unwrap_or_else(null))
                .with("parameters", parameters.unwrap_or_else(null))
                .with("strict", member(tool, "strict").unwrap_or_else(|| Value::from(false))),
        ));
    }
    Ok(converted)
}

/// The description of a custom tool, with the grammar of its input.
fn custom_description(tool: &Value) -> Result<Option<String>, PromptError> {
    let mut texts = Vec::new();
    texts.extend(text_member(tool, "description")?.filter(|text| !text.is_empty()));
    if let Some(format) = member(tool, "format")
        && kind_of(&format).as_deref() == Some("grammar")
    {
        let syntax = text_member(&format, "syntax")?.filter(|syntax| !syntax.is_empty());
        let syntax = syntax.unwrap_or_else(|| "lark".to_owned());
        let definition = text_member(&format, "definition")?.unwrap_or_default();
        texts.push(format!("The payload must conform to this {syntax} grammar:\n{definition}"));
    }
    Ok((!texts.is_empty()).then(|| texts.join("\n\n")))
}

/// Only functions and custom tools can be chosen by name.
fn convert_choice(choice: Option<&Value>) -> Option<Value> {
    let choice = choice?;
    if choice.as_str().is_some() {
        return Some(choice.clone());
    }
    let name = member(choice, "name")
        .filter(Value::is_true)
        .or_else(|| member(&member(choice, "function")?, "name"))
        .filter(|name| name.is_true() && matches!(kind_of(choice).as_deref(), Some("function" | "custom")))?;
    Some(function_tool(ObjectBuilder::default().with("name", name)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;

    fn chat(body: &Json, merges_systems: bool) -> ChatBody {
        convert(&ResponsesBody::parse(body.to_string().as_bytes()).unwrap(), merges_systems).unwrap()
    }

    #[test]
    fn instructions_of_all_tiers_are_one_system_message() {
        let body = json!({ "instructions": "a", "input": [
            { "role": "developer", "content": [{ "type": "input_text", "text": "b" }] },
            { "role": "user", "content": "c" },
            { "role": "system", "content": "d" },
        ] });
        let messages = serde_json::to_value(chat(&body, true).messages).unwrap();
        let system = "a\n\nDeveloper instructions:\nb\n\nd";
        assert_eq!(
            messages,
            json!([{ "role": "system", "content": system }, { "role": "user", "content": "c" }])
        );
        assert_eq!(chat(&body, false).messages.len(), 4);
    }

    #[test]
    fn only_missing_effort_has_a_default() {
        let effort = |reasoning: Json| {
            let body = json!({ "input": "a", "reasoning": reasoning });
            chat(&body, true).reasoning_effort.map(|effort| effort.to_string())
        };
        assert_eq!(effort(json!({})).as_deref(), Some("medium"));
        assert_eq!(effort(json!({ "effort": "high" })).as_deref(), Some("high"));
        assert_eq!(effort(json!({ "effort": null })), None);
        assert_eq!(effort(json!(null)), None);
    }

    #[test]
    fn only_sglangs_own_encoded_reasoning_is_unknown() {
        let reasoning = |blob: &str| {
            let item = json!({ "type": "reasoning", "summary": [], "encrypted_content": blob });
            convert_item(&serde_json::from_value(item).unwrap())
        };
        assert!(reasoning("gAAAA").is_ok_and(|message| message.is_none()));
        assert_eq!(
            reasoning("sglang-reasoning-v1.eJw=").err(),
            Some(PromptError::UnsupportedMember("encrypted_content"))
        );
    }
}
