//! Derives an engine's hashing of KV pages from its responses.

use super::events;
use super::responses::{SglangServerInfo, VllmMetrics};
use super::version::release;
use crate::kv_cache::{DeclaredKvFacts, EngineBlockHashing, VllmHashAlgorithm};

/// The seed of vLLM's first digest if `PYTHONHASHSEED` is not set.
const VLLM_SEED: &str = "vllm-none-hash";
/// The oldest vLLM that is known to use [`VLLM_SEED`]. Before this constant, the seed was random in every process.
const VLLM_SEED_SINCE: (u32, u32, u32) = (0, 32, 0);
/// The oldest SGLang that is known to mix `extra_key` and `cache_salt` into page hashes.
const SGLANG_NAMESPACE_SINCE: (u32, u32, u32) = (0, 5, 23);
/// The newest SGLang that is known not to. Releases between the two are unverified, and a wrong guess would predict another tenant's pages.
const SGLANG_NO_NAMESPACE_UNTIL: (u32, u32, u32) = (0, 5, 6);
/// Speculative algorithms with which SGLang hashes pairs of tokens.
const SGLANG_BIGRAMS: [&str; 4] = ["EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP"];

pub(super) fn sglang(info: &SglangServerInfo) -> Option<EngineBlockHashing> {
    if info.disable_radix_cache == Some(true) {
        return None;
    }
    let speculative = info.speculative_algorithm.as_deref().unwrap_or_default().to_ascii_uppercase();
    let bigrams = SGLANG_BIGRAMS.contains(&speculative.as_str());
    if !bigrams && (speculative.contains("EAGLE") || speculative.contains("MTP")) {
        return Some(opaque(format!("speculative algorithm {speculative}")));
    }
    if info.dcp_size.is_some_and(|size| size > 1) {
        // Pages are larger by this factor, in the engine's tree and in its events.
        return Some(opaque("decode context parallelism".to_owned()));
    }
    let release = info.version.as_deref().and_then(release);
    let namespaced = release.and_then(|release| {
        (release >= SGLANG_NAMESPACE_SINCE || release <= SGLANG_NO_NAMESPACE_UNTIL)
            .then_some(release >= SGLANG_NAMESPACE_SINCE)
    });
    let namespaced_events = events::sglang_format(info).as_deref() == Some("dynamo");
    Some(EngineBlockHashing::Sglang { namespaced, bigrams, namespaced_events })
}

pub(super) fn vllm(
    metrics: &VllmMetrics,
    version: &str,
    declared: &DeclaredKvFacts,
) -> Option<EngineBlockHashing> {
    if metrics.prefix_caching == Some(false) {
        return None;
    }
    let reported_algorithm = metrics.hash_algorithm.as_deref();
    let algorithm = match (declared.hash_algorithm, reported_algorithm) {
        (Some(algorithm), _) => algorithm,
        (None, Some("sha256")) => VllmHashAlgorithm::Sha256,
        (None, Some("sha256_cbor")) => VllmHashAlgorithm::Sha256Cbor,
        (None, other) => return other.map(|name| opaque(name.to_owned())),
    };
    if metrics.hash_block_size.is_some_and(|size| Some(size) != metrics.block_size) {
        return Some(opaque("hash block size differs from the KV block size".to_owned()));
    }
    let constant = release(version).is_some_and(|release| release >= VLLM_SEED_SINCE);
    Some(match declared.hash_seed.clone().or_else(|| constant.then(|| VLLM_SEED.to_owned())) {
        Some(seed) => EngineBlockHashing::Vllm { algorithm, seed },
        None => opaque(format!("{algorithm} with an unknown seed")),
    })
}

fn opaque(name: String) -> EngineBlockHashing {
    EngineBlockHashing::Opaque { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sglang_with(version: &str, members: &str) -> Option<EngineBlockHashing> {
        let body = format!(r#"{{"model_path":"m","version":"{version}"{members}}}"#);
        sglang(&SglangServerInfo::parse(body.as_bytes()).unwrap())
    }

    #[test]
    fn sglang_namespaces_follow_from_the_version() {
        for (version, namespaced) in [
            ("0.5.23", Some(true)),
            ("0.6.0", Some(true)),
            ("0.5.6.post1", Some(false)),
            ("0.4.9", Some(false)),
            ("0.5.7", None),
            ("0.5.22", None),
            ("0.0.0.dev1+g1", None),
        ] {
            let expected =
                Some(EngineBlockHashing::Sglang { namespaced, bigrams: false, namespaced_events: false });
            assert_eq!(sglang_with(version, ""), expected, "{version}");
        }
    }

    #[test]
    fn sglang_events_of_dynamo_are_namespaced() {
        let namespaced =
            |config: &str| match sglang_with("0.5.23", &format!(r#","kv_events_config":{config}"#)) {
                Some(EngineBlockHashing::Sglang { namespaced_events, .. }) => namespaced_events,
                other => panic!("{other:?}"),
            };
        assert!(namespaced(r#""{\"publisher\":\"zmq\",\"format\":\"dynamo\"}""#));
        assert!(!namespaced(r#""{\"publisher\":\"zmq\"}""#) && !namespaced("null") && !namespaced("7"));
    }

    #[test]
    fn sglang_eagle_hashes_bigrams_and_unknown_is_opaque() {
        let bigrams = |algorithm: &str| match sglang_with(
            "0.5.23",
            &format!(r#","speculative_algorithm":"{algorithm}""#),
        ) {
            Some(EngineBlockHashing::Sglang { bigrams, .. }) => Some(bigrams),
            _ => None,
        };
        assert_eq!(bigrams("EAGLE3"), Some(true));
        assert_eq!(bigrams("eagle"), Some(true));
        assert_eq!(bigrams("NGRAM"), Some(false));
        assert_eq!(bigrams("EAGLE9"), None);
        assert!(matches!(sglang_with("0.5.23", r#","dcp_size":2"#), Some(EngineBlockHashing::Opaque { .. })));
        assert!(matches!(sglang_with("0.5.23", r#","dcp_size":1"#), Some(EngineBlockHashing::Sglang { .. })));
        assert_eq!(sglang_with("0.5.23", r#","disable_radix_cache":true"#), None);
    }

    fn info(labels: &str) -> VllmMetrics {
        VllmMetrics::parse(format!("vllm:cache_config_info{{block_size=\"16\",{labels}}} 1.0\n").as_bytes())
    }

    #[test]
    fn vllm_reports_its_algorithm_and_declared_values_override_it() {
        let nothing = DeclaredKvFacts::default();
        let cbor = info(r#"prefix_caching_hash_algo="sha256_cbor""#);
        let constant =
            EngineBlockHashing::Vllm { algorithm: VllmHashAlgorithm::Sha256Cbor, seed: VLLM_SEED.into() };
        assert_eq!(vllm(&cbor, "0.32.0", &nothing), Some(constant));
        assert!(
            matches!(vllm(&cbor, "0.11.0", &nothing), Some(EngineBlockHashing::Opaque { .. })),
            "a random seed"
        );
        let declared = DeclaredKvFacts {
            hash_algorithm: Some(VllmHashAlgorithm::Sha256),
            hash_seed: Some("0".into()),
            ..nothing.clone()
        };
        let overridden = EngineBlockHashing::Vllm { algorithm: VllmHashAlgorithm::Sha256, seed: "0".into() };
        assert_eq!(vllm(&cbor, "0.11.0", &declared), Some(overridden));
        let xxhash = EngineBlockHashing::Opaque { name: "xxhash_cbor".into() };
        assert_eq!(
            vllm(&info(r#"prefix_caching_hash_algo="xxhash_cbor""#), "0.33.0", &nothing),
            Some(xxhash)
        );
        assert_eq!(vllm(&VllmMetrics::default(), "0.33.0", &nothing), None, "metrics are off");
    }

    #[test]
    fn vllm_without_prefix_cache_or_known_hash_is_unpredicted() {
        let nothing = DeclaredKvFacts::default();
        let off = info(r#"enable_prefix_caching="False",prefix_caching_hash_algo="sha256""#);
        assert_eq!(vllm(&off, "0.33.0", &nothing), None);
        let finer = info(r#"hash_block_size="8",prefix_caching_hash_algo="sha256""#);
        assert!(matches!(vllm(&finer, "0.33.0", &nothing), Some(EngineBlockHashing::Opaque { .. })));
        let same = info(r#"hash_block_size="16",prefix_caching_hash_algo="sha256""#);
        assert!(matches!(vllm(&same, "0.33.0", &nothing), Some(EngineBlockHashing::Vllm { .. })));
    }
}
