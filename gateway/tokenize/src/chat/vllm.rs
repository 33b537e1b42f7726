//! Prepares a conversation as vLLM does (`vllm/renderers/chat_utils.py`, `hf.py` and the request's protocol, version 0.32).

use minijinja::Value;
use minijinja::value::ValueKind;

use super::messages::{ContentPart, ObjectBuilder, has, items, member, pairs, part, role};
use super::{
    BILLING_LINE, MessageRole, PreparedMessage, TemplateInput, TemplateTraits, arguments, client_variables,
    continuation, default_variable, developer, prepare_messages, set_variable,
};
use crate::api::ConversationApi;
use crate::body::ChatBody;
use crate::dialect::ContentFormat;
use crate::error::PromptError;

pub(super) fn prepare(
    format: ContentFormat,
    template: TemplateTraits,
    body: &ChatBody,
    known: &[PreparedMessage],
) -> Result<TemplateInput, PromptError> {
    let add_generation_prompt = body.add_generation_prompt.unwrap_or(true);
    let continues = body.continue_final_message.unwrap_or(false);
    if add_generation_prompt && continues {
        let problem = "`continue_final_message` needs `add_generation_prompt` to be false";
        return Err(PromptError::Malformed(problem.to_owned()));
    }
    let prepared = prepare_messages(body, known, |message| prepare_message(format, message))?;
    let mut messages: Vec<Value> = prepared.iter().map(|prepared| prepared.message.clone()).collect();
    let has_developers = prepared.iter().any(|prepared| prepared.role == MessageRole::Developer);
    let is_in_order = template.has_developers || !has_developers;
    if !is_in_order {
        messages = developer::as_system(messages)?;
    }
    let mut variables = client_variables(body)?;
    if let Some(effort) = body.reasoning_effort.as_ref().filter(|effort| !effort.is_none()) {
        set_variable(&mut variables, "reasoning_effort", effort.clone());
        default_variable(&mut variables, "enable_thinking", effort.as_str() != Some("none"));
    }
    let continuation = if continues { Some(continuation::mark(&mut messages)?) } else { None };
    Ok(TemplateInput {
        messages,
        prepared,
        is_in_order,
        tools: prepare_tools(body)?,
        documents: body.documents.clone().unwrap_or(Value::from(())),
        add_generation_prompt,
        variables,
        continuation,
        suffix: None,
        add_special_tokens: body.add_special_tokens.unwrap_or(false),
    })
}

fn prepare_message(format: ContentFormat, message: &Value) -> Result<PreparedMessage, PromptError> {
    let role = role(message)?;
    let content = prepare_content(format, &role, member(message, "content"))?;
    let mut out = ObjectBuilder::default().with("role", role.as_str()).with("content", content);
    match role.as_str() {
        "assistant" => {
            let reasoning = member(message, "reasoning").or_else(|| member(message, "reasoning_content"));
            out = out.with_some("tool_calls", prepare_calls(member(message, "tool_calls"))?);
            out = out.with_some("reasoning", reasoning.clone()).with_some("reasoning_content", reasoning);
        }
        "tool" if has(message, "tool_call_id") => {
            let id = member(message, "tool_call_id").unwrap_or(Value::from(()));
            out = out.with("tool_call_id", id);
        }
        _ => {}
    }
    out = out.with_some("name", member(message, "name").filter(|name| name.as_str().is_some()));
    out = out.with_some("task", member(message, "task").filter(|task| task.as_str().is_some()));
    if role == "developer" {
        out = out.with("tools", member(message, "tools").unwrap_or(Value::from(())));
    }
    Ok(PreparedMessage { message: out.build(), role: MessageRole::of(&role) })
}

fn prepare_content(format: ContentFormat, role: &str, content: Option<Value>) -> Result<Value, PromptError> {
    let parts = match content {
        None => Vec::new(),
        Some(text) if text.as_str().is_some() => {
            // The common case: the text is shared, not copied.
            let stripped =
                role == "system" && text.as_str().is_some_and(|text| text.starts_with(BILLING_LINE));
            if format == ContentFormat::Text && !stripped {
                return Ok(text);
            }
            vec![text]
        }
        Some(list) => items(&list, "content")?,
    };
    let mut texts = Vec::new();
    let mut references = false;
    for value in &parts {
        match part(value)? {
            ContentPart::Text(kind, text) => {
                let text = match text.strip_prefix(BILLING_LINE) {
                    Some(rest) if role == "system" && kind == "text" => match rest.split_once('\n') {
                        Some((_, rest)) if !rest.is_empty() => rest.to_owned(),
                        _ => continue,
                    },
                    _ => text,
                };
                texts.push((text, extra_members(value)?));
            }
            ContentPart::ToolReference(_) => references = true,
        }
    }
    if references {
        return Err(PromptError::UnsupportedMember("tool_reference"));
    }
    if format == ContentFormat::Parts && role != "tool" {
        let typed = texts.into_iter().map(|(text, extra)| {
            let own = [("type".to_owned(), Value::from("text")), ("text".to_owned(), Value::from(text))];
            Value::from_pairs(own.into_iter().chain(extra))
        });
        return Ok(typed.collect());
    }
    // Empty texts are dropped before joining, so they leave no empty line.
    let keep_empty = format == ContentFormat::Parts;
    let texts: Vec<String> =
        texts.into_iter().map(|(text, _)| text).filter(|text| keep_empty || !text.is_empty()).collect();
    Ok(Value::from(texts.join("\n")))
}

/// Members of a text part that OpenAI's types do not define; vLLM passes them to the template.
fn extra_members(part: &Value) -> Result<Vec<(String, Value)>, PromptError> {
    if part.kind() != ValueKind::Map {
        return Ok(Vec::new());
    }
    let mut extra = pairs(part, "content")?;
    extra.retain(|(name, _)| !matches!(name.as_str(), "type" | "text" | "refusal" | "thinking"));
    if extra.is_empty() { Ok(extra) } else { Err(PromptError::UnsupportedMember("content")) }
}

fn prepare_calls(calls: Option<Value>) -> Result<Option<Value>, PromptError> {
    let Some(calls) = calls else { return Ok(None) };
    let calls = items(&calls, "tool_calls")?;
    if calls.is_empty() {
        return Ok(None);
    }
    let mut prepared = Vec::with_capacity(calls.len());
    for call in calls {
        let function = member(&call, "function");
        let typed = member(&call, "type").is_none_or(|kind| kind.as_str() == Some("function"));
        let Some(function) = function.filter(|function| typed && function.kind() == ValueKind::Map) else {
            return Err(PromptError::Malformed("a tool call is not a function's".to_owned()));
        };
        let parsed = member(&function, "arguments").and_then(|given| arguments::object(&given));
        let parsed = parsed.unwrap_or_else(|| Value::from_pairs(Vec::<(String, Value)>::new()));
        let function = replaced(pairs(&function, "function")?, "arguments", parsed);
        prepared.push(replaced(pairs(&call, "tool_calls")?, "function", function));
    }
    Ok(Some(Value::from(prepared)))
}

/// The object with one member replaced, or appended if missing.
fn replaced(mut members: Vec<(String, Value)>, name: &str, value: Value) -> Value {
    match members.iter_mut().find(|(other, _)| other == name) {
        Some((_, old)) => *old = value,
        None => members.push((name.to_owned(), value)),
    }
    Value::from_pairs(members)
}

/// Tools as vLLM's own types serialize them: known members only, in the order of the type, missing ones as null.
fn prepare_tools(body: &ChatBody) -> Result<Option<Vec<Value>>, PromptError> {
    let Some(tools) = &body.tools else { return Ok(None) };
    // Converted from another API, the list may be empty.
    if tools.is_empty() && body.api == ConversationApi::Chat {
        return Err(PromptError::Malformed("`tools` is empty".to_owned()));
    }
    let prepared = tools.iter().map(|tool| {
        let function = member(tool, "function")
            .ok_or_else(|| PromptError::Malformed("a tool has no `function`".to_owned()))?;
        let null = || Value::from(());
        let late = member(tool, "defer_loading");
        let function = ObjectBuilder::default()
            .with("name", member(&function, "name").unwrap_or_else(null))
            .with("description", member(&function, "description").unwrap_or_else(null))
            .with("parameters", member(&function, "parameters").unwrap_or_else(null))
            .with_some("strict", member(&function, "strict"))
            .with_some("defer_loading", member(&function, "defer_loading").or_else(|| late.clone()))
            .build();
        Ok(ObjectBuilder::default()
            .with("type", "function")
            .with("function", function)
            .with_some("defer_loading", late)
            .build())
    });
    prepared.collect::<Result<_, _>>().map(Some)
}
