//! A body of a conversation gives the same prompt whether earlier turns of its conversation are cached or not, within the limit of its length.
//!
//! The first byte selects the engine, the API, and whether a long message comes first: only long bodies are cached. The second byte is the
//! part of the rest that belongs to the earlier turn.

#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use moongate_tokenize::{
    ChatBody, ConversationApi, PromptDialect, PromptLimits, PromptTokenizer, TemplateTime,
};

const PROMPT_BYTES: usize = 64 << 10;

struct PromptTokenizerPair {
    /// A tokenizer that caches texts and bodies.
    cached: PromptTokenizer,
    /// A tokenizer without a cache.
    fresh: PromptTokenizer,
}

fn load(engine: PromptDialect) -> PromptTokenizerPair {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gateway/tokenize/tests/data/small");
    let load = |cache_bytes| {
        let limits = PromptLimits { template_steps: 100_000, prompt_bytes: PROMPT_BYTES, cache_bytes };
        PromptTokenizer::load(&folder, engine, limits).expect("the model is good")
    };
    PromptTokenizerPair { cached: load(8 << 20), fresh: load(0) }
}

static VLLM: LazyLock<PromptTokenizerPair> = LazyLock::new(|| load(PromptDialect::Vllm));
static SGLANG: LazyLock<PromptTokenizerPair> = LazyLock::new(|| load(PromptDialect::Sglang));

/// The start of a long body, whose list has this name.
fn long(list: &str) -> String {
    format!(r#"{{"{list}":[{{"role":"user","content":"{}"}},"#, "a long question ".repeat(1100))
}

static LONG_MESSAGES: LazyLock<String> = LazyLock::new(|| long("messages"));
static LONG_INPUT: LazyLock<String> = LazyLock::new(|| long("input"));

fn check(models: &PromptTokenizerPair, engine: PromptDialect, api: ConversationApi, body: &[u8]) {
    let parsed = ChatBody::parse_conversation(api, engine, body);
    let read = models.cached.read_conversation(api, body);
    // The template renders system messages anywhere, and an effort of none in its own way, as is assumed without a template.
    assert_eq!(format!("{read:?}"), format!("{parsed:?}"));
    let (Ok(parsed), Ok(read)) = (parsed, read) else { return };
    let _ = parsed.check_text();
    let _ = parsed.truncation();
    let _ = parsed.media();
    if let Ok(chat) = models.fresh.render_media_chat(&parsed, TemplateTime::utc(0)) {
        let all = models.fresh.tokenize_media_chat(&chat);
        let before = models.fresh.tokenize_before_media(&chat);
        assert_eq!(before.is_ok(), all.is_ok());
    }
    let text = models.fresh.render_chat(&parsed, TemplateTime::utc(0));
    assert_eq!(models.cached.render_chat(&read, TemplateTime::utc(0)), text);
    // What a message continues may follow what the template made.
    assert!(text.map_or(0, |text| text.len()) <= PROMPT_BYTES + body.len());
    let (whole, cached) = (
        models.fresh.tokenize_chat(&parsed, TemplateTime::utc(0)),
        models.cached.tokenize_chat(&read, TemplateTime::utc(0)),
    );
    match (whole, cached) {
        (Ok(whole), Ok(cached)) => {
            assert_eq!(cached.ids().to_vec(), whole.ids().to_vec());
        }
        (whole, cached) => assert_eq!(cached.err(), whole.err()),
    }
}

fuzz_target!(|input: &[u8]| {
    let [flags, share, rest @ ..] = input else { return };
    let (models, engine) =
        if flags & 1 == 0 { (&*VLLM, PromptDialect::Vllm) } else { (&*SGLANG, PromptDialect::Sglang) };
    let (api, long) = match flags >> 2 & 3 {
        1 => (ConversationApi::Messages, &LONG_MESSAGES),
        2 => (ConversationApi::Responses, &LONG_INPUT),
        _ => (ConversationApi::Chat, &LONG_MESSAGES),
    };
    let begin = if flags & 2 == 0 { &[] } else { long.as_bytes() };
    let earlier = rest.len() * usize::from(*share) / 255;
    let end = if flags & 2 == 0 { &b""[..] } else { &b"]}"[..] };
    check(models, engine, api, &[begin, &rest[..earlier], end].concat());
    check(models, engine, api, &[begin, rest, end].concat());
});
