//! The chat completion that is equal to a Messages request.

use serde_json::{Map, Value, json};

use super::super::SimProtocol;
use super::super::response::SimRejection;

type Members = Map<String, Value>;

/// Members that vLLM and SGLang pass on unchanged.
const VLLM_MEMBERS: [&str; 4] = ["cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"];
const SGLANG_MEMBERS: [&str; 5] =
    ["bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank"];
/// Claude Code's first system block. It differs between requests, so vLLM drops it to keep the prefix.
const BILLING_HEADER: &str = "x-anthropic-billing-header";
/// Minimum number of tokens of extended thinking.
const MIN_THINKING_BUDGET: u64 = 1024;

/// Converts a request. The error is a rejection of the body.
pub(crate) fn chat_form(protocol: SimProtocol, body: &Members) -> Result<Members, SimRejection> {
    let max_tokens = max_tokens(body)?;
    let mut chat = Members::new();
    chat.insert("model".to_owned(), model(body)?);
    chat.insert("messages".to_owned(), Value::Array(messages(protocol, body)?));
    chat.insert("max_tokens".to_owned(), max_tokens.into());
    let passed: &[&str] = match protocol {
        SimProtocol::Vllm => &VLLM_MEMBERS,
        SimProtocol::Sglang => &SGLANG_MEMBERS,
    };
    let renamed = [("stop_sequences", "stop"), ("stream", "stream"), ("temperature", "temperature")];
    for (from, to) in renamed.into_iter().chain(passed.iter().map(|name| (*name, *name))) {
        if let Some(value) = body.get(from).filter(|value| !value.is_null()) {
            chat.insert(to.to_owned(), value.clone());
        }
    }
    if let Some(arguments) = thinking(protocol, body, max_tokens)? {
        chat.insert("chat_template_kwargs".to_owned(), arguments);
    }
    if let Some(effort) = body.get("output_config").and_then(|config| config.get("effort")) {
        chat.insert("reasoning_effort".to_owned(), effort.clone());
    }
    let tools = tools(body);
    if let Some(choice) = tool_choice(body, &tools)? {
        chat.insert("tool_choice".to_owned(), choice);
    }
    if !tools.is_empty() {
        chat.insert("tools".to_owned(), Value::Array(tools));
    }
    Ok(chat)
}

fn model(body: &Members) -> Result<Value, SimRejection> {
    match body.get("model") {
        Some(Value::String(model)) if !model.is_empty() => Ok(json!(model)),
        _ => Err(SimRejection::invalid_body("model", "Model is required")),
    }
}

fn max_tokens(body: &Members) -> Result<u64, SimRejection> {
    let value =
        body.get("max_tokens").ok_or_else(|| SimRejection::invalid_body("max_tokens", "Field required"))?;
    value
        .as_u64()
        .filter(|value| *value > 0)
        .ok_or_else(|| SimRejection::invalid_body("max_tokens", "max_tokens must be positive"))
}

/// The arguments of the chat template. The budget has no effect on the simulated model.
fn thinking(protocol: SimProtocol, body: &Members, max_tokens: u64) -> Result<Option<Value>, SimRejection> {
    let Some(thinking) = body.get("thinking").filter(|thinking| !thinking.is_null()) else {
        return Ok(None);
    };
    let invalid = |message| Err(SimRejection::invalid_body("thinking", message));
    match thinking.get("type").and_then(Value::as_str) {
        Some("disabled") => Ok(Some(json!({"enable_thinking": false}))),
        Some("adaptive") => Ok(Some(json!({"enable_thinking": true}))),
        Some("enabled") => {
            let budget = thinking.get("budget_tokens").and_then(Value::as_u64).unwrap_or(0);
            // A prefill leg generates one token, whatever the client's limit is.
            let is_prefill_leg = body
                .get("kv_transfer_params")
                .and_then(|params| params.get("do_remote_decode")?.as_bool())
                .unwrap_or(false);
            if budget < MIN_THINKING_BUDGET {
                return invalid("budget_tokens must be at least 1024");
            }
            if protocol == SimProtocol::Vllm && budget >= max_tokens && !is_prefill_leg {
                return invalid("thinking.budget_tokens must be less than max_tokens");
            }
            Ok(Some(json!({"enable_thinking": true})))
        }
        _ => invalid("type must be 'enabled', 'disabled' or 'adaptive'"),
    }
}

fn tools(body: &Members) -> Vec<Value> {
    let tools = body.get("tools").and_then(Value::as_array).into_iter().flatten();
    let custom = tools.filter(|tool| tool.get("input_schema").is_some_and(Value::is_object));
    custom
        .map(|tool| {
            let member = |name: &str| tool.get(name).cloned().unwrap_or_default();
            let mut parameters = member("input_schema");
            if let Some(schema) = parameters.as_object_mut() {
                schema.entry("type").or_insert(json!("object"));
            }
            json!({"type": "function", "function": {
                "name": member("name"), "description": member("description"), "parameters": parameters,
                "strict": member("strict"),
            }})
        })
        .collect()
}

fn tool_choice(body: &Members, tools: &[Value]) -> Result<Option<Value>, SimRejection> {
    let Some(choice) = body.get("tool_choice").filter(|choice| !choice.is_null()) else {
        return Ok((!tools.is_empty()).then(|| json!("auto")));
    };
    let name = choice.get("name").and_then(Value::as_str);
    match (choice.get("type").and_then(Value::as_str), name) {
        (Some("auto"), _) => Ok(Some(json!("auto"))),
        (Some("none"), _) => Ok(Some(json!("none"))),
        (Some("any"), _) => Ok(Some(json!("required"))),
        (Some("tool"), Some(name)) => Ok(Some(json!({"type": "function", "function": {"name": name}}))),
        (Some("tool"), None) => {
            Err(SimRejection::invalid_body("tool_choice", "tool_choice.name is required when type is 'tool'"))
        }
        _ => Err(SimRejection::invalid_body("tool_choice", "type must be 'auto', 'any', 'tool' or 'none'")),
    }
}

/// Strings as they are, blocks as a list.
enum Content<'a> {
    Text(&'a str),
    Blocks(&'a [Value]),
}

impl<'a> Content<'a> {
    fn of(value: Option<&'a Value>) -> Option<Self> {
        match value? {
            Value::String(text) => Some(Self::Text(text)),
            Value::Array(blocks) => Some(Self::Blocks(blocks)),
            _ => None,
        }
    }

    /// The text blocks of a system prompt.
    fn system_texts(&self, protocol: SimProtocol) -> Vec<&'a str> {
        let texts: Vec<&str> = match self {
            Self::Text(text) => vec![text],
            Self::Blocks(blocks) => blocks.iter().filter_map(|block| block.get("text")?.as_str()).collect(),
        };
        let dropped = |text: &&str| {
            text.is_empty() || (protocol == SimProtocol::Vllm && text.starts_with(BILLING_HEADER))
        };
        texts.into_iter().filter(|text| !dropped(text)).collect()
    }
}

fn messages(protocol: SimProtocol, body: &Members) -> Result<Vec<Value>, SimRejection> {
    let separator = if protocol == SimProtocol::Vllm { "" } else { "\n" };
    let mut chat = Vec::new();
    if let Some(system) = Content::of(body.get("system")) {
        let texts = system.system_texts(protocol);
        if !texts.is_empty() {
            chat.push(json!({"role": "system", "content": texts.join(separator)}));
        }
    }
    let messages = body
        .get("messages")
        .and_then(Value::as_array)
        .ok_or_else(|| SimRejection::invalid_body("messages", "Field required"))?;
    for message in messages {
        let role = message.get("role").and_then(Value::as_str).unwrap_or_default();
        let content = Content::of(message.get("content"))
            .ok_or_else(|| SimRejection::invalid_body("messages", "content: Field required"))?;
        match (role, content) {
            ("system", content) => {
                let texts = content.system_texts(protocol);
                if !texts.is_empty() {
                    chat.push(json!({"role": "system", "content": texts.join(separator)}));
                }
            }
            ("user" | "assistant", Content::Text(text)) => chat.push(json!({"role": role, "content": text})),
            ("user", Content::Blocks(blocks)) => push_user(protocol, blocks, &mut chat),
            ("assistant", Content::Blocks(blocks)) => chat.push(assistant(blocks)),
            _ => {
                return Err(SimRejection::invalid_body(
                    "messages",
                    "role must be 'user', 'assistant' or 'system'",
                ));
            }
        }
    }
    Ok(chat)
}

fn block_type(block: &Value) -> &str {
    block.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// A user's message. Results of tools are messages of their own: vLLM puts them before the text, SGLang in order.
fn push_user(protocol: SimProtocol, blocks: &[Value], chat: &mut Vec<Value>) {
    let mut parts = Vec::new();
    for block in blocks {
        match block_type(block) {
            "tool_result" => {
                if protocol == SimProtocol::Sglang {
                    push_parts("user", &mut parts, chat);
                }
                push_tool_result(block, chat);
            }
            "text" => parts.push(json!({"type": "text", "text": block.get("text")})),
            "image" => parts.extend(image_part(block)),
            _ => {}
        }
    }
    push_parts("user", &mut parts, chat);
}

/// Moves parts into a message; a single text is its whole content.
fn push_parts(role: &str, parts: &mut Vec<Value>, chat: &mut Vec<Value>) {
    if !parts.is_empty() {
        chat.push(json!({"role": role, "content": whole_content(std::mem::take(parts))}));
    }
}

fn whole_content(mut parts: Vec<Value>) -> Value {
    match parts.as_mut_slice() {
        [only] if block_type(only) == "text" => only.get("text").cloned().unwrap_or_default(),
        _ => Value::Array(parts),
    }
}

fn push_tool_result(block: &Value, chat: &mut Vec<Value>) {
    let id = block.get("tool_use_id").cloned().unwrap_or_default();
    let (mut texts, mut images) = (Vec::new(), Vec::new());
    match Content::of(block.get("content")) {
        Some(Content::Text(text)) => texts.push(text),
        Some(Content::Blocks(blocks)) => {
            texts.extend(blocks.iter().filter_map(|block| block.get("text")?.as_str()));
            images.extend(blocks.iter().filter(|block| block_type(block) == "image").filter_map(image_part));
        }
        None => {}
    }
    chat.push(json!({"role": "tool", "tool_call_id": id, "content": texts.join("\n")}));
    if !images.is_empty() {
        chat.push(json!({"role": "user", "content": images}));
    }
}

fn image_part(block: &Value) -> Option<Value> {
    let source = block.get("source")?;
    let text = |name: &str| source.get(name).and_then(Value::as_str).unwrap_or_default();
    let url = match text("type") {
        "url" => text("url").to_owned(),
        _ => format!("data:{};base64,{}", text("media_type"), text("data")),
    };
    Some(json!({"type": "image_url", "image_url": {"url": url}}))
}

fn assistant(blocks: &[Value]) -> Value {
    let (mut parts, mut calls, mut reasoning) = (Vec::new(), Vec::new(), String::new());
    for block in blocks {
        match block_type(block) {
            "text" => parts.push(json!({"type": "text", "text": block.get("text")})),
            "thinking" => {
                reasoning.push_str(block.get("thinking").and_then(Value::as_str).unwrap_or_default());
            }
            "tool_use" => {
                let input = block.get("input").filter(|input| input.is_object()).cloned();
                let arguments = input.unwrap_or_else(|| json!({})).to_string();
                calls.push(json!({"id": block.get("id"), "type": "function",
                    "function": {"name": block.get("name"), "arguments": arguments}}));
            }
            _ => {}
        }
    }
    let mut message = json!({"role": "assistant"});
    if !reasoning.is_empty() {
        message["reasoning"] = reasoning.into();
    }
    if !parts.is_empty() {
        message["content"] = whole_content(parts);
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    fn convert(protocol: SimProtocol, body: &Value) -> Value {
        Value::Object(chat_form(protocol, body.as_object().unwrap()).unwrap())
    }

    #[test]
    fn conversation_is_converted_as_the_engines_do() {
        let body = json!({"model": "m", "max_tokens": 5, "system": [
                {"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "be"},
                {"type": "text", "text": "brief"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "yes"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}]},
                {"role": "user", "content": [
                    {"type": "text", "text": "go on"},
                    {"type": "tool_result", "tool_use_id": "c", "content": [
                        {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}]});
        let user = json!({"role": "user", "content": "hi"});
        let call = json!({"role": "assistant", "reasoning": "hm", "content": "yes", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}}]});
        let result = json!({"role": "tool", "tool_call_id": "c", "content": "a\nb"});
        let text = json!({"role": "user", "content": "go on"});
        let system = |content: &str| json!({"role": "system", "content": content});
        assert_eq!(
            convert(SimProtocol::Vllm, &body)["messages"],
            json!([system("bebrief"), user, call, result, text])
        );
        assert_eq!(
            convert(SimProtocol::Sglang, &body)["messages"],
            json!([system("x-anthropic-billing-header: 1\nbe\nbrief"), user, call, text, result])
        );
    }

    #[test]
    fn tools_sampling_and_transfers_are_converted() {
        let body = json!({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"name": "f", "input_schema": {"properties": {}}}], "tool_choice": {"type": "tool", "name": "f"},
            "stop_sequences": ["x"], "thinking": {"type": "adaptive"}, "kv_transfer_params": {"a": 1},
            "cache_salt": "s", "bootstrap_room": 7, "stream": true});
        let vllm = convert(SimProtocol::Vllm, &body);
        assert_eq!(vllm["tools"][0]["function"]["parameters"], json!({"properties": {}, "type": "object"}));
        assert_eq!(vllm["tool_choice"], json!({"type": "function", "function": {"name": "f"}}));
        assert_eq!((&vllm["stop"], &vllm["stream"]), (&json!(["x"]), &json!(true)));
        assert_eq!((&vllm["kv_transfer_params"], &vllm["cache_salt"]), (&json!({"a": 1}), &json!("s")));
        assert_eq!((vllm.get("bootstrap_room"), &vllm["max_tokens"]), (None, &json!(5)));
        let sglang = convert(SimProtocol::Sglang, &body);
        assert_eq!((&sglang["bootstrap_room"], sglang.get("cache_salt")), (&json!(7), None));
    }

    #[test]
    fn invalid_bodies_are_rejected() {
        let valid = json!({"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]});
        for (member, value) in [
            ("model", json!("")),
            ("max_tokens", json!(0)),
            ("max_tokens", json!("5")),
            ("messages", json!("hi")),
            ("messages", json!([{"role": "tool", "content": "x"}])),
            ("messages", json!([{"role": "user"}])),
            ("thinking", json!({"type": "enabled", "budget_tokens": 1})),
            ("thinking", json!({"type": "enabled", "budget_tokens": 2000})),
            ("tool_choice", json!({"type": "tool"})),
            ("tool_choice", json!({"type": "some"})),
        ] {
            let mut body = valid.clone();
            body[member] = value;
            let rejection = chat_form(SimProtocol::Vllm, body.as_object().unwrap()).unwrap_err();
            assert_eq!(rejection.param, Some(member), "{body}");
        }
        // The prefill leg of a pair has the client's budget and a limit of one token.
        let mut leg = valid;
        leg["thinking"] = json!({"type": "enabled", "budget_tokens": 2000});
        leg["max_tokens"] = json!(1);
        leg["kv_transfer_params"] = json!({"do_remote_decode": true});
        assert!(chat_form(SimProtocol::Vllm, leg.as_object().unwrap()).is_ok());
    }
}
