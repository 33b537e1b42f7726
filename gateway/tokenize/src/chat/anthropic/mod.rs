//! Converts requests of Anthropic's Messages API to chats.

mod sglang;
mod vllm;

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Deserialize;

use super::messages::{ObjectBuilder, items, kind_of, member, message, pairs, text_member};
use super::rules::TemplateRules;
use super::tools;
use crate::api::ConversationApi;
use crate::body::{ChatBody, malformed};
use crate::dialect::PromptDialect;
use crate::error::PromptError;

/// Members of a `/v1/messages` body that determine the prompt.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct MessagesBody {
    pub(crate) messages: Vec<Value>,
    #[serde(default)]
    system: Option<Value>,
    #[serde(default)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    tool_choice: Option<Value>,
    #[serde(default)]
    thinking: Option<Value>,
    #[serde(default)]
    output_config: Option<Value>,
    #[serde(default)]
    chat_template_kwargs: Option<Value>,
    /// Size of the body in bytes.
    #[serde(skip)]
    pub(crate) bytes: usize,
}

impl MessagesBody {
    pub(crate) fn parse(body: &[u8]) -> Result<MessagesBody, PromptError> {
        let read: MessagesBody = serde_json::from_slice(body).map_err(malformed)?;
        Ok(MessagesBody { bytes: body.len(), ..read })
    }

    /// The chat that `engine` converts it to.
    pub(crate) fn to_chat(
        &self,
        engine: PromptDialect,
        rules: &TemplateRules<'_>,
    ) -> Result<ChatBody, PromptError> {
        let chat = match engine {
            PromptDialect::Vllm => vllm::convert(self, rules)?,
            PromptDialect::Sglang => sglang::convert(self, rules.merges_systems)?,
        };
        Ok(ChatBody { api: ConversationApi::Messages, bytes: self.bytes, ..chat })
    }

    /// `output_config.effort`, if it is one of `known`.
    fn effort(&self, known: &[&str]) -> Result<Option<String>, PromptError> {
        let Some(config) = &self.output_config else { return Ok(None) };
        let Some(effort) = text_member(config, "effort")? else { return Ok(None) };
        if known.contains(&effort.as_str()) {
            Ok(Some(effort))
        } else {
            Err(PromptError::Malformed(format!("no effort is named `{effort}`")))
        }
    }
}

/// How an engine converts messages, where engines differ.
struct MessageConversion {
    /// The texts of the member `system`.
    system_prompt: fn(&Value) -> Result<Vec<String>, PromptError>,
    /// The text of a system message; `None` if it has none.
    inline_system: fn(&Value) -> Result<Option<String>, PromptError>,
    /// Between the texts of the system prompt.
    separator: &'static str,
    /// Appends what a message with this role is converted to.
    message: fn(&'static str, &Value, &mut Vec<Value>) -> Result<(), PromptError>,
}

impl MessageConversion {
    /// The messages of a chat. With `merges_systems`, all system messages become part of the first.
    fn convert(&self, body: &MessagesBody, merges_systems: bool) -> Result<Vec<Value>, PromptError> {
        let mut system = body.system.as_ref().map_or(Ok(Vec::new()), self.system_prompt)?;
        if merges_systems {
            for inline in &body.messages {
                if role(inline)? == "system" {
                    system.extend((self.inline_system)(inline)?);
                }
            }
        }
        let mut messages = Vec::with_capacity(body.messages.len() + 1);
        if !system.is_empty() {
            messages.push(message("system", system.join(self.separator)));
        }
        for given in &body.messages {
            match role(given)? {
                "system" if merges_systems => {}
                role => (self.message)(role, given, &mut messages)?,
            }
        }
        Ok(messages)
    }
}

/// The blocks of a message; `None` for a text, which is appended as it is.
fn blocks_of(
    role: &'static str,
    given: &Value,
    messages: &mut Vec<Value>,
) -> Result<Option<Vec<Value>>, PromptError> {
    match MessageContent::of(given)? {
        MessageContent::Text(text) => {
            messages.push(message(role, text));
            Ok(None)
        }
        MessageContent::Blocks(blocks) => Ok(Some(blocks)),
    }
}

/// The content of a message.
enum MessageContent {
    Text(Value),
    Blocks(Vec<Value>),
}

impl MessageContent {
    fn of(message: &Value) -> Result<MessageContent, PromptError> {
        match member(message, "content") {
            Some(text) if text.as_str().is_some() => Ok(MessageContent::Text(text)),
            Some(blocks) => items(&blocks, "content").map(MessageContent::Blocks),
            None => Err(PromptError::Malformed("a message has no `content`".to_owned())),
        }
    }
}

/// A message's role, which Anthropic's API restricts to three.
fn role(message: &Value) -> Result<&'static str, PromptError> {
    let role = super::messages::role(message)?;
    ["user", "assistant", "system"]
        .into_iter()
        .find(|known| *known == role)
        .ok_or_else(|| PromptError::Malformed(format!("no role is named `{role}`")))
}

/// A message of the template's input with these members, of which those without a value are left out.
fn message_of(
    role: &'static str,
    reasoning: Option<String>,
    calls: Vec<Value>,
    content: Vec<Value>,
) -> Value {
    ObjectBuilder::default()
        .with("role", role)
        .with_some("reasoning", reasoning.map(Value::from))
        .with_some("tool_calls", (!calls.is_empty()).then(|| Value::from(calls)))
        .with_some("content", (!content.is_empty()).then(|| content_of(content)))
        .build()
}

/// The message of a tool's result.
fn result_message(call_id: &str, content: Value) -> Value {
    ObjectBuilder::default()
        .with("role", "tool")
        .with("tool_call_id", call_id)
        .with("content", content)
        .build()
}

fn image_part(url: Value) -> Value {
    let url = ObjectBuilder::default().with("url", url).build();
    ObjectBuilder::default().with("type", "image_url").with("image_url", url).build()
}

/// The content of a message with these parts: a single text without a list around it.
fn content_of(parts: Vec<Value>) -> Value {
    match parts.as_slice() {
        [only] if kind_of(only).as_deref() == Some("text") => {
            member(only, "text").unwrap_or_else(|| Value::from(""))
        }
        _ => Value::from(parts),
    }
}

/// The call of a `tool_use` block.
fn tool_call(block: &Value) -> Result<Value, PromptError> {
    // An engine invents the id of a call without one.
    let id = text_member(block, "id")?
        .filter(|id| !id.is_empty())
        .ok_or_else(|| PromptError::UnsupportedContent("tool_use without an id".to_owned()))?;
    let input = member(block, "input").unwrap_or_else(|| Value::from_pairs(Vec::<(String, Value)>::new()));
    if input.kind() != ValueKind::Map {
        return Err(PromptError::Malformed("the `input` of a tool call is not an object".to_owned()));
    }
    Ok(tools::tool_call(Some(id), text_member(block, "name")?.unwrap_or_default(), input))
}

/// A tool's `input_schema`, with the type that engines add.
fn schema(tool: &Value) -> Result<Value, PromptError> {
    let schema = member(tool, "input_schema")
        .ok_or_else(|| PromptError::Malformed("a tool has no `input_schema`".to_owned()))?;
    let mut members = pairs(&schema, "input_schema")?;
    if members.iter().any(|(name, _)| name == "type") {
        return Ok(schema);
    }
    members.push(("type".to_owned(), Value::from("object")));
    Ok(Value::from_pairs(members))
}

/// The type of a block.
fn block_kind(block: &Value) -> Result<String, PromptError> {
    kind_of(block).ok_or_else(|| PromptError::Malformed("a content block has no `type`".to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;

    fn convert(engine: PromptDialect, content: &Json) -> Result<Json, PromptError> {
        let body = json!({ "messages": [{ "role": "user", "content": content }] }).to_string();
        let rules = TemplateRules { merges_systems: false, effort_without_thinking: &|| "none" };
        let chat = MessagesBody::parse(body.as_bytes())?.to_chat(engine, &rules)?;
        Ok(serde_json::to_value(chat.messages).unwrap())
    }

    #[test]
    fn images_are_addresses() {
        let url = |engine, source: Json| {
            let converted = convert(engine, &json!([{ "type": "image", "source": source }])).unwrap();
            converted[0]["content"][0]["image_url"]["url"].clone()
        };
        for engine in [PromptDialect::Vllm, PromptDialect::Sglang] {
            assert_eq!(url(engine, json!({ "type": "url", "url": "https://h/a.png" })), "https://h/a.png");
            let webp = json!({ "type": "base64", "media_type": "image/webp", "data": "AA==" });
            assert_eq!(url(engine, webp), "data:image/webp;base64,AA==");
        }
        let untyped = json!({ "type": "base64", "data": "AA==" });
        assert_eq!(url(PromptDialect::Vllm, untyped.clone()), "data:image/jpeg;base64,AA==");
        assert_eq!(url(PromptDialect::Sglang, untyped), "data:image/png;base64,AA==");
    }

    #[test]
    fn results_are_before_the_text_in_vllm_and_in_place_in_sglang() {
        let content = json!([{ "type": "text", "text": "a" }, { "type": "tool_result", "tool_use_id": "t", "content": "b" }]);
        let (user, tool) = (
            json!({ "role": "user", "content": "a" }),
            json!({ "role": "tool", "tool_call_id": "t", "content": "b" }),
        );
        assert_eq!(convert(PromptDialect::Vllm, &content).unwrap(), json!([tool, user]));
        assert_eq!(convert(PromptDialect::Sglang, &content).unwrap(), json!([user, tool]));
    }

    #[test]
    fn a_call_without_id_has_no_known_prompt() {
        for engine in [PromptDialect::Vllm, PromptDialect::Sglang] {
            let call = convert(engine, &json!([{ "type": "tool_use", "name": "n", "input": {} }]));
            assert!(matches!(call, Err(PromptError::UnsupportedContent(_))), "{call:?}");
        }
    }

    #[test]
    fn invalid_members_are_malformed() {
        for engine in [PromptDialect::Vllm, PromptDialect::Sglang] {
            for content in [
                json!(null),
                json!(1),
                json!([1]),
                json!([{}]),
                json!([{ "type": "text", "text": 1 }]),
                json!([{ "type": "tool_use", "id": "a", "name": "n", "input": "x" }]),
                json!([{ "type": "tool_use", "id": 1, "name": "n", "input": {} }]),
                json!([{ "type": "tool_result", "tool_use_id": "a", "content": 1 }]),
            ] {
                let converted = convert(engine, &content);
                assert!(
                    matches!(converted, Err(PromptError::Malformed(_))),
                    "{engine:?} {content}: {converted:?}"
                );
            }
        }
    }
}
