//! Synthetic prompt text: a function of the id, four bytes per token of the simulator.

use super::trace::TraceRow;
use crate::engine::tokens::{BYTES_PER_TOKEN, hash_bytes, mix, token_text};

/// Text of a trace row: every block id maps to one text, so rows that share ids share a prefix. A last partial block is
/// a prefix of its block's text. Rows without ids get text of their own, by `seed`.
#[must_use]
pub fn prompt_of_row(row: &TraceRow, seed: u64) -> String {
    let mut text = String::with_capacity(row.input_tokens * BYTES_PER_TOKEN);
    let mut left = row.input_tokens;
    for block in &row.blocks {
        let tokens = left.min(row.block_tokens);
        push_words(&mut text, *block, tokens);
        left -= tokens;
    }
    // Tokens that the ids do not cover.
    push_words(&mut text, mix(seed, hash_bytes(b"rest")), left);
    text
}

/// Text of this many tokens, different for every seed.
#[must_use]
pub fn unique_prompt(tokens: usize, seed: u64) -> String {
    let mut text = String::with_capacity(tokens * BYTES_PER_TOKEN);
    push_words(&mut text, mix(seed, hash_bytes(b"unique")), tokens);
    text
}

fn push_words(text: &mut String, seed: u64, tokens: usize) {
    for index in 0..tokens {
        text.push_str(&token_text(mix(seed, index as u64)));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::tokens::tokens_of_text;

    fn row(input_tokens: usize, blocks: &[u64]) -> TraceRow {
        TraceRow {
            at: Duration::ZERO,
            input_tokens,
            output_tokens: 1,
            blocks: blocks.to_vec(),
            block_tokens: 512,
        }
    }

    #[test]
    fn equal_ids_give_equal_text_and_lengths_are_exact() {
        let first = prompt_of_row(&row(1_100, &[1, 2, 3]), 1);
        let second = prompt_of_row(&row(1_500, &[1, 2, 9]), 2);
        assert_eq!(tokens_of_text(&first).len(), 1_100);
        assert_eq!(first[..4_096], second[..4_096]);
        assert_ne!(first[4_096..4_120], second[4_096..4_120]);
        // A partial block is a prefix of the whole one.
        assert!(prompt_of_row(&row(1_536, &[1, 2, 3]), 3).starts_with(&first));
        assert_eq!(tokens_of_text(&prompt_of_row(&row(700, &[]), 4)).len(), 700);
    }
}
