//! Errors of requests to the admin server.

use std::fmt;
use std::str::{FromStr, Utf8Error};
use std::sync::Arc;
use std::time::Duration;

use mooncake_wire::object_locations::LocationBatchError;

/// Why a request to the admin server failed. URLs are truncated to 120 characters.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AdminError {
    /// The address is unusable, or the HTTP client cannot be created.
    #[error("the address {address:?} of a master's admin server is unusable: {source}; give host:port")]
    Address { address: String, source: AdminAddressError },
    /// The connection failed, or broke before the end of the response.
    #[error("GET {url}: {source}; check that the master runs, and the address of its admin server")]
    Failed { url: String, source: HttpRequestError },
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
    #[error("GET {url}: {source}; is it a Mooncake master's admin server?")]
    Malformed { url: String, source: AdminResponseError },
}

/// Why an address is not that of an admin server.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AdminAddressError {
    #[error("{0}")]
    Url(#[source] <reqwest::Url as FromStr>::Err),
    /// The URL has a path, a query or another scheme.
    #[error("not a host and a port")]
    NotHostAndPort,
    /// The HTTP client cannot be created.
    #[error(transparent)]
    Client(#[from] HttpRequestError),
}

/// Why a response is not one of an admin server.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AdminResponseError {
    #[error("the response has more than {limit} bytes")]
    TooLarge { limit: usize },
    #[error("{0}")]
    NotJson(#[source] Arc<serde_json::Error>),
    #[error("{0}")]
    NotUtf8(#[from] Utf8Error),
    #[error("{0}")]
    NotALocationBatch(#[from] LocationBatchError),
}

impl From<serde_json::Error> for AdminResponseError {
    fn from(error: serde_json::Error) -> Self {
        Self::NotJson(Arc::new(error))
    }
}

/// A failed HTTP exchange. Its text is the innermost cause: "Connection refused" is more specific than "error sending request".
#[derive(Clone, Debug)]
pub struct HttpRequestError(Arc<reqwest::Error>);

impl From<reqwest::Error> for HttpRequestError {
    fn from(error: reqwest::Error) -> Self {
        Self(Arc::new(error))
    }
}

impl fmt::Display for HttpRequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cause: &dyn std::error::Error = &*self.0;
        while let Some(source) = cause.source() {
            cause = source;
        }
        fmt::Display::fmt(cause, f)
    }
}

/// Without a source: the text would be repeated by its less specific causes.
impl std::error::Error for HttpRequestError {}

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
