//! RBG's injected discovery file: which roles are engines, under which address and port.
//!
//! The file is derived from the group's spec, so it lists instances that do not run yet and contains no readiness, which the
//! prober determines. The kubelet updates the file with a delay of up to two minutes; for faster updates use the Kubernetes source.

mod resolved_names;
pub(crate) mod watch;

use std::path::PathBuf;

use rbg_api::{DiscoveredGroup, DiscoveryFile, RbgIdentity};

use crate::endpoint::{EngineEndpoint, HttpScheme};
use crate::error::TopologyFileError;
use crate::kv_transfer::KvConnector;
use crate::listing::{ListedHost, ListedInstance, SourceUpdate};
use crate::location::PhysicalLocation;
use crate::roles::{RoleNames, RolePorts, bootstrap_port, http_port};
use crate::topology::{DeclaredFacts, EngineKind, EngineRole, InstanceSource, KubernetesWorkload};

pub(crate) use self::resolved_names::{ResolvedNames, system_resolver};

/// File in which Kubernetes mounts the pod's namespace.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";

/// Settings of discovery from RBG's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RbgDiscoveryOptions {
    /// Path of the file; default `/etc/rbg/config.yaml`.
    pub path: PathBuf,
    /// Namespace of the group, appended to `<pod>.<service>` addresses; `None` leaves them unqualified, which resolves
    /// only in pods of the same namespace. [`RbgDiscoveryOptions::from_env`] sets it.
    pub namespace: Option<String>,
    /// Names of the roles that are engines.
    pub roles: RoleNames,
    /// HTTP ports of instances without one in the file.
    pub ports: RolePorts,
    /// Scheme of all engines; the file does not contain it.
    pub scheme: HttpScheme,
    /// Bootstrap port of prefills if neither the file nor the engine names one.
    pub bootstrap_port: Option<u16>,
    /// Kind of all engines of the group; `None`: probed.
    pub engine: Option<EngineKind>,
    /// vLLM's connector in this group; `None`: probed.
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

/// One instance of the file with its possible host names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RbgMember {
    /// The address as in the file; it does not depend on which name resolves.
    id: String,
    /// `None` for a member without an engine, which is listed for its location only.
    role: Option<EngineRole>,
    port: u16,
    bootstrap_port: Option<u16>,
    location: PhysicalLocation,
    workload: KubernetesWorkload,
    /// The host name as listed, qualified by the namespace.
    pub(crate) host: String,
    /// The leader's name, in a role whose listed names are not those of pods.
    pub(crate) alternative: Option<String>,
}

/// Parses the file's text into engines, and other members with a location.
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
            tracing::debug!(role = role.name, "role is not an engine");
        }
        let group = Some(config.group.clone()).filter(|group| !group.is_empty());
        let workload =
            KubernetesWorkload { group, role: Some(role.name.clone()), ..KubernetesWorkload::default() };
        for instance in &role.instances {
            let location = PhysicalLocation::from(instance.location.clone());
            if engine_role.is_none() && location == PhysicalLocation::default() {
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
                location,
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

/// Appends the namespace to `<pod>.<service>`; a longer name or an IP address is returned unchanged.
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
        tracing::warn!(
            own_group = own,
            file_group = config.group,
            "the discovery file belongs to another group"
        );
    }
}

/// Engines as listed instances, under the host names chosen by `names`, and locations of the other members.
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
