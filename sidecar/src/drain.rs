//! `moongate sidecar drain`: waits until the sidecar reports that the engine has drained. For preStop hooks of engines' containers.

use std::time::Duration;

use clap::Args;
use moongate_runtime::plain_http_client;
use reqwest::{StatusCode, redirect};
use tokio::time::{Instant, sleep, timeout_at};

use crate::http_client::{self, root_cause};

/// Interval between two requests.
const PERIOD: Duration = Duration::from_secs(1);
/// Timeout of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Without a response of the sidecar for this time, nothing drains the engine.
const MAX_SILENCE: Duration = Duration::from_secs(15);

/// Options of `moongate sidecar drain`.
#[derive(Debug, Clone, Args)]
pub struct DrainOptions {
    /// URL of the sidecar's listener.
    #[arg(long, value_name = "URL", env = "MOONGATE_SIDECAR_URL", default_value = "http://127.0.0.1:9400")]
    pub url: String,

    /// Shortest duration, even if the engine is idle.
    ///
    /// Gateways that discover pods themselves send requests until they have observed that the pod ends.
    #[arg(long, value_name = "TIME", env = "MOONGATE_SIDECAR_DRAIN_NOTICE", default_value = "5s", value_parser = humantime::parse_duration)]
    pub notice: Duration,

    /// Longest duration.
    ///
    /// Less than the pod's grace period, so that the engine has time to exit.
    #[arg(long, value_name = "TIME", env = "MOONGATE_SIDECAR_DRAIN_LIMIT", default_value = "5m", value_parser = humantime::parse_duration)]
    pub limit: Duration,
}

/// Why the engine may not have drained.
#[derive(Debug, thiserror::Error)]
pub enum DrainError {
    #[error("cannot make requests")]
    Client(#[from] reqwest::Error),
    #[error(
        "{url} has not responded for {MAX_SILENCE:?} ({error}): is the sidecar running, and is --url its address?"
    )]
    Silent { url: String, error: String },
    #[error("the engine has not drained within {limit:?}: {blocker}")]
    TimedOut { limit: Duration, blocker: String },
}

/// Drains the engine of this pod, and waits until it is idle and no gateway routes to it.
///
/// # Errors
/// [`DrainError`]; requests may be in progress then.
pub async fn drain(options: &DrainOptions) -> Result<(), DrainError> {
    let client = plain_http_client().redirect(redirect::Policy::none()).build()?;
    let url = format!("{}/drain", options.url.trim_end_matches('/'));
    let started = Instant::now();
    let (notice_end, limit_end) = (started + options.notice, started + options.limit);
    let mut responded = started;
    let mut blocker = "no response of the sidecar".to_owned();
    loop {
        match timeout_at(limit_end, request(&client, &url)).await {
            Ok(Ok((status, reason))) => {
                responded = Instant::now();
                if status == StatusCode::OK && responded >= notice_end {
                    return Ok(());
                }
                blocker = reason;
            }
            Ok(Err(error)) if responded.elapsed() >= MAX_SILENCE => {
                return Err(DrainError::Silent { url, error });
            }
            Ok(Err(_)) | Err(_) => {}
        }
        if Instant::now() + PERIOD > limit_end {
            return Err(DrainError::TimedOut { limit: options.limit, blocker });
        }
        sleep(PERIOD).await;
    }
}

/// The status of the response, and what the drain waits for.
async fn request(client: &reqwest::Client, url: &str) -> Result<(StatusCode, String), String> {
    let cause = |error: reqwest::Error| root_cause(&error);
    let response = client.post(url).timeout(REQUEST_TIMEOUT).send().await.map_err(cause)?;
    let status = response.status();
    let body = http_client::read_bounded_body(response).await.map_err(|error| error.to_string())?;
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
    let reason = body["waiting_for"].as_str().map_or_else(|| status.to_string(), str::to_owned);
    Ok((status, reason))
}
