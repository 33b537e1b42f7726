//! Several releases in one cluster: a release that watches all namespaces waits while another one owns the webhooks, since both would
//! reconcile the same objects.

use std::time::Duration;

use tokio::sync::watch;

use crate::OperatorMetrics;
use crate::webhooks::WebhookOwner;

/// Maximum time to wait for the first registration of the webhooks. If it fails, reconciliation starts nevertheless.
const UNKNOWN: Duration = Duration::from_secs(10);

/// Error after another release has taken over the webhooks.
#[derive(Debug, thiserror::Error)]
#[error("release `{0}` has taken over this cluster's webhooks, so this one stops reconciling")]
pub struct OwnedByOther(String);

/// Waits until no other release owns the webhooks.
pub(super) async fn wait(owner: &mut watch::Receiver<WebhookOwner>, metrics: &OperatorMetrics) {
    let is_known = owner.wait_for(|owner| *owner != WebhookOwner::Unknown);
    let _ = tokio::time::timeout(UNKNOWN, is_known).await;
    loop {
        let WebhookOwner::Other(other) = owner.borrow_and_update().clone() else { break };
        tracing::warn!(
            owner = other,
            "not reconciling: another release does. Uninstall it, or give each release its own namespace"
        );
        metrics.set_waiting_for(Some(other));
        // Without a sender, this process stops.
        if owner.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
    metrics.set_waiting_for(None);
}

/// Waits until another release owns the webhooks.
pub(super) async fn taken_over(owner: Option<&mut watch::Receiver<WebhookOwner>>) -> OwnedByOther {
    let Some(owner) = owner else { return std::future::pending().await };
    let other = match owner.wait_for(|owner| matches!(owner, WebhookOwner::Other(_))).await.as_deref() {
        Ok(WebhookOwner::Other(other)) => Some(other.clone()),
        _ => None,
    };
    match other {
        Some(other) => OwnedByOther(other),
        None => std::future::pending().await,
    }
}
