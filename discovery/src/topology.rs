//! The snapshot of all engines, merged from all topology sources, which the gateway reads.

use std::fmt;
use std::sync::Arc;

use crate::kv_cache::{DeclaredKvFacts, EngineBlockHashing, EngineStoreFacts, KvEventSource};
use crate::kv_transfer::{KvConnector, KvTransferMethod};
use crate::location::{HostLocations, PhysicalLocation};

/// Maximum number of instances in one topology: bounds memory and probing if a source is faulty.
pub(crate) const MAX_INSTANCES: usize = 10_000;

/// The state of discovery at one moment. Immutable: every change is a new snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Topology {
    /// Incremented with every published change.
    pub generation: u64,
    /// Sorted by id, ids are unique.
    pub instances: Vec<Arc<EngineInstance>>,
    /// Locations of hosts without an engine.
    pub hosts: Arc<HostLocations>,
}

impl Topology {
    /// Looks an instance up by id.
    #[must_use]
    pub fn get(&self, id: &InstanceId) -> Option<&Arc<EngineInstance>> {
        let index = self.instances.binary_search_by(|instance| instance.id.cmp(id)).ok()?;
        self.instances.get(index)
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
    /// The engine's role in a disaggregated fleet.
    pub role: EngineRole,
    /// `http://host:port` or `https://host:port`, no path, no trailing slash.
    pub url: String,
    /// The source that listed it.
    pub source: InstanceSource,
    /// Where it runs, as far as known: determines the network distance to other engines and to store nodes.
    pub location: PhysicalLocation,
    /// The Kubernetes workload that it belongs to.
    pub workload: KubernetesWorkload,
    /// Facts declared by the source; they override probed facts.
    pub declared: DeclaredFacts,
    /// Whether the gateway may route to it.
    pub readiness: InstanceReadiness,
    /// Facts that the engine reported; `None` until the first successful probe.
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
    /// Computes the prompt's KV cache and transfers it to a decode engine.
    Prefill,
    /// Receives the KV cache and generates the response.
    Decode,
    /// Runs both phases of a request.
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

/// The discovery source of an instance.
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

/// The Kubernetes workload of an engine, as far as its source reports it: shows the progress of a rollout.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct KubernetesWorkload {
    /// Name of the RoleBasedGroup.
    pub group: Option<String>,
    /// Name of the role in the group.
    pub role: Option<String>,
    /// Revision to which its pod was created or last updated.
    pub revision: Option<String>,
    /// Image of the pod's first container.
    pub image: Option<String>,
}

/// Facts declared by the source (file, annotation). Each overrides its probed counterpart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeclaredFacts {
    /// The engine's kind; `None`: probed.
    pub engine: Option<EngineKind>,
    /// vLLM's KV connector; `None`: probed.
    pub connector: Option<KvConnector>,
    /// Port of the prefill's bootstrap server (SGLang, or vLLM's MooncakeConnector).
    pub bootstrap_port: Option<u16>,
    /// Served model names; empty: probed.
    pub models: Vec<String>,
    /// Declared facts of the engine's KV cache.
    pub kv: DeclaredKvFacts,
}

/// Whether the gateway may route to an instance, with the reason if not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceReadiness {
    /// Both the source and the last probe report the engine as ready.
    Ready,
    /// The source or the last probe reports the engine as not ready.
    NotReady {
        /// The reason, such as "GET http://…/server_info: connection refused" or "pod is not Ready".
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

impl EngineKind {
    /// Name in settings, traces and status reports.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            EngineKind::Sglang => "sglang",
            EngineKind::Vllm => "vllm",
        }
    }

    /// Name in sentences.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            EngineKind::Sglang => "SGLang",
            EngineKind::Vllm => "vLLM",
        }
    }
}

/// Facts that an engine reported about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineFacts {
    /// The engine's kind.
    pub engine: EngineKind,
    /// The engine's version, empty if not reported.
    pub version: String,
    /// Served model names, in the engine's order, without duplicates.
    pub models: Vec<String>,
    /// Role that the engine is configured with (`disaggregation_mode`); `None` if not reported.
    pub reported_role: Option<EngineRole>,
    /// Data-parallel ranks, at least 1 and at most 4096.
    pub dp_size: u32,
    /// KV page or block size in tokens; `None` if not reported.
    pub page_size: Option<u32>,
    /// Longest sequence in tokens; `None` if not reported.
    pub context_length: Option<u32>,
    /// Source of the model's tokenizer and chat template: a folder on the engine's machine, or a repository's name. `None` if not
    /// reported, or if the engine uses another chat template than the one there.
    pub tokenizer: Option<String>,
    /// How the engine sends or receives KV cache; `None` for plain workers.
    pub transfer: Option<KvTransferMethod>,
    /// How its KV pages are hashed; `None` if it has no prefix cache, or if not reported.
    pub hashing: Option<EngineBlockHashing>,
    /// Where it publishes KV events, by rank; empty if it does not, or not over TCP. `None` until the first response; when a later probe gets
    /// none, the earlier value is kept.
    pub events: Option<Vec<KvEventSource>>,
    /// Whether pages evicted from the device are kept in host memory; `None` if not reported.
    pub host_cache: Option<bool>,
    /// How it stores pages in a Mooncake store; `None` if it uses none.
    pub store: Option<EngineStoreFacts>,
    /// Order of queued requests by the priority in their bodies; `None` if the engine ignores priorities, or preempts running requests
    /// for them.
    pub priority_order: Option<PriorityOrder>,
    /// Where a cached prefix can be reused, as far as KV events show, if not after every block.
    pub checkpoints: Option<PrefixCheckpoints>,
    /// LoRA adapters among [`EngineFacts::models`].
    pub adapters: Vec<LoraAdapterFacts>,
    /// Whether a vLLM decodes speculatively. The method is not reported.
    pub speculates: bool,
    /// Whether the engines of a pair can serve Anthropic's Messages: older SGLangs do not take a pair's members there.
    pub pairs_serve_messages: bool,
}

impl EngineFacts {
    /// Facts of an engine with one data-parallel rank that reports nothing else.
    #[must_use]
    pub fn unreported(engine: EngineKind) -> Self {
        Self {
            engine,
            version: String::new(),
            models: Vec::new(),
            reported_role: None,
            dp_size: 1,
            page_size: None,
            context_length: None,
            tokenizer: None,
            transfer: None,
            hashing: None,
            events: None,
            host_cache: None,
            store: None,
            priority_order: None,
            checkpoints: None,
            adapters: Vec::new(),
            speculates: false,
            pairs_serve_messages: engine == EngineKind::Vllm,
        }
    }
}

/// Where an SGLang with layers of several kinds can reuse a cached prefix. Its events are only about layers with full attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrefixCheckpoints {
    /// A recurrent state is kept for the end of each request.
    RequestEnds,
    /// One window is kept for the end of each request, and for where one branched off another.
    RequestEndsAndBranches,
}

/// A LoRA adapter that an engine has loaded (`/v1/models`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LoraAdapterFacts {
    /// The adapter's name, by which requests select it.
    pub name: String,
    /// Where the engine has loaded it from; `None` if its block hashes do not depend on it.
    pub path: Option<String>,
    /// SGLang's identifier, on which its block hashes depend. `None` if it is not reported, as for adapters that were loaded at runtime:
    /// then hashes cannot be computed.
    pub id: Option<String>,
}

/// Order in which an engine schedules priorities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PriorityOrder {
    /// SGLang with `--schedule-low-priority-values-first`.
    SmallestFirst,
    /// SGLang without it.
    LargestFirst,
}
