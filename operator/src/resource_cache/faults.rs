//! What depends on nodes, instances and policies for the recovery from faults.

use std::sync::Arc;

use super::{ObservedResource, ResourceCache, ResourceKey};
use crate::ResourceKind;

/// Field of a policy that has fault recovery.
const FAULT_RECOVERY: &str = "\"faultRecovery\"";

impl ResourceCache {
    /// The policy of a group, if it has fault recovery.
    pub(super) fn fault_policy(&self, namespace: &str, group: &str) -> Option<Arc<ObservedResource>> {
        let (namespace, name) = (namespace.to_owned(), group.to_owned());
        let policy = self.get(&ResourceKey { kind: ResourceKind::Policy, namespace, name })?;
        policy.text.contains(FAULT_RECOVERY).then_some(policy)
    }

    /// Adds keys that have to be reconciled only for fault recovery: instances on a changed node or under a changed policy, and the
    /// group of a changed instance.
    pub(super) fn add_affected_by_fault(&self, live: &ObservedResource, affected: &mut Vec<ResourceKey>) {
        match live.key.kind {
            ResourceKind::Node => {
                let policies =
                    self.of_kind(ResourceKind::Policy).filter(|policy| policy.text.contains(FAULT_RECOVERY));
                for policy in policies {
                    let (namespace, group) = (&policy.key.namespace, &policy.key.name);
                    affected.extend(
                        self.instances_of_group(namespace, group, |pod| pod.references.contains(&live.key)),
                    );
                }
            }
            ResourceKind::Policy => {
                affected.extend(self.instances_of_group(&live.key.namespace, &live.key.name, |_| true));
            }
            ResourceKind::Instance => {
                let Some(name) = live.group.clone() else { return };
                if self.fault_policy(&live.key.namespace, &name).is_some() {
                    let namespace = live.key.namespace.clone();
                    affected.push(ResourceKey { kind: ResourceKind::Group, namespace, name });
                }
            }
            _ => {}
        }
    }

    /// Instances with a pod of this kind.
    fn instances_of_group(
        &self,
        namespace: &str,
        group: &str,
        is_concerned: impl Fn(&ObservedResource) -> bool,
    ) -> Vec<ResourceKey> {
        let pods = self.index.pods(namespace, group).filter_map(|key| self.get(key));
        let owners = pods.filter(|pod| is_concerned(pod)).filter_map(|pod| pod.controller.clone());
        owners.map(|(owner, _)| owner).filter(|owner| owner.kind == ResourceKind::Instance).collect()
    }
}
