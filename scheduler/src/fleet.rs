//! The fleet as input of a decision: facts that change rarely ([`SchedulableFleet`]) and load that changes with every
//! request ([`InstanceLoad`]).

use std::sync::Arc;

use crate::cache_params::EngineCacheParams;
use crate::decode_step::{DecodeBatch, DecodeStepModel};
use crate::prefill_time::PrefillTimeModel;
use crate::seconds::Seconds;

/// Time constant of [`InstanceLoad::prefill_share`] in seconds.
pub(crate) const PREFILL_SHARE_S: Seconds = 5.0;

/// Position of an instance in [`SchedulableFleet::instances`] and in the parallel load and prediction slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct InstanceIndex(pub u32);

impl InstanceIndex {
    /// The indices of a cluster in its order, without end.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..).map(Self)
    }

    #[must_use]
    pub fn as_usize(self) -> usize {
        self.0 as usize
    }
}

/// A model name, interned by the owner of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ModelIndex(pub u32);

/// Prefills and decodes can transfer KV cache to each other only inside one domain: same engine kind, same connector.
/// Interned by the owner of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct PairingDomain(pub u32);

/// Role of an engine in a disaggregated fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum InstanceRole {
    /// Computes KV cache for a decode engine.
    Prefill,
    /// Generates from received KV cache.
    Decode,
    /// Computes the prompt and generates.
    Plain,
}

/// Physical location; each level is interned by the owner of the cluster, `None` where unknown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct LocationIds {
    pub zone: Option<u32>,
    /// Rack or RDMA rail.
    pub rack: Option<u32>,
    pub node: Option<u32>,
    pub nvlink_domain: Option<u32>,
}

/// Distance that KV cache has to travel, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TopologyDistance {
    Nvlink,
    Node,
    /// Same rack or RDMA rail.
    Rack,
    Zone,
    /// Both zones are known and differ.
    CrossZone,
    /// The location of one of the two is unknown.
    Unknown,
}

impl LocationIds {
    /// The nearest level that both locations share.
    #[must_use]
    pub fn distance(&self, other: &LocationIds) -> TopologyDistance {
        let same = |a: Option<u32>, b: Option<u32>| a.is_some() && a == b;
        if same(self.nvlink_domain, other.nvlink_domain) {
            TopologyDistance::Nvlink
        } else if same(self.node, other.node) {
            TopologyDistance::Node
        } else if same(self.rack, other.rack) {
            TopologyDistance::Rack
        } else if same(self.zone, other.zone) {
            TopologyDistance::Zone
        } else if self.zone.is_some() && other.zone.is_some() {
            TopologyDistance::CrossZone
        } else {
            TopologyDistance::Unknown
        }
    }
}

/// One data-parallel rank of an engine, which has a queue and a KV cache of its own; most engines have one. The part that does not
/// change from request to request.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SchedulableInstance {
    /// Instance name, used in explanations.
    pub name: Arc<str>,
    pub role: InstanceRole,
    pub models: Vec<ModelIndex>,
    /// LoRA adapters that it does not serve, but can load at run time.
    #[serde(default)]
    pub loadable: Vec<ModelIndex>,
    /// Engines that it can pair with; ignored for plain workers.
    pub domain: PairingDomain,
    /// Data-parallel rank within the engine; 0 for an engine with one rank.
    #[serde(default)]
    pub rank: u32,
    /// Physical location, for transfer distances.
    pub location: LocationIds,
    /// Cache parameters, as configured or reported.
    pub cache: EngineCacheParams,
    /// Whether it can also serve a request alone, computing the prompt between its decode steps; ignored unless it is a
    /// decode.
    #[serde(default)]
    pub local_prefill: bool,
}

impl SchedulableInstance {
    /// Whether requests for `model` may be sent to it, if need be after a load.
    #[must_use]
    pub fn is_eligible(&self, model: ModelIndex) -> bool {
        self.models.contains(&model) || self.loadable.contains(&model)
    }

    /// Each model once.
    fn eligible_models(&self) -> impl Iterator<Item = ModelIndex> {
        let loadable = self.loadable.iter().filter(|model| !self.models.contains(model));
        self.models.iter().chain(loadable).copied()
    }
}

/// Load of one instance at the time of the decision. The caller provides one per instance, in the cluster's order.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct InstanceLoad {
    /// Eligible: healthy, breaker closed, not draining, not already tried for this request.
    pub available: bool,
    /// Unfinished requests that this gateway has sent to the instance.
    pub in_flight: u32,
    /// Requests among those that wait for their first token and whose prompt is computed here.
    pub pending_prefills: u32,
    /// Uncached prompt tokens of the pending prefills.
    pub pending_prefill_tokens: u64,
    /// Tokens that this gateway's unfinished requests are expected to occupy while they decode here.
    pub active_decode_tokens: u64,
    /// Sequences of those requests.
    #[serde(default)]
    pub decode_sequences: u32,
    /// Those of background requests, and their tokens.
    #[serde(default)]
    pub background_sequences: u32,
    #[serde(default)]
    pub background_tokens: u64,
    /// Latest load report of the engine; includes the traffic of other gateways.
    pub reported: Option<ReportedLoad>,
    /// Sequences in that report beyond the gateway's own at that time.
    #[serde(default)]
    pub external_sequences: u32,
    /// Seconds until the engine would start computing a prompt that is sent now, behind the prompts it already has.
    pub prefill_wait: Seconds,
    /// The last of the passes in that time, if it has not started and short prompts can join it.
    #[serde(default)]
    pub next_pass: NextPass,
    /// Seconds until the engine becomes idle because all its prompts wait for their blocks; a prompt that needs no
    /// blocks overtakes them then.
    #[serde(default)]
    pub idle_wait: Seconds,
    /// Duration of that idle time in seconds; 0 if none is expected.
    #[serde(default)]
    pub idle_for: Seconds,
    /// Recent share of its time for which it was sent prompts to compute.
    #[serde(default)]
    pub prefill_share: f64,
    /// Seconds until its link to the shared store would start fetching for a prompt that is sent now.
    pub fetch_wait: Seconds,
    /// Learned ratio of the shared store's read time to [`EngineCacheParams::l3_bytes_per_s`]; `None` counts as 1.
    #[serde(default)]
    pub fetch_slowness: Option<f64>,
    /// Time model for computing a prompt.
    pub service: PrefillTimeModel,
    /// Seconds per token of the KV cache that is transferred to the decode after the computation.
    pub handover_per_token: f64,
    /// Time model for a decode step.
    #[serde(default)]
    pub decode_step: DecodeStepModel,
    /// Mean length of a response in tokens.
    #[serde(default)]
    pub response_tokens: f64,
}

/// A pass of an engine's computation that has not started: prompts in it share its constant time.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct NextPass {
    /// Uncached tokens that may be added. Few: a prompt that takes longer than the constant gains little, and is better sent late.
    pub room: u64,
    /// Seconds that it takes so far.
    pub work: Seconds,
}

impl NextPass {
    /// A pass that begins with a prompt of `new` uncached tokens and takes `work` seconds.
    pub(crate) fn begin(service: &PrefillTimeModel, new: u64, work: Seconds) -> Self {
        // As many tokens as take as long as the constant.
        let most = if service.a > 0.0 { service.c0 / service.a } else { 0.0 };
        let most = most.clamp(0.0, f64::from(u32::MAX)) as u64;
        Self { room: most.saturating_sub(new), work }
    }

    /// The pass with another prompt, which shares its constant.
    pub(crate) fn with(self, new: u64, work: Seconds) -> Self {
        Self { room: self.room.saturating_sub(new), work: self.work + work }
    }
}

impl InstanceLoad {
    /// Seconds in which an engine with these parameters reads a token from the shared store.
    #[must_use]
    pub(crate) fn fetch_per_token(&self, rules: &EngineCacheParams) -> Seconds {
        rules.fetch_per_token() * self.fetch_slowness.unwrap_or(1.0)
    }

    /// Lower bound of the time that a prompt waits for others.
    #[must_use]
    pub(crate) fn min_wait(&self) -> Seconds {
        if self.idle_for > 0.0 { self.idle_wait.min(self.prefill_wait) } else { self.prefill_wait }
    }

    /// Prompt tokens waiting or being computed: the larger of the gateway's own count and the engine's report.
    #[must_use]
    pub fn prefill_backlog_tokens(&self) -> u64 {
        self.pending_prefill_tokens.max(self.reported.map_or(0, |reported| reported.waiting_uncached_tokens))
    }

    /// Tokens occupied for decoding: the larger of the gateway's own count and the engine's report.
    #[must_use]
    pub fn decode_tokens(&self) -> u64 {
        self.active_decode_tokens.max(self.reported.map_or(0, |reported| reported.used_tokens))
    }

    /// Used share of the KV cache; 0 if its capacity is not reported.
    pub(crate) fn used_cache_share(&self) -> f64 {
        match self.reported.map_or(0, |reported| reported.capacity_tokens) {
            0 => 0.0,
            capacity => self.decode_tokens() as f64 / capacity as f64,
        }
    }

    /// By which share a decode step would be longer with one more background sequence, against one without any.
    pub(crate) fn background_step_growth(&self) -> f64 {
        let sequences = f64::from(self.background_sequences);
        let tokens = self.background_tokens as f64;
        let more = 1.0 + 1.0 / sequences.max(1.0);
        let background = DecodeBatch { sequences: sequences + 1.0, tokens: tokens * more };
        let all = self.decode_batch();
        let others = DecodeBatch {
            sequences: (all.sequences - sequences).max(0.0),
            tokens: (all.tokens - tokens).max(0.0),
        };
        self.decode_step.seconds(others + background) / self.decode_step.seconds(others) - 1.0
    }

    /// Sequences that generate, and those that will once their prompt has been computed, with the tokens that they occupy.
    /// A report may be a second old, so only what it has beyond the gateway's own count is taken from it.
    pub(crate) fn decode_batch(&self) -> DecodeBatch {
        DecodeBatch {
            sequences: self.decode_sequences.saturating_add(self.external_sequences).into(),
            tokens: self.decode_tokens() as f64,
        }
    }
}

/// An engine's own load report (SGLang `/v1/loads`, vLLM `/metrics`).
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ReportedLoad {
    pub running: u32,
    pub waiting: u32,
    /// Prompt tokens of waiting requests that are not in the engine's cache.
    pub waiting_uncached_tokens: u64,
    pub used_tokens: u64,
    /// KV cache capacity in tokens, 0 if not reported.
    pub capacity_tokens: u64,
    pub age: Seconds,
}

/// Immutable facts of the fleet, with candidate lists per model.
#[derive(Debug, Clone, Default)]
pub struct SchedulableFleet {
    instances: Arc<[SchedulableInstance]>,
    /// Prefills and plain workers by model, in order of index.
    prefills: Vec<Vec<InstanceIndex>>,
    /// Decodes by model, in order of index.
    decodes: Vec<Vec<InstanceIndex>>,
    /// Those of them that can serve a request alone.
    local_prefills: Vec<Vec<InstanceIndex>>,
    /// Instances that have to load the model first, in order of index.
    loadable: Vec<Vec<InstanceIndex>>,
}

impl SchedulableFleet {
    #[must_use]
    pub fn new(instances: Vec<SchedulableInstance>) -> Self {
        let all = instances.iter().flat_map(SchedulableInstance::eligible_models);
        let models = all.map(|model| model.0 as usize + 1).max().unwrap_or(0);
        let mut prefills = vec![Vec::new(); models];
        let mut decodes = vec![Vec::new(); models];
        let mut local_prefills = vec![Vec::new(); models];
        let mut loadable = vec![Vec::new(); models];
        for (ix, instance) in InstanceIndex::all().zip(&instances) {
            let lists = match instance.role {
                InstanceRole::Prefill | InstanceRole::Plain => &mut prefills,
                InstanceRole::Decode => &mut decodes,
            };
            for model in instance.eligible_models() {
                lists[model.0 as usize].push(ix);
                if instance.role == InstanceRole::Decode && instance.local_prefill {
                    local_prefills[model.0 as usize].push(ix);
                }
            }
            for model in instance.loadable.iter().filter(|model| !instance.models.contains(model)) {
                loadable[model.0 as usize].push(ix);
            }
        }
        Self { instances: instances.into(), prefills, decodes, local_prefills, loadable }
    }

    /// All instances, indexed by [`InstanceIndex`].
    #[must_use]
    pub fn instances(&self) -> &[SchedulableInstance] {
        &self.instances
    }

    /// One instance, or `None` for an index of another cluster.
    #[must_use]
    pub fn get(&self, ix: InstanceIndex) -> Option<&SchedulableInstance> {
        self.instances.get(ix.as_usize())
    }

    /// The instances, to be kept with a decision.
    pub(crate) fn shared_instances(&self) -> Arc<[SchedulableInstance]> {
        self.instances.clone()
    }

    /// Engines that have to load `model` before they serve it; they are also among [`SchedulableFleet::prefills`] or
    /// [`SchedulableFleet::decodes`].
    #[must_use]
    pub fn loadable(&self, model: ModelIndex) -> &[InstanceIndex] {
        self.loadable.get(model.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// The first data-parallel rank of the engine that `ix` is a rank of: ranks of an engine follow each other.
    pub(crate) fn first_rank(&self, ix: InstanceIndex) -> InstanceIndex {
        InstanceIndex(ix.0.saturating_sub(self.get(ix).map_or(0, |instance| instance.rank)))
    }

    /// Engines that compute prompts for `model`: prefills and plain workers.
    #[must_use]
    pub fn prefills(&self, model: ModelIndex) -> &[InstanceIndex] {
        self.prefills.get(model.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// Decodes that can serve a request for `model` alone.
    #[must_use]
    pub fn local_prefills(&self, model: ModelIndex) -> &[InstanceIndex] {
        self.local_prefills.get(model.0 as usize).map_or(&[], Vec::as_slice)
    }

    #[must_use]
    pub fn decodes(&self, model: ModelIndex) -> &[InstanceIndex] {
        self.decodes.get(model.0 as usize).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_is_the_nearest_shared_level() {
        let here = LocationIds { zone: Some(1), rack: Some(2), node: Some(3), nvlink_domain: Some(4) };
        assert_eq!(here.distance(&here), TopologyDistance::Nvlink);
        assert_eq!(here.distance(&LocationIds { nvlink_domain: Some(9), ..here }), TopologyDistance::Node);
        assert_eq!(
            here.distance(&LocationIds { node: Some(9), nvlink_domain: None, ..here }),
            TopologyDistance::Rack
        );
        assert_eq!(
            here.distance(&LocationIds { zone: Some(1), ..LocationIds::default() }),
            TopologyDistance::Zone
        );
        assert_eq!(
            here.distance(&LocationIds { zone: Some(7), ..LocationIds::default() }),
            TopologyDistance::CrossZone
        );
        assert_eq!(here.distance(&LocationIds::default()), TopologyDistance::Unknown);
        assert_eq!(LocationIds::default().distance(&LocationIds::default()), TopologyDistance::Unknown);
    }

    #[test]
    fn load_is_the_larger_of_own_count_and_report() {
        let mut load =
            InstanceLoad { pending_prefill_tokens: 10, active_decode_tokens: 5, ..InstanceLoad::default() };
        assert_eq!((load.prefill_backlog_tokens(), load.decode_tokens()), (10, 5));
        load.reported =
            Some(ReportedLoad { waiting_uncached_tokens: 40, used_tokens: 2, ..ReportedLoad::default() });
        assert_eq!((load.prefill_backlog_tokens(), load.decode_tokens()), (40, 5));
    }
}
