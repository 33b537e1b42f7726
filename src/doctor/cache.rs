//! The KV caches of engines in doctor's report: a line for each engine, and how to enable what the prediction of cache hits requires.

use std::collections::BTreeMap;

use moongate_discovery::{
    EngineBlockHashing, EngineFacts, EngineKind, EngineStoreFacts, PrefixCheckpoints, StoreKeyScheme,
};

/// Describes an engine's KV cache in one line of text.
pub(super) fn describe(facts: &EngineFacts) -> String {
    let page = facts.page_size.map(|tokens| format!("pages of {tokens} tokens"));
    let hashing = match &facts.hashing {
        None => "no hashes".to_owned(),
        Some(EngineBlockHashing::Sglang { bigrams: false, .. }) => "SGLang's hashes".to_owned(),
        Some(EngineBlockHashing::Sglang { bigrams: true, .. }) => "SGLang's hashes of token pairs".to_owned(),
        Some(EngineBlockHashing::Vllm { algorithm, .. }) => format!("vLLM's hashes ({algorithm})"),
        Some(EngineBlockHashing::Opaque { name }) => format!("hashes that cannot be computed ({name})"),
    };
    let events = match facts.events.as_deref().unwrap_or_default() {
        [] => "no KV events".to_owned(),
        [first, rest @ ..] => {
            let verb = if first.engine_binds { "at" } else { "sent to" };
            let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
            format!("KV events {verb} {}{more}", first.endpoint)
        }
    };
    let host = facts.host_cache.filter(|has| *has).map(|_| "host memory".to_owned());
    let hybrid = facts.checkpoints.map(|checkpoints| {
        let places = match checkpoints {
            PrefixCheckpoints::RequestEnds => "ended",
            PrefixCheckpoints::RequestEndsAndBranches => "ended or branched off",
        };
        format!("a hybrid model, of which only prefixes where a request {places} count as cached")
    });
    let parts = page
        .into_iter()
        .chain([hashing, events])
        .chain(hybrid)
        .chain(host)
        .chain(facts.store.as_ref().map(store));
    format!("KV cache: {}", parts.collect::<Vec<_>>().join(", "))
}

fn store(store: &EngineStoreFacts) -> String {
    let prefix = match &store.keys {
        StoreKeyScheme::Sglang { prefix, .. } => prefix.as_deref(),
        StoreKeyScheme::Vllm { model, .. } => model.as_deref(),
        StoreKeyScheme::Opaque { name } => Some(name.as_str()),
    };
    let keys = prefix.filter(|text| !text.is_empty()).map(|text| format!(" under {text}"));
    let from =
        store.prefetch_threshold.filter(|tokens| *tokens > 0).map(|tokens| format!(" from {tokens} tokens"));
    format!("Mooncake store{}{}", keys.unwrap_or_default(), from.unwrap_or_default())
}

/// Features that these engines lack, how to enable each, and the number of engines. None is a problem: requests are served without.
pub(super) fn advice<'a>(engines: impl Iterator<Item = &'a EngineFacts>) -> Vec<String> {
    let mut lacking: BTreeMap<String, usize> = BTreeMap::new();
    for text in engines.flat_map(missing_features) {
        *lacking.entry(text).or_default() += 1;
    }
    lacking
        .into_iter()
        .map(|(text, count)| format!("{count} engine{}: {text}", if count == 1 { "" } else { "s" }))
        .collect()
}

fn missing_features(facts: &EngineFacts) -> Vec<String> {
    let mut lacks = Vec::new();
    let (engine, enable) = match facts.engine {
        EngineKind::Sglang => ("SGLang", ""),
        EngineKind::Vllm => ("vLLM", r#""enable_kv_cache_events":true,"#),
    };
    let events = facts.events.as_deref().unwrap_or_default();
    if events.is_empty() {
        lacks.push(format!(
            r#"no KV events; start {engine} with --kv-events-config '{{{enable}"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}}'"#
        ));
    } else if events.iter().any(|source| source.replay.is_none()) {
        lacks.push(r#"missed KV events are not replayed; add "replay_endpoint":"tcp://*:5657" to --kv-events-config"#.to_owned());
    }
    match (&facts.hashing, facts.engine) {
        (Some(EngineBlockHashing::Opaque { name }), EngineKind::Vllm) => lacks.push(format!(
            "page hashes cannot be computed ({name}), so adapters and the store are not predicted; start vLLM with --prefix-caching-hash-algo sha256_cbor, and set `kv.hash_seed` to its PYTHONHASHSEED if it has one"
        )),
        (None, EngineKind::Vllm) => lacks.push(
            "page hashes are not reported; start vLLM with metrics and prefix caching enabled, or set `kv.hash_algorithm`".to_owned(),
        ),
        (None, EngineKind::Sglang) => {
            lacks.push("no prefix cache; start SGLang without --disable-radix-cache".to_owned());
        }
        (Some(EngineBlockHashing::Sglang { namespaced: Some(true), namespaced_events: false, .. }), _)
            if !events.is_empty() =>
        {
            lacks.push(
                r#"requests with `extra_key` are not predicted, and their blocks count as those of plain prompts: KV events do not contain the key; if you use it, add "format":"dynamo" to --kv-events-config"#.to_owned(),
            );
        }
        (Some(_), _) => {}
    }
    if let Some(store) = &facts.store {
        let prefix = matches!(store.keys, StoreKeyScheme::Sglang { prefix: None, .. });
        let unknown = [
            (prefix, "store_key_prefix"),
            (store.tp_size.is_none(), "tp_size"),
            (store.prefetch_threshold.is_none(), "prefetch_threshold"),
        ];
        let keys: Vec<String> = unknown
            .iter()
            .filter(|(is_unknown, _)| *is_unknown)
            .map(|(_, key)| format!("`kv.{key}`"))
            .collect();
        if !keys.is_empty() {
            lacks.push(format!(
                "the engine does not report all settings of its Mooncake store; set {} in the instances file",
                keys.join(", ")
            ));
        }
    }
    lacks
}

#[cfg(test)]
mod tests {
    use super::*;
    use moongate_discovery::{KvEventSource, VllmHashAlgorithm};

    fn source(replay: Option<&str>) -> KvEventSource {
        KvEventSource {
            dp_rank: 0,
            endpoint: "tcp://10.0.0.1:5557".into(),
            engine_binds: true,
            replay: replay.map(str::to_owned),
            topic: String::new(),
        }
    }

    fn facts(engine: EngineKind) -> EngineFacts {
        EngineFacts {
            page_size: Some(64),
            hashing: Some(EngineBlockHashing::Vllm {
                algorithm: VllmHashAlgorithm::Sha256Cbor,
                seed: "0".into(),
            }),
            events: Some(vec![source(Some("tcp://10.0.0.1:5657"))]),
            host_cache: Some(true),
            ..EngineFacts::unreported(engine)
        }
    }

    #[test]
    fn an_engine_that_reports_everything_gets_a_line_and_no_advice() {
        let mut complete = facts(EngineKind::Vllm);
        complete.store = Some(EngineStoreFacts {
            keys: StoreKeyScheme::Vllm { prefix: String::new(), model: Some("tiny".into()) },
            tp_size: Some(1),
            pp_size: None,
            prefetch_threshold: Some(0),
            prefetch_policy: None,
            master: None,
        });
        assert_eq!(advice([&complete].into_iter()), Vec::<String>::new());
        assert_eq!(
            describe(&complete),
            "KV cache: pages of 64 tokens, vLLM's hashes (sha256_cbor), KV events at tcp://10.0.0.1:5557, host memory, Mooncake store under tiny"
        );
    }

    #[test]
    fn advice_names_the_key_or_the_flag_and_counts_engines() {
        let mut sglang = facts(EngineKind::Sglang);
        sglang.hashing = None;
        sglang.store = Some(EngineStoreFacts {
            keys: StoreKeyScheme::Sglang { prefix: None, mla: None },
            tp_size: Some(1),
            pp_size: Some(1),
            prefetch_threshold: None,
            prefetch_policy: None,
            master: None,
        });
        let mut vllm = facts(EngineKind::Vllm);
        vllm.hashing = Some(EngineBlockHashing::Opaque { name: "xxhash".into() });
        vllm.events = Some(vec![source(None)]);
        let advice = advice([&sglang, &sglang, &vllm].into_iter());
        for (count, words) in [
            ("2 engines: ", "--disable-radix-cache"),
            ("2 engines: ", "set `kv.store_key_prefix`, `kv.prefetch_threshold`"),
            (
                "1 engine: ",
                "(xxhash), so adapters and the store are not predicted; start vLLM with --prefix-caching-hash-algo sha256_cbor",
            ),
            ("1 engine: ", "replay_endpoint"),
        ] {
            let line = advice.iter().find(|line| line.contains(words));
            assert!(line.is_some_and(|line| line.starts_with(count)), "{words}: {advice:?}");
        }
        assert_eq!(advice.len(), 4, "{advice:?}");
    }
}
