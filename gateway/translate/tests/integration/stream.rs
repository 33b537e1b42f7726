//! Streams.

use moongate_translate::{ChatStreamToMessages, StreamFailure};
use proptest::prelude::*;
use serde_json::{Value, json};

const DONE: &str = "data: [DONE]\n\n";

fn event(payload: &Value) -> String {
    format!("data: {payload}\n\n")
}

fn chunk(delta: &Value) -> String {
    event(&json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": null, "matched_stop": null}]}))
}

fn finish(reason: &str, matched_stop: &Value) -> String {
    event(&json!({"id": "chatcmpl-1", "model": "m",
        "choices": [{"index": 0, "delta": {"content": null}, "finish_reason": reason, "matched_stop": matched_stop}]}))
}

fn usage(output: u64) -> String {
    event(&json!({"id": "chatcmpl-1", "model": "m", "choices": [],
        "usage": {"prompt_tokens": 10, "completion_tokens": output, "prompt_tokens_details": {"cached_tokens": 8}}}))
}

fn call(index: u32, id: Option<&str>, name: Option<&str>, arguments: Option<&str>) -> Value {
    json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]})
}

/// The events of a message, shortened: a block as `TYPE[INDEX]`, its deltas joined.
fn summary(events: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for event in str::from_utf8(events).unwrap().split_terminator("\n\n") {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        match name {
            "content_block_start" => {
                let (block, at) = (&data["content_block"], &data["index"]);
                let tool =
                    block["name"].as_str().map(|name| format!(" {name} {}", block["id"])).unwrap_or_default();
                lines.push(format!("{}[{at}]{tool}: ", block["type"].as_str().unwrap()));
            }
            "content_block_delta" => {
                let line = lines.last_mut().unwrap();
                assert!(line.contains(&format!("[{}]", data["index"])), "{line} {data}");
                let delta = &data["delta"];
                let text =
                    ["text", "thinking", "partial_json"].into_iter().find_map(|name| delta[name].as_str());
                line.push_str(text.unwrap());
            }
            "content_block_stop" => assert!(lines.last().unwrap().contains(&format!("[{}]", data["index"]))),
            "message_delta" => lines.push(format!("{} {}", data["delta"], data["usage"])),
            _ => lines.push(name.to_owned()),
        }
    }
    lines
}

fn translate(events: &[String]) -> (Vec<String>, Result<(), StreamFailure>) {
    let mut stream = ChatStreamToMessages::default();
    let out: Vec<u8> = events.iter().flat_map(|event| stream.push(event.as_bytes())).collect();
    (summary(&out), stream.finish())
}

fn full_stream() -> Vec<String> {
    vec![
        chunk(&json!({"role": "assistant", "content": ""})),
        ": ping\n\n".to_owned(),
        chunk(&json!({"reasoning_content": "Let "})),
        chunk(&json!({"reasoning_content": "me see"})),
        chunk(&json!({"content": "Wait"})),
        chunk(&json!({"content": "…"})),
        chunk(&call(0, Some("call_a"), Some("get_weather"), Some(""))),
        chunk(&call(0, None, None, Some("{\"place\": "))),
        chunk(&call(0, None, None, Some("\"Bern\"}"))),
        chunk(&call(1, Some("call_b"), Some("clock"), Some("{}"))),
        chunk(&json!({"reasoning_content": "Again"})),
        chunk(&json!({"content": "Done"})),
        finish("tool_calls", &Value::Null),
        usage(7),
        DONE.to_owned(),
    ]
}

#[test]
fn blocks_follow_reasoning_text_and_tool_calls() {
    let (lines, end) = translate(&full_stream());
    assert_eq!(
        lines,
        [
            "message_start",
            "thinking[0]: Let me see",
            "text[1]: Wait…",
            "tool_use[2] get_weather \"call_a\": {\"place\": \"Bern\"}",
            "tool_use[3] clock \"call_b\": {}",
            "thinking[4]: Again",
            "text[5]: Done",
            r#"{"stop_reason":"tool_use","stop_sequence":null} {"cache_read_input_tokens":8,"input_tokens":2,"output_tokens":7}"#,
            "message_stop",
        ]
    );
    assert_eq!(end, Ok(()));
}

#[test]
fn the_first_event_has_the_input_tokens() {
    let start = event(
        &json!({"id": "chatcmpl-1", "model": "m", "choices": [{"index": 0, "delta": {"role": "assistant"}}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}}),
    );
    let out = ChatStreamToMessages::default().push(start.as_bytes());
    let data = str::from_utf8(&out).unwrap().strip_prefix("event: message_start\ndata: ").unwrap();
    assert_eq!(
        serde_json::from_str::<Value>(data).unwrap(),
        json!({"type": "message_start", "message": {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [],
            "stop_reason": null, "stop_sequence": null,
            "usage": {"input_tokens": 2, "cache_read_input_tokens": 8, "output_tokens": 0}}})
    );
}

#[test]
fn output_in_the_last_chunk_is_kept() {
    let last = event(&json!({"id": "chatcmpl-1", "model": "m",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop", "stop_reason": "END"}]}));
    let (lines, end) = translate(&[last, DONE.to_owned()]);
    assert_eq!(
        lines[1..3],
        [
            "text[0]: Hi",
            r#"{"stop_reason":"stop_sequence","stop_sequence":"END"} {"input_tokens":0,"output_tokens":0}"#
        ]
    );
    assert_eq!(end, Ok(()));
}

#[test]
fn a_call_cut_off_by_a_stop_string_is_not_a_tool_use() {
    let cut = [
        chunk(&call(0, Some("a"), Some("f"), Some("{\"x\": \"} E"))),
        finish("stop", &json!("END")),
        DONE.to_owned(),
    ];
    let (lines, _) = translate(&cut);
    assert!(lines[2].starts_with(r#"{"stop_reason":"stop_sequence""#), "{lines:?}");
    let whole =
        [chunk(&call(0, Some("a"), Some("f"), Some("{}"))), finish("stop", &json!("END")), DONE.to_owned()];
    let (lines, _) = translate(&whole);
    assert!(lines[2].starts_with(r#"{"stop_reason":"tool_use""#), "{lines:?}");
}

#[test]
fn text_within_a_tool_call_follows_it() {
    let (lines, end) = translate(&[
        chunk(&call(0, Some("a"), Some("f"), Some("{"))),
        chunk(&json!({"content": "by "})),
        chunk(&json!({"content": "the way", "tool_calls": call(0, None, None, Some("}"))["tool_calls"]})),
        finish("tool_calls", &Value::Null),
        DONE.to_owned(),
    ]);
    assert_eq!(lines[1..3], ["tool_use[0] f \"a\": {}", "text[1]: by the way"]);
    assert_eq!(end, Ok(()));
    let long = chunk(&json!({"content": "x".repeat(40 << 10)}));
    let (_, end) = translate(&[chunk(&call(0, Some("a"), Some("f"), Some("{"))), long.clone(), long]);
    assert!(matches!(end, Err(StreamFailure::Malformed(_))));
}

#[test]
fn the_name_of_a_call_may_follow_its_id() {
    let (lines, end) = translate(&[
        chunk(&call(0, Some("a"), None, None)),
        chunk(&call(0, None, Some("f"), None)),
        chunk(&call(0, Some("a"), Some("f"), Some("{}"))),
        chunk(&call(1, None, Some("f"), None)),
        finish("tool_calls", &Value::Null),
        DONE.to_owned(),
    ]);
    assert_eq!(lines[1..3], ["tool_use[0] f \"a\": {}", "tool_use[1] f \"call_chatcmpl-1_1\": "]);
    assert_eq!(end, Ok(()));
}

#[test]
fn the_engines_error_ends_the_stream() {
    for (payload, kind, message) in [
        (
            json!({"error": {"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}}),
            "invalid_request_error",
            "too long",
        ),
        (json!({"object": "error", "message": "busy", "code": 503}), "overloaded_error", "busy"),
        (json!({"error": "broken"}), "api_error", "broken"),
    ] {
        let mut stream = ChatStreamToMessages::default();
        let _ = stream.push(chunk(&json!({"content": "Hi"})).as_bytes());
        let out = stream.push((event(&payload) + &finish("stop", &Value::Null) + DONE).as_bytes());
        let expected = json!({"type": "error", "error": {"type": kind, "message": message}});
        let data = str::from_utf8(&out).unwrap().strip_prefix("event: error\ndata: ").unwrap();
        assert_eq!(serde_json::from_str::<Value>(data).unwrap(), expected);
        assert_eq!(stream.push(DONE.as_bytes()), b"");
        assert!(matches!(stream.finish(), Err(StreamFailure::Engine { .. })));
    }
}

#[test]
fn a_stream_that_is_not_complete_is_an_error() {
    let hello = chunk(&json!({"content": "Hi"}));
    let (lines, end) = translate(&[hello.clone(), finish("stop", &Value::Null)]);
    assert_eq!((lines.last().unwrap().as_str(), end), ("text[0]: Hi", Err(StreamFailure::Truncated)));
    for events in [
        vec![hello.clone(), DONE.to_owned()],
        vec![hello.clone(), finish("abort", &Value::Null), DONE.to_owned()],
        vec![hello, "data: {\n\n".to_owned()],
        vec![chunk(&call(0, None, None, Some("{")))],
        vec![
            chunk(&call(0, Some("a"), Some("f"), None)),
            chunk(&call(1, Some("b"), Some("f"), None)),
            chunk(&call(0, None, None, Some("{"))),
        ],
    ] {
        let (lines, end) = translate(&events);
        assert_eq!(lines.last().unwrap(), "error");
        assert!(matches!(end, Err(StreamFailure::Malformed(_))), "{end:?}");
    }
    let mut stream = ChatStreamToMessages::default();
    assert!(stream.push(b"data: \xff\n\n").starts_with(b"event: error\n"));
}

proptest! {
    #[test]
    fn the_same_events_follow_however_they_are_grouped(groups in prop::collection::vec(1usize..4, 15)) {
        let events = full_stream();
        let mut whole = ChatStreamToMessages::default();
        let expected = whole.push(events.concat().as_bytes());
        let mut stream = ChatStreamToMessages::default();
        let (mut out, mut rest) = (Vec::new(), &events[..]);
        for group in groups {
            let (now, later) = rest.split_at(group.min(rest.len()));
            out.extend(stream.push(now.concat().as_bytes()));
            rest = later;
        }
        prop_assert_eq!(String::from_utf8(out), String::from_utf8(expected));
        prop_assert_eq!(stream.finish(), Ok(()));
    }
}
