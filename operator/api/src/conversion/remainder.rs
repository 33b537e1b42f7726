//! Field changes that a conversion loses, stored to be restored by the conversion back.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// A field whose value differs after a round trip.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct FieldChange {
    /// Field names from the root; list items are identified by their `name`.
    #[serde(rename = "at")]
    path: Vec<String>,
    /// How many of the last parent objects may be created.
    #[serde(rename = "made", default, skip_serializing_if = "is_zero")]
    creatable_parents: usize,
    /// The value after the round trip. If the field has another value now, it was edited and stays.
    #[serde(
        rename = "was",
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "deserialize_present"
    )]
    after: Option<Value>,
    /// The original value, to be restored.
    #[serde(
        rename = "is",
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "deserialize_present"
    )]
    original: Option<Value>,
}

fn is_text_map(value: &Value) -> bool {
    value.as_object().is_some_and(|map| map.values().all(Value::is_string))
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// A field that is present, including `null`.
fn deserialize_present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

impl FieldChange {
    /// The changes that turn `from` into `to`.
    pub(super) fn diff(from: &Value, to: &Value) -> Vec<Self> {
        let mut changes = Vec::new();
        collect_changes(Some(from), Some(to), &mut Vec::new(), 0, &mut changes);
        changes
    }

    /// Whether a conversion may apply the change. Users can edit the annotation, and an API server rejects a converted object
    /// whose metadata differs, together with every list that contains it.
    pub(super) fn is_allowed(&self) -> bool {
        let path: Vec<&str> = self.path.iter().map(String::as_str).collect();
        match path.as_slice() {
            ["spec" | "status", ..] => true,
            ["metadata", "annotations"] => self.original.as_ref().is_none_or(is_text_map),
            ["metadata", "annotations", _] => self.original.as_ref().is_none_or(Value::is_string),
            _ => false,
        }
    }

    /// Applies the change, unless the field is gone or was edited.
    pub(super) fn apply(&self, object: &mut Value) {
        let Some((last, parents)) = self.path.split_last() else { return };
        let first_creatable = parents.len().saturating_sub(self.creatable_parents);
        let mut parent = object;
        for (depth, name) in parents.iter().enumerate() {
            if depth >= first_creatable
                && self.original.is_some()
                && let Value::Object(members) = &mut *parent
                && !members.contains_key(name)
            {
                members.insert(name.clone(), Value::Object(Map::new()));
            }
            match member_mut(parent, name) {
                Some(member) => parent = member,
                None => return,
            }
        }
        let Value::Object(members) = parent else { return };
        if members.get(last) == self.after.as_ref() {
            match &self.original {
                Some(value) => drop(members.insert(last.clone(), value.clone())),
                None => drop(members.remove(last)),
            }
        }
    }
}

fn member_mut<'a>(parent: &'a mut Value, name: &str) -> Option<&'a mut Value> {
    match parent {
        Value::Object(members) => members.get_mut(name),
        Value::Array(items) => {
            items.iter_mut().find(|item| item.get("name").and_then(Value::as_str) == Some(name))
        }
        _ => None,
    }
}

fn collect_changes(
    from: Option<&Value>,
    to: Option<&Value>,
    path: &mut Vec<String>,
    creatable_parents: usize,
    changes: &mut Vec<FieldChange>,
) {
    if from == to {
        return;
    }
    let empty = Map::new();
    match (from, to) {
        (Some(Value::Object(from)), Some(Value::Object(to))) => collect_members(from, to, path, 0, changes),
        // Field by field, so that one field can be restored when another has been edited.
        (None, Some(Value::Object(to))) if !to.is_empty() && !path.is_empty() => {
            collect_members(&empty, to, path, creatable_parents + 1, changes);
        }
        (Some(Value::Array(from)), Some(Value::Array(to))) if same_names(from, to) => {
            for (from, to) in from.iter().zip(to) {
                path.push(from["name"].as_str().unwrap_or_default().to_owned());
                collect_changes(Some(from), Some(to), path, 0, changes);
                path.pop();
            }
        }
        (from, to) => changes.push(FieldChange {
            path: path.clone(),
            creatable_parents,
            after: from.cloned(),
            original: to.cloned(),
        }),
    }
}

fn collect_members(
    from: &Map<String, Value>,
    to: &Map<String, Value>,
    path: &mut Vec<String>,
    creatable_parents: usize,
    changes: &mut Vec<FieldChange>,
) {
    let added = to.keys().filter(|name| !from.contains_key(*name));
    for name in from.keys().chain(added) {
        path.push(name.clone());
        collect_changes(from.get(name), to.get(name), path, creatable_parents, changes);
        path.pop();
    }
}

/// Whether both lists have objects with the same unique names in the same order.
fn same_names(from: &[Value], to: &[Value]) -> bool {
    let names = |list: &[Value]| -> Option<Vec<String>> {
        list.iter().map(|item| Some(item.as_object()?.get("name")?.as_str()?.to_owned())).collect()
    };
    let (Some(from), Some(to)) = (names(from), names(to)) else { return false };
    let mut unique = from.clone();
    unique.sort_unstable();
    unique.dedup();
    from == to && unique.len() == from.len()
}
