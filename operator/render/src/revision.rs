//! Revisions: the parts of a spec that change pods, their hash, and the ControllerRevision that stores them.
//!
//! Data and hashes equal those of upstream's controller, so that its revisions are recognised.

use rbg_api::conversion::remove_mirror;
use rbg_api::v1alpha2::{InstanceComponent, RoleBasedGroupSpec, RoleSpec};
use rbg_api::{PodTemplate, keys};
use serde_json::{Map, Value, json};

use crate::canonical;
use crate::hash::{fnv1, fnv1a, safe_encode};
use crate::manifest::{Manifest, ManifestMetadata, OwnerRef, StringMap};

/// One revision of a spec.
#[derive(Debug, Clone, PartialEq)]
pub struct SpecRevision {
    pub name: String,
    /// End of the name, and value of the pods' revision label.
    pub hash: String,
    pub data: Value,
}

/// Metadata of a ControllerRevision, except its name.
#[derive(Debug)]
pub struct RevisionMetadata<'a> {
    pub namespace: &'a str,
    pub labels: StringMap,
    pub annotations: StringMap,
    pub owner: &'a OwnerRef,
}

impl SpecRevision {
    /// Revision of a RoleInstanceSet. `template` is `spec.roleInstanceTemplate`; `collisions` counts others with the same hash.
    #[must_use]
    pub fn for_set(set: &str, template: &Value, collisions: i32) -> Self {
        let mut template = template.clone();
        if let Value::Object(template) = &mut template {
            template.insert("$patch".to_owned(), "replace".into());
        }
        Self::numbered(set, json!({ "spec": { "roleInstanceTemplate": template } }), collisions)
    }

    /// Revision of a RoleInstance: its components without their sizes.
    #[must_use]
    pub fn for_instance(instance: &str, components: &[InstanceComponent], collisions: i32) -> Self {
        let order: Vec<Value> =
            components.iter().map(|component| json!({ "name": component.name })).collect();
        let components: Vec<Value> = components
            .iter()
            .map(|component| {
                let mut template = component.template.0.clone();
                template.insert("$patch".to_owned(), "replace".into());
                let mut stored = to_object(component);
                stored.remove("size");
                stored.insert("template".to_owned(), Value::Object(template));
                stored.entry("serviceName").or_insert(Value::Null);
                Value::Object(stored)
            })
            .collect();
        let data = json!({ "spec": { "$setElementOrder/components": order, "components": components } });
        Self::numbered(instance, data, collisions)
    }

    /// Revision of a group: its roles without their replicas. `number` counts the group's revisions from 1.
    #[must_use]
    pub fn for_group(group: &str, spec: &RoleBasedGroupSpec, number: i64) -> Self {
        let replace = json!({ "$patch": "replace" });
        let templates = spec.role_templates.iter().map(|template| {
            let mut stored = to_object(template);
            stored.insert("template".to_owned(), stored_template(&template.template));
            Value::Object(stored)
        });
        let roles = spec.roles.iter().map(|role| {
            let mut stored = stored_role(role);
            stored.insert("replicas".to_owned(), Value::Null);
            Value::Object(stored)
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

    /// Whether a stored revision has the same content. Its hash may differ: upstream's structures have other fields.
    #[must_use]
    pub fn is_same(&self, stored: &Value) -> bool {
        without_empty_values(&self.data) == without_empty_values(stored)
    }

    /// Renders the ControllerRevision with this number.
    #[must_use]
    pub fn manifest(&self, metadata: RevisionMetadata<'_>, number: i64) -> Manifest {
        let RevisionMetadata { namespace, labels, annotations, owner } = metadata;
        let metadata =
            ManifestMetadata { name: &self.name, namespace, labels, annotations, owner: Some(owner) };
        let mut manifest =
            Manifest::new("apps/v1", "ControllerRevision", metadata, json!({ "revision": number }));
        // Inserted directly: `Manifest::new` would drop the nulls in the data.
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

/// Hash of one role and the role template that it references.
pub(crate) fn role_hash(spec: &RoleBasedGroupSpec, role: &RoleSpec) -> String {
    let mut stored = stored_role(role);
    stored.remove("replicas");
    let standalone = role.standalone_pattern.as_ref().and_then(|pattern| pattern.template_ref.as_ref());
    let leader_worker = role.leader_worker_pattern.as_ref().and_then(|pattern| pattern.template_ref.as_ref());
    let reference = standalone.or(leader_worker);
    let template = reference
        .and_then(|reference| spec.role_templates.iter().find(|template| template.name == reference.name));
    let template = template.map(|template| go_json(&stored_template(&template.template))).unwrap_or_default();
    safe_encode(fnv1a(go_json(&Value::Object(stored)).bytes().chain(template.bytes())))
}

/// A role with its templates in canonical form, and without the mirror of its template, which changes no pods.
fn stored_role(role: &RoleSpec) -> Map<String, Value> {
    let mut stored = to_object(role);
    remove_mirror(&mut stored);
    for pattern in ["standalonePattern", "leaderWorkerPattern"] {
        let template = stored.get_mut(pattern).and_then(|pattern| pattern.get_mut("template"));
        if let Some(template) = template {
            canonicalise(template);
        }
    }
    let components =
        stored.get_mut("customComponentsPattern").and_then(|pattern| pattern.get_mut("components"));
    for component in components.and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(template) = component.get_mut("template") {
            canonicalise(template);
        }
    }
    stored
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

/// JSON as Go encodes it: fields sorted by name, and HTML's special characters escaped.
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
    for character in Value::from(string).to_string().chars() {
        match character {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                text.push_str(&format!("\\u{:04x}", u32::from(character)));
            }
            character => text.push(character),
        }
    }
}

/// The value without nulls and empty strings, lists and maps.
fn without_empty_values(value: &Value) -> Option<Value> {
    match value {
        Value::Null => None,
        Value::String(text) if text.is_empty() => None,
        Value::Array(items) if items.is_empty() => None,
        // Positions in lists are significant, so items stay even if they are empty.
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
