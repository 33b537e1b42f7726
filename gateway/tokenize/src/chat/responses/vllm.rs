//! Converts as vLLM does (`vllm/entrypoints/openai/responses/utils.py` and `protocol.py`, `vllm/tool_parsers/utils.py`, version 0.32).

use minijinja::Value;

use super::{NO_TRUNCATION, ResponsesBody, ResponsesInput, content_parts, item_kind};
use crate::body::ChatBody;
use crate::chat::messages::{ObjectBuilder, items, kind_of, member, message, role, text_member};
use crate::chat::tools::{called_function, custom_arguments, custom_parameters, function_tool, tool_name};
use crate::error::PromptError;

/// Between a namespace and the name of a tool in it.
const NAMESPACE_SEPARATOR: &str = "__";

pub(super) fn convert(body: &ResponsesBody) -> Result<ChatBody, PromptError> {
    let is_continued = is_last_continued(&body.input)?;
    let tools = body.tools.as_deref().filter(|tools| !tools.is_empty());
    let is_truncated = body.truncation.as_deref() != Some(NO_TRUNCATION);
    Ok(ChatBody {
        messages: convert_input(body)?,
        tools: tools.map(convert_tools).transpose()?,
        reasoning_effort: body.reasoning.as_ref().and_then(|reasoning| member(reasoning, "effort")),
        chat_template_kwargs: body.chat_template_kwargs.clone(),
        add_generation_prompt: Some(!is_continued),
        continue_final_message: Some(is_continued),
        // Unlike for chats, it is the tokenizer's default.
        add_special_tokens: Some(true),
        truncate_prompt_tokens: is_truncated.then_some(-1),
        max_completion_tokens: body.max_output_tokens,
        ..ChatBody::default()
    })
}

/// Whether the response continues the last item.
fn is_last_continued(input: &ResponsesInput) -> Result<bool, PromptError> {
    let ResponsesInput::Items(items) = input else { return Ok(false) };
    let Some(last) = items.last() else { return Ok(false) };
    let status = text_member(last, "status")?;
    Ok(matches!(item_kind(last).as_str(), "message" | "reasoning")
        && matches!(status.as_deref(), Some("in_progress" | "incomplete")))
}

fn convert_input(body: &ResponsesBody) -> Result<Vec<Value>, PromptError> {
    let mut turns = TurnBuilder::default();
    if let Some(instructions) = body.instructions() {
        turns.push(message("system", instructions));
    }
    match &body.input {
        ResponsesInput::Text(text) => turns.push(message("user", text.as_str())),
        ResponsesInput::Items(items) => items.iter().try_for_each(|item| turns.add(item))?,
    }
    Ok(turns.finish())
}

/// Assembles messages from items. A message of the assistant may consist of several items.
#[derive(Default)]
struct TurnBuilder {
    messages: Vec<Value>,
    /// The last message, if it is the assistant's.
    assistant: Option<AssistantTurn>,
}

/// A message of the assistant to which further items may be added.
#[derive(Default)]
struct AssistantTurn {
    content: Option<Value>,
    reasoning: Option<String>,
    calls: Vec<Value>,
}

impl TurnBuilder {
    fn add(&mut self, item: &Value) -> Result<(), PromptError> {
        match item_kind(item).as_str() {
            "function_call" => {
                let name = required(item, "name")?;
                let namespace = text_member(item, "namespace")?.filter(|namespace| !namespace.is_empty());
                let name = match namespace {
                    Some(namespace) => format!("{namespace}{NAMESPACE_SEPARATOR}{name}"),
                    None => name,
                };
                self.add_call(item, name, Value::from(required(item, "arguments")?))?;
            }
            "custom_tool_call" => {
                let input = text_member(item, "input")?.unwrap_or_default();
                self.add_call(item, required(item, "name")?, custom_arguments(input))?;
            }
            "function_call_output" | "custom_tool_call_output" => {
                let output = member(item, "output")
                    .ok_or_else(|| PromptError::Malformed("an output has no `output`".to_owned()))?;
                self.push(
                    ObjectBuilder::default()
                        .with("role", "tool")
                        .with("content", output)
                        .with("tool_call_id", member(item, "call_id").unwrap_or(Value::from(())))
                        .build(),
                );
            }
            "reasoning" => self.add_reasoning(item)?,
            "message" => self.add_message(item)?,
            other => return Err(PromptError::UnsupportedContent(other.to_owned())),
        }
        Ok(())
    }

    fn add_call(&mut self, item: &Value, name: String, arguments: Value) -> Result<(), PromptError> {
        let call = ObjectBuilder::default()
            .with("id", required(item, "call_id")?)
            .with("function", called_function(name, arguments))
            .with("type", "function");
        self.assistant.get_or_insert_default().calls.push(call.build());
        Ok(())
    }

    fn add_reasoning(&mut self, item: &Value) -> Result<(), PromptError> {
        if member(item, "encrypted_content").is_some_and(|content| content.is_true()) {
            return Err(PromptError::UnsupportedMember("encrypted_content"));
        }
        let mut reasoning = String::new();
        for name in ["content", "summary"] {
            let parts = member(item, name).map_or(Ok(Vec::new()), |parts| items(&parts, name))?;
            if let Some(first) = parts.first() {
                reasoning = required(first, "text")?;
                break;
            }
        }
        let turn = self.turn_without(|turn| turn.reasoning.is_some());
        turn.reasoning = Some(reasoning);
        Ok(())
    }

    fn add_message(&mut self, item: &Value) -> Result<(), PromptError> {
        let role = role(item)?;
        let content = member(item, "content")
            .ok_or_else(|| PromptError::Malformed("a message has no `content`".to_owned()))?;
        let parts = content_parts(&content)?;
        match role.as_str() {
            "assistant" => {
                let content = match parts {
                    None => content,
                    Some(parts) => assistant_content(item, parts)?,
                };
                self.turn_without(|turn| turn.content.is_some()).content = Some(content);
            }
            "user" | "system" | "developer" => {
                for part in parts.iter().flatten() {
                    match kind_of(part).as_deref() {
                        Some("input_text" | "input_image" | "input_file") => {}
                        other => {
                            return Err(PromptError::UnsupportedContent(
                                other.unwrap_or_default().to_owned(),
                            ));
                        }
                    }
                }
                // Its other members are passed on.
                self.push(item.clone());
            }
            other => return Err(PromptError::Malformed(format!("no role is named `{other}`"))),
        }
        Ok(())
    }

    /// The assistant's last message, or a new one if it already has the member.
    fn turn_without(&mut self, has_member: impl Fn(&AssistantTurn) -> bool) -> &mut AssistantTurn {
        if self.assistant.as_ref().is_some_and(has_member) {
            self.close();
        }
        self.assistant.get_or_insert_default()
    }

    fn push(&mut self, message: Value) {
        self.close();
        self.messages.push(message);
    }

    fn close(&mut self) {
        let Some(AssistantTurn { content, reasoning, calls }) = self.assistant.take() else { return };
        let message = ObjectBuilder::default()
            .with("role", "assistant")
            .with_some("content", content)
            .with_some("reasoning", reasoning.map(Value::from))
            .with_some("tool_calls", (!calls.is_empty()).then(|| Value::from(calls)));
        self.messages.push(message.build());
    }

    fn finish(mut self) -> Vec<Value> {
        self.close();
        self.messages
    }
}

/// vLLM takes the first part of an assistant's message only.
fn assistant_content(item: &Value, parts: Vec<Value>) -> Result<Value, PromptError> {
    let Some(first) = parts.first() else {
        return if kind_of(item).is_some() {
            Err(PromptError::Malformed("a message of the assistant has no parts".to_owned()))
        } else {
            Ok(Value::from(parts))
        };
    };
    match kind_of(first).as_deref() {
        Some("output_text" | "input_text") => required(first, "text").map(Value::from),
        Some("input_image" | "input_file") => Ok(Value::from(parts)),
        other => Err(PromptError::UnsupportedContent(other.unwrap_or_default().to_owned())),
    }
}

fn required(item: &Value, name: &str) -> Result<String, PromptError> {
    text_member(item, name)?
        .ok_or_else(|| PromptError::Malformed(format!("an item of the input has no `{name}`")))
}

/// Functions and custom tools. vLLM does not describe the tools of OpenAI's servers to the model.
fn convert_tools(tools: &[Value]) -> Result<Vec<Value>, PromptError> {
    let mut converted = Vec::with_capacity(tools.len());
    for tool in tools {
        match kind_of(tool).as_deref() {
            Some("function") => converted.push(function(tool, tool_name(tool)?)),
            Some("custom") => {
                let grammar = member(tool, "format").and_then(|format| kind_of(&format));
                if grammar.as_deref() == Some("grammar") {
                    return Err(PromptError::Malformed("a custom tool has a grammar".to_owned()));
                }
                let description = member(tool, "description");
                converted.push(function_tool(
                    ObjectBuilder::default()
                        .with("name", tool_name(tool)?)
                        .with_some("description", description)
                        .with("parameters", custom_parameters()),
                ));
            }
            Some("namespace") => {
                let namespace = tool_name(tool)?;
                let members = member(tool, "tools").map_or(Ok(Vec::new()), |tools| items(&tools, "tools"))?;
                for inner in members.iter().filter(|inner| kind_of(inner).as_deref() == Some("function")) {
                    let name = format!("{namespace}{NAMESPACE_SEPARATOR}{}", tool_name(inner)?);
                    converted.push(function(inner, name));
                }
            }
            Some(_) => {}
            None => return Err(PromptError::Malformed("a tool has no `type`".to_owned())),
        }
    }
    Ok(converted)
}

fn function(tool: &Value, name: String) -> Value {
    function_tool(
        ObjectBuilder::default()
            .with("name", name)
            .with_some("description", member(tool, "description"))
            .with_some("parameters", member(tool, "parameters"))
            .with_some("strict", member(tool, "strict"))
            .with_some("defer_loading", member(tool, "defer_loading")),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;

    fn convert_items(items: &Json) -> Result<ChatBody, PromptError> {
        convert(&ResponsesBody::parse(json!({ "input": items }).to_string().as_bytes()).unwrap())
    }

    fn messages(items: &Json) -> Json {
        serde_json::to_value(convert_items(items).unwrap().messages).unwrap()
    }

    #[test]
    fn an_item_with_the_same_member_begins_a_message() {
        let output = json!({ "type": "message", "role": "assistant", "content": [{ "type": "output_text", "text": "b" }] });
        assert_eq!(
            messages(&json!([{ "role": "assistant", "content": "" }, output])),
            json!([{ "role": "assistant", "content": "" }, { "role": "assistant", "content": "b" }])
        );
        let call = json!({ "type": "function_call", "call_id": "a", "name": "n", "arguments": "{}", "namespace": "" });
        let converted =
            json!({ "id": "a", "function": { "name": "n", "arguments": "{}" }, "type": "function" });
        assert_eq!(
            messages(&json!([{ "role": "assistant", "content": [] }, call, call])),
            json!([{ "role": "assistant", "content": [], "tool_calls": [converted, converted] }])
        );
        assert_eq!(
            messages(&json!([{ "type": "reasoning", "summary": [] }, output, call])),
            json!([{ "role": "assistant", "content": "b", "reasoning": "", "tool_calls": [converted] }])
        );
    }

    #[test]
    fn only_an_unfinished_last_message_is_continued() {
        let is_continued = |item: Json| convert_items(&json!([item])).unwrap().continue_final_message;
        for status in ["in_progress", "incomplete"] {
            let text = json!({ "role": "user", "content": "x", "status": status });
            assert_eq!(is_continued(text), Some(true));
            let reasoning = json!({ "type": "reasoning", "summary": [], "status": status });
            assert_eq!(is_continued(reasoning), Some(true));
            let output = json!({ "type": "function_call_output", "output": "x", "status": status });
            assert_eq!(is_continued(output), Some(false));
        }
        assert_eq!(
            is_continued(json!({ "role": "user", "content": "x", "status": "completed" })),
            Some(false)
        );
    }

    #[test]
    fn items_that_vllm_rejects_are_errors() {
        for item in [
            json!(1),
            json!({ "role": "tool", "content": "x" }),
            json!({ "role": "user" }),
            json!({ "role": "user", "content": 1 }),
            json!({ "type": "message", "role": "assistant", "content": [] }),
            json!({ "type": "message", "role": "assistant", "content": [{ "type": "refusal", "refusal": "no" }] }),
            json!({ "role": "user", "content": [{ "type": "output_text", "text": "a" }] }),
            json!({ "type": "reasoning", "summary": [], "encrypted_content": "x" }),
            json!({ "type": "function_call", "call_id": "a", "name": "n", "arguments": {} }),
            json!({ "type": "function_call", "name": "n", "arguments": "{}" }),
            json!({ "type": "function_call_output", "call_id": "a" }),
            json!({ "type": "web_search_call", "id": "a" }),
        ] {
            assert!(convert_items(&json!([item])).is_err(), "{item}");
        }
    }
}
