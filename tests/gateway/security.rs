//! Access control of the binary: API keys, signed tokens, quotas, TLS, the admin listener, and secrets in logs.

use std::path::PathBuf;
use std::time::Duration;

use jsonwebtoken::jwk::Jwk;
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode, get_current_timestamp};
use moongate_loadtest::engine::{RecordedRequest, SimEngine};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::fleet::{TestEngines, TestFleet, TestFleetBuilder};
use crate::harness::process::{GatewayAddresses, MoongateProcess};
use crate::harness::raw_http::exchange;
use crate::harness::tls::{generate_certificates, get_over_tls};
use crate::harness::{TEST_TIMEOUT, client, openai_error};

const KEY: &str = "sk-of-team-a-0123456789";
const ADMIN_KEY: &str = "sk-of-the-administrator-01";
const BODY: &str = r#"{"model":"sim","prompt":"go on","max_tokens":2}"#;

/// A gateway process with one engine, and a folder for its files.
struct SecuredGateway {
    binary: MoongateProcess,
    at: GatewayAddresses,
    engines: TestEngines,
    folder: TempDir,
}

impl SecuredGateway {
    /// Writes `files` and starts the gateway; in `flags`, `{}` is their folder.
    async fn start(files: &[(&str, &str)], flags: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let engines = TestFleetBuilder::sglang().plain(1).engines().await;
        let place = folder.path().to_str().unwrap();
        let given = flags.iter().map(|flag| flag.replace("{}", place));
        let flags: Vec<String> =
            engines.flags().into_iter().chain(["--health-interval=0s".to_owned()]).chain(given).collect();
        let (binary, at) = MoongateProcess::gateway(&flags).await;
        Self { binary, at, engines, folder }
    }

    fn engine(&self) -> &SimEngine {
        &self.engines.workers[0]
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.folder.path().join(name), text).unwrap();
    }

    /// Waits until the engine is usable.
    async fn ready(self) -> Self {
        let url = format!("http://{}/ready", self.at.public);
        self.wait_until("the engine is usable", async || {
            client().get(&url).send().await.unwrap().status() == 200
        })
        .await;
        self
    }

    async fn wait_until(&self, what: &str, condition: impl AsyncFn() -> bool) {
        let waited = tokio::time::timeout(TEST_TIMEOUT, async {
            while !condition().await {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        assert!(waited.await.is_ok(), "not within {TEST_TIMEOUT:?}: {what}\n{}", self.binary.output_text());
    }

    async fn complete(&self, key: Option<&str>) -> reqwest::Response {
        let mut request = client().post(format!("http://{}/v1/completions", self.at.public));
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        request.header("content-type", "application/json").body(BODY).send().await.unwrap()
    }

    /// Status and `error.code` of a completion.
    async fn outcome(&self, key: Option<&str>) -> (u16, String) {
        let response = self.complete(key).await;
        let status = response.status().as_u16();
        let body = response.bytes().await.unwrap();
        (
            status,
            if status == 200 {
                String::new()
            } else {
                openai_error(&body)["code"].as_str().unwrap().to_owned()
            },
        )
    }

    async fn admin(&self, path: &str, token: Option<&str>) -> u16 {
        let mut request = client().get(format!("http://{}{path}", self.at.admin));
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        request.send().await.unwrap().status().as_u16()
    }
}

/// The `Authorization` headers that an engine received.
fn shown(request: &RecordedRequest) -> Vec<&str> {
    let values = request.headers.iter().filter(|(name, _)| name == "authorization");
    values.map(|(_, value)| value.as_str()).collect()
}

fn keys(quota: &str) -> String {
    format!(
        "[[key]]\nkey = \"{KEY}\"\ntenant = \"team-a\"\n\
         [[key]]\nkey = \"{ADMIN_KEY}\"\ntenant = \"us\"\nscopes = [\"admin\"]\n{quota}"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn only_known_keys_are_accepted_and_none_reaches_an_engine() {
    let files = [("access.toml", &*keys(""))];
    let world =
        SecuredGateway::start(&files, &["--access-file={}/access.toml", "--engine-api-key=sk-engine"])
            .await
            .ready()
            .await;
    assert_eq!(world.outcome(None).await, (401, "invalid_api_key".to_owned()));
    assert_eq!(world.outcome(Some("sk-of-team-b-0123456789")).await, (401, "invalid_api_key".to_owned()));
    assert_eq!(world.outcome(Some(ADMIN_KEY)).await, (403, "insufficient_permissions".to_owned()));
    assert_eq!(world.engines.started(), 0);
    let refused = world.complete(None).await;
    assert_eq!(refused.headers()["www-authenticate"], "Bearer");
    assert!(refused.headers().contains_key("x-request-id"));
    for path in ["/v1/models", "/v1/anything", "/nothing", "/generate"] {
        let url = format!("http://{}{path}", world.at.public);
        assert_eq!(client().get(&url).send().await.unwrap().status(), 401, "{path}");
    }
    for path in ["/health", "/ready"] {
        let url = format!("http://{}{path}", world.at.public);
        assert_eq!(client().get(&url).send().await.unwrap().status(), 200, "{path}");
    }
    assert_eq!(world.outcome(Some(KEY)).await.0, 200);
    let seen = TestFleet::last_request(world.engine());
    assert_eq!(shown(&seen), ["Bearer sk-engine"], "the engine gets its own key and not the client's");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_as_anthropics_sdk_sends_it_is_accepted() {
    let files = [("access.toml", &*keys(""))];
    let world =
        SecuredGateway::start(&files, &["--access-file={}/access.toml", "--engine-api-key=sk-engine"])
            .await
            .ready()
            .await;
    let send = async |headers: &[(&str, &str)]| {
        let mut request = client().post(format!("http://{}/v1/completions", world.at.public));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.header("content-type", "application/json").body(BODY).send().await.unwrap()
    };
    let bearer = format!("Bearer {KEY}");
    let version = ("anthropic-version", "2023-06-01");
    for headers in [&[("x-api-key", KEY), version] as &[_], &[("x-api-key", KEY), ("authorization", &bearer)]]
    {
        assert_eq!(send(headers).await.status(), 200, "{headers:?}");
        let seen = TestFleet::last_request(world.engine());
        assert_eq!(shown(&seen), ["Bearer sk-engine"]);
        assert!(seen.headers.iter().all(|(_, value)| !value.contains(KEY)), "{:?}", seen.headers);
        let versions = seen.headers.iter().filter(|(name, _)| name == version.0).count();
        assert_eq!(versions, usize::from(headers.contains(&version)));
    }
    for (headers, part) in [
        (&[("x-api-key", "sk-unknown-0123456789")] as &[_], "invalid API key"),
        (&[("x-api-key", "sk-unknown-0123456789"), ("authorization", &bearer)], "different keys"),
        (&[("x-api-key", "")], "x-api-key: KEY"),
    ] {
        let refused = send(headers).await;
        assert_eq!(refused.status(), 401, "{headers:?}");
        let error = openai_error(&refused.bytes().await.unwrap());
        assert_eq!(error["code"], "invalid_api_key");
        assert!(error["message"].as_str().unwrap().contains(part), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_reload_without_restart_and_bad_file_is_ignored() {
    let files = [("access.toml", &*keys(""))];
    let world = SecuredGateway::start(&files, &["--access-file={}/access.toml"]).await.ready().await;
    world.write("access.toml", "[[key]]\nkey = ");
    let mut binary = world.binary;
    binary.wait_for_line("keeping the previous content").await;
    let world = SecuredGateway { binary, ..world };
    assert_eq!(world.outcome(Some(KEY)).await.0, 200);
    world.write("access.toml", "[[key]]\nkey = \"sk-of-team-b-0123456789\"\ntenant = \"b\"\n");
    let next = Some("sk-of-team-b-0123456789");
    world.wait_until("the new key is known", async || world.outcome(next).await.0 == 200).await;
    assert_eq!(world.outcome(Some(KEY)).await.0, 401, "the old key is rejected");
}

/// A provider's private key, and its JWKS.
fn provider() -> (EncodingKey, String) {
    // PKCS#8 of an Ed25519 key (RFC 8410) that is used nowhere else.
    let mut der = vec![0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
    der.extend([11; 32]);
    let key = EncodingKey::from_ed_der(&der);
    let jwk = Jwk::from_encoding_key(&key, Algorithm::EdDSA).unwrap();
    (key, json!({"keys": [jwk]}).to_string())
}

fn claims(change: Value) -> Value {
    let mut claims = json!({"iss": "https://id.example", "aud": "moongate", "org": "team-a",
                            "exp": get_current_timestamp() + 600});
    claims.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    claims
}

#[tokio::test(flavor = "multi_thread")]
async fn only_valid_signed_tokens_are_accepted() {
    let (key, jwks) = provider();
    let flags = [
        "--jwks-file={}/jwks.json",
        "--jwt-issuer=https://id.example",
        "--jwt-audience=moongate",
        "--jwt-tenant-claim=org",
    ];
    let world = SecuredGateway::start(&[("jwks.json", &jwks)], &flags).await.ready().await;
    let signed = |change| encode(&Header::new(Algorithm::EdDSA), &claims(change), &key).unwrap();
    let good = signed(json!({}));
    assert_eq!(world.outcome(Some(&good)).await.0, 200);
    assert!(shown(&TestFleet::last_request(world.engine())).is_empty());
    let payload = good.split('.').nth(1).unwrap();
    let secret = EncodingKey::from_secret(jwks.as_bytes());
    for (what, token) in [
        ("expired", signed(json!({"exp": get_current_timestamp() - 3600}))),
        ("another audience", signed(json!({"aud": "else"}))),
        ("another issuer", signed(json!({"iss": "https://else.example"}))),
        ("no tenant", signed(json!({"org": null}))),
        // {"alg":"none"}
        ("not signed", format!("eyJhbGciOiJub25lIn0.{payload}.")),
        (
            "signed with the public key",
            encode(&Header::new(Algorithm::HS256), &claims(json!({})), &secret).unwrap(),
        ),
        ("changed", good.replacen('.', ".e", 1)),
        ("no token", "sk-something".to_owned()),
        ("critical parameters", {
            let header = Header { crit: Some(vec!["exp".to_owned()]), ..Header::new(Algorithm::EdDSA) };
            encode(&header, &claims(json!({})), &key).unwrap()
        }),
    ] {
        assert_eq!(world.outcome(Some(&token)).await, (401, "invalid_api_key".to_owned()), "{what}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_over_quota_are_rejected_until_it_is_refilled() {
    let quota = "[tenant.team-a]\nrequests_per_second = 0.01\n";
    let world = SecuredGateway::start(&[("access.toml", &keys(quota))], &["--access-file={}/access.toml"])
        .await
        .ready()
        .await;
    assert_eq!(world.outcome(Some(KEY)).await.0, 200);
    let refused = world.complete(Some(KEY)).await;
    assert_eq!(refused.status(), 429);
    let after: u64 = refused.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=100).contains(&after), "{after}");
    assert_eq!(openai_error(&refused.bytes().await.unwrap())["code"], "rate_limit_exceeded");
    // Waiting for the full 100 s would take too long.
    world.write("access.toml", &keys(&quota.replace("0.01", "1000")));
    world.wait_until("the quota is full again", async || world.outcome(Some(KEY)).await.0 == 200).await;
    let metrics = client()
        .get(format!("http://{}/metrics", world.at.admin))
        .bearer_auth(ADMIN_KEY)
        .send()
        .await
        .unwrap();
    let metrics = metrics.text().await.unwrap();
    assert!(
        metrics.contains("moongate_rejected_requests_total{reason=\"requests_per_second\"}"),
        "{metrics}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_admin_listener_is_closed_except_for_listed_paths() {
    let flags = [
        "--admin-token=the-administrators-token",
        "--admin-open=health,metrics",
        "--registration-token=engines",
    ];
    let world = SecuredGateway::start(&[], &flags).await;
    let token = Some("the-administrators-token");
    for (path, nobody, wrong) in [
        ("/health", 200, 200),
        ("/metrics", 200, 200),
        ("/ready", 401, 401),
        ("/debug/decisions", 401, 401),
        ("/workers", 401, 401),
        ("/nothing", 401, 401),
    ] {
        assert_eq!(world.admin(path, None).await, nobody, "{path} without a token");
        assert_eq!(world.admin(path, Some("wrong")).await, wrong, "{path} with a wrong token");
        assert_ne!(world.admin(path, token).await, 401, "{path} with the token");
    }
    assert_eq!(world.admin("/workers", Some("engines")).await, 200);
    assert_eq!(world.admin("/debug/decisions", Some("engines")).await, 401);
    let explained = MoongateProcess::run(&[
        "explain",
        "--admin",
        &world.at.admin,
        "--admin-token=the-administrators-token",
    ])
    .await;
    assert!(explained.status.success(), "{}", explained.stderr);
}

#[tokio::test(flavor = "multi_thread")]
async fn both_listeners_support_tls_and_client_certificates() {
    let (ca, server, own) = generate_certificates();
    let files = [("ca.pem", &*ca), ("cert.pem", &*server.0), ("key.pem", &*server.1)];
    let flags = [
        "--tls-cert={}/cert.pem",
        "--tls-key={}/key.pem",
        "--tls-client-ca={}/ca.pem",
        "--admin-tls-cert={}/cert.pem",
        "--admin-tls-key={}/key.pem",
        "--admin-tls-client-ca={}/ca.pem",
    ];
    let world = SecuredGateway::start(&files, &flags).await;
    let (public, admin) = (&*world.at.public, &*world.at.admin);
    assert_eq!(get_over_tls(public, "/health", &ca, Some(&own)).await.unwrap(), "HTTP/1.1 200 OK");
    assert!(get_over_tls(public, "/health", &ca, None).await.is_err(), "no certificate");
    let (_, _, foreign) = generate_certificates();
    assert!(get_over_tls(public, "/health", &ca, Some(&foreign)).await.is_err(), "of another CA");
    assert!(client().get(format!("http://{public}/health")).send().await.is_err(), "no TLS");

    assert_eq!(get_over_tls(admin, "/health", &ca, None).await.unwrap(), "HTTP/1.1 200 OK");
    assert_eq!(get_over_tls(admin, "/metrics", &ca, None).await.unwrap(), "HTTP/1.1 401 Unauthorized");
    assert_eq!(get_over_tls(admin, "/metrics", &ca, Some(&own)).await.unwrap(), "HTTP/1.1 200 OK");

    let (next_ca, next, _) = generate_certificates();
    world.write("key.pem", &next.1);
    world.write("cert.pem", &next.0);
    let renewed = async || get_over_tls(admin, "/health", &next_ca, None).await.is_ok();
    world.wait_until("the new certificate is shown", renewed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_never_logged_but_exposures_are() {
    let (key, jwks) = provider();
    let token = encode(&Header::new(Algorithm::EdDSA), &claims(json!({})), &key).unwrap();
    let secrets = [
        KEY,
        ADMIN_KEY,
        "sk-engine-secret",
        "admin-token-secret",
        "registration-secret",
        "wrong-key-secret",
        &token,
    ];
    let flags = [
        "--log-filter=trace",
        "--access-file={}/access.toml",
        "--jwks-file={}/jwks.json",
        "--jwt-issuer=https://id.example",
        "--jwt-audience=moongate",
        "--jwt-tenant-claim=org",
        "--engine-api-key=sk-engine-secret",
        "--admin-token=admin-token-secret",
        "--registration",
        "--registration-token=registration-secret",
    ];
    let world = SecuredGateway::start(&[("access.toml", &keys("")), ("jwks.json", &jwks)], &flags)
        .await
        .ready()
        .await;
    for (key, status) in [(KEY, 200), (&token, 200), ("wrong-key-secret", 401), (ADMIN_KEY, 403)] {
        assert_eq!(world.outcome(Some(key)).await.0, status);
    }
    for token in ["admin-token-secret", "registration-secret", "wrong-key-secret", ADMIN_KEY] {
        world.admin("/workers", Some(token)).await;
        world.admin("/debug/decisions", Some(token)).await;
    }
    world.write("access.toml", &keys("[quota]\nconcurrent_requests = 0\n"));
    let mut binary = world.binary;
    binary.wait_for_line("keeping the previous content").await;
    binary.wait_for_line("public listener 127.0.0.1").await;
    let line = binary.wait_for_line("admin listener 127.0.0.1").await;
    assert!(line.contains("no TLS") && line.contains("/health, /ready without authentication"), "{line}");
    binary.signal("TERM").await;
    let ended = binary.wait().await;
    assert!(ended.stderr.contains("TRACE") || ended.stderr.contains("DEBUG"), "the log level was too low");
    for secret in secrets {
        assert!(!ended.stderr.contains(secret) && !ended.stdout.contains(secret), "{secret} was logged");
    }
}

/// Output and exit code of `moongate config check`.
async fn checked(flags: &[String]) -> (Option<i32>, String) {
    let args: Vec<&str> = ["config", "check"].into_iter().chain(flags.iter().map(String::as_str)).collect();
    let ended = MoongateProcess::run(&args).await;
    (ended.status.code(), format!("{}{}", ended.stdout, ended.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn config_check_validates_settings() {
    let folder = TempDir::new().unwrap();
    let file = |name: &str, text: &str| -> PathBuf {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (access, wrong) =
        (file("access.toml", &keys("")), file("wrong.toml", "[[key]]\nkey = \"short\"\ntenant = \"a\"\n"));
    let settings = format!(
        "listen = \"0.0.0.0:8000\"\nworker = [\"http://127.0.0.1:1\"]\naccess-file = \"{}\"\n",
        access.display()
    );
    let config = file("gateway.toml", &settings);
    let (code, said) = checked(&[format!("--config={}", config.display())]).await;
    assert_eq!(code, Some(0), "{said}");
    assert!(
        said.contains("public listener 0.0.0.0:8000: no TLS; clients need an API key (2 configured)"),
        "{said}"
    );
    let bad = file("bad.toml", "attempts = \"three\"\n");
    for (flags, part) in [
        (vec![format!("--config={}", bad.display())], "bad.toml:1"),
        (vec![format!("--access-file={}", wrong.display())], "guessed"),
        (vec![format!("--access-file={}/none.toml", folder.path().display())], "none.toml"),
        (vec![format!("--jwks-file={}", access.display())], "--jwt-issuer"),
        (vec![format!("--tls-cert={}", access.display())], "--tls-key"),
        (vec![format!("--instances-file={}", access.display())], "instances-file"),
        (vec![format!("--model=m={}", folder.path().display())], "tokenizer.json"),
        (vec!["--nonsense".to_owned()], "nonsense"),
    ] {
        let (code, said) = checked(&flags).await;
        assert_eq!(code, Some(2), "{flags:?}: {said}");
        assert!(said.contains(part), "{flags:?}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engine_admin_needs_admin_scope_and_the_admin_listener() {
    let files = [("access.toml", &*keys(""))];
    let world = SecuredGateway::start(&files, &["--access-file={}/access.toml"]).await.ready().await;
    for path in [
        "/flush_cache",
        "/v1/load_lora_adapter",
        "/v1/../flush_cache",
        "/v1/%2e%2e/flush_cache",
        "/v1/loads",
        "/pause_generation",
        "/update_weights_from_disk",
    ] {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: g\r\nauthorization: Bearer {KEY}\r\ncontent-length: 2\r\n\r\n{{}}"
        );
        let refused = exchange(world.at.public.parse().unwrap(), head.as_bytes()).await;
        assert_eq!(
            (refused.status, &openai_error(&refused.body)["code"]),
            (404, &json!("not_found")),
            "{path}"
        );
    }
    let id = world.engine().url().replace('/', "%2F");
    let flush = async |at: &str, key: &str| {
        let url = format!("http://{at}/engines/{id}/flush_cache?timeout=0");
        client().post(url).bearer_auth(key).send().await.unwrap().status().as_u16()
    };
    assert_eq!(flush(&world.at.admin, KEY).await, 403);
    assert_eq!(flush(&world.at.admin, "sk-of-nobody-0123456789").await, 401);
    assert_eq!(flush(&world.at.public, KEY).await, 404);
    assert_eq!(flush(&world.at.admin, ADMIN_KEY).await, 200);
    let nobody = client().post(format!("http://{}/engines/nobody/flush_cache", world.at.admin));
    assert_eq!(nobody.bearer_auth(ADMIN_KEY).send().await.unwrap().status(), 404);

    // A listener without authentication rejects administration.
    let open = SecuredGateway::start(&[], &[]).await;
    let id = open.engine().url().replace('/', "%2F");
    let url = format!("http://{}/engines/{id}/flush_cache", open.at.admin);
    assert_eq!(client().post(url).send().await.unwrap().status(), 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_other_origins_cannot_register_engines() {
    let world = SecuredGateway::start(&[], &["--registration"]).await;
    let body = json!({"url": "http://203.0.113.1:80", "role": "plain", "lease_seconds": 60}).to_string();
    let register = async |headers: &[(&str, &str)]| {
        let mut request = client().post(format!("http://{}/workers", world.at.admin)).body(body.clone());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await.unwrap().status().as_u16()
    };
    let json = ("content-type", "application/json");
    assert_eq!(register(&[("content-type", "text/plain"), ("origin", "http://evil.example")]).await, 403);
    assert_eq!(register(&[json, ("origin", "http://evil.example")]).await, 403);
    assert_eq!(register(&[json, ("sec-fetch-site", "cross-site")]).await, 403);
    assert_eq!(register(&[json, ("origin", "null")]).await, 403);
    for simple in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b"] {
        assert_eq!(register(&[("content-type", simple)]).await, 415, "{simple}");
    }
    assert_eq!(register(&[]).await, 415);
    assert_eq!(register(&[json]).await, 200);
    let metrics = client().get(format!("http://{}/metrics", world.at.admin)).send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    assert!(metrics.contains("moongate_rejected_requests_total{reason=\"cross_origin\"} 4\n"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_listed_origins_are_allowed() {
    const HEADERS: &str = "authorization,content-type,x-api-key,anthropic-version,anthropic-beta";
    let world = SecuredGateway::start(&[], &["--cors-origin=https://chat.example"]).await.ready().await;
    let url = format!("http://{}/v1/completions", world.at.public);
    let preflight = async |origin: &str| {
        let asked = client().request(reqwest::Method::OPTIONS, &url).header("origin", origin);
        let asked = asked.header("access-control-request-method", "POST");
        asked.header("access-control-request-headers", HEADERS).send().await.unwrap()
    };
    let allowed = preflight("https://chat.example").await;
    assert_eq!(allowed.status(), 204);
    assert_eq!(allowed.headers()["access-control-allow-origin"], "https://chat.example");
    assert_eq!(allowed.headers()["access-control-allow-headers"], HEADERS);
    assert!(allowed.headers()["access-control-allow-methods"].to_str().unwrap().contains("POST"));
    let refused = preflight("https://evil.example").await;
    assert_eq!(refused.status(), 405);
    assert!(!refused.headers().contains_key("access-control-allow-origin"));
    for (origin, given) in [("https://chat.example", true), ("https://evil.example", false)] {
        let request = client().post(&url).header("origin", origin).header("content-type", "application/json");
        let answer = request.body(BODY).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers().contains_key("access-control-allow-origin"), given, "{origin}");
        assert_eq!(answer.headers()["vary"], "origin");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_need_one_host_and_no_compression() {
    let world = SecuredGateway::start(&[], &[]).await.ready().await;
    for listener in [&world.at.public, &world.at.admin] {
        for hosts in ["", "host: a\r\nhost: a\r\n", "host: a\r\nHost: b\r\n", "host: a b\r\n"] {
            let request = format!("GET /health HTTP/1.1\r\n{hosts}\r\n");
            let refused = exchange(listener.parse().unwrap(), request.as_bytes()).await;
            assert_eq!(refused.status, 400, "{hosts:?}");
            assert!(openai_error(&refused.body)["message"].as_str().unwrap().contains("Host"), "{refused:?}");
        }
        let good = exchange(listener.parse().unwrap(), b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n").await;
        assert_eq!(good.status, 200);
    }
    let metrics = client().get(format!("http://{}/metrics", world.at.admin)).send().await.unwrap();
    let metrics = metrics.text().await.unwrap();
    assert!(metrics.contains("moongate_rejected_requests_total{reason=\"invalid_host\"} 8\n"), "{metrics}");
    let url = format!("http://{}/v1/completions", world.at.public);
    let gzip =
        client().post(&url).header("content-type", "application/json").header("content-encoding", "gzip");
    let refused = gzip.body(vec![0x1f, 0x8b, 8, 0]).send().await.unwrap();
    assert_eq!(refused.status(), 415);
    let error = openai_error(&refused.bytes().await.unwrap());
    assert_eq!(error["code"], "unsupported_media_type");
    assert!(error["message"].as_str().unwrap().contains("gzip"), "{error}");
    assert_eq!(world.engines.started(), 0);
    let plain =
        client().post(&url).header("content-type", "application/json").header("content-encoding", "identity");
    assert_eq!(plain.body(BODY).send().await.unwrap().status(), 200);
}

/// An empty secret, as from an unset variable, is an error: it neither protects nor opens the listener.
#[tokio::test]
async fn an_empty_secret_is_rejected() {
    for flag in ["--admin-token=", "--registration-token=", "--engine-api-key="] {
        let ended = MoongateProcess::run(&["gateway", "--registration", flag]).await;
        assert_eq!(ended.status.code(), Some(2), "{flag}: {}", ended.stderr);
        assert!(ended.stderr.contains("it is empty"), "{flag}: {}", ended.stderr);
    }
}
