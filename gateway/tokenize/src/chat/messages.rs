//! Reading the members of messages, and building the messages that a template sees.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::failed;
use crate::error::PromptError;

/// A member of an object; nothing if it is missing or null.
pub(super) fn member(object: &Value, name: &str) -> Option<Value> {
    object.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none())
}

/// Whether the object has this member, be it null.
pub(super) fn has(object: &Value, name: &str) -> bool {
    object.get_attr(name).is_ok_and(|value| !value.is_undefined())
}

/// The message's role.
pub(super) fn role(message: &Value) -> Result<String, PromptError> {
    let role = member(message, "role");
    role.as_ref()
        .and_then(Value::as_str)
        .map(str::to_owned)
        .ok_or_else(|| PromptError::Malformed("a message has no `role`".to_owned()))
}

/// The elements of a list.
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

/// An object under construction. Templates may print whole objects, so the order counts.
#[derive(Debug, Default)]
pub(super) struct ObjectBuilder(Vec<(&'static str, Value)>);

impl ObjectBuilder {
    pub(super) fn with(mut self, name: &'static str, value: impl Into<Value>) -> ObjectBuilder {
        self.0.push((name, value.into()));
        self
    }

    /// Adds the member unless there is no value.
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

/// A part of a list-like content.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ContentPart {
    /// Text under the name of its type.
    Text(&'static str, String),
    /// A reference to a tool, in one family of models.
    ToolReference(String),
}

/// Reads a part. Both engines know these types; what is an image, audio or video is theirs alone.
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
