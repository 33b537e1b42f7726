//! Pairs generate the same output as a single engine, with every protocol, and fail as real pairs do.

use std::time::{Duration, Instant};

use moongate_loadtest::engine::{
    SharedL3Store, SimEngine, SimEngineOptions, SimProtocol, SimRole, VllmConnector,
};
use serde_json::{Value, json};

use super::{LONG, bootstrap, chat, content, events, post, start, start_vllm, with};

async fn sglang_pair() -> (SimEngine, SimEngine, SimEngine) {
    tokio::join!(
        start(SimRole::Prefill, SimProtocol::Sglang),
        start(SimRole::Decode, SimProtocol::Sglang),
        start(SimRole::Plain, SimProtocol::Sglang)
    )
}

#[tokio::test]
async fn sglang_pair_generates_the_output_of_one_engine() {
    let (prefill, decode, plain) = sglang_pair().await;
    let body = chat("Tell me about the moon, at some length please.", 12);
    let paired = with(&body, bootstrap(&prefill, &json!(4_611_686_018_427_387_904_u64)));
    let (first, second) = tokio::join!(
        post(&prefill, "/v1/chat/completions", &paired),
        post(&decode, "/v1/chat/completions", &paired)
    );
    let (_, alone) = post(&plain, "/v1/chat/completions", &body).await;
    assert_eq!((first.0, second.0), (200, 200));
    assert_eq!(content(&second.1), content(&alone));
    assert_eq!(second.1["usage"], alone["usage"]);
    assert_eq!(first.1["usage"]["completion_tokens"], 1);
    assert_eq!(first.1["choices"][0]["finish_reason"], "length");
    assert!(content(&alone).starts_with(content(&first.1)));

    let streaming = with(&body, json!({"stream": true, "stream_options": {"include_usage": true}}));
    let paired = with(&streaming, bootstrap(&prefill, &json!(7)));
    let (first, second) = tokio::join!(
        events(&prefill, "/v1/chat/completions", &paired),
        events(&decode, "/v1/chat/completions", &paired)
    );
    let output: String =
        second.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(output, content(&alone));
    assert_eq!(second.last().expect("usage")["usage"]["completion_tokens"], 12);
    assert_eq!(first.last().expect("usage")["usage"]["completion_tokens"], 1);
    assert_eq!(
        (prefill.stats().kv_sent, decode.stats().kv_received, decode.stats().prompt_mismatches),
        (2, 2, 0)
    );
}

#[tokio::test]
async fn sglang_batches_and_choices_have_a_room_each() {
    let (prefill, decode, plain) = sglang_pair().await;
    let two = chat("two answers", 5);
    let two = with(&two, json!({"n": 2}));
    let batch = json!({"input_ids": [[1, 2, 3], [4, 5, 6]], "sampling_params": {"max_new_tokens": 5}});
    let host = bootstrap(&prefill, &json!(0));
    let lists = |rooms: Value| {
        json!({"bootstrap_host": [host["bootstrap_host"], host["bootstrap_host"]],
               "bootstrap_port": [host["bootstrap_port"], host["bootstrap_port"]], "bootstrap_room": rooms})
    };
    for (path, body, pair) in [
        ("/v1/chat/completions", &two, lists(json!([11, 12]))),
        ("/generate", &batch, lists(json!([21, 22]))),
        ("/generate", &batch, bootstrap(&prefill, &json!(31))),
    ] {
        let paired = with(body, pair);
        let (first, second) = tokio::join!(post(&prefill, path, &paired), post(&decode, path, &paired));
        let (_, alone) = post(&plain, path, body).await;
        assert_eq!((first.0, second.0), (200, 200), "{path}");
        let texts = |response: &Value| -> Vec<Value> {
            let parts = response.get("choices").unwrap_or(response).as_array().expect("parts").clone();
            parts.iter().map(|part| part.get("text").unwrap_or(&part["message"]["content"]).clone()).collect()
        };
        assert_eq!(texts(&second.1), texts(&alone), "{path}");
        assert_ne!(texts(&alone)[0], texts(&alone)[1]);
    }
}

#[tokio::test]
async fn an_sglang_leg_without_room_is_refused() {
    let (prefill, decode, _) = sglang_pair().await;
    for engine in [&prefill, &decode] {
        let (status, response) = post(engine, "/v1/chat/completions", &chat("hi", 1)).await;
        assert_eq!(status, 400);
        assert_eq!(
            response["message"],
            "Invalid request: Disaggregated request received without bootstrap room id"
        );
        assert_eq!(post(engine, "/generate", &json!({"text": "hi"})).await.0, 400);
    }
}

#[tokio::test]
async fn different_prompts_in_one_room_give_wrong_output() {
    let (prefill, decode, plain) = sglang_pair().await;
    let pair = bootstrap(&prefill, &json!(3));
    let (wrong, body) = (with(&chat("another question", 8), pair.clone()), chat("the question", 8));
    let right = with(&body, pair);
    let (_, second) = tokio::join!(
        post(&prefill, "/v1/chat/completions", &wrong),
        post(&decode, "/v1/chat/completions", &right)
    );
    let (_, alone) = post(&plain, "/v1/chat/completions", &body).await;
    assert_eq!(second.0, 200);
    assert_ne!(content(&second.1), content(&alone));
    assert_eq!(decode.stats().prompt_mismatches, 1);
}

#[tokio::test]
async fn missing_leg_times_out_the_other_leg() {
    let mut config = SimEngineOptions::new(SimRole::Prefill, SimProtocol::Sglang).fast();
    config.bootstrap_timeout = Some(Duration::from_millis(200));
    let prefill = SimEngine::start(config.clone()).await.expect("an engine");
    config.role = SimRole::Decode;
    let decode = SimEngine::start(config.clone()).await.expect("an engine");
    let body = with(&chat("alone", 2), bootstrap(&prefill, &json!(1)));
    let started = Instant::now();
    let (first, second) = (
        post(&prefill, "/v1/chat/completions", &body).await,
        post(&decode, "/v1/chat/completions", &with(&body, json!({"bootstrap_room": 2}))).await,
    );
    assert_eq!((first.0, second.0), (500, 500));
    assert!(started.elapsed() >= Duration::from_millis(400));
    let failed = events(&decode, "/v1/chat/completions", &with(&body, json!({"stream": true}))).await;
    assert_eq!(failed[0]["error"]["code"], 500);

    (config.bootstrap_timeout, config.handshake_timeout) = (None, Duration::from_millis(200));
    let decode = SimEngine::start(config).await.expect("an engine");
    prefill.stop().await;
    let (status, response) = post(&decode, "/v1/chat/completions", &body).await;
    assert_eq!(status, 500);
    let message = response["message"].as_str().expect("a message").to_owned();
    assert!(message.contains("Could not fetch prefill parallel info"), "{message}");
}

#[tokio::test]
async fn room_selects_the_rank_and_a_conflict_fails_both_legs() {
    let mut config = SimEngineOptions::new(SimRole::Prefill, SimProtocol::Sglang).fast();
    config.dp_size = 4;
    let prefill = SimEngine::start(config).await.expect("an engine");
    let decode = start(SimRole::Decode, SimProtocol::Sglang).await;
    for (room, more, status) in [
        (6_u64, json!({}), 200),
        (8, json!({"routed_dp_rank": 3, "disagg_prefill_dp_rank": 3}), 200),
        (9, json!({"routed_dp_rank": 3}), 500),
    ] {
        let body = with(&chat("ranks", 2), bootstrap(&prefill, &json!(room)));
        let to_prefill = with(&body, more.clone());
        // The decode engine has one rank and gets only the prefill's rank.
        let rank = more.get("disagg_prefill_dp_rank").cloned().unwrap_or_default();
        let to_decode = with(&body, json!({"disagg_prefill_dp_rank": rank}));
        let (first, second) = tokio::join!(
            post(&prefill, "/v1/chat/completions", &to_prefill),
            post(&decode, "/v1/chat/completions", &to_decode)
        );
        assert_eq!((first.0, second.0), (status, status), "room {room}: {} {}", first.1, second.1);
    }
    assert_eq!(prefill.stats().by_dp_rank, [0, 0, 1, 2]);
    let out_of_range =
        with(&chat("x", 1), with(&bootstrap(&prefill, &json!(1)), json!({"routed_dp_rank": 4})));
    assert_eq!(post(&prefill, "/v1/chat/completions", &out_of_range).await.0, 400);
}

const COMPLETION: &str = "The moon is a harsh mistress and a long prompt fills more than one block of it.";

#[tokio::test]
async fn nixl_pair_generates_the_output_of_one_engine() {
    let fleet = SharedL3Store::default();
    let prefill = start_vllm(SimRole::Prefill, VllmConnector::Nixl, &fleet).await;
    let decode = start_vllm(SimRole::Decode, VllmConnector::Nixl, &fleet).await;
    let plain = start_vllm(SimRole::Plain, VllmConnector::Nixl, &fleet).await;
    let body = json!({"model": "sim", "prompt": COMPLETION, "max_tokens": 9});
    let asked = json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                       "remote_block_ids": null, "remote_host": null, "remote_port": null});
    let (status, first) = post(
        &prefill,
        "/v1/completions",
        &with(&body, json!({"max_tokens": 1, "kv_transfer_params": asked})),
    )
    .await;
    assert_eq!(status, 200);
    let params = first["kv_transfer_params"].clone();
    let (status, second) =
        post(&decode, "/v1/completions", &with(&body, json!({"kv_transfer_params": params}))).await;
    let (_, alone) = post(&plain, "/v1/completions", &body).await;
    assert_eq!(status, 200);
    assert_eq!(second["choices"][0]["text"], alone["choices"][0]["text"]);
    assert_eq!(decode.stats().recomputed, 0);

    // The blocks are released once they were pulled.
    assert!(prefill.wait_for(LONG, |stats| stats.kv_sent == 1).await);
    let (status, response) =
        post(&decode, "/v1/completions", &with(&body, json!({"kv_transfer_params": params}))).await;
    assert_eq!((status, &response["error"]["message"]), (500, &json!("Internal server error")));

    // Without parameters the decode engine computes the prompt itself, without any indication.
    let (status, silent) = post(&decode, "/v1/completions", &body).await;
    assert_eq!((status, &silent["choices"][0]["text"]), (200, &alone["choices"][0]["text"]));
    assert_eq!(decode.stats().recomputed, 1);
}

#[tokio::test]
async fn mooncake_pair_joins_in_any_order_and_rejects_old_id() {
    let fleet = SharedL3Store::default();
    let prefill = start_vllm(SimRole::Prefill, VllmConnector::Mooncake, &fleet).await;
    let decode = start_vllm(SimRole::Decode, VllmConnector::Mooncake, &fleet).await;
    let plain = start_vllm(SimRole::Plain, VllmConnector::Mooncake, &fleet).await;
    let bootstrap = format!("http://{}", prefill.bootstrap_addr().expect("a prefill engine"));
    let query: Value = super::client()
        .get(format!("{bootstrap}/query"))
        .send()
        .await
        .expect("a response")
        .json()
        .await
        .expect("JSON");
    assert_eq!(query["0"]["engine_id"], prefill.engine_id());
    assert!(query["0"]["worker_addr"]["0"]["0"].as_str().expect("an address").starts_with("tcp://"));

    let body = json!({"model": "sim", "prompt": COMPLETION, "max_tokens": 9});
    let (_, alone) = post(&plain, "/v1/completions", &body).await;
    let legs = |id: &str, engine_id: &str| {
        let sent = json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id});
        let pull_params = json!({"do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id,
                           "remote_bootstrap_addr": bootstrap, "remote_engine_id": engine_id});
        (
            with(&body, json!({"max_tokens": 1, "kv_transfer_params": sent})),
            with(&body, json!({"kv_transfer_params": pull_params})),
        )
    };
    let (to_prefill, to_decode) = legs("xfer-1", prefill.engine_id());
    let (second, first) = tokio::join!(
        post(&decode, "/v1/completions", &to_decode),
        post(&prefill, "/v1/completions", &to_prefill)
    );
    assert_eq!((first.0, second.0), (200, 200));
    assert_eq!(first.1["kv_transfer_params"], Value::Null);
    assert_eq!(second.1["choices"][0]["text"], alone["choices"][0]["text"]);
    let usage = &second.1["usage"];
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]);

    let (_, to_decode) = legs("xfer-2", "00000000-0000-4000-a000-000000000000");
    assert_eq!(post(&decode, "/v1/completions", &to_decode).await.0, 500);
    let incomplete = with(&body, json!({"kv_transfer_params": {"do_remote_prefill": true}}));
    let (status, recomputed) = post(&decode, "/v1/completions", &incomplete).await;
    assert_eq!((status, &recomputed["choices"][0]["text"]), (200, &alone["choices"][0]["text"]));
}

#[tokio::test]
async fn engines_of_a_fleet_share_the_store() {
    let fleet = SharedL3Store::new(100_000);
    let prefill = start_vllm(SimRole::Prefill, VllmConnector::Store, &fleet).await;
    let decode = start_vllm(SimRole::Decode, VllmConnector::Store, &fleet).await;
    let body = json!({"model": "sim", "prompt": vec![7; 100], "max_tokens": 6});
    let (_, first) = post(&prefill, "/v1/completions", &with(&body, json!({"max_tokens": 1}))).await;
    let (_, second) = post(&decode, "/v1/completions", &body).await;
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    // Six blocks of 16; at least one token is computed.
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], 96);
    assert_eq!(decode.stats().cached_storage_tokens, 96);
    assert!(
        second["choices"][0]["text"]
            .as_str()
            .expect("text")
            .starts_with(first["choices"][0]["text"].as_str().expect("text"))
    );
}

#[tokio::test]
async fn sglang_reads_the_store_only_for_long_prefixes() {
    let fleet = SharedL3Store::new(100_000);
    let mut config = SimEngineOptions::new(SimRole::Plain, SimProtocol::Sglang).fast();
    (config.use_storage, config.page_size) = (true, 32);
    let first = SimEngine::start_with_store(config.clone(), &fleet).await.expect("an engine");
    let second = SimEngine::start_with_store(config, &fleet).await.expect("an engine");
    for (length, expected) in [(257, 256), (65, 0)] {
        let body = json!({"input_ids": vec![length; length], "sampling_params": {"max_new_tokens": 1}});
        post(&first, "/generate", &body).await;
        let (_, response) = post(&second, "/generate", &body).await;
        assert_eq!(response["meta_info"]["cached_tokens"], expected, "{length} tokens");
    }
}
