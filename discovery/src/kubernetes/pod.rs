//! Converts pods to listed instances and hosts.

use std::str::FromStr;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use rbg_api::keys;

use super::KubernetesDiscoveryOptions;
use crate::endpoint::EngineEndpoint;
use crate::kv_transfer::KvConnector;
use crate::listing::{ListedHost, ListedInstance};
use crate::location::PhysicalLocation;
use crate::roles::{bootstrap_port, http_port};
use crate::topology::{
    DeclaredFacts, EngineKind, EngineRole, InstanceId, InstanceSource, KubernetesWorkload,
};

/// Annotations (or labels) of pods that configure discovery beyond RBG's labels and the container ports.
pub mod annotation {
    /// HTTP port of the engine.
    pub const PORT: &str = "moongate.io/port";
    /// Scheme of the engine: `http` or `https`.
    pub const SCHEME: &str = "moongate.io/scheme";
    /// Port of the prefill's bootstrap server.
    pub const BOOTSTRAP_PORT: &str = "moongate.io/bootstrap-port";
    /// vLLM's connector: `nixl`, `mooncake` or `store`.
    pub const KV_CONNECTOR: &str = "moongate.io/kv-connector";
    /// Kind of the engine: `sglang` or `vllm`.
    pub const ENGINE: &str = "moongate.io/engine";
    /// `prefill`, `decode` or `plain`; any other value, such as `none`, excludes the pod.
    pub const ROLE: &str = "moongate.io/role";
    /// Served model names, separated by commas.
    pub const MODELS: &str = "moongate.io/models";
}

/// Kubernetes' own label, which newer API servers copy from nodes to pods.
const ZONE: &str = "topology.kubernetes.io/zone";

/// The pod as an instance; `None` if it is not an engine, has no address yet or has ended.
pub(crate) fn to_listed_instance(pod: &Pod, options: &KubernetesDiscoveryOptions) -> Option<ListedInstance> {
    let uid = pod.metadata.uid.as_deref()?;
    let name = pod.metadata.name.as_deref()?;
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let role = role(pod, options)?;
    let status = pod.status.as_ref()?;
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return None;
    }
    let ip = status.pod_ip.as_deref().filter(|ip| !ip.is_empty())?;
    let port = port(pod).unwrap_or_else(|| options.ports.of(role));
    let scheme = parsed(pod, annotation::SCHEME).unwrap_or(options.scheme);
    let endpoint = EngineEndpoint::from_parts(scheme, ip, port)
        .inspect_err(|error| tracing::error!(pod = name, %error, "pod skipped"))
        .ok()?;
    let connector = parsed(pod, annotation::KV_CONNECTOR).or(options.connector);
    Some(ListedInstance {
        id: InstanceId(format!("{namespace}/{name}@{uid}").into()),
        role,
        url: endpoint.url,
        host: endpoint.host,
        source: InstanceSource::Kubernetes,
        location: location(pod),
        workload: workload(pod),
        declared: DeclaredFacts {
            engine: parsed(pod, annotation::ENGINE)
                .or(options.engine)
                .or_else(|| connector.map(|_: KvConnector| EngineKind::Vllm)),
            connector,
            bootstrap_port: bootstrap(pod).filter(|_| role == EngineRole::Prefill),
            models: models(pod),
            ..DeclaredFacts::default()
        },
        unavailable_reason: unavailable_reason(pod, status),
    })
}

/// The location of a pod without an engine; `None` if it has no address yet or has ended.
pub(crate) fn to_listed_host(pod: &Pod) -> Option<ListedHost> {
    let status = pod.status.as_ref()?;
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return None;
    }
    let ip = status.pod_ip.as_ref().filter(|ip| !ip.is_empty())?;
    let others = status.pod_ips.iter().flatten().map(|address| &address.ip).filter(|other| *other != ip);
    let names = pod.metadata.name.iter().chain([ip]).chain(others).cloned().collect();
    Some(ListedHost { names, location: location(pod) })
}

/// The reason why the gateway must not route to the pod; `None` if it may.
fn unavailable_reason(pod: &Pod, status: &PodStatus) -> Option<String> {
    if pod.metadata.deletion_timestamp.is_some() {
        return Some("pod is terminating".to_owned());
    }
    if status.phase.as_deref() != Some("Running") {
        return Some(format!("pod is {}", status.phase.as_deref().unwrap_or("of unknown phase")));
    }
    let ready = status.conditions.iter().flatten().find(|condition| condition.type_ == "Ready");
    match ready {
        Some(condition) if condition.status == "True" => None,
        Some(condition) => {
            let reason = condition
                .message
                .as_deref()
                .or(condition.reason.as_deref())
                .unwrap_or("see kubectl describe pod");
            Some(format!("pod is not Ready: {reason}"))
        }
        None => Some("pod is not Ready yet".to_owned()),
    }
}

fn role(pod: &Pod, options: &KubernetesDiscoveryOptions) -> Option<EngineRole> {
    if is_follower(pod) {
        return None;
    }
    if let Some(text) = annotation_or_label(pod, annotation::ROLE) {
        return text.parse().ok();
    }
    let name = label(pod, keys::ROLE_NAME).or_else(|| label(pod, keys::legacy::ROLE_NAME))?;
    options.roles.role(name)
}

/// Whether the pod is a worker of a multi-pod instance, which serves at its leader only.
fn is_follower(pod: &Pod) -> bool {
    [keys::COMPONENT_INDEX, keys::legacy::LWS_WORKER_INDEX]
        .into_iter()
        .any(|key| label(pod, key).is_some_and(|index| index != "0"))
}

fn port(pod: &Pod) -> Option<u16> {
    parsed(pod, annotation::PORT).or_else(|| http_port(container_ports(pod)))
}

fn bootstrap(pod: &Pod) -> Option<u16> {
    parsed(pod, annotation::BOOTSTRAP_PORT).or_else(|| bootstrap_port(container_ports(pod)))
}

fn container_ports(pod: &Pod) -> impl Iterator<Item = (&str, u16)> + Clone {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    containers.flat_map(|container| container.ports.iter().flatten()).filter_map(|port| {
        let number = u16::try_from(port.container_port).ok()?;
        let tcp = port.protocol.as_deref().is_none_or(|protocol| protocol == "TCP");
        tcp.then_some((port.name.as_deref().unwrap_or_default(), number))
    })
}

fn models(pod: &Pod) -> Vec<String> {
    let list = annotation_or_label(pod, annotation::MODELS).unwrap_or_default();
    list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn location(pod: &Pod) -> PhysicalLocation {
    PhysicalLocation {
        zone: annotation_or_label(pod, keys::ZONE).or_else(|| label(pod, ZONE)).map(str::to_owned),
        rack: annotation_or_label(pod, keys::RACK).map(str::to_owned),
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
        nvlink_domain: annotation_or_label(pod, keys::NVLINK_DOMAIN).map(str::to_owned),
    }
}

fn workload(pod: &Pod) -> KubernetesWorkload {
    let either = |key, legacy| label(pod, key).or_else(|| label(pod, legacy)).map(str::to_owned);
    let first = pod.spec.as_ref().and_then(|spec| spec.containers.first());
    KubernetesWorkload {
        group: either(keys::GROUP_NAME, keys::legacy::GROUP_NAME),
        role: either(keys::ROLE_NAME, keys::legacy::ROLE_NAME),
        revision: label(pod, keys::CONTROLLER_REVISION_HASH).map(str::to_owned),
        image: first.and_then(|container| container.image.clone()),
    }
}

/// The parsed value of an annotation; an invalid one is logged and ignored.
fn parsed<T: FromStr>(pod: &Pod, key: &str) -> Option<T> {
    let text = annotation_or_label(pod, key)?;
    let value = text.trim().parse().ok();
    if value.is_none() {
        let pod = pod.metadata.name.as_deref().unwrap_or_default();
        tracing::warn!(
            pod,
            key,
            value = text,
            "annotation ignored: the value is invalid; see docs/configuration.md"
        );
    }
    value
}

/// The value of an annotation, or of the label of that name.
fn annotation_or_label<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    let annotations = pod.metadata.annotations.as_ref();
    annotations.and_then(|map| map.get(key)).map(String::as_str).or_else(|| label(pod, key))
}

fn label<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.labels.as_ref()?.get(key).map(String::as_str)
}

#[cfg(test)]
#[path = "pod_tests.rs"]
mod tests;
