//! The discovery file `config.yaml` that RBG mounts into pods.
//!
//! Two forms exist. The *address* form (every release so far) has `group` as a map and lists
//! `roles.<role>.instances[].address`; an address is `<pod>.<service>` without namespace and port. The *template* form
//! (KEP-133, documented only) has `group` as a string and `roles.<role>.{replicas, size, excludes}`; addresses are derived
//! from it. Both reflect the spec: a listed instance need not run.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Deserialize;
use serde::de::{self, MapAccess, Visitor};

use crate::TopologyLocation;

/// Maximum number of instances in a file, over all roles: a file is at most 1 MiB, but a template expands.
pub const MAX_INSTANCES: u64 = 10_000;

/// The file as written: unknown fields are ignored, missing ones are empty. Call [`DiscoveryFile::resolve`] next.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct DiscoveryFile {
    #[serde(default)]
    namespace: Option<String>,
    #[serde(default)]
    group: Option<RawGroup>,
    #[serde(default)]
    roles: Option<BTreeMap<String, Option<RawRole>>>,
}

#[derive(Debug, Clone)]
enum RawGroup {
    Template(String),
    Address { name: Option<String>, roles: Vec<String> },
}

#[derive(Debug, Clone, Default, Deserialize)]
struct RawRole {
    #[serde(default)]
    instances: Option<Vec<RawInstance>>,
    #[serde(default)]
    replicas: Option<u64>,
    #[serde(default)]
    size: Option<u64>,
    #[serde(default)]
    excludes: Option<BTreeSet<u64>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct RawInstance {
    #[serde(default)]
    address: Option<String>,
    #[serde(default)]
    ports: Option<BTreeMap<String, RawPort>>,
    #[serde(default)]
    place: Option<TopologyLocation>,
}

/// A port as a number or a numeric string.
#[derive(Debug, Clone, Deserialize)]
#[serde(from = "String")]
struct RawPort(Option<u16>);

impl From<String> for RawPort {
    fn from(text: String) -> Self {
        Self(text.trim().parse().ok().filter(|port| *port != 0))
    }
}

impl<'de> Deserialize<'de> for RawGroup {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct GroupVisitor;
        impl<'de> Visitor<'de> for GroupVisitor {
            type Value = RawGroup;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a group name, or a map with name, roles and size")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<RawGroup, E> {
                Ok(RawGroup::Template(name.to_owned()))
            }

            fn visit_u64<E: de::Error>(self, name: u64) -> Result<RawGroup, E> {
                Ok(RawGroup::Template(name.to_string()))
            }

            fn visit_i64<E: de::Error>(self, name: i64) -> Result<RawGroup, E> {
                Ok(RawGroup::Template(name.to_string()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<RawGroup, A::Error> {
                #[derive(Deserialize)]
                struct AddressFormFields {
                    #[serde(default)]
                    name: Option<String>,
                    #[serde(default)]
                    roles: Option<Vec<String>>,
                }
                let fields = AddressFormFields::deserialize(de::value::MapAccessDeserializer::new(map))?;
                Ok(RawGroup::Address { name: fields.name, roles: fields.roles.unwrap_or_default() })
            }
        }
        deserializer.deserialize_any(GroupVisitor)
    }
}

/// Contents of the file, independent of its form.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiscoveredGroup {
    /// Name of the group; empty if the file has none.
    pub group: String,
    /// Namespace; only the template form contains it.
    pub namespace: Option<String>,
    /// Roles in the order of the spec (address form), otherwise by name.
    pub roles: Vec<DiscoveredRole>,
}

/// A role with its instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveredRole {
    pub name: String,
    /// Instances of the role, in the file's order.
    pub instances: Vec<DiscoveredInstance>,
}

/// An instance in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiscoveredInstance {
    /// The address as listed, or as derived from the template. It is stable and can serve as identity.
    pub address: String,
    /// The address to use if no pod has the name in `address`: for leader-worker and custom-component roles the address form
    /// names pods that do not exist; the leader is `<first label>-0`.
    pub alternative: Option<String>,
    /// The role's `servicePorts` by name: in lower case with `_` for `-`, unnamed ones as `port<N>`.
    pub ports: BTreeMap<String, u16>,
    /// Location of the instance, if the file contains it: our operator writes it for groups with topology levels.
    pub location: TopologyLocation,
}

/// Error in a file that is valid YAML, but not a usable discovery file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryFileError {
    /// A field of both forms is missing.
    #[error(
        "the field `{0}` is missing; RBG writes `group` and `roles`, so this is another file or an empty one"
    )]
    Missing(&'static str),
    /// The number of instances exceeds [`MAX_INSTANCES`].
    #[error(
        "the file contains {0} instances, at most {MAX_INSTANCES} are supported; check `replicas` of the roles"
    )]
    TooMany(u64),
    /// The template form lacks the number of instances.
    #[error("role `{0}` has neither `instances` nor `replicas`")]
    NoInstances(String),
    /// An instance has no address.
    #[error("instance {index} of role `{role}` has no `address`")]
    NoAddress {
        role: String,
        /// Index in the role's list.
        index: usize,
    },
}

impl DiscoveryFile {
    /// Converts either form to a common one.
    ///
    /// # Errors
    /// See [`DiscoveryFileError`].
    pub fn resolve(self) -> Result<DiscoveredGroup, DiscoveryFileError> {
        let group = self.group.ok_or(DiscoveryFileError::Missing("group"))?;
        let mut roles = self.roles.ok_or(DiscoveryFileError::Missing("roles"))?;
        let (name, order, template) = match group {
            RawGroup::Template(name) => (name, Vec::new(), true),
            RawGroup::Address { name, roles } => (name.unwrap_or_default(), roles, false),
        };
        check_total(&roles, template)?;
        let mut resolved = Vec::with_capacity(roles.len());
        for role in order {
            if let Some(body) = roles.remove(&role) {
                resolved.push((role, body));
            }
        }
        resolved.extend(roles);
        let namespace = self.namespace.filter(|namespace| !namespace.is_empty());
        let roles = resolved
            .into_iter()
            .map(|(role, body)| {
                let mut body = body.unwrap_or_default();
                let instances = match (body.instances.take(), template) {
                    (Some(listed), _) => listed_instances(&role, listed)?,
                    (None, true) => expand(&name, &role, namespace.as_deref(), &body)?,
                    (None, false) => Vec::new(),
                };
                Ok(DiscoveredRole { name: role, instances })
            })
            .collect::<Result<_, DiscoveryFileError>>()?;
        Ok(DiscoveredGroup { group: name, namespace, roles })
    }
}

fn check_total(roles: &BTreeMap<String, Option<RawRole>>, template: bool) -> Result<(), DiscoveryFileError> {
    let total = roles.values().flatten().fold(0u64, |total, role| {
        let count = match &role.instances {
            Some(listed) => listed.len() as u64,
            None if template => role.replicas.unwrap_or(0),
            None => 0,
        };
        total.saturating_add(count)
    });
    if total > MAX_INSTANCES { Err(DiscoveryFileError::TooMany(total)) } else { Ok(()) }
}

fn listed_instances(
    role: &str,
    listed: Vec<RawInstance>,
) -> Result<Vec<DiscoveredInstance>, DiscoveryFileError> {
    listed
        .into_iter()
        .enumerate()
        .map(|(index, instance)| {
            let address = instance
                .address
                .filter(|address| !address.trim().is_empty())
                .ok_or_else(|| DiscoveryFileError::NoAddress { role: role.to_owned(), index })?;
            let ports = instance.ports.unwrap_or_default();
            Ok(DiscoveredInstance {
                alternative: leader_address(&address),
                address,
                ports: ports.into_iter().filter_map(|(name, port)| Some((name, port.0?))).collect(),
                location: instance.place.unwrap_or_default(),
            })
        })
        .collect()
}

/// The leader pod's address of a leader-worker instance listed as `<instance>.<service>`.
#[must_use]
pub fn leader_address(address: &str) -> Option<String> {
    let (instance, service) = address.split_once('.')?;
    let is_ip = address.parse::<std::net::IpAddr>().is_ok();
    (!is_ip && !instance.is_empty()).then(|| format!("{instance}-0.{service}"))
}

/// Naming rule of KEP-133: `{group}-{role}-{i}-{j}.s-{group}-{role}.{namespace}.svc.cluster.local`, here with j = 0.
/// Upstream HEAD names a standalone pod without `-0`, which is the alternative.
fn expand(
    group: &str,
    role: &str,
    namespace: Option<&str>,
    body: &RawRole,
) -> Result<Vec<DiscoveredInstance>, DiscoveryFileError> {
    let replicas = body.replicas.ok_or_else(|| DiscoveryFileError::NoInstances(role.to_owned()))?;
    let domain = match namespace {
        Some(namespace) => format!("s-{group}-{role}.{namespace}.svc.cluster.local"),
        None => format!("s-{group}-{role}"),
    };
    let is_single_pod = body.size.is_none_or(|size| size <= 1);
    let instances = (0..replicas)
        .filter(|index| body.excludes.as_ref().is_none_or(|excluded| !excluded.contains(index)))
        .map(|index| DiscoveredInstance {
            address: format!("{group}-{role}-{index}-0.{domain}"),
            alternative: is_single_pod.then(|| format!("{group}-{role}-{index}.{domain}")),
            ports: BTreeMap::new(),
            location: TopologyLocation::default(),
        });
    Ok(instances.collect())
}
