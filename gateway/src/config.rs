//! Settings of the gateway: each is a flag, an environment variable and a key of the config file.

mod batches;
mod engines;
mod listeners;
mod memory;
mod shared_queue;
mod upstream;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use http::HeaderName;
use moongate_runtime::PeerTlsArgs;
use moongate_scheduler::{PolicyName, SchedulerOptions, TtftTarget};

use crate::access::AccessOptions;
use crate::feedback::MetricAliases;
use crate::ingress::{IngressOptions, TenantPriorityHeaders};
use crate::lora_adapters::LoraAdapterOptions;
use crate::model_aliases::ModelAliasOptions;

pub use batches::BatchApiOptions;
pub use engines::{DiscoverySource, EngineOptions};
pub(crate) use listeners::DEFAULT_CONNECTIONS;
pub use listeners::ListenerOptions;
pub use memory::MemoryOptions;
pub use shared_queue::{SharedQueueError, SharedQueueOptions};
pub use upstream::UpstreamOptions;

/// Name of a request header; empty for none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeaderSetting(pub(crate) Option<HeaderName>);

/// The text is not the name of a header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a valid header name; give one such as x-tenant-id, or nothing")]
pub struct HeaderSettingError(String);

impl FromStr for HeaderSetting {
    type Err = HeaderSettingError;

    fn from_str(name: &str) -> Result<Self, HeaderSettingError> {
        if name.is_empty() {
            return Ok(Self(None));
        }
        let header = HeaderName::try_from(name).map_err(|_| HeaderSettingError(name.to_owned()))?;
        Ok(Self(Some(header)))
    }
}

/// Command-line options of `moongate gateway`.
#[derive(Debug, Clone, Args)]
pub struct GatewayOptions {
    /// TOML file with any of these settings; keys are the flags' names.
    #[arg(long, value_name = "FILE", env = "MOONGATE_CONFIG")]
    pub config: Option<PathBuf>,

    /// Address of the public listener. Default: loopback only, so that nothing is exposed to a network by accident.
    #[arg(long, value_name = "ADDR", env = "MOONGATE_LISTEN", default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,

    /// Address of the admin listener: /console, /metrics, /health and /ready.
    #[arg(long, value_name = "ADDR", env = "MOONGATE_ADMIN_LISTEN", default_value = "127.0.0.1:9000")]
    pub admin_listen: SocketAddr,

    /// TLS and limits of both listeners.
    #[command(flatten)]
    pub listeners: ListenerOptions,

    /// Memory shared by all requests.
    #[command(flatten)]
    pub memory: MemoryOptions,

    /// Authentication of clients and administrators.
    #[command(flatten)]
    pub access: AccessOptions,

    /// Open paths and origins.
    #[command(flatten)]
    pub ingress: IngressOptions,

    /// Names of models for clients.
    #[command(flatten)]
    pub model_aliases: ModelAliasOptions,

    /// LoRA adapters that engines load at run time.
    #[command(flatten)]
    pub lora_adapters: LoraAdapterOptions,

    /// Engines and how they are discovered.
    #[command(flatten)]
    pub engines: EngineOptions,

    /// Routing policy. By predicted time: predictive. By load: least_load, least_requests, power_of_two, round_robin, random.
    /// Policies of other routers, for comparison: cache_aware and prefix_hash (smg), llm_d, lmetric, dynamo, dynamo_queue,
    /// conductor. Default predictive: it predicts queueing, fetching and computation in seconds.
    #[arg(long, value_name = "NAME", env = "MOONGATE_POLICY", default_value = "predictive")]
    pub policy: PolicyName,

    /// Policy `predictive`: reject a request (429) when its first token can no longer arrive within this time; 0s never rejects.
    /// Longer prompts have a longer target: see --ttft-target-factor.
    #[arg(long, value_name = "TIME", env = "MOONGATE_TTFT_TARGET", default_value = "0s", value_parser = humantime::parse_duration)]
    pub ttft_target: Duration,

    /// TTFT target of a long prompt, as a multiple of the time to compute it without any cache hit.
    #[arg(long, value_name = "N", env = "MOONGATE_TTFT_TARGET_FACTOR", default_value_t = 2.0, value_parser = parse_factor)]
    pub ttft_target_factor: f64,

    /// Policy `predictive`: send a decode no more requests than it can generate with this time per output token; 0s fills decodes as
    /// far as their KV cache allows. Requests beyond that are queued. Within the target, vLLM decodes also compute prompts.
    #[arg(long, value_name = "TIME", env = "MOONGATE_TPOT_TARGET", default_value = "0s", value_parser = humantime::parse_duration)]
    pub tpot_target: Duration,

    /// Other gateways with the same queue.
    #[command(flatten)]
    pub shared_queue: SharedQueueOptions,

    /// Most requests queued for engines; more are rejected (429).
    #[arg(long, value_name = "N", env = "MOONGATE_MAX_QUEUED_REQUESTS", default_value_t = 4096)]
    pub max_queued_requests: usize,

    /// Number of recent decisions kept for `moongate explain`; 0 keeps none. Each takes a few hundred bytes per engine; of
    /// a fleet with more than 64 engines, or of more than a thousand decisions a second, only a part is kept.
    #[arg(long, value_name = "N", env = "MOONGATE_DECISION_HISTORY", default_value_t = 256)]
    pub decision_history: usize,

    /// Also export metrics under the names of another gateway, for its dashboards. Default: none.
    #[arg(long, value_enum, value_name = "GATEWAY", env = "MOONGATE_METRIC_ALIASES")]
    pub metric_aliases: Option<MetricAliases>,

    /// Header that identifies the tenant: each tenant has its share of a busy fleet. Empty: all requests belong to one tenant.
    /// Default: each API key is a tenant.
    #[arg(long, value_name = "NAME", env = "MOONGATE_TENANT_HEADER", default_value = "authorization")]
    pub tenant_header: HeaderSetting,

    /// Header with a request's priority, an integer; larger is more urgent, 0 is the default. Default: none, because any client
    /// could set it.
    #[arg(long, value_name = "NAME", env = "MOONGATE_PRIORITY_HEADER")]
    pub priority_header: Option<HeaderSetting>,

    /// Folder with a model's tokenizer.json and tokenizer_config.json, by the model's name in requests. Without it, the gateway
    /// uses the folder that the engine reports if it exists on this machine, else queries engines for the tokens. Repeatable.
    #[arg(long, value_name = "NAME=DIR", env = "MOONGATE_MODEL", value_delimiter = ' ')]
    pub model: Vec<moongate_tokenize::ModelFolder>,

    /// Threads that tokenize prompts; the threads of connections tokenize only short ones. Default: half of the processor's cores, at most 8,
    /// each with up to 64 MiB of the tokenizer's own caches.
    #[arg(long, value_name = "N", env = "MOONGATE_PROMPT_THREADS", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub prompt_threads: Option<u16>,

    /// Longest time for tokenizing a prompt, including the wait for a thread; a request whose prompt takes longer is routed without a
    /// prediction. Default 100 ms: 128,000 tokens take 5 to 10 ms, and seconds to compute again.
    #[arg(long, value_name = "TIME", env = "MOONGATE_PROMPT_TIMEOUT", default_value = "100ms", value_parser = humantime::parse_duration)]
    pub prompt_timeout: Duration,

    /// Longest wait for an engine to tokenize a prompt whose model has no local tokenizer; 0s: engines are not queried. Default 100
    /// ms: about 20 ms are needed for 10,000 tokens, which take a second to compute again.
    #[arg(long, value_name = "TIME", env = "MOONGATE_TOKENIZE_TIMEOUT", default_value = "100ms", value_parser = humantime::parse_duration)]
    pub tokenize_timeout: Duration,

    /// Admin server of the Mooncake master whose store the engines use, as host:port; the master's default port is 9003. For a
    /// store with several shards, those of all masters in the order of their --shard, separated by commas. Without it, store
    /// hits are not predicted.
    #[arg(long, value_name = "HOST:PORT,...", env = "MOONGATE_MOONCAKE_ADMIN", value_delimiter = ',')]
    pub mooncake_admin: Vec<String>,

    /// Endpoint of that master's KV events, as tcp://host:port: its --kv_events_bind_endpoint; for several shards, those of all
    /// masters in the same order, separated by commas. Without it, or if the master publishes none, all keys are scanned every
    /// 10 s.
    #[arg(
        long,
        value_name = "ENDPOINT,...",
        env = "MOONGATE_MOONCAKE_EVENTS",
        requires = "mooncake_admin",
        value_delimiter = ','
    )]
    pub mooncake_events: Vec<moongate_zmtp::ZmtpEndpoint>,

    /// TLS between this program and the store.
    #[command(flatten)]
    pub store_tls: PeerTlsArgs,

    /// Speed-up of simulated engines: their --time-scale. The scheduler's time runs this many times faster; all other times are
    /// unchanged.
    #[arg(long, value_name = "N", env = "MOONGATE_TIME_SCALE", default_value_t = 1.0, value_parser = parse_factor)]
    pub time_scale: f64,

    /// Most KV-cache blocks in the index, 24 bytes each. Default 8 million, at most 192 MB: 512 million tokens in blocks of 64.
    #[arg(long, value_name = "N", env = "MOONGATE_INDEX_BLOCKS", default_value_t = 8_000_000)]
    pub index_blocks: usize,

    /// Connections, retries and time limits of requests to engines.
    #[command(flatten)]
    pub upstream: UpstreamOptions,

    /// Files and batches.
    #[command(flatten)]
    pub batches: BatchApiOptions,

    /// On shutdown: how long to keep serving while /ready already fails, so that load balancers notice.
    #[arg(long, value_name = "TIME", env = "MOONGATE_DRAIN_DELAY", default_value = "0s", value_parser = humantime::parse_duration)]
    pub drain_delay: Duration,

    /// On shutdown: time limit for open requests. Default 25 s: within Kubernetes' grace period of 30 s.
    #[arg(long, value_name = "TIME", env = "MOONGATE_DRAIN_DEADLINE", default_value = "25s", value_parser = humantime::parse_duration)]
    pub drain_deadline: Duration,
}

/// A folder of `--model` has no readable tokenizer.
#[derive(Debug, thiserror::Error)]
#[error("--model {model}={}: tokenizer.json cannot be read: {source}", folder.display())]
pub struct ModelFolderError {
    model: String,
    folder: PathBuf,
    source: std::io::Error,
}

/// Checks that the queue can be shared as `--queue-peer` says.
///
/// # Errors
///
/// [`SharedQueueError`] if a setting is invalid.
pub fn check_shared_queue(options: &GatewayOptions) -> Result<(), SharedQueueError> {
    options.shared_queue.peers(options.policy).map(drop)
}

/// Checks that each folder of `--model` has a readable tokenizer.json. It is loaded when an engine serves the model.
///
/// # Errors
///
/// [`ModelFolderError`] names the first model without one.
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
    /// Settings of the scheduler, from the flags.
    pub(crate) fn scheduler_settings(&self) -> SchedulerOptions {
        let base = self.ttft_target.as_secs_f64();
        let target = TtftTarget { base, cold_factor: self.ttft_target_factor };
        let tpot_target = self.tpot_target.as_secs_f64();
        SchedulerOptions {
            ttft_target: (base > 0.0).then_some(target),
            tpot_target: (tpot_target > 0.0).then_some(tpot_target),
            ..SchedulerOptions::default()
        }
    }

    /// Headers that carry tenant and priority.
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
        _ => Err(format!("{text:?} is not a number of at least 1")),
    }
}
