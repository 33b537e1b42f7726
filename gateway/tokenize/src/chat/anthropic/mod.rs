//! Converts requests of Anthropic's Messages API to chats.

mod sglang;
mod vllm;

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Deserialize;

use super::messages::{ObjectBuilder, items, kind_of, member, pairs, text_member};
use super::rules::TemplateRules;
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

/// The blocks of the system prompt; a text is one block.
fn system_blocks(system: &Value) -> Result<Vec<Value>, PromptError> {
    if system.as_str().is_some() { Ok(vec![system.clone()]) } else { items(system, "system") }
}

/// A message of the template's input with this content.
fn message(role: &'static str, content: impl Into<Value>) -> Value {
    ObjectBuilder::default().with("role", role).with("content", content).build()
}

fn text_part(text: impl Into<Value>) -> Value {
    ObjectBuilder::default().with("type", "text").with("text", text).build()
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
    let function = ObjectBuilder::default()
        .with("name", text_member(block, "name")?.unwrap_or_default())
        .with("arguments", input)
        .build();
    Ok(ObjectBuilder::default().with("id", id).with("type", "function").with("function", function).build())
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

/// The name of a tool.
fn tool_name(tool: &Value) -> Result<String, PromptError> {
    text_member(tool, "name")?.ok_or_else(|| PromptError::Malformed("a tool has no `name`".to_owned()))
}

/// The type of a block.
fn block_kind(block: &Value) -> Result<String, PromptError> {
    kind_of(block).ok_or_else(|| PromptError::Malformed("a content block has no `type`".to_owned()))
}
