//! Parses engines' responses leniently: unknown members are ignored, missing ones are `None`.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::kv_cache::{MAX_RANKS, PrefetchPolicy};
use crate::kv_transfer::KvConnector;
use crate::topology::{EngineRole, PrefixCheckpoints, PriorityOrder};

/// Maximum number of model names per engine.
const MAX_MODELS: usize = 1024;
/// Longest accepted name of a hash algorithm in bytes.
const MAX_ALGORITHM: usize = 64;
/// Longest accepted path of a tokenizer in bytes: Linux' `PATH_MAX`.
const MAX_PATH: usize = 4096;
/// The gateway's priorities are in milliseconds. An engine that preempts running requests only for differences of at least this value,
/// more than a quarter of an hour, counts as one without preemption.
const NO_PREEMPTION: u64 = 1_000_000;

/// SGLang's `/server_info`: server arguments and state; `/model_info` has the first half of these members.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct SglangServerInfo {
    #[serde(default)]
    pub(crate) model_path: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) tokenizer_path: Option<String>,
    /// `--chat-template`: a file or a name, instead of the model's own.
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) chat_template: Option<String>,
    #[serde(default)]
    pub(crate) served_model_name: Option<String>,
    /// Absent: not reported. Present and null or `"null"`: a plain engine.
    #[serde(default, deserialize_with = "present")]
    pub(crate) disaggregation_mode: Option<Option<String>>,
    #[serde(default)]
    pub(crate) disaggregation_bootstrap_port: Option<u16>,
    #[serde(default)]
    pub(crate) version: Option<String>,
    #[serde(default)]
    pub(crate) dp_size: Option<u32>,
    #[serde(default)]
    pub(crate) page_size: Option<u32>,
    #[serde(default)]
    pub(crate) context_length: Option<u32>,
    // The following members describe the KV cache. They are optional, so a member of an unexpected type counts as missing.
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) disable_radix_cache: Option<bool>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) speculative_algorithm: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) dcp_size: Option<u32>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) tp_size: Option<u32>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) pp_size: Option<u32>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) attn_cp_size: Option<u32>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) enable_dp_attention: Option<bool>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) enable_hierarchical_cache: Option<bool>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) hicache_storage_backend: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) hicache_storage_key_scheme: Option<String>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) hicache_storage_prefetch_policy: Option<PrefetchPolicy>,
    #[serde(default)]
    pub(crate) hicache_storage_backend_extra_config: Option<Value>,
    #[serde(default)]
    pub(crate) hicache_object_layout: Option<Value>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) enable_priority_scheduling: Option<bool>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) schedule_low_priority_values_first: Option<bool>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) disable_priority_preemption: Option<bool>,
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) priority_scheduling_preemption_threshold: Option<u64>,
    /// Whether the model has layers with a recurrent state.
    #[serde(default, deserialize_with = "lenient")]
    pub(crate) uses_mamba_radix_cache: Option<bool>,
    /// One per data-parallel rank.
    #[serde(default)]
    pub(crate) internal_states: Option<Value>,
    /// LoRA adapters of the command line.
    #[serde(default)]
    pub(crate) lora_paths: Option<Value>,
    #[serde(default)]
    pub(crate) kv_events: Option<Value>,
    #[serde(default)]
    pub(crate) kv_events_config: Option<Value>,
}

pub(super) fn present<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Option<String>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

fn lenient<'de, T: DeserializeOwned, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    Value::deserialize(deserializer).map(|value| T::deserialize(value).ok())
}

/// Parses a member that is an object, or a string with JSON from the engine's command line.
pub(super) fn embedded<T: DeserializeOwned>(member: Option<&Value>) -> Option<T> {
    match member? {
        Value::String(text) => serde_json::from_str(text).ok(),
        value => T::deserialize(value).ok(),
    }
}

impl SglangServerInfo {
    /// `None` unless the body looks like SGLang's: vLLM has a `/server_info` too.
    pub(crate) fn parse(body: &[u8]) -> Option<Self> {
        let info: Self = serde_json::from_slice(body).ok()?;
        (info.disaggregation_mode.is_some() || info.model_path.is_some()).then_some(info)
    }

    /// The tokenizer's path; `None` if the engine uses another chat template than the tokenizer's.
    pub(crate) fn tokenizer(&self) -> Option<String> {
        match self.chat_template {
            None => tokenizer(self.tokenizer_path.as_deref().or(self.model_path.as_deref())),
            Some(_) => None,
        }
    }

    /// The order of waiting requests by priority; `None` without priority scheduling, or if it preempts running requests.
    pub(crate) fn priority_order(&self) -> Option<PriorityOrder> {
        let preempts = self.disable_priority_preemption != Some(true)
            && self
                .priority_scheduling_preemption_threshold
                .is_none_or(|threshold| threshold < NO_PREEMPTION);
        if self.enable_priority_scheduling != Some(true) || preempts {
            return None;
        }
        Some(match self.schedule_low_priority_values_first {
            Some(true) => PriorityOrder::SmallestFirst,
            _ => PriorityOrder::LargestFirst,
        })
    }

    /// Layers with a sliding window may have a cache of their own, and layers a recurrent state.
    pub(crate) fn checkpoints(&self) -> Option<PrefixCheckpoints> {
        if self.uses_mamba_radix_cache == Some(true) {
            return Some(PrefixCheckpoints::RequestEnds);
        }
        let states = self.internal_states.as_ref().and_then(Value::as_array)?;
        let has_window_cache =
            |state: &Value| state.pointer("/memory_usage/token_capacity_swa").is_some_and(Value::is_number);
        states.iter().any(has_window_cache).then_some(PrefixCheckpoints::RequestEndsAndBranches)
    }

    pub(crate) fn role(&self) -> Option<EngineRole> {
        match self.disaggregation_mode.as_ref()?.as_deref() {
            Some("prefill") => Some(EngineRole::Prefill),
            Some("decode") => Some(EngineRole::Decode),
            None | Some("" | "null" | "none") => Some(EngineRole::Plain),
            Some(_) => None,
        }
    }
}

/// The reported path of a tokenizer, unless it is empty or too long.
pub(crate) fn tokenizer(reported: Option<&str>) -> Option<String> {
    reported.filter(|path| !path.is_empty() && path.len() <= MAX_PATH).map(str::to_owned)
}

/// `/v1/models` of both engines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ServedModels {
    /// Served names in the engine's order, without duplicates.
    pub(crate) names: Vec<String>,
    /// The smallest reported `max_model_len` in tokens.
    pub(crate) context_length: Option<u32>,
    /// Source of the first model: a path or a repository name.
    pub(crate) root: Option<String>,
    /// Names of LoRA adapters, each with the path it was loaded from.
    pub(crate) adapters: Vec<(String, Option<String>)>,
}

impl ServedModels {
    pub(crate) fn parse(body: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct ServedModelList {
            data: Vec<ServedModelCard>,
        }
        #[derive(Deserialize)]
        struct ServedModelCard {
            id: String,
            #[serde(default)]
            max_model_len: Option<u32>,
            #[serde(default, deserialize_with = "lenient")]
            root: Option<String>,
            /// The base model of an adapter.
            #[serde(default, deserialize_with = "lenient")]
            parent: Option<String>,
        }
        let list: ServedModelList = serde_json::from_slice(body).ok()?;
        let adapters = list.data.iter().filter(|card| card.parent.is_some());
        let adapters = adapters.map(|card| (card.id.clone(), card.root.clone())).take(MAX_MODELS).collect();
        Some(Self {
            adapters,
            context_length: list.data.iter().filter_map(|card| card.max_model_len).min(),
            root: list.data.first().and_then(|card| card.root.clone()),
            names: distinct(list.data.into_iter().map(|card| card.id)),
        })
    }
}

/// The names in the same order, without duplicates and empty names.
pub(crate) fn distinct(names: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut seen = BTreeSet::new();
    names.into_iter().filter(|name| !name.is_empty() && seen.insert(name.clone())).take(MAX_MODELS).collect()
}

/// vLLM's `/version`.
pub(crate) fn version(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct VllmVersionBody {
        version: String,
    }
    serde_json::from_slice::<VllmVersionBody>(body).ok().map(|response| response.version)
}

/// The Mooncake bootstrap server's `/query`: `{"<dp rank>": {"engine_id": …, "worker_addr": …}}`.
pub(crate) fn engine_ids(body: &[u8]) -> Option<BTreeMap<u32, String>> {
    #[derive(Deserialize)]
    struct BootstrapRank {
        engine_id: String,
    }
    let ranks: BTreeMap<u32, BootstrapRank> = serde_json::from_slice(body).ok()?;
    Some(ranks.into_iter().take(MAX_RANKS as usize).map(|(rank, entry)| (rank, entry.engine_id)).collect())
}

/// Configuration derived from vLLM's `/metrics`: a connector registers its metric families when it is created.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct VllmMetrics {
    nixl: bool,
    mooncake: bool,
    /// Whether a store's connector is in use, alone or with another connector.
    pub(crate) store: bool,
    pub(crate) block_size: Option<u32>,
    /// Tokens per hashed block, if it differs from `block_size`.
    pub(crate) hash_block_size: Option<u32>,
    pub(crate) hash_algorithm: Option<String>,
    pub(crate) prefix_caching: Option<bool>,
    /// Whether blocks are offloaded to host memory.
    pub(crate) offloading: Option<bool>,
    /// Whether drafts are counted.
    pub(crate) speculates: bool,
    /// Data-parallel ranks behind this server, by the `engine` label.
    pub(crate) ranks: Option<u32>,
}

impl VllmMetrics {
    pub(crate) fn parse(body: &[u8]) -> Self {
        let mut metrics = Self::default();
        let mut engines = BTreeSet::new();
        for line in String::from_utf8_lossy(body).lines() {
            let line = line.strip_prefix("# TYPE ").unwrap_or(line);
            let Some(name) = line.strip_prefix("vllm:") else { continue };
            metrics.nixl |= name.starts_with("nixl_");
            metrics.store |= name.starts_with("mooncake_store_");
            metrics.mooncake |= name.starts_with("mooncake_") && !name.starts_with("mooncake_store_");
            metrics.speculates |= name.starts_with("spec_decode_");
            let is_config = name.starts_with("cache_config_info{");
            if is_config {
                metrics.read_cache_config(name);
            }
            // With several API servers, an engine has no gauges before its first request.
            if (is_config || name.starts_with("num_requests_running{")) && engines.len() < MAX_RANKS as usize
            {
                engines.extend(label(name, "engine").map(str::to_owned));
            }
        }
        metrics.ranks = u32::try_from(engines.len()).ok().filter(|ranks| *ranks > 0);
        metrics
    }

    /// The labels are the fields of vLLM's cache configuration, formatted by Python.
    fn read_cache_config(&mut self, sample: &str) {
        let reported = |name: &str| label(sample, name).filter(|value| *value != "None");
        self.block_size = self.block_size.or_else(|| reported("block_size")?.parse().ok());
        self.hash_block_size = self.hash_block_size.or_else(|| reported("hash_block_size")?.parse().ok());
        self.prefix_caching =
            reported("enable_prefix_caching").map(|value| value == "True").or(self.prefix_caching);
        self.offloading = label(sample, "kv_offloading_size").map(|size| size != "None").or(self.offloading);
        if let Some(name) = reported("prefix_caching_hash_algo").filter(|name| name.len() <= MAX_ALGORITHM) {
            self.hash_algorithm = Some(name.to_owned());
        }
    }

    /// The connector that determines the order of the legs: a store connector counts only if it is the only one.
    pub(crate) fn connector(&self) -> Option<KvConnector> {
        if self.nixl {
            Some(KvConnector::Nixl)
        } else if self.mooncake {
            Some(KvConnector::Mooncake)
        } else if self.store {
            Some(KvConnector::Store)
        } else {
            None
        }
    }
}

/// The value of a label; escape sequences are not supported.
fn label<'a>(sample: &'a str, name: &str) -> Option<&'a str> {
    let rest =
        ["{", ","].iter().find_map(|before| Some(sample.split_once(&format!("{before}{name}=\""))?.1))?;
    rest.split_once('"').map(|(value, _)| value)
}

#[cfg(test)]
#[path = "answers_tests.rs"]
mod tests;
