//! Invalid requests: each gets a response that explains the error, none reaches an engine, and the gateway keeps serving.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::harness::fleet::{TestFleet, TestFleetBuilder};
use crate::harness::process::MoongateProcess;
use crate::harness::raw_http::{RawHttpConnection, RawHttpResponse, exchange, post};
use crate::harness::{TEST_TIMEOUT, openai_error};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const GOOD: &str = r#"{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":2}"#;

/// A rejected body: path, text, status, error code, invalid member, and a word of the message.
type RejectedBodyCase = (&'static str, &'static str, u16, &'static str, Option<&'static str>, &'static str);

const CASES: &[RejectedBodyCase] = &[
    // Not JSON at all.
    (CHAT, "", 400, "invalid_json", None, "no body"),
    (CHAT, " \r\n", 400, "invalid_json", None, "no body"),
    (CHAT, "{", 400, "invalid_json", None, "line 1 column 1"),
    (CHAT, "hello", 400, "invalid_json", None, "line 1"),
    (CHAT, "[]", 400, "invalid_json", None, "a JSON object"),
    (CHAT, "null", 400, "invalid_json", None, "a JSON object"),
    (CHAT, "\"{}\"", 400, "invalid_json", None, "a JSON object"),
    (CHAT, r#"{"messages":[{}]} {"#, 400, "invalid_json", None, "trailing"),
    (CHAT, r#"{"messages":[{}],}"#, 400, "invalid_json", None, "column 18"),
    (CHAT, r#"{"messages":[{}],"temperature":NaN}"#, 400, "invalid_json", None, "line 1"),
    (CHAT, r#"{'messages':[{}]}"#, 400, "invalid_json", None, "line 1"),
    (CHAT, "{\"messages\":[{\"content\":\"a\u{0}b\"}]}", 400, "invalid_json", None, "control character"),
    (COMPLETIONS, "{", 400, "invalid_json", None, "line 1"),
    ("/generate", "{", 400, "invalid_json", None, "line 1"),
    // The model.
    (
        CHAT,
        r#"{"model":"nope","messages":[{}]}"#,
        404,
        "model_not_found",
        Some("model"),
        "served models: sim",
    ),
    (COMPLETIONS, r#"{"model":"","prompt":"a"}"#, 404, "model_not_found", Some("model"), "`model`"),
    (CHAT, r#"{"model":7,"messages":[{}]}"#, 400, "invalid_request", Some("model"), "a number"),
    (CHAT, r#"{"model":["sim"],"messages":[{}]}"#, 400, "invalid_request", Some("model"), "an array"),
    (
        CHAT,
        r#"{"model":"sim","model":"sim","messages":[{}]}"#,
        400,
        "invalid_request",
        Some("model"),
        "twice",
    ),
    ("/v1/embeddings", r#"{"model":"nope","input":"a"}"#, 404, "model_not_found", Some("model"), "`model`"),
    // Messages.
    (CHAT, r#"{"model":"sim"}"#, 400, "invalid_request", Some("messages"), "`messages` is missing"),
    (CHAT, r#"{"messages":null}"#, 400, "invalid_request", Some("messages"), "`messages` is missing"),
    (CHAT, r#"{"messages":"hi"}"#, 400, "invalid_request", Some("messages"), "a string"),
    (CHAT, r#"{"messages":{}}"#, 400, "invalid_request", Some("messages"), "an object"),
    (CHAT, r#"{"messages":[]}"#, 400, "invalid_request", Some("messages"), "empty"),
    (CHAT, r#"{"messages":["hi"]}"#, 400, "invalid_request", Some("messages[0]"), "`messages[0]`"),
    (CHAT, r#"{"messages":[{},{},null]}"#, 400, "invalid_request", Some("messages[2]"), "`messages[2]`"),
    (CHAT, r#"{"messages":[{}],"messages":[{}]}"#, 400, "invalid_request", Some("messages"), "twice"),
    // Numbers and flags.
    (CHAT, r#"{"messages":[{}],"stream":"yes"}"#, 400, "invalid_request", Some("stream"), "a boolean"),
    (CHAT, r#"{"messages":[{}],"n":0}"#, 400, "invalid_request", Some("n"), "at least 1"),
    (CHAT, r#"{"messages":[{}],"n":-1}"#, 400, "invalid_request", Some("n"), "negative"),
    (CHAT, r#"{"messages":[{}],"n":1.5}"#, 400, "invalid_request", Some("n"), "integer"),
    (CHAT, r#"{"messages":[{}],"n":"2"}"#, 400, "invalid_request", Some("n"), "an integer"),
    (CHAT, r#"{"messages":[{}],"n":1000000000}"#, 400, "invalid_request", Some("n"), "at most"),
    (CHAT, r#"{"messages":[{}],"max_tokens":-1}"#, 400, "invalid_request", Some("max_tokens"), "negative"),
    (CHAT, r#"{"messages":[{}],"max_tokens":"9"}"#, 400, "invalid_request", Some("max_tokens"), "an integer"),
    (
        CHAT,
        r#"{"messages":[{}],"max_completion_tokens":[]}"#,
        400,
        "invalid_request",
        Some("max_completion_tokens"),
        "an array",
    ),
    // Prompts.
    (COMPLETIONS, r#"{"model":"sim"}"#, 400, "invalid_request", Some("prompt"), "`prompt` is missing"),
    (COMPLETIONS, r#"{"prompt":7}"#, 400, "invalid_request", Some("prompt"), "a number"),
    (COMPLETIONS, r#"{"prompt":[]}"#, 400, "invalid_request", Some("prompt"), "empty"),
    (COMPLETIONS, r#"{"prompt":[{}]}"#, 400, "invalid_request", Some("prompt[0]"), "`prompt[0]`"),
    (COMPLETIONS, r#"{"prompt":[1,2,"a"]}"#, 400, "invalid_request", Some("prompt[2]"), "`prompt[2]`"),
    (COMPLETIONS, r#"{"prompt":["a"],"n":4294967296}"#, 400, "invalid_request", Some("n"), "at most"),
    ("/generate", "{}", 400, "invalid_request", Some("text"), "`input_ids` is missing"),
    ("/generate", r#"{"text":true}"#, 400, "invalid_request", Some("text"), "a boolean"),
    (
        "/generate",
        r#"{"text":"a","sampling_params":7}"#,
        400,
        "invalid_request",
        Some("sampling_params"),
        "an object",
    ),
    (
        "/generate",
        r#"{"text":"a","sampling_params":{"n":300000000}}"#,
        400,
        "invalid_request",
        Some("sampling_params.n"),
        "at most",
    ),
    // Unknown paths.
    ("/", "{}", 404, "not_found", None, "/v1/chat/completions"),
    ("/chat/completions", GOOD, 404, "not_found", None, "/chat/completions"),
    ("/v1/models", "{}", 405, "method_not_allowed", None, "POST"),
    ("/health", "{}", 405, "method_not_allowed", None, "POST"),
];

/// The gateway still serves, and no request except this one has reached the engines.
async fn assert_still_serving(world: &TestFleet) {
    assert_eq!(world.engines.started(), 0, "a bad request has reached an engine");
    let answer = world.post(CHAT, GOOD).await;
    assert_eq!(answer.status(), 200);
    assert_eq!(world.engines.started(), 2);
    assert_eq!(world.gateway.running.in_flight(), 0);
}

fn check(response: &RawHttpResponse, status: u16, code: &str, word: &str, shown: &str) -> Value {
    assert_eq!(response.status, status, "{shown}: {response:?}");
    let head = response.head.to_ascii_lowercase();
    assert!(head.contains("content-type: application/json"), "{shown}: {head}");
    assert!(
        head.contains("x-request-id: ") || code == "not_found" || code == "method_not_allowed",
        "{shown}: {head}"
    );
    let error = openai_error(&response.body);
    assert_eq!(error["code"], code, "{shown}: {error}");
    assert_eq!(error["type"], "invalid_request_error", "{shown}: {error}");
    assert!(error["message"].as_str().unwrap().contains(word), "{shown}: no {word:?} in {error}");
    error
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_bodies_are_refused_with_the_member_at_fault() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    for (path, body, status, code, param, word) in CASES {
        let shown = format!("POST {path} {body}");
        let response = exchange(world.gateway.running.address, &post(path, body.as_bytes())).await;
        let error = check(&response, *status, code, word, &shown);
        assert_eq!(error["param"].as_str(), *param, "{shown}: {error}");
    }
    assert_still_serving(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_not_text_and_nests_without_end() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    let address = world.gateway.running.address;
    for bytes in [
        &b"{\"messages\":[{\"content\":\"\xff\xfe\"}]}"[..],
        b"{\"messages\":[{}],\"other\":\"\xc3\x28\"}",
        b"{\"messages\":[{}],\"\xf0\x9f\":1}",
        b"{\"messages\":[{}],\"deep\":{\"\xff\":[\"\xff\"]}}",
    ] {
        let response = exchange(address, &post(CHAT, bytes)).await;
        check(&response, 400, "invalid_json", "UTF-8", &String::from_utf8_lossy(bytes));
    }
    for depth in [200, 1_000_000] {
        for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
            let value = format!("{}1{}", open.repeat(depth), close.repeat(depth));
            let body = format!("{{\"messages\":[{{}}],\"x\":{value}}}");
            let response = exchange(address, &post(CHAT, body.as_bytes())).await;
            check(&response, 400, "invalid_json", "127 levels", &format!("{depth} times {open}"));
        }
    }
    assert_still_serving(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_must_be_named_if_there_are_two() {
    let first = TestFleetBuilder::sglang().plain(1).engines().await;
    let tuned = TestFleetBuilder::sglang().plain(1).tune(|mut config| {
        config.model = "other".to_owned();
        config.fast()
    });
    let world = tuned.flag(&format!("--worker={}", first.workers[0].url())).start().await;
    let response = exchange(world.gateway.running.address, &post(CHAT, br#"{"messages":[{}]}"#)).await;
    let error = check(&response, 400, "invalid_request", "`model` is missing", "no model");
    for served in ["sim", "other"] {
        assert!(error["message"].as_str().unwrap().contains(served), "{error}");
    }
    assert_eq!(error["param"], "model");
    assert_eq!(world.engines.started() + first.started(), 0);
}

/// 100 MB, declared and undeclared: rejected at once, and the client can read the reason even if it sends the whole body first.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_of_100_mb_is_refused() {
    const PIECE: usize = 1 << 20;
    const SIZE: usize = 96 * PIECE;
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    let address = world.gateway.running.address;
    let head = |framing: &str| format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\n{framing}\r\n\r\n");
    let piece = vec![b' '; PIECE];

    for expect in ["", "\r\nexpect: 100-continue"] {
        let request = head(&format!("content-length: {SIZE}{expect}"));
        let response = exchange(address, request.as_bytes()).await;
        check(&response, 413, "body_too_large", "--max-body-bytes", "only the head");
    }

    let mut declared = RawHttpConnection::open(address).await;
    declared.send(head(&format!("content-length: {SIZE}")).as_bytes()).await;
    let mut sent = 0;
    while sent < SIZE && declared.send(&piece).await {
        sent += PIECE;
    }
    check(&declared.response().await, 413, "body_too_large", "32.0 MiB", "declared");

    let mut chunked = RawHttpConnection::open(address).await;
    chunked.send(head("transfer-encoding: chunked").as_bytes()).await;
    let mut sent = 0;
    while sent < SIZE
        && chunked.send(format!("{PIECE:x}\r\n").as_bytes()).await
        && chunked.send(&piece).await
        && chunked.send(b"\r\n").await
    {
        sent += PIECE;
    }
    chunked.send(b"0\r\n\r\n").await;
    check(&chunked.response().await, 413, "body_too_large", "32.0 MiB", "chunked");

    // Also with a client library that writes the whole body before it reads.
    for _ in 0..5 {
        let response =
            world.client.post(world.gateway.url(CHAT)).body(vec![b' '; SIZE]).send().await.unwrap();
        assert_eq!(response.status(), 413);
        openai_error(&response.bytes().await.unwrap());
    }
    assert_still_serving(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_just_below_the_limit_passes() {
    let world = TestFleetBuilder::sglang().plain(1).flag("--max-body-bytes=100000").start().await;
    let body = |length: usize| format!("{GOOD}{}", " ".repeat(length - GOOD.len()));
    assert_eq!(world.post(CHAT, body(100_000)).await.status(), 200);
    assert_eq!(world.post(CHAT, body(100_001)).await.status(), 413);
    assert_eq!(world.engines.started(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_does_not_come() {
    let world = TestFleetBuilder::sglang().pairs(1).flag("--body-timeout=100ms").start().await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\ncontent-length: 100\r\n\r\n{{\"mod");
    let mut slow = RawHttpConnection::open(world.gateway.running.address).await;
    slow.send(head.as_bytes()).await;
    check(&slow.response().await, 400, "body_incomplete", "100ms", "a pause");

    let mut broken = RawHttpConnection::open(world.gateway.running.address).await;
    broken.send(head.as_bytes()).await;
    broken.finish().await;
    drop(broken);
    assert_still_serving(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn heads_that_are_too_large() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    let address = world.gateway.running.address;
    let request =
        |extra: &str| format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\n{extra}content-length: 2\r\n\r\n{{}}");
    let many = (0..200).fold(String::new(), |mut text, n| {
        let _infallible = write!(text, "x-{n}: 1\r\n");
        text
    });
    let long = format!("x-long: {}\r\n", "a".repeat(100_000));
    for head in [long, many] {
        let response = exchange(address, request(&head).as_bytes()).await;
        assert_eq!(response.status, 431, "{response:?}");
    }
    let target = format!("GET /{} HTTP/1.1\r\nhost: g\r\n\r\n", "a".repeat(100_000));
    let response = exchange(address, target.as_bytes()).await;
    assert!(matches!(response.status, 414 | 431), "{response:?}");
    assert_still_serving(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_not_http() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    let address = world.gateway.running.address;
    for bytes in [
        "\u{16}\u{3}\u{1}\u{2}\u{0}\u{1}\u{0}\u{1}hello of TLS\r\n\r\n".to_owned(),
        "GET / HTTP/9.9\r\n\r\n".to_owned(),
        format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\ncontent-length: many\r\n\r\n"),
        format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{{}}"),
        format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\nbad header: 1\r\n\r\n"),
    ] {
        let response = exchange(address, bytes.as_bytes()).await;
        assert_eq!(response.status, 400, "{bytes:?}: {response:?}");
    }
    // Invalid chunks: the head was valid, so the response has a body.
    let chunks = format!("POST {CHAT} HTTP/1.1\r\nhost: g\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n");
    let response = exchange(address, chunks.as_bytes()).await;
    check(&response, 400, "body_incomplete", "truncated", "bad chunks");
    assert_still_serving(&world).await;
}

/// Content-Length and chunked encoding together: whichever a proxy in front uses, no request may be smuggled in the body.
#[tokio::test(flavor = "multi_thread")]
async fn a_hidden_second_request_is_not_served() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    let hidden = post(CHAT, GOOD.as_bytes());
    let body = [b"0\r\n\r\n", &hidden[..]].concat();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: g\r\ncontent-length: {}\r\ntransfer-encoding: chunked\r\n\r\n",
        body.len()
    );
    let mut connection = RawHttpConnection::open(world.gateway.running.address).await;
    connection.send(&[head.as_bytes(), &body].concat()).await;
    assert_eq!(connection.response().await.status, 400);
    connection.finish().await;
    assert_still_serving(&world).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_methods_name_the_right_one() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    for (method, path, allowed) in [
        ("GET", CHAT, "POST"),
        ("DELETE", COMPLETIONS, "POST"),
        ("PUT", "/generate", "POST"),
        ("POST", "/v1/models", "GET"),
    ] {
        let request = format!("{method} {path} HTTP/1.1\r\nhost: g\r\ncontent-length: 0\r\n\r\n");
        let response = exchange(world.gateway.running.address, request.as_bytes()).await;
        let error = check(&response, 405, "method_not_allowed", method, path);
        assert!(error["message"].as_str().unwrap().contains(path), "{error}");
        let allow = response
            .head
            .lines()
            .find_map(|line| line.to_ascii_lowercase().strip_prefix("allow: ").map(str::to_owned));
        assert!(
            allow.is_some_and(|allow| allow.contains(&allowed.to_ascii_lowercase())),
            "{}",
            response.head
        );
    }
    assert_still_serving(&world).await;
}

/// A request that arrives byte by byte is served.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_in_single_bytes_is_served() {
    let world = TestFleetBuilder::sglang().pairs(1).start().await;
    let mut connection = RawHttpConnection::open(world.gateway.running.address).await;
    for byte in post(CHAT, GOOD.as_bytes()) {
        assert!(connection.send(&[byte]).await);
        tokio::task::yield_now().await;
    }
    let response = connection.response().await;
    assert_eq!(response.status, 200, "{response:?}");
}

/// An engine's own rejection is forwarded unchanged.
#[tokio::test(flavor = "multi_thread")]
async fn an_engines_refusal_is_passed_on() {
    let world = TestFleetBuilder::sglang().pairs(1).tune(|mut config| {
        config.context_tokens = 100;
        config.fast()
    });
    let world = world.start().await;
    let body = json!({"model": "sim", "prompt": "word ".repeat(1000), "max_tokens": 2});
    let started = std::time::Instant::now();
    let response = world.post(COMPLETIONS, body.to_string()).await;
    assert_eq!(response.status(), 400);
    assert!(started.elapsed() < TEST_TIMEOUT.min(Duration::from_secs(5)));
    let body: Value = response.json().await.unwrap();
    assert!(body.to_string().contains("context length"), "{body}");
}

/// Invalid settings: the command line, and the text that the error must contain.
const WRONG_SETTINGS: &[(&str, &str)] = &[
    ("gateway --listen=nowhere", "--listen"),
    ("gateway", "no engines are configured"),
    ("gateway --registration --model=m=/nonexistent", "--model m=/nonexistent: tokenizer.json"),
    ("gateway --registration --tls-cert=/no/cert --tls-key=/no/key", "--tls-cert /no/cert: "),
    ("gateway --registration --tls-cert=/no/cert", "--tls-cert needs --tls-key"),
    (
        "gateway --registration --admin-tls-cert=/no/cert --admin-tls-key=/no/key",
        "--admin-tls-cert /no/cert: ",
    ),
    ("gateway --registration --queue-peer=x", "--queue-peer"),
    (
        "gateway --registration --queue-peer=x:1 --policy=lmetric",
        "--queue-peer: policy lmetric cannot be shared between gateways; use --policy predictive",
    ),
    ("gateway --registration --queue-peer=https://x:1 --queue-peer-ca=/no/ca", "--queue-peer-ca /no/ca: "),
    ("gateway --registration --engine-ca=/no/ca", "--engine-ca /no/ca: "),
    ("gateway --registration --access-file=/no/keys", "--access-file /no/keys: "),
    ("gateway --registration --model-alias-file=/no/aliases", "--model-alias-file /no/aliases: "),
    ("gateway --registration --lora-adapter-file=/no/adapters", "--lora-adapter-file /no/adapters: "),
    ("gateway --registration --otlp-endpoint=https://c:4318 --otlp-ca=/no/ca", "/no/ca: "),
    ("gateway --instances-file=/no/engines", "--instances-file /no/engines: "),
    ("gateway --discovery=rbg --rbg-config=/no/rbg", "--rbg-config /no/rbg: "),
    ("gateway --discovery=kubernetes --kubeconfig=/no/kube", "/no/kube"),
    ("gateway --config=/no/config", "--config"),
    ("config check", "no engines are configured"),
    ("config check --registration --model=m=/nonexistent", "--model m=/nonexistent: tokenizer.json"),
    ("config check --registration --model-alias-file=/no/aliases", "--model-alias-file /no/aliases: "),
    ("config check --registration --lora-adapter-file=/no/adapters", "--lora-adapter-file /no/adapters: "),
    ("config check --registration --tls-cert=/no/cert --tls-key=/no/key", "--tls-cert /no/cert: "),
    ("config check --registration --queue-peer=x:1 --policy=random", "policy random cannot be shared"),
    ("config check --instances-file=/no/engines", "--instances-file /no/engines: "),
    ("config check --discovery=rbg --rbg-config=/no/rbg", "--rbg-config /no/rbg: "),
    ("operator --kubeconfig=/no/kube --admin-listen=127.0.0.1:0", "--kubeconfig /no/kube: "),
    ("operator --start-port=60000 --port-range=60000 --admin-listen=127.0.0.1:0", "--port-range"),
    ("master --rpc_prot=1", "did you mean --rpc_port?"),
    ("master --config_path=/no/config", "--config_path"),
    ("store", "MOONCAKE_MASTER"),
    ("store --config=/no/config", "cannot read /no/config"),
    ("store-holder --socket=/no/folder/socket", "--socket /no/folder/socket: "),
    ("kv --master", "--master"),
    ("sidecar --engine-ca=/no/ca", "--engine-ca /no/ca: "),
    ("sidecar --gateway-ca=/no/ca", "--gateway-ca /no/ca: "),
    ("explain --admin=https://127.0.0.1:1 --admin-ca=/no/ca", "--admin-ca /no/ca: "),
    ("up --prefill=x", "--prefill"),
    ("loadtest engine --role=x", "--role"),
    ("kubectl status --output=x", "--output"),
    ("doctor --listen=nowhere", "--listen"),
];

/// Every command exits with code 2 before it serves, and names the setting.
#[tokio::test(flavor = "multi_thread")]
async fn wrong_settings_are_refused_at_the_start() {
    for (line, named) in WRONG_SETTINGS {
        let args: Vec<&str> = line.split(' ').collect();
        let ended = MoongateProcess::run(&args).await;
        assert_eq!(ended.status.code(), Some(2), "moongate {line}: {ended:?}");
        assert!(ended.stderr.contains(named), "moongate {line}: no {named:?} in {}", ended.stderr);
    }
    let doctor = MoongateProcess::run(&["doctor", "--registration", "--model=m=/nonexistent"]).await;
    assert_eq!(doctor.status.code(), Some(1), "{doctor:?}");
    assert!(doctor.stdout.contains("ERROR --model m=/nonexistent: tokenizer.json"), "{}", doctor.stdout);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_variable_is_named_with_the_one_that_may_be_meant() {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_moongate"));
    command.args(["config", "check", "--registration"]).env_clear();
    command.env("MOONGATE_POLCY", "random").env("MOONGATE_GATEWAY_SERVICE_HOST", "10.0.0.1");
    let ended = MoongateProcess::spawn(&mut command).wait().await;
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    let warnings: Vec<&str> = ended.stderr.lines().filter(|line| line.contains("WARN")).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("MOONGATE_POLCY") && warnings[0].contains("did you mean MOONGATE_POLICY?"));
}
