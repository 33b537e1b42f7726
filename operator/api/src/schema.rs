//! Parts of the CRDs' schemas that Rust types do not say by themselves.
//!
//! Pod templates are checked only where a mistake would otherwise surface late (names of containers, labels that are no
//! text); everything else in them is preserved and judged by the API server when a pod is made. That keeps a CRD at a few
//! kilobytes.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

const PRESERVE: &str = "x-kubernetes-preserve-unknown-fields";

/// A DNS label, as role templates and those who refer to them are named.
pub(crate) const DNS_LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// A percentage as v1alpha1 writes it.
pub(crate) const PERCENT: &str = "^([0-9]|[1-9][0-9]|100)%$";
/// `group/version` as v1alpha1's workloads name it.
pub(crate) const API_VERSION: &str =
    "^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/v[0-9]+((alpha|beta)[0-9]+)?$";

/// Any value at all.
pub(crate) fn any_value(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "x-kubernetes-preserve-unknown-fields": true })
}

/// An integer or a percentage.
pub(crate) fn int_or_string(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "x-kubernetes-int-or-string": true })
}

/// A point in time, RFC 3339.
pub(crate) fn time(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "format": "date-time" })
}

/// A map of text to text, as labels and annotations are.
fn text_map() -> Value {
    json!({ "type": "object", "additionalProperties": { "type": "string" } })
}

/// A pod template, see the module's text.
pub(crate) fn pod_template(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        PRESERVE: true,
        "properties": {
            "metadata": {
                "type": "object",
                PRESERVE: true,
                "properties": { "labels": text_map(), "annotations": text_map() },
            },
            "spec": {
                "type": "object",
                PRESERVE: true,
                "properties": { "containers": named_list() },
            },
        },
    })
}

/// Objects of which no two have the same `name`.
fn named_list() -> Value {
    json!({
        "type": "array",
        "items": {
            "type": "object",
            PRESERVE: true,
            "properties": { "name": { "type": "string" } },
            "required": ["name"],
        },
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
    })
}

/// Containers or volumes.
pub(crate) fn named_objects(_: &mut SchemaGenerator) -> Schema {
    let mut schema = Schema::default();
    if let Value::Object(members) = named_list() {
        members.into_iter().for_each(|(name, value)| drop(schema.insert(name, value)));
    }
    schema
}

/// Objects of which nothing is checked.
pub(crate) fn objects(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": { "type": "object", PRESERVE: true } })
}

/// A label selector of `meta/v1`.
pub(crate) fn label_selector(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "properties": {
            "matchLabels": text_map(),
            "matchExpressions": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "key": { "type": "string" },
                        "operator": { "type": "string" },
                        "values": { "type": "array", "items": { "type": "string" } },
                    },
                    "required": ["key", "operator"],
                },
            },
        },
        "x-kubernetes-map-type": "atomic",
    })
}
