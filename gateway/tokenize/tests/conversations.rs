//! A conversation's turns, tokenised with what is kept of earlier ones, give the ids of tokenising each in one go.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

use std::path::Path;
use std::sync::{Arc, LazyLock};

use moongate_tokenize::{
    ChatBody, PromptDialect, PromptLimits, PromptTokenizer, TemplateTime, TextPrompt, TokenizedPrompt,
};
use proptest::prelude::*;
use serde_json::{Value, json};

type CachedIds = Arc<Vec<u32>>;

fn load(limits: PromptLimits) -> PromptTokenizer<CachedIds> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/small");
    PromptTokenizer::load(&folder, PromptDialect::Vllm, limits).unwrap()
}

/// Remembers nothing.
static UNCACHED: LazyLock<PromptTokenizer<CachedIds>> = LazyLock::new(|| load(PromptLimits::default()));

fn tokenize(
    model: &PromptTokenizer<CachedIds>,
    messages: &[Value],
    more: Value,
) -> TokenizedPrompt<CachedIds> {
    let mut body = json!({ "messages": messages });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let body = ChatBody::parse(body.to_string().as_bytes()).unwrap();
    model.tokenize_chat(&body, TemplateTime::utc(0)).unwrap()
}

/// Checks a prompt against the same in one go, and what came back with it against the ids it was kept with; then keeps it.
fn check(
    model: &PromptTokenizer<CachedIds>,
    prompt: &TokenizedPrompt<CachedIds>,
    whole: &TokenizedPrompt<CachedIds>,
) {
    let ids = whole.ids().to_vec();
    assert_eq!(prompt.ids().to_vec(), ids);
    assert_eq!(whole.cached_prefix_tokens(), 0);
    let common = prompt.cached_prefix_tokens();
    match prompt.slot() {
        None => assert_eq!(common, 0),
        Some(kept) => assert_eq!(kept[..common], ids[..common]),
    }
    model.cache_conversation(prompt, Arc::new(ids));
}

fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

#[test]
fn a_follow_up_costs_its_new_text() {
    let model = load(PromptLimits::default());
    let mut messages = vec![message("system", &"Be brief. ".repeat(500)), message("user", "Hello")];
    let first = tokenize(&model, &messages, json!({}));
    assert_eq!(first.cached_prefix_tokens(), 0);
    check(&model, &first, &tokenize(&UNCACHED, &messages, json!({})));
    messages.push(message("assistant", "Hello to you."));
    messages.push(message("user", "And now?"));
    let second = tokenize(&model, &messages, json!({}));
    // All but the role behind the last token of the first prompt.
    assert!(second.cached_prefix_tokens() + 8 > first.ids().len(), "{}", second.cached_prefix_tokens());
    check(&model, &second, &tokenize(&UNCACHED, &messages, json!({})));
    // Another conversation with the same system prompt.
    let other = tokenize(&model, &[messages[0].clone(), message("user", "Something else")], json!({}));
    assert!(other.cached_prefix_tokens() > 1000, "{}", other.cached_prefix_tokens());
    // Another engine option at the end of the prompt is no obstacle.
    let unthinking =
        tokenize(&model, &messages, json!({ "chat_template_kwargs": { "enable_thinking": false } }));
    assert!(unthinking.cached_prefix_tokens() > 1000);
}

#[test]
fn dropped_reasoning_is_found_around() {
    let model = load(PromptLimits::default());
    let mut messages = vec![message("system", &"Be brief. ".repeat(500)), message("user", "Hello")];
    for step in 0..40 {
        messages.push(json!({
            "role": "assistant", "content": "", "reasoning": format!("Step {step}."),
            "tool_calls": [{ "id": "x", "type": "function", "function": { "name": "f", "arguments": "{\"a\": 1}" } }],
        }));
        messages.push(json!({ "role": "tool", "tool_call_id": "x", "content": format!("{step}") }));
        let prompt = tokenize(&model, &messages, json!({}));
        check(&model, &prompt, &tokenize(&UNCACHED, &messages, json!({})));
        assert!(step == 0 || prompt.cached_prefix_tokens() > 1000);
    }
    // Now the reasoning of all these steps is gone from the prompt.
    messages.push(message("user", "Thanks."));
    let prompt = tokenize(&model, &messages, json!({}));
    assert!(prompt.cached_prefix_tokens() > 1000, "{}", prompt.cached_prefix_tokens());
    check(&model, &prompt, &tokenize(&UNCACHED, &messages, json!({})));
}

#[test]
fn a_very_long_conversation_stays_exact() {
    let model = load(PromptLimits::default());
    let mut messages = Vec::new();
    for turn in 0..300 {
        messages.push(message("user", &format!("{turn}?")));
        let prompt = tokenize(&model, &messages, json!({}));
        let new = prompt.ids().len() - prompt.cached_prefix_tokens();
        assert!(turn == 0 || new < 50, "{new} new tokens in turn {turn}");
        assert!(prompt.ids().slices().count() < 600, "stretches are merged");
        check(&model, &prompt, &tokenize(&UNCACHED, &messages, json!({})));
        messages.push(message("assistant", "Yes."));
    }
}

#[test]
fn completions_have_the_tokenizers_own_tokens() {
    let model = load(PromptLimits::default());
    let text = TextPrompt::Text("<|im_start|>a<|im_end|>".to_owned());
    let bare = model.tokenize_text(&text, false).unwrap();
    model.cache_conversation(&bare, Arc::default());
    let marked = model.tokenize_text(&text, true).unwrap();
    assert_eq!(marked.cached_prefix_tokens(), 0, "what was kept without special tokens is another prompt");
    assert_eq!(marked.ids().to_vec()[1..], bare.ids().to_vec());
    model.cache_conversation(&marked, Arc::default());
    let longer = TextPrompt::Text("<|im_start|>a<|im_end|>b".to_owned());
    let longer = model.tokenize_text(&longer, true).unwrap();
    assert_eq!(longer.cached_prefix_tokens(), marked.ids().len());
    assert_eq!(longer.ids().to_vec()[0], marked.ids().to_vec()[0]);
    let ids = model.tokenize_text(&TextPrompt::Ids(vec![7, 8]), true).unwrap();
    assert_eq!(ids.ids().to_vec(), [7, 8]);
}

#[test]
fn the_cache_is_bounded() {
    let model = load(PromptLimits { conversation_bytes: 100_000, ..PromptLimits::default() });
    let ask_one = |number: usize| {
        let messages = [message("user", &format!("{number} {}", "word ".repeat(2000))), message("user", "b")];
        tokenize(&model, &messages, json!({}))
    };
    for number in 0..100 {
        let prompt = ask_one(number);
        model.cache_conversation(&prompt, Arc::default());
    }
    let known = (0..100).filter(|number| ask_one(*number).cached_prefix_tokens() > 0).count();
    assert!((1..=10).contains(&known), "{known} of 100 prompts are known");
}

#[test]
fn many_threads_share_the_conversations() {
    let model = load(PromptLimits::default());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let model = &model;
            scope.spawn(move || {
                let mut messages = vec![message("system", "The same for all. ")];
                for turn in 0..20 {
                    messages.push(message("user", &format!("{} {turn}", thread % 2)));
                    check(
                        model,
                        &tokenize(model, &messages, json!({})),
                        &tokenize(&UNCACHED, &messages, json!({})),
                    );
                }
            });
        }
    });
}

/// Text with pieces that matter to the tokenizer.
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

/// How a client goes on.
#[derive(Debug, Clone)]
enum ConversationStep {
    Say(&'static str, String),
    /// Forgets the last messages and says something else.
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
    fn turns_equal_one_pass(steps in prop::collection::vec(step(), 1..40)) {
        static MODEL: LazyLock<PromptTokenizer<CachedIds>> = LazyLock::new(|| load(PromptLimits::default()));
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
            check(&MODEL, &tokenize(&MODEL, &messages, json!({})), &tokenize(&UNCACHED, &messages, json!({})));
        }
    }

    #[test]
    fn texts_equal_one_pass(pieces in prop::collection::vec(text(), 1..12), special in any::<bool>()) {
        static MODEL: LazyLock<PromptTokenizer<CachedIds>> = LazyLock::new(|| load(PromptLimits::default()));
        let mut whole = String::new();
        for piece in pieces {
            whole.push_str(&piece);
            let text = TextPrompt::Text(whole.clone());
            let prompt = MODEL.tokenize_text(&text, special).unwrap();
            check(&MODEL, &prompt, &UNCACHED.tokenize_text(&text, special).unwrap());
        }
    }
}
