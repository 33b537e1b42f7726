//! RBG's injected discovery file: which roles are engines, under which address and port.
//!
//! The file follows the group's spec, so it lists instances that do not run yet and says nothing about readiness: that is
//! the prober's to find out. The kubelet brings a change with up to two minutes' delay; where that is too slow, use the
//! Kubernetes source.

mod resolved_names;
pub(crate) mod watch;

use std::path::PathBuf;

use rbg_api::{DiscoveredGroup, DiscoveryFile, RbgIdentity};

use crate::endpoint::{EngineEndpoint, HttpScheme};
use crate::error::TopologyFileError;
use crate::listing::{ListedHost, ListedInstance, SourceUpdate};
use crate::roles::{RoleNames, RolePorts, bootstrap_port, http_port};
use crate::topology::{
    DeclaredFacts, EngineKind, EngineRole, InstanceSource, KubernetesWorkload, KvConnector, PhysicalLocation,
};

pub(crate) use self::resolved_names::{ResolvedNames, system_resolver};

/// Where Kubernetes mounts the pod's namespace.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// How RBG's discovery file is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RbgDiscoveryOptions {
    /// The file; default `/etc/rbg/config.yaml`.
    pub path: PathBuf,
    /// Namespace of the group, appended to `<pod>.<service>` addresses; `None` leaves them as they are, which resolves
    /// only from a pod in the same namespace. [`RbgDiscoveryOptions::from_env`] finds it.
    pub namespace: Option<String>,
    /// Which roles are engines.
    pub roles: RoleNames,
    /// HTTP ports where the file names none.
    pub ports: RolePorts,
    /// How engines are spoken to: the file does not say it.
    pub scheme: HttpScheme,
    /// Bootstrap port of prefills where neither the file nor the engine names one.
    pub bootstrap_port: Option<u16>,
    /// Engine kind of all engines of the group; `None`: asked.
    pub engine: Option<EngineKind>,
    /// vLLM's connector in this group; `None`: asked.
    pub connector: Option<KvConnector>,
}

impl Default for RbgDiscoveryOptions {
    fn default() -> Self {
        Self {
            path: PathBuf::from(rbg_api::CLUSTER_FILE),
            namespace: None,
            roles: RoleNames::default(),
            ports: RolePorts::default(),
            scheme: HttpScheme::default(),
            bootstrap_port: None,
            engine: None,
            connector: None,
        }
    }
}

impl RbgDiscoveryOptions {
    /// The defaults, with the namespace from `POD_NAMESPACE` or the mounted service account.
    #[must_use]
    pub fn from_env() -> Self {
        let variable = std::env::var("POD_NAMESPACE").ok();
        let namespace = variable.or_else(|| std::fs::read_to_string(NAMESPACE_FILE).ok());
        let namespace = namespace.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        Self { namespace, ..Self::default() }
    }
}

/// One instance of the file and the host names it may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RbgMember {
    /// The address as in the file: stable, whatever name resolves.
    id: String,
    /// `None` for what is no engine, and listed for its place only.
    role: Option<EngineRole>,
    port: u16,
    bootstrap_port: Option<u16>,
    location: PhysicalLocation,
    workload: KubernetesWorkload,
    /// The name as listed.
    pub(crate) host: String,
    /// The leader's name, in a role whose listed names are no pods'.
    pub(crate) alternative: Option<String>,
}

/// Reads the file's text.
pub(crate) fn parse(text: &str, options: &RbgDiscoveryOptions) -> Result<Vec<RbgMember>, TopologyFileError> {
    let file: DiscoveryFile =
        serde_saphyr::from_str(text).map_err(|error| TopologyFileError::Syntax(error.to_string()))?;
    let config = file.resolve()?;
    warn_of_another_group(&config);
    let namespace = options.namespace.as_deref().or(config.namespace.as_deref());
    let mut members = Vec::new();
    for role in &config.roles {
        let engine_role = options.roles.role(&role.name);
        if engine_role.is_none() {
            tracing::debug!(role = role.name, "role is no engine");
        }
        let group = Some(config.group.clone()).filter(|group| !group.is_empty());
        let workload =
            KubernetesWorkload { group, role: Some(role.name.clone()), ..KubernetesWorkload::default() };
        for instance in &role.instances {
            let place = PhysicalLocation::from(instance.location.clone());
            if engine_role.is_none() && place == PhysicalLocation::default() {
                continue;
            }
            let ports = || instance.ports.iter().map(|(name, port)| (name.as_str(), *port));
            members.push(RbgMember {
                id: instance.address.clone(),
                role: engine_role,
                port: http_port(ports())
                    .or_else(|| engine_role.map(|role| options.ports.of(role)))
                    .unwrap_or_default(),
                bootstrap_port: bootstrap_port(ports()).or(options.bootstrap_port),
                location: place,
                workload: workload.clone(),
                host: qualify(&instance.address, namespace),
                alternative: instance.alternative.as_deref().map(|host| qualify(host, namespace)),
            });
        }
    }
    members.sort_by(|a, b| a.id.cmp(&b.id));
    members.dedup_by(|a, b| a.id == b.id);
    Ok(members)
}

/// `<pod>.<service>` with the namespace; a longer name or an IP as it is.
fn qualify(address: &str, namespace: Option<&str>) -> String {
    let is_pod_dot_service = address.matches('.').count() == 1;
    match namespace {
        Some(namespace) if is_pod_dot_service => format!("{address}.{namespace}"),
        _ => address.to_owned(),
    }
}

fn warn_of_another_group(config: &DiscoveredGroup) {
    let own = RbgIdentity::from_env(|name| std::env::var(name).ok());
    if let Some(own) = own.group.filter(|own| !config.group.is_empty() && *own != config.group) {
        tracing::warn!(own_group = own, file_group = config.group, "the discovery file is another group's");
    }
}

/// Engines as listed instances, under the host names that `names` decided for, and where the other members run.
pub(crate) fn listing(
    members: &[RbgMember],
    names: &ResolvedNames,
    options: &RbgDiscoveryOptions,
    slot: usize,
) -> SourceUpdate {
    let instances = members.iter().filter_map(|member| member.listed(names.chosen(member), options));
    let others = members.iter().filter(|member| member.role.is_none());
    let hosts =
        others.map(|member| ListedHost { names: names.all(member), location: member.location.clone() });
    SourceUpdate { slot, instances: instances.collect(), hosts: hosts.collect() }
}

impl RbgMember {
    fn listed(&self, host: &str, options: &RbgDiscoveryOptions) -> Option<ListedInstance> {
        let role = self.role?;
        let endpoint = EngineEndpoint::from_parts(options.scheme, host, self.port)
            .inspect_err(|error| tracing::error!(%error, "instance of the RBG file skipped"))
            .ok()?;
        Some(ListedInstance {
            id: self.id.as_str().into(),
            role,
            url: endpoint.url,
            host: endpoint.host,
            source: InstanceSource::Rbg,
            location: self.location.clone(),
            workload: self.workload.clone(),
            declared: DeclaredFacts {
                engine: options.engine.or_else(|| options.connector.map(|_| EngineKind::Vllm)),
                connector: options.connector,
                bootstrap_port: self.bootstrap_port.filter(|_| role == EngineRole::Prefill),
                ..DeclaredFacts::default()
            },
            unavailable_reason: None,
        })
    }
}

#[cfg(test)]
#[path = "rbg_tests.rs"]
mod tests;
