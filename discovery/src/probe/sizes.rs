//! How much is taken of engines' answers: for fuzzing.

use super::answers::{self, Metrics, Models, ServerInfo};
use super::{events, hashing, store};
use crate::cache::{DeclaredKv, KvEventSource, KvHashing, KvStore, StoreKeys};

/// Numbers of things and lengths of texts that were taken of one body, whichever path it is the answer of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnswerSizes {
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
pub fn answer_sizes(body: &[u8]) -> AnswerSizes {
    let declared = DeclaredKv::default();
    let mut sources = events::sources(body, "engine");
    let mut texts: Vec<String> = Vec::new();
    if let Some(info) = ServerInfo::parse(body) {
        sources.extend(events::sglang(&info, "engine"));
        texts.extend(info.tokenizer());
        texts.extend(store::sglang(&info, &declared).into_iter().flat_map(store_texts));
        let _ = (info.role(), info.priority_order(), hashing::sglang(&info));
    }
    let models = Models::parse(body).unwrap_or_default();
    texts.extend(answers::tokenizer(models.root.as_deref()));
    texts.extend(store_texts(store::vllm(models.root.as_deref(), &declared)));
    let metrics = Metrics::parse(body);
    let version = answers::version(body).unwrap_or_default();
    if let Some(KvHashing::Opaque { name }) = hashing::vllm(&metrics, &version, &declared) {
        texts.push(name);
    }
    let ranks = answers::engine_ids(body).map_or(0, |ids| ids.len());
    texts.extend(sources.iter().map(|KvEventSource { topic, .. }| topic.clone()));
    AnswerSizes {
        models: models.names.len(),
        ranks: ranks.max(metrics.ranks.and_then(|ranks| usize::try_from(ranks).ok()).unwrap_or(0)),
        event_sources: sources.len(),
        longest: texts.iter().map(String::len).max().unwrap_or(0),
    }
}

fn store_texts(store: KvStore) -> Vec<String> {
    let keys = match store.keys {
        StoreKeys::Opaque { name } => vec![name],
        StoreKeys::Sglang { prefix, .. } => prefix.into_iter().collect(),
        StoreKeys::Vllm { prefix, model } => model.into_iter().chain([prefix]).collect(),
    };
    keys.into_iter().chain(store.master).collect()
}
