//! Settings of engines: addresses, discovery and credentials.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use http::HeaderValue;
use moongate_discovery::{
    DiscoveryOptions, EngineKind, EngineRegistry, EngineRole, HttpScheme, KubernetesDiscoveryOptions,
    KvConnector, ProbeOptions, RbgDiscoveryOptions, RolePorts, StaticInstance,
};
use moongate_runtime::{ClientTls, EngineTlsArgs, SecretString};

use crate::fleet::{CompatibleVersions, VersionPairing, VersionRule};

/// Source of engines, in addition to those given by flags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DiscoverySource {
    /// Flags, and the file of --instances-file.
    Static,
    /// RBG's injected /etc/rbg/config.yaml.
    Rbg,
    /// Pods in the Kubernetes API, by RBG's labels.
    Kubernetes,
}

/// Engines and how they are discovered.
#[derive(Debug, Clone, Args)]
pub struct EngineOptions {
    /// A prefill engine, as http://host:port or http://host:port,bootstrap-port; https:// with TLS. Repeatable.
    #[arg(long, value_name = "URL[,PORT]", env = "MOONGATE_PREFILL", value_delimiter = ' ', value_parser = parse_prefill)]
    pub prefill: Vec<StaticInstance>,

    /// URL of a decode engine. Repeatable.
    #[arg(long, value_name = "URL", env = "MOONGATE_DECODE", value_delimiter = ' ', value_parser = parse_decode)]
    pub decode: Vec<StaticInstance>,

    /// URL of an engine that runs both prefill and decode. Repeatable.
    #[arg(long, value_name = "URL", env = "MOONGATE_WORKER", value_delimiter = ' ', value_parser = parse_worker)]
    pub worker: Vec<StaticInstance>,

    /// Source of engines, in addition to those given by flags.
    #[arg(long, value_enum, env = "MOONGATE_DISCOVERY", default_value = "static")]
    pub discovery: DiscoverySource,

    /// TOML file that lists engines (tables named `instance` with url, role, …); reloaded on change.
    #[arg(long, value_name = "FILE", env = "MOONGATE_INSTANCES_FILE")]
    pub instances_file: Option<PathBuf>,

    /// Discovery file that RBG mounts into the pod.
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

    /// Kubernetes: label selector of the engines' pods, instead of RBG's labels; the label or annotation moongate.io/role gives the
    /// role.
    #[arg(long, value_name = "SELECTOR", env = "MOONGATE_SELECTOR")]
    pub selector: Option<String>,

    /// Let engines register at run time through POST /workers of the admin listener, as `moongate sidecar` does. Off by default,
    /// because anyone who can reach that listener could redirect prompts to another host.
    #[arg(long, env = "MOONGATE_REGISTRATION")]
    pub registration: bool,

    /// Token that /workers requires, as `Authorization: Bearer TOKEN`. Default: no token.
    #[arg(long, value_name = "TOKEN", env = "MOONGATE_REGISTRATION_TOKEN", hide_env_values = true)]
    pub registration_token: Option<SecretString>,

    /// RBG and Kubernetes: HTTP port of prefill engines that declare none. Default 8000: vLLM's default and the usual one in RBG's
    /// examples; SGLang's default is 30000.
    #[arg(long, value_name = "PORT", env = "MOONGATE_PREFILL_PORT", default_value_t = 8000)]
    pub prefill_port: u16,

    /// RBG and Kubernetes: HTTP port of decode engines that declare none.
    #[arg(long, value_name = "PORT", env = "MOONGATE_DECODE_PORT", default_value_t = 8000)]
    pub decode_port: u16,

    /// RBG and Kubernetes: HTTP port of plain workers that declare none.
    #[arg(long, value_name = "PORT", env = "MOONGATE_WORKER_PORT", default_value_t = 8000)]
    pub worker_port: u16,

    /// RBG and Kubernetes: scheme of engines without the annotation moongate.io/scheme.
    #[arg(long, value_name = "http|https", env = "MOONGATE_ENGINE_SCHEME", default_value = "http")]
    pub engine_scheme: HttpScheme,

    /// RBG: bootstrap port of prefill engines that declare none; default: the port that the engine reports, else 8998.
    #[arg(long, value_name = "PORT", env = "MOONGATE_BOOTSTRAP_PORT")]
    pub bootstrap_port: Option<u16>,

    /// Engine kind of engines that do not declare it; default: each engine is probed.
    #[arg(long, value_name = "sglang|vllm", env = "MOONGATE_ENGINE")]
    pub engine: Option<EngineKind>,

    /// vLLM's KV connector of engines that do not declare it; default: each engine is probed.
    #[arg(long, value_name = KvConnector::CHOICES, env = "MOONGATE_KV_CONNECTOR")]
    pub kv_connector: Option<KvConnector>,

    /// Whether a prefill and a decode of different engine versions may pair. `preferred`: only if a model has no pair of one version.
    #[arg(long, value_enum, env = "MOONGATE_PAIR_VERSIONS", default_value_t = VersionPairing::Preferred)]
    pub pair_versions: VersionPairing,

    /// Versions that may pair although they differ, as 0.5.5=0.5.6. Repeatable.
    #[arg(long, value_name = "VERSION=VERSION", env = "MOONGATE_COMPATIBLE_VERSIONS", value_delimiter = ' ')]
    pub compatible_versions: Vec<CompatibleVersions>,

    /// API key that engines require: sent with the gateway's own queries, and with clients' requests if the gateway authenticates
    /// clients itself. Otherwise clients' keys are passed through.
    #[arg(long, value_name = "KEY", env = "MOONGATE_ENGINE_API_KEY", hide_env_values = true)]
    pub engine_api_key: Option<SecretString>,

    /// TLS of connections to engines.
    #[command(flatten)]
    pub engine_tls: EngineTlsArgs,
}

impl EngineOptions {
    /// Which versions of engines may pair.
    pub(crate) fn version_rule(&self) -> VersionRule {
        VersionRule::new(self.pair_versions, &self.compatible_versions)
    }

    /// Options for service discovery and engine probes.
    #[must_use]
    pub fn discovery_options(&self, trust: &ClientTls) -> DiscoveryOptions {
        let mut options = DiscoveryOptions {
            instances: self.static_instances(),
            file: self.instances_file.clone(),
            registry: self.registration.then(EngineRegistry::default),
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
                options.rbg = Some(RbgDiscoveryOptions {
                    path: self.rbg_config.clone(),
                    scheme: self.engine_scheme,
                    engine: self.engine,
                    connector: self.kv_connector,
                    ports: self.role_ports(),
                    bootstrap_port: self.bootstrap_port,
                    ..RbgDiscoveryOptions::from_env()
                });
            }
            DiscoverySource::Kubernetes => {
                options.kubernetes = Some(KubernetesDiscoveryOptions {
                    kubeconfig: self.kubeconfig.clone(),
                    namespace: self.namespace.clone(),
                    group: self.group.clone(),
                    selector: self.selector.clone(),
                    scheme: self.engine_scheme,
                    ports: self.role_ports(),
                    engine: self.engine,
                    connector: self.kv_connector,
                    ..KubernetesDiscoveryOptions::default()
                });
            }
        }
        options
    }

    fn role_ports(&self) -> RolePorts {
        RolePorts { prefill: self.prefill_port, decode: self.decode_port, plain: self.worker_port }
    }

    /// Engines given by flags, with the defaults applied.
    #[must_use]
    pub fn static_instances(&self) -> Vec<StaticInstance> {
        let given = self.prefill.iter().chain(&self.decode).chain(&self.worker).cloned();
        given
            .map(|mut instance| {
                instance.engine = instance.engine.or(self.engine);
                if instance.role != EngineRole::Plain {
                    instance.connector = instance.connector.or(self.kv_connector);
                }
                instance
            })
            .collect()
    }

    /// The engines' API key as an `Authorization` header value.
    pub(crate) fn authorization(&self) -> Option<HeaderValue> {
        let mut value =
            HeaderValue::try_from(format!("Bearer {}", self.engine_api_key.as_ref()?.expose())).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

/// Why a flag does not name an engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum EngineUrlError {
    #[error("{0}; write it as http://host:port")]
    Syntax(#[from] url::ParseError),
    #[error("the host is missing; write it as http://host:port")]
    NoHost,
    #[error("{0}:// is not supported for engines; write it as http://host:port")]
    Scheme(String),
    #[error("{0:?} after the comma is not a bootstrap port (1-65535)")]
    BootstrapPort(String),
}

fn parse_prefill(text: &str) -> Result<StaticInstance, EngineUrlError> {
    let (url, port) = match text.rsplit_once(',') {
        Some((url, port)) => (url, Some(port)),
        None => (text, None),
    };
    let mut instance = parse_url(EngineRole::Prefill, url)?;
    if let Some(port) = port {
        let port = port.parse().map_err(|_| EngineUrlError::BootstrapPort(port.to_owned()))?;
        instance.bootstrap_port = Some(port);
    }
    Ok(instance)
}

fn parse_decode(text: &str) -> Result<StaticInstance, EngineUrlError> {
    parse_url(EngineRole::Decode, text)
}

fn parse_worker(text: &str) -> Result<StaticInstance, EngineUrlError> {
    parse_url(EngineRole::Plain, text)
}

fn parse_url(role: EngineRole, text: &str) -> Result<StaticInstance, EngineUrlError> {
    let url = url::Url::parse(text)?;
    match (url.scheme(), url.host_str(), url.port_or_known_default()) {
        (scheme @ ("http" | "https"), Some(host), Some(port)) => {
            Ok(StaticInstance::new(role, format!("{scheme}://{host}:{port}")))
        }
        ("http" | "https", ..) => Err(EngineUrlError::NoHost),
        (scheme, ..) => Err(EngineUrlError::Scheme(scheme.to_owned())),
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
            let error = parse_prefill(bad).unwrap_err().to_string();
            assert!(error.contains(part), "{bad}: {error}");
        }
    }
}
