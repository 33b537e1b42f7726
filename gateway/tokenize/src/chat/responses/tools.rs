//! Custom tools of the Responses API. Their input is a text, for which both engines describe a function with one argument to the model.

use minijinja::Value;

use crate::chat::messages::ObjectBuilder;

/// Name of the only argument.
const INPUT: &str = "input";

/// The JSON schema of a custom tool's function.
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

/// A tool of the template's input.
pub(super) fn function_tool(function: ObjectBuilder) -> Value {
    ObjectBuilder::default().with("type", "function").with("function", function.build()).build()
}
