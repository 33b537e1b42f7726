//! Which engines a request may go to, and where it goes if the scheduler is not asked.

use std::sync::Arc;

use moongate_discovery::EngineRole;
use moongate_scheduler::{
    self as scheduler, EngineRoute, InstanceIndex, ModelIndex, RequestProfile, RoutingDecision,
    ScheduleRejection,
};
use tokio::time::Instant;

use super::in_flight::InFlightGuard;
use super::routed_request::RoutedRequest;
use crate::fleet::{FleetMember, FleetSnapshot, UpstreamEndpoint};
use crate::request_body::InferenceApi;

/// A route whose engines are looked up and whose load is booked.
#[derive(Debug)]
pub(crate) struct ChosenRoute {
    pub(crate) prefill: FleetMember,
    /// The decode with its wanted rank, and the prefill's rank before it; `None` for a single worker.
    pub(crate) decode: Option<DecodeTarget>,
    pub(crate) in_flight: InFlightGuard,
    /// `None` on paths that are passed through without a decision.
    pub(crate) decision: Option<FleetDecision>,
}

/// A decision, with the fleet that it was made for.
#[derive(Debug, Clone)]
pub(crate) struct FleetDecision {
    pub(crate) decision: Arc<RoutingDecision>,
    pub(crate) fleet: Arc<FleetSnapshot>,
}

/// The decode side of a pair.
#[derive(Debug)]
pub(crate) struct DecodeTarget {
    pub(crate) decode: FleetMember,
    pub(crate) prefill_rank: u32,
    pub(crate) decode_rank: u32,
}

/// How picky the choice is: first a suspect engine whose trial is due, then engines that are sound, then also suspect ones and those
/// with an open breaker, then any that was not tried yet. So suspicions, open breakers or failing health checks on all engines never turn
/// a live fleet into one that refuses everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EligibilityTier {
    /// The trial itself. A policy that finds the engine no better than its twins would never send one.
    Trial,
    Available,
    Healthy,
    Untried,
}

impl EligibilityTier {
    pub(super) const ALL: [EligibilityTier; 4] = [
        EligibilityTier::Trial,
        EligibilityTier::Available,
        EligibilityTier::Healthy,
        EligibilityTier::Untried,
    ];
}

/// Which engines one request may go to.
#[derive(Debug, Clone)]
pub(super) struct RouteConstraints {
    api: InferenceApi,
    samples: u32,
    tried: Vec<Arc<UpstreamEndpoint>>,
    tier: EligibilityTier,
}

impl RouteConstraints {
    pub(super) fn new(ask: &RoutedRequest, tried: &[Arc<UpstreamEndpoint>], tier: EligibilityTier) -> Self {
        Self { api: ask.api, samples: ask.routing.n, tried: tried.to_vec(), tier }
    }

    /// The engines that it may not go to.
    pub(super) fn excluded(&self, fleet: &FleetSnapshot) -> Vec<InstanceIndex> {
        let trial = self.trial(fleet);
        let members = (0_u32..).map(InstanceIndex).zip(&fleet.members);
        members.filter(|(_, member)| self.excludes(member, trial)).map(|(ix, _)| ix).collect()
    }

    fn excludes(&self, member: &FleetMember, trial: Option<&FleetMember>) -> bool {
        let is_trial = trial.is_some_and(|trial| Arc::ptr_eq(&trial.endpoint, &member.endpoint));
        let is_instead = self.tier == EligibilityTier::Trial
            && trial.is_none_or(|trial| can_substitute(member.instance.role, trial.instance.role));
        !self.allows(member, is_trial) || (is_instead && !is_trial)
    }

    /// Whether a suspect engine is due for a trial that this request can be. A stream is given up after its engine's silence limit; the
    /// silence of an answer in one piece says little for its whole length.
    pub(super) fn is_due_for_trial(&self, ask: &RoutedRequest, fleet: &FleetSnapshot) -> bool {
        ask.routing.stream && self.trial(fleet).is_some()
    }

    /// Whether it is for the trial of a suspect engine alone.
    pub(super) fn is_trial(&self) -> bool {
        self.tier == EligibilityTier::Trial
    }

    /// A trial is not worth waiting for.
    pub(super) fn cancel_trial(&mut self) {
        self.tier = EligibilityTier::Available;
    }

    /// A suspect engine that this request may try. Only one, so that a pair has a sound side; and no request tries one that has been
    /// delayed by another engine already.
    fn trial<'a>(&self, fleet: &'a FleetSnapshot) -> Option<&'a FleetMember> {
        if !matches!(self.tier, EligibilityTier::Trial | EligibilityTier::Available) || !self.tried.is_empty()
        {
            return None;
        }
        let mut suspects =
            fleet.members.iter().filter(|member| member.endpoint.silence.is_suspect()).peekable();
        suspects.peek()?;
        let now = Instant::now();
        let due = suspects.filter(|member| member.endpoint.silence.is_trial_due(now));
        due.min_by_key(|_| fastrand::u32(..))
    }

    /// Whether there is an engine, or a pair, that serves `model` for this request.
    pub(super) fn has_route(&self, fleet: &FleetSnapshot, model: ModelIndex) -> bool {
        let allowed = |role: scheduler::InstanceRole| {
            let members = fleet.cluster.instances().iter().zip(&fleet.members);
            let serving = members.filter(move |(one, _)| one.role == role && one.models.contains(&model));
            serving.filter(|(_, member)| self.allows(member, false)).map(|(instance, _)| instance)
        };
        allowed(scheduler::InstanceRole::Plain).next().is_some()
            || allowed(scheduler::InstanceRole::Prefill).any(|prefill| {
                allowed(scheduler::InstanceRole::Decode).any(|decode| decode.domain == prefill.domain)
            })
    }

    fn allows(&self, member: &FleetMember, is_trial: bool) -> bool {
        let endpoint = &member.endpoint;
        // `/generate` is SGLang's own, and an SGLang pair cannot run several samples of one prompt.
        (self.api != InferenceApi::Generate || member.is_sglang())
            && (self.samples == 1 || !member.is_sglang() || member.instance.role == EngineRole::Plain)
            && (self.tier == EligibilityTier::Untried || endpoint.is_healthy())
            && (!matches!(self.tier, EligibilityTier::Trial | EligibilityTier::Available)
                || (!endpoint.breaker.is_open() && (is_trial || !endpoint.silence.is_suspect())))
            && !self.tried.iter().any(|tried| Arc::ptr_eq(tried, endpoint))
    }
}

/// Whether an engine of role `one` would make a route without the engine of role `other`.
fn can_substitute(one: EngineRole, other: EngineRole) -> bool {
    one == other || one == EngineRole::Plain || other == EngineRole::Plain
}

/// The engines of a route.
pub(super) fn route_members(
    fleet: &FleetSnapshot,
    route: EngineRoute,
) -> Option<(FleetMember, Option<DecodeTarget>)> {
    let entry = fleet.member(route.prefill_instance())?.clone();
    let exit = match route {
        EngineRoute::Single { .. } => None,
        EngineRoute::Pair { decode, prefill_rank, decode_rank, .. } => {
            Some(DecodeTarget { decode: fleet.member(decode)?.clone(), prefill_rank, decode_rank })
        }
    };
    Some((entry, exit))
}

/// Paths that the gateway does not interpret go to one engine as they are: a plain worker if there is one, else a decode (vLLM's
/// computes a prompt itself if it is given no KV cache), else a prefill. What an engine cannot do, it says itself.
pub(super) fn choose_passthrough(
    fleet: &FleetSnapshot,
    request: Option<&RequestProfile>,
    tried: &[Arc<UpstreamEndpoint>],
) -> Result<ChosenRoute, ScheduleRejection> {
    let serves = |ix: usize| {
        let instance = &fleet.cluster.instances()[ix];
        request.is_none_or(|request| instance.models.contains(&request.model))
    };
    let rank = |member: &FleetMember| match member.instance.role {
        EngineRole::Plain => 0,
        EngineRole::Decode => 1,
        EngineRole::Prefill => 2,
    };
    let best = fleet
        .members
        .iter()
        .enumerate()
        .filter(|(ix, _)| serves(*ix))
        .filter(|(_, member)| !tried.iter().any(|tried| Arc::ptr_eq(tried, &member.endpoint)))
        .min_by_key(|(_, member)| {
            let endpoint = &member.endpoint;
            (!endpoint.is_available(), rank(member), endpoint.in_flight.count(), fastrand::u32(..))
        });
    let Some((_, member)) = best else { return Err(ScheduleRejection::UnknownModel) };
    let booked = InFlightGuard::passthrough(member.endpoint.clone());
    Ok(ChosenRoute { prefill: member.clone(), decode: None, in_flight: booked, decision: None })
}
