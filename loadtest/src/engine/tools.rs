//! Tool calls: when the simulated model makes one, and with which arguments.

use std::collections::VecDeque;

use serde_json::{Map, Value};

use super::tokens::{BYTES_PER_TOKEN, TokenGenerator};

/// Text in the last user message that triggers a tool call.
pub(crate) const TOOL_CALL_TRIGGER: &str = "call_tool";

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SimToolCall {
    /// Name of the called function.
    pub(crate) name: String,
    parameters: Value,
}

impl SimToolCall {
    /// The tool call of a chat request: forced by `tool_choice`, or triggered by the last user message.
    pub(crate) fn of(body: &Map<String, Value>, last_user_text: &str) -> Option<Self> {
        let tools = body.get("tools")?.as_array()?;
        let choice = body.get("tool_choice");
        if choice.and_then(Value::as_str) == Some("none") {
            return None;
        }
        let forced_name = choice.and_then(|choice| choice.pointer("/function/name")).and_then(Value::as_str);
        let forced = forced_name.is_some() || choice.and_then(Value::as_str) == Some("required");
        if !forced && !last_user_text.contains(TOOL_CALL_TRIGGER) {
            return None;
        }
        let functions: Vec<&Value> = tools.iter().filter_map(|tool| tool.get("function")).collect();
        let name_of = |function: &&Value| function.get("name").and_then(Value::as_str).map(str::to_owned);
        let function = match forced_name {
            Some(requested) => {
                functions.iter().find(|function| name_of(function).as_deref() == Some(requested))?
            }
            None => functions.first()?,
        };
        let parameters = function.get("parameters").cloned().unwrap_or(Value::Null);
        Some(Self { name: name_of(function)?, parameters })
    }

    /// The arguments, as JSON text.
    pub(crate) fn arguments(&self, generator: TokenGenerator) -> String {
        let mut arguments = Map::new();
        let properties = self.parameters.get("properties").and_then(Value::as_object);
        for (index, (name, schema)) in properties.into_iter().flatten().enumerate() {
            let word = generator.token_text(index as u64);
            let value = match schema.get("type").and_then(Value::as_str) {
                Some("integer" | "number") => Value::from(word.bytes().map(u64::from).sum::<u64>()),
                Some("boolean") => Value::Bool(word.len() == BYTES_PER_TOKEN),
                Some("array") => Value::Array(Vec::new()),
                Some("object") => Value::Object(Map::new()),
                _ => match schema.get("enum").and_then(Value::as_array).and_then(|allowed| allowed.first()) {
                    Some(allowed) => allowed.clone(),
                    None => Value::String(word.trim_start().to_owned()),
                },
            };
            arguments.insert(name.clone(), value);
        }
        Value::Object(arguments).to_string()
    }

    /// The arguments, split into tokens.
    pub(crate) fn argument_tokens(&self, generator: TokenGenerator) -> VecDeque<String> {
        let characters: Vec<char> = self.arguments(generator).chars().collect();
        characters.chunks(BYTES_PER_TOKEN).map(|piece| piece.iter().collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn body(choice: &Value) -> Map<String, Value> {
        let tools = json!([
            {"type": "function", "function": {"name": "first", "parameters": {}}},
            {"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]);
        let body = json!({"tools": tools, "tool_choice": choice});
        body.as_object().cloned().expect("an object")
    }

    #[test]
    fn tool_is_called_when_forced_or_triggered() {
        let generator = TokenGenerator::new(1, 0);
        let named = json!({"type": "function", "function": {"name": "weather"}});
        let plan = SimToolCall::of(&body(&named), "hi").expect("forced");
        let arguments: Value = serde_json::from_str(&plan.arguments(generator)).expect("JSON");
        assert!(arguments["city"].is_string() && arguments["days"].is_u64());
        assert_eq!(
            plan.argument_tokens(generator).into_iter().collect::<String>(),
            plan.arguments(generator)
        );
        assert_eq!(
            SimToolCall::of(&body(&json!("required")), "hi").map(|plan| plan.name),
            Some("first".to_owned())
        );
        assert!(SimToolCall::of(&body(&json!("auto")), "hi").is_none());
        assert!(SimToolCall::of(&body(&json!("auto")), "please call_tool").is_some());
        assert!(SimToolCall::of(&body(&json!("none")), "call_tool").is_none());
    }
}
