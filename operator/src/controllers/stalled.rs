//! Reports in an object's status why its plan cannot be made or carried out.

use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use super::ControllerContext;
use crate::ResourceKind;
use crate::plan::WriteAction;
use crate::resource_cache::ResourceKey;
use crate::status;

/// Sets the condition `Stalled` of an object. Returns whether that is a change. The next plan that succeeds clears the condition.
pub(super) async fn report(shared: &ControllerContext, key: &ResourceKey, text: (&str, &str)) -> bool {
    if !has_condition(key.kind) {
        return true;
    }
    let object = shared.cluster.get(key).and_then(|live| live.read::<Value>());
    let body = object.and_then(|object| status::stalled_patch(&object, text, Timestamp::now()));
    let Some(body) = body else { return false };
    let action = WriteAction::Patch { kind: key.kind, name: key.name.clone(), status: true, body };
    match shared.writer.write(&key.namespace, &action).await {
        // The back-off of this object applies, however often the message changes.
        Ok(Some(change)) => shared.cluster.apply_without_requeue(change, key),
        Ok(None) => {}
        Err(error) => {
            let kind = key.kind.name();
            tracing::info!(kind, namespace = key.namespace, name = key.name, %error, "cannot write the condition Stalled");
        }
    }
    true
}

/// Whether plans for the kind maintain the condition.
fn has_condition(kind: ResourceKind) -> bool {
    matches!(kind, ResourceKind::GroupSet | ResourceKind::Group | ResourceKind::Set | ResourceKind::Instance)
}
