//! Who belongs to whom, so that a plan looks at its own objects only, however many others there are.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{Key, Live};
use crate::Kind;

#[derive(Debug, Default)]
pub(super) struct Index {
    /// By the owner's UID.
    parts: HashMap<String, BTreeSet<Key>>,
    /// Pods of instances and of other controllers, by namespace and group.
    pods: HashMap<(String, String), BTreeSet<Key>>,
    /// How many objects have chosen each port.
    ports: BTreeMap<u16, usize>,
}

impl Index {
    pub(super) fn link(&mut self, live: &Live) {
        if let Some((_, owner)) = &live.controller {
            self.parts.entry(owner.clone()).or_default().insert(live.key.clone());
        }
        if let Some(group) = group_of_pod(live) {
            self.pods.entry(group).or_default().insert(live.key.clone());
        }
        for port in &live.ports {
            *self.ports.entry(*port).or_default() += 1;
        }
    }

    pub(super) fn unlink(&mut self, live: &Live) {
        if let Some((_, owner)) = &live.controller
            && let Some(keys) = self.parts.get_mut(owner)
            && keys.remove(&live.key)
            && keys.is_empty()
        {
            self.parts.remove(owner);
        }
        if let Some(group) = group_of_pod(live)
            && let Some(keys) = self.pods.get_mut(&group)
            && keys.remove(&live.key)
            && keys.is_empty()
        {
            self.pods.remove(&group);
        }
        for port in &live.ports {
            if let Some(objects) = self.ports.get_mut(port) {
                *objects -= 1;
                if *objects == 0 {
                    self.ports.remove(port);
                }
            }
        }
    }

    pub(super) fn parts(&self, owner: &str) -> impl Iterator<Item = &Key> {
        self.parts.get(owner).into_iter().flatten()
    }

    pub(super) fn pods(&self, namespace: &str, group: &str) -> impl Iterator<Item = &Key> {
        self.pods.get(&(namespace.to_owned(), group.to_owned())).into_iter().flatten()
    }

    pub(super) fn has_port(&self, port: u16) -> bool {
        self.ports.contains_key(&port)
    }
}

fn group_of_pod(live: &Live) -> Option<(String, String)> {
    let is_pod = matches!(live.key.kind, Kind::Pod | Kind::ForeignPod);
    is_pod.then(|| Some((live.key.namespace.clone(), live.group.clone()?)))?
}
