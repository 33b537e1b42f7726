//! What predictions do not cover of an engine's cache, and why.

use std::sync::Arc;

use moongate_discovery::{EngineBlockHashing, EngineFacts, EngineKind};
use serde::Serialize;

use crate::kv_index::{ChunkRuleStatus, EngineSlotGuard, HashRuleStatus};

/// A part of an engine's cache that is not predicted, or not with certainty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PredictionGap {
    /// Short name.
    pub reason: &'static str,
    /// The cause in words, with a remedy if there is one.
    pub message: String,
}

/// The state of predictions for one rank of an engine.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct RankPredictionStatus {
    rank: usize,
    /// Whether the hashes of the rank's blocks are those of predictions.
    block_hashes: String,
    /// Chunks of its LMCache; `None` without LMCache.
    lmcache: Option<String>,
    /// Whether it computes the last cached block of a prompt again; `None` if it does not speculate.
    drops_last_block: Option<bool>,
}

fn gap(reason: &'static str, message: impl Into<String>) -> PredictionGap {
    PredictionGap { reason, message: message.into() }
}

/// What cannot be predicted for an engine according to its own responses.
#[must_use]
pub fn prediction_gaps(facts: &EngineFacts) -> Vec<PredictionGap> {
    let mut gaps = Vec::new();
    if facts.events.as_ref().is_none_or(Vec::is_empty) {
        gaps.push(gap(
            "no_events",
            "the engine publishes no KV events: what it has in its own memory is unknown",
        ));
    }
    match &facts.hashing {
        Some(EngineBlockHashing::Opaque { name }) => {
            gaps.push(gap(
                "unknown_hashes",
                format!(
                    "block hashes cannot be computed ({name}); blocks are indexed by the tokens in events, without adapters and a store"
                ),
            ));
        }
        None => gaps.push(gap("unknown_hashes", "block hashes are not reported: nothing is predicted")),
        Some(_) if facts.page_size.is_none() => {
            gaps.push(gap("unknown_hashes", "the block size is not reported: nothing is predicted"));
        }
        Some(EngineBlockHashing::Sglang { bigrams: true, .. }) => {
            gaps.push(gap(
                "salted_prompts",
                "with speculation, prompts with a `cache_salt` or `extra_key` are not predicted",
            ));
        }
        Some(_) => {}
    }
    if facts.speculates && facts.engine == EngineKind::Vllm {
        gaps.push(gap(
            "speculation",
            "the engine speculates by a method that it does not report: with EAGLE or MTP it computes the last cached block of a \
             prompt again, which is learned from its first responses, if they report cached tokens",
        ));
    }
    gaps
}

/// The same, and what has been learned from the events and responses of its ranks.
pub(crate) fn observed_gaps(facts: &EngineFacts, ranks: &[Arc<EngineSlotGuard>]) -> Vec<PredictionGap> {
    let mut gaps = prediction_gaps(facts);
    if ranks.iter().any(|slot| slot.hit_history().drops_last_block()) {
        // Predictions leave the block out.
        gaps.retain(|gap| gap.reason != "speculation");
    }
    let is_single = ranks.len() == 1;
    let publishes = facts.events.as_ref().is_some_and(|events| !events.is_empty());
    for (rank, slot) in ranks.iter().enumerate() {
        let mut add = |reason, text: String| {
            gaps.push(gap(reason, if is_single { text } else { format!("rank {rank}: {text}") }));
        };
        match slot.hash_rule().status() {
            HashRuleStatus::Confirmed => {}
            HashRuleStatus::Unchecked if publishes => {
                add(
                    "unverified_rule",
                    "no event about the first block of a prompt has been checked yet".to_owned(),
                );
            }
            HashRuleStatus::Unchecked => {}
            status @ HashRuleStatus::Different { .. } => {
                // Known from the engine's responses.
                if !matches!(facts.hashing, Some(EngineBlockHashing::Opaque { .. })) {
                    add(
                        "unverified_rule",
                        format!("block hashes are {status}, without adapters and a store"),
                    );
                }
            }
        }
        if slot.groups().has_unknown() {
            add(
                "unknown_group",
                "blocks of a kind of attention that is not known are not counted".to_owned(),
            );
        }
        match slot.chunk_rule().status() {
            ChunkRuleStatus::Unknown => {
                let text = "LMCache hashes its chunks by an unknown rule; configure `pre_caching_hash_algorithm: sha256_cbor`";
                add("lmcache", text.to_owned());
            }
            ChunkRuleStatus::Learning => {
                add("lmcache", "the hash rule of LMCache is not known yet".to_owned());
            }
            ChunkRuleStatus::Known(_) if slot.hit_history().misses_chunks() => {
                let text = "the engine does not find the chunks that its LMCache reports; configure \
                            `pre_caching_hash_algorithm: sha256_cbor`, or the same PYTHONHASHSEED for all of its processes";
                add("lmcache", text.to_owned());
            }
            ChunkRuleStatus::NoChunks | ChunkRuleStatus::Known(_) => {}
        }
        for adapter in slot.adapters().unlisted(facts) {
            add(
                "adapter",
                format!("the LoRA adapter {adapter:?} is in events, but not among the engine's models"),
            );
        }
    }
    gaps
}

/// The state of predictions for each rank of an engine.
pub(crate) fn rank_status(facts: &EngineFacts, ranks: &[Arc<EngineSlotGuard>]) -> Vec<RankPredictionStatus> {
    let status = |(rank, slot): (usize, &Arc<EngineSlotGuard>)| RankPredictionStatus {
        rank,
        block_hashes: slot.hash_rule().status().to_string(),
        lmcache: match slot.chunk_rule().status() {
            ChunkRuleStatus::NoChunks => None,
            ChunkRuleStatus::Learning => Some("unchecked".to_owned()),
            ChunkRuleStatus::Known(rule) => Some(rule.to_string()),
            ChunkRuleStatus::Unknown => Some("unknown rule".to_owned()),
        },
        drops_last_block: facts.speculates.then(|| slot.hit_history().drops_last_block()),
    };
    ranks.iter().enumerate().map(status).collect()
}

#[cfg(test)]
mod tests {

    use moongate_discovery::{KvEventSource, VllmHashAlgorithm};

    use super::*;
    use crate::kv_index::{EngineSlots, KvIndex};

    fn facts() -> EngineFacts {
        let source = KvEventSource {
            dp_rank: 0,
            endpoint: "tcp://10.0.0.1:5557".into(),
            engine_binds: true,
            replay: None,
            topic: String::new(),
        };
        EngineFacts {
            page_size: Some(16),
            hashing: Some(EngineBlockHashing::Vllm {
                algorithm: VllmHashAlgorithm::Sha256,
                seed: "0".into(),
            }),
            events: Some(vec![source]),
            ..EngineFacts::unreported(EngineKind::Vllm)
        }
    }

    fn reasons(gaps: &[PredictionGap]) -> Vec<&'static str> {
        gaps.iter().map(|gap| gap.reason).collect()
    }

    #[test]
    fn gaps_follow_from_an_engines_facts() {
        assert_eq!(prediction_gaps(&facts()), []);
        let nothing = EngineFacts::unreported(EngineKind::Sglang);
        assert_eq!(reasons(&prediction_gaps(&nothing)), ["no_events", "unknown_hashes"]);
        let bigrams = Some(EngineBlockHashing::Sglang {
            namespaced: Some(true),
            namespaced_events: false,
            bigrams: true,
        });
        let speculating = EngineFacts { speculates: true, ..facts() };
        assert_eq!(reasons(&prediction_gaps(&speculating)), ["speculation"]);
        assert_eq!(
            reasons(&prediction_gaps(&EngineFacts { hashing: bigrams, ..facts() })),
            ["salted_prompts"]
        );
    }

    #[test]
    fn learned_speculation_is_no_gap() {
        let slots = EngineSlots::new(KvIndex::new(10)).of_ranks(1);
        let facts = EngineFacts { speculates: true, ..facts() };
        let speculation = || reasons(&observed_gaps(&facts, &slots)).contains(&"speculation");
        assert!(speculation());
        (0..8).for_each(|_| slots[0].hit_history().observe(64, 48, 16));
        assert!(!speculation());
        let status = serde_json::to_value(rank_status(&facts, &slots)).unwrap();
        assert_eq!(status[0]["drops_last_block"], true);
    }

    #[test]
    fn gaps_of_ranks_are_named_by_rank() {
        let ranks = EngineSlots::new(KvIndex::new(10)).of_ranks(2);
        let slots: Vec<Arc<EngineSlotGuard>> = ranks.to_vec();
        let gaps = observed_gaps(&facts(), &slots);
        assert_eq!(reasons(&gaps), ["unverified_rule"; 2]);
        assert!(gaps[1].message.starts_with("rank 1: no event"), "{gaps:?}");
        slots[0].adapters().learn("poet");
        let gaps = observed_gaps(&facts(), &slots[..1]);
        assert_eq!(reasons(&gaps), ["unverified_rule", "adapter"]);
        assert!(gaps[1].message.contains("\"poet\""));
        let status = serde_json::to_value(rank_status(&facts(), &slots)).unwrap();
        assert_eq!(status[1]["block_hashes"], "unchecked");
        assert_eq!((&status[1]["rank"], &status[1]["lmcache"]), (&1.into(), &serde_json::Value::Null));
    }
}
