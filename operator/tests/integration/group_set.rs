//! Plans for a RoleBasedGroupSet, carried out in memory.

use k8s_openapi::jiff::Timestamp;
use moongate_operator::plan::{self, GroupSetInput, MAX_UNAVAILABLE, WriteAction};
use moongate_operator::{ResourceKind, SizeLimits};
use rbg_api::keys;
use rbg_api::v1alpha2::{RoleBasedGroup, RoleBasedGroupSet};
use serde_json::{Value, json};

/// A set with its groups.
struct GroupSetFixture {
    set: RoleBasedGroupSet,
    groups: Vec<RoleBasedGroup>,
    others: Vec<String>,
    uids: u32,
}

impl GroupSetFixture {
    fn new(replicas: i32) -> Self {
        let set = json!({
            "metadata": { "name": "s", "namespace": "n", "uid": "set", "generation": 1 },
            "spec": { "replicas": replicas, "groupTemplate": {
                "labels": { "app": "a" },
                "metadata": { "annotations": { "note": "b" } },
                "spec": {
                    "roleTemplates": [{ "name": "t", "template": { "spec": {} } }],
                    "roles": [{ "name": "r", "replicas": 2, "scalingAdapter": { "enable": true },
                        "standalonePattern": { "templateRef": { "name": "t", "patch": { "spec": { "hostname": null } } } } }],
                },
            } },
        });
        Self { set: serde_json::from_value(set).unwrap(), groups: Vec::new(), others: Vec::new(), uids: 0 }
    }

    /// Plans and carries out steps until nothing is left to do. Returns the actions on groups.
    fn run(&mut self) -> Vec<String> {
        let mut done = Vec::new();
        for _ in 0..50 {
            let names: Vec<String> =
                self.groups.iter().map(name).chain(self.others.iter().cloned()).collect();
            let exists = |name: &str| names.iter().any(|other| other == name);
            let now = Timestamp::from_second(1_700_000_000).unwrap();
            let limits = SizeLimits::default();
            let input = GroupSetInput { set: &self.set, groups: &self.groups, exists: &exists, limits, now };
            let plan = plan::group_set(input).unwrap();
            if plan.steps.is_empty() {
                return done;
            }
            for step in plan.steps {
                done.extend(self.write(step.action));
            }
        }
        panic!("the plan does not end");
    }

    fn write(&mut self, action: WriteAction) -> Option<String> {
        match action {
            WriteAction::Create(manifest) => {
                let mut object = Value::Object(manifest.0);
                self.uids += 1;
                object["metadata"]["uid"] = format!("u{}", self.uids).into();
                object["metadata"]["generation"] = 1.into();
                // The API server records the fields of our writes.
                let fields = |member: &str| -> Value {
                    let keys = object["metadata"][member].as_object().into_iter().flatten();
                    keys.map(|(key, _)| (format!("f:{key}"), json!({})))
                        .collect::<serde_json::Map<_, _>>()
                        .into()
                };
                let fields = json!({ "f:metadata": {
                    "f:labels": fields("labels"), "f:annotations": fields("annotations") } });
                object["metadata"]["managedFields"] = json!([{ "manager": "rbg", "fieldsV1": fields }]);
                let group: RoleBasedGroup = serde_json::from_value(object).unwrap();
                let written = format!("create {}", name(&group));
                self.groups.push(group);
                Some(written)
            }
            WriteAction::Replace { kind: ResourceKind::Group, name: wanted, object } => {
                let at = self.groups.iter().position(|live| name(live) == wanted).unwrap();
                let mut new: RoleBasedGroup = serde_json::from_value(object).unwrap();
                new.metadata.generation = new.metadata.generation.map(|generation| generation + 1);
                self.groups[at] = new;
                Some(format!("update {wanted}"))
            }
            WriteAction::Delete { kind: ResourceKind::Group, name, uid } => {
                self.groups.retain(|live| live.metadata.uid.as_ref() != Some(&uid));
                Some(format!("delete {name}"))
            }
            WriteAction::Patch { kind: ResourceKind::GroupSet, status: true, body, .. } => {
                self.set.status = Some(serde_json::from_value(body["status"].clone()).unwrap());
                None
            }
            other => panic!("{other:?}"),
        }
    }

    /// Marks all groups as ready at their present spec.
    fn ready(&mut self) {
        for live in &mut self.groups {
            let conditions = json!([{ "type": "Ready", "status": "True" }]);
            let status = json!({ "observedGeneration": live.metadata.generation, "conditions": conditions });
            live.status = Some(serde_json::from_value(status).unwrap());
        }
    }

    fn settle(&mut self) -> Vec<Vec<String>> {
        let mut rounds = Vec::new();
        loop {
            let done = self.run();
            if done.is_empty() {
                return rounds;
            }
            rounds.push(done);
            self.ready();
        }
    }

    fn condition(&self, kind: &str) -> (String, String) {
        let conditions = &self.set.status.as_ref().unwrap().conditions;
        let condition = conditions.iter().find(|condition| condition.kind == kind).unwrap();
        (condition.status.clone(), condition.reason.clone())
    }

    fn change(&mut self) {
        let template = &mut self.set.spec.group_template;
        template.spec.roles[0].min_ready_seconds += 1;
    }
}

fn name(group: &RoleBasedGroup) -> String {
    group.metadata.name.clone().unwrap()
}

#[test]
fn groups_get_all_fields_of_the_template() {
    let mut world = GroupSetFixture::new(2);
    assert_eq!(world.run(), ["create s-0", "create s-1"]);
    assert_eq!(world.condition("Ready").1, "ReplicasNotReady");
    world.ready();
    assert!(world.settle().is_empty());
    assert_eq!(world.condition("Ready"), ("True".to_owned(), "AllReplicasReady".to_owned()));
    let status = world.set.status.clone().unwrap();
    assert_eq!((status.replicas, status.ready_replicas, status.observed_generation), (2, 2, Some(1)));
    let group = &world.groups[1];
    assert_eq!(
        group.spec, world.set.spec.group_template.spec,
        "role templates and nulls of patches included"
    );
    let labels = group.metadata.labels.as_ref().unwrap();
    assert_eq!((labels["app"].as_str(), labels[keys::GROUPSET_NAME].as_str()), ("a", "s"));
    assert_eq!(labels[keys::GROUPSET_INDEX], "1");
    assert_eq!(group.metadata.annotations.as_ref().unwrap()["note"], "b");
    let owner = &group.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.controller), ("RoleBasedGroupSet", Some(true)));
}

#[test]
fn groups_are_updated_one_by_one_from_the_highest() {
    let mut world = GroupSetFixture::new(3);
    world.settle();
    world.change();
    assert_eq!(world.run(), ["update s-2"]);
    assert_eq!(world.condition("RollingUpdateInProgress").0, "True");
    world.ready();
    assert_eq!(world.settle(), [["update s-1"], ["update s-0"]]);
    assert_eq!(world.condition("RollingUpdateInProgress").0, "False");
    let annotations = [(MAX_UNAVAILABLE.to_owned(), "50%".to_owned())].into();
    world.set.metadata.annotations = Some(annotations);
    world.change();
    assert_eq!(world.settle(), [vec!["update s-2", "update s-1"], vec!["update s-0"]]);
}

#[test]
fn a_group_out_of_service_is_updated_at_once() {
    let mut world = GroupSetFixture::new(3);
    world.settle();
    world.change();
    world.run();
    // The new template does not start; the next change updates the same group, and no other.
    world.change();
    assert_eq!(world.run(), ["update s-2"]);
    world.groups[0].status = None;
    assert_eq!(world.run(), ["update s-0"]);
}

#[test]
fn replicas_of_autoscalers_and_foreign_fields_stay() {
    let mut world = GroupSetFixture::new(1);
    world.settle();
    let group = &mut world.groups[0];
    group.spec.roles[0].replicas = 7;
    group.metadata.labels.as_mut().unwrap().insert("theirs".into(), "x".into());
    assert!(world.settle().is_empty());
    world.change();
    world.set.spec.group_template.labels.clear();
    assert_eq!(world.settle(), [["update s-0"]]);
    let group = &world.groups[0];
    assert_eq!((group.spec.roles[0].replicas, group.spec.roles[0].min_ready_seconds), (7, 1));
    let labels = group.metadata.labels.as_ref().unwrap();
    assert!(labels.contains_key("theirs") && !labels.contains_key("app"));
}

#[test]
fn surplus_groups_are_deleted_and_conflicts_reported() {
    let mut world = GroupSetFixture::new(3);
    world.settle();
    world.set.spec.replicas = 1;
    assert_eq!(world.settle(), [["delete s-2", "delete s-1"]]);
    world.others.push("s-1".into());
    world.set.spec.replicas = 3;
    assert_eq!(world.settle(), [["create s-2"]]);
    assert_eq!(world.condition("Ready"), ("False".to_owned(), "NameConflict".to_owned()));
}

#[test]
fn the_older_of_two_groups_with_an_index_is_kept() {
    let mut world = GroupSetFixture::new(1);
    world.settle();
    let mut twin = world.groups[0].clone();
    twin.metadata.name = Some("other".into());
    twin.metadata.uid = Some("twin".into());
    twin.metadata.creation_timestamp = serde_json::from_value(json!("2023-01-02T00:00:00Z")).unwrap();
    world.groups[0].metadata.creation_timestamp =
        serde_json::from_value(json!("2023-01-01T00:00:00Z")).unwrap();
    world.groups.insert(0, twin);
    assert_eq!(world.settle(), [["delete other"]]);
}
