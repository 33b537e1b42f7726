//! What draws pods together and apart: preferences for the scheduler, made from a group's ladder.
//!
//! A domain that is nearer weighs more than all that are further together. Pods whose roles belong together are drawn to each
//! other at every rung up to the one that roles are spread over, and the whole group at the rungs beyond it. Only one of two
//! roles says so: the scheduler counts the preferences of pods that run for those that come, too. Nothing is required, so
//! that a group whose best place is full goes to the next best.

use rbg_api::template::{member_list, member_object};
use rbg_api::v1alpha2::{InstanceComponent, RoleInstance};
use rbg_api::{PodTemplate, keys};
use serde_json::{Map, Value, json};

use crate::RenderError;
use crate::group_topology::RoleTopology;

const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";
/// The scheduler takes up to 100. Each rung weighs half of the one before.
const MAX_WEIGHT: i32 = 100;
/// Label of LeaderWorkerSet pods: equal for those that belong together.
const LWS_GROUP_KEY: &str = "leaderworkerset.sigs.k8s.io/group-key";

/// Who a pod of another's workload is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ForeignPodKind {
    /// An instance by itself.
    Single,
    /// The leader of a LeaderWorkerSet.
    Leader,
    /// A worker of a LeaderWorkerSet.
    Worker,
}

/// Draws a pod of an instance to its place. The first pod seeks the place, the others of the instance follow it.
pub(crate) fn add_pod_affinity(
    template: &mut PodTemplate,
    instance: &RoleInstance,
    component: &InstanceComponent,
    id: i32,
) -> Result<(), RenderError> {
    let annotations = instance.metadata.annotations.as_ref();
    let Some(text) = annotations.and_then(|all| all.get(keys::TOPOLOGY)).filter(|text| !text.is_empty())
    else {
        return Ok(());
    };
    let topology = RoleTopology::parse(text)?;
    let labels = instance.metadata.labels.as_ref();
    let of = |key: &str| labels.and_then(|labels| labels.get(key)).cloned().unwrap_or_default();
    let (group, role) = (of(keys::GROUP_NAME), of(keys::ROLE_NAME));
    let is_first =
        instance.spec.components.first().is_some_and(|first| first.name == component.name) && id == 0;
    if is_first {
        let firsts = json!({ "matchLabels": { keys::GROUP_NAME: group, keys::ROLE_NAME: role,
            keys::COMPONENT_NAME: component.name, keys::COMPONENT_ID: "0" } });
        seek(template, &topology, &group, firsts);
    } else {
        let own = json!({ "matchLabels": { keys::ROLE_INSTANCE_NAME: instance.metadata.name } });
        follow(template, &topology, &json!({ "labelSelector": own }));
    }
    Ok(())
}

/// The same for a pod of another's workload, whose template all of its pods share.
pub(crate) fn add_external_pod_affinity(
    template: &mut PodTemplate,
    topology: &RoleTopology,
    (group, role): (&str, &str),
    who: ForeignPodKind,
) {
    let mut labels = Map::new();
    labels.insert(keys::GROUP_NAME.to_owned(), group.into());
    labels.insert(keys::ROLE_NAME.to_owned(), role.into());
    match who {
        ForeignPodKind::Worker => {
            let own =
                json!({ "labelSelector": { "matchLabels": labels }, "matchLabelKeys": [LWS_GROUP_KEY] });
            follow(template, topology, &own);
        }
        ForeignPodKind::Single => seek(template, topology, group, json!({ "matchLabels": labels })),
        ForeignPodKind::Leader => {
            labels.insert(keys::legacy::LWS_WORKER_INDEX.to_owned(), "0".into());
            seek(template, topology, group, json!({ "matchLabels": labels }));
        }
    }
}

/// Near the partners of its role and in the midst of its group, and apart from the other instances of its role, which
/// `instances` selects.
fn seek(template: &mut PodTemplate, topology: &RoleTopology, group: &str, instances: Value) {
    let group = json!({ keys::GROUP_NAME: group });
    let partners = (!topology.near.is_empty()).then(|| {
        let roles = json!([{ "key": keys::ROLE_NAME, "operator": "In", "values": topology.near }]);
        json!({ "labelSelector": { "matchLabels": group, "matchExpressions": roles } })
    });
    let all = Some(json!({ "labelSelector": { "matchLabels": group } }));
    let whom = |rung: usize| if rung < topology.spread { partners.as_ref() } else { all.as_ref() };
    push_preferred_terms(template, topology, whom);
    let Some(rung) = topology.spread.checked_sub(1).and_then(|at| topology.rungs.get(at)) else { return };
    let constraints = template.list_mut("topologySpreadConstraints");
    // Two of the same kind are refused by the API server, and the user's own counts.
    let is_said = |one: &Value| {
        one["topologyKey"] == rung.label.as_str() && one["whenUnsatisfiable"] == "ScheduleAnyway"
    };
    if !constraints.iter().any(is_said) {
        constraints
            .push(json!({ "maxSkew": 1, "topologyKey": rung.label, "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": instances }));
    }
}

/// Near the pods of its own instance.
fn follow(template: &mut PodTemplate, topology: &RoleTopology, own: &Value) {
    push_preferred_terms(template, topology, |_| Some(own));
}

fn push_preferred_terms<'a>(
    template: &mut PodTemplate,
    topology: &RoleTopology,
    whom: impl Fn(usize) -> Option<&'a Value>,
) {
    let terms: Vec<Value> = topology
        .rungs
        .iter()
        .enumerate()
        .filter_map(|(at, rung)| {
            let mut term = whom(at)?.clone();
            term["topologyKey"] = rung.label.as_str().into();
            Some(json!({ "weight": (MAX_WEIGHT >> at).max(1), "podAffinityTerm": term }))
        })
        .collect();
    if !terms.is_empty() {
        let affinity = member_object(member_object(template.spec_mut(), "affinity"), "podAffinity");
        member_list(affinity, PREFERRED).extend(terms);
    }
}

#[cfg(test)]
mod tests {
    use rbg_api::TopologyLevel;

    use super::*;
    use crate::group_topology::TopologyKey;

    fn topology(near: &[&str], spread: usize) -> RoleTopology {
        let rung = |level: TopologyLevel, label: &str| TopologyKey { level, label: label.to_owned() };
        RoleTopology {
            rungs: vec![
                rung(TopologyLevel::Node, "host"),
                rung(TopologyLevel::Rack, "rack"),
                rung(TopologyLevel::Zone, "zone"),
            ],
            near: near.iter().map(|name| (*name).to_owned()).collect(),
            spread,
        }
    }

    fn instance(topology: &RoleTopology, components: Value) -> RoleInstance {
        let labels = json!({ keys::GROUP_NAME: "g", keys::ROLE_NAME: "prefill" });
        let metadata = json!({ "name": "g-prefill-0", "labels": labels, "annotations": { keys::TOPOLOGY: topology.text() } });
        serde_json::from_value(json!({ "metadata": metadata, "spec": { "components": components } })).unwrap()
    }

    /// Weight, key and selector of each term.
    fn terms(template: &PodTemplate) -> Vec<(i64, String, Value)> {
        let terms = &template.0["spec"]["affinity"]["podAffinity"][PREFERRED];
        let one = |term: &Value| {
            let what = &term["podAffinityTerm"];
            let key = what["topologyKey"].as_str().unwrap().to_owned();
            (term["weight"].as_i64().unwrap(), key, what["labelSelector"].clone())
        };
        terms.as_array().unwrap().iter().map(one).collect()
    }

    #[test]
    fn affinity_adds_partners_and_group_and_keeps_user_terms() {
        let own = json!({ "weight": 1, "podAffinityTerm": { "topologyKey": "own", "labelSelector": {} } });
        let affinity = json!({ "podAffinity": { PREFERRED: [own] }, "nodeAffinity": {} });
        let spread = json!({ "topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "ScheduleAnyway" });
        let mut template = serde_json::from_value(
            json!({ "spec": { "affinity": affinity, "topologySpreadConstraints": [spread] } }),
        )
        .unwrap();
        let one =
            instance(&topology(&["decode"], 1), json!([{ "name": "prefill", "size": 1, "template": {} }]));
        add_pod_affinity(&mut template, &one, &one.spec.components[0], 0).unwrap();

        let all = json!({ "matchLabels": { keys::GROUP_NAME: "g" } });
        let mut decodes = all.clone();
        decodes["matchExpressions"] =
            json!([{ "key": keys::ROLE_NAME, "operator": "In", "values": ["decode"] }]);
        let expected = [
            (1, "own".to_owned(), json!({})),
            (100, "host".to_owned(), decodes),
            (50, "rack".to_owned(), all.clone()),
            (25, "zone".to_owned(), all),
        ];
        assert_eq!(terms(&template), expected);
        assert!(template.0["spec"]["affinity"]["nodeAffinity"].is_object());
        let constraints = template.0["spec"]["topologySpreadConstraints"].as_array().unwrap().clone();
        assert_eq!(constraints[0], spread);
        let firsts = json!({ keys::GROUP_NAME: "g", keys::ROLE_NAME: "prefill",
            keys::COMPONENT_NAME: "prefill", keys::COMPONENT_ID: "0" });
        assert_eq!(constraints[1]["topologyKey"], "host");
        assert_eq!(constraints[1]["labelSelector"]["matchLabels"], firsts);

        let mut template = PodTemplate::default();
        let mut own = template.clone();
        own.list_mut("topologySpreadConstraints")
            .push(json!({ "topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 9 }));
        add_pod_affinity(&mut own, &one, &one.spec.components[0], 0).unwrap();
        assert_eq!(own.list_mut("topologySpreadConstraints").len(), 1, "the user's counts");
        let packed = instance(&topology(&[], 0), json!([{ "name": "prefill", "template": {} }]));
        add_pod_affinity(&mut template, &packed, &packed.spec.components[0], 0).unwrap();
        assert_eq!(terms(&template).len(), 3);
        assert!(!template.0["spec"].as_object().unwrap().contains_key("topologySpreadConstraints"));
    }

    #[test]
    fn the_other_pods_of_an_instance_follow_the_first() {
        let components =
            json!([{ "name": "leader", "template": {} }, { "name": "worker", "size": 2, "template": {} }]);
        let one = instance(&topology(&["decode"], 1), components);
        let mut template = PodTemplate::default();
        add_pod_affinity(&mut template, &one, &one.spec.components[1], 0).unwrap();
        let own = json!({ "matchLabels": { keys::ROLE_INSTANCE_NAME: "g-prefill-0" } });
        let expected = [(100, "host"), (50, "rack"), (25, "zone")];
        assert_eq!(terms(&template), expected.map(|(weight, key)| (weight, key.to_owned(), own.clone())));
        assert!(!template.0["spec"].as_object().unwrap().contains_key("topologySpreadConstraints"));
    }

    #[test]
    fn workers_of_a_leader_worker_set_follow_their_own_leader() {
        let said = topology(&["decode"], 1);
        let (mut leader, mut worker) = (PodTemplate::default(), PodTemplate::default());
        add_external_pod_affinity(&mut leader, &said, ("g", "prefill"), ForeignPodKind::Leader);
        add_external_pod_affinity(&mut worker, &said, ("g", "prefill"), ForeignPodKind::Worker);
        let leaders = &leader.0["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"];
        assert_eq!(leaders[keys::legacy::LWS_WORKER_INDEX], "0");
        let follows = &worker.0["spec"]["affinity"]["podAffinity"][PREFERRED][0]["podAffinityTerm"];
        assert_eq!(follows["matchLabelKeys"], json!([LWS_GROUP_KEY]));
        assert_eq!(
            follows["labelSelector"]["matchLabels"],
            json!({ keys::GROUP_NAME: "g", keys::ROLE_NAME: "prefill" })
        );
    }
}
