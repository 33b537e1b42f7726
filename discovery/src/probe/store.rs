//! Derives from an engine's responses how it stores KV pages in a Mooncake store.

use serde::Deserialize;

use super::responses::{SglangServerInfo, embedded};
use crate::kv_cache::{DeclaredKvFacts, EngineStoreFacts, MAX_TEXT, StoreKeyScheme};

/// SGLang's default for the minimum number of tokens to read from the store.
const SGLANG_PREFETCH_THRESHOLD: u32 = 256;

/// SGLang's `hicache_object_layout` of `/server_info`. The relevant members are in a nested object of the same name.
#[derive(Default, Deserialize)]
struct HicacheLayoutBody {
    #[serde(default)]
    hicache_object_layout: HicacheKeyLayout,
}

#[derive(Default, Deserialize)]
struct HicacheKeyLayout {
    /// Absent if the engine has no store, `null` if keys have no prefix.
    #[serde(default, deserialize_with = "super::responses::present")]
    key_prefix: Option<Option<String>>,
    #[serde(default)]
    is_mla_backend: Option<bool>,
    #[serde(default)]
    pp_size: Option<u32>,
}

/// The relevant members of SGLang's `--hicache-storage-backend-extra-config`.
#[derive(Default, Deserialize)]
struct HicacheExtraConfig {
    #[serde(default)]
    prefetch_threshold: Option<u32>,
    /// With engines of several tensor-parallel sizes on one store: the common number of ranks that all of them write objects for.
    #[serde(default)]
    tp_lcm_size: Option<u32>,
    #[serde(default)]
    master_server_address: Option<String>,
}

pub(super) fn sglang(info: &SglangServerInfo, declared: &DeclaredKvFacts) -> Option<EngineStoreFacts> {
    if info.enable_hierarchical_cache != Some(true)
        || info.hicache_storage_backend.as_deref() != Some("mooncake")
    {
        return None;
    }
    let keys = embedded::<HicacheLayoutBody>(info.hicache_object_layout.as_ref())
        .unwrap_or_default()
        .hicache_object_layout;
    let given = info.hicache_storage_backend_extra_config.as_ref();
    // A configuration that cannot be read here, such as `@file`, may have any content.
    let extra: Option<HicacheExtraConfig> =
        given.map_or_else(|| Some(HicacheExtraConfig::default()), |given| embedded(Some(given)));
    let threshold = extra.as_ref().map(|extra| extra.prefetch_threshold.unwrap_or(SGLANG_PREFETCH_THRESHOLD));
    let split = extra.as_ref().and_then(|extra| extra.tp_lcm_size);
    let prefix = keys.key_prefix.map(Option::unwrap_or_default).filter(|prefix| prefix.len() <= MAX_TEXT);
    Some(EngineStoreFacts {
        keys: match info.hicache_storage_key_scheme.as_deref() {
            Some("unified") => StoreKeyScheme::Opaque { name: "unified".to_owned() },
            _ => StoreKeyScheme::Sglang {
                prefix: declared.store_key_prefix.clone().or(prefix),
                mla: keys.is_mla_backend,
            },
        },
        tp_size: declared.tp_size.or(split).or_else(|| attention_ranks(info)),
        pp_size: keys.pp_size.or(info.pp_size),
        // The engine reads at least one page.
        prefetch_threshold: declared
            .prefetch_threshold
            .or(threshold)
            .map(|tokens| tokens.max(info.page_size.unwrap_or(0))),
        prefetch_policy: info.hicache_storage_prefetch_policy,
        master: extra
            .and_then(|extra| extra.master_server_address)
            .filter(|address| !address.is_empty() && address.len() <= MAX_TEXT),
    })
}

/// Tensor-parallel ranks that share one request's attention. With DP attention, they are divided between the data-parallel ranks.
fn attention_ranks(info: &SglangServerInfo) -> Option<u32> {
    let groups = if info.enable_dp_attention == Some(true) { info.dp_size.unwrap_or(1).max(1) } else { 1 };
    let groups = groups.checked_mul(info.attn_cp_size.unwrap_or(1).max(1))?;
    info.tp_size.filter(|size| *size >= groups && size % groups == 0).map(|size| size / groups)
}

/// vLLM reports that it uses a store, and the source of the model part of its keys; the rest must be declared.
pub(super) fn vllm(model_root: Option<&str>, declared: &DeclaredKvFacts) -> EngineStoreFacts {
    let model = model_root.map(|root| root.trim_end_matches('/')).and_then(|root| root.rsplit('/').next());
    EngineStoreFacts {
        keys: StoreKeyScheme::Vllm {
            prefix: declared.store_key_prefix.clone().unwrap_or_default(),
            model: model.filter(|name| !name.is_empty() && name.len() <= MAX_TEXT).map(str::to_owned),
        },
        tp_size: declared.tp_size,
        pp_size: None,
        // Its connector queries every block.
        prefetch_threshold: declared.prefetch_threshold.or(Some(0)),
        prefetch_policy: None,
        master: None,
    }
}

#[cfg(test)]
#[path = "store_tests.rs"]
mod tests;
