//! Where the prompt's KV cache is: the input that cost-based policies price.

use std::sync::Arc;

use crate::cluster::InstanceIx;

/// Hits per instance, in the cluster's order. Empty where nothing is known.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Prediction {
    /// One entry per instance, or none at all.
    pub per_instance: Vec<TierHits>,
    /// How much longer than usual each instance's fetch from the shared store takes, by [where its pages are](crate::farness()). Empty
    /// where all take as long as usual.
    #[serde(default)]
    pub farness: Vec<f32>,
    /// Runs of the prompt's pages in the shared store, in prompt order; there may be gaps between them.
    pub shared: Vec<L3Run>,
    /// Keys of the prompt's full pages, in order, for policies that keep a picture of their own. Each key stands for its
    /// page and all before it. Empty where the prompt was not read.
    #[serde(skip)]
    pub pages: Arc<[u64]>,
    /// Tokens per page of [`Prediction::pages`].
    pub page_tokens: u32,
}

impl Prediction {
    /// What is known of `instance`.
    #[must_use]
    pub fn hits(&self, instance: InstanceIx) -> TierHits {
        self.per_instance.get(instance.at()).copied().unwrap_or_default()
    }

    /// Most tokens that any instance would take from the shared store, each counted as often as it takes longer than usual.
    #[must_use]
    pub fn stored(&self) -> f64 {
        let instances = (0..).map(InstanceIx).zip(&self.per_instance);
        instances.map(|(ix, hits)| self.farness(ix) * f64::from(hits.l3_tokens)).fold(0.0, f64::max)
    }

    /// How much longer than usual a fetch of `instance` takes.
    #[must_use]
    pub fn farness(&self, instance: InstanceIx) -> f64 {
        self.farness.get(instance.at()).copied().map_or(1.0, f64::from)
    }

    /// Tokens of the prompt that `instance` need not compute, as far as known.
    #[must_use]
    pub fn cached_tokens(&self, instance: InstanceIx) -> u32 {
        self.per_instance.get(instance.at()).map_or(0, TierHits::total)
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
pub enum Medium {
    /// Memory.
    Dram,
    /// Solid-state disk.
    Nvme,
}

/// A run of consecutive pages in the shared store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct L3Run {
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
        let prediction = Prediction { per_instance: vec![hits], ..Prediction::default() };
        assert_eq!(prediction.cached_tokens(InstanceIx(0)), 6);
        assert_eq!(prediction.cached_tokens(InstanceIx(1)), 0);
        assert_eq!(Prediction::default().cached_tokens(InstanceIx(0)), 0);
    }
}
