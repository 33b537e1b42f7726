//! Plans a group: its revision, its discovery file, and a workload and a service per role.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use moongate_render::revision::{RevisionMetadata, SpecRevision};
use moongate_render::{
    GangPolicy, GangPolicyError, GangScheduler, GroupContext, Manifest, PreservedFields, RenderError,
    ResolvedRole, RoleNames, RuntimeProfiles, SizeLimits, TopologyKey, WorkloadKind, coordinated_policy,
    discovery_config_map, headless_service, scaling_adapter,
};
use rbg_api::conversion::{FoldedGroup, fold_group};
use rbg_api::v1alpha2::{
    CoordinatedPolicySpec, RoleBasedGroup, RoleBasedGroupScalingAdapter, RoleInstance, RoleSpec,
};
use rbg_api::{Condition, keys};
use serde_json::Value;

use super::desired_roles::{DesiredRole, RoleWithWorkload, desired_roles, is_observed};
use super::{
    FIELD_MANAGER, NodeLabelLookup, NodeStateLookup, PlanError, ReconcilePlan, WriteAction, adapter, fault,
    gang, pod_locations, ports, profiles, revisions, shrink, stateful, topology,
};
use crate::ResourceKind;
use crate::resource_cache::PortTable;
use crate::status::{self, ObservedRoleStatus};

/// Number of group revisions to keep.
const REVISION_LIMIT: usize = 5;

#[derive(Clone, Copy)]
pub struct GroupInput<'a> {
    pub group: &'a RoleBasedGroup,
    /// All runtime profiles of the cluster.
    pub profiles: &'a RuntimeProfiles,
    /// The scheduler that handles gangs.
    pub gang: GangScheduler,
    /// The gang of the group's policy; resolved by the plan.
    pub gang_policy: Option<&'a GangPolicy>,
    pub limits: SizeLimits,
    /// Stored revisions of the group.
    pub revisions: &'a [ControllerRevision],
    /// The workloads that the group controls.
    pub workloads: &'a [Value],
    /// Scaling adapters that the group owns.
    pub adapters: &'a [RoleBasedGroupScalingAdapter],
    /// Number of instances of a RoleInstanceSet, by its UID, whose pods all have nodes.
    pub scheduled: &'a dyn Fn(&str) -> i32,
    /// Number of instances of a RoleInstanceSet, by its UID, that are being removed.
    pub leaving: &'a dyn Fn(&str) -> i32,
    /// Pods of the group, including those created by other controllers.
    pub pods: &'a dyn Fn() -> Vec<Pod>,
    /// Labels of the nodes that they run on.
    pub nodes: NodeLabelLookup<'a>,
    /// Topology levels that the cluster's nodes have labels of.
    pub node_levels: &'a [TopologyKey],
    pub node: NodeStateLookup<'a>,
    /// Names of all nodes, if the group has a policy with fault recovery.
    pub node_names: &'a dyn Fn() -> Vec<String>,
    /// Instances of all roles.
    pub instances: &'a dyn Fn() -> Vec<RoleInstance>,
    /// Pods that other controllers created for the workload with that UID.
    pub foreign_pods: &'a dyn Fn(&str) -> Vec<Pod>,
    /// Any other object of the group's namespace.
    pub live: &'a dyn Fn(ResourceKind, &str) -> Option<Value>,
    /// Ports in use in the whole cluster.
    pub ports: &'a PortTable,
    /// Whether the cluster does not serve a kind.
    pub is_absent: &'a dyn Fn(ResourceKind) -> bool,
    pub now: Timestamp,
}

impl<'a> GroupInput<'a> {
    /// The group, with these profiles, as what is rendered for it depends on.
    pub(super) fn context(self, profiles: &'a RuntimeProfiles) -> Result<GroupContext<'a>, PlanError> {
        let group = GroupContext::new(self.group, profiles, self.gang)?;
        Ok(group.with_gang(self.gang_policy).with_node_levels(self.node_levels))
    }
}

/// Plans one group. An invalid spec changes only the status, which contains the error.
#[must_use]
pub fn group(input: GroupInput<'_>) -> ReconcilePlan {
    let mut plan = ReconcilePlan::default();
    if input.group.metadata.deletion_timestamp.is_some() {
        return plan;
    }
    let folded = fold_group(input.group);
    folded.iter().for_each(|folded| plan.push(write_folded(folded), fold_reason(folded)));
    let input = GroupInput { group: folded.as_ref().map_or(input.group, |folded| &folded.group), ..input };
    let as_run = with_running_patterns(input.group, input.workloads);
    let input = GroupInput { group: as_run.as_ref().unwrap_or(input.group), ..input };
    let stored_levels = topology::stored_levels(input.workloads);
    let node_levels = if input.node_levels.is_empty() { &stored_levels } else { input.node_levels };
    let input = GroupInput { node_levels, ..input };
    let gang = gang::of_policy(input);
    let (gang, gang_error) = (gang.as_ref().ok().and_then(Option::as_ref), gang.as_ref().err());
    let input = GroupInput { gang_policy: gang, ..input };
    let mut states = Vec::new();
    let refused = match gang_error {
        Some(error) => Some(GroupPlanError::Gang(error.clone())),
        None => plan_roles(input, &mut plan, &mut states).err(),
    };
    if refused.is_some() {
        plan.steps.clear();
    }
    if gang_error.is_some() {
        // Pods that were created now would not wait for the others. Those of removed roles only hold their nodes.
        delete_orphans(input, &mut plan);
    }
    // Before all other steps, one of which may fail. After the edit of a template the group is planned again.
    let recovery = match folded {
        Some(_) => fault::GroupRecovery::default(),
        None => plan.prepend(|first| fault::coordinate(input, first)),
    };
    let refused = refused.map(|error| (error.reason(), error.to_string()));
    let spec_error = refused.as_ref().map(|(reason, error)| (*reason, error.as_str()));
    let mut after = status::group(input.group, &states, spec_error, input.now);
    let of_workload = |live: &Value| serde_json::from_value(live["status"]["conditions"].clone()).ok();
    let parts: Vec<Vec<Condition>> = input.workloads.iter().filter_map(of_workload).collect();
    let parts = parts.iter().map(Vec::as_slice);
    status::aggregate_waiting(&mut after.conditions, parts.clone(), input.now);
    status::aggregate_scaling_in(&mut after.conditions, parts.clone(), input.now);
    if spec_error.is_none() {
        status::aggregate_stalled(&mut after.conditions, parts, input.now);
        topology::set_condition(input, &mut after.conditions);
    }
    gang::set_condition(input, gang_error, &mut after.conditions);
    recovery.apply(&mut after, input.now);
    let name = input.group.metadata.name.as_deref().unwrap_or_default();
    plan.status(ResourceKind::Group, name, input.group.status.as_ref(), &after);
    plan
}

/// Replaces the whole group, so that the resource version detects a concurrent edit.
fn write_folded(folded: &FoldedGroup) -> WriteAction {
    WriteAction::Replace {
        kind: ResourceKind::Group,
        name: folded.group.metadata.name.clone().unwrap_or_default(),
        object: serde_json::to_value(&folded.group).unwrap_or_default(),
    }
}

fn fold_reason(folded: &FoldedGroup) -> String {
    format!("the edited template of {} is copied to its other path", folded.roles.join(", "))
}

/// The group with the pattern that its workloads run now, for roles that request another one only by v1alpha1's annotation.
/// Upstream ignores that annotation, so workloads that it created may use the other pattern; switching would replace all
/// pods.
fn with_running_patterns(group: &RoleBasedGroup, workloads: &[Value]) -> Option<RoleBasedGroup> {
    let mut as_run = group.clone();
    for role in &mut as_run.spec.roles {
        let Some(requested) = role.annotations.get(keys::legacy::INSTANCE_PATTERN) else { continue };
        let live = workloads.iter().find(|live| label(live, keys::ROLE_NAME) == Some(role.name.as_str()));
        let running =
            live.and_then(|live| live["metadata"]["annotations"].get(keys::ROLE_INSTANCE_PATTERN)?.as_str());
        if let Some(running) = running.filter(|running| running != requested) {
            role.annotations
                .entry(keys::ROLE_INSTANCE_PATTERN.to_owned())
                .or_insert_with(|| running.to_owned());
        }
    }
    (as_run != *group).then_some(as_run)
}

/// Error in a group's spec.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GroupPlanError {
    #[error(transparent)]
    Render(#[from] PlanError),
    #[error("role `{0}` depends on `{1}`, which is no role of this group")]
    NoSuchRole(String, String),
    #[error("these roles depend on each other in a circle: {0}")]
    DependencyCycle(String),
    #[error(
        "the group's annotations {} and {} exclude each other; set the latter on roles, or leave it out",
        keys::GANG_SCHEDULING,
        keys::INSTANCE_GANG_SCHEDULING
    )]
    ConflictingGangs,
    #[error(transparent)]
    Gang(GangPolicyError),
    #[error("this cluster does not serve {kind} ({version})", kind = .0.name(), version = .0.api_version())]
    Absent(ResourceKind),
}

impl GroupPlanError {
    /// Reason in the conditions of the group.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Render(error) => super::condition_reason(error),
            Self::Gang(_) => status::INCOMPATIBLE_GANG,
            _ => status::INVALID_SPEC,
        }
    }
}

fn plan_roles(
    input: GroupInput<'_>,
    plan: &mut ReconcilePlan,
    states: &mut Vec<ObservedRoleStatus>,
) -> Result<(), GroupPlanError> {
    let group = input.context(input.profiles)?;
    check_dependencies(input.group)?;
    let roles = live_roles(input, group)?;
    let replicas = |spec| adapter::replicas(input.adapters, spec).unwrap_or(spec.replicas);
    let requested = roles.iter().map(|role| (&role.role, replicas(role.spec)));
    input.limits.check_roles(requested).map_err(RenderError::from)?;
    let policy = policy(input, group, plan)?;
    let targets = desired_roles(input, group, policy.as_ref(), &roles, plan);
    store_revision(input, group, plan);
    let now = targets.iter().map(|(name, target)| (name.clone(), target.current.clone())).collect();
    let file =
        (input.live)(ResourceKind::ConfigMap, input.group.metadata.name.as_deref().unwrap_or_default());
    if let Some(manifest) =
        discovery_config_map(group, &now, &pod_locations::group_locations(input, group, file.as_ref())?)?
    {
        apply_if_changed(&manifest, file, plan, "the discovery file");
    }
    gang::plan(input, group, plan)?;
    let mut wanted = Vec::new();
    for role_with_workload in &roles {
        let RoleWithWorkload { spec, role, live } = role_with_workload;
        let Some(target) = targets.get(&spec.name) else { continue };
        let preserved = preserved_fields(*live, role);
        let mut manifest = profiles::workload(input, spec, role, &target.current, (*live, &preserved))?;
        ports::allocate_role_ports(input, &mut manifest, *live, plan)?;
        stateful::plan_rollout(input, role_with_workload, target, &mut manifest);
        topology::remove_annotations(&mut manifest, *live);
        shrink::record(target, &mut manifest);
        states.push(state(role, target, *live, &manifest));
        wanted.push((spec, role, target, live, manifest));
    }
    let behind_gang = gang::roles_behind_gang(group, input.group);
    for (index, (spec, role, target, live, manifest)) in wanted.iter().enumerate() {
        let is_unready =
            |name: &&String| states.iter().any(|state| state.name == **name && !state.is_at_requested());
        let begins_with_gang = live.is_none() && group.is_in_gang(&spec.name);
        let may_wait = |name: &&String| !begins_with_gang || !behind_gang.contains(name.as_str());
        if let Some(other) = spec.dependencies.iter().filter(may_wait).find(is_unready) {
            states[index].blocked_by = Some(format!("role {} waits for {other}", spec.name));
            shrink::shrink_blocked(&spec.name, **live, manifest, plan);
            continue;
        }
        if !is_written(manifest, **live) {
            let reason =
                if live.is_some() { "the role's spec has changed" } else { "the role has no workload" };
            plan.push(WriteAction::Apply(manifest.clone()), format!("{}: {reason}", spec.name));
        }
        if let Some(uid) = live.and_then(|live| live["metadata"]["uid"].as_str())
            && let Some(service) = headless_service(role, &target.current, uid)
        {
            apply_if_changed(
                &service,
                (input.live)(ResourceKind::Service, service.name()),
                plan,
                "the role's service",
            );
        }
    }
    plan_adapters(input, &roles, plan);
    delete_orphans(input, plan);
    revisions::prune(input.revisions, |_| false, REVISION_LIMIT, plan);
    Ok(())
}

fn live_roles<'a>(
    input: GroupInput<'a>,
    group: GroupContext<'a>,
) -> Result<Vec<RoleWithWorkload<'a>>, GroupPlanError> {
    let of_one = |spec: &'a RoleSpec| {
        let live = workload(input.workloads, spec);
        let mut names = RoleNames::new(input.group.metadata.name.as_deref().unwrap_or_default(), &spec.name);
        if let Some(name) = live.and_then(|live| live["metadata"]["name"].as_str()) {
            name.clone_into(&mut names.workload);
        }
        let role = ResolvedRole::with_names(group, spec, names)?;
        if role.kind() == WorkloadKind::LeaderWorkerSet && (input.is_absent)(ResourceKind::LeaderWorkerSet) {
            return Err(GroupPlanError::Absent(ResourceKind::LeaderWorkerSet));
        }
        Ok(RoleWithWorkload { spec, role, live })
    };
    input.group.spec.roles.iter().map(of_one).collect()
}

/// The workload that runs the role with its present kind.
pub(super) fn workload<'a>(workloads: &'a [Value], role: &RoleSpec) -> Option<&'a Value> {
    let kind = WorkloadKind::from_role(role).ok()?.kind();
    workloads.iter().find(|live| live["kind"] == kind && label(live, keys::ROLE_NAME) == Some(&role.name))
}

/// The policy with the group's name, or the one converted from v1alpha1's `coordination`.
fn policy(
    input: GroupInput<'_>,
    group: GroupContext<'_>,
    plan: &mut ReconcilePlan,
) -> Result<Option<CoordinatedPolicySpec>, PlanError> {
    let read = |object: &Value| serde_json::from_value(object["spec"].clone()).ok();
    let name = input.group.metadata.name.as_deref().unwrap_or_default();
    let live = (input.live)(ResourceKind::Policy, name);
    let Some(manifest) = coordinated_policy(group)? else { return Ok(live.as_ref().and_then(read)) };
    let spec = read(&Value::Object(manifest.0.clone()));
    apply_if_changed(&manifest, live, plan, "the policy of the group's coordination");
    Ok(spec)
}

fn plan_adapters(input: GroupInput<'_>, roles: &[RoleWithWorkload<'_>], plan: &mut ReconcilePlan) {
    for manifest in roles.iter().filter_map(|role| scaling_adapter(&role.role)) {
        apply_if_changed(
            &manifest,
            (input.live)(ResourceKind::Adapter, manifest.name()),
            plan,
            "the role's adapter",
        );
    }
    let is_deleting = |adapter: &RoleBasedGroupScalingAdapter| adapter.metadata.deletion_timestamp.is_some();
    let has_role = |live: &_| roles.iter().any(|role| adapter::is_of(live, role.spec));
    for surplus in input.adapters.iter().filter(|live| !has_role(live) && !is_deleting(live)) {
        let name = adapter::name(surplus).to_owned();
        let uid = surplus.metadata.uid.clone().unwrap_or_default();
        plan.push(
            WriteAction::Delete { kind: ResourceKind::Adapter, name, uid },
            "no role of the group uses this adapter any more",
        );
    }
}

pub(crate) fn check_dependencies(group: &RoleBasedGroup) -> Result<(), GroupPlanError> {
    let roles = &group.spec.roles;
    for role in roles {
        if let Some(other) = role.dependencies.iter().find(|name| group.spec.role(name).is_none()) {
            return Err(GroupPlanError::NoSuchRole(role.name.clone(), other.clone()));
        }
    }
    let mut remaining: Vec<_> = roles.iter().collect();
    loop {
        let before = remaining.len();
        let names: Vec<String> = remaining.iter().map(|role| role.name.clone()).collect();
        remaining.retain(|role| role.dependencies.iter().any(|name| names.contains(name)));
        match remaining.len() {
            0 => return Ok(()),
            count if count == before => return Err(GroupPlanError::DependencyCycle(names.join(", "))),
            _ => {}
        }
    }
}

fn store_revision(input: GroupInput<'_>, group: GroupContext<'_>, plan: &mut ReconcilePlan) {
    let name = input.group.metadata.name.as_deref().unwrap_or_default();
    let newest = input.revisions.iter().max_by_key(|stored| stored.revision);
    let number = newest.map_or(0, |stored| stored.revision).saturating_add(1);
    let wanted = SpecRevision::for_group(name, &input.group.spec, number);
    if newest.and_then(revisions::data).is_some_and(|data| wanted.is_same(&data)) {
        return;
    }
    let namespace = input.group.metadata.namespace.as_deref().unwrap_or_default();
    let owner = group.owner(true);
    let metadata = RevisionMetadata {
        namespace,
        labels: wanted.group_labels(name),
        annotations: BTreeMap::new(),
        owner: &owner,
    };
    let manifest = wanted.manifest(metadata, number);
    plan.push(WriteAction::Create(manifest), "the spec has a new revision");
}

fn preserved_fields(live: Option<&Value>, role: &ResolvedRole<'_>) -> PreservedFields {
    let is_foreign = role.kind() != WorkloadKind::RoleInstanceSet;
    let Some(live) = live.filter(|_| is_foreign) else { return PreservedFields::default() };
    let selector = serde_json::from_value(live["spec"]["selector"]["matchLabels"].clone()).ok();
    let labels = &live["spec"]["template"]["metadata"]["labels"];
    let created_with = live["metadata"]["annotations"][keys::TOPOLOGY].as_str().unwrap_or_default();
    PreservedFields {
        selector,
        legacy: Some(labels.get(keys::legacy::GROUP_NAME).is_some()),
        topology: is_of_revision(live, role).then(|| created_with.to_owned()),
    }
}

/// Whether the workload was written from the role's present revision.
fn is_of_revision(live: &Value, role: &ResolvedRole<'_>) -> bool {
    label(live, &role.revision_label()) == Some(role.revision().as_str())
}

fn label<'a>(object: &'a Value, key: &str) -> Option<&'a str> {
    object["metadata"]["labels"].get(key)?.as_str()
}

/// Whether the workload matches the manifest. The template is compared as a whole, so that removed fields are detected.
fn is_written(manifest: &Manifest, live: Option<&Value>) -> bool {
    let Some(live) = live else { return false };
    let template = |object: &Value| object["spec"]["roleInstanceTemplate"].clone();
    let wanted = Value::Object(manifest.0.clone());
    manifest.is_applied_to(live, FIELD_MANAGER) && template(&wanted) == template(live)
}

pub(super) fn apply_if_changed(
    manifest: &Manifest,
    live: Option<Value>,
    plan: &mut ReconcilePlan,
    what: &str,
) {
    match live {
        Some(live) if manifest.is_applied_to(&live, FIELD_MANAGER) => {}
        Some(_) => plan.push(WriteAction::Apply(manifest.clone()), format!("{what} has changed")),
        None => plan.push(WriteAction::Apply(manifest.clone()), format!("{what} is missing")),
    }
}

fn state(
    role: &ResolvedRole<'_>,
    target: &DesiredRole,
    live: Option<&Value>,
    manifest: &Manifest,
) -> ObservedRoleStatus {
    let is_current = is_written(manifest, live);
    let status = live.map(|live| &live["status"]);
    let number = |name: &str| {
        let number = status.and_then(|status| status[name].as_i64()).unwrap_or(0);
        i32::try_from(number).unwrap_or(i32::MAX)
    };
    let observed = live.is_some_and(is_observed);
    let wanted = Value::Object(manifest.0.clone());
    let same_spec = live.is_some_and(|live| is_of_revision(live, role));
    ObservedRoleStatus {
        name: label(&wanted, keys::ROLE_NAME).unwrap_or_default().to_owned(),
        desired: target.desired,
        requested: target.current.replicas,
        expected_updated: target.desired.saturating_sub(target.partitioned),
        replicas: number("replicas"),
        ready: number("readyReplicas"),
        updated: if observed && same_spec { number("updatedReplicas") } else { 0 },
        current: is_current && observed,
        blocked_by: None,
    }
}

/// Deletes workloads of roles that were removed or now run as another kind.
fn delete_orphans(input: GroupInput<'_>, plan: &mut ReconcilePlan) {
    for workload in input.workloads {
        let role = label(workload, keys::ROLE_NAME).and_then(|name| input.group.spec.role(name));
        let wanted = role.and_then(|role| WorkloadKind::from_role(role).ok());
        let (Some(kind), Some(name), Some(uid)) = (
            workload["kind"].as_str().and_then(ResourceKind::parse),
            workload["metadata"]["name"].as_str(),
            workload["metadata"]["uid"].as_str(),
        ) else {
            continue;
        };
        let is_deleting = workload["metadata"].get("deletionTimestamp").is_some();
        if wanted.is_none_or(|wanted| wanted.kind() != kind.name()) && !is_deleting {
            if kind == ResourceKind::Set && shrink::drain_orphan(workload, plan) {
                continue;
            }
            let action = WriteAction::Delete { kind, name: name.to_owned(), uid: uid.to_owned() };
            plan.push(action, "no role of the group uses this workload any more");
        }
    }
}
