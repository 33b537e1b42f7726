//! Settings of probes.

use std::fmt;
use std::time::Duration;

use moongate_runtime::{BackoffPolicy, ClientTls};

/// Settings of the probes of engines.
#[derive(Clone)]
pub struct ProbeOptions {
    /// Timeout of one HTTP exchange, connect and body included. Default 5 s: an SGLang scheduler responds between batches.
    pub timeout: Duration,
    /// Timeout of connecting. Default 1 s.
    pub connect_timeout: Duration,
    /// Interval of probes of a ready instance. Default 30 s.
    pub refresh: Duration,
    /// Jittered pauses after failed probes. Default 250 ms to 5 s.
    pub backoff: BackoffPolicy,
    /// Consecutive timeouts after which a ready instance becomes not ready. Default 10: health checks detect unresponsive engines,
    /// and single timeouts on a busy machine must not remove engines from the fleet.
    pub timeouts_to_unready: u32,
    /// Maximum number of concurrent probes. Default 32.
    pub concurrency: usize,
    /// API key of the engines, sent as `Authorization: Bearer …`.
    pub api_key: Option<String>,
    /// TLS settings for engines with `https://` URLs; `None`: such engines are not trusted.
    pub trust: Option<ClientTls>,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(1),
            refresh: Duration::from_secs(30),
            backoff: BackoffPolicy { initial: Duration::from_millis(250), max: Duration::from_secs(5) },
            timeouts_to_unready: 10,
            concurrency: 32,
            api_key: None,
            trust: None,
        }
    }
}

impl fmt::Debug for ProbeOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProbeOptions")
            .field("timeout", &self.timeout)
            .field("connect_timeout", &self.connect_timeout)
            .field("refresh", &self.refresh)
            .field("backoff", &self.backoff)
            .field("timeouts_to_unready", &self.timeouts_to_unready)
            .field("concurrency", &self.concurrency)
            .field("api_key", &self.api_key.as_ref().map(|_| "(set)"))
            .field("trust", &self.trust)
            .finish()
    }
}
