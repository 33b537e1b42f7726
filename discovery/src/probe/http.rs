//! Bounded GET requests to engines.

use std::time::Instant;

use moongate_runtime::{ClientTls, plain_http_client, tls_error_hint};

use crate::error::DiscoveryError;
use crate::options::ProbeOptions;
use crate::probe::report::{ProbeCheck, ProbeCheckOutcome};

/// Largest answer that is read. `/metrics` of a many-rank engine is a few hundred KiB.
pub(crate) const MAX_BODY: usize = 4 << 20;

/// Asks one engine, and keeps a record of every exchange.
pub(crate) struct ProbeSession<'a> {
    client: &'a reqwest::Client,
    api_key: Option<&'a str>,
    pub(crate) checks: Vec<ProbeCheck>,
}

/// A status and a body.
#[derive(Debug, Clone)]
pub(crate) struct ProbeResponse {
    pub(crate) url: String,
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

/// Why there is no usable answer, in words that name the URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProbeError {
    pub(crate) reason: String,
    pub(crate) timed_out: bool,
    /// The server answered with a status from 500 on.
    pub(crate) server_error: bool,
}

impl ProbeError {
    pub(crate) fn new(reason: String) -> Self {
        Self { reason, timed_out: false, server_error: false }
    }
}

pub(crate) fn client(options: &ProbeOptions) -> Result<reqwest::Client, DiscoveryError> {
    let builder = options.trust.as_ref().map_or_else(plain_http_client, ClientTls::http_client);
    builder
        .timeout(options.timeout)
        .connect_timeout(options.connect_timeout)
        .redirect(reqwest::redirect::Policy::none())
        // A new connection for each question: servers close idle ones after seconds, and a question that meets the closing would look like a
        // dead engine.
        .pool_max_idle_per_host(0)
        .build()
        .map_err(|error| DiscoveryError::HttpClient(root_cause(&error)))
}

impl<'a> ProbeSession<'a> {
    pub(crate) fn new(client: &'a reqwest::Client, api_key: Option<&'a str>) -> Self {
        Self { client, api_key, checks: Vec::new() }
    }

    /// One GET; any status is an answer.
    pub(crate) async fn get(&mut self, url: String) -> Result<ProbeResponse, ProbeError> {
        let begun = Instant::now();
        let outcome = self.exchange(&url).await;
        let took = begun.elapsed();
        let mut check = ProbeCheck {
            url: url.clone(),
            outcome: ProbeCheckOutcome::TimedOut,
            duration: took,
            conclusion: String::new(),
            fix: None,
        };
        let result = match outcome {
            Ok((status, body)) => {
                check.outcome = ProbeCheckOutcome::Status(status);
                Ok(ProbeResponse { url, status, body })
            }
            Err(ProbeExchangeError { outcome, mend }) => {
                let trouble = ProbeError {
                    reason: match mend {
                        Some(mend) => format!("GET {url}: {outcome}; {mend}"),
                        None => format!("GET {url}: {outcome}"),
                    },
                    timed_out: outcome == ProbeCheckOutcome::TimedOut,
                    server_error: false,
                };
                check.outcome = outcome;
                check.conclusion = "nothing".to_owned();
                let mend = mend.unwrap_or("check that the engine runs, and its host and port");
                check.fix = Some(mend.to_owned());
                Err(trouble)
            }
        };
        self.checks.push(check);
        result
    }

    /// Says what the last exchange told.
    pub(crate) fn set_conclusion(&mut self, text: impl Into<String>) {
        if let Some(check) = self.checks.last_mut() {
            check.conclusion = text.into();
        }
    }

    /// Says what the last exchange told, what to do about it, and answers both as the reason.
    pub(crate) fn set_fix(&mut self, concluded: impl Into<String>, mend: impl Into<String>) -> String {
        let (concluded, mend) = (concluded.into(), mend.into());
        let reason = format!("{concluded}; {mend}");
        if let Some(check) = self.checks.last_mut() {
            check.conclusion = concluded;
            check.fix = Some(mend);
        }
        reason
    }

    async fn exchange(&self, url: &str) -> Result<(u16, Vec<u8>), ProbeExchangeError> {
        let mut request = self.client.get(url);
        if let Some(key) = self.api_key {
            request = request.bearer_auth(key);
        }
        let mut response = moongate_runtime::net::send_request(request).await.map_err(failure)?;
        let status = response.status().as_u16();
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(failure)? {
            if body.len() + chunk.len() > MAX_BODY {
                let outcome =
                    ProbeCheckOutcome::Failed(format!("the answer is larger than {MAX_BODY} bytes"));
                return Err(ProbeExchangeError { outcome, mend: None });
            }
            body.extend_from_slice(&chunk);
        }
        Ok((status, body))
    }
}

/// An exchange without an answer.
struct ProbeExchangeError {
    outcome: ProbeCheckOutcome,
    /// What to do about it, if TLS was the trouble.
    mend: Option<&'static str>,
}

fn failure(error: reqwest::Error) -> ProbeExchangeError {
    if error.is_timeout() {
        return ProbeExchangeError { outcome: ProbeCheckOutcome::TimedOut, mend: None };
    }
    ProbeExchangeError {
        outcome: ProbeCheckOutcome::Failed(root_cause(&error)),
        mend: tls_error_hint(&error),
    }
}

/// The innermost cause: "Connection refused" says more than "error sending request".
pub(crate) fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
