//! What one instance of a role is made of.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{InstanceComponent, UnknownFields};
use crate::{PodTemplate, schema};

/// An instance of one pod.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "!(has(self.template) && has(self.templateRef))",
    "message": "template and templateRef are mutually exclusive",
}]))]
pub struct StandalonePattern {
    /// The pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::pod_template")]
    pub template: Option<PodTemplate>,
    /// The pod, as a role template with a patch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_ref: Option<TemplateRef>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// An instance of a leader and workers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "!(has(self.template) && has(self.templateRef))",
    "message": "template and templateRef are mutually exclusive",
}]))]
pub struct LeaderWorkerPattern {
    /// The pod of both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::pod_template")]
    pub template: Option<PodTemplate>,
    /// The pod of both, as a role template with a patch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_ref: Option<TemplateRef>,
    /// Pods of an instance, the leader included.
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
    /// `LeaderOnly` (default) or `All`: whose addresses the role's service has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["All", "LeaderOnly"]))]
    pub shared_service_selection: Option<String>,
    /// Deprecated form of `restartPolicyConfig.type`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["None", "RecreateRoleInstanceOnPodRestart"]))]
    pub restart_policy: Option<String>,
    /// What a crash of one pod does to the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy_config: Option<RestartPolicyConfig>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// An instance of components of any kind.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CustomComponentsPattern {
    /// The components.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<InstanceComponent>,
    /// Deprecated form of `restartPolicyConfig.type`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["None", "RecreateRoleInstanceOnPodRestart"]))]
    pub restart_policy: Option<String>,
    /// What a crash of one pod does to the others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart_policy_config: Option<RestartPolicyConfig>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// A role template, and what is different here.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateRef {
    /// Name of the role template.
    #[schemars(length(min = 1, max = 63), regex(pattern = schema::DNS_LABEL))]
    pub name: String,
    /// Strategic merge patch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_value")]
    pub patch: Option<Value>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// What a crash of one pod does to the others, and how patiently.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "!has(self.baseDelaySeconds) || !has(self.maxDelaySeconds) || self.maxDelaySeconds >= self.baseDelaySeconds",
    "message": "maxDelaySeconds must be greater than or equal to baseDelaySeconds",
}]))]
pub struct RestartPolicyConfig {
    /// `None`, or `RecreateRoleInstanceOnPodRestart`: all pods of the instance are made anew.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["None", "RecreateRoleInstanceOnPodRestart"]))]
    pub kind: Option<String>,
    /// Seconds before the second recreation; doubled for each further one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0), extend("default" = 30))]
    pub base_delay_seconds: Option<i32>,
    /// Most seconds between two recreations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0), extend("default" = 600))]
    pub max_delay_seconds: Option<i32>,
    /// Members of later releases.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: UnknownFields,
}

/// What a crash of one pod does to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestartPolicy {
    /// Nothing.
    None,
    /// All pods of the instance are made anew.
    Recreate,
}

impl RestartPolicy {
    /// As written in an object; `None` for an empty or unknown text.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "None" => Some(Self::None),
            "RecreateRoleInstanceOnPodRestart" => Some(Self::Recreate),
            _ => None,
        }
    }

    /// As written in an object.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Recreate => "RecreateRoleInstanceOnPodRestart",
        }
    }
}

impl RestartPolicyConfig {
    /// Delay before the second recreation if nothing else is said, in seconds.
    pub const BASE_DELAY_SECONDS: i32 = 30;
    /// Most seconds between two recreations if nothing else is said.
    pub const MAX_DELAY_SECONDS: i32 = 600;

    /// `config` with its gaps filled: the type from the deprecated field, else `default`; delays from the constants here.
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
