//! Pod templates in the canonical form of upstream's controller.
//!
//! Upstream decodes templates into Go structures and encodes them again, which drops empty values and rewrites quantities.
//! We keep templates as they are written; without this form, a group taken over from upstream would appear changed, and its
//! pods would be restarted.

use rbg_api::PodTemplate;
use serde_json::{Map, Value};

use crate::quantity;

/// Fields whose `false` equals absence.
const DEFAULT_FALSE_MEMBERS: [&str; 9] = [
    "readOnly",
    "hostNetwork",
    "hostPID",
    "hostIPC",
    "stdin",
    "stdinOnce",
    "tty",
    "paused",
    "recursiveReadOnly",
];
/// Fields whose 0 equals absence.
const DEFAULT_ZERO_MEMBERS: [&str; 6] = [
    "initialDelaySeconds",
    "timeoutSeconds",
    "periodSeconds",
    "successThreshold",
    "failureThreshold",
    "hostPort",
];
/// String maps: every entry is significant, an empty map equals absence.
const TEXT_MAPS: [&str; 4] = ["labels", "annotations", "nodeSelector", "matchLabels"];
/// Maps from names to quantities.
const QUANTITY_MAPS: [&str; 2] = ["limits", "requests"];
/// Fields that are a quantity.
const QUANTITIES: [&str; 2] = ["sizeLimit", "divisor"];
/// Strings for which empty differs from absent.
const SIGNIFICANT_EMPTY_MEMBERS: [&str; 2] = ["storageClassName", "volumeName"];

/// Converts a template to its canonical form.
pub(crate) fn pod_template(template: PodTemplate) -> PodTemplate {
    let mut template = PodTemplate(object(template.0));
    for list in ["containers", "initContainers"] {
        let Some(Value::Array(containers)) = template.0.get_mut("spec").and_then(|spec| spec.get_mut(list))
        else {
            continue;
        };
        for container in containers.iter_mut().filter_map(Value::as_object_mut) {
            container.entry("resources").or_insert_with(|| Value::Object(Map::new()));
        }
    }
    template
}

fn object(members: Map<String, Value>) -> Map<String, Value> {
    members.into_iter().filter_map(|(name, value)| Some((name.clone(), member(&name, value)?))).collect()
}

/// The field's value; `None` if it equals absence.
fn member(name: &str, value: Value) -> Option<Value> {
    match value {
        Value::Null => None,
        Value::Object(map) if TEXT_MAPS.contains(&name) => (!map.is_empty()).then_some(Value::Object(map)),
        Value::Object(map) if QUANTITY_MAPS.contains(&name) => {
            let quantities = map.into_iter().map(|(name, quantity)| (name, canonical_quantity(quantity)));
            Some(Value::Object(quantities.collect()))
                .filter(|map| map.as_object().is_some_and(|map| !map.is_empty()))
        }
        Value::Object(map) => Some(Value::Object(object(map))),
        Value::Array(items) if items.is_empty() => None,
        Value::Array(items) => Some(Value::Array(items.into_iter().map(item).collect())),
        Value::String(text) if text.is_empty() && !SIGNIFICANT_EMPTY_MEMBERS.contains(&name) => None,
        Value::Bool(false) if DEFAULT_FALSE_MEMBERS.contains(&name) => None,
        Value::Number(number) if DEFAULT_ZERO_MEMBERS.contains(&name) && number.as_i64() == Some(0) => None,
        value if QUANTITIES.contains(&name) => Some(canonical_quantity(value)),
        value => Some(value),
    }
}

fn item(value: Value) -> Value {
    match value {
        Value::Object(members) => Value::Object(object(members)),
        value => value,
    }
}

fn canonical_quantity(value: Value) -> Value {
    let text = match &value {
        Value::String(text) => text.trim().to_owned(),
        Value::Number(number) => number.to_string(),
        _ => return value,
    };
    quantity::canonical(&text).map_or(value, Value::String)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn empty_values_are_dropped_and_quantities_rewritten() {
        let template = serde_json::from_value(json!({
            "metadata": { "creationTimestamp": null, "labels": { "empty": "" }, "annotations": {} },
            "spec": {
                "hostNetwork": false,
                "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": false,
                "volumes": [{ "name": "v", "emptyDir": {} }],
                "containers": [{
                    "name": "c",
                    "args": [""],
                    "env": [{ "name": "E", "value": "" }],
                    "resources": { "limits": { "cpu": 1, "memory": "1024Mi" }, "requests": {} },
                    "readinessProbe": { "initialDelaySeconds": 0, "tcpSocket": { "port": 0 } },
                }, { "name": "d", "ports": [] }],
            },
        }));
        let expected = json!({
            "metadata": { "labels": { "empty": "" } },
            "spec": {
                "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": false,
                "volumes": [{ "name": "v", "emptyDir": {} }],
                "containers": [{
                    "name": "c",
                    "args": [""],
                    "env": [{ "name": "E" }],
                    "resources": { "limits": { "cpu": "1", "memory": "1Gi" } },
                    "readinessProbe": { "tcpSocket": { "port": 0 } },
                }, { "name": "d", "resources": {} }],
            },
        });
        assert_eq!(Value::Object(pod_template(template.unwrap()).0), expected);
    }
}
