//! Parts of the CRDs' schemas that cannot be derived from Rust types.
//!
//! Pod templates are validated only where a mistake would otherwise surface late (container names, labels that are not
//! strings); all other fields are preserved and validated by the API server when a pod is created. That keeps a CRD at a
//! few kilobytes.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

const PRESERVE: &str = "x-kubernetes-preserve-unknown-fields";

/// A DNS label, as in names of role templates and references to them.
pub(crate) const DNS_LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
/// A percentage in the form of v1alpha1.
pub(crate) const PERCENT: &str = "^([0-9]|[1-9][0-9]|100)%$";
/// `group/version` in the form of v1alpha1's workloads.
pub(crate) const API_VERSION: &str =
    "^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/v[0-9]+((alpha|beta)[0-9]+)?$";

pub(crate) fn any_value(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "x-kubernetes-preserve-unknown-fields": true })
}

/// Schema of an integer or a percentage.
pub(crate) fn int_or_string(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "x-kubernetes-int-or-string": true })
}

/// Schema of a point in time, RFC 3339.
pub(crate) fn time(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "format": "date-time" })
}

/// Schema of a string map, for labels and annotations.
fn text_map() -> Value {
    json!({ "type": "object", "additionalProperties": { "type": "string" } })
}

/// Schema of a pod template, see the module's documentation.
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

/// Schema of a list of objects with unique `name` fields.
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

/// Schema of containers or volumes.
pub(crate) fn named_objects(_: &mut SchemaGenerator) -> Schema {
    let mut schema = Schema::default();
    if let Value::Object(members) = named_list() {
        members.into_iter().for_each(|(name, value)| drop(schema.insert(name, value)));
    }
    schema
}

/// Schema of objects without validation.
pub(crate) fn objects(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "items": { "type": "object", PRESERVE: true } })
}

/// Schema of a label selector of `meta/v1`.
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
