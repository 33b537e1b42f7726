//! API of RoleBasedGroup: labels, environment names and the injected discovery file; with the feature `objects` also the
//! object types with their CRDs, conversion between versions and strategic merge of pod templates.
//!
//! This crate has no file I/O and no sockets: [`DiscoveryFile`] implements `Deserialize`, and the caller chooses the YAML
//! parser.

#[cfg(feature = "objects")]
mod condition;
#[cfg(feature = "objects")]
pub mod conversion;
#[cfg(feature = "objects")]
pub mod crds;
pub mod discovery_file;
pub mod env;
#[cfg(feature = "objects")]
mod int_or_percent;
pub mod keys;
#[cfg(feature = "objects")]
pub mod merge;
mod role_kind;
#[cfg(feature = "objects")]
mod schema;
#[cfg(feature = "objects")]
pub mod template;
mod topology;
#[cfg(feature = "objects")]
pub mod v1alpha1;
#[cfg(feature = "objects")]
pub mod v1alpha2;

#[cfg(feature = "objects")]
pub use condition::Condition;
pub use discovery_file::{
    DiscoveredGroup, DiscoveredInstance, DiscoveredRole, DiscoveryFile, DiscoveryFileError,
};
pub use env::RbgIdentity;
#[cfg(feature = "objects")]
pub use int_or_percent::{IntOrPercent, RoundingMode};
pub use role_kind::RoleKind;
#[cfg(feature = "objects")]
pub use template::PodTemplate;
pub use topology::{TopologyLevel, TopologyLocation};

/// Path at which RBG mounts the discovery file in every container of a stateful role.
pub const CLUSTER_FILE: &str = "/etc/rbg/config.yaml";
