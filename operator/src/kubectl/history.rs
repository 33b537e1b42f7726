//! Revisions of a group: what they were, how they differ, and going back to one.

use moongate_render::revision::SpecRevision as Rendered;
use rbg_api::conversion::{ApiVersion, convert};
use rbg_api::v1alpha2::RoleBasedGroup;
use serde::Serialize;
use serde_json::Value;

use super::KubectlError;
use super::cluster::{GroupSnapshot, current};
use super::differences::{FieldDifference, differences, summary};
use super::edit::text;
use crate::ResourceKind;

/// One stored revision.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GroupRevision {
    /// Its number.
    pub number: i64,
    /// Name of its ControllerRevision.
    pub name: String,
    /// When it was made, RFC 3339.
    pub made: String,
    /// Whether the group is so now.
    pub is_current: bool,
    /// How it differs from the one before it, in a few words.
    pub changes: Vec<String>,
    /// What it keeps.
    #[serde(skip)]
    pub data: Value,
}

/// The stored revisions of a group, the oldest first.
#[derive(Debug, Clone, Serialize)]
pub struct RevisionHistory {
    /// Them.
    pub revisions: Vec<GroupRevision>,
    /// What the group would be stored as now.
    #[serde(skip)]
    now: Value,
}

impl RevisionHistory {
    /// Reads it.
    ///
    /// # Errors
    /// [`KubectlError::Unreadable`].
    pub fn read(group: &Value, family: &GroupSnapshot) -> Result<Self, KubectlError> {
        let now = rendered(group)?;
        let uid = &group["metadata"]["uid"];
        let is_own = |revision: &&Value| {
            let owners = revision["metadata"]["ownerReferences"].as_array().into_iter().flatten();
            owners.into_iter().any(|owner| owner["uid"] == *uid)
        };
        let mut stored: Vec<&Value> = family.server.all(ResourceKind::Revision).filter(is_own).collect();
        stored.sort_by_key(|revision| revision["revision"].as_i64());
        let newest_same = stored.iter().rposition(|revision| now.is_same(&revision["data"]));
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
                made: text(&revision["metadata"]["creationTimestamp"]),
                is_current: newest_same == Some(index),
                changes,
                data,
            });
        }
        Ok(Self { revisions, now: now.data })
    }

    /// The revision of that number.
    ///
    /// # Errors
    /// [`KubectlError::NoRevision`].
    pub fn revision(&self, number: i64) -> Result<&GroupRevision, KubectlError> {
        let found = self.revisions.iter().find(|revision| revision.number == number);
        found.ok_or_else(|| KubectlError::NoRevision {
            revision: number,
            there: self.revisions.iter().map(|revision| revision.number.to_string()).collect(),
        })
    }

    /// The newest revision by which pods were others than now. How updates go about does not count.
    ///
    /// # Errors
    /// [`KubectlError::NothingEarlier`].
    pub fn previous(&self) -> Result<&GroupRevision, KubectlError> {
        let differs = |revision: &&GroupRevision| !self.differences_to(revision).is_empty();
        self.revisions.iter().rev().find(differs).ok_or(KubectlError::NothingEarlier)
    }

    /// What going back to the revision would change.
    #[must_use]
    pub fn differences_to(&self, revision: &GroupRevision) -> Vec<FieldDifference> {
        let mut all = differences(&self.now["spec"], &revision.data["spec"]);
        all.retain(|one| !one.path.contains("rolloutStrategy"));
        all
    }
}

fn rendered(group: &Value) -> Result<Rendered, KubectlError> {
    let typed: RoleBasedGroup = serde_json::from_value(group.clone())
        .map_err(|error| KubectlError::Unreadable(format!("the group cannot be read: {error}")))?;
    let name = typed.metadata.name.as_deref().unwrap_or_default();
    Ok(Rendered::for_group(name, &typed.spec, 0))
}

/// Puts a group, of either version, back to what the revision keeps. Replicas, which revisions do not keep, and how updates go
/// about stay as they are; so do roles that are the same.
///
/// # Errors
/// [`KubectlError::Unreadable`].
pub fn restore_revision(group: &mut Value, data: &Value) -> Result<(), KubectlError> {
    let version = ApiVersion::parse(group["apiVersion"].as_str().unwrap_or_default());
    let mut now = current(group.clone())?;
    let as_stored = rendered(&now)?.data;
    for list in ["roleTemplates", "roles"] {
        let wanted = restore_items(&now["spec"][list], &as_stored["spec"][list], &data["spec"][list]);
        match now["spec"].as_object_mut() {
            Some(spec) if wanted.is_empty() => drop(spec.remove(list)),
            Some(spec) => drop(spec.insert(list.to_owned(), wanted.into())),
            None => {}
        }
    }
    let version = version.unwrap_or(ApiVersion::V1alpha2);
    *group = convert(&now, version).map_err(|error| KubectlError::Unreadable(error.to_string()))?;
    Ok(())
}

/// The items that a revision has; those that would be stored the same as they are written now.
fn restore_items(live: &Value, as_stored: &Value, wanted: &Value) -> Vec<Value> {
    let (live, as_stored) = (named(live), named(as_stored));
    let one = |(name, item): (String, Value)| {
        let find = |list: &[(String, Value)]| {
            list.iter().find(|(other, _)| *other == name).map(|(_, item)| item.clone())
        };
        let (before, stored) = (find(&live), find(&as_stored));
        match before {
            Some(before) if stored.map(without_strategy) == Some(without_strategy(item.clone())) => before,
            before => keep_unrevisioned(item, before.as_ref()),
        }
    };
    named(wanted).into_iter().map(one).collect()
}

fn without_strategy(mut role: Value) -> Value {
    if let Value::Object(members) = &mut role {
        members.remove("rolloutStrategy");
    }
    role
}

/// The item with what revisions do not decide as it is now.
fn keep_unrevisioned(mut item: Value, before: Option<&Value>) -> Value {
    let Value::Object(members) = &mut item else { return item };
    for member in ["replicas", "rolloutStrategy"] {
        let now = before.map(|before| before.get(member).cloned().unwrap_or_default());
        match now.or_else(|| members.get(member).cloned()) {
            None | Some(Value::Null) => drop(members.remove(member)),
            Some(now) => drop(members.insert(member.to_owned(), now)),
        }
    }
    item
}

/// Items that have names.
fn named(list: &Value) -> Vec<(String, Value)> {
    let all = list.as_array().into_iter().flatten();
    all.filter_map(|item| Some((item["name"].as_str()?.to_owned(), item.clone()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let mut now = group("i:2", true);
        restore_revision(&mut now, &before).unwrap();
        let role = &now["spec"]["roles"][0];
        assert_eq!(role.pointer("/standalonePattern/template/spec/containers/0/image").unwrap(), "i:1");
        assert_eq!(
            (&role["replicas"], &role["rolloutStrategy"]["rollingUpdate"]["paused"]),
            (&json!(3), &json!(true))
        );
        assert_eq!(now["spec"]["roles"][1], group("i:2", true)["spec"]["roles"][1], "as it was written");
        assert!(now["spec"].get("roleTemplates").is_none());
    }
}
