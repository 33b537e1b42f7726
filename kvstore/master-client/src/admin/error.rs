//! Why the admin server did not help.

use std::time::Duration;

/// Why the admin server did not help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdminError {
    /// No HTTP client can be made, or the address is unusable.
    #[error("the address {address:?} of a master's admin server is unusable: {reason}; give host:port")]
    Address {
        /// The address.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No answer, or half of one.
    #[error("GET {url}: {reason}; check that the master runs, and the address of its admin server")]
    Failed {
        /// What was asked, shortened.
        url: String,
        /// What went wrong.
        reason: String,
    },
    /// No answer in time, although there is a connection: the server is busy, or hangs.
    #[error("GET {url}: no answer within {limit:?}")]
    TimedOut {
        /// What was asked, shortened.
        url: String,
        /// The time limit.
        limit: Duration,
    },
    /// This release has no such endpoint, or it is another server.
    #[error("GET {url}: not found; this release of Mooncake lacks it, or it is not a master's admin server")]
    NotFound {
        /// What was asked, shortened.
        url: String,
    },
    /// The master stands by for another one.
    #[error("GET {url}: the master does not serve now; another one may be the leader")]
    NotServing {
        /// What was asked, shortened.
        url: String,
    },
    /// Any other status than 200.
    #[error("GET {url}: status {status}: {body}")]
    Status {
        /// What was asked, shortened.
        url: String,
        /// The status.
        status: u16,
        /// The start of the body.
        body: String,
    },
    /// The answer is not what this endpoint answers.
    #[error("GET {url}: {reason}; is it a Mooncake master's admin server?")]
    Malformed {
        /// What was asked, shortened.
        url: String,
        /// What is wrong.
        reason: String,
    },
}

impl AdminError {
    /// Whether it may pass, so that it is worth asking again.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Failed { .. } | Self::TimedOut { .. } | Self::NotServing { .. })
    }
}

/// As much of a URL as belongs into a message: one with keys has thousands of characters.
pub(super) fn shortened(url: &str) -> String {
    const LONGEST: usize = 120;
    match url.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", url.get(..end).unwrap_or(url)),
        None => url.to_owned(),
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
