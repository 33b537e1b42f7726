//! Patterns: composition of one instance of a role.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{InstanceComponent, UnknownFields};
use crate::{PodTemplate, schema};

/// Pattern for instances of one pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "!(has(self.template) && has(self.templateRef))",
    "message": "template and templateRef are mutually exclusive",
}]))]
pub struct StandalonePattern {
    /// Pod template of the instances.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::pod_template")]
    pub template: Option<PodTemplate>,
    /// Role template with a patch, instead of `template`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_ref: Option<TemplateRef>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Pattern for instances of a leader and workers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "!(has(self.template) && has(self.templateRef))",
    "message": "template and templateRef are mutually exclusive",
}]))]
pub struct LeaderWorkerPattern {
    /// Pod template of leader and workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::pod_template")]
    pub template: Option<PodTemplate>,
    /// Role template with a patch, instead of `template`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_ref: Option<TemplateRef>,
    /// Number of pods of an instance, including the leader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = 1))]
    pub size: Option<i32>,
    /// Strategic merge patch for the leader's pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_value")]
    pub leader_template_patch: Option<Value>,
    /// Strategic merge patch for the workers' pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_value")]
    pub worker_template_patch: Option<Value>,
    /// Pods with addresses in the role's service: `LeaderOnly` (default) or `All`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["All", "LeaderOnly"]))]
    pub shared_service_selection: Option<String>,
    /// Deprecated: set `restartPolicyConfig.type` instead of this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["None", "RecreateRoleInstanceOnPodRestart"]))]
    pub restart_policy: Option<String>,
    /// Effect of a pod's crash on the other pods of the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy_config: Option<RestartPolicyConfig>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Pattern for instances of several named components.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CustomComponentsPattern {
    /// Components that each instance consists of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<InstanceComponent>,
    /// Deprecated: set `restartPolicyConfig.type` instead of this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["None", "RecreateRoleInstanceOnPodRestart"]))]
    pub restart_policy: Option<String>,
    /// Effect of a pod's crash on the other pods of the instance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy_config: Option<RestartPolicyConfig>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Reference to a role template, with a patch.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateRef {
    /// Name of the role template.
    #[schemars(length(min = 1, max = 63), regex(pattern = schema::DNS_LABEL))]
    pub name: String,
    /// Strategic merge patch of the role template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_value")]
    pub patch: Option<Value>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Effect of a pod's crash on the other pods of the instance, with back-off.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "!has(self.baseDelaySeconds) || !has(self.maxDelaySeconds) || self.maxDelaySeconds >= self.baseDelaySeconds",
    "message": "maxDelaySeconds must be greater than or equal to baseDelaySeconds",
}]))]
pub struct RestartPolicyConfig {
    /// Policy: `None`, or `RecreateRoleInstanceOnPodRestart` to recreate all pods of the instance.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["None", "RecreateRoleInstanceOnPodRestart"]))]
    pub kind: Option<String>,
    /// Seconds before the second recreation; doubled for each further one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0), extend("default" = 30))]
    pub base_delay_seconds: Option<i32>,
    /// Maximum number of seconds between two recreations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0), extend("default" = 600))]
    pub max_delay_seconds: Option<i32>,
    /// Fields of later releases, preserved as they are.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// Effect of a pod's crash on the other pods of the instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestartPolicy {
    /// Other pods are not affected.
    None,
    /// All pods of the instance are recreated.
    Recreate,
}

impl RestartPolicy {
    /// Parses the value in an object; `None` for an empty or unknown value.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "None" => Some(Self::None),
            "RecreateRoleInstanceOnPodRestart" => Some(Self::Recreate),
            _ => None,
        }
    }

    /// The value in an object.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Recreate => "RecreateRoleInstanceOnPodRestart",
        }
    }
}

impl RestartPolicyConfig {
    /// Default delay before the second recreation, in seconds.
    pub const BASE_DELAY_SECONDS: i32 = 30;
    /// Default maximum delay between two recreations, in seconds.
    pub const MAX_DELAY_SECONDS: i32 = 600;

    /// `config` with defaults filled in: the type from the deprecated field, otherwise `default`; delays from the constants
    /// here.
    #[must_use]
    pub fn resolve(config: Option<&Self>, deprecated: Option<&str>, default: RestartPolicy) -> Self {
        let config = config.cloned().unwrap_or_default();
        let written = config.kind.filter(|kind| !kind.is_empty());
        let kind = written.or_else(|| deprecated.filter(|kind| !kind.is_empty()).map(str::to_owned));
        Self {
            kind: Some(kind.unwrap_or_else(|| default.as_str().to_owned())),
            base_delay_seconds: Some(config.base_delay_seconds.unwrap_or(Self::BASE_DELAY_SECONDS)),
            max_delay_seconds: Some(config.max_delay_seconds.unwrap_or(Self::MAX_DELAY_SECONDS)),
            other: config.other,
        }
    }
}
