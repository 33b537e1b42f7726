//! Settings of discovery. The command line owns their flag, environment and file names.

use std::path::PathBuf;

use crate::kubernetes::KubernetesDiscoveryOptions;
use crate::probe::options::ProbeOptions;
use crate::rbg::RbgDiscoveryOptions;
use crate::registry::EngineRegistry;
use crate::static_file::StaticInstance;

/// Sources and probe settings of discovery. Sources are combined; on equal ids the earlier field has precedence.
#[derive(Debug, Clone, Default)]
pub struct DiscoveryOptions {
    /// Instances given by flags.
    pub instances: Vec<StaticInstance>,
    /// TOML file with `[[instance]]` tables; watched.
    pub file: Option<PathBuf>,
    /// RBG's injected discovery file; watched.
    pub rbg: Option<RbgDiscoveryOptions>,
    /// Registrations at run time. A registration and a pod with the same id are one instance.
    pub registry: Option<EngineRegistry>,
    /// Pods in the Kubernetes API; watched.
    pub kubernetes: Option<KubernetesDiscoveryOptions>,
    /// Settings of the probes of engines.
    pub probe: ProbeOptions,
}
