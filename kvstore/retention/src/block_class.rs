//! Classes of blocks with separately learned return times.

/// Ranges of use counts: 1, 2, 3, more.
const USE_RANGES: usize = 4;
const LENGTHS: usize = 4;
const HINTS: usize = 3;

/// Length of the prompt that last used a block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PromptLength {
    /// Below 2,048 tokens.
    #[default]
    Short,
    /// Below 8,192 tokens.
    Medium,
    /// Below 32,768 tokens.
    Long,
    /// At least 32,768 tokens.
    Huge,
}

impl PromptLength {
    /// The length of a prompt of this many tokens.
    #[must_use]
    pub fn of_tokens(tokens: u64) -> Self {
        match tokens {
            0..2_048 => Self::Short,
            2_048..8_192 => Self::Medium,
            8_192..32_768 => Self::Long,
            _ => Self::Huge,
        }
    }

    /// An estimate from the number of keys that a caller looks up or writes at once. How many tokens a key has depends
    /// on the engine: from 16 to several hundred.
    #[must_use]
    pub fn of_keys(keys: usize) -> Self {
        match keys {
            0..16 => Self::Short,
            16..64 => Self::Medium,
            64..256 => Self::Long,
            _ => Self::Huge,
        }
    }
}

/// What a client or a protocol says about the next request with the same prefix. A hint selects a class, so that it
/// counts as much as it has proved right.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ReturnHint {
    #[default]
    Unknown,
    /// There will be none: a finished agent, a one-shot job, a closed session.
    Never,
    /// There will be one.
    Expected,
}

/// What is known of a block when it is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockClass(u8);

impl BlockClass {
    /// Number of classes.
    pub const COUNT: usize = USE_RANGES * LENGTHS * HINTS;

    /// The class of a block with this number of uses, including the current one.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "below COUNT")]
    pub fn new(uses: u32, length: PromptLength, hint: ReturnHint) -> Self {
        let range = (uses.max(1) as usize - 1).min(USE_RANGES - 1);
        Self(((range * LENGTHS + length as usize) * HINTS + hint as usize) as u8)
    }

    /// The class of a block of this class after its next use.
    #[must_use]
    pub fn used_again(self, length: PromptLength, hint: ReturnHint) -> Self {
        // The range that is one larger than the present one starts with this count.
        let range = u32::from(self.0) / (LENGTHS * HINTS) as u32;
        Self::new(range + 2, length, hint)
    }

    /// The class of a block of this class after more became known about its last use.
    #[must_use]
    pub fn described(self, length: PromptLength, hint: ReturnHint) -> Self {
        let range = u32::from(self.0) / (LENGTHS * HINTS) as u32;
        Self::new(range + 1, length, hint)
    }

    /// Position among all classes, below [`Self::COUNT`].
    #[must_use]
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// The class at a position; `None` from [`Self::COUNT`] on.
    #[must_use]
    pub fn from_index(index: usize) -> Option<Self> {
        u8::try_from(index).ok().filter(|_| index < Self::COUNT).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn classes_are_distinct_and_complete() {
        let mut classes = BTreeSet::new();
        for uses in [1, 2, 3, 4] {
            for length in [PromptLength::Short, PromptLength::Medium, PromptLength::Long, PromptLength::Huge]
            {
                for hint in [ReturnHint::Unknown, ReturnHint::Never, ReturnHint::Expected] {
                    classes.insert(BlockClass::new(uses, length, hint));
                }
            }
        }
        assert_eq!(classes.len(), BlockClass::COUNT);
        assert!((0..BlockClass::COUNT).eq(classes.iter().map(|class| class.index())));
        assert_eq!(BlockClass::from_index(BlockClass::COUNT), None);
    }

    #[test]
    fn a_use_moves_a_block_to_the_next_range() {
        let class = |uses| BlockClass::new(uses, PromptLength::Long, ReturnHint::Unknown);
        for uses in 1..10 {
            assert_eq!(class(uses).used_again(PromptLength::Long, ReturnHint::Unknown), class(uses + 1));
            let described = BlockClass::new(uses, PromptLength::Huge, ReturnHint::Never);
            assert_eq!(class(uses).described(PromptLength::Huge, ReturnHint::Never), described);
        }
    }
}
