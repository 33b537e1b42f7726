//! Settings of the sidecar: each is a flag, an environment variable and a key of the config file.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use moongate_discovery::{EngineRole, HttpScheme, KvConnector, MAX_LEASE, PhysicalLocation};
use moongate_runtime::{ClientTls, ClientTlsFiles, EngineTlsArgs, TlsConfigError};

use crate::gateways::GatewayAddress;

/// Options of `moongate sidecar`.
#[derive(Debug, Clone, Args)]
pub struct SidecarOptions {
    /// TOML file with any of these settings; keys are the flags' names.
    #[arg(long, value_name = "FILE", env = "MOONGATE_CONFIG")]
    pub config: Option<PathBuf>,

    /// Where the engine may be; the first that answers as one is it. Default: the ports of vLLM and of SGLang on this machine.
    #[arg(
        long,
        value_name = "URL",
        env = "MOONGATE_SIDECAR_ENGINE_URL",
        value_delimiter = ' ',
        default_values = ["http://127.0.0.1:8000", "http://127.0.0.1:30000"]
    )]
    pub engine_url: Vec<String>,

    /// API key that the engine asks for.
    #[arg(long, value_name = "KEY", env = "MOONGATE_ENGINE_API_KEY", hide_env_values = true)]
    pub engine_api_key: Option<String>,

    /// TLS towards the engine.
    #[command(flatten)]
    pub engine_tls: EngineTlsArgs,

    /// Host under which gateways and other engines reach the engine: the pod's address. Default: the one in --engine-url.
    #[arg(long, value_name = "HOST", env = "POD_IP")]
    pub advertise_host: Option<String>,

    /// Admin listener of gateways, as host:port, or https://host:port if it has TLS. A name stands for all of its addresses. Repeatable.
    #[arg(long, value_name = "HOST:PORT", env = "MOONGATE_SIDECAR_GATEWAY", value_delimiter = ' ')]
    pub gateway: Vec<GatewayAddress>,

    /// Role of the RoleBasedGroup whose pods are gateways, by the file of --rbg-config.
    #[arg(long, value_name = "NAME", env = "MOONGATE_SIDECAR_GATEWAY_ROLE")]
    pub gateway_role: Option<String>,

    /// Port of their admin listeners, if the file names no port `admin`.
    #[arg(long, value_name = "PORT", env = "MOONGATE_SIDECAR_GATEWAY_PORT", default_value_t = 9000)]
    pub gateway_port: u16,

    /// How the gateways of --gateway-role are spoken to.
    #[arg(long, value_name = "http|https", env = "MOONGATE_SIDECAR_GATEWAY_SCHEME", default_value = "http")]
    pub gateway_scheme: HttpScheme,

    /// Authorities of gateways with TLS (PEM); re-read when it changes. Default: those that this machine trusts.
    #[arg(long, value_name = "FILE", env = "MOONGATE_SIDECAR_GATEWAY_CA")]
    pub gateway_ca: Option<PathBuf>,

    /// Certificate for gateways that ask for one (mTLS, PEM); re-read when it changes.
    #[arg(long, value_name = "FILE", env = "MOONGATE_SIDECAR_GATEWAY_TLS_CERT")]
    pub gateway_tls_cert: Option<PathBuf>,

    /// Its key.
    #[arg(long, value_name = "FILE", env = "MOONGATE_SIDECAR_GATEWAY_TLS_KEY")]
    pub gateway_tls_key: Option<PathBuf>,

    /// Name that the gateways' certificates have. Default: the host in --gateway, and the instance's in the file of --rbg-config.
    #[arg(long, value_name = "NAME", env = "MOONGATE_SIDECAR_GATEWAY_TLS_NAME")]
    pub gateway_tls_name: Option<String>,

    /// RBG's discovery file.
    #[arg(long, value_name = "FILE", env = "MOONGATE_RBG_CONFIG", default_value = rbg_api::CLUSTER_FILE)]
    pub rbg_config: PathBuf,

    /// The gateways' --registration-token.
    #[arg(long, value_name = "TOKEN", env = "MOONGATE_REGISTRATION_TOKEN", hide_env_values = true)]
    pub registration_token: Option<String>,

    /// A gateway forgets the engine after so long without a word of the sidecar, which renews it three times as often.
    #[arg(long, value_name = "TIME", env = "MOONGATE_SIDECAR_LEASE", default_value = "6s", value_parser = parse_lease)]
    pub lease: Duration,

    /// Name of the engine in gateways, NAMESPACE/POD@UID for a pod, as in their own Kubernetes discovery. Default: its URL.
    #[arg(long, value_name = "ID", env = "MOONGATE_SIDECAR_ID")]
    pub id: Option<String>,

    /// prefill, decode or plain. Default: what SGLang says, else what the role's name in the RoleBasedGroup says, else plain.
    #[arg(long, value_name = "ROLE", env = "MOONGATE_SIDECAR_ROLE")]
    pub role: Option<EngineRole>,

    /// vLLM's KV connector, if it does not tell: nixl, mooncake or store.
    #[arg(long, value_name = "NAME", env = "MOONGATE_KV_CONNECTOR")]
    pub kv_connector: Option<KvConnector>,

    /// Port of the prefill's bootstrap server. Default: what SGLang says, else 8998.
    #[arg(long, value_name = "PORT", env = "MOONGATE_BOOTSTRAP_PORT")]
    pub bootstrap_port: Option<u16>,

    /// Kubernetes node or host.
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

    /// File with the pod's labels or annotations, from a volume of the downward API; read again when it changes. Repeatable.
    #[arg(long, value_name = "FILE", env = "MOONGATE_SIDECAR_POD_INFO", value_delimiter = ' ')]
    pub pod_info: Vec<PathBuf>,

    /// File with the LoRA adapters that the engine shall have, NAME=PATH each; read again when it changes. Default: the annotation
    /// moongate.io/lora-adapters in --pod-info.
    #[arg(long, value_name = "FILE", env = "MOONGATE_SIDECAR_LORA_FILE")]
    pub lora_file: Option<PathBuf>,

    /// Address of /drain, /settled, /healthz, /readyz, /status and /metrics. Default: this machine only, so that nothing is opened to a
    /// network by accident.
    #[arg(long, value_name = "ADDR", env = "MOONGATE_SIDECAR_LISTEN", default_value = "127.0.0.1:9400")]
    pub listen: SocketAddr,
}

impl SidecarOptions {
    /// Where the engine is, by flags alone.
    pub(crate) fn location(&self) -> PhysicalLocation {
        PhysicalLocation {
            zone: self.zone.clone(),
            rack: self.rack.clone(),
            node: self.node.clone(),
            nvlink_domain: self.nvlink_domain.clone(),
        }
    }

    /// What gateways are known by.
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

    /// Whether any gateway is to be told.
    pub(crate) fn has_gateways(&self) -> bool {
        !self.gateway.is_empty() || self.gateway_role.is_some()
    }
}

fn parse_lease(text: &str) -> Result<Duration, String> {
    let lease = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let whole = lease.subsec_nanos() == 0 && (1..=u64::from(MAX_LEASE)).contains(&lease.as_secs());
    whole.then_some(lease).ok_or_else(|| format!("{text} is not 1s to {MAX_LEASE}s, in whole seconds"))
}
