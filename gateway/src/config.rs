//! Settings of the gateway: each is a flag, an environment variable and a key of the config file.

mod access;
mod engines;
mod listeners;
mod memory;
mod upstream;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use http::HeaderName;
use moongate_runtime::PeerTlsArgs;
use moongate_scheduler::{PolicyName, SchedulerOptions, TtftTarget};

use crate::feedback::MetricAliases;
use crate::ingress::TenantPriorityHeaders;

pub(crate) use access::JwtRequirements;
pub use access::{AccessOptions, UnauthenticatedPath};
pub use engines::{DiscoverySource, EngineOptions};
pub(crate) use listeners::DEFAULT_CONNECTIONS;
pub use listeners::ListenerOptions;
pub use memory::MemoryOptions;
pub use upstream::UpstreamOptions;

/// Name of a header that is looked at; empty for none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeaderSetting(pub(crate) Option<HeaderName>);

impl FromStr for HeaderSetting {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if name.is_empty() {
            return Ok(Self(None));
        }
        let wrong =
            |_| format!("{name:?} cannot be a header's name; give one such as x-tenant-id, or nothing");
        HeaderName::try_from(name).map(|name| Self(Some(name))).map_err(wrong)
    }
}

/// Options of `moongate gateway`.
#[derive(Debug, Clone, Args)]
pub struct GatewayOptions {
    /// TOML file with any of these settings; keys are the flags' names.
    #[arg(long, value_name = "FILE", env = "MOONGATE_CONFIG")]
    pub config: Option<PathBuf>,

    /// Address for clients. Default: this machine only, so that nothing is opened to a network by accident.
    #[arg(long, value_name = "ADDR", env = "MOONGATE_LISTEN", default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,

    /// Address for /console, /metrics, /health and /ready.
    #[arg(long, value_name = "ADDR", env = "MOONGATE_ADMIN_LISTEN", default_value = "127.0.0.1:9000")]
    pub admin_listen: SocketAddr,

    /// TLS and limits of both listeners.
    #[command(flatten)]
    pub listeners: ListenerOptions,

    /// Memory that all requests share.
    #[command(flatten)]
    pub memory: MemoryOptions,

    /// Who may ask.
    #[command(flatten)]
    pub access: AccessOptions,

    /// Which engines there are.
    #[command(flatten)]
    pub engines: EngineOptions,

    /// How routes are chosen. By predicted time: predictive. By load: least_load, least_requests, power_of_two, round_robin, random. Like
    /// other routers, to compare with: cache_aware and prefix_hash (smg), llm_d, lmetric, dynamo, dynamo_queue, conductor. Default
    /// predictive: it predicts queues, fetches and computation in seconds.
    #[arg(long, value_name = "NAME", env = "MOONGATE_POLICY", default_value = "predictive")]
    pub policy: PolicyName,

    /// Policy `predictive`: refuse a request (429) once its first token cannot come within this time any more; 0s never refuses. Longer
    /// prompts have longer: see --ttft-target-factor.
    #[arg(long, value_name = "TIME", env = "MOONGATE_TTFT_TARGET", default_value = "0s", value_parser = humantime::parse_duration)]
    pub ttft_target: Duration,

    /// The target of a long prompt, as a multiple of the time to compute it without any cache.
    #[arg(long, value_name = "N", env = "MOONGATE_TTFT_TARGET_FACTOR", default_value_t = 2.0, value_parser = parse_factor)]
    pub ttft_target_factor: f64,

    /// Most requests that wait for engines; more are refused (429).
    #[arg(long, value_name = "N", env = "MOONGATE_HELD_REQUESTS", default_value_t = 4096)]
    pub held_requests: usize,

    /// Latest decisions that can be asked for with `moongate explain`; 0 keeps none. Each takes some hundred bytes per engine.
    #[arg(long, value_name = "N", env = "MOONGATE_KEPT_DECISIONS", default_value_t = 256)]
    pub kept_decisions: usize,

    /// Also tell metrics under the names that they have in another gateway, for its dashboards. Default: none.
    #[arg(long, value_enum, value_name = "GATEWAY", env = "MOONGATE_METRIC_ALIASES")]
    pub metric_aliases: Option<MetricAliases>,

    /// Header that tells tenants apart: each has its share of a busy fleet. Empty: all requests are one tenant's. Default: each API key
    /// is a tenant.
    #[arg(long, value_name = "NAME", env = "MOONGATE_TENANT_HEADER", default_value = "authorization")]
    pub tenant_header: HeaderSetting,

    /// Header with a request's priority, a whole number; larger is more urgent, 0 is usual. Default: none, because any client could set it.
    #[arg(long, value_name = "NAME", env = "MOONGATE_PRIORITY_HEADER")]
    pub priority_header: Option<HeaderSetting>,

    /// Folder with a model's tokenizer.json and tokenizer_config.json, by the model's name in requests. Without one: the folder that the
    /// engine names, if it is on this machine too; else engines are asked for the tokens. Repeatable.
    #[arg(long, value_name = "NAME=DIR", env = "MOONGATE_MODEL", value_delimiter = ' ')]
    pub model: Vec<moongate_tokenize::ModelFolder>,

    /// Longest time that a request waits for an engine to tell its tokens, if the model has no tokenizer here; 0s: engines are not
    /// asked. Default 100 ms: some 20 ms are needed for 10 thousand tokens; to compute that many again takes a second.
    #[arg(long, value_name = "TIME", env = "MOONGATE_TOKENIZE_TIMEOUT", default_value = "100ms", value_parser = humantime::parse_duration)]
    pub tokenize_timeout: Duration,

    /// The admin server of the Mooncake master whose store the engines use, as host:port; 9003 is the master's default. Without it,
    /// pages in the store are not predicted.
    #[arg(long, value_name = "HOST:PORT", env = "MOONGATE_MOONCAKE_ADMIN")]
    pub mooncake_admin: Option<String>,

    /// Where that master publishes its KV events, as tcp://host:port: its --kv_events_bind_endpoint. Without it, and with a master
    /// that publishes none, what others store is found by reading all keys every 10 s.
    #[arg(long, value_name = "ENDPOINT", env = "MOONGATE_MOONCAKE_EVENTS", requires = "mooncake_admin")]
    pub mooncake_events: Option<moongate_zmtp::ZmtpEndpoint>,

    /// TLS with the programs of the store.
    #[command(flatten)]
    pub store_tls: PeerTlsArgs,

    /// How many times faster than real engines the engines are: simulated ones with the same --time-scale. The scheduler's seconds pass
    /// so many times faster; all other times stay as they are.
    #[arg(long, value_name = "N", env = "MOONGATE_TIME_SCALE", default_value_t = 1.0, value_parser = parse_factor)]
    pub time_scale: f64,

    /// Pages that the index of KV caches holds at most, 24 bytes each. Default 8 million, at most 192 MB: 512 million tokens in pages
    /// of 64.
    #[arg(long, value_name = "N", env = "MOONGATE_INDEX_PAGES", default_value_t = 8_000_000)]
    pub index_pages: usize,

    /// How requests are sent to engines.
    #[command(flatten)]
    pub upstream: UpstreamOptions,

    /// On shutdown: how long to go on serving while /ready already says no, so that load balancers notice.
    #[arg(long, value_name = "TIME", env = "MOONGATE_DRAIN_DELAY", default_value = "0s", value_parser = humantime::parse_duration)]
    pub drain_delay: Duration,

    /// On shutdown: how long open requests may take to end. Default 25 s: inside Kubernetes' 30 s of grace.
    #[arg(long, value_name = "TIME", env = "MOONGATE_DRAIN_DEADLINE", default_value = "25s", value_parser = humantime::parse_duration)]
    pub drain_deadline: Duration,
}

/// A folder of `--model` has no tokenizer.
#[derive(Debug, thiserror::Error)]
#[error("--model {model}={}: tokenizer.json cannot be read: {source}", folder.display())]
pub struct ModelFolderError {
    model: String,
    folder: PathBuf,
    source: std::io::Error,
}

/// Checks that each folder of `--model` has a tokenizer that can be read. It is loaded when an engine serves the model.
///
/// # Errors
/// [`ModelFolderError`] names the first model without.
pub fn check_model_folders(options: &GatewayOptions) -> Result<(), ModelFolderError> {
    options.model.iter().try_for_each(|source| {
        let opened = std::fs::File::open(source.folder.join("tokenizer.json"));
        opened.map(drop).map_err(|error| ModelFolderError {
            model: source.model.clone(),
            folder: source.folder.clone(),
            source: error,
        })
    })
}

impl GatewayOptions {
    /// What the scheduler is told.
    pub(crate) fn scheduler_settings(&self) -> SchedulerOptions {
        let base = self.ttft_target.as_secs_f64();
        let target = TtftTarget { base, cold_factor: self.ttft_target_factor };
        SchedulerOptions { ttft_target: (base > 0.0).then_some(target), ..SchedulerOptions::default() }
    }

    /// What decides on a request's turn.
    pub(crate) fn tenant_priority_headers(&self) -> TenantPriorityHeaders {
        TenantPriorityHeaders {
            tenant: self.tenant_header.0.clone(),
            priority: self.priority_header.clone().and_then(|header| header.0),
        }
    }
}

fn parse_factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if factor.is_finite() && factor >= 1.0 => Ok(factor),
        _ => Err(format!("{text:?} is not a number from 1 on")),
    }
}
