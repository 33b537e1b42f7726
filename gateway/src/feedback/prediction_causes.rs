//! Wrong predictions by cause and by data-parallel rank.

use std::sync::Arc;

use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use super::cache::ExpectedHits;
use crate::kv_index::{EngineSlotGuard, HashRuleStatus, HitHistory};

/// Ranks with a label of their own; the others share [`OTHER_RANKS`].
const MAX_RANKS: u32 = 64;
const OTHER_RANKS: &str = "other";

/// The engine that computes a prompt, as it was when its hits were predicted.
#[derive(Debug, Clone)]
pub(crate) struct PredictedEngine {
    name: Arc<str>,
    history: Arc<HitHistory>,
    /// Whether its LMCache has reported chunks whose hashes are known.
    has_chunks: bool,
    /// Its rank, if it has several.
    rank: Option<u32>,
    /// Whether the hash rule of its blocks is that of predictions.
    is_rule_confirmed: bool,
    /// Whether it speculates, and may drop the last block of a hit.
    speculates: bool,
    block_tokens: u32,
    removed_blocks: u64,
}

impl PredictedEngine {
    pub(crate) fn new(
        name: Arc<str>,
        slot: &EngineSlotGuard,
        rank: Option<u32>,
        speculates: bool,
        block_tokens: u32,
    ) -> Self {
        let history = slot.hit_history().clone();
        Self {
            name,
            has_chunks: slot.chunk_rule().known().is_some(),
            rank,
            is_rule_confirmed: slot.hash_rule().status() == HashRuleStatus::Confirmed,
            speculates,
            block_tokens,
            removed_blocks: history.removed_blocks(),
            history,
        }
    }

    /// Learns from the tokens that the engine has found.
    pub(crate) fn observe(&self, expected: &ExpectedHits, found: u64) {
        self.observe_chunks(expected, found);
        let only_own_blocks =
            expected.hits.total() == expected.hits.l1_tokens && expected.pending_tokens == 0;
        if self.speculates && only_own_blocks {
            let cached = u64::from(expected.hits.total()) + u64::from(expected.dropped_tokens);
            self.history.observe(cached, found, self.block_tokens.into());
        }
    }

    fn observe_chunks(&self, expected: &ExpectedHits, found: u64) {
        let own = u64::from(expected.hits.l1_tokens) + u64::from(expected.dropped_tokens);
        if !self.has_chunks || !self.history.observe_chunks(own, expected.in_chunks, found) {
            return;
        }
        if self.history.misses_chunks() {
            tracing::warn!(
                engine = &*self.name,
                "the engine does not find the chunks that its LMCache reports: they are no longer predicted; configure LMCache with \
                 `pre_caching_hash_algorithm: sha256_cbor`, or set the same PYTHONHASHSEED for all of the engine's processes"
            );
        } else {
            tracing::info!(
                engine = &*self.name,
                "the engine finds chunks of LMCache again: they are predicted"
            );
        }
    }

    /// The likely cause of a prediction of other hits than `found`.
    fn cause(&self, expected: &ExpectedHits, found: u64) -> &'static str {
        let hits = expected.hits;
        let (predicted, block) = (u64::from(hits.total()), u64::from(self.block_tokens));
        let own = u64::from(hits.l1_tokens) - u64::from(hits.l1_tokens.min(expected.pending_tokens));
        if !self.is_rule_confirmed {
            "unverified_rule"
        } else if found > predicted {
            if expected.dropped_tokens > 0 && found == predicted + block { "last_block" } else { "other" }
        } else if self.speculates && found + block == predicted {
            "last_block"
        } else if expected.pending_tokens > 0 && found >= own {
            "pending"
        } else if hits.l3_tokens > 0 && found >= u64::from(hits.l1_tokens + hits.l2_tokens) {
            "store"
        } else if expected.in_chunks && found >= u64::from(hits.l1_tokens) {
            "lmcache"
        } else if self.history.removed_blocks() > self.removed_blocks {
            "evicted"
        } else {
            "other"
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabels {
    error: &'static str,
    cause: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RankLabels {
    rank: String,
    result: &'static str,
}

/// Metrics of wrong predictions by cause, and of all predictions by rank.
#[derive(Debug)]
pub(super) struct PredictionCauseMetrics {
    causes: Family<CauseLabels, Counter>,
    ranks: Family<RankLabels, Counter>,
}

impl PredictionCauseMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        Self {
            causes: registry.register(
                "moongate_prediction_error_tokens_total",
                "Tokens of wrong predictions (`false_negative`, `false_positive`) by their likely cause: `unverified_rule` (the engine's hash rule is not confirmed), `last_block` (the engine speculates, and computes the last cached block again), `pending` (another prompt in computation was expected to be the prefix), `store` (blocks of the store), `lmcache` (LMCache reports no evictions), `evicted` (the engine has removed blocks since the prediction) or `other`",
                Family::default(),
            ),
            ranks: registry.register(
                "moongate_prediction_rank_tokens_total",
                "Prompt tokens of engines with several data-parallel ranks, by rank: all (`compared`), and those predicted wrongly (`false_negative`, `false_positive`)",
                Family::default(),
            ),
        }
    }

    /// Gives every family a sample.
    pub(super) fn init_all_series(&self) {
        self.causes.get_or_create(&CauseLabels { error: "", cause: "" }).inc_by(0);
        self.ranks.get_or_create(&RankLabels { rank: String::new(), result: "" }).inc_by(0);
    }

    /// Counts a comparison of expected hits with those that the engine has found.
    pub(super) fn compare(&self, expected: &ExpectedHits, found: u64) {
        let Some(engine) = &expected.engine else { return };
        let predicted = u64::from(expected.hits.total());
        let error = if found > predicted { "false_negative" } else { "false_positive" };
        let tokens = found.abs_diff(predicted);
        if tokens > 0 {
            let cause = engine.cause(expected, found);
            self.causes.get_or_create(&CauseLabels { error, cause }).inc_by(tokens);
        }
        if let Some(rank) = engine.rank {
            let rank = if rank < MAX_RANKS { rank.to_string() } else { OTHER_RANKS.to_owned() };
            let count = |result, tokens| {
                self.ranks.get_or_create(&RankLabels { rank: rank.clone(), result }).inc_by(tokens)
            };
            count("compared", expected.input_tokens.into());
            count(error, tokens);
        }
    }
}

#[cfg(test)]
#[path = "prediction_causes_tests.rs"]
mod tests;
