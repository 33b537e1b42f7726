//! Predicted cache hits of a prompt: the input that cost-based policies price.

use std::sync::Arc;

use crate::fleet::InstanceIndex;

/// Hits per instance, in the cluster's order. Empty if nothing is cached.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct CacheHitPrediction {
    /// One entry per instance, or none at all.
    pub per_instance: Vec<TierHits>,
    /// Time factor of each instance's fetch from the shared store, by [location of its
    /// blocks](crate::network_distance()). Empty if all are 1.
    #[serde(default)]
    pub network_distance: Vec<f32>,
    /// Runs of the prompt's blocks in the shared store, in prompt order; there may be gaps between them.
    pub shared: Vec<StoreTokenRun>,
    /// Keys of the prompt's full blocks, in order, for policies that keep state of their own. Each key covers its block
    /// and all before it. Empty if the prompt was not tokenized; only the first ones if only its beginning was.
    #[serde(skip)]
    pub pages: Arc<[u64]>,
    /// Beginnings of the prompt's text, in order, up to the whole text: they identify what is not tokenized. Empty for
    /// short prompts and those that are no text.
    #[serde(skip)]
    pub text_prefixes: Arc<[TextPrefix]>,
    /// Tokens per block of [`CacheHitPrediction::pages`].
    pub page_tokens: u32,
    /// Whether blocks that an earlier request is computing do not count: engines of a hybrid model cannot reuse every
    /// prefix of a prompt.
    #[serde(default)]
    pub excludes_pending: bool,
}

impl CacheHitPrediction {
    #[must_use]
    pub fn hits(&self, instance: InstanceIndex) -> TierHits {
        self.per_instance.get(instance.as_usize()).copied().unwrap_or_default()
    }

    /// Maximum number of tokens that any instance would fetch from the shared store, weighted by network distance.
    #[must_use]
    pub fn max_store_fetch_tokens(&self) -> f64 {
        let instances = InstanceIndex::all().zip(&self.per_instance);
        instances.map(|(ix, hits)| self.network_distance(ix) * f64::from(hits.l3_tokens)).fold(0.0, f64::max)
    }

    /// Time factor of a fetch by `instance` from the shared store.
    #[must_use]
    pub fn network_distance(&self, instance: InstanceIndex) -> f64 {
        self.network_distance.get(instance.as_usize()).copied().map_or(1.0, f64::from)
    }

    /// Predicted number of prompt tokens that `instance` need not compute.
    #[must_use]
    pub fn cached_tokens(&self, instance: InstanceIndex) -> u32 {
        self.per_instance.get(instance.as_usize()).map_or(0, TierHits::total)
    }
}

/// Contiguous prefix of one prompt by tier, in tokens. Each tier counts only what the faster ones lack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TierHits {
    /// Tokens in the engine's device memory.
    pub l1_tokens: u32,
    /// Tokens in the engine's host memory, beyond L1.
    pub l2_tokens: u32,
    /// Tokens in the shared store, beyond L1 and L2, and loadable under the engine's parameters (threshold, all ranks'
    /// keys).
    pub l3_tokens: u32,
    /// Part of `l1_tokens` that an earlier request is computing there.
    #[serde(default)]
    pub pending_tokens: u32,
}

impl TierHits {
    #[must_use]
    pub fn total(&self) -> u32 {
        self.l1_tokens.saturating_add(self.l2_tokens).saturating_add(self.l3_tokens)
    }
}

/// A beginning of a prompt's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextPrefix {
    /// Identifies the text.
    pub key: u64,
    /// Its length: an estimate where the text is not tokenized.
    pub tokens: u32,
}

/// Medium on which a store node keeps a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum StoreMedium {
    Dram,
    Nvme,
}

/// A run of consecutive blocks in the shared store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct StoreTokenRun {
    /// Prompt tokens before the run.
    pub first_token: u32,
    pub tokens: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_instances_have_no_hit() {
        let hits = TierHits { l1_tokens: 1, l2_tokens: 2, l3_tokens: 3, pending_tokens: 1 };
        let prediction = CacheHitPrediction { per_instance: vec![hits], ..CacheHitPrediction::default() };
        assert_eq!(prediction.cached_tokens(InstanceIndex(0)), 6);
        assert_eq!(prediction.cached_tokens(InstanceIndex(1)), 0);
        assert_eq!(CacheHitPrediction::default().cached_tokens(InstanceIndex(0)), 0);
    }
}
