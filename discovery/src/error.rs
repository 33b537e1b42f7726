//! Errors in the configuration of discovery.

use std::error::Error;
use std::fmt::Display;
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
    KubernetesConfig(#[from] KubernetesConfigError),
    /// The HTTP client could not be built.
    #[error("HTTP client for probing: {}", root_cause(.0))]
    HttpClient(#[source] reqwest::Error),
}

impl DiscoveryError {
    /// Whether a setting, or a file that it names, is invalid.
    #[must_use]
    pub fn is_invalid_setting(&self) -> bool {
        !matches!(self, Self::HttpClient(_))
    }
}

/// Why there is no client of the Kubernetes API. Kube's errors are not sources: their messages are shown here without the doubled
/// quotes around paths, and a chain would repeat them with the quotes.
#[derive(Debug, thiserror::Error)]
pub enum KubernetesConfigError {
    /// The file of `--kubeconfig` cannot be used.
    #[error("{}", without_doubled_quotes(.0))]
    Kubeconfig(kube::config::KubeconfigError),
    /// Neither a service account nor a default kubeconfig can be used.
    #[error("{}", without_doubled_quotes(.0))]
    Infer(kube::config::InferConfigError),
    /// The configuration is readable, but no client can be built from it.
    #[error("{}", without_doubled_quotes(.0))]
    Client(kube::Error),
}

fn without_doubled_quotes(error: &dyn Display) -> String {
    error.to_string().replace("'\"", "'").replace("\"'", "'")
}

/// Why one listed instance is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InstanceError {
    /// The URL is invalid.
    #[error("instance url `{url}`: {source}; write http://HOST:PORT or https://HOST:PORT")]
    Url { url: String, source: InstanceUrlError },
    /// Two instances have the same id.
    #[error("instance id `{0}` is given twice; remove one or give each its own `id`")]
    Duplicate(String),
    /// The number of instances exceeds the limit.
    #[error("{listed} instances are listed; the limit is {max}")]
    TooMany { listed: usize, max: usize },
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

/// Why a URL is not the address of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InstanceUrlError {
    #[error(transparent)]
    Syntax(#[from] url::ParseError),
    #[error("the scheme is neither http nor https")]
    Scheme,
    #[error("it has a path")]
    Path,
    #[error("it has a query or fragment")]
    QueryOrFragment,
    #[error("it has a user name or password")]
    Credentials,
    #[error("it has no host")]
    NoHost,
    #[error("its port is 0")]
    PortZero,
}

/// Why a topology file was rejected. Causes are kept as text, because errors are compared: only another error is reported.
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

/// The innermost cause: "Connection refused" is more specific than "error sending request".
pub(crate) fn root_cause(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
