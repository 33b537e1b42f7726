//! Fields of an object that a field manager has applied, as the API server records them in `metadata.managedFields`.

use serde_json::Value;

use crate::manifest::Manifest;

impl Manifest {
    /// Whether the live object has the fields of this manifest with the same values, and none that `manager` applied before and that
    /// the manifest no longer has. Such fields are removed when the manifest is applied again.
    #[must_use]
    pub fn is_applied_to(&self, live: &Value, manager: &str) -> bool {
        self.is_subset_of(live) && !self.omits_applied_field(live, manager)
    }

    fn omits_applied_field(&self, live: &Value, manager: &str) -> bool {
        let wanted = Value::Object(self.0.clone());
        let entries = live["metadata"]["managedFields"].as_array().into_iter().flatten();
        let mut applied = entries.filter(|entry| {
            let is_of_manager = entry["manager"] == manager && entry["operation"] == "Apply";
            // Fields of another version have other names. Those of a subresource are applied separately.
            is_of_manager && entry["apiVersion"] == self.api_version() && entry.get("subresource").is_none()
        });
        applied.any(|entry| omits_field(&entry["fieldsV1"], &wanted, live))
    }
}

/// Whether `fields`, in the form of `FieldsV1`, contains a field of `live` that `wanted` does not have.
fn omits_field(fields: &Value, wanted: &Value, live: &Value) -> bool {
    let Some(fields) = fields.as_object().filter(|fields| !fields.is_empty()) else {
        return is_trimmed(wanted, live);
    };
    fields.iter().any(|(key, children)| {
        // The key `.` is the item itself.
        let Some((kind, text)) = key.split_once(':') else { return false };
        let (wanted, live) = match kind {
            "f" => (wanted.get(text), live.get(text)),
            "k" => (find_item(wanted, text), find_item(live, text)),
            "v" => (find_value(wanted, text), find_value(live, text)),
            _ => return false,
        };
        live.is_some_and(|live| wanted.is_none_or(|wanted| omits_field(children, wanted, live)))
    })
}

/// Members that the API server adds to values that have one owner.
const DEFAULTED: [&str; 3] = ["apiVersion", "divisor", "expirationSeconds"];

/// Whether an object or list that has one owner, such as a selector, lacks members of the live one. An empty one is not owned with
/// the members that others add.
fn is_trimmed(wanted: &Value, live: &Value) -> bool {
    match (wanted, live) {
        (Value::Object(wanted), Value::Object(live)) if !wanted.is_empty() => {
            live.iter().any(|(name, live)| match wanted.get(name) {
                Some(wanted) => is_trimmed(wanted, live),
                None => !DEFAULTED.contains(&name.as_str()),
            })
        }
        (Value::Array(wanted), Value::Array(live)) => {
            wanted.iter().zip(live).any(|(wanted, live)| is_trimmed(wanted, live))
        }
        _ => false,
    }
}

/// The item of a list that has these keys. The API server may have added keys with default values, such as a port's protocol.
fn find_item<'a>(list: &'a Value, keys: &str) -> Option<&'a Value> {
    let keys: Value = serde_json::from_str(keys).ok()?;
    let keys = keys.as_object()?;
    let has_keys =
        |item: &&Value| keys.iter().all(|(key, value)| item.get(key).is_none_or(|own| own == value));
    list.as_array()?.iter().find(has_keys)
}

/// The item of a set.
fn find_value<'a>(list: &'a Value, text: &str) -> Option<&'a Value> {
    let value: Value = serde_json::from_str(text).ok()?;
    list.as_array()?.iter().find(|item| **item == value)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn service(selector: &Value, ports: &Value) -> Manifest {
        let object = json!({ "apiVersion": "v1", "kind": "Service", "metadata": { "name": "s" },
            "spec": { "selector": selector, "ports": ports } });
        serde_json::from_value(object).unwrap()
    }

    fn live(entry: &Value) -> Value {
        let selector = json!({ "app": "a", "component": "leader" });
        let ports = json!([{ "port": 1, "protocol": "TCP" }, { "port": 2, "protocol": "TCP" }]);
        json!({ "apiVersion": "v1", "kind": "Service",
            "metadata": { "name": "s", "managedFields": [entry] },
            "spec": { "selector": selector, "ports": ports, "clusterIP": "None" } })
    }

    fn entry(manager: &str, operation: &str) -> Value {
        let port = json!({ ".": {}, "f:port": {} });
        json!({ "manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": { "f:spec": {
            "f:selector": { "f:app": {}, "f:component": {} },
            "f:ports": { "k:{\"port\":1,\"protocol\":\"TCP\"}": port, "k:{\"port\":2,\"protocol\":\"TCP\"}": port },
        } } })
    }

    #[test]
    fn a_removed_field_has_to_be_applied() {
        let both = json!({ "app": "a", "component": "leader" });
        let ports = json!([{ "port": 1 }, { "port": 2 }]);
        // The API server stores a Service's selector as one value.
        let mut atomic = entry("rbg", "Apply");
        atomic["fieldsV1"]["f:spec"]["f:selector"] = json!({});
        for entry in [entry("rbg", "Apply"), atomic] {
            let live = live(&entry);
            assert!(service(&both, &ports).is_applied_to(&live, "rbg"));
            assert!(!service(&json!({ "app": "a" }), &ports).is_applied_to(&live, "rbg"));
            let other = json!({ "app": "b", "component": "leader" });
            assert!(!service(&other, &ports).is_applied_to(&live, "rbg"));
        }
    }

    #[test]
    fn defaults_and_items_of_others_do_not_count() {
        let fields = json!({ "f:annotations": {}, "f:env": { "k:{\"name\":\"A\"}": {
            ".": {}, "f:name": {}, "f:valueFrom": { ".": {}, "f:fieldRef": {} } } } });
        let env = |field: Value| json!([{ "name": "A", "valueFrom": { "fieldRef": field } }]);
        let field = json!({ "fieldPath": "metadata.name" });
        let wanted = json!({ "annotations": {}, "env": env(field) });
        let mut live = json!({ "annotations": { "other": "1" },
            "env": env(json!({ "apiVersion": "v1", "fieldPath": "metadata.name" })) });
        assert!(!omits_field(&fields, &wanted, &live));
        live["env"][0]["valueFrom"]["fieldRef"]["other"] = "1".into();
        assert!(omits_field(&fields, &wanted, &live));
    }

    #[test]
    fn removed_items_of_lists_are_found_by_their_keys() {
        let live = live(&entry("rbg", "Apply"));
        let fields = entry("rbg", "Apply")["fieldsV1"]["f:spec"].clone();
        let selector = json!({ "app": "a", "component": "b" });
        let omits = |ports: Value| {
            omits_field(&fields, &json!({ "selector": selector, "ports": ports }), &live["spec"])
        };
        assert!(!omits(json!([{ "port": 1 }, { "port": 2, "protocol": "TCP" }])));
        assert!(omits(json!([{ "port": 1 }])));
        assert!(omits(json!([{ "port": 1 }, { "port": 2, "protocol": "UDP" }])));
        let set = json!({ "f:finalizers": { "v:\"a\"": {} } });
        let live = json!({ "finalizers": ["a", "c"] });
        assert!(!omits_field(&set, &json!({ "finalizers": ["a"] }), &live));
        assert!(omits_field(&set, &json!({ "finalizers": ["b"] }), &live));
        assert!(!omits_field(&set, &json!({ "finalizers": ["b"] }), &json!({})), "it is removed already");
    }

    #[test]
    fn fields_of_other_managers_stay() {
        let less = service(&json!({ "app": "a" }), &json!([{ "port": 1 }, { "port": 2 }]));
        let mut of_status = entry("rbg", "Apply");
        of_status["subresource"] = "status".into();
        for other in [entry("kubectl", "Apply"), entry("rbg", "Update"), of_status] {
            assert!(less.is_applied_to(&live(&other), "rbg"), "{other}");
        }
    }
}
