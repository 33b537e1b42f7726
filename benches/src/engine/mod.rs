//! Mock engines with SGLang's API, at a few microseconds of CPU per request.

mod connection;
mod request;
pub(crate) mod responses;
pub(crate) mod stream;

use std::io::Write as _;
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use responses::{CannedResponses, MockRole};

use crate::clock::busy_poll;

/// Maximum number of concurrent connections per listener; more wait.
const MAX_CONNECTIONS: usize = 8192;

/// Command-line arguments of `gateway-bench engine`.
#[derive(Debug, Args)]
pub(crate) struct MockEngineArgs {
    /// Port on 127.0.0.1 of an engine that prefills and decodes; 0 selects any. Repeatable.
    #[arg(long, value_name = "PORT")]
    plain: Vec<u16>,

    /// Ports of a prefill engine and its bootstrap server. Repeatable.
    #[arg(long, value_name = "PORT,BOOTSTRAP_PORT", value_parser = parse_pair)]
    prefill: Vec<(u16, u16)>,

    /// Port of a decode engine. Repeatable.
    #[arg(long, value_name = "PORT")]
    decode: Vec<u16>,

    /// Time between two tokens of a stream; 0 sends at full speed. A request with the member "user":"itl-ms-N"
    /// overrides it.
    #[arg(long, value_name = "MS", default_value_t = 0)]
    itl_ms: u32,

    /// Never sleep, so that the gateway spends no CPU time on waking this process.
    #[arg(long)]
    busy_poll: bool,

    /// Exit without a signal after this time.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    max_seconds: u64,

    /// Exit when standard input is closed, so that the process never outlives the command that started it.
    #[arg(long)]
    exit_on_stdin_eof: bool,
}

/// One engine, or one bootstrap server.
#[derive(Debug)]
struct MockEngine {
    responses: CannedResponses,
    itl: Duration,
}

pub(crate) async fn run(options: MockEngineArgs) -> anyhow::Result<()> {
    let guard = options.exit_on_stdin_eof.then(stdin_pipe).transpose()?;
    let itl = Duration::from_millis(u64::from(options.itl_ms));
    let mut servers = JoinSet::new();
    let mut listing = serde_json::json!({"plain": [], "prefill": [], "decode": []});
    let mut start = |listener: TcpListener, role: MockRole| {
        servers.spawn(serve(listener, Arc::new(MockEngine { responses: CannedResponses::new(role), itl })));
    };
    for port in options.plain {
        let (listener, port) = bind(port).await?;
        start(listener, MockRole::Plain);
        append(&mut listing, "plain", port.into());
    }
    for (port, bootstrap_port) in options.prefill {
        let (bootstrap, bootstrap_port) = bind(bootstrap_port).await?;
        let (listener, port) = bind(port).await?;
        start(bootstrap, MockRole::Bootstrap { prefill_port: port });
        start(listener, MockRole::Prefill { bootstrap_port });
        append(&mut listing, "prefill", serde_json::json!([port, bootstrap_port]));
    }
    for port in options.decode {
        let (listener, port) = bind(port).await?;
        start(listener, MockRole::Decode);
        append(&mut listing, "decode", port.into());
    }
    if servers.is_empty() {
        bail!("no engine is configured; give --plain, --prefill or --decode");
    }
    writeln!(std::io::stdout(), "{listing}")?;
    // The task ends when the set is dropped.
    let mut tasks = JoinSet::new();
    if options.busy_poll {
        tasks.spawn(busy_poll());
    }
    tokio::select! {
        ended = servers.join_next() => match ended {
            Some(Ok(outcome)) => outcome,
            Some(Err(error)) => Err(error.into()),
            None => Ok(()),
        },
        () = tokio::time::sleep(Duration::from_secs(options.max_seconds)) => Ok(()),
        () = async { if let Some(input) = guard { until_closed(input).await } }, if options.exit_on_stdin_eof => Ok(()),
        signal = tokio::signal::ctrl_c() => Ok(signal?),
    }
}

fn parse_pair(text: &str) -> Result<(u16, u16), String> {
    let pair = text
        .split_once(',')
        .and_then(|(port, bootstrap)| Some((port.parse().ok()?, bootstrap.parse().ok()?)));
    pair.ok_or_else(|| format!("{text:?} is not two ports; write it as 9101,8998"))
}

fn append(listing: &mut serde_json::Value, role: &str, entry: serde_json::Value) {
    if let Some(list) = listing[role].as_array_mut() {
        list.push(entry);
    }
}

async fn bind(port: u16) -> anyhow::Result<(TcpListener, u16)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
        .await
        .with_context(|| format!("port {port} of 127.0.0.1"))?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

async fn until_closed(mut input: pipe::Receiver) {
    let mut ignored = [0; 64];
    while matches!(input.read(&mut ignored).await, Ok(1..)) {}
}

/// Standard input, which must be a pipe.
fn stdin_pipe() -> anyhow::Result<pipe::Receiver> {
    let input = std::io::stdin().as_fd().try_clone_to_owned()?;
    pipe::Receiver::from_owned_fd(input).context("--exit-on-stdin-eof needs a pipe as standard input")
}

async fn serve(listener: TcpListener, engine: Arc<MockEngine>) -> anyhow::Result<()> {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < MAX_CONNECTIONS => {
                let (stream, _) = accepted?;
                connections.spawn(connect(stream, engine.clone()));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connect(stream: TcpStream, engine: Arc<MockEngine>) {
    // A peer that disconnects or sends invalid data loses its connection; the load generator counts that.
    let _ended = match stream.set_nodelay(true) {
        Ok(()) => connection::serve(stream, &engine).await,
        Err(error) => Err(error),
    };
}
