//! Which engines a request may go to, and where it goes if the scheduler is not asked.

use std::sync::Arc;

use moongate_discovery::Role;
use moongate_scheduler::{self as scheduler, Decision, InstanceIx, ModelIx, Refusal, Request, Route};
use tokio::time::Instant;

use super::ask::Ask;
use super::booked::Booked;
use crate::fleet::{Endpoint, Fleet, Member};
use crate::prompt::Api;

/// A route whose engines are looked up and whose load is booked.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) entry: Member,
    /// The decode with its wanted rank, and the prefill's rank before it; `None` for a single worker.
    pub(crate) exit: Option<Exit>,
    pub(crate) booked: Booked,
    /// `None` on paths that are passed through without a decision.
    pub(crate) reasons: Option<Reasons>,
}

/// A decision, with the fleet that it was made for.
#[derive(Debug, Clone)]
pub(crate) struct Reasons {
    pub(crate) decision: Arc<Decision>,
    pub(crate) fleet: Arc<Fleet>,
}

/// The decode side of a pair.
#[derive(Debug)]
pub(crate) struct Exit {
    pub(crate) decode: Member,
    pub(crate) prefill_rank: u32,
    pub(crate) decode_rank: u32,
}

/// How picky the choice is: first a suspect engine whose trial is due, then engines that are sound, then also suspect ones and those
/// with an open breaker, then any that was not tried yet. So suspicions, open breakers or failing health checks on all engines never turn
/// a live fleet into one that refuses everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pickiness {
    /// The trial itself. A policy that finds the engine no better than its twins would never send one.
    Trial,
    Sound,
    Healthy,
    Untried,
}

impl Pickiness {
    pub(super) const ALL: [Pickiness; 4] =
        [Pickiness::Trial, Pickiness::Sound, Pickiness::Healthy, Pickiness::Untried];
}

/// Which engines one request may go to.
#[derive(Debug, Clone)]
pub(super) struct Wish {
    api: Api,
    samples: u32,
    tried: Vec<Arc<Endpoint>>,
    pickiness: Pickiness,
}

impl Wish {
    pub(super) fn new(ask: &Ask, tried: &[Arc<Endpoint>], pickiness: Pickiness) -> Self {
        Self { api: ask.api, samples: ask.head.n, tried: tried.to_vec(), pickiness }
    }

    /// The engines that it may not go to.
    pub(super) fn barred(&self, fleet: &Fleet) -> Vec<InstanceIx> {
        let trial = self.trial(fleet);
        let members = (0_u32..).map(InstanceIx).zip(&fleet.members);
        members.filter(|(_, member)| self.bars(member, trial)).map(|(ix, _)| ix).collect()
    }

    fn bars(&self, member: &Member, trial: Option<&Member>) -> bool {
        let is_trial = trial.is_some_and(|trial| Arc::ptr_eq(&trial.endpoint, &member.endpoint));
        let is_instead = self.pickiness == Pickiness::Trial
            && trial.is_none_or(|trial| stands_in(member.instance.role, trial.instance.role));
        !self.allows(member, is_trial) || (is_instead && !is_trial)
    }

    /// Whether a suspect engine is due for a trial that this request can be. A stream is given up after its engine's silence limit; the
    /// silence of an answer in one piece says little for its whole length.
    pub(super) fn is_due_for_trial(&self, ask: &Ask, fleet: &Fleet) -> bool {
        ask.head.stream && self.trial(fleet).is_some()
    }

    /// Whether it is for the trial of a suspect engine alone.
    pub(super) fn is_trial(&self) -> bool {
        self.pickiness == Pickiness::Trial
    }

    /// A trial is not worth waiting for.
    pub(super) fn give_up_trial(&mut self) {
        self.pickiness = Pickiness::Sound;
    }

    /// A suspect engine that this request may try. Only one, so that a pair has a sound side; and no request tries one that has been
    /// delayed by another engine already.
    fn trial<'a>(&self, fleet: &'a Fleet) -> Option<&'a Member> {
        if !matches!(self.pickiness, Pickiness::Trial | Pickiness::Sound) || !self.tried.is_empty() {
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
    pub(super) fn has_route(&self, fleet: &Fleet, model: ModelIx) -> bool {
        let allowed = |role: scheduler::Role| {
            let members = fleet.cluster.instances().iter().zip(&fleet.members);
            let serving = members.filter(move |(one, _)| one.role == role && one.models.contains(&model));
            serving.filter(|(_, member)| self.allows(member, false)).map(|(instance, _)| instance)
        };
        allowed(scheduler::Role::Plain).next().is_some()
            || allowed(scheduler::Role::Prefill)
                .any(|prefill| allowed(scheduler::Role::Decode).any(|decode| decode.domain == prefill.domain))
    }

    fn allows(&self, member: &Member, is_trial: bool) -> bool {
        let endpoint = &member.endpoint;
        // `/generate` is SGLang's own, and an SGLang pair cannot run several samples of one prompt.
        (self.api != Api::Generate || member.is_sglang())
            && (self.samples == 1 || !member.is_sglang() || member.instance.role == Role::Plain)
            && (self.pickiness == Pickiness::Untried || endpoint.is_healthy())
            && (!matches!(self.pickiness, Pickiness::Trial | Pickiness::Sound)
                || (!endpoint.breaker.is_open() && (is_trial || !endpoint.silence.is_suspect())))
            && !self.tried.iter().any(|tried| Arc::ptr_eq(tried, endpoint))
    }
}

/// Whether an engine of role `one` would make a route without the engine of role `other`.
fn stands_in(one: Role, other: Role) -> bool {
    one == other || one == Role::Plain || other == Role::Plain
}

/// The engines of a route.
pub(super) fn engines(fleet: &Fleet, route: Route) -> Option<(Member, Option<Exit>)> {
    let entry = fleet.member(route.entry())?.clone();
    let exit = match route {
        Route::Single { .. } => None,
        Route::Pair { decode, prefill_rank, decode_rank, .. } => {
            Some(Exit { decode: fleet.member(decode)?.clone(), prefill_rank, decode_rank })
        }
    };
    Some((entry, exit))
}

/// Paths that the gateway does not interpret go to one engine as they are: a plain worker if there is one, else a decode (vLLM's
/// computes a prompt itself if it is given no KV cache), else a prefill. What an engine cannot do, it says itself.
pub(super) fn choose_passthrough(
    fleet: &Fleet,
    request: Option<&Request>,
    tried: &[Arc<Endpoint>],
) -> Result<Chosen, Refusal> {
    let serves = |ix: usize| {
        let instance = &fleet.cluster.instances()[ix];
        request.is_none_or(|request| instance.models.contains(&request.model))
    };
    let rank = |member: &Member| match member.instance.role {
        Role::Plain => 0,
        Role::Decode => 1,
        Role::Prefill => 2,
    };
    let best = fleet
        .members
        .iter()
        .enumerate()
        .filter(|(ix, _)| serves(*ix))
        .filter(|(_, member)| !tried.iter().any(|tried| Arc::ptr_eq(tried, &member.endpoint)))
        .min_by_key(|(_, member)| {
            let endpoint = &member.endpoint;
            (!endpoint.is_sound(), rank(member), endpoint.in_flight.count(), fastrand::u32(..))
        });
    let Some((_, member)) = best else { return Err(Refusal::UnknownModel) };
    let booked = Booked::passing(member.endpoint.clone());
    Ok(Chosen { entry: member.clone(), exit: None, booked, reasons: None })
}
