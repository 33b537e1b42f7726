//! Placement of pods that are replaced together: in one domain of the nodes, or in any other one.

use rbg_api::template::{member_list, member_object};
use rbg_api::{PodTemplate, keys};
use serde_json::json;

use crate::hash;
use crate::manifest::StringMap;

/// Domains that a pod may run in.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DomainPlacement {
    /// Node label that identifies the domains.
    pub label: String,
    /// Values of the label.
    pub domains: Vec<String>,
    /// Whether the pod may not run in these domains; otherwise it may only run in them.
    pub are_excluded: bool,
    /// Identity of the replacement whose pods share a domain.
    pub replacement: String,
}

impl DomainPlacement {
    /// The expression that nodes must match.
    pub(crate) fn expression(&self) -> serde_json::Value {
        let operator = if self.are_excluded { "NotIn" } else { "In" };
        json!({ "key": self.label, "operator": operator, "values": self.domains })
    }

    /// Requires that the pod runs in the same domain as the other pods of its replacement. The scheduler lets the first of them choose.
    pub(crate) fn add_pod_affinity(&self, template: &mut PodTemplate) {
        let value = hash::safe_encode(hash::fnv1a(self.replacement.bytes()));
        template.set_labels(&StringMap::from([(keys::FAULT_REPLACEMENT.to_owned(), value.clone())]));
        let term = json!({ "topologyKey": self.label,
            "labelSelector": { "matchLabels": { keys::FAULT_REPLACEMENT: value } } });
        let affinity = member_object(member_object(template.spec_mut(), "affinity"), "podAffinity");
        member_list(affinity, "requiredDuringSchedulingIgnoredDuringExecution").push(term);
    }
}
