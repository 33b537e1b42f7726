//! Prepares a conversation as SGLang does (`srt/entrypoints/openai/serving_chat.py`, `protocol.py` and `parser/jinja_template_utils.py`,
//! version 0.5.23).

use minijinja::Value;
use minijinja::value::ValueKind;

use super::messages::{ContentPart, ObjectBuilder, items, member, pairs, part, role};
use super::{
    MessageRole, PreparedMessage, TemplateInput, TemplateTraits, arguments, client_variables,
    default_variable, prepare_messages,
};
use crate::body::ChatBody;
use crate::dialect::ContentFormat;
use crate::error::PromptError;

const ROLES: [&str; 7] = ["system", "assistant", "tool", "function", "developer", "latest_reminder", "root"];

pub(super) fn prepare(
    format: ContentFormat,
    template: TemplateTraits,
    body: &ChatBody,
    known: &[PreparedMessage],
) -> Result<TemplateInput, PromptError> {
    if body.reasoning.as_ref().is_some_and(|reasoning| !reasoning.is_none()) {
        return Err(PromptError::UnsupportedMember("reasoning"));
    }
    let prepared = prepare_messages(body, known, |message| prepare_message(format, message))?;
    let has_results = |pair: &[PreparedMessage]| pair.iter().all(|message| message.role == MessageRole::Tool);
    if template.orders_results && prepared.windows(2).any(has_results) {
        // The template expects results in the order of their calls.
        return Err(PromptError::UnsupportedMember("tool_call_id"));
    }
    let mut messages = prepared.iter().map(|prepared| prepared.message.clone()).collect();
    let suffix = prepare_last(&mut messages, body);
    let mut variables = client_variables(body)?;
    if let Some(effort) = body.reasoning_effort.as_ref().filter(|effort| !effort.is_none()) {
        let thinks = effort.as_str() != Some("none");
        default_variable(&mut variables, "thinking", thinks);
        default_variable(&mut variables, "enable_thinking", thinks);
        default_variable(&mut variables, "reasoning_effort", effort.clone());
    }
    Ok(TemplateInput {
        messages,
        prepared,
        is_in_order: true,
        tools: prepare_tools(body)?,
        documents: Value::from(()),
        add_generation_prompt: true,
        variables,
        continuation: None,
        suffix,
        add_special_tokens: false,
    })
}

/// A final assistant message is continued after the generation prompt, or otherwise treated as a user message.
fn prepare_last(messages: &mut Vec<Value>, body: &ChatBody) -> Option<String> {
    let last = messages.last_mut()?;
    let content = member(last, "content")?;
    let content = content.as_str()?;
    if member(last, "role")?.as_str() != Some("assistant") {
        return None;
    }
    if body.continue_final_message.unwrap_or(false) {
        let continued = content.to_owned();
        messages.pop();
        return Some(continued);
    }
    *last = ObjectBuilder::default().with("role", "user").with("content", content).build();
    None
}

fn prepare_message(format: ContentFormat, message: &Value) -> Result<PreparedMessage, PromptError> {
    let mut role = role(message)?;
    let user = role == "user";
    if !user {
        role = role.to_lowercase();
        if !ROLES.contains(&role.as_str()) {
            return Err(PromptError::Malformed(format!("no role is named `{role}`")));
        }
    }
    let content = prepare_content(format, &role, member(message, "content"))?;
    let mut out = ObjectBuilder::default().with("role", role.as_str());
    // SGLang appends a list of parts behind the other members.
    let parts =
        content.kind() == ValueKind::Seq || member(message, "content").is_some_and(|c| c.as_str().is_none());
    let behind = parts && format == ContentFormat::Parts;
    if !behind {
        out = out.with("content", content.clone());
    }
    if !user {
        for name in ["tool_call_id", "name", "phase", "reasoning_content"] {
            out = out.with_some(name, member(message, name));
        }
        out = out.with_some("tool_calls", prepare_calls(&role, member(message, "tool_calls"))?);
        if let Some(tools) = member(message, "tools") {
            let tools = items(&tools, "tools")?;
            out = out.with("tools", tools.iter().map(prepare_tool).collect::<Result<Vec<_>, _>>()?);
        }
        out = out.with_some("prefix", member(message, "prefix"));
    }
    if behind {
        out = out.with("content", content);
    }
    Ok(PreparedMessage { message: out.build(), role: MessageRole::of(&role) })
}

fn prepare_content(format: ContentFormat, role: &str, content: Option<Value>) -> Result<Value, PromptError> {
    let list = match content {
        None => return Ok(Value::from("")),
        Some(text) if text.as_str().is_some() => return Ok(text),
        Some(list) => items(&list, "content")?,
    };
    let mut texts = Vec::new();
    for value in &list {
        match part(value)? {
            ContentPart::Text("text", text) if value.as_str().is_none() => texts.push(text),
            ContentPart::Text("thinking", _) if role == "assistant" => {}
            ContentPart::ToolReference(_) => return Err(PromptError::UnsupportedMember("tool_reference")),
            ContentPart::Text(kind, _) => {
                return Err(PromptError::Malformed(format!("a part of type `{kind}`")));
            }
        }
    }
    if format == ContentFormat::Parts && role != "tool" {
        let typed = texts.into_iter();
        return Ok(typed
            .map(|text| ObjectBuilder::default().with("type", "text").with("text", text).build())
            .collect());
    }
    Ok(Value::from(texts.join(" ")))
}

fn prepare_calls(role: &str, calls: Option<Value>) -> Result<Option<Value>, PromptError> {
    let Some(calls) = calls else { return Ok(None) };
    let null = || Value::from(());
    let mut prepared = Vec::new();
    for call in items(&calls, "tool_calls")? {
        let function = member(&call, "function")
            .ok_or_else(|| PromptError::Malformed("a tool call has no `function`".to_owned()))?;
        let arguments = match member(&function, "arguments") {
            Some(given) if role == "assistant" => arguments::object(&given).ok_or_else(|| {
                PromptError::Malformed("a tool call's arguments are no JSON object".to_owned())
            })?,
            given => given.unwrap_or_else(null),
        };
        let function = ObjectBuilder::default()
            .with("name", member(&function, "name").unwrap_or_else(null))
            .with("arguments", arguments)
            .build();
        let call = ObjectBuilder::default()
            .with("id", member(&call, "id").unwrap_or_else(null))
            .with("index", member(&call, "index").unwrap_or_else(null))
            .with("type", "function")
            .with("function", function);
        prepared.push(call.build());
    }
    Ok(Some(Value::from(prepared)))
}

fn prepare_tools(body: &ChatBody) -> Result<Option<Vec<Value>>, PromptError> {
    let Some(tools) = body.tools.as_ref().filter(|tools| !tools.is_empty()) else { return Ok(None) };
    let choice = body.tool_choice.as_ref().filter(|choice| !choice.is_none());
    if choice.is_some_and(|choice| choice.as_str() == Some("none")) {
        return Ok(None);
    }
    let chosen = choice
        .filter(|choice| choice.as_str().is_none())
        .and_then(|choice| member(&member(choice, "function")?, "name"));
    let mut prepared = Vec::with_capacity(tools.len());
    for tool in tools {
        let name = member(tool, "function").and_then(|function| member(&function, "name"));
        if chosen.is_none() || chosen == name {
            prepared.push(prepare_tool(tool)?);
        }
    }
    Ok((!prepared.is_empty()).then_some(prepared))
}

/// A tool as SGLang's own types serialize it: a function's known members in the client's order, then the missing ones as null.
fn prepare_tool(tool: &Value) -> Result<Value, PromptError> {
    let function = member(tool, "function")
        .ok_or_else(|| PromptError::Malformed("a tool has no `function`".to_owned()))?;
    let late = member(tool, "defer_loading");
    let mut members = pairs(&function, "function")?;
    members.retain(|(name, value)| match name.as_str() {
        "name" | "description" | "parameters" => true,
        "strict" | "defer_loading" => !value.is_none(),
        _ => false,
    });
    for (name, value) in [
        ("description", Some(Value::from(()))),
        ("parameters", Some(Value::from(()))),
        ("defer_loading", late.clone()),
    ] {
        if let Some(value) = value
            && !members.iter().any(|(other, _)| other == name)
        {
            members.push((name.to_owned(), value));
        }
    }
    let kind = member(tool, "type").unwrap_or_else(|| Value::from("function"));
    Ok(ObjectBuilder::default()
        .with("type", kind)
        .with("function", Value::from_pairs(members))
        .with("defer_loading", late.unwrap_or(Value::from(())))
        .build())
}
