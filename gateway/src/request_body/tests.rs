//! Tests of reading and splicing, with serde_json as the reference.

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::error::ApiErrorCode;

fn fields(api: InferenceApi, body: &str) -> Result<RoutingFields<'_>, crate::error::ApiError> {
    RoutingFields::read(api, body.as_bytes())
}

#[test]
fn reads_a_chat_request() {
    let body =
        r#"{"messages":[{"role":"user","content":"hello"}],"model":"m","max_tokens":7,"stream":true,"n":2}"#;
    let fields = fields(InferenceApi::Chat, body).unwrap();
    assert_eq!(fields.model.as_deref(), Some("m"));
    assert_eq!(
        (fields.stream, fields.n, fields.sequences(), fields.max_output_tokens),
        (true, 2, 2, Some(7))
    );
    assert_eq!(fields.prompt_bytes, 9);
    assert!(fields.has(BodyMember::MaxTokens) && !fields.has(BodyMember::Rid));
}

#[test]
fn max_completion_tokens_wins_over_max_tokens() {
    let body = r#"{"messages":[{}],"max_tokens":7,"max_completion_tokens":9}"#;
    assert_eq!(fields(InferenceApi::Chat, body).unwrap().max_output_tokens, Some(9));
}

#[test]
fn batches_are_counted() {
    let batch = |api, body| fields(api, body).map(|h| (h.batch, h.prompt_ids)).unwrap();
    assert_eq!(batch(InferenceApi::Completions, r#"{"prompt":"a"}"#), (1, 0));
    assert_eq!(batch(InferenceApi::Completions, r#"{"prompt":["a","b"]}"#), (2, 0));
    assert_eq!(batch(InferenceApi::Completions, r#"{"prompt":[1,2,3]}"#), (1, 3));
    assert_eq!(batch(InferenceApi::Completions, r#"{"prompt":[[1,2],[3]]}"#), (2, 3));
    assert_eq!(batch(InferenceApi::Generate, r#"{"input_ids":[[1],[2],[3]]}"#), (3, 3));
    let body = r#"{"text":"x","sampling_params":{"n":4,"max_new_tokens":5}}"#;
    let generate = fields(InferenceApi::Generate, body).unwrap();
    assert_eq!((generate.n, generate.max_output_tokens), (4, Some(5)));
}

#[test]
fn wishes_to_keep_the_prompt_are_detected() {
    for (members, expected) in [
        ("", false),
        (r#","prompt_cache_retention":"24h""#, true),
        (r#","prompt_cache_retention":"\u00324h""#, true),
        (r#","prompt_cache_retention":"in_memory""#, false),
        (r#","prompt_cache_retention":null"#, false),
        (r#","prompt_cache_retention":24"#, false),
        (r#","prompt_cache_retention":{"24h":[]}"#, false),
        (r#","cache_control":{"type":"ephemeral","ttl":"1h"}"#, true),
        (r#","cache_control":null"#, false),
        (r#","store":false,"prompt_cache_key":"k""#, false),
        (r#","prompt_cache_options":{"mode":"implicit","ttl":"30m"}"#, false),
        (r#","tools":[{"type":"function","cache_control":{"type":"ephemeral"}}]"#, false),
    ] {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"a"}}]{members}}}"#);
        assert_eq!(fields(InferenceApi::Chat, &body).unwrap().wants_prompt_cached, expected, "{body}");
    }
    let part = r#"{"type":"text","text":"a","cache_control":{"type":"ephemeral"}}"#;
    let marked = format!(r#"{{"role":"user","content":[{part}]}}"#);
    let plain = r#"{"role":"user","content":[{"type":"text","text":"a"}]}"#;
    let breakpoint =
        r#"{"content":[{"type":"text","text":"a","prompt_cache_breakpoint":{"mode":"explicit"}}]}"#;
    let on_message = r#"{"role":"user","content":"a","cache_control":{"type":"ephemeral"}}"#;
    for (messages, expected) in [
        (format!("{plain},{marked}"), true),
        // Only the prefix up to the mark will be used again.
        (format!("{marked},{plain}"), false),
        (format!("{plain},{on_message}"), true),
        (format!("{plain},{breakpoint}"), true),
        (format!("{breakpoint},{plain}"), false),
        (r#"{"role":"user","content":"a","cache_control":null}"#.to_owned(), false),
        (r#"{"role":"user","content":"\"cache_control\":{}"}"#.to_owned(), false),
    ] {
        let body = format!(r#"{{"messages":[{messages}]}}"#);
        assert_eq!(fields(InferenceApi::Chat, &body).unwrap().wants_prompt_cached, expected, "{body}");
        assert_eq!(fields(InferenceApi::Other, &body).unwrap().wants_prompt_cached, expected, "{body}");
    }
}

#[test]
fn errors_name_the_invalid_member() {
    let cases = [
        (InferenceApi::Chat, r#"{"model":1,"messages":[{}]}"#, "model"),
        (InferenceApi::Chat, r#"{"model":"m"}"#, "messages"),
        (InferenceApi::Chat, r#"{"messages":"hi"}"#, "messages"),
        (InferenceApi::Chat, r#"{"messages":[]}"#, "messages"),
        (InferenceApi::Chat, r#"{"messages":["hi"]}"#, "messages[0]"),
        (InferenceApi::Chat, r#"{"messages":[{},7]}"#, "messages[1]"),
        (InferenceApi::Chat, r#"{"messages":[{}],"stream":"yes"}"#, "stream"),
        (InferenceApi::Chat, r#"{"messages":[{}],"n":0}"#, "n"),
        (InferenceApi::Chat, r#"{"messages":[{}],"n":1.5}"#, "n"),
        (InferenceApi::Chat, r#"{"messages":[{}],"max_tokens":-1}"#, "max_tokens"),
        (InferenceApi::Chat, r#"{"messages":[{}],"max_tokens":"9"}"#, "max_tokens"),
        (InferenceApi::Chat, r#"{"messages":[{}],"model":"a","model":"b"}"#, "model"),
        (InferenceApi::Completions, r#"{"model":"m"}"#, "prompt"),
        (InferenceApi::Completions, r#"{"prompt":{}}"#, "prompt"),
        (InferenceApi::Completions, r#"{"prompt":[]}"#, "prompt"),
        (InferenceApi::Completions, r#"{"prompt":["a",1]}"#, "prompt[1]"),
        (InferenceApi::Completions, r#"{"prompt":[true]}"#, "prompt[0]"),
        (InferenceApi::Generate, "{}", "text"),
        (InferenceApi::Generate, r#"{"text":"a","sampling_params":3}"#, "sampling_params"),
        (InferenceApi::Generate, r#"{"text":"a","sampling_params":{"n":-3}}"#, "sampling_params.n"),
    ];
    for (api, body, param) in cases {
        let error = fields(api, body).expect_err(body);
        assert_eq!(
            (error.code, error.param.as_deref()),
            (ApiErrorCode::InvalidRequest, Some(param)),
            "{body}: {error}"
        );
        assert!(error.message.contains(param), "{error}");
    }
}

#[test]
fn json_errors_are_specific() {
    let deep = format!("{{\"messages\":{}{}}}", "[".repeat(500), "]".repeat(500));
    let cases: [(&[u8], &str); 8] = [
        (b"", "no body"),
        (b"  \n", "no body"),
        (b"[]", "object"),
        (b"{\"a\":1", "line 1 column 6"),
        (b"{\"a\":1}x", "trailing"),
        (b"{\"a\":\"\xff\xfe\"}", "UTF-8"),
        (deep.as_bytes(), "nests deeper"),
        (b"{\"a\":\"\\ud800\"}", "hex escape"),
    ];
    for (body, part) in cases {
        let error = RoutingFields::read(InferenceApi::Chat, body).unwrap_err();
        assert_eq!(error.code, ApiErrorCode::InvalidJson);
        assert!(error.message.contains(part), "{part}: {error}");
    }
}

#[test]
fn transfer_members_are_detected() {
    for body in [
        r#"{"messages":[{}],"bootstrap_host":"x"}"#,
        r#"{"messages":[{}],"bootstrap\u005froom":1}"#,
        r#"{"messages":[{}],"kv_transfer_params":null,"kv_transfer_params":{}}"#,
        r#"{"messages":[{}],"vllm_xargs":{"kv_transfer_params":"x"}}"#,
        r#"{"messages":[{}],"vllm_xargs":{"a":1,"\u006bv_transfer_params":"x"}}"#,
        r#"{"messages":[{}],"x":[[{"y":{"routed_dp_rank":1}}]]}"#,
    ] {
        assert!(fields(InferenceApi::Chat, body).unwrap().has_transfer_members, "{body}");
    }
    for body in [
        r#"{"messages":[{"kv_transfer_params":{}}],"x":"kv_transfer_params"}"#,
        r#"{"messages":[{}],"tools":[{"function":{"parameters":{"properties":{"bootstrap_host":{}}}}}]}"#,
    ] {
        assert!(!fields(InferenceApi::Chat, body).unwrap().has_transfer_members, "{body}");
    }
}

fn splice(body: &str, edits: &[MemberEdit], appended: &'static str) -> String {
    let bytes = Bytes::copy_from_slice(body.as_bytes());
    let fields = RoutingFields::read(InferenceApi::Other, &bytes).unwrap();
    let spliced = SplicedBody::new(&bytes, &fields, edits, Bytes::from_static(appended.as_bytes()));
    assert_eq!(spliced.len() as usize, spliced.to_vec().len());
    String::from_utf8(spliced.to_vec()).unwrap()
}

#[test]
fn splicing_changes_no_other_bytes() {
    assert_eq!(splice(" { } ", &[], r#""a":1"#), r#" { "a":1}"#);
    assert_eq!(splice(r#"{"x":"}"} "#, &[], r#""a":1"#), r#"{"x":"}","a":1}"#);
    assert_eq!(splice(r#"{"x" : 1.0000000000000002}"#, &[], ""), r#"{"x" : 1.0000000000000002}"#);
    let edits = [MemberEdit::new(BodyMember::Stream, "false"), MemberEdit::new(BodyMember::MaxTokens, "1")];
    assert_eq!(
        splice(r#"{"max_tokens": 500 ,"x":[ 1 ],"stream":true}"#, &edits, r#""k":null"#),
        r#"{"max_tokens": 1 ,"x":[ 1 ],"stream":false,"k":null}"#
    );
    assert_eq!(splice(r#"{"strea\u006d":true}"#, &edits, ""), r#"{"strea\u006d":false}"#);
}

pub(super) fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::hash_map(".{0,8}", inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    /// Only the edited and appended members change.
    #[test]
    fn splice_equals_edit_of_the_parsed_value(
        others in prop::collection::hash_map("[a-z]{1,6}_", any_json(), 0..5),
        stream in any::<Option<bool>>(),
        max in any::<Option<u32>>(),
    ) {
        let mut value: serde_json::Map<String, Value> = others.into_iter().collect();
        if let Some(stream) = stream { value.insert("stream".into(), stream.into()); }
        if let Some(max) = max { value.insert("max_tokens".into(), max.into()); }
        let body = Bytes::from(Value::Object(value).to_string());
        // Parsed again, because parsing a printed float does not always give the same float.
        let mut value: serde_json::Map<String, Value> = serde_json::from_slice(&body).unwrap();
        let fields = RoutingFields::read(InferenceApi::Other, &body).unwrap();
        let edits = [MemberEdit::new(BodyMember::Stream, "false"), MemberEdit::new(BodyMember::MaxTokens, "1")];
        let spliced = SplicedBody::new(&body, &fields, &edits, Bytes::from_static(br#""zz":{"q":[1]}"#)).to_vec();
        if stream.is_some() { value.insert("stream".into(), false.into()); }
        if max.is_some() { value.insert("max_tokens".into(), 1.into()); }
        value.insert("zz".into(), json!({"q": [1]}));
        prop_assert_eq!(serde_json::from_slice::<Value>(&spliced).unwrap(), Value::Object(value));
    }

    /// Bodies are accepted exactly when serde_json parses them as an object, also after a few bytes were changed.
    #[test]
    fn agrees_with_serde_json_on_validity(value in any_json(), changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3)) {
        let mut body = json!({"messages": value, "model": "m"}).to_string().into_bytes();
        for (index, byte) in changes {
            let index = index.index(body.len());
            body[index] = byte;
        }
        prop_assert_eq!(accepts(&body), serde_json::from_slice::<serde_json::Map<String, Value>>(&body).is_ok());
    }
}
