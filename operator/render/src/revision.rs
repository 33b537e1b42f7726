//! Revisions: what of a spec makes pods change, its hash, and the ControllerRevision that keeps it.
//!
//! Data and hashes are those of upstream's controller, so that revisions which it wrote are found again.

use rbg_api::v1alpha2::{InstanceComponent, RoleBasedGroupSpec, RoleSpec};
use rbg_api::{PodTemplate, keys};
use serde_json::{Map, Value, json};

use crate::canonical;
use crate::hash::{fnv1, fnv1a, safe_encode};
use crate::manifest::{Manifest, ManifestMetadata, OwnerRef, StringMap};

/// One state of a spec.
#[derive(Debug, Clone, PartialEq)]
pub struct SpecRevision {
    /// Name of its ControllerRevision.
    pub name: String,
    /// What the name ends in, and what pods are labelled with.
    pub hash: String,
    /// What it keeps.
    pub data: Value,
}

impl SpecRevision {
    /// A RoleInstanceSet's. `template` is `spec.roleInstanceTemplate`; `collisions` counts others with the same hash.
    #[must_use]
    pub fn for_set(set: &str, template: &Value, collisions: i32) -> Self {
        let mut template = template.clone();
        if let Value::Object(template) = &mut template {
            template.insert("$patch".to_owned(), "replace".into());
        }
        Self::numbered(set, json!({ "spec": { "roleInstanceTemplate": template } }), collisions)
    }

    /// A RoleInstance's: its components, less their sizes.
    #[must_use]
    pub fn for_instance(instance: &str, components: &[InstanceComponent], collisions: i32) -> Self {
        let order: Vec<Value> =
            components.iter().map(|component| json!({ "name": component.name })).collect();
        let components: Vec<Value> = components
            .iter()
            .map(|component| {
                let mut template = component.template.0.clone();
                template.insert("$patch".to_owned(), "replace".into());
                let mut kept = to_object(component);
                kept.remove("size");
                kept.insert("template".to_owned(), Value::Object(template));
                kept.entry("serviceName").or_insert(Value::Null);
                Value::Object(kept)
            })
            .collect();
        let data = json!({ "spec": { "$setElementOrder/components": order, "components": components } });
        Self::numbered(instance, data, collisions)
    }

    /// A group's: its roles, less their replicas. `number` counts the group's revisions from 1.
    #[must_use]
    pub fn for_group(group: &str, spec: &RoleBasedGroupSpec, number: i64) -> Self {
        let replace = json!({ "$patch": "replace" });
        let templates = spec.role_templates.iter().map(|template| {
            let mut kept = to_object(template);
            kept.insert("template".to_owned(), stored_template(&template.template));
            Value::Object(kept)
        });
        let roles = spec.roles.iter().map(|role| {
            let mut kept = stored_role(role);
            kept.insert("replicas".to_owned(), Value::Null);
            Value::Object(kept)
        });
        let templates: Vec<Value> = std::iter::once(replace.clone()).chain(templates).collect();
        let roles: Vec<Value> = std::iter::once(replace).chain(roles).collect();
        let data = json!({ "spec": { "roleTemplates": templates, "roles": roles } });
        let hash = safe_encode(fnv1a(go_json(&data).bytes()));
        Self { name: format!("{group}-{hash}-{number}"), hash, data }
    }

    fn numbered(owner: &str, data: Value, collisions: i32) -> Self {
        let hash = safe_encode(fnv1(go_json(&data).bytes().chain(collisions.to_string().bytes())));
        Self { name: format!("{owner}-{hash}"), hash, data }
    }

    /// Whether a stored revision keeps the same. Its hash may be another: upstream's structures know other fields.
    #[must_use]
    pub fn is_same(&self, stored: &Value) -> bool {
        without_empty_values(&self.data) == without_empty_values(stored)
    }

    /// The ControllerRevision.
    #[must_use]
    pub fn manifest(
        &self,
        namespace: &str,
        labels: StringMap,
        annotations: StringMap,
        owner: &OwnerRef,
        number: i64,
    ) -> Manifest {
        let metadata =
            ManifestMetadata { name: &self.name, namespace, labels, annotations, owner: Some(owner) };
        let mut manifest =
            Manifest::new("apps/v1", "ControllerRevision", metadata, json!({ "revision": number }));
        // Not through `Manifest::new`: the nulls in it are part of it.
        manifest.0.insert("data".to_owned(), self.data.clone());
        manifest
    }

    /// Labels of a group's ControllerRevisions.
    #[must_use]
    pub fn group_labels(&self, group: &str) -> StringMap {
        StringMap::from([
            (keys::GROUP_NAME.to_owned(), group.to_owned()),
            (keys::GROUP_REVISION.to_owned(), self.hash.clone()),
        ])
    }
}

/// Hash of one role and of the role template that it refers to.
pub(crate) fn role_hash(spec: &RoleBasedGroupSpec, role: &RoleSpec) -> String {
    let mut kept = stored_role(role);
    kept.remove("replicas");
    let standalone = role.standalone_pattern.as_ref().and_then(|pattern| pattern.template_ref.as_ref());
    let leader_worker = role.leader_worker_pattern.as_ref().and_then(|pattern| pattern.template_ref.as_ref());
    let reference = standalone.or(leader_worker);
    let template = reference
        .and_then(|reference| spec.role_templates.iter().find(|template| template.name == reference.name));
    let template = template.map(|template| go_json(&stored_template(&template.template))).unwrap_or_default();
    safe_encode(fnv1a(go_json(&Value::Object(kept)).bytes().chain(template.bytes())))
}

/// A role with its templates in their canonical form.
fn stored_role(role: &RoleSpec) -> Map<String, Value> {
    let mut kept = to_object(role);
    for pattern in ["standalonePattern", "leaderWorkerPattern"] {
        let template = kept.get_mut(pattern).and_then(|pattern| pattern.get_mut("template"));
        if let Some(template) = template {
            canonicalise(template);
        }
    }
    let components =
        kept.get_mut("customComponentsPattern").and_then(|pattern| pattern.get_mut("components"));
    for component in components.and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(template) = component.get_mut("template") {
            canonicalise(template);
        }
    }
    kept
}

fn canonicalise(template: &mut Value) {
    if let Value::Object(members) = template {
        *template = stored_template(&PodTemplate(std::mem::take(members)));
    }
}

fn stored_template(template: &PodTemplate) -> Value {
    let mut template = canonical::pod_template(template.clone());
    template.0.entry("metadata").or_insert_with(|| Value::Object(Map::new()));
    Value::Object(template.0)
}

fn to_object(value: &impl serde::Serialize) -> Map<String, Value> {
    match serde_json::to_value(value) {
        Ok(Value::Object(members)) => members,
        _ => Map::new(),
    }
}

/// JSON as Go writes it: members by name, and signs that mean something in HTML as escapes.
fn go_json(value: &Value) -> String {
    let mut text = String::new();
    write_json(value, &mut text);
    text
}

fn write_json(value: &Value, text: &mut String) {
    match value {
        Value::Object(members) => {
            let mut members: Vec<(&String, &Value)> = members.iter().collect();
            members.sort_by_key(|(name, _)| *name);
            text.push('{');
            for (index, (name, value)) in members.into_iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                write_text(name, text);
                text.push(':');
                write_json(value, text);
            }
            text.push('}');
        }
        Value::Array(items) => {
            text.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                write_json(item, text);
            }
            text.push(']');
        }
        Value::String(string) => write_text(string, text),
        value => text.push_str(&value.to_string()),
    }
}

fn write_text(string: &str, text: &mut String) {
    for sign in Value::from(string).to_string().chars() {
        match sign {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                text.push_str(&format!("\\u{:04x}", u32::from(sign)));
            }
            sign => text.push(sign),
        }
    }
}

/// The value without what says nothing: nulls, and empty texts, lists and maps.
fn without_empty_values(value: &Value) -> Option<Value> {
    match value {
        Value::Null => None,
        Value::String(text) if text.is_empty() => None,
        Value::Array(items) if items.is_empty() => None,
        // An item's place means something, so it stays even if it says nothing.
        Value::Array(items) => {
            Some(items.iter().map(|item| without_empty_values(item).unwrap_or(Value::Null)).collect())
        }
        Value::Object(members) => {
            let members =
                members.iter().filter_map(|(name, value)| Some((name.clone(), without_empty_values(value)?)));
            let members: Map<String, Value> = members.collect();
            (!members.is_empty()).then_some(Value::Object(members))
        }
        value => Some(value.clone()),
    }
}
