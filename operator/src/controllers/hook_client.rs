//! Calls upgrade hooks of pods. Responses are stored in the resource cache.

use std::collections::HashSet;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::{Supervisor, plain_http_client};
use parking_lot::Mutex;
use reqwest::{Client, Method, Response, StatusCode, redirect};
use serde::Deserialize;

use super::ControllerContext;
use crate::resource_cache::ResourceKey;
use crate::upgrade_hook::{HookCall, HookResult, UpgradeHook};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of bytes to read of a response.
const MAX_BODY: usize = 64 << 10;
/// Maximum number of characters of a pod's message to show.
const MAX_TEXT: usize = 200;

/// HTTP client for upgrade hooks.
pub(super) struct HookClient {
    http: Client,
    /// Pods with a call in progress.
    in_flight: Mutex<HashSet<String>>,
    supervisor: Supervisor,
}

/// Fields of a response body.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct HookResponse {
    waiting_for: Option<String>,
    warning: Option<String>,
    drained: bool,
    cost: Option<i32>,
}

impl HookClient {
    /// Calls pods directly and ignores proxies in the environment.
    pub(super) fn new(supervisor: &Supervisor) -> Result<Self, reqwest::Error> {
        let http = plain_http_client().timeout(REQUEST_TIMEOUT).redirect(redirect::Policy::none());
        let http = http.pool_max_idle_per_host(0).build()?;
        Ok(Self { http, in_flight: Mutex::default(), supervisor: supervisor.clone() })
    }

    /// Performs one call. A failed call counts as `Pending`.
    async fn call(&self, call: &HookCall) -> HookResult {
        let (method, path) = match call.hook {
            UpgradeHook::Drain => (Method::POST, "drain"),
            UpgradeHook::DrainForRemoval => (Method::POST, "drain?reason=removal"),
            UpgradeHook::Settled => (Method::GET, "settled"),
            UpgradeHook::RemovalCost => (Method::GET, "removal-cost"),
        };
        let (status, response) = match self.request(call, method, path).await {
            Ok(result) => result,
            Err(error) => {
                return HookResult::Pending(Some(truncate(&format!(
                    "calling its hook failed: {}",
                    root_cause(&error)
                ))));
            }
        };
        if status == StatusCode::OK {
            if let (UpgradeHook::RemovalCost, Some(cost)) = (call.hook, response.cost) {
                return HookResult::Cost(cost);
            }
            return HookResult::Done(response.warning.as_deref().map(truncate));
        }
        if call.hook == UpgradeHook::Settled && response.drained {
            // The pod was drained for an update that was reverted before the restart.
            let result = self.request(call, Method::DELETE, "drain").await;
            tracing::debug!(?result, pod = call.pod, "drain cancelled");
        }
        let unexpected = (status != StatusCode::ACCEPTED)
            .then(|| format!("its hook responded with status {}", status.as_u16()));
        HookResult::Pending(response.waiting_for.or(unexpected).as_deref().map(truncate))
    }

    async fn request(
        &self,
        call: &HookCall,
        method: Method,
        path: &str,
    ) -> Result<(StatusCode, HookResponse), reqwest::Error> {
        let host = match call.ip.contains(':') {
            true => format!("[{}]", call.ip),
            false => call.ip.clone(),
        };
        let url = format!("http://{host}:{}/{path}", call.port);
        let response = self.http.request(method, url).send().await?;
        let status = response.status();
        Ok((status, serde_json::from_slice(&body(response).await?).unwrap_or_default()))
    }
}

async fn body(mut response: Response) -> Result<Vec<u8>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        let remaining = MAX_BODY - body.len();
        body.extend_from_slice(chunk.get(..remaining).unwrap_or(&chunk));
        if body.len() == MAX_BODY {
            break;
        }
    }
    Ok(body)
}

/// The innermost error: outer ones say only that a request failed.
fn root_cause(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

fn truncate(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(MAX_TEXT).collect()
}

/// Starts calls in the background. A changed response triggers another reconciliation of the object.
pub(super) fn spawn_calls(shared: &Arc<ControllerContext>, key: &ResourceKey, calls: Vec<HookCall>) {
    for call in calls {
        if !shared.hook_client.in_flight.lock().insert(call.pod.clone()) {
            continue;
        }
        let (shared, key) = (Arc::clone(shared), key.clone());
        let supervisor = shared.hook_client.supervisor.clone();
        supervisor.spawn("operator hook", async move {
            let result = shared.hook_client.call(&call).await;
            shared.hook_client.in_flight.lock().remove(&call.pod);
            if call.hook == UpgradeHook::RemovalCost
                && let HookResult::Pending(reason) = &result
            {
                let (pod, reason) = (&call.pod, reason.as_deref().unwrap_or("no reason given"));
                tracing::warn!(object = %key.name, pod, reason, "the pod did not report the cost of its removal, which counts as 0");
            }
            shared.cluster.record_hook_result(key, call, result);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hook_messages_are_one_line_of_bounded_length() {
        assert_eq!(truncate("requests\nin progress"), "requestsin progress");
        assert_eq!(truncate(&"ä".repeat(1000)).chars().count(), MAX_TEXT);
    }

    #[test]
    fn response_fields_are_optional_but_typed() {
        let response: HookResponse =
            serde_json::from_str(r#"{"waiting_for": "uploads", "more": [1]}"#).unwrap();
        assert_eq!((response.waiting_for.as_deref(), response.drained), (Some("uploads"), false));
        assert!(serde_json::from_str::<HookResponse>(r#"{"drained": "yes"}"#).is_err());
    }
}
