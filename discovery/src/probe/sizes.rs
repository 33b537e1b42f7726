//! How much is taken of engines' answers: for fuzzing.

use super::responses::{self, ServedModels, SglangServerInfo, VllmMetrics};
use super::{events, hashing, store};
use crate::kv_cache::{DeclaredKvFacts, EngineBlockHashing, EngineStoreFacts, KvEventSource, StoreKeyScheme};

/// Numbers of things and lengths of texts that were taken of one body, whichever path it is the answer of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProbeResponseSizes {
    /// Names of models.
    pub models: usize,
    /// Data-parallel ranks.
    pub ranks: usize,
    /// Where KV events are published.
    pub event_sources: usize,
    /// The longest text, except names and versions.
    pub longest: usize,
}

/// Reads `body` as the answer of every path that is requested.
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
