//! Sizes of the values parsed from engines' responses, for the fuzz target that checks their bounds.

use super::responses::{self, ServedModels, SglangServerInfo, VllmMetrics};
use super::{events, hashing, store};
use crate::kv_cache::{DeclaredKvFacts, EngineBlockHashing, EngineStoreFacts, KvEventSource, StoreKeyScheme};

/// Counts and text lengths parsed from one body, read as the response of every path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProbeResponseSizes {
    /// Number of model names.
    pub models: usize,
    /// Number of data-parallel ranks.
    pub ranks: usize,
    /// Number of KV event sources.
    pub event_sources: usize,
    /// Length of the longest text in bytes, except names and versions.
    pub longest: usize,
}

/// Parses `body` as the response of every path that probes request.
#[must_use]
pub fn response_sizes(body: &[u8]) -> ProbeResponseSizes {
    let declared = DeclaredKvFacts::default();
    let mut sources = events::sources(body, "engine");
    let mut texts: Vec<String> = Vec::new();
    if let Some(info) = SglangServerInfo::parse(body) {
        sources.extend(events::sglang(&info, "engine"));
        texts.extend(info.tokenizer());
        texts.extend(store::sglang(&info, &declared).into_iter().flat_map(store_texts));
        let _ = (info.role(), info.priority_order(), hashing::sglang(&info));
    }
    let models = ServedModels::parse(body).unwrap_or_default();
    texts.extend(responses::tokenizer(models.root.as_deref()));
    texts.extend(store_texts(store::vllm(models.root.as_deref(), &declared)));
    let metrics = VllmMetrics::parse(body);
    let version = responses::version(body).unwrap_or_default();
    if let Some(EngineBlockHashing::Opaque { name }) = hashing::vllm(&metrics, &version, &declared) {
        texts.push(name);
    }
    let ranks = responses::engine_ids(body).map_or(0, |ids| ids.len());
    texts.extend(sources.iter().map(|KvEventSource { topic, .. }| topic.clone()));
    ProbeResponseSizes {
        models: models.names.len(),
        ranks: ranks.max(metrics.ranks.and_then(|ranks| usize::try_from(ranks).ok()).unwrap_or(0)),
        event_sources: sources.len(),
        longest: texts.iter().map(String::len).max().unwrap_or(0),
    }
}

fn store_texts(store: EngineStoreFacts) -> Vec<String> {
    let keys = match store.keys {
        StoreKeyScheme::Opaque { name } => vec![name],
        StoreKeyScheme::Sglang { prefix, .. } => prefix.into_iter().collect(),
        StoreKeyScheme::Vllm { prefix, model } => model.into_iter().chain([prefix]).collect(),
    };
    keys.into_iter().chain(store.master).collect()
}
