//! What can be wrong with the configuration of discovery.

use std::path::PathBuf;

/// Why discovery could not start. Later trouble is logged and shown in the snapshot instead.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// No source was configured.
    #[error(
        "no engines are named: give --prefill and --decode (or --worker) URLs, an instances file, --discovery rbg|kubernetes, or --registration"
    )]
    NoSource,
    /// An instance given by flags is wrong.
    #[error(transparent)]
    Instance(#[from] InstanceError),
    /// A file is missing or wrong.
    #[error("{flag} {}: {error}", path.display())]
    File {
        /// The flag that names it.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: TopologyFileError,
    },
    /// No usable Kubernetes client configuration.
    #[error("Kubernetes client: {0}; run inside a pod with a service account, or name a kubeconfig file")]
    KubernetesConfig(String),
    /// The HTTP client could not be built.
    #[error("HTTP client for probing: {0}")]
    HttpClient(String),
}

impl DiscoveryError {
    /// Whether a setting, or a file that it names, is wrong.
    #[must_use]
    pub fn is_invalid_setting(&self) -> bool {
        !matches!(self, Self::HttpClient(_))
    }
}

/// What is wrong with one listed instance.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InstanceError {
    /// Not an address.
    #[error("instance url `{url}`: {problem}; write http://HOST:PORT or https://HOST:PORT")]
    Url {
        /// As given.
        url: String,
        /// Such as "has a path".
        problem: String,
    },
    /// Two instances would be mistaken for each other.
    #[error("instance id `{0}` is given twice; remove one or give each its own `id`")]
    Duplicate(String),
    /// A bound that protects the gateway.
    #[error("{0} instances are listed, at most {max} are taken", max = crate::listing::MAX_INSTANCES)]
    TooMany(usize),
    /// A connector of another engine.
    #[error("instance `{0}`: `connector` is for vLLM, but `engine` says sglang; remove one of the two")]
    ConnectorWithoutVllm(String),
    /// A hash of another engine.
    #[error(
        "instance `{0}`: `kv.hash_algorithm` and `kv.hash_seed` are for vLLM, but `engine` says sglang; remove one of the two"
    )]
    HashWithoutVllm(String),
    /// A wrong value in the table `kv`.
    #[error("instance `{id}`: `kv.{key}` {problem}")]
    Kv {
        /// The instance.
        id: String,
        /// Which key of the table.
        key: &'static str,
        /// What is wrong, and what to write.
        problem: &'static str,
    },
}

/// Why a topology file could not be taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyFileError {
    /// Cannot be read.
    #[error("cannot be read: {0}")]
    Read(String),
    /// Larger than any real one.
    #[error("is larger than {} bytes", crate::file_watch::MAX_FILE)]
    TooLarge,
    /// Not UTF-8.
    #[error("is not UTF-8 text")]
    NotText,
    /// Not TOML or not YAML, or an unknown key; the parser says line and column.
    #[error("cannot be parsed: {0}")]
    Syntax(String),
    /// Well-formed, but an instance in it is wrong.
    #[error(transparent)]
    Instance(#[from] InstanceError),
    /// Well-formed, but no RBG discovery file.
    #[error(transparent)]
    Rbg(#[from] rbg_api::DiscoveryFileError),
}
