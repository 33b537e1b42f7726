//! How two specs differ, member by member.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::Value;

/// One member that differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FieldDifference {
    /// Where: `roles[store].standalonePattern.template.spec.containers[store].image`.
    pub path: String,
    /// What it was; nothing, if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Value>,
    /// What it is; nothing, if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<Value>,
}

impl FieldDifference {
    /// For people: a line each for what it was and what it is.
    #[must_use]
    pub fn to_text(&self) -> String {
        let line = |mark: &str, value: &Option<Value>| {
            value.as_ref().map(|value| format!("{mark} {}: {value}\n", self.path)).unwrap_or_default()
        };
        line("-", &self.from) + &line("+", &self.to)
    }
}

/// All members that differ. Lists of things with names are compared by name; what says nothing is like what is absent.
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
    let said = |value: &Value| (!is_empty_value(value)).then(|| value.clone());
    all.push(FieldDifference { path: path.to_owned(), from: said(from), to: said(to) });
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

/// Names of all items; nothing, if one has none, or two the same. A revision's mark for lists is no item.
fn names(list: &[Value]) -> Option<Vec<&str>> {
    let items = list.iter().filter(|item| item.get("$patch").is_none());
    let names: Option<Vec<&str>> = items.map(|item| item["name"].as_str()).collect();
    names.filter(|names| names.iter().collect::<BTreeSet<_>>().len() == names.len())
}

/// A few words on each role: its images in full, the rest as a number.
#[must_use]
pub(super) fn summary(all: &[FieldDifference]) -> Vec<String> {
    let mut lines: Vec<(String, Vec<String>, usize)> = Vec::new();
    for one in all {
        let (whose, rest) = role_of_path(&one.path);
        let at = lines.iter().position(|(other, ..)| *other == whose).unwrap_or_else(|| {
            lines.push((whose.clone(), Vec::new(), 0));
            lines.len() - 1
        });
        let Some((_, told, others)) = lines.get_mut(at) else { continue };
        match (&one.from, &one.to) {
            (None, Some(_)) if rest.is_empty() => told.push("new".to_owned()),
            (Some(_), None) if rest.is_empty() => told.push("gone".to_owned()),
            (Some(Value::String(from)), Some(Value::String(to))) if rest.ends_with("].image") => {
                told.push(format!("{from} -> {to}"));
            }
            _ => *others += 1,
        }
    }
    let line = |(whose, mut told, others): (String, Vec<String>, usize)| {
        match others {
            0 => {}
            1 => told.push("1 member".to_owned()),
            count => told.push(format!("{count} members")),
        }
        format!("{whose}: {}", told.join(", "))
    };
    lines.into_iter().map(line).collect()
}

/// The role or role template that a path is about, and the rest of it.
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
    fn things_with_names_are_compared_by_name() {
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
    fn what_has_no_names_is_compared_as_a_whole() {
        let all = differences(&json!({ "args": ["a", "b"] }), &json!({ "args": ["a"], "n": 1 }));
        let paths: Vec<&str> = all.iter().map(|one| one.path.as_str()).collect();
        assert_eq!(paths, ["args", "n"]);
        assert_eq!(summary(&all), ["group: 2 members"]);
    }
}
