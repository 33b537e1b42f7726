//! Asks the scheduler for a route and enters it into the books.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moongate_discovery::Role;
use moongate_scheduler::{
    Booking, Decision, Input, Load, Policy, Prediction, Refusal, Request, Route, Verdict,
};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::ask::Ask;
use crate::fleet::{Booked, Endpoint, Fleet, Member};
use crate::prompt::Api;

/// The policy with what it needs from outside: time, order, chance.
#[derive(Debug)]
pub(crate) struct Decider {
    policy: Mutex<Box<dyn Policy>>,
    sequence: AtomicU64,
    start: Instant,
}

/// A route whose engines are looked up and whose load is booked.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) entry: Member,
    /// The decode with its wanted rank, and the prefill's rank before it; `None` for a single worker.
    pub(crate) exit: Option<Exit>,
    pub(crate) booked: Booked,
    /// `None` on paths that are passed through without a decision.
    pub(crate) decision: Option<Decision>,
}

/// The decode side of a pair.
#[derive(Debug)]
pub(crate) struct Exit {
    pub(crate) decode: Member,
    pub(crate) prefill_rank: u32,
    pub(crate) decode_rank: u32,
}

/// How picky availability is: first choice, then without the breakers, then whoever was not tried yet. So open breakers or
/// failing health checks on all engines never turn a live fleet into one that refuses everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pickiness {
    Sound,
    Healthy,
    Untried,
}

impl Decider {
    pub(crate) fn new(policy: Box<dyn Policy>) -> Self {
        Self { policy: Mutex::new(policy), sequence: AtomicU64::new(0), start: Instant::now() }
    }

    /// Chooses a route that avoids the engines in `tried`.
    pub(crate) fn choose(
        &self,
        fleet: &Fleet,
        ask: &Ask,
        tried: &[Arc<Endpoint>],
    ) -> Result<Chosen, Refusal> {
        match (&ask.request, ask.api) {
            (Some(request), Api::Chat | Api::Completions | Api::Generate) => {
                self.choose_route(fleet, ask, request, tried)
            }
            (request, _) => choose_passthrough(fleet, request.as_ref(), tried),
        }
    }

    fn choose_route(
        &self,
        fleet: &Fleet,
        ask: &Ask,
        request: &Request,
        tried: &[Arc<Endpoint>],
    ) -> Result<Chosen, Refusal> {
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let now = self.start.elapsed().as_secs_f64();
        let prediction =
            ask.predicted.as_ref().map_or_else(Prediction::default, |predicted| predicted.for_fleet(fleet));
        let mut refusal = Refusal::UnknownModel;
        for pickiness in [Pickiness::Sound, Pickiness::Healthy, Pickiness::Untried] {
            let loads = loads(fleet, ask, tried, pickiness);
            let input = Input {
                request,
                cluster: &fleet.cluster,
                loads: &loads,
                prediction: &prediction,
                now,
                arrived: now,
                sequence,
                entropy: fastrand::u64(..),
            };
            let mut policy = self.policy.lock();
            match policy.decide(&input) {
                Ok(Verdict::Send(decision)) => {
                    policy.sent(&input, &decision);
                    return chosen(fleet, decision).ok_or(refusal);
                }
                Ok(Verdict::Hold { until }) => refusal = Refusal::Overloaded { retry_after: until - now },
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }
}

fn loads(fleet: &Fleet, ask: &Ask, tried: &[Arc<Endpoint>], pickiness: Pickiness) -> Vec<Load> {
    let (api, samples) = (ask.api, ask.head.n);
    let available = |member: &Member| {
        let endpoint = &member.endpoint;
        // `/generate` is SGLang's own, and an SGLang pair cannot run several samples of one prompt.
        (api != Api::Generate || member.is_sglang())
            && (samples == 1 || !member.is_sglang() || member.instance.role == Role::Plain)
            && (pickiness == Pickiness::Untried || endpoint.is_healthy())
            && (pickiness != Pickiness::Sound || !endpoint.breaker.is_open())
            && !tried.iter().any(|tried| Arc::ptr_eq(tried, endpoint))
    };
    fleet.members.iter().map(|member| member.endpoint.book.load(available(member))).collect()
}

fn chosen(fleet: &Fleet, decision: Decision) -> Option<Chosen> {
    let entry = fleet.member(decision.route.entry())?.clone();
    let exit = match decision.route {
        Route::Single { .. } => None,
        Route::Pair { decode, prefill_rank, decode_rank, .. } => {
            Some(Exit { decode: fleet.member(decode)?.clone(), prefill_rank, decode_rank })
        }
    };
    let last = exit.as_ref().map_or(&entry, |exit| &exit.decode).endpoint.clone();
    let booked = Booked::new(entry.endpoint.clone(), last, decision.booking);
    Some(Chosen { entry, exit, booked, decision: Some(decision) })
}

/// Paths that the gateway does not interpret go to one engine as they are: a plain worker if there is one, else a decode (vLLM's
/// computes a prompt itself if it is given no KV cache), else a prefill. What an engine cannot do, it says itself.
fn choose_passthrough(
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
            let sound = endpoint.is_healthy() && !endpoint.breaker.is_open();
            (!sound, rank(member), endpoint.book.load(true).in_flight, fastrand::u32(..))
        });
    let Some((_, member)) = best else {
        return Err(Refusal::NoneAvailable { entries: 0, decodes: 0 });
    };
    let booked = Booked::new(member.endpoint.clone(), member.endpoint.clone(), Booking::default());
    Ok(Chosen { entry: member.clone(), exit: None, booked, decision: None })
}
