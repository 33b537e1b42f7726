//! Mirrors: pod templates of a v1alpha2 role a second time, at the path that they have in v1alpha1.
//!
//! `kubectl patch` sends a JSON patch to the newest version unless the command names one, and a patch written for v1alpha1
//! replaces `/spec/roles/N/template`. Conversion to v1alpha2 therefore leaves `template` in the roles of a group that was written
//! as v1alpha1, equal to the template in the role's pattern, with the hash of both. An edit of either is detected by
//! the hash and copied to the other one: by the operator, and by the conversion to v1alpha1, which has only one of them.
//!
//! The hash is a member of the role rather than an annotation of the group, so that server-side applies of different roles do not
//! conflict, and so that clients which replace a role without its mirror also remove its hash.

use serde_json::{Map, Value};

use super::ORIGIN;
use crate::PodTemplate;
use crate::template::{member_list, member_object};
use crate::v1alpha2::{RoleBasedGroup, RoleSpec};

type JsonObject = Map<String, Value>;

/// Member of a v1alpha2 role: the mirror of its pattern's template.
const MIRROR: &str = "template";
/// Member of a v1alpha2 role: hash of the template when mirror and pattern were last equal.
const MIRROR_HASH: &str = "mirroredTemplateHash";

/// A group whose mirrors equal the templates in its patterns again.
#[derive(Debug, Clone, PartialEq)]
pub struct FoldedGroup {
    pub group: RoleBasedGroup,
    /// Names of the roles that have changed.
    pub roles: Vec<String>,
}

/// The template that mirror and pattern have in common after an edit.
struct Resolution {
    /// `None` if the pattern has no template any more, so that there is nothing to mirror.
    template: Option<JsonObject>,
    /// Whether both were edited, to different templates. The pattern's is used.
    is_conflict: bool,
}

/// Adds mirrors to the roles of a group in v1alpha2 that was written as v1alpha1.
pub(super) fn add(group: &mut JsonObject) {
    each_role(group, |role| {
        if role.contains_key(MIRROR) || role.contains_key(MIRROR_HASH) {
            return;
        }
        if let Some(template) =
            pattern(role).and_then(|pattern| pattern.get("template")?.as_object()).cloned()
        {
            set_mirror(role, template);
        }
    });
}

/// Removes the mirrors of a group in v1alpha2, after copying their edits to the patterns.
pub(super) fn fold_and_remove(group: &mut JsonObject) {
    fold(group);
    each_role(group, remove_mirror);
}

/// Makes mirrors and patterns equal again after an edit of either. Returns the names of the roles in which both were
/// edited to different templates: the pattern's is kept.
pub fn fold_mirrors(group: &mut Value) -> Vec<String> {
    group.as_object_mut().map(fold).unwrap_or_default()
}

/// A v1alpha2 group without mirrors, whose edits are in the patterns.
#[must_use]
pub fn without_mirrors(group: &Value) -> Value {
    let mut group = group.clone();
    if let Value::Object(members) = &mut group {
        fold_and_remove(members);
    }
    group
}

/// As [`fold_mirrors`]; `None` if nothing was edited.
#[must_use]
pub fn fold_group(group: &RoleBasedGroup) -> Option<FoldedGroup> {
    let annotations = group.metadata.annotations.as_ref()?;
    if !annotations.contains_key(ORIGIN) {
        return None;
    }
    let edited = |(index, role)| Some((index, resolve_role(role)?));
    let edits: Vec<(usize, Resolution)> = group.spec.roles.iter().enumerate().filter_map(edited).collect();
    if edits.is_empty() {
        return None;
    }
    let mut folded = FoldedGroup { group: group.clone(), roles: Vec::new() };
    for (index, resolution) in edits {
        let Some(role) = folded.group.spec.roles.get_mut(index) else { continue };
        folded.roles.push(role.name.clone());
        apply_to_role(resolution, role);
    }
    Some(folded)
}

/// Removes a role's mirror and its hash, if it has both. Revisions of roles do not contain them.
pub fn remove_mirror(role: &mut JsonObject) {
    if mirror(role).is_some() {
        role.remove(MIRROR);
        role.remove(MIRROR_HASH);
    }
}

/// Copies the mirror of a role to another spec of it, whose template is an edit of the pattern then.
pub fn copy_mirror(from: &JsonObject, to: &mut JsonObject) {
    if let Some((mirror, recorded)) = mirror(from) {
        to.insert(MIRROR.to_owned(), mirror.clone());
        to.insert(MIRROR_HASH.to_owned(), recorded.into());
    }
}

fn resolve_role(role: &RoleSpec) -> Option<Resolution> {
    let recorded = role.other.get(MIRROR_HASH)?.as_str()?;
    let template = if let Some(pattern) = &role.leader_worker_pattern {
        pattern.template.as_ref()
    } else if role.custom_components_pattern.is_some() {
        None
    } else {
        role.standalone_pattern.as_ref().and_then(|pattern| pattern.template.as_ref())
    };
    resolve(recorded, role.other.get(MIRROR)?, template.map(|template| &template.0))
}

fn apply_to_role(resolution: Resolution, role: &mut RoleSpec) {
    let Some(template) = resolution.template else {
        role.other.remove(MIRROR);
        role.other.remove(MIRROR_HASH);
        return;
    };
    role.other.insert(MIRROR_HASH.to_owned(), hash(&template).into());
    role.other.insert(MIRROR.to_owned(), Value::Object(template.clone()));
    if let Some(pattern) = &mut role.leader_worker_pattern {
        pattern.template = Some(PodTemplate(template));
    } else if let Some(pattern) = &mut role.standalone_pattern {
        pattern.template = Some(PodTemplate(template));
    }
}

fn fold(group: &mut JsonObject) -> Vec<String> {
    let mut conflicts = Vec::new();
    each_role(group, |role| {
        let Some((mirror, recorded)) = mirror(role) else { return };
        let template = pattern(role).and_then(|pattern| pattern.get("template")?.as_object());
        let Some(resolution) = resolve(recorded, mirror, template) else { return };
        if resolution.is_conflict {
            conflicts.extend(role.get("name").and_then(Value::as_str).map(str::to_owned));
        }
        match resolution.template {
            None => remove_mirror(role),
            Some(template) => {
                if let Some(name) = pattern_name(role) {
                    member_object(role, name).insert("template".to_owned(), template.clone().into());
                }
                set_mirror(role, template);
            }
        }
    });
    conflicts
}

/// Compares mirror and pattern with the recorded hash. `None` if neither was edited.
fn resolve(recorded: &str, mirror: &Value, pattern: Option<&JsonObject>) -> Option<Resolution> {
    let Some(pattern) = pattern else { return Some(Resolution { template: None, is_conflict: false }) };
    let pattern_hash = hash(pattern);
    let mirror = mirror.as_object().map(|mirror| (mirror, hash(mirror)));
    let is_pattern_edited = pattern_hash != recorded;
    let is_mirror_edited = mirror.as_ref().is_none_or(|(_, mirror_hash)| mirror_hash != recorded);
    if !is_pattern_edited && !is_mirror_edited {
        return None;
    }
    let kept = |is_conflict| Some(Resolution { template: Some(pattern.clone()), is_conflict });
    match mirror {
        Some((mirror, _)) if !is_pattern_edited => {
            Some(Resolution { template: Some(mirror.clone()), is_conflict: false })
        }
        Some((_, mirror_hash)) => kept(is_mirror_edited && mirror_hash != pattern_hash),
        None => kept(true),
    }
}

/// Calls `change` for each role of a group that was written as v1alpha1.
fn each_role(group: &mut JsonObject, change: impl FnMut(&mut JsonObject)) {
    let annotations = group.get("metadata").and_then(|metadata| metadata.get("annotations"));
    if annotations.is_none_or(|annotations| annotations.get(ORIGIN).is_none()) {
        return;
    }
    let Some(Value::Object(spec)) = group.get_mut("spec") else { return };
    if spec.get("roles").is_some_and(Value::is_array) {
        member_list(spec, "roles").iter_mut().filter_map(Value::as_object_mut).for_each(change);
    }
}

/// The role's mirror with the recorded hash.
fn mirror(role: &JsonObject) -> Option<(&Value, &str)> {
    Some((role.get(MIRROR)?, role.get(MIRROR_HASH)?.as_str()?))
}

fn set_mirror(role: &mut JsonObject, template: JsonObject) {
    role.insert(MIRROR_HASH.to_owned(), hash(&template).into());
    role.insert(MIRROR.to_owned(), Value::Object(template));
}

/// The pattern whose template v1alpha1 has in the role itself.
fn pattern_name(role: &JsonObject) -> Option<&'static str> {
    let has = |name: &str| role.get(name).is_some_and(Value::is_object);
    if has("leaderWorkerPattern") {
        return Some("leaderWorkerPattern");
    }
    (!has("customComponentsPattern") && has("standalonePattern")).then_some("standalonePattern")
}

fn pattern(role: &JsonObject) -> Option<&JsonObject> {
    role.get(pattern_name(role)?)?.as_object()
}

/// FNV-1a, 64 bits, in hexadecimal digits. It detects edits, and its value must be the same in all releases.
fn hash(template: &JsonObject) -> String {
    format!("{:016x}", hash_members(template, 0xcbf2_9ce4_8422_2325))
}

fn hash_bytes(bytes: &[u8], hash: u64) -> u64 {
    bytes.iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Text with its length, so that different values never have the same bytes.
fn hash_text(text: &str, hash: u64) -> u64 {
    hash_bytes(text.as_bytes(), hash_bytes(format!("{}:", text.len()).as_bytes(), hash))
}

/// Members in the order of their names; null equals absence, because an API server may remove it.
fn hash_members(members: &JsonObject, hash: u64) -> u64 {
    let mut members: Vec<(&String, &Value)> = members.iter().filter(|(_, value)| !value.is_null()).collect();
    members.sort_unstable_by_key(|(name, _)| *name);
    let all = members
        .into_iter()
        .fold(hash_bytes(b"{", hash), |hash, (name, value)| hash_value(value, hash_text(name, hash)));
    hash_bytes(b"}", all)
}

fn hash_value(value: &Value, hash: u64) -> u64 {
    match value {
        Value::Object(members) => hash_members(members, hash),
        Value::Array(items) => {
            let all = items.iter().fold(hash_bytes(b"[", hash), |hash, item| hash_value(item, hash));
            hash_bytes(b"]", all)
        }
        Value::String(text) => hash_text(text, hash_bytes(b"\"", hash)),
        other => hash_bytes(format!("{other};").as_bytes(), hash),
    }
}
