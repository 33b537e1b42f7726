//! The APIs that agents use, through pairs of every kind: the same text as a single engine, both legs, and conversations that continue a
//! response by its id.

use moongate_loadtest::engine::{SimEngine, SimEngineOptions, VllmConnector};
use serde_json::{Value, json};

use crate::harness::client_api::ClientApi;
use crate::harness::fleet::{TestFleet, TestFleetBuilder};
use crate::harness::metrics::metric;

/// Every kind of pair.
fn pairs() -> [(&'static str, TestFleetBuilder); 4] {
    [
        ("sglang", TestFleetBuilder::sglang()),
        ("vllm nixl", TestFleetBuilder::vllm(VllmConnector::Nixl)),
        ("vllm mooncake", TestFleetBuilder::vllm(VllmConnector::Mooncake)),
        ("vllm store", TestFleetBuilder::vllm(VllmConnector::Store)),
    ]
}

async fn exchange(fleet: &TestFleet, path: &str, body: &Value) -> (u16, String) {
    let response = fleet.post(path, body.to_string()).await;
    (response.status().as_u16(), response.text().await.unwrap())
}

async fn json_of(fleet: &TestFleet, path: &str, body: &Value) -> Value {
    let (status, text) = exchange(fleet, path, body).await;
    assert_eq!(status, 200, "{path}: {text}");
    serde_json::from_str(&text).unwrap()
}

async fn get(fleet: &TestFleet, path: &str) -> (u16, Value) {
    let response = fleet.client.get(fleet.gateway.url(path)).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// The text of a request's response, streamed or not.
async fn text(fleet: &TestFleet, api: ClientApi, stream: bool) -> String {
    let body = api.body(&fleet.model(), stream, 12);
    let (status, text) = exchange(fleet, api.path(), &body).await;
    assert_eq!(status, 200, "{api:?}: {text}");
    if !stream {
        return api.text(&serde_json::from_str(&text).unwrap()).unwrap();
    }
    assert!(api.is_complete(&text), "{api:?}: {text}");
    let events = text.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = events.filter_map(|event| serde_json::from_str::<Value>(event).ok());
    events.filter_map(|event| api.text_of_event(&event)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pairs_answer_as_one_engine() {
    for ((name, pair), (_, single)) in pairs().into_iter().zip(pairs()) {
        let (pair, single) = (pair.pairs(1).start().await, single.plain(1).start().await);
        for api in [ClientApi::Chat, ClientApi::Responses, ClientApi::Messages] {
            for stream in [false, true] {
                let case = format!("{name}, {api:?}, stream {stream}");
                let before = pair.engines.prefills[0].stats().started;
                assert_eq!(text(&pair, api, stream).await, text(&single, api, stream).await, "{case}");
                assert_eq!(pair.engines.prefills[0].stats().started, before + 1, "{case}: the prefill leg");
                for engine in pair.engines.all() {
                    let stats = engine.stats();
                    assert_eq!((stats.prompt_mismatches, stats.recomputed), (0, 0), "{case}: {stats:?}");
                }
            }
        }
    }
}

/// SGLang before 0.5.23: its pairs have no Messages, so they get chats.
fn old_sglang() -> TestFleetBuilder {
    TestFleetBuilder::sglang()
        .tune(|options| SimEngineOptions { reported_version: Some("0.5.20".to_owned()), ..options.fast() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_translated_for_old_pairs() {
    let (old, new) = (old_sglang().pairs(1).start().await, TestFleetBuilder::sglang().pairs(1).start().await);
    for stream in [false, true] {
        let translated = text(&old, ClientApi::Messages, stream).await;
        assert_eq!(translated, text(&new, ClientApi::Messages, stream).await, "stream {stream}");
        for engine in old.engines.all() {
            assert_eq!(TestFleet::last_request(engine).target, "/v1/chat/completions");
            assert_eq!(engine.stats().prompt_mismatches, 0);
        }
        assert_eq!(TestFleet::last_request(&new.engines.decodes[0]).target, "/v1/messages");
    }
    // A block that a chat cannot express.
    let document = json!({"type": "document", "source": {"type": "url", "url": "https://host/a.pdf"}});
    let mut body = ClientApi::Messages.body(&old.model(), false, 8);
    body["messages"] = json!([{"role": "user", "content": [document]}]);
    let (status, error) = exchange(&old, "/v1/messages", &body).await;
    assert_eq!(status, 400, "{error}");
    assert!(error.contains("messages[0].content[0]"), "{error}");
}

/// The message whose model ends at once: the prefill of a Mooncake pair has dropped the blocks for which its decode would wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_may_end_at_their_first_token() {
    for ((name, pair), (_, single)) in pairs().into_iter().zip(pairs()) {
        let ends =
            |options: SimEngineOptions| SimEngineOptions { ends_at_first_token: true, ..options.fast() };
        let (pair, single) =
            (pair.pairs(1).tune(ends).start().await, single.plain(1).tune(ends).start().await);
        for api in [ClientApi::Chat, ClientApi::Responses, ClientApi::Messages] {
            let case = format!("{name}, {api:?}");
            assert_eq!(text(&pair, api, true).await, text(&single, api, true).await, "{case}");
        }
        let decode = pair.engines.decodes[0].stats();
        let recomputed = u64::from(name == "vllm mooncake");
        assert_eq!((decode.prompt_mismatches, decode.recomputed), (0, recomputed), "{name}: {decode:?}");
    }
}

/// The first turn of a conversation.
async fn first_response(fleet: &TestFleet) -> Value {
    let body = json!({"model": fleet.model(), "input": "Describe the moon gate.", "max_output_tokens": 8});
    json_of(fleet, "/v1/responses", &body).await
}

/// The second turn, which names the first response.
async fn continue_response(fleet: &TestFleet, first: &Value) -> (u16, String) {
    let body = json!({"model": fleet.model(), "input": "And then?", "max_output_tokens": 8,
        "previous_response_id": first["id"]});
    exchange(fleet, "/v1/responses", &body).await
}

/// Stops the engine that has served a request.
async fn stop_used(engines: &mut Vec<SimEngine>) {
    let used = engines.iter().position(|engine| engine.stats().started > 0).unwrap();
    engines.remove(used).stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stored_responses_continue_on_any_pair() {
    for (name, builder) in pairs() {
        // The second turn may be sent to each of the stopped engines first.
        let fleet = builder.pairs(2).flag("--response-store=1048576").flag("--attempts=3");
        let mut fleet = fleet.start().await;
        let first = first_response(&fleet).await;
        stop_used(&mut fleet.engines.prefills).await;
        stop_used(&mut fleet.engines.decodes).await;
        let (status, second) = continue_response(&fleet, &first).await;
        assert_eq!(status, 200, "{name}: {second}");
        let second: Value = serde_json::from_str(&second).unwrap();
        let tokens = |response: &Value| response["usage"]["input_tokens"].as_u64().unwrap();
        assert!(tokens(&second) > tokens(&first) + 8, "{name}: the conversation so far is sent: {second}");

        let path = format!("/v1/responses/{}", second["id"].as_str().unwrap());
        assert_eq!(get(&fleet, &path).await, (200, second), "{name}");
        let (status, items) = get(&fleet, &format!("{path}/input_items")).await;
        assert_eq!((status, items["data"].as_array().unwrap().len()), (200, 3), "{name}: {items}");
        let cancelled = fleet.client.post(fleet.gateway.url(&format!("{path}/cancel"))).send().await.unwrap();
        assert_eq!(cancelled.status(), 400, "{name}: it is complete");
        let deleted = fleet.client.delete(fleet.gateway.url(&path)).send().await.unwrap();
        assert_eq!(deleted.json::<Value>().await.unwrap()["deleted"], true, "{name}");

        let gone = json!({"model": fleet.model(), "input": "Hello?", "previous_response_id": "resp_gone"});
        let (status, error) = exchange(&fleet, "/v1/responses", &gone).await;
        assert_eq!(status, 404, "{name}: {error}");
        assert!(error.contains("response_not_found") && error.contains("resp_gone"), "{name}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streamed_responses_are_stored_too() {
    let fleet = TestFleetBuilder::sglang().pairs(1).flag("--response-store=1048576").start().await;
    let body = ClientApi::Responses.body(&fleet.model(), true, 8);
    let (_, events) = exchange(&fleet, "/v1/responses", &body).await;
    let last = events.lines().filter_map(|line| line.strip_prefix("data: ")).next_back().unwrap();
    let id = serde_json::from_str::<Value>(last).unwrap()["response"]["id"].take();
    let next =
        json!({"model": fleet.model(), "input": "And?", "max_output_tokens": 8, "previous_response_id": id});
    json_of(&fleet, "/v1/responses", &next).await;
    let private = json!({"model": fleet.model(), "input": "Secret.", "max_output_tokens": 8, "store": false});
    let id = json_of(&fleet, "/v1/responses", &private).await["id"].take();
    let next = json!({"model": fleet.model(), "input": "And?", "previous_response_id": id});
    assert_eq!(exchange(&fleet, "/v1/responses", &next).await.0, 404, "`store` was false");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_store_responses_continue_where_they_were_made() {
    for (name, builder) in pairs() {
        let response_store = name != "sglang";
        let stores = move |options: SimEngineOptions| SimEngineOptions { response_store, ..options.fast() };
        let fleet = builder.pairs(2).tune(stores).start().await;
        let first = first_response(&fleet).await;
        let maker = fleet.engines.decodes.iter().position(|decode| decode.stats().started > 0).unwrap();
        let decisions = metric(&fleet, "moongate_decision_seconds_count").await;
        let (status, second) = continue_response(&fleet, &first).await;
        if name == "sglang" {
            assert_eq!(status, 501, "{name}: {second}");
            assert!(
                second.contains("previous_response_id") && second.contains("--response-store"),
                "{second}"
            );
        } else {
            assert_eq!(status, 200, "{name}: {second}");
            assert_eq!(fleet.engines.decodes[maker].stats().started, 2, "{name}: the engine that has it");
            let now = metric(&fleet, "moongate_decision_seconds_count").await;
            assert_eq!(now, decisions + 1, "{name}: its load is recorded by the scheduler");
            let metrics = fleet.client.get(fleet.gateway.admin_url("/metrics")).send().await.unwrap();
            let metrics = metrics.text().await.unwrap();
            let (_, locked) = metrics.split_once("moongate_scheduler_lock_seconds_total ").unwrap();
            let locked: f64 = locked.lines().next().unwrap().parse().unwrap();
            assert!(locked > 0.0 && locked < 60.0, "{name}: {locked} seconds for two requests");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_are_those_of_the_clients_api() {
    let fleet = TestFleetBuilder::sglang().pairs(1).start().await;
    let body = ClientApi::Messages.body("unknown", false, 8);
    let (status, error) = exchange(&fleet, "/v1/messages", &body).await;
    let error: Value = serde_json::from_str(&error).unwrap();
    assert_eq!((status, &error["type"]), (404, &json!("error")));
    assert_eq!(error["error"]["type"], "not_found_error");
    let (status, error) = exchange(&fleet, "/v1/responses", &json!({"model": fleet.model()})).await;
    assert_eq!(status, 400);
    assert_eq!(serde_json::from_str::<Value>(&error).unwrap()["error"]["param"], "input");
}

/// The second turn of a conversation finds as much in the caches as that of a chat.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_turns_are_cached_as_those_of_chats() {
    for (name, builder) in pairs() {
        let fleet = builder.pairs(1).start().await;
        let cached_tokens = || {
            let stats = fleet.engines.prefills[0].stats();
            stats.cached_device_tokens + stats.cached_host_tokens + stats.cached_storage_tokens
        };
        let mut cached = Vec::new();
        for api in [ClientApi::Chat, ClientApi::Responses, ClientApi::Messages] {
            let opening = format!("{api:?} {}", "The garden wall has a round door. ".repeat(60));
            let turn = |role: &str, text: &str| json!({"role": role, "content": text});
            let mut body = api.body(&fleet.model(), false, 8);
            let list = if api == ClientApi::Responses { "input" } else { "messages" };
            body[list] = json!([turn("user", &opening)]);
            let said = api.text(&json_of(&fleet, api.path(), &body).await).unwrap();
            let before = cached_tokens();
            body[list] = json!([turn("user", &opening), turn("assistant", &said), turn("user", "And then?")]);
            json_of(&fleet, api.path(), &body).await;
            cached.push(cached_tokens() - before);
        }
        assert!(cached[0] > 300, "{name}: the chat is cached: {cached:?}");
        // The names of the APIs at the beginning have different lengths.
        assert!(cached.iter().all(|tokens| *tokens + 16 >= cached[0]), "{name}: {cached:?}");
    }
}
