//! A chat template is part of a model from a third party. Any text is compiled or rejected, and its rendering ends within limits of
//! steps and length.
//!
//! The input is the template, followed by a zero byte and the messages.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moongate_tokenize::{PromptLimits, render_template};

/// So few steps that repeated doubling of a text stays small: the template engine bounds steps, and not the values that they make.
const LIMITS: PromptLimits = PromptLimits { template_steps: 100, prompt_bytes: 4096, cache_bytes: 0 };
const MESSAGES: &str =
    r#"[{"role":"system","content":"a"},{"role":"user","content":[{"type":"text","text":"b"}]}]"#;
/// The template engine takes texts of 100 MB, and numbers in proportion. They are slow, and no fault of a template's reader.
const MAX_DIGITS: usize = 4;

fn has_large_number(source: &str) -> bool {
    source
        .split(|character: char| !matches!(character, '0'..='9' | '_'))
        .any(|digits| digits.len() > MAX_DIGITS)
}

fuzz_target!(|input: &str| {
    let (source, messages) = input.split_once('\0').unwrap_or((input, MESSAGES));
    if has_large_number(source) {
        return;
    }
    let rendered = render_template(source, messages, LIMITS);
    assert_eq!(render_template(source, messages, LIMITS), rendered, "a template has no other state");
    assert!(rendered.map_or(0, |text| text.len()) <= LIMITS.prompt_bytes);
});
