//! The chat completion that is equal to a Responses request.

use serde_json::{Value, json};

use super::super::SimProtocol;
use super::super::response::SimRejection;
use super::store::StoredResponse;
use super::{Members, invalid};

/// Members that vLLM and SGLang pass on unchanged.
const VLLM_MEMBERS: [&str; 5] =
    ["cache_salt", "ec_transfer_params", "ignore_eos", "kv_transfer_params", "vllm_xargs"];
const SGLANG_MEMBERS: [&str; 8] = [
    "cache_salt",
    "extra_key",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
];

/// The conversation up to and including this request, as the engine stores it: vLLM chat messages, SGLang items.
pub(super) fn history(
    protocol: SimProtocol,
    previous: Option<&StoredResponse>,
    body: &Members,
) -> Result<Vec<Value>, SimRejection> {
    let input = match body.get("input") {
        Some(Value::String(text)) => vec![json!({"role": "user", "content": text})],
        Some(Value::Array(items)) => items.clone(),
        _ => return Err(SimRejection::invalid_body("input", "Field required, a text or a list of items")),
    };
    let mut history = previous.map(|previous| previous.history.clone()).unwrap_or_default();
    let output = previous.map_or(&[][..], StoredResponse::output);
    match protocol {
        SimProtocol::Sglang => {
            history.extend_from_slice(output);
            history.extend(input);
        }
        SimProtocol::Vllm => {
            // Instructions do not carry over, and of the output only its texts are kept.
            history.retain(|message| message.get("role").and_then(Value::as_str) != Some("system"));
            let texts = output.iter().filter(|item| item_type(item) == Some("message"));
            history.extend(
                texts
                    .flat_map(|item| texts_of(item.get("content")))
                    .map(|text| json!({"role": "assistant", "content": text})),
            );
            if let Some(instructions) = instructions(body) {
                history.insert(0, instructions);
            }
            // Items of this request are not merged with messages before it.
            history.extend(chat_messages(protocol, &input)?);
        }
    }
    Ok(history)
}

/// Converts a request, given its [`history`].
pub(super) fn chat_form(
    protocol: SimProtocol,
    history: &[Value],
    body: &Members,
) -> Result<Members, SimRejection> {
    let messages = match protocol {
        SimProtocol::Vllm => history.to_vec(),
        SimProtocol::Sglang => {
            let converted = chat_messages(protocol, history)?;
            instructions(body).into_iter().chain(converted).collect()
        }
    };
    let mut chat = Members::new();
    chat.insert("messages".to_owned(), Value::Array(messages));
    let passed: &[&str] = match protocol {
        SimProtocol::Vllm => &VLLM_MEMBERS,
        SimProtocol::Sglang => &SGLANG_MEMBERS,
    };
    let renamed =
        [("model", "model"), ("max_output_tokens", "max_tokens"), ("stop", "stop"), ("stream", "stream")];
    for (from, to) in renamed.into_iter().chain(passed.iter().map(|name| (*name, *name))) {
        if let Some(value) = body.get(from).filter(|value| !value.is_null()) {
            chat.insert(to.to_owned(), value.clone());
        }
    }
    if let Some(effort) = body.get("reasoning").and_then(|reasoning| reasoning.get("effort")) {
        chat.insert("reasoning_effort".to_owned(), effort.clone());
    }
    let tools: Vec<Value> = function_tools(body).map(function_tool).collect();
    if let Some(choice) = tool_choice(body, &tools)? {
        chat.insert("tool_choice".to_owned(), choice);
    }
    if !tools.is_empty() {
        chat.insert("tools".to_owned(), Value::Array(tools));
    }
    Ok(chat)
}

fn instructions(body: &Members) -> Option<Value> {
    let text = body.get("instructions")?.as_str().filter(|text| !text.is_empty())?;
    Some(json!({"role": "system", "content": text}))
}

fn function_tools(body: &Members) -> impl Iterator<Item = &Value> {
    let tools = body.get("tools").and_then(Value::as_array).into_iter().flatten();
    tools.filter(|tool| item_type(tool) == Some("function"))
}

/// A tool of this API has the members of a chat tool's function.
fn function_tool(tool: &Value) -> Value {
    let mut function = tool.clone();
    if let Some(members) = function.as_object_mut() {
        members.remove("type");
    }
    json!({"type": "function", "function": function})
}

fn tool_choice(body: &Members, tools: &[Value]) -> Result<Option<Value>, SimRejection> {
    let choice = body.get("tool_choice").filter(|choice| !choice.is_null());
    let unknown = |message: &str| Err(invalid("tool_choice", message));
    match choice {
        Some(Value::String(mode)) if mode == "required" && tools.is_empty() => {
            unknown("Tool choice 'required' must be specified with 'tools' parameter.")
        }
        Some(Value::Object(named)) if named.get("type").is_some_and(|kind| kind == "function") => {
            let name = named.get("name").cloned().unwrap_or_default();
            if !tools.iter().any(|tool| tool.pointer("/function/name") == Some(&name)) {
                return unknown("Tool choice 'function' not found in 'tools' parameter.");
            }
            Ok(Some(json!({"type": "function", "function": {"name": name}})))
        }
        other => Ok(other.cloned()),
    }
}

fn item_type(item: &Value) -> Option<&str> {
    item.get("type").and_then(Value::as_str)
}

/// The texts of a content: itself, or those of its parts.
fn texts_of(content: Option<&Value>) -> Vec<&str> {
    match content {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(parts)) => parts.iter().filter_map(|part| part.get("text")?.as_str()).collect(),
        _ => Vec::new(),
    }
}

/// Chat messages of items. Reasoning, text and calls of one turn are one message.
fn chat_messages(protocol: SimProtocol, items: &[Value]) -> Result<Vec<Value>, SimRejection> {
    let mut messages: Vec<Value> = Vec::new();
    for item in items {
        match item_type(item) {
            Some("function_call") => {
                let call = json!({"id": item.get("call_id"), "type": "function",
                    "function": {"name": item.get("name"), "arguments": item.get("arguments")}});
                let turn = assistant_turn(&mut messages);
                match turn.get_mut("tool_calls").and_then(Value::as_array_mut) {
                    Some(calls) => calls.push(call),
                    None => turn["tool_calls"] = json!([call]),
                }
            }
            Some("function_call_output") => {
                let output = texts_of(item.get("output")).concat();
                messages
                    .push(json!({"role": "tool", "tool_call_id": item.get("call_id"), "content": output}));
            }
            Some("reasoning") => {
                let text = reasoning_text(protocol, item)?;
                set_once(&mut messages, "reasoning", text);
            }
            None | Some("message") => match item.get("role").and_then(Value::as_str) {
                Some("assistant") => {
                    let text = texts_of(item.get("content")).concat();
                    set_once(&mut messages, "content", text);
                }
                Some(role) => messages.push(json!({"role": role, "content": item.get("content")})),
                None => return Err(invalid("input", "every message needs a role")),
            },
            Some(other) => {
                return Err(invalid("input", format!("Unsupported input item type: {other}")));
            }
        }
    }
    Ok(messages)
}

/// The reasoning of an item: vLLM prefers its content, SGLang its summary.
fn reasoning_text(protocol: SimProtocol, item: &Value) -> Result<String, SimRejection> {
    if protocol == SimProtocol::Vllm
        && item.get("encrypted_content").is_some_and(|content| !content.is_null())
    {
        return Err(invalid("input", "Encrypted content is not supported."));
    }
    let of = |name: &str| texts_of(item.get(name)).join("\n");
    let [first, second] = match protocol {
        SimProtocol::Vllm => [of("content"), of("summary")],
        SimProtocol::Sglang => [of("summary"), of("content")],
    };
    Ok(if first.is_empty() { second } else { first })
}

/// The assistant's message at the end, which is appended if there is none.
fn assistant_turn(messages: &mut Vec<Value>) -> &mut Value {
    let is_turn = messages
        .last()
        .is_some_and(|message| message.get("role").and_then(Value::as_str) == Some("assistant"));
    if !is_turn {
        messages.push(json!({"role": "assistant"}));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// Sets a member of the assistant's turn, or begins a new turn that has it.
fn set_once(messages: &mut Vec<Value>, name: &str, text: String) {
    let turn = assistant_turn(messages);
    if turn.get(name).is_none() {
        turn[name] = text.into();
    } else {
        messages.push(json!({"role": "assistant", name: text}));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(protocol: SimProtocol, previous: Option<&StoredResponse>, body: &Value) -> Value {
        let body = body.as_object().unwrap();
        let history = history(protocol, previous, body).unwrap();
        Value::Object(chat_form(protocol, &history, body).unwrap())
    }

    #[test]
    fn items_of_a_turn_are_one_message() {
        let body = json!({"instructions": "be brief", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "42"}]});
        let expected = json!([{"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"role": "assistant", "reasoning": "hm", "content": "yes", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "42"}]);
        for protocol in [SimProtocol::Vllm, SimProtocol::Sglang] {
            assert_eq!(convert(protocol, None, &body)["messages"], expected);
        }
    }

    #[test]
    fn previous_response_is_continued_as_each_engine_does() {
        let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
        let text = json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]});
        let body = json!({"input": "and?", "instructions": "new"});
        let stored = |history: Value| StoredResponse {
            response: json!({"output": [text, call]}),
            history: history.as_array().unwrap().clone(),
            cancel: None,
        };
        let old = stored(json!([{"role": "system", "content": "old"}, {"role": "user", "content": "hi"}]));
        let messages = &convert(SimProtocol::Vllm, Some(&old), &body)["messages"];
        let (system, user) =
            (json!({"role": "system", "content": "new"}), json!({"role": "user", "content": "hi"}));
        let next = json!({"role": "user", "content": "and?"});
        assert_eq!(messages, &json!([system, user, {"role": "assistant", "content": "yes"}, next]));
        let messages = &convert(SimProtocol::Sglang, Some(&stored(json!([user]))), &body)["messages"];
        assert_eq!(messages[2]["tool_calls"][0]["function"]["name"], "f");
        assert_eq!((&messages[0], &messages[1], &messages[3]), (&system, &user, &next));
    }

    #[test]
    fn tools_sampling_and_transfers_are_converted() {
        let body = json!({"model": "m", "input": "hi", "max_output_tokens": 5, "reasoning": {"effort": "low"},
            "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"}],
            "tool_choice": {"type": "function", "name": "f"}, "kv_transfer_params": {"a": 1}, "bootstrap_room": 7});
        let vllm = convert(SimProtocol::Vllm, None, &body);
        assert_eq!(vllm["tools"], json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]));
        assert_eq!(vllm["tool_choice"], json!({"type": "function", "function": {"name": "f"}}));
        assert_eq!((&vllm["max_tokens"], &vllm["reasoning_effort"]), (&json!(5), &json!("low")));
        assert_eq!((&vllm["kv_transfer_params"], vllm.get("bootstrap_room")), (&json!({"a": 1}), None));
        assert_eq!(convert(SimProtocol::Sglang, None, &body)["bootstrap_room"], 7);
    }

    #[test]
    fn invalid_input_is_rejected() {
        for body in [
            json!({}),
            json!({"input": 7}),
            json!({"input": [{"type": "item_reference", "id": "x"}]}),
            json!({"input": [{"content": "x"}]}),
            json!({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}),
            json!({"input": "hi", "tool_choice": "required"}),
            json!({"input": "hi", "tool_choice": {"type": "function", "name": "f"}}),
        ] {
            let object = body.as_object().unwrap();
            let converted = history(SimProtocol::Vllm, None, object)
                .and_then(|history| chat_form(SimProtocol::Vllm, &history, object));
            assert_eq!(converted.unwrap_err().status, 400, "{body}");
        }
    }
}
