//! Policies: the interface, their names, and what all of them share (which pairs are possible at all).

mod least_load;
mod power_of_two;
mod rotation;

use std::fmt;
use std::str::FromStr;

use crate::cluster::{Cluster, Instance, InstanceIx, Load, Role};
use crate::decision::{Booking, Candidate, Decision, Explanation, Refusal, Route};
use crate::prediction::Prediction;
use crate::request::{Request, Seconds};

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
    /// The caller's clock.
    pub now: Seconds,
    /// Number of this decision, counting from 0: what rotation turns on.
    pub sequence: u64,
    /// Random bits for tie-breaks, drawn by the caller.
    pub entropy: u64,
}

/// A way to choose. Implementations are pure: the same input gives the same answer.
pub trait Policy: fmt::Debug + Send + Sync {
    /// Which policy it is.
    fn name(&self) -> PolicyName;

    /// Chooses a route.
    ///
    /// # Errors
    /// [`Refusal`] if no route is possible or wanted.
    fn decide(&self, input: &Input<'_>) -> Result<Decision, Refusal>;
}

/// The policies that can be asked for by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PolicyName {
    /// Entries and decodes in turn.
    RoundRobin,
    /// The less loaded of two entries drawn at random, the same for decodes.
    PowerOfTwo,
    /// The entry with the fewest waiting prompt tokens, the decode with the fewest held tokens.
    LeastLoad,
}

impl PolicyName {
    /// All, in the order that help texts list them.
    pub const ALL: [PolicyName; 3] = [PolicyName::LeastLoad, PolicyName::PowerOfTwo, PolicyName::RoundRobin];

    /// The name in flags and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            PolicyName::RoundRobin => "round_robin",
            PolicyName::PowerOfTwo => "power_of_two",
            PolicyName::LeastLoad => "least_load",
        }
    }

    /// Makes the policy.
    #[must_use]
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            PolicyName::RoundRobin => Box::new(rotation::RoundRobin),
            PolicyName::PowerOfTwo => Box::new(power_of_two::PowerOfTwo),
            PolicyName::LeastLoad => Box::new(least_load::LeastLoad),
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A policy name that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no policy is called {0:?}; the policies are least_load, power_of_two, round_robin")]
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

/// Cost of an entry for the policies that price load alone: prompt tokens ahead of this request, then requests in flight as a
/// tie-break.
fn entry_cost(load: &Load) -> f64 {
    load.prefill_backlog_tokens() as f64 + f64::from(load.in_flight) * 1e-3
}

/// Cost of a decode: tokens it holds, then requests in flight as a tie-break.
fn decode_cost(load: &Load) -> f64 {
    load.decode_tokens() as f64 + f64::from(load.in_flight) * 1e-3
}

/// Completes a decision once entry and (for a prefill) decode are chosen.
fn conclude(
    input: &Input<'_>,
    policy: PolicyName,
    reason: &'static str,
    entry: InstanceIx,
    decode: Option<InstanceIx>,
    candidates: Vec<Candidate>,
) -> Decision {
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
    Decision { route, booking, predicted_ttft: None, explanation: Explanation { policy, reason, candidates } }
}

/// Whether `entry` hands over to a decode.
fn is_prefill<'a>(input: &Input<'a>, entry: InstanceIx) -> Option<&'a Instance> {
    input.cluster.get(entry).filter(|instance| instance.role == Role::Prefill)
}

#[cfg(test)]
mod tests;
