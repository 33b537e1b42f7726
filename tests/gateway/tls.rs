//! TLS of outgoing connections: gateway to engines, sidecar to engine and gateways, `moongate explain` to a gateway.

use std::time::Duration;

use clap::Parser as _;
use moongate_loadtest::engine::SimEngine;
use moongate_runtime::Supervisor;
use moongate_sidecar::SidecarOptions;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::fleet::TestFleetBuilder;
use crate::harness::gateway::TestGateway;
use crate::harness::process::MoongateProcess;
use crate::harness::tls::{TlsTerminator, generate_certificates};
use crate::harness::{TEST_TIMEOUT, client};

/// Certificates, as text and as files.
struct TlsTestCertificates {
    folder: TempDir,
    authority: String,
    server: (String, String),
}

impl TlsTestCertificates {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let (authority, server, client) = generate_certificates();
        for (name, text) in [
            ("ca.pem", &authority),
            ("server.pem", &server.0),
            ("server.key", &server.1),
            ("client.pem", &client.0),
            ("client.key", &client.1),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        Self { folder, authority, server }
    }

    /// Flags in which `{}` is the folder.
    fn flags(&self, flags: &[&str]) -> Vec<String> {
        let folder = self.folder.path().to_str().unwrap();
        flags.iter().map(|flag| flag.replace("{}", folder)).collect()
    }

    /// Puts TLS in front of an engine; with `clients`, it requires client certificates.
    async fn before(&self, engine: &SimEngine, clients: bool) -> TlsTerminator {
        TlsTerminator::start(engine.addr(), &self.server, clients.then_some(self.authority.as_str())).await
    }
}

async fn complete(gateway: &TestGateway, stream: bool) -> (u16, String) {
    let body = json!({"model": "sim", "prompt": "over TLS", "max_tokens": 3, "stream": stream});
    let sent = client().post(gateway.url("/v1/completions")).json(&body).send().await.unwrap();
    (sent.status().as_u16(), sent.text().await.unwrap())
}

/// Waits until the gateway reports its only engine as not ready, with a reason that contains `part`.
async fn waits_because(gateway: &TestGateway, part: &str) {
    let mut last = Value::Null;
    let waited = tokio::time::timeout(TEST_TIMEOUT, async {
        loop {
            last = client().get(gateway.admin_url("/ready")).send().await.unwrap().json().await.unwrap();
            if last["waiting"][0]["reason"].as_str().is_some_and(|reason| reason.contains(part)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    assert!(waited.await.is_ok(), "no {part:?} in {last}");
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_require_client_certificates_work_over_tls() {
    let files = TlsTestCertificates::new();
    let engines = TestFleetBuilder::sglang().pairs(1).engines().await;
    let prefill = files.before(&engines.prefills[0], true).await;
    let decode = files.before(&engines.decodes[0], true).await;
    let mut flags = files.flags(&[
        "--engine-ca={}/ca.pem",
        "--engine-tls-cert={}/client.pem",
        "--engine-tls-key={}/client.key",
        "--health-interval=50ms",
    ]);
    let bootstrap = engines.prefills[0].bootstrap_addr().unwrap().port();
    flags.push(format!("--prefill={},{bootstrap}", prefill.url));
    flags.push(format!("--decode={}", decode.url));
    let gateway = TestGateway::start_ready(&flags).await;
    for stream in [false, true, true] {
        let (status, text) = complete(&gateway, stream).await;
        assert_eq!(status, 200, "{text}");
        assert!(!stream || text.ends_with("data: [DONE]\n\n"), "{text}");
    }
    assert_eq!(engines.started(), 6, "three requests, two legs each");
    let before = [prefill.handshakes(), decode.handshakes()];
    assert!(before.iter().all(|count| *count > 0));
    let (open, _) = gateway.running.engine_connections();
    assert!(open > 0, "TLS connections are reused");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_with_an_unexpected_certificate_is_rejected() {
    let files = TlsTestCertificates::new();
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let worker = files.before(&engines.workers[0], false).await;
    let by_address = worker.url.replace("localhost", "127.0.0.1");
    let start = async |url: &str, flags: &[&str]| {
        let mut flags = files.flags(flags);
        flags.push(format!("--worker={url}"));
        TestGateway::start(&flags).await
    };
    let unknown = files.folder.path().join("unknown.pem");
    std::fs::write(&unknown, generate_certificates().0).unwrap();
    waits_because(&start(&worker.url, &["--engine-ca={}/unknown.pem"]).await, "configure the CA").await;
    waits_because(&start(&by_address, &["--engine-ca={}/ca.pem"]).await, "name").await;
    let plain = engines.workers[0].url().replace("http://", "https://");
    waits_because(&start(&plain, &["--engine-ca={}/ca.pem"]).await, "if it does not use TLS").await;
    let named = files.flags(&["--engine-ca={}/ca.pem", "--engine-tls-name=localhost"]);
    let named = TestGateway::start_ready(&[named, vec![format!("--worker={by_address}")]].concat()).await;
    assert_eq!(complete(&named, false).await.0, 200);
    assert_eq!(engines.started(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_and_registrations_may_name_engines_with_tls() {
    let files = TlsTestCertificates::new();
    let engines =
        TestFleetBuilder::vllm(moongate_loadtest::engine::VllmConnector::Nixl).plain(2).engines().await;
    let [listed, registered] =
        [files.before(&engines.workers[0], false).await, files.before(&engines.workers[1], false).await];
    let list = format!("[[instance]]\nurl = \"{}\"\nrole = \"plain\"\n", listed.url);
    std::fs::write(files.folder.path().join("engines.toml"), list).unwrap();
    let flags = files.flags(&["--engine-ca={}/ca.pem", "--instances-file={}/engines.toml", "--registration"]);
    let gateway = TestGateway::start_ready(&flags).await;
    let registration = json!({"url": registered.url, "role": "plain"});
    let sent = client().post(gateway.admin_url("/workers")).json(&registration).send().await.unwrap();
    assert!(sent.status().is_success());
    while registered.handshakes() == 0 || engines.workers[1].stats().started == 0 {
        assert_eq!(complete(&gateway, false).await.0, 200);
    }
}

#[derive(Debug, clap::Parser)]
struct SidecarTlsTestArgs {
    #[command(flatten)]
    options: SidecarOptions,
}

#[tokio::test(flavor = "multi_thread")]
async fn sidecar_and_explain_reach_a_tls_admin_listener() {
    let files = TlsTestCertificates::new();
    let engines = TestFleetBuilder::sglang().plain(1).engines().await;
    let worker = files.before(&engines.workers[0], true).await;
    let shown =
        ["--engine-ca={}/ca.pem", "--engine-tls-cert={}/client.pem", "--engine-tls-key={}/client.key"];
    let gateway = [
        "--registration",
        "--admin-tls-cert={}/server.pem",
        "--admin-tls-key={}/server.key",
        "--admin-tls-client-ca={}/ca.pem",
        "--health-interval=0s",
    ];
    let (binary, at) = MoongateProcess::gateway(&files.flags(&[&shown[..], &gateway].concat())).await;

    let mut flags = files.flags(&[&shown[..], &["sidecar", "--listen=127.0.0.1:0"]].concat());
    flags.rotate_left(3);
    flags.extend(files.flags(&[
        "--gateway-ca={}/ca.pem",
        "--gateway-tls-name=localhost",
        "--gateway-tls-cert={}/client.pem",
        "--gateway-tls-key={}/client.key",
    ]));
    flags.push(format!("--engine-url={}", worker.url));
    flags.push(format!("--gateway=https://{}", at.admin));
    let options = SidecarTlsTestArgs::try_parse_from(flags).unwrap().options;
    let supervisor = Supervisor::new();
    let sidecar = moongate_sidecar::start(options, &supervisor).unwrap();
    let url = format!("http://{sidecar}/settled");
    let settled = tokio::time::timeout(TEST_TIMEOUT, async {
        while client().get(&url).send().await.unwrap().status() != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let status = async || client().get(format!("http://{sidecar}/status")).send().await.unwrap().text().await;
    assert!(settled.await.is_ok(), "{:?}\n{}", status().await, binary.output_text());

    let body = json!({"model": "sim", "prompt": "over TLS", "max_tokens": 1});
    let asked = client().post(format!("http://{}/v1/completions", at.public)).header("x-request-id", "mine");
    assert_eq!(asked.json(&body).send().await.unwrap().status(), 200);
    let explain = async |flags: &[&str]| {
        let mut args = vec!["explain".to_owned(), "mine".to_owned()];
        args.push(format!("--admin=https://localhost:{}", at.admin.rsplit_once(':').unwrap().1));
        args.extend(files.flags(flags));
        MoongateProcess::run(&args.iter().map(String::as_str).collect::<Vec<_>>()).await
    };
    let own = ["--admin-ca={}/ca.pem", "--admin-cert={}/client.pem", "--admin-key={}/client.key"];
    let output = explain(&own).await;
    assert!(output.stdout.contains("replayed with predictive: "), "{output:?}");
    let refused = explain(&["--admin-ca={}/ca.pem"]).await;
    assert_eq!(refused.status.code(), Some(1), "no certificate, no token: {refused:?}");
    let untrusted = explain(&["--admin-ca={}/server.pem"]).await;
    assert!(untrusted.stderr.contains("configure the CA"), "{untrusted:?}");
    supervisor.token().cancel();
}
