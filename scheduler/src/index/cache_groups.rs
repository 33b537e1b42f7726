//! Reusable prefixes of hybrid models, whose layers have different kinds of attention.
//!
//! vLLM divides such a model's layers into groups, each with blocks of its own. A prefix can be reused if every group
//! has the blocks that the next token attends to: all of them with full attention, the last ones with a sliding window.
//! The rules are those of `HybridKVCacheCoordinator.find_longest_cache_hit` of vLLM 0.32.

/// Groups that have not agreed on a length after this many rounds are too many or too odd: nothing counts as reusable.
const MAX_ROUNDS: usize = 64;

/// Which blocks of a group must be cached for a prefix to be reusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupReuse {
    /// All.
    Prefix,
    /// This many last ones, at least one, or all of a shorter prefix: a sliding window, or a recurrent state.
    Tail { blocks: u32 },
}

/// One group of a hybrid model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheGroup {
    pub reuse: GroupReuse,
    /// Tokens per block, at least one.
    pub block_tokens: u32,
}

/// Tokens of the longest prefix, of at most `limit` tokens, that all groups can reuse. `has` returns whether a block of
/// a group is cached, both by position.
#[must_use]
pub fn reusable_tokens(groups: &[CacheGroup], limit: u32, has: impl Fn(usize, u32) -> bool) -> u32 {
    let alignment = groups.iter().fold(1, |lcm, group| least_common_multiple(lcm, group.block_tokens.max(1)));
    let mut tokens = limit;
    // Each group accepts the length or reduces it. Models have two kinds of groups, which agree after two rounds.
    for _ in 0..MAX_ROUNDS {
        let before = tokens;
        for (position, group) in groups.iter().enumerate() {
            tokens = group.reusable(tokens, alignment, |block| has(position, block));
        }
        if tokens == before || tokens == 0 {
            return tokens;
        }
    }
    0
}

impl CacheGroup {
    /// Tokens of the longest prefix, of at most `limit` tokens and a multiple of `alignment`, that this group allows.
    fn reusable(&self, limit: u32, alignment: u32, has: impl Fn(u32) -> bool) -> u32 {
        let block_tokens = self.block_tokens.max(1);
        let limit_blocks = limit / block_tokens;
        let is_aligned = |blocks: u32| blocks.saturating_mul(block_tokens).is_multiple_of(alignment);
        let blocks = match self.reuse {
            GroupReuse::Prefix => (0..limit_blocks).take_while(|&block| has(block)).count() as u32,
            GroupReuse::Tail { blocks } => tail(limit_blocks, blocks.max(1), &has, &is_aligned),
        };
        let aligned = (0..=blocks).rev().find(|&blocks| is_aligned(blocks)).unwrap_or(0);
        aligned * block_tokens
    }
}

/// The largest number of blocks, at most `limit`, of which the last `wanted` are cached, or all if there are fewer.
fn tail(limit: u32, wanted: u32, has: &impl Fn(u32) -> bool, is_aligned: &impl Fn(u32) -> bool) -> u32 {
    let (mut end, mut found) = (0, 0);
    for block in (0..limit).rev() {
        if !has(block) {
            found = 0;
            continue;
        }
        if found == 0 {
            if !is_aligned(block + 1) {
                continue;
            }
            end = block + 1;
        }
        found += 1;
        if found == wanted {
            return end;
        }
    }
    // The start of the prompt is cached.
    found
}

fn least_common_multiple(a: u32, b: u32) -> u32 {
    let (mut divisor, mut rest) = (a, b);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a.checked_div(divisor).and_then(|factor| factor.checked_mul(b)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: CacheGroup = CacheGroup { reuse: GroupReuse::Prefix, block_tokens: 16 };

    fn window(blocks: u32) -> CacheGroup {
        CacheGroup { reuse: GroupReuse::Tail { blocks }, block_tokens: 16 }
    }

    /// `cached` has one string for each group, with an `x` for each cached block.
    fn tokens(groups: &[CacheGroup], limit: u32, cached: &[&str]) -> u32 {
        reusable_tokens(groups, limit, |group, block| {
            cached[group].as_bytes().get(block as usize) == Some(&b'x')
        })
    }

    #[test]
    fn full_attention_needs_every_block() {
        assert_eq!(tokens(&[FULL], 80, &["xx-x"]), 32);
        assert_eq!(tokens(&[FULL], 31, &["xxxx"]), 16);
    }

    #[test]
    fn window_needs_its_last_blocks() {
        assert_eq!(tokens(&[window(2), FULL], 80, &["--xx", "xxxxx"]), 64);
        assert_eq!(tokens(&[window(2), FULL], 80, &["-xxx-", "xx"]), 0);
        assert_eq!(tokens(&[window(2), FULL], 80, &["xx-x", "xxxxx"]), 32);
        // A prefix that is shorter than the window needs all of its blocks.
        assert_eq!(tokens(&[window(4), FULL], 80, &["xx", "xxxxx"]), 32);
        assert_eq!(tokens(&[window(4), FULL], 80, &["-x", "xxxxx"]), 0);
    }

    #[test]
    fn groups_reduce_each_other_until_all_agree() {
        // The first window allows four blocks, the second one three, and then the first one only two.
        assert_eq!(tokens(&[FULL, window(1), window(2)], 80, &["xxxx", "-x-x", "xxx"]), 32);
    }

    #[test]
    fn recurrent_state_is_one_block() {
        let groups = [FULL, window(1)];
        assert_eq!(tokens(&groups, 160, &["xxxxxxxxxx", "--x---x"]), 112);
        assert_eq!(tokens(&groups, 100, &["xxxxxxxxxx", "--x---x"]), 48);
    }

    #[test]
    fn prefix_ends_at_a_boundary_of_all_groups() {
        let large = CacheGroup { reuse: GroupReuse::Tail { blocks: 1 }, block_tokens: 32 };
        assert_eq!(tokens(&[FULL, large], 160, &["xxx", "xx"]), 32);
        let small = CacheGroup { reuse: GroupReuse::Tail { blocks: 1 }, block_tokens: 16 };
        let large = CacheGroup { block_tokens: 32, ..FULL };
        assert_eq!(tokens(&[large, small], 160, &["xxx", "xx-x-"]), 64);
    }

    #[test]
    fn huge_blocks_and_no_groups_are_harmless() {
        let huge = CacheGroup { block_tokens: u32::MAX - 1, ..FULL };
        assert_eq!(tokens(&[FULL, huge], u32::MAX, &["x", "x"]), 0);
        assert_eq!(tokens(&[CacheGroup { block_tokens: 0, ..FULL }], 0, &["x"]), 0);
    }
}
