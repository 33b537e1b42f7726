//! Index of objects by owner and group, so that the cost of a plan does not depend on the number of other objects.

use std::collections::{BTreeSet, HashMap};

use super::{ObservedResource, ResourceKey};
use crate::ResourceKind;

#[derive(Debug, Default)]
pub(super) struct ResourceIndex {
    /// Keys of objects by their owner's UID.
    children: HashMap<String, BTreeSet<ResourceKey>>,
    /// Pods of instances and of other controllers, by namespace and group.
    pods: HashMap<(String, String), BTreeSet<ResourceKey>>,
}

impl ResourceIndex {
    pub(super) fn insert(&mut self, live: &ObservedResource) {
        if let Some((_, owner)) = &live.controller {
            self.children.entry(owner.clone()).or_default().insert(live.key.clone());
        }
        if let Some(group) = group_of_pod(live) {
            self.pods.entry(group).or_default().insert(live.key.clone());
        }
    }

    pub(super) fn remove(&mut self, live: &ObservedResource) {
        if let Some((_, owner)) = &live.controller
            && let Some(keys) = self.children.get_mut(owner)
            && keys.remove(&live.key)
            && keys.is_empty()
        {
            self.children.remove(owner);
        }
        if let Some(group) = group_of_pod(live)
            && let Some(keys) = self.pods.get_mut(&group)
            && keys.remove(&live.key)
            && keys.is_empty()
        {
            self.pods.remove(&group);
        }
    }

    pub(super) fn children(&self, owner: &str) -> impl Iterator<Item = &ResourceKey> {
        self.children.get(owner).into_iter().flatten()
    }

    pub(super) fn pods(&self, namespace: &str, group: &str) -> impl Iterator<Item = &ResourceKey> {
        self.pods.get(&(namespace.to_owned(), group.to_owned())).into_iter().flatten()
    }
}

fn group_of_pod(live: &ObservedResource) -> Option<(String, String)> {
    let is_pod = matches!(live.key.kind, ResourceKind::Pod | ResourceKind::ForeignPod);
    is_pod.then(|| Some((live.key.namespace.clone(), live.group.clone()?)))?
}
