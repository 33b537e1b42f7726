//! Plans for a RoleInstanceSet, carried out in memory: instances become ready when the test marks them.

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use moongate_operator::plan::{self, InstanceSetInput, WriteAction};
use moongate_operator::{ResourceKind, SizeLimits};
use rbg_api::keys;
use rbg_api::v1alpha2::{RoleInstance, RoleInstanceSet};
use serde_json::{Value, json};

/// A set with its instances.
struct InstanceSetFixture {
    set: RoleInstanceSet,
    revisions: Vec<ControllerRevision>,
    instances: Vec<RoleInstance>,
    uids: u32,
    now: Timestamp,
}

impl InstanceSetFixture {
    fn new(replicas: i32, strategy: Value) -> Self {
        let set = json!({
            "metadata": { "name": "s", "namespace": "n", "uid": "set", "generation": 1 },
            "spec": {
                "replicas": replicas,
                "selector": { "matchLabels": { "app": "s" } },
                "updateStrategy": strategy,
                "roleInstanceTemplate": { "components": [{ "name": "c", "size": 1, "template": template("image:1") }] },
            },
        });
        Self {
            set: serde_json::from_value(set).unwrap(),
            revisions: Vec::new(),
            instances: Vec::new(),
            uids: 0,
            now: Timestamp::from_second(1_700_000_000).unwrap(),
        }
    }

    /// Plans and carries out steps until nothing is left to do. Returns the actions, except for statuses and revisions.
    fn run(&mut self) -> Vec<String> {
        let mut done = Vec::new();
        for _ in 0..50 {
            let input = InstanceSetInput {
                hook_result: &|_| None,
                set: &self.set,
                revisions: &self.revisions,
                instances: &self.instances,
                pods: &|_| Vec::new(),
                limits: SizeLimits::default(),
                now: self.now,
            };
            let plan = plan::set(input).unwrap();
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
            WriteAction::Create(manifest) if manifest.kind() == ResourceKind::Revision.name() => {
                self.revisions.push(serde_json::from_value(Value::Object(manifest.0)).unwrap());
                None
            }
            WriteAction::Create(manifest) => {
                let written = format!("create {}", manifest.name());
                let mut object = Value::Object(manifest.0);
                self.uids += 1;
                object["metadata"]["uid"] = format!("u{}", self.uids).into();
                object["metadata"]["generation"] = 1.into();
                self.instances.push(serde_json::from_value(object).unwrap());
                Some(written)
            }
            WriteAction::Replace { name, object, .. } => {
                let at = self
                    .instances
                    .iter()
                    .position(|live| live.metadata.name.as_ref() == Some(&name))
                    .unwrap();
                let mut new: RoleInstance = serde_json::from_value(object).unwrap();
                new.metadata.generation = Some(new.metadata.generation.unwrap() + 1);
                self.instances[at] = new;
                Some(format!("update {name}"))
            }
            WriteAction::Delete { kind: ResourceKind::Instance, name, uid } => {
                self.instances.retain(|live| live.metadata.uid.as_ref() != Some(&uid));
                Some(format!("delete {name}"))
            }
            WriteAction::Patch { kind: ResourceKind::Set, status: true, body, .. } => {
                self.set.status = Some(serde_json::from_value(body["status"].clone()).unwrap());
                None
            }
            WriteAction::Patch { kind: ResourceKind::Revision, name, body, .. } => {
                let mut revisions = self.revisions.iter_mut();
                let stored = revisions.find(|stored| stored.metadata.name.as_ref() == Some(&name)).unwrap();
                stored.revision = body["revision"].as_i64().unwrap();
                None
            }
            WriteAction::Patch { kind: ResourceKind::Instance, name, status: false, body } => {
                let live = self.named(&name);
                let labels = live.metadata.labels.get_or_insert_default();
                let state = body["metadata"]["labels"][keys::LIFECYCLE_STATE].as_str().unwrap();
                labels.insert(keys::LIFECYCLE_STATE.to_owned(), state.to_owned());
                let annotations = live.metadata.annotations.get_or_insert_default();
                for (key, value) in body["metadata"]["annotations"].as_object().unwrap() {
                    annotations.remove(key);
                    annotations.extend(value.as_str().map(|value| (key.clone(), value.to_owned())));
                }
                Some(format!("{name} is {state}"))
            }
            other => panic!("{other:?}"),
        }
    }

    fn named(&mut self, name: &str) -> &mut RoleInstance {
        self.instances.iter_mut().find(|live| live.metadata.name.as_deref() == Some(name)).unwrap()
    }

    /// Adds or removes a lifecycle label of an instance.
    fn guard(&mut self, name: &str, is_guarded: bool) {
        let labels = self.named(name).metadata.labels.get_or_insert_default();
        match is_guarded {
            true => labels.insert("guarded".to_owned(), "yes".to_owned()),
            false => labels.remove("guarded"),
        };
    }

    /// Marks all instances as ready at their present spec.
    fn ready(&mut self) {
        for live in &mut self.instances {
            let status = json!({ "observedGeneration": live.metadata.generation, "conditions": [
                { "type": "RoleInstanceReady", "status": "True", "reason": "Ready", "message": "",
                  "lastTransitionTime": "2023-01-01T00:00:00Z" }] });
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

    fn image(&mut self, image: &str) {
        let template = serde_json::from_value(template(image)).unwrap();
        self.set.spec.role_instance_template.components[0].template = template;
        self.set.metadata.generation = Some(self.set.metadata.generation.unwrap() + 1);
    }
}

fn template(image: &str) -> Value {
    json!({ "spec": { "containers": [{ "name": "c", "image": image }] } })
}

#[test]
fn instances_are_updated_from_the_highest_one_at_a_time() {
    let mut world = InstanceSetFixture::new(3, json!({ "maxUnavailable": 1 }));
    assert_eq!(world.settle(), [["create s-0", "create s-1", "create s-2"]]);
    world.image("image:2");
    assert_eq!(world.settle(), [["update s-2"], ["update s-1"], ["update s-0"]]);
    let status = world.set.status.clone().unwrap();
    assert_eq!(status.updated_ready_replicas, 3);
    assert_eq!(status.current_revision, status.update_revision);
    for (ordinal, live) in world.instances.iter().enumerate() {
        let labels = live.metadata.labels.as_ref().unwrap();
        assert_eq!(labels[keys::ROLE_INSTANCE_INDEX], ordinal.to_string(), "an update keeps the ordinal");
    }
}

#[test]
fn partitioned_instances_keep_their_revision_on_recreation() {
    let mut world = InstanceSetFixture::new(3, json!({ "partition": 2, "maxUnavailable": 1 }));
    world.settle();
    world.image("image:2");
    assert_eq!(world.settle(), [["update s-2"]]);
    world.instances.remove(0);
    assert_eq!(world.settle(), [["create s-0"]]);
    let live = world.instances.iter().find(|live| live.metadata.name.as_deref() == Some("s-0")).unwrap();
    assert_eq!(live.spec.components[0].template.containers()[0]["image"], "image:1");
}

#[test]
fn a_paused_update_makes_no_progress() {
    let mut world = InstanceSetFixture::new(2, json!({ "paused": true, "maxUnavailable": 1 }));
    world.settle();
    world.image("image:2");
    assert!(world.settle().is_empty());
}

#[test]
fn surge_instances_exist_only_during_the_update() {
    let mut world = InstanceSetFixture::new(2, json!({ "maxSurge": 1, "maxUnavailable": 0 }));
    world.settle();
    world.image("image:2");
    let rounds = world.settle();
    assert_eq!(rounds[0], ["create s-2"]);
    assert_eq!(rounds.last().unwrap(), &["delete s-2"]);
    assert_eq!(rounds.concat().iter().filter(|done| done.starts_with("update")).count(), 2);
}

/// Upstream stores this time in memory, where reconciliations of other sets delete it, and does not requeue at its end.
#[test]
fn instance_down_for_ten_seconds_is_updated_beyond_budget() {
    let mut world = InstanceSetFixture::new(2, json!({ "maxUnavailable": 1 }));
    world.settle();
    world.image("image:2");
    for (name, since) in [("s-1", world.now), ("s-0", world.now)] {
        let live =
            world.instances.iter_mut().find(|live| live.metadata.name.as_deref() == Some(name)).unwrap();
        let condition = &mut live.status.as_mut().unwrap().conditions[0];
        condition.status = "False".to_owned();
        condition.last_transition_time = Some(Time(since));
    }
    let since = world.now;
    let after = |seconds: u64| since.checked_add(std::time::Duration::from_secs(seconds)).unwrap();
    world.now = after(9);
    assert_eq!(world.run(), [""; 0]);
    let InstanceSetFixture { set, revisions, instances, now, .. } = &world;
    let input = InstanceSetInput {
        hook_result: &|_| None,
        set,
        revisions,
        instances,
        pods: &|_| Vec::new(),
        limits: SizeLimits::default(),
        now: *now,
    };
    assert_eq!(plan::set(input).unwrap().requeue_at, Some(after(10)));
    world.now = after(10);
    assert_eq!(world.run(), ["update s-1", "update s-0"]);
}

#[test]
fn an_earlier_spec_reuses_its_revision() {
    let mut world = InstanceSetFixture::new(1, json!({ "maxUnavailable": 1 }));
    world.settle();
    let first = world.set.status.clone().unwrap().update_revision;
    world.image("image:2");
    world.settle();
    world.image("image:1");
    let input = InstanceSetInput {
        hook_result: &|_| None,
        set: &world.set,
        revisions: &world.revisions,
        instances: &world.instances,
        pods: &|_| Vec::new(),
        limits: SizeLimits::default(),
        now: world.now,
    };
    let renumbered = plan::set(input).unwrap().steps.into_iter().any(|step| {
        matches!(step.action, WriteAction::Patch { kind: ResourceKind::Revision, name, .. } if Some(&name) == first.as_ref())
    });
    assert!(renumbered);
}

/// An instance with a lifecycle label waits until the label is removed.
#[test]
fn an_instance_with_a_lifecycle_hook_waits() {
    let hook = json!({ "labelsHandler": { "guarded": "yes" }, "markPodNotReady": true });
    let mut world = InstanceSetFixture::new(2, json!({ "maxUnavailable": 1 }));
    world.set.spec.lifecycle =
        Some(serde_json::from_value(json!({ "inPlaceUpdate": hook, "preDelete": hook })).unwrap());
    world.settle();
    world.guard("s-1", true);
    world.image("image:2");
    assert_eq!(world.settle(), [["s-1 is PreparingUpdate"]], "s-0 is not touched while s-1 waits");
    assert_eq!(world.instances[1].metadata.annotations.as_ref().unwrap()[keys::LIFECYCLE_NOT_READY], "true");

    world.image("image:1");
    assert_eq!(world.settle(), [["s-1 is Normal"]], "the update was reverted");
    assert!(
        !world.instances[1].metadata.annotations.as_ref().unwrap().contains_key(keys::LIFECYCLE_NOT_READY)
    );

    world.image("image:2");
    world.settle();
    world.guard("s-1", false);
    let rounds = world.settle();
    // Without its label, an instance stays in `Updated`.
    assert_eq!(rounds, [vec!["update s-1"], vec!["update s-0", "s-1 is Updated"], vec!["s-0 is Updated"]]);
    world.guard("s-1", true);
    assert_eq!(world.settle(), [["s-1 is Normal"]]);

    world.set.spec.replicas = Some(1);
    assert_eq!(world.settle(), [["s-1 is PreparingDelete"]]);
    world.set.spec.replicas = Some(2);
    assert_eq!(world.settle(), [["s-1 is Normal"]]);
    world.set.spec.replicas = Some(1);
    world.settle();
    world.guard("s-1", false);
    assert_eq!(world.settle(), [["delete s-1"]]);
}

/// The memory of a plan is bounded; the next plan continues.
#[test]
fn large_sets_are_created_by_several_plans() {
    for pattern in ["Stateful", "Stateless"] {
        let mut world = InstanceSetFixture::new(2500, json!({}));
        let annotation = (keys::ROLE_INSTANCE_PATTERN.to_owned(), pattern.to_owned());
        world.set.metadata.annotations = Some([annotation].into());
        let (set, limits) = (&world.set, SizeLimits::default());
        let input = InstanceSetInput {
            hook_result: &|_| None,
            set,
            revisions: &[],
            instances: &[],
            pods: &|_| Vec::new(),
            limits,
            now: world.now,
        };
        let plan = plan::set(input).unwrap();
        assert_eq!((plan.steps.len(), plan.is_truncated), (1000, true), "{pattern}");
        world.run();
        assert_eq!(world.instances.len(), 2500, "{pattern}");
    }
}

/// Numbers of instances that are updated in each round, with the smallest number of instances that stay ready.
fn rounds(strategy: Value) -> (Vec<usize>, Vec<Vec<String>>) {
    let mut world = InstanceSetFixture::new(3, strategy);
    world.settle();
    world.image("image:2");
    let rounds = world.settle();
    let updated = |round: &Vec<String>| round.iter().filter(|step| step.starts_with("update")).count();
    (rounds.iter().map(updated).collect(), rounds)
}

#[test]
fn surge_and_unavailable_instances_add_up() {
    let (updates, steps) = rounds(json!({ "maxSurge": 1, "maxUnavailable": 1 }));
    assert!(steps[0].contains(&"create s-3".to_owned()), "{steps:?}");
    assert!(updates.iter().all(|count| *count <= 2) && updates.contains(&2), "{steps:?}");
    assert_eq!(updates.iter().sum::<usize>(), 3, "{steps:?}");
    // More surge than replicas creates no more than replicas.
    let (_, steps) = rounds(json!({ "maxSurge": 10, "maxUnavailable": 0 }));
    let created = steps.concat().iter().filter(|step| step.starts_with("create")).count();
    assert_eq!(created, 3, "{steps:?}");
    assert_eq!(steps.concat().iter().filter(|step| step.starts_with("delete")).count(), 3, "{steps:?}");
}

#[test]
fn a_lower_partition_updates_more_instances() {
    let mut world = InstanceSetFixture::new(4, json!({ "partition": 3, "maxUnavailable": 1 }));
    world.settle();
    world.image("image:2");
    assert_eq!(world.settle(), [["update s-3"]]);
    for (partition, updates) in [(1, vec!["update s-2", "update s-1"]), (0, vec!["update s-0"])] {
        let strategy = json!({ "partition": partition, "maxUnavailable": 1 });
        world.set.spec.update_strategy = serde_json::from_value(strategy).unwrap();
        assert_eq!(world.settle().concat(), updates);
    }
}
