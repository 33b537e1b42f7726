//! Gang scheduling: pods of a group that are scheduled together or not at all.

use rbg_api::v1alpha2::RoleSpec;
use rbg_api::{PodTemplate, keys};
use serde_json::{Value, json};

use crate::group::{GangScheduler, GroupContext};
use crate::manifest::{Manifest, StringMap};
use crate::role::ResolvedRole;

/// Default timeout of scheduler-plugins, in seconds.
const TIMEOUT_SECONDS: i64 = 60;
/// Name of Volcano's scheduler.
const VOLCANO: &str = "volcano";

impl GroupContext<'_> {
    /// Whether pods of the group are scheduled together: by its policy, or else by its annotation.
    #[must_use]
    pub fn has_gang(self) -> bool {
        self.gang.is_some() || self.is_gang_by_annotation()
    }

    fn is_gang_by_annotation(self) -> bool {
        self.annotation(keys::GANG_SCHEDULING) == Some("true")
    }

    /// Whether pods of the role are scheduled together with others.
    #[must_use]
    pub fn is_in_gang(self, role: &str) -> bool {
        self.gang.map_or_else(|| self.is_gang_by_annotation(), |gang| gang.has_role(role))
    }

    /// Number of instances of the role that are scheduled together, of this number of replicas.
    #[must_use]
    pub fn gang_minimum(self, role: &str, replicas: i32) -> i32 {
        match self.gang {
            Some(gang) => gang.minimum(role, replicas),
            None if self.is_gang_by_annotation() => replicas,
            None => 0,
        }
    }
}

/// The PodGroup, if the group has gang scheduling.
#[must_use]
pub fn pod_group(group: GroupContext<'_>) -> Option<Manifest> {
    group.has_gang().then(|| {
        let mut metadata = group.metadata(group.name, true);
        let (api_version, inherited, spec) = match group.gang_scheduler {
            GangScheduler::SchedulerPlugins => {
                let seconds =
                    group.annotation(keys::GANG_SCHEDULING_TIMEOUT).and_then(|text| text.parse().ok());
                let seconds: i64 = seconds.unwrap_or(TIMEOUT_SECONDS);
                let spec = json!({ "minMember": members(group), "scheduleTimeoutSeconds": seconds });
                ("scheduling.x-k8s.io/v1alpha1", "scheduling.x-k8s.io/", spec)
            }
            GangScheduler::Volcano => {
                let text = |key| group.annotation(key).filter(|text| !text.is_empty());
                let spec = json!({
                    "minMember": members(group),
                    "subGroupPolicy": sub_groups(group),
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
    count(group, |role| role.replicas)
}

/// Number of pods that are scheduled together.
fn members(group: GroupContext<'_>) -> i64 {
    count(group, |role| group.gang_minimum(&role.name, role.replicas))
}

fn count(group: GroupContext<'_>, instances: impl Fn(&RoleSpec) -> i32) -> i64 {
    let roles = group.object.spec.roles.iter();
    let pods = |role: &RoleSpec| instance_size(group, role).saturating_mul(instances(role).into());
    roles.map(pods).fold(0, i64::saturating_add)
}

fn instance_size(group: GroupContext<'_>, role: &RoleSpec) -> i64 {
    ResolvedRole::new(group, role).map_or(1, |role| role.instance_size()).into()
}

/// The instances of each role with a minimum, of which Volcano schedules each as a whole. As upstream renders them.
fn sub_groups(group: GroupContext<'_>) -> Option<Vec<Value>> {
    let gang = group.gang.filter(|gang| gang.has_minimums())?;
    let members = group.object.spec.roles.iter().filter(|role| gang.has_role(&role.name));
    let sub_group = |role: &RoleSpec| {
        let labels = json!({ keys::GROUP_NAME: group.name, keys::ROLE_NAME: role.name });
        json!({
            "name": role.name,
            "labelSelector": { "matchLabels": labels },
            "matchLabelKeys": [keys::ROLE_INSTANCE_NAME],
            "subGroupSize": instance_size(group, role),
            "minSubGroups": gang.minimum(&role.name, role.replicas),
        })
    };
    Some(members.map(sub_group).collect())
}

/// Adds the reference to the PodGroup to the template of a member.
pub(crate) fn inject(group: GroupContext<'_>, role: &str, template: &mut PodTemplate) {
    if group.gang.is_some() && group.gang_scheduler == GangScheduler::Volcano {
        // Also for pods that are no members, as upstream does: a second scheduler could give the members' nodes to them. An annotation has no
        // such effect, since pods of existing groups would be recreated.
        let spec = template.spec_mut();
        spec.entry("schedulerName").or_insert_with(|| VOLCANO.into());
    }
    if !group.is_in_gang(role) {
        return;
    }
    let named = |key: &str| StringMap::from([(key.to_owned(), group.name.to_owned())]);
    match group.gang_scheduler {
        GangScheduler::SchedulerPlugins => template.set_labels(&named(keys::POD_GROUP)),
        GangScheduler::Volcano => template.set_annotations(&named(keys::VOLCANO_POD_GROUP)),
    }
}
