//! Messages of the role `developer`, for templates that do not have it (`vllm/renderers/hf.py`, version 0.32). SGLang passes them to every
//! template.

use minijinja::Value;

use super::failed;
use super::messages::{ObjectBuilder, member, pairs};
use crate::error::PromptError;

/// Converts messages of developers to system messages. If there are any, all system messages are merged into one at the start, since
/// templates may reject them elsewhere.
pub(super) fn as_system(messages: Vec<Value>) -> Result<Vec<Value>, PromptError> {
    if !messages.iter().any(|message| has_role(message, "developer")) {
        return Ok(messages);
    }
    let converted = messages
        .into_iter()
        .map(|message| if has_role(&message, "developer") { converted(&message) } else { Ok(message) });
    let messages = converted.collect::<Result<Vec<_>, _>>()?;
    if !needs_merge(&messages) {
        return Ok(messages);
    }
    let (system, others): (Vec<Value>, Vec<Value>) =
        messages.into_iter().partition(|message| has_role(message, "system"));
    let texts = system.iter().map(text).collect::<Result<Vec<_>, _>>()?;
    let texts: Vec<String> = texts.into_iter().filter(|text| !text.is_empty()).collect();
    let merged = ObjectBuilder::default().with("role", "system").with("content", texts.join("\n\n")).build();
    Ok(std::iter::once(merged).chain(others).collect())
}

fn has_role(message: &Value, role: &str) -> bool {
    member(message, "role").is_some_and(|given| given.as_str() == Some(role))
}

/// A developer's message as a system message, without its tools.
fn converted(message: &Value) -> Result<Value, PromptError> {
    let mut members = pairs(message, "messages")?;
    members.retain(|(name, _)| name != "tools");
    for (name, value) in &mut members {
        if name == "role" {
            *value = Value::from("system");
        }
    }
    Ok(Value::from_pairs(members))
}

/// Whether a system message is not the first message.
fn needs_merge(messages: &[Value]) -> bool {
    messages.iter().skip(1).any(|message| has_role(message, "system"))
}

/// The message's text; the texts of parts, each on its own line.
fn text(message: &Value) -> Result<String, PromptError> {
    let Some(content) = member(message, "content") else { return Ok(String::new()) };
    if let Some(text) = content.as_str() {
        return Ok(text.to_owned());
    }
    let texts = content.try_iter().map_err(failed)?.filter_map(|part| {
        let text = member(&part, "text")?;
        text.as_str().map(str::to_owned)
    });
    Ok(texts.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn converted(messages: &serde_json::Value) -> serde_json::Value {
        let messages: Vec<Value> = serde_json::from_value(messages.clone()).unwrap();
        serde_json::to_value(as_system(messages).unwrap()).unwrap()
    }

    #[test]
    fn one_developer_at_the_start_becomes_the_system() {
        let parts = json!([{ "type": "text", "text": "a" }]);
        assert_eq!(
            converted(&json!([{ "role": "developer", "content": parts, "name": "n", "tools": [] },
                { "role": "user", "content": "b" }])),
            json!([{ "role": "system", "content": parts, "name": "n" }, { "role": "user", "content": "b" }])
        );
        let later = json!([{ "role": "user", "content": "a" }, { "role": "system", "content": "b" }]);
        assert_eq!(converted(&later), later, "without a developer, nothing is merged");
    }

    #[test]
    fn several_system_messages_are_merged_at_the_start() {
        let parts = json!([{ "type": "text", "text": "b" }, { "type": "text", "text": "c" }]);
        assert_eq!(
            converted(&json!([{ "role": "system", "content": "a" }, { "role": "user", "content": "x" },
                { "role": "developer", "content": parts, "tools": null }, { "role": "developer", "content": "" }])),
            json!([{ "role": "system", "content": "a\n\nb\nc" }, { "role": "user", "content": "x" }])
        );
        assert_eq!(
            converted(&json!([{ "role": "user", "content": "x" }, { "role": "developer", "content": "a" }])),
            json!([{ "role": "system", "content": "a" }, { "role": "user", "content": "x" }])
        );
    }
}
