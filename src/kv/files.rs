//! `moongate kv put` and `moongate kv get`.

use std::io::{self, IsTerminal as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moongate_store_client::{KvClient, PutOptions, PutOutcome, SoftPinChange};

use super::KvStoreArgs;

/// Redraw interval of the progress bar.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);

/// Arguments of `moongate kv put`.
#[derive(Debug, Args)]
pub(super) struct KvPutArgs {
    /// Key under which the object is stored
    key: String,

    /// File to read; stdin if absent or `-`
    file: Option<PathBuf>,

    /// Number of replicas, each on another node
    #[arg(long, value_name = "N", default_value_t = 1)]
    replicas: u64,

    /// Replace the object if it exists
    #[arg(long)]
    upsert: bool,

    /// Evict other objects first, for the master's default time
    #[arg(long)]
    soft_pin: bool,

    /// Never evict the object
    #[arg(long)]
    hard_pin: bool,

    /// Names of segments on which to allocate first
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    segment: Vec<String>,

    /// Group with which the object is leased and evicted
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
}

/// Arguments of `moongate kv get`.
#[derive(Debug, Args)]
pub(super) struct KvGetArgs {
    /// Key under which the object is stored
    key: String,

    /// File to write; stdout if absent or `-`
    file: Option<PathBuf>,
}

fn is_stream(file: Option<&Path>) -> bool {
    file.is_none_or(|file| file.as_os_str() == "-")
}

pub(super) async fn put(
    command: KvPutArgs,
    store: &KvStoreArgs,
    client: &KvClient,
) -> anyhow::Result<ExitCode> {
    let bytes = match command.file.as_deref() {
        Some(file) if !is_stream(Some(file)) => {
            std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?
        }
        _ => {
            let mut bytes = Vec::new();
            io::stdin().lock().read_to_end(&mut bytes).context("cannot read stdin")?;
            bytes
        }
    };
    let options = PutOptions {
        replicas: command.replicas,
        soft_pin: if command.soft_pin { SoftPinChange::Pinned(None) } else { SoftPinChange::Unchanged },
        hard_pin: command.hard_pin,
        preferred_segments: command.segment,
        group: command.group,
        ..PutOptions::default()
    };
    let (key, started_at) = (&command.key, Instant::now());
    let total = (bytes.len() as u64).saturating_mul(command.replicas.max(1));
    let putting = async {
        if command.upsert {
            client.upsert(key, &bytes, &options).await.map(|()| PutOutcome::Stored)
        } else {
            client.put(key, &bytes, &options).await
        }
    };
    let put = with_progress(client, total, putting).await?;
    let seconds = started_at.elapsed().as_secs_f64();
    let stored = put == PutOutcome::Stored;
    if store.json {
        let line =
            serde_json::json!({ "key": key, "bytes": bytes.len(), "stored": stored, "seconds": seconds });
        writeln!(io::stdout(), "{line}")?;
    } else if !stored {
        bail!("the object {key:?} exists already and was not changed; --upsert replaces it");
    }
    Ok(if stored { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub(super) async fn get(
    command: KvGetArgs,
    store: &KvStoreArgs,
    client: &KvClient,
) -> anyhow::Result<ExitCode> {
    let (key, file, started_at) = (&command.key, command.file.as_deref(), Instant::now());
    if store.json && is_stream(file) {
        bail!("--json prints to stdout; name a file for the object");
    }
    let total = client.stat(key).await?.size;
    let bytes = with_progress(client, total, client.get(key)).await?;
    let seconds = started_at.elapsed().as_secs_f64();
    match file.filter(|_| !is_stream(file)) {
        Some(file) => {
            std::fs::write(file, &bytes).with_context(|| format!("cannot write {}", file.display()))?;
        }
        None => io::stdout().lock().write_all(&bytes).context("cannot write to stdout")?,
    }
    if store.json {
        let line = serde_json::json!({ "key": key, "bytes": bytes.len(), "seconds": seconds });
        writeln!(io::stdout(), "{line}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Shows a progress bar during `work` if stderr is a terminal.
async fn with_progress<T>(client: &KvClient, total: u64, work: impl Future<Output = T>) -> T {
    if !io::stderr().is_terminal() {
        return work.await;
    }
    let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let before = client.bytes_moved();
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => {
                bar.finish_and_clear();
                return done;
            }
            () = tokio::time::sleep(REDRAW_INTERVAL) => bar.set_position(client.bytes_moved() - before),
        }
    }
}
