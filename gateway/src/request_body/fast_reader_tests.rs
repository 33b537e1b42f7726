//! The quick reader against serde_json: it may give up, but never differ.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::fast_reader::members;
use super::serde_reader::strict_members;
use super::tests::any_json;

/// Whether the quick reader took the body; fails if it found anything else than serde_json.
fn taken(body: &[u8]) -> bool {
    let text = String::from_utf8_lossy(body);
    let Some(quick) = members(body) else { return false };
    match strict_members(body) {
        Ok(strict) => assert_eq!(quick, strict, "{text}"),
        Err(error) => panic!("serde_json rejects what was accepted: {error}\n{text}"),
    }
    true
}

#[test]
fn takes_the_usual_bodies() {
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
    for body in [chat, ids, batch, completion, json!({})] {
        assert!(taken(body.to_string().as_bytes()), "{body}");
        assert!(taken(serde_json::to_string_pretty(&body).unwrap().as_bytes()), "{body:#}");
    }
    for body in [
        "\r\n\t {} \n",
        r#"{"prompt":"\u00e9\u20AC\u0041\/\b\f"}"#,
        r#"{"n":-0,"x":0.10}"#,
        r#"{"n":9999999999999999999,"seed":-9999999999999999999}"#,
        r#"{"model":"a","model":null,"n":1,"n":2}"#,
        r#"{"sampling_params":{"n":1.5,"n":2,"n":"x"},"sampling_params":[1,"a",{}]}"#,
    ] {
        assert!(taken(body.as_bytes()), "{body}");
    }
}

#[test]
fn leaves_the_rest_to_serde_json() {
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

/// Pieces whose order is mostly wrong, sometimes right.
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

/// A value, and now and then a number as it is seldom printed.
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
            "seed", "rid", "bootstrap_room", "mod\\u0065l",
        ]).prop_map(str::to_owned),
        1 => "[a-zé]{0,4}",
    ]
}

/// A body with known members, each perhaps inside an array or object of its own.
fn any_body() -> impl Strategy<Value = String> {
    let value = (any_value(), any_value(), 0..6_u8).prop_map(|(one, two, shape)| match shape {
        0 => format!("[{one},{two}]"),
        1 => format!("{{\"n\":{one} , \"max_new_tokens\": {two}}}"),
        2 => format!("[ {one}, {one}, {two} ]"),
        _ => one,
    });
    prop::collection::vec((any_key(), value), 0..5).prop_map(|members| {
        let members: Vec<String> = members.iter().map(|(key, value)| format!("\"{key}\": {value}")).collect();
        format!("{{{}}}", members.join(",\n"))
    })
}

proptest! {
    #[test]
    fn agrees_on_bodies(body in any_body()) {
        taken(body.as_bytes());
    }

    #[test]
    fn agrees_on_tokens(body in any_tokens()) {
        taken(body.as_bytes());
    }

    #[test]
    fn agrees_on_damaged_bodies(
        body in any_body(),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![
            any::<u8>(),
            prop::sample::select(b"\"\\{}[]:,0-.eu \n".to_vec()),
        ]), 1..4),
        length in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        let mut body = body.into_bytes();
        for (at, byte) in cuts {
            let at = at.index(body.len());
            body[at] = byte;
        }
        if cut { body.truncate(length.index(body.len())); }
        taken(&body);
    }

    /// Whatever has no numbers but small whole ones and no escaped keys must be taken, printed either way.
    #[test]
    fn takes_text(
        texts in prop::collection::vec(("[ -~\n\t\r\u{1}é€🌙]{0,40}", any::<u32>()), 1..5),
        pretty in any::<bool>(),
    ) {
        let messages: Vec<Value> = texts.iter().map(|(text, id)| json!({"content": text, "id": id})).collect();
        let body = json!({"messages": messages, "model": "m"});
        let body = if pretty { format!("{body:#}") } else { body.to_string() };
        prop_assert!(taken(body.as_bytes()), "{body}");
    }
}
