//! Settings of the sidecar: each is a flag, an environment variable and a key of the config file.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use moongate_discovery::{EngineRole, HttpScheme, KvConnector, MAX_LEASE, PhysicalLocation};
use moongate_runtime::{ClientTls, ClientTlsFiles, EngineTlsArgs, TlsConfigError};

use crate::gateway_address::GatewayAddress;

/// Options of `moongate sidecar`.
#[derive(Debug, Clone, Args)]
pub struct SidecarOptions {
    /// TOML file with these settings; keys are the flags' names.
    #[arg(long, value_name = "FILE", env = "MOONGATE_CONFIG")]
    pub config: Option<PathBuf>,

    /// Candidate URLs of the engine; the first that responds as an engine is used. Default: the ports of vLLM and SGLang on this machine.
    #[arg(
        long,
        value_name = "URL",
        env = "MOONGATE_SIDECAR_ENGINE_URL",
        value_delimiter = ' ',
        default_values = ["http://127.0.0.1:8000", "http://127.0.0.1:30000"]
    )]
    pub engine_url: Vec<String>,

    /// API key that the engine requires.
    #[arg(long, value_name = "KEY", env = "MOONGATE_ENGINE_API_KEY", hide_env_values = true)]
    pub engine_api_key: Option<String>,

    /// TLS settings for connections to the engine.
    #[command(flatten)]
    pub engine_tls: EngineTlsArgs,

    /// Host under which gateways and other engines reach the engine: the pod's address. Default: the host in --engine-url.
    #[arg(long, value_name = "HOST", env = "POD_IP")]
    pub advertise_host: Option<String>,

    /// Admin listener of gateways, as host:port, or https://host:port with TLS. All addresses of a name are used. Repeatable.
    #[arg(long, value_name = "HOST:PORT", env = "MOONGATE_SIDECAR_GATEWAY", value_delimiter = ' ')]
    pub gateway: Vec<GatewayAddress>,

    /// Role of the RoleBasedGroup whose pods are gateways, from the file of --rbg-config.
    #[arg(long, value_name = "NAME", env = "MOONGATE_SIDECAR_GATEWAY_ROLE")]
    pub gateway_role: Option<String>,

    /// Port of their admin listeners, if the file has no port named `admin`.
    #[arg(long, value_name = "PORT", env = "MOONGATE_SIDECAR_GATEWAY_PORT", default_value_t = 9000)]
    pub gateway_port: u16,

    /// Scheme of the gateways of --gateway-role.
    #[arg(long, value_name = "http|https", env = "MOONGATE_SIDECAR_GATEWAY_SCHEME", default_value = "http")]
    pub gateway_scheme: HttpScheme,

    /// CA certificates (PEM) for gateways with TLS; reloaded on change. Default: the system store.
    #[arg(long, value_name = "FILE", env = "MOONGATE_SIDECAR_GATEWAY_CA")]
    pub gateway_ca: Option<PathBuf>,

    /// Client certificate (PEM) for gateways that require mTLS; reloaded on change.
    #[arg(long, value_name = "FILE", env = "MOONGATE_SIDECAR_GATEWAY_TLS_CERT")]
    pub gateway_tls_cert: Option<PathBuf>,

    /// Private key (PEM) for --gateway-tls-cert.
    #[arg(long, value_name = "FILE", env = "MOONGATE_SIDECAR_GATEWAY_TLS_KEY")]
    pub gateway_tls_key: Option<PathBuf>,

    /// Expected name in the gateways' certificates. Default: the host in --gateway, or the instance's name in the file of --rbg-config.
    #[arg(long, value_name = "NAME", env = "MOONGATE_SIDECAR_GATEWAY_TLS_NAME")]
    pub gateway_tls_name: Option<String>,

    /// RBG's discovery file, for --gateway-role.
    #[arg(long, value_name = "FILE", env = "MOONGATE_RBG_CONFIG", default_value = rbg_api::CLUSTER_FILE)]
    pub rbg_config: PathBuf,

    /// Token for registrations: the gateways' --registration-token.
    #[arg(long, value_name = "TOKEN", env = "MOONGATE_REGISTRATION_TOKEN", hide_env_values = true)]
    pub registration_token: Option<String>,

    /// Gateways remove the engine after this time without a renewal. The sidecar renews three times per lease.
    #[arg(long, value_name = "TIME", env = "MOONGATE_SIDECAR_LEASE", default_value = "6s", value_parser = parse_lease)]
    pub lease: Duration,

    /// Id of the engine in gateways; for a pod NAMESPACE/POD@UID, as in their Kubernetes discovery. Default: its URL.
    #[arg(long, value_name = "ID", env = "MOONGATE_SIDECAR_ID")]
    pub id: Option<String>,

    /// prefill, decode or plain. Default: as SGLang reports, else by the role's name in the RoleBasedGroup, else plain.
    #[arg(long, value_name = "ROLE", env = "MOONGATE_SIDECAR_ROLE")]
    pub role: Option<EngineRole>,

    /// vLLM's KV connector, if the engine does not report it: nixl, mooncake or store.
    #[arg(long, value_name = "NAME", env = "MOONGATE_KV_CONNECTOR")]
    pub kv_connector: Option<KvConnector>,

    /// Port of the prefill's bootstrap server. Default: as SGLang reports, else 8998.
    #[arg(long, value_name = "PORT", env = "MOONGATE_BOOTSTRAP_PORT")]
    pub bootstrap_port: Option<u16>,

    /// Kubernetes node or host of the engine.
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node: Option<String>,

    /// Availability zone. Default: moongate.io/zone or topology.kubernetes.io/zone in --pod-info.
    #[arg(long, value_name = "NAME", env = "MOONGATE_SIDECAR_ZONE")]
    pub zone: Option<String>,

    /// Rack or RDMA rail. Default: moongate.io/rack in --pod-info.
    #[arg(long, value_name = "NAME", env = "MOONGATE_SIDECAR_RACK")]
    pub rack: Option<String>,

    /// NVLink domain. Default: moongate.io/nvlink-domain in --pod-info.
    #[arg(long, value_name = "NAME", env = "MOONGATE_SIDECAR_NVLINK_DOMAIN")]
    pub nvlink_domain: Option<String>,

    /// File with the pod's labels or annotations, from a volume of the downward API; reloaded on change. Repeatable.
    #[arg(long, value_name = "FILE", env = "MOONGATE_SIDECAR_POD_INFO", value_delimiter = ' ')]
    pub pod_info: Vec<PathBuf>,

    /// File with the desired LoRA adapters of the engine, NAME=PATH each; reloaded on change. Default: the annotation
    /// moongate.io/lora-adapters in --pod-info.
    #[arg(long, value_name = "FILE", env = "MOONGATE_SIDECAR_LORA_FILE")]
    pub lora_file: Option<PathBuf>,

    /// Address of /drain, /settled, /removal-cost, /healthz, /readyz, /status and /metrics. Loopback by default, so that nothing is exposed to a
    /// network by accident.
    #[arg(long, value_name = "ADDR", env = "MOONGATE_SIDECAR_LISTEN", default_value = "127.0.0.1:9400")]
    pub listen: SocketAddr,
}

impl SidecarOptions {
    /// The engine's location according to the flags alone.
    pub(crate) fn location(&self) -> PhysicalLocation {
        PhysicalLocation {
            zone: self.zone.clone(),
            rack: self.rack.clone(),
            node: self.node.clone(),
            nvlink_domain: self.nvlink_domain.clone(),
        }
    }

    /// TLS settings for connections to gateways.
    pub(crate) fn gateway_trust(&self) -> Result<ClientTls, TlsConfigError> {
        let identity = [self.gateway_tls_cert.as_ref(), self.gateway_tls_key.as_ref()];
        let flags = ["--gateway-tls-cert", "--gateway-tls-key"];
        let name = self.gateway_tls_name.as_ref();
        let loaded = ClientTlsFiles::from_options(self.gateway_ca.as_ref(), identity, name, flags)
            .and_then(ClientTls::load);
        let files =
            [("--gateway-ca", self.gateway_ca.as_ref()), (flags[0], identity[0]), (flags[1], identity[1])];
        loaded.map_err(|error| error.with_flag(&files))
    }

    /// Whether any gateway is configured.
    pub(crate) fn has_gateways(&self) -> bool {
        !self.gateway.is_empty() || self.gateway_role.is_some()
    }
}

fn parse_lease(text: &str) -> Result<Duration, String> {
    let lease = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let whole = lease.subsec_nanos() == 0 && (1..=u64::from(MAX_LEASE)).contains(&lease.as_secs());
    whole.then_some(lease).ok_or_else(|| format!("{text} is not 1s to {MAX_LEASE}s, in whole seconds"))
}
