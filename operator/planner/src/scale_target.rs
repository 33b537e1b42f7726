//! A resource with a `scale` subresource, and requests to it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use k8s_openapi::api::autoscaling::v1::Scale;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::{Client, Error};
use serde_json::json;

/// Time limit of one request to the API server.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Field manager of writes.
pub(crate) const FIELD_MANAGER: &str = "moongate-planner";

/// A resource with a `scale` subresource, such as `deployments.v1.apps/decode`: plural, version and group of its kind, and its name. Kinds
/// of the core group have no group: `replicationcontrollers.v1/decode`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScaleTarget {
    plural: String,
    version: String,
    group: String,
    name: String,
}

/// The text is no scale target.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?}: expected RESOURCE.VERSION.GROUP/NAME, such as deployments.v1.apps/decode or rolebasedgroupscalingadapters.v1alpha2.workloads.x-k8s.io/llama-decode"
)]
pub struct InvalidScaleTarget(String);

impl FromStr for ScaleTarget {
    type Err = InvalidScaleTarget;

    fn from_str(text: &str) -> Result<Self, InvalidScaleTarget> {
        let invalid = || InvalidScaleTarget(text.to_owned());
        let (kind, name) = text.split_once('/').ok_or_else(invalid)?;
        let (plural, version_and_group) = kind.split_once('.').ok_or_else(invalid)?;
        let (version, group) = version_and_group.split_once('.').unwrap_or((version_and_group, ""));
        let is_label = |text: &str| {
            text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        };
        let is_subdomain = |text: &str| text.split('.').all(|label| !label.is_empty() && is_label(label));
        let is_valid = is_subdomain(plural)
            && version.starts_with('v')
            && is_label(version)
            && (group.is_empty() || is_subdomain(group))
            && is_subdomain(name)
            && text.len() <= 512;
        let [plural, version, group, name] = [plural, version, group, name].map(str::to_owned);
        if is_valid { Ok(Self { plural, version, group, name }) } else { Err(invalid()) }
    }
}

impl fmt::Display for ScaleTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { plural, version, group, name } = self;
        let dot = if group.is_empty() { "" } else { "." };
        write!(f, "{plural}.{version}{dot}{group}/{name}")
    }
}

/// What the `scale` subresource of a target says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ScaleReading {
    pub(crate) replicas: u32,
    /// Selector of the replicas' pods; `None` while the target's controller has not published it.
    pub(crate) selector: Option<String>,
    pub(crate) resource_version: Option<String>,
}

/// Why a request to a `scale` subresource failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ScaleRequestError {
    /// The target has been changed since it was read.
    #[error("it was changed at the same time")]
    Conflict,
    /// The API server rejected the request.
    #[error("{0}")]
    Refused(String),
    #[error("no response within {} s", REQUEST_TIMEOUT.as_secs())]
    TimedOut,
    #[error("{0}")]
    Failed(Error),
}

impl ScaleRequestError {
    /// Value of the label `result`.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Conflict => "conflict",
            Self::Refused(_) => "refused",
            Self::TimedOut | Self::Failed(_) => "failed",
        }
    }
}

impl From<Error> for ScaleRequestError {
    fn from(error: Error) -> Self {
        match error {
            Error::Api(status) if status.code == 409 => Self::Conflict,
            Error::Api(status) => Self::Refused(format!("{} (HTTP {})", status.message, status.code)),
            other => Self::Failed(other),
        }
    }
}

/// Client for the `scale` subresource of one target.
#[derive(Clone)]
pub(crate) struct ScaleClient {
    api: Api<DynamicObject>,
    name: String,
}

impl ScaleClient {
    pub(crate) fn new(client: Client, namespace: &str, target: &ScaleTarget) -> Self {
        let api_version = match target.group.as_str() {
            "" => target.version.clone(),
            group => format!("{group}/{}", target.version),
        };
        let resource = ApiResource {
            group: target.group.clone(),
            version: target.version.clone(),
            api_version,
            // Only requests to the subresource are sent, whose path has no kind.
            kind: String::new(),
            plural: target.plural.clone(),
        };
        Self { api: Api::namespaced_with(client, namespace, &resource), name: target.name.clone() }
    }

    pub(crate) async fn read(&self) -> Result<ScaleReading, ScaleRequestError> {
        match tokio::time::timeout(REQUEST_TIMEOUT, self.api.get_scale(&self.name)).await {
            Ok(scale) => Ok(reading(scale?)),
            Err(_) => Err(ScaleRequestError::TimedOut),
        }
    }

    /// Sets the replicas, unless the target has been changed since `last` was read.
    pub(crate) async fn write(
        &self,
        last: &ScaleReading,
        replicas: u32,
    ) -> Result<ScaleReading, ScaleRequestError> {
        let body = json!({
            "metadata": { "resourceVersion": last.resource_version },
            "spec": { "replicas": replicas },
        });
        let params = PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let patch = Patch::Merge(body);
        match tokio::time::timeout(REQUEST_TIMEOUT, self.api.patch_scale(&self.name, &params, &patch)).await {
            Ok(scale) => Ok(reading(scale?)),
            Err(_) => Err(ScaleRequestError::TimedOut),
        }
    }
}

fn reading(scale: Scale) -> ScaleReading {
    let replicas = scale.spec.and_then(|spec| spec.replicas).unwrap_or(0);
    let selector = scale.status.and_then(|status| status.selector).filter(|selector| !selector.is_empty());
    ScaleReading {
        replicas: u32::try_from(replicas).unwrap_or(0),
        selector,
        resource_version: scale.metadata.resource_version,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_have_resource_version_group_and_name() {
        for text in [
            "deployments.v1.apps/decode",
            "rolebasedgroupscalingadapters.v1alpha2.workloads.x-k8s.io/llama-70b.prefill",
            "replicationcontrollers.v1/decode",
        ] {
            assert_eq!(text.parse::<ScaleTarget>().unwrap().to_string(), text);
        }
        let target: ScaleTarget = "deployments.v1.apps/decode".parse().unwrap();
        assert_eq!([target.version.as_str(), target.group.as_str()], ["v1", "apps"]);
        for text in [
            "",
            "decode",
            "deployments/decode",
            "deployments.apps/decode",
            "deployments.v1.apps/",
            "deployments.v1.apps/a/b",
            "Deployments.v1.apps/a",
            "deployments.v1..apps/a",
        ] {
            let error = text.parse::<ScaleTarget>().unwrap_err().to_string();
            assert!(error.contains("expected RESOURCE.VERSION.GROUP/NAME"), "{text}: {error}");
        }
    }
}
