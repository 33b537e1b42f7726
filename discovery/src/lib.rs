//! Topology sources (static file, RBG, Kubernetes) and engine probing, merged into one snapshot.
//!
//! Data flows one way: a source lists instances → the prober asks each engine what it is → the merged
//! [`Topology`] is published. Readers never wait for any of it.
//!
//! A source that cannot be read keeps what it listed last; an engine that does not answer stays in the snapshot as
//! [`Readiness::NotReady`] with the reason in words.

mod cache;
mod endpoint;
mod entry;
mod error;
mod file_watch;
mod hosts;
mod hub;
mod kubernetes;
mod listing;
mod load;
mod names;
mod options;
mod probe;
mod rbg;
mod reader;
mod registry;
mod roles;
mod start;
mod static_file;
mod tcp_address;
mod topology;

pub use cache::{DeclaredKv, KvEventSource, KvHashing, KvStore, PrefetchPolicy, StoreKeys, VllmHash};
pub use endpoint::Scheme;
pub use error::{DiscoveryError, FileError, InstanceError};
pub use hosts::Hosts;
pub use kubernetes::KubernetesOptions;
pub use kubernetes::pod::annotation;
#[doc(hidden)]
pub use load::read_load;
pub use load::{EngineLoad, LoadTrouble, ask_load};
pub use names::UnknownName;
pub use options::{DiscoveryOptions, ProbeOptions};
pub use probe::report::{Check, CheckOutcome, ProbeReport, Verdict};
#[doc(hidden)]
pub use probe::sizes::{AnswerSizes, answer_sizes};
pub use rbg::RbgOptions;
pub use reader::{TopologyPublisher, TopologyReader, channel};
pub use registry::{MAX_LEASE, Registered, Registration, Registry, RegistryError};
pub use roles::{RoleNames, RolePorts};
pub use start::{probe_once, start};
#[doc(hidden)]
pub use static_file::ids_in;
pub use static_file::{StaticInstance, instances_in};
pub use topology::{
    Bootstrap, Declared, Engine, EngineFacts, Instance, InstanceId, KvConnector, KvTransfer, Place,
    PriorityOrder, Readiness, Role, Source, Topology, Workload,
};
