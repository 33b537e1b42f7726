//! Tokenizing the turns of a conversation with cached earlier turns returns the same ids as tokenizing each prompt without the cache.

use std::path::Path;
use std::sync::LazyLock;

use moongate_tokenize::{
    ChatBody, PromptDialect, PromptError, PromptLimits, PromptTokenizer, TemplateTime, TextBody, TextPrompt,
    TokenizedPrompt,
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn load(cache_bytes: u64) -> PromptTokenizer {
    load_for(PromptDialect::Vllm, cache_bytes)
}

fn load_for(engine: PromptDialect, cache_bytes: u64) -> PromptTokenizer {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/small");
    let limits = PromptLimits { cache_bytes, ..PromptLimits::default() };
    PromptTokenizer::load(&folder, engine, limits).unwrap()
}

static VLLM: LazyLock<PromptTokenizer> = LazyLock::new(|| load(1 << 26));
static SGLANG: LazyLock<PromptTokenizer> = LazyLock::new(|| load_for(PromptDialect::Sglang, 1 << 26));

/// A tokenizer that caches nothing, as the reference.
static UNCACHED: LazyLock<PromptTokenizer> = LazyLock::new(|| load(0));

fn tokenize(model: &PromptTokenizer, messages: &[Value], more: Value) -> TokenizedPrompt {
    let mut body = json!({ "messages": messages });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let body = ChatBody::parse(body.to_string().as_bytes()).unwrap();
    model.tokenize_chat(&body, TemplateTime::utc(0)).unwrap()
}

/// Compares a prompt with the same prompt tokenized without a cache.
fn check(prompt: &TokenizedPrompt, reference: &TokenizedPrompt) {
    assert_eq!(prompt.ids().to_vec(), reference.ids().to_vec());
}

/// Number of tokens of the longest common prefix that both prompts report.
fn shared(one: &TokenizedPrompt, other: &TokenizedPrompt) -> usize {
    let both = one.ids().prefixes().zip(other.ids().prefixes());
    both.take_while(|(one, other)| one == other).last().map_or(0, |((tokens, _), _)| tokens)
}

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

#[test]
fn a_follow_up_shares_the_text_before_it() {
    let model = load(1 << 20);
    let mut messages = vec![message("system", &"Be brief. ".repeat(500)), message("user", "Hello")];
    let first = tokenize(&model, &messages, json!({}));
    check(&first, &tokenize(&UNCACHED, &messages, json!({})));
    messages.push(message("assistant", "Hello to you."));
    messages.push(message("user", "And now?"));
    let second = tokenize(&model, &messages, json!({}));
    check(&second, &tokenize(&UNCACHED, &messages, json!({})));
    // Another conversation with the same system prompt, and an option that changes the end of the prompt.
    let other = tokenize(&model, &[messages[0].clone(), message("user", "Something else")], json!({}));
    let without_thinking =
        tokenize(&model, &messages, json!({ "chat_template_kwargs": { "enable_thinking": false } }));
    for prompt in [&second, &other, &without_thinking] {
        assert!(shared(&first, prompt) > 1000, "{}", shared(&first, prompt));
    }
}

#[test]
fn dropped_reasoning_keeps_the_prefix_before_it() {
    let model = load(1 << 20);
    let mut messages = vec![message("system", &"Be brief. ".repeat(500)), message("user", "Hello")];
    let first = tokenize(&model, &messages, json!({}));
    for step in 0..40 {
        messages.push(json!({
            "role": "assistant", "content": "", "reasoning": format!("Step {step}."),
            "tool_calls": [{ "id": "x", "type": "function", "function": { "name": "f", "arguments": "{\"a\": 1}" } }],
        }));
        messages.push(json!({ "role": "tool", "tool_call_id": "x", "content": format!("{step}") }));
        let prompt = tokenize(&model, &messages, json!({}));
        check(&prompt, &tokenize(&UNCACHED, &messages, json!({})));
        assert!(shared(&first, &prompt) > 1000);
    }
    // After a user message, the template drops the reasoning of all earlier steps.
    messages.push(message("user", "Thanks."));
    let prompt = tokenize(&model, &messages, json!({}));
    assert!(shared(&first, &prompt) > 1000);
    check(&prompt, &tokenize(&UNCACHED, &messages, json!({})));
}

/// What a client may change between two turns.
fn options(number: usize) -> Value {
    match number {
        0 => json!({ "chat_template_kwargs": { "enable_thinking": false } }),
        1 => json!({ "tools": [{ "type": "function", "function": { "name": "f" } }] }),
        2 => json!({ "add_generation_prompt": false, "continue_final_message": true }),
        3 => json!({ "add_special_tokens": true }),
        4 => json!({ "reasoning_effort": "none" }),
        _ => json!({}),
    }
}

fn turn_message(kind: usize, text: &str) -> Value {
    match kind {
        0 => message("user", text),
        1 => json!({ "role": "assistant", "content": text, "reasoning": text }),
        2 => json!({ "role": "assistant", "content": null, "tool_calls": [
            { "id": "x", "type": "function", "function": { "name": "f", "arguments": "{\"a\": 1}" } }
        ] }),
        3 => json!({ "role": "tool", "tool_call_id": "x", "content": [{ "type": "text", "text": text }] }),
        4 => message("developer", text),
        _ => message("system", text),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn ids_of_cached_bodies_equal_those_without_a_cache(
        sglang in any::<bool>(),
        turns in prop::collection::vec(
            (prop_oneof![4 => Just(0), 1 => 1..4_usize], prop::collection::vec((0..6_usize, "[a-z ]{0,9}"), 0..4), 0..12_usize),
            1..8,
        ),
    ) {
        let model = if sglang { &*SGLANG } else { &*VLLM };
        // Shorter bodies are not cached.
        let mut messages =
            vec![message("user", &"A long beginning. ".repeat(1_000)), message("assistant", "ok"), message("user", "go")];
        for (dropped, added, option) in turns {
            messages.truncate(messages.len().saturating_sub(dropped).max(1));
            messages.extend(added.iter().map(|(kind, text)| turn_message(*kind, text)));
            let mut body = options(option);
            body["messages"] = json!(messages);
            let body = body.to_string().into_bytes();
            let tokens = |body: ChatBody| {
                let prompt = model.tokenize_chat(&body, TemplateTime::utc(0))?;
                Ok::<_, PromptError>((prompt.ids().to_vec(), prompt.ids().prefixes().collect::<Vec<_>>()))
            };
            let cached = tokens(model.read_chat(&body).unwrap());
            prop_assert_eq!(cached, tokens(ChatBody::parse(&body).unwrap()));
        }
    }
}

#[test]
fn ids_of_300_turns_equal_those_without_the_cache() {
    let model = load(1 << 20);
    let mut messages = Vec::new();
    let mut earlier: Option<TokenizedPrompt> = None;
    for turn in 0..300 {
        messages.push(message("user", &format!("{turn}?")));
        let prompt = tokenize(&model, &messages, json!({}));
        check(&prompt, &tokenize(&UNCACHED, &messages, json!({})));
        let new = earlier.map_or(0, |earlier| prompt.ids().len() - shared(&earlier, &prompt));
        // The last segment, of at least 512 bytes, may not be complete.
        assert!(new < 400, "{new} new tokens in turn {turn}");
        messages.push(message("assistant", "Yes."));
        earlier = Some(prompt);
    }
}

#[test]
fn completions_have_prompts_with_and_without_special_tokens() {
    let model = load(1 << 20);
    let text = TextPrompt::Text("<|im_start|>a<|im_end|>".to_owned());
    let bare = model.tokenize_text(&text, false).unwrap();
    let marked = model.tokenize_text(&text, true).unwrap();
    assert_eq!(marked.ids().to_vec()[1..], bare.ids().to_vec());
    let ids = model.tokenize_text(&TextPrompt::Ids(vec![7, 8]), true).unwrap();
    assert_eq!((ids.ids().to_vec(), ids.ids().prefixes().count()), (vec![7, 8], 0));
}

#[test]
fn truncated_prompts_are_those_of_vllm() {
    // Recorded with the tokenizer's own truncation, and with slices as vLLM makes them.
    let text = "Hello world, this is a test of truncation.";
    for (members, expected) in [
        (json!({ "truncate_prompt_tokens": 5 }), &[512, 66, 261, 356, 13][..]),
        (json!({ "truncate_prompt_tokens": 5, "truncation_side": "left" }), &[308, 66, 261, 356, 13]),
        (json!({ "truncate_prompt_tokens": 5, "truncation_side": "right" }), &[512, 39, 439, 75, 78]),
        (json!({ "truncate_prompt_tokens": -1 }), &[512, 261, 356, 13]),
        (json!({ "truncate_prompt_tokens": -1, "max_tokens": 0 }), &[512, 66, 261, 356, 13]),
    ] {
        let mut body = json!({ "prompt": text });
        body.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
        let body = TextBody::parse(body.to_string().as_bytes()).unwrap();
        let truncation = body.truncation().unwrap().unwrap();
        let prompt = UNCACHED.tokenize_text(&body.prompts[0], body.add_special_tokens).unwrap();
        let kept = prompt.truncated(truncation, Some(5)).unwrap();
        assert_eq!((kept.ids().to_vec(), kept.ids().prefixes().count()), (expected.to_vec(), 0), "{members}");
    }
}

#[test]
fn concurrent_threads_share_cached_conversations() {
    let model = load(1 << 20);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let model = &model;
            scope.spawn(move || {
                let mut messages = vec![message("system", "A shared system prompt. ")];
                for turn in 0..20 {
                    messages.push(message("user", &format!("{} {turn}", thread % 2)));
                    check(&tokenize(model, &messages, json!({})), &tokenize(&UNCACHED, &messages, json!({})));
                }
            });
        }
    });
}

/// Text with parts that tokenizers treat specially: special tokens, parts of them, combining characters, contractions.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        3 => "[a-z ]{0,12}",
        1 => any::<String>(),
        1 => prop::sample::select(vec![
            "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|im_", "|>", "<", ">", "\n", "  ", "\u{301}", "e\u{301}", "'s", "世界", "\r\n",
        ]).prop_map(str::to_owned),
    ];
    prop::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

/// A client's next change of the conversation.
#[derive(Debug, Clone)]
enum ConversationStep {
    Say(&'static str, String),
    /// Removes the last messages and appends another one.
    Rewind(usize, String),
    Think(String, String),
}

fn step() -> impl Strategy<Value = ConversationStep> {
    prop_oneof![
        4 => (prop::sample::select(vec!["user", "assistant", "system"]), text()).prop_map(|(role, text)| ConversationStep::Say(role, text)),
        1 => (1_usize..4, text()).prop_map(|(back, text)| ConversationStep::Rewind(back, text)),
        2 => (text(), text()).prop_map(|(thought, text)| ConversationStep::Think(thought, text)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn turns_equal_those_without_the_cache(steps in prop::collection::vec(step(), 1..40)) {
        static MODEL: LazyLock<PromptTokenizer> = LazyLock::new(|| load(1 << 20));
        let mut messages = Vec::new();
        for step in steps {
            match step {
                ConversationStep::Say(role, text) => messages.push(message(role, &text)),
                ConversationStep::Rewind(back, text) => {
                    messages.truncate(messages.len().saturating_sub(back));
                    messages.push(message("user", &text));
                }
                ConversationStep::Think(thought, text) => {
                    messages.push(json!({ "role": "assistant", "content": text, "reasoning": thought }));
                }
            }
            check(&tokenize(&MODEL, &messages, json!({})), &tokenize(&UNCACHED, &messages, json!({})));
        }
    }

    #[test]
    fn growing_texts_equal_those_without_the_cache(pieces in prop::collection::vec(text(), 1..12), special in any::<bool>()) {
        static MODEL: LazyLock<PromptTokenizer> = LazyLock::new(|| load(1 << 20));
        let mut accumulated = String::new();
        for piece in pieces {
            accumulated.push_str(&piece);
            let text = TextPrompt::Text(accumulated.clone());
            let prompt = MODEL.tokenize_text(&text, special).unwrap();
            check(&prompt, &UNCACHED.tokenize_text(&text, special).unwrap());
        }
    }
}
