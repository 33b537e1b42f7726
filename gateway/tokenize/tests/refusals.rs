//! Requests whose prompt cannot be determined, with the reason.
#![expect(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

use std::path::Path;

use moongate_tokenize::{
    ChatBody, PromptDialect, PromptError, PromptLimits, PromptTokenizer, TemplateTime, TokenizerRegistry,
};
use serde_json::{Value, json};

fn load(engine: PromptDialect) -> PromptTokenizer {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/small");
    PromptTokenizer::load(&folder, engine, PromptLimits { prompt_bytes: 100_000, ..PromptLimits::default() })
        .unwrap()
}

fn refusal(engine: PromptDialect, body: &Value) -> PromptError {
    let body = match ChatBody::parse(body.to_string().as_bytes()) {
        Ok(body) => body,
        Err(reason) => return reason,
    };
    match load(engine).tokenize_chat(&body, TemplateTime::utc(0)) {
        Ok(prompt) => panic!("{body:?} has {} tokens", prompt.ids().len()),
        Err(reason) => reason,
    }
}

fn with(more: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "a" }] });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn saying(content: Value) -> Value {
    json!({ "messages": [{ "role": "user", "content": content }] })
}

#[test]
fn what_is_not_followed_is_named() {
    for engine in [PromptDialect::Vllm, PromptDialect::Sglang] {
        for (body, reason) in [
            (with(json!({ "chat_template": "x" })), PromptError::UnsupportedMember("chat_template")),
            (
                with(json!({ "truncate_prompt_tokens": 3 })),
                PromptError::UnsupportedMember("truncate_prompt_tokens"),
            ),
            (
                with(json!({ "chat_template_kwargs": { "messages": [] } })),
                PromptError::UnsupportedMember("chat_template_kwargs"),
            ),
            (
                saying(json!([{ "type": "image_url", "image_url": { "url": "data:," } }])),
                PromptError::Multimodal("image_url".to_owned()),
            ),
            (
                saying(json!([{ "type": "input_audio", "input_audio": {} }])),
                PromptError::Multimodal("input_audio".to_owned()),
            ),
            (saying(json!("a".repeat(200_000))), PromptError::TemplateLimit("output")),
        ] {
            assert_eq!(refusal(engine, &body), reason, "{engine:?}");
        }
    }
    let developer = json!({ "messages": [{ "role": "developer", "content": "a" }] });
    assert_eq!(refusal(PromptDialect::Vllm, &developer), PromptError::UnsupportedMember("developer"));
    let reasoning = with(json!({ "reasoning": { "effort": "high" } }));
    assert_eq!(refusal(PromptDialect::Sglang, &reasoning), PromptError::UnsupportedMember("reasoning"));
}

#[test]
fn what_the_engines_refuse_is_refused() {
    for engine in [PromptDialect::Vllm, PromptDialect::Sglang] {
        for body in [
            json!({ "messages": [] }),
            json!({ "messages": [1] }),
            json!({ "messages": "a" }),
            json!({ "messages": [{ "content": "no role" }] }),
            saying(json!({})),
            saying(json!([{ "type": "text" }])),
            saying(json!([{ "type": "odd", "text": "a" }])),
            with(json!({ "tools": [{}] })),
            with(json!({ "chat_template_kwargs": 1 })),
        ] {
            let reason = refusal(engine, &body);
            assert!(matches!(reason, PromptError::Malformed(_)), "{engine:?}: {body}: {reason:?}");
        }
    }
    let both = with(json!({ "continue_final_message": true }));
    assert!(matches!(refusal(PromptDialect::Vllm, &both), PromptError::Malformed(_)));
    let arguments = json!({ "messages": [{ "role": "assistant", "content": "", "tool_calls": [
        { "type": "function", "function": { "name": "f", "arguments": "[1" } }] }] });
    assert!(matches!(refusal(PromptDialect::Sglang, &arguments), PromptError::Malformed(_)));
}

#[test]
fn ids_bypass_template_and_tokenizer() {
    let body = ChatBody::parse(with(json!({ "input_ids": [3, 1, 2] })).to_string().as_bytes()).unwrap();
    let prompt = load(PromptDialect::Sglang).tokenize_chat(&body, TemplateTime::utc(0)).unwrap();
    assert_eq!(prompt.ids().to_vec(), [3, 1, 2]);
}

#[test]
fn models_are_found_by_name() {
    let registry: TokenizerRegistry = TokenizerRegistry::new();
    assert!(registry.get("small").is_none());
    registry.insert("small", load(PromptDialect::Vllm));
    let model = registry.get("small").unwrap();
    let body = ChatBody::parse(with(json!({})).to_string().as_bytes()).unwrap();
    assert_eq!(
        model.render_chat(&body, TemplateTime::utc(0)).unwrap(),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    );
}
