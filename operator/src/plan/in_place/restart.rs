//! Restarts a pod in place without another image. The kubelet restarts a container when the reference of its image changes, so the
//! reference alternates between that of the template and the digest of the same image, which is on the node already.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use serde_json::{Map, Value, json};

use super::progress::{self, STATE};
use super::{GRACE, annotation, close_gate, containers};
use crate::ResourceKind;
use crate::plan::instance::{InstanceInput, component_of};
use crate::plan::{ReconcilePlan, WriteAction, hooks, revisions};

/// Annotation that names the main container of a pod, as kubectl uses it.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";
/// Prefix of image IDs of Docker.
const DOCKER: &str = "docker-pullable://";

/// Starts the restart of a pod's main container, and sets an annotation in the same write. Hooks run as for an update. Returns false if
/// the image has no other reference.
pub(in crate::plan) fn restart(
    input: InstanceInput<'_>,
    pod: &Pod,
    revision: &revisions::RevisionRef,
    (key, value, reason): (&str, &str, &str),
    plan: &mut ReconcilePlan,
) -> bool {
    let Some((container, image)) = next_reference(input, pod) else { return false };
    let images: Map<String, Value> = [(container, image.into())].into_iter().collect();
    let name = pod.metadata.name.clone().unwrap_or_default();
    close_gate(input, pod, None, plan);
    let mut state = progress::state(pod, &images, revision, input.now);
    let mut body = json!({ "metadata": { "uid": pod.metadata.uid, "annotations": { key: value } } });
    let has_hooks = component_of(input.instance, pod).is_some_and(|one| hooks::has_hooks(&one.template));
    if has_hooks {
        state["hooks"] = hooks::initial_progress();
    }
    if hooks::are_used(input.instance) {
        let waiting = json!({ "revision": revision.name, "containerImages": images, "graceSeconds": 0 });
        body["metadata"]["annotations"][GRACE] = waiting.to_string().into();
    } else {
        body["spec"] = containers(&images);
    }
    body["metadata"]["annotations"][STATE] = state.to_string().into();
    plan.push(WriteAction::Patch { kind: ResourceKind::Pod, name, status: false, body }, reason);
    true
}

/// Whether the containers of the pod's last update or restart in place have been restarted.
pub(in crate::plan) fn has_restarted(pod: &Pod) -> bool {
    let state = annotation(pod, STATE).unwrap_or_default();
    let before = state["lastContainerStatuses"].as_object().into_iter().flatten();
    before.into_iter().all(|(container, before)| {
        let restarts = status(pod, container).map_or(0, |status| i64::from(status.restart_count));
        before["restartCount"].as_i64().is_none_or(|before| restarts > before)
    })
}

fn status<'a>(pod: &'a Pod, container: &str) -> Option<&'a ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.iter().find(|status| status.name == container)
}

/// The pod's main container, and another reference of the image that it runs.
fn next_reference(input: InstanceInput<'_>, pod: &Pod) -> Option<(String, String)> {
    let template = &component_of(input.instance, pod)?.template;
    let containers = template.containers();
    let named = template.annotation(DEFAULT_CONTAINER);
    let main = containers.iter().find(|container| container["name"].as_str() == named);
    let main = main.or(containers.first())?;
    let name = main["name"].as_str()?;
    let live = pod.spec.as_ref()?.containers.iter().find(|container| container.name == name)?;
    let image_id = status(pod, name).map(|status| status.image_id.as_str()).unwrap_or_default();
    let image = other_reference(main["image"].as_str()?, live.image.as_deref()?, image_id)?;
    Some((name.to_owned(), image))
}

fn other_reference(template: &str, live: &str, image_id: &str) -> Option<String> {
    if live != template {
        return Some(template.to_owned());
    }
    let digest = image_id.strip_prefix(DOCKER).unwrap_or(image_id);
    let (repository, hash) = digest.split_once('@').filter(|(repository, _)| !repository.is_empty())?;
    // Runtimes ignore a tag beside a digest.
    Some(if digest == live { format!("{repository}:restart@{hash}") } else { digest.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_alternates_between_references_of_one_image() {
        let (tag, digest) = ("r.io/engine:1", "r.io/engine@sha256:ab");
        assert_eq!(other_reference(tag, tag, digest).unwrap(), digest);
        assert_eq!(other_reference(tag, digest, digest).unwrap(), tag);
        assert_eq!(other_reference(tag, tag, &format!("{DOCKER}{digest}")).unwrap(), digest);
        let pinned = other_reference(digest, digest, digest).unwrap();
        assert_eq!(pinned, "r.io/engine:restart@sha256:ab");
        assert_eq!(other_reference(digest, &pinned, digest).unwrap(), digest);
        for unusable in ["", "sha256:ab", "@sha256:ab"] {
            assert_eq!(other_reference(tag, tag, unusable), None);
        }
    }
}
