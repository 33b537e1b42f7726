//! Why an object requests more objects than the operator allows.

/// An object requests more objects than the operator allows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeLimitError {
    #[error(
        "role `{role}`: an instance has {pods} pods, but at most {limit} are allowed; lower leaderWorkerPattern.size or the \
         size of its components, or raise the operator's --max-pods-per-instance"
    )]
    RoleInstanceSize { role: String, pods: u64, limit: u32 },
    #[error(
        "spec.roles: the group has {pods} pods, {of_role} of them in role `{role}` with {replicas} replicas, but at most \
         {limit} are allowed; lower the replicas, or raise the operator's --max-pods-per-group"
    )]
    PodsPerGroup {
        pods: u64,
        /// Role with the most pods.
        role: String,
        of_role: u64,
        replicas: i32,
        limit: u32,
    },
    #[error(
        "spec.replicas: {replicas} instances have {pods} pods, but at most {limit} are allowed; lower the replicas, or raise \
         the operator's --max-pods-per-group"
    )]
    PodsPerInstanceSet { replicas: i32, pods: u64, limit: u32 },
    #[error(
        "the components of an instance have {pods} pods, but at most {limit} are allowed; lower the size of the components, or \
         raise the operator's --max-pods-per-instance"
    )]
    PodsPerInstance { pods: u64, limit: u32 },
    #[error(
        "spec.replicas: {replicas} groups are requested, but at most {limit} are allowed; lower the replicas, or raise the \
         operator's --max-groups-per-set"
    )]
    GroupsPerSet { replicas: i32, limit: u32 },
    #[error(
        "the discovery file of the group's ordered roles has {bytes} bytes, but a ConfigMap holds at most {limit}; lower the \
         replicas, use shorter names of group and roles, or split the group"
    )]
    DiscoveryFile { bytes: usize, limit: usize },
}
