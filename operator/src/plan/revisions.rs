//! Finds the revision of a spec among the stored ones, or creates one.

use k8s_openapi::api::apps::v1::ControllerRevision;
use moongate_render::OwnerRef;
use moongate_render::revision::{RevisionMetadata, SpecRevision};
use rbg_api::keys;
use serde_json::Value;

use super::{ReconcilePlan, WriteAction};
use crate::ResourceKind;

/// The present revision of a spec.
#[derive(Debug, Clone)]
pub(super) struct RevisionRef {
    pub(super) name: String,
    /// Value of the pods' revision label.
    pub(super) hash: String,
}

/// The object that a new revision belongs to.
pub(super) struct RevisionOwner<'a> {
    pub(super) namespace: &'a str,
    pub(super) labels: std::collections::BTreeMap<String, String>,
    pub(super) reference: OwnerRef,
}

/// Returns the stored revision equal to `wanted`, even if another controller wrote it; else adds a step that stores it. A
/// hash that another
/// spec already has is resolved by `make`, which takes the number of collisions.
pub(super) fn find_or_make(
    render: impl Fn(i32) -> SpecRevision,
    stored: &[ControllerRevision],
    owner: RevisionOwner<'_>,
    plan: &mut ReconcilePlan,
) -> RevisionRef {
    let last = stored.iter().map(|revision| revision.revision).max().unwrap_or(0);
    let mut collisions = 0;
    loop {
        let wanted = render(collisions);
        let same = stored.iter().find(|stored| data(stored).is_some_and(|data| wanted.is_same(&data)));
        if let Some(same) = same {
            let name = same.metadata.name.clone().unwrap_or_default();
            // A rollback: the old revision is the newest again.
            if same.revision < last {
                let body = serde_json::json!({ "revision": last.saturating_add(1) });
                let action = WriteAction::Patch {
                    kind: ResourceKind::Revision,
                    name: name.clone(),
                    status: false,
                    body,
                };
                plan.push(action, "an earlier revision is active again");
            }
            return RevisionRef { hash: hash(same), name };
        }
        let is_taken = stored.iter().any(|stored| stored.metadata.name.as_ref() == Some(&wanted.name));
        if is_taken {
            collisions += 1;
            continue;
        }
        let mut labels = owner.labels;
        labels.insert(keys::REVISION_HASH.to_owned(), wanted.hash.clone());
        let metadata = RevisionMetadata {
            namespace: owner.namespace,
            labels,
            annotations: std::collections::BTreeMap::new(),
            owner: &owner.reference,
        };
        let manifest = wanted.manifest(metadata, last.saturating_add(1));
        plan.push(WriteAction::Create(manifest), "the spec has a new revision");
        return RevisionRef { name: wanted.name, hash: wanted.hash };
    }
}

/// Deletes unused revisions beyond the newest `limit`.
pub(super) fn prune(
    stored: &[ControllerRevision],
    in_use: impl Fn(&str) -> bool,
    limit: usize,
    plan: &mut ReconcilePlan,
) {
    let mut unused: Vec<&ControllerRevision> =
        stored.iter().filter(|stored| !in_use(stored.metadata.name.as_deref().unwrap_or_default())).collect();
    unused.sort_by_key(|stored| std::cmp::Reverse(stored.revision));
    for old in unused.into_iter().skip(limit) {
        let (Some(name), Some(uid)) = (old.metadata.name.clone(), old.metadata.uid.clone()) else { continue };
        plan.push(
            WriteAction::Delete { kind: ResourceKind::Revision, name, uid },
            "the revision is beyond the history limit",
        );
    }
}

pub(super) fn data(stored: &ControllerRevision) -> Option<Value> {
    serde_json::to_value(stored.data.as_ref()?).ok()
}

/// Value of the revision label of its pods.
pub(super) fn hash(stored: &ControllerRevision) -> String {
    let label = stored.metadata.labels.as_ref().and_then(|labels| labels.get(keys::REVISION_HASH));
    let from_name = || {
        let name = stored.metadata.name.as_deref().unwrap_or_default();
        name.rsplit('-').next().unwrap_or_default().to_owned()
    };
    label.cloned().unwrap_or_else(from_name)
}
