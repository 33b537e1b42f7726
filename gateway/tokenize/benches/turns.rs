//! CPU time to tokenize the first turn of a long conversation, and a follow-up turn.
//!
//! Needs a real tokenizer: `MOONGATE_BENCH_TOKENIZER` names its folder (tests/exact/setup installs two).
#![expect(clippy::unwrap_used, reason = "a benchmark ends by panicking")]

use std::hint::black_box;
use std::path::PathBuf;
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use moongate_tokenize::{ChatBody, PromptDialect, PromptLimits, PromptTokenizer, TemplateTime, TextPrompt};
use serde_json::{Value, json};

const CONVERSATION_TOKENS: usize = 131_072;

/// Generates text that depends on the seed. The tokenizer caches words, so a measurement of uncached text needs new words.
struct UniqueWords(u64);

impl UniqueWords {
    fn next(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    /// About 4.6 bytes per token: common words, some rare, some numbers and code.
    fn paragraph(&mut self, words: usize) -> String {
        const COMMON: [&str; 32] = [
            "the", "request", "cache", "of", "engine", "and", "prefill", "to", "a", "decode", "in", "that",
            "is", "token", "router", "for", "with", "memory", "block", "it", "as", "was", "on", "stream",
            "be", "answer", "at", "by", "had", "not", "are", "but",
        ];
        let mut text = String::new();
        for _ in 0..words {
            match self.next(20) {
                0 => text.push_str(&format!(" {}", self.next(100_000))),
                1 => text.push_str(&format!(" fn call_{}(&self) -> u64;\n", self.next(50))),
                2 => {
                    let syllables = ["ka", "to", "mi", "ren", "sol", "vi", "ber", "dan"];
                    text.push(' ');
                    (0..3).for_each(|_| text.push_str(syllables[usize::try_from(self.next(8)).unwrap()]));
                }
                _ => {
                    text.push(' ');
                    text.push_str(COMMON[usize::try_from(self.next(32)).unwrap()]);
                }
            }
            if self.next(12) == 0 {
                text.push_str(".\n");
            }
        }
        text
    }
}

fn conversation(model: &PromptTokenizer, seed: u64) -> Vec<Value> {
    let mut words = UniqueWords(seed);
    let mut messages = vec![json!({ "role": "system", "content": words.paragraph(2000) })];
    loop {
        for role in ["user", "assistant"] {
            messages.push(json!({ "role": role, "content": words.paragraph(600) }));
        }
        if messages.len() % 32 == 1 && tokens(model, &messages) >= CONVERSATION_TOKENS {
            messages.push(json!({ "role": "user", "content": words.paragraph(200) }));
            return messages;
        }
    }
}

fn body(messages: &[Value]) -> Vec<u8> {
    json!({ "model": "m", "messages": messages, "stream": true }).to_string().into_bytes()
}

fn tokens(model: &PromptTokenizer, messages: &[Value]) -> usize {
    let body = ChatBody::parse(&body(messages)).unwrap();
    model.tokenize_chat(&body, TemplateTime::utc(0)).unwrap().ids().len()
}

fn turns(criterion: &mut Criterion) {
    let Some(folder) = std::env::var_os("MOONGATE_BENCH_TOKENIZER").map(PathBuf::from) else { return };
    let model = PromptTokenizer::load(&folder, PromptDialect::Vllm, PromptLimits::default()).unwrap();
    let mut messages = conversation(&model, 1);
    let first = body(&messages);
    let text = |raw: &[u8]| model.render_chat(&ChatBody::parse(raw).unwrap(), TemplateTime::utc(0)).unwrap();
    model.read_chat(&first).unwrap();
    let first_text = TextPrompt::Text(text(&first));
    messages.push(json!({ "role": "assistant", "content": UniqueWords(7).paragraph(150) }));
    messages.push(json!({ "role": "user", "content": UniqueWords(8).paragraph(50) }));
    let next = body(&messages);
    let next_text = TextPrompt::Text(text(&next));

    let mut group = criterion.benchmark_group("turns");
    group.sample_size(20).measurement_time(Duration::from_secs(4));
    let mut seed = 100;
    // Each text is used once, so that only the common words are in the tokenizer's word cache.
    group.bench_function("first turn, new text", |bencher| {
        bencher.iter_batched(
            || {
                seed += 1;
                let body = body(&conversation(&model, seed));
                TextPrompt::Text(text(&body))
            },
            |text| black_box(model.tokenize_text(&text, false).unwrap()),
            BatchSize::PerIteration,
        );
    });
    group.bench_function("first turn, cached words", |bencher| {
        bencher.iter(|| black_box(model.tokenize_text(&first_text, false).unwrap()));
    });
    group.bench_function("follow-up turn", |bencher| {
        bencher.iter(|| black_box(model.tokenize_text(&next_text, false).unwrap()));
    });
    group.bench_function("parsing the body", |bencher| {
        bencher.iter(|| black_box(ChatBody::parse(&next).unwrap()));
    });
    group.bench_function("parsing the body of a follow-up turn", |bencher| {
        bencher.iter(|| black_box(model.read_chat(&next).unwrap()));
    });
    let parsed = ChatBody::parse(&next).unwrap();
    group.bench_function("rendering", |bencher| {
        bencher.iter(|| black_box(model.render_chat(&parsed, TemplateTime::utc(0)).unwrap()));
    });
    group.bench_function("follow-up turn, from body to tokens", |bencher| {
        bencher.iter(|| {
            let parsed = model.read_chat(&next).unwrap();
            black_box(model.tokenize_chat(&parsed, TemplateTime::utc(0)).unwrap())
        });
    });
    group.finish();
}

criterion_group!(benches, turns);
criterion_main!(benches);
