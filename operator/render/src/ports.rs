//! Ports allocated for pods, and component discovery.
//!
//! A pod template requests ports by an annotation. Ports of scope `RoleScoped` are allocated once per component of a role
//! and stored in the
//! annotation `<component>.<name>` of the set and its instances; ports of scope `PodScoped` once per pod, in the annotation
//! `<pod>.<name>` of
//! the instance.

use std::ops::Range;

use rbg_api::v1alpha2::{InstanceComponent, RoleInstance};
use rbg_api::{PodTemplate, keys};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{ComponentAnnotationError, RenderError, SharedError};
use crate::hash::fnv1a;
use crate::manifest::StringMap;
use crate::pod_name::pod_name;

#[derive(Debug, Default, Deserialize)]
struct PortAllocatorConfig {
    #[serde(default)]
    allocations: Vec<PortAllocation>,
    #[serde(default)]
    references: Vec<PortReference>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PortAllocation {
    name: String,
    env: String,
    #[serde(default)]
    annotation_key: Option<String>,
    #[serde(default)]
    scope: PortScope,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
enum PortScope {
    #[default]
    PodScoped,
    RoleScoped,
}

#[derive(Debug, Deserialize)]
struct PortReference {
    env: String,
    /// Reference of the form `<role>.<component>.<port>`.
    from: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ComponentDiscovery {
    #[serde(default)]
    address_refs: Vec<AddressRef>,
    #[serde(default)]
    port_refs: Vec<PortRef>,
}

#[derive(Debug, Deserialize)]
struct AddressRef {
    env: String,
    component: String,
    #[serde(default)]
    index: i32,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PortRef {
    env: String,
    component: String,
    port_name: String,
    #[serde(default)]
    index: i32,
}

/// Variables and annotations to add to a pod.
#[derive(Debug, Default)]
pub(crate) struct PortInjection {
    pub(crate) variables: Vec<Value>,
    pub(crate) annotations: StringMap,
}

/// Annotations that a set needs for a component: one per port of scope `RoleScoped`.
///
/// # Errors
/// [`RenderError::Annotation`].
pub fn role_scoped_keys(component: &InstanceComponent) -> Result<Vec<String>, RenderError> {
    let config = allocator_config(component)?;
    let shared = config.allocations.iter().filter(|allocation| allocation.scope == PortScope::RoleScoped);
    Ok(shared.map(|allocation| format!("{}.{}", component.name, allocation.name)).collect())
}

/// Annotations that an instance needs: one per pod and port of scope `PodScoped`.
///
/// # Errors
/// [`RenderError::Annotation`].
pub fn pod_scoped_keys(instance: &RoleInstance) -> Result<Vec<String>, RenderError> {
    let mut all = Vec::new();
    for component in &instance.spec.components {
        let config = allocator_config(component)?;
        for id in 0..component.size() {
            let pod = pod_name(instance, &component.name, id);
            let pod_allocations =
                config.allocations.iter().filter(|allocation| allocation.scope == PortScope::PodScoped);
            all.extend(pod_allocations.map(|allocation| format!("{pod}.{}", allocation.name)));
        }
    }
    Ok(all)
}

/// Finds a port in `range` that is not taken. The search starts at a hash of `key`, so that equal keys get equal ports and
/// different keys are spread. `None` if all ports are taken.
#[must_use]
pub fn allocate(range: Range<u16>, is_taken: impl Fn(u16) -> bool, key: &str) -> Option<u16> {
    let count = u32::from(range.end.checked_sub(range.start)?);
    let start = fnv1a(key.bytes()).checked_rem(count)?;
    let candidates = (start..count).chain(0..start).filter_map(|offset| u16::try_from(offset).ok());
    candidates.map(|offset| range.start + offset).find(|port| !is_taken(*port))
}

/// Variables and annotations of one pod. Ports that are not allocated yet are omitted.
pub(crate) fn pod_injection(
    instance: &RoleInstance,
    component: &InstanceComponent,
    id: i32,
    namespace: &str,
) -> Result<PortInjection, RenderError> {
    let mut injection = PortInjection::default();
    let allocated = |key: &str| instance.metadata.annotations.as_ref().and_then(|all| all.get(key));
    let of_component = |component: &str, id: i32, port: &str| {
        let of_pod = format!("{}.{port}", pod_name(instance, component, id));
        allocated(&of_pod).or_else(|| allocated(&format!("{component}.{port}")))
    };
    let mut variable =
        |env: &str, value: &str| injection.variables.push(json!({ "name": env, "value": value }));

    let config = allocator_config(component)?;
    for allocation in &config.allocations {
        let port = match allocation.scope {
            PortScope::PodScoped => of_component(&component.name, id, &allocation.name),
            PortScope::RoleScoped => allocated(&format!("{}.{}", component.name, allocation.name)),
        };
        let Some(port) = port else { continue };
        variable(&allocation.env, port);
        if let Some(key) = allocation.annotation_key.as_ref().filter(|key| !key.is_empty()) {
            injection.annotations.insert(key.clone(), port.clone());
        }
    }
    for reference in &config.references {
        let parts: Vec<&str> = reference.from.split('.').collect();
        let &[_, other, port] = parts.as_slice() else {
            return Err(RenderError::Annotation {
                key: keys::PORT_ALLOCATOR,
                component: component.name.clone(),
                source: ComponentAnnotationError::PortReference(reference.from.clone()),
            });
        };
        if let Some(port) = of_component(other, 0, port) {
            variable(&reference.env, port);
        }
    }
    let discovery: ComponentDiscovery = annotation(component, keys::COMPONENT_DISCOVERY)?;
    for reference in &discovery.port_refs {
        if let Some(port) = of_component(&reference.component, reference.index, &reference.port_name) {
            variable(&reference.env, port);
        }
    }
    for reference in &discovery.address_refs {
        let pod = pod_name(instance, &reference.component, reference.index);
        let other = instance.spec.components.iter().find(|other| other.name == reference.component);
        if let Some(service) = other.and_then(|other| other.service_name.as_deref()) {
            variable(&reference.env, &format!("{pod}.{service}.{namespace}.svc.cluster.local"));
        }
    }
    Ok(injection)
}

fn allocator_config(component: &InstanceComponent) -> Result<PortAllocatorConfig, RenderError> {
    annotation(component, keys::PORT_ALLOCATOR)
}

/// Parses the annotation of the component or its template as JSON; the default if it is absent or empty.
pub(crate) fn annotation<T: Default + for<'de> Deserialize<'de>>(
    component: &InstanceComponent,
    key: &'static str,
) -> Result<T, RenderError> {
    let pod_allocations = component.annotations.get(key).map(String::as_str);
    let template: &PodTemplate = &component.template;
    match pod_allocations.or_else(|| template.annotation(key)).map(str::trim) {
        None | Some("") => Ok(T::default()),
        Some(text) => serde_json::from_str(text).map_err(|error| RenderError::Annotation {
            key,
            component: component.name.clone(),
            source: SharedError::from(error).into(),
        }),
    }
}
