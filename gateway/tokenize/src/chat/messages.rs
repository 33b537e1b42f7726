//! Reads the members of messages, and builds the messages for the template.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::failed;
use crate::error::PromptError;

/// A member of an object; `None` if it is missing or null.
pub(super) fn member(object: &Value, name: &str) -> Option<Value> {
    object.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none())
}

/// Whether the object has this member, including null.
pub(super) fn has(object: &Value, name: &str) -> bool {
    object.get_attr(name).is_ok_and(|value| !value.is_undefined())
}

/// A text member of an object; `None` if it is missing or null.
///
/// # Errors
/// [`PromptError::Malformed`] if it is not a text.
pub(super) fn text_member(object: &Value, name: &str) -> Result<Option<String>, PromptError> {
    let Some(value) = member(object, name) else { return Ok(None) };
    match value.as_str() {
        Some(text) => Ok(Some(text.to_owned())),
        None => Err(PromptError::Malformed(format!("`{name}` is not a text"))),
    }
}

/// The `type` of a part, block or item.
pub(super) fn kind_of(object: &Value) -> Option<String> {
    member(object, "type").and_then(|kind| kind.as_str().map(str::to_owned))
}

/// The message's role.
pub(super) fn role(message: &Value) -> Result<String, PromptError> {
    let role = member(message, "role");
    role.as_ref()
        .and_then(Value::as_str)
        .map(str::to_owned)
        .ok_or_else(|| PromptError::Malformed("a message has no `role`".to_owned()))
}

/// The elements of the list; an error if it is not a list.
pub(super) fn items(list: &Value, name: &str) -> Result<Vec<Value>, PromptError> {
    if list.kind() != ValueKind::Seq {
        return Err(PromptError::Malformed(format!("`{name}` is not a list")));
    }
    Ok(list.try_iter().map_err(failed)?.collect())
}

/// The members of an object, in order.
pub(super) fn pairs(object: &Value, name: &str) -> Result<Vec<(String, Value)>, PromptError> {
    if object.kind() != ValueKind::Map {
        return Err(PromptError::Malformed(format!("`{name}` is not an object")));
    }
    let keys = object.try_iter().map_err(failed)?;
    keys.map(|key| Ok((key.to_string(), object.get_item(&key).map_err(failed)?))).collect()
}

/// Builder of an object. Templates may print whole objects, so it keeps the order of members.
#[derive(Debug, Default)]
pub(super) struct ObjectBuilder(Vec<(&'static str, Value)>);

impl ObjectBuilder {
    pub(super) fn with(mut self, name: &'static str, value: impl Into<Value>) -> ObjectBuilder {
        self.0.push((name, value.into()));
        self
    }

    /// Adds the member if it has a value.
    pub(super) fn with_some(self, name: &'static str, value: Option<Value>) -> ObjectBuilder {
        match value {
            Some(value) => self.with(name, value),
            None => self,
        }
    }

    pub(super) fn build(self) -> Value {
        Value::from_pairs(self.0)
    }
}

/// A message of the template's input with this content.
pub(super) fn message(role: &str, content: impl Into<Value>) -> Value {
    ObjectBuilder::default().with("role", role).with("content", content).build()
}

/// A text in a list of parts.
pub(super) fn text_part(text: impl Into<Value>) -> Value {
    ObjectBuilder::default().with("type", "text").with("text", text).build()
}

/// A part of a message's content list.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ContentPart {
    /// Text under the name of its type.
    Text(&'static str, String),
    /// A reference to a tool, used by one family of models.
    ToolReference(String),
}

/// Parses a part of a type that both engines support. Images, audio and video are left to the engines.
pub(super) fn part(part: &Value) -> Result<ContentPart, PromptError> {
    if let Some(text) = part.as_str() {
        return Ok(ContentPart::Text("text", text.to_owned()));
    }
    let kind = member(part, "type");
    let kind = kind.as_ref().and_then(Value::as_str).unwrap_or_default();
    let string = |name: &str| {
        let text = member(part, name);
        text.as_ref()
            .and_then(Value::as_str)
            .map(str::to_owned)
            .ok_or_else(|| PromptError::Malformed(format!("a part of type `{kind}` has no `{name}`")))
    };
    match kind {
        "text" => Ok(ContentPart::Text("text", string("text")?)),
        "input_text" => Ok(ContentPart::Text("input_text", string("text")?)),
        "output_text" => Ok(ContentPart::Text("output_text", string("text")?)),
        "refusal" => Ok(ContentPart::Text("refusal", string("refusal")?)),
        "thinking" => Ok(ContentPart::Text("thinking", string("thinking")?)),
        "tool_reference" => Ok(ContentPart::ToolReference(string("name")?)),
        _ if ["image", "audio", "video", "file"].iter().any(|medium| kind.contains(medium)) => {
            Err(PromptError::Multimodal(kind.to_owned()))
        }
        _ => Err(PromptError::Malformed(format!("a part of type `{kind}`"))),
    }
}
