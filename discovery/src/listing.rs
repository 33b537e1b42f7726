//! What a source says: which instances exist, before any of them was asked.

use std::collections::BTreeMap;

use crate::topology::{Declared, InstanceId, Place, Role, Source};

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
    pub(crate) declared: Declared,
    /// Why the source itself says that it must not serve now.
    pub(crate) held: Option<String>,
}

/// A source's complete list; replaces its earlier one.
#[derive(Debug)]
pub(crate) struct Update {
    /// Which source. Lower slots win where two sources list one id.
    pub(crate) slot: usize,
    pub(crate) instances: Vec<Listed>,
}

/// All sources' lists as one, by id.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    slots: BTreeMap<usize, Vec<Listed>>,
}

impl Lists {
    pub(crate) fn replace(&mut self, update: Update) {
        self.slots.insert(update.slot, update.instances);
    }

    pub(crate) fn merged(&self) -> BTreeMap<InstanceId, Listed> {
        let mut merged: BTreeMap<InstanceId, Listed> = BTreeMap::new();
        for listed in self.slots.values().flatten() {
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
        lists.replace(Update {
            slot: 1,
            instances: vec![sample("a", Role::Decode), sample("b", Role::Decode)],
        });
        lists.replace(Update { slot: 0, instances: vec![sample("a", Role::Prefill)] });
        let merged = lists.merged();
        assert_eq!(merged.len(), 2);
        assert_eq!(merged[&InstanceId::from("a")].role, Role::Prefill);
        lists.replace(Update { slot: 0, instances: Vec::new() });
        assert_eq!(lists.merged()[&InstanceId::from("a")].role, Role::Decode);
    }

    #[test]
    fn any_source_may_hold_an_instance() {
        let held = Listed { held: Some("draining".into()), ..sample("a", Role::Decode) };
        for (first, second) in
            [(held.clone(), sample("a", Role::Prefill)), (sample("a", Role::Prefill), held)]
        {
            let mut lists = Lists::default();
            lists.replace(Update { slot: 0, instances: vec![first.clone()] });
            lists.replace(Update { slot: 1, instances: vec![second] });
            let merged = lists.merged().remove(&InstanceId::from("a")).unwrap();
            assert_eq!((merged.role, merged.held.as_deref()), (first.role, Some("draining")));
        }
    }
}
