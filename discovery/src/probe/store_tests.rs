use proptest::prelude::*;

use super::*;
use crate::kv_cache::PrefetchPolicy;

fn told_with(members: &str, declared: &DeclaredKvFacts) -> Option<EngineStoreFacts> {
    let body = format!(r#"{{"model_path":"m","page_size":64,{members}}}"#);
    sglang(&SglangServerInfo::parse(body.as_bytes()).unwrap(), declared)
}

fn reported(members: &str) -> Option<EngineStoreFacts> {
    told_with(members, &DeclaredKvFacts::default())
}

const ON: &str = r#""enable_hierarchical_cache":true,"hicache_storage_backend":"mooncake""#;
/// As recorded from 0.5.23 with a Mooncake store.
const LAYOUT: &str = r#""hicache_object_layout":{"enabled":false,"backend":"mooncake","page_size":32,"hicache_object_layout":{"pools":[],"key_prefix":"tiny","is_mla_backend":false,"pp_rank":0,"pp_size":1},"reason":"External L3 lookup requires rank-replicated/MLA pools"}"#;

#[test]
fn sglang_reports_its_layout() {
    let store = reported(&format!(
        r#"{ON},{LAYOUT},"tp_size":4,"hicache_storage_prefetch_policy":"wait_complete","hicache_storage_backend_extra_config":null"#
    ));
    assert_eq!(
        store,
        Some(EngineStoreFacts {
            keys: StoreKeyScheme::Sglang { prefix: Some("tiny".into()), mla: Some(false) },
            tp_size: Some(4),
            pp_size: Some(1),
            prefetch_threshold: Some(256),
            prefetch_policy: Some(PrefetchPolicy::WaitComplete),
            master: None,
        })
    );
    let none = reported(&format!(
        r#"{ON},"hicache_object_layout":{{"hicache_object_layout":{{"key_prefix":null}}}}"#
    ));
    assert_eq!(none.unwrap().keys, StoreKeyScheme::Sglang { prefix: Some(String::new()), mla: None });
    let old = reported(ON).unwrap();
    assert_eq!(old.keys, StoreKeyScheme::Sglang { prefix: None, mla: None }, "a version without layout");
}

#[test]
fn sglang_without_hicache_or_with_other_backend_has_no_store() {
    assert_eq!(reported(r#""enable_hierarchical_cache":false,"hicache_storage_backend":"mooncake""#), None);
    assert_eq!(reported(r#""enable_hierarchical_cache":true,"hicache_storage_backend":null"#), None);
    assert_eq!(reported(r#""enable_hierarchical_cache":true,"hicache_storage_backend":"file""#), None);
    let unified = reported(&format!(r#"{ON},"hicache_storage_key_scheme":"unified""#)).unwrap();
    assert!(matches!(unified.keys, StoreKeyScheme::Opaque { .. }));
}

#[test]
fn sglangs_extra_configuration_is_used() {
    let extra = |text: &str| {
        reported(&format!(r#"{ON},"tp_size":2,"hicache_storage_backend_extra_config":{text}"#)).unwrap()
    };
    let store = extra(
        r#""{\"prefetch_threshold\":512,\"tp_lcm_size\":8,\"master_server_address\":\"10.0.0.9:50051\"}""#,
    );
    assert_eq!((store.prefetch_threshold, store.tp_size), (Some(512), Some(8)));
    assert_eq!(store.master.as_deref(), Some("10.0.0.9:50051"));
    let store = extra(r#"{"prefetch_threshold":1}"#);
    assert_eq!((store.prefetch_threshold, store.master), (Some(64), None), "a page at least");
    let file = extra(r#""@/etc/hicache.json""#);
    assert_eq!((file.prefetch_threshold, file.tp_size), (None, Some(2)), "not reported");
    let declared = DeclaredKvFacts {
        prefetch_threshold: Some(300),
        tp_size: Some(16),
        store_key_prefix: Some("p".into()),
        ..DeclaredKvFacts::default()
    };
    let store = told_with(&format!("{ON},{LAYOUT}"), &declared).unwrap();
    assert_eq!((store.prefetch_threshold, store.tp_size), (Some(300), Some(16)));
    assert_eq!(store.keys, StoreKeyScheme::Sglang { prefix: Some("p".into()), mla: Some(false) });
}

#[test]
fn data_parallel_attention_divides_the_ranks() {
    let ranks = |members: &str| reported(&format!("{ON},{members}")).unwrap().tp_size;
    assert_eq!(ranks(r#""tp_size":8,"dp_size":4,"enable_dp_attention":true"#), Some(2));
    assert_eq!(ranks(r#""tp_size":8,"dp_size":4,"enable_dp_attention":false"#), Some(8));
    assert_eq!(ranks(r#""tp_size":8,"dp_size":2,"enable_dp_attention":true,"attn_cp_size":2"#), Some(2));
    assert_eq!(ranks(r#""tp_size":8,"dp_size":3,"enable_dp_attention":true"#), None);
    assert_eq!(ranks(r#""dp_size":2"#), None);
}

#[test]
fn vllm_uses_the_last_part_of_the_models_path() {
    let model = |root: Option<&str>| match vllm(root, &DeclaredKvFacts::default()).keys {
        StoreKeyScheme::Vllm { model, prefix } if prefix.is_empty() => model,
        other => panic!("{other:?}"),
    };
    assert_eq!(model(Some("/models/tiny-qwen3")).as_deref(), Some("tiny-qwen3"));
    assert_eq!(model(Some("Qwen/Qwen3-32B/")).as_deref(), Some("Qwen3-32B"));
    assert_eq!(model(Some("/")), None);
    assert_eq!(model(None), None);
    let declared = DeclaredKvFacts {
        tp_size: Some(2),
        store_key_prefix: Some("p".into()),
        ..DeclaredKvFacts::default()
    };
    let store = vllm(Some("m"), &declared);
    assert_eq!((store.tp_size, store.prefetch_threshold), (Some(2), Some(0)));
    assert_eq!(store.keys, StoreKeyScheme::Vllm { prefix: "p".into(), model: Some("m".into()) });
}

proptest! {
    #[test]
    fn arbitrary_members_never_panic(tp in any::<u32>(), dp in any::<u32>(), cp in any::<u32>(), extra in "\\PC{0,30}") {
        let extra = serde_json::Value::String(extra);
        let _ = reported(&format!(
            r#"{ON},"tp_size":{tp},"dp_size":{dp},"attn_cp_size":{cp},"enable_dp_attention":true,"hicache_storage_backend_extra_config":{extra}"#
        ));
    }
}
