//! RoleBasedGroup's labels, environment names and injected discovery file.
//!
//! This crate has no file format and no socket: [`ClusterFile`] implements `Deserialize`, whoever reads the file
//! chooses the YAML parser.

pub mod cluster;
pub mod env;
pub mod keys;

pub use cluster::{ClusterConfig, ClusterFile, ClusterFileError, RoleAddresses, RoleInstance};
pub use env::Identity;

/// Where RBG mounts the discovery file in every container of a stateful role.
pub const CLUSTER_FILE: &str = "/etc/rbg/config.yaml";
