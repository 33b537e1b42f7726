//! The report of a probe: every exchange, its conclusion, and a fix for each problem.

use std::fmt;
use std::time::Duration;

use crate::topology::EngineFacts;

/// The exchanges and the verdict of one probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeReport {
    /// All exchanges, in order.
    pub checks: Vec<ProbeCheck>,
    /// The verdict derived from the checks.
    pub verdict: ProbeVerdict,
}

/// One HTTP exchange with an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeCheck {
    /// URL of the GET request.
    pub url: String,
    /// The HTTP status, or the failure.
    pub outcome: ProbeCheckOutcome,
    /// Duration of the exchange, body included.
    pub duration: Duration,
    /// Conclusion about the engine, as text.
    pub conclusion: String,
    /// How to fix the problem; `None` if there is none.
    pub fix: Option<String>,
}

/// How an exchange ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeCheckOutcome {
    /// A response arrived, with a body within the size limit.
    Status(u16),
    /// No complete response arrived within the time limit.
    TimedOut,
    /// The exchange failed without a response, such as "connection refused".
    Failed(String),
}

impl fmt::Display for ProbeCheckOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "HTTP {status}"),
            Self::TimedOut => f.write_str("no response in time"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

/// The result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeVerdict {
    /// The engine serves, in the role it is listed with.
    Ready(EngineFacts),
    /// A vLLM engine serves, but does not report its KV connector. A decode may adopt that of its prefills.
    NoConnector {
        /// The reported facts, without `transfer`.
        facts: EngineFacts,
        /// What is missing and how to configure it.
        reason: String,
    },
    /// The gateway must not route to the engine.
    NotReady {
        /// What is wrong, where, and how to fix it.
        reason: String,
        /// The facts, if the engine reported them.
        facts: Option<EngineFacts>,
        /// Whether the only error was a timeout.
        timed_out: bool,
    },
}
