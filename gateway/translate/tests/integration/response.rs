//! Complete responses.

use moongate_translate::chat_to_messages;
use serde_json::{Value, json};

fn translate(choice: &Value, usage: &Value) -> Result<Value, String> {
    let response = json!({"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage});
    let message = chat_to_messages(response.to_string().as_bytes()).map_err(|error| error.to_string())?;
    Ok(serde_json::from_slice(&message).unwrap())
}

fn choice(message: &Value, finish_reason: &str) -> Value {
    json!({"index": 0, "message": message, "finish_reason": finish_reason, "matched_stop": 151_645, "logprobs": null})
}

fn call(arguments: &Value) -> Value {
    json!({"id": "call_1", "type": "function", "index": 0, "function": {"name": "get_weather", "arguments": arguments}})
}

#[test]
fn a_message_has_thinking_text_and_tool_calls() {
    let message = json!({"role": "assistant", "content": "Wait", "reasoning_content": "Hm", "tool_calls": [
        call(&json!(r#"{"z": 1.0, "a": "é"}"#)),
        {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": ""}},
    ]});
    let usage = json!({"prompt_tokens": 10, "total_tokens": 15, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}});
    assert_eq!(
        translate(&choice(&message, "tool_calls"), &usage).unwrap(),
        json!({
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "text", "text": "Wait"},
                {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"z": 1.0, "a": "é"}},
                {"type": "tool_use", "id": "call_2", "name": "clock", "input": {}},
            ],
            "stop_reason": "tool_use", "stop_sequence": null,
            "usage": {"input_tokens": 2, "cache_read_input_tokens": 8, "output_tokens": 5},
        })
    );
}

#[test]
fn a_message_without_output_has_an_empty_text() {
    let message = json!({"role": "assistant", "content": null, "reasoning": "", "tool_calls": []});
    let translated = translate(&choice(&message, "stop"), &Value::Null).unwrap();
    assert_eq!(translated["content"], json!([{"type": "text", "text": ""}]));
    assert_eq!(translated["usage"], json!({"input_tokens": 0, "output_tokens": 0}));
}

#[test]
fn finish_reasons_are_stop_reasons() {
    let text = json!({"role": "assistant", "content": "a"});
    let tool = json!({"role": "assistant", "content": null, "tool_calls": [call(&json!("{}"))]});
    for (message, finish, matched, expected) in [
        (&text, "stop", json!(null), ("end_turn", json!(null))),
        (&text, "stop", json!(2), ("end_turn", json!(null))),
        (&text, "stop", json!("END"), ("stop_sequence", json!("END"))),
        (&text, "length", json!(null), ("max_tokens", json!(null))),
        (&text, "content_filter", json!(null), ("refusal", json!(null))),
        (&tool, "tool_calls", json!(null), ("tool_use", json!(null))),
        // A named tool's call ends with `stop` in vLLM.
        (&tool, "stop", json!("END"), ("tool_use", json!(null))),
    ] {
        for name in ["matched_stop", "stop_reason"] {
            let mut choice = json!({"index": 0, "message": message, "finish_reason": finish});
            choice[name] = matched.clone();
            let translated = translate(&choice, &Value::Null).unwrap();
            assert_eq!(
                (translated["stop_reason"].as_str(), &translated["stop_sequence"]),
                (Some(expected.0), &expected.1)
            );
        }
    }
}

#[test]
fn a_response_that_is_not_complete_is_an_error() {
    let text = json!({"role": "assistant", "content": "a"});
    assert!(translate(&choice(&text, "abort"), &Value::Null).unwrap_err().contains("\"abort\""));
    let unfinished = json!({"index": 0, "message": text, "finish_reason": null});
    assert!(translate(&unfinished, &Value::Null).unwrap_err().contains("None"));
    for arguments in ["{\"a\": ", "[1]"] {
        let tool = json!({"role": "assistant", "content": null, "tool_calls": [call(&json!(arguments))]});
        assert!(translate(&choice(&tool, "tool_calls"), &Value::Null).unwrap_err().contains("`get_weather`"));
    }
    assert!(chat_to_messages(br#"{"choices": []}"#).unwrap_err().to_string().contains("no choice"));
}

#[test]
fn arguments_cut_off_by_the_limit_are_empty() {
    let tool = json!({"role": "assistant", "content": null, "tool_calls": [call(&json!("{\"a\": "))]});
    let translated = translate(&choice(&tool, "length"), &Value::Null).unwrap();
    assert_eq!(
        (&translated["stop_reason"], &translated["content"][0]["input"]),
        (&json!("max_tokens"), &json!({}))
    );
}

#[test]
fn arguments_may_be_an_object() {
    let tool = json!({"role": "assistant", "content": null, "tool_calls": [call(&json!({"a": 1}))]});
    let translated = translate(&choice(&tool, "tool_calls"), &Value::Null).unwrap();
    assert_eq!(translated["content"][0]["input"], json!({"a": 1}));
}
