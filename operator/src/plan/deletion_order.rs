//! Order in which unordered instances are removed when their set has too many.

use std::cmp::Reverse;

use k8s_openapi::api::core::v1::Pod;
use rbg_api::keys;
use rbg_api::v1alpha2::RoleInstance;

use super::lifecycle;
use super::set::InstanceSetView;
use crate::status::is_ready;

/// Sorts instances so that the first ones are removed first: those whose removal has begun, those that are not ready, those of an
/// older revision, which lose their state in the update anyway, those with the lowest deletion cost, and then the youngest.
pub(super) fn sort(view: &InstanceSetView<'_>, instances: &mut [&RoleInstance]) {
    instances.sort_by_cached_key(|live| {
        let created = live.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (
            !lifecycle::is_leaving(live),
            is_ready(live),
            view.is_updated(live),
            deletion_cost(live, view.input.pods),
            Reverse(created),
        )
    });
}

/// Cost of deleting an instance: its own annotation, or the sum of those of its pods.
fn deletion_cost(instance: &RoleInstance, pods: &dyn Fn(&str) -> Vec<Pod>) -> i64 {
    let annotations = instance.metadata.annotations.as_ref();
    let own = annotations.and_then(|all| parse(all.get(keys::INSTANCE_DELETION_COST)?));
    own.unwrap_or_else(|| {
        let pods = pods(instance.metadata.uid.as_deref().unwrap_or_default());
        let cost = |pod: &Pod| parse(pod.metadata.annotations.as_ref()?.get(keys::POD_DELETION_COST)?);
        pods.iter().filter_map(cost).sum()
    })
}

/// A cost as Kubernetes accepts it: a 32-bit integer without a plus sign.
fn parse(text: &str) -> Option<i64> {
    text.parse::<i32>().ok().filter(|_| !text.starts_with('+')).map(i64::from)
}
