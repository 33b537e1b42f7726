use proptest::prelude::*;

use super::*;

const RECORDED_SERVER_INFO: &[u8] = include_bytes!("../../tests/data/sglang-0.5.23-server_info.json");
const RECORDED_NIXL_DECODE: &[u8] = include_bytes!("../../tests/data/vllm-0.32-nixl-decode-metrics.txt");
const RECORDED_STORE_DECODE: &[u8] = include_bytes!("../../tests/data/vllm-0.32-store-decode-metrics.txt");

#[test]
fn recorded_sglang_server_info() {
    let info = SglangServerInfo::parse(RECORDED_SERVER_INFO).unwrap();
    assert_eq!(info.version.as_deref(), Some("0.5.23"));
    assert_eq!(info.served_model_name.as_deref(), Some("tiny"));
    assert_eq!((info.page_size, info.context_length, info.dp_size), (Some(32), Some(8192), Some(1)));
    assert_eq!(info.disaggregation_bootstrap_port, Some(8998));
    assert_eq!(info.role(), Some(EngineRole::Plain), "recorded with \"null\"");
    assert_eq!(info.tokenizer().as_deref(), Some("$HOME/engines/models/tiny-qwen3"));
    assert_eq!((info.tp_size, info.pp_size, info.dcp_size), (Some(1), Some(1), Some(1)));
    assert_eq!((info.enable_hierarchical_cache, info.disable_radix_cache), (Some(false), Some(false)));
    assert_eq!(info.hicache_storage_prefetch_policy, Some(PrefetchPolicy::Timeout));
}

#[test]
fn a_cache_member_of_another_form_leaves_an_engine_recognised() {
    let info = SglangServerInfo::parse(
        br#"{"model_path":"m","page_size":64,"tp_size":"4","disable_radix_cache":0,"speculative_algorithm":{},"kv_events":[1],
             "hicache_storage_prefetch_policy":"new","hicache_object_layout":7}"#,
    )
    .unwrap();
    assert_eq!((info.page_size, info.tp_size, info.disable_radix_cache), (Some(64), None, None));
    assert_eq!((info.speculative_algorithm, info.hicache_storage_prefetch_policy), (None, None));
}

#[test]
fn a_tokenizer_is_used_only_with_its_own_chat_template() {
    let reported = |members: &str| {
        SglangServerInfo::parse(format!(r#"{{"model_path":"/m"{members}}}"#).as_bytes()).unwrap().tokenizer()
    };
    assert_eq!(reported(r#","chat_template":null"#).as_deref(), Some("/m"));
    assert_eq!(reported(r#","tokenizer_path":"/t""#).as_deref(), Some("/t"));
    assert_eq!(reported(r#","chat_template":"/other.jinja""#), None);
    assert_eq!(reported(&format!(r#","tokenizer_path":"/{}""#, "x".repeat(MAX_PATH))), None);
}

#[test]
fn a_missing_mode_is_not_a_plain_engine() {
    let role = |text: &str| SglangServerInfo::parse(text.as_bytes()).unwrap().role();
    assert_eq!(role(r#"{"model_path":"m"}"#), None);
    assert_eq!(role(r#"{"disaggregation_mode":null}"#), Some(EngineRole::Plain));
    assert_eq!(role(r#"{"disaggregation_mode":"prefill"}"#), Some(EngineRole::Prefill));
    assert_eq!(role(r#"{"disaggregation_mode":"decode","internal_states":[{}]}"#), Some(EngineRole::Decode));
    assert_eq!(SglangServerInfo::parse(br#"{"vllm_config":"x"}"#), None, "vLLM's /server_info");
}

#[test]
fn hybrid_models_of_sglang_have_a_window_cache_or_states() {
    let hybrid = |members: &str| {
        SglangServerInfo::parse(format!(r#"{{"model_path":"/m"{members}}}"#).as_bytes()).unwrap()
    };
    let state = |capacity: &str| {
        let state = format!(r#"{{"memory_usage":{{"token_capacity":9,"token_capacity_swa":{capacity}}}}}"#);
        hybrid(&format!(r#","internal_states":[{state}]"#)).checkpoints()
    };
    assert_eq!((state("6144"), state("null")), (Some(PrefixCheckpoints::RequestEndsAndBranches), None));
    let states = hybrid(r#","uses_mamba_radix_cache":true"#).checkpoints();
    assert_eq!(states, Some(PrefixCheckpoints::RequestEnds));
    for other in
        ["", r#","internal_states":7"#, r#","internal_states":[]"#, r#","uses_mamba_radix_cache":"x""#]
    {
        assert_eq!(hybrid(other).checkpoints(), None, "{other}");
    }
    assert_eq!(SglangServerInfo::parse(RECORDED_SERVER_INFO).unwrap().checkpoints(), None);
}

#[test]
fn priority_order_is_as_reported_and_without_preemption() {
    let order = |members: &str| {
        let text = format!(r#"{{"model_path":"/m"{members}}}"#);
        SglangServerInfo::parse(text.as_bytes()).unwrap().priority_order()
    };
    assert_eq!(SglangServerInfo::parse(RECORDED_SERVER_INFO).unwrap().priority_order(), None);
    assert_eq!(order(r#","enable_priority_scheduling":true"#), None, "it may stop running requests");
    assert_eq!(
        order(r#","enable_priority_scheduling":true,"disable_priority_preemption":true"#),
        Some(PriorityOrder::LargestFirst)
    );
    let old = r#","enable_priority_scheduling":true,"schedule_low_priority_values_first":true"#;
    let threshold = |value| format!(r#"{old},"priority_scheduling_preemption_threshold":{value}"#);
    assert_eq!(order(&threshold("10")), None);
    assert_eq!(order(&threshold("1000000000")), Some(PriorityOrder::SmallestFirst));
    assert_eq!(order(r#","enable_priority_scheduling":false,"disable_priority_preemption":true"#), None);
}

#[test]
fn recorded_metrics_name_the_connector() {
    let nixl = VllmMetrics::parse(RECORDED_NIXL_DECODE);
    assert_eq!(nixl.connector(), Some(KvConnector::Nixl));
    assert_eq!((nixl.block_size, nixl.ranks), (Some(32), Some(1)));
    assert_eq!((nixl.hash_algorithm.as_deref(), nixl.hash_block_size), (Some("sha256_cbor"), None));
    assert_eq!((nixl.prefix_caching, nixl.offloading, nixl.store), (Some(true), Some(false), false));
    assert!(VllmMetrics::parse(RECORDED_STORE_DECODE).store);
    assert_eq!(VllmMetrics::parse(RECORDED_STORE_DECODE).connector(), Some(KvConnector::Store));
    let both =
        b"# TYPE vllm:mooncake_store_operation_total counter\nvllm:mooncake_xfer_time_seconds_count 0\n";
    assert_eq!(VllmMetrics::parse(both).connector(), Some(KvConnector::Mooncake));
    assert_eq!(VllmMetrics::parse(b"").connector(), None);
}

/// vLLM 0.32 with `--data-parallel-size 2`, and therefore two API servers, before and after the first request to rank 1.
#[test]
fn ranks_are_counted_before_their_first_request() {
    let config = |rank: u32| format!("vllm:cache_config_info{{block_size=\"32\",engine=\"{rank}\"}} 1.0\n");
    let idle = config(0) + &config(1);
    assert_eq!(VllmMetrics::parse(idle.as_bytes()).ranks, Some(2));
    let used = idle + "vllm:num_requests_running{engine=\"1\",model_name=\"m\"} 1.0\n";
    assert_eq!(VllmMetrics::parse(used.as_bytes()).ranks, Some(2));
}

#[test]
fn duplicate_models_are_removed_in_order() {
    let models = ServedModels::parse(
        br#"{"object":"list","data":[{"id":"b","max_model_len":8192,"root":"/m/b"},{"id":"a"},{"id":"b","max_model_len":4096},{"id":""}]}"#,
    )
    .unwrap();
    assert_eq!(models.names, ["b", "a"]);
    assert_eq!((models.context_length, models.root.as_deref()), (Some(4096), Some("/m/b")));
}

/// A response of vLLM 0.32 with `--lora-modules`.
#[test]
fn adapters_are_the_models_with_a_parent() {
    let models = ServedModels::parse(
        br#"{"object":"list","data":[{"id":"tiny","object":"model","root":"/m/tiny","parent":null},
            {"id":"poet","object":"model","root":"/a/poet","parent":"tiny","max_model_len":null},
            {"id":"odd","parent":"tiny","root":7}]}"#,
    )
    .unwrap();
    assert_eq!(models.names, ["tiny", "poet", "odd"]);
    assert_eq!(models.adapters, [("poet".to_owned(), Some("/a/poet".to_owned())), ("odd".to_owned(), None)]);
}

#[test]
fn recorded_mooncake_query() {
    let body = br#"{"0":{"engine_id":"00daad46-1","worker_addr":{"0":{"0":"tcp://127.0.0.1:38751"}}},"1":{"engine_id":"x"}}"#;
    assert_eq!(engine_ids(body), Some(BTreeMap::from([(0, "00daad46-1".into()), (1, "x".into())])));
    assert_eq!(engine_ids(br#"{"detail":"Not Found"}"#), None);
    assert_eq!(engine_ids(b"{}"), Some(BTreeMap::new()));
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(body in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = (SglangServerInfo::parse(&body), ServedModels::parse(&body), version(&body), engine_ids(&body));
        let _ = VllmMetrics::parse(&body).connector();
    }

    #[test]
    fn metrics_like_text_never_panics(text in "(vllm:(nixl_|mooncake_|cache_config_info)?\\{?[a-z_\"=0-9,]{0,30}\\}? ?[0-9]{0,3}\n){0,20}") {
        let _ = VllmMetrics::parse(text.as_bytes()).connector();
    }
}
