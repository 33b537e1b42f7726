//! An API server in memory: as much of one as the operator's writes need.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::kubelet::{self, Next};
use crate::Kind;
use crate::plan::Action;

/// Schemas of the kinds that are ours, for their defaults.
static SCHEMAS: LazyLock<BTreeMap<Kind, Value>> = LazyLock::new(|| {
    let schemas = rbg_api::crds::all().into_iter().filter_map(|crd| {
        let kind = Kind::named(&crd.spec.names.kind)?;
        let version = crd.spec.versions.into_iter().find(|version| version.name == "v1alpha2")?;
        let schema = version.schema?.open_api_v3_schema?;
        Some((kind, serde_json::to_value(schema).ok()?))
    });
    schemas.collect()
});

/// What watches tell.
#[derive(Debug, Clone)]
pub enum Change {
    /// An object is so now.
    Is(Kind, Value),
    /// It is no more; this is what it was.
    Gone(Kind, Value),
}

/// What becomes of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It does what it is for.
    Works,
    /// It ends, with this reason and exit code.
    Ends(&'static str, i32),
    /// It does not start, for this reason.
    Waits(&'static str),
}

/// The objects of one namespace.
#[derive(Debug, Clone)]
pub struct Server {
    objects: BTreeMap<(Kind, String), Value>,
    /// Objects that Kubernetes itself has still to do something about.
    pub restless: BTreeSet<(Kind, String)>,
    version: u64,
    uids: u64,
    /// The time.
    pub now: Timestamp,
    /// What becomes of containers of an image. If nothing else is said, all work.
    pub fate: fn(image: &str) -> Fate,
}

impl Server {
    /// One without objects.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        let objects = BTreeMap::new();
        Self { objects, restless: BTreeSet::new(), version: 0, uids: 0, now, fate: |_| Fate::Works }
    }

    /// All objects of a kind, by name.
    pub fn all(&self, kind: Kind) -> impl Iterator<Item = &Value> {
        self.objects.iter().filter(move |((of, _), _)| *of == kind).map(|(_, object)| object)
    }

    /// All objects.
    pub fn everything(&self) -> impl Iterator<Item = (Kind, &Value)> {
        self.objects.iter().map(|((kind, _), object)| (*kind, object))
    }

    /// An object by name.
    #[must_use]
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Value> {
        self.objects.get(&(kind, name.to_owned()))
    }

    /// As it is, with its UID, version and generation: what another controller left behind.
    pub fn restore(&mut self, kind: Kind, mut object: Value) {
        let version = object["metadata"]["resourceVersion"].as_str().and_then(|version| version.parse().ok());
        self.version = self.version.max(version.unwrap_or(0));
        object["apiVersion"] = kind.api_version().into();
        object["kind"] = kind.name().into();
        self.insert(kind, object);
    }

    fn insert(&mut self, kind: Kind, object: Value) {
        let key = (kind, text(&object["metadata"]["name"]));
        match kubelet::next(kind, &object, self.fate) {
            Some(_) => self.restless.insert(key.clone()),
            None => self.restless.remove(&key),
        };
        self.objects.insert(key, object);
    }

    /// A new object, as someone's `kubectl create` makes it.
    pub fn create(&mut self, kind: Kind, mut object: Value) -> Change {
        self.version += 1;
        self.uids += 1;
        let made = self.seconds();
        let metadata = &mut object["metadata"];
        if metadata["namespace"].is_null() && !kind.is_of_cluster() {
            metadata["namespace"] = "default".into();
        }
        metadata["uid"] = format!("uid-{}", self.uids).into();
        metadata["generation"] = 1.into();
        metadata["resourceVersion"] = self.version.to_string().into();
        metadata["creationTimestamp"] = made.into();
        defaulted(kind, &mut object);
        self.insert(kind, object.clone());
        Change::Is(kind, object)
    }

    /// The time, without a fraction, as Kubernetes has it.
    fn seconds(&self) -> String {
        Timestamp::from_second(self.now.as_second()).unwrap_or(self.now).to_string()
    }

    /// Puts an object in the place of the one of that name. Nothing happens if it is the same.
    pub fn put(&mut self, kind: Kind, mut object: Value) -> Change {
        defaulted(kind, &mut object);
        let key = (kind, text(&object["metadata"]["name"]));
        let live = self.objects.get(&key).unwrap_or(&Value::Null);
        if *live == object {
            return Change::Is(kind, object);
        }
        self.version += 1;
        let generation = live["metadata"]["generation"].as_i64().unwrap_or(1);
        let same_spec = live["spec"] == object["spec"];
        object["metadata"]["generation"] = if same_spec { generation } else { generation + 1 }.into();
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.insert(kind, object.clone());
        Change::Is(kind, object)
    }

    /// Takes an object away, and what it owned with it. Pods live until their kubelet has ended them.
    pub fn remove(&mut self, kind: Kind, name: &str) -> Vec<Change> {
        let key = (kind, name.to_owned());
        self.restless.remove(&key);
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
        let owned: Vec<(Kind, String)> =
            self.objects.iter().filter(|(_, object)| owned(object)).map(|(key, _)| key.clone()).collect();
        let mut changes = vec![Change::Gone(kind, gone)];
        for (kind, name) in owned {
            changes.extend(match kind {
                Kind::Pod | Kind::WarmupPod => self.end_pod(kind, &name).into_iter().collect(),
                _ => self.remove(kind, &name),
            });
        }
        changes
    }

    fn end_pod(&mut self, kind: Kind, name: &str) -> Option<Change> {
        let mut pod = self.get(kind, name)?.clone();
        pod["metadata"]["deletionTimestamp"] = self.seconds().into();
        Some(self.put(kind, pod))
    }

    /// What Kubernetes does next about one object.
    pub fn advance(&mut self, kind: Kind, name: &str) -> Vec<Change> {
        match self.get(kind, name).and_then(|live| kubelet::next(kind, live, self.fate)) {
            Some(Next::Is(object)) => vec![self.put(kind, object)],
            Some(Next::Gone) => self.remove(kind, name),
            None => Vec::new(),
        }
    }

    /// One write of the operator. The first change is the answer.
    ///
    /// # Errors
    /// Why the write is refused.
    pub fn write(&mut self, action: &Action) -> Result<Vec<Change>, String> {
        match action {
            Action::Apply(manifest) | Action::Create(manifest) => {
                let Some(kind) = Kind::of(manifest) else { return Ok(Vec::new()) };
                let object = Value::Object(manifest.0.clone());
                let change = match (self.get(kind, manifest.name()).cloned(), action) {
                    (None, _) => self.create(kind, object),
                    (Some(live), Action::Create(_)) => Change::Is(kind, live),
                    (Some(live), _) => self.put(kind, applied(live, object)),
                };
                Ok(vec![change])
            }
            Action::Replace { kind, name, object } => {
                let live = self.same(*kind, name, &object["metadata"])?;
                let mut object = object.clone();
                object["status"] = live["status"].clone();
                Ok(vec![self.put(*kind, object)])
            }
            Action::Patch { kind, name, status, body } => {
                let mut live = self.same(*kind, name, &body["metadata"])?;
                let mut body = body.clone();
                if kind.is_custom() || *kind == Kind::Revision {
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
            Action::Delete { kind, name, uid } => {
                if self.same(*kind, name, &json!({ "uid": uid })).is_err() {
                    return Ok(Vec::new());
                }
                Ok(match kind {
                    Kind::Pod | Kind::WarmupPod => self.end_pod(*kind, name).into_iter().collect(),
                    _ => self.remove(*kind, name),
                })
            }
        }
    }

    /// The live object, if it is the one that is meant.
    fn same(&self, kind: Kind, name: &str, metadata: &Value) -> Result<Value, String> {
        let live = self.get(kind, name).ok_or_else(|| format!("{name} is gone"))?;
        let is_other =
            |member: &str| metadata.get(member).is_some_and(|one| *one != live["metadata"][member]);
        if is_other("uid") {
            return Err(format!("{name} is another one now"));
        }
        if is_other("resourceVersion") {
            return Err(format!("{name} has changed"));
        }
        Ok(live.clone())
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// What server-side apply by the only one who applies makes of it.
fn applied(live: Value, mut ours: Value) -> Value {
    let mut metadata = live["metadata"].clone();
    merge(&mut metadata, &ours["metadata"]);
    ours["metadata"] = metadata;
    if let Some(status) = live.get("status") {
        ours["status"] = status.clone();
    }
    ours
}

/// A merge patch.
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

/// Items that are told apart by one of their members.
fn merge_list(live: &mut Value, patch: &Value, key: &str) {
    let Some(patch) = patch.as_array() else { return };
    if !live.is_array() {
        *live = json!([]);
    }
    let Value::Array(live) = live else { return };
    for item in patch {
        match live.iter_mut().find(|one| one[key] == item[key]) {
            Some(one) => merge(one, item),
            None => {
                let mut new = Value::Null;
                merge(&mut new, item);
                live.push(new);
            }
        }
    }
}

fn defaulted(kind: Kind, object: &mut Value) {
    if let Some(schema) = SCHEMAS.get(&kind) {
        fill(schema, object);
    }
}

/// Defaults of a schema.
fn fill(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(members) => {
            for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
                if let Some(default) =
                    schema.get("default").filter(|_| members.get(name).is_none_or(Value::is_null))
                {
                    members.insert(name.clone(), default.clone());
                }
                if let Some(member) = members.get_mut(name) {
                    fill(schema, member);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| fill(&schema["items"], item)),
        _ => {}
    }
}
