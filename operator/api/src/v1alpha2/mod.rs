//! `workloads.x-k8s.io/v1alpha2`: the stored version, which the operator reconciles.
//!
//! Fields with a fixed set of values are strings here, with an enum in the schema: one object with a value of a later
//! release must not make a whole list unreadable. Methods interpret the values. `other` preserves fields that this release
//! does not know.

mod adapter;
mod fault_recovery;
mod group;
mod instance;
mod instance_set;
mod pattern;
mod policy;
mod profile;
mod rollout;
mod set;
mod warmup;

pub use adapter::{
    RoleBasedGroupScalingAdapter, RoleBasedGroupScalingAdapterSpec, RoleBasedGroupScalingAdapterStatus,
    ScaleTargetRef,
};
pub use fault_recovery::{CoordinatedFaultRecovery, FaultLink, FaultStatus, FaultTrigger, LinkedAction};
pub use group::{
    EngineRuntime, RoleBasedGroup, RoleBasedGroupSpec, RoleBasedGroupStatus, RoleSpec, RoleStatus,
    RoleTemplate, ScalingAdapter, ServicePort,
};
pub use instance::{
    ComponentStatus, ContainerBaseline, InstanceComponent, ReadinessGate, RoleInstance, RoleInstanceSpec,
    RoleInstanceStatus,
};
pub use instance_set::{
    Lifecycle, LifecycleHook, RoleInstanceSet, RoleInstanceSetSpec, RoleInstanceSetStatus, ScaleStrategy,
    UpdateStrategy,
};
pub use pattern::{
    CustomComponentsPattern, LeaderWorkerPattern, RestartPolicy, RestartPolicyConfig, StandalonePattern,
    TemplateRef,
};
pub use policy::{
    CoordinatedGang, CoordinatedPolicy, CoordinatedPolicySpec, CoordinatedPolicyStatus,
    CoordinatedRollingUpdate, CoordinatedScaling, CoordinatedScheduling, PolicyRule, PolicyStrategy,
};
pub use profile::{
    ClusterEngineRuntimeProfile, ClusterEngineRuntimeProfileSpec, ClusterEngineRuntimeProfileStatus,
};
pub use rollout::{InPlaceUpdateStrategy, RollingUpdate, RolloutStrategy};
pub use set::{
    GroupTemplate, GroupTemplateMetadata, RoleBasedGroupSet, RoleBasedGroupSetSpec, RoleBasedGroupSetStatus,
};
pub use warmup::{
    CustomizedAction, ImagePreload, LocalObjectReference, RoleBasedGroupWarmup, RoleBasedGroupWarmupSpec,
    RoleBasedGroupWarmupStatus, TargetNodes, TargetRoleBasedGroup, WarmupActions, WarmupPolicies,
};

use std::collections::BTreeMap;

use serde_json::Value;

/// Fields that this release does not know, preserved as they are.
pub type UnknownFields = BTreeMap<String, Value>;

pub(crate) fn one() -> i32 {
    1
}

pub(crate) fn is_zero(number: &i32) -> bool {
    *number == 0
}

pub(crate) fn is_false(flag: &bool) -> bool {
    !flag
}
