//! Topology sources (static file, RBG, Kubernetes) and engine probing, merged into one snapshot.
//!
//! Data flows one way: a source lists instances → the prober queries each engine → the merged [`Topology`] is published.
//! Readers never block.
//!
//! For a source that cannot be read, the last list is kept; an engine that does not respond stays in the snapshot as
//! [`InstanceReadiness::NotReady`] with the reason.

mod endpoint;
mod engine_load;
mod error;
mod file_watch;
mod hub;
mod kubernetes;
mod kv_cache;
mod kv_transfer;
mod listing;
mod location;
mod options;
mod parse_names;
mod probe;
mod probed_instance;
mod publish;
mod rbg;
mod registry;
mod roles;
mod start;
mod static_file;
mod tcp_address;
mod topology;

pub use endpoint::HttpScheme;
pub use engine_load::{
    EngineLoad, EngineLoadError, LOAD_QUERY_TIMEOUT, MAX_LOAD_BYTES, MissingLoadError, RankLoads, fetch_load,
    load_path, parse_load,
};
pub use error::{DiscoveryError, InstanceError, InstanceUrlError, KubernetesConfigError, TopologyFileError};
pub use kubernetes::KubernetesDiscoveryOptions;
pub use kubernetes::pod::annotation;
pub use kv_cache::{
    DeclaredKvFacts, EngineBlockHashing, EngineStoreFacts, KvEventSource, PrefetchPolicy, StoreKeyScheme,
    VllmHashAlgorithm,
};
pub use kv_transfer::{BootstrapAddress, KvConnector, KvTransferMethod};
pub use location::{HostLocations, PhysicalLocation};
pub use options::DiscoveryOptions;
pub use parse_names::UnknownNameError;
pub use probe::options::ProbeOptions;
pub use probe::report::{ProbeCheck, ProbeCheckOutcome, ProbeReport, ProbeVerdict};
#[doc(hidden)]
pub use probe::sizes::{ProbeResponseSizes, response_sizes};
pub use publish::{TopologyPublisher, TopologyReader, channel};
pub use rbg::RbgDiscoveryOptions;
pub use registry::{EngineRegistration, EngineRegistry, EngineRegistryError, MAX_LEASE, RegistrationResult};
pub use roles::{RoleNames, RolePorts};
pub use start::{probe_once, start};
#[doc(hidden)]
pub use static_file::instance_ids;
pub use static_file::{StaticInstance, count_instances};
pub use topology::{
    DeclaredFacts, EngineFacts, EngineInstance, EngineKind, EngineRole, InstanceId, InstanceReadiness,
    InstanceSource, KubernetesWorkload, LoraAdapterFacts, PrefixCheckpoints, PriorityOrder, Topology,
};
