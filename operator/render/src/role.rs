//! Renders a role's workload.

use rbg_api::keys;
use rbg_api::v1alpha2::{
    CustomComponentsPattern, LeaderWorkerPattern, RoleSpec, RollingUpdate, StandalonePattern,
};
use rbg_api::{IntOrPercent, conversion};
use serde_json::json;

use crate::group_topology::{GroupTopology, RoleTopology};
use crate::manifest::{Manifest, ManifestMetadata, OwnerRef, StringMap};
use crate::pod_template::TemplateInjection;
use crate::workload::{PreservedFields, WorkloadKind};
use crate::{GroupRenderer, RenderError, RoleNames, legacy, service};

/// Composition of an instance of a role.
#[derive(Debug, Clone, Copy)]
pub enum RolePattern<'a> {
    /// Each instance is one pod.
    Standalone(&'a StandalonePattern),
    /// Instances of a leader and workers.
    LeaderWorker(&'a LeaderWorkerPattern),
    /// Each instance consists of named components.
    Custom(&'a CustomComponentsPattern),
}

/// Number of instances, and limits of an update, at this moment. Coordination between roles may set less than the spec.
#[derive(Debug, Clone, PartialEq)]
pub struct RoleTarget {
    pub replicas: i32,
    /// Replaces the role's own partition, if set.
    pub partition: Option<IntOrPercent>,
    /// Replaces the role's own limit, if set.
    pub max_unavailable: Option<IntOrPercent>,
}

/// Renderer of a role's objects.
#[derive(Debug, Clone)]
pub struct RoleRenderer<'a> {
    pub(crate) group: GroupRenderer<'a>,
    pub(crate) spec: &'a RoleSpec,
    pub(crate) names: RoleNames,
    pub(crate) kind: WorkloadKind,
    pub(crate) pattern: RolePattern<'a>,
}

impl RoleTarget {
    /// The target as in the role's spec.
    #[must_use]
    pub fn of(role: &RoleSpec) -> Self {
        Self { replicas: role.replicas, partition: None, max_unavailable: None }
    }
}

impl<'a> RoleRenderer<'a> {
    /// Creates a renderer for a role whose objects have these names.
    ///
    /// # Errors
    /// [`RenderError::UnknownWorkload`], [`RenderError::NoPattern`], [`RenderError::PatternOfWorkload`].
    pub fn new(group: GroupRenderer<'a>, spec: &'a RoleSpec, names: RoleNames) -> Result<Self, RenderError> {
        let kind = WorkloadKind::from_role(spec)?;
        let pattern = if let Some(pattern) = &spec.leader_worker_pattern {
            RolePattern::LeaderWorker(pattern)
        } else if let Some(pattern) = &spec.custom_components_pattern {
            RolePattern::Custom(pattern)
        } else if let Some(pattern) = &spec.standalone_pattern {
            RolePattern::Standalone(pattern)
        } else {
            return Err(RenderError::NoPattern(spec.name.clone()));
        };
        if matches!(pattern, RolePattern::Custom(_)) && kind != WorkloadKind::RoleInstanceSet {
            return Err(RenderError::PatternOfWorkload {
                role: spec.name.clone(),
                kind: kind.kind(),
                pattern: "customComponentsPattern",
            });
        }
        Ok(Self { group, spec, names, kind, pattern })
    }

    /// Kind of the role's workload.
    #[must_use]
    pub fn kind(&self) -> WorkloadKind {
        self.kind
    }

    #[must_use]
    pub fn pattern(&self) -> RolePattern<'a> {
        self.pattern
    }

    /// Number of instances in the spec.
    #[must_use]
    pub fn replicas(&self) -> i32 {
        self.spec.replicas
    }

    /// Names of the role's objects.
    #[must_use]
    pub fn names(&self) -> &RoleNames {
        &self.names
    }

    /// Whether instances have ordinals: their names are predictable, and the discovery file lists them.
    #[must_use]
    pub fn is_ordered(&self) -> bool {
        match self.kind {
            WorkloadKind::Deployment => false,
            WorkloadKind::StatefulSet | WorkloadKind::LeaderWorkerSet => true,
            WorkloadKind::RoleInstanceSet => self.instance_pattern() != Some("Stateless"),
        }
    }

    /// Number of pods of one instance.
    #[must_use]
    pub fn instance_size(&self) -> i32 {
        match self.pattern {
            RolePattern::Standalone(_) => 1,
            RolePattern::LeaderWorker(pattern) if self.runs_leader_and_workers() => {
                pattern.size.unwrap_or(1).max(1)
            }
            RolePattern::LeaderWorker(_) => 1,
            RolePattern::Custom(pattern) => pattern.components.iter().map(|component| component.size()).sum(),
        }
    }

    /// Revision of the role's spec without its replicas: equal specs have equal revisions.
    #[must_use]
    pub fn revision(&self) -> String {
        crate::revision::role_hash(&self.group.object.spec, self.spec)
    }

    /// Key of the workload's label that stores this revision.
    #[must_use]
    pub fn revision_label(&self) -> String {
        format!("{}{}", keys::ROLE_REVISION_PREFIX, self.spec.name)
    }

    /// Renders the workload. `preserved` contains the fields of an existing workload that must not change.
    ///
    /// # Errors
    /// See [`RenderError`].
    pub fn workload(
        &self,
        target: &RoleTarget,
        preserved: &PreservedFields,
    ) -> Result<Manifest, RenderError> {
        let spec = match self.kind {
            WorkloadKind::RoleInstanceSet => self.role_instance_set(target)?,
            WorkloadKind::StatefulSet => self.stateful_set(target, preserved)?,
            WorkloadKind::Deployment => self.deployment(target, preserved)?,
            WorkloadKind::LeaderWorkerSet => self.leader_worker_set(target, preserved)?,
        };
        let owner = self.group.owner(true);
        let metadata = ManifestMetadata {
            name: &self.names.workload,
            namespace: self.group.namespace,
            labels: self.workload_labels(preserved),
            annotations: self.workload_annotations(target, preserved)?,
            owner: Some(&owner),
        };
        Ok(Manifest::new(self.kind.api_version(), self.kind.kind(), metadata, json!({ "spec": spec })))
    }

    /// Renders the headless Service that makes pod names resolvable, owned by the workload. `None` for Deployments and
    /// LeaderWorkerSets.
    #[must_use]
    pub fn service(&self, target: &RoleTarget, workload_uid: &str) -> Option<Manifest> {
        service::headless(self, target, workload_uid)
    }

    /// Renders the adapter through which an autoscaler sets the role's replicas, if it is enabled.
    #[must_use]
    pub fn scaling_adapter(&self) -> Option<Manifest> {
        service::scaling_adapter(self)
    }

    /// Whether the role's Service has only addresses of leaders.
    #[must_use]
    pub fn serves_leaders_only(&self) -> bool {
        match self.pattern {
            RolePattern::LeaderWorker(pattern) if self.kind == WorkloadKind::RoleInstanceSet => {
                pattern.shared_service_selection.as_deref() != Some("All")
            }
            _ => false,
        }
    }

    /// StatefulSets and Deployments run the template of a leader-worker role as single pods, as upstream does.
    pub(crate) fn runs_leader_and_workers(&self) -> bool {
        matches!(self.kind, WorkloadKind::RoleInstanceSet | WorkloadKind::LeaderWorkerSet)
    }

    fn instance_pattern(&self) -> Option<&str> {
        let keys = [keys::ROLE_INSTANCE_PATTERN, keys::legacy::INSTANCE_PATTERN];
        let mut values = keys.into_iter().filter_map(|key| self.spec.annotations.get(key));
        values.find(|value| !value.is_empty()).map(String::as_str)
    }

    /// Labels of all objects of the role. They are part of selectors and must never change.
    pub(crate) fn selector(&self) -> StringMap {
        StringMap::from([
            (keys::GROUP_NAME.to_owned(), self.group.name.to_owned()),
            (keys::GROUP_UID.to_owned(), self.group.unique_key()),
            (keys::ROLE_NAME.to_owned(), self.spec.name.clone()),
        ])
    }

    /// Annotations of the role's Service: the role's own, and its size.
    pub(crate) fn annotations(&self, target: &RoleTarget) -> StringMap {
        let mut annotations = self.spec.annotations.clone();
        annotations.remove(keys::ROLE_WORKLOAD_TYPE);
        annotations.insert(keys::ROLE_SIZE.to_owned(), target.replicas.to_string());
        annotations
    }

    fn workload_labels(&self, preserved: &PreservedFields) -> StringMap {
        let mut labels = self.spec.labels.clone();
        labels.extend(preserved.selector.clone().unwrap_or_else(|| self.selector()));
        labels.insert(self.revision_label(), self.revision());
        if self.kind == WorkloadKind::RoleInstanceSet {
            let role_type = match self.pattern {
                RolePattern::Standalone(_) => "PodTemplate",
                RolePattern::LeaderWorker(_) => "LeaderWorkerSet",
                RolePattern::Custom(_) => "Components",
            };
            labels.insert(keys::ROLE_TYPE.to_owned(), role_type.to_owned());
            if self.spec.annotations.get(keys::INPLACE_SCHEDULING).is_some_and(|value| !value.is_empty()) {
                labels.insert(keys::RBG_OWNER_UID.to_owned(), self.group.owner(true).uid);
            }
        }
        labels
    }

    fn workload_annotations(
        &self,
        target: &RoleTarget,
        preserved: &PreservedFields,
    ) -> Result<StringMap, RenderError> {
        let mut annotations = self.spec.annotations.clone();
        annotations.insert(keys::ROLE_SIZE.to_owned(), target.replicas.to_string());
        if let Some(topology) = self.topology(preserved)? {
            annotations.insert(keys::TOPOLOGY.to_owned(), topology.text());
        }
        if self.kind == WorkloadKind::RoleInstanceSet {
            let pattern = self.instance_pattern().unwrap_or("Stateful").to_owned();
            annotations.insert(keys::ROLE_INSTANCE_PATTERN.to_owned(), pattern);
            if let Some(seconds) = self.grace_period_seconds() {
                annotations.insert(keys::GRACE_PERIOD_SECONDS.to_owned(), seconds.to_string());
            }
            if self.group.pod_group().is_some() {
                annotations
                    .entry(keys::INSTANCE_GANG_SCHEDULING.to_owned())
                    .or_insert_with(|| "true".to_owned());
            }
            if self.group.is_legacy() {
                annotations.insert(conversion::ORIGIN.to_owned(), "v1alpha1".to_owned());
            }
        }
        Ok(annotations)
    }

    /// Topology of the role's pods.
    pub(crate) fn topology(&self, preserved: &PreservedFields) -> Result<Option<RoleTopology>, RenderError> {
        match &preserved.topology {
            Some(preserved) if preserved.is_empty() => Ok(None),
            Some(preserved) => RoleTopology::parse(preserved).map(Some),
            None => {
                let group = self.group.object;
                Ok(GroupTopology::from_group(group)?
                    .map(|topology| topology.role(&self.spec.name, &group.spec.roles)))
            }
        }
    }

    /// The role's rolling-update settings, if set.
    #[must_use]
    pub fn rolling_update(&self) -> Option<&'a RollingUpdate> {
        self.spec.rollout_strategy.as_ref()?.rolling_update.as_ref()
    }

    fn grace_period_seconds(&self) -> Option<i32> {
        self.rolling_update()?.in_place_update_strategy.as_ref()?.grace_period_seconds
    }

    pub(crate) fn is_legacy(&self, preserved: &PreservedFields) -> bool {
        preserved.legacy.unwrap_or_else(|| self.group.is_legacy())
    }

    /// Labels of v1alpha1 for pods of external workloads.
    pub(crate) fn legacy_labels(&self) -> StringMap {
        legacy::labels(self.group.name, &self.spec.name, &self.group.unique_key())
    }

    pub(crate) fn injection(&self) -> TemplateInjection {
        TemplateInjection { discovery_file: self.is_ordered(), runtimes: true, leader_worker: false }
    }

    /// Owner reference to the role's workload.
    pub(crate) fn workload_owner(&self, uid: &str) -> OwnerRef {
        OwnerRef {
            api_version: self.kind.api_version().to_owned(),
            kind: self.kind.kind().to_owned(),
            name: self.names.workload.clone(),
            uid: uid.to_owned(),
            controller: false,
        }
    }
}
