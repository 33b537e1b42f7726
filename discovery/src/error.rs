//! Errors in the configuration of discovery.

use std::path::PathBuf;

/// Why discovery could not start. Later errors are logged and shown in the snapshot instead.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// No source was configured.
    #[error(
        "no engines are configured: set --prefill and --decode (or --worker) URLs, an instances file, --discovery rbg|kubernetes, or --registration"
    )]
    NoSource,
    /// An instance given by flags is invalid.
    #[error(transparent)]
    Instance(#[from] InstanceError),
    /// A file is missing or invalid.
    #[error("{flag} {}: {error}", path.display())]
    File {
        /// The flag that names it.
        flag: &'static str,
        path: PathBuf,
        error: TopologyFileError,
    },
    /// No usable Kubernetes client configuration.
    #[error("Kubernetes client: {0}; run inside a pod with a service account, or set --kubeconfig")]
    KubernetesConfig(String),
    /// The HTTP client could not be built.
    #[error("HTTP client for probing: {0}")]
    HttpClient(String),
}

impl DiscoveryError {
    /// Whether a setting, or a file that it names, is invalid.
    #[must_use]
    pub fn is_invalid_setting(&self) -> bool {
        !matches!(self, Self::HttpClient(_))
    }
}

/// Why one listed instance is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InstanceError {
    /// The URL is invalid.
    #[error("instance url `{url}`: {problem}; write http://HOST:PORT or https://HOST:PORT")]
    Url {
        url: String,
        /// Such as "has a path".
        problem: String,
    },
    /// Two instances have the same id.
    #[error("instance id `{0}` is given twice; remove one or give each its own `id`")]
    Duplicate(String),
    /// The number of instances exceeds the limit.
    #[error("{0} instances are listed; the limit is {max}", max = crate::topology::MAX_INSTANCES)]
    TooMany(usize),
    /// A connector is set for an engine that is not vLLM.
    #[error("instance `{0}`: `connector` is for vLLM, but `engine` is sglang; remove one of the two")]
    ConnectorWithoutVllm(String),
    /// A hash setting is set for an engine that is not vLLM.
    #[error(
        "instance `{0}`: `kv.hash_algorithm` and `kv.hash_seed` are for vLLM, but `engine` is sglang; remove one of the two"
    )]
    HashWithoutVllm(String),
    /// A value in the table `kv` is invalid.
    #[error("instance `{id}`: `kv.{key}` {problem}")]
    Kv {
        /// Id of the instance.
        id: String,
        /// Name of the key in the table.
        key: &'static str,
        /// Why the value is invalid, and which values are valid.
        problem: &'static str,
    },
}

/// Why a topology file was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyFileError {
    /// The file cannot be read.
    #[error("cannot be read: {0}")]
    Read(String),
    /// The file exceeds the size limit, in bytes.
    #[error("is larger than {0} bytes")]
    TooLarge(u64),
    /// The content is not UTF-8.
    #[error("is not UTF-8 text")]
    NotText,
    /// Invalid TOML or YAML, or an unknown key; the text contains line and column.
    #[error("cannot be parsed: {0}")]
    Syntax(String),
    /// Well-formed, but with an invalid instance.
    #[error(transparent)]
    Instance(#[from] InstanceError),
    /// Well-formed, but not an RBG discovery file.
    #[error(transparent)]
    Rbg(#[from] rbg_api::DiscoveryFileError),
}
