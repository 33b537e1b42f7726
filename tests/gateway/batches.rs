//! Files and batches: uploads, results, cancellation, tenants, and a gateway that is killed in the middle.

mod under_load;

use std::path::Path;
use std::time::Duration;

use moongate_testkit::S3Server;
use reqwest::Method;
use reqwest::header::HeaderValue;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::fleet::{TestEngines, TestFleetBuilder};
use crate::harness::metrics::metric_at;
use crate::harness::process::{GatewayAddresses, MoongateProcess};
use crate::harness::{TEST_TIMEOUT, client, openai_error};

const KEY_A: &str = "sk-of-team-a-0123456789";
const KEY_B: &str = "sk-of-team-b-0123456789";

/// A gateway process with batches, in front of engines that outlive it.
struct BatchGateway {
    binary: MoongateProcess,
    at: GatewayAddresses,
    flags: Vec<String>,
    environment: Vec<(&'static str, String)>,
    key: Option<&'static str>,
}

impl BatchGateway {
    async fn start(engines: &TestEngines, folder: &Path, more: &[String]) -> Self {
        let batch_store = format!("--batch-store={}", folder.join("batches").display());
        Self::start_at(engines, batch_store, Vec::new(), more).await
    }

    /// A gateway whose files and batches are in a bucket.
    async fn start_with_bucket(engines: &TestEngines, server: &S3Server, more: &[String]) -> Self {
        let batch_store = format!("--batch-store=s3://{}/gateways", server.bucket());
        Self::start_at(engines, batch_store, server.environment().to_vec(), more).await
    }

    async fn start_at(
        engines: &TestEngines,
        batch_store: String,
        environment: Vec<(&'static str, String)>,
        more: &[String],
    ) -> Self {
        let mut flags = engines.flags();
        flags.extend(["--health-interval=0s".to_owned(), batch_store]);
        flags.extend_from_slice(more);
        Self::with_flags(flags, environment).await
    }

    async fn with_flags(flags: Vec<String>, environment: Vec<(&'static str, String)>) -> Self {
        let (binary, at) = MoongateProcess::gateway_with_environment(&flags, &environment).await;
        let gateway = Self { binary, at, flags, environment, key: None };
        gateway.wait_until("the engines are usable", async || gateway.status("/ready").await == 200).await;
        gateway
    }

    /// Kills the process without a warning, and starts another one.
    async fn kill_and_restart(self) -> Self {
        let (flags, environment) = (self.flags.clone(), self.environment.clone());
        self.kill().await;
        Self::with_flags(flags, environment).await
    }

    /// Kills the process without a warning.
    async fn kill(self) {
        self.binary.signal("KILL").await;
        self.binary.wait().await;
    }

    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let request = client().request(method, format!("http://{}{path}", self.at.public));
        match self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    async fn status(&self, path: &str) -> u16 {
        self.request(Method::GET, path).send().await.unwrap().status().as_u16()
    }

    async fn get(&self, path: &str) -> Value {
        let response = self.request(Method::GET, path).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
        response.json().await.unwrap()
    }

    async fn upload(&self, content: &str) -> String {
        let form = format!(
            "--b0\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b0\r\nContent-Disposition: form-data; \
             name=\"file\"; filename=\"in.jsonl\"\r\nContent-Type: application/octet-stream\r\n\r\n{content}\r\n--b0--\r\n"
        );
        let request = self.request(Method::POST, "/v1/files").body(form);
        let response =
            request.header("content-type", "multipart/form-data; boundary=b0").send().await.unwrap();
        assert_eq!(response.status(), 200);
        let file: Value = response.json().await.unwrap();
        assert_eq!((&file["bytes"], &file["filename"]), (&json!(content.len()), &json!("in.jsonl")));
        file["id"].as_str().unwrap().to_owned()
    }

    async fn create(&self, file: &str) -> String {
        let batch = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}});
        let response = self.request(Method::POST, "/v1/batches").json(&batch).send().await.unwrap();
        assert_eq!(response.status(), 200);
        let batch: Value = response.json().await.unwrap();
        assert_eq!((&batch["object"], &batch["metadata"]["a"]), (&json!("batch"), &json!("b")));
        batch["id"].as_str().unwrap().to_owned()
    }

    async fn batch(&self, id: &str) -> Value {
        self.get(&format!("/v1/batches/{id}")).await
    }

    /// Waits until the batch has this status.
    async fn wait_for(&self, id: &str, status: &str) -> Value {
        self.wait_until(status, async || self.batch(id).await["status"] == status).await;
        self.batch(id).await
    }

    async fn wait_until(&self, what: &str, condition: impl AsyncFn() -> bool) {
        let waited = tokio::time::timeout(TEST_TIMEOUT, async {
            while !condition().await {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        assert!(waited.await.is_ok(), "not within {TEST_TIMEOUT:?}: {what}\n{}", self.binary.output_text());
    }

    async fn results(&self, file: &Value) -> Vec<Value> {
        let path = format!("/v1/files/{}/content", file.as_str().unwrap());
        let text = self.request(Method::GET, &path).send().await.unwrap().text().await.unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Status and error code of a request that fails.
    async fn failure(&self, method: Method, path: &str, body: Option<&Value>) -> (u16, String) {
        let mut request = self.request(method, path);
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let error = openai_error(&response.bytes().await.unwrap());
        (status, error["code"].as_str().unwrap().to_owned())
    }
}

fn line(id: usize, body: &Value) -> String {
    json!({"custom_id": format!("id-{id}"), "method": "POST", "url": "/v1/completions", "body": body})
        .to_string()
}

fn lines(count: usize, tokens: u32) -> String {
    let body = |id| json!({"model": "sim", "prompt": format!("number {id}"), "max_tokens": tokens});
    (0..count).map(|id| line(id, &body(id)) + "\n").collect()
}

fn ids(results: &[Value]) -> Vec<String> {
    results.iter().map(|result| result["custom_id"].as_str().unwrap().to_owned()).collect()
}

fn ids_of(numbers: impl Iterator<Item = usize>) -> Vec<String> {
    numbers.map(|id| format!("id-{id}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_runs_and_its_results_are_in_order() {
    let folder = TempDir::new().unwrap();
    let engines = TestFleetBuilder::sglang().pairs(1).engines().await;
    let gateway = BatchGateway::start(&engines, folder.path(), &[]).await;
    let input = lines(20, 4) + &line(20, &json!({"model": "nope", "prompt": "x"}));
    let file = gateway.upload(&input).await;
    assert_eq!(gateway.get(&format!("/v1/files/{file}")).await["purpose"], "batch");
    let id = gateway.create(&file).await;
    let batch = gateway.wait_for(&id, "completed").await;
    assert_eq!(batch["request_counts"], json!({"total": 21, "completed": 20, "failed": 1}));
    let results = gateway.results(&batch["output_file_id"]).await;
    assert_eq!(ids(&results), ids_of(0..20));
    for result in &results {
        let response = &result["response"];
        assert_eq!((&response["status_code"], &result["error"]), (&json!(200), &Value::Null));
        assert_eq!(response["body"]["usage"]["completion_tokens"], 4, "{result}");
    }
    let errors = gateway.results(&batch["error_file_id"]).await;
    assert_eq!(ids(&errors), ["id-20"]);
    assert_eq!(errors[0]["response"]["status_code"], 404);
    assert_eq!(errors[0]["response"]["body"]["error"]["code"], "model_not_found");

    let files = gateway.get("/v1/files?order=asc").await;
    assert_eq!(files["data"].as_array().unwrap().len(), 3);
    let first = gateway.get("/v1/files?order=asc&limit=1").await;
    assert_eq!((&first["data"][0]["id"], &first["has_more"]), (&json!(file), &json!(true)));
    assert_eq!(gateway.get("/v1/batches").await["data"][0]["id"], json!(id));
    let admin = format!("http://{}", gateway.at.admin);
    let metric = async |name| metric_at(&client(), &admin, name).await;
    assert_eq!(metric("moongate_batch_lines_total{outcome=\"completed\"}").await, 20);
    assert_eq!(metric("moongate_batches{status=\"completed\"}").await, 1);
    assert!(metric("moongate_batch_stored_bytes").await > input.len() as u64);

    let deleted = gateway.request(Method::DELETE, &format!("/v1/files/{file}")).send().await.unwrap();
    assert_eq!(deleted.json::<Value>().await.unwrap()["deleted"], true);
    assert_eq!(gateway.status(&format!("/v1/files/{file}")).await, 404);
    let cancel = format!("/v1/batches/{id}/cancel");
    assert_eq!(gateway.failure(Method::POST, &cancel, None).await, (400, "invalid_request".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_kill_every_line_is_once_in_the_output() {
    let folder = TempDir::new().unwrap();
    let engines = TestFleetBuilder::vllm(moongate_loadtest::engine::VllmConnector::Nixl)
        .plain(1)
        .tune(|mut config| {
            config.service.prefill_base_s = 0.001;
            config
        })
        .engines()
        .await;
    let mut gateway =
        BatchGateway::start(&engines, folder.path(), &["--batch-concurrency=4".to_owned()]).await;
    let file = gateway.upload(&lines(40, 10)).await;
    let id = gateway.create(&file).await;
    for done in [4, 20] {
        let stored = async || gateway.batch(&id).await["request_counts"]["completed"].as_u64() >= Some(done);
        gateway.wait_until("some lines have results", stored).await;
        gateway = gateway.kill_and_restart().await;
    }
    let batch = gateway.wait_for(&id, "completed").await;
    assert_eq!(batch["request_counts"], json!({"total": 40, "completed": 40, "failed": 0}));
    assert_eq!(ids(&gateway.results(&batch["output_file_id"]).await), ids_of(0..40));
    let started = engines.started();
    assert!((40..60).contains(&started), "lines with results run again: {started}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_batch_aborts_its_lines() {
    let folder = TempDir::new().unwrap();
    let engines = TestFleetBuilder::sglang().plain(1).tune(|config| config).engines().await;
    let gateway = BatchGateway::start(&engines, folder.path(), &["--batch-concurrency=2".to_owned()]).await;
    let long = json!({"model": "sim", "prompt": "x", "max_tokens": 100_000, "ignore_eos": true});
    let file = gateway.upload(&(lines(1, 1) + &line(1, &long) + "\n" + &line(2, &long))).await;
    let id = gateway.create(&file).await;
    let first =
        async || gateway.batch(&id).await["request_counts"]["completed"] == 1 && engines.started() == 3;
    gateway.wait_until("the first line has a result", first).await;
    let delete = format!("/v1/files/{file}");
    assert_eq!(gateway.failure(Method::DELETE, &delete, None).await, (400, "invalid_request".to_owned()));
    let cancelled = gateway.request(Method::POST, &format!("/v1/batches/{id}/cancel")).send().await.unwrap();
    assert_eq!(cancelled.json::<Value>().await.unwrap()["status"], "cancelling");
    let batch = gateway.wait_for(&id, "cancelled").await;
    assert_eq!(ids(&gateway.results(&batch["output_file_id"]).await), ["id-0"]);
    let running = async || engines.all().all(|engine| engine.stats().running == 0);
    gateway.wait_until("the engine runs nothing", running).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn other_tenants_and_unknown_ids_get_404() {
    let folder = TempDir::new().unwrap();
    let keys = folder.path().join("access.toml");
    let key = |key: &str, tenant: &str| format!("[[key]]\nkey = \"{key}\"\ntenant = \"{tenant}\"\n");
    std::fs::write(&keys, key(KEY_A, "a") + &key(KEY_B, "b")).unwrap();
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let access = format!("--access-file={}", keys.display());
    let mut gateway = BatchGateway::start(&engines, folder.path(), &[access]).await;
    gateway.key = Some(KEY_A);
    let file = gateway.upload(&lines(2, 1)).await;
    let batch = gateway.create(&file).await;
    gateway.wait_for(&batch, "completed").await;
    gateway.key = Some(KEY_B);
    let not_found = (404, "not_found".to_owned());
    for (file, batch) in [(&*file, &*batch), ("file-0", "batch_0"), ("..%2fx", "..")] {
        for (method, path) in [
            (Method::GET, format!("/v1/files/{file}")),
            (Method::GET, format!("/v1/files/{file}/content")),
            (Method::DELETE, format!("/v1/files/{file}")),
            (Method::GET, format!("/v1/batches/{batch}")),
            (Method::POST, format!("/v1/batches/{batch}/cancel")),
        ] {
            if !path.contains("..") {
                assert_eq!(gateway.failure(method, &path, None).await, not_found, "{path}");
            }
        }
        let body = json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"});
        assert_eq!(gateway.failure(Method::POST, "/v1/batches", Some(&body)).await, not_found, "{file}");
    }
    for path in ["/v1/files", "/v1/batches"] {
        assert_eq!(gateway.get(path).await["data"], json!([]), "{path}");
    }
    for (path, status) in
        [("/v1/files", 200), ("/v1/files/x", 404), ("/v1/batches", 200), ("/v1/batches/x", 404)]
    {
        let response =
            gateway.request(Method::GET, path).header("x-request-id", "mine").send().await.unwrap();
        assert_eq!(
            (response.status().as_u16(), &response.headers()["x-request-id"]),
            (status, &HeaderValue::from_static("mine"))
        );
        let response = gateway.request(Method::GET, path).send().await.unwrap();
        assert!(!response.headers()["x-request-id"].is_empty(), "{path}");
    }
    gateway.key = None;
    assert_eq!(gateway.failure(Method::GET, "/v1/files", None).await, (401, "invalid_api_key".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_are_rejected() {
    let folder = TempDir::new().unwrap();
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let gateway =
        BatchGateway::start(&engines, folder.path(), &["--batch-max-file-bytes=2000".to_owned()]).await;
    let file = gateway.upload("no json\n").await;
    let id = gateway.create(&file).await;
    let batch = gateway.wait_for(&id, "failed").await;
    assert_eq!(batch["errors"]["data"][0]["line"], 1);
    let invalid = (400, "invalid_request".to_owned());
    for (member, value) in [
        ("completion_window", json!("1h")),
        ("endpoint", json!("/v1/models")),
        ("metadata", json!({"a": "b".repeat(600)})),
        ("input_file_id", json!(1)),
    ] {
        let mut body =
            json!({"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"});
        body[member] = value;
        assert_eq!(gateway.failure(Method::POST, "/v1/batches", Some(&body)).await, invalid, "{member}");
    }
    let (status, code) = gateway.failure(Method::POST, "/v1/files", Some(&json!({}))).await;
    assert_eq!((status, &*code), (415, "unsupported_media_type"));
    for path in ["/v1/files?limit=0", "/v1/batches?limit=101", "/v1/files?order=up", "/v1/files?after=x"] {
        assert_eq!(gateway.failure(Method::GET, path, None).await, invalid, "{path}");
    }
    for (length, expected) in [(3000, 400), (200_000, 413)] {
        let form = format!(
            "--b0\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b0\r\nContent-Disposition: form-data; \
             name=\"file\"\r\n\r\n{}\r\n--b0--\r\n",
            "x".repeat(length)
        );
        let request = gateway.request(Method::POST, "/v1/files").body(form);
        let response =
            request.header("content-type", "multipart/form-data; boundary=b0").send().await.unwrap();
        assert_eq!(response.status(), expected);
        let error = openai_error(&response.bytes().await.unwrap());
        assert!(error["message"].as_str().unwrap().contains("--batch-max-file-bytes"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_folder_files_and_batches_are_off() {
    let (_binary, at) = MoongateProcess::gateway(&["--registration".to_owned()]).await;
    for path in ["/v1/files", "/v1/files/a", "/v1/files/a/content", "/v1/batches", "/v1/batches/a"] {
        let response = client().get(format!("http://{}{path}", at.public)).send().await.unwrap();
        assert_eq!(response.status(), 404);
        let error = openai_error(&response.bytes().await.unwrap());
        assert!(error["message"].as_str().unwrap().contains("--batch-store"), "{error}");
    }
}
