//! An API server in memory: as much of one as the operator's writes need.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use k8s_openapi::jiff::Timestamp;
use moongate_operator::Kind;
use moongate_operator::plan::Action;
use serde_json::{Map, Value, json};

use crate::kubelet;

/// Schemas of the kinds that are ours, for their defaults.
static SCHEMAS: LazyLock<BTreeMap<Kind, Value>> = LazyLock::new(|| {
    let schemas = rbg_api::crds::all().into_iter().filter_map(|crd| {
        let kind = Kind::named(&crd.spec.names.kind)?;
        let version = crd.spec.versions.into_iter().find(|version| version.name == "v1alpha2")?;
        let schema = version.schema?.open_api_v3_schema?;
        Some((kind, serde_json::to_value(schema).unwrap()))
    });
    schemas.collect()
});

/// What watches tell.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    Is(Kind, Value),
    Gone(Kind, Value),
}

#[derive(Debug, Clone)]
pub(crate) struct Server {
    objects: BTreeMap<(Kind, String), Value>,
    /// Objects that Kubernetes itself has still to do something about.
    pub(crate) restless: BTreeSet<(Kind, String)>,
    version: u64,
    uids: u64,
    pub(crate) now: Timestamp,
}

impl Server {
    pub(crate) fn new() -> Self {
        let now = Timestamp::from_second(1_790_000_000).unwrap();
        // Versions begin beyond those of recorded objects.
        Self { objects: BTreeMap::new(), restless: BTreeSet::new(), version: 1_000_000, uids: 0, now }
    }

    pub(crate) fn all(&self, kind: Kind) -> impl Iterator<Item = &Value> {
        self.objects.iter().filter(move |((of, _), _)| *of == kind).map(|(_, object)| object)
    }

    pub(crate) fn everything(&self) -> impl Iterator<Item = (Kind, &Value)> {
        self.objects.iter().map(|((kind, _), object)| (*kind, object))
    }

    pub(crate) fn get(&self, kind: Kind, name: &str) -> Option<&Value> {
        self.objects.get(&(kind, name.to_owned()))
    }

    /// As it is, with its UID, version and generation: what another controller left behind.
    pub(crate) fn restore(&mut self, kind: Kind, mut object: Value) {
        object["apiVersion"] = kind.api_version().into();
        object["kind"] = kind.name().into();
        self.insert(kind, object);
    }

    fn insert(&mut self, kind: Kind, object: Value) {
        let key = (kind, text(&object["metadata"]["name"]));
        match kubelet::next(kind, &object) {
            Some(_) => self.restless.insert(key.clone()),
            None => self.restless.remove(&key),
        };
        self.objects.insert(key, object);
    }

    /// A new object, as someone's `kubectl create` makes it.
    pub(crate) fn create(&mut self, kind: Kind, mut object: Value) -> Change {
        self.version += 1;
        self.uids += 1;
        let seconds = Timestamp::from_second(self.now.as_second()).unwrap().to_string();
        let meta = object["metadata"].as_object_mut().unwrap();
        meta.insert("namespace".into(), "default".into());
        meta.insert("uid".into(), format!("uid-{}", self.uids).into());
        meta.insert("generation".into(), 1.into());
        meta.insert("resourceVersion".into(), self.version.to_string().into());
        meta.insert("creationTimestamp".into(), seconds.into());
        defaulted(kind, &mut object);
        self.insert(kind, object.clone());
        Change::Is(kind, object)
    }

    /// Puts an object in the place of the one of that name. Nothing happens if it is the same.
    pub(crate) fn put(&mut self, kind: Kind, mut object: Value) -> Change {
        defaulted(kind, &mut object);
        let key = (kind, text(&object["metadata"]["name"]));
        let live = &self.objects[&key];
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
    pub(crate) fn remove(&mut self, kind: Kind, name: &str) -> Vec<Change> {
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
                Kind::Pod | Kind::WarmupPod => vec![self.end_pod(kind, &name)],
                _ => self.remove(kind, &name),
            });
        }
        changes
    }

    fn end_pod(&mut self, kind: Kind, name: &str) -> Change {
        let mut pod = self.objects[&(kind, name.to_owned())].clone();
        let now = Timestamp::from_second(self.now.as_second()).unwrap();
        pod["metadata"]["deletionTimestamp"] = now.to_string().into();
        self.put(kind, pod)
    }

    /// One write of the operator. The first change is the answer.
    pub(crate) fn write(&mut self, action: &Action) -> Result<Vec<Change>, String> {
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
                if live["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
                    return Err(format!("{name} has changed"));
                }
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
                    merge_list(&mut live["status"]["conditions"], &body["status"]["conditions"], "type");
                } else {
                    let containers = body["spec"]["containers"].take();
                    body.as_object_mut().unwrap().remove("spec");
                    merge(&mut live, &body);
                    merge_list(&mut live["spec"]["containers"], &containers, "name");
                }
                Ok(vec![self.put(*kind, live)])
            }
            Action::Delete { kind, name, uid } => {
                if self.same(*kind, name, &json!({ "uid": uid })).is_err() {
                    return Ok(Vec::new());
                }
                Ok(match kind {
                    Kind::Pod | Kind::WarmupPod => vec![self.end_pod(*kind, name)],
                    _ => self.remove(*kind, name),
                })
            }
        }
    }

    /// The live object, if it is the one that is meant.
    fn same(&self, kind: Kind, name: &str, metadata: &Value) -> Result<Value, String> {
        let live = self.get(kind, name).ok_or_else(|| format!("{name} is gone"))?;
        match metadata.get("uid") {
            Some(uid) if *uid != live["metadata"]["uid"] => Err(format!("{name} is another one now")),
            _ => Ok(live.clone()),
        }
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
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
    let members = live.as_object_mut().unwrap();
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
    let live = live.as_array_mut().unwrap();
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
