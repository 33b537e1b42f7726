//! Settings of requests to engines: attempts, time limits, connections, health checks.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use http::Uri;
use moongate_runtime::{BackoffPolicy, ClientTls};
use tokio::sync::Semaphore;

use crate::dispatch::RetryLimits;
use crate::fleet::{BreakerLimits, EndpointLimits, HealthCheckLimits, SilenceLimits};
use crate::legs::AttemptLimits;
use crate::upstream::{ConnectionPoolLimits, LegTimeouts};

/// Longest pause of an engine that keeps failing.
const MAX_BREAKER_PAUSE: Duration = Duration::from_secs(60);
/// Longest delay between two attempts, as a multiple of the first.
const MAX_RETRY_BACKOFF_FACTOR: u32 = 256;
/// Silence is detected at most a quarter of its limit late.
const CHECKS_PER_LIMIT: u32 = 4;
/// Shortest interval between two checks of a waiting request.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Connections, retries and time limits of requests to engines.
#[derive(Debug, Clone, Args)]
pub struct UpstreamOptions {
    /// Attempts per request, each on another pair, as long as no byte has reached the client.
    #[arg(long, value_name = "N", env = "MOONGATE_ATTEMPTS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=10))]
    pub attempts: u32,

    /// Delay before the second attempt; doubles, with jitter. Default: enough for a restarting listener, and short compared with a
    /// prefill.
    #[arg(long, value_name = "TIME", env = "MOONGATE_RETRY_BACKOFF", default_value = "25ms", value_parser = humantime::parse_duration)]
    pub retry_backoff: Duration,

    /// Time limit for a connection to an engine, including the TLS handshake. Default: within a data centre it takes less than 1
    /// ms; lost packets are retransmitted after 1 s.
    #[arg(long, value_name = "TIME", env = "MOONGATE_CONNECT_TIMEOUT", default_value = "1500ms", value_parser = humantime::parse_duration)]
    pub connect_timeout: Duration,

    /// Time limit for the prefill leg's response. Default 300 s, as in SGLang.
    #[arg(long, value_name = "TIME", env = "MOONGATE_PREFILL_TIMEOUT", default_value = "300s", value_parser = humantime::parse_duration)]
    pub prefill_timeout: Duration,

    /// Time limit for the first byte of a stream. Default 300 s: queueing, prefill and KV transfer of a very long prompt.
    #[arg(long, value_name = "TIME", env = "MOONGATE_FIRST_BYTE_TIMEOUT", default_value = "300s", value_parser = humantime::parse_duration)]
    pub first_byte_timeout: Duration,

    /// Time limit for a non-streamed response. Default 30 min: it arrives after the whole generation.
    #[arg(long, value_name = "TIME", env = "MOONGATE_RESPONSE_TIMEOUT", default_value = "30m", value_parser = humantime::parse_duration)]
    pub response_timeout: Duration,

    /// Longest pause within a response. Default 60 s: an engine that is preempting still sends within seconds.
    #[arg(long, value_name = "TIME", env = "MOONGATE_IDLE_TIMEOUT", default_value = "60s", value_parser = humantime::parse_duration)]
    pub idle_timeout: Duration,

    /// Non-streamed responses are buffered up to this size before they are passed on, so that a truncated one can be retried.
    #[arg(long, value_name = "BYTES", env = "MOONGATE_RESPONSE_BUFFER_BYTES", default_value_t = 1 << 20)]
    pub response_buffer_bytes: usize,

    /// Most idle connections per engine.
    #[arg(long, value_name = "N", env = "MOONGATE_MAX_IDLE_CONNECTIONS", default_value_t = 1024)]
    pub max_idle_connections: usize,

    /// Age at which idle engine connections are closed. Default 4 s: uvicorn, which engines use, closes after 5 s, and the gateway
    /// should close first.
    #[arg(long, value_name = "TIME", env = "MOONGATE_IDLE_CONNECTION_TIMEOUT", default_value = "4s", value_parser = humantime::parse_duration)]
    pub idle_connection_timeout: Duration,

    /// Consecutive failures that open an engine's circuit breaker.
    #[arg(long, value_name = "N", env = "MOONGATE_BREAKER_FAILURES", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub breaker_failures: u32,

    /// First pause of an open breaker; doubles with every further failure, up to a minute.
    #[arg(long, value_name = "TIME", env = "MOONGATE_BREAKER_PAUSE", default_value = "2s", value_parser = humantime::parse_duration)]
    pub breaker_pause: Duration,

    /// Silence limit as a multiple of the expected TTFT: an engine that produces no output for any request for longer becomes
    /// suspect, new requests avoid it, and requests without a byte are redispatched. Default 4: expected times are off by less than
    /// half, and a prompt of another gateway may be computed first.
    #[arg(long, value_name = "N", env = "MOONGATE_SILENCE_FACTOR", default_value_t = 4.0, value_parser = super::parse_factor)]
    pub silence_factor: f64,

    /// Shortest silence that makes an engine suspect; 0s turns the detection off. Default 2 s: longer than the pauses of a working
    /// engine, and short for a client.
    #[arg(long, value_name = "TIME", env = "MOONGATE_SILENCE_FLOOR", default_value = "2s", value_parser = humantime::parse_duration)]
    pub silence_floor: Duration,

    /// Most redispatches from silent engines, as a share of all requests, beyond a burst of 64 and one per second; 0 turns
    /// redispatching off. Default 0.2: it adds little load to an overloaded fleet.
    #[arg(long, value_name = "SHARE", env = "MOONGATE_REDISPATCH_SHARE", default_value_t = 0.2, value_parser = parse_share)]
    pub redispatch_share: f64,

    /// Pause of a stream after which it ends with an error, if its engine is silent for all requests and fails a health check; 0s
    /// leaves it to --idle-timeout. Default 10 s: a working engine passes its health check within --health-timeout.
    #[arg(long, value_name = "TIME", env = "MOONGATE_STALL_TIMEOUT", default_value = "10s", value_parser = humantime::parse_duration)]
    pub stall_timeout: Duration,

    /// Path of the engines' health check.
    #[arg(long, value_name = "PATH", env = "MOONGATE_HEALTH_PATH", default_value = "/health", value_parser = parse_path)]
    pub health_path: Uri,

    /// Interval between two health checks of an engine; 0s turns them off. Default 10 s: SGLang's check runs a generation.
    #[arg(long, value_name = "TIME", env = "MOONGATE_HEALTH_INTERVAL", default_value = "10s", value_parser = humantime::parse_duration)]
    pub health_interval: Duration,

    /// Time limit for one health check. Default 5 s: SGLang's takes 1 s on an idle engine.
    #[arg(long, value_name = "TIME", env = "MOONGATE_HEALTH_TIMEOUT", default_value = "5s", value_parser = humantime::parse_duration)]
    pub health_timeout: Duration,

    /// Interval between two queries for an engine's own load, which includes requests of other gateways; 0s turns them off. Default
    /// 100 ms: with several gateways, older reports cost more than they save.
    #[arg(long, value_name = "TIME", env = "MOONGATE_LOAD_INTERVAL", default_value = "100ms", value_parser = humantime::parse_duration)]
    pub load_interval: Duration,
}

impl UpstreamOptions {
    /// `connections` is the limit for all engines together.
    pub(crate) fn endpoint_limits(&self, trust: &ClientTls, connections: usize) -> EndpointLimits {
        let pauses = BackoffPolicy { initial: self.breaker_pause, max: MAX_BREAKER_PAUSE };
        EndpointLimits {
            pool: ConnectionPoolLimits {
                connect_timeout: self.connect_timeout,
                max_idle: self.max_idle_connections,
                idle_timeout: self.idle_connection_timeout,
                connections: Arc::new(Semaphore::new(connections.min(Semaphore::MAX_PERMITS))),
                trust: trust.clone(),
            },
            breaker: BreakerLimits { failures: self.breaker_failures, pauses },
            silence: SilenceLimits {
                factor: self.silence_factor,
                floor: self.silence_floor,
                stall: self.stall_timeout,
                trial_pauses: pauses,
                suspected: Arc::default(),
            },
        }
    }

    pub(crate) fn retry_limits(&self) -> RetryLimits {
        let limits = |first_byte| LegTimeouts {
            first_byte,
            idle: self.idle_timeout,
            first_byte_check: check_interval(self.silence_floor, first_byte),
            idle_check: check_interval(self.stall_timeout, self.idle_timeout),
        };
        RetryLimits {
            attempts: self.attempts,
            backoff: BackoffPolicy {
                initial: self.retry_backoff,
                max: self.retry_backoff.saturating_mul(MAX_RETRY_BACKOFF_FACTOR),
            },
            attempt: AttemptLimits {
                prefill: limits(self.prefill_timeout),
                stream: limits(self.first_byte_timeout),
                non_stream: limits(self.response_timeout),
                response_buffer_bytes: self.response_buffer_bytes,
            },
        }
    }

    /// `None` if health checks are off.
    pub(crate) fn health_limits(&self) -> Option<HealthCheckLimits> {
        (!self.health_interval.is_zero()).then(|| HealthCheckLimits {
            path: self.health_path.clone(),
            interval: self.health_interval,
            timeout: self.health_timeout,
            failures: 3,
        })
    }
}

/// A path of an engine's server, with a query if need be.
fn parse_path(text: &str) -> Result<Uri, String> {
    let path = Some(text).filter(|text| text.starts_with('/')).and_then(|text| text.parse().ok());
    path.ok_or_else(|| format!("`{text}` is not a path; write it as /health"))
}

/// Interval between two checks for a silence limit; `otherwise` if there is no limit.
fn check_interval(limit: Duration, otherwise: Duration) -> Duration {
    if limit.is_zero() { otherwise } else { (limit / CHECKS_PER_LIMIT).max(MIN_CHECK_INTERVAL) }
}

fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err(format!("{text:?} is not a number from 0 to 1")),
    }
}
