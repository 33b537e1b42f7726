//! Records of faults and actions in annotations of instances.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use rbg_api::keys;
use rbg_api::v1alpha2::RoleInstance;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::rules::{FaultAction, FaultCondition};

/// Faults that an instance remembers as acted on.
const MAX_ACTED: usize = 16;

/// Record of an instance's own plan, in [`keys::FAULT`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct InstanceFaults {
    /// Nodes of the instance's pods, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) nodes: BTreeMap<String, NodeRecord>,
    /// Identities of evidence that is still there and has been recorded, or needs no record.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) seen: BTreeSet<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) latest: Option<InstanceFault>,
    /// Whether the instance has been ready since its latest fault.
    pub(super) is_over: bool,
    /// Key of the last action that has ended.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) recovered: String,
}

/// A node, as it was when it was last observed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct NodeRecord {
    pub(super) uid: String,
    /// Its domains, by node label.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) domains: BTreeMap<String, String>,
}

/// A fault of an instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct InstanceFault {
    pub(super) id: String,
    /// Its kind, and those of faults before it that the group has not dealt with.
    pub(super) conditions: BTreeSet<FaultCondition>,
    /// Name of the node that the pod at fault ran on.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) node: String,
    /// Domains of that node, by node label.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) domains: BTreeMap<String, String>,
    /// What happened, for messages: `failed on node n3 (pod p: Evicted)`.
    pub(super) text: String,
    pub(super) at: Time,
}

impl InstanceFault {
    pub(super) fn condition(&self) -> FaultCondition {
        self.conditions.last().copied().unwrap_or(FaultCondition::Restarted)
    }
}

/// Record of the group's plan, in [`keys::FAULT_ACTION`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct FaultActions {
    /// The latest fault of the instance that the group has dealt with.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) handled: String,
    /// Faults for which an action on the instance was requested, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    acted: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) request: Option<ActionRequest>,
}

impl FaultActions {
    pub(super) fn read(metadata: &ObjectMeta) -> Self {
        read(metadata, keys::FAULT_ACTION)
    }

    pub(super) fn has_acted_on(&self, fault: &str) -> bool {
        self.acted.iter().any(|acted| acted == fault)
    }

    pub(super) fn set_request(&mut self, request: ActionRequest) {
        if !self.has_acted_on(&request.fault) {
            self.acted.push(request.fault.clone());
            self.acted.drain(..self.acted.len().saturating_sub(MAX_ACTED));
        }
        self.request = Some(request);
    }
}

/// An action that the group requests from an instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ActionRequest {
    pub(super) fault: String,
    /// Number of the attempt to place a replacement, from 1.
    pub(super) attempt: u32,
    pub(super) action: FaultAction,
    /// Name of the policy's rule.
    pub(super) policy: String,
    /// The fault, its cause and the actions.
    pub(super) reason: String,
    /// UIDs of the pods to act on. Newer pods are not concerned.
    pub(super) pods: BTreeSet<String>,
    /// Node whose kubelet does not confirm deletions.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) lost_node: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) placement: Option<ReplacementPlacement>,
    /// Whether the instance is one of several that are placed together.
    #[serde(default)]
    pub(super) is_joint: bool,
    pub(super) at: Time,
}

/// Where the pods of a replacement may run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ReplacementPlacement {
    /// Node label that identifies the domains.
    pub(super) label: String,
    pub(super) domains: Vec<String>,
    /// Whether these domains are excluded; otherwise they are required.
    pub(super) are_excluded: bool,
}

impl ActionRequest {
    /// Identity of the action.
    pub(super) fn key(&self) -> String {
        format!("{}#{}", self.fault, self.attempt)
    }
}

fn read<T: DeserializeOwned + Default>(metadata: &ObjectMeta, key: &str) -> T {
    let text = metadata.annotations.as_ref().and_then(|annotations| annotations.get(key));
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

/// Both records of an instance.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct InstanceRecords {
    pub(super) faults: InstanceFaults,
    pub(super) actions: FaultActions,
}

impl InstanceRecords {
    pub(super) fn of(instance: &RoleInstance) -> Self {
        let metadata = &instance.metadata;
        Self { faults: read(metadata, keys::FAULT), actions: FaultActions::read(metadata) }
    }

    /// The action that has been requested and has not ended.
    pub(super) fn in_progress(&self) -> Option<&ActionRequest> {
        self.actions.request.as_ref().filter(|request| request.key() != self.faults.recovered)
    }

    /// The fault that the group has not dealt with.
    pub(super) fn pending(&self) -> Option<&InstanceFault> {
        self.faults.latest.as_ref().filter(|fault| fault.id != self.actions.handled)
    }
}
