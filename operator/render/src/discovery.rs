//! The discovery file that pods of ordered roles mount.

use std::collections::BTreeMap;

use rbg_api::{DiscoveryFile, TopologyLocation};
use serde::Serialize;
use serde_json::json;

use crate::error::RenderError;
use crate::gang;
use crate::group::GroupContext;
use crate::group_topology::TopologyKey;
use crate::manifest::Manifest;
use crate::role::{ResolvedRole, RolePattern, RoleTarget};
use crate::size_limit_error::SizeLimitError;
use crate::size_limits::MAX_DISCOVERY_FILE;
use crate::workload_kind::WorkloadKind;

#[derive(Serialize)]
struct DiscoveryDocument {
    group: GroupEntry,
    roles: BTreeMap<String, RoleEntry>,
    /// Topology levels of the group, nearest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    topology: Vec<TopologyKey>,
}

#[derive(Serialize)]
struct GroupEntry {
    name: String,
    /// Ordered roles, in the order of the spec.
    roles: Vec<String>,
    /// Number of pods of the group.
    size: i64,
}

#[derive(Serialize)]
struct RoleEntry {
    instances: Vec<InstanceEntry>,
    size: i32,
}

#[derive(Serialize)]
struct InstanceEntry {
    /// `<pod>.<service>` of the pod that represents the instance: the only pod, the leader, or the first pod of the first
    /// component.
    address: String,
    /// `<pod>.<service>` of all pods that have a host name, if there is more than one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pods: Vec<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    ports: BTreeMap<String, i32>,
    /// Location of the pod at `address`.
    #[serde(skip_serializing_if = "Option::is_none")]
    place: Option<TopologyLocation>,
}

/// Locations of pods by pod name.
pub type PodLocations = BTreeMap<String, TopologyLocation>;

/// Locations in a discovery file. Empty for a file that does not parse.
#[must_use]
pub fn parse_locations(text: &str) -> PodLocations {
    let file = serde_saphyr::from_str::<DiscoveryFile>(text).ok().and_then(|file| file.resolve().ok());
    let instances = file.into_iter().flat_map(|file| file.roles).flat_map(|role| role.instances);
    let with_location = instances.filter(|instance| instance.location != TopologyLocation::default());
    with_location.map(|instance| (pod_name(&instance.address).to_owned(), instance.location)).collect()
}

fn pod_name(address: &str) -> &str {
    address.split('.').next().unwrap_or_default()
}

/// The ConfigMap with the discovery file, with the known locations of pods. `None` if no role has ordered instances: then no
/// pod mounts it.
///
/// # Errors
/// See [`RenderError`].
pub fn discovery_config_map(
    group: GroupContext<'_>,
    targets: &BTreeMap<String, RoleTarget>,
    locations: &PodLocations,
) -> Result<Option<Manifest>, RenderError> {
    let Some(file) = render_file(group, targets, locations)? else { return Ok(None) };
    let metadata = group.metadata(group.name, true);
    let body = json!({ "data": { "config.yaml": file } });
    Ok(Some(Manifest::new("v1", "ConfigMap", metadata.as_ref(), body)))
}

fn render_file(
    group: GroupContext<'_>,
    targets: &BTreeMap<String, RoleTarget>,
    locations: &PodLocations,
) -> Result<Option<String>, RenderError> {
    let mut names = Vec::new();
    let mut roles = BTreeMap::new();
    for spec in &group.object.spec.roles {
        let role = ResolvedRole::new(group, spec)?;
        if !role.is_ordered() {
            continue;
        }
        let replicas = targets.get(&spec.name).map_or(spec.replicas, |target| target.replicas);
        let instances = (0..replicas).map(|ordinal| instance(&role, ordinal, locations)).collect();
        names.push(spec.name.clone());
        roles.insert(spec.name.clone(), RoleEntry { instances, size: replicas });
    }
    if names.is_empty() {
        return Ok(None);
    }
    let entry = GroupEntry { name: group.name.to_owned(), roles: names, size: gang::pods(group) };
    // One line per address, whatever its length, since simple parsers read this file too.
    let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
    let topology = group.topology()?.map(|topology| topology.levels().to_vec()).unwrap_or_default();
    let document = DiscoveryDocument { group: entry, roles, topology };
    let text = serde_saphyr::to_string_with_options(&document, options);
    let text = text.map_err(|error| RenderError::DiscoveryFile(error.into()))?;
    if text.len() > MAX_DISCOVERY_FILE {
        return Err(SizeLimitError::DiscoveryFile { bytes: text.len(), limit: MAX_DISCOVERY_FILE }.into());
    }
    Ok(Some(text))
}

fn instance(role: &ResolvedRole<'_>, ordinal: i32, locations: &PodLocations) -> InstanceEntry {
    let pods = addresses(role, &format!("{}-{ordinal}", role.names.workload));
    let ports = role.spec.service_ports.iter().map(|port| {
        let name = port.name.as_ref().filter(|name| !name.is_empty());
        let name =
            name.map_or_else(|| format!("port{}", port.port), |name| name.replace('-', "_").to_lowercase());
        (name, port.port)
    });
    let address = pods.first().cloned().unwrap_or_default();
    InstanceEntry {
        place: locations.get(pod_name(&address)).cloned(),
        address,
        pods: if pods.len() > 1 { pods } else { Vec::new() },
        ports: ports.collect(),
    }
}

/// Addresses of an instance's pods that have a host name.
fn addresses(role: &ResolvedRole<'_>, instance: &str) -> Vec<String> {
    let service = &role.names.service;
    match role.pattern {
        RolePattern::LeaderWorker(pattern) if role.kind == WorkloadKind::RoleInstanceSet => {
            let size = if role.serves_leaders_only() { 1 } else { pattern.size.unwrap_or(1).max(1) };
            (0..size).map(|pod| format!("{instance}-{pod}.{service}")).collect()
        }
        RolePattern::Custom(pattern) => {
            let components = pattern.components.iter().flat_map(|component| {
                let service_name =
                    component.service_name.as_ref().filter(|name| !name.is_empty()).unwrap_or(service);
                (0..component.size())
                    .map(move |pod| format!("{instance}-{}-{pod}.{service_name}", component.name))
            });
            components.collect()
        }
        _ => vec![format!("{instance}.{service}")],
    }
}
