//! Removal of instances in steps: the roles of a rule shrink in proportion.

use std::fmt;

use rbg_api::v1alpha2::CoordinatedScaling;

use super::{ObservedRole, RoleProgress, allowed_progress};

/// A removal of instances: the number at first, and the number to reach. Progress is the share of this difference, so the first
/// number is recorded in the workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::plan) struct ScaleIn {
    from: i32,
    to: i32,
}

impl ScaleIn {
    /// Parses a record. A removal of nothing is none.
    pub(in crate::plan) fn parse(text: &str) -> Option<Self> {
        let (from, to) = text.split_once(" to ")?;
        let (from, to) = (from.parse().ok()?, to.parse().ok()?);
        (0 <= to && to < from).then_some(Self { from, to })
    }
}

impl fmt::Display for ScaleIn {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} to {}", self.from, self.to)
    }
}

/// What a role that shrinks may do now.
pub(super) struct ScaleInStep {
    pub(super) replicas: i32,
    pub(super) record: Option<ScaleIn>,
}

/// Steps of the roles that shrink; `None` for the others.
pub(super) fn steps(scaling: &CoordinatedScaling, roles: &[&ObservedRole<'_>]) -> Vec<Option<ScaleInStep>> {
    let removals: Vec<Option<ScaleIn>> = roles.iter().map(|role| removal(role)).collect();
    let Some(skew) = &scaling.max_skew else {
        let at_once = |scale_in: ScaleIn| ScaleInStep { replicas: scale_in.to, record: None };
        return removals.into_iter().map(|scale_in| scale_in.map(at_once)).collect();
    };
    // Without a progression, steps do not wait until instances are gone, as they do not wait for new ones either.
    let waits = scaling.progression.is_some();
    let progress: Vec<RoleProgress> = roles
        .iter()
        .zip(&removals)
        .map(|(role, removal)| match removal {
            Some(ScaleIn { from, to }) => {
                let leaving = role.live.as_ref().filter(|_| waits).map_or(0, |live| live.leaving);
                RoleProgress::new(from - requested(role) - leaving, from - to)
            }
            None => RoleProgress::new(0, 0),
        })
        .collect();
    let allowed = allowed_progress(skew, &progress);
    let is_coordinated = removals.iter().flatten().count() > 1;
    let step = |(index, removal): (usize, &Option<ScaleIn>)| {
        let scale_in = (*removal)?;
        let replicas = requested(roles[index]).min(scale_in.from - allowed[index]);
        let has_begun = is_coordinated && replicas < scale_in.from;
        Some(ScaleInStep { replicas, record: has_begun.then_some(scale_in) })
    };
    removals.iter().enumerate().map(step).collect()
}

fn requested(role: &ObservedRole<'_>) -> i32 {
    role.live.as_ref().map_or(0, |live| live.requested)
}

/// The removal that the role takes part in: the recorded one while its goal is the same, else a new one from the present number.
fn removal(role: &ObservedRole<'_>) -> Option<ScaleIn> {
    let live = role.live.as_ref().filter(|live| live.requested >= role.desired)?;
    let recorded = live.scale_in.filter(|record| record.to == role.desired && record.from >= live.requested);
    let new = ScaleIn { from: live.requested, to: role.desired };
    recorded.or_else(|| (new.from > new.to).then_some(new))
}
