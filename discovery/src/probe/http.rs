//! Bounded GET requests to engines.

use std::time::{Duration, Instant};

use moongate_runtime::{ClientTls, plain_http_client, tls_error_hint};

use crate::error::{DiscoveryError, root_cause};
use crate::probe::options::ProbeOptions;
use crate::probe::report::{ProbeCheck, ProbeCheckOutcome};

/// Largest accepted response. `/metrics` of an engine with many ranks has a few hundred KiB.
pub(crate) const MAX_BODY: usize = 4 << 20;

/// Sends the requests of one probe to one engine, and records every exchange.
pub(crate) struct ProbeSession<'a> {
    client: &'a reqwest::Client,
    api_key: Option<&'a str>,
    pub(crate) checks: Vec<ProbeCheck>,
}

/// The status and body of a response, with the requested URL.
#[derive(Debug, Clone)]
pub(crate) struct ProbeResponse {
    pub(crate) url: String,
    pub(crate) status: u16,
    pub(crate) body: Vec<u8>,
}

/// Why a probe failed; the reason contains the URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProbeError {
    pub(crate) reason: String,
    pub(crate) timed_out: bool,
    /// The server returned a status of 500 or above.
    pub(crate) server_error: bool,
}

impl ProbeError {
    pub(crate) fn new(reason: String) -> Self {
        Self { reason, timed_out: false, server_error: false }
    }
}

/// How long a connection stays open after a request. Far below the limits of engines' servers (uvicorn: 5 s).
const KEPT_IDLE: Duration = Duration::from_secs(1);

pub(crate) fn client(options: &ProbeOptions) -> Result<reqwest::Client, DiscoveryError> {
    let builder = options.trust.as_ref().map_or_else(plain_http_client, ClientTls::http_client);
    builder
        .timeout(options.timeout)
        .connect_timeout(options.connect_timeout)
        .redirect(reqwest::redirect::Policy::none())
        // One connection for the requests of a probe, and a new one for the next probe: servers close idle connections after seconds, and
        // a request on a connection that is just being closed would look like a dead engine.
        .pool_idle_timeout(KEPT_IDLE)
        .build()
        .map_err(DiscoveryError::HttpClient)
}

impl<'a> ProbeSession<'a> {
    pub(crate) fn new(client: &'a reqwest::Client, api_key: Option<&'a str>) -> Self {
        Self { client, api_key, checks: Vec::new() }
    }

    /// Sends a GET request. Any HTTP status is a success.
    pub(crate) async fn get(&mut self, url: String) -> Result<ProbeResponse, ProbeError> {
        let started = Instant::now();
        let outcome = self.exchange(&url).await;
        let duration = started.elapsed();
        let mut check = ProbeCheck {
            url: url.clone(),
            outcome: ProbeCheckOutcome::TimedOut,
            duration,
            conclusion: String::new(),
            fix: None,
        };
        let result = match outcome {
            Ok((status, body)) => {
                check.outcome = ProbeCheckOutcome::Status(status);
                Ok(ProbeResponse { url, status, body })
            }
            Err(ProbeExchangeError { outcome, fix }) => {
                let error = ProbeError {
                    reason: match fix {
                        Some(fix) => format!("GET {url}: {outcome}; {fix}"),
                        None => format!("GET {url}: {outcome}"),
                    },
                    timed_out: outcome == ProbeCheckOutcome::TimedOut,
                    server_error: false,
                };
                check.outcome = outcome;
                check.conclusion = "no response".to_owned();
                let fix = fix.unwrap_or("check that the engine is running, and its host and port");
                check.fix = Some(fix.to_owned());
                Err(error)
            }
        };
        self.checks.push(check);
        result
    }

    /// Records the conclusion from the last exchange.
    pub(crate) fn set_conclusion(&mut self, text: impl Into<String>) {
        if let Some(check) = self.checks.last_mut() {
            check.conclusion = text.into();
        }
    }

    /// Records the conclusion from the last exchange and a fix, and returns both as the reason.
    pub(crate) fn set_fix(&mut self, concluded: impl Into<String>, fix: impl Into<String>) -> String {
        let (concluded, fix) = (concluded.into(), fix.into());
        let reason = format!("{concluded}; {fix}");
        if let Some(check) = self.checks.last_mut() {
            check.conclusion = concluded;
            check.fix = Some(fix);
        }
        reason
    }

    async fn exchange(&self, url: &str) -> Result<(u16, Vec<u8>), ProbeExchangeError> {
        let mut request = self.client.get(url);
        if let Some(key) = self.api_key {
            request = request.bearer_auth(key);
        }
        let again = request.try_clone();
        let mut response = match (moongate_runtime::net::send_request(request).await, again) {
            // A server may close a connection after any response, uvicorn for one after an exception: that says nothing about the engine.
            (Err(error), Some(request)) if !error.is_timeout() && !error.is_connect() => {
                moongate_runtime::net::send_request(request).await
            }
            (sent, _) => sent,
        }
        .map_err(failure)?;
        let status = response.status().as_u16();
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(failure)? {
            if body.len() + chunk.len() > MAX_BODY {
                let outcome =
                    ProbeCheckOutcome::Failed(format!("the response is larger than {MAX_BODY} bytes"));
                return Err(ProbeExchangeError { outcome, fix: None });
            }
            body.extend_from_slice(&chunk);
        }
        Ok((status, body))
    }
}

/// An exchange without a response.
struct ProbeExchangeError {
    outcome: ProbeCheckOutcome,
    /// The fix, if the cause is TLS.
    fix: Option<&'static str>,
}

fn failure(error: reqwest::Error) -> ProbeExchangeError {
    if error.is_timeout() {
        return ProbeExchangeError { outcome: ProbeCheckOutcome::TimedOut, fix: None };
    }
    ProbeExchangeError { outcome: ProbeCheckOutcome::Failed(root_cause(&error)), fix: tls_error_hint(&error) }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_connection_that_closes_after_a_response_is_replaced() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/path", listener.local_addr().unwrap());
        let server = async {
            // Responds once on each connection, and closes it when the next request arrives.
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = [0; 1024];
                assert!(stream.read(&mut request).await.unwrap() > 0);
                stream.write_all(b"HTTP/1.1 500 Error\r\ncontent-length: 2\r\n\r\nno").await.unwrap();
                let _next_or_end = stream.read(&mut request).await;
            }
        };
        let client = client(&ProbeOptions::default()).unwrap();
        let probe = async {
            let mut session = ProbeSession::new(&client, None);
            for _ in 0..2 {
                let response = session.get(url.clone()).await.unwrap();
                assert_eq!((response.status, &response.body[..]), (500, &b"no"[..]));
            }
            drop(session);
        };
        tokio::select! {
            () = probe => {}
            () = server => panic!("a third connection"),
        }
    }
}
