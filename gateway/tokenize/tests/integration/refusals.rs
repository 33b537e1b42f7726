//! Requests whose prompt the gateway cannot determine are rejected with the reason.

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

fn rejection(engine: PromptDialect, body: &Value) -> PromptError {
    let body = match ChatBody::parse(body.to_string().as_bytes()) {
        Ok(body) => body,
        Err(reason) => return reason,
    };
    match load(engine).tokenize_chat(&body, TemplateTime::utc(0)) {
        Ok(prompt) => panic!("{body:?} has {} tokens", prompt.ids().len()),
        Err(reason) => reason,
    }
}

fn body_with(members: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "a" }] });
    body.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
    body
}

fn body_with_content(content: Value) -> Value {
    json!({ "messages": [{ "role": "user", "content": content }] })
}

#[test]
fn the_reason_names_the_unsupported_member() {
    for engine in [PromptDialect::Vllm, PromptDialect::Sglang] {
        for (body, reason) in [
            (body_with(json!({ "chat_template": "x" })), PromptError::UnsupportedMember("chat_template")),
            (
                body_with(json!({ "chat_template_kwargs": { "messages": [] } })),
                PromptError::UnsupportedMember("chat_template_kwargs"),
            ),
            (
                body_with_content(json!([{ "type": "image_url", "image_url": { "url": "data:," } }])),
                PromptError::Multimodal("image_url".to_owned()),
            ),
            (
                body_with_content(json!([{ "type": "input_audio", "input_audio": {} }])),
                PromptError::Multimodal("input_audio".to_owned()),
            ),
            (body_with_content(json!("a".repeat(200_000))), PromptError::TemplateLimit("output")),
        ] {
            assert_eq!(rejection(engine, &body), reason, "{engine:?}");
        }
    }
    let reasoning = body_with(json!({ "reasoning": { "effort": "high" } }));
    assert_eq!(rejection(PromptDialect::Sglang, &reasoning), PromptError::UnsupportedMember("reasoning"));
}

#[test]
fn requests_that_engines_reject_are_malformed() {
    for engine in [PromptDialect::Vllm, PromptDialect::Sglang] {
        for body in [
            json!({ "messages": [] }),
            json!({ "messages": [1] }),
            json!({ "messages": "a" }),
            json!({ "messages": [{ "content": "no role" }] }),
            body_with_content(json!({})),
            body_with_content(json!([{ "type": "text" }])),
            body_with_content(json!([{ "type": "odd", "text": "a" }])),
            body_with(json!({ "tools": [{}] })),
            body_with(json!({ "chat_template_kwargs": 1 })),
        ] {
            let reason = rejection(engine, &body);
            assert!(matches!(reason, PromptError::Malformed(_)), "{engine:?}: {body}: {reason:?}");
        }
    }
    let both = body_with(json!({ "continue_final_message": true }));
    assert!(matches!(rejection(PromptDialect::Vllm, &both), PromptError::Malformed(_)));
    let arguments = json!({ "messages": [{ "role": "assistant", "content": "", "tool_calls": [
        { "type": "function", "function": { "name": "f", "arguments": "[1" } }] }] });
    assert!(matches!(rejection(PromptDialect::Sglang, &arguments), PromptError::Malformed(_)));
}

#[test]
fn developers_are_systems_in_vllm_and_kept_in_sglang() {
    let body =
        json!({ "messages": [{ "role": "user", "content": "a" }, { "role": "developer", "content": "b" }] });
    let body = ChatBody::parse(body.to_string().as_bytes()).unwrap();
    let rendered = |engine| load(engine).render_chat(&body, TemplateTime::utc(0)).unwrap();
    assert_eq!(
        rendered(PromptDialect::Vllm),
        "<|im_start|>system\nb<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(
        rendered(PromptDialect::Sglang),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>developer\nb<|im_end|>\n<|im_start|>assistant\n"
    );
}

#[test]
fn ids_bypass_template_and_tokenizer() {
    let body = ChatBody::parse(body_with(json!({ "input_ids": [3, 1, 2] })).to_string().as_bytes()).unwrap();
    let prompt = load(PromptDialect::Sglang).tokenize_chat(&body, TemplateTime::utc(0)).unwrap();
    assert_eq!(prompt.ids().to_vec(), [3, 1, 2]);
}

#[test]
fn registry_returns_a_tokenizer_by_model_name() {
    let registry: TokenizerRegistry = TokenizerRegistry::new();
    assert!(registry.get("small").is_none());
    registry.insert("small", load(PromptDialect::Vllm));
    let model = registry.get("small").unwrap();
    let body = ChatBody::parse(body_with(json!({})).to_string().as_bytes()).unwrap();
    assert_eq!(
        model.render_chat(&body, TemplateTime::utc(0)).unwrap(),
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    );
}
