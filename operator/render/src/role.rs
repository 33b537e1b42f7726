//! A role of a group, resolved to the kind of its workload, its pattern and the names of its objects.

use rbg_api::v1alpha2::{
    CustomComponentsPattern, LeaderWorkerPattern, RoleSpec, RollingUpdate, StandalonePattern,
};
use rbg_api::{IntOrPercent, keys};

use crate::error::RenderError;
use crate::group::GroupContext;
use crate::group_topology::RoleTopology;
use crate::manifest::StringMap;
use crate::names::RoleNames;
use crate::revision;
use crate::workload_kind::{PreservedFields, WorkloadKind};

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

/// A role of a group, with what its spec means.
#[derive(Debug, Clone)]
pub struct ResolvedRole<'a> {
    pub(crate) group: GroupContext<'a>,
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

impl<'a> ResolvedRole<'a> {
    /// A role with the names of new objects.
    ///
    /// # Errors
    /// [`RenderError::UnknownWorkload`], [`RenderError::NoPattern`], [`RenderError::PatternOfWorkload`].
    pub fn new(group: GroupContext<'a>, spec: &'a RoleSpec) -> Result<Self, RenderError> {
        Self::with_names(group, spec, RoleNames::new(group.name, &spec.name))
    }

    /// A role whose objects have these names.
    ///
    /// # Errors
    /// See [`ResolvedRole::new`].
    pub fn with_names(
        group: GroupContext<'a>,
        spec: &'a RoleSpec,
        names: RoleNames,
    ) -> Result<Self, RenderError> {
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
            RolePattern::Custom(pattern) => {
                let sizes = pattern.components.iter().map(|component| component.size());
                sizes.fold(0, i32::saturating_add)
            }
        }
    }

    /// Revision of the role's spec without its replicas: equal specs have equal revisions.
    #[must_use]
    pub fn revision(&self) -> String {
        revision::role_hash(&self.group.object.spec, self.spec)
    }

    /// Key of the workload's label that stores this revision.
    #[must_use]
    pub fn revision_label(&self) -> String {
        format!("{}{}", keys::ROLE_REVISION_PREFIX, self.spec.name)
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

    pub(crate) fn instance_pattern(&self) -> Option<&str> {
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

    /// Topology of the role's pods.
    pub(crate) fn topology(&self, preserved: &PreservedFields) -> Result<Option<RoleTopology>, RenderError> {
        match &preserved.topology {
            Some(preserved) if preserved.is_empty() => Ok(None),
            Some(preserved) => RoleTopology::parse(preserved).map(Some),
            None => {
                let topology = self.group.topology()?;
                Ok(topology.map(|topology| topology.role(&self.spec.name, &self.group.object.spec.roles)))
            }
        }
    }

    /// The role's rolling-update settings, if set.
    #[must_use]
    pub fn rolling_update(&self) -> Option<&'a RollingUpdate> {
        self.spec.rollout_strategy.as_ref()?.rolling_update.as_ref()
    }

    pub(crate) fn is_legacy(&self, preserved: &PreservedFields) -> bool {
        preserved.legacy.unwrap_or_else(|| self.group.is_legacy())
    }
}
