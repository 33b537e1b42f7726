//! The weighted choice among an alias's models.

use sha2::{Digest as _, Sha256};

/// What the choice of a model depends on, besides the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChoiceKey {
    /// A session: all its requests get the same model, from every gateway with the same file.
    Session(u64),
    /// Entropy of one request.
    Random(u64),
}

impl ChoiceKey {
    /// A number in `0..total` for the choice among the models of `alias`. Different aliases divide the same users differently.
    /// `total` is at least 1.
    pub(super) fn point(&self, alias: &str, total: u64) -> u64 {
        let mut hash = Sha256::new();
        match self {
            Self::Session(key) | Self::Random(key) => hash.update(key.to_le_bytes()),
        }
        // No key contains the separator and the alias of another choice.
        hash.update([0]);
        hash.update(alias.as_bytes());
        let digest: [u8; 32] = hash.finalize().into();
        let bits = digest.iter().take(8).fold(0_u64, |bits, byte| bits << 8 | u64::from(*byte));
        bits % total.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_follow_the_key_and_the_alias() {
        let points = |alias: &str, keys: std::ops::Range<u64>| -> Vec<u64> {
            keys.map(|key| ChoiceKey::Session(key).point(alias, 10)).collect()
        };
        assert_eq!(points("a", 0..100), points("a", 0..100));
        assert_ne!(points("a", 0..100), points("b", 0..100));
        let below = points("a", 0..10_000).iter().filter(|point| **point == 0).count();
        assert!((800..1200).contains(&below), "{below} of 10000 with a weight of a tenth");
        assert_eq!(ChoiceKey::Random(3).point("a", 1), 0);
    }
}
