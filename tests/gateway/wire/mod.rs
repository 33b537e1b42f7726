//! The engines' protocols as recorded from real engines: each leg receives the recorded request, and the client gets the
//! decode's response byte for byte.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::harness::client;
use crate::harness::gateway::TestGateway;
use crate::harness::scripted::{EngineScript, ReceivedRequest, ScriptedEngine, ScriptedEngineResponse};
use crate::harness::wire_json::JsonMembers;

/// Members of SGLang's legs in addition to the client's.
const SGLANG_ADDED: [&str; 4] = ["bootstrap_host", "bootstrap_port", "bootstrap_room", "rid"];

/// One recorded exchange with one engine.
#[derive(Debug, Deserialize)]
struct RecordedExchange {
    to: String,
    request: Box<RawValue>,
    response: Box<RawValue>,
}

/// One recorded client request, with the exchange of each engine.
#[derive(Debug)]
struct RecordedClientRequest {
    path: String,
    prefill: RecordedExchange,
    decode: RecordedExchange,
}

impl RecordedClientRequest {
    /// The client's request: the decode's request without the members that the recorded router had appended.
    fn client_body(&self) -> String {
        let whole = self.decode.request.get();
        let added = [r#", "kv_transfer_params""#, r#", "bootstrap_host""#].map(|key| whole.find(key));
        let end = added.into_iter().flatten().min().unwrap_or(whole.len() - 1);
        format!("{}}}", &whole[..end])
    }
}

/// The recorded requests of a file. Prefills listened on 8100 and 8300, decodes on 8200 and 8400.
fn read_recordings(jsonl: &str) -> Vec<RecordedClientRequest> {
    let rows: Vec<RecordedExchange> = jsonl.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut pairs = Vec::new();
    let mut rows = rows.into_iter();
    while let (Some(a), Some(b)) = (rows.next(), rows.next()) {
        let is_prefill = |row: &RecordedExchange| row.to.contains(":8100/") || row.to.contains(":8300/");
        let (prefill, decode) = if is_prefill(&a) { (a, b) } else { (b, a) };
        assert!(is_prefill(&prefill) && !is_prefill(&decode), "{} {}", prefill.to, decode.to);
        let path = decode.to.splitn(4, '/').nth(3).unwrap();
        pairs.push(RecordedClientRequest { path: format!("/{path}"), prefill, decode });
    }
    assert!(!pairs.is_empty());
    pairs
}

/// A pair of scripted engines behind a gateway.
struct WireFixture {
    prefill: ScriptedEngine,
    decode: ScriptedEngine,
    gateway: TestGateway,
    client: reqwest::Client,
}

/// Kind and connector of the engines.
#[derive(Debug, Clone, Default)]
struct EnginePairSpec {
    sglang: bool,
    dp_size: u32,
    connector: Option<&'static str>,
    mooncake_query: Option<String>,
}

impl EnginePairSpec {
    fn sglang() -> Self {
        Self { sglang: true, dp_size: 1, ..Self::default() }
    }

    fn vllm(connector: &'static str) -> Self {
        Self { connector: Some(connector), dp_size: 1, ..Self::default() }
    }
}

impl WireFixture {
    async fn start(
        cast: EnginePairSpec,
        prefill: ScriptedEngineResponse,
        decode: ScriptedEngineResponse,
    ) -> Self {
        let script = |role| EngineScript {
            model: "tiny",
            dp_size: cast.dp_size,
            sglang_role: cast.sglang.then_some(role),
            mooncake_query: cast.mooncake_query.clone(),
            server_info: Vec::new(),
        };
        let prefill = ScriptedEngine::start(script("prefill"), prefill).await;
        let decode = ScriptedEngine::start(script("decode"), decode).await;
        let mut flags = vec![
            format!("--prefill=http://{},{}", prefill.address, prefill.address.port()),
            format!("--decode=http://{}", decode.address),
        ];
        flags.extend(cast.connector.map(|connector| format!("--kv-connector={connector}")));
        let gateway = TestGateway::start_ready(&flags).await;
        Self { prefill, decode, gateway, client: client() }
    }

    /// Replays one recorded exchange: checks that the client gets the decode's bytes, and returns the requests that the engines received.
    async fn replay(
        cast: EnginePairSpec,
        exchange: &RecordedClientRequest,
    ) -> (ReceivedRequest, ReceivedRequest, Self) {
        let answer = |row: &RecordedExchange| ScriptedEngineResponse::json(row.response.get().to_owned());
        let stage = Self::start(cast, answer(&exchange.prefill), answer(&exchange.decode)).await;
        let got = stage.post(&exchange.path, exchange.client_body()).await;
        assert_eq!(got, exchange.decode.response.get(), "the client's answer");
        let (prefill, decode) = (stage.prefill.only_request().await, stage.decode.only_request().await);
        assert_eq!((&prefill.path, &decode.path), (&exchange.path, &exchange.path));
        (prefill, decode, stage)
    }

    /// Posts a body and returns the response's text.
    async fn post(&self, path: &str, body: impl Into<reqwest::Body>) -> String {
        let request = self.client.post(self.gateway.url(path)).header("content-type", "application/json");
        let response = request.body(body).send().await.unwrap();
        assert_eq!(response.status(), 200);
        response.text().await.unwrap()
    }
}

fn value(text: Option<&str>) -> Value {
    serde_json::from_str(text.expect("the member is there")).unwrap()
}

/// Whether the text has the form of a UUID: 36 characters with any bits.
fn is_uuid(text: &str) -> bool {
    let groups: Vec<usize> = text.split('-').map(str::len).collect();
    groups == [8, 4, 4, 4, 12] && text.chars().all(|c| c == '-' || c.is_ascii_hexdigit())
}

/// Both legs of vLLM have the same request id, generated by the gateway.
fn same_request_id(prefill: &ReceivedRequest, decode: &ReceivedRequest) -> String {
    let id = prefill.header("x-request-id");
    assert!(is_uuid(id), "{id:?}");
    assert_eq!(decode.header("x-request-id"), id);
    id.to_owned()
}

/// A vLLM prefill leg has the client's members in the client's order, except for those that limit it to one token.
fn is_one_token_prefill(received: &ReceivedRequest, client_body: &str, recorded: &RecordedExchange) {
    let got = JsonMembers::of(&received.body);
    let ours = ["max_tokens", "min_tokens", "kv_transfer_params"];
    let (sent, recorded) =
        (JsonMembers::of(client_body.as_bytes()), JsonMembers::of(recorded.request.get().as_bytes()));
    assert_eq!(got.without(&ours), sent.without(&ours));
    assert_eq!(got.get("max_tokens"), recorded.get("max_tokens"));
    assert_eq!(got.get("min_tokens"), Some("1"), "keeps an end token from dropping the blocks");
}

#[tokio::test(flavor = "multi_thread")]
async fn sglang_as_recorded() {
    let mut rooms = BTreeSet::new();
    for exchange in read_recordings(include_str!("sglang-pd.jsonl")) {
        let (prefill, decode, stage) = WireFixture::replay(EnginePairSpec::sglang(), &exchange).await;
        assert_eq!(prefill.body, decode.body, "both engines get the same bytes");
        let client_body = exchange.client_body();
        let kept = client_body.strip_suffix('}').unwrap();
        assert!(prefill.body.starts_with(kept.as_bytes()), "the client's bytes come first, unchanged");

        let got = JsonMembers::of(&prefill.body);
        assert_eq!(got.without(&SGLANG_ADDED), JsonMembers::of(client_body.as_bytes()));
        assert_eq!(value(got.get("bootstrap_host")), "127.0.0.1");
        assert_eq!(value(got.get("bootstrap_port")), stage.prefill.address.port());
        let room = value(got.get("bootstrap_room")).as_u64().unwrap();
        assert!(room < 1 << 63, "{room}");
        assert!(rooms.insert(room), "bootstrap rooms are unique");
        assert!(is_uuid(value(got.get("rid")).as_str().unwrap()));
        // The same members as the recorded router's, with a request id for aborts.
        let recorded = JsonMembers::of(exchange.decode.request.get().as_bytes());
        for (key, _) in &recorded.0 {
            assert!(got.get(key).is_some(), "{key} is missing");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn vllm_nixl_as_recorded() {
    for exchange in read_recordings(include_str!("vllm-nixl.jsonl")) {
        let (prefill, decode, _stage) = WireFixture::replay(EnginePairSpec::vllm("nixl"), &exchange).await;
        same_request_id(&prefill, &decode);
        let client_body = exchange.client_body();
        is_one_token_prefill(&prefill, &client_body, &exchange.prefill);
        let recorded = JsonMembers::of(exchange.prefill.request.get().as_bytes());
        assert_eq!(
            value(JsonMembers::of(&prefill.body).get("kv_transfer_params")),
            value(recorded.get("kv_transfer_params"))
        );

        let answered = JsonMembers::of(exchange.prefill.response.get().as_bytes());
        let params = answered.get("kv_transfer_params").unwrap();
        let kept = client_body.strip_suffix('}').unwrap();
        let expected = format!("{kept},\"kv_transfer_params\":{params}}}");
        assert_eq!(decode.body, expected, "the prefill's parameters, byte for byte");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn vllm_mooncake_as_recorded() {
    let mut transfers = BTreeSet::new();
    for exchange in read_recordings(include_str!("vllm-mooncakeconnector.jsonl")) {
        let theirs = JsonMembers::of(exchange.decode.request.get().as_bytes());
        let theirs = value(theirs.get("kv_transfer_params"));
        let engine_id = theirs["remote_engine_id"].as_str().unwrap();
        let query =
            json!({"0": {"engine_id": engine_id, "worker_addr": {"0": {"0": "tcp://127.0.0.1:38751"}}}});
        let cast =
            EnginePairSpec { mooncake_query: Some(query.to_string()), ..EnginePairSpec::vllm("mooncake") };
        let (prefill, decode, stage) = WireFixture::replay(cast, &exchange).await;
        same_request_id(&prefill, &decode);
        let client_body = exchange.client_body();
        is_one_token_prefill(&prefill, &client_body, &exchange.prefill);
        let kept = client_body.strip_suffix('}').unwrap();
        assert!(decode.body.starts_with(kept.as_bytes()));

        let to_prefill = value(JsonMembers::of(&prefill.body).get("kv_transfer_params"));
        let transfer = to_prefill["transfer_id"].as_str().unwrap();
        assert!(is_uuid(transfer.strip_prefix("xfer-").unwrap()));
        assert!(transfers.insert(transfer.to_owned()), "transfer ids are unique");
        assert_eq!(
            to_prefill,
            json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": transfer})
        );
        // As recorded, except for the id and the address of the bootstrap server.
        let mut expected = theirs.clone();
        expected["transfer_id"] = transfer.into();
        expected["remote_bootstrap_addr"] = format!("http://{}", stage.prefill.address).into();
        assert_eq!(value(JsonMembers::of(&decode.body).get("kv_transfer_params")), expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn vllm_store_as_recorded() {
    for exchange in read_recordings(include_str!("vllm-mooncakestore.jsonl")) {
        let (prefill, decode, _stage) = WireFixture::replay(EnginePairSpec::vllm("store"), &exchange).await;
        same_request_id(&prefill, &decode);
        let client_body = exchange.client_body();
        is_one_token_prefill(&prefill, &client_body, &exchange.prefill);
        assert_eq!(JsonMembers::of(&prefill.body).get("kv_transfer_params"), None);
        assert_eq!(decode.body, client_body, "the decode gets the client's bytes");
    }
}

/// Each data-parallel rank of a Mooncake prefill has its own engine id, and the decode must get the id of the rank that
/// processed the prefill leg.
#[tokio::test(flavor = "multi_thread")]
async fn mooncake_engine_id_is_that_of_the_prefills_rank() {
    let rank = |n: u32| (n.to_string(), json!({"engine_id": format!("engine-{n}"), "worker_addr": {}}));
    let query: serde_json::Map<String, Value> = (0..4).map(rank).collect();
    let cast = EnginePairSpec {
        dp_size: 4,
        mooncake_query: Some(Value::from(query).to_string()),
        ..EnginePairSpec::vllm("mooncake")
    };
    let stage =
        WireFixture::start(cast, ScriptedEngineResponse::json("{}"), ScriptedEngineResponse::json("{}"))
            .await;
    let body = r#"{"model":"tiny","prompt":"a","max_tokens":1}"#;
    let posts = (0..16).map(|_| stage.post("/v1/completions", body));
    futures_util::future::join_all(posts).await;

    let mut ranks = BTreeSet::new();
    let prefills = stage.prefill.received(16).await;
    for decode in stage.decode.received(16).await {
        let id = decode.header("x-request-id");
        let prefill = prefills.iter().find(|prefill| prefill.header("x-request-id") == id).unwrap();
        let rank = prefill.header("x-data-parallel-rank");
        assert!(rank.parse::<u32>().is_ok_and(|rank| rank < 4), "{rank:?}");
        let params = value(JsonMembers::of(&decode.body).get("kv_transfer_params"));
        assert_eq!(params["remote_engine_id"], format!("engine-{rank}"));
        ranks.insert(rank.to_owned());
    }
    assert!(ranks.len() > 1, "16 requests at once went to one rank only: {ranks:?}");
}
