//! Asks pods what plans want to know. Answers are taken in as what watches tell is.

use std::collections::HashSet;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::{Supervisor, plain_http};
use parking_lot::Mutex;
use reqwest::{Client, Method, Response, StatusCode, redirect};
use serde::Deserialize;

use super::Shared;
use crate::observed::Key;
use crate::plan::{Answer, Ask, Hook};

/// For one request.
const TIME_LIMIT: Duration = Duration::from_secs(5);
/// Bytes of an answer that are read.
const MAX_BODY: usize = 64 << 10;
/// Letters of what a pod says that are shown.
const MAX_TEXT: usize = 200;

/// Who asks.
pub(super) struct Asker {
    http: Client,
    /// Pods that have not answered yet.
    busy: Mutex<HashSet<String>>,
    supervisor: Supervisor,
}

/// What is read of an answer's body.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Said {
    waiting_for: Option<String>,
    warning: Option<String>,
    drained: bool,
}

impl Asker {
    /// Pods are asked directly, whatever proxy the environment names.
    pub(super) fn new(supervisor: &Supervisor) -> Result<Self, reqwest::Error> {
        let http = plain_http().timeout(TIME_LIMIT).redirect(redirect::Policy::none());
        let http = http.pool_max_idle_per_host(0).build()?;
        Ok(Self { http, busy: Mutex::default(), supervisor: supervisor.clone() })
    }

    /// One question. Whatever is no answer counts as not yet.
    async fn ask(&self, ask: &Ask) -> Answer {
        let (method, path) = match ask.hook {
            Hook::Drain => (Method::POST, "drain"),
            Hook::Settled => (Method::GET, "settled"),
        };
        let (status, said) = match self.request(ask, method, path).await {
            Ok(answer) => answer,
            Err(error) => {
                return Answer::NotYet(Some(short(&format!("it cannot be asked: {}", cause(&error)))));
            }
        };
        if status == StatusCode::OK {
            return Answer::Done(said.warning.as_deref().map(short));
        }
        if ask.hook == Hook::Settled && said.drained {
            // It was drained for an update that was taken back before there was a restart.
            let ended = self.request(ask, Method::DELETE, "drain").await;
            tracing::debug!(?ended, pod = ask.pod, "a pod shall work on");
        }
        let unexpected = (status != StatusCode::ACCEPTED).then(|| format!("it answers {}", status.as_u16()));
        Answer::NotYet(said.waiting_for.or(unexpected).as_deref().map(short))
    }

    async fn request(
        &self,
        ask: &Ask,
        method: Method,
        path: &str,
    ) -> Result<(StatusCode, Said), reqwest::Error> {
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
fn cause(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}

fn short(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(MAX_TEXT).collect()
}

/// Asks without waiting. What is new is followed by another look at the object whose plan has asked.
pub(super) fn ask(shared: &Arc<Shared>, key: &Key, asks: Vec<Ask>) {
    for ask in asks {
        if !shared.asker.busy.lock().insert(ask.pod.clone()) {
            continue;
        }
        let (shared, key) = (Arc::clone(shared), key.clone());
        let supervisor = shared.asker.supervisor.clone();
        supervisor.spawn("operator hook", async move {
            let answer = shared.asker.ask(&ask).await;
            shared.asker.busy.lock().remove(&ask.pod);
            if shared.observed.lock().take_answer(ask, answer) {
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
        assert_eq!(short("requests\nin progress"), "requestsin progress");
        assert_eq!(short(&"ä".repeat(1000)).chars().count(), MAX_TEXT);
    }

    #[test]
    fn members_may_be_missing_but_not_be_of_another_type() {
        let said: Said = serde_json::from_str(r#"{"waiting_for": "uploads", "more": [1]}"#).unwrap();
        assert_eq!((said.waiting_for.as_deref(), said.drained), (Some("uploads"), false));
        assert!(serde_json::from_str::<Said>(r#"{"drained": "yes"}"#).is_err());
    }
}
