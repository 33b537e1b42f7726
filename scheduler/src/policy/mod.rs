//! Policies: the interface, their names, and what all of them share (enumeration of possible pairs).

mod cache_aware;
mod conductor;
mod dynamo;
mod dynamo_queue;
mod hash_ring;
mod least_load;
mod least_requests;
mod llm_d;
mod lmetric;
mod min_cost;
mod name_hash;
mod power_of_two;
mod predictive;
mod prefix_hash;
mod random;
mod round_robin;

use std::fmt;
use std::str::FromStr;

use self::min_cost::min_cost;
pub use self::predictive::HeldChoice;
use crate::adapter_loads::AdapterResidencies;
use crate::decision::{
    CandidateEngine, DecisionExplanation, EngineRoute, LoadReservation, RoutingDecision, ScheduleRejection,
};
use crate::decode_step::DecodeBatch;
use crate::estimate::{EngineView, PrefillBacklog, PrefillEstimate};
use crate::fleet::{InstanceIndex, InstanceLoad, InstanceRole, SchedulableFleet, SchedulableInstance};
use crate::options::SchedulerOptions;
use crate::prediction::CacheHitPrediction;
use crate::prefill_time_distribution::PrefillTimeDistribution;
use crate::request::RequestProfile;
use crate::seconds::Seconds;

/// All inputs of a decision.
#[derive(Debug, Clone, Copy)]
pub struct PolicyInput<'a> {
    pub request: &'a RequestProfile,
    pub cluster: &'a SchedulableFleet,
    /// Load of each instance, in the cluster's order.
    pub loads: &'a [InstanceLoad],
    /// Cache hits of each instance, in the cluster's order.
    pub prediction: &'a CacheHitPrediction,
    /// Whether each instance has loaded the request's LoRA adapter, in the cluster's order.
    pub adapters: &'a AdapterResidencies,
    /// Recent distribution of prefill times, of all prompts the engines had to compute.
    pub prefill_times: &'a PrefillTimeDistribution,
    /// Recent average share of a prompt's computation that was not avoided by caches.
    pub uncached_share: f64,
    /// Expected length of each sequence of the response, in tokens.
    pub expected_output_tokens: u32,
    /// Current time by the caller's clock.
    pub now: Seconds,
    /// Arrival time of the request by the same clock.
    pub arrived: Seconds,
    /// Number of this decision, from 0; drives round robin.
    pub sequence: u64,
    /// Random bits for tie-breaks, provided by the caller.
    pub entropy: u64,
    /// Whether a decision has to be explained with all candidates, not only with the chosen one.
    pub is_explained: bool,
    /// What the policy returned with the last [`PolicyVerdict::Defer`] of this request, if its prediction and the fleet are the same.
    pub held: Option<&'a HeldChoice>,
}

impl PolicyInput<'_> {
    /// Tokens that the request is expected to occupy on the engine that decodes it.
    #[must_use]
    pub fn expected_tokens(&self) -> u64 {
        let sequences = u64::from(self.request.sequences.max(1));
        self.request.total_input_tokens() + u64::from(self.expected_output_tokens) * sequences
    }

    /// What the request is expected to add to the batch of the engine that decodes it.
    pub(crate) fn expected_batch(&self) -> DecodeBatch {
        DecodeBatch { sequences: self.request.sequences.max(1).into(), tokens: self.expected_tokens() as f64 }
    }
}

/// Inputs that are the same for all decisions of a round.
#[derive(Debug, Clone, Copy)]
pub struct ScheduleRound<'a> {
    pub cluster: &'a SchedulableFleet,
    /// Load of each instance, in the cluster's order, before the round sends anything.
    pub loads: &'a [InstanceLoad],
    /// The instances whose load has been refreshed since the last round; `None` if all have.
    pub refreshed: Option<&'a [InstanceIndex]>,
    /// When each load was computed; empty if all were at `now`.
    pub refreshed_at: &'a [Seconds],
    /// Number of queued requests in this round.
    pub queued_requests: usize,
    /// Maximum number of tokens that any of them could fetch from the shared store, weighted by network distance: see
    /// [`CacheHitPrediction::max_store_fetch_tokens`].
    pub max_store_fetch_tokens: f64,
    /// Longest wait of any of them for a load of its LoRA adapter, on any instance.
    pub max_adapter_load: Seconds,
    /// Current time by the caller's clock.
    pub now: Seconds,
}

/// Outcome of a decision for one request.
#[derive(Debug, Clone, PartialEq)]
pub enum PolicyVerdict {
    Send(RoutingDecision),
    /// Keep the request queued: a later engine is better than any available now.
    Defer {
        /// When to decide again if nothing else happens before; infinite if only an event can change the result.
        until: Seconds,
        /// Input of the next decision for the request.
        held: Option<HeldChoice>,
    },
}

/// A routing policy. Implementations are deterministic: the same calls give the same results.
pub trait Policy: fmt::Debug + Send {
    fn name(&self) -> PolicyName;

    /// Position among queued requests: smaller goes first, ties in order of arrival. Computed when the request arrives
    /// and when its prediction changes. Policies that never queue need none.
    fn rank(&self, input: &PolicyInput<'_>) -> f64 {
        input.arrived
    }

    /// Factor on the part of the rank after the arrival, for requests of a tenant. Applied to all queued requests in
    /// every round, because it changes with every request that is sent.
    fn tenant_factor(&self, tenant: Option<u64>) -> f64 {
        let _ = tenant;
        1.0
    }

    /// Starts a round: `decide` is called once for every queued request, in order of rank.
    fn begin_round(&mut self, round: &ScheduleRound<'_>) {
        let _ = round;
    }

    /// Work of queued requests on an engine that goes before the current request and is missing in
    /// [`InstanceLoad::prefill_wait`].
    fn planned_work(&self, engine: InstanceIndex) -> Seconds {
        let _ = engine;
        0.0
    }

    /// Chooses a route, or to wait. Besides the round, only [`Policy::on_sent`] changes state that later decisions
    /// depend on.
    ///
    /// # Errors
    /// [`ScheduleRejection`] if no route is possible or the policy rejects the request.
    fn decide(&mut self, input: &PolicyInput<'_>) -> Result<PolicyVerdict, ScheduleRejection>;

    /// Called after a decision was carried out: for policies that keep state of their own.
    fn on_sent(&mut self, input: &PolicyInput<'_>, decision: &RoutingDecision) {
        let _ = (input, decision);
    }
}

/// Policies that can be selected by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
pub enum PolicyName {
    /// The pair with the least predicted time to first token; queues requests while all engines are busy.
    Predictive,
    /// Any prefill, any decode.
    Random,
    /// Prefills and decodes in rotation.
    RoundRobin,
    /// The less loaded of two prefills drawn at random, the same for decodes.
    PowerOfTwo,
    /// The prefill with the fewest requests, the same for decodes.
    LeastRequests,
    /// The prefill with the fewest waiting prompt tokens, the decode with the fewest occupied tokens.
    LeastLoad,
    /// smg's: where most of the prompt was sent before, unless the fleet is out of balance.
    CacheAware,
    /// smg's: the owner of the prompt's prefix hash, with bounded load.
    PrefixHash,
    /// llm-d's precise prefix caching: cached share, free cache and waiting queue, weighted.
    LlmD,
    /// LMetric: new prompt tokens times batch size.
    LMetric,
    /// NVIDIA Dynamo's router with default settings.
    Dynamo,
    /// NVIDIA Dynamo's router with its queue and with the shared store.
    DynamoQueue,
    /// Mooncake's Conductor, Algorithm 1 of its paper.
    Conductor,
}

impl PolicyName {
    /// All policies, in the order of help texts.
    pub const ALL: [PolicyName; 13] = [
        PolicyName::Predictive,
        PolicyName::LeastLoad,
        PolicyName::LeastRequests,
        PolicyName::PowerOfTwo,
        PolicyName::RoundRobin,
        PolicyName::Random,
        PolicyName::CacheAware,
        PolicyName::PrefixHash,
        PolicyName::LlmD,
        PolicyName::LMetric,
        PolicyName::Dynamo,
        PolicyName::DynamoQueue,
        PolicyName::Conductor,
    ];

    /// The name in flags and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            PolicyName::Predictive => "predictive",
            PolicyName::Random => "random",
            PolicyName::RoundRobin => "round_robin",
            PolicyName::PowerOfTwo => "power_of_two",
            PolicyName::LeastRequests => "least_requests",
            PolicyName::LeastLoad => "least_load",
            PolicyName::CacheAware => "cache_aware",
            PolicyName::PrefixHash => "prefix_hash",
            PolicyName::LlmD => "llm_d",
            PolicyName::LMetric => "lmetric",
            PolicyName::Dynamo => "dynamo",
            PolicyName::DynamoQueue => "dynamo_queue",
            PolicyName::Conductor => "conductor",
        }
    }

    /// Whether it keeps state about each block of a prompt, and not only of those that engines may have.
    #[must_use]
    pub fn needs_all_blocks(self) -> bool {
        self == PolicyName::CacheAware
    }

    /// Creates a policy with these settings.
    #[must_use]
    pub fn build(self, settings: &SchedulerOptions) -> Box<dyn Policy> {
        match self {
            PolicyName::Predictive => Box::new(predictive::PredictivePolicy::new(settings)),
            PolicyName::Random => Box::new(random::RandomPolicy),
            PolicyName::RoundRobin => Box::new(round_robin::RoundRobinPolicy),
            PolicyName::PowerOfTwo => Box::new(power_of_two::PowerOfTwoPolicy),
            PolicyName::LeastRequests => Box::new(least_requests::LeastRequestsPolicy),
            PolicyName::LeastLoad => Box::new(least_load::LeastLoadPolicy),
            PolicyName::CacheAware => Box::new(cache_aware::CacheAwarePolicy::default()),
            PolicyName::PrefixHash => Box::new(prefix_hash::PrefixHashPolicy::default()),
            PolicyName::LlmD => Box::new(llm_d::LlmDPolicy),
            PolicyName::LMetric => Box::new(lmetric::LMetricPolicy),
            PolicyName::Dynamo => Box::new(dynamo::DynamoPolicy),
            PolicyName::DynamoQueue => Box::new(dynamo_queue::DynamoQueuePolicy),
            PolicyName::Conductor => Box::new(conductor::ConductorPolicy),
        }
    }
}

impl From<PolicyName> for &'static str {
    fn from(name: PolicyName) -> Self {
        name.as_str()
    }
}

impl TryFrom<String> for PolicyName {
    type Error = UnknownPolicyError;

    fn try_from(name: String) -> Result<Self, UnknownPolicyError> {
        name.parse()
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A policy name that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown policy {0:?}; available: {all}", all = PolicyName::ALL.map(PolicyName::as_str).join(", "))]
pub struct UnknownPolicyError(String);

impl FromStr for PolicyName {
    type Err = UnknownPolicyError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|name| name.as_str() == text)
            .ok_or_else(|| UnknownPolicyError(text.to_owned()))
    }
}

/// Available engines that compute prompts for the request's model: plain workers, and prefills with at least one
/// available decode to pair with. Only those that need no load of the request's LoRA adapter, if there are any.
fn available_prefills(input: &PolicyInput<'_>) -> Result<Vec<InstanceIndex>, ScheduleRejection> {
    let model = input.request.model;
    let entries = input.cluster.prefills(model);
    let decodes = input.cluster.decodes(model);
    if entries.is_empty() {
        return Err(if decodes.is_empty() {
            ScheduleRejection::UnknownModel
        } else {
            ScheduleRejection::NoneAvailable { prefills: 0, decodes: decodes.len() }
        });
    }
    let mut open: Vec<InstanceIndex> = entries
        .iter()
        .copied()
        .filter(|&ix| is_available(input, ix))
        .filter(|&ix| match input.cluster.get(ix) {
            Some(SchedulableInstance { role: InstanceRole::Plain, .. }) => true,
            Some(prefill) => all_pairable_decodes(input, prefill).next().is_some(),
            None => false,
        })
        .collect();
    if open.is_empty() {
        return Err(ScheduleRejection::NoneAvailable { prefills: entries.len(), decodes: decodes.len() });
    }
    retain_preferred(input, &mut open);
    Ok(open)
}

/// Removes engines with which the request would wait longer for its LoRA adapter than with others.
fn retain_preferred(input: &PolicyInput<'_>, engines: &mut Vec<InstanceIndex>) {
    if input.adapters.is_empty() {
        return;
    }
    let preference = |ix: InstanceIndex| input.adapters.of(ix).preference();
    let best = engines.iter().map(|&ix| preference(ix)).min();
    engines.retain(|&ix| Some(preference(ix)) == best);
}

/// Available decodes that can take over from `prefill`. Only those that need no load of the request's LoRA adapter, if there
/// are any.
fn pairable_decodes<'a>(
    input: &'a PolicyInput<'_>,
    prefill: &'a SchedulableInstance,
) -> impl Iterator<Item = InstanceIndex> + 'a {
    let preference = |ix: InstanceIndex| input.adapters.of(ix).preference();
    // Nearly all requests need no load.
    let best = match input.adapters.is_empty() {
        true => None,
        false => all_pairable_decodes(input, prefill).map(preference).min(),
    };
    all_pairable_decodes(input, prefill).filter(move |&ix| best.is_none_or(|best| preference(ix) == best))
}

/// Available decodes that can take over from `prefill`, with or without the request's LoRA adapter.
fn all_pairable_decodes<'a>(
    input: &'a PolicyInput<'_>,
    prefill: &'a SchedulableInstance,
) -> impl Iterator<Item = InstanceIndex> + 'a {
    let of_domain =
        move |ix: &InstanceIndex| input.cluster.get(*ix).is_some_and(|d| d.domain == prefill.domain);
    input
        .cluster
        .decodes(input.request.model)
        .iter()
        .copied()
        .filter(|&ix| is_available(input, ix))
        .filter(of_domain)
}

fn is_available(input: &PolicyInput<'_>, ix: InstanceIndex) -> bool {
    input.loads.get(ix.as_usize()).is_some_and(|load| load.available)
}

fn load(input: &PolicyInput<'_>, ix: InstanceIndex) -> InstanceLoad {
    input.loads.get(ix.as_usize()).copied().unwrap_or_default()
}

/// Requests that occupy an engine: a request occupies a prefill until its first token.
fn active_requests(input: &PolicyInput<'_>, ix: InstanceIndex) -> u32 {
    let load = load(input, ix);
    match input.cluster.get(ix).map(|instance| instance.role) {
        Some(InstanceRole::Prefill) => load.pending_prefills,
        _ => load.in_flight,
    }
}

/// Cost of a prefill for the policies that price load alone: prompt tokens ahead of this request, with requests in
/// flight as tie-breaker.
fn prefill_cost(load: &InstanceLoad) -> f64 {
    load.prefill_backlog_tokens() as f64 + f64::from(load.in_flight) * 1e-3
}

/// Cost of a decode: tokens it occupies, with requests in flight as tie-breaker.
fn decode_cost(load: &InstanceLoad) -> f64 {
    load.decode_tokens() as f64 + f64::from(load.in_flight) * 1e-3
}

/// The available decode for `entry` with the fewest occupied tokens; `None` for a plain worker.
fn least_loaded_decode(input: &PolicyInput<'_>, entry: InstanceIndex) -> Option<InstanceIndex> {
    let prefill = as_prefill(input, entry)?;
    // The high half of the entropy: independent of a draw among prefills.
    min_cost(
        pairable_decodes(input, prefill).map(|ix| (ix, decode_cost(&load(input, ix)))),
        input.entropy >> 32,
    )
}

/// The engines that a policy has chosen, and why.
struct EngineChoice {
    reason: &'static str,
    entry: InstanceIndex,
    /// `None` for a plain worker.
    decode: Option<InstanceIndex>,
    candidates: Vec<CandidateEngine>,
}

/// Completes a decision once the engines are chosen.
fn build_decision(input: &PolicyInput<'_>, policy: PolicyName, choice: EngineChoice) -> PolicyVerdict {
    let EngineChoice { reason, entry, decode, candidates } = choice;
    let rank = |ix: InstanceIndex| input.cluster.get(ix).map_or(0, |instance| instance.rank);
    let route = match decode {
        Some(decode) => {
            EngineRoute::Pair { prefill: entry, prefill_rank: rank(entry), decode, decode_rank: rank(decode) }
        }
        None => EngineRoute::Single { worker: entry, rank: rank(entry) },
    };
    let cached = u64::from(input.prediction.cached_tokens(entry));
    let booking = LoadReservation {
        prefill_tokens: input.request.total_input_tokens().saturating_sub(cached).max(1),
        decode_tokens: input.expected_tokens(),
    };
    let explanation = DecisionExplanation { policy, reason, candidates, terms: Vec::new() };
    let expected_ttft = expected_ttft(input, entry);
    PolicyVerdict::Send(RoutingDecision {
        route,
        reservation: booking,
        engine_priority: None,
        predicted_ttft: None,
        expected_ttft,
        pending_tokens: input.prediction.hits(entry).pending_tokens,
        explanation,
    })
}

/// Time to first token of the request on `entry` after everything that the engine has now.
fn expected_ttft(input: &PolicyInput<'_>, entry: InstanceIndex) -> Seconds {
    let (Some(instance), Some(load)) = (input.cluster.get(entry), input.loads.get(entry.as_usize())) else {
        return 0.0;
    };
    let tokens = input.request.total_input_tokens();
    let engine = EngineView { index: entry, instance, load };
    let estimate = PrefillEstimate::new(tokens, input.prediction, engine, PrefillBacklog::of(load));
    estimate.after_load(input.adapters.of(entry).wait()).ttft()
}

/// Selects one of many by random bits.
fn pick_random(from: &[InstanceIndex], entropy: u64) -> Option<InstanceIndex> {
    let len = from.len().max(1) as u64;
    from.get(usize::try_from((entropy & 0xffff_ffff) % len).unwrap_or(0)).copied()
}

/// The prefill instance at `entry`, or `None` for a plain worker.
fn as_prefill<'a>(input: &PolicyInput<'a>, entry: InstanceIndex) -> Option<&'a SchedulableInstance> {
    input.cluster.get(entry).filter(|instance| instance.role == InstanceRole::Prefill)
}

#[cfg(test)]
mod adapter_tests;
#[cfg(test)]
mod fixture;
#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod tests;
