//! Engine pods in the Kubernetes API, found by RBG's labels.

pub(crate) mod pod;
pub(crate) mod watch;

use std::path::PathBuf;
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::endpoint::HttpScheme;
use crate::error::KubernetesConfigError;
use crate::kv_transfer::KvConnector;
use crate::roles::{RoleNames, RolePorts};
use crate::topology::EngineKind;

/// Settings of discovery from pods in the Kubernetes API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesDiscoveryOptions {
    /// Client configuration; `None`: the pod's service account, or the user's default kubeconfig.
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the pods; `None`: the client configuration's.
    pub namespace: Option<String>,
    /// Name of the RoleBasedGroup; `None`: every group in the namespace.
    pub group: Option<String>,
    /// A label selector that replaces the selection by RBG's labels: for pods that are not part of a RoleBasedGroup. Their role is
    /// the label or annotation `moongate.io/role`.
    pub selector: Option<String>,
    /// Names of the roles that are engines.
    pub roles: RoleNames,
    /// HTTP ports of pods that declare none.
    pub ports: RolePorts,
    /// Scheme of pods without the annotation `moongate.io/scheme`.
    pub scheme: HttpScheme,
    /// Engine kind of pods that declare none; `None`: probed.
    pub engine: Option<EngineKind>,
    /// vLLM's connector of pods that declare none; `None`: probed.
    pub connector: Option<KvConnector>,
    /// Interval of complete lists, default 60 s. A watch can stop delivering events without an error; this bounds how long the
    /// list is stale.
    pub relist: Duration,
}

impl Default for KubernetesDiscoveryOptions {
    fn default() -> Self {
        Self {
            kubeconfig: None,
            namespace: None,
            group: None,
            selector: None,
            roles: RoleNames::default(),
            ports: RolePorts::default(),
            scheme: HttpScheme::default(),
            engine: None,
            connector: None,
            relist: Duration::from_secs(60),
        }
    }
}

impl KubernetesDiscoveryOptions {
    /// The defaults, with the group of this process from RBG's environment variables.
    #[must_use]
    pub fn from_env() -> Self {
        let own = rbg_api::RbgIdentity::from_env(|name| std::env::var(name).ok());
        Self { group: own.group, ..Self::default() }
    }

    /// One selector per watch. Pods of v1alpha1 have only the legacy labels; no pod matches both selectors.
    pub(crate) fn selectors(&self) -> Vec<String> {
        use rbg_api::keys;
        match (&self.selector, &self.group) {
            (Some(selector), _) => vec![selector.clone()],
            (None, Some(group)) => vec![
                format!("{}={group}", keys::GROUP_NAME),
                format!("{}={group},!{}", keys::legacy::GROUP_NAME, keys::GROUP_NAME),
            ],
            (None, None) => vec![
                keys::GROUP_NAME.to_owned(),
                format!("{},!{}", keys::legacy::GROUP_NAME, keys::GROUP_NAME),
            ],
        }
    }
}

/// The API client and the namespace to watch.
pub(crate) async fn client(
    options: &KubernetesDiscoveryOptions,
) -> Result<(Client, String), KubernetesConfigError> {
    let config = match &options.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).map_err(KubernetesConfigError::Kubeconfig)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .map_err(KubernetesConfigError::Kubeconfig)?
        }
        None => Config::infer().await.map_err(KubernetesConfigError::Infer)?,
    };
    let namespace = options.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
    let client = Client::try_from(config).map_err(KubernetesConfigError::Client)?;
    Ok((client, namespace))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_missing_client_configuration_is_named_in_the_error() {
        let options = KubernetesDiscoveryOptions {
            kubeconfig: Some("/no/such".into()),
            ..KubernetesDiscoveryOptions::default()
        };
        let error = client(&options).await.err().unwrap().to_string();
        assert!(error.contains("'/no/such'"), "{error}");
    }

    #[test]
    fn selectors_are_disjoint_and_cover_both_label_generations() {
        let options =
            KubernetesDiscoveryOptions { group: Some("g".into()), ..KubernetesDiscoveryOptions::default() };
        assert_eq!(
            options.selectors(),
            [
                "rbg.workloads.x-k8s.io/group-name=g",
                "rolebasedgroup.workloads.x-k8s.io/name=g,!rbg.workloads.x-k8s.io/group-name",
            ]
        );
        let own = KubernetesDiscoveryOptions { selector: Some("app=x".into()), ..options };
        assert_eq!(own.selectors(), ["app=x"]);
    }
}
