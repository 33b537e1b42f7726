//! An in-memory API server, limited to what the operator's writes need.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use serde_json::{Map, Value, json};

use super::simulated_controllers::{self, NextResourceState};
use super::simulated_stateful_set::{self, StatefulSetAction};
use super::step::manifest_template_is_in;
use crate::ResourceKind;
use crate::plan::WriteAction;
use crate::resource_cache::{ResourceCache, ResourceKey};

/// Schemas of the custom kinds, for their defaults.
static SCHEMAS: LazyLock<BTreeMap<ResourceKind, Value>> = LazyLock::new(|| {
    let schemas = rbg_api::crds::all().into_iter().filter_map(|crd| {
        let kind = ResourceKind::parse(&crd.spec.names.kind)?;
        let version = crd.spec.versions.into_iter().find(|version| version.name == "v1alpha2")?;
        let schema = version.schema?.open_api_v3_schema?;
        Some((kind, serde_json::to_value(schema).ok()?))
    });
    schemas.collect()
});

/// A change of an object, as a watch reports it.
#[derive(Debug, Clone)]
pub enum ResourceChange {
    /// The object was created or changed.
    Present(ResourceKind, Value),
    /// The object was deleted; the value is its last state.
    Gone(ResourceKind, Value),
}

impl ResourceChange {
    /// Applies the change to the objects that an operator has observed. Returns the objects to reconcile.
    pub fn apply_to(self, observed: &mut ResourceCache) -> Vec<ResourceKey> {
        match self {
            Self::Present(kind, object) => serde_json::from_value::<DynamicObject>(object)
                .map(|object| observed.upsert(kind, object))
                .unwrap_or_default(),
            Self::Gone(kind, object) => {
                let member = |member: &str| text(&object["metadata"][member]);
                let key = ResourceKey { kind, namespace: member("namespace"), name: member("name") };
                observed.remove(&key, &member("uid"))
            }
        }
    }
}

/// Why a write is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SimulatedWriteError {
    #[error("{0} is gone")]
    Gone(String),
    #[error("{0} was replaced by another object")]
    Replaced(String),
    #[error("{0} has changed")]
    Changed(String),
    /// Injected by tests.
    #[error("the API server is overloaded")]
    Overloaded,
}

/// Behaviour of a simulated container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContainerOutcome {
    /// It runs, or completes successfully.
    Runs,
    /// It exits with this reason and exit code.
    Exits(&'static str, i32),
    /// It does not start, for this reason.
    NotStarted(&'static str),
}

/// The objects of one namespace.
#[derive(Debug, Clone)]
pub struct SimulatedApiServer {
    objects: BTreeMap<(ResourceKind, String), Value>,
    /// Objects that Kubernetes' own controllers still have to act on.
    pub unsettled: BTreeSet<(ResourceKind, String)>,
    version: u64,
    uids: u64,
    /// Present time of the simulation.
    pub now: Timestamp,
    /// Behaviour of containers by image. By default, all run.
    pub container_outcome: fn(image: &str) -> ContainerOutcome,
    /// Whether a node has room for a pod. By default, one has.
    pub is_schedulable: fn(pod: &Value) -> bool,
}

impl SimulatedApiServer {
    /// Creates a server without objects.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        let objects = BTreeMap::new();
        Self {
            objects,
            unsettled: BTreeSet::new(),
            version: 0,
            uids: 0,
            now,
            container_outcome: |_| ContainerOutcome::Runs,
            is_schedulable: |_| true,
        }
    }

    /// All objects of a kind, by name.
    pub fn all(&self, kind: ResourceKind) -> impl Iterator<Item = &Value> {
        self.objects.iter().filter(move |((of, _), _)| *of == kind).map(|(_, object)| object)
    }

    /// All objects of all kinds.
    pub fn objects(&self) -> impl Iterator<Item = (ResourceKind, &Value)> {
        self.objects.iter().map(|((kind, _), object)| (*kind, object))
    }

    /// All objects as a watch that starts now reports them.
    #[must_use]
    pub fn initial_changes(&self) -> Vec<ResourceChange> {
        self.objects().map(|(kind, object)| ResourceChange::Present(kind, object.clone())).collect()
    }

    /// Looks up an object by name.
    #[must_use]
    pub fn get(&self, kind: ResourceKind, name: &str) -> Option<&Value> {
        self.objects.get(&(kind, name.to_owned()))
    }

    /// Inserts an object with its UID, version and generation, for example one that another controller created.
    pub fn restore(&mut self, kind: ResourceKind, mut object: Value) {
        let version = object["metadata"]["resourceVersion"].as_str().and_then(|version| version.parse().ok());
        self.version = self.version.max(version.unwrap_or(0));
        object["apiVersion"] = kind.api_version().into();
        object["kind"] = kind.name().into();
        self.insert(kind, object);
    }

    fn next_state(&self, kind: ResourceKind, object: &Value) -> Option<NextResourceState> {
        let is_pending = kind == ResourceKind::Pod && object["spec"].get("nodeName").is_none();
        if is_pending
            && object["metadata"].get("deletionTimestamp").is_none()
            && !(self.is_schedulable)(object)
        {
            return simulated_controllers::unschedulable(object);
        }
        simulated_controllers::next_state(kind, object, self.container_outcome)
    }

    fn insert(&mut self, kind: ResourceKind, object: Value) {
        let key = (kind, text(&object["metadata"]["name"]));
        let is_unsettled = match kind {
            ResourceKind::StatefulSet => self.next_action(&object).is_some(),
            _ => self.next_state(kind, &object).is_some(),
        };
        match is_unsettled {
            true => self.unsettled.insert(key.clone()),
            false => self.unsettled.remove(&key),
        };
        self.objects.insert(key, object);
    }

    /// Creates an object, as `kubectl create` does.
    pub fn create(&mut self, kind: ResourceKind, mut object: Value) -> ResourceChange {
        self.version += 1;
        self.uids += 1;
        let created = self.now_rfc3339();
        let metadata = &mut object["metadata"];
        if metadata["namespace"].is_null() && !kind.is_of_cluster() {
            metadata["namespace"] = "default".into();
        }
        metadata["uid"] = format!("uid-{}", self.uids).into();
        metadata["generation"] = 1.into();
        metadata["resourceVersion"] = self.version.to_string().into();
        metadata["creationTimestamp"] = created.into();
        apply_defaults(kind, &mut object);
        self.insert(kind, object.clone());
        ResourceChange::Present(kind, object)
    }

    /// The time without a fraction, as Kubernetes formats it.
    fn now_rfc3339(&self) -> String {
        Timestamp::from_second(self.now.as_second()).unwrap_or(self.now).to_string()
    }

    /// Replaces the object of that name. Nothing happens if it is unchanged.
    pub fn put(&mut self, kind: ResourceKind, mut object: Value) -> ResourceChange {
        apply_defaults(kind, &mut object);
        let key = (kind, text(&object["metadata"]["name"]));
        let live = self.objects.get(&key).unwrap_or(&Value::Null);
        if *live == object {
            return ResourceChange::Present(kind, object);
        }
        self.version += 1;
        let generation = live["metadata"]["generation"].as_i64().unwrap_or(1);
        let same_spec = live["spec"] == object["spec"];
        if kind == ResourceKind::StatefulSet && !manifest_template_is_in(&object, live) {
            object["status"]["updateRevision"] = format!("{}-{}", key.1, self.version).into();
        }
        object["metadata"]["generation"] = if same_spec { generation } else { generation + 1 }.into();
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.insert(kind, object.clone());
        ResourceChange::Present(kind, object)
    }

    /// Deletes an object and the objects that it owns. Pods stay until their kubelet has stopped them.
    pub fn remove(&mut self, kind: ResourceKind, name: &str) -> Vec<ResourceChange> {
        let key = (kind, name.to_owned());
        self.unsettled.remove(&key);
        let Some(mut gone) = self.objects.remove(&key) else { return Vec::new() };
        self.version += 1;
        gone["metadata"]["resourceVersion"] = self.version.to_string().into();
        let uid = gone["metadata"]["uid"].clone();
        let owned = |object: &Value| {
            object["metadata"]["ownerReferences"]
                .as_array()
                .into_iter()
                .flatten()
                .any(|owner| owner["uid"] == uid)
        };
        let owned: Vec<(ResourceKind, String)> =
            self.objects.iter().filter(|(_, object)| owned(object)).map(|(key, _)| key.clone()).collect();
        let mut changes = vec![ResourceChange::Gone(kind, gone)];
        for (kind, name) in owned {
            changes.extend(match kind {
                ResourceKind::Pod | ResourceKind::WarmupPod => {
                    self.end_pod(kind, &name).into_iter().collect()
                }
                _ => self.remove(kind, &name),
            });
        }
        changes
    }

    fn end_pod(&mut self, kind: ResourceKind, name: &str) -> Option<ResourceChange> {
        let mut pod = self.get(kind, name)?.clone();
        pod["metadata"]["deletionTimestamp"] = self.now_rfc3339().into();
        Some(self.put(kind, pod))
    }

    /// Performs the next action of Kubernetes' own controllers on one object.
    pub fn advance(&mut self, kind: ResourceKind, name: &str) -> Vec<ResourceChange> {
        if kind == ResourceKind::StatefulSet {
            return self.advance_stateful_set(name);
        }
        match self.get(kind, name).and_then(|live| self.next_state(kind, live)) {
            Some(NextResourceState::Present(object)) => vec![self.put(kind, object)],
            Some(NextResourceState::Gone) => self.remove(kind, name),
            None => Vec::new(),
        }
    }

    fn next_action(&self, set: &Value) -> Option<StatefulSetAction> {
        let is_owned = |pod: &&Value| pod["metadata"]["ownerReferences"][0]["uid"] == set["metadata"]["uid"];
        let pods: Vec<&Value> = self.all(ResourceKind::ForeignPod).filter(is_owned).collect();
        simulated_stateful_set::next_action(set, &pods)
    }

    fn advance_stateful_set(&mut self, name: &str) -> Vec<ResourceChange> {
        let Some(set) = self.get(ResourceKind::StatefulSet, name).cloned() else { return Vec::new() };
        let changes = match self.next_action(&set) {
            Some(StatefulSetAction::UpdateStatus(set)) => {
                return vec![self.put(ResourceKind::StatefulSet, set)];
            }
            Some(StatefulSetAction::CreatePod(pod)) => vec![self.create(ResourceKind::ForeignPod, pod)],
            Some(StatefulSetAction::DeletePod(pod)) => self.remove(ResourceKind::ForeignPod, &pod),
            None => Vec::new(),
        };
        // Whether there is more to do depends on its pods.
        self.insert(ResourceKind::StatefulSet, set);
        changes
    }

    /// Performs one write of the operator. The first change is the written object.
    ///
    /// # Errors
    /// When the object is not in the state that the write requires.
    pub fn write(&mut self, action: &WriteAction) -> Result<Vec<ResourceChange>, SimulatedWriteError> {
        match action {
            WriteAction::Apply(manifest) | WriteAction::Create(manifest) => {
                let Some(kind) = ResourceKind::from_manifest(manifest) else { return Ok(Vec::new()) };
                let object = Value::Object(manifest.0.clone());
                let change = match (self.get(kind, manifest.name()).cloned(), action) {
                    (None, _) => self.create(kind, object),
                    (Some(live), WriteAction::Create(_)) => ResourceChange::Present(kind, live),
                    (Some(live), _) => self.put(kind, apply_manifest(live, object)),
                };
                Ok(vec![change])
            }
            WriteAction::Replace { kind, name, object } => {
                let live = self.get_matching(*kind, name, &object["metadata"])?;
                let mut object = object.clone();
                object["status"] = live["status"].clone();
                Ok(vec![self.put(*kind, object)])
            }
            WriteAction::Patch { kind, name, status, body } => {
                let mut live = self.get_matching(*kind, name, &body["metadata"])?;
                let mut body = body.clone();
                if kind.is_custom() || *kind == ResourceKind::Revision {
                    merge(&mut live, &body);
                } else if *status {
                    merge(&mut live["metadata"], &body["metadata"]);
                    merge_list(&mut live["status"]["conditions"], &body["status"]["conditions"], "type");
                } else {
                    let spec = body.as_object_mut().and_then(|body| body.remove("spec")).unwrap_or_default();
                    merge(&mut live, &body);
                    merge_list(&mut live["spec"]["containers"], &spec["containers"], "name");
                }
                Ok(vec![self.put(*kind, live)])
            }
            WriteAction::Delete { kind, name, uid } => {
                if self.get_matching(*kind, name, &json!({ "uid": uid })).is_err() {
                    return Ok(Vec::new());
                }
                Ok(match kind {
                    ResourceKind::Pod | ResourceKind::WarmupPod => {
                        self.end_pod(*kind, name).into_iter().collect()
                    }
                    _ => self.remove(*kind, name),
                })
            }
            WriteAction::ForceDelete { name, uid } => {
                let live = self.get_matching(ResourceKind::Pod, name, &json!({ "uid": uid }));
                Ok(if live.is_ok() { self.remove(ResourceKind::Pod, name) } else { Vec::new() })
            }
        }
    }

    /// The live object, if its UID and resource version match.
    fn get_matching(
        &self,
        kind: ResourceKind,
        name: &str,
        metadata: &Value,
    ) -> Result<Value, SimulatedWriteError> {
        let live = self.get(kind, name).ok_or_else(|| SimulatedWriteError::Gone(name.to_owned()))?;
        let is_other =
            |member: &str| metadata.get(member).is_some_and(|item| *item != live["metadata"][member]);
        if is_other("uid") {
            return Err(SimulatedWriteError::Replaced(name.to_owned()));
        }
        if is_other("resourceVersion") {
            return Err(SimulatedWriteError::Changed(name.to_owned()));
        }
        Ok(live.clone())
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Result of server-side apply with a single field manager.
fn apply_manifest(live: Value, mut applied: Value) -> Value {
    let mut metadata = live["metadata"].clone();
    // They describe an earlier manifest.
    metadata.as_object_mut().into_iter().for_each(|metadata| drop(metadata.remove("managedFields")));
    merge(&mut metadata, &applied["metadata"]);
    applied["metadata"] = metadata;
    if let Some(status) = live.get("status") {
        applied["status"] = status.clone();
    }
    applied
}

/// Applies a JSON merge patch.
fn merge(live: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *live = patch.clone();
        return;
    };
    if !live.is_object() {
        *live = Value::Object(Map::new());
    }
    let Value::Object(members) = live else { return };
    for (name, value) in patch {
        match value {
            Value::Null => drop(members.remove(name)),
            value => merge(members.entry(name.as_str()).or_insert(Value::Null), value),
        }
    }
}

/// Merges lists whose items are identified by one of their fields.
fn merge_list(live: &mut Value, patch: &Value, key: &str) {
    let Some(patch) = patch.as_array() else { return };
    if !live.is_array() {
        *live = json!([]);
    }
    let Value::Array(live) = live else { return };
    for item in patch {
        match live.iter_mut().find(|live| live[key] == item[key]) {
            Some(live) => merge(live, item),
            None => {
                let mut new = Value::Null;
                merge(&mut new, item);
                live.push(new);
            }
        }
    }
}

fn apply_defaults(kind: ResourceKind, object: &mut Value) {
    if let Some(schema) = SCHEMAS.get(&kind) {
        fill_defaults(schema, object);
    }
}

/// Fills in the defaults of a schema.
fn fill_defaults(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
                if let Some(default) =
                    schema.get("default").filter(|_| members.get(name).is_none_or(Value::is_null))
                {
                    members.insert(name.clone(), default.clone());
                }
                if let Some(member) = members.get_mut(name) {
                    fill_defaults(schema, member);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| fill_defaults(&schema["items"], item)),
        _ => {}
    }
}
