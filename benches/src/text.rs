//! Synthetic text with about 4.6 bytes per token: common words, numbers, code and invented words.

const COMMON: [&str; 24] = [
    "the", "request", "cache", "of", "engine", "and", "prefill", "to", "a", "decode", "in", "that", "is",
    "token", "router", "for", "with", "memory", "block", "it", "as", "was", "on", "stream",
];
const SYLLABLES: [&str; 8] = ["ka", "to", "mi", "ren", "sol", "vi", "ber", "dan"];

/// Appends a space and a word, sometimes with the end of a sentence and of a line.
pub(crate) fn append_word(text: &mut String, rng: &mut fastrand::Rng) {
    text.push(' ');
    match rng.u8(..20) {
        0 => text.push_str(&rng.u32(..100_000).to_string()),
        1 => text.push_str("fn call(&self) -> u64;\n"),
        2 => (0..3).for_each(|_| text.push_str(SYLLABLES[rng.usize(..8)])),
        _ => text.push_str(COMMON[rng.usize(..24)]),
    }
    if rng.u8(..12) == 0 {
        text.push_str(".\n");
    }
}
