//! What a source says: which instances exist, before any of them was asked.

use std::collections::BTreeMap;

use crate::hosts::Hosts;
use crate::topology::{Declared, InstanceId, Place, Role, Source, Workload};

/// Most instances in one topology: bounds memory and probing if a source goes wrong.
pub(crate) const MAX_INSTANCES: usize = 10_000;

/// One instance as its source lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) id: InstanceId,
    pub(crate) role: Role,
    pub(crate) url: String,
    /// Host of `url`, without brackets.
    pub(crate) host: String,
    pub(crate) source: Source,
    pub(crate) place: Place,
    pub(crate) workload: Workload,
    pub(crate) declared: Declared,
    /// Why the source itself says that it must not serve now.
    pub(crate) held: Option<String>,
}

/// A source's complete list; replaces its earlier one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Update {
    /// Which source. Lower slots win where two sources list one id.
    pub(crate) slot: usize,
    pub(crate) instances: Vec<Listed>,
    /// What else it knows the place of.
    pub(crate) hosts: Vec<Host>,
}

/// A host that is no engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// Names and addresses.
    pub(crate) names: Vec<String>,
    pub(crate) place: Place,
}

impl Update {
    /// Of a source that knows engines only.
    pub(crate) fn engines(slot: usize, instances: Vec<Listed>) -> Self {
        Self { slot, instances, hosts: Vec::new() }
    }
}

/// All sources' lists as one, by id.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    slots: BTreeMap<usize, Update>,
}

impl Lists {
    pub(crate) fn replace(&mut self, update: Update) {
        self.slots.insert(update.slot, update);
    }

    pub(crate) fn merged(&self) -> BTreeMap<InstanceId, Listed> {
        let mut merged: BTreeMap<InstanceId, Listed> = BTreeMap::new();
        for listed in self.slots.values().flat_map(|update| &update.instances) {
            if merged.len() >= MAX_INSTANCES && !merged.contains_key(&listed.id) {
                tracing::error!(
                    limit = MAX_INSTANCES,
                    "more instances are listed than are taken; narrow the label selector or the instances file"
                );
                break;
            }
            // Whoever says that an instance must not serve is heard, whichever source describes it.
            merged
                .entry(listed.id.clone())
                .and_modify(|kept| kept.held = kept.held.take().or_else(|| listed.held.clone()))
                .or_insert_with(|| listed.clone());
        }
        merged
    }

    /// Where other hosts run.
    pub(crate) fn hosts(&self) -> Hosts {
        let hosts = self.slots.values().flat_map(|update| &update.hosts).take(MAX_INSTANCES);
        let places = hosts.flat_map(|host| host.names.iter().map(|name| (name.clone(), host.place.clone())));
        places.collect()
    }
}

#[cfg(test)]
pub(crate) fn sample(id: &str, role: Role) -> Listed {
    Listed {
        id: id.into(),
        role,
        url: format!("http://{id}:8000"),
        host: id.to_owned(),
        source: Source::Static,
        place: Place::default(),
        workload: Workload::default(),
        declared: Declared::default(),
        held: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lower_slots_win_and_an_update_replaces_only_its_slot() {
        let mut lists = Lists::default();
        let both = vec![sample("a", Role::Decode), sample("b", Role::Decode)];
        lists.replace(Update::engines(1, both));
        lists.replace(Update::engines(0, vec![sample("a", Role::Prefill)]));
        let merged = lists.merged();
        assert_eq!(merged.len(), 2);
        assert_eq!(merged[&InstanceId::from("a")].role, Role::Prefill);
        lists.replace(Update::engines(0, Vec::new()));
        assert_eq!(lists.merged()[&InstanceId::from("a")].role, Role::Decode);
    }

    #[test]
    fn any_source_may_hold_an_instance() {
        let held = Listed { held: Some("draining".into()), ..sample("a", Role::Decode) };
        for (first, second) in
            [(held.clone(), sample("a", Role::Prefill)), (sample("a", Role::Prefill), held)]
        {
            let mut lists = Lists::default();
            lists.replace(Update::engines(0, vec![first.clone()]));
            lists.replace(Update::engines(1, vec![second]));
            let merged = lists.merged().remove(&InstanceId::from("a")).unwrap();
            assert_eq!((merged.role, merged.held.as_deref()), (first.role, Some("draining")));
        }
    }
}
