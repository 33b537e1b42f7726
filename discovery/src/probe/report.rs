//! What was asked of an engine and what was concluded, in words that a person can act on.

use std::fmt;
use std::time::Duration;

use crate::topology::EngineFacts;

/// Everything one probe did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeReport {
    /// Every exchange, in order.
    pub checks: Vec<ProbeCheck>,
    /// What follows from them.
    pub verdict: ProbeVerdict,
}

/// One HTTP exchange with an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeCheck {
    /// The URL that was read with GET.
    pub url: String,
    /// What came back.
    pub outcome: ProbeCheckOutcome,
    /// How long it took.
    pub duration: Duration,
    /// What this tells about the engine.
    pub conclusion: String,
    /// What a person can do about it; `None` if nothing is wrong.
    pub fix: Option<String>,
}

/// How an exchange ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeCheckOutcome {
    /// An HTTP status arrived, and a body within bounds.
    Status(u16),
    /// Nothing usable arrived within the time limit.
    TimedOut,
    /// Not even a status, such as "connection refused".
    Failed(String),
}

impl fmt::Display for ProbeCheckOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "HTTP {status}"),
            Self::TimedOut => f.write_str("no answer in time"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

/// What a probe concluded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeVerdict {
    /// The engine serves, in the role it is listed with.
    Ready(EngineFacts),
    /// A vLLM engine serves, but does not say how it moves KV. A decode may take it from its prefills.
    NoConnector {
        /// What is known, without `transfer`.
        facts: EngineFacts,
        /// What is missing and how to say it.
        reason: String,
    },
    /// The engine must not be sent traffic.
    NotReady {
        /// What is wrong, where, and how to mend it.
        reason: String,
        /// What it answered nevertheless.
        facts: Option<EngineFacts>,
        /// Whether the only trouble was a time-out.
        timed_out: bool,
    },
}
