//! Fleets of engines that do not run, for tests.

use std::sync::Arc;

use clap::Parser;
use moongate_discovery::{
    DeclaredFacts, EngineFacts, EngineInstance, EngineKind, EngineRole, InstanceId, InstanceReadiness,
    InstanceSource, KubernetesWorkload, PhysicalLocation, Topology,
};
use moongate_runtime::{ClientTls, ClientTlsFiles};

use crate::config::GatewayOptions;
use crate::fleet::FleetSnapshot;
use crate::kv_index::KvIndex;
use crate::lora_adapters::AdapterTable;

#[derive(Debug, Parser)]
struct DefaultOptions {
    #[command(flatten)]
    gateway: GatewayOptions,
}

/// An engine that serves the model `m`.
pub(crate) fn engine(name: &str, role: EngineRole, kind: EngineKind, dp_size: u32) -> Arc<EngineInstance> {
    let facts = EngineFacts { models: vec!["m".to_owned()], dp_size, ..EngineFacts::unreported(kind) };
    with_facts(name, role, facts)
}

/// An engine that reports these facts.
pub(crate) fn with_facts(name: &str, role: EngineRole, facts: EngineFacts) -> Arc<EngineInstance> {
    Arc::new(EngineInstance {
        id: InstanceId::from(name),
        role,
        url: format!("http://{name}:80"),
        source: InstanceSource::Static,
        location: PhysicalLocation::default(),
        workload: KubernetesWorkload::default(),
        declared: DeclaredFacts::default(),
        readiness: InstanceReadiness::Ready,
        facts: Some(facts),
    })
}

/// A snapshot with default settings.
pub(crate) fn snapshot(
    instances: Vec<Arc<EngineInstance>>,
    previous: &FleetSnapshot,
    index: &Arc<KvIndex>,
) -> FleetSnapshot {
    snapshot_with_adapters(instances, previous, index, Arc::default())
}

/// A snapshot of engines that can load these LoRA adapters.
pub(crate) fn snapshot_with_adapters(
    instances: Vec<Arc<EngineInstance>>,
    previous: &FleetSnapshot,
    index: &Arc<KvIndex>,
    adapters: Arc<AdapterTable>,
) -> FleetSnapshot {
    let options = DefaultOptions::try_parse_from(["gateway"]).unwrap().gateway;
    let files = ClientTlsFiles::from_options(None, [None, None], None, ["", ""]).unwrap();
    let limits = options.upstream.endpoint_limits(&ClientTls::load(files).unwrap(), 10);
    let topology = Topology { generation: 1, instances, ..Topology::default() };
    FleetSnapshot::build(&topology, previous, &limits, (index, adapters))
}
