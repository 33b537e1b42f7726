//! Exclusive topology: a topology domain for one group alone.

use rbg_api::template::{member_list, member_object};
use rbg_api::{PodTemplate, keys};
use serde_json::{Map, Value, json};

use crate::manifest::StringMap;
use crate::role::ResolvedRole;

/// Adds affinity to the group's own pods, anti-affinity to pods of other exclusive groups, and the label that both select.
pub(crate) fn inject(role: &ResolvedRole<'_>, template: &mut PodTemplate) {
    let Some(topology) = role.group.exclusive_topology() else { return };
    let opt_out = [keys::ROLE_DISABLE_EXCLUSIVE, keys::legacy::DISABLE_EXCLUSIVE_TOPOLOGY];
    if opt_out.iter().any(|key| template.annotation(key).is_some_and(|value| !value.is_empty())) {
        return;
    }
    let unique = role.group.unique_key();
    let annotations = [(keys::GROUP_EXCLUSIVE_TOPOLOGY.to_owned(), topology.to_owned())];
    template.set_annotations(&StringMap::from(annotations));
    template.set_labels(&StringMap::from([(keys::GROUP_UNIQUE_HASH.to_owned(), unique.clone())]));
    let affinity = member_object(template.spec_mut(), "affinity");
    require_affinity(
        affinity,
        "podAffinity",
        topology,
        json!([{ "key": keys::GROUP_UNIQUE_HASH, "operator": "In", "values": [unique] }]),
    );
    let others = json!([
        { "key": keys::GROUP_UNIQUE_HASH, "operator": "Exists" },
        { "key": keys::GROUP_UNIQUE_HASH, "operator": "NotIn", "values": [unique] },
    ]);
    require_affinity(affinity, "podAntiAffinity", topology, others);
}

fn require_affinity(affinity: &mut Map<String, Value>, kind: &str, topology: &str, expressions: Value) {
    let terms = member_list(member_object(affinity, kind), "requiredDuringSchedulingIgnoredDuringExecution");
    let term = json!({ "labelSelector": { "matchExpressions": expressions }, "topologyKey": topology });
    if !terms.contains(&term) {
        terms.push(term);
    }
}
