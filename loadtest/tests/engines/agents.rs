//! The APIs of agents: Messages and Responses have the events and members of the engines' own conversions, the prompts of
//! equal chat completions, and work in pairs.

use moongate_loadtest::engine::{
    EngineFault, SharedL3Store, SimEngine, SimEngineOptions, SimProtocol, SimRole, VllmConnector,
};
use serde_json::{Value, json};

use super::{LONG, bootstrap, chat, client, content, get, post, recording, start, start_vllm, with};

const PROTOCOLS: [SimProtocol; 2] = [SimProtocol::Sglang, SimProtocol::Vllm];
const PATHS: [&str; 2] = ["/v1/messages", "/v1/responses"];

/// Members whose values depend on the model, its tokens or the time.
const MASKED: [&str; 12] = [
    "arguments",
    "call_id",
    "cache_read_input_tokens",
    "created_at",
    "id",
    "item_id",
    "partial_json",
    "sequence_number",
    "signature",
    "text",
    "thinking",
    "max_output_tokens",
];

/// The value without what depends on the model.
fn masked(value: &Value) -> Value {
    match value {
        Value::Object(members) => {
            let members = members.iter().map(|(name, value)| {
                let is_text_delta = name == "delta" && value.is_string();
                let is_input = name == "input";
                let is_count = name.ends_with("_tokens") && value.is_number();
                let is_masked = !value.is_object() && MASKED.contains(&name.as_str());
                let hide = is_input || is_text_delta || is_count || is_masked;
                (name.clone(), if hide { json!("masked") } else { masked(value) })
            });
            Value::Object(members.collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(masked).collect()),
        other => other.clone(),
    }
}

/// The masked events; the deltas of one part count once.
fn shapes(events: &[Value]) -> Vec<Value> {
    let mut shapes: Vec<Value> = events.iter().map(masked).collect();
    shapes.dedup();
    shapes
}

/// Events, of which each has its type in a line of its own.
fn parsed_events(text: &str) -> Vec<Value> {
    let events = text.split_terminator("\n\n").map(|event| {
        let (name, data) = event.split_once('\n').expect("two lines");
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        data
    });
    events.collect()
}

async fn named_events(engine: &SimEngine, path: &str, body: &Value) -> Vec<Value> {
    let response =
        client().post(format!("{}{path}", engine.url())).json(body).send().await.expect("a response");
    assert_eq!(response.status(), 200);
    parsed_events(&response.text().await.expect("a whole stream"))
}

/// A Messages or Responses request that equals a chat completion.
fn request(path: &str, text: &str, max_tokens: u32) -> Value {
    if path == "/v1/messages" {
        return chat(text, max_tokens);
    }
    json!({"model": "sim", "input": text, "max_output_tokens": max_tokens, "store": false})
}

/// All text of a response.
fn text(response: &Value) -> String {
    let blocks = response.get("output").unwrap_or(&response["content"]).as_array().expect("blocks");
    let parts = blocks.iter().flat_map(|block| match block["content"].as_array() {
        Some(parts) => parts.clone(),
        None => vec![block.clone()],
    });
    parts.filter_map(|part| part["text"].as_str().map(str::to_owned)).collect()
}

#[tokio::test]
async fn events_and_responses_are_those_of_the_engines() {
    for (protocol, name) in [(SimProtocol::Sglang, "sglang"), (SimProtocol::Vllm, "vllm")] {
        let engine = start(SimRole::Plain, protocol).await;
        for path in PATHS {
            let rows = recording(&format!("{name}-{}", path.rsplit('/').next().expect("a name")));
            for row in rows.iter().filter(|row| row["name"] != "failed") {
                let case = format!("{name} {path} {}", row["name"]);
                match row["events"].as_array() {
                    Some(recorded) => {
                        let simulated = named_events(&engine, path, &row["request"]).await;
                        let (recorded, simulated) = (shapes(recorded), shapes(&simulated));
                        for (recorded, simulated) in recorded.iter().zip(&simulated) {
                            assert_eq!(simulated, recorded, "{case}");
                        }
                        assert_eq!(simulated.len(), recorded.len(), "{case}");
                    }
                    None => {
                        let (status, simulated) = post(&engine, path, &row["request"]).await;
                        assert_eq!((status, masked(&simulated)), (200, masked(&row["response"])), "{case}");
                    }
                }
            }
        }
    }
}

#[tokio::test]
async fn equal_requests_have_equal_prompts() {
    for protocol in PROTOCOLS {
        let engine = start(SimRole::Plain, protocol).await;
        let prompt = "the same prompt, long enough for several pages of cache. ".repeat(20);
        let (_, whole) = post(&engine, "/v1/chat/completions", &chat(&prompt, 8)).await;
        let (_, message) = post(&engine, "/v1/messages", &request("/v1/messages", &prompt, 8)).await;
        let (_, object) = post(&engine, "/v1/responses", &request("/v1/responses", &prompt, 8)).await;
        assert_eq!((text(&message).as_str(), text(&object).as_str()), (content(&whole), content(&whole)));
        let cached = message["usage"]["cache_read_input_tokens"].as_u64().expect("cached tokens");
        let total = message["usage"]["input_tokens"].as_u64().expect("input tokens") + cached;
        assert!(cached > 0);
        assert_eq!(json!(total), whole["usage"]["prompt_tokens"]);
        assert_eq!(object["usage"]["input_tokens"], json!(total));
        assert_eq!(object["usage"]["input_tokens_details"]["cached_tokens"], json!(cached));
        let (_, counted) = post(&engine, "/v1/messages/count_tokens", &chat(&prompt, 8)).await;
        assert_eq!(counted["input_tokens"], json!(total));
    }
}

/// A conversation with a tool: the call, its result, and the text after it, which continues the cached prefix.
#[tokio::test]
async fn tool_results_continue_the_conversation() {
    for protocol in PROTOCOLS {
        let engine = start(SimRole::Plain, protocol).await;
        let long = format!("please call_tool for {}", "this city ".repeat(60));
        let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
        let mut body = with(
            &request("/v1/messages", &long, 50),
            json!({"tools": [{"name": "weather", "input_schema": schema}], "thinking": {"type": "adaptive"}}),
        );
        let (_, first) = post(&engine, "/v1/messages", &body).await;
        let call = &first["content"][1];
        assert_eq!((&first["content"][0]["type"], &call["type"]), (&json!("thinking"), &json!("tool_use")));
        let turns = body["messages"].as_array_mut().expect("messages");
        turns.push(json!({"role": "assistant", "content": first["content"]}));
        turns.push(json!({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}]}));
        let (_, second) = post(&engine, "/v1/messages", &body).await;
        assert_eq!((second["content"][1]["type"].clone(), text(&second).is_empty()), (json!("text"), false));
        assert!(second["usage"]["cache_read_input_tokens"].as_u64() >= Some(128), "{second}");

        let tool = json!({"type": "function", "name": "weather", "parameters": schema});
        let mut body = with(&request("/v1/responses", &long, 50), json!({"tools": [tool]}));
        let (_, first) = post(&engine, "/v1/responses", &body).await;
        let call = first["output"][0].clone();
        assert_eq!(call["type"], "function_call");
        let result = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"});
        body["input"] = json!([{"role": "user", "content": long}, call, result]);
        let (_, second) = post(&engine, "/v1/responses", &body).await;
        assert_eq!(second["output"][0]["type"], "message");
    }
}

#[tokio::test]
async fn pairs_serve_agents_as_one_engine_does() {
    let prompt = "describe the moon to an agent, at some length";
    let (vllm, fleet) = (start(SimRole::Plain, SimProtocol::Vllm).await, SharedL3Store::default());
    let prefill = start_vllm(SimRole::Prefill, VllmConnector::Nixl, &fleet).await;
    let decode = start_vllm(SimRole::Decode, VllmConnector::Nixl, &fleet).await;
    for path in PATHS {
        let leg = json!({"kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false}});
        let (_, first) = post(&prefill, path, &with(&request(path, prompt, 1), leg)).await;
        let params = &first["kv_transfer_params"];
        assert_eq!(params["do_remote_prefill"], true, "{first}");
        let body = request(path, prompt, 12);
        let paired = with(&body, json!({"kv_transfer_params": params}));
        let (status, second) = post(&decode, path, &paired).await;
        let (_, alone) = post(&vllm, path, &body).await;
        assert_eq!((status, text(&second)), (200, text(&alone)), "{path}");
    }
    assert_eq!((decode.stats().kv_received, decode.stats().prompt_mismatches), (2, 0));

    let (sglang, prefill, decode) = tokio::join!(
        start(SimRole::Plain, SimProtocol::Sglang),
        start(SimRole::Prefill, SimProtocol::Sglang),
        start(SimRole::Decode, SimProtocol::Sglang)
    );
    for (room, path) in PATHS.into_iter().enumerate() {
        let body = request(path, prompt, 12);
        assert_eq!(post(&decode, path, &body).await.0, 400, "{path}");
        let paired = with(&body, bootstrap(&prefill, &json!(room)));
        let (first, second) = tokio::join!(post(&prefill, path, &paired), post(&decode, path, &paired));
        let (_, alone) = post(&sglang, path, &body).await;
        assert_eq!((first.0, second.0, text(&second.1)), (200, 200, text(&alone)), "{path}");
    }
    assert_eq!((decode.stats().kv_received, decode.stats().prompt_mismatches), (2, 0));
}

async fn with_response_store(protocol: SimProtocol, time_scale: f64) -> SimEngine {
    let mut config = SimEngineOptions::new(SimRole::Plain, protocol);
    (config.response_store, config.time_scale) = (true, time_scale);
    SimEngine::start(config).await.expect("an engine")
}

#[tokio::test]
async fn stored_responses_are_continued_and_retrieved() {
    for protocol in PROTOCOLS {
        let engine = with_response_store(protocol, 1_000.0).await;
        let body = json!({"model": "sim", "input": "first", "max_output_tokens": 5});
        let (_, first) = post(&engine, "/v1/responses", &body).await;
        assert_eq!(
            get(&engine, &format!("/v1/responses/{}", first["id"].as_str().expect("an id"))).await,
            first
        );
        let next = json!({"model": "sim", "input": "and?", "max_output_tokens": 5,
                          "previous_response_id": first["id"]});
        let (_, second) = post(&engine, "/v1/responses", &next).await;
        let conversation = json!([{"role": "user", "content": "first"},
            {"role": "assistant", "content": text(&first)}, {"role": "user", "content": "and?"}]);
        let (_, whole) = post(&engine, "/v1/responses", &with(&body, json!({"input": conversation}))).await;
        let prompt = |response: &Value| response["usage"]["input_tokens"].clone();
        assert_eq!((text(&second), prompt(&second)), (text(&whole), prompt(&whole)), "{protocol:?}");

        let (_, unstored) = post(&engine, "/v1/responses", &with(&body, json!({"store": false}))).await;
        let missing = with(&next, json!({"previous_response_id": unstored["id"]}));
        let (status, error) = post(&engine, "/v1/responses", &missing).await;
        assert_eq!((status, &error["error"]["param"]), (404, &json!("response_id")), "{error}");
        let streamed = named_events(&engine, "/v1/responses", &with(&body, json!({"stream": true}))).await;
        let last = &streamed.last().expect("events")["response"];
        assert_eq!(
            get(&engine, &format!("/v1/responses/{}", last["id"].as_str().expect("an id"))).await,
            *last
        );
    }
}

#[tokio::test]
async fn without_store_nothing_is_continued_or_retrieved() {
    for (protocol, status) in [(SimProtocol::Sglang, 400), (SimProtocol::Vllm, 404)] {
        let engine = start(SimRole::Plain, protocol).await;
        let (_, first) = post(&engine, "/v1/responses", &json!({"model": "sim", "input": "hi"})).await;
        let next = json!({"model": "sim", "input": "and?", "previous_response_id": first["id"]});
        assert_eq!(post(&engine, "/v1/responses", &next).await.0, status);
        let url = format!("{}/v1/responses/{}", engine.url(), first["id"].as_str().expect("an id"));
        assert_eq!(client().get(url).send().await.expect("a response").status(), status);
        let background = json!({"model": "sim", "input": "hi", "background": true});
        assert_eq!(post(&engine, "/v1/responses", &background).await.0, 400);
    }
}

#[tokio::test]
async fn background_responses_run_and_are_cancelled() {
    for protocol in PROTOCOLS {
        let engine = with_response_store(protocol, 1_000.0).await;
        let body = json!({"model": "sim", "input": "hi", "max_output_tokens": 4, "background": true});
        let (_, queued) = post(&engine, "/v1/responses", &body).await;
        assert_eq!((&queued["status"], &queued["usage"]), (&json!("queued"), &Value::Null));
        assert!(engine.wait_for(LONG, |stats| stats.finished == 1).await);
        let path = format!("/v1/responses/{}", queued["id"].as_str().expect("an id"));
        assert_eq!(get(&engine, &path).await["status"], "incomplete");
        let (status, again) = post(&engine, &format!("{path}/cancel"), &json!({})).await;
        match protocol {
            SimProtocol::Sglang => assert_eq!((status, &again["status"]), (200, &json!("incomplete"))),
            SimProtocol::Vllm => assert_eq!((status, &again["error"]["param"]), (400, &json!("response_id"))),
        }

        let engine = with_response_store(protocol, 1.0).await;
        let (_, queued) =
            post(&engine, "/v1/responses", &with(&body, json!({"max_output_tokens": 9_000}))).await;
        let path = format!("/v1/responses/{}", queued["id"].as_str().expect("an id"));
        let (status, cancelled) = post(&engine, &format!("{path}/cancel"), &json!({})).await;
        assert_eq!((status, &cancelled["status"]), (200, &json!("cancelled")));
        assert!(engine.wait_for(LONG, |stats| stats.aborted_by_rid == 1 && stats.active == 0).await);
        assert_eq!(get(&engine, &path).await["status"], "cancelled");
    }
}

#[tokio::test]
async fn errors_have_the_format_of_the_api() {
    let (sglang, vllm) =
        (start(SimRole::Plain, SimProtocol::Sglang).await, start(SimRole::Plain, SimProtocol::Vllm).await);
    let other = |path: &str| with(&request(path, "hi", 1), json!({"model": "other"}));
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let (status, error) = post(&vllm, path, &other("/v1/messages")).await;
        let expected = json!({"type": "NotFoundError",
                              "message": "The model `other` does not exist. Valid aliases: sim."});
        assert_eq!((status, &error["type"], &error["error"]), (404, &json!("error"), &expected));
        // SGLang serves any name.
        assert_eq!(post(&sglang, path, &other("/v1/messages")).await.0, 200);
    }
    let (status, error) = post(&vllm, "/v1/responses", &other("/v1/responses")).await;
    assert_eq!((status, &error["error"]["type"]), (404, &json!("NotFoundError")));
    let (status, error) = post(&sglang, "/v1/responses", &other("/v1/responses")).await;
    assert_eq!((status, &error["error"]["type"]), (404, &json!("invalid_request_error")));

    let incomplete = json!({"model": "sim", "messages": [{"role": "user", "content": "hi"}]});
    let (status, error) = post(&sglang, "/v1/messages", &incomplete).await;
    assert_eq!((status, &error["error"]["type"]), (400, &json!("invalid_request_error")));
    // vLLM validates bodies before its handler.
    let (status, error) = post(&vllm, "/v1/messages", &incomplete).await;
    assert_eq!(
        (status, &error["error"]["type"], &error["error"]["param"]),
        (400, &json!("Bad Request"), &json!("max_tokens"))
    );
    vllm.set_fault(EngineFault::Status500);
    let (status, error) = post(&vllm, "/v1/messages", &request("/v1/messages", "hi", 1)).await;
    assert_eq!((status, &error["error"]["type"]), (500, &json!("InternalServerError")));
}

/// Decode legs whose prefill engine does not exist.
#[tokio::test]
async fn failed_streams_end_as_those_of_the_engines() {
    let vllm = start_vllm(SimRole::Decode, VllmConnector::Nixl, &SharedL3Store::default()).await;
    let lost = json!({"stream": true, "kv_transfer_params": {"do_remote_prefill": true, "remote_engine_id": "e",
        "remote_host": "127.0.0.1", "remote_port": 9, "remote_request_id": "r"}});
    let body = |path: &str| with(&request(path, "hi", 4), lost.clone());
    let events = named_events(&vllm, "/v1/messages", &body("/v1/messages")).await;
    assert_eq!((events.len(), &events[0]["error"]["type"]), (1, &json!("internal_error")));
    let url = format!("{}/v1/responses", vllm.url());
    let broken = client().post(url).json(&body("/v1/responses")).send().await.expect("a response");
    assert!(broken.text().await.is_err(), "vLLM's error is no event of this API, and breaks the stream");

    let mut config = SimEngineOptions::new(SimRole::Decode, SimProtocol::Sglang).fast();
    config.handshake_timeout = std::time::Duration::from_millis(50);
    let sglang = SimEngine::start(config).await.expect("an engine");
    let lost =
        json!({"stream": true, "bootstrap_host": "127.0.0.1", "bootstrap_port": 9, "bootstrap_room": 1});
    let body = |path: &str| with(&request(path, "hi", 4), lost.clone());
    let events = named_events(&sglang, "/v1/messages", &body("/v1/messages")).await;
    let types: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
    assert_eq!(types, ["message_start", "error", "message_stop"]);
    let events = named_events(&sglang, "/v1/responses", &body("/v1/responses")).await;
    let last = &events.last().expect("events")["response"];
    assert_eq!(
        (events.len(), &last["status"], &last["error"]["code"]),
        (3, &json!("failed"), &json!("server_error"))
    );
}

#[tokio::test]
async fn rendered_prompts_are_those_that_are_computed() {
    let mut config = SimEngineOptions::new(SimRole::Plain, SimProtocol::Vllm).fast();
    config.scale_out = true;
    let engine = SimEngine::start(config).await.expect("an engine");
    let (_, expected) = post(&engine, "/v1/chat/completions/render", &chat("hi there", 4)).await;
    for path in PATHS {
        let (status, rendered) =
            post(&engine, &format!("{path}/render"), &request(path, "hi there", 4)).await;
        assert_eq!((status, &rendered["token_ids"]), (200, &expected["token_ids"]), "{path}");
    }
}

#[tokio::test]
async fn canned_endpoints_respond_and_check_the_model() {
    let paths = [
        ("/rerank", json!({"query": "a", "documents": ["b", "c"]}), "results"),
        ("/v1/rerank", json!({"query": "a", "documents": ["b", "c"]}), "results"),
        ("/v2/rerank", json!({"query": "a", "documents": ["b", "c"]}), "results"),
        ("/score", json!({"text_1": "a", "text_2": ["b", "c"]}), "data"),
        ("/v1/score", json!({"queries": "a", "documents": ["b", "c"]}), "data"),
        ("/classify", json!({"input": ["b", "c"]}), "data"),
        ("/pooling", json!({"input": ["b", "c"]}), "data"),
        ("/v1/embeddings", json!({"input": ["b", "c"]}), "data"),
        ("/v1/images/generations", json!({"prompt": "moon", "n": 2}), "data"),
    ];
    let engine = start(SimRole::Plain, SimProtocol::Vllm).await;
    for (path, body, list) in paths {
        let (status, response) = post(&engine, path, &with(&body, json!({"model": "sim"}))).await;
        assert_eq!((status, response[list].as_array().map(Vec::len)), (200, Some(2)), "{path}: {response}");
        let (status, error) = post(&engine, path, &with(&body, json!({"model": "other"}))).await;
        assert_eq!((status, &error["error"]["code"]), (404, &json!(404)), "{path}");
        assert_eq!(post(&engine, path, &json!({"model": "sim"})).await.0, 400, "{path}");
    }
    for protocol in PROTOCOLS {
        let engine = start(SimRole::Plain, protocol).await;
        let form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nsim\r\n\
            --b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\nsamples\r\n--b--\r\n";
        let url = format!("{}/v1/audio/transcriptions", engine.url());
        let sent = client().post(url).header("content-type", "multipart/form-data; boundary=b").body(form);
        let heard: Value = sent.send().await.expect("a response").json().await.expect("JSON");
        assert_eq!((heard["text"].is_string(), &heard["usage"]["seconds"]), (true, &json!(1)), "{heard}");
    }
}
