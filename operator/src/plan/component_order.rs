//! Which components of an instance have their pods made, or ended, now.

use k8s_openapi::api::core::v1::Pod;
use moongate_render::ComponentDependencies;
use rbg_api::keys;
use rbg_api::v1alpha2::{InstanceComponent, RoleInstance};

use super::PlanError;
use crate::status::{pod_has, pod_label};

/// A component and the names of those that it waits for.
struct OrderedComponent<'a> {
    component: &'a InstanceComponent,
    start_after: Vec<String>,
    delete_after: Vec<String>,
}

type DependencySelector = for<'p> fn(&'p OrderedComponent<'_>) -> &'p Vec<String>;

/// The order of an instance's components.
pub(super) struct ComponentOrder<'a>(Vec<OrderedComponent<'a>>);

impl<'a> ComponentOrder<'a> {
    /// What starts after a component ends before it. Components that wait for each other in a circle wait for nobody.
    pub(super) fn for_instance(instance: &'a RoleInstance) -> Result<Self, PlanError> {
        let components = &instance.spec.components;
        let mut places = Vec::new();
        for component in components {
            let ComponentDependencies { start_after, delete_after } =
                ComponentDependencies::from_component(component)?;
            places.push(OrderedComponent { component, start_after, delete_after });
        }
        for index in 0..components.len() {
            let name = &components[index].name;
            let later = places.iter().filter(|place| place.start_after.contains(name));
            let later: Vec<String> = later.map(|place| place.component.name.clone()).collect();
            places[index].delete_after.extend(later);
        }
        if is_circular(&places, |place| &place.start_after) {
            places.iter_mut().for_each(|place| place.start_after.clear());
        }
        if is_circular(&places, |place| &place.delete_after) {
            places.iter_mut().for_each(|place| place.delete_after.clear());
        }
        Ok(Self(places))
    }

    /// Whether all that the component starts after is up. A pod is up when its containers are: that it serves waits for the
    /// whole instance.
    pub(super) fn may_start(&self, component: &InstanceComponent, pods: &[&Pod]) -> bool {
        self.predecessors(component, |place| &place.start_after).all(|other| {
            let up = pods.iter().filter(|pod| is_of(pod, other) && pod_has(pod, "ContainersReady"));
            i32::try_from(up.count()).is_ok_and(|up| up >= other.size())
        })
    }

    /// Whether nothing that the component ends after has surplus pods.
    pub(super) fn may_delete(&self, component: &InstanceComponent, pods: &[Pod]) -> bool {
        let mut before = self.predecessors(component, |place| &place.delete_after);
        before.all(|other| !pods.iter().any(|pod| is_of(pod, other) && !is_wanted(pod, other)))
    }

    fn predecessors(
        &self,
        component: &InstanceComponent,
        names: DependencySelector,
    ) -> impl Iterator<Item = &'a InstanceComponent> {
        let own = self.0.iter().find(|place| place.component.name == component.name);
        let others = own.map(names).into_iter().flatten();
        others
            .filter_map(|name| self.0.iter().find(|place| place.component.name == *name))
            .map(|place| place.component)
    }
}

fn is_circular(places: &[OrderedComponent<'_>], names: DependencySelector) -> bool {
    let mut left: Vec<_> = places.iter().collect();
    loop {
        let before = left.len();
        let waiting: Vec<&str> = left.iter().map(|place| place.component.name.as_str()).collect();
        left.retain(|place| names(place).iter().any(|name| waiting.contains(&name.as_str())));
        match left.len() {
            0 => return false,
            count if count == before => return true,
            _ => {}
        }
    }
}

fn is_of(pod: &Pod, component: &InstanceComponent) -> bool {
    pod_label(pod, keys::COMPONENT_NAME) == Some(component.name.as_str())
}

/// Whether the component has a pod of that number.
pub(super) fn is_wanted(pod: &Pod, component: &InstanceComponent) -> bool {
    let id = pod_label(pod, keys::COMPONENT_ID).and_then(|id| id.parse::<i32>().ok());
    id.is_some_and(|id| (0..component.size()).contains(&id))
}
