//! A group with what its objects depend on besides its spec, and the metadata that they share.

use std::collections::BTreeMap;

use rbg_api::v1alpha2::{ClusterEngineRuntimeProfileSpec, RoleBasedGroup};
use rbg_api::{conversion, keys};

use crate::error::RenderError;
use crate::gang_policy::GangPolicy;
use crate::group_topology::{GroupTopology, TopologyKey};
use crate::hash::sha1_hex;
use crate::manifest::{ManifestMetadata, OwnerRef, StringMap};

/// Specs of runtime profiles by name.
pub type RuntimeProfiles = BTreeMap<String, ClusterEngineRuntimeProfileSpec>;

/// Scheduler that handles gangs in the cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GangScheduler {
    /// The PodGroup API of kubernetes-sigs/scheduler-plugins.
    #[default]
    SchedulerPlugins,
    /// The PodGroup API of Volcano.
    Volcano,
}

/// A group, the runtime profiles that its roles may name, and the cluster's scheduler of gangs.
#[derive(Debug, Clone, Copy)]
pub struct GroupContext<'a> {
    pub(crate) object: &'a RoleBasedGroup,
    pub(crate) name: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) profiles: &'a RuntimeProfiles,
    pub(crate) gang_scheduler: GangScheduler,
    /// The gang of the group's policy.
    pub(crate) gang: Option<&'a GangPolicy>,
    /// Topology levels that the cluster's nodes have labels of.
    pub(crate) node_levels: &'a [TopologyKey],
}

impl<'a> GroupContext<'a> {
    /// The context of a group as read from the API server.
    ///
    /// # Errors
    /// [`RenderError::NoMetadata`].
    pub fn new(
        object: &'a RoleBasedGroup,
        profiles: &'a RuntimeProfiles,
        gang_scheduler: GangScheduler,
    ) -> Result<Self, RenderError> {
        let name = object.metadata.name.as_deref().ok_or(RenderError::NoMetadata("name"))?;
        let namespace = object.metadata.namespace.as_deref().ok_or(RenderError::NoMetadata("namespace"))?;
        Ok(Self { object, name, namespace, profiles, gang_scheduler, gang: None, node_levels: &[] })
    }

    /// The group with the gang of its policy, if that has one.
    #[must_use]
    pub fn with_gang(self, gang: Option<&'a GangPolicy>) -> Self {
        Self { gang, ..self }
    }

    /// The group in a cluster whose nodes have labels of these topology levels.
    #[must_use]
    pub fn with_node_levels(self, node_levels: &'a [TopologyKey]) -> Self {
        Self { node_levels, ..self }
    }

    /// The group's topology levels, if it has any.
    ///
    /// # Errors
    /// [`RenderError::Topology`] if the group's annotations are invalid.
    pub fn topology(self) -> Result<Option<GroupTopology>, RenderError> {
        GroupTopology::from_group(self.object, self.node_levels)
    }

    /// Hex SHA-1 of `namespace/name`: the label value that identifies the group.
    #[must_use]
    pub fn unique_key(self) -> String {
        sha1_hex(&format!("{}/{}", self.namespace, self.name))
    }

    /// Whether the group was written as v1alpha1, so that its pods also get the labels and environment names of v1alpha1: the
    /// conversion recorded it, a field manager still writes v1alpha1, or a role has a v1alpha1 annotation.
    #[must_use]
    pub fn is_legacy(self) -> bool {
        let metadata = &self.object.metadata;
        let has_origin = self.annotation(conversion::ORIGIN).is_some();
        let is_written_as_legacy = metadata.managed_fields.iter().flatten().any(|entry| {
            entry.api_version.as_deref() == Some(conversion::ApiVersion::V1alpha1.api_version())
        });
        let mut roles = self.object.spec.roles.iter();
        has_origin
            || is_written_as_legacy
            || roles.any(|role| role.annotations.contains_key(keys::legacy::INSTANCE_PATTERN))
    }

    pub(crate) fn annotation(self, key: &str) -> Option<&'a str> {
        self.object.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }

    /// The topology key for which the group has an exclusive domain.
    pub(crate) fn exclusive_topology(self) -> Option<&'a str> {
        let keys = [keys::GROUP_EXCLUSIVE_TOPOLOGY, keys::legacy::EXCLUSIVE_TOPOLOGY];
        keys.into_iter().find_map(|key| self.annotation(key)).filter(|topology| !topology.is_empty())
    }

    /// Owner reference to the group.
    #[must_use]
    pub fn owner(self, controller: bool) -> OwnerRef {
        OwnerRef {
            api_version: conversion::ApiVersion::V1alpha2.api_version().to_owned(),
            kind: "RoleBasedGroup".to_owned(),
            name: self.name.to_owned(),
            uid: self.object.metadata.uid.clone().unwrap_or_default(),
            controller,
        }
    }

    pub(crate) fn metadata(self, name: &'a str, controller: bool) -> OwnedMetadata<'a> {
        OwnedMetadata {
            name,
            namespace: self.namespace,
            labels: StringMap::new(),
            annotations: StringMap::new(),
            owner: self.owner(controller),
        }
    }
}

/// Metadata of an object that the group owns.
pub(crate) struct OwnedMetadata<'a> {
    pub(crate) name: &'a str,
    pub(crate) namespace: &'a str,
    pub(crate) labels: StringMap,
    pub(crate) annotations: StringMap,
    pub(crate) owner: OwnerRef,
}

impl OwnedMetadata<'_> {
    pub(crate) fn as_ref(&self) -> ManifestMetadata<'_> {
        ManifestMetadata {
            name: self.name,
            namespace: self.namespace,
            labels: self.labels.clone(),
            annotations: self.annotations.clone(),
            owner: Some(&self.owner),
        }
    }
}
