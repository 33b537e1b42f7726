//! An object as it is sent to the API server.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// An object as it is sent: for server-side apply, it says all that we say about the object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Manifest(pub Map<String, Value>);

/// Text by text, as labels and annotations are.
pub(crate) type StringMap = BTreeMap<String, String>;

/// An owner of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnerRef {
    /// `group/version`.
    pub api_version: String,
    /// The kind.
    pub kind: String,
    /// The name.
    pub name: String,
    /// The UID.
    pub uid: String,
    /// Whether it is the one that controls the object.
    pub controller: bool,
}

/// What an object is called.
pub(crate) struct ManifestMetadata<'a> {
    pub(crate) name: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) labels: StringMap,
    pub(crate) annotations: StringMap,
    pub(crate) owner: Option<&'a OwnerRef>,
}

impl Manifest {
    /// An object whose other members are `body`. Empty labels and annotations are left out.
    pub(crate) fn new(api_version: &str, kind: &str, metadata: ManifestMetadata<'_>, body: Value) -> Self {
        let ManifestMetadata { name, namespace, labels, annotations, owner } = metadata;
        let mut meta = Map::new();
        meta.insert("name".to_owned(), name.into());
        meta.insert("namespace".to_owned(), namespace.into());
        for (member, texts) in [("labels", labels), ("annotations", annotations)] {
            if !texts.is_empty() {
                meta.insert(member.to_owned(), texts.into_iter().collect());
            }
        }
        meta.extend(owner.map(|owner| ("ownerReferences".to_owned(), json!([owner.to_json()]))));
        let mut object = Map::new();
        object.insert("apiVersion".to_owned(), api_version.into());
        object.insert("kind".to_owned(), kind.into());
        object.insert("metadata".to_owned(), Value::Object(meta));
        if let Value::Object(body) = without_nulls(body) {
            object.extend(body);
        }
        Self(object)
    }

    /// `group/version` of its kind.
    #[must_use]
    pub fn api_version(&self) -> &str {
        self.text("/apiVersion")
    }

    /// The kind.
    #[must_use]
    pub fn kind(&self) -> &str {
        self.text("/kind")
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.text("/metadata/name")
    }

    /// A label.
    #[must_use]
    pub fn label(&self, key: &str) -> Option<&str> {
        self.0.get("metadata")?.get("labels")?.get(key)?.as_str()
    }

    /// Whether an object as the API server has it says all that this one says. What the server or others added does not
    /// count; what was said once and is no longer does not show here, but in the fields that server-side apply keeps per
    /// manager.
    #[must_use]
    pub fn is_subset_of(&self, live: &Value) -> bool {
        live.as_object().is_some_and(|live| is_object_subset(&self.0, live))
    }

    fn text(&self, pointer: &str) -> &str {
        let mut names = pointer.split('/').skip(1);
        let first = names.next().and_then(|name| self.0.get(name));
        names
            .fold(first, |value, name| value.and_then(|value| value.get(name)))
            .and_then(Value::as_str)
            .unwrap_or("")
    }
}

impl OwnerRef {
    fn to_json(&self) -> Value {
        without_nulls(json!({
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
            "blockOwnerDeletion": true,
            "controller": self.controller.then_some(true),
        }))
    }
}

fn is_object_subset(ours: &Map<String, Value>, live: &Map<String, Value>) -> bool {
    ours.iter().all(|(name, value)| live.get(name).is_some_and(|live| is_value_subset(value, live)))
}

fn is_value_subset(ours: &Value, live: &Value) -> bool {
    match (ours, live) {
        (Value::Object(ours), Value::Object(live)) => is_object_subset(ours, live),
        (Value::Array(ours), Value::Array(live)) => {
            ours.len() == live.len() && ours.iter().zip(live).all(|(ours, live)| is_value_subset(ours, live))
        }
        (ours, live) => ours == live,
    }
}

/// Members that are null say nothing; `json!` writes them for what is `None`.
pub(crate) fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(members) => {
            let members = members.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(members.map(|(name, value)| (name, without_nulls(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(without_nulls).collect()),
        value => value,
    }
}
