//! The fleet as the decision sees it: facts that change rarely ([`SchedulableFleet`]) and load that changes always ([`InstanceLoad`]).

use std::sync::Arc;

use crate::cache_params::EngineCacheParams;
use crate::prefill_time::PrefillTimeModel;
use crate::request::Seconds;

/// Position of an instance in [`SchedulableFleet::instances`] and in the load and prediction slices beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct InstanceIndex(pub u32);

impl InstanceIndex {
    /// As an index.
    #[must_use]
    pub fn as_usize(self) -> usize {
        self.0 as usize
    }
}

/// A model name, interned by the owner of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ModelIndex(pub u32);

/// Prefills and decodes can hand KV cache to each other only inside one domain: same engine kind, same
/// connector. Interned by the owner of the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct PairingDomain(pub u32);

/// What an engine does in a disaggregated fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum InstanceRole {
    /// Computes KV cache for a decode.
    Prefill,
    /// Generates from received KV cache.
    Decode,
    /// Does both.
    Plain,
}

/// Physical position; each level is interned by the owner of the cluster, `None` where unknown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct LocationIds {
    /// Availability zone.
    pub zone: Option<u32>,
    /// Rack or RDMA rail.
    pub rack: Option<u32>,
    /// Host.
    pub node: Option<u32>,
    /// NVLink domain.
    pub nvlink_domain: Option<u32>,
}

/// How far KV cache has to travel, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TopologyDistance {
    /// Same NVLink domain.
    Nvlink,
    /// Same host.
    Node,
    /// Same rack or rail.
    Rack,
    /// Same zone.
    Zone,
    /// Known to be in different zones.
    CrossZone,
    /// Nothing known of one of the two.
    Unknown,
}

impl LocationIds {
    /// The nearest level that both places share.
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

/// One engine endpoint: the part that does not change from request to request.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SchedulableInstance {
    /// Name for explanations.
    pub name: Arc<str>,
    /// Role in the fleet.
    pub role: InstanceRole,
    /// Models it serves.
    pub models: Vec<ModelIndex>,
    /// Whom it can pair with; ignored for plain workers.
    pub domain: PairingDomain,
    /// Data-parallel ranks, at least 1.
    pub dp_size: u32,
    /// Where it runs.
    pub place: LocationIds,
    /// How it caches.
    pub cache: EngineCacheParams,
}

/// Load of one instance at the moment of the decision. The caller fills one per instance, in the cluster's order.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct InstanceLoad {
    /// May be chosen: healthy, breaker closed, not draining, not already tried for this request.
    pub available: bool,
    /// Requests this gateway has sent there and that have not ended.
    pub in_flight: u32,
    /// How many of those requests wait for their first token, if their prompt is computed here.
    pub pending_prefills: u32,
    /// Uncached prompt tokens of those.
    pub pending_prefill_tokens: u64,
    /// Tokens those requests may occupy while they decode.
    pub active_decode_tokens: u64,
    /// What the engine last said of itself: includes the traffic of other gateways.
    pub reported: Option<ReportedLoad>,
    /// Until the engine would begin to compute a prompt that is sent now, as far as other prompts keep it busy.
    pub prefill_wait: Seconds,
    /// Until it has nothing to compute although prompts are there, because all of them wait for their pages; whoever needs no pages
    /// overtakes them then.
    #[serde(default)]
    pub idle_wait: Seconds,
    /// For how long; 0 if that is not to be expected.
    #[serde(default)]
    pub idle_for: Seconds,
    /// Until its link to the shared store would begin to fetch for a prompt that is sent now.
    pub fetch_wait: Seconds,
    /// How many times longer than by [`EngineCacheParams::l3_bytes_per_s`] reading from the shared store takes, as learned; `None` is as long.
    #[serde(default)]
    pub fetch_slowness: Option<f64>,
    /// How long it takes to compute a prompt.
    pub service: PrefillTimeModel,
    /// Seconds per token of the KV cache that goes to the decode after the computation.
    pub handover_per_token: f64,
}

impl InstanceLoad {
    /// Seconds in which an engine with these rules reads a token from the shared store.
    #[must_use]
    pub(crate) fn fetch_per_token(&self, rules: &EngineCacheParams) -> Seconds {
        rules.fetch_per_token() * self.fetch_slowness.unwrap_or(1.0)
    }

    /// No prompt has to wait less than this for others.
    #[must_use]
    pub(crate) fn min_wait(&self) -> Seconds {
        if self.idle_for > 0.0 { self.idle_wait.min(self.prefill_wait) } else { self.prefill_wait }
    }

    /// Prompt tokens waiting or being computed: the larger of the own book and the engine's report.
    #[must_use]
    pub fn prefill_backlog_tokens(&self) -> u64 {
        self.pending_prefill_tokens.max(self.reported.map_or(0, |reported| reported.waiting_uncached_tokens))
    }

    /// Tokens held for decoding: the larger of the own book and the engine's report.
    #[must_use]
    pub fn decode_tokens(&self) -> u64 {
        self.active_decode_tokens.max(self.reported.map_or(0, |reported| reported.used_tokens))
    }
}

/// An engine's own load report (SGLang `/v1/loads`, vLLM `/metrics`).
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct ReportedLoad {
    /// Requests in the running batch.
    pub running: u32,
    /// Requests waiting.
    pub waiting: u32,
    /// Prompt tokens of waiting requests that are not in the engine's cache.
    pub waiting_uncached_tokens: u64,
    /// KV tokens in use.
    pub used_tokens: u64,
    /// KV tokens in all, 0 if not told.
    pub capacity_tokens: u64,
    /// Age of the report in seconds.
    pub age: Seconds,
}

/// Immutable facts of the fleet with candidate lists per model.
#[derive(Debug, Clone, Default)]
pub struct SchedulableFleet {
    instances: Vec<SchedulableInstance>,
    /// Prefills and plain workers by model, in order of index.
    prefills: Vec<Vec<InstanceIndex>>,
    /// Decodes by model, in order of index.
    decodes: Vec<Vec<InstanceIndex>>,
}

impl SchedulableFleet {
    /// Indexes `instances` by model.
    #[must_use]
    pub fn new(instances: Vec<SchedulableInstance>) -> Self {
        let models = instances.iter().flat_map(|i| &i.models).map(|m| m.0 as usize + 1).max().unwrap_or(0);
        let mut prefills = vec![Vec::new(); models];
        let mut decodes = vec![Vec::new(); models];
        for (ix, instance) in (0_u32..).map(InstanceIndex).zip(&instances) {
            let lists = match instance.role {
                InstanceRole::Prefill | InstanceRole::Plain => &mut prefills,
                InstanceRole::Decode => &mut decodes,
            };
            for model in &instance.models {
                lists[model.0 as usize].push(ix);
            }
        }
        Self { instances, prefills, decodes }
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

    /// Where a request for `model` can start: its prefills and plain workers.
    #[must_use]
    pub fn prefills(&self, model: ModelIndex) -> &[InstanceIndex] {
        self.prefills.get(model.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// Decodes of `model`.
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
    fn load_believes_the_larger_of_book_and_report() {
        let mut load =
            InstanceLoad { pending_prefill_tokens: 10, active_decode_tokens: 5, ..InstanceLoad::default() };
        assert_eq!((load.prefill_backlog_tokens(), load.decode_tokens()), (10, 5));
        load.reported =
            Some(ReportedLoad { waiting_uncached_tokens: 40, used_tokens: 2, ..ReportedLoad::default() });
        assert_eq!((load.prefill_backlog_tokens(), load.decode_tokens()), (40, 5));
    }
}
