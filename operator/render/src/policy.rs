//! The CoordinatedPolicy converted from v1alpha1's `coordination`.

use rbg_api::conversion::COORDINATION;
use rbg_api::v1alpha1::Coordination;
use serde_json::{Value, json};

use crate::error::RenderError;
use crate::group::GroupContext;
use crate::manifest::Manifest;

/// The CoordinatedPolicy converted from v1alpha1's `coordination`. Without controller reference, since users may edit it.
///
/// # Errors
/// [`RenderError::Coordination`].
pub fn coordinated_policy(group: GroupContext<'_>) -> Result<Option<Manifest>, RenderError> {
    let Some(text) = group.annotation(COORDINATION).filter(|text| !text.is_empty()) else { return Ok(None) };
    let rules: Vec<Coordination> =
        serde_json::from_str(text).map_err(|error| RenderError::Coordination(error.into()))?;
    if rules.is_empty() {
        return Ok(None);
    }
    let policies: Vec<Value> = rules.iter().map(rule).collect();
    let metadata = group.metadata(group.name, false);
    let body = json!({ "spec": { "policies": policies } });
    Ok(Some(Manifest::new("workloads.x-k8s.io/v1alpha2", "CoordinatedPolicy", metadata.as_ref(), body)))
}

fn rule(rule: &Coordination) -> Value {
    let strategy = rule.strategy.clone().unwrap_or_default();
    let update = strategy.rolling_update.map(|update| {
        json!({ "maxSkew": update.max_skew, "maxUnavailable": update.max_unavailable, "partition": update.partition })
    });
    let scaling = strategy.scaling.map(|scaling| {
        json!({
            "maxSkew": scaling.max_skew,
            "progression": scaling.progression.as_deref().unwrap_or("OrderScheduled"),
        })
    });
    json!({
        "name": rule.name,
        "roles": rule.roles,
        "strategy": { "rollingUpdate": update, "scaling": scaling },
    })
}
