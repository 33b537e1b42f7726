//! Settings of exchanges with engines: attempts, time limits, connections, health checks.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use moongate_runtime::ClientTls;
use tokio::sync::Semaphore;

use crate::dispatch::{AttemptLimits, RetryLimits};
use crate::fleet::{BreakerLimits, EndpointLimits, HealthCheckLimits, SilenceLimits};
use crate::upstream::{ConnectionPoolLimits, LegTimeouts};

/// Longest pause of an engine that keeps failing.
const MAX_BREAKER_PAUSE: Duration = Duration::from_secs(60);
/// A silence is noticed this share of its limit late at most.
const CHECKS_PER_LIMIT: u32 = 4;
/// Waiting requests are not checked more often than this.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// How requests are sent to engines.
#[derive(Debug, Clone, Args)]
pub struct UpstreamOptions {
    /// Attempts per request, each on another pair, while no byte has reached the client.
    #[arg(long, value_name = "N", env = "MOONGATE_ATTEMPTS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=10))]
    pub attempts: u32,

    /// Pause before the second attempt; doubles, with jitter. Default: long enough for a restarting listener, short beside a
    /// prefill.
    #[arg(long, value_name = "TIME", env = "MOONGATE_RETRY_BACKOFF", default_value = "25ms", value_parser = humantime::parse_duration)]
    pub retry_backoff: Duration,

    /// Time for a connection to an engine, with its TLS handshake. Default: within a data centre it takes under 1 ms; lost packets are sent again
    /// after 1 s.
    #[arg(long, value_name = "TIME", env = "MOONGATE_CONNECT_TIMEOUT", default_value = "1500ms", value_parser = humantime::parse_duration)]
    pub connect_timeout: Duration,

    /// Time for the prefill leg's answer. Default 300 s: what SGLang itself waits for the other side.
    #[arg(long, value_name = "TIME", env = "MOONGATE_PREFILL_TIMEOUT", default_value = "300s", value_parser = humantime::parse_duration)]
    pub prefill_timeout: Duration,

    /// Time until the first byte of a stream. Default 300 s: queue, prefill and hand-over of a very long prompt.
    #[arg(long, value_name = "TIME", env = "MOONGATE_FIRST_BYTE_TIMEOUT", default_value = "300s", value_parser = humantime::parse_duration)]
    pub first_byte_timeout: Duration,

    /// Time for an answer that is not a stream. Default 30 min: it comes after the whole generation.
    #[arg(long, value_name = "TIME", env = "MOONGATE_ANSWER_TIMEOUT", default_value = "30m", value_parser = humantime::parse_duration)]
    pub answer_timeout: Duration,

    /// Longest pause inside a begun answer. Default 60 s: an engine that is preempting still sends within seconds.
    #[arg(long, value_name = "TIME", env = "MOONGATE_IDLE_TIMEOUT", default_value = "60s", value_parser = humantime::parse_duration)]
    pub idle_timeout: Duration,

    /// Answers that are not streams are held up to this size before they are passed on, so that one that breaks off can be retried.
    #[arg(long, value_name = "BYTES", env = "MOONGATE_HELD_ANSWER_BYTES", default_value_t = 1 << 20)]
    pub held_answer_bytes: usize,

    /// Idle connections kept per engine.
    #[arg(long, value_name = "N", env = "MOONGATE_MAX_IDLE_CONNECTIONS", default_value_t = 1024)]
    pub max_idle_connections: usize,

    /// Age at which idle engine connections are closed. Default 4 s: uvicorn, which engines use, closes after 5 s, and the side that
    /// closes first should be ours.
    #[arg(long, value_name = "TIME", env = "MOONGATE_IDLE_CONNECTION_TIMEOUT", default_value = "4s", value_parser = humantime::parse_duration)]
    pub idle_connection_timeout: Duration,

    /// Failures in a row that keep traffic away from an engine for a while.
    #[arg(long, value_name = "N", env = "MOONGATE_BREAKER_FAILURES", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub breaker_failures: u32,

    /// First such pause; doubles with every further failure, up to a minute.
    #[arg(long, value_name = "TIME", env = "MOONGATE_BREAKER_PAUSE", default_value = "2s", value_parser = humantime::parse_duration)]
    pub breaker_pause: Duration,

    /// How many times the expected time to first token an engine may produce no output for any request, before it becomes suspect: new
    /// requests avoid it, and those without a byte go elsewhere. Default 4: expected times are off by less than half, and a prompt
    /// that another gateway sent may come between.
    #[arg(long, value_name = "N", env = "MOONGATE_SILENCE_FACTOR", default_value_t = 4.0, value_parser = super::parse_factor)]
    pub silence_factor: f64,

    /// Silence of an engine that is never suspicious; 0s turns the detection off. Default 2 s: above the pauses of a working engine, and
    /// short beside a client's patience.
    #[arg(long, value_name = "TIME", env = "MOONGATE_SILENCE_FLOOR", default_value = "2s", value_parser = humantime::parse_duration)]
    pub silence_floor: Duration,

    /// Requests taken from silent engines and sent elsewhere, as a share of all requests, beyond a burst of 64 and one per second; 0
    /// leaves them where they are. Default 0.2: an overloaded fleet gets little more work from it.
    #[arg(long, value_name = "SHARE", env = "MOONGATE_REDISPATCH_SHARE", default_value_t = 0.2, value_parser = parse_share)]
    pub redispatch_share: f64,

    /// Pause of a begun stream after which it ends with an error, if its engine is silent for all requests and fails a health check; 0s
    /// leaves it to --idle-timeout. Default 10 s: a working engine passes its health check within --health-timeout.
    #[arg(long, value_name = "TIME", env = "MOONGATE_STALL_TIMEOUT", default_value = "10s", value_parser = humantime::parse_duration)]
    pub stall_timeout: Duration,

    /// Path of the engines' health check.
    #[arg(long, value_name = "PATH", env = "MOONGATE_HEALTH_PATH", default_value = "/health")]
    pub health_path: String,

    /// Time between two health checks of an engine; 0s turns them off. Default 10 s: SGLang's runs a generation.
    #[arg(long, value_name = "TIME", env = "MOONGATE_HEALTH_INTERVAL", default_value = "10s", value_parser = humantime::parse_duration)]
    pub health_interval: Duration,

    /// Time for one health check. Default 5 s: SGLang's takes 1 s on an idle engine.
    #[arg(long, value_name = "TIME", env = "MOONGATE_HEALTH_TIMEOUT", default_value = "5s", value_parser = humantime::parse_duration)]
    pub health_timeout: Duration,

    /// Time between two questions to an engine for its own load, which includes what other gateways have sent it; 0s turns them off.
    /// Default 100 ms: with several gateways, older answers cost more than they tell.
    #[arg(long, value_name = "TIME", env = "MOONGATE_LOAD_INTERVAL", default_value = "100ms", value_parser = humantime::parse_duration)]
    pub load_interval: Duration,
}

impl UpstreamOptions {
    /// `connections` are the most to all engines together.
    pub(crate) fn endpoint_limits(&self, trust: &ClientTls, connections: usize) -> EndpointLimits {
        EndpointLimits {
            pool: ConnectionPoolLimits {
                connect_timeout: self.connect_timeout,
                max_idle: self.max_idle_connections,
                idle_timeout: self.idle_connection_timeout,
                connections: Arc::new(Semaphore::new(connections.min(Semaphore::MAX_PERMITS))),
                trust: trust.clone(),
            },
            breaker: BreakerLimits {
                failures: self.breaker_failures,
                pause: self.breaker_pause,
                max_pause: MAX_BREAKER_PAUSE,
            },
            silence: SilenceLimits {
                factor: self.silence_factor,
                floor: self.silence_floor,
                stall: self.stall_timeout,
                pause: self.breaker_pause,
                max_pause: MAX_BREAKER_PAUSE,
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
            backoff: self.retry_backoff,
            attempt: AttemptLimits {
                prefill: limits(self.prefill_timeout),
                stream: limits(self.first_byte_timeout),
                non_stream: limits(self.answer_timeout),
                held_answer_bytes: self.held_answer_bytes,
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

/// Time between two checks of a silence that is suspicious after `limit`; `otherwise` if it never is.
fn check_interval(limit: Duration, otherwise: Duration) -> Duration {
    if limit.is_zero() { otherwise } else { (limit / CHECKS_PER_LIMIT).max(MIN_CHECK_INTERVAL) }
}

fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err(format!("{text:?} is not a number from 0 to 1")),
    }
}
