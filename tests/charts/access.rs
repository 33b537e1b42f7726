//! How clients reach the gateway: an HTTPRoute, and the test of a release.

use serde_json::json;

use super::rendered::{Rendered, rejected};

const WORKER: &str =
    "--set=engines.worker.engine=vllm,engines.worker.model=m,engines.worker.servedModelName=served";

#[test]
fn an_http_route_leads_to_the_gateway() {
    let enabled = "--set=gateway.httpRoute.enabled=true,gateway.service.port=81";
    let details = "--set=gateway.httpRoute.parentRefs[0].name=public,gateway.httpRoute.hostnames[0]=llm.example,\
                   gateway.httpRoute.timeouts.request=0s";
    let rendered = Rendered::with(&[enabled, details]);
    let spec = &rendered.object("HTTPRoute", "release-gateway")["spec"];
    assert_eq!(spec["parentRefs"], json!([{ "name": "public" }]));
    assert_eq!(spec["hostnames"], json!(["llm.example"]));
    let rule = &spec["rules"][0];
    assert_eq!(rule["backendRefs"], json!([{ "name": "release-gateway", "port": 81 }]));
    assert_eq!(rule["timeouts"], json!({ "request": "0s" }));
    let service = &rendered.object("Service", "release-gateway")["spec"]["ports"][0];
    assert_eq!(service["port"], 81);
    assert!(rejected(&[enabled]).contains("parentRefs"));
    assert!(Rendered::with(&[]).find("HTTPRoute", "release-gateway").is_none());
}

#[test]
fn the_test_of_a_release_sends_one_chat_completion() {
    let rendered = Rendered::with(&[WORKER]);
    let test = rendered.object("Pod", "release-test");
    assert_eq!(test["metadata"]["annotations"]["helm.sh/hook"], "test");
    let container = &test["spec"]["containers"][0];
    assert_eq!(container["command"], json!(["curl"]));
    let arguments = container["args"].as_array().unwrap();
    assert_eq!(arguments[0], "http://release-gateway:8000/v1/chat/completions");
    let body: serde_json::Value = serde_json::from_str(arguments.last().unwrap().as_str().unwrap()).unwrap();
    assert_eq!([&body["model"], &body["messages"][0]["role"]], ["served", "user"]);

    let guarded = "--set=gateway.tls.secret=tls,test.apiKeySecret=client,test.model=other";
    let rendered = Rendered::with(&[WORKER, guarded]);
    let container = &rendered.object("Pod", "release-test")["spec"]["containers"][0];
    let arguments = container["args"].as_array().unwrap();
    assert!(arguments[0].as_str().unwrap().starts_with("https://"));
    assert!(arguments.iter().any(|argument| argument == "authorization: Bearer $(KEY)"));
    assert_eq!(container["env"][0]["valueFrom"]["secretKeyRef"], json!({ "name": "client", "key": "key" }));
    assert!(arguments.last().unwrap().as_str().unwrap().contains("\"other\""));
    assert!(Rendered::with(&[]).find("Pod", "release-test").is_none(), "there is no model");
}
