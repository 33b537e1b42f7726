//! Every fault has the documented effect.

use std::time::Duration;

use moongate_loadtest::engine::{EngineFault, EngineFaultPlan, SimEngine, SimProtocol, SimRole};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{LONG, chat, client, events, get, post, start, with};

fn streaming() -> Value {
    with(&chat("hello", 10), json!({"stream": true}))
}

/// Bytes received until the socket is closed or the time is over, and whether it was closed.
async fn raw(engine: &SimEngine, body: &Value, patience: Duration) -> (Vec<u8>, bool) {
    let mut socket = TcpStream::connect(engine.addr()).await.expect("a connection");
    let body = body.to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all((head + &body).as_bytes()).await.expect("written");
    let mut bytes = Vec::new();
    let closed = tokio::time::timeout(patience, socket.read_to_end(&mut bytes)).await.is_ok();
    (bytes, closed)
}

fn tokens_in(bytes: &[u8]) -> usize {
    let text = String::from_utf8_lossy(bytes);
    text.lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter_map(|data| serde_json::from_str::<Value>(data).ok())
        .filter(|event| event["choices"][0]["delta"]["content"].as_str().is_some_and(|text| !text.is_empty()))
        .count()
}

#[tokio::test]
async fn status_500_and_the_error_event() {
    let engine = start(SimRole::Plain, SimProtocol::Sglang).await;
    engine.set_fault(EngineFault::Status500);
    assert_eq!(post(&engine, "/v1/chat/completions", &chat("x", 1)).await.0, 500);
    engine.set_fault(EngineFault::SseError);
    assert_eq!(events(&engine, "/v1/chat/completions", &streaming()).await[0]["error"]["code"], 500);
    assert_eq!(post(&engine, "/v1/chat/completions", &chat("x", 1)).await.0, 500);
    // Health and model requests are not affected.
    assert_eq!(get(&engine, "/v1/models").await["data"][0]["id"], "sim");
    engine.set_fault(EngineFault::None);
    assert_eq!(post(&engine, "/v1/chat/completions", &chat("x", 1)).await.0, 200);
    assert_eq!((engine.stats().failed, engine.stats().finished), (3, 1));
}

#[tokio::test]
async fn plan_can_expire_and_can_affect_all_endpoints() {
    let engine = start(SimRole::Plain, SimProtocol::Vllm).await;
    engine.set_fault(EngineFaultPlan { times: Some(2), ..EngineFault::Status500.into() });
    for expected in [500, 500, 200] {
        assert_eq!(post(&engine, "/v1/chat/completions", &chat("x", 1)).await.0, expected);
    }
    let plan = json!({"fault": "status500", "all_endpoints": true, "times": 1});
    assert_eq!(post(&engine, "/_sim/fault", &plan).await.0, 200);
    assert_eq!(
        client().get(format!("{}/health", engine.url())).send().await.expect("a response").status(),
        500
    );
    let bad =
        client().post(format!("{}/_sim/fault", engine.url())).body("{}").send().await.expect("a response");
    assert_eq!(bad.status(), 400);
}

#[tokio::test]
async fn a_closed_connection_before_the_first_byte() {
    let engine = start(SimRole::Plain, SimProtocol::Sglang).await;
    engine.set_fault(EngineFault::CloseBeforeFirstByte);
    assert_eq!(raw(&engine, &streaming(), LONG).await, (Vec::new(), true));
}

#[tokio::test]
async fn garbage_instead_of_http_and_instead_of_json() {
    let engine = start(SimRole::Plain, SimProtocol::Sglang).await;
    engine.set_fault(EngineFault::Garbage);
    let (bytes, closed) = raw(&engine, &streaming(), LONG).await;
    assert!(closed && !bytes.is_empty() && !bytes.starts_with(b"HTTP"));
    engine.set_fault(EngineFault::GarbageBody);
    let response = client()
        .post(format!("{}/v1/chat/completions", engine.url()))
        .json(&chat("x", 1))
        .send()
        .await
        .expect("200");
    assert_eq!(response.status(), 200);
    assert!(response.json::<Value>().await.is_err());
}

#[tokio::test]
async fn disconnect_happens_after_the_exact_token_count() {
    for protocol in [SimProtocol::Sglang, SimProtocol::Vllm] {
        let engine = start(SimRole::Plain, protocol).await;
        for tokens in [0, 3] {
            engine.set_fault(EngineFault::DisconnectMidStream { tokens });
            let (bytes, closed) = raw(&engine, &streaming(), LONG).await;
            let text = String::from_utf8_lossy(&bytes);
            assert!(closed && !text.ends_with("0\r\n\r\n") && !text.contains("[DONE]"), "{text}");
            assert_eq!(tokens_in(&bytes) as u64, tokens, "{text}");
        }
        // A shorter response ends normally.
        engine.set_fault(EngineFault::DisconnectMidStream { tokens: 100 });
        assert!(!events(&engine, "/v1/chat/completions", &streaming()).await.is_empty());
        engine.set_fault(EngineFault::DisconnectMidStream { tokens: 2 });
        let response = client()
            .post(format!("{}/v1/chat/completions", engine.url()))
            .json(&chat("x", 5))
            .send()
            .await
            .expect("200");
        assert!(response.bytes().await.is_err(), "half a JSON body");
    }
}

#[tokio::test]
async fn hang_mid_stream_and_from_the_start() {
    let engine = start(SimRole::Plain, SimProtocol::Vllm).await;
    engine.set_fault(EngineFault::HangMidStream { tokens: 2 });
    let (bytes, closed) = raw(&engine, &streaming(), Duration::from_millis(500)).await;
    assert!(!closed);
    assert_eq!(tokens_in(&bytes), 2);
    engine.set_fault(EngineFault::Hang);
    assert_eq!(raw(&engine, &streaming(), Duration::from_millis(300)).await, (Vec::new(), false));
    // Both detected the client's disconnect.
    assert!(engine.wait_for(LONG, |stats| stats.aborted_by_disconnect == 2 && stats.active == 0).await);
}

#[tokio::test]
async fn refusing_engine_closes_its_ports_and_recovers() {
    let engine = start(SimRole::Prefill, SimProtocol::Sglang).await;
    let bootstrap = engine.bootstrap_addr().expect("a prefill engine");
    let mut open = TcpStream::connect(engine.addr()).await.expect("a connection");
    assert!(engine.wait_for(LONG, |stats| stats.open_connections == 1).await);
    engine.set_fault(EngineFaultPlan { duration_ms: Some(400), ..EngineFault::Refuse.into() });
    assert!(engine.wait_for(LONG, |stats| stats.open_connections == 0).await);
    assert!(!matches!(open.read(&mut [0; 1]).await, Ok(1..)));
    for address in [engine.addr(), bootstrap] {
        assert!(TcpStream::connect(address).await.is_err(), "{address}");
    }
    let back = async {
        while TcpStream::connect(engine.addr()).await.is_err() || TcpStream::connect(bootstrap).await.is_err()
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LONG, back).await.expect("it listens again");
}

#[tokio::test]
async fn a_slow_engine_takes_longer() {
    let engine = start(SimRole::Plain, SimProtocol::Sglang).await;
    // 48 ms of prefill and 20 ms per token, a thousand times faster, and slowed down by ten thousand.
    engine.set_fault(EngineFault::Slow { factor: 10_000.0 });
    let started = std::time::Instant::now();
    assert_eq!(post(&engine, "/v1/chat/completions", &chat("x", 2)).await.0, 200);
    assert!(started.elapsed() >= Duration::from_millis(600), "{:?}", started.elapsed());
}
