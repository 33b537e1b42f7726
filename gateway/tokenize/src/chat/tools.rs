//! Tools and their calls in the template's input.

use minijinja::Value;

use super::messages::{ObjectBuilder, text_member};
use crate::error::PromptError;

/// Name of the only argument of a custom tool.
const INPUT: &str = "input";

/// A tool of the template's input, or the choice of one.
pub(super) fn function_tool(function: ObjectBuilder) -> Value {
    ObjectBuilder::default().with("type", "function").with("function", function.build()).build()
}

/// The name of a tool.
pub(super) fn tool_name(tool: &Value) -> Result<String, PromptError> {
    text_member(tool, "name")?.ok_or_else(|| PromptError::Malformed("a tool has no `name`".to_owned()))
}

/// The function of a call.
pub(super) fn called_function(name: String, arguments: Value) -> Value {
    ObjectBuilder::default().with("name", name).with("arguments", arguments).build()
}

/// A call of a tool.
pub(super) fn tool_call(id: Option<String>, name: String, arguments: Value) -> Value {
    ObjectBuilder::default()
        .with_some("id", id.map(Value::from))
        .with("type", "function")
        .with("function", called_function(name, arguments))
        .build()
}

/// The JSON schema of the function as which both engines describe a custom tool of the Responses API, whose input is a text.
pub(super) fn custom_parameters() -> Value {
    let input = ObjectBuilder::default()
        .with("type", "string")
        .with("description", "The freeform text payload for this tool.")
        .build();
    ObjectBuilder::default()
        .with("type", "object")
        .with("properties", ObjectBuilder::default().with(INPUT, input).build())
        .with("required", vec![INPUT])
        .with("additionalProperties", false)
        .build()
}

/// The arguments of a call of a custom tool.
pub(super) fn custom_arguments(input: String) -> Value {
    ObjectBuilder::default().with(INPUT, input).build()
}
