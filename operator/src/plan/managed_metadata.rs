//! Labels and annotations that the operator wrote to an object, by the object's managed fields.

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use moongate_render::Manifest;

use super::FIELD_MANAGER;

/// Labels or annotations that the manifest no longer contains, but that our field manager owns.
pub(super) fn stale_keys(wanted: &Manifest, live: &ObjectMeta, member: &str) -> BTreeSet<String> {
    let entries = live.managed_fields.iter().flatten();
    let own_entries = entries.filter(|entry| entry.manager.as_deref() == Some(FIELD_MANAGER));
    let fields = own_entries.filter_map(|entry| {
        let fields = entry.fields_v1.as_ref()?;
        fields.0.get("f:metadata")?.get(format!("f:{member}"))?.as_object()
    });
    let keys = fields.flat_map(|fields| fields.keys()).filter_map(|field| field.strip_prefix("f:"));
    let live = if member == "labels" { &live.labels } else { &live.annotations };
    let wanted = wanted.0.get("metadata").and_then(|metadata| metadata.get(member));
    let is_stale = |key: &&str| {
        live.as_ref().is_some_and(|live| live.contains_key(*key))
            && wanted.is_none_or(|wanted| wanted.get(key).is_none())
    };
    keys.filter(is_stale).map(str::to_owned).collect()
}
