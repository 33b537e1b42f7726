//! Differences between a pod and its instance's spec.

use k8s_openapi::api::core::v1::Pod;
use rbg_api::v1alpha2::InstanceComponent;
use rbg_api::{PodTemplate, keys};
use serde_json::{Map, Value};

use crate::plan::instance::{InstanceInput, component_of};
use crate::plan::revisions;
use crate::status::pod_label;

/// Annotation of pod templates with the time of the last requested restart, as `kubectl rollout restart` and other
/// controllers use it.
pub(crate) const RESTARTED_AT: &str = "kubectl.kubernetes.io/restartedAt";

pub(super) fn old_template(input: InstanceInput<'_>, pod: &Pod, component: &str) -> Option<PodTemplate> {
    let mut template = old_component(input, pod, component)?["template"].take();
    template.as_object_mut()?.remove("$patch");
    serde_json::from_value(template).ok()
}

/// The component in the revision that the pod was created from.
fn old_component(input: InstanceInput<'_>, pod: &Pod, component: &str) -> Option<Value> {
    let hash = pod_label(pod, keys::CONTROLLER_REVISION_HASH)?;
    let stored = input.revisions.iter().find(|stored| revisions::hash(stored) == hash)?;
    let data = revisions::data(stored)?;
    let components = data["spec"]["components"].as_array()?;
    components.iter().find(|entry| entry["name"] == component).cloned()
}

/// The images that differ, by container. `None` if another field of the pod specs differs.
pub(super) fn images(old: &PodTemplate, new: &PodTemplate) -> Option<Map<String, Value>> {
    let (mut old, new_spec) = (old.0.get("spec")?.clone(), new.0.get("spec")?);
    let mut images = Map::new();
    let containers = old.get_mut("containers").and_then(Value::as_array_mut)?;
    for (old, new) in containers.iter_mut().zip(new.containers()) {
        let image = new.get("image").filter(|image| old.get("image") != Some(image));
        if let Some(image) = image {
            images.insert(new.get("name")?.as_str()?.to_owned(), image.clone());
            old["image"] = image.clone();
        }
    }
    (old == *new_spec).then_some(images)
}

/// Adds images that the pod does not have yet: an earlier update may still be in its grace period.
pub(super) fn with_pending(
    mut images: Map<String, Value>,
    pod: &Pod,
    new: &PodTemplate,
) -> Map<String, Value> {
    for live in pod.spec.iter().flat_map(|spec| &spec.containers) {
        let template = new.containers().iter().find(|entry| entry["name"] == live.name.as_str());
        if let Some(image) = template.and_then(|entry| entry.get("image"))
            && image.as_str() != live.image.as_deref()
        {
            images.insert(live.name.clone(), image.clone());
        }
    }
    images
}

/// Labels or annotations of the new template, and null for those that it no longer has.
pub(super) fn metadata_patch(old: &PodTemplate, new: &PodTemplate, member: &str) -> Map<String, Value> {
    let entries = |template: &PodTemplate| {
        let texts = template.0.get("metadata").and_then(|metadata| metadata.get(member));
        texts.and_then(Value::as_object).cloned().unwrap_or_default()
    };
    let (old, new) = (entries(old), entries(new));
    let mut texts: Map<String, Value> = old
        .into_iter()
        .filter(|(key, _)| !new.contains_key(key))
        .map(|(key, _)| (key, Value::Null))
        .collect();
    texts.extend(new);
    texts.remove(keys::COMPONENT_DISCOVERY);
    texts
}

/// Whether the component's Service is another than in the pod's revision: a pod's subdomain cannot be changed.
pub(super) fn has_other_service(input: InstanceInput<'_>, pod: &Pod, component: &InstanceComponent) -> bool {
    let Some(old) = old_component(input, pod, &component.name) else { return false };
    let old = old["serviceName"].as_str().unwrap_or_default();
    old != component.service_name.as_deref().unwrap_or_default()
}

/// The images to change so that the pod matches its instance's spec. `None` if the pod must be recreated.
pub(in crate::plan) fn new_images(input: InstanceInput<'_>, pod: &Pod) -> Option<Map<String, Value>> {
    let component = component_of(input.instance, pod)?;
    let old = old_template(input, pod, &component.name)?;
    if has_other_service(input, pod, component) {
        return None;
    }
    Some(with_pending(images(&old, &component.template)?, pod, &component.template))
}

/// Whether the pod can be updated to its instance's spec in place.
pub(in crate::plan) fn is_possible(input: InstanceInput<'_>, pod: &Pod) -> bool {
    new_images(input, pod).is_some()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_images_change_in_place() {
        let template = |image: &str, value: &str| -> PodTemplate {
            serde_json::from_value(json!({ "spec": { "containers": [
                { "name": "c", "image": image, "env": [{ "name": "E", "value": value }] }] } }))
            .unwrap()
        };
        assert_eq!(images(&template("a", "1"), &template("b", "1")).unwrap()["c"], "b");
        assert!(images(&template("a", "1"), &template("b", "2")).is_none());
        assert!(images(&template("a", "1"), &template("a", "1")).unwrap().is_empty());
    }
}
