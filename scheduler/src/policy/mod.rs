//! Policies: the interface, their names, and what all of them share (which pairs are possible at all).

mod cache_aware;
mod conductor;
mod dynamo;
mod dynamo_queue;
mod least_load;
mod least_requests;
mod lightest;
mod llm_d;
mod lmetric;
mod name_hash;
mod power_of_two;
mod predictive;
mod prefix_hash;
mod random;
mod ring;
mod rotation;

use std::fmt;
use std::str::FromStr;

use self::lightest::lightest;
use crate::cluster::{Cluster, Instance, InstanceIx, Load, Role};
use crate::decision::{Booking, Candidate, Decision, Explanation, Refusal, Route};
use crate::estimate::Estimate;
use crate::prediction::Prediction;
use crate::request::{Request, Seconds};
use crate::service_mix::ServiceMix;
use crate::settings::Settings;

/// Everything a decision may depend on.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The request.
    pub request: &'a Request,
    /// The fleet.
    pub cluster: &'a Cluster,
    /// One per instance, in the cluster's order.
    pub loads: &'a [Load],
    /// Cache hits, in the cluster's order.
    pub prediction: &'a Prediction,
    /// What prompts the engines have had to compute of late.
    pub mix: &'a ServiceMix,
    /// The caller's clock.
    pub now: Seconds,
    /// When the request arrived, by the same clock.
    pub arrived: Seconds,
    /// Number of this decision, counting from 0: what rotation turns on.
    pub sequence: u64,
    /// Random bits for tie-breaks, drawn by the caller.
    pub entropy: u64,
}

/// What is the same for all questions of a round.
#[derive(Debug, Clone, Copy)]
pub struct Round<'a> {
    /// The fleet.
    pub cluster: &'a Cluster,
    /// One per instance, in the cluster's order, before anything is sent.
    pub loads: &'a [Load],
    /// Requests that will be asked about.
    pub held: usize,
    /// Most tokens that any of them could be given from the shared store, by the time that they take: see [`Prediction::stored`].
    pub most_stored: f64,
    /// The caller's clock.
    pub now: Seconds,
}

/// What to do with a request now.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// Send it.
    Send(Decision),
    /// Keep it: a later engine is better than any now.
    Hold {
        /// When to ask again, if nothing else happens before; infinite if only an event can change the answer.
        until: Seconds,
    },
}

/// A way to choose. Implementations are deterministic: the same calls give the same answers.
pub trait Policy: fmt::Debug + Send {
    /// Which policy it is.
    fn name(&self) -> PolicyName;

    /// Its place among held requests: smaller goes first, equals in order of arrival. Asked when the request arrives and
    /// when its prediction changes. Policies that never hold need none.
    fn rank(&self, input: &Input<'_>) -> f64 {
        input.arrived
    }

    /// A round of questions begins: every held request is asked about once, in order of rank.
    fn begin(&mut self, round: &Round<'_>) {
        let _ = round;
    }

    /// Whether the longest held request has waited so long that it goes before all others this time.
    fn is_aged(&self, input: &Input<'_>) -> bool {
        let _ = input;
        false
    }

    /// Work of held requests on an engine that goes before the request asked about: what [`Load::prefill_wait`] lacks.
    fn planned(&self, engine: InstanceIx) -> Seconds {
        let _ = engine;
        0.0
    }

    /// Chooses a route, or to wait. Beyond the round, only [`Policy::sent`] changes what later answers depend on.
    ///
    /// # Errors
    /// [`Refusal`] if no route is possible or wanted.
    fn decide(&mut self, input: &Input<'_>) -> Result<Verdict, Refusal>;

    /// The decision was carried out: for policies that keep a picture of their own.
    fn sent(&mut self, input: &Input<'_>, decision: &Decision) {
        let _ = (input, decision);
    }
}

/// The policies that can be asked for by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
pub enum PolicyName {
    /// The pair with the least predicted time to first token; holds requests while all engines are busy.
    Predictive,
    /// Any entry, any decode.
    Random,
    /// Entries and decodes in turn.
    RoundRobin,
    /// The less loaded of two entries drawn at random, the same for decodes.
    PowerOfTwo,
    /// The entry with the fewest requests, the same for decodes.
    LeastRequests,
    /// The entry with the fewest waiting prompt tokens, the decode with the fewest held tokens.
    LeastLoad,
    /// smg's: where most of the prompt was sent before, unless the fleet is out of balance.
    CacheAware,
    /// smg's: the owner of the prompt's beginning, with bounded load.
    PrefixHash,
    /// llm-d's precise prefix caching: cached share, free cache and waiting queue, weighted.
    LlmD,
    /// LMetric: new prompt tokens times batch size.
    LMetric,
    /// NVIDIA Dynamo's router without settings.
    Dynamo,
    /// NVIDIA Dynamo's router with its queue, and with knowledge of the shared store.
    DynamoQueue,
    /// Mooncake's Conductor.
    Conductor,
}

impl PolicyName {
    /// All, in the order that help texts list them.
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

    /// Makes the policy.
    #[must_use]
    pub fn build(self, settings: &Settings) -> Box<dyn Policy> {
        match self {
            PolicyName::Predictive => Box::new(predictive::Predictive::new(settings)),
            PolicyName::Random => Box::new(random::Random),
            PolicyName::RoundRobin => Box::new(rotation::RoundRobin),
            PolicyName::PowerOfTwo => Box::new(power_of_two::PowerOfTwo),
            PolicyName::LeastRequests => Box::new(least_requests::LeastRequests),
            PolicyName::LeastLoad => Box::new(least_load::LeastLoad),
            PolicyName::CacheAware => Box::new(cache_aware::CacheAware::default()),
            PolicyName::PrefixHash => Box::new(prefix_hash::PrefixHash::default()),
            PolicyName::LlmD => Box::new(llm_d::LlmD),
            PolicyName::LMetric => Box::new(lmetric::LMetric),
            PolicyName::Dynamo => Box::new(dynamo::Dynamo),
            PolicyName::DynamoQueue => Box::new(dynamo_queue::DynamoQueue),
            PolicyName::Conductor => Box::new(conductor::Conductor),
        }
    }
}

impl From<PolicyName> for &'static str {
    fn from(name: PolicyName) -> Self {
        name.as_str()
    }
}

impl TryFrom<String> for PolicyName {
    type Error = UnknownPolicy;

    fn try_from(name: String) -> Result<Self, UnknownPolicy> {
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
#[error("no policy is called {0:?}; the policies are {all}", all = PolicyName::ALL.map(PolicyName::as_str).join(", "))]
pub struct UnknownPolicy(String);

impl FromStr for PolicyName {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|name| name.as_str() == text).ok_or_else(|| UnknownPolicy(text.to_owned()))
    }
}

/// Available entries of the request's model: plain workers, and prefills with at least one available decode to
/// pair with.
fn open_entries(input: &Input<'_>) -> Result<Vec<InstanceIx>, Refusal> {
    let model = input.request.model;
    let entries = input.cluster.entries(model);
    let decodes = input.cluster.decodes(model);
    if entries.is_empty() {
        return Err(if decodes.is_empty() {
            Refusal::UnknownModel
        } else {
            Refusal::NoneAvailable { entries: 0, decodes: decodes.len() }
        });
    }
    let open: Vec<InstanceIx> = entries
        .iter()
        .copied()
        .filter(|&ix| available(input, ix))
        .filter(|&ix| match input.cluster.get(ix) {
            Some(Instance { role: Role::Plain, .. }) => true,
            Some(prefill) => partners(input, prefill).next().is_some(),
            None => false,
        })
        .collect();
    if open.is_empty() {
        return Err(Refusal::NoneAvailable { entries: entries.len(), decodes: decodes.len() });
    }
    Ok(open)
}

/// Available decodes that can take over from `prefill`.
fn partners<'a>(input: &'a Input<'_>, prefill: &'a Instance) -> impl Iterator<Item = InstanceIx> + 'a {
    let of_domain = move |ix: &InstanceIx| input.cluster.get(*ix).is_some_and(|d| d.domain == prefill.domain);
    input
        .cluster
        .decodes(input.request.model)
        .iter()
        .copied()
        .filter(|&ix| available(input, ix))
        .filter(of_domain)
}

fn available(input: &Input<'_>, ix: InstanceIx) -> bool {
    input.loads.get(ix.at()).is_some_and(|load| load.available)
}

fn load(input: &Input<'_>, ix: InstanceIx) -> Load {
    input.loads.get(ix.at()).copied().unwrap_or_default()
}

/// Requests that an engine is busy with: a prefill is done with one when its first token is there.
fn requests(input: &Input<'_>, ix: InstanceIx) -> u32 {
    let load = load(input, ix);
    match input.cluster.get(ix).map(|instance| instance.role) {
        Some(Role::Prefill) => load.pending_prefills,
        _ => load.in_flight,
    }
}

/// Cost of an entry for the policies that price load alone: prompt tokens ahead of this request, then requests in flight as a
/// tie-break.
fn entry_cost(load: &Load) -> f64 {
    load.prefill_backlog_tokens() as f64 + f64::from(load.in_flight) * 1e-3
}

/// Cost of a decode: tokens it holds, then requests in flight as a tie-break.
fn decode_cost(load: &Load) -> f64 {
    load.decode_tokens() as f64 + f64::from(load.in_flight) * 1e-3
}

/// The available decode for `entry` that holds the fewest tokens; `None` for an entry that needs none.
fn least_loaded_decode(input: &Input<'_>, entry: InstanceIx) -> Option<InstanceIx> {
    let prefill = is_prefill(input, entry)?;
    // The high half of the entropy: independent of a draw among entries.
    lightest(partners(input, prefill).map(|ix| (ix, decode_cost(&load(input, ix)))), input.entropy >> 32)
}

/// Completes a decision once entry and (for a prefill) decode are chosen.
fn conclude(
    input: &Input<'_>,
    policy: PolicyName,
    reason: &'static str,
    entry: InstanceIx,
    decode: Option<InstanceIx>,
    candidates: Vec<Candidate>,
) -> Verdict {
    let rank = |ix: InstanceIx| {
        let dp_size = input.cluster.get(ix).map_or(1, |instance| instance.dp_size.max(1));
        u32::try_from(input.sequence % u64::from(dp_size)).unwrap_or(0)
    };
    let route = match decode {
        Some(decode) => {
            Route::Pair { prefill: entry, prefill_rank: rank(entry), decode, decode_rank: rank(decode) }
        }
        None => Route::Single { worker: entry },
    };
    let cached = u64::from(input.prediction.cached_tokens(entry));
    let booking = Booking {
        prefill_tokens: input.request.total_input_tokens().saturating_sub(cached).max(1),
        decode_tokens: input.request.total_tokens(),
    };
    let explanation = Explanation { policy, reason, candidates, terms: Vec::new() };
    let expected_ttft = expected_ttft(input, entry);
    Verdict::Send(Decision {
        route,
        booking,
        engine_priority: None,
        predicted_ttft: None,
        expected_ttft,
        explanation,
    })
}

/// Time to first token of the request on `entry` behind everything that the engine has now.
fn expected_ttft(input: &Input<'_>, entry: InstanceIx) -> Seconds {
    let (Some(instance), Some(load)) = (input.cluster.get(entry), input.loads.get(entry.at())) else {
        return 0.0;
    };
    let tokens = input.request.total_input_tokens();
    Estimate::of(tokens, input.prediction, (entry, instance), load, load.prefill_wait).ttft()
}

/// One of many, by random bits.
fn drawn(from: &[InstanceIx], entropy: u64) -> Option<InstanceIx> {
    let len = from.len().max(1) as u64;
    from.get(usize::try_from((entropy & 0xffff_ffff) % len).unwrap_or(0)).copied()
}

/// Whether `entry` hands over to a decode.
fn is_prefill<'a>(input: &Input<'a>, entry: InstanceIx) -> Option<&'a Instance> {
    input.cluster.get(entry).filter(|instance| instance.role == Role::Prefill)
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod scene;
#[cfg(test)]
mod tests;
