//! Where the prompt's KV cache is: the input that cost-based policies price.

use std::sync::Arc;

use crate::fleet::InstanceIndex;

/// Hits per instance, in the cluster's order. Empty where nothing is known.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct CacheHitPrediction {
    /// One entry per instance, or none at all.
    pub per_instance: Vec<TierHits>,
    /// How much longer than usual each instance's fetch from the shared store takes, by [where its pages are](crate::farness()). Empty
    /// where all take as long as usual.
    #[serde(default)]
    pub farness: Vec<f32>,
    /// Runs of the prompt's pages in the shared store, in prompt order; there may be gaps between them.
    pub shared: Vec<StoreTokenRun>,
    /// Keys of the prompt's full pages, in order, for policies that keep a picture of their own. Each key stands for its
    /// page and all before it. Empty where the prompt was not read.
    #[serde(skip)]
    pub pages: Arc<[u64]>,
    /// Tokens per page of [`CacheHitPrediction::pages`].
    pub page_tokens: u32,
}

impl CacheHitPrediction {
    /// What is known of `instance`.
    #[must_use]
    pub fn hits(&self, instance: InstanceIndex) -> TierHits {
        self.per_instance.get(instance.as_usize()).copied().unwrap_or_default()
    }

    /// Most tokens that any instance would take from the shared store, each counted as often as it takes longer than usual.
    #[must_use]
    pub fn max_store_fetch_tokens(&self) -> f64 {
        let instances = (0..).map(InstanceIndex).zip(&self.per_instance);
        instances.map(|(ix, hits)| self.network_distance(ix) * f64::from(hits.l3_tokens)).fold(0.0, f64::max)
    }

    /// How much longer than usual a fetch of `instance` takes.
    #[must_use]
    pub fn network_distance(&self, instance: InstanceIndex) -> f64 {
        self.farness.get(instance.as_usize()).copied().map_or(1.0, f64::from)
    }

    /// Tokens of the prompt that `instance` need not compute, as far as known.
    #[must_use]
    pub fn cached_tokens(&self, instance: InstanceIndex) -> u32 {
        self.per_instance.get(instance.as_usize()).map_or(0, TierHits::total)
    }
}

/// Contiguous prefix of one prompt by tier, in tokens. Each tier counts only what the faster ones lack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct TierHits {
    /// In the engine's device memory.
    pub l1_tokens: u32,
    /// In the engine's host memory, beyond L1.
    pub l2_tokens: u32,
    /// In the shared store, beyond L1 and L2, and loadable under the engine's rules (threshold, all ranks' keys).
    pub l3_tokens: u32,
}

impl TierHits {
    /// All tiers together.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.l1_tokens.saturating_add(self.l2_tokens).saturating_add(self.l3_tokens)
    }
}

/// What a store node keeps a page on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum StoreMedium {
    /// Memory.
    Dram,
    /// Solid-state disk.
    Nvme,
}

/// A run of consecutive pages in the shared store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct StoreTokenRun {
    /// Tokens of the prompt before the run.
    pub first_token: u32,
    /// Tokens covered.
    pub tokens: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_instances_have_no_hit() {
        let hits = TierHits { l1_tokens: 1, l2_tokens: 2, l3_tokens: 3 };
        let prediction = CacheHitPrediction { per_instance: vec![hits], ..CacheHitPrediction::default() };
        assert_eq!(prediction.cached_tokens(InstanceIndex(0)), 6);
        assert_eq!(prediction.cached_tokens(InstanceIndex(1)), 0);
        assert_eq!(CacheHitPrediction::default().cached_tokens(InstanceIndex(0)), 0);
    }
}
