//! The permissions of `manifests/permissions.yaml`, and those that an operator has used.

use std::collections::BTreeSet;

use kube::Client;
use kube::api::{Api, DynamicObject, ListParams};
use moongate_operator::ResourceKind;
use moongate_testkit::AuditEvent;
use serde_json::Value;

const MANIFEST: &str = include_str!("../../../manifests/permissions.yaml");

/// API group, resource with its subresource, and verb.
pub(crate) type RbacPermission = (String, String, String);

pub(crate) fn documents() -> Vec<Value> {
    serde_saphyr::from_multiple(MANIFEST).unwrap()
}

pub(crate) fn granted() -> BTreeSet<RbacPermission> {
    let mut all = BTreeSet::new();
    let texts = |list: &Value| -> Vec<String> { serde_json::from_value(list.clone()).unwrap() };
    for document in documents() {
        for rule in document["rules"].as_array().into_iter().flatten() {
            for group in texts(&rule["apiGroups"]) {
                for resource in texts(&rule["resources"]) {
                    let verbs = texts(&rule["verbs"]).into_iter();
                    all.extend(verbs.map(|verb| (group.clone(), resource.clone(), verb)));
                }
            }
        }
    }
    all
}

/// Permissions for requests in the audit log.
pub(crate) fn used(events: &[AuditEvent]) -> BTreeSet<RbacPermission> {
    let mut all = BTreeSet::new();
    for event in events {
        let Some(object) = &event.object_ref else { continue };
        let resource = match object.subresource.as_str() {
            "" => object.resource.clone(),
            subresource => format!("{}/{subresource}", object.resource),
        };
        all.insert((object.api_group.clone(), resource.clone(), event.verb.clone()));
        // A server-side apply that creates the object.
        if event.verb == "patch" && event.code() == 201 {
            all.insert((object.api_group.clone(), resource, "create".to_owned()));
        }
    }
    all
}

/// Permissions that the admission plugin OwnerReferencesPermissionEnforcement requires, which appear in no audit log: for owned
/// objects `delete`, and for owners with blocking references the update of `finalizers`.
pub(crate) async fn waiting_owners(client: &Client) -> BTreeSet<RbacPermission> {
    let mut all = BTreeSet::new();
    for kind in ResourceKind::ALL {
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &kind.resource());
        for object in api.list(&ListParams::default()).await.unwrap() {
            let owners = object.metadata.owner_references.unwrap_or_default();
            let resource = kind.resource();
            if owners.iter().any(|owner| owner.block_owner_deletion == Some(true)) {
                all.insert((resource.group, resource.plural, "delete".to_owned()));
            }
            for owner in owners.iter().filter(|owner| owner.block_owner_deletion == Some(true)) {
                let Some(kind) = ResourceKind::parse(&owner.kind) else { continue };
                let resource = kind.resource();
                all.insert((resource.group, format!("{}/finalizers", resource.plural), "update".to_owned()));
            }
        }
    }
    all
}

/// Every kind that the operator creates has an owner, except for groups outside of sets.
#[test]
fn owned_kinds_may_be_deleted_and_owners_finalized() {
    let granted = granted();
    let is_granted = |group: &str, resource: &str, verb: &str| {
        granted.contains(&(group.to_owned(), resource.to_owned(), verb.to_owned()))
    };
    let mut created = 0;
    for kind in ResourceKind::ALL {
        let resource = kind.resource();
        if is_granted(&resource.group, &resource.plural, "create") {
            created += 1;
            assert!(is_granted(&resource.group, &resource.plural, "delete"), "{kind:?}");
        }
    }
    assert_eq!(created, 16, "kinds with the three kinds of pods and two of PodGroups");
    let owners = [
        ResourceKind::GroupSet,
        ResourceKind::Group,
        ResourceKind::Set,
        ResourceKind::Instance,
        ResourceKind::StatefulSet,
        ResourceKind::Warmup,
    ];
    for kind in owners {
        let resource = kind.resource();
        assert!(
            is_granted(&resource.group, &format!("{}/finalizers", resource.plural), "update"),
            "{kind:?}"
        );
    }
}
