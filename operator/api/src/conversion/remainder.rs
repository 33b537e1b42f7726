//! What a conversion loses, as changes to make on the way back.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// A member that is one thing after mapping there and back, and was another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct FieldChange {
    /// Names of members from the top; an item of a list is named by its `name`.
    at: Vec<String>,
    /// How many of the last objects on the way may be made.
    #[serde(default, skip_serializing_if = "is_zero")]
    made: usize,
    /// The value after mapping there and back. Another one was put there since, and stays.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_present")]
    was: Option<Value>,
    /// The value to put there.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "deserialize_present")]
    is: Option<Value>,
}

fn is_text_map(value: &Value) -> bool {
    value.as_object().is_some_and(|map| map.values().all(Value::is_string))
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

/// A member that is there, `null` included.
fn deserialize_present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

impl FieldChange {
    /// The changes that make `to` of `from`.
    pub(super) fn diff(from: &Value, to: &Value) -> Vec<Self> {
        let mut changes = Vec::new();
        collect_changes(Some(from), Some(to), &mut Vec::new(), 0, &mut changes);
        changes
    }

    /// Whether a conversion may make it. The annotation is anyone's to write, and an API server that is given back other
    /// metadata than it sent refuses the object, and with it every list that it is in.
    pub(super) fn is_allowed(&self) -> bool {
        let at: Vec<&str> = self.at.iter().map(String::as_str).collect();
        match at.as_slice() {
            ["spec" | "status", ..] => true,
            ["metadata", "annotations"] => self.is.as_ref().is_none_or(is_text_map),
            ["metadata", "annotations", _] => self.is.as_ref().is_none_or(Value::is_string),
            _ => false,
        }
    }

    /// Makes the change, unless what it changes is gone or has been changed by someone else.
    pub(super) fn apply(&self, object: &mut Value) {
        let Some((last, way)) = self.at.split_last() else { return };
        let may_make_from = way.len().saturating_sub(self.made);
        let mut parent = object;
        for (depth, name) in way.iter().enumerate() {
            if depth >= may_make_from
                && self.is.is_some()
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
        if members.get(last) == self.was.as_ref() {
            match &self.is {
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
    at: &mut Vec<String>,
    made: usize,
    changes: &mut Vec<FieldChange>,
) {
    if from == to {
        return;
    }
    let empty = Map::new();
    match (from, to) {
        (Some(Value::Object(from)), Some(Value::Object(to))) => collect_members(from, to, at, 0, changes),
        // Member by member, so that one of them can be put back when another has been set since.
        (None, Some(Value::Object(to))) if !to.is_empty() && !at.is_empty() => {
            collect_members(&empty, to, at, made + 1, changes);
        }
        (Some(Value::Array(from)), Some(Value::Array(to))) if same_names(from, to) => {
            for (from, to) in from.iter().zip(to) {
                at.push(from["name"].as_str().unwrap_or_default().to_owned());
                collect_changes(Some(from), Some(to), at, 0, changes);
                at.pop();
            }
        }
        (from, to) => changes.push(FieldChange { at: at.clone(), made, was: from.cloned(), is: to.cloned() }),
    }
}

fn collect_members(
    from: &Map<String, Value>,
    to: &Map<String, Value>,
    at: &mut Vec<String>,
    made: usize,
    changes: &mut Vec<FieldChange>,
) {
    let added = to.keys().filter(|name| !from.contains_key(*name));
    for name in from.keys().chain(added) {
        at.push(name.clone());
        collect_changes(from.get(name), to.get(name), at, made, changes);
        at.pop();
    }
}

/// Whether both lists have objects with the same names in the same order, each name once.
fn same_names(from: &[Value], to: &[Value]) -> bool {
    let names = |list: &[Value]| -> Option<Vec<String>> {
        list.iter().map(|item| Some(item.as_object()?.get("name")?.as_str()?.to_owned())).collect()
    };
    let (Some(from), Some(to)) = (names(from), names(to)) else { return false };
    let mut once = from.clone();
    once.sort_unstable();
    once.dedup();
    from == to && once.len() == from.len()
}
