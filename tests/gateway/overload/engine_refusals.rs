//! The refusals of full engines reach the client.

use axum::http::StatusCode;

use crate::harness::gateway::TestGateway;
use crate::harness::scripted::{EngineScript, ScriptedEngine, ScriptedEngineResponse};
use crate::harness::{client, openai_error};

/// A gateway in front of one engine with this response.
async fn gateway_with_engine(answer: ScriptedEngineResponse) -> (TestGateway, ScriptedEngine) {
    let script = EngineScript {
        model: "sim",
        dp_size: 1,
        sglang_role: None,
        mooncake_query: None,
        server_info: Vec::new(),
    };
    let engine = ScriptedEngine::start(script, answer).await;
    let flags = [format!("--worker=http://{}", engine.address), "--retry-backoff=1ms".to_owned()];
    (TestGateway::start_ready(&flags).await, engine)
}

async fn send(gateway: &TestGateway, stream: bool) -> reqwest::Response {
    let body = format!(r#"{{"model":"sim","prompt":"a","stream":{stream}}}"#);
    client().post(gateway.url("/v1/completions")).body(body).send().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_engine_s_status_and_retry_after_reach_the_client() {
    for (status, code) in [(503, "engine_unavailable"), (429, "engine_rejected")] {
        for (path, stream) in [("completions", false), ("completions", true), ("embeddings", false)] {
            let refusal = ScriptedEngineResponse {
                status: StatusCode::from_u16(status).unwrap(),
                headers: vec![("retry-after", "17")],
                ..ScriptedEngineResponse::json(r#"{"error":{"message":"full","type":"x","param":null}}"#)
            };
            let (gateway, _engine) = gateway_with_engine(refusal).await;
            let body = format!(r#"{{"model":"sim","prompt":"a","input":"a","stream":{stream}}}"#);
            let request =
                client().post(gateway.url(&format!("/v1/{path}"))).header("content-type", "application/json");
            let response = request.body(body).send().await.unwrap();
            let shown = format!("{status} {path} {stream}: {response:?}");
            assert_eq!(response.status(), status, "{shown}");
            assert_eq!(response.headers()["retry-after"], "17", "{shown}");
            assert_eq!(openai_error(&response.bytes().await.unwrap())["code"], code, "{shown}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_does_not_say_when_is_asked_again_in_a_second() {
    let (gateway, _engine) = gateway_with_engine(ScriptedEngineResponse {
        status: StatusCode::SERVICE_UNAVAILABLE,
        ..ScriptedEngineResponse::json("loading")
    })
    .await;
    let response = send(&gateway, false).await;
    assert_eq!(
        (response.status().as_u16(), &response.headers()["retry-after"]),
        (503, &"1".parse().unwrap())
    );
}

/// However an error event is written, and though `[DONE]` follows it, the request has failed.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_event_with_other_members_is_an_error() {
    for error in [
        r#"{"object":"error","id":"a","error":{"message":"broken","code":500}}"#,
        r#"{"id":"a","choices":[],"error":{"message":"broken"}}"#,
    ] {
        let (gateway, _engine) =
            gateway_with_engine(ScriptedEngineResponse::events(format!("data: {error}\n\ndata: [DONE]\n\n")))
                .await;
        let response = send(&gateway, true).await;
        assert_eq!(response.status(), 502, "{error}");
        assert_eq!(openai_error(&response.bytes().await.unwrap())["code"], "worker_failed");
        let metrics = client().get(gateway.admin_url("/metrics")).send().await.unwrap().text().await.unwrap();
        assert!(
            metrics.contains(r#"moongate_requests_total{api="completions",code="worker_failed"} 1"#),
            "{metrics}"
        );
        assert!(!metrics.contains(r#"code="ok""#), "{metrics}");
    }
}

/// A response that is not a stream has no first token that a client could see.
#[tokio::test(flavor = "multi_thread")]
async fn only_streams_have_a_first_token() {
    let stream = "data: {\"choices\":[]}\n\ndata: {\"choices\":[]}\n\ndata: [DONE]\n\n";
    for (answer, streams) in
        [(ScriptedEngineResponse::json(r#"{"choices":[]}"#), 0), (ScriptedEngineResponse::events(stream), 1)]
    {
        let (gateway, _engine) = gateway_with_engine(answer).await;
        let response = send(&gateway, streams == 1).await;
        assert_eq!(response.status(), 200);
        response.bytes().await.unwrap();
        let metrics = client().get(gateway.admin_url("/metrics")).send().await.unwrap().text().await.unwrap();
        let counted = format!(r#"moongate_ttft_seconds_count{{api="completions"}} {streams}"#);
        assert!(metrics.contains(&counted), "{counted}: {metrics}");
    }
}
