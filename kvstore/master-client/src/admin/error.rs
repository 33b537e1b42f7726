//! Errors of requests to the admin server.

use std::time::Duration;

/// Why a request to the admin server failed. URLs are truncated to 120 characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdminError {
    /// The address is unusable, or the HTTP client cannot be created.
    #[error("the address {address:?} of a master's admin server is unusable: {reason}; give host:port")]
    Address { address: String, reason: String },
    /// The connection failed, or broke before the end of the response.
    #[error("GET {url}: {reason}; check that the master runs, and the address of its admin server")]
    Failed { url: String, reason: String },
    /// The server accepted the connection but did not respond in time.
    #[error("GET {url}: no response within {limit:?}")]
    TimedOut { url: String, limit: Duration },
    /// This release lacks the endpoint, or the server is not a master's.
    #[error("GET {url}: not found; this release of Mooncake lacks it, or it is not a master's admin server")]
    NotFound { url: String },
    /// The master is a standby.
    #[error("GET {url}: the master is not serving; another one may be the leader")]
    NotServing { url: String },
    /// Any other status except 200.
    #[error("GET {url}: status {status}: {body}")]
    Status {
        url: String,
        status: u16,
        /// The first 200 bytes of the body.
        body: String,
    },
    /// The response is too large or cannot be parsed.
    #[error("GET {url}: {reason}; is it a Mooncake master's admin server?")]
    Malformed { url: String, reason: String },
}

impl AdminError {
    /// Whether a retry may succeed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Failed { .. } | Self::TimedOut { .. } | Self::NotServing { .. })
    }
}

/// Truncates a URL for a message: one with keys can have thousands of characters.
pub(super) fn shortened(url: &str) -> String {
    const MAX_CHARS: usize = 120;
    match url.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", url.get(..end).unwrap_or(url)),
        None => url.to_owned(),
    }
}

/// The innermost cause: "Connection refused" is more specific than "error sending request".
pub(crate) fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}
