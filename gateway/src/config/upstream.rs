//! Settings of exchanges with engines: attempts, time limits, connections, health checks.

use std::time::Duration;

use clap::Args;
use moongate_runtime::Trust;

use crate::dispatch::{AttemptLimits, RetryLimits};
use crate::fleet::{BreakerLimits, EndpointLimits, HealthLimits};
use crate::upstream::{LegLimits, PoolLimits};

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
    pub(crate) fn endpoint_limits(&self, trust: &Trust) -> EndpointLimits {
        EndpointLimits {
            pool: PoolLimits {
                connect_timeout: self.connect_timeout,
                max_idle: self.max_idle_connections,
                idle_timeout: self.idle_connection_timeout,
                trust: trust.clone(),
            },
            breaker: BreakerLimits {
                failures: self.breaker_failures,
                pause: self.breaker_pause,
                longest_pause: Duration::from_secs(60),
            },
        }
    }

    pub(crate) fn retry_limits(&self) -> RetryLimits {
        RetryLimits {
            attempts: self.attempts,
            backoff: self.retry_backoff,
            attempt: AttemptLimits {
                prefill: LegLimits { first_byte: self.prefill_timeout, idle: self.idle_timeout },
                stream: LegLimits { first_byte: self.first_byte_timeout, idle: self.idle_timeout },
                whole: LegLimits { first_byte: self.answer_timeout, idle: self.idle_timeout },
                held_answer_bytes: self.held_answer_bytes,
            },
        }
    }

    /// `None` if health checks are off.
    pub(crate) fn health_limits(&self) -> Option<HealthLimits> {
        (!self.health_interval.is_zero()).then(|| HealthLimits {
            path: self.health_path.clone(),
            every: self.health_interval,
            timeout: self.health_timeout,
            failures: 3,
        })
    }
}
