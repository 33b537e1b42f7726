//! The one snapshot type that every topology source produces and the gateway reads.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::hosts::HostLocations;
use crate::kv_cache::{DeclaredKvFacts, EngineBlockHashing, EngineStoreFacts, KvEventSource};

/// Everything discovery knows at one moment. Immutable: a change is a new snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// Grows by one with every published change.
    pub generation: u64,
    /// Sorted by id, ids are unique.
    pub instances: Vec<Arc<EngineInstance>>,
    /// Where hosts run that are no engines.
    pub hosts: Arc<HostLocations>,
}

impl Topology {
    /// Looks an instance up by id.
    #[must_use]
    pub fn get(&self, id: &InstanceId) -> Option<&Arc<EngineInstance>> {
        let at = self.instances.binary_search_by(|instance| instance.id.cmp(id)).ok()?;
        self.instances.get(at)
    }
}

/// Stable name of one engine endpoint: the pod's UID-qualified name, the RBG address, or its URL.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceId(pub Arc<str>);

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<&str> for InstanceId {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

/// One engine endpoint (for a tensor-parallel engine: its leader).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineInstance {
    /// Stable across re-lists and restarts of the gateway.
    pub id: InstanceId,
    /// What the engine does in a disaggregated fleet.
    pub role: EngineRole,
    /// `http://host:port` or `https://host:port`, no path, no trailing slash.
    pub url: String,
    /// Which source named it.
    pub source: InstanceSource,
    /// Where it runs, as far as known: prices distance between a prefill, a decode and a store node.
    pub location: PhysicalLocation,
    /// What runs it.
    pub workload: KubernetesWorkload,
    /// What the source says about the engine; wins over what is probed.
    pub declared: DeclaredFacts,
    /// Whether traffic may be sent there.
    pub readiness: InstanceReadiness,
    /// What the engine itself answered; `None` until the first successful probe.
    pub facts: Option<EngineFacts>,
}

impl EngineInstance {
    /// The facts, if the instance may serve now.
    #[must_use]
    pub fn usable_facts(&self) -> Option<&EngineFacts> {
        match self.readiness {
            InstanceReadiness::Ready => self.facts.as_ref(),
            InstanceReadiness::NotReady { .. } => None,
        }
    }
}

/// Role of an engine in a prefill/decode fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineRole {
    /// Computes the prompt's KV cache and hands it to a decode engine.
    Prefill,
    /// Receives KV cache and generates.
    Decode,
    /// Does both; takes a request alone.
    #[serde(alias = "regular")]
    Plain,
}

impl fmt::Display for EngineRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EngineRole::Prefill => "prefill",
            EngineRole::Decode => "decode",
            EngineRole::Plain => "plain",
        })
    }
}

/// Where an instance was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum InstanceSource {
    /// Flags or the static file.
    Static,
    /// RBG's injected `/etc/rbg/config.yaml` and environment.
    Rbg,
    /// A registration at run time, such as a sidecar's.
    Registry,
    /// Pods in the Kubernetes API.
    Kubernetes,
}

impl fmt::Display for InstanceSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            InstanceSource::Static => "static",
            InstanceSource::Rbg => "rbg",
            InstanceSource::Registry => "registry",
            InstanceSource::Kubernetes => "kubernetes",
        })
    }
}

/// Physical position, coarse to fine. Unknown levels are `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct PhysicalLocation {
    /// Availability zone.
    pub zone: Option<String>,
    /// Rack or RDMA rail.
    pub rack: Option<String>,
    /// Kubernetes node or host name.
    pub node: Option<String>,
    /// NVLink domain inside or across nodes.
    pub nvlink_domain: Option<String>,
}

impl From<rbg_api::TopologyLocation> for PhysicalLocation {
    fn from(place: rbg_api::TopologyLocation) -> Self {
        let rbg_api::TopologyLocation { node, nvlink_domain, rack, zone } = place;
        Self { zone, rack, node, nvlink_domain }
    }
}

/// What runs an engine on Kubernetes, as far as its source knows: tells which instances have been replaced by a rollout.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct KubernetesWorkload {
    /// The RoleBasedGroup.
    pub group: Option<String>,
    /// The role in it.
    pub role: Option<String>,
    /// Revision that its pod was made or last updated to.
    pub revision: Option<String>,
    /// Image of the pod's first container.
    pub image: Option<String>,
}

/// Facts stated by the source (file, annotation). Each overrides its probed counterpart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeclaredFacts {
    /// Engine kind.
    pub engine: Option<EngineKind>,
    /// vLLM's KV connector.
    pub connector: Option<KvConnector>,
    /// Port of the prefill's bootstrap server (SGLang, or vLLM's MooncakeConnector).
    pub bootstrap_port: Option<u16>,
    /// Served model names.
    pub models: Vec<String>,
    /// What the engine's KV cache is like.
    pub kv: DeclaredKvFacts,
}

/// Whether an instance may be sent traffic, and if not, why in words for a person.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceReadiness {
    /// Source and probe both say yes.
    Ready,
    /// At least one says no.
    NotReady {
        /// Such as "GET http://…/server_info: connection refused" or "pod is not Ready".
        reason: String,
    },
}

/// Inference engine kinds that the gateway can drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// SGLang: bootstrap triple in both legs.
    Sglang,
    /// vLLM: `kv_transfer_params` by connector.
    Vllm,
}

/// How a vLLM pair moves KV cache; decides the order of the legs and what is spliced into them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvConnector {
    /// NixlConnector: prefill first, its `kv_transfer_params` forwarded verbatim to decode.
    Nixl,
    /// MooncakeConnector: both legs at once, tied by a transfer id and the bootstrap server.
    Mooncake,
    /// MooncakeStoreConnector or another shared store: prefill with one token, then decode; no parameters.
    Store,
}

/// What an engine answered about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineFacts {
    /// Which engine it is.
    pub engine: EngineKind,
    /// Its version string, empty if it did not say.
    pub version: String,
    /// Served model names, in the engine's order, without duplicates.
    pub models: Vec<String>,
    /// Role the engine believes it has (`disaggregation_mode`); `None` if it does not say.
    pub reported_role: Option<EngineRole>,
    /// Data-parallel ranks, at least 1.
    pub dp_size: u32,
    /// KV page or block size in tokens, if told.
    pub page_size: Option<u32>,
    /// Longest sequence in tokens, if told.
    pub context_length: Option<u32>,
    /// Where the model's tokenizer and chat template are: a folder on the engine's machine, or a repository's name. `None` if that is
    /// not told, or if the engine was given another chat template than the one there.
    pub tokenizer: Option<String>,
    /// How KV reaches or leaves this engine; `None` for plain workers.
    pub transfer: Option<KvTransferMethod>,
    /// How its KV pages are hashed; `None` if it keeps none for later requests, or does not say.
    pub hashing: Option<EngineBlockHashing>,
    /// Where it publishes KV events, by rank; empty if it does not, or not over TCP. `None` until it could be asked: a later question that
    /// goes unanswered leaves the earlier answer in force.
    pub events: Option<Vec<KvEventSource>>,
    /// Whether pages that leave the device are kept in the host's memory; `None` if not told.
    pub host_cache: Option<bool>,
    /// How it keeps pages in a Mooncake store; `None` if it uses none.
    pub store: Option<EngineStoreFacts>,
    /// In which order it takes waiting requests by the priority in their bodies; `None` if it does not, or would stop running requests
    /// for it.
    pub priority_order: Option<PriorityOrder>,
}

/// Which priorities an engine takes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PriorityOrder {
    /// SGLang with `--schedule-low-priority-values-first`.
    SmallestFirst,
    /// SGLang without it.
    LargestFirst,
}

/// Hand-off facts of one engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvTransferMethod {
    /// SGLang. `bootstrap` is set on prefills only.
    SglangBootstrap {
        /// Host and port of the prefill's bootstrap server, as decode engines must reach it.
        bootstrap: Option<BootstrapAddress>,
    },
    /// vLLM NixlConnector.
    VllmNixl,
    /// vLLM MooncakeConnector.
    VllmMooncake {
        /// The prefill's bootstrap server; `None` on decodes.
        bootstrap: Option<BootstrapAddress>,
        /// `engine_id` by data-parallel rank, from the bootstrap server's `/query`; new after every restart of the prefill.
        engine_ids: BTreeMap<u32, String>,
    },
    /// vLLM with a shared store only.
    VllmStore,
}

/// Address of a prefill's bootstrap server.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BootstrapAddress {
    /// Host name or IP, without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
}
