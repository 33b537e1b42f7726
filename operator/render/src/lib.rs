//! Renders the objects that run a RoleBasedGroup from its spec.
//!
//! Pure: the same input yields the same objects, for the controller that writes them, a dry run that compares them, and
//! tests. It reads no clock, no cluster and no random source; partly random names are passed in by the caller.
//!
//! A RoleBasedGroupSet yields groups ([`group_set`]). A group ([`GroupContext`]) yields its discovery file, a PodGroup and a
//! CoordinatedPolicy, and each of its roles ([`ResolvedRole`]) a workload, a headless Service and a scaling adapter. A
//! RoleInstanceSet yields RoleInstances ([`instance`]); these yield pods ([`pod`]), and pods that pull images before a
//! restart ([`pre_pull`]). A warmup yields pods as well ([`warmup`]). Objects are [`Manifest`]s: JSON as it is sent, since
//! typed structures would drop unknown fields.
//!
//! Names, labels and templates are those of upstream's controller, so that either can take over from the other without
//! restarting a pod. Upstream's defects are not reproduced:
//! * ordinals are put on instances and pods, not into the template that all of them share;
//! * pods of a group with exclusive topology carry the label that their affinity selects;
//! * the discovery file names pods that exist, and its group size counts pods;
//! * roles of kind InstanceSet and v1alpha1's annotation for stateless roles are supported;
//! * the policy from v1alpha1's `coordination` has its required names and keeps its progression;
//! * gangs count the pods of custom components;
//! * allocated ports differ from those in use;
//! * names too long for Kubernetes are truncated with a hash, so that they stay distinct.

mod affinity;
mod canonical;
mod dependencies;
mod discovery;
mod domain_placement;
mod environment;
mod error;
mod gang;
mod gang_policy;
mod group;
pub mod group_set;
mod group_topology;
mod hash;
pub mod instance;
mod legacy;
mod managed_fields;
mod manifest;
mod names;
mod node_labels;
pub mod pod;
mod pod_name;
mod pod_template;
mod policy;
pub mod ports;
pub mod pre_pull;
mod quantity;
mod queue;
pub mod revision;
mod role;
mod role_environment;
mod runtime_profile;
mod service;
mod size_limit_error;
mod size_limits;
mod topology;
pub mod warmup;
mod workload;
mod workload_kind;
mod workload_spec;

pub use dependencies::ComponentDependencies;
pub use discovery::{PodLocations, discovery_config_map, parse_locations};
pub use domain_placement::DomainPlacement;
pub use error::{ComponentAnnotationError, RenderError, SharedError, TopologyAnnotationError};
pub use gang::pod_group;
pub use gang_policy::{GangPolicy, GangPolicyError};
pub use group::{GangScheduler, GroupContext, RuntimeProfiles};
pub use group_topology::{GroupTopology, RoleTopology, TopologyKey};
pub use manifest::{Manifest, OwnerRef};
pub use names::RoleNames;
pub use node_labels::NodeLabels;
pub use pod_name::pod_name;
pub use policy::coordinated_policy;
pub use queue::{join_kueue_group, kueue_group_name, queue};
pub use role::{ResolvedRole, RolePattern, RoleTarget};
pub use service::{headless_service, scaling_adapter};
pub use size_limit_error::SizeLimitError;
pub use size_limits::SizeLimits;
pub use workload::render_workload;
pub use workload_kind::{PreservedFields, WorkloadKind};
