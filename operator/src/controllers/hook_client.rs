//! Asks pods what plans want to know. Answers are taken in as what watches tell is.

use std::collections::HashSet;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::{Supervisor, plain_http_client};
use parking_lot::Mutex;
use reqwest::{Client, Method, Response, StatusCode, redirect};
use serde::Deserialize;

use super::ControllerContext;
use crate::plan::{HookCall, HookResult, UpgradeHook};
use crate::resource_cache::ResourceKey;

/// For one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of an answer that are read.
const MAX_BODY: usize = 64 << 10;
/// Letters of what a pod says that are shown.
const MAX_TEXT: usize = 200;

/// Who asks.
pub(super) struct HookClient {
    http: Client,
    /// Pods that have not answered yet.
    in_flight: Mutex<HashSet<String>>,
    supervisor: Supervisor,
}

/// What is read of an answer's body.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct HookResponse {
    waiting_for: Option<String>,
    warning: Option<String>,
    drained: bool,
}

impl HookClient {
    /// Pods are asked directly, whatever proxy the environment names.
    pub(super) fn new(supervisor: &Supervisor) -> Result<Self, reqwest::Error> {
        let http = plain_http_client().timeout(REQUEST_TIMEOUT).redirect(redirect::Policy::none());
        let http = http.pool_max_idle_per_host(0).build()?;
        Ok(Self { http, in_flight: Mutex::default(), supervisor: supervisor.clone() })
    }

    /// One question. Whatever is no answer counts as not yet.
    async fn call(&self, ask: &HookCall) -> HookResult {
        let (method, path) = match ask.hook {
            UpgradeHook::Drain => (Method::POST, "drain"),
            UpgradeHook::Settled => (Method::GET, "settled"),
        };
        let (status, said) = match self.request(ask, method, path).await {
            Ok(answer) => answer,
            Err(error) => {
                return HookResult::NotYet(Some(truncate(&format!(
                    "it cannot be asked: {}",
                    root_cause(&error)
                ))));
            }
        };
        if status == StatusCode::OK {
            return HookResult::Done(said.warning.as_deref().map(truncate));
        }
        if ask.hook == UpgradeHook::Settled && said.drained {
            // It was drained for an update that was taken back before there was a restart.
            let ended = self.request(ask, Method::DELETE, "drain").await;
            tracing::debug!(?ended, pod = ask.pod, "a pod shall work on");
        }
        let unexpected = (status != StatusCode::ACCEPTED).then(|| format!("it answers {}", status.as_u16()));
        HookResult::NotYet(said.waiting_for.or(unexpected).as_deref().map(truncate))
    }

    async fn request(
        &self,
        ask: &HookCall,
        method: Method,
        path: &str,
    ) -> Result<(StatusCode, HookResponse), reqwest::Error> {
        let host = match ask.ip.contains(':') {
            true => format!("[{}]", ask.ip),
            false => ask.ip.clone(),
        };
        let url = format!("http://{host}:{}/{path}", ask.port);
        let response = self.http.request(method, url).send().await?;
        let status = response.status();
        Ok((status, serde_json::from_slice(&body(response).await?).unwrap_or_default()))
    }
}

async fn body(mut response: Response) -> Result<Vec<u8>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await? {
        let room = MAX_BODY - body.len();
        body.extend_from_slice(piece.get(..room).unwrap_or(&piece));
        if body.len() == MAX_BODY {
            break;
        }
    }
    Ok(body)
}

/// What an error goes back to: the rest says only that there was a request.
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

/// Asks without waiting. What is new is followed by another look at the object whose plan has asked.
pub(super) fn spawn_calls(shared: &Arc<ControllerContext>, key: &ResourceKey, asks: Vec<HookCall>) {
    for ask in asks {
        if !shared.hook_client.in_flight.lock().insert(ask.pod.clone()) {
            continue;
        }
        let (shared, key) = (Arc::clone(shared), key.clone());
        let supervisor = shared.hook_client.supervisor.clone();
        supervisor.spawn("operator hook", async move {
            let answer = shared.hook_client.call(&ask).await;
            shared.hook_client.in_flight.lock().remove(&ask.pod);
            if shared.observed.lock().record_hook_result(ask, answer) {
                shared.queue.push(key);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_pod_says_is_shown_on_one_line_of_bounded_length() {
        assert_eq!(truncate("requests\nin progress"), "requestsin progress");
        assert_eq!(truncate(&"ä".repeat(1000)).chars().count(), MAX_TEXT);
    }

    #[test]
    fn members_may_be_missing_but_not_be_of_another_type() {
        let said: HookResponse = serde_json::from_str(r#"{"waiting_for": "uploads", "more": [1]}"#).unwrap();
        assert_eq!((said.waiting_for.as_deref(), said.drained), (Some("uploads"), false));
        assert!(serde_json::from_str::<HookResponse>(r#"{"drained": "yes"}"#).is_err());
    }
}
