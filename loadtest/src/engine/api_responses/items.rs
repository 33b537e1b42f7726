//! Output items, with the members of each engine.

use serde_json::{Value, json};

use super::super::SimProtocol;
use super::super::render::{ChoiceOutput, ResponseRenderer};
use super::super::response::hex_id;

/// A new id. vLLM's have 16 digits; SGLang's have 32, those of function calls 8.
pub(super) fn new_id(protocol: SimProtocol, prefix: &str) -> String {
    let digits = match protocol {
        SimProtocol::Vllm => 16,
        SimProtocol::Sglang if prefix == "fc" => 8,
        SimProtocol::Sglang => 32,
    };
    format!("{prefix}_{}", &hex_id()[..digits])
}

/// Reasoning; `text` is missing while the item is in progress.
pub(super) fn reasoning(
    protocol: SimProtocol,
    id: &str,
    text: Option<&str>,
    with_summary: bool,
    status: Option<&str>,
) -> Value {
    let content = match (text, protocol) {
        (Some(text), _) => json!([{"type": "reasoning_text", "text": text}]),
        (None, SimProtocol::Vllm) => Value::Null,
        (None, SimProtocol::Sglang) => json!([]),
    };
    let summary = match text.filter(|_| with_summary) {
        Some(text) => json!([{"type": "summary_text", "text": text}]),
        None => json!([]),
    };
    json!({"type": "reasoning", "id": id, "summary": summary, "content": content, "encrypted_content": null,
           "status": status})
}

pub(super) fn output_text(text: &str, logprobs: &Value) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

/// A message; `text` is missing while the item is in progress.
pub(super) fn message(protocol: SimProtocol, id: &str, text: Option<&str>) -> Value {
    let content = text.filter(|text| !text.is_empty()).map(|text| output_text(text, &Value::Null));
    let status = if text.is_some() { "completed" } else { "in_progress" };
    // The simulated model does not comment on its calls.
    let phase = (protocol == SimProtocol::Sglang).then_some("final_answer");
    json!({"type": "message", "id": id, "role": "assistant", "content": content.into_iter().collect::<Vec<_>>(),
           "status": status, "phase": phase})
}

/// A function call; `arguments` are missing while the item is in progress.
pub(super) fn function_call(
    protocol: SimProtocol,
    id: &str,
    call_id: &str,
    name: &str,
    arguments: Option<&str>,
) -> Value {
    let status = if arguments.is_some() { "completed" } else { "in_progress" };
    let mut item = json!({"type": "function_call", "id": id, "call_id": call_id, "name": name,
                          "arguments": arguments.unwrap_or_default(), "status": status});
    if protocol == SimProtocol::Vllm {
        for unset in ["async", "caller", "namespace"] {
            item[unset] = Value::Null;
        }
    }
    item
}

/// The items of a whole output.
pub(super) fn of_output(
    renderer: &ResponseRenderer,
    output: &ChoiceOutput,
    with_summary: bool,
) -> Vec<Value> {
    let protocol = renderer.protocol;
    let mut items = Vec::new();
    if !output.reasoning.is_empty() {
        // Without a stream, vLLM leaves the status of reasoning out.
        let status = (protocol == SimProtocol::Sglang).then_some("completed");
        let id = new_id(protocol, "rs");
        items.push(reasoning(protocol, &id, Some(&output.reasoning), with_summary, status));
    }
    match renderer.called_tool(output) {
        Some(name) => {
            let (id, call_id) = (new_id(protocol, "fc"), renderer.call_id(0));
            items.push(function_call(protocol, &id, &call_id, name, Some(&output.text)));
        }
        None if !output.text.is_empty() => {
            items.push(message(protocol, &new_id(protocol, "msg"), Some(&output.text)));
        }
        None => {}
    }
    items
}
