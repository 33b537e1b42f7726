//! The merges of a byte-pair model: which two tokens become one, and in which order.

/// No merge. All ranks are smaller.
pub(super) const NO_MERGE: u32 = u32::MAX;

const TOKEN_BITS: u32 = 21;
const RANK_BITS: u32 = 22;
/// Tokens and ranks are smaller than these limits, so that no entry is [`EMPTY`].
const MAX_TOKENS: u32 = (1 << TOKEN_BITS) - 1;
const MAX_RANKS: u32 = (1 << RANK_BITS) - 1;
const EMPTY: u64 = u64::MAX;
const SLOTS: usize = 8;

/// A line of the processor's cache: the left token, the right one, and the rank of each merge.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Bucket([u64; SLOTS]);

/// A hash table of merges.
pub(super) struct MergeTable {
    buckets: Box<[Bucket]>,
    /// The token that each merge gives, by rank.
    products: Vec<u32>,
}

/// A merge in the order of the model's file: the two tokens, and what they become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Merge {
    pub(super) left: u32,
    pub(super) right: u32,
    pub(super) product: u32,
}

impl MergeTable {
    /// Of two merges of the same tokens, the later one is valid, as in the `tokenizers` library. None if there are too many.
    pub(super) fn new(merges: &[Merge]) -> Option<Self> {
        let too_large = |merge: &Merge| merge.left.max(merge.right) >= MAX_TOKENS;
        if merges.len() >= MAX_RANKS as usize || merges.iter().any(too_large) {
            return None;
        }
        let buckets = merges.len() / 5 + 1;
        let mut table = Self {
            buckets: vec![Bucket([EMPTY; SLOTS]); buckets].into_boxed_slice(),
            products: merges.iter().map(|merge| merge.product).collect(),
        };
        for (rank, merge) in (0_u64..).zip(merges) {
            table.insert(pair(merge.left, merge.right), rank);
        }
        Some(table)
    }

    fn insert(&mut self, pair: u64, rank: u64) {
        let mut at = self.home(pair);
        loop {
            let free = |&entry: &u64| entry == EMPTY || entry >> RANK_BITS == pair;
            if let Some(slot) = self.buckets[at].0.iter().position(free) {
                self.buckets[at].0[slot] = pair << RANK_BITS | rank;
                return;
            }
            at = (at + 1) % self.buckets.len();
        }
    }

    #[inline]
    fn home(&self, pair: u64) -> usize {
        let hash = pair.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((u128::from(hash ^ hash << 32) * self.buckets.len() as u128) >> 64) as usize
    }

    /// The rank of merging two tokens, or [`NO_MERGE`].
    #[inline]
    pub(super) fn rank(&self, left: u32, right: u32) -> u32 {
        let pair = pair(left, right);
        let mut at = self.home(pair);
        loop {
            let Bucket(entries) = &self.buckets[at];
            for &entry in entries {
                if entry >> RANK_BITS == pair {
                    return (entry & u64::from(MAX_RANKS)) as u32;
                }
            }
            if entries[SLOTS - 1] == EMPTY {
                return NO_MERGE;
            }
            at = (at + 1) % self.buckets.len();
        }
    }

    /// The token that the merge of this rank gives.
    #[inline]
    pub(super) fn product(&self, rank: u32) -> u32 {
        self.products[rank as usize]
    }
}

fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << TOKEN_BITS | u64::from(right)
}
