//! Ports that pods request: allocated once, and stored as annotations before any pod is created.

use moongate_render::{Manifest, ports};
use rbg_api::keys;
use rbg_api::template::member_object;
use rbg_api::v1alpha2::InstanceComponent;
use serde_json::{Map, Value, json};

use super::group::GroupInput;
use super::instance::{InstanceInput, name};
use super::{PlanError, ReconcilePlan, WriteAction};
use crate::ResourceKind;
use crate::resource_cache::{PortChoice, PortTable, ResourceKey};

/// Allocates ports that all pods of a component share: those stored in the workload's annotations, and new ones.
pub(super) fn allocate_role_ports(
    input: GroupInput<'_>,
    manifest: &mut Manifest,
    live: Option<&Value>,
    plan: &mut ReconcilePlan,
) -> Result<(), PlanError> {
    let spec = manifest.0.get("spec").map(|spec| &spec["roleInstanceTemplate"]["components"]);
    let has_ports = |component: &&Value| {
        let annotations = [&component["annotations"], &component["template"]["metadata"]["annotations"]];
        annotations.into_iter().any(|annotations| annotations.get(keys::PORT_ALLOCATOR).is_some())
    };
    let components_with_ports = spec.and_then(Value::as_array).into_iter().flatten().filter(has_ports);
    let components: Vec<InstanceComponent> = components_with_ports
        .filter_map(|component| serde_json::from_value(component.clone()).ok())
        .collect();
    let object = ResourceKey {
        kind: ResourceKind::Set,
        namespace: input.group.metadata.namespace.clone().unwrap_or_default(),
        name: manifest.name().to_owned(),
    };
    for component in &components {
        for key in ports::role_scoped_keys(component)? {
            let stored = live.and_then(|live| live["metadata"]["annotations"].get(&key)?.as_str());
            let port = match stored {
                Some(port) => Some(port.to_owned()),
                None => choose_port(input.ports, &object, &key, plan)?.map(|port| port.to_string()),
            };
            if let Some(port) = port {
                let annotations = member_object(member_object(&mut manifest.0, "metadata"), "annotations");
                annotations.insert(key, port.into());
            }
        }
    }
    Ok(())
}

/// Allocates ports of the instance's own pods. Returns whether the plan stores new ones: all other steps wait until they
/// are stored.
pub(super) fn allocate_instance_ports(
    input: InstanceInput<'_>,
    plan: &mut ReconcilePlan,
) -> Result<bool, PlanError> {
    let live = input.instance;
    let is_allocated =
        |key: &str| live.metadata.annotations.as_ref().is_some_and(|all| all.contains_key(key));
    let object = ResourceKey {
        kind: ResourceKind::Instance,
        namespace: live.metadata.namespace.clone().unwrap_or_default(),
        name: name(live).to_owned(),
    };
    let mut missing = Map::new();
    for key in ports::pod_scoped_keys(live)?.into_iter().filter(|key| !is_allocated(key)) {
        if let Some(port) = choose_port(input.ports, &object, &key, plan)? {
            missing.insert(key, port.to_string().into());
        }
    }
    if missing.is_empty() {
        return Ok(false);
    }
    let body = json!({ "metadata": { "uid": live.metadata.uid, "annotations": missing } });
    let action =
        WriteAction::Patch { kind: ResourceKind::Instance, name: name(live).to_owned(), status: false, body };
    plan.push(action, "ports are allocated for its pods");
    Ok(true)
}

/// The port reserved for the annotation of an object, or a free one, which the plan then contains. `None` if port allocation
/// is off.
fn choose_port(
    ports: &PortTable,
    object: &ResourceKey,
    annotation: &str,
    plan: &mut ReconcilePlan,
) -> Result<Option<u16>, PlanError> {
    let is_for = |choice: &&PortChoice| choice.object == *object && choice.annotation == annotation;
    let chosen = plan.port_choices.iter().find(is_for).map(|choice| choice.port);
    if let Some(port) = chosen.or_else(|| ports.reservation(object, annotation)) {
        return Ok(Some(port));
    }
    let is_chosen = |port| plan.port_choices.iter().any(|choice| choice.port == port);
    let Some(port) = ports.find_free(object, annotation, is_chosen)? else { return Ok(None) };
    plan.port_choices.push(PortChoice { object: object.clone(), annotation: annotation.to_owned(), port });
    Ok(Some(port))
}
