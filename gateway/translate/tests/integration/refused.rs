//! What a chat completion cannot express.

use moongate_translate::messages_to_chat;
use serde_json::{Value, json};

fn problem(members: &Value) -> String {
    let mut body = json!({"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": "Hi"}]});
    for (name, value) in members.as_object().unwrap() {
        body[name] = value.clone();
    }
    messages_to_chat(body.to_string().as_bytes()).unwrap_err().to_string()
}

fn block(role: &str, block: &Value) -> Value {
    json!({"messages": [{"role": role, "content": [{"type": "text", "text": "a"}, block]}]})
}

#[test]
fn an_error_names_the_member() {
    let document = json!({"type": "document", "source": {"type": "text", "data": "x"}});
    let tool = json!({"name": "a", "input_schema": {}});
    for (members, expected) in [
        (block("user", &document), "`messages[0].content[1]` is not supported"),
        (block("user", &json!({"type": "tool_use", "id": "a", "name": "b"})), "of type `tool_use`"),
        (block("user", &json!({"type": "thinking", "thinking": "a"})), "of type `thinking`"),
        (
            block("assistant", &json!({"type": "redacted_thinking", "data": "x"})),
            "of type `redacted_thinking`",
        ),
        (block("assistant", &json!({"type": "server_tool_use", "id": "a"})), "of type `server_tool_use`"),
        (block("user", &json!({"type": "text", "text": "a", "new": 1})), "`messages[0].content[1].new`"),
        (
            block("user", &json!({"type": "text", "text": "a", "citations": [{}]})),
            "`messages[0].content[1].citations`",
        ),
        (block("user", &json!({"type": "text"})), "`messages[0].content[1].text` is missing"),
        (block("user", &json!({"text": "a"})), "`messages[0].content[1].type` is missing"),
        (
            block("user", &json!({"type": "image", "source": {"type": "file", "file_id": "a"}})),
            "`messages[0].content[1].source` is not supported",
        ),
        (
            block("user", &json!({"type": "tool_result", "tool_use_id": "a", "content": [document]})),
            "`messages[0].content[1].content[0]` is not supported",
        ),
        (
            block("assistant", &json!({"type": "tool_use", "id": "a", "name": "b", "input": [1]})),
            "`messages[0].content[1].input` is not valid",
        ),
        (json!({"messages": [{"role": "tool", "content": "a"}]}), "`messages[0].role` is not valid"),
        (json!({"messages": [{"role": "user"}]}), "`messages[0].content` is missing"),
        (
            json!({"messages": [{"role": "user", "content": "a", "name": "b"}]}),
            "`messages[0].name` is not supported",
        ),
        (json!({"messages": null}), "`messages` is missing"),
        (json!({"max_tokens": null}), "`max_tokens` is missing"),
        (json!({"system": [{"type": "image"}]}), "`system[0]` is not supported"),
        (json!({"tools": [tool, {"type": "web_search_20250305", "name": "web_search"}]}), "`tools[1].type`"),
        (json!({"tools": [{"name": "a"}]}), "`tools[0].input_schema` is missing"),
        (
            json!({"tools": [{"name": "a", "input_schema": {}, "input_examples": [{}]}]}),
            "`tools[0].input_examples`",
        ),
        (
            json!({"tools": [{"name": "a", "input_schema": {}, "allowed_callers": ["code_execution_20250825"]}]}),
            "`tools[0].allowed_callers`",
        ),
        (
            json!({"tools": [tool], "tool_choice": {"type": "tool", "name": "b"}}),
            "`tool_choice.name` is not valid",
        ),
        (json!({"tool_choice": {"type": "any"}}), "`tools` is missing"),
        (json!({"tool_choice": {"type": "some"}}), "`tool_choice.type` is not valid"),
        (json!({"mcp_servers": [{}]}), "`mcp_servers` is not supported"),
        (json!({"container": "a"}), "`container` is not supported"),
        (json!({"context_management": {"edits": [{}]}}), "`context_management.edits` is not supported"),
        (json!({"metadata": {"user_id": "a", "more": 1}}), "`metadata.more` is not supported"),
        (json!({"thinking": {"type": "sometimes"}}), "`thinking.type` is not valid"),
        (json!({"output_config": {"format": {"type": "xml"}}}), "`output_config.format.type` is not valid"),
        (
            json!({"output_config": {"effort": "low"}, "reasoning_effort": "high"}),
            "`output_config.effort` is given twice",
        ),
        (json!({"stop": "a"}), "`stop` is not supported by this model's engine: use `stop_sequences`"),
        (json!({"n": 2}), "`n` is not supported"),
        (json!({"stream": "yes"}), "`stream` is not valid"),
    ] {
        let problem = problem(&members);
        assert!(problem.contains(expected), "{problem}\nlacks {expected}");
    }
}

#[test]
fn bodies_that_are_not_objects_are_rejected() {
    for body in ["", "[]", "{", r#"{"model":"a","model":"b"}"#, "\u{feff}{}"] {
        let problem = messages_to_chat(body.as_bytes()).unwrap_err().to_string();
        assert!(problem.starts_with("`body` is not valid"), "{problem}");
    }
}

#[test]
fn members_of_engines_are_passed_through() {
    let body = r#"{"model":"m","max_tokens":1,"messages":[],"cache_salt":"s","extra_key":"k","priority":3,"rid":"r","lora_path":"l",
        "min_p":0.10,"service_tier":"auto","metadata":{"user_id":"u"},"chat_template_kwargs":{"thinking":false,"x":1},
        "thinking":{"type":"adaptive"},"context_management":{"edits":[]}}"#;
    let chat = String::from_utf8(messages_to_chat(body.as_bytes()).unwrap()).unwrap();
    let expected = r#"{"model":"m","messages":[],"max_tokens":1,"user":"u",
        "chat_template_kwargs":{"thinking":false,"x":1,"enable_thinking":true},
        "cache_salt":"s","extra_key":"k","priority":3,"rid":"r","lora_path":"l","min_p":0.10}"#;
    assert_eq!(chat, expected.replace("\n        ", ""));
}
