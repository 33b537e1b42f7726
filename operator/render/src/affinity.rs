//! Pod affinity and spreading: scheduler preferences made from a group's topology levels.
//!
//! A nearer domain weighs more than all further ones together. Pods of related roles prefer the same domain at each level
//! up to the spread
//! level, and the whole group prefers the same domain at the levels beyond it. Only one of two related roles has the
//! preference: the scheduler
//! also applies preferences of running pods to new ones. All terms are preferences, so that pods fall back to the next best
//! domain when the best
//! one is full.

use rbg_api::template::{member_list, member_object};
use rbg_api::v1alpha2::{InstanceComponent, RoleInstance};
use rbg_api::{PodTemplate, keys};
use serde_json::{Map, Value, json};

use crate::error::RenderError;
use crate::group_topology::RoleTopology;

const PREFERRED: &str = "preferredDuringSchedulingIgnoredDuringExecution";
/// Maximum weight that the scheduler accepts. Each level weighs half of the previous one.
const MAX_WEIGHT: i32 = 100;
/// Label of LeaderWorkerSet pods with the same value for all pods of an instance.
const LWS_GROUP_KEY: &str = "leaderworkerset.sigs.k8s.io/group-key";

/// Kind of a pod of an external workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ForeignPodKind {
    /// A pod that is an instance by itself.
    Single,
    /// Leader pod of a LeaderWorkerSet.
    Leader,
    /// Worker pod of a LeaderWorkerSet.
    Worker,
}

/// Adds affinity to a pod of an instance. The first pod has affinity to other roles, the other pods only to pods of their
/// instance.
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
    let label_of = |key: &str| labels.and_then(|labels| labels.get(key)).cloned().unwrap_or_default();
    let (group, role) = (label_of(keys::GROUP_NAME), label_of(keys::ROLE_NAME));
    let is_first =
        instance.spec.components.first().is_some_and(|first| first.name == component.name) && id == 0;
    if is_first {
        let first_pods = json!({ "matchLabels": { keys::GROUP_NAME: group, keys::ROLE_NAME: role,
            keys::COMPONENT_NAME: component.name, keys::COMPONENT_ID: "0" } });
        seek_group(template, &topology, &group, first_pods);
    } else {
        let own_term = json!({ "matchLabels": { keys::ROLE_INSTANCE_NAME: instance.metadata.name } });
        follow_instance(template, &topology, &json!({ "labelSelector": own_term }));
    }
    Ok(())
}

/// Adds affinity to the template of an external workload, which all of its pods share.
pub(crate) fn add_external_pod_affinity(
    template: &mut PodTemplate,
    topology: &RoleTopology,
    (group, role): (&str, &str),
    kind: ForeignPodKind,
) {
    let mut labels = Map::new();
    labels.insert(keys::GROUP_NAME.to_owned(), group.into());
    labels.insert(keys::ROLE_NAME.to_owned(), role.into());
    match kind {
        ForeignPodKind::Worker => {
            let own_term =
                json!({ "labelSelector": { "matchLabels": labels }, "matchLabelKeys": [LWS_GROUP_KEY] });
            follow_instance(template, topology, &own_term);
        }
        ForeignPodKind::Single => seek_group(template, topology, group, json!({ "matchLabels": labels })),
        ForeignPodKind::Leader => {
            labels.insert(keys::legacy::LWS_WORKER_INDEX.to_owned(), "0".into());
            seek_group(template, topology, group, json!({ "matchLabels": labels }));
        }
    }
}

/// Prefers domains of related roles and of the group, and spreads the instances of the role, which `instances` selects.
fn seek_group(template: &mut PodTemplate, topology: &RoleTopology, group: &str, instances: Value) {
    let group = json!({ keys::GROUP_NAME: group });
    let partners = (!topology.near.is_empty()).then(|| {
        let roles = json!([{ "key": keys::ROLE_NAME, "operator": "In", "values": topology.near }]);
        json!({ "labelSelector": { "matchLabels": group, "matchExpressions": roles } })
    });
    let all = Some(json!({ "labelSelector": { "matchLabels": group } }));
    let selector =
        |level_index: usize| if level_index < topology.spread { partners.as_ref() } else { all.as_ref() };
    push_preferred_terms(template, topology, selector);
    let Some(key) = topology.spread.checked_sub(1).and_then(|level_index| topology.levels.get(level_index))
    else {
        return;
    };
    let constraints = template.list_mut("topologySpreadConstraints");
    // The API server rejects two constraints of the same kind, and the user's takes precedence.
    let is_present = |entry: &Value| {
        entry["topologyKey"] == key.label.as_str() && entry["whenUnsatisfiable"] == "ScheduleAnyway"
    };
    if !constraints.iter().any(is_present) {
        constraints
            .push(json!({ "maxSkew": 1, "topologyKey": key.label, "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": instances }));
    }
}

/// Prefers domains of the pods of the same instance.
fn follow_instance(template: &mut PodTemplate, topology: &RoleTopology, own_term: &Value) {
    push_preferred_terms(template, topology, |_| Some(own_term));
}

fn push_preferred_terms<'a>(
    template: &mut PodTemplate,
    topology: &RoleTopology,
    selector: impl Fn(usize) -> Option<&'a Value>,
) {
    let terms: Vec<Value> = topology
        .levels
        .iter()
        .enumerate()
        .filter_map(|(level_index, key)| {
            let mut term = selector(level_index)?.clone();
            term["topologyKey"] = key.label.as_str().into();
            Some(json!({ "weight": (MAX_WEIGHT >> level_index).max(1), "podAffinityTerm": term }))
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
        let key = |level: TopologyLevel, label: &str| TopologyKey { level, label: label.to_owned() };
        RoleTopology {
            levels: vec![
                key(TopologyLevel::Node, "host"),
                key(TopologyLevel::Rack, "rack"),
                key(TopologyLevel::Zone, "zone"),
            ],
            near: near.iter().map(|name| (*name).to_owned()).collect(),
            spread,
            automatic: false,
        }
    }

    fn instance(topology: &RoleTopology, components: Value) -> RoleInstance {
        let labels = json!({ keys::GROUP_NAME: "g", keys::ROLE_NAME: "prefill" });
        let metadata = json!({ "name": "g-prefill-0", "labels": labels, "annotations": { keys::TOPOLOGY: topology.text() } });
        serde_json::from_value(json!({ "metadata": metadata, "spec": { "components": components } })).unwrap()
    }

    /// Weight, topology key and label selector of each term.
    fn terms(template: &PodTemplate) -> Vec<(i64, String, Value)> {
        let terms = &template.0["spec"]["affinity"]["podAffinity"][PREFERRED];
        let entry = |term: &Value| {
            let affinity = &term["podAffinityTerm"];
            let key = affinity["topologyKey"].as_str().unwrap().to_owned();
            (term["weight"].as_i64().unwrap(), key, affinity["labelSelector"].clone())
        };
        terms.as_array().unwrap().iter().map(entry).collect()
    }

    #[test]
    fn affinity_adds_partners_and_group_and_keeps_user_terms() {
        let own_term =
            json!({ "weight": 1, "podAffinityTerm": { "topologyKey": "own", "labelSelector": {} } });
        let affinity = json!({ "podAffinity": { PREFERRED: [own_term] }, "nodeAffinity": {} });
        let spread = json!({ "topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "ScheduleAnyway" });
        let mut template = serde_json::from_value(
            json!({ "spec": { "affinity": affinity, "topologySpreadConstraints": [spread] } }),
        )
        .unwrap();
        let entry =
            instance(&topology(&["decode"], 1), json!([{ "name": "prefill", "size": 1, "template": {} }]));
        add_pod_affinity(&mut template, &entry, &entry.spec.components[0], 0).unwrap();

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
        let first_pods = json!({ keys::GROUP_NAME: "g", keys::ROLE_NAME: "prefill",
            keys::COMPONENT_NAME: "prefill", keys::COMPONENT_ID: "0" });
        assert_eq!(constraints[1]["topologyKey"], "host");
        assert_eq!(constraints[1]["labelSelector"]["matchLabels"], first_pods);

        let mut template = PodTemplate::default();
        let mut own_term = template.clone();
        own_term
            .list_mut("topologySpreadConstraints")
            .push(json!({ "topologyKey": "host", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 9 }));
        add_pod_affinity(&mut own_term, &entry, &entry.spec.components[0], 0).unwrap();
        assert_eq!(
            own_term.list_mut("topologySpreadConstraints").len(),
            1,
            "the user's constraint takes precedence"
        );
        let packed = instance(&topology(&[], 0), json!([{ "name": "prefill", "template": {} }]));
        add_pod_affinity(&mut template, &packed, &packed.spec.components[0], 0).unwrap();
        assert_eq!(terms(&template).len(), 3);
        assert!(!template.0["spec"].as_object().unwrap().contains_key("topologySpreadConstraints"));
    }

    #[test]
    fn other_pods_of_an_instance_have_affinity_to_its_pods() {
        let components =
            json!([{ "name": "leader", "template": {} }, { "name": "worker", "size": 2, "template": {} }]);
        let entry = instance(&topology(&["decode"], 1), components);
        let mut template = PodTemplate::default();
        add_pod_affinity(&mut template, &entry, &entry.spec.components[1], 0).unwrap();
        let own_term = json!({ "matchLabels": { keys::ROLE_INSTANCE_NAME: "g-prefill-0" } });
        let expected = [(100, "host"), (50, "rack"), (25, "zone")];
        assert_eq!(
            terms(&template),
            expected.map(|(weight, key)| (weight, key.to_owned(), own_term.clone()))
        );
        assert!(!template.0["spec"].as_object().unwrap().contains_key("topologySpreadConstraints"));
    }

    #[test]
    fn lws_workers_have_affinity_to_their_own_leader() {
        let topology = topology(&["decode"], 1);
        let (mut leader, mut worker) = (PodTemplate::default(), PodTemplate::default());
        add_external_pod_affinity(&mut leader, &topology, ("g", "prefill"), ForeignPodKind::Leader);
        add_external_pod_affinity(&mut worker, &topology, ("g", "prefill"), ForeignPodKind::Worker);
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
