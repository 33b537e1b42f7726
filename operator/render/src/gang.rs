//! Gang scheduling: groups whose pods are scheduled all together or not at all.

use rbg_api::{PodTemplate, keys};
use serde_json::json;

use crate::group::{GangScheduler, GroupContext};
use crate::manifest::{Manifest, StringMap};
use crate::role::ResolvedRole;

/// Default timeout of scheduler-plugins, in seconds.
const TIMEOUT_SECONDS: i64 = 60;

fn is_gang(group: GroupContext<'_>) -> bool {
    group.annotation(keys::GANG_SCHEDULING) == Some("true")
}

/// The PodGroup, if the group has gang scheduling.
#[must_use]
pub fn pod_group(group: GroupContext<'_>) -> Option<Manifest> {
    is_gang(group).then(|| {
        let mut metadata = group.metadata(group.name, true);
        let (api_version, inherited, spec) = match group.gang_scheduler {
            GangScheduler::SchedulerPlugins => {
                let seconds =
                    group.annotation(keys::GANG_SCHEDULING_TIMEOUT).and_then(|text| text.parse().ok());
                let seconds: i64 = seconds.unwrap_or(TIMEOUT_SECONDS);
                let spec = json!({ "minMember": pods(group), "scheduleTimeoutSeconds": seconds });
                ("scheduling.x-k8s.io/v1alpha1", "scheduling.x-k8s.io/", spec)
            }
            GangScheduler::Volcano => {
                let text = |key| group.annotation(key).filter(|text| !text.is_empty());
                let spec = json!({
                    "minMember": pods(group),
                    "queue": text(keys::GANG_SCHEDULING_VOLCANO_QUEUE).or(text(keys::QUEUE)),
                    "priorityClassName": text(keys::GANG_SCHEDULING_VOLCANO_PRIORITY),
                });
                ("scheduling.volcano.sh/v1beta1", "volcano.sh/", spec)
            }
        };
        let annotations = group.object.metadata.annotations.iter().flatten();
        let annotations = annotations.filter(|(key, _)| key.starts_with(inherited));
        metadata.annotations = annotations.map(|(key, value)| (key.clone(), value.clone())).collect();
        Manifest::new(api_version, "PodGroup", metadata.as_ref(), json!({ "spec": spec }))
    })
}

/// Number of pods of the whole group. A role that cannot be rendered counts one pod per instance; its error is reported
/// elsewhere.
pub(crate) fn pods(group: GroupContext<'_>) -> i64 {
    let roles = group.object.spec.roles.iter();
    roles
        .map(|spec| {
            let role = ResolvedRole::new(group, spec);
            i64::from(role.map_or(1, |role| role.instance_size())).saturating_mul(spec.replicas.into())
        })
        .fold(0, i64::saturating_add)
}

/// Adds the reference to the PodGroup to the pod template.
pub(crate) fn inject(group: GroupContext<'_>, template: &mut PodTemplate) {
    if !is_gang(group) {
        return;
    }
    let named = |key: &str| StringMap::from([(key.to_owned(), group.name.to_owned())]);
    match group.gang_scheduler {
        GangScheduler::SchedulerPlugins => template.set_labels(&named(keys::POD_GROUP)),
        GangScheduler::Volcano => template.set_annotations(&named(keys::VOLCANO_POD_GROUP)),
    }
}
