//! Topology sources (static file, RBG, Kubernetes) and engine probing, merged into one snapshot.
//!
//! Data flows one way: a source lists instances → the prober asks each engine what it is → the merged
//! [`Topology`] is published. Readers never wait for any of it.

mod topology;

pub use topology::{
    Bootstrap, Declared, Engine, EngineFacts, Instance, InstanceId, KvConnector, KvTransfer, Place, Readiness, Role,
    Source, Topology,
};
