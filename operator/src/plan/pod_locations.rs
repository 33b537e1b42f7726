//! Locations of pods, at the topology levels of their group, for routers that weigh network distance: published in the
//! discovery file and in
//! annotations of pods.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use moongate_render::{GroupContext, PodLocations, RoleTopology, TopologyKey, parse_locations};
use rbg_api::{TopologyLevel, TopologyLocation, keys};
use serde_json::{Map, Value};

use super::instance::component_of;
use super::{GroupInput, InstanceInput, PlanError};

/// Looks up the labels of a node; `None` if the node is not in the cache.
pub type NodeLabelLookup<'a> = &'a dyn Fn(&str) -> Option<BTreeMap<String, String>>;

/// Locations of the group's pods, for its discovery file. While pods are unscheduled, the present file's locations stay, so
/// that the file is
/// written once for all of them.
pub(super) fn group_locations(
    input: GroupInput<'_>,
    group: GroupContext<'_>,
    file: Option<&Value>,
) -> Result<PodLocations, PlanError> {
    let Some(topology) = group.topology()? else { return Ok(PodLocations::new()) };
    let pods = (input.pods)();
    let text = file.and_then(|file| file["data"]["config.yaml"].as_str());
    let published = text.map(parse_locations).unwrap_or_default();
    if text.is_some() && pods.iter().any(is_unscheduled) {
        return Ok(published);
    }
    let locate = |pod: &Pod| {
        let name = pod.metadata.name.clone()?;
        let location = pod_location(topology.levels(), pod, input.nodes)?;
        // Keep the published location of a node that is not in the cache.
        let is_uncached = location.node.as_deref().is_some_and(|node| (input.nodes)(node).is_none());
        let same =
            published.get(&name).filter(|published| is_uncached && published.node == location.node).cloned();
        Some((name, same.unwrap_or(location)))
    };
    Ok(pods.iter().filter_map(locate).collect())
}

/// Whether the scheduler has not yet decided about a pod.
fn is_unscheduled(pod: &Pod) -> bool {
    let has_node = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    let mut conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let is_refused =
        conditions.any(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
    pod.metadata.deletion_timestamp.is_none() && !has_node && !is_refused
}

fn pod_location(
    keys_of_group: &[TopologyKey],
    pod: &Pod,
    nodes: NodeLabelLookup<'_>,
) -> Option<TopologyLocation> {
    let node = pod.spec.as_ref()?.node_name.clone()?;
    let labels = nodes(&node).unwrap_or_default();
    let mut location = TopologyLocation::default();
    for key in keys_of_group {
        location.set(key.level, labels.get(&key.label).cloned());
    }
    // The node's name, regardless of its hostname label: sources without access to nodes use the name, too.
    location.set(TopologyLevel::Node, Some(node));
    Some(location)
}

/// Topology annotations that the pod lacks. Annotations in the user's template take precedence.
pub(super) fn topology_annotations(input: InstanceInput<'_>, pod: &Pod) -> Map<String, Value> {
    let of_instance = input.instance.metadata.annotations.as_ref();
    let topology = of_instance.and_then(|all| RoleTopology::parse(all.get(keys::TOPOLOGY)?).ok());
    let location =
        topology.and_then(|topology| pod_location(&topology.levels, pod, input.nodes)).unwrap_or_default();
    let present = |key: &str| pod.metadata.annotations.as_ref().and_then(|all| all.get(key));
    let component = component_of(input.instance, pod);
    let is_users =
        |key: &str| component.is_some_and(|component| component.template.annotation(key).is_some());
    [(keys::ZONE, location.zone), (keys::RACK, location.rack), (keys::NVLINK_DOMAIN, location.nvlink_domain)]
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)))
        .filter(|(key, value)| present(key) != Some(value) && !is_users(key))
        .map(|(key, value)| (key.to_owned(), value.into()))
        .collect()
}
