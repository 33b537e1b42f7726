//! The fault recovery of a policy, with resolved values.

use std::collections::BTreeSet;
use std::time::Duration;

use moongate_render::{GroupTopology, TopologyKey, WorkloadKind};
use rbg_api::v1alpha2::{
    CoordinatedFaultRecovery, CoordinatedPolicySpec, FaultLink, PolicyRule, RoleBasedGroup,
};
use rbg_api::{TopologyLevel, keys};
use serde::{Deserialize, Serialize};

use super::FaultPolicyError;

/// Kind of a fault, from the mildest to the most severe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum FaultCondition {
    Restarted,
    Failed,
    NodeLost,
}

impl FaultCondition {
    const ALL: [Self; 3] = [Self::Restarted, Self::Failed, Self::NodeLost];

    fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|condition| condition.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Restarted => "Restarted",
            Self::Failed => "Failed",
            Self::NodeLost => "NodeLost",
        }
    }
}

/// Action on an instance, from the mildest to the most severe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum FaultAction {
    Restart,
    Drain,
    Replace,
}

impl FaultAction {
    fn parse(name: &str) -> Option<Self> {
        match name {
            "Restart" => Some(Self::Restart),
            "Drain" => Some(Self::Drain),
            "Replace" => Some(Self::Replace),
            _ => None,
        }
    }

    /// Value of the metric's label.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Restart => "restart",
            Self::Drain => "drain",
            Self::Replace => "replace",
        }
    }

    fn verb(self) -> &'static str {
        match self {
            Self::Restart => "restarts",
            Self::Drain => "drains",
            Self::Replace => "replaces",
        }
    }

    pub(super) fn participle(self) -> &'static str {
        match self {
            Self::Restart => "restarted",
            Self::Drain => "drained and recreated",
            Self::Replace => "replaced",
        }
    }
}

/// Which instances are associated with one that fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum LinkScope {
    Ordinal,
    /// Same value of this node label.
    Domain(String),
    Group,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ResolvedLink {
    pub(super) role: String,
    pub(super) conditions: BTreeSet<FaultCondition>,
    pub(super) scope: LinkScope,
    pub(super) then: Vec<(String, FaultAction)>,
}

/// A rule with fault recovery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FaultRule {
    pub(super) name: String,
    pub(super) roles: Vec<String>,
    pub(super) links: Vec<ResolvedLink>,
    /// Node label of the replacement domain.
    pub(super) replacement: Option<String>,
    pub(super) placement_timeout: Duration,
    pub(super) backoff: Duration,
    pub(super) max_per_hour: usize,
    node_lost_after: Duration,
    unready_after: Option<Duration>,
}

/// Fault recovery of one policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FaultRules(pub(super) Vec<FaultRule>);

/// What an instance of a role watches.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct WatchedFaults {
    pub(super) conditions: BTreeSet<FaultCondition>,
    /// Node labels whose values are recorded.
    pub(super) labels: BTreeSet<String>,
    pub(super) node_lost_after: Option<Duration>,
    pub(super) unready_after: Option<Duration>,
}

impl FaultRules {
    /// Resolves the rules with the topology levels of the group; without them, levels are not checked. Links are not transitive, so
    /// roles may be linked both ways.
    ///
    /// # Errors
    /// [`FaultPolicyError`].
    pub(crate) fn resolve(
        policy: &CoordinatedPolicySpec,
        levels: Option<&[TopologyKey]>,
    ) -> Result<Self, FaultPolicyError> {
        let rules = policy.policies.iter().filter_map(|rule| {
            let recovery = rule.strategy.fault_recovery.as_ref()?;
            Some(resolve_rule(rule, recovery, levels))
        });
        let rules = Self(rules.collect::<Result<_, _>>()?);
        rules.check_contradictions()?;
        Ok(rules)
    }

    /// Resolves the rules for a group, and checks the roles that they use. `node_levels` are the topology levels that the cluster's nodes
    /// have labels of; if they are not known, only levels that the group lists are checked.
    ///
    /// # Errors
    /// [`FaultPolicyError`].
    pub(crate) fn for_group(
        policy: &CoordinatedPolicySpec,
        group: &RoleBasedGroup,
        node_levels: Option<&[TopologyKey]>,
    ) -> Result<Self, FaultPolicyError> {
        // Invalid levels are an error of the group, which its plan reports.
        let topology = GroupTopology::from_group(group, node_levels.unwrap_or_default()).ok().flatten();
        let is_listed = topology.as_ref().is_some_and(|topology| !topology.is_automatic());
        let levels = topology.map(|topology| topology.levels().to_vec()).unwrap_or_default();
        let is_resolved = node_levels.is_some() || is_listed;
        let rules = Self::resolve(policy, is_resolved.then_some(levels.as_slice()))?;
        rules.check_roles(group)?;
        Ok(rules)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What instances of the role watch; `None` if no rule uses the role.
    pub(super) fn watched(&self, role: &str) -> Option<WatchedFaults> {
        let mut watched = WatchedFaults::default();
        let mut rules = self.0.iter().filter(|rule| rule.roles.iter().any(|name| name == role)).peekable();
        rules.peek()?;
        for rule in rules {
            watched.labels.extend(rule.replacement.clone());
            watched.labels.extend(rule.links.iter().filter_map(|link| match &link.scope {
                LinkScope::Domain(label) => Some(label.clone()),
                LinkScope::Ordinal | LinkScope::Group => None,
            }));
            let triggers = rule.links.iter().filter(|link| link.role == role);
            let mut conditions: BTreeSet<_> =
                triggers.flat_map(|link| link.conditions.iter().copied()).collect();
            conditions.extend(rule.replacement.is_some().then_some(FaultCondition::NodeLost));
            if conditions.contains(&FaultCondition::NodeLost) {
                let earlier = watched.node_lost_after.unwrap_or(Duration::MAX);
                watched.node_lost_after = Some(earlier.min(rule.node_lost_after));
            }
            if conditions.contains(&FaultCondition::Failed) {
                watched.unready_after = watched.unready_after.into_iter().chain(rule.unready_after).min();
            }
            watched.conditions.extend(conditions);
        }
        Some(watched)
    }

    fn check_contradictions(&self) -> Result<(), FaultPolicyError> {
        let links = || self.0.iter().flat_map(|rule| rule.links.iter().map(move |link| (rule, link)));
        let actions = |(rule, link)| {
            let link: &ResolvedLink = link;
            link.then.iter().map(move |(target, action)| (rule, link, target, *action))
        };
        let all: Vec<(&FaultRule, &ResolvedLink, &String, FaultAction)> = links().flat_map(actions).collect();
        for (index, (_, link, target, action)) in all.iter().enumerate() {
            let contradicts = |other: &&(&FaultRule, &ResolvedLink, &String, FaultAction)| {
                let is_same = other.1.role == link.role && other.2 == *target && other.3 != *action;
                is_same && !other.1.conditions.is_disjoint(&link.conditions)
            };
            if let Some((rule, _, _, other)) = all[index + 1..].iter().find(contradicts) {
                return Err(FaultPolicyError::Contradiction {
                    policy: rule.name.clone(),
                    trigger: link.role.clone(),
                    target: (*target).clone(),
                    first: action.verb(),
                    second: other.verb(),
                });
            }
        }
        Ok(())
    }

    fn check_roles(&self, group: &RoleBasedGroup) -> Result<(), FaultPolicyError> {
        for rule in &self.0 {
            for name in &rule.roles {
                let (policy, role) = (rule.name.clone(), name.clone());
                let Some(spec) = group.spec.role(name) else {
                    return Err(FaultPolicyError::NoSuchRole { policy, role });
                };
                // An unknown kind is an error of the group, which its plan reports.
                let kind = WorkloadKind::from_role(spec).unwrap_or(WorkloadKind::RoleInstanceSet);
                if kind != WorkloadKind::RoleInstanceSet {
                    return Err(FaultPolicyError::ForeignRole { policy, role, kind: kind.kind() });
                }
                let is_used = |link: &&ResolvedLink| {
                    link.role == *name || link.then.iter().any(|(target, _)| target == name)
                };
                let by_ordinal =
                    rule.links.iter().filter(is_used).any(|link| link.scope == LinkScope::Ordinal);
                let pattern = [keys::ROLE_INSTANCE_PATTERN, keys::legacy::INSTANCE_PATTERN];
                let pattern = pattern.into_iter().find_map(|key| spec.annotations.get(key));
                if by_ordinal && pattern.is_some_and(|pattern| pattern == "Stateless") {
                    return Err(FaultPolicyError::Unordered { policy, role });
                }
            }
        }
        Ok(())
    }
}

fn resolve_rule(
    rule: &PolicyRule,
    recovery: &CoordinatedFaultRecovery,
    levels: Option<&[TopologyKey]>,
) -> Result<FaultRule, FaultPolicyError> {
    let policy = rule.name.clone();
    if recovery.links.is_empty() && recovery.replacement_domain.is_none() {
        return Err(FaultPolicyError::Empty { policy });
    }
    let number = |field, value: Option<i32>, default: i32, (min, max): (i32, i32)| match value {
        Some(value) if !(min..=max).contains(&value) => {
            Err(FaultPolicyError::OutOfRange { policy: rule.name.clone(), field, min, max, value })
        }
        value => Ok(u64::from(value.unwrap_or(default).unsigned_abs())),
    };
    let seconds =
        |field, value, default, bounds| number(field, value, default, bounds).map(Duration::from_secs);
    let day = 86_400;
    let unready = seconds("unreadySeconds", recovery.unready_seconds, 1, (1, day))?;
    let max_per_hour = number("maxPerHour", recovery.max_per_hour, 10, (1, 60))?;
    let replacement = recovery.replacement_domain.as_deref();
    let replacement = replacement.map(|domain| domain_label(&policy, domain, levels)).transpose()?;
    let links = recovery.links.iter().map(|link| resolve_link(rule, link, replacement.as_deref(), levels));
    Ok(FaultRule {
        roles: rule.roles.clone(),
        links: links.collect::<Result<_, _>>()?,
        placement_timeout: seconds("placementSeconds", recovery.placement_seconds, 60, (1, day))?,
        backoff: seconds("backoffSeconds", recovery.backoff_seconds, 60, (0, 3600))?,
        max_per_hour: usize::try_from(max_per_hour).unwrap_or(usize::MAX),
        node_lost_after: seconds("nodeLostSeconds", recovery.node_lost_seconds, 300, (0, day))?,
        unready_after: recovery.unready_seconds.map(|_| unready),
        name: policy,
        replacement,
    })
}

fn resolve_link(
    rule: &PolicyRule,
    link: &FaultLink,
    replacement: Option<&str>,
    levels: Option<&[TopologyKey]>,
) -> Result<ResolvedLink, FaultPolicyError> {
    let (policy, role) = (|| rule.name.clone(), &link.when.role);
    let unknown = |field, value: &str, allowed| FaultPolicyError::UnknownValue {
        policy: policy(),
        field,
        value: value.to_owned(),
        allowed,
    };
    let targets = link.then.iter().map(|action| &action.role);
    if let Some(role) = std::iter::once(role).chain(targets.clone()).find(|role| !rule.roles.contains(role)) {
        return Err(FaultPolicyError::NotListed { policy: policy(), role: role.clone() });
    }
    if link.then.is_empty() {
        return Err(FaultPolicyError::NoActions { policy: policy(), role: role.clone() });
    }
    if targets.into_iter().any(|target| target == role) {
        return Err(FaultPolicyError::SelfLink { policy: policy(), role: role.clone() });
    }
    let condition = |name: &String| {
        FaultCondition::parse(name)
            .ok_or_else(|| unknown("condition", name, "Restarted, Failed and NodeLost"))
    };
    let mut conditions: BTreeSet<_> = link.when.conditions.iter().map(condition).collect::<Result<_, _>>()?;
    if conditions.is_empty() {
        conditions = FaultCondition::ALL.into();
    }
    let scope = match link.scope.as_str() {
        "Ordinal" => LinkScope::Ordinal,
        "Group" => LinkScope::Group,
        "Domain" => LinkScope::Domain(match (&link.domain, replacement) {
            (Some(domain), _) => domain_label(&rule.name, domain, levels)?,
            (None, Some(label)) => label.to_owned(),
            (None, None) => return Err(FaultPolicyError::NoDomain { policy: policy(), role: role.clone() }),
        }),
        other => return Err(unknown("scope", other, "Ordinal, Domain and Group")),
    };
    let action = |entry: &rbg_api::v1alpha2::LinkedAction| {
        let action = FaultAction::parse(&entry.action)
            .ok_or_else(|| unknown("action", &entry.action, "Restart, Drain and Replace"))?;
        Ok((entry.role.clone(), action))
    };
    let then = link.then.iter().map(action).collect::<Result<_, FaultPolicyError>>()?;
    Ok(ResolvedLink { role: role.clone(), conditions, scope, then })
}

/// The node label of a level, by the group's levels or by default; any other text is a label.
fn domain_label(
    policy: &str,
    domain: &str,
    levels: Option<&[TopologyKey]>,
) -> Result<String, FaultPolicyError> {
    let (Some(level), Some(levels)) = (TopologyLevel::parse(domain), levels) else {
        return Ok(domain.to_owned());
    };
    let of_group = levels.iter().find(|key| key.level == level).map(|key| key.label.as_str());
    let label = of_group.or(level.default_label()).map(str::to_owned);
    label.ok_or_else(|| FaultPolicyError::UnlabelledDomain {
        policy: policy.to_owned(),
        domain: domain.to_owned(),
    })
}

#[cfg(test)]
mod tests;
