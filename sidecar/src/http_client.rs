//! HTTP exchanges: the client, size limits for responses, and error messages.

use std::error::Error;

use moongate_runtime::{ClientTls, tls_error_hint};

/// Largest accepted response in bytes; the largest are an engine's metrics.
const MAX_BODY: usize = 4 << 20;

/// A client without idle connections: engines close them after seconds, and a request on a closing connection would look like an outage.
pub(crate) fn new(trust: &ClientTls) -> reqwest::Result<reqwest::Client> {
    trust.http_client().redirect(reqwest::redirect::Policy::none()).pool_max_idle_per_host(0).build()
}

/// Why there is no complete response.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HttpExchangeError {
    #[error("{}", root_cause(.0))]
    Transport(#[from] reqwest::Error),
    #[error("the response is larger than {MAX_BODY} bytes")]
    TooLarge,
}

/// Reads a whole response body of at most [`MAX_BODY`] bytes.
pub(crate) async fn read_bounded_body(mut response: reqwest::Response) -> Result<Vec<u8>, HttpExchangeError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > MAX_BODY {
            return Err(HttpExchangeError::TooLarge);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// The innermost cause, since "Connection refused" is more specific than "error sending request", with a hint for TLS errors.
pub(crate) fn root_cause(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    match tls_error_hint(error) {
        Some(hint) => format!("{cause}; {hint}"),
        None => cause.to_string(),
    }
}
