//! Where pods run, as far as the ladder of their group asks, told to whoever prices distance: in the discovery file, and in
//! annotations of pods.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use moongate_render::{PodLocations, RoleTopology, TopologyKey, parse_locations, topology_keys};
use rbg_api::{TopologyLevel, TopologyLocation, keys};
use serde_json::{Map, Value};

use super::instance::component_of;
use super::{GroupInput, InstanceInput, PlanError};

/// The labels of a node, if it is known.
pub type NodeLabelLookup<'a> = &'a dyn Fn(&str) -> Option<BTreeMap<String, String>>;

/// Where the group's pods run, for its discovery file. While the scheduler has pods before it, those that have been told
/// stay, so that the file is written once for all of them.
pub(super) fn group_locations(
    input: GroupInput<'_>,
    file: Option<&Value>,
) -> Result<PodLocations, PlanError> {
    let rungs = topology_keys(input.group)?;
    if rungs.is_empty() {
        return Ok(PodLocations::new());
    }
    let pods = (input.pods)();
    let text = file.and_then(|file| file["data"]["config.yaml"].as_str());
    let told = text.map(parse_locations).unwrap_or_default();
    if text.is_some() && pods.iter().any(is_unscheduled) {
        return Ok(told);
    }
    let one = |pod: &Pod| {
        let name = pod.metadata.name.clone()?;
        let place = pod_location(&rungs, pod, input.nodes)?;
        // Nothing new is known of a node that is not seen.
        let is_unseen = place.node.as_deref().is_some_and(|node| (input.nodes)(node).is_none());
        let same = told.get(&name).filter(|told| is_unseen && told.node == place.node).cloned();
        Some((name, same.unwrap_or(place)))
    };
    Ok(pods.iter().filter_map(one).collect())
}

/// Whether the scheduler has not yet said where a pod goes, or that it goes nowhere for now.
fn is_unscheduled(pod: &Pod) -> bool {
    let has_node = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let is_refused = conditions.any(|one| one.type_ == "PodScheduled" && one.status == "False");
    pod.metadata.deletion_timestamp.is_none() && !has_node && !is_refused
}

fn pod_location(rungs: &[TopologyKey], pod: &Pod, nodes: NodeLabelLookup<'_>) -> Option<TopologyLocation> {
    let node = pod.spec.as_ref()?.node_name.clone()?;
    let labels = nodes(&node).unwrap_or_default();
    let mut place = TopologyLocation::default();
    for rung in rungs {
        *place.domain_mut(rung.level) = labels.get(&rung.label).cloned();
    }
    // By its name whatever the label says: so sources that do not see nodes call it, too.
    *place.domain_mut(TopologyLevel::Node) = Some(node);
    Some(place)
}

/// Annotations that say where a pod runs, as far as it does not have them. What the user's template says, stays.
pub(super) fn topology_annotations(input: InstanceInput<'_>, pod: &Pod) -> Map<String, Value> {
    let of_instance = input.instance.metadata.annotations.as_ref();
    let topology = of_instance.and_then(|all| RoleTopology::parse(all.get(keys::TOPOLOGY)?).ok());
    let place =
        topology.and_then(|topology| pod_location(&topology.rungs, pod, input.nodes)).unwrap_or_default();
    let said = |key: &str| pod.metadata.annotations.as_ref().and_then(|all| all.get(key));
    let component = component_of(input.instance, pod);
    let is_users =
        |key: &str| component.is_some_and(|component| component.template.annotation(key).is_some());
    [(keys::ZONE, place.zone), (keys::RACK, place.rack), (keys::NVLINK_DOMAIN, place.nvlink_domain)]
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)))
        .filter(|(key, value)| said(key) != Some(value) && !is_users(key))
        .map(|(key, value)| (key.to_owned(), value.into()))
        .collect()
}
