//! The simulator's tokenizer (text to tokens and back), and its "model".
//!
//! One token is four bytes of text (the last one of a segment may be shorter), so a text that grows at its end keeps
//! its previous tokens. Every output token is a space and three letters, which is again one input token: output that is
//! sent as history in the next turn has the same tokens and can hit the prefix cache. The output is a function of the
//! *whole* prompt and of the position, so a wrong KV cache is detectable.

/// Bytes of text per token.
pub const BYTES_PER_TOKEN: usize = 4;
/// Ids below this one represent text, as in Qwen3's vocabulary; special tokens follow.
const TEXT_VOCABULARY: u64 = 151_643;
/// Special token that starts a chat message.
const MESSAGE_START: u32 = 151_644;
/// Special token that ends a chat message.
const MESSAGE_END: u32 = 151_645;
/// Number of different output tokens: three lower-case letters.
const OUTPUT_VOCABULARY: u64 = 26 * 26 * 26;

const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Finaliser of SplitMix64: every input bit affects every output bit.
pub(crate) const fn splitmix64(value: u64) -> u64 {
    let mut z = value.wrapping_add(GOLDEN_GAMMA);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Combines two values; the order matters.
pub(crate) const fn mix(left: u64, right: u64) -> u64 {
    splitmix64(left ^ splitmix64(right))
}

/// 64-bit hash of some bytes.
pub(crate) fn hash_bytes(bytes: &[u8]) -> u64 {
    let mut state = bytes.len() as u64;
    for chunk in bytes.chunks(8) {
        let mut word = [0_u8; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        state = mix(state, u64::from_le_bytes(word));
    }
    state
}

pub(crate) fn push_text(tokens: &mut Vec<u32>, text: &str) {
    tokens.reserve(text.len() / BYTES_PER_TOKEN + 1);
    for chunk in text.as_bytes().chunks(BYTES_PER_TOKEN) {
        tokens.push(chunk_token(chunk));
    }
}

///
/// The first `a.len() / 4` tokens of `tokens(a)` and `tokens(a + b)` are equal.
#[must_use]
pub fn tokens_of_text(text: &str) -> Vec<u32> {
    let mut tokens = Vec::new();
    push_text(&mut tokens, text);
    tokens
}

fn chunk_token(chunk: &[u8]) -> u32 {
    // The remainder is below 2^18.
    u32::try_from(hash_bytes(chunk) % TEXT_VOCABULARY).unwrap_or_default()
}

/// Appends one chat message. Contents start on a token boundary, so output quoted as history has the tokens with which
/// it was generated.
pub(crate) fn push_message(tokens: &mut Vec<u32>, role: &str, content: &str) {
    push_generation_prompt(tokens, role);
    push_text(tokens, content);
    tokens.push(MESSAGE_END);
}

/// Appends the opening of the message that the model generates.
pub(crate) fn push_generation_prompt(tokens: &mut Vec<u32>, role: &str) {
    tokens.push(MESSAGE_START);
    push_text(tokens, role);
}

/// The chained hash of a token sequence: one hash per full page, and one of the whole sequence.
///
/// A page's hash covers everything before it too, so equal hashes mean equal prefixes.
#[derive(Debug, Clone)]
pub(crate) struct PageHashChain {
    lanes: [u64; 2],
    page_size: usize,
    length: usize,
    salt: u64,
    pages: Vec<u128>,
}

impl PageHashChain {
    /// An empty chain. `salt` separates caches (tenants); it does not change [`PageHashChain::fingerprint`].
    pub(crate) fn new(page_size: usize, salt: u64) -> Self {
        Self { lanes: [1, 2], page_size: page_size.max(1), length: 0, salt, pages: Vec::new() }
    }

    pub(crate) fn of(tokens: &[u32], page_size: usize, salt: u64) -> Self {
        let mut chain = Self::new(page_size, salt);
        chain.pages.reserve(tokens.len() / chain.page_size);
        for token in tokens {
            chain.push(*token);
        }
        chain
    }

    pub(crate) fn push(&mut self, token: u32) {
        let token = u64::from(token);
        self.lanes = [mix(self.lanes[0], token), mix(self.lanes[1], token)];
        self.length += 1;
        if self.length.is_multiple_of(self.page_size) {
            let salted = [mix(self.lanes[0], self.salt), mix(self.lanes[1], self.salt)];
            self.pages.push((u128::from(salted[0]) << 64) | u128::from(salted[1]));
        }
    }

    /// Hashes of the full pages, in order.
    pub(crate) fn pages(&self) -> &[u128] {
        &self.pages
    }

    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Identifies the whole sequence; stands for the content of its KV cache.
    pub(crate) fn fingerprint(&self) -> u64 {
        mix(self.lanes[0] ^ self.lanes[1].rotate_left(32), self.length as u64)
    }
}

/// The model's output after a prompt with this fingerprint, for the `choice`-th of `n` choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenGenerator(u64);

impl TokenGenerator {
    pub(crate) fn new(fingerprint: u64, choice: u32) -> Self {
        if choice == 0 { Self(fingerprint) } else { Self(mix(fingerprint, u64::from(choice))) }
    }

    /// Output of an engine that decodes with another prompt's KV cache: well-formed and wrong.
    pub(crate) fn with_wrong_cache(own: u64, received: u64, choice: u32) -> Self {
        Self::new(mix(own, received), choice)
    }

    /// Text of the output token at `index`.
    pub(crate) fn token_text(self, index: u64) -> String {
        token_text(mix(self.0, index))
    }

    /// Number of output tokens without a limit.
    pub(crate) fn natural_length(self) -> u32 {
        // 16 to 127 tokens.
        16 + u32::try_from(mix(self.0, u64::MAX) % 112).unwrap_or_default()
    }
}

/// A four-byte word chosen by `seed`: one token as output and one token as input.
#[must_use]
pub fn token_text(seed: u64) -> String {
    let mut rest = seed % OUTPUT_VOCABULARY;
    let mut text = String::with_capacity(BYTES_PER_TOKEN);
    text.push(' ');
    for _ in 0..3 {
        // The remainder is below 26.
        text.push(char::from(b'a' + u8::try_from(rest % 26).unwrap_or_default()));
        rest /= 26;
    }
    text
}

/// Token of one piece of output text.
pub(crate) fn token_of(piece: &str) -> u32 {
    chunk_token(piece.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_output_word_is_one_input_token() {
        let generator = TokenGenerator::new(7, 0);
        let output: String = (0..5).map(|index| generator.token_text(index)).collect();
        let expected: Vec<u32> = (0..5).map(|index| token_of(&generator.token_text(index))).collect();
        assert_eq!(tokens_of_text(&output), expected);
    }

    #[test]
    fn a_history_keeps_its_tokens_when_a_turn_is_added() {
        let mut first = Vec::new();
        push_message(&mut first, "user", "hello there");
        push_generation_prompt(&mut first, "assistant");
        let mut second = Vec::new();
        push_message(&mut second, "user", "hello there");
        push_message(&mut second, "assistant", " abc def");
        assert_eq!(second[..first.len()], first[..]);
        assert_eq!(second[first.len()..first.len() + 2], [token_of(" abc"), token_of(" def")]);
    }

    #[test]
    fn every_prompt_token_changes_output_and_salt_changes_cache() {
        let tokens: Vec<u32> = (0..100).collect();
        let chain = PageHashChain::of(&tokens, 16, 0);
        let salted = PageHashChain::of(&tokens, 16, 9);
        assert_eq!(chain.fingerprint(), salted.fingerprint());
        assert_ne!(chain.pages()[0], salted.pages()[0]);
        for changed in 0..100 {
            let mut other = tokens.clone();
            other[changed] += 1;
            assert_ne!(PageHashChain::of(&other, 16, 0).fingerprint(), chain.fingerprint());
        }
    }

    proptest! {
        #[test]
        fn tokens_are_stable_under_extension(head in ".{0,200}", tail in ".{0,200}") {
            let short = tokens_of_text(&head);
            let long = tokens_of_text(&format!("{head}{tail}"));
            let full = head.len() / BYTES_PER_TOKEN;
            prop_assert_eq!(&short[..full], &long[..full]);
        }

        #[test]
        fn equal_pages_mean_equal_prefixes(left in prop::collection::vec(0_u32..3, 0..40), right in prop::collection::vec(0_u32..3, 0..40)) {
            let a = PageHashChain::of(&left, 4, 0);
            let b = PageHashChain::of(&right, 4, 0);
            for (index, (x, y)) in a.pages().iter().zip(b.pages()).enumerate() {
                let end = (index + 1) * 4;
                prop_assert_eq!(x == y, left[..end] == right[..end]);
            }
        }
    }
}
