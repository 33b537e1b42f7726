//! RoleBasedGroup's API: labels, environment names and the injected discovery file; with the feature `objects` also the
//! object types with their CRDs, conversion between versions and strategic merge of pod templates.
//!
//! This crate has no file format and no socket: [`ClusterFile`] implements `Deserialize`, whoever reads the file
//! chooses the YAML parser.

pub mod cluster;
#[cfg(feature = "objects")]
mod condition;
#[cfg(feature = "objects")]
pub mod conversion;
#[cfg(feature = "objects")]
pub mod crds;
mod duty;
pub mod env;
#[cfg(feature = "objects")]
mod int_or_percent;
pub mod keys;
#[cfg(feature = "objects")]
pub mod merge;
mod place;
#[cfg(feature = "objects")]
mod schema;
#[cfg(feature = "objects")]
pub mod template;
#[cfg(feature = "objects")]
pub mod v1alpha1;
#[cfg(feature = "objects")]
pub mod v1alpha2;

pub use cluster::{ClusterConfig, ClusterFile, ClusterFileError, RoleAddresses, RoleInstance};
#[cfg(feature = "objects")]
pub use condition::Condition;
pub use duty::Duty;
pub use env::Identity;
#[cfg(feature = "objects")]
pub use int_or_percent::{IntOrPercent, Round};
pub use place::{Level, Place};
#[cfg(feature = "objects")]
pub use template::PodTemplate;

/// Where RBG mounts the discovery file in every container of a stateful role.
pub const CLUSTER_FILE: &str = "/etc/rbg/config.yaml";
