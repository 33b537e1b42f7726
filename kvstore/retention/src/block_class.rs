//! Classes of blocks with separately learned return times.

use crate::prompt_description::{PromptDescription, PromptLength, ReturnHint, TenantBucket};

/// Ranges of use counts: 1, 2, 3, more.
const USE_RANGES: usize = 4;
const LENGTHS: usize = PromptLength::Huge as usize + 1;
/// Hints with classes of their own.
const HINTS: usize = 2;

/// Classes of blocks without a hint, by uses and length.
const UNHINTED: usize = USE_RANGES * LENGTHS;
/// Classes of blocks with a hint, by hint, tenants and uses.
const HINTED: usize = HINTS * TenantBucket::COUNT * USE_RANGES;

/// What is known of a block when it is used. A hint says more about the next use than the prompt's length, so the classes
/// of hinted blocks do not distinguish lengths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockClass(u8);

impl BlockClass {
    /// Number of classes.
    pub const COUNT: usize = UNHINTED + HINTED;

    /// The class of a block with this number of uses, including the current one by this prompt.
    #[must_use]
    pub fn new(uses: u32, prompt: PromptDescription) -> Self {
        let range = (uses.max(1) as usize - 1).min(USE_RANGES - 1);
        let hint = match prompt.hint {
            ReturnHint::Unknown => return Self::at(range * LENGTHS + prompt.length as usize),
            ReturnHint::Never => 0,
            ReturnHint::Expected => 1,
        };
        Self::hinted(hint, prompt.tenants.number(), range)
    }

    fn hinted(hint: usize, bucket: usize, range: usize) -> Self {
        Self::at(UNHINTED + (hint * TenantBucket::COUNT + bucket) * USE_RANGES + range)
    }

    #[expect(clippy::cast_possible_truncation, reason = "below COUNT")]
    fn at(index: usize) -> Self {
        Self(index as u8)
    }

    /// Position of its range among all ranges of use counts.
    fn use_range(self) -> usize {
        match self.index().checked_sub(UNHINTED) {
            None => self.index() / LENGTHS,
            Some(hinted) => hinted % USE_RANGES,
        }
    }

    /// The class of a block of this class after its next use, by this prompt.
    #[must_use]
    pub fn used_again(self, prompt: PromptDescription) -> Self {
        // The range that is one larger than the present one starts with this count.
        Self::new(self.use_range() as u32 + 2, prompt)
    }

    /// The class of a block of this class after more became known about the prompt of its last use.
    #[must_use]
    pub fn described(self, prompt: PromptDescription) -> Self {
        Self::new(self.use_range() as u32 + 1, prompt)
    }

    /// The classes of the other tenants' blocks with the same hint and number of uses; none without a hint.
    pub(crate) fn of_other_tenants(self) -> impl Iterator<Item = Self> {
        let hinted = self.index().checked_sub(UNHINTED);
        let hint = hinted.map(|hinted| hinted / USE_RANGES / TenantBucket::COUNT);
        let buckets =
            hint.into_iter().flat_map(|hint| (0..TenantBucket::COUNT).map(move |bucket| (hint, bucket)));
        buckets
            .map(move |(hint, bucket)| Self::hinted(hint, bucket, self.use_range()))
            .filter(move |other| *other != self)
    }

    /// All classes, by position.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT).map(Self::at)
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

    const LENGTHS: [PromptLength; 4] =
        [PromptLength::Short, PromptLength::Medium, PromptLength::Long, PromptLength::Huge];

    fn prompts() -> Vec<PromptDescription> {
        let mut prompts = Vec::new();
        for length in LENGTHS {
            for hint in [ReturnHint::Unknown, ReturnHint::Never, ReturnHint::Expected] {
                for bucket in 0..TenantBucket::COUNT as u8 {
                    prompts.push(PromptDescription { length, hint, tenants: TenantBucket::new(bucket) });
                }
            }
        }
        prompts
    }

    #[test]
    fn classes_are_distinct_and_complete() {
        let mut classes = BTreeSet::new();
        for uses in [1, 2, 3, 4] {
            classes.extend(prompts().into_iter().map(|prompt| BlockClass::new(uses, prompt)));
        }
        assert!((0..BlockClass::COUNT).eq(classes.iter().map(|class| class.index())));
        assert_eq!(BlockClass::from_index(BlockClass::COUNT), None);
        // Whatever number a gateway sends, the number of classes is bounded.
        for bucket in 0..=u8::MAX {
            let tenants = TenantBucket::new(bucket);
            let class = BlockClass::new(
                9,
                PromptDescription { hint: ReturnHint::Expected, tenants, ..Default::default() },
            );
            assert!(classes.contains(&class));
        }
        // Tenants only matter with a hint.
        let unhinted =
            |bucket| PromptDescription { tenants: TenantBucket::new(bucket), ..Default::default() };
        assert_eq!(BlockClass::new(1, unhinted(0)), BlockClass::new(1, unhinted(5)));
    }

    #[test]
    fn a_use_moves_a_block_to_the_next_range() {
        for prompt in prompts() {
            for uses in 1..10 {
                let class = BlockClass::new(uses, prompt);
                assert_eq!(class.used_again(prompt), BlockClass::new(uses + 1, prompt));
                for other in prompts() {
                    assert_eq!(class.described(other), BlockClass::new(uses, other));
                }
            }
        }
    }

    #[test]
    fn other_tenants_have_the_same_hint_and_uses() {
        let class = |hint, bucket| {
            let tenants = TenantBucket::new(bucket);
            BlockClass::new(3, PromptDescription { length: PromptLength::Long, hint, tenants })
        };
        assert_eq!(class(ReturnHint::Unknown, 2).of_other_tenants().count(), 0);
        for hint in [ReturnHint::Never, ReturnHint::Expected] {
            let others: Vec<BlockClass> = class(hint, 2).of_other_tenants().collect();
            assert_eq!(others, [0, 1, 3, 4, 5, 6, 7].map(|bucket| class(hint, bucket)));
        }
    }
}
