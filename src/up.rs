//! `moongate up`: simulated engines, their store and a gateway on one machine, without any configuration.

mod local_store;

use std::io::{IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use moongate_gateway::{GatewayOptions, RunningGateway};
use moongate_loadtest::engine::{
    KvEventOptions, SharedL3Store, SimEngine, SimEngineOptions, SimProtocol, SimRole, VllmConnector,
};
use moongate_runtime::{Supervisor, config, terminated};
use moongate_telemetry::{LoggingArgs, Tracer};

use self::local_store::LocalStoreCluster;
use crate::output::print;

/// Time limit for the engines to become ready. They run in this process and usually need less than a second.
const READY_TIMEOUT: Duration = Duration::from_secs(15);
/// Time limit for the gateway's tasks to end after the gateway has stopped.
const GATEWAY_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval at which the status line on a terminal is updated.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

/// Flags of `moongate up`.
#[derive(Debug, Args)]
#[command(mut_arg("filter", |arg| arg.default_value("warn")))]
pub(crate) struct UpArgs {
    /// Address for clients.
    #[arg(long, value_name = "ADDR", env = "MOONGATE_LISTEN", default_value = "127.0.0.1:8000")]
    listen: SocketAddr,
    /// Address for /console, /metrics, /health and /ready.
    #[arg(long, value_name = "ADDR", env = "MOONGATE_ADMIN_LISTEN", default_value = "127.0.0.1:9000")]
    admin_listen: SocketAddr,
    /// Number of simulated prefill engines.
    #[arg(long, value_name = "N", env = "MOONGATE_UP_PREFILL", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    prefill: u16,
    /// Number of simulated decode engines.
    #[arg(long, value_name = "N", env = "MOONGATE_UP_DECODE", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    decode: u16,
    /// Port of the first engine; the others use the following ports, prefill before decode. 0 selects free ports.
    #[arg(long, value_name = "PORT", env = "MOONGATE_UP_ENGINE_PORT", default_value_t = 0)]
    engine_port: u16,
    /// Wire protocol of the simulated engines.
    #[arg(long, value_enum, env = "MOONGATE_UP_PROTOCOL", default_value = "sglang")]
    protocol: SimProtocol,
    /// Model name that the engines serve.
    #[arg(long, value_name = "NAME", env = "MOONGATE_UP_MODEL", default_value = "moongate-sim")]
    model: String,
    /// Speed of the engines relative to a real large model.
    #[arg(long, value_name = "X", env = "MOONGATE_UP_TIME_SCALE", default_value_t = 10.0)]
    time_scale: f64,
    /// Routing policy of the gateway.
    #[arg(long, value_name = "NAME", env = "MOONGATE_POLICY", default_value = "predictive")]
    policy: String,
    #[command(flatten)]
    pub(crate) logs: LoggingArgs,
}

/// Starts all components, prints the first commands to try, and runs until SIGTERM or Ctrl-C.
pub(crate) async fn run(command: UpArgs, supervisor: Supervisor) -> anyhow::Result<ExitCode> {
    let stores = LocalStoreCluster::start().await.context("the store did not start")?;
    let fleet = SharedL3Store::with_mooncake(stores.client()?);
    let mut engines = Vec::new();
    let mut ports = (command.engine_port..=u16::MAX).filter(|_| command.engine_port > 0);
    for (role, count) in [(SimRole::Prefill, command.prefill), (SimRole::Decode, command.decode)] {
        for _ in 0..count {
            let mut engine = SimEngineOptions::new(role, command.protocol);
            engine.model.clone_from(&command.model);
            engine.time_scale = command.time_scale;
            engine.kv_events = Some(KvEventOptions::default());
            engine.use_storage = role == SimRole::Prefill;
            // Simulated vLLM engines transfer KV cache through the store.
            engine.connector = VllmConnector::Store;
            engine.listen.set_port(ports.next().unwrap_or_default());
            engines.push(
                SimEngine::start_with_store(engine, &fleet)
                    .await
                    .context("a simulated engine did not start")?,
            );
        }
    }
    let options = gateway_options(&command, &engines, &stores)?;
    let gateway = moongate_gateway::start(&options, Tracer::disabled(), &supervisor).await?;
    wait_until_ready(&gateway).await?;
    print_line(&banner(&command, &gateway, &engines, &stores));

    let live = std::io::stderr().is_terminal();
    tokio::select! {
        () = terminated() => {}
        () = show_status(&gateway, &engines), if live => {}
    }
    if live {
        print_status("");
    }
    tokio::select! {
        () = gateway.stop() => {}
        () = terminated() => {}
    }
    // A second signal skips waiting for open streams. The gateway still stops before the store, to which it is connected.
    if let Err(still) = supervisor.shutdown(GATEWAY_SHUTDOWN_TIMEOUT).await {
        tracing::warn!(%still, "tasks did not end before the timeout");
    }
    for engine in engines {
        engine.stop().await;
    }
    stores.stop().await;
    print_line("stopped");
    Ok(ExitCode::SUCCESS)
}

/// The gateway's default options, with the addresses of the simulated engines and their store.
fn gateway_options(
    command: &UpArgs,
    engines: &[SimEngine],
    stores: &LocalStoreCluster,
) -> anyhow::Result<GatewayOptions> {
    #[derive(Debug, clap::Parser)]
    struct DefaultGatewayArgs {
        #[command(flatten)]
        options: GatewayOptions,
    }
    let mut args = vec![
        "moongate".to_owned(),
        format!("--listen={}", command.listen),
        format!("--admin-listen={}", command.admin_listen),
        format!("--policy={}", command.policy),
        "--drain-deadline=5s".to_owned(),
    ];
    args.extend(stores.gateway_flags());
    for engine in engines {
        args.push(match (engine.options().role, engine.bootstrap_addr()) {
            (SimRole::Prefill, Some(bootstrap)) => format!("--prefill={},{}", engine.url(), bootstrap.port()),
            (SimRole::Prefill, None) => format!("--prefill={}", engine.url()),
            (SimRole::Decode, _) => format!("--decode={}", engine.url()),
            (SimRole::Plain, _) => format!("--worker={}", engine.url()),
        });
    }
    let parsed: DefaultGatewayArgs =
        config::parse(args.into_iter().map(Into::into)).map_err(|error| anyhow::anyhow!("{error}"))?;
    Ok(parsed.options)
}

async fn wait_until_ready(gateway: &RunningGateway) -> anyhow::Result<()> {
    let ready = async {
        while !gateway.is_ready() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(READY_TIMEOUT, ready).await.context("the simulated engines did not become ready")
}

fn banner(
    command: &UpArgs,
    gateway: &RunningGateway,
    engines: &[SimEngine],
    stores: &LocalStoreCluster,
) -> String {
    let UpArgs { prefill, decode, model, .. } = command;
    let (address, admin) = (gateway.address, gateway.admin_address);
    let store = store_hint(command.protocol, engines, stores);
    let requests = example_requests(&format!("http://{address}"), model);
    format!(
        "Moongate is up: {prefill} prefill and {decode} decode engines (simulated) behind http://{address}\n\
         \n\
         Try:\n\
         {requests}\
         {store}\
         Any OpenAI client works with base URL http://{address}/v1 and any API key.\n\
         Console: http://{admin}/console\n\
         Metrics: http://{admin}/metrics    Stop: Ctrl-C"
    )
}

/// A command for each API, with a blank line after each.
fn example_requests(url: &str, model: &str) -> String {
    let hello = r#""messages": [{"role": "user", "content": "Hello"}]"#;
    let bodies = [
        ("chat/completions", format!(r#"{{"model": "{model}", "stream": true, {hello}}}"#)),
        ("completions", format!(r#"{{"model": "{model}", "prompt": "Once upon a time"}}"#)),
        ("responses", format!(r#"{{"model": "{model}", "input": "Hello"}}"#)),
        ("messages", format!(r#"{{"model": "{model}", "max_tokens": 64, {hello}}}"#)),
    ];
    let commands = bodies.iter().map(|(path, body)| {
        format!("  curl {url}/v1/{path} -H 'content-type: application/json' \\\n    -d '{body}'\n\n")
    });
    commands.collect()
}

/// The banner's part about the store: how to list its objects, and how to flush the engines' own caches.
fn store_hint(protocol: SimProtocol, engines: &[SimEngine], stores: &LocalStoreCluster) -> String {
    let (nodes, admin) = (local_store::NODES, stores.admin());
    let (uses_it, path): (fn(SimRole) -> bool, _) = match protocol {
        SimProtocol::Sglang => (|role| role == SimRole::Prefill, "flush_cache"),
        SimProtocol::Vllm => (|_| true, "reset_prefix_cache"),
    };
    let using = engines.iter().filter(|engine| uses_it(engine.options().role));
    let flush_urls: Vec<String> = using.map(|engine| format!("{}/{path}", engine.url())).collect();
    format!(
        "The KV cache is also written to a store of {nodes} nodes, and served from it after eviction:\n\
         \x20 moongate kv ls --admin {admin}\n\
         \x20 curl -X POST {}\n\n",
        flush_urls.join(" ")
    )
}

/// Updates the status line on the terminal every [`STATUS_INTERVAL`].
async fn show_status(gateway: &RunningGateway, engines: &[SimEngine]) {
    let mut tick = tokio::time::interval(STATUS_INTERVAL);
    loop {
        tick.tick().await;
        let served: u64 =
            engines.iter().filter(|engine| engine.options().role == SimRole::Decode).map(served).sum();
        let (open, idle) = gateway.engine_connections();
        print_status(&format!(
            "requests served {served} · in flight {} · clients {} · engine connections {open} ({idle} idle)",
            gateway.in_flight() / 2,
            gateway.connections()
        ));
    }
}

fn served(engine: &SimEngine) -> u64 {
    engine.stats().finished
}

fn print_line(text: &str) {
    // Standard output may be closed; the components keep running.
    let _ = print(text);
}

fn print_status(text: &str) {
    let mut stderr = std::io::stderr().lock();
    // Standard error may be closed; the components keep running.
    let _ = write!(stderr, "\r\x1b[2K{text}").and_then(|()| stderr.flush());
}
