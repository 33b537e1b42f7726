//! How each gateway is started, and when it is ready.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use super::child::{self, BenchEnvironment, GatewayProcess};
use crate::ports::free_port;
use crate::wire::request_once;

/// Time limit for a gateway's first successful completion.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Additional time for late start-up work: loading models' names, first health checks.
const SETTLE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) enum BenchGatewayKind {
    Moongate {
        path: PathBuf,
        flags: Vec<String>,
        /// Share of requests whose traces it exports, if any.
        trace_ratio: Option<f64>,
        /// Folder of the model's tokenizer, with which it predicts cache hits as by default; without one it predicts none, and
        /// sends requests to the engines with the least load.
        tokenizer: Option<PathBuf>,
    },
    Smg {
        path: PathBuf,
        policy: &'static str,
    },
    /// A plain proxy to complete engines: a lower bound for forwarding bytes.
    Nginx {
        path: PathBuf,
    },
    /// No gateway: the load goes to an engine, whose own CPU time is reported.
    EngineOnly,
}

#[derive(Debug)]
pub(super) struct BenchGateway {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) kind: BenchGatewayKind,
}

impl BenchGateway {
    pub(super) async fn new(name: &str, kind: BenchGatewayKind) -> Self {
        let version = match &kind {
            BenchGatewayKind::Moongate { path, .. } | BenchGatewayKind::Smg { path, .. } => {
                version(path, "--version").await
            }
            BenchGatewayKind::Nginx { path } => version(path, "-v").await,
            BenchGatewayKind::EngineOnly => env!("CARGO_PKG_VERSION").to_owned(),
        };
        Self { name: name.to_owned(), version, kind }
    }
}

async fn version(path: &PathBuf, flag: &str) -> String {
    let mut command = Command::new(path);
    command.arg(flag).kill_on_drop(true);
    let Ok(output) = child::output(command, Duration::from_secs(20)).await else {
        return "unknown".to_owned();
    };
    let text = [output.stdout, output.stderr].concat();
    String::from_utf8_lossy(&text).lines().next().unwrap_or("unknown").to_owned()
}

/// The mock engines' process and ports.
#[derive(Debug)]
pub(super) struct MockEngineProcess {
    // The child exits when its standard input closes, which is when this is dropped.
    child: Child,
    plain: Vec<u64>,
    prefill: Vec<(u64, u64)>,
    decode: Vec<u64>,
}

impl MockEngineProcess {
    pub(super) async fn start(environment: &BenchEnvironment) -> anyhow::Result<Self> {
        let own = std::env::current_exe()?;
        let mut command = environment.command(environment.load_cpu, &own);
        command.args(["engine", "--exit-on-stdin-eof", "--max-seconds", "86400"]);
        command.args(["--plain", "0", "--plain", "0", "--prefill", "0,0", "--prefill", "0,0"]);
        command.args(["--decode", "0", "--decode", "0"]);
        command.args(environment.busy_poll.then_some("--busy-poll"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("mock engines")?;
        let output = child.stdout.take().context("mock engines have no output")?;
        let mut line = String::new();
        timeout(START_LIMIT, BufReader::new(output).read_line(&mut line)).await.context("mock engines")??;
        let ports: Value = serde_json::from_str(&line).context("the mock engines' ports")?;
        let list = |role: &str| ports[role].as_array().cloned().unwrap_or_default();
        let engines = Self {
            child,
            plain: list("plain").iter().filter_map(Value::as_u64).collect(),
            prefill: list("prefill")
                .iter()
                .filter_map(|pair| Some((pair[0].as_u64()?, pair[1].as_u64()?)))
                .collect(),
            decode: list("decode").iter().filter_map(Value::as_u64).collect(),
        };
        let counts = (engines.plain.len(), engines.prefill.len(), engines.decode.len());
        ensure!(counts == (2, 2, 2), "the mock engines' ports: {line}");
        Ok(engines)
    }

    pub(super) fn pid(&self) -> anyhow::Result<u32> {
        self.child.id().context("the mock engines have ended")
    }

    /// Ports of the prefill engines.
    pub(super) fn prefills(&self) -> impl Iterator<Item = u64> {
        self.prefill.iter().map(|(port, _)| *port)
    }
}

/// A gateway that has served a completion.
#[derive(Debug)]
pub(super) struct StartedGateway {
    pub(super) port: u16,
    /// Port of the admin listener of a gateway that predicts cache hits.
    pub(super) predicts: Option<u16>,
    /// `None` without a gateway.
    pub(super) server: Option<GatewayProcess>,
}

impl StartedGateway {
    pub(super) async fn start(
        gateway: &BenchGateway,
        engines: &MockEngineProcess,
        environment: &BenchEnvironment,
    ) -> anyhow::Result<Self> {
        let (port, admin) = (free_port()?, free_port()?);
        let command = match &gateway.kind {
            BenchGatewayKind::Moongate { path, flags, trace_ratio: traces, tokenizer } => {
                let mut command = environment.command(environment.gateway_cpu, path);
                command.arg("gateway");
                if let Some(ratio) = traces {
                    let collector = engines.plain.first().context("no plain engine")?;
                    command.args(["--otlp-endpoint", &format!("http://127.0.0.1:{collector}")]);
                    command.args(["--trace-sample-ratio", &ratio.to_string()]);
                }
                match tokenizer {
                    Some(folder) => command.args(["--model", &format!("mock={}", folder.display())]),
                    None => command.args(["--policy", "least_load"]),
                };
                moongate(command, port, admin, engines, flags)
            }
            BenchGatewayKind::Smg { path, policy } => {
                smg(environment.command(environment.gateway_cpu, path), port, admin, engines, policy)
            }
            BenchGatewayKind::Nginx { path } => {
                nginx(environment.command(environment.gateway_cpu, path), port, engines, environment)?
            }
            BenchGatewayKind::EngineOnly => {
                let port = *engines.plain.first().context("no plain engine")?;
                return Ok(Self { port: u16::try_from(port)?, predicts: None, server: None });
            }
        };
        let mut server = GatewayProcess::start(environment, command)?;
        let limit = Instant::now() + START_LIMIT;
        let ready_port = matches!(gateway.kind, BenchGatewayKind::Moongate { .. }).then_some(admin);
        while let Err(error) = is_ready(port, ready_port).await {
            server.ensure_running()?;
            if Instant::now() > limit {
                bail!("not ready within {START_LIMIT:?} ({error:#}): {}", server.log_tail());
            }
            sleep(Duration::from_millis(100)).await;
        }
        sleep(SETTLE).await;
        server.ensure_running()?;
        let predicts = matches!(gateway.kind, BenchGatewayKind::Moongate { tokenizer: Some(_), .. });
        Ok(Self { port, predicts: predicts.then_some(admin), server: Some(server) })
    }
}

async fn is_ready(port: u16, ready_port: Option<u16>) -> anyhow::Result<()> {
    const LIMIT: Duration = Duration::from_secs(5);
    if let Some(ready_port) = ready_port {
        let request = "GET /ready HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n";
        let (status, body) = timeout(LIMIT, request_once(ready_port, request)).await??;
        ensure!(status == 200, "/ready: {status} {}", String::from_utf8_lossy(&body));
    }
    let body = r#"{"model":"mock","messages":[{"role":"user","content":"Hi"}],"max_tokens":4}"#;
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let (status, body) = timeout(LIMIT, request_once(port, &request)).await??;
    ensure!(status == 200, "a completion: {status} {}", String::from_utf8_lossy(&body));
    Ok(())
}

fn moongate(
    mut command: Command,
    port: u16,
    admin: u16,
    engines: &MockEngineProcess,
    flags: &[String],
) -> Command {
    command.args(["--listen", &format!("127.0.0.1:{port}")]);
    command.args(["--admin-listen", &format!("127.0.0.1:{admin}"), "--log-filter", "warn"]);
    for (port, bootstrap) in &engines.prefill {
        command.args(["--prefill", &format!("http://127.0.0.1:{port},{bootstrap}")]);
    }
    for port in &engines.decode {
        command.args(["--decode", &format!("http://127.0.0.1:{port}")]);
    }
    command.args(flags);
    command
}

fn smg(mut command: Command, port: u16, metrics: u16, engines: &MockEngineProcess, policy: &str) -> Command {
    command.args(["launch", "--host", "127.0.0.1", "--port", &port.to_string(), "--pd-disaggregation"]);
    for (port, bootstrap) in &engines.prefill {
        command.args(["--prefill", &format!("http://127.0.0.1:{port}"), &bootstrap.to_string()]);
    }
    for port in &engines.decode {
        command.args(["--decode", &format!("http://127.0.0.1:{port}")]);
    }
    command.args(["--policy", policy, "--log-level", "warn", "--max-concurrent-requests", "0"]);
    command.args(["--prometheus-host", "127.0.0.1", "--prometheus-port", &metrics.to_string()]);
    // At start it would look up a tokenizer of the model; nothing may be downloaded.
    command.args(["--disable-tokenizer-autoload"]);
    command
}

fn nginx(
    mut command: Command,
    port: u16,
    engines: &MockEngineProcess,
    environment: &BenchEnvironment,
) -> anyhow::Result<Command> {
    let scratch = environment.scratch.path();
    let servers: String = engines.plain.iter().map(|port| format!("server 127.0.0.1:{port}; ")).collect();
    let temp: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|module| format!("{module}_temp_path {}/{module}; ", scratch.display()))
        .collect();
    let text = format!(
        "daemon off; master_process off; pid {0}/nginx.pid; error_log {0}/nginx.log error;\n\
         events {{ worker_connections 8192; }}\n\
         http {{ access_log off; {temp} client_max_body_size 64m; client_body_buffer_size 1m;\n\
         keepalive_requests 1000000000; tcp_nodelay on;\n\
         upstream engines {{ {servers} keepalive 1024; keepalive_requests 1000000000; }}\n\
         server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://engines; proxy_http_version 1.1;\n\
         proxy_set_header Connection \"\"; proxy_buffering off; }} }} }}\n",
        scratch.display()
    );
    let file = scratch.join("nginx.conf");
    std::fs::write(&file, text)?;
    command.arg("-c").arg(file).arg("-p").arg(scratch);
    Ok(command)
}
