//! Why an engine has not loaded an adapter.

use std::time::Duration;

use http::StatusCode;

/// Why an engine has not loaded an adapter.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum AdapterLoadError {
    /// There is no response.
    #[error("loading the adapter: {0}")]
    Exchange(String),
    #[error("has not loaded the adapter within {0:?} (--lora-load-timeout)")]
    Timeout(Duration),
    #[error("did not load the adapter: HTTP {status}: {message}{hint}")]
    Rejected {
        status: StatusCode,
        /// The start of the response.
        message: String,
        /// The engine's flags that permit the call, after a semicolon; empty if they are not the cause.
        hint: &'static str,
    },
    /// The gateway is shutting down.
    #[error("loading the adapter was interrupted")]
    Interrupted,
}
