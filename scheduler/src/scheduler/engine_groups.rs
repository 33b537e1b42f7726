//! Groups of engines with comparable speed.

use crate::engine_models::EngineModels;
use crate::fleet::{InstanceIndex, ModelIndex, SchedulableFleet};
use crate::options::SchedulerOptions;

/// The models learned for each group.
#[derive(Debug, Default)]
pub(super) struct EngineGroups {
    learned: Vec<EngineModels>,
    /// Position in `learned` of each engine's group, in the cluster's order.
    group_of: Vec<usize>,
}

impl EngineGroups {
    /// The groups of another cluster. `previous` has the former index of each of its engines. A group inherits what
    /// was learned for any of its engines.
    pub(super) fn regrouped(
        &self,
        cluster: &SchedulableFleet,
        previous: &[Option<InstanceIndex>],
        settings: &SchedulerOptions,
    ) -> Self {
        let mut groups: Vec<(Option<ModelIndex>, Option<EngineModels>)> = Vec::new();
        let mut group_of = Vec::with_capacity(previous.len());
        for (instance, previous) in cluster.instances().iter().zip(previous) {
            let model = instance.models.first().copied();
            let group = groups.iter().position(|(known, _)| *known == model).unwrap_or_else(|| {
                groups.push((model, None));
                groups.len() - 1
            });
            group_of.push(group);
            if let (None, Some(old)) = (&groups[group].1, previous) {
                groups[group].1 = self.models(*old).cloned();
            }
        }
        let fresh = || EngineModels::new(settings);
        let learned = groups.into_iter().map(|(_, learned)| learned.unwrap_or_else(fresh)).collect();
        Self { learned, group_of }
    }

    pub(super) fn models(&self, engine: InstanceIndex) -> Option<&EngineModels> {
        self.learned.get(*self.group_of.get(engine.as_usize())?)
    }

    pub(super) fn models_mut(&mut self, engine: InstanceIndex) -> Option<&mut EngineModels> {
        self.learned.get_mut(*self.group_of.get(engine.as_usize())?)
    }

    /// The models of all engines, in the cluster's order.
    pub(super) fn by_engine(&self) -> impl Iterator<Item = &EngineModels> {
        self.group_of.iter().map(|&group| &self.learned[group])
    }
}
