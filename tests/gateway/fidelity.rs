//! The gateway forwards bodies, headers, streams and responses of batches unchanged.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use moongate_loadtest::engine::{RecordedRequest, SimEngine, VllmConnector};
use serde_json::{Value, json};

use crate::harness::fleet::{TestFleet, TestFleetBuilder};
use crate::harness::gateway::TestGateway;
use crate::harness::scripted::{EngineScript, ScriptedEngine, ScriptedEngineResponse};
use crate::harness::{client, raw_http};

/// JSON that parsing and serializing would change.
const ODD: &str = "\t{ \"model\" :\t\"sim\",\r\n \"messages\": [ {\"role\":\"user\", \"content\":\"h\\u00e9llo \\ud83d\\ude00 \\/ é\", \
    \"x_cache\": {\"ttl\" : 1e3}} ],\"temperature\":1.0000000000000002,\"big\":12345678901234567890123,\"zero\":-0.0,\
    \"nested\":{\"a\":[ ],\"a\":1},\"unknown\":null , \"\\u0073eed\": 7, \"max_tokens\" : 3 , \"stream\" :  false }";

fn header<'a>(request: &'a RecordedRequest, name: &str) -> Vec<&'a str> {
    request.headers.iter().filter(|(key, _)| key == name).map(|(_, value)| value.as_str()).collect()
}

fn parsed(engine: &SimEngine) -> Vec<Value> {
    engine.recent_requests(64).iter().map(|request| serde_json::from_slice(&request.body).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_bytes_reach_sglang_unchanged() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    let response = world.post("/v1/chat/completions", ODD).await;
    assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
    let kept = ODD.strip_suffix('}').unwrap();
    for engine in world.engines.all() {
        let body = TestFleet::last_request(engine).body;
        assert!(body.starts_with(kept.as_bytes()), "{}", String::from_utf8_lossy(&body));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unusual_bytes_reach_vllm_unchanged_but_for_set_members() {
    for connector in [VllmConnector::Nixl, VllmConnector::Mooncake, VllmConnector::Store] {
        let world = TestFleetBuilder::vllm(connector).pairs(1).flag("--engine=vllm").start().await;
        let response = world.post("/v1/chat/completions", ODD).await;
        assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
        let decode = TestFleet::last_request(&world.engines.decodes[0]).body;
        assert!(decode.starts_with(ODD.strip_suffix('}').unwrap().as_bytes()), "{connector:?}");
        let prefill = TestFleet::last_request(&world.engines.prefills[0]).body;
        let expected = ODD.strip_suffix('}').unwrap().replace("\"max_tokens\" : 3", "\"max_tokens\" : 1");
        assert!(
            prefill.starts_with(expected.as_bytes()),
            "{connector:?}: {}",
            String::from_utf8_lossy(&prefill)
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_worker_receives_exactly_the_clients_bytes() {
    let world = TestFleetBuilder::sglang().plain(1).start().await;
    let response = world.post("/v1/chat/completions", ODD).await;
    assert_eq!(response.status(), 200);
    assert_eq!(TestFleet::last_request(&world.engines.workers[0]).body, ODD);
}

#[tokio::test(flavor = "multi_thread")]
async fn end_to_end_headers_pass_and_hop_by_hop_headers_do_not() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    let body = r#"{"model":"sim","prompt":"a","max_tokens":1}"#;
    let request = format!(
        "POST /v1/completions?api-version=1 HTTP/1.1\r\nHost: gateway.example\r\nContent-Type: application/json\r\n\
         X-Foo: 1\r\nX-Foo: 2\r\nX-Session-Id: s 1\r\nAuthorization: Bearer sk-1\r\nX-Request-Id: mine\r\n\
         Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\nUser-Agent: test/1\r\n\
         Connection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\n\
         Proxy-Authorization: Basic eDp5\r\nX-Data-Parallel-Rank: 7\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let response = raw_http::exchange(world.gateway.running.address, request.as_bytes()).await;
    assert_eq!(response.status, 200, "{response:?}");
    assert!(response.head.to_ascii_lowercase().contains("x-request-id: mine"), "{}", response.head);
    for engine in world.engines.all() {
        let got = TestFleet::last_request(engine);
        assert_eq!(got.target, "/v1/completions?api-version=1");
        assert_eq!(header(&got, "x-foo"), ["1", "2"]);
        assert_eq!(header(&got, "x-session-id"), ["s 1"]);
        assert_eq!(header(&got, "authorization"), ["Bearer sk-1"]);
        assert_eq!(header(&got, "user-agent"), ["test/1"]);
        assert_eq!(header(&got, "traceparent").len(), 1);
        assert_eq!(header(&got, "host"), [engine.addr().to_string()]);
        assert_eq!(header(&got, "content-length"), [got.body.len().to_string()]);
        for gone in ["connection", "x-hop", "keep-alive", "te", "proxy-authorization", "x-data-parallel-rank"]
        {
            assert_eq!(header(&got, gone), Vec::<&str>::new(), "{gone}");
        }
    }
}

fn script(role: &'static str) -> EngineScript {
    EngineScript {
        model: "sim",
        dp_size: 1,
        sglang_role: Some(role),
        mooncake_query: None,
        server_info: Vec::new(),
    }
}

/// The prefill schedules the smallest priority first, the decode the largest; the client's own priority is overridden.
#[tokio::test(flavor = "multi_thread")]
async fn engines_with_priority_order_get_the_gateways_priorities() {
    let ordered = |role, smallest_first: bool| {
        let server_info = vec![
            ("enable_priority_scheduling", json!(true)),
            ("disable_priority_preemption", json!(true)),
            ("schedule_low_priority_values_first", json!(smallest_first)),
        ];
        EngineScript { server_info, ..script(role) }
    };
    let answer = || ScriptedEngineResponse::json(r#"{"object":"text_completion","choices":[]}"#);
    let prefill = ScriptedEngine::start(ordered("prefill", true), answer()).await;
    let decode = ScriptedEngine::start(ordered("decode", false), answer()).await;
    let gateway = TestGateway::start_ready(&[
        format!("--prefill=http://{},{}", prefill.address, prefill.address.port()),
        format!("--decode=http://{}", decode.address),
    ])
    .await;
    for body in [
        r#"{"model":"sim","prompt":"a","max_tokens":1}"#,
        r#"{"model":"sim","priority":-9000000000000,"prompt":"a","max_tokens":1}"#,
    ] {
        let response = client().post(gateway.url("/v1/completions")).body(body).send().await.unwrap();
        assert_eq!(response.status(), 200);
    }
    let priorities = async |engine: &ScriptedEngine| -> Vec<i64> {
        let bodies = engine.received(2).await;
        bodies
            .iter()
            .map(|got| serde_json::from_slice::<Value>(&got.body).unwrap()["priority"].as_i64().unwrap())
            .collect()
    };
    let at_prefill = priorities(&prefill).await;
    // Both priorities contain the arrival time: a tenth of it in milliseconds since 1970.
    assert!(at_prefill.iter().all(|priority| *priority > 100 * 1_000_000_000), "{at_prefill:?}");
    let at_decode = priorities(&decode).await;
    assert_eq!(at_decode, at_prefill.iter().map(|priority| -priority).collect::<Vec<_>>());
}

/// A decode stream with unusual formatting that the gateway would not generate itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_and_its_headers_pass_byte_for_byte() {
    let stream = ": welcome\n\ndata:{\"id\" : \"x\",\"choices\":[ ],\"future\":1.50}\r\n\r\nevent: odd\nid: 7\ndata: {\"t\":\"\\u00e9 é\"}\n\n\
                  data: {\"usage\":{\"prompt_tokens\":1}}\n\ndata: [DONE]\n\n";
    let prefill = ScriptedEngine::start(
        script("prefill"),
        ScriptedEngineResponse::events("data: {}\n\ndata: [DONE]\n\n"),
    )
    .await;
    let headers = vec![("x-engine", "a"), ("x-engine", "b"), ("keep-alive", "timeout=5"), ("upgrade", "h2c")];
    let decode = ScriptedEngine::start(
        script("decode"),
        ScriptedEngineResponse { headers, ..ScriptedEngineResponse::events(stream) },
    )
    .await;
    let gateway = TestGateway::start_ready(&[
        format!("--prefill=http://{},{}", prefill.address, prefill.address.port()),
        format!("--decode=http://{}", decode.address),
    ])
    .await;
    let body = r#"{"model":"sim","prompt":"a","stream":true}"#;
    let response = client().post(gateway.url("/v1/completions")).body(body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(response.headers().get_all("x-engine").iter().collect::<Vec<_>>(), ["a", "b"]);
    for gone in ["keep-alive", "upgrade"] {
        assert!(!response.headers().contains_key(gone), "{gone}");
    }
    assert_eq!(response.text().await.unwrap(), stream);
    assert_eq!(decode.only_request().await.body, prefill.only_request().await.body);
}

/// SGLang needs one bootstrap room for each prompt of a batch.
#[tokio::test(flavor = "multi_thread")]
async fn the_prompts_of_a_batch_have_a_room_each() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    let [prefill, decode] = [&world.engines.prefills[0], &world.engines.decodes[0]];
    let port = prefill.bootstrap_addr().unwrap().port();
    let texts = json!({"model": "sim", "prompt": ["one", "two", "three"], "max_tokens": 4});
    let ids = json!({"model": "sim", "prompt": [[1, 2, 3], [4, 5]], "max_tokens": 4});
    let mut rooms = BTreeSet::new();
    for (body, count) in [(&texts, 3), (&ids, 2)] {
        let answer = world.post("/v1/completions", body.to_string()).await.json::<Value>().await.unwrap();
        assert_eq!(answer["choices"].as_array().map(Vec::len), Some(count), "{answer}");
        assert_eq!(TestFleet::last_request(prefill).body, TestFleet::last_request(decode).body);
        let sent: Value = serde_json::from_slice(&TestFleet::last_request(decode).body).unwrap();
        assert_eq!(sent["bootstrap_host"], json!(vec!["127.0.0.1"; count]));
        assert_eq!(sent["bootstrap_port"], json!(vec![port; count]));
        let own = sent["bootstrap_room"].as_array().unwrap().iter().map(|room| room.as_u64().unwrap());
        assert_eq!(own.filter(|room| *room < 1 << 63 && rooms.insert(*room)).count(), count, "{sent}");
        assert_eq!(sent["rid"].as_str().map(str::len), Some(36));
    }
    assert_eq!((decode.stats().prompt_mismatches, decode.stats().kv_received), (0, 5));
}

/// Two samples of one prompt: SGLang's pairs cannot share a room, so each is a separate request.
#[tokio::test(flavor = "multi_thread")]
async fn several_samples_have_a_room_each() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    let [prefill, decode] = [&world.engines.prefills[0], &world.engines.decodes[0]];
    let body =
        json!({"model": "sim", "n": 2, "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]});
    let answer = world.post("/v1/chat/completions", body.to_string()).await.json::<Value>().await.unwrap();
    let indices: Vec<&Value> = answer["choices"].as_array().unwrap().iter().map(|c| &c["index"]).collect();
    assert_eq!(indices, [0, 1], "{answer}");
    let rooms = |engine| -> BTreeSet<u64> {
        parsed(engine).iter().map(|body| body["bootstrap_room"].as_u64().unwrap()).collect()
    };
    assert_eq!(rooms(prefill).len(), 2);
    assert_eq!(rooms(prefill), rooms(decode));
    let unchanged = |body: &Value| body["messages"] == json!([{"role": "user", "content": "hi"}]);
    assert!(parsed(decode).iter().all(unchanged));
    assert_eq!((decode.stats().prompt_mismatches, decode.stats().kv_received), (0, 2));
}

/// vLLM transfers one sequence per transfer: the decode computes a request for several samples itself.
#[tokio::test(flavor = "multi_thread")]
async fn several_samples_of_vllm_are_returned() {
    for connector in [VllmConnector::Nixl, VllmConnector::Mooncake, VllmConnector::Store] {
        let world = TestFleetBuilder::vllm(connector).pairs(1).start().await;
        let body = json!({"model": "sim", "prompt": ["one", "two"], "n": 2, "max_tokens": 4});
        let answer: Value = world.post("/v1/completions", body.to_string()).await.json().await.unwrap();
        assert_eq!(answer["choices"].as_array().map(Vec::len), Some(4), "{connector:?}: {answer}");
        assert_eq!(world.engines.decodes[0].stats().prompt_mismatches, 0);
    }
}

/// The prefill takes `room % dp_size` as the rank, and the decode any rank that its body names.
#[tokio::test(flavor = "multi_thread")]
async fn rooms_and_bodies_select_the_ranks_of_both_sides() {
    let world = TestFleetBuilder::sglang()
        .pairs(1)
        .tune(|mut config| {
            config.dp_size = 4;
            // Slow enough that all requests run at once, also on a busy machine.
            config.time_scale = 0.5;
            config
        })
        .start()
        .await;
    let posts = (0..16).map(|n| {
        // Long enough for a pass of its own: short prompts that arrive during a pass rightly wait for one rank's next pass together.
        let prompt = format!("prompt {n} ").repeat(500);
        let body = json!({"model": "sim", "prompt": prompt, "max_tokens": 8});
        world.post("/v1/completions", body.to_string())
    });
    assert!(join_all(posts).await.iter().all(|response| response.status() == 200));
    let [prefill, decode] = [&world.engines.prefills[0], &world.engines.decodes[0]];
    let rooms = |engine| -> BTreeSet<u64> {
        parsed(engine).iter().map(|body| body["bootstrap_room"].as_u64().unwrap()).collect()
    };
    assert_eq!(rooms(prefill).len(), 16, "each request has its own room");
    assert_eq!(rooms(prefill), rooms(decode));
    for request in parsed(prefill) {
        assert_eq!(request["bootstrap_room"].as_u64().unwrap() % 4, request["routed_dp_rank"]);
    }
    for engine in [prefill, decode] {
        let by_rank = engine.stats().by_dp_rank;
        assert_eq!(by_rank.iter().sum::<u64>(), 16);
        assert!(
            by_rank.iter().all(|count| *count >= 2),
            "requests at once are spread over the ranks: {by_rank:?}"
        );
    }
}

/// SGLang aborts every request whose id starts with the given one, so ids must have the same length.
#[tokio::test(flavor = "multi_thread")]
async fn request_ids_are_unique_and_of_the_same_length() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    for rid in ["null", "\"mine\"", "[\"a\"]"] {
        let body = format!(r#"{{"rid":{rid},"model":"sim","prompt":"a","max_tokens":1}}"#);
        assert_eq!(world.post("/v1/completions", body).await.status(), 200);
    }
    for _ in 0..20 {
        let body = r#"{"model":"sim","prompt":"a","max_tokens":1}"#;
        assert_eq!(world.post("/v1/completions", body).await.status(), 200);
    }
    let requests = parsed(&world.engines.decodes[0]);
    let rids: BTreeSet<&str> = requests.iter().map(|body| body["rid"].as_str().unwrap()).collect();
    assert_eq!(rids.len(), 23);
    assert!(rids.iter().all(|rid| rid.len() == 36), "{rids:?}");
}
