//! Responses requests, and the responses and streams of their chat completions.

use moongate_translate::{
    ChatForResponses, ChatStreamToResponses, InlineSystem, StreamFailure, chat_to_responses,
    responses_to_chat,
};
use serde_json::{Value, json};

fn translate(request: &Value, inline: InlineSystem) -> ChatForResponses {
    responses_to_chat(request.to_string().as_bytes(), inline).unwrap()
}

fn chat(request: &Value) -> Value {
    serde_json::from_slice(&translate(request, InlineSystem::Merge).body).unwrap()
}

#[test]
fn a_text_is_a_user_message() {
    assert_eq!(
        chat(
            &json!({"model": "m", "input": "Hello", "instructions": "Be brief.", "max_output_tokens": 9, "store": true})
        ),
        json!({"model": "m", "max_completion_tokens": 9, "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]})
    );
}

#[test]
fn items_are_messages() {
    let request = json!({"model": "m", "instructions": "A", "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "What is it?"},
            {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}], "encrypted_content": null},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "commentary",
            "content": [{"type": "output_text", "text": "Wait", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{\"x\": 1}", "status": "completed"},
        {"type": "function_call", "call_id": "call_2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "call_1", "output": "one"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "t"}, {"type": "input_text", "text": "wo"}]},
        {"role": "developer", "content": "B"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "y"}]},
    ]});
    let call = |id: &str, name: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    let messages = json!([
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": [{"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}}]},
        {"role": "assistant", "content": "Wait", "reasoning_content": "Hm",
            "tool_calls": [call("call_1", "f", "{\"x\": 1}"), call("call_2", "g", "{}")]},
        {"role": "tool", "tool_call_id": "call_1", "content": "one"},
        {"role": "tool", "tool_call_id": "call_2", "content": "two"},
        {"role": "assistant", "content": "x\n\ny"},
    ]);
    assert_eq!(chat(&request)["messages"], messages);
    let kept: Value = serde_json::from_slice(&translate(&request, InlineSystem::Keep).body).unwrap();
    assert_eq!(kept["messages"][0], json!({"role": "system", "content": "A"}));
    assert_eq!(kept["messages"][5], json!({"role": "system", "content": "B"}));
}

#[test]
fn settings_have_the_names_of_chat_completions() {
    let request = json!({"model": "m", "input": [], "stream": true, "temperature": 0.5, "top_p": 0.9, "cache_salt": "s", "user": "u",
        "tools": [{"type": "function", "name": "f", "description": "F", "parameters": {"type": "object"}, "strict": true}],
        "tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": false,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": true}, "verbosity": "low"},
        "reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "truncation": "disabled",
        "metadata": {"a": "b"}, "store": false, "previous_response_id": null, "service_tier": "auto", "prompt_cache_key": "k"});
    assert_eq!(
        chat(&request),
        json!({"model": "m", "messages": [], "stream": true, "temperature": 0.5, "top_p": 0.9, "cache_salt": "s", "user": "u",
            "stream_options": {"include_usage": true, "continuous_usage_stats": true},
            "tools": [{"type": "function", "function": {"name": "f", "description": "F", "parameters": {"type": "object"}, "strict": true}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": false,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": true}},
            "verbosity": "low", "reasoning_effort": "high"})
    );
}

#[test]
fn an_error_names_what_a_response_cannot_have() {
    for (members, expected) in [
        (json!({"previous_response_id": "resp_1"}), "`previous_response_id` is not supported"),
        (json!({"conversation": "c"}), "`conversation` is not supported"),
        (json!({"background": true}), "`background` is not supported"),
        (json!({"truncation": "auto"}), "`truncation` is not supported"),
        (json!({"include": ["message.output_text.logprobs"]}), "`include[0]` is not supported"),
        (json!({"input": null}), "`input` is missing"),
        (json!({"input": [{"type": "item_reference", "id": "a"}]}), "`input[0]` is not supported"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}),
            "`input[0].content[0]` is not supported",
        ),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "a"}]}]}),
            "`input[0].content[0].file_id` is not supported",
        ),
        (json!({"input": [{"role": "critic", "content": "a"}]}), "`input[0].role` is not valid"),
        (
            json!({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]}),
            "`input[0].arguments` is not valid",
        ),
        (
            json!({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}),
            "`input[0].encrypted_content` is not supported",
        ),
        (json!({"tools": [{"type": "web_search"}]}), "`tools[0]` is not supported"),
        (json!({"tool_choice": "required"}), "`tools` is missing"),
        (json!({"tool_choice": {"type": "function", "name": "f"}}), "`tool_choice.name` is not valid"),
        (json!({"text": {"format": {"type": "grammar"}}}), "`text.format.type` is not valid"),
        (json!({"max_tokens": 1}), "use `max_output_tokens`"),
    ] {
        let mut request = json!({"model": "m", "input": "Hi"});
        for (name, value) in members.as_object().unwrap() {
            request[name] = value.clone();
        }
        let problem =
            responses_to_chat(request.to_string().as_bytes(), InlineSystem::Merge).unwrap_err().to_string();
        assert!(problem.contains(expected), "{problem}\nlacks {expected}");
    }
}

#[test]
fn a_response_repeats_the_settings() {
    let context = translate(
        &json!({"model": "m", "input": "Hi", "temperature": 0.5, "tool_choice": "none"}),
        InlineSystem::Merge,
    )
    .context;
    let completion = json!({"id": "chatcmpl-1", "created": 5, "model": "m", "choices": [{"index": 0, "finish_reason": "length",
        "message": {"role": "assistant", "content": "Hi", "reasoning_content": "Hm", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"x\":"}}]}}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}, "reasoning_tokens": 2}});
    let response: Value =
        serde_json::from_slice(&chat_to_responses(completion.to_string().as_bytes(), &context).unwrap())
            .unwrap();
    assert_eq!(
        response,
        json!({"id": "resp_1", "object": "response", "created_at": 5, "status": "incomplete", "error": null, "model": "m",
            "incomplete_details": {"reason": "max_output_tokens"}, "previous_response_id": null, "store": false,
            "output": [
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}], "status": "completed"},
                {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                    "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}]},
                {"type": "function_call", "id": "fc_1_0", "call_id": "call_1", "name": "f", "arguments": "{\"x\":", "status": "incomplete"},
            ],
            "usage": {"input_tokens": 10, "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0}, "output_tokens": 5,
                "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 15},
            "temperature": 0.5, "tool_choice": "none", "metadata": {}, "parallel_tool_calls": true, "tools": [], "truncation": "disabled"})
    );
    assert!(chat_to_responses(br#"{"choices": []}"#, &context).is_err());
}

fn chunk(delta: &Value, finish_reason: Option<&str>) -> String {
    let choices = json!([{"index": 0, "delta": delta, "finish_reason": finish_reason}]);
    format!("data: {}\n\n", json!({"id": "chatcmpl-1", "created": 5, "model": "m", "choices": choices}))
}

fn new_stream() -> ChatStreamToResponses {
    ChatStreamToResponses::new(translate(&json!({"model": "m", "input": "Hi"}), InlineSystem::Merge).context)
}

/// The events, whose names and numbers are checked.
fn events(out: &[u8]) -> Vec<Value> {
    let events = str::from_utf8(out).unwrap().split_terminator("\n\n").enumerate().map(|(number, event)| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(
            (data["type"].as_str(), data["sequence_number"].as_u64()),
            (Some(name), u64::try_from(number).ok())
        );
        data
    });
    events.collect()
}

#[test]
fn a_stream_has_the_events_of_each_item() {
    let call = |id: Option<&str>, name: Option<&str>, arguments: &str| json!({"tool_calls": [{"index": 0, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]});
    let usage = r#"data: {"id":"chatcmpl-1","model":"m","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}"#;
    let stream = [
        chunk(&json!({"role": "assistant", "content": ""}), None),
        chunk(&json!({"reasoning_content": "Hm"}), None),
        chunk(&json!({"content": "Hel"}), None),
        chunk(&json!({"content": "lo"}), None),
        chunk(&call(Some("call_1"), Some("f"), ""), None),
        chunk(&call(None, None, "{}"), None),
        chunk(&json!({}), Some("tool_calls")),
        format!("{usage}\n\ndata: [DONE]\n\n"),
    ];
    let mut translator = new_stream();
    let out: Vec<u8> = stream.iter().flat_map(|event| translator.push(event.as_bytes())).collect();
    assert_eq!(translator.finish(), Ok(()));
    let events = events(&out);
    let summary: Vec<String> = events
        .iter()
        .map(|event| {
            let index = event["output_index"].as_u64().map(|index| format!(" {index}")).unwrap_or_default();
            let text = ["delta", "text", "arguments"].into_iter().find_map(|name| event[name].as_str());
            let text = text.map(|text| format!(" {text}")).unwrap_or_default();
            format!("{}{index}{text}", event["type"].as_str().unwrap().strip_prefix("response.").unwrap())
        })
        .collect();
    assert_eq!(
        summary,
        [
            "created",
            "in_progress",
            "output_item.added 0",
            "content_part.added 0",
            "reasoning_text.delta 0 Hm",
            "reasoning_text.done 0 Hm",
            "content_part.done 0",
            "output_item.done 0",
            "output_item.added 1",
            "content_part.added 1",
            "output_text.delta 1 Hel",
            "output_text.delta 1 lo",
            "output_text.done 1 Hello",
            "content_part.done 1",
            "output_item.done 1",
            "output_item.added 2",
            "function_call_arguments.delta 2 {}",
            "function_call_arguments.done 2 {}",
            "output_item.done 2",
            "completed",
        ]
    );
    let items: Vec<&Value> = events
        .iter()
        .filter(|event| event["type"] == "response.output_item.done")
        .map(|event| &event["item"])
        .collect();
    let last = &events.last().unwrap()["response"];
    assert_eq!((json!(items), &last["status"]), (last["output"].clone(), &json!("completed")));
    assert_eq!(last["usage"]["total_tokens"], 7);
    assert_eq!(
        items[2],
        &json!({"type": "function_call", "id": "fc_1_2", "call_id": "call_1", "name": "f", "arguments": "{}", "status": "completed"})
    );
}

#[test]
fn a_call_without_arguments_has_an_empty_object() {
    let calls = json!({"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]});
    let events =
        events(&new_stream().push((chunk(&calls, Some("tool_calls")) + "data: [DONE]\n\n").as_bytes()));
    let deltas: Vec<_> = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(
        (deltas, &events.last().unwrap()["response"]["output"][0]["arguments"]),
        (vec!["{}"], &json!("{}"))
    );

    let completion = json!({"choices": [{"message": calls, "finish_reason": "tool_calls"}]});
    let context = translate(&json!({"input": "Hi"}), InlineSystem::Merge).context;
    let response = chat_to_responses(completion.to_string().as_bytes(), &context).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&response).unwrap()["output"][0]["arguments"], "{}");
}

#[test]
fn the_last_item_is_incomplete_at_the_limit() {
    let mut translator = new_stream();
    let stream = chunk(&json!({"content": "Hel"}), Some("length")) + "data: [DONE]\n\n";
    let events = events(&translator.push(stream.as_bytes()));
    let last = events.last().unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["status"]),
        (&json!("response.incomplete"), &json!("incomplete"))
    );
    assert_eq!(last["response"]["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(last["response"]["output"][0]["status"], "incomplete");
}

#[test]
fn a_failure_is_the_last_event() {
    let mut translator = new_stream();
    let stream = chunk(&json!({"content": "Hi"}), None)
        + "data: {\"error\": {\"message\": \"busy\", \"code\": 429}}\n\ndata: [DONE]\n\n";
    let failed = events(&translator.push(stream.as_bytes())).pop().unwrap();
    assert_eq!(
        (&failed["type"], &failed["response"]["status"]),
        (&json!("response.failed"), &json!("failed"))
    );
    assert_eq!(failed["response"]["error"], json!({"code": "rate_limit_exceeded", "message": "busy"}));
    assert!(matches!(translator.finish(), Err(StreamFailure::Engine { .. })));

    let mut translator = new_stream();
    let mut out = translator.push(chunk(&json!({"content": "Hi"}), Some("stop")).as_bytes());
    let truncated = translator.finish().unwrap_err();
    out.extend(translator.failure_event(&truncated));
    assert_eq!(
        (truncated, &events(&out).pop().unwrap()["type"]),
        (StreamFailure::Truncated, &json!("response.failed"))
    );
}

#[test]
fn the_output_that_is_held_is_bounded() {
    let mut translator = new_stream();
    let part = chunk(&json!({"content": "x".repeat(1 << 20)}), None);
    for _ in 0..17 {
        let _ = translator.push(part.as_bytes());
    }
    assert!(matches!(translator.finish(), Err(StreamFailure::Malformed(_))));
}
