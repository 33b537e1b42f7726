//! Compares the fast reader with serde_json: it may return `None`, but must never differ.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::fast_reader::members;
use super::serde_reader::strict_members;
use super::tests::any_json;

/// Whether the fast reader accepts the body; panics if its result differs from serde_json's.
fn is_accepted(body: &[u8]) -> bool {
    let text = String::from_utf8_lossy(body);
    let Some(fast) = members(body) else { return false };
    match strict_members(body) {
        Ok(strict) => assert_eq!(fast, strict, "{text}"),
        Err(error) => panic!("the fast reader accepts a body that serde_json rejects: {error}\n{text}"),
    }
    true
}

#[test]
fn common_bodies_are_accepted() {
    let chat = json!({
        "model": "größe/m",
        "messages": [
            {"role": "system", "content": "Line one.\nHe said \"hi\"\t\\o/\r\n"},
            {"role": "user", "content": [{"type": "text", "text": "日本 🌙\u{1}\u{7f}"}]},
        ],
        "temperature": 0.7,
        "top_p": 1,
        "stop": ["\n\n"],
        "max_tokens": 64,
        "stream": true,
        "stream_options": {"include_usage": true},
        "seed": -9_007_199_254_740_993_i64,
        "tools": [],
        "user": null,
    });
    let ids = json!({"prompt": (0..300).map(|id| id * 397).collect::<Vec<_>>(), "model": "m"});
    let batch =
        json!({"input_ids": [[1, 2], [], [128_000]], "sampling_params": {"n": 4, "temperature": 0.5}});
    let completion = json!({"prompt": ["a\n", "b"], "n": 2});
    let media = json!({"messages": [{"content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACgAAAAeCAIAAADRv8uK"}},
        {"input_audio": {"data": "a\"\u{e9}".repeat(99), "format": "wav"}, "image": null, "video": [{"image": "x"}]},
    ]}], "image": {"url": "x"}, "echo": true});
    for body in [chat, ids, batch, completion, media, json!({})] {
        assert!(is_accepted(body.to_string().as_bytes()), "{body}");
        assert!(is_accepted(serde_json::to_string_pretty(&body).unwrap().as_bytes()), "{body:#}");
    }
    for body in [
        "\r\n\t {} \n",
        r#"{"prompt":"\u00e9\u20AC\u0041\/\b\f"}"#,
        r#"{"n":-0,"x":0.10}"#,
        r#"{"n":9999999999999999999,"seed":-9999999999999999999}"#,
        r#"{"model":"a","model":null,"n":1,"n":2}"#,
        r#"{"sampling_params":{"n":1.5,"n":2,"n":"x"},"sampling_params":[1,"a",{}]}"#,
    ] {
        assert!(is_accepted(body.as_bytes()), "{body}");
    }
}

#[test]
fn other_bodies_are_left_to_serde_json() {
    let deep = format!("{{\"x\":{}{}}}", "[".repeat(100), "]".repeat(100));
    let cases: [&[u8]; 38] = [
        deep.as_bytes(),
        b"",
        b"  ",
        b"[]",
        b"{",
        b"{}x",
        b"{}{}",
        b"\xef\xbb\xbf{}",
        b"{\"a\":\"\xff\"}",
        b"{\"a\":\"\n\"}",
        b"{\"a\":\"\x00\"}",
        b"{\"a\n\":1}",
        b"{\x0c}",
        br#"{"a":1,}"#,
        br#"{,"a":1}"#,
        br#"{"a":[1,]}"#,
        br#"{"a":[,1]}"#,
        br#"{"a":[1 2]}"#,
        br#"{"a":[1}"#,
        br#"{"a" 1}"#,
        br#"{"a":}"#,
        br#"{a:1}"#,
        br#"{"a":01}"#,
        br#"{"a":-}"#,
        br#"{"a":+1}"#,
        br#"{"a":1.}"#,
        br#"{"a":.5}"#,
        br#"{"a":1e999}"#,
        br#"{"a":nul}"#,
        br#"{"a":trueish}"#,
        br#"{"a":"\x"}"#,
        br#"{"a":"\u+123"}"#,
        br#"{"a":"\ud83d\ude00"}"#,
        br#"{"a":"\u12"#,
        br#"{"\u006d":1}"#,
        br#"{"model":"a\/b"}"#,
        br#"{"n":1.5}"#,
        br#"{"prompt":["a",0.1]}"#,
    ];
    for body in cases {
        assert_eq!(members(body), None, "{}", String::from_utf8_lossy(body));
    }
}

/// Tokens in random order, mostly invalid, sometimes valid.
fn any_tokens() -> impl Strategy<Value = String> {
    let token = prop::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"",
        "\\",
        "\\n",
        "\\u00e9",
        "\\ud83d",
        " ",
        "\n",
        "\u{b}",
        "0",
        "1",
        "-",
        ".",
        "e",
        "12345678",
        "true",
        "false",
        "null",
        "é",
        "\"n\":",
        "\"model\":",
        "\"prompt\":",
        "\"a\"",
    ]);
    prop::collection::vec(token, 0..12).prop_map(|tokens| format!("{{\"prompt\":{}}}", tokens.concat()))
}

/// A value, occasionally with an unusual spelling of a number.
fn any_value() -> impl Strategy<Value = String> {
    prop_oneof![
        8 => any_json().prop_map(|value| value.to_string()),
        2 => any_json().prop_map(|value| format!("{value:#}")),
        1 => "-?[0-9]{1,25}",
        1 => "-?[0-9]{1,5}\\.[0-9]{1,70}",
        1 => "-?[0-9]{1,3}(\\.[0-9]{1,3})?[eE][+-]?[0-9]{1,3}",
        1 => "\"(\\\\[\"\\\\/bfnrtu]|\\\\u[0-9a-fA-F]{4}|[ -!a-zé€🌙]){0,8}\"",
        2 => "\\[([0-9]{1,6}, ?){0,20}[0-9]{1,6}\\]",
    ]
}

fn any_key() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => prop::sample::select(vec![
            "model", "kv_transfer_params", "routed_dp_rank", "vllm_xargs", "tools", "messages", "prompt", "text", "input_ids", "sampling_params", "stream", "n", "max_tokens",
            "seed", "rid", "bootstrap_room", "mod\\u0065l", "cache_control", "prompt_cache_retention",
        ]).prop_map(str::to_owned),
        1 => "[a-zé]{0,4}",
    ]
}

/// A body with known members, some inside an array or object.
fn any_body() -> impl Strategy<Value = String> {
    let value = (any_value(), any_value(), 0..9_u8).prop_map(|(one, two, shape)| match shape {
        0 => format!("[{one},{two}]"),
        1 => format!("{{\"n\":{one} , \"max_new_tokens\": {two}}}"),
        2 => format!("[ {one}, {one}, {two} ]"),
        3 => format!("[{{\"cache_control\":{one}}}, {{\"a\": [{{\"prompt_cache_breakpoint\": {two}}}]}}]"),
        4 => format!("[{{\"image_url\":{one},\"input_audio\":{{\"data\": {two}}},\"x\":{one}}}]"),
        _ => one,
    });
    prop::collection::vec((any_key(), value), 0..5).prop_map(|members| {
        let members: Vec<String> = members.iter().map(|(key, value)| format!("\"{key}\": {value}")).collect();
        format!("{{{}}}", members.join(",\n"))
    })
}

proptest! {
    #[test]
    fn agrees_with_serde_json_on_bodies(body in any_body()) {
        is_accepted(body.as_bytes());
    }

    #[test]
    fn agrees_with_serde_json_on_random_tokens(body in any_tokens()) {
        is_accepted(body.as_bytes());
    }

    #[test]
    fn agrees_with_serde_json_on_damaged_bodies(
        body in any_body(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![
            any::<u8>(),
            prop::sample::select(b"\"\\{}[]:,0-.eu \n".to_vec()),
        ]), 1..4),
        length in any::<prop::sample::Index>(),
        truncate in any::<bool>(),
    ) {
        let mut body = body.into_bytes();
        for (index, byte) in changes {
            let index = index.index(body.len());
            body[index] = byte;
        }
        if truncate { body.truncate(length.index(body.len())); }
        is_accepted(&body);
    }

    /// Bodies with only small integers and keys without escapes must be accepted, compact or pretty-printed.
    #[test]
    fn text_bodies_are_accepted(
        texts in prop::collection::vec(("[ -~\n\t\r\u{1}é€🌙]{0,40}", any::<u32>()), 1..5),
        pretty in any::<bool>(),
    ) {
        let messages: Vec<Value> = texts.iter().map(|(text, id)| json!({"content": text, "id": id})).collect();
        let body = json!({"messages": messages, "model": "m"});
        let body = if pretty { format!("{body:#}") } else { body.to_string() };
        prop_assert!(is_accepted(body.as_bytes()), "{body}");
    }
}
