//! Placement of a group: where its topology levels come from when no node is known, how they are reported, and annotations of workloads.

use moongate_render::{Manifest, RoleTopology, TopologyKey};
use rbg_api::template::member_object;
use rbg_api::{Condition, keys};
use serde_json::Value;

use super::group::GroupInput;
use crate::status;

/// Condition of a group with topology levels; its message lists them.
const CONDITION: &str = "TopologyLevels";

/// Levels from the labels of nodes that the group's workloads store. They apply if no node is known: without permission to list nodes, and
/// in a forecast.
pub(super) fn stored_levels(workloads: &[Value]) -> Vec<TopologyKey> {
    let stored = |live: &Value| {
        let text = live["metadata"]["annotations"][keys::TOPOLOGY].as_str()?;
        RoleTopology::parse(text).ok().filter(|topology| topology.automatic)
    };
    workloads.iter().find_map(stored).map(|topology| topology.levels).unwrap_or_default()
}

/// Sets the condition to the group's levels. Removes it from a group without levels.
pub(super) fn set_condition(input: GroupInput<'_>, conditions: &mut Vec<Condition>) {
    let topology = input.context(input.profiles).and_then(|group| group.topology()).ok().flatten();
    let Some(topology) = topology else {
        conditions.retain(|condition| condition.kind != CONDITION);
        return;
    };
    let reason = if topology.is_automatic() { "LabelsOfNodes" } else { "Annotation" };
    let levels = topology.levels().iter().map(|key| format!("{}={}", key.level.name(), key.label));
    let message = levels.collect::<Vec<_>>().join(", ");
    status::set_condition(conditions, CONDITION, true, (reason, &message), input.now);
}

/// Empties the annotations of a workload that are no longer set: server-side apply would keep omitted ones.
pub(super) fn remove_annotations(manifest: &mut Manifest, live: Option<&Value>) {
    let annotations = live.map(|live| &live["metadata"]["annotations"]);
    for key in keys::PLACEMENT {
        if annotations.is_some_and(|present| present.get(key).is_some()) {
            let metadata = member_object(&mut manifest.0, "metadata");
            member_object(metadata, "annotations").entry(key).or_insert_with(|| "".into());
        }
    }
}
