//! Revision history of a group: contents, differences and rollback.

use moongate_render::revision::SpecRevision as Rendered;
use rbg_api::conversion::{ApiVersion, convert, copy_mirror};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde::Serialize;
use serde_json::Value;

use super::KubectlError;
use super::cluster::{GroupSnapshot, current};
use super::differences::{FieldDifference, differences, summary};
use super::edit::text;
use crate::ResourceKind;

/// A stored revision of a group.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupRevision {
    pub number: i64,
    pub name: String,
    pub created_at: String,
    /// Whether the revision equals the group's present spec.
    pub is_current: bool,
    /// Summary of the differences from the previous revision.
    pub changes: Vec<String>,
    /// Spec stored in the revision.
    #[serde(skip)]
    pub data: Value,
}

/// The stored revisions of a group, oldest first.
#[derive(Debug, Clone, Serialize)]
pub struct RevisionHistory {
    /// The stored revisions, oldest first.
    pub revisions: Vec<GroupRevision>,
    /// The data that a revision of the present spec would contain.
    #[serde(skip)]
    present: Value,
}

impl RevisionHistory {
    /// Reads the revisions of a group from its snapshot.
    ///
    /// # Errors
    /// [`KubectlError::Conversion`] or [`KubectlError::InvalidGroup`].
    pub fn read(group: &Value, snapshot: &GroupSnapshot) -> Result<Self, KubectlError> {
        let present = rendered(group)?;
        let uid = &group["metadata"]["uid"];
        let is_owned = |revision: &&Value| {
            let owners = revision["metadata"]["ownerReferences"].as_array().into_iter().flatten();
            owners.into_iter().any(|owner| owner["uid"] == *uid)
        };
        let mut stored: Vec<&Value> = snapshot.server.all(ResourceKind::Revision).filter(is_owned).collect();
        stored.sort_by_key(|revision| revision["revision"].as_i64());
        let newest_same = stored.iter().rposition(|revision| present.is_same(&revision["data"]));
        let mut revisions: Vec<GroupRevision> = Vec::new();
        for (index, revision) in stored.iter().enumerate() {
            let data = revision["data"].clone();
            let changes = match revisions.last() {
                Some(before) => summary(&differences(&before.data["spec"], &data["spec"])),
                None => Vec::new(),
            };
            revisions.push(GroupRevision {
                number: revision["revision"].as_i64().unwrap_or(0),
                name: text(&revision["metadata"]["name"]),
                created_at: text(&revision["metadata"]["creationTimestamp"]),
                is_current: newest_same == Some(index),
                changes,
                data,
            });
        }
        Ok(Self { revisions, present: present.data })
    }

    /// Looks up a revision by its number.
    ///
    /// # Errors
    /// [`KubectlError::NoRevision`].
    pub fn revision(&self, number: i64) -> Result<&GroupRevision, KubectlError> {
        let found = self.revisions.iter().find(|revision| revision.number == number);
        found.ok_or_else(|| KubectlError::NoRevision {
            revision: number,
            existing: self.revisions.iter().map(|revision| revision.number.to_string()).collect(),
        })
    }

    /// The newest revision with other pods than the present spec. Differences of the rollout strategy do not count.
    ///
    /// # Errors
    /// [`KubectlError::NothingEarlier`].
    pub fn previous(&self) -> Result<&GroupRevision, KubectlError> {
        let differs = |revision: &&GroupRevision| !self.differences_to(revision).is_empty();
        self.revisions.iter().rev().find(differs).ok_or(KubectlError::NothingEarlier)
    }

    /// The changes that a rollback to the revision would make.
    #[must_use]
    pub fn differences_to(&self, revision: &GroupRevision) -> Vec<FieldDifference> {
        let mut all = differences(&self.present["spec"], &revision.data["spec"]);
        all.retain(|difference| !difference.path.contains("rolloutStrategy"));
        all
    }
}

fn rendered(group: &Value) -> Result<Rendered, KubectlError> {
    let typed: RoleBasedGroup = serde_json::from_value(group.clone()).map_err(KubectlError::InvalidGroup)?;
    let name = typed.metadata.name.as_deref().unwrap_or_default();
    Ok(Rendered::for_group(name, &typed.spec, 0))
}

/// Restores a group, of either version, to a revision. Replicas and rollout strategies, which are not part of a rollback,
/// stay as they are, and so do unchanged roles.
///
/// # Errors
/// [`KubectlError::Conversion`] or [`KubectlError::InvalidGroup`].
pub fn restore_revision(group: &mut Value, data: &Value) -> Result<(), KubectlError> {
    let version = ApiVersion::parse(group["apiVersion"].as_str().unwrap_or_default());
    let mut present = current(group)?;
    let as_stored = rendered(&present)?.data;
    for list in ["roleTemplates", "roles"] {
        let wanted = restore_items(&present["spec"][list], &as_stored["spec"][list], &data["spec"][list]);
        match present["spec"].as_object_mut() {
            Some(spec) if wanted.is_empty() => drop(spec.remove(list)),
            Some(spec) => drop(spec.insert(list.to_owned(), wanted.into())),
            None => {}
        }
    }
    let version = version.unwrap_or(ApiVersion::V1alpha2);
    *group = convert(&present, version)?;
    Ok(())
}

/// The items of a revision; an unchanged item is kept in its present form.
fn restore_items(live: &Value, as_stored: &Value, wanted: &Value) -> Vec<Value> {
    let (live, as_stored) = (named(live), named(as_stored));
    let restore = |(name, item): (String, Value)| {
        let find = |list: &[(String, Value)]| {
            list.iter().find(|(other, _)| *other == name).map(|(_, item)| item.clone())
        };
        let (before, stored) = (find(&live), find(&as_stored));
        match before {
            Some(before) if stored.map(without_strategy) == Some(without_strategy(item.clone())) => before,
            before => keep_unrevisioned(item, before.as_ref()),
        }
    };
    named(wanted).into_iter().map(restore).collect()
}

fn without_strategy(mut role: Value) -> Value {
    if let Value::Object(members) = &mut role {
        members.remove("rolloutStrategy");
    }
    role
}

/// The revision's item with the present replicas and rollout strategy, and with the mirror of its template, which revisions do
/// not contain.
fn keep_unrevisioned(mut item: Value, before: Option<&Value>) -> Value {
    let Value::Object(members) = &mut item else { return item };
    if let Some(Value::Object(before)) = before {
        copy_mirror(before, members);
    }
    for member in ["replicas", "rolloutStrategy"] {
        let present = before.map(|before| before.get(member).cloned().unwrap_or_default());
        match present.or_else(|| members.get(member).cloned()) {
            None | Some(Value::Null) => drop(members.remove(member)),
            Some(present) => drop(members.insert(member.to_owned(), present)),
        }
    }
    item
}

/// Items with a name, with their names.
fn named(list: &Value) -> Vec<(String, Value)> {
    let all = list.as_array().into_iter().flatten();
    all.filter_map(|item| Some((item["name"].as_str()?.to_owned(), item.clone()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rbg_api::conversion::fold_mirrors;
    use serde_json::json;

    fn group(image: &str, paused: bool) -> Value {
        json!({ "apiVersion": "workloads.x-k8s.io/v1alpha2", "kind": "RoleBasedGroup",
            "metadata": { "name": "g" }, "spec": { "roles": [
                { "name": "a", "replicas": 3, "rolloutStrategy": { "type": "RollingUpdate",
                    "rollingUpdate": { "paused": paused } },
                  "standalonePattern": { "template": { "spec": { "containers": [
                    { "name": "c", "image": image, "resources": {} }], "volumes": [] } } } },
                { "name": "b", "replicas": 2, "standalonePattern": { "template": { "spec": {
                    "containers": [{ "name": "c", "image": "other" }] } } } },
            ] } })
    }

    #[test]
    fn rollback_keeps_replicas_strategy_and_unchanged_roles() {
        let before = rendered(&group("i:1", false)).unwrap().data;
        let mut present = group("i:2", true);
        restore_revision(&mut present, &before).unwrap();
        let role = &present["spec"]["roles"][0];
        assert_eq!(role.pointer("/standalonePattern/template/spec/containers/0/image").unwrap(), "i:1");
        assert_eq!(
            (&role["replicas"], &role["rolloutStrategy"]["rollingUpdate"]["paused"]),
            (&json!(3), &json!(true))
        );
        assert_eq!(
            present["spec"]["roles"][1],
            group("i:2", true)["spec"]["roles"][1],
            "an unchanged role stays as it is"
        );
        assert!(present["spec"].get("roleTemplates").is_none());
    }

    #[test]
    fn rollback_restores_the_mirror_of_a_template() {
        let mut older = group("i:1", false);
        older["metadata"]["annotations"] = json!({ rbg_api::conversion::ORIGIN: "v1alpha1" });
        let older = convert(&older, ApiVersion::V1alpha1).unwrap();
        let mut present = convert(&older, ApiVersion::V1alpha2).unwrap();
        let data = rendered(&present).unwrap().data;
        let image = |path: &str| format!("/spec/roles/0/{path}/spec/containers/0/image");
        for path in ["template", "standalonePattern/template"] {
            *present.pointer_mut(&image(path)).unwrap() = "i:2".into();
        }
        fold_mirrors(&mut present);
        restore_revision(&mut present, &data).unwrap();
        fold_mirrors(&mut present);
        for path in ["template", "standalonePattern/template"] {
            assert_eq!(present.pointer(&image(path)).unwrap(), "i:1", "{path}");
        }
    }
}
