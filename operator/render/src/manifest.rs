//! Objects as they are sent to the API server.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// An object as it is sent to the API server. For server-side apply, it contains all fields that we manage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Manifest(pub Map<String, Value>);

pub(crate) type StringMap = BTreeMap<String, String>;

/// Reference to an object's owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnerRef {
    pub api_version: String,
    pub kind: String,
    pub name: String,
    pub uid: String,
    /// Whether the owner controls the object.
    pub controller: bool,
}

/// Name, labels, annotations and owner of an object.
pub(crate) struct ManifestMetadata<'a> {
    pub(crate) name: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) labels: StringMap,
    pub(crate) annotations: StringMap,
    pub(crate) owner: Option<&'a OwnerRef>,
}

impl Manifest {
    /// Creates an object with the fields of `body`. Empty labels and annotations are omitted.
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

    #[must_use]
    pub fn api_version(&self) -> &str {
        self.text("/apiVersion")
    }

    #[must_use]
    pub fn kind(&self) -> &str {
        self.text("/kind")
    }

    #[must_use]
    pub fn name(&self) -> &str {
        self.text("/metadata/name")
    }

    #[must_use]
    pub fn label(&self, key: &str) -> Option<&str> {
        self.0.get("metadata")?.get("labels")?.get(key)?.as_str()
    }

    /// Whether a live object contains all fields of this one with the same values. Additional fields of the live object do not
    /// count; [`Self::is_applied_to`] also detects fields that were removed from the manifest.
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

fn is_object_subset(own: &Map<String, Value>, live: &Map<String, Value>) -> bool {
    own.iter().all(|(name, value)| live.get(name).is_some_and(|live| is_value_subset(value, live)))
}

fn is_value_subset(own: &Value, live: &Value) -> bool {
    match (own, live) {
        (Value::Object(own), Value::Object(live)) => is_object_subset(own, live),
        (Value::Array(own), Value::Array(live)) => {
            own.len() == live.len() && own.iter().zip(live).all(|(own, live)| is_value_subset(own, live))
        }
        (own, live) => own == live,
    }
}

/// Removes null fields, which `json!` writes for `None`.
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
