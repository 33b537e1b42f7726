//! Engines, their store, and a gateway in a process of its own.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use moongate_runtime::Supervisor;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};

use super::args::{LiveComparisonArgs, MODEL};
use crate::engine::{SharedL3Store, SimEngine, SimMasterAdmin, SimRole};

/// How long a gateway may take until all engines are ready.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A running fleet with a gateway. The gateway is killed on drop.
pub(super) struct LiveTestbed {
    engines: Vec<SimEngine>,
    admin: SimMasterAdmin,
    gateway: Child,
    /// `http://host:port` of the gateway.
    pub(super) url: String,
}

impl LiveTestbed {
    /// Starts everything with empty caches, and waits until all engines are ready.
    pub(super) async fn start(
        args: &LiveComparisonArgs,
        policy: &str,
        page_tokens: usize,
        supervisor: &Supervisor,
    ) -> anyhow::Result<Self> {
        let fleet = SharedL3Store::new(usize::try_from(args.l3_tokens).unwrap_or(usize::MAX));
        let admin = SimMasterAdmin::start(&fleet, MODEL).await?;
        let mut engines = Vec::new();
        let mut flags = vec![
            "gateway".to_owned(),
            "--listen=127.0.0.1:0".to_owned(),
            "--admin-listen=127.0.0.1:0".to_owned(),
            format!("--policy={policy}"),
            format!("--time-scale={}", args.time_scale),
            format!("--load-interval={}us", args.scaled(args.poll_ms / 1_000.0).as_micros()),
        ];
        if args.l3_tokens > 0 {
            flags.push(format!("--mooncake-admin={}", admin.addr()));
        }
        for (role, count) in [(SimRole::Prefill, args.prefill), (SimRole::Decode, args.decode)] {
            for _ in 0..count {
                let engine = SimEngine::start_with_store(args.engine(role, page_tokens), &fleet).await?;
                flags.push(match engine.bootstrap_addr() {
                    Some(bootstrap) => format!("--prefill={},{}", engine.url(), bootstrap.port()),
                    None => format!("--decode={}", engine.url()),
                });
                engines.push(engine);
            }
        }
        let program = match &args.gateway {
            Some(program) => program.clone(),
            None => std::env::current_exe().context("cannot find this program; set --gateway FILE")?,
        };
        let starting = start_gateway(&program, &flags, supervisor);
        let (gateway, url) =
            tokio::time::timeout(START_TIMEOUT, starting).await.context("the gateway does not start")??;
        Ok(Self { engines, admin, gateway, url })
    }

    /// Stops the gateway and the engines.
    pub(super) async fn stop(mut self) {
        // The process may have exited already.
        let _ = self.gateway.kill().await;
        for engine in self.engines {
            engine.stop().await;
        }
        drop(self.admin);
    }
}

/// Starts a gateway with an empty environment, so that the machine's settings have no effect.
async fn start_gateway(
    program: &Path,
    flags: &[String],
    supervisor: &Supervisor,
) -> anyhow::Result<(Child, String)> {
    let mut gateway = Command::new(program)
        .args(flags)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let stderr = gateway.stderr.take().context("the gateway has no standard error")?;
    let (address, admin) = listen_addresses(stderr, supervisor).await?;
    let client = moongate_runtime::plain_http_client().build()?;
    loop {
        let ready = client.get(format!("http://{admin}/ready")).send().await?;
        let all = ready.status().is_success();
        let state: serde_json::Value = ready.json().await?;
        if all && state["waiting"].as_array().is_some_and(Vec::is_empty) {
            return Ok((gateway, format!("http://{address}")));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Parses the gateway's listen addresses from its log: for clients, and for the admin API.
async fn listen_addresses(
    stderr: impl AsyncRead + Unpin + Send + 'static,
    supervisor: &Supervisor,
) -> anyhow::Result<(String, String)> {
    let mut lines = BufReader::new(stderr).lines();
    while let Some(line) = lines.next_line().await? {
        let field =
            |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name)).map(str::to_owned);
        if let (true, Some(address), Some(admin)) =
            (line.contains("gateway listening"), field("address="), field("admin="))
        {
            // Keep reading: a gateway that writes to a closed pipe fails.
            supervisor
                .spawn("live-gateway-log", async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return Ok((address, admin));
        }
        tracing::debug!(line, "gateway output");
    }
    anyhow::bail!("the gateway exited before it was listening")
}
