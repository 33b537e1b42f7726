//! Order in which components of an instance create and delete their pods.

use k8s_openapi::api::core::v1::Pod;
use moongate_render::ComponentDependencies;
use rbg_api::keys;
use rbg_api::v1alpha2::{InstanceComponent, RoleInstance};

use super::PlanError;
use crate::status::{pod_has, pod_label};

/// A component with the names of the components that it waits for.
struct OrderedComponent<'a> {
    component: &'a InstanceComponent,
    start_after: Vec<String>,
    delete_after: Vec<String>,
}

type DependencySelector = for<'p> fn(&'p OrderedComponent<'_>) -> &'p Vec<String>;

/// Start and deletion order of an instance's components.
pub(super) struct ComponentOrder<'a>(Vec<OrderedComponent<'a>>);

impl<'a> ComponentOrder<'a> {
    /// A component that starts after another is deleted before it. Cyclic dependencies are ignored.
    pub(super) fn for_instance(instance: &'a RoleInstance) -> Result<Self, PlanError> {
        let components = &instance.spec.components;
        let mut ordered = Vec::new();
        for component in components {
            let ComponentDependencies { start_after, delete_after } =
                ComponentDependencies::from_component(component)?;
            ordered.push(OrderedComponent { component, start_after, delete_after });
        }
        for index in 0..components.len() {
            let name = &components[index].name;
            let later = ordered.iter().filter(|entry| entry.start_after.contains(name));
            let later: Vec<String> = later.map(|entry| entry.component.name.clone()).collect();
            ordered[index].delete_after.extend(later);
        }
        if is_circular(&ordered, |entry| &entry.start_after) {
            ordered.iter_mut().for_each(|entry| entry.start_after.clear());
        }
        if is_circular(&ordered, |entry| &entry.delete_after) {
            ordered.iter_mut().for_each(|entry| entry.delete_after.clear());
        }
        Ok(Self(ordered))
    }

    /// Whether all predecessors are up. A pod is up when its containers are ready: its `Ready` condition depends on the whole
    /// instance.
    pub(super) fn may_start(&self, component: &InstanceComponent, pods: &[&Pod]) -> bool {
        self.predecessors(component, |entry| &entry.start_after).all(|other| {
            let up = pods.iter().filter(|pod| is_of(pod, other) && pod_has(pod, "ContainersReady"));
            i32::try_from(up.count()).is_ok_and(|up| up >= other.size())
        })
    }

    /// Whether no component that must be deleted first has surplus pods.
    pub(super) fn may_delete(&self, component: &InstanceComponent, pods: &[Pod]) -> bool {
        let mut before = self.predecessors(component, |entry| &entry.delete_after);
        before.all(|other| !pods.iter().any(|pod| is_of(pod, other) && !is_wanted(pod, other)))
    }

    fn predecessors(
        &self,
        component: &InstanceComponent,
        names: DependencySelector,
    ) -> impl Iterator<Item = &'a InstanceComponent> {
        let component_entry = self.0.iter().find(|entry| entry.component.name == component.name);
        let others = component_entry.map(names).into_iter().flatten();
        others
            .filter_map(|name| self.0.iter().find(|entry| entry.component.name == *name))
            .map(|entry| entry.component)
    }
}

fn is_circular(ordered: &[OrderedComponent<'_>], names: DependencySelector) -> bool {
    let mut remaining: Vec<_> = ordered.iter().collect();
    loop {
        let before = remaining.len();
        let waiting: Vec<&str> = remaining.iter().map(|entry| entry.component.name.as_str()).collect();
        remaining.retain(|entry| names(entry).iter().any(|name| waiting.contains(&name.as_str())));
        match remaining.len() {
            0 => return false,
            count if count == before => return true,
            _ => {}
        }
    }
}

fn is_of(pod: &Pod, component: &InstanceComponent) -> bool {
    pod_label(pod, keys::COMPONENT_NAME) == Some(component.name.as_str())
}

/// Whether the pod's id lies within the component's size.
pub(super) fn is_wanted(pod: &Pod, component: &InstanceComponent) -> bool {
    let id = pod_label(pod, keys::COMPONENT_ID).and_then(|id| id.parse::<i32>().ok());
    id.is_some_and(|id| (0..component.size()).contains(&id))
}
