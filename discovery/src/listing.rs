//! Lists of instances from the sources, before any probe.

use std::collections::BTreeMap;

use crate::location::{HostLocations, PhysicalLocation};
use crate::topology::{
    DeclaredFacts, EngineRole, InstanceId, InstanceSource, KubernetesWorkload, MAX_INSTANCES,
};

/// One instance as its source lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedInstance {
    pub(crate) id: InstanceId,
    pub(crate) role: EngineRole,
    pub(crate) url: String,
    /// Host of `url`, without brackets.
    pub(crate) host: String,
    pub(crate) source: InstanceSource,
    pub(crate) location: PhysicalLocation,
    pub(crate) workload: KubernetesWorkload,
    pub(crate) declared: DeclaredFacts,
    /// Reason why the source marks it unavailable; `None` if it may serve.
    pub(crate) unavailable_reason: Option<String>,
}

/// A source's complete list, which replaces its previous one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SourceUpdate {
    /// Slot of the source. The lower slot wins if two sources list the same id.
    pub(crate) slot: usize,
    pub(crate) instances: Vec<ListedInstance>,
    /// Hosts without an engine whose location is known.
    pub(crate) hosts: Vec<ListedHost>,
}

/// A host without an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListedHost {
    /// Host names and IP addresses.
    pub(crate) names: Vec<String>,
    pub(crate) location: PhysicalLocation,
}

impl SourceUpdate {
    /// A list of engines without other hosts.
    pub(crate) fn of_engines(slot: usize, instances: Vec<ListedInstance>) -> Self {
        Self { slot, instances, hosts: Vec::new() }
    }
}

/// The latest lists of all sources, merged by id.
#[derive(Debug, Default)]
pub(crate) struct SourceLists {
    slots: BTreeMap<usize, SourceUpdate>,
}

impl SourceLists {
    pub(crate) fn replace(&mut self, update: SourceUpdate) {
        self.slots.insert(update.slot, update);
    }

    pub(crate) fn merged(&self) -> BTreeMap<InstanceId, ListedInstance> {
        let mut merged: BTreeMap<InstanceId, ListedInstance> = BTreeMap::new();
        for listed in self.slots.values().flat_map(|update| &update.instances) {
            if merged.len() >= MAX_INSTANCES && !merged.contains_key(&listed.id) {
                tracing::error!(
                    limit = MAX_INSTANCES,
                    "too many instances are listed; narrow the label selector or the instances file"
                );
                break;
            }
            // Any source can mark an instance unavailable, also one with a lower precedence.
            merged
                .entry(listed.id.clone())
                .and_modify(|merged| {
                    merged.unavailable_reason =
                        merged.unavailable_reason.take().or_else(|| listed.unavailable_reason.clone());
                })
                .or_insert_with(|| listed.clone());
        }
        merged
    }

    /// Locations of hosts without an engine.
    pub(crate) fn hosts(&self) -> HostLocations {
        let hosts = self.slots.values().flat_map(|update| &update.hosts).take(MAX_INSTANCES);
        let locations =
            hosts.flat_map(|host| host.names.iter().map(|name| (name.clone(), host.location.clone())));
        locations.collect()
    }
}

#[cfg(test)]
pub(crate) fn listed_instance(id: &str, role: EngineRole) -> ListedInstance {
    ListedInstance {
        id: id.into(),
        role,
        url: format!("http://{id}:8000"),
        host: id.to_owned(),
        source: InstanceSource::Static,
        location: PhysicalLocation::default(),
        workload: KubernetesWorkload::default(),
        declared: DeclaredFacts::default(),
        unavailable_reason: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lower_slots_win_and_an_update_replaces_only_its_slot() {
        let mut lists = SourceLists::default();
        let both = vec![listed_instance("a", EngineRole::Decode), listed_instance("b", EngineRole::Decode)];
        lists.replace(SourceUpdate::of_engines(1, both));
        lists.replace(SourceUpdate::of_engines(0, vec![listed_instance("a", EngineRole::Prefill)]));
        let merged = lists.merged();
        assert_eq!(merged.len(), 2);
        assert_eq!(merged[&InstanceId::from("a")].role, EngineRole::Prefill);
        lists.replace(SourceUpdate::of_engines(0, Vec::new()));
        assert_eq!(lists.merged()[&InstanceId::from("a")].role, EngineRole::Decode);
    }

    #[test]
    fn any_source_may_mark_an_instance_unavailable() {
        let unavailable = ListedInstance {
            unavailable_reason: Some("draining".into()),
            ..listed_instance("a", EngineRole::Decode)
        };
        for (first, second) in [
            (unavailable.clone(), listed_instance("a", EngineRole::Prefill)),
            (listed_instance("a", EngineRole::Prefill), unavailable),
        ] {
            let mut lists = SourceLists::default();
            lists.replace(SourceUpdate::of_engines(0, vec![first.clone()]));
            lists.replace(SourceUpdate::of_engines(1, vec![second]));
            let merged = lists.merged().remove(&InstanceId::from("a")).unwrap();
            assert_eq!((merged.role, merged.unavailable_reason.as_deref()), (first.role, Some("draining")));
        }
    }
}
