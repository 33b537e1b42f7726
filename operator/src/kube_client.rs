//! Errors of the Kubernetes client's configuration.

use std::path::PathBuf;

use kube::config::{InferConfigError, KubeconfigError};

// kube's errors are not sources: the text has them already, without the doubled quotes around a path.
/// Why no client for a cluster could be created.
#[derive(Debug, thiserror::Error)]
pub enum KubeClientError {
    /// The file given by a flag cannot be read.
    #[error("--kubeconfig {}: {}", path.display(), unquoted(error))]
    File { path: PathBuf, error: KubeconfigError },
    #[error("{}", unquoted(.0))]
    Kubeconfig(KubeconfigError),
    /// Neither a kubeconfig nor a service account is usable.
    #[error("{}", unquoted(.0))]
    Infer(InferConfigError),
    /// The configuration is not usable, for example because of its certificates.
    #[error("{}", unquoted(.0))]
    Client(kube::Error),
}

impl From<KubeconfigError> for KubeClientError {
    fn from(error: KubeconfigError) -> Self {
        Self::Kubeconfig(error)
    }
}

impl From<InferConfigError> for KubeClientError {
    fn from(error: InferConfigError) -> Self {
        Self::Infer(error)
    }
}

impl From<kube::Error> for KubeClientError {
    fn from(error: kube::Error) -> Self {
        Self::Client(error)
    }
}

/// Text of a kube error, without the doubled quotes around a path.
fn unquoted(error: &dyn std::fmt::Display) -> String {
    error.to_string().replace("'\"", "'").replace("\"'", "'")
}
