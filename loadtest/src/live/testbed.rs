//! Engines, their store, and a gateway in a process of its own.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions};
use tokio::process::Child;

use super::args::{LiveComparisonArgs, MODEL};
use super::process;
use super::store::{LiveStore, LiveStoreVariant};
use crate::engine::{OBJECTS_PER_PAGE, SharedL3Store, SimEngine, SimMasterAdmin, SimRole};

/// The engines' store.
enum TestbedStore {
    /// In this process, with the admin interface of a master.
    Simulated(SimMasterAdmin),
    Live(Box<LiveStore>),
}

/// A running fleet with a gateway. The gateway is killed on drop.
pub(super) struct LiveTestbed {
    engines: Vec<SimEngine>,
    store: TestbedStore,
    gateway: Child,
    /// `http://host:port` of the gateway.
    pub(super) url: String,
}

impl LiveTestbed {
    /// Starts everything with empty caches, and waits until all engines are ready.
    pub(super) async fn start(
        args: &LiveComparisonArgs,
        policy: &str,
        store: Option<LiveStoreVariant>,
        page_tokens: usize,
        supervisor: &Supervisor,
    ) -> anyhow::Result<Self> {
        let program = match &args.program {
            Some(program) => program.clone(),
            None => std::env::current_exe().context("cannot find this program; set --program FILE")?,
        };
        let (fleet, store) = match store {
            None => {
                let fleet = SharedL3Store::new(usize::try_from(args.l3_tokens).unwrap_or(usize::MAX));
                let admin = SimMasterAdmin::start(&fleet, MODEL).await?;
                (fleet, TestbedStore::Simulated(admin))
            }
            Some(variant) => {
                let objects = args.l3_tokens / (page_tokens as u64).max(1) * OBJECTS_PER_PAGE;
                let store = LiveStore::start(&program, variant, objects, supervisor).await?;
                let client = KvClient::new(&store.rpc, KvClientOptions::default(), supervisor)?;
                (SharedL3Store::with_mooncake(client), TestbedStore::Live(Box::new(store)))
            }
        };
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
            flags.push(match &store {
                TestbedStore::Simulated(admin) => format!("--mooncake-admin={}", admin.addr()),
                TestbedStore::Live(store) => format!("--mooncake-admin={}", store.admin),
            });
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
        let (gateway, url) = start_gateway(&program, &flags, supervisor).await?;
        Ok(Self { engines, store, gateway, url })
    }

    /// Stops the gateway and the engines.
    pub(super) async fn stop(mut self) {
        // The process may have exited already.
        let _ = self.gateway.kill().await;
        for engine in self.engines {
            engine.stop().await;
        }
        drop(self.store);
    }
}

/// Starts a gateway and waits until all engines are ready. Returns its URL.
async fn start_gateway(
    program: &Path,
    flags: &[String],
    supervisor: &Supervisor,
) -> anyhow::Result<(Child, String)> {
    // One line has both addresses.
    let fields = [("gateway listening", "address=")];
    let (gateway, [address]) = process::start(program, flags, fields, supervisor).await.context("gateway")?;
    let client = moongate_runtime::plain_http_client().build()?;
    let wait = async {
        loop {
            let ready = client.get(format!("http://{address}/ready")).send().await?;
            let all = ready.status().is_success();
            let state: serde_json::Value = ready.json().await?;
            if all && state["waiting"].as_array().is_some_and(Vec::is_empty) {
                return anyhow::Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(process::START_TIMEOUT, wait).await.context("the engines do not become ready")??;
    Ok((gateway, format!("http://{address}")))
}
