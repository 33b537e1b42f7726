//! `moongate kv ls`, `stat` and `rm`.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use moongate_master_client::admin::{self, AdminClient};
use moongate_master_client::rpc::MasterLocator;
use moongate_store_client::{KvClient, KvError, ObjectStat};
use serde_json::json;

use super::KvStoreArgs;
use super::size::format_size;

/// Default port of Mooncake's admin server.
const ADMIN_PORT: u16 = 9003;
/// Time limit of one etcd endpoint for the lookup of the master.
const ETCD_LIMIT: Duration = Duration::from_secs(2);

/// Arguments of `moongate kv ls`.
#[derive(Debug, Args)]
pub(super) struct KvListArgs {
    /// List only keys with this prefix
    #[arg(default_value = "")]
    prefix: String,

    /// The master's admin server; by default port 9003 of the master's host
    #[arg(long, value_name = "HOST:PORT", env = "MOONGATE_KV_ADMIN")]
    admin: Option<String>,

    /// Maximum number of keys to list; unlimited by default
    #[arg(long, value_name = "N", default_value_t = usize::MAX, hide_default_value = true)]
    limit: usize,
}

/// Arguments of `moongate kv stat`.
#[derive(Debug, Args)]
pub(super) struct KvStatArgs {
    /// Keys of the objects, separated by spaces
    #[arg(required = true)]
    keys: Vec<String>,
}

/// Arguments of `moongate kv rm`.
#[derive(Debug, Args)]
pub(super) struct KvRemoveArgs {
    /// Keys of the objects, separated by spaces
    #[arg(required_unless_present_any = ["regex", "all"])]
    keys: Vec<String>,

    /// Remove all objects whose key matches
    #[arg(long, value_name = "REGEX", conflicts_with_all = ["keys", "all"])]
    regex: Option<String>,

    /// Remove all objects of the tenant
    #[arg(long, conflicts_with = "keys")]
    all: bool,

    /// Also remove leased objects
    #[arg(long)]
    force: bool,
}

pub(super) async fn list(command: KvListArgs, store: &KvStoreArgs) -> anyhow::Result<ExitCode> {
    let address = match command.admin {
        Some(address) => address,
        None => {
            let master = MasterLocator::new(&store.master()?, ETCD_LIMIT).locate().await?;
            let host = master.rsplit_once(':').map_or(&*master, |(host, _)| host);
            format!("{host}:{ADMIN_PORT}")
        }
    };
    let tls = store.tls()?;
    let admin = AdminClient::authenticated(&address, admin::AdminClientOptions::default(), tls.as_ref())?;
    let mut keys = admin
        .keys()
        .await
        .context("cannot list keys; check --admin, the address of the master's admin server")?;
    let (mut out, mut remaining) = (io::BufWriter::new(io::stdout().lock()), command.limit);
    while let Some(page) = keys.next().await? {
        for key in page.iter().filter(|key| key.starts_with(&command.prefix)) {
            if remaining == 0 {
                out.flush()?;
                return Ok(ExitCode::SUCCESS);
            }
            remaining -= 1;
            if store.json { writeln!(out, "{}", json!({ "key": key }))? } else { writeln!(out, "{key}")? }
        }
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn stat(
    command: KvStatArgs,
    store: &KvStoreArgs,
    client: &KvClient,
) -> anyhow::Result<ExitCode> {
    let mut missing = 0;
    for key in &command.keys {
        let text = match client.stat(key).await {
            Ok(stat) if store.json => json_of(key, &stat),
            Ok(stat) => text_of(key, &stat),
            Err(KvError::NotFound { .. }) => {
                missing += 1;
                if store.json {
                    json!({ "key": key, "found": false }).to_string()
                } else {
                    format!("{key}: not found")
                }
            }
            Err(error) => return Err(error.into()),
        };
        writeln!(io::stdout(), "{text}")?;
    }
    Ok(if missing == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn json_of(key: &str, stat: &ObjectStat) -> String {
    let replica = |it: &moongate_store_client::ObjectReplica| json!({ "id": it.id, "medium": it.medium, "place": it.location, "address": it.address, "complete": it.complete });
    json!({
        "key": key,
        "found": true,
        "bytes": stat.size,
        "lease_ms": stat.lease.as_millis() as u64,
        "checksum": stat.checksum,
        "replicas": stat.replicas.iter().map(replica).collect::<Vec<_>>(),
    })
    .to_string()
}

fn text_of(key: &str, stat: &ObjectStat) -> String {
    let mut text = format!("{key}: {}, leased for {:?}", format_size(stat.size), stat.lease);
    for it in &stat.replicas {
        let state = if it.complete { "" } else { ", incomplete" };
        text.push_str(&format!(
            "\n  replica {}: {} of {} at {:#x}{state}",
            it.id, it.medium, it.location, it.address
        ));
    }
    text
}

pub(super) async fn remove(
    command: KvRemoveArgs,
    store: &KvStoreArgs,
    client: &KvClient,
) -> anyhow::Result<ExitCode> {
    let removed = match &command.regex {
        Some(regex) => client.remove_matching(regex, command.force).await?,
        None if command.all => client.remove_all(command.force).await?,
        None => {
            let (mut removed, mut failures) = (0, Vec::new());
            for key in &command.keys {
                match client.remove(key, command.force).await {
                    Ok(()) => removed += 1,
                    Err(error) => failures.push(error.to_string()),
                }
            }
            if !failures.is_empty() {
                bail!("{}; --force also removes leased objects", failures.join("; "));
            }
            removed
        }
    };
    if store.json {
        writeln!(io::stdout(), "{}", json!({ "removed": removed }))?;
    }
    Ok(ExitCode::SUCCESS)
}
