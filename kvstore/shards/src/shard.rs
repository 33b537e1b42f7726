//! Which shard a key belongs to.

use std::hash::Hasher as _;
use std::num::NonZeroUsize;

use fnv::FnvHasher;
use mooncake_wire::shards::MAX_SHARDS;

/// Index of a shard, below its [`ShardCount`].
pub type ShardIndex = usize;

/// Shortest run of hexadecimal digits that is taken for a block's hash: 64 bits.
const MIN_HASH_DIGITS: usize = 16;

/// A number of shards that is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} shards are not supported; give 1 to {MAX_SHARDS}")]
pub struct InvalidShardCount(pub usize);

/// The number of a store's shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardCount(NonZeroUsize);

impl ShardCount {
    /// # Errors
    /// When it is zero or above 256.
    pub fn new(count: usize) -> Result<Self, InvalidShardCount> {
        NonZeroUsize::new(count)
            .filter(|count| count.get() as u64 <= MAX_SHARDS)
            .map(Self)
            .ok_or(InvalidShardCount(count))
    }

    pub fn get(self) -> usize {
        self.0.get()
    }

    /// All shards.
    pub fn iter(self) -> impl Iterator<Item = ShardIndex> {
        0..self.get()
    }

    /// The shard of a key.
    ///
    /// **Must not change**: another result for a key makes its object unreachable. Engines store a block as several objects, which
    /// differ in what stands around the block's hash in their keys; all of them are in one shard, so that they can be leased and evicted
    /// as one group. The tenant does not matter, because a master without tenants ignores it. The hash is the longest run of hexadecimal digits, or the whole key if none has 16.
    pub fn shard_of(self, key: &str) -> ShardIndex {
        let mut hasher = FnvHasher::default();
        hasher.write(block_hash(key).unwrap_or(key).as_bytes());
        let scaled = u128::from(mix(hasher.finish())) * self.get() as u128;
        // Below the count, as the mixed hash is below 2^64.
        (scaled >> 64) as usize
    }
}

/// The finalizer of MurmurHash3, because the upper bits of FNV hashes of similar keys are similar.
fn mix(mut hash: u64) -> u64 {
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash ^= hash >> 33;
    hash = hash.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ hash >> 33
}

/// The first of the longest runs of hexadecimal digits, if it is long enough.
fn block_hash(key: &str) -> Option<&str> {
    let mut longest = "";
    for run in key.split(|c: char| !c.is_ascii_hexdigit()) {
        if run.len() > longest.len() {
            longest = run;
        }
    }
    (longest.len() >= MIN_HASH_DIGITS).then_some(longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOUR: ShardCount = ShardCount(NonZeroUsize::new(4).unwrap());

    /// Objects of existing stores are found by these.
    #[test]
    fn shards_of_keys_are_fixed() {
        let keys = ["", "a", "key-7", "0123456789abcdef", "m@0@0123456789abcdef@1"];
        assert_eq!(keys.map(|key| FOUR.shard_of(key)), [3, 2, 1, 2, 2]);
    }

    #[test]
    fn parts_of_a_block_are_in_one_shard() {
        let hash = "97a342130561a78c97a342130561a78c97a342130561a78c97a342130561a78c";
        let keys = [
            format!("{hash}_0_k"),
            format!("{hash}_3_v"),
            format!("model-7b_{hash}_1_2_k"),
            format!("Qwen3-8B@tp_rank:3@pcp0@dcp0@pp_rank:1@group:0@{hash}"),
            format!("vllm@Qwen/Qwen3-8B@8@3@{hash}@bfloat16"),
        ];
        let shards: Vec<_> = keys.iter().map(|key| FOUR.shard_of(key)).collect();
        assert!(shards.iter().all(|shard| *shard == shards[0]), "{shards:?}");
    }

    #[test]
    fn keys_are_spread_evenly() {
        for form in ["key-{}", "{:032x}", "{:016x}_0_k"] {
            let mut counts = [0; 4];
            for number in 0..4000_u64 {
                let number = number.wrapping_mul(if form.contains('x') { 0x9e37_79b9_7f4a_7c15 } else { 1 });
                let key = match form {
                    "key-{}" => format!("key-{number}"),
                    "{:032x}" => format!("{number:032x}"),
                    _ => format!("{number:016x}_0_k"),
                };
                counts[FOUR.shard_of(&key)] += 1;
            }
            assert!(counts.iter().all(|count| (850..1150).contains(count)), "{form}: {counts:?}");
        }
    }

    #[test]
    fn counts_are_checked() {
        assert_eq!(ShardCount::new(0), Err(InvalidShardCount(0)));
        assert_eq!(
            ShardCount::new(257).unwrap_err().to_string(),
            "257 shards are not supported; give 1 to 256"
        );
        assert_eq!(ShardCount::new(256).unwrap().get(), 256);
    }
}
