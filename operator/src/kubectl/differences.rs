//! Differences between two specs, field by field.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::Value;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FieldDifference {
    /// Path of the field, for example `roles[store].standalonePattern.template.spec.containers[store].image`.
    pub path: String,
    /// The old value; `None` if the field was absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Value>,
    /// The new value; `None` if the field is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<Value>,
}

impl FieldDifference {
    /// Text with one line for the old value and one for the new.
    #[must_use]
    pub fn to_text(&self) -> String {
        let line = |mark: &str, value: &Option<Value>| {
            value.as_ref().map(|value| format!("{mark} {}: {value}\n", self.path)).unwrap_or_default()
        };
        line("-", &self.from) + &line("+", &self.to)
    }
}

/// All fields that differ. Lists of named items are compared by name; empty values equal absent ones.
#[must_use]
pub(super) fn differences(from: &Value, to: &Value) -> Vec<FieldDifference> {
    let mut all = Vec::new();
    compare("", from, to, &mut all);
    all
}

fn compare(path: &str, from: &Value, to: &Value, all: &mut Vec<FieldDifference>) {
    if from == to || is_empty_value(from) && is_empty_value(to) {
        return;
    }
    let null = &Value::Null;
    match (from, to) {
        (Value::Object(old), Value::Object(new)) => {
            for name in old.keys().chain(new.keys()).collect::<BTreeSet<_>>() {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                compare(&path, old.get(name).unwrap_or(null), new.get(name).unwrap_or(null), all);
            }
        }
        (Value::Array(old), Value::Array(new)) => match (names(old), names(new)) {
            (Some(before), Some(after)) => {
                let find =
                    |list: &[Value], name: &str| list.iter().find(|item| item["name"] == name).cloned();
                for name in before.iter().chain(after.iter().filter(|name| !before.contains(name))) {
                    let (old, new) = (find(old, name), find(new, name));
                    let path = format!("{path}[{name}]");
                    compare(&path, old.as_ref().unwrap_or(null), new.as_ref().unwrap_or(null), all);
                }
            }
            _ => push(path, from, to, all),
        },
        _ => push(path, from, to, all),
    }
}

fn push(path: &str, from: &Value, to: &Value, all: &mut Vec<FieldDifference>) {
    let non_empty = |value: &Value| (!is_empty_value(value)).then(|| value.clone());
    all.push(FieldDifference { path: path.to_owned(), from: non_empty(from), to: non_empty(to) });
}

fn is_empty_value(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.iter().all(|item| item.get("$patch").is_some()),
        Value::Object(members) => members.values().all(is_empty_value),
        _ => false,
    }
}

/// Names of all items; `None` if an item has no name, or if two have the same. The `$patch` entry of a revision's list is
/// skipped.
fn names(list: &[Value]) -> Option<Vec<&str>> {
    let items = list.iter().filter(|item| item.get("$patch").is_none());
    let names: Option<Vec<&str>> = items.map(|item| item["name"].as_str()).collect();
    names.filter(|names| names.iter().collect::<BTreeSet<_>>().len() == names.len())
}

/// Summary by role: images in full, other fields as a number.
#[must_use]
pub(super) fn summary(all: &[FieldDifference]) -> Vec<String> {
    let mut lines: Vec<(String, Vec<String>, usize)> = Vec::new();
    for difference in all {
        let (role, rest) = role_of_path(&difference.path);
        let index = lines.iter().position(|(other, ..)| *other == role).unwrap_or_else(|| {
            lines.push((role.clone(), Vec::new(), 0));
            lines.len() - 1
        });
        let Some((_, parts, others)) = lines.get_mut(index) else { continue };
        match (&difference.from, &difference.to) {
            (None, Some(_)) if rest.is_empty() => parts.push("new".to_owned()),
            (Some(_), None) if rest.is_empty() => parts.push("gone".to_owned()),
            (Some(Value::String(from)), Some(Value::String(to))) if rest.ends_with("].image") => {
                parts.push(format!("{from} -> {to}"));
            }
            _ => *others += 1,
        }
    }
    let line = |(role, mut parts, others): (String, Vec<String>, usize)| {
        match others {
            0 => {}
            1 => parts.push("1 field".to_owned()),
            count => parts.push(format!("{count} fields")),
        }
        format!("{role}: {}", parts.join(", "))
    };
    lines.into_iter().map(line).collect()
}

/// The role or role template that a path belongs to, and the rest of the path.
fn role_of_path(path: &str) -> (String, &str) {
    for (list, what) in [("roles[", ""), ("roleTemplates[", "template ")] {
        if let Some((name, rest)) = path.strip_prefix(list).and_then(|path| path.split_once(']')) {
            return (format!("{what}{name}"), rest.trim_start_matches('.'));
        }
    }
    ("group".to_owned(), path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn named_items_are_compared_by_name() {
        let role = |image: &str| {
            json!({ "name": "a", "template": { "spec": { "containers": [{ "name": "c", "image": image,
            "args": ["x"] }] } } })
        };
        let mark = json!({ "$patch": "replace" });
        let from = json!({ "roles": [mark, role("i:1"), { "name": "b", "replicas": null, "labels": {} }], "roleTemplates": [mark] });
        let to = json!({ "roles": [mark, { "name": "b" }, role("i:2"), { "name": "n", "x": 1 }] });
        let all = differences(&from, &to);
        assert_eq!(all[0].path, "roles[a].template.spec.containers[c].image");
        assert_eq!((&all[0].from, &all[0].to), (&Some(json!("i:1")), &Some(json!("i:2"))));
        assert_eq!((all[1].path.as_str(), &all[1].from), ("roles[n]", &None));
        assert_eq!(all.len(), 2, "{all:?}");
        assert_eq!(summary(&all), ["a: i:1 -> i:2", "n: new"]);
    }

    #[test]
    fn lists_without_names_are_compared_as_a_whole() {
        let all = differences(&json!({ "args": ["a", "b"] }), &json!({ "args": ["a"], "n": 1 }));
        let paths: Vec<&str> = all.iter().map(|difference| difference.path.as_str()).collect();
        assert_eq!(paths, ["args", "n"]);
        assert_eq!(summary(&all), ["group: 2 fields"]);
    }
}
