//! The members of responses, compared with recordings of real engines and with the protocols' lists.

use std::collections::BTreeSet;
use std::time::Duration;

use moongate_loadtest::engine::{
    SharedL3Store, SimEngine, SimEngineOptions, SimProtocol, SimRole, VllmConnector,
};
use serde_json::{Value, json};

use super::{bootstrap, chat, client, content, events, get, post, recording, start, start_vllm, with};

/// Every member path of a value; list elements count as one.
fn members(value: &Value, path: &str, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                let path = format!("{path}.{name}");
                into.insert(path.clone());
                members(value, &path, into);
            }
        }
        Value::Array(list) => list.iter().for_each(|value| members(value, &format!("{path}[]"), into)),
        _ => {}
    }
}

fn missing(recorded: &Value, simulated: &Value, allowed: &[&str]) -> Vec<String> {
    let (mut recorded_members, mut simulated_members) = (BTreeSet::new(), BTreeSet::new());
    members(recorded, "", &mut recorded_members);
    members(simulated, "", &mut simulated_members);
    recorded_members
        .difference(&simulated_members)
        .filter(|path| !allowed.iter().any(|allowed| path.contains(allowed)))
        .cloned()
        .collect()
}

#[tokio::test]
async fn sglang_answers_with_the_recorded_members() {
    let (prefill, decode) = tokio::join!(
        start(SimRole::Prefill, SimProtocol::Sglang),
        start(SimRole::Decode, SimProtocol::Sglang)
    );
    let rows = recording("sglang-pd");
    let request = with(&rows[0]["request"], bootstrap(&prefill, &rows[0]["request"]["bootstrap_room"]));
    let (first, second) =
        tokio::join!(post(&prefill, "/generate", &request), post(&decode, "/generate", &request));
    // Timings of the real scheduler that no gateway reads.
    let timings = ["_ts", "_time", "_wait", "latency", "weight_versions"];
    for (row, (status, response)) in rows.iter().zip([first, second]) {
        assert_eq!(status, 200);
        assert_eq!(missing(&row["response"], &response, &timings), Vec::<String>::new());
        let (recorded_members, simulated) = (&row["response"]["meta_info"], &response["meta_info"]);
        for member in ["finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens"] {
            assert_eq!(recorded_members[member], simulated[member], "{member}");
        }
    }
}

#[tokio::test]
async fn vllm_answers_with_the_recorded_members() {
    for (name, connector) in
        [("vllm-nixl", VllmConnector::Nixl), ("vllm-mooncakeconnector", VllmConnector::Mooncake)]
    {
        let fleet = SharedL3Store::default();
        let mut config = SimEngineOptions::new(SimRole::Prefill, SimProtocol::Vllm).fast();
        (config.connector, config.model, config.page_size) = (connector, "tiny".to_owned(), 32);
        let prefill = SimEngine::start_with_store(config.clone(), &fleet).await.expect("an engine");
        config.role = SimRole::Decode;
        let decode = SimEngine::start_with_store(config, &fleet).await.expect("an engine");
        let rows = recording(name);
        let (status, first) = post(&prefill, "/v1/completions", &rows[0]["request"]).await;
        assert_eq!((status, missing(&rows[0]["response"], &first, &[])), (200, Vec::new()), "{name}");
        let mut params = first["kv_transfer_params"].clone();
        if connector == VllmConnector::Mooncake {
            params = rows[1]["request"]["kv_transfer_params"].clone();
            params["remote_engine_id"] = json!(prefill.engine_id());
            let address = prefill.bootstrap_addr().expect("a prefill engine");
            params["remote_bootstrap_addr"] = json!(format!("http://{address}"));
        }
        let request = with(&rows[1]["request"], json!({"kv_transfer_params": params}));
        let (status, second) = post(&decode, "/v1/completions", &request).await;
        assert_eq!((status, missing(&rows[1]["response"], &second, &[])), (200, Vec::new()), "{name}");
        assert_eq!(rows[1]["response"]["usage"], second["usage"], "{name}");
    }
}

#[tokio::test]
async fn loads_have_every_member() {
    let mut config = SimEngineOptions::new(SimRole::Prefill, SimProtocol::Sglang).fast();
    config.dp_size = 2;
    let engine = SimEngine::start(config).await.expect("an engine");
    let loads = get(&engine, "/v1/loads?include=core,disagg,queues,memory").await;
    assert_eq!(loads["loads"].as_array().expect("ranks").len(), 2);
    let members = "timestamp dp_rank num_running_reqs num_waiting_reqs num_waiting_uncached_tokens num_used_tokens \
        num_total_tokens num_active_tokens num_prealloc_ready_tokens max_total_num_tokens max_running_requests \
        token_usage gen_throughput cache_hit_rate utilization total_prefill_uncached_tokens total_prefill_busy_us \
        decode_moments disaggregation queues";
    let load = loads["loads"][0].as_object().expect("an object");
    for member in members.split_whitespace() {
        assert!(load.contains_key(member), "{member}");
    }
    let disaggregation = "mode prefill_bootstrap_queue_reqs prefill_inflight_queue_reqs decode_prealloc_queue_reqs \
        decode_transfer_queue_reqs decode_retracted_queue_reqs kv_transfer_speed_gb_s kv_transfer_latency_ms";
    for member in disaggregation.split_whitespace() {
        assert!(load["disaggregation"].get(member).is_some(), "{member}");
    }
    let one = get(&engine, "/v1/loads?dp_rank=1&include=core").await;
    assert_eq!((one["loads"][0]["dp_rank"].clone(), one["loads"][0].get("queues")), (json!(1), None));
}

#[tokio::test]
async fn information_and_metrics_have_their_names() {
    let sglang = start(SimRole::Prefill, SimProtocol::Sglang).await;
    for path in ["/server_info", "/get_server_info", "/model_info", "/get_model_info"] {
        assert_eq!(get(&sglang, path).await["disaggregation_mode"], "prefill", "{path}");
    }
    let text = |engine: &SimEngine, path: &str| {
        let url = format!("{}{path}", engine.url());
        async move { client().get(url).send().await.expect("a response").text().await.expect("text") }
    };
    let metrics = text(&sglang, "/metrics").await;
    for name in [
        "num_running_reqs",
        "num_queue_reqs",
        "token_usage",
        "num_prefill_bootstrap_queue_reqs",
        "cache_hit_rate",
    ] {
        assert!(metrics.contains(&format!("\nsglang:{name}{{")), "{name}");
    }
    for (connector, name) in [
        (VllmConnector::Nixl, "nixl_bytes_transferred_sum"),
        (VllmConnector::Mooncake, "mooncake_bytes_transferred_sum"),
        (VllmConnector::Store, "mooncake_store_operation_bytes_total"),
    ] {
        let engine = start_vllm(SimRole::Plain, connector, &SharedL3Store::default()).await;
        let metrics = text(&engine, "/metrics").await;
        for name in [
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "prefix_cache_hits_total",
            name,
        ] {
            assert!(metrics.contains(&format!("\nvllm:{name}{{")), "{name}");
        }
        assert_eq!(get(&engine, "/version").await["version"], "0.32.0");
        assert_eq!(get(&engine, "/load").await["server_load"], 0);
        let tokens = post(&engine, "/tokenize", &json!({"model": "sim", "prompt": "abcdefgh"})).await.1;
        assert_eq!(tokens["count"], 2);
        let unknown = with(&chat("x", 1), json!({"model": "other"}));
        assert_eq!(post(&engine, "/v1/chat/completions", &unknown).await.0, 404);
    }
    let embedded = post(&sglang, "/v1/embeddings", &json!({"input": ["a", "b"]})).await.1;
    assert_eq!(embedded["data"].as_array().expect("two").len(), 2);
}

#[tokio::test]
async fn the_bootstrap_server_is_a_readiness_probe() {
    let mut config = SimEngineOptions::new(SimRole::Prefill, SimProtocol::Sglang).fast();
    config.ready_after = Duration::from_millis(300);
    config.dp_size = 2;
    let engine = SimEngine::start(config).await.expect("an engine");
    let base = format!("http://{}", engine.bootstrap_addr().expect("a prefill engine"));
    let route =
        format!("{base}/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1");
    assert_eq!(client().get(&route).send().await.expect("a response").status(), 503);
    let ready = async {
        loop {
            let response = client().get(&route).send().await.expect("a response");
            if response.status() == 200 {
                return response.json::<Value>().await.expect("JSON");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let info = tokio::time::timeout(super::LONG, ready).await.expect("ready");
    assert_eq!((&info["dp_size"], &info["prefill_http_port"]), (&json!(2), &json!(engine.addr().port())));
    let register =
        client().post(format!("{base}/register_dp_rank")).json(&json!({"bootstrap_room": 5, "dp_rank": 0}));
    assert_eq!(register.send().await.expect("a response").status(), 200);
    let query = client().post(format!("{base}/query_dp_ranks")).json(&json!({"bootstrap_rooms": [5, 6]}));
    assert_eq!(query.send().await.expect("a response").json::<Value>().await.expect("JSON"), json!({"5": 0}));
}

#[tokio::test]
async fn tool_calls_are_complete_and_streamed() {
    for protocol in [SimProtocol::Sglang, SimProtocol::Vllm] {
        let engine = start(SimRole::Plain, protocol).await;
        let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]);
        let body = with(&chat("please call_tool now", 50), json!({"tools": tools}));
        let (_, whole) = post(&engine, "/v1/chat/completions", &body).await;
        let call = &whole["choices"][0]["message"]["tool_calls"][0];
        assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
        assert_eq!(call["function"]["name"], "weather");
        let streamed = events(&engine, "/v1/chat/completions", &with(&body, json!({"stream": true}))).await;
        let arguments: String = streamed
            .iter()
            .filter_map(|event| {
                event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"].as_str()
            })
            .collect();
        assert_eq!(json!(arguments), call["function"]["arguments"]);
        assert!(serde_json::from_str::<Value>(&arguments).expect("JSON")["city"].is_string());
        // Without a trigger, it generates text.
        let (_, prose) =
            post(&engine, "/v1/chat/completions", &with(&chat("hello", 5), json!({"tools": tools}))).await;
        assert!(!content(&prose).is_empty());
    }
}

#[tokio::test]
async fn limits_stops_and_history_are_honoured() {
    let engine = start(SimRole::Plain, SimProtocol::Sglang).await;
    let first = chat("tell me a long story, page after page", 200);
    let (_, response) = post(&engine, "/v1/chat/completions", &first).await;
    let output = content(&response).to_owned();
    assert_eq!((output.len(), &response["usage"]["completion_tokens"]), (800, &json!(200)));
    let stop = &output[40..44];
    let (_, stopped) = post(&engine, "/v1/chat/completions", &with(&first, json!({"stop": [stop]}))).await;
    assert_eq!(
        (&stopped["choices"][0]["finish_reason"], &stopped["choices"][0]["matched_stop"]),
        (&json!("stop"), &json!(stop))
    );
    assert!(output.starts_with(content(&stopped)) && content(&stopped).len() <= 40);
    // The next turn finds the prompt and the response in the cache.
    let history = json!({"model": "sim", "max_tokens": 1, "messages": [
        first["messages"][0], {"role": "assistant", "content": output}, {"role": "user", "content": "and then?"}]});
    let (_, next) = post(&engine, "/v1/chat/completions", &history).await;
    assert_eq!(next["usage"]["prompt_tokens_details"]["cached_tokens"], 192);
    // A flushed cache and another tenant's salt give no hits.
    let salted = with(&history, json!({"cache_salt": "tenant"}));
    assert_eq!(
        post(&engine, "/v1/chat/completions", &salted).await.1["usage"]["prompt_tokens_details"]["cached_tokens"],
        0
    );
    client().post(format!("{}/flush_cache", engine.url())).send().await.expect("a response");
    assert_eq!(
        post(&engine, "/v1/chat/completions", &history).await.1["usage"]["prompt_tokens_details"]["cached_tokens"],
        0
    );
}
