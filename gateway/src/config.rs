//! Settings of the gateway: each is a flag, an environment variable and a key of the config file.

mod access;
mod engine_tls;
mod listeners;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use http::{HeaderName, HeaderValue};
use moongate_discovery::{
    DiscoveryOptions, Engine, KubernetesOptions, KvConnector, ProbeOptions, RbgOptions, Registry, Role,
    RolePorts, Scheme, StaticInstance,
};
use moongate_runtime::{Secret, Trust};
use moongate_scheduler::{PolicyName, Settings, TtftTarget};

use crate::dispatch::{AttemptLimits, RetryLimits};
use crate::fleet::{BreakerLimits, EndpointLimits, HealthLimits};
use crate::ingress::Standing;
use crate::upstream::{LegLimits, PoolLimits};

pub(crate) use access::TokenRules;
pub use access::{AccessOptions, OpenPath};
pub use engine_tls::EngineTlsOptions;
pub use listeners::ListenerOptions;

/// Where engines come from, beside the ones given by flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DiscoverySource {
    /// Flags, and the file of --instances-file.
    Static,
    /// RBG's injected /etc/rbg/config.yaml.
    Rbg,
    /// Pods in the Kubernetes API, by RBG's labels.
    Kubernetes,
}

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

    /// Who may ask.
    #[command(flatten)]
    pub access: AccessOptions,

    /// A prefill engine, as http://host:port or http://host:port,bootstrap-port; https:// with TLS. Repeatable.
    #[arg(long, value_name = "URL[,PORT]", env = "MOONGATE_PREFILL", value_delimiter = ' ', value_parser = parse_prefill)]
    pub prefill: Vec<StaticInstance>,

    /// A decode engine. Repeatable.
    #[arg(long, value_name = "URL", env = "MOONGATE_DECODE", value_delimiter = ' ', value_parser = parse_decode)]
    pub decode: Vec<StaticInstance>,

    /// An engine that does both. Repeatable.
    #[arg(long, value_name = "URL", env = "MOONGATE_WORKER", value_delimiter = ' ', value_parser = parse_worker)]
    pub worker: Vec<StaticInstance>,

    /// Where engines come from, beside the ones given by flags.
    #[arg(long, value_enum, env = "MOONGATE_DISCOVERY", default_value = "static")]
    pub discovery: DiscoverySource,

    /// TOML file that lists engines (tables named `instance` with url, role, …); watched and re-read when it changes.
    #[arg(long, value_name = "FILE", env = "MOONGATE_INSTANCES_FILE")]
    pub instances_file: Option<PathBuf>,

    /// RBG's discovery file.
    #[arg(long, value_name = "FILE", env = "MOONGATE_RBG_CONFIG", default_value = "/etc/rbg/config.yaml")]
    pub rbg_config: PathBuf,

    /// Kubernetes: client configuration; default: the pod's service account, or the user's own.
    #[arg(long, value_name = "FILE", env = "MOONGATE_KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,

    /// Kubernetes: namespace of the engines' pods; default: the gateway's own.
    #[arg(long, value_name = "NAME", env = "MOONGATE_NAMESPACE")]
    pub namespace: Option<String>,

    /// Kubernetes: name of the RoleBasedGroup; default: every group in the namespace.
    #[arg(long, value_name = "NAME", env = "MOONGATE_GROUP")]
    pub group: Option<String>,

    /// Kubernetes: label selector of the engines' pods, instead of RBG's labels; their role is the label or annotation moongate.io/role.
    #[arg(long, value_name = "SELECTOR", env = "MOONGATE_SELECTOR")]
    pub selector: Option<String>,

    /// Let engines register at run time: POST /workers at the admin listener, as `moongate sidecar` does. Off by default, because whoever
    /// reaches that listener could then have prompts sent anywhere.
    #[arg(long, env = "MOONGATE_REGISTRATION")]
    pub registration: bool,

    /// Token that /workers asks for, as `Authorization: Bearer TOKEN`; without one nobody is asked.
    #[arg(long, value_name = "TOKEN", env = "MOONGATE_REGISTRATION_TOKEN", hide_env_values = true)]
    pub registration_token: Option<Secret>,

    /// RBG and Kubernetes: HTTP port of prefill engines that name none. Default 8000: vLLM's own, and the usual one in RBG's
    /// examples; SGLang's own is 30000.
    #[arg(long, value_name = "PORT", env = "MOONGATE_PREFILL_PORT", default_value_t = 8000)]
    pub prefill_port: u16,

    /// RBG and Kubernetes: HTTP port of decode engines that name none.
    #[arg(long, value_name = "PORT", env = "MOONGATE_DECODE_PORT", default_value_t = 8000)]
    pub decode_port: u16,

    /// RBG and Kubernetes: HTTP port of plain workers that name none.
    #[arg(long, value_name = "PORT", env = "MOONGATE_WORKER_PORT", default_value_t = 8000)]
    pub worker_port: u16,

    /// RBG and Kubernetes: how engines are spoken to that do not say it by the annotation moongate.io/scheme.
    #[arg(long, value_name = "http|https", env = "MOONGATE_ENGINE_SCHEME", default_value = "http", value_parser = parse_scheme)]
    pub engine_scheme: Scheme,

    /// RBG: bootstrap port of prefills that name none; default: what the engine says, else 8998.
    #[arg(long, value_name = "PORT", env = "MOONGATE_BOOTSTRAP_PORT")]
    pub bootstrap_port: Option<u16>,

    /// Engine kind of engines that do not name theirs; default: each is asked.
    #[arg(long, value_name = "sglang|vllm", env = "MOONGATE_ENGINE", value_parser = parse_engine)]
    pub engine: Option<Engine>,

    /// vLLM's KV connector of engines that do not name theirs; default: each is asked.
    #[arg(long, value_name = "nixl|mooncake|store", env = "MOONGATE_KV_CONNECTOR", value_parser = parse_connector)]
    pub kv_connector: Option<KvConnector>,

    /// API key that engines ask for: for the gateway's own questions, and for clients' requests if the gateway asks clients for keys of
    /// its own. Else clients' keys are passed on as they are.
    #[arg(long, value_name = "KEY", env = "MOONGATE_ENGINE_API_KEY", hide_env_values = true)]
    pub engine_api_key: Option<Secret>,

    /// TLS towards engines.
    #[command(flatten)]
    pub engine_tls: EngineTlsOptions,

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
    pub model: Vec<moongate_prompt::Source>,

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
    pub mooncake_events: Option<moongate_zmtp::Endpoint>,

    /// How many times faster than real engines the engines are: simulated ones with the same --time-scale. The scheduler's seconds pass
    /// so many times faster; all other times stay as they are.
    #[arg(long, value_name = "N", env = "MOONGATE_TIME_SCALE", default_value_t = 1.0, value_parser = parse_factor)]
    pub time_scale: f64,

    /// Pages that the index of KV caches holds at most, 24 bytes each. Default 8 million, at most 192 MB: 512 million tokens in pages
    /// of 64.
    #[arg(long, value_name = "N", env = "MOONGATE_INDEX_PAGES", default_value_t = 8_000_000)]
    pub index_pages: usize,

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

    /// On shutdown: how long to go on serving while /ready already says no, so that load balancers notice.
    #[arg(long, value_name = "TIME", env = "MOONGATE_DRAIN_DELAY", default_value = "0s", value_parser = humantime::parse_duration)]
    pub drain_delay: Duration,

    /// On shutdown: how long open requests may take to end. Default 25 s: inside Kubernetes' 30 s of grace.
    #[arg(long, value_name = "TIME", env = "MOONGATE_DRAIN_DEADLINE", default_value = "25s", value_parser = humantime::parse_duration)]
    pub drain_deadline: Duration,
}

impl GatewayOptions {
    /// What discovery is started with, and engines are known by.
    #[must_use]
    pub fn discovery_options(&self, trust: &Trust) -> DiscoveryOptions {
        let mut options = DiscoveryOptions {
            instances: self.static_instances(),
            file: self.instances_file.clone(),
            registry: self.registration.then(Registry::default),
            probe: ProbeOptions {
                api_key: self.engine_api_key.as_ref().map(|key| key.expose().to_owned()),
                trust: Some(trust.clone()),
                ..ProbeOptions::default()
            },
            ..DiscoveryOptions::default()
        };
        match self.discovery {
            DiscoverySource::Static => {}
            DiscoverySource::Rbg => {
                options.rbg = Some(RbgOptions {
                    path: self.rbg_config.clone(),
                    scheme: self.engine_scheme,
                    engine: self.engine,
                    connector: self.kv_connector,
                    ports: self.role_ports(),
                    bootstrap_port: self.bootstrap_port,
                    ..RbgOptions::from_env()
                });
            }
            DiscoverySource::Kubernetes => {
                options.kubernetes = Some(KubernetesOptions {
                    kubeconfig: self.kubeconfig.clone(),
                    namespace: self.namespace.clone(),
                    group: self.group.clone(),
                    selector: self.selector.clone(),
                    scheme: self.engine_scheme,
                    ports: self.role_ports(),
                    engine: self.engine,
                    connector: self.kv_connector,
                    ..KubernetesOptions::default()
                });
            }
        }
        options
    }

    fn role_ports(&self) -> RolePorts {
        RolePorts { prefill: self.prefill_port, decode: self.decode_port, plain: self.worker_port }
    }

    /// Engines given by flags.
    #[must_use]
    pub fn static_instances(&self) -> Vec<StaticInstance> {
        let given = self.prefill.iter().chain(&self.decode).chain(&self.worker).cloned();
        given
            .map(|mut instance| {
                instance.engine = instance.engine.or(self.engine);
                if instance.role != Role::Plain {
                    instance.connector = instance.connector.or(self.kv_connector);
                }
                instance
            })
            .collect()
    }

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

    /// What the scheduler is told.
    pub(crate) fn scheduler_settings(&self) -> Settings {
        let base = self.ttft_target.as_secs_f64();
        let target = TtftTarget { base, cold_factor: self.ttft_target_factor };
        Settings { ttft_target: (base > 0.0).then_some(target), ..Settings::default() }
    }

    /// The engines' key as the header that carries it.
    pub(crate) fn engine_authorization(&self) -> Option<HeaderValue> {
        let mut value =
            HeaderValue::try_from(format!("Bearer {}", self.engine_api_key.as_ref()?.expose())).ok()?;
        value.set_sensitive(true);
        Some(value)
    }

    /// What decides on a request's turn.
    pub(crate) fn standing(&self) -> Standing {
        Standing {
            tenant: self.tenant_header.0.clone(),
            priority: self.priority_header.clone().and_then(|header| header.0),
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

fn parse_factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(factor) if factor.is_finite() && factor >= 1.0 => Ok(factor),
        _ => Err(format!("{text:?} is not a number from 1 on")),
    }
}

fn parse_prefill(text: &str) -> Result<StaticInstance, String> {
    let (url, port) = match text.rsplit_once(',') {
        Some((url, port)) => (url, Some(port)),
        None => (text, None),
    };
    let mut instance = parse_url(Role::Prefill, url)?;
    if let Some(port) = port {
        let port = port
            .parse()
            .map_err(|_| format!("{port:?} after the comma is not a bootstrap port (1-65535)"))?;
        instance.bootstrap_port = Some(port);
    }
    Ok(instance)
}

fn parse_decode(text: &str) -> Result<StaticInstance, String> {
    parse_url(Role::Decode, text)
}

fn parse_worker(text: &str) -> Result<StaticInstance, String> {
    parse_url(Role::Plain, text)
}

fn parse_url(role: Role, text: &str) -> Result<StaticInstance, String> {
    let url = url::Url::parse(text).map_err(|error| format!("{error}; write it as http://host:port"))?;
    match (url.scheme(), url.host_str(), url.port_or_known_default()) {
        (scheme @ ("http" | "https"), Some(host), Some(port)) => {
            Ok(StaticInstance::new(role, format!("{scheme}://{host}:{port}")))
        }
        ("http" | "https", ..) => Err("the host is missing; write it as http://host:port".to_owned()),
        (scheme, ..) => {
            Err(format!("{scheme}:// is not supported for engines; write it as http://host:port"))
        }
    }
}

fn parse_scheme(text: &str) -> Result<Scheme, String> {
    Scheme::parse(text).ok_or_else(|| "schemes are http and https".to_owned())
}

fn parse_engine(text: &str) -> Result<Engine, String> {
    match text {
        "sglang" => Ok(Engine::Sglang),
        "vllm" => Ok(Engine::Vllm),
        _ => Err("engines are sglang and vllm".to_owned()),
    }
}

fn parse_connector(text: &str) -> Result<KvConnector, String> {
    match text {
        "nixl" => Ok(KvConnector::Nixl),
        "mooncake" => Ok(KvConnector::Mooncake),
        "store" => Ok(KvConnector::Store),
        _ => Err("connectors are nixl, mooncake and store".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefill_takes_a_bootstrap_port() {
        let given = parse_prefill("http://10.0.0.1:30000/,8998").unwrap();
        assert_eq!((given.url.as_str(), given.bootstrap_port), ("http://10.0.0.1:30000", Some(8998)));
        assert_eq!(parse_prefill("http://p:1").unwrap().bootstrap_port, None);
        let secured = parse_prefill("https://p,8998").unwrap();
        assert_eq!((secured.url.as_str(), secured.bootstrap_port), ("https://p:443", Some(8998)));
        for (bad, part) in
            [("10.0.0.1:30000", "http://host:port"), ("ftp://p:1", "ftp"), ("http://p:1,x", "bootstrap")]
        {
            let error = parse_prefill(bad).unwrap_err();
            assert!(error.contains(part), "{bad}: {error}");
        }
    }
}
