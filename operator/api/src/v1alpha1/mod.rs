//! `workloads.x-k8s.io/v1alpha1`: deprecated, served by conversion ([`crate::conversion`]).
//!
//! Groups and sets are stored as v1alpha2; these types are their older form. InstanceSet and Instance exist only in this
//! version and have no controller: roles of kind InstanceSet are run as RoleInstanceSets.

mod group;
mod instance;
mod mirrored;

pub use group::{
    Coordination, CoordinationRollingUpdate, CoordinationScaling, CoordinationStrategy, KubeScheduling,
    LeaderWorkerTemplate, PodGroupPolicy, RoleBasedGroup, RoleBasedGroupSet, RoleBasedGroupSetSpec,
    RoleBasedGroupSpec, RoleComponent, RoleSpec, RoleTemplateRef, VolcanoScheduling, WorkloadRef,
};
pub use instance::{Instance, InstanceScaleStrategy, InstanceSet, InstanceSetSpec, InstanceSpec};
pub use mirrored::{ClusterEngineRuntimeProfile, RoleBasedGroupScalingAdapter};
