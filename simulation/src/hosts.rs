//! The programs, each on a host of its own, with their own command lines.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsString;
use std::path::Path;
use std::rc::{Rc, Weak};
use std::time::Duration;

use clap::Parser;
use moongate_gateway::{GatewayOptions, RunningGateway};
use moongate_loadtest::engine::{
    EngineFaultPlan, SharedL3Store, SimEngine, SimEngineOptions, SimProtocol, SimRole, SimStats,
    VllmConnector,
};
use moongate_master::flags::{self, MasterInvocation};
use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions};
use moongate_store_node::{NodeArgs, NodeConfig};
use moongate_telemetry::Tracer;

use crate::plan::{PAIRS, SeedPlan, SimulatedHost};

pub(crate) type HostResult = Result<(), Box<dyn Error>>;

/// Address at which clients connect to the gateway.
pub(crate) const GATEWAY: &str = "gateway:8000";
pub(crate) const MASTER: &str = "master:50051";
const ENGINE_PORT: u16 = 8000;
const BOOTSTRAP_PORT: u16 = 8998;
/// Speed of the engines relative to real ones.
const TIME_SCALE: f64 = 2.0;

thread_local! {
    static GATEWAY_RUNNING: RefCell<Weak<RunningGateway>> = const { RefCell::new(Weak::new()) };
    static ENGINES: RefCell<BTreeMap<String, Weak<SimEngine>>> = const { RefCell::new(BTreeMap::new()) };
}

#[derive(Debug, Parser)]
struct SimulatedGatewayArgs {
    #[command(flatten)]
    options: GatewayOptions,
}

/// Runs a gateway until its host crashes.
pub(crate) async fn gateway() -> HostResult {
    let mut line = vec![
        "gateway".to_owned(),
        "--listen=0.0.0.0:8000".to_owned(),
        "--admin-listen=0.0.0.0:9000".to_owned(),
        "--prefill-timeout=5s".to_owned(),
        "--first-byte-timeout=5s".to_owned(),
        "--response-timeout=8s".to_owned(),
        "--idle-timeout=4s".to_owned(),
        "--stall-timeout=3s".to_owned(),
        "--health-interval=2s".to_owned(),
        "--health-timeout=1s".to_owned(),
        "--load-interval=500ms".to_owned(),
        "--index-blocks=10000".to_owned(),
        format!("--time-scale={TIME_SCALE}"),
    ];
    for number in 0..PAIRS {
        line.push(format!(
            "--prefill=http://{}:{ENGINE_PORT},{BOOTSTRAP_PORT}",
            SimulatedHost::Prefill(number).name()
        ));
        line.push(format!("--decode=http://{}:{ENGINE_PORT}", SimulatedHost::Decode(number).name()));
    }
    let options = SimulatedGatewayArgs::try_parse_from(line)?.options;
    let supervisor = Supervisor::new();
    let running = moongate_gateway::start(&options, Tracer::disabled(), &supervisor).await?;
    let running = Rc::new(running);
    GATEWAY_RUNNING.set(Rc::downgrade(&running));
    std::future::pending().await
}

/// Requests in flight by the gateway's gauges; `None` if it does not run.
pub(crate) fn in_flight() -> Option<u32> {
    GATEWAY_RUNNING.with_borrow(Weak::upgrade).map(|gateway| gateway.in_flight())
}

/// Runs an engine until its host crashes.
pub(crate) async fn engine(host: SimulatedHost, plan: Rc<SeedPlan>) -> HostResult {
    let role = if matches!(host, SimulatedHost::Prefill(_)) { SimRole::Prefill } else { SimRole::Decode };
    let mut config = SimEngineOptions::new(role, plan.face);
    config.connector = plan.connector;
    config.listen = ([0, 0, 0, 0], ENGINE_PORT).into();
    config.bootstrap_listen = Some(([0, 0, 0, 0], BOOTSTRAP_PORT).into());
    config.advertise_host = Some(host.name());
    config.time_scale = TIME_SCALE;
    config.bootstrap_timeout = Some(Duration::from_secs(6));
    config.handshake_timeout = Duration::from_secs(2);
    // Only SGLang engines use a store in addition to direct transfers.
    config.use_storage = true;
    config.device_tokens = 4_096;
    let supervisor = Supervisor::new();
    let fleet = match (plan.face, plan.connector) {
        (SimProtocol::Sglang, _) | (_, VllmConnector::Store) => {
            SharedL3Store::with_mooncake(KvClient::new(MASTER, client_options(), &supervisor)?)
        }
        _ => SharedL3Store::default(),
    };
    let engine = Rc::new(SimEngine::start_with_store(config, &fleet).await?);
    ENGINES.with_borrow_mut(|engines| engines.insert(host.name(), Rc::downgrade(&engine)));
    std::future::pending().await
}

/// Sets a fault of an engine, if it runs.
pub(crate) fn set_fault(host: SimulatedHost, plan: EngineFaultPlan) {
    if let Some(engine) = running(host) {
        engine.set_fault(plan);
    }
}

/// An engine's counters; `None` if it does not run.
pub(crate) fn stats(host: SimulatedHost) -> Option<SimStats> {
    running(host).map(|engine| engine.stats())
}

fn running(host: SimulatedHost) -> Option<Rc<SimEngine>> {
    ENGINES.with_borrow(|engines| engines.get(&host.name()).and_then(Weak::upgrade))
}

/// Options of all store clients.
pub(crate) fn client_options() -> KvClientOptions {
    let mut options = KvClientOptions::default();
    options.master.timeout = Duration::from_secs(2);
    options.transfers.stall = Duration::from_secs(2);
    options
}

/// Runs a master with its state in a folder until its host crashes.
pub(crate) async fn master(folder: &Path) -> HostResult {
    let line = [
        "--rpc_address=0.0.0.0".to_owned(),
        "--rpc_port=50051".to_owned(),
        "--metrics_host=0.0.0.0".to_owned(),
        "--metrics_port=9003".to_owned(),
        format!("--data_dir={}", folder.display()),
    ];
    let MasterInvocation::Serve(options) = flags::read(line.map(OsString::from), |_| None)? else {
        return Err("the master has nothing but text".into());
    };
    let supervisor = Supervisor::new();
    let _running = moongate_master::start(*options, &supervisor).await?;
    std::future::pending().await
}

/// Runs a store node until its host crashes.
pub(crate) async fn node(host: SimulatedHost, memory: Option<&Path>) -> HostResult {
    let memory = memory.map_or("process".to_owned(), |folder| format!("folder:{}", folder.display()));
    let line = [
        "store".to_owned(),
        "--port=8080".to_owned(),
        "--listen=0.0.0.0".to_owned(),
        "--allow-peers=192.168.0.0/16".to_owned(),
        "--data-port=7000".to_owned(),
        "--scrub-rate=0".to_owned(),
        format!("--memory={memory}"),
    ];
    let flags = NodeArgs::try_parse_from(line)?;
    let config = NodeConfig::read(None, &[], |name| match name {
        "MOONCAKE_MASTER" => Some(MASTER.to_owned()),
        "MOONCAKE_LOCAL_HOSTNAME" => Some(format!("{}:7001", host.name())),
        "MOONCAKE_GLOBAL_SEGMENT_SIZE" => Some("16mb".to_owned()),
        _ => None,
    })?;
    let supervisor = Supervisor::new();
    let _running = moongate_store_node::start(flags, config, &supervisor).await?;
    std::future::pending().await
}
